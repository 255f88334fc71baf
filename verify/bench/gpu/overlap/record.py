"""What `overlap` writes down: rows of steps that need a prefix, and how each way to load it served them."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from verify.bench.record import Timing


@dataclass
class Sample:
    """One step, in seconds.

    total_s      on the host's clock, from the first call until the result is there
    submitted_s  likewise, until all of the load has been submitted; the model's first layer comes after that
    arrived_s    on the device's clock, from the beginning: when each layer was there (all at once: one entry)
    begun_s      when each layer began to be computed
    finished_s   when it had been computed
    """

    total_s: float
    submitted_s: float
    arrived_s: list[float]
    begun_s: list[float]
    finished_s: list[float]


@dataclass
class Timeline:
    """Samples of a step: totals as they are, everything else as medians, to the tenth of a microsecond."""

    timing: Timing
    submitted_s: float
    arrived_s: list[float]
    begun_s: list[float]
    finished_s: list[float]

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> Timeline:
        def medians(name: str) -> list[float]:
            columns = zip(*(getattr(sample, name) for sample in samples), strict=True)
            return [round(statistics.median(column), 7) for column in columns]

        submitted = round(statistics.median(sample.submitted_s for sample in samples), 7)
        timing = Timing([sample.total_s for sample in samples])
        return cls(timing, submitted, medians("arrived_s"), medians("begun_s"), medians("finished_s"))


@dataclass
class Cell:
    """One way to load the prefix of a row.

    by_layer     whether layers arrive one after another; if not, all arrive before the first is reported
    status       "measured"; "refused" before a byte moved; "wrong": other bytes than the oracle's, or another result
                 than with a resident prefix; "failed": it raised; "left out": the time was up
    reason       why it is not measured
    path         of the load by layer, from its receipts
    descriptors  of the load by layer, and of all layers at once
    host_s       what a bit of work that is always the same took the host, before these steps and after them
    loading      the load by layer alone, nothing is computed
    layerwise    each layer is computed as soon as it is there
    all_first    all layers are loaded in one transfer, then computed
    """

    layout: str
    backend: str
    by_layer: bool | None = None
    status: str = "measured"
    reason: str = ""
    path: str | None = None
    descriptors: tuple[int, int] | None = None
    host_s: tuple[float, float] | None = None
    loading: Timeline | None = None
    layerwise: Timeline | None = None
    all_first: Timeline | None = None

    def give_up(self, status: str, reason: str) -> None:
        """Figures of a cell that is not measured would mislead."""
        self.status, self.reason = status, reason
        self.host_s = self.loading = self.layerwise = self.all_first = None


@dataclass
class Row:
    """A prefill of `new_tokens` after a prefix of `prefix_tokens`.

    repeatable   whether two steps with a resident prefix had the same result, bit for bit; if so, every other has it
    resident     the step without any load; `host_s` as of a cell
    """

    model: str
    prefix_tokens: int
    new_tokens: int
    page_size: int
    layers: int
    layer_bytes: int
    repeatable: bool | None = None
    resident: Timeline | None = None
    host_s: tuple[float, float] | None = None
    cells: list[Cell] = field(default_factory=list)


@dataclass
class Recompute:
    """A prefill of so many tokens after none; status and reason as of a cell."""

    model: str
    tokens: int
    status: str = "measured"
    reason: str = ""
    timing: Timing | None = None

    def give_up(self, status: str, reason: str) -> None:
        self.status, self.reason, self.timing = status, reason, None
