"""Reporting: what ranks keep of their rates beside each other, in tables and in words. Nothing is measured here."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from refimpl.support import DIRECTIONS
from verify.bench.noise import FLOOR
from verify.bench.report import Table, as_text, size

Content = dict[str, Any]

# How plays are called in tables: by name, and by direction where all ranks have one.
TOGETHER = ("both backup", "both load", "opposite")
# What a rank moves while others move: its direction and theirs.
Situation = tuple[str, str]
SITUATIONS: tuple[Situation, ...] = (("backup", "backup"), ("load", "load"), ("backup", "load"), ("load", "backup"))
MUCH = 0.1  # of its rate alone: ranks that lose more are counted
LOW = 80  # percent of a plain copy: a rate below it that a rank has alone is not the other ranks' doing


def together(played: Content) -> str:
    return "opposite" if played["play"] == "opposite" else f"both {played['directions'][0]}"


def measured(content: Content) -> Iterator[tuple[Content, Content]]:
    """Rows and their cells that were measured."""
    yield from ((row, cell) for row in content["rows"] for cell in row["cells"] if cell["status"] == "measured")


@dataclass(frozen=True)
class Rate:
    """Of one rank, in one play of a cell; percent of plain copies in the same play, all ranks together.

    beside  the direction of the others; None where it is alone
    kept    of its rate alone; 1 where it is alone
    """

    row: Content
    cell: Content
    direction: str
    beside: str | None
    gb_per_s: float
    kept: float
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


def each(content: Content) -> Iterator[Rate]:
    """Every rank in every play of every cell in which it moves."""
    for row, cell in measured(content):
        for played in cell["plays"]:
            moving = [(way, rate) for way, rate in zip(played["directions"], played["gb_per_s"], strict=True) if way]
            for (way, rate), kept in zip(moving, played["kept"] or [1.0], strict=True):
                yield Rate(row, cell, way, beside(played, way), rate, kept, played["percent_of_ceiling"])


def beside(played: Content, way: str) -> str | None:
    """What the others do while a rank moves its bytes that way."""
    if played["play"] == "alone":
        return None
    return way if played["play"] == "same" else next(other for other in DIRECTIONS if other != way)


def of_plays(cell: Content, name: str, key: str) -> list[float]:
    """What the plays of a kind say of all ranks together."""
    return [played[key] for played in cell["plays"] if played["play"] != "alone" and together(played) == name]


def kept(content: Content) -> Table:
    """Per backend the median of what ranks keep of their rate alone, and of percent of plain copies together.

    Backends that lose least come first.
    """
    backends = by_backend(content)
    lines = {name: _line(name, cells) for name, cells in backends.items()}
    order = sorted(backends, key=lambda name: -statistics.median(_keeps(backends[name], SITUATIONS)))
    plain = _line("plain copy", [{"plays": content["ceilings"]}], ceiling=True)
    keeps = [f"{way} beside {others}: kept, %" for way, others in SITUATIONS]
    head = ["backend", "cells", *keeps, *(f"{name}: % of plain" for name in TOGETHER)]
    return Table(title(content), head, [plain, *(lines[name] for name in order)], [])


def by_backend(content: Content) -> dict[str, list[Content]]:
    """Cells that were measured."""
    cells: dict[str, list[Content]] = {}
    for _, cell in measured(content):
        cells.setdefault(cell["backend"], []).append(cell)
    return cells


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
    yield from without_rates(content)
    yield ""
    yield from (f"{sentence}." for sentence in sentences(content))


def without_rates(content: Content) -> Iterator[str]:
    """Cells that were not measured, and why."""
    for row in content["rows"]:
        yield from (
            f"{row['case']} {row['pool']} {row['layout']} {cell['backend']}: {cell['status']}: {cell['reason']}"
            for cell in row["cells"]
            if cell["status"] != "measured"
        )


def slow_alone(content: Content) -> list[list[Rate]]:
    """For each cell and direction in which ranks are alone and still far below a plain copy: their rates."""
    found: dict[tuple[int, str], list[Rate]] = {}
    for rate in each(content):
        if not rate.beside:
            found.setdefault((id(rate.cell), rate.direction), []).append(rate)
    return [rates for rates in found.values() if min(rate.percent_of_ceiling for rate in rates) < LOW]


# ---- in words


def sentences(content: Content) -> Iterator[str]:
    """What the figures say, and on what they rest."""
    yield _scope(content)
    yield _plain(content)
    if rates := list(each(content)):
        yield _backends(content)
        yield _losses([rate for rate in rates if rate.beside])
    yield _placement(content)


def _scope(content: Content) -> str:
    settings, ranks = content["settings"], len(content["devices"])
    cells = [cell["status"] for row in content["rows"] for cell in row["cells"]]
    models = ", ".join(dict.fromkeys(row["case"] for row in content["rows"]))
    return (
        f"{ranks} ranks: a process for each GPU, with a device pool and a host pool of its own, as a rank has them "
        f"under tensor parallelism of {ranks} ({models}); about {size(settings['payload_bytes'])} a transfer, "
        f"{settings['samples']} samples or more. Of {len(cells)} cells {cells.count('measured')} were measured"
    )


def _plain(content: Content) -> str:
    shares = {name: _share(content["ceilings"], name) for name in TOGETHER}
    told = ", ".join(f"{share:.1%} ({name})" for name, share in shares.items())
    if min(shares.values()) >= 1 - FLOOR:
        verdict = (
            "all of it, within noise. Here the GPUs share no bottleneck, and nothing is told of hosts where they do"
        )
    else:
        verdict = "not all of it. The GPUs share a bottleneck, and what backends lose is to be read against that"
    return f"Plain copies by all GPUs at once reach {told} of what they reach alone, added up: {verdict}"


def _share(ceilings: list[Content], name: str) -> float:
    """Of the sum of what each rank reaches alone, what all reach at once."""
    plays = [played for played in ceilings if played["play"] != "alone" and together(played) == name]
    alone = [rate / kept for p in plays for rate, kept in zip(p["gb_per_s"], p["kept"], strict=True)]
    return sum(p["sum_gb_per_s"] for p in plays) / sum(alone)


def _backends(content: Content) -> str:
    """Which of them lose least, over all plays and in those in which ranks lose most."""
    cells = by_backend(content)
    every = [cell for mine in cells.values() for cell in mine]
    hardest = min(SITUATIONS, key=lambda situation: statistics.median(_keeps(every, [situation])))
    plain = statistics.median(_keeps([{"plays": content["ceilings"]}], [hardest]))
    return (
        f"Of its rate alone a rank keeps, in the median, {_least_lost(cells, SITUATIONS)}. Most is lost by a "
        f"{hardest[0]} beside a {hardest[1]}: it keeps {_least_lost(cells, [hardest])}, and plain copies {plain:.1%}"
    )


def _least_lost(cells: dict[str, list[Content]], situations: Sequence[Situation]) -> str:
    keeps = {name: statistics.median(_keeps(mine, situations)) for name, mine in cells.items()}
    ranked = sorted(keeps, key=lambda name: -keeps[name])
    first = [name for name in ranked if keeps[ranked[0]] - keeps[name] <= FLOOR]
    told = ", ".join(f"{keeps[name]:.1%} by {name}" for name in ranked)
    if len(first) == 1:
        return f"{told} ({first[0]} loses least)"
    return f"{told} ({'all' if len(first) == len(ranked) else ' and '.join(first)} level within noise)"


def _losses(rates: Sequence[Rate]) -> str:
    """How many ranks lose much, of which pools, and the one that loses most; how many gain as much."""
    lost = [rate for rate in rates if rate.kept < 1 - MUCH]
    if not lost:
        return f"None of the {len(rates)} rates beside another rank is more than {MUCH:.0%} below the rate alone"
    gained = sum(rate.kept > 1 + MUCH for rate in rates)
    doubt = f". But {gained} are as far above it, so not all of this is the other ranks' doing" if gained else ""
    pools = ", ".join(f"{pool} {count}" for pool, count in Counter(rate.pool for rate in lost).most_common())
    worst = min(lost, key=lambda rate: rate.kept)
    return (
        f"Of the {len(rates)} rates beside another rank {len(lost)} are more than {MUCH:.0%} below the rate alone "
        f"({pools}); the furthest is a {worst.direction} of {worst.pool} in {worst.row['layout']} by "
        f"{worst.cell['backend']} beside a {worst.beside}: {worst.kept:.0%} of it{doubt}"
    )


def _placement(content: Content) -> str:
    nodes = [device["numa_node"] for device in content["devices"]]
    if None in nodes:
        return "This machine shows no NUMA node of its GPUs: what placement of host memory changes was not tested"
    return f"The GPUs are on NUMA nodes {', '.join(map(str, nodes))}"


def _line(name: str, cells: list[Content], ceiling: bool = False) -> list[str]:
    shares = [f"{100 * statistics.median(_keeps(cells, [situation])):.0f}" for situation in SITUATIONS]
    percents = ["100" if ceiling else f"{_percent_of_plain(cells, way):.0f}" for way in TOGETHER]
    return [name, "" if ceiling else str(len(cells)), *shares, *percents]


def _percent_of_plain(cells: list[Content], name: str) -> float:
    return statistics.median(percent for cell in cells for percent in of_plays(cell, name, "percent_of_ceiling"))


def _keeps(cells: list[Content], situations: Sequence[Situation]) -> list[float]:
    """Of its rate alone, what each rank keeps that is in one of the situations."""
    return [
        kept
        for cell in cells
        for played in cell["plays"]
        if played["play"] != "alone"
        for way, kept in zip(played["directions"], played["kept"], strict=True)
        if (way, beside(played, way)) in situations
    ]
