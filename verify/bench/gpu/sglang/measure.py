"""Rows of the published table, measured again: verified against the oracle, timed, verified again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from refimpl.host_buffers import HostBuffers
from verify.adapters.protocol import Json
from verify.bench.gpu import ceilings
from verify.bench.gpu.cases import Portion
from verify.bench.gpu.measure import Bench
from verify.bench.gpu.rig import Rig, Stage
from verify.bench.gpu.sglang.calls import transfer
from verify.bench.record import Timing

FASTER = 1.2  # a path that is not taken is measured too where it was so many times as fast as what is taken


@dataclass
class Row:
    """One way of SGLang's to move the bytes of a case.

    path      by the name of the published table
    chosen    whether SGLang's pools take it, for one of their backends
    status    "measured"; "wrong": other bytes than the oracle's; "failed": it raised
    reason    why it is not measured
    held      everything was submitted before the device began; None where there is no device
    timing    device time of a transfer; a load is one call a layer, summed
    gb_per_s  payload, counted once, over the median; GB = 1e9 bytes
    fraction  of the plain memcpy in this direction, same session
    """

    case: str
    layout: str
    direction: str
    path: str
    chosen: bool
    pages: int
    payload_bytes: int
    status: str = "measured"
    reason: str = ""
    held: bool | None = None
    timing: Timing | None = None
    gb_per_s: float | None = None
    fraction: float | None = None


def wanted(figures: Sequence[Json]) -> list[Json]:
    """What SGLang chooses, and what it does not although it was much faster there."""
    taken: dict[Any, float] = {}
    for figure in figures:
        if figure["chosen"]:
            taken[_cell(figure)] = max(figure["fraction"], taken.get(_cell(figure), 0.0))
    return [f for f in figures if f["chosen"] or f["fraction"] > FASTER * taken.get(_cell(f), 1.0)]


def _cell(figure: Json) -> tuple[str, str, str]:
    return figure["case"], figure["layout"], figure["direction"]


def rows(bench: Bench, portion: Portion, figures: Sequence[Json]) -> Iterator[Row]:
    """Each figure as soon as it is measured; those of a case share a device pool, those of a layout its oracle."""
    (payload,) = portion.payloads
    for case in portion.cases:
        rig = Rig(case.spec, case.pages_of(payload), portion.scattered, bench.clock.device, bench.seed)
        for layout in portion.layouts:
            asked = [figure for figure in figures if (figure["case"], figure["layout"]) == (case.name, layout)]
            if asked:
                stage = Stage(rig, layout)
                for figure in asked:
                    yield measured(bench, stage, figure)
                    bench.clock.finish()  # raises where the device does not recover from what the row did


def measured(bench: Bench, stage: Stage, figure: Json) -> Row:
    """A row, whatever happens."""
    rig, named = stage.rig, {name: figure[name] for name in ("case", "layout", "direction", "path", "chosen")}
    row = Row(**named, pages=rig.pages, payload_bytes=rig.pages * rig.spec.page_bytes)
    bench.arena.reset()
    host = HostBuffers(rig.spec, stage.layout, rig.num_pages, bench.arena, None)
    try:
        _measure(bench, stage, host, figure, row)
    except Exception as error:  # somebody else's code: whatever it raises
        row.status, row.reason = "failed", f"{type(error).__name__}: {error}"[:300]
    host.close()
    return row


def _measure(bench: Bench, stage: Stage, host: HostBuffers, figure: Json, row: Row) -> None:
    """The first transfer is not timed: kernels may be compiled for it."""
    run = transfer(figure, host, stage.rig.work, stage.at, bench.clock.device)
    stage.fill(host, row.direction)
    run()
    bench.clock.finish()
    if fault := stage.fault(host, row.direction):
        row.status, row.reason = "wrong", fault
        return
    stage.fill(host, row.direction)
    first = bench.clock.series(lambda: run, 1, 0)
    series = bench.effort.series(bench.clock, lambda: run, first)
    if fault := stage.fault(host, row.direction):
        row.status, row.reason = "wrong", f"after timing: {fault}"
        return
    row.timing, row.held = Timing(series.samples_s), series.held
    row.gb_per_s = row.payload_bytes / row.timing.median_s / 1e9
    row.fraction = row.gb_per_s / ceilings.of(bench.ceilings, row.direction, row.payload_bytes)
