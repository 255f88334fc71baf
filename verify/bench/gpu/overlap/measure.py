"""A workload, measured: prefills whose prefix is loaded meanwhile, before, or computed again.

Before a step its prefix is wiped on the device. Bytes are compared with the oracle's once for each way to load; the
result of every single step is compared with that of a resident prefix.
"""

from __future__ import annotations

import gc
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial

import torch

from refimpl import UnsupportedPairing
from refimpl.controller import loads_by_layer
from verify.arena import Arena
from verify.bench.gpu.clock import Clock
from verify.bench.gpu.overlap.cases import Workload
from verify.bench.gpu.overlap.layers import Layer, layers
from verify.bench.gpu.overlap.record import Cell, Recompute, Row, Sample, Timeline
from verify.bench.gpu.overlap.steps import Prefix, Steps
from verify.bench.record import Timing

SAMPLES = (5, 9)  # fewest, and most of short steps
SHORT_S = 0.1  # of all samples of a step together, about
LONG_S = 0.3  # a step that takes longer warms up within a sample
DISTURBED, TRIES = 1.3, 3  # a pulse that is so much longer than the shortest; how often to try then, on a GPU
LOADS = ("by layer", "at once")


class TimeIsUp(Exception):
    """What has not begun is left out."""


class Wrong(Exception):
    """Other bytes, or another result, than there should be."""


@dataclass
class Bench:
    """What all workloads share.

    until    when the time is up, on the monotonic clock
    tries    how often steps are timed at most, when the host is disturbed
    quiet_s  the shortest pulse so far
    """

    clock: Clock
    arena: Arena
    seed: int
    until: float
    tries: int = 1
    quiet_s: float = math.inf

    def prefix(self, workload: Workload, tokens: int) -> Prefix:
        return Prefix(self.clock, self.arena, workload.spec, tokens, workload.pages(tokens), self.seed)

    @staticmethod
    def tell(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def pulse(self) -> float:
        """Host seconds of a bit of work that is always the same: some small kernels are submitted."""
        x, took = torch.zeros(1, device=self.clock.device), []
        for _ in range(5):
            begin = time.perf_counter()
            for _ in range(100):
                x.add_(1)
            took.append(time.perf_counter() - begin)
            self.clock.finish()
        return round(statistics.median(took), 7)

    def quietly(self, measure: Callable[[], None], tries: int | None = None) -> tuple[float, float]:
        """Measure, and again if others disturbed the host. Pulses before and after the last time."""
        tries, before = self.tries if tries is None else tries, self.pulse()
        measure()
        after = self.pulse()
        self.quiet_s = min(self.quiet_s, before, after)
        disturbed = max(before, after) > DISTURBED * self.quiet_s
        if disturbed and tries > 1 and time.monotonic() < self.until:
            return self.quietly(measure, tries - 1)
        return before, after

    def require_time(self) -> None:
        if time.monotonic() > self.until:
            raise TimeIsUp("the time was up")


def measure(bench: Bench, workload: Workload) -> tuple[list[Row], list[Recompute]]:
    """Everything of a workload; what fails, or has no time left, says so."""
    layer = layers(workload.shape, workload.spec, bench.clock.device, bench.seed)
    recomputed = _recompute(bench, workload, layer)
    rows: list[Row] = []
    for tokens in workload.steps:
        rows += _rows(bench, workload, layer, tokens)
        gc.collect()  # pools of gigabytes, before the next
    return rows, recomputed


def _inputs(bench: Bench, workload: Workload, tokens: int) -> torch.Tensor:
    generator = torch.Generator(bench.clock.device).manual_seed(bench.seed + tokens)
    shape = tokens, workload.shape.hidden
    return torch.empty(shape, dtype=torch.bfloat16, device=bench.clock.device).normal_(generator=generator)


def _recompute(bench: Bench, workload: Workload, layer: Layer) -> list[Recompute]:
    found = [Recompute(workload.model, tokens) for tokens in workload.recompute]
    if not found:
        return []
    with _told(bench, found, f"{workload.model}: room for {max(workload.recompute)} tokens"):
        prefix = bench.prefix(workload.from_nothing, workload.spec.page_size)
        with prefix.steps(layer, *workload.ways[0]) as steps:
            for done in found:
                with _told(bench, [done], f"{workload.model}: {done.tokens} tokens from nothing"):
                    bench.require_time()
                    x = _inputs(bench, workload, done.tokens)
                    done.timing = Timing([s.total_s for s in _samples(partial(steps.run, x, prefix=False))])
    return found


def _rows(bench: Bench, workload: Workload, layer: Layer, tokens: int) -> list[Row]:
    """Of one prefix: every way to load it, and with each every step.

    The prefix is made when a cell asks for it, so that a cell fails and not the program where there is no room.
    """

    @cache
    def prefix() -> Prefix:
        return bench.prefix(workload, tokens)

    spec = workload.spec
    sizes = spec.page_size, spec.layers, tokens // spec.page_size * spec.page_bytes // spec.layers
    rows = [Row(workload.model, tokens, new, *sizes) for new in workload.steps[tokens]]
    results: dict[int, torch.Tensor] = {}
    for layout, backend in workload.ways:
        cells = [Cell(layout, backend) for _ in rows]
        name = f"{workload.model}: prefix of {tokens}, {layout}, {backend}"
        for row, cell in zip(rows, cells, strict=True):
            row.cells.append(cell)
        with _told(bench, cells, name):
            bench.require_time()
            with prefix().steps(layer, layout, backend) as steps:
                for row in rows:
                    if row.resident is None:
                        x = _inputs(bench, workload, row.new_tokens)
                        results[row.new_tokens] = _resident(bench, prefix(), steps, row, x)
                _verify(prefix(), steps, cells)
                bench.quietly(partial(_load_alone, steps, cells))
                for row, cell in zip(rows, cells, strict=True):
                    with _told(bench, [cell], f"{name}, {row.new_tokens} new"):
                        bench.require_time()
                        x = _inputs(bench, workload, row.new_tokens)
                        right = results[row.new_tokens] if row.repeatable else None
                        cell.host_s = bench.quietly(partial(_fill, cell, steps, x, right))
    return rows


def _load_alone(steps: Steps, cells: Sequence[Cell]) -> None:
    loading = Timeline.of(_checked(steps, None, "by layer", None))
    for cell in cells:
        cell.loading = loading


def _fill(cell: Cell, steps: Steps, x: torch.Tensor, right: torch.Tensor | None) -> None:
    cell.layerwise = Timeline.of(_checked(steps, x, "by layer", right))
    cell.all_first = Timeline.of(_checked(steps, x, "at once", right))


def _resident(bench: Bench, prefix: Prefix, steps: Steps, row: Row, x: torch.Tensor) -> torch.Tensor:
    """Time the step without a load, and return its result."""

    def measure() -> None:
        row.resident = Timeline.of(_samples(partial(steps.run, x)))

    prefix.make_resident()
    right = steps.run(x)[1]
    row.repeatable = torch.equal(steps.run(x)[1], right)
    row.host_s = bench.quietly(measure)
    return right


def _verify(prefix: Prefix, steps: Steps, cells: Sequence[Cell]) -> None:
    """Load in both ways, and compare every byte."""
    descriptors = []
    for how in LOADS:
        steps.wipe()
        prefix.clock.finish()
        steps.run(None, how)
        if fault := prefix.fault():
            raise Wrong(f"{how}: {fault}")
        descriptors.append(sum(receipt.descriptors for receipt in steps.receipts))
        if how == "by layer":
            for cell in cells:
                cell.by_layer, cell.path = loads_by_layer(steps.pool), steps.receipts[0].path
    for cell in cells:
        cell.descriptors = descriptors[0], descriptors[1]


def _checked(steps: Steps, x: torch.Tensor | None, how: str, right: torch.Tensor | None) -> list[Sample]:
    """Samples of a step, each with the prefix wiped before and, if `right` is known, the same result."""

    def run() -> tuple[Sample, torch.Tensor]:
        steps.wipe()
        steps.runtime.record(steps.runtime.current()).synchronize()
        found = steps.run(x, how)
        if right is not None and not torch.equal(found[1], right):
            raise Wrong(f"{how}: the step has another result than with a resident prefix")
        return found

    return _samples(run)


def _samples(run: Callable[[], tuple[Sample, torch.Tensor]]) -> list[Sample]:
    """After one that warms up: a few, or some more of short ones."""
    fewest, most = SAMPLES
    warm = run()[0]
    count = max(fewest, min(most, int(SHORT_S / warm.total_s)))
    found = [warm] if warm.total_s > LONG_S else []
    return found + [run()[0] for _ in range(count - len(found))]


@contextmanager
def _told(bench: Bench, found: Sequence[Cell | Recompute], name: str) -> Iterator[None]:
    """Whatever happens inside is noted where it belongs, and measuring goes on."""
    begin, status, reason = time.monotonic(), "measured", ""
    try:
        yield
    except UnsupportedPairing as refusal:
        status, reason = "refused", str(refusal)
    except Wrong as fault:
        status, reason = "wrong", str(fault)
    except TimeIsUp as late:
        status, reason = "left out", str(late)
    except Exception as error:
        status, reason = "failed", f"{type(error).__name__}: {error}"
        bench.clock.finish()  # raises what a device does not recover from
    for one in found if reason else ():
        one.give_up(status, reason)
    bench.tell(f"{time.monotonic() - begin:6.1f} s  {name}: {status}{reason and ': '}{reason}")
