"""What a result file of `overlap` comes to: what was hidden, what the prediction says, what recomputing would take."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from verify.bench.gpu.overlap.pipeline import Pace, between, break_even, finishes, hidden

BEYOND = 1.1  # how far past the longest recomputation its curve is trusted

Content = dict[str, Any]


@dataclass(frozen=True)
class Way:
    """One measured cell, in seconds; the properties are what follows from it."""

    row: Content
    cell: Content

    @property
    def name(self) -> str:
        return f"{self.cell['layout']}, {self.cell['backend']}"

    @property
    def resident_s(self) -> float:
        return median(self.row["resident"])

    @property
    def loading_s(self) -> float:
        return median(self.cell["loading"])

    @property
    def by_layer_s(self) -> float:
        return median(self.cell["layerwise"])

    @property
    def all_first_s(self) -> float:
        return median(self.cell["all_first"])

    @property
    def hidden(self) -> float:
        """The share of loading that the step did not wait for."""
        return hidden(self.by_layer_s, self.resident_s, self.loading_s)

    @property
    def submitted_s(self) -> float:
        """Host time before the model can begin."""
        return self.cell["layerwise"]["submitted_s"]

    @property
    def gb_per_s(self) -> float:
        """Of the load alone, by layer."""
        return self.row["layers"] * self.row["layer_bytes"] / self.loading_s / 1e9

    @property
    def compute_s(self) -> list[float]:
        return compute(self.row["resident"])

    @property
    def ratio(self) -> float:
        """Time to compute a layer over time to load it."""
        return self.resident_s / self.loading_s

    @property
    def pace(self) -> Pace:
        """Both stages as four numbers."""
        return Pace.of(self.cell["loading"]["arrived_s"], self.compute_s)

    @property
    def predicted_s(self) -> float:
        """The step by layer, from a load alone and a step alone: each layer with its own times."""
        return finishes(self.cell["loading"]["arrived_s"], self.compute_s, self.submitted_s)[-1]

    @property
    def slowdown(self) -> float:
        """How much longer the layers took to compute while others were loaded: 0.1 is a tenth."""
        beside = self.cell["layerwise"]
        took = [end - begin for begin, end in zip(beside["begun_s"], beside["finished_s"], strict=True)]
        alone = self.row["resident"]
        free = [end - begin for begin, end in zip(alone["begun_s"], alone["finished_s"], strict=True)]
        return sum(took) / sum(free) - 1


def predicted_curve(layers: int) -> list[tuple[float, float]]:
    """(ratio as of a way, share of loading that is hidden) of layers that are alike, from 1/64 to 64."""
    paces = [Pace(layers, 1.0, 2 ** (step / 4)) for step in range(-24, 25)]
    return [(pace.compute_s, hidden(pace.by_layer, pace.resident, layers)) for pace in paces]


def ways(content: Content) -> list[Way]:
    return [Way(row, cell) for row in content["rows"] for cell in row["cells"] if cell["status"] == "measured"]


def median(timeline: Content) -> float:
    return timeline["timing"]["median_s"]


def compute(timeline: Content) -> list[float]:
    """Seconds of each layer of a step that never waits, the host's time between two layers included."""
    ends = [timeline["begun_s"][0], *timeline["finished_s"]]
    return [end - begin for begin, end in pairwise(ends)]


def recomputed(content: Content, model: str) -> list[tuple[int, float]]:
    """(tokens, seconds) of computing them from nothing, ascending."""
    return sorted(
        (done["tokens"], median(done))
        for done in content["recompute"]
        if done["model"] == model and done["status"] == "measured"
    )


@dataclass(frozen=True)
class Served:
    """Steps of as many new tokens after prefixes of several lengths, each loaded in the way that was fastest.

    loaded      (prefix tokens, seconds), ascending
    best        the way that each of them stands for, and whether by layer
    break_even  tokens of a prefix from which on loading is faster than recomputing, looked for among those measured and
                between them; None: not even the longest
    """

    model: str
    new_tokens: int
    loaded: list[tuple[int, float]]
    best: list[tuple[str, bool]]
    recomputed: list[float]
    break_even: int | None


def served(content: Content) -> Iterator[Served]:
    """Time to the first token, by model and new tokens, where there is something to compare with."""
    found: dict[tuple[str, int], dict[int, list[Way]]] = {}
    for way in ways(content):
        key = way.row["model"], way.row["new_tokens"]
        found.setdefault(key, {}).setdefault(way.row["prefix_tokens"], []).append(way)
    for (model, new), by_prefix in found.items():
        again = recomputed(content, model)
        reach = BEYOND * max((tokens for tokens, _ in again), default=0)
        lengths = [tokens for tokens in sorted(by_prefix) if tokens + new <= reach]
        if min(len(lengths), len(again)) >= 2:
            page = by_prefix[lengths[0]][0].row["page_size"]
            yield _served(model, new, page, {tokens: by_prefix[tokens] for tokens in lengths}, again)


def _served(
    model: str, new: int, page: int, by_prefix: dict[int, list[Way]], again: Sequence[tuple[int, float]]
) -> Served:
    fastest = {tokens: _fastest(of) for tokens, of in by_prefix.items()}
    loaded = [(tokens, seconds) for tokens, (seconds, _, _) in fastest.items()]
    crossing = break_even(
        lambda tokens: between(loaded, tokens),
        lambda tokens: between(again, tokens + new),
        range(loaded[0][0], loaded[-1][0] + 1, page),
    )
    best = [(name, by_layer) for _, name, by_layer in fastest.values()]
    return Served(model, new, loaded, best, [between(again, tokens + new) for tokens in by_prefix], crossing)


def _fastest(of: Sequence[Way]) -> tuple[float, str, bool]:
    return min((s, way.name, how) for way in of for s, how in ((way.by_layer_s, True), (way.all_first_s, False)))
