"""Reporting: what a result file says, as a table for the terminal. Nothing is measured here.

Tables are made of the JSON content of result files, so yesterday's file or another machine's reads like a fresh one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

Content = dict[str, Any]


@dataclass(frozen=True)
class Table:
    """Text, cell by cell, and the footnotes it refers to; shown on terminals and pages alike."""

    title: str
    head: list[str]
    body: list[list[str]]
    notes: list[str]


def matrix(content: Content) -> Table:
    """Model pools × layouts down, backends × directions across: GB/s and percent of the row's plain copy."""
    backends, lines = content["settings"]["backends"], _by_layout(content["rows"])
    directions = list(dict.fromkeys(row["direction"] for row in content["rows"]))
    footnotes: dict[str, int] = {}
    body = []
    for (model, pool, layout), rows in lines.items():
        first = rows[directions[0]]
        cells = {(c["backend"], d): c for d, row in rows.items() for c in row["cells"]}
        texts = [_cell(cells[b, d], footnotes) for d in directions for b in backends]
        copies = [_ceiling(rows[d]) for d in directions]
        body.append([model, pool, layout, _pages(first), _runs(first["runs"]), *texts, *copies])
    across = [f"{b} {d}" for d in directions for b in backends] + [f"plain {d}" for d in directions]
    notes = [f"[{number}] {reason}" for reason, number in footnotes.items()]
    return Table(_title(content), ["model", "pool", "layout", "moved", "runs", *across], body, notes)


def counts(content: Content) -> dict[str, int]:
    """Cells by status."""
    found = {"measured": 0, "refused": 0, "wrong": 0}
    for row in content["rows"]:
        for cell in row["cells"]:
            found[cell["status"]] += 1
    return found


def verdicts(content: Content, share: float = 0.6, run_bytes: int = 4096) -> list[str]:
    """How each backend stands against the plain copy (on long runs), and against the first backend."""
    first, *others = content["settings"]["backends"]
    lines = []
    for backend in (first, *others):
        long = [
            (cell["percent_of_copy"], row)
            for row, cell in _measured(content, backend)
            if min(run["bytes"] for run in row["runs"]) >= run_bytes
        ]
        if long:
            lowest, row = min(long, key=lambda found: found[0])
            enough = sum(percent >= 100 * share for percent, _ in long)
            lines.append(
                f"{backend}: {enough} of {len(long)} rows with runs of {size(run_bytes)} and more reach {share:.0%} of "
                f"the plain copy; the lowest is {lowest:.0f}% ({_row_name(row)})"
            )
    for backend in others:
        ratios = [
            (cell["gb_per_s"] / rival["gb_per_s"], row)
            for row, cell in _measured(content, backend)
            for rival in row["cells"]
            if rival["backend"] == first and rival["status"] == "measured"
        ]
        if ratios:
            lowest, row = min(ratios, key=lambda found: found[0])
            faster = sum(ratio >= 1 for ratio, _ in ratios)
            lines.append(
                f"{backend} is no slower than {first} in {faster} of {len(ratios)} rows; the lowest ratio is "
                f"{lowest:.2f} ({_row_name(row)})"
            )
    return lines


def _measured(content: Content, backend: str) -> list[tuple[Content, Content]]:
    """Rows with the cell of one backend, where it was measured."""
    return [
        (row, cell)
        for row in content["rows"]
        for cell in row["cells"]
        if cell["backend"] == backend and cell["status"] == "measured"
    ]


def _row_name(row: Content) -> str:
    return f"{row['model']} {row['pool']}, {row['layout']}, {row['direction']}"


def as_text(table: Table, left: Collection[str] = ("model", "pool", "layout")) -> str:
    """Aligned columns: names (`left`) to the left, figures to the right."""
    lines = [table.head, *table.body]
    widths = [max(len(line[i]) for line in lines) for i in range(len(table.head))]

    def aligned(line: list[str]) -> str:
        padded = [
            text.ljust(width) if name in left else text.rjust(width)
            for text, width, name in zip(line, widths, table.head, strict=True)
        ]
        return "  ".join(padded).rstrip()

    rule = "  ".join("-" * width for width in widths)
    body = [aligned(line) for line in _without_repeats(table.body)]
    return "\n".join([table.title, "", aligned(table.head), rule, *body, *([""] if table.notes else []), *table.notes])


def size(nbytes: int) -> str:
    """Bytes for people, binary units.

    >>> size(448), size(4096), size(33554432)
    ('448 B', '4 KiB', '32 MiB')
    """
    amount, unit = float(nbytes), "B"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024 or unit == "GiB":
            break
        amount /= 1024
    return f"{amount:.3g} {unit}" if amount < 1000 else f"{amount:.0f} {unit}"


def _by_layout(rows: Iterable[Content]) -> dict[tuple[str, str, str], dict[str, Content]]:
    """Rows of one pool and layout together, by direction."""
    lines: dict[tuple[str, str, str], dict[str, Content]] = {}
    for row in rows:
        lines.setdefault((row["model"], row["pool"], row["layout"]), {})[row["direction"]] = row
    return lines


def _cell(cell: Content, footnotes: dict[str, int]) -> str:
    if cell["status"] == "measured":
        return f"{_noisy(cell['timing'])}{cell['gb_per_s']:.2f} {cell['percent_of_copy']:4.0f}%"
    return f"{cell['status']} [{footnotes.setdefault(cell['reason'], len(footnotes) + 1)}]"


def _noisy(timing: Content) -> str:
    """A mark where the middle half of the samples is spread wider than a quarter of the median."""
    lower, upper = timing["quartiles_s"]
    return "~" if upper - lower > timing["median_s"] / 4 else ""


def _ceiling(row: Content) -> str:
    """GB/s of the row's ceiling, and which copy it was."""
    for copy in row["copies"]:
        if copy["name"] == row["ceiling"]:
            speed = row["payload_bytes"] / copy["timing"]["median_s"] / 1e9
            return f"{_noisy(copy['timing'])}{speed:.2f} {copy['name'][0]}{copy['threads']}"
    return "-"


def _pages(row: Content) -> str:
    return f"{row['pages']:,} × {size(row['payload_bytes'] // row['pages'])}"


def _runs(runs: list[dict[str, int]]) -> str:
    return " + ".join(f"{run['count']:,} × {size(run['bytes'])}" for run in runs) or "-"


def _title(content: Content) -> str:
    source = content["provenance"]
    return (
        "GB/s (payload once, GB = 1e9, median) and percent of the faster plain copy of as many bytes, measured in "
        f"turns\n{source['cpu']}, {source['cores']} cores, torch {source['versions']['torch']} with "
        f"{source['threads']['torch']} threads, numba {source['versions']['numba']} with {source['threads']['numba']}; "
        "plain: t torch copy_, n numpy copyto, and its threads; ~ a noisy figure: quartiles further apart than a "
        "quarter of the median"
    )


def _without_repeats(body: list[list[str]]) -> list[list[str]]:
    """Model and pool are named where they begin."""
    shown, last = [], ["", ""]
    for line in body:
        names = ["" if line[:2] == last else text for text in line[:2]]
        shown.append(names + line[2:])
        last = line[:2]
    return shown
