"""Measuring: every row of the matrix verified against the oracle, timed, verified again.

A row is model pool × layout × direction. Its backends and the plain copies take turns, in an order shuffled every
round, so that whatever else the machine does meets them alike and ratios inside a row can be trusted. Together they
touch more memory than the caches hold. The clock runs from the call to its return, on indices that were checked
before; the check is timed apart.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from refimpl import (
    DevicePool,
    HostMemory,
    HostPool,
    PoolSpec,
    Receipt,
    Refusal,
    oracle,
    plan,
    presets,
    slots_of,
    support,
)
from refimpl.backends import registry
from refimpl.host_buffers import HostBuffers
from refimpl.support import DIRECTIONS
from verify.bench.ceilings import Stretch, threads
from verify.bench.record import Cell, PlainCopy, Row, Timing

POISON = 0xA5
SPARE_PAGES = 1  # moved by nobody: they must keep their poison

Indices = tuple[torch.Tensor, torch.Tensor]  # token slots of the host, and of the device
Sides = tuple[list[torch.Tensor], list[torch.Tensor]]  # all bytes of the host, and of the device


@dataclass(frozen=True)
class Settings:
    """What to measure.

    page_size      tokens a page, or None: as the presets have it
    pages          pages that move, or None for as many as `payload_bytes` holds (one at least)
    payload_bytes  bytes that move, at most (unless one page is larger)
    seconds        time budget of a row's rounds
    rounds         the fewest and the most rounds of a row
    """

    models: tuple[str, ...]
    layouts: tuple[str, ...]
    backends: tuple[str, ...]
    pages: int | None = None
    payload_bytes: int = 16 << 20
    seconds: float = 0.3
    rounds: tuple[int, int] = (3, 25)
    seed: int = 0
    page_size: int | None = None

    def pages_of(self, spec: PoolSpec) -> int:
        return self.pages or max(1, self.payload_bytes // spec.page_bytes)


def pools(settings: Settings) -> list[tuple[str, PoolSpec]]:
    """`(model, pool)` for every pool that has bytes; an anchor that only owns indices has nothing to time."""
    models = [(name, presets.model(name, page_size=settings.page_size)) for name in settings.models]
    return [(name, spec) for name, specs in models for spec in specs.values() if spec.page_bytes]


def count_rows(settings: Settings) -> int:
    return len(pools(settings)) * len(settings.layouts) * len(DIRECTIONS)


def memory_needed(settings: Settings) -> int:
    """Bytes that the largest pool of the matrix takes: both sides of each backend, four of the oracle, plain copies."""
    pages = [(settings.pages_of(spec) + SPARE_PAGES) * spec.page_bytes for _, spec in pools(settings)]
    return (2 * len(settings.backends) + 5) * max(pages)


def rows(settings: Settings) -> Iterator[Row]:
    """Every row of the matrix, as soon as it is known."""
    wanted = pools(settings)
    stretch = Stretch(max(settings.pages_of(spec) * spec.page_bytes for _, spec in wanted))
    for model, spec in wanted:
        yield from PoolBench(model, spec, settings, stretch).rows()


class PoolBench:
    """One pool: a source of random bytes, and scattered pages to bring them to."""

    def __init__(self, model: str, spec: PoolSpec, settings: Settings, stretch: Stretch) -> None:
        self.model, self.spec, self.settings, self.stretch = model, spec, settings, stretch
        self.pages = settings.pages_of(spec)
        self.num_pages = self.pages + SPARE_PAGES
        self.random = np.random.default_rng(settings.seed)
        self.source = DevicePool(spec, self.num_pages)
        for tensor in device_tensors(self.source):
            tensor.copy_(torch.from_numpy(self.random.integers(0, 256, tensor.numel(), np.uint8)))
        self.devices: dict[str, DevicePool] = {}

    def rows(self) -> Iterator[Row]:
        for layout in self.settings.layouts:
            yield from self._rows_of(layout)

    def _rows_of(self, layout: str) -> Iterator[Row]:
        """Backup, then load of what the backup wrote."""
        refusals = {backend: self._refusal(layout, backend) for backend in self.settings.backends}
        hosts = {b: HostPool(self.spec, layout, self.num_pages, b) for b, reason in refusals.items() if not reason}
        for backend in hosts.keys() - self.devices.keys():
            self.devices[backend] = DevicePool(self.spec, self.num_pages)
        stored = HostBuffers(self.spec, layout, self.num_pages, HostMemory(), None) if hosts else None
        for direction in DIRECTIONS:
            row = Row(self.model, self.spec.name, layout, direction, self.pages, self.pages * self.spec.page_bytes, [])
            if stored:
                self._measure(row, {b: (host, self.devices[b]) for b, host in hosts.items()}, stored)
            row.cells += [Cell(b, "refused", reason) for b, reason in refusals.items() if reason]
            row.cells.sort(key=lambda cell: self.settings.backends.index(cell.backend))
            yield row
        for host in hosts.values():
            host.close()

    def _refusal(self, layout: str, backend: str) -> str:
        """Why a pool cannot be built, or nothing. A pool is built for both directions or not at all."""
        for direction in DIRECTIONS:
            answer = support(self.spec, layout, backend, direction)
            if isinstance(answer, Refusal):
                return answer.reason
        return registry.unavailable(backend) or ""

    def _scattered(self) -> torch.Tensor:
        return slots_of(self.random.permutation(self.num_pages)[: self.pages], self.spec.page_size)

    def _measure(self, row: Row, sides: dict[str, tuple[HostPool, DevicePool]], stored: HostBuffers) -> None:
        """Fill in a row. `stored` holds what host pools must hold: written by a backup, read by a load."""
        at = self._scattered(), self._scattered()
        with one_thread():
            expected = self._expected(row.direction, stored, at)
            runners = {b: Runner(host, device, row.direction, at, expected) for b, (host, device) in sides.items()}
            for runner in runners.values():
                runner.fill(stored, self.source)
        time_row(row, runners, self.stretch, self.settings)
        row.runs = runs(*next(iter(sides.values())), row.pages)

    def _expected(self, direction: str, stored: HostBuffers, at: Indices) -> Sides:
        """What the oracle makes of both sides; the side that it writes was poison before."""
        if direction == "backup":
            wipe(host_tensors(stored))
            oracle.backup(stored, self.source, *at)
            return host_tensors(stored), device_tensors(self.source)
        loaded = DevicePool(self.spec, self.num_pages)
        wipe(device_tensors(loaded))
        oracle.load(stored, loaded, *at)
        return host_tensors(stored), device_tensors(loaded)


class Runner:
    """One backend about to move the pages of a row, and the proof that it does."""

    def __init__(
        self,
        host: HostPool,
        device: DevicePool,
        direction: str,
        at: Indices,
        expected: Sides,
    ) -> None:
        self.host, self.device, self.direction, self.at, self.expected = host, device, direction, at, expected
        self.check_s = 0.0

    def fill(self, stored: HostBuffers, source: DevicePool) -> None:
        """Give the side that is read its bytes, and the other one poison."""
        if self.direction == "backup":
            copy(device_tensors(self.device), device_tensors(source))
        else:
            copy(host_tensors(self.host), host_tensors(stored))
        self.poison()

    def poison(self) -> None:
        wipe(host_tensors(self.host) if self.direction == "backup" else device_tensors(self.device))

    def run(self) -> Receipt:
        """Move the pages once."""
        return self.host.prepare(self.device, *self.at, self.direction).run()

    def seconds(self) -> float:
        """The same, and how long it took from the call to its return; checking the indices is not counted."""
        begin = time.perf_counter()
        transfer = self.host.prepare(self.device, *self.at, self.direction)
        self.check_s = time.perf_counter() - begin
        return seconds(transfer.run)

    def fault(self) -> str:
        """Which side differs from the oracle in any byte, written or not; empty if none does."""
        held = (host_tensors(self.host), device_tensors(self.device))
        for side, mine, right in zip(("host", "device"), held, self.expected, strict=True):
            for number, (a, b) in enumerate(zip(mine, right, strict=True)):
                if not torch.equal(a, b):
                    first = int((a != b).nonzero()[0])
                    return f"byte {first:,} of {side} tensor {number} is {int(a[first]):#04x}, not {int(b[first]):#04x}"
        return ""


def time_row(row: Row, runners: dict[str, Runner], stretch: Stretch, settings: Settings) -> None:
    """Verify, poison, take turns, verify. A backend that is wrong at first is not timed."""
    with one_thread():
        faults = {backend: first_fault(runner, row.payload_bytes) for backend, runner in runners.items()}
    plain = stretch.copies(row.payload_bytes, row.direction)
    for warm_up in plain.values():
        warm_up()
    timed = {f"backend {b}": runner.seconds for b, runner in runners.items() if not faults[b]}
    timed |= {name: partial(seconds, copy) for name, copy in plain.items()}
    timings = {name: Timing(taken) for name, taken in take_turns(timed, settings).items()}
    row.copies = [PlainCopy(name, threads(name), timings[name]) for name in plain]
    ceiling = min(row.copies, key=lambda c: c.timing.median_s)
    row.ceiling = ceiling.name
    for backend, runner in runners.items():
        with one_thread():
            fault = faults[backend] or runner.fault()
        if fault:
            row.cells.append(Cell(backend, "wrong", fault))
            continue
        timing = timings[f"backend {backend}"]
        speed = row.payload_bytes / timing.median_s / 1e9
        percent = 100 * ceiling.timing.median_s / timing.median_s
        row.cells.append(Cell(backend, "measured", "", runner.check_s, timing, speed, percent))


def first_fault(runner: Runner, payload_bytes: int) -> str:
    """What is wrong after one run, which also warms up. Poison again: the second proof is about the timed runs."""
    receipt = runner.run()
    fault = runner.fault()
    runner.poison()
    if not fault and receipt.bytes != payload_bytes:
        return f"the receipt says {receipt.bytes:,} bytes, {payload_bytes:,} were to move"
    return fault


def take_turns(timed: dict[str, Callable[[], float]], settings: Settings) -> dict[str, list[float]]:
    """Rounds of one sample each until time is up, the order shuffled anew."""
    random = np.random.default_rng(settings.seed)
    samples: dict[str, list[float]] = {name: [] for name in timed}
    fewest, most = settings.rounds
    begin = time.perf_counter()
    for number in range(most):
        if number >= fewest and time.perf_counter() - begin > settings.seconds:
            break
        for name in random.permutation(list(timed)):
            samples[name].append(timed[name]())
    return samples


@contextmanager
def one_thread() -> Iterator[None]:
    """For what is not timed: torch's threads wait for one another, at length where other programs are busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def seconds(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def runs(host: HostPool, device: DevicePool, pages: int) -> list[dict[str, int]]:
    """Contiguous pieces by length, as the plan cuts them."""
    counts: Counter[int] = Counter()
    for move in plan(host, device).moves:
        counts[move.run] += len(move.layers) * pages * move.runs_per_item
    return [{"bytes": nbytes, "count": counts[nbytes]} for nbytes in sorted(counts)]


def host_tensors(host: HostBuffers) -> list[torch.Tensor]:
    """Every host tensor as flat bytes."""
    return [flat(tensor) for _, tensors in host.storage for tensor in tensors]


def device_tensors(device: DevicePool) -> list[torch.Tensor]:
    """Every device buffer as flat bytes."""
    spec = device.spec
    return [flat(device.buffer(c.name, layer)) for c in spec.components for layer in spec.layers_of(c)]


def flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)


def copy(to: list[torch.Tensor], source: list[torch.Tensor]) -> None:
    for a, b in zip(to, source, strict=True):
        a.copy_(b)


def wipe(tensors: list[torch.Tensor]) -> None:
    for tensor in tensors:
        tensor.fill_(POISON)
