"""Measuring: each cell verified against the oracle, timed, verified again. A cell that raises costs only itself."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import product
from typing import Any, cast

from refimpl import HostPool, Receipt, Refusal, UnsupportedPairing, support
from refimpl.backends import registry
from refimpl.host_buffers import HostBuffers
from refimpl.support import DIRECTIONS
from verify.arena import ALIGNMENT, Arena
from verify.bench.gpu import calls, ceilings, matmul
from verify.bench.gpu.cases import Case, Mover, Portion
from verify.bench.gpu.clock import Clock, Run, Series, Start, latencies
from verify.bench.gpu.record import Cell, Row
from verify.bench.gpu.rig import Rig, Stage
from verify.bench.gpu.variants import VARIANTS
from verify.bench.measure import SPARE_PAGES, Indices, runs
from verify.bench.record import Timing

Key = tuple[Any, ...]
OWN_SAMPLES = 5  # transfers in which calls of the device are timed one by one
NAMES = ("portion", "case", "pool", "layout", "direction", "scattered", "pages")  # of a row


@dataclass(frozen=True)
class Effort:
    """How long to measure.

    seconds    device time of a cell's samples, about
    slow_s     a transfer that takes longer is timed twice, no more
    repeats    the fewest and the most samples of a cell
    latencies  single pages timed in a cell
    matmul     the loop beside transfers
    """

    seconds: float = 0.06
    slow_s: float = 0.15
    repeats: tuple[int, int] = (3, 10)
    latencies: int = 10
    matmul: matmul.Loop = field(default_factory=matmul.Loop)

    def slow(self, first: Series) -> bool:
        """Whether transfers like this one are timed twice, no more."""
        return first.samples_s[-1] > self.slow_s

    def series(self, clock: Clock, start: Start, first: Series) -> Series:
        """As many samples as the effort allows, and a hold that covers them, by what a first one took."""
        fewest, most = self.repeats
        count = 2 if self.slow(first) else max(fewest, min(most, int(self.seconds / first.samples_s[-1])))
        return clock.series(start, count, count * first.submit_s[-1])


@dataclass(frozen=True)
class Bench:
    """What all rows of a session share. `ceilings` are those of the session, as plain data."""

    clock: Clock
    arena: Arena
    effort: Effort
    seed: int
    session: int
    ceilings: list[dict[str, Any]]


def memory_needed(portions: Sequence[Portion]) -> int:
    """Bytes of host memory that the largest pool takes, with what alignment loses."""
    return max(
        (
            (case.pages_of(payload) + SPARE_PAGES) * case.spec.page_bytes
            + ALIGNMENT * (1 + 2 * len(case.spec.components) * (1 + case.spec.layers))
            for portion in portions
            for case in portion.cases
            for payload in portion.payloads
        ),
        default=0,
    )


def key(row: dict[str, Any]) -> Key:
    """What makes a row the same as one of an earlier session."""
    return tuple(row[name] for name in NAMES)


def rows(bench: Bench, name: str, portion: Portion, done: set[Key]) -> Iterator[Row]:
    """Every row of a portion that is not done yet, as soon as it is known."""
    for case in portion.cases:
        for pages in dict.fromkeys(case.pages_of(payload) for payload in portion.payloads):
            wanted = [row for row in _empty_rows(bench, name, portion, case, pages) if key(vars(row)) not in done]
            if wanted:
                yield from _filled_in(bench, portion, case, wanted)


def _empty_rows(bench: Bench, name: str, portion: Portion, case: Case, pages: int) -> Iterator[Row]:
    spec = case.spec
    sizes = pages, spec.page_bytes, pages * spec.page_bytes
    for layout, direction in product(portion.layouts, DIRECTIONS):
        places = layout, direction, portion.scattered
        yield Row(
            name, bench.session, case.name, spec.name, *places, *sizes, dispatch=_dispatch(case, layout, direction)
        )


def _dispatch(case: Case, layout: str, direction: str) -> list[str]:
    """The paths that SGLang takes for this pool and layout, one for each of its backends that has one."""
    answers = [support(case.spec, layout, b, direction, "cuda", "sglang") for b in ("kernel", "direct")]
    return [answer.name for answer in answers if not isinstance(answer, Refusal)]


def _filled_in(bench: Bench, portion: Portion, case: Case, wanted: list[Row]) -> Iterator[Row]:
    """Rows of one case and number of pages: they share the pools on the device, and those of a layout the oracle's.

    Both are made when a cell asks for them, so that a cell fails and not the session where there is no room for them.
    """

    @lru_cache(1)
    def rig() -> Rig:
        return Rig(case.spec, wanted[0].pages, portion.scattered, bench.clock.device, bench.seed)

    @lru_cache(1)
    def stage(layout: str) -> Stage:
        return Stage(rig(), layout)

    for row in wanted:
        for mover in portion.movers(case, row.pages):
            refusal = _refusal(case, row.layout, mover, row.direction, bench.clock.platform)
            if refusal:
                row.cells.append(_cell(mover, "refused", refusal))
            else:
                row.cells.append(_measured(bench, row, mover, partial(stage, row.layout), portion.interference))
        yield row


def _refusal(case: Case, layout: str, mover: Mover, direction: str, platform: str) -> str:
    """Why a cell is not measured, or nothing. Host pools are built for both directions or not at all."""
    if mover.layerwise and direction == "backup":
        return "a backup moves all layers at once"
    # A variant moves whatever layouts exist for the pool, which is what backend torch can do.
    backend, platform = ("torch", "cpu") if mover.backend in VARIANTS else (mover.backend, platform)
    for way in DIRECTIONS:
        answer = support(case.spec, layout, backend, way, platform)
        if isinstance(answer, Refusal):
            return answer.reason
    return registry.unavailable(backend, platform) or ""


def _cell(mover: Mover, status: str = "measured", reason: str = "") -> Cell:
    return Cell(mover.name, mover.backend, mover.blocks, mover.staging_pages, mover.layerwise, status, reason)


def _measured(bench: Bench, row: Row, mover: Mover, stage: Callable[[], Stage], interference: bool) -> Cell:
    """A cell, whatever happens. An error that the device does not recover from is raised by `finish`."""
    cell = _cell(mover)
    bench.arena.reset()
    try:
        attempt = Attempt(bench, row, mover, stage(), cell)
        try:
            attempt.measure(interference)
        finally:
            bench.clock.finish()
            attempt.host.close()
    except UnsupportedPairing as refusal:
        cell = _cell(mover, "refused", str(refusal))
    except Exception as error:
        cell = _cell(mover, "failed", f"{type(error).__name__}: {error}")
        print(f"{row.case} {row.layout} {row.direction} {mover.name}: {cell.reason}", file=sys.stderr)
        bench.clock.finish()
    return cell


class Attempt:
    """A host pool about to move the pages of a row, and the cell that it fills in."""

    def __init__(self, bench: Bench, row: Row, mover: Mover, stage: Stage, cell: Cell) -> None:
        self.bench, self.row, self.mover, self.stage, self.cell = bench, row, mover, stage, cell
        self.rig, self.direction = stage.rig, row.direction
        self.host = self._pool()
        row.runs = row.runs or runs(cast(HostPool, self.host), self.rig.work, row.pages)
        row.piece_bytes = stage.piece_bytes

    def measure(self, interference: bool) -> None:
        """Verify, which also warms up; poison; time; verify."""
        first = self._verified()
        if first is None:
            return
        self.stage.fill(self.host, self.direction)
        self._time(first)
        fault = self.stage.fault(self.host, self.direction)
        if fault:
            vars(self.cell).update(vars(_cell(self.mover, "wrong", f"after timing: {fault}")))
            return
        self.cell.latency = self._latency(2 if self.bench.effort.slow(first) else None)
        if interference:
            run = self.prepare(self.stage.at)
            self.cell.interference = matmul.interference(
                self.bench.clock, run, self.row.payload_bytes, self.cell.timing, self.bench.effort.matmul
            )

    def prepare(self, at: Indices) -> Run:
        """A transfer, checked; called, it moves everything once and returns its receipt."""
        if self.mover.backend in VARIANTS:
            return VARIANTS[self.mover.backend](self.host, self.rig.work, at, self.direction, self.bench.clock.platform)
        assert isinstance(self.host, HostPool)
        transfer = self.host.prepare(self.rig.work, *at, self.direction)
        if not self.mover.layerwise:
            return lambda: transfer.run(side_states=True)
        side = any(c.side for c in self.rig.spec.components)
        layers = [(layer,) for layer in self.rig.spec.owned_layers]
        return lambda: sum_of([transfer.run(layer, side_states=side and layer == layers[0]) for layer in layers])

    def _pool(self) -> HostBuffers:
        spec, layout, pages = self.rig.spec, self.row.layout, self.rig.num_pages
        if self.mover.backend in VARIANTS:
            return HostBuffers(spec, layout, pages, self.bench.arena, None)
        asked = {"blocks": self.mover.blocks, "staging_pages": self.mover.staging_pages}
        options: dict[str, Any] = {name: value for name, value in asked.items() if value is not None}
        platform = self.bench.clock.platform
        return HostPool(spec, layout, pages, self.mover.backend, memory=self.bench.arena, platform=platform, **options)

    def _verified(self) -> Series | None:
        """The first transfer, if it is right; the cell tells what was wrong otherwise."""
        self.stage.fill(self.host, self.direction)
        receipts: list[Receipt] = []

        def start() -> Run:
            begin = time.perf_counter()
            run = self.prepare(self.stage.at)
            self.cell.prepare_s = time.perf_counter() - begin
            return lambda: receipts.append(run()) or receipts[-1]

        series = self.bench.clock.series(start, 1, 0)
        fault, receipt = self.stage.fault(self.host, self.direction), receipts[-1]
        if not fault and receipt.bytes != self.row.payload_bytes:
            fault = f"the receipt says {receipt.bytes:,} bytes, {self.row.payload_bytes:,} were to move"
        if fault:
            vars(self.cell).update(vars(_cell(self.mover, "wrong", fault)))
            return None
        for name in ("path", "descriptors", "kernels", "index_uploads", "host_syncs"):
            setattr(self.cell, name, getattr(receipt, name))
        return series

    def _time(self, first: Series) -> None:
        """Warm samples, as many as the effort allows by what the second one took."""
        effort, clock = self.bench.effort, self.bench.clock

        def start() -> Run:
            return self.prepare(self.stage.at)

        warm = first if effort.slow(first) else clock.series(start, 1, first.submit_s[-1])
        series = effort.series(clock, start, warm)
        self.cell.timing, self.cell.submit, self.cell.held = (
            Timing(series.samples_s),
            Timing(series.submit_s),
            series.held,
        )
        on_a_device = clock.platform != "cpu" and self.mover.backend not in VARIANTS
        if on_a_device and series.held is not False and not effort.slow(first):
            self.cell.own_s = self._outside_calls(self.cell.submit.median_s)
        self.cell.gb_per_s = self.row.payload_bytes / self.cell.timing.median_s / 1e9
        ceiling = ceilings.of(self.bench.ceilings, self.direction, self.row.payload_bytes)
        self.cell.percent_of_ceiling = 100 * self.cell.gb_per_s / ceiling

    def _outside_calls(self, submit_s: float) -> float:
        """In each transfer of its own, for the same call of a driver takes twice as long at some times."""
        own: list[float] = []
        with calls.spent(self.bench.clock.platform) as found:

            def start() -> Run:
                run = self.prepare(self.stage.at)

                def timed() -> Receipt:
                    found.clear()
                    begin = time.perf_counter()
                    receipt = run()
                    own.append(time.perf_counter() - begin - sum(found))
                    return receipt

                return timed

            self.bench.clock.series(start, OWN_SAMPLES, OWN_SAMPLES * submit_s)
        return statistics.median(own)

    def _latency(self, count: int | None = None) -> Timing:
        host, device = (slots[: self.rig.spec.page_size] for slots in self.stage.at)

        def start() -> Run:
            return self.prepare((host, device))

        self.bench.clock.series(start, 1, 0)
        return Timing(latencies(self.bench.clock, start, count or self.bench.effort.latencies))


def sum_of(receipts: Sequence[Receipt]) -> Receipt:
    total = receipts[0]
    for receipt in receipts[1:]:
        total += receipt
    return total
