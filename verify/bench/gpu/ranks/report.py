"""Reporting: what ranks keep of their rates beside each other. Nothing is measured here."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

from verify.bench.report import Table, as_text

Content = dict[str, Any]

# How plays are called in tables: by name, and by direction where all ranks have one.
TOGETHER = ("both backup", "both load", "opposite")


def together(played: Content) -> str:
    return "opposite" if played["play"] == "opposite" else f"both {played['directions'][0]}"


def measured(content: Content) -> Iterator[tuple[Content, Content]]:
    """Rows and their cells that were measured."""
    yield from ((row, cell) for row in content["rows"] for cell in row["cells"] if cell["status"] == "measured")


def of_plays(cell: Content, name: str, key: str) -> list[float]:
    """What the plays of a kind say: of each rank, or of all together."""
    found = [played[key] for played in cell["plays"] if played["play"] != "alone" and together(played) == name]
    return [figure for each in found for figure in (each if isinstance(each, list) else [each])]


def kept(content: Content) -> Table:
    """Per backend the median of what ranks keep of their rate alone, and of percent of plain copies together.

    Backends that lose least come first.
    """
    backends: dict[str, list[Content]] = {}
    for _, cell in measured(content):
        backends.setdefault(cell["backend"], []).append(cell)
    lines = {name: _line(name, cells) for name, cells in backends.items()}
    order = sorted(backends, key=lambda name: -statistics.median(_of(backends[name], TOGETHER, "kept")))
    plain = _line("plain copy", [{"plays": content["ceilings"]}], ceiling=True)
    head = ["backend", "cells", *(f"{name}: kept, %" for name in TOGETHER), *(f"{n}: % of plain" for n in TOGETHER)]
    return Table(title(content), head, [plain, *(lines[name] for name in order)], [])


def rates(content: Content) -> Table:
    """Every cell: GB/s of a rank alone (mean over the ranks), and of all ranks together."""
    body = []
    for row, cell in measured(content):
        alone = [
            statistics.mean(p["sum_gb_per_s"] for p in cell["plays"] if p["play"] == "alone" and way in p["directions"])
            for way in ("backup", "load")
        ]
        sums = [statistics.mean(of_plays(cell, name, "sum_gb_per_s")) for name in TOGETHER]
        figures = [f"{figure:.1f}" for figure in (*alone, *sums)]
        body.append([row["case"], row["pool"], row["layout"], cell["backend"], *figures])
    head = ["model", "pool", "layout", "backend", "backup alone", "load alone", *(f"{n}: sum" for n in TOGETHER)]
    return Table(title(content), head, body, [])


def title(content: Content) -> str:
    """The devices, and what plain copies reach together."""
    names = [device["gpu"]["name"] if device["gpu"] else device["device"] for device in content["devices"]]
    plain = {together(c): c["sum_gb_per_s"] for c in content["ceilings"] if c["play"] != "alone"}
    return f"{' and '.join(names)}: plain copies " + ", ".join(f"{n} {plain[n]:.1f} GB/s" for n in TOGETHER)


def line(row: Content) -> str:
    """The latest cell of a row, for whoever waits."""
    cell = row["cells"][-1]
    sums = [f"{name} {statistics.mean(of_plays(cell, name, 'sum_gb_per_s')):.1f}" for name in TOGETHER if cell["plays"]]
    told = f"{', '.join(sums)} GB/s" if sums else f"{cell['status']}: {cell['reason']}"
    return f"{row['case']} {row['pool']} {row['layout']} {cell['backend']}: {told}"


def summary(content: Content) -> Iterator[str]:
    if any(True for _ in measured(content)):
        yield as_text(rates(content), left=("model", "pool", "layout", "backend"))
        yield ""
        yield as_text(kept(content), left=("backend",))
    for row in content["rows"]:
        yield from (
            f"{row['case']} {row['pool']} {row['layout']} {cell['backend']}: {cell['status']}: {cell['reason']}"
            for cell in row["cells"]
            if cell["status"] != "measured"
        )


def _line(name: str, cells: list[Content], ceiling: bool = False) -> list[str]:
    shares = [f"{100 * statistics.median(_of(cells, (way,), 'kept')):.0f}" for way in TOGETHER]
    percents = [
        "100" if ceiling else f"{statistics.median(_of(cells, (w,), 'percent_of_ceiling')):.0f}" for w in TOGETHER
    ]
    return [name, "" if ceiling else str(len(cells)), *shares, *percents]


def _of(cells: list[Content], names: tuple[str, ...], key: str) -> list[float]:
    return [figure for cell in cells for name in names for figure in of_plays(cell, name, key)]
