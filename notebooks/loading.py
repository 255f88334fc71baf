"""Notebook 08: which way costs least, steps as time passes, what was hidden, and time to the first token."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import book
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle

from verify.bench.gpu.overlap.report import Content, Served, Way

Spans = Sequence[tuple[float, float]]  # milliseconds: begin, end

BACKENDS = {name: look[:2] for name, look in book.WAYS.items()} | {"auto": ("#CC79A7", "D")}
BELOW = -60  # percent: what hides less is drawn there
RECOMPUTED, LOADED = ("#000000", "o", "--"), ("#0072B2", "s", "-")


# ---- figures


def ranking(ways: Sequence[Way], model: str) -> list[tuple[str, float, float]]:
    """Ways of a model, the best first: how much longer their steps by layer take than the fastest of the same row.

    The geometric mean over all rows, and the most.
    """
    fastest: dict[int, float] = {}
    for way in ways:
        fastest[id(way.row)] = min(way.by_layer_s, fastest.get(id(way.row), way.by_layer_s))
    behind: dict[str, list[float]] = {}
    for way in ways:
        if way.row["model"] == model:
            behind.setdefault(way.name, []).append(way.by_layer_s / fastest[id(way.row)])
    found = [(name, statistics.geometric_mean(ratios), max(ratios)) for name, ratios in behind.items()]
    return sorted(found, key=lambda one: one[1])


def fastest_of_rows(rows: Sequence[Content], ways: Sequence[Way]) -> list[tuple[Content, Way, Way, float]]:
    """Rows in which something was measured: the fastest by layer, the fastest all first, and the share that saves."""
    found = []
    for row in rows:
        mine = [way for way in ways if way.row is row]
        if mine:
            by_layer, at_once = min(mine, key=lambda w: w.by_layer_s), min(mine, key=lambda w: w.all_first_s)
            found.append((row, by_layer, at_once, 1 - by_layer.by_layer_s / at_once.all_first_s))
    return found


def all_first_is_faster(best: Sequence[tuple[Content, Way, Way, float]]) -> str:
    """In how many rows of `fastest_of_rows`, and how long their prefixes are at most."""
    behind = [row["prefix_tokens"] for row, *_, gain in best if gain < 0]
    reach = f", with prefixes of {max(behind):,} tokens at most" if behind else ""
    return f"rows in which all first is faster than by layer: {len(behind)} of {len(best)}{reach}"


def pays_from(served: Served) -> str:
    """Tokens of a prefix from which on loading it is faster than computing it; `≤` where none shorter was tried."""
    if served.break_even is None:
        return "never"
    return f"{'≤ ' * (served.break_even == served.loaded[0][0])}{served.break_even:,}"


# ---- drawings


@dataclass(frozen=True)
class Lanes:
    """One step: layers on the bus, layers in the model; `submitted` is when the host had described the load."""

    title: str
    loads: Spans
    computes: Spans
    submitted: float


def draw_steps(steps: Sequence[Lanes]) -> Figure:
    """Two lanes for each step, on one axis of time. Layers take turns in shade; hatched is the bus.

    Until the first layer is there, host and bus share a bar: nobody recorded where the one ends.
    """
    figure, axes = plt.subplots(len(steps), 1, figsize=(9.6, 1.15 * len(steps) + 0.9), sharex=True, squeeze=False)
    for ax, step in zip(axes[:, 0], steps, strict=True):
        (_, begin), *rest = step.loads
        ax.add_patch(Rectangle((0, 1), begin, 0.6, facecolor=book.OTHER, edgecolor="#444444", hatch="////", lw=0.4))
        _draw_spans(ax, 1, rest, "////")
        _draw_spans(ax, 0, step.computes, "")
        ax.plot([step.submitted] * 2, [-0.1, 1.7], color="#D55E00", lw=1.4, ls=":", marker="")
        ax.set(ylim=(-0.15, 1.75))
        ax.set_yticks([0.3, 1.3], ["model", "bus"])
        ax.tick_params(axis="y", length=0)
        ax.grid(axis="y", visible=False)
        ax.set_title(step.title, fontsize=9.5)
    axes[-1, 0].set_xlabel("milliseconds")
    axes[-1, 0].set_xlim(0, 1.02 * max(end for step in steps for _, end in step.computes))
    keys = [
        Rectangle((0, 0), 1, 1, facecolor=book.OTHER, edgecolor="#444444", hatch="////", lw=0.4),
        Rectangle((0, 0), 1, 1, facecolor=book.LAYER_COLOURS[1], edgecolor="#444444", hatch="////", lw=0.4),
        Rectangle((0, 0), 1, 1, facecolor=book.LAYER_COLOURS[1], edgecolor="#444444", lw=0.4),
        Line2D([], [], color="#D55E00", lw=1.4, ls=":", marker=""),
    ]
    names = ["until the first layer is there", "a layer is loaded", "a layer is computed", "the host has submitted"]
    figure.legend(keys, names, loc="outside lower center", ncols=4, fontsize=9)
    return figure


def _draw_spans(ax: Axes, y: int, spans: Spans, hatch: str) -> None:
    for layer, (begin, end) in enumerate(spans):
        shade, box = book.LAYER_COLOURS[1 + layer % 2], ((begin, y), end - begin, 0.6)
        ax.add_patch(Rectangle(*box, facecolor=shade, edgecolor="#444444", hatch=hatch, lw=0.4))


@dataclass(frozen=True)
class Mark:
    """A measured step: seconds of a layer in the model over seconds on the bus, and percent of the load hidden."""

    backend: str
    by_layer: bool
    ratio: float
    hidden: float


def draw_hidden(marks: Sequence[Mark], curve: Sequence[tuple[float, float]]) -> Figure:
    """Filled where layers arrive one by one; the curve is what the prediction allows."""
    figure, ax = plt.subplots(figsize=(9.0, 4.6))
    ax.plot(*zip(*curve, strict=True), color="#555555", lw=1.4, ls="-", marker="", label="predicted")
    ax.axvline(1, color="#555555", lw=0.8, ls=":", marker="")
    for mark in marks:
        colour, marker = BACKENDS[mark.backend]
        fill = colour if mark.by_layer else "none"
        y = max(mark.hidden, BELOW)
        ax.plot(mark.ratio, y, marker=marker, color=colour, mfc=fill, mew=1.3, ms=6, ls="")
    hidden = [mark.hidden for mark in marks if mark.hidden < BELOW]
    if hidden:
        text = f"↓ off the scale, drawn at its edge: {len(hidden)}, down to {min(hidden):.0f} %"
        ax.text(0.02, BELOW + 2, text, fontsize=8.5, va="bottom", transform=ax.get_yaxis_transform())
    ax.set_xscale("log")
    ax.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
    ax.set(xlabel="time to compute a layer ÷ time to load it", ylabel="% of the load that the step did not wait for")
    ax.set_ylim(max(BELOW, min([0, *(mark.hidden for mark in marks)])) - 6, 108)
    keys = [Line2D([], [], color=c, marker=m, ls="", ms=6, label=name) for name, (c, m) in BACKENDS.items()]
    keys.append(
        Line2D([], [], color="#555555", marker="o", mfc="none", ls="", label="open: all layers arrive together")
    )
    keys.append(Line2D([], [], color="#555555", marker="", ls="-", lw=1.4, label="predicted"))
    figure.legend(handles=keys, loc="outside lower center", ncols=6, fontsize=9)
    return figure


@dataclass(frozen=True)
class Curves:
    """(prefix tokens, milliseconds) of both ways to the first token; where loading begins to pay."""

    title: str
    loaded: Sequence[tuple[int, float]]
    recomputed: Sequence[tuple[int, float]]
    break_even: int | None


def draw_first_token(panels: Sequence[Curves]) -> Figure:
    """Both axes logarithmic: a straight gap is a factor."""
    columns = min(3, len(panels))
    lines = -(-len(panels) // columns)
    figure, axes = plt.subplots(lines, columns, figsize=(9.6, 2.7 * lines + 0.5), squeeze=False, sharey=True)
    for ax, panel in zip(axes.flat, panels, strict=False):
        for points, (colour, marker, line) in ((panel.recomputed, RECOMPUTED), (panel.loaded, LOADED)):
            ax.plot(*zip(*points, strict=True), color=colour, marker=marker, ls=line, mfc="none", mew=1.3)
        if panel.break_even:
            ax.axvline(panel.break_even, color="#D55E00", lw=1.2, ls=":", marker="")
        ax.set_xscale("log", base=2)
        ax.set_yscale("log")
        ax.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")
        ax.yaxis.set_major_formatter(lambda y, _: f"{y:g}")
        ax.minorticks_off()
        ax.set_title(panel.title, fontsize=9.5)
    for ax in axes.flat[len(panels) :]:
        ax.set_visible(False)
    for ax in axes[-1]:
        ax.set_xlabel("tokens of the prefix")
    for ax in axes[:, 0]:
        ax.set_ylabel("milliseconds")
    looks = (
        ("computed again", RECOMPUTED),
        ("loaded, the fastest way", LOADED),
        ("break-even", ("#D55E00", "", ":")),
    )
    keys = [Line2D([], [], color=c, marker=m, ls=line, mfc="none", label=name) for name, (c, m, line) in looks]
    figure.legend(handles=keys, loc="outside lower center", ncols=3, fontsize=9)
    return figure
