"""When two rates differ. Each is a fraction of a plain copy that was measured beside it, and both have a spread."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

# The same cells measured again in other sessions, on machines alike by their description, differ by as much; what a
# session repeats a few times in a row spreads less. `compare.repeats` tells it of any file.
FLOOR = 0.03
RULE = (
    "a rate is a fraction of its own plain copy, from medians of raw samples; its spread is what quartiles of both "
    f"make of it at worst; a difference is within noise where spreads overlap or medians are within {FLOOR:.0%}"
)


@dataclass(frozen=True)
class Fraction:
    """A rate over that of the plain copy: from medians, and with both a quartile off, one this way, one that way."""

    low: float
    value: float
    high: float

    def within_noise_of(self, other: Fraction) -> bool:
        """
        >>> slower, faster = Fraction(0.90, 0.91, 0.92), Fraction(0.95, 0.96, 0.97)
        >>> slower.within_noise_of(faster)  # neither spreads nor medians are near
        False
        >>> Fraction(0.90, 0.91, 0.95).within_noise_of(faster)  # spreads touch
        True
        >>> slower.within_noise_of(Fraction(0.93, 0.93, 0.93))  # medians within the floor
        True
        """
        near = abs(other.value / self.value - 1) <= FLOOR
        return near or (self.low <= other.high and other.low <= self.high)


def fraction(timing: dict[str, Any], nbytes: int, plain: dict[str, Any], plain_bytes: int) -> Fraction:
    """The rate of `nbytes` in `timing` over that of a plain copy of `plain_bytes`; both as `record.Timing` writes them.

    >>> copy = {"median_s": 2.0, "quartiles_s": [1.0, 4.0]}
    >>> fraction({"median_s": 4.0, "quartiles_s": [2.0, 8.0]}, 100, copy, 100)
    Fraction(low=0.125, value=0.5, high=2.0)
    """
    size = nbytes / plain_bytes
    fast, slow = timing["quartiles_s"]
    plain_fast, plain_slow = plain["quartiles_s"]
    return Fraction(size * plain_fast / slow, size * plain["median_s"] / timing["median_s"], size * plain_slow / fast)
