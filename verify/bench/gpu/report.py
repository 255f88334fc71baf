"""Reporting: tables of a result file, a portion at a time. Nothing is measured here."""

from __future__ import annotations

import statistics
from typing import Any

from verify.bench.gpu import targets
from verify.bench.gpu.record import Row
from verify.bench.report import Table, size

Content = dict[str, Any]
NAMES = ["model", "pool", "layout", "direction", "moved", "run", "piece"]
VERDICTS = ["best", "ours by SGLang's name", "target", "met"]
LEGEND = (
    "moved: pages × bytes of each; run: bytes that lie together on both sides, of every length that moves; piece: "
    "bytes of a page that lie together on the host, 0 B where its layers lie apart",
    "best: the fastest of our backends; ours by SGLang's name: those of our backends that are named like the paths "
    "that SGLang takes here, × ratio to the best. SGLang's own code is other code: what was measured of it is told by "
    "`python -m verify audit`, and by notebook 04_pairings",
    "target: percent of memcpy that the best backend is to reach with such a run and piece, - where none is set; met: "
    "whether it does. A lone NO is a rate that falls short in that row, nothing worse: wrong bytes read `wrong`. "
    f"Targets are meant for full payloads: verdicts count them in portions {' and '.join(targets.FULL)} alone",
)


def line(row: Row) -> str:
    """A row in short, while it is measured."""
    cells = [
        f"{c.mover} {c.gb_per_s:.1f} ({c.percent_of_ceiling:.0f}%)" if c.gb_per_s else f"{c.mover} {c.status}"
        for c in row.cells
        if c.status != "refused"
    ]
    return f"{row.case} {row.pool} {row.layout} {row.direction}: {', '.join(cells) or 'refused'}"


def table(content: Content, portion: str) -> Table:
    """Rows of a portion down, movers across: GB/s and percent of the session's memcpy."""
    rows = [row for row in content["rows"] if row["portion"] == portion]
    movers = list(dict.fromkeys(cell["mover"] for row in rows for cell in row["cells"]))
    footnotes: dict[str, int] = {}
    body = [[*_names(row), *_across(row, movers, footnotes), *_verdicts(row)] for row in rows]
    notes = [f"[{number}] {reason}" for reason, number in footnotes.items()]
    return Table(f"{portion}: {_title(content, rows)}", [*NAMES, *movers, *VERDICTS], body, notes)


def _names(row: Content) -> list[str]:
    runs = "+".join(size(run["bytes"]) for run in row["runs"]) or "-"
    moved = f"{row['pages']:,} × {size(row['page_bytes'])}"
    return [row["case"], row["pool"], row["layout"], row["direction"], moved, runs, size(row["piece_bytes"])]


def _across(row: Content, movers: list[str], footnotes: dict[str, int]) -> list[str]:
    cells = {cell["mover"]: cell for cell in row["cells"]}
    return [_cell(cells[mover], row, footnotes) if mover in cells else "-" for mover in movers]


def _cell(cell: Content, row: Content, footnotes: dict[str, int]) -> str:
    """Rate; for what is no backend as it comes also its ratio to the best one; what it does to a matmul."""
    if cell["status"] != "measured":
        return f"{cell['status']} [{footnotes.setdefault(cell['reason'], len(footnotes) + 1)}]"
    text = f"{_marks(cell)}{cell['gb_per_s']:.2f} {cell['percent_of_ceiling']:3.0f}%"
    best = targets.best(row)
    if best and cell["mover"] not in targets.BACKENDS:
        text += f" ×{cell['gb_per_s'] / best['gb_per_s']:.2f}"
    beside = cell["interference"]
    if beside:
        text += f" mm{-beside['slowdown']:+.1%}"
    if beside and beside["kernel_s"] is not None:
        text += f" SM {beside['kernel_s'] / cell['timing']['median_s']:.0%}"
    return text


def _marks(cell: Content) -> str:
    """`~` quartiles wide apart; `!` the device did not wait until everything was submitted."""
    lower, upper = cell["timing"]["quartiles_s"]
    noisy = upper - lower > cell["timing"]["median_s"] / 20
    return ("~" if noisy else "") + ("!" if cell["held"] is False else "")


def _verdicts(row: Content) -> list[str]:
    best, required = targets.best(row), targets.required(row)
    rates = {cell["mover"]: cell["gb_per_s"] for cell in targets.measured(row)}
    upstream = [f"{path} ×{rates[path] / best['gb_per_s']:.2f}" for path in row["dispatch"] if best and path in rates]
    if not best or not required:
        return [best["mover"] if best else "-", ", ".join(upstream) or "-", "-", "-"]
    met = "yes" if best["percent_of_ceiling"] >= 100 * required else "NO"
    return [best["mover"], ", ".join(upstream) or "-", f"{required:.0%}", met]


def _title(content: Content, rows: list[Content]) -> str:
    """What the figures are, and the ceilings of the sessions they come from."""
    lines = [
        "GB/s (payload once, GB = 1e9, median of device times), percent of a plain memcpy in the same session; "
        "× ratio to the best backend; mm what it does to a matmul beside; SM time with a kernel running; "
        "~ quartiles further apart than 5 % of the median; ! submitting took longer than the device was held"
    ]
    for number in sorted({row["session"] for row in rows}):
        session = content["sessions"][number]
        device = session["provenance"]["gpu"]
        limits = [
            f"{limit['direction']} {size(limit['payload_bytes'])} {limit['gb_per_s']:.1f}"
            for limit in session["ceilings"]
        ]
        lines.append(f"{device['name'] if device else session['settings']['platform']}: memcpy {', '.join(limits)}")
    return "\n".join([*lines, _submits(rows), *LEGEND])


def _submits(rows: list[Content]) -> str:
    """Medians over rows of what a call costs the host, and of the latency of one page, in microseconds."""
    found: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        for cell in targets.measured(row):
            figures = cell["submit"]["median_s"], cell["latency"]["median_s"]
            found.setdefault(cell["mover"], []).append(figures)
    texts = [
        f"{mover} {statistics.median(s for s, _ in pairs) * 1e6:.0f}/{statistics.median(t for _, t in pairs) * 1e6:.0f}"
        for mover, pairs in found.items()
    ]
    return f"submit / latency of one page, µs, median over rows: {', '.join(texts) or '-'}"
