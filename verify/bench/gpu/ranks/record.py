"""What is written down: for every play of a cell the samples of each rank, and what they come to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from verify.bench.gpu.ranks.cases import Play
from verify.bench.record import Timing


@dataclass
class Played:
    """Ranks at work at the same time. Lists have an entry for each rank; None: it rested.

    timings             device seconds of a transfer, one right behind the other, while all that take part go on
    gb_per_s            payload, counted once, over the median; GB = 1e9 bytes
    sum_gb_per_s        of all ranks together
    percent_of_ceiling  of the sum that plain copies reach in the same play, same run; None for them
    kept                of its rate alone, what each rank keeps; None when alone
    """

    play: str
    directions: list[str | None]
    timings: list[Timing | None]
    gb_per_s: list[float | None]
    sum_gb_per_s: float
    percent_of_ceiling: float | None = None
    kept: list[float] | None = None

    @classmethod
    def of(cls, play: Play, samples: Sequence[list[float]], payload_bytes: int) -> Played:
        timings = [Timing(taken) if taken else None for taken in samples]
        rates = [payload_bytes / timing.median_s / 1e9 if timing else None for timing in timings]
        return cls(play.name, list(play.directions), timings, rates, sum(rate or 0 for rate in rates))


@dataclass
class Cell:
    """A backend of a row.

    status       "measured"; "wrong": other bytes than the oracle's; "failed": a rank raised; "left out": time was up
    reason       why it is not measured
    path         of a backup and of a load, from their receipts
    descriptors  likewise
    """

    backend: str
    status: str = "measured"
    reason: str = ""
    path: list[str] | None = None
    descriptors: list[int] | None = None
    plays: list[Played] = field(default_factory=list)


@dataclass
class Row:
    """A pool of a rank in one layout: every rank moves as much, scattered pages of a pool of its own."""

    case: str
    pool: str
    layout: str
    pages: int
    page_bytes: int
    payload_bytes: int
    cells: list[Cell] = field(default_factory=list)


def compare(plays: Sequence[Played], ceilings: Sequence[Played]) -> None:
    """Fill in what each rank keeps of its rate alone, and percent of what plain copies reach in the same play."""
    alone = {(at, way): played.gb_per_s[at] for played in plays for at, way in moving(played) if played.play == "alone"}
    limits = {(c.play, *c.directions): c.sum_gb_per_s for c in ceilings}
    for played in plays:
        if limits:
            limit = limits[played.play, *played.directions]
            played.percent_of_ceiling = 100 * played.sum_gb_per_s / limit
        if played.play != "alone":
            played.kept = [(played.gb_per_s[at] or 0) / (alone[at, way] or 1) for at, way in moving(played)]


def moving(played: Played) -> list[tuple[int, str]]:
    """Ranks that take part, each with its direction."""
    return [(at, way) for at, way in enumerate(played.directions) if way]
