"""What the figures of ranks say, in words, and on what they rest."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from verify.bench.gpu.ranks import report
from verify.bench.gpu.ranks.report import Content, Rate, Situation, keeps, said
from verify.bench.noise import FLOOR
from verify.bench.report import size

MUCH = 0.1  # of its rate alone: ranks that lose more are counted


def of(content: Content) -> Iterator[str]:
    yield _scope(content)
    yield _plain(content)
    if rates := list(report.each(content)):
        yield _backends(content)
        yield _losses([rate for rate in rates if rate.beside])
    yield _placement(content)


def _scope(content: Content) -> str:
    settings, ranks = content["settings"], len(content["devices"])
    cells = [cell["status"] for row in content["rows"] for cell in row["cells"]]
    models = ", ".join(dict.fromkeys(row["case"] for row in content["rows"]))
    return (
        f"{ranks} ranks: a process for each {_what(content)}, with a device pool and a host pool of its own, as a rank "
        f"has them under tensor parallelism of {ranks} ({models}); about {size(settings['payload_bytes'])} a transfer, "
        f"{settings['samples']} samples or more. Of {len(cells)} cells {cells.count('measured')} were measured"
    )


def _plain(content: Content) -> str:
    """Situation by situation: in a sum, ranks that lose nothing would hide those that lose."""
    least = {situation: min(keeps(content["ceilings"], [situation])) for situation in report.situations(content)}
    told = ", ".join(f"{share:.1%} in {said(situation)}" for situation, share in least.items())
    if lost := [said(situation) for situation, share in least.items() if share < 1 - FLOOR]:
        where = "everywhere" if len(lost) == len(least) else f"in {_listed(lost)}, and nowhere else"
        verdict = (
            f"More than noise is lost {where}: there the {_what(content)}s slow each other down by themselves, and "
            "what backends lose is to be read against that"
        )
    else:
        verdict = (
            f"Nowhere is more lost than noise: the {_what(content)}s show no bottleneck that they share, and nothing "
            "is told of hosts where they do"
        )
    return f"Plain copies by all {_what(content)}s at once keep, of their rate alone, at least {told}. {verdict}"


def _backends(content: Content) -> str:
    """Which of them lose least, over all plays and in those in which ranks lose most."""
    chosen = report.situations(content)
    plays = {name: report.plays_of(cells) for name, cells in report.by_backend(content).items()}
    every = [played for mine in plays.values() for played in mine]
    medians = {situation: statistics.median(keeps(every, [situation])) for situation in chosen}
    hardest = [situation for situation in chosen if medians[situation] - min(medians.values()) <= FLOOR]
    told = f"Of its rate alone a rank keeps, in the median, {_least_lost(plays, chosen)}. "
    if len(hardest) == len(chosen):
        return f"{told}What the other ranks move makes no difference beyond noise"
    plain = statistics.median(keeps(content["ceilings"], hardest))
    where = _listed([said(situation) for situation in hardest])
    return f"{told}Most is lost in {where}: there it keeps {_least_lost(plays, hardest)}, and plain copies {plain:.1%}"


def _least_lost(plays: Mapping[str, Sequence[Content]], chosen: Sequence[Situation]) -> str:
    medians = {name: statistics.median(keeps(mine, chosen)) for name, mine in plays.items()}
    ranked = sorted(medians, key=lambda name: -medians[name])
    first = [name for name in ranked if medians[ranked[0]] - medians[name] <= FLOOR]
    told = ", ".join(f"{medians[name]:.1%} by {name}" for name in ranked)
    if len(first) == 1:
        return f"{told} ({first[0]} loses least)"
    return f"{told} ({'all' if len(first) == len(ranked) else _listed(first)} level within noise)"


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
        f"{worst.cell['backend']} ({said(worst.situation)}): {worst.kept:.0%} of it{doubt}"
    )


def _placement(content: Content) -> str:
    nodes = [device["numa_node"] for device in content["devices"]]
    if all(node is None for node in nodes):
        unknown = "what placement of host memory changes was not tested"
        return f"This machine shows no NUMA node of its {_what(content)}s: {unknown}"
    told = ", ".join("not shown" if node is None else str(node) for node in nodes)
    return f"NUMA nodes of the {_what(content)}s: {told}"


def _what(content: Content) -> str:
    return "emulated device" if "emulated" in content["devices"][0]["device"] else "GPU"


def _listed(names: Sequence[str]) -> str:
    """
    >>> _listed(["direct"]), _listed(["direct", "kernel", "staged"])
    ('direct', 'direct, kernel and staged')
    """
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last
