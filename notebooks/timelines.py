"""Notebook 07: what a device was told as a timeline: each operation begins as soon as streams and events allow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import matplotlib.pyplot as plt
from book import LAYER_COLOURS, OTHER
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from tracing import Told

from refimpl.runtime import Stream

LENGTHS = {"upload": 0.6, "launch": 1.0, "copy": 1.7}  # as drawn; no measure of time


@dataclass(frozen=True)
class Box:
    """Work in a timeline: `number` counts what this stream was told of the kind."""

    what: str
    stream: Stream
    number: int
    begin: float
    end: float


@dataclass(frozen=True)
class Arrow:
    """An event: from the work before it to the work that waits for it."""

    source: Box
    to: Box


def timeline(told: Sequence[Told]) -> tuple[list[Box], list[Arrow]]:
    """Every operation as soon as its stream and the events it waits for let it begin."""
    boxes: list[Box] = []
    arrows: list[Arrow] = []
    last: dict[Stream, Box] = {}
    passed: dict[int, Box | None] = {}
    waiting: dict[Stream, list[Box]] = {}
    for one in told:
        if one.what == "record":
            passed[id(one.event)] = last.get(one.stream)
        elif one.what == "wait":
            before = passed.get(id(one.event))
            if before is not None:
                waiting.setdefault(one.stream, []).append(before)
        else:
            after = waiting.pop(one.stream, [])
            ready = [box.end for box in (*after, *filter(None, [last.get(one.stream)]))]
            begin = max(ready, default=0.0) + 0.35 * bool(ready)
            number = sum(box.what == one.what for box in boxes)
            box = Box(one.what, one.stream, number, begin, begin + LENGTHS[one.what])
            arrows += [Arrow(source, box) for source in after if source.stream != one.stream]
            boxes.append(box)
            last[one.stream] = box
    return boxes, arrows


def draw_timelines(of: dict[str, Sequence[Told]], halves: int = 2) -> Figure:
    """One panel for each transfer: a lane for each stream, boxes for work, arrows for events between streams."""
    figure, axes = plt.subplots(len(of), 1, figsize=(9.6, 2.0 * len(of) + 0.5), sharex=True)
    for ax, (title, told) in zip(axes, of.items(), strict=True):
        boxes, arrows = timeline(told)
        lanes = {box.stream: float(box.stream == "default") for box in boxes}
        for box in boxes:
            y, half = lanes[box.stream], box.number % halves
            look = {"facecolor": OTHER} if box.what == "upload" else {"facecolor": LAYER_COLOURS[1 + half]}
            ax.add_patch(Rectangle((box.begin, y), box.end - box.begin, 0.5, edgecolor="#444444", lw=0.8, **look))
            verb = {"launch": "gather" if title.startswith("backup") else "scatter", "upload": "list"}
            name = verb.get(box.what, box.what) + ("" if box.what == "upload" else f"\nchunk {box.number}")
            ax.text((box.begin + box.end) / 2, y + 0.25, name, ha="center", va="center", fontsize=7.5)
        for arrow in arrows:
            down = lanes[arrow.source.stream] > lanes[arrow.to.stream]
            tail = arrow.source.end, lanes[arrow.source.stream] + (0 if down else 0.5)
            head = arrow.to.begin, lanes[arrow.to.stream] + (0.5 if down else 0)
            reuse = arrow.to.number - arrow.source.number == halves
            look = {"color": "#D55E00", "lw": 2.0} if reuse else {"color": "#000000", "lw": 1.0}
            ax.annotate("", head, tail, arrowprops={"arrowstyle": "->", "shrinkA": 0, "shrinkB": 0, **look})
        ax.set(ylim=(-0.15, 1.65), xticks=[], xlim=(-0.1, None))
        ax.set_yticks([0.25, 1.25], ["stream beside it:\ncopies", "caller's stream:\nkernels"])
        ax.tick_params(length=0)
        ax.grid(False)
        ax.spines[:].set_visible(False)
        ax.set_title(title, fontsize=10)
    axes[0].set_xlim(-0.1, max(box.end for told in of.values() for box in timeline(told)[0]) + 0.1)
    keys = [
        *(Rectangle((0, 0), 1, 1, facecolor=LAYER_COLOURS[1 + half], edgecolor="#444444") for half in range(halves)),
        Line2D([], [], color="#000000", lw=1, marker=">", ms=4),
        Line2D([], [], color="#D55E00", lw=2, marker=">", ms=4),
    ]
    names = ["first half", "second half", "event: what came before is done", "event: the half is free again"]
    figure.legend(keys, names, loc="outside lower center", ncols=4, fontsize=9)
    return figure
