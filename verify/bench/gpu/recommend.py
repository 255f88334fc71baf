"""From measured rows to advice: the best pair of layout and backend by pool and direction, and one pair for all pools.

A rate here is what lasts: a device must move the bytes and a host must describe them, so the slower of the two counts.
Pairs that noise does not tell apart are level, and of those the one is advised that takes least of others: time of the
host for the call, and what a model that computes meanwhile loses.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Generic, Protocol, TypeVar

from refimpl import LAYOUTS, PoolSpec, presets
from refimpl.support import DIRECTIONS
from verify.bench.gpu import ceilings
from verify.bench.noise import Fraction, fraction

Content = dict[str, Any]

BACKENDS = ("direct", "kernel", "staged")  # `auto` is one of these each time
PORTIONS = ("core", "pages", "contiguous")  # full payloads, backends as they come, every layout


# ---- what was measured


def rows_of_model(content: Content, model: str, layouts: Sequence[str] = LAYOUTS) -> list[Content]:
    """Rows of all pools of a model, whatever their pages, scattered or not."""
    return [
        row
        for row in content["rows"]
        if row["portion"] in PORTIONS and row["case"].partition(", page ")[0] == model and row["layout"] in layouts
    ]


def rows_of(
    content: Content,
    model: str,
    page_size: int | None = None,
    layouts: Sequence[str] = LAYOUTS,
    scattered: bool = True,
) -> list[Content]:
    """The same with pages of `page_size` tokens (None: as its preset has them), at random places or one after another.

    `ValueError` where the model cannot have such pages.
    """
    page_bytes = {name: spec.page_bytes for name, spec in presets.model(model, page_size=page_size).items()}
    return [
        row
        for row in rows_of_model(content, model, layouts)
        if row["scattered"] == scattered and row["page_bytes"] == page_bytes.get(row["pool"])
    ]


@dataclass(frozen=True)
class Way:
    """A measured cell: one pool and direction by one pair of layout and backend.

    fraction    of the ceiling, what lasts
    gb_per_s    the same as a rate
    submit_s    of the host, for a transfer
    lost_s      that a model which computes beside a transfer loses; 0 where that was not measured
    host_bound  describing takes the host longer than moving takes the device
    """

    pool: str
    direction: str
    layout: str
    backend: str
    fraction: Fraction
    gb_per_s: float
    submit_s: float
    lost_s: float
    host_bound: bool

    @property
    def taken_s(self) -> float:
        return self.submit_s + self.lost_s

    @property
    def pair(self) -> str:
        return f"{self.layout} with {self.backend}"


def ways(content: Content, rows: Iterable[Content], backends: Sequence[str] = BACKENDS) -> list[Way]:
    """Every measured cell of some backends."""
    lost = losses(content)
    return [
        _way(content["sessions"][row["session"]]["ceilings"], row, cell, lost)
        for row in rows
        for cell in row["cells"]
        if cell["mover"] in backends and cell["status"] == "measured"
    ]


def lasting(cell: Content) -> Content:
    """The timing that counts when transfers go on and on: the device's, or the host's if that takes longer."""
    return max(cell["timing"], cell["submit"], key=lambda timing: timing["median_s"])


def losses(content: Content) -> dict[tuple[str, str], float]:
    """(backend, direction) -> the share of its rate that a matmul beside loses: a median over what was measured.

    Of several numbers of blocks the fastest one counts, since the others do not move what the backend does by itself.
    """
    found: dict[tuple[str, str], list[float]] = {}
    for row in content["rows"]:
        beside = [cell for cell in row["cells"] if cell["interference"]]
        for backend in {cell["backend"] for cell in beside}:
            movers = [cell["interference"] for cell in beside if cell["backend"] == backend]
            fastest = max(movers, key=lambda one: one["gb_per_s"])
            found.setdefault((backend, row["direction"]), []).append(max(0.0, fastest["slowdown"]))
    return {way: statistics.median(values) for way, values in found.items()}


def _way(limits: list[Content], row: Content, cell: Content, lost: Mapping[tuple[str, str], float]) -> Way:
    timing, nbytes = lasting(cell), row["payload_bytes"]
    plain = ceilings.fitting(limits, row["direction"], nbytes)
    return Way(
        row["pool"],
        row["direction"],
        row["layout"],
        cell["mover"],
        fraction(timing, nbytes, plain["timing"], plain["payload_bytes"]),
        nbytes / timing["median_s"] / 1e9,
        cell["submit"]["median_s"],
        lost.get((cell["mover"], row["direction"]), 0.0) * timing["median_s"],
        timing is cell["submit"],
    )


# ---- what to take


class Rated(Protocol):
    """What can be chosen: it has a rate, and takes seconds of others."""

    @property
    def fraction(self) -> Fraction: ...
    @property
    def taken_s(self) -> float: ...


Option = TypeVar("Option", bound=Rated)


@dataclass(frozen=True)
class Choice(Generic[Option]):
    """What is advised, the fastest, all that noise does not tell from it, and the fastest of what is behind."""

    taken: Option
    fastest: Option
    level: tuple[Option, ...]
    behind: Option | None


def choose(options: Sequence[Option]) -> Choice[Option]:
    """Of those that noise does not tell from the fastest, the one that takes least of others."""
    ranked = sorted(options, key=lambda option: -option.fraction.value)
    level = tuple(option for option in ranked if option.fraction.within_noise_of(ranked[0].fraction))
    behind = next((option for option in ranked if option not in level), None)
    return Choice(min(level, key=lambda option: option.taken_s), ranked[0], level, behind)


def by_pool_and_direction(found: Iterable[Way]) -> dict[tuple[str, str], list[Way]]:
    groups: dict[tuple[str, str], list[Way]] = {}
    for way in found:
        groups.setdefault((way.pool, way.direction), []).append(way)
    return groups


def lacking(found: Iterable[Way], pools: Iterable[PoolSpec]) -> list[str]:
    """Pools and directions of which no pair was measured: advice on all pools is without them."""
    measured = {(way.pool, way.direction) for way in found}
    return [
        f"{spec.name} {direction}"
        for spec in pools
        for direction in DIRECTIONS
        if spec.page_bytes and (spec.name, direction) not in measured
    ]


@dataclass(frozen=True)
class Pair:
    """One layout and backend for several pools and directions.

    fraction  of the rate of the best pairs: were each pool and direction given the same time with its own best pair,
              that time over the time with this one
    least     where this pair is furthest behind, and its fraction of the best rate there
    taken_s   of host and model, for a transfer of each pool in each direction
    """

    layout: str
    backend: str
    fraction: Fraction
    least: tuple[Way, float]
    taken_s: float

    @property
    def pair(self) -> str:
        return f"{self.layout} with {self.backend}"


def pairs(found: Sequence[Way]) -> list[Pair]:
    """Every pair that works for every pool and direction, with what it costs against the best pair of each."""
    groups = by_pool_and_direction(found)
    best = {where: max(way.fraction.value for way in group) for where, group in groups.items()}
    by_pair: dict[tuple[str, str], list[Way]] = {}
    for way in found:
        by_pair.setdefault((way.layout, way.backend), []).append(way)
    return [_pair(*names, mine, best) for names, mine in by_pair.items() if len(mine) == len(groups)]


def _pair(layout: str, backend: str, mine: Sequence[Way], best: Mapping[tuple[str, str], float]) -> Pair:
    def share(end: str) -> float:
        return statistics.harmonic_mean([getattr(w.fraction, end) / best[w.pool, w.direction] for w in mine])

    shares = [(way, way.fraction.value / best[way.pool, way.direction]) for way in mine]
    overall = Fraction(share("low"), share("value"), share("high"))
    least = min(shares, key=lambda one: one[1])
    return Pair(layout, backend, overall, least, sum(way.taken_s for way in mine))


# ---- in words


def advice(content: Content, rows: Sequence[Content]) -> list[str]:
    """Sentences, each with the figures that it rests on; none where nothing was measured."""
    found = ways(content, rows)
    if not found:
        return []
    groups = by_pool_and_direction(found)
    pools = list(dict.fromkeys(way.pool for way in found))
    said = [_best(where, choose(group)) for where, group in groups.items()]
    for pool in pools:
        said.append(_one_pair(f"{pool} both ways", [way for way in found if way.pool == pool]))
    if absent := lacking(found, presets.model(rows[0]["case"].partition(", page ")[0]).values()):
        said.append(f"{', '.join(absent)}: not measured with such pages and layouts, so nothing here holds for that")
    elif len(pools) > 1:
        said.append(_one_pair(f"all {len(pools)} pools both ways", found))
    return said + _auto(ways(content, rows, ("auto",)), groups) + _beside_a_matmul(content)


def _best(where: tuple[str, str], choice: Choice[Way]) -> str:
    way = choice.taken
    text = (
        f"{' '.join(where)}: take {way.pair}: {way.gb_per_s:.1f} GB/s, {_spread(way.fraction)} of the ceiling; a "
        f"transfer takes {way.submit_s * 1e6:,.0f} µs of the host, and a matmul beside it {way.lost_s * 1e6:,.0f} µs "
        "longer"
    )
    return f"{text}. {_others(choice, 'a transfer')}"


def _one_pair(what: str, found: Sequence[Way]) -> str:
    able = pairs(found)
    if not able:
        return f"{what}: no pair was measured everywhere."
    choice = choose(able)
    taken, (way, share) = choice.taken, choice.taken.least
    text = (
        f"{what}: take {taken.pair}: {_spread(taken.fraction)} of what the best pair of each pool and direction "
        f"reaches; least in {way.pool} {way.direction}, {share:.1%}"
    )
    return f"{text}. {_others(choice, 'a transfer of each pool each way')}"


def _spread(fraction: Fraction) -> str:
    return f"{fraction.value:.1%} ({fraction.low:.1%} to {fraction.high:.1%})"


def _others(choice: Choice[Way] | Choice[Pair], taking: str) -> str:
    """What is level, by backend; why the fastest is not taken; how far behind the next one is.

    taking  what it is that takes time of host and model
    """
    layouts: dict[str, list[str]] = {}
    for option in choice.level:
        if option is not choice.taken:
            layouts.setdefault(option.backend, []).append(option.layout)
    level = "; ".join(f"{backend} in {', '.join(names)}" for backend, names in layouts.items())
    text = f"Level within noise: {level}. " if level else ""
    if choice.fastest is not choice.taken:
        its, mine = (f"{option.taken_s * 1e6:,.0f} µs" for option in (choice.fastest, choice.taken))
        text += (
            f"The fastest figure is that of {choice.fastest.pair}, {choice.fastest.fraction.value:.1%}, but noise "
            "does not tell it from what is advised, which takes less of the host and of a matmul beside it: "
            f"{mine} for {taking}, not {its}. "
        )
    if not choice.behind:
        return text + "Nothing was behind."
    ratio = choice.behind.fraction.value / choice.fastest.fraction.value
    return text + f"Behind: {choice.behind.pair}, {ratio:.2f} of the fastest."


def _auto(found: Sequence[Way], groups: Mapping[tuple[str, str], Sequence[Way]]) -> list[str]:
    """How near auto is to the best backend of the same layout."""
    ratios: list[tuple[float, Way]] = []
    for auto in found:
        rivals = [w.fraction.value for w in groups.get((auto.pool, auto.direction), ()) if w.layout == auto.layout]
        if rivals:
            ratios.append((auto.fraction.value / max(rivals), auto))
    if not ratios:
        return []
    least, where = min(ratios, key=lambda one: one[0])
    return [
        f"backend auto, which decides for itself, has {statistics.median(r for r, _ in ratios):.1%} of the rate of the "
        f"best backend in the same layout (median of {len(ratios)}); least in {where.pool} {where.direction}, "
        f"{where.layout}, {least:.1%}."
    ]


def _beside_a_matmul(content: Content) -> list[str]:
    """What backends take of a model that computes meanwhile, whichever pools they move."""
    told = [f"{backend} {direction} {lost:.1%}" for (backend, direction), lost in sorted(losses(content).items())]
    return [f"while bytes move, a matmul loses of its rate (medians): {', '.join(told)}"] if told else []


# ---- run length and number


def curves(content: Content) -> dict[tuple[str, str], dict[int, dict[int, float]]]:
    """Portion `descriptors`: (direction, backend) -> number of runs -> bytes a run -> GB/s that last."""
    found: dict[tuple[str, str], dict[int, dict[int, float]]] = {}
    for row in content["rows"]:
        if row["portion"] == "descriptors":
            for way in ways(content, [row]):
                (run,) = row["runs"]
                by_count = found.setdefault((row["direction"], way.backend), {})
                by_count.setdefault(run["count"], {})[run["bytes"]] = way.gb_per_s
    return {key: found[key] for direction in DIRECTIONS for key in found if key[0] == direction}


def crossover(rate: Mapping[int, float], rival: Mapping[int, float]) -> float:
    """Bytes a run from which on a rate is never below its rival, between measured lengths on straight log-log lines.

    0 where it never is, infinity where it still is at the longest run that both have.

    >>> round(crossover({512: 1, 2048: 4, 8192: 16}, {512: 2, 2048: 2, 8192: 2}))
    1024
    >>> crossover({512: 1}, {512: 1}), crossover({512: 1}, {512: 2})
    (0.0, inf)
    """
    lead = [(math.log(run), math.log(rate[run] / rival[run])) for run in sorted(rate.keys() & rival.keys())]
    if not lead or lead[-1][1] < 0:
        return math.inf
    for (x, y), (next_x, next_y) in reversed(list(pairwise(lead))):
        if y < 0:
            return math.exp(x - y * (next_x - x) / (next_y - y))
    return 0.0
