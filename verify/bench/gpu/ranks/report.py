"""Reporting: what ranks keep of their rates beside each other, as tables. Nothing is measured here."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from refimpl.support import DIRECTIONS
from verify.bench.report import Table

Content = dict[str, Any]

# How plays are called: by name, and by direction where all ranks have one.
TOGETHER = ("all backup", "all load", "opposite")
# What a rank moves while others move: its direction and theirs, which are both where more than two ranks take turns.
Situation = tuple[str, tuple[str, ...]]
LOW = 80  # percent of a plain copy: a rate below it that a rank has alone is not the other ranks' doing


def together(played: Content) -> str:
    return "opposite" if played["play"] == "opposite" else f"all {played['directions'][0]}"


def measured(content: Content) -> Iterator[tuple[Content, Content]]:
    """Rows and their cells that were measured."""
    yield from ((row, cell) for row in content["rows"] for cell in row["cells"] if cell["status"] == "measured")


def by_backend(content: Content) -> dict[str, list[Content]]:
    """Cells that were measured."""
    cells: dict[str, list[Content]] = {}
    for _, cell in measured(content):
        cells.setdefault(cell["backend"], []).append(cell)
    return cells


# ---- ranks one by one


@dataclass(frozen=True)
class Moved:
    """By one rank in one play.

    beside  directions of the others; none where it is alone
    kept    of its rate alone; 1 where it is alone
    """

    direction: str
    beside: tuple[str, ...]
    gb_per_s: float
    kept: float

    @property
    def situation(self) -> Situation:
        return self.direction, self.beside


@dataclass(frozen=True)
class Rate(Moved):
    """The same in one cell; percent of plain copies in the same play, all ranks together."""

    row: Content
    cell: Content
    percent_of_ceiling: float

    @property
    def pool(self) -> str:
        return f"{self.row['case']} {self.row['pool']}"

    @property
    def path(self) -> str:
        return self.cell["path"][self.direction == "load"]

    @property
    def descriptors(self) -> int:
        return self.cell["descriptors"][self.direction == "load"]


def moved(played: Content) -> Iterator[Moved]:
    """By every rank that takes part."""
    taking = [(way, rate) for way, rate in zip(played["directions"], played["gb_per_s"], strict=True) if way]
    for at, ((way, rate), share) in enumerate(zip(taking, played["kept"] or [1.0], strict=True)):
        others = {other for other, _ in taking[:at] + taking[at + 1 :]}
        yield Moved(way, tuple(other for other in DIRECTIONS if other in others), rate, share)


def each(content: Content) -> Iterator[Rate]:
    """Every rank in every play of every cell in which it moves."""
    for row, cell in measured(content):
        for played in cell["plays"]:
            for one in moved(played):
                yield Rate(**vars(one), row=row, cell=cell, percent_of_ceiling=played["percent_of_ceiling"])


def slow_alone(content: Content) -> list[list[Rate]]:
    """For each cell and direction in which ranks are alone and still far below a plain copy: their rates."""
    found: dict[tuple[int, str], list[Rate]] = {}
    for rate in each(content):
        if not rate.beside:
            found.setdefault((id(rate.cell), rate.direction), []).append(rate)
    return [alike for alike in found.values() if min(rate.percent_of_ceiling for rate in alike) < LOW]


# ---- what they keep


def plays_of(cells: Iterable[Content]) -> list[Content]:
    return [played for cell in cells for played in cell["plays"]]


def situations(content: Content) -> list[Situation]:
    """All that ranks are in while others move."""
    return list(dict.fromkeys(one.situation for played in content["ceilings"] for one in moved(played) if one.beside))


def keeps(plays: Iterable[Content], chosen: Sequence[Situation]) -> list[float]:
    """Of its rate alone, what each rank keeps that is in one of the situations."""
    return [one.kept for played in plays for one in moved(played) if one.situation in chosen]


def sums(plays: Iterable[Content], name: str, key: str = "sum_gb_per_s") -> list[float]:
    """What the plays of a kind say of all ranks together."""
    return [played[key] for played in plays if played["play"] != "alone" and together(played) == name]


# ---- tables


def by_cell(content: Content) -> Table:
    """GB/s of a rank alone (mean over the ranks), and of all ranks together."""
    body = []
    for row, cell in measured(content):
        alone = [
            statistics.mean(p["sum_gb_per_s"] for p in cell["plays"] if p["play"] == "alone" and way in p["directions"])
            for way in DIRECTIONS
        ]
        figures = [f"{figure:.1f}" for figure in (*alone, *_means(cell["plays"]).values())]
        body.append([row["case"], row["pool"], row["layout"], cell["backend"], *figures])
    heads = [*(f"{way} alone" for way in DIRECTIONS), *(f"{name}: sum" for name in TOGETHER)]
    return Table(title(content), ["model", "pool", "layout", "backend", *heads], body, [])


def kept(content: Content) -> Table:
    """Per backend the median of what ranks keep of their rate alone, and of percent of plain copies together.

    Backends that lose least come first.
    """
    chosen, cells = situations(content), by_backend(content)
    plays = {name: plays_of(mine) for name, mine in cells.items()}
    order = sorted(plays, key=lambda name: -statistics.median(keeps(plays[name], chosen)))
    plain = ["plain copy", "", *_shares(content["ceilings"], chosen), *["100" for _ in TOGETHER]]
    body = [[name, str(len(cells[name])), *_shares(plays[name], chosen), *_percents(plays[name])] for name in order]
    heads = [*(f"{said(one)}: kept, %" for one in chosen), *(f"{name}: % of plain" for name in TOGETHER)]
    return Table(title(content), ["backend", "cells", *heads], [plain, *body], [])


def said(situation: Situation) -> str:
    """
    >>> said(("load", ("backup",))), said(("load", ("backup", "load")))
    ('load beside backup', 'load beside both')
    """
    direction, others = situation
    return f"{direction} beside {others[0] if len(others) == 1 else 'both'}"


def title(content: Content) -> str:
    """The devices, and what plain copies reach together."""
    names = [device["gpu"]["name"] if device["gpu"] else device["device"] for device in content["devices"]]
    plain = ", ".join(f"{name} {mean:.1f} GB/s" for name, mean in _means(content["ceilings"]).items())
    return f"{' and '.join(names)}: plain copies {plain}"


def line(row: Content) -> str:
    """The latest cell of a row, for whoever waits."""
    cell = row["cells"][-1]
    told = f"{cell['status']}: {cell['reason']}"
    if cell["plays"]:
        told = ", ".join(f"{name} {mean:.1f}" for name, mean in _means(cell["plays"]).items()) + " GB/s"
    return f"{row['case']} {row['pool']} {row['layout']} {cell['backend']}: {told}"


def without_rates(content: Content) -> Iterator[str]:
    """Cells that were not measured, and why."""
    for row in content["rows"]:
        yield from (
            f"{row['case']} {row['pool']} {row['layout']} {cell['backend']}: {cell['status']}: {cell['reason']}"
            for cell in row["cells"]
            if cell["status"] != "measured"
        )


def _means(plays: Sequence[Content]) -> dict[str, float]:
    """GB/s of all ranks together."""
    return {name: statistics.mean(sums(plays, name)) for name in TOGETHER}


def _shares(plays: Sequence[Content], chosen: Sequence[Situation]) -> list[str]:
    return [f"{100 * statistics.median(keeps(plays, [situation])):.0f}" for situation in chosen]


def _percents(plays: Sequence[Content]) -> list[str]:
    return [f"{statistics.median(sums(plays, name, 'percent_of_ceiling')):.0f}" for name in TOGETHER]
