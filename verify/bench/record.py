"""What measuring writes down and reporting reads: rows of cells, with raw samples."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field


@dataclass
class Timing:
    """Raw samples in seconds, in the order taken, to the nanosecond, and what they come to."""

    samples_s: list[float]
    median_s: float = field(init=False)
    quartiles_s: tuple[float, float] = field(init=False)

    def __post_init__(self) -> None:
        self.samples_s = [round(sample, 9) for sample in self.samples_s]
        lower, self.median_s, upper = statistics.quantiles(self.samples_s, n=4, method="inclusive")
        self.quartiles_s = (lower, upper)


@dataclass
class PlainCopy:
    """A copy of the row's bytes from contiguous to contiguous memory."""

    name: str
    threads: int
    timing: Timing


@dataclass
class Cell:
    """One backend of a row.

    status           "measured"; "refused" before any byte moved; "wrong": other bytes than the oracle's, so not timed
    reason           why it was refused, or what was wrong
    check_s          seconds that checking the indices took, once
    gb_per_s         payload, counted once, over the median; GB = 1e9 bytes
    percent_of_copy  median of the row's faster plain copy over this median
    """

    backend: str
    status: str
    reason: str = ""
    check_s: float | None = None
    timing: Timing | None = None
    gb_per_s: float | None = None
    percent_of_copy: float | None = None


@dataclass
class Row:
    """One pool in one layout and direction, and its cells.

    runs    contiguous pieces that move: {"bytes": of each, "count": of them}, shortest first
    copies  the plain copies of the row; `ceiling` names the faster one
    """

    model: str
    pool: str
    layout: str
    direction: str
    pages: int
    payload_bytes: int
    cells: list[Cell]
    runs: list[dict[str, int]] = field(default_factory=list)
    copies: list[PlainCopy] = field(default_factory=list)
    ceiling: str | None = None
