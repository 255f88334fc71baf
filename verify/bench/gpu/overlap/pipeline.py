"""How long a step takes that loads its prefix: what a pipeline of two stages predicts.

The bus brings one layer after another, the model computes one after another, and a layer cannot be computed before it
has arrived. Nothing else is in this model; where a measured step takes longer, something else has happened.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise


def finishes(arrived: Sequence[float], compute: Sequence[float], begin: float = 0.0) -> list[float]:
    """When each layer has been computed.

    arrived  seconds at which each layer is there
    compute  seconds that each layer takes
    begin    seconds at which the model may begin

    >>> finishes(arrived=[2, 4, 6], compute=[1, 5, 1])
    [3, 9, 10]
    """
    found: list[float] = []
    for there, seconds in zip(arrived, compute, strict=True):
        found.append(max(found[-1] if found else begin, there) + seconds)
    return found


@dataclass(frozen=True)
class Pace:
    """Layers that are alike: `load_s` on the bus, `compute_s` in the model; `latency_s` before the first one moves.

    >>> slow_bus = Pace(layers=10, load_s=3, compute_s=2, latency_s=1)
    >>> slow_bus.by_layer, slow_bus.at_once, slow_bus.resident
    (33, 51, 20)
    """

    layers: int
    load_s: float
    compute_s: float
    latency_s: float = 0.0

    @classmethod
    def of(cls, arrived: Sequence[float], compute: Sequence[float]) -> Pace:
        """The pace of measured layers: from the first arrival to the last, and the mean of the computing."""
        load = (arrived[-1] - arrived[0]) / max(len(arrived) - 1, 1)
        return cls(len(arrived), load, sum(compute) / len(compute), max(arrived[0] - load, 0.0))

    @property
    def by_layer(self) -> float:
        """Seconds of a step that computes each layer as soon as it is there: `finishes` in closed form."""
        slower, last = max(self.load_s, self.compute_s), self.compute_s
        return self.latency_s + self.load_s + (self.layers - 1) * slower + last

    @property
    def at_once(self) -> float:
        """Seconds of a step that waits for all layers."""
        return self.latency_s + self.layers * (self.load_s + self.compute_s)

    @property
    def resident(self) -> float:
        """Seconds of a step that need not load."""
        return self.layers * self.compute_s


def hidden(total: float, resident: float, loading: float) -> float:
    """The share of loading that a step does not wait for: 1 if it takes no longer than a resident one, 0 if all of it.

    >>> hidden(total=25, resident=20, loading=10)
    0.5
    """
    return 1 - (total - resident) / loading


def break_even(
    loaded: Callable[[int], float], recomputed: Callable[[int], float], prefixes: Iterable[int]
) -> int | None:
    """The shortest prefix from which on loading is the faster way, of ascending lengths; None if it is not at last.

    >>> break_even(lambda tokens: 10 + tokens, lambda tokens: 3 * tokens, range(1, 100))
    6
    """
    found = None
    for tokens in prefixes:
        if loaded(tokens) >= recomputed(tokens):
            found = None
        elif found is None:
            found = tokens
    return found


def between(points: Sequence[tuple[float, float]], x: float) -> float:
    """A straight line between measured points, ascending in x; beyond them the nearest line goes on.

    >>> between([(0, 1), (10, 2), (20, 4)], 15), between([(0, 1), (10, 2), (20, 4)], 30)
    (3.0, 6.0)
    """
    lines = list(pairwise(points))
    (x0, y0), (x1, y1) = next((line for line in lines if x <= line[1][0]), lines[-1])
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)
