"""The measured model that is nearest to one that nobody measured, by what decides a rate."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from refimpl import LAYOUTS, DevicePool, HostPool, PoolSpec, presets, support
from refimpl.support import DIRECTIONS
from verify.bench.gpu.cases import name_of
from verify.bench.gpu.recommend import Content, Pair, Way, choose, pairs, rows_of, ways
from verify.bench.measure import runs
from verify.bench.report import size


@dataclass(frozen=True)
class Shape:
    """What decides the rate of a pool in a layout: its family, bytes of a run (on average), bytes of a page."""

    pool: str
    family: str
    run_bytes: int
    page_bytes: int

    @classmethod
    def of(cls, spec: PoolSpec, layout: str) -> Shape:
        with HostPool(spec, layout, 1) as host:
            count = sum(run["count"] for run in runs(host, DevicePool(spec, 1), 1))
        return cls(spec.name, spec.family, spec.page_bytes // count, spec.page_bytes)

    def distance(self, other: Shape) -> tuple[bool, float, float]:
        """Whether families differ, then how often runs, and then pages, would have to be doubled or halved."""
        run, page = self.run_bytes / other.run_bytes, self.page_bytes / other.page_bytes
        return self.family != other.family, abs(math.log2(run)), abs(math.log2(page))


@dataclass(frozen=True)
class Nearest:
    """A measured model, the pair that is best for it, and for each pool of another model the nearest of its pools.

    alone  the pools that the pair is best for, where those are not all of its pools
    """

    model: str
    taken: Pair
    beside: tuple[tuple[Shape, Shape], ...]
    alone: tuple[str, ...] = ()

    @property
    def distance(self) -> tuple[float, ...]:
        """Families that it lacks count first, then runs, then pages."""
        return tuple(map(sum, zip(*(mine.distance(other) for mine, other in self.beside), strict=True)))

    def __str__(self) -> str:
        """In a line, with the reason: the pool that it stands for least well, if any differs."""
        which = f"whose {', '.join(self.alone)} alone" if self.alone else "which"
        lacking = dict.fromkeys(mine.family for mine, other in self.beside if mine.family != other.family)
        families = f"it has no pool of family {', '.join(lacking)}" if lacking else "it has pools of the same families"
        said = f"nearest is {self.model}, for {which} {self.taken.pair} is best: {families}"
        mine, other = max(self.beside, key=lambda shapes: shapes[0].distance(shapes[1]))
        if not any(mine.distance(other)):
            return f"{said}, and in that layout runs and pages are as long as its own"
        return (
            f"{said}; furthest apart in that layout are {mine.pool} and its {other.pool}, with runs of "
            f"{size(mine.run_bytes)} and {size(other.run_bytes)}, pages of {size(mine.page_bytes)} and "
            f"{size(other.page_bytes)}"
        )


def sentence(
    content: Content, specs: Iterable[PoolSpec], layouts: Sequence[str] = LAYOUTS, page_size: int | None = None
) -> str:
    """The nearest model in words, or why there is none; arguments as of `nearest`."""
    if found := nearest(content, specs, layouts, page_size):
        return str(found)
    if any(_measured(content, layouts, page_size)):
        return "no measured model has a pair that these pools can have"
    return "nothing was measured in these layouts, with such pages or with those of a preset"


def nearest(
    content: Content, specs: Iterable[PoolSpec], layouts: Sequence[str] = LAYOUTS, page_size: int | None = None
) -> Nearest | None:
    """Of the measured models the one whose pools are most like these, by `Shape`; None where none has a pair for them.

    Each is compared in the layout that is best for it, of those pairs that these pools can have, and with pages of
    `page_size` tokens where they were measured. Its pools of other families have no say in that, unless it has no
    others.
    """
    storing = [spec for spec in specs if spec.page_bytes]
    families = {spec.family for spec in storing}

    def possible(way: Way) -> bool:
        asked = ((spec, direction) for spec in storing for direction in DIRECTIONS)
        return all(support(spec, way.layout, way.backend, direction, "cuda") for spec, direction in asked)

    near: list[Nearest] = []
    for model, pools, every in _measured(content, layouts, page_size):
        akin = [way for way in every if pools[way.pool].family in families] or every
        found = [way for way in akin if possible(way)]
        if storing and (able := pairs(found)):
            taken, names = choose(able).taken, tuple(dict.fromkeys(way.pool for way in found))
            measured = [Shape.of(pools[name], taken.layout) for name in names]
            asked = [Shape.of(spec, taken.layout) for spec in storing]
            beside = tuple((mine, min(measured, key=mine.distance)) for mine in asked)
            near.append(Nearest(model, taken, beside, names if len(akin) < len(every) else ()))
    return min(near, key=lambda one: one.distance, default=None)


def _measured(
    content: Content, layouts: Sequence[str], page_size: int | None
) -> Iterator[tuple[str, dict[str, PoolSpec], list[Way]]]:
    """Name, pools and measured cells of models: with the pages asked for, or as presets have them if more pools do."""
    for model in presets.MODELS:
        found = {tokens: _ways(content, model, tokens, layouts) for tokens in (page_size, None)}
        tokens = max(found, key=lambda tokens: len({way.pool for way in found[tokens]}))
        if found[tokens]:
            yield name_of(model, tokens), presets.model(model, page_size=tokens), found[tokens]


def _ways(content: Content, model: str, page_size: int | None, layouts: Sequence[str]) -> list[Way]:
    try:
        return ways(content, rows_of(content, model, page_size, layouts))
    except ValueError:  # it cannot have such pages
        return []
