"""Notebook 06: which rows of a memory are right after a transfer, and which are wrong."""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

STATES = {  # of a row: fill, hatch
    "right": ("#A9D8F2", ""),
    "wrong": ("#DE9B72", "xxx"),
    "not asked for": ("#FFFFFF", ""),
}


def draw_states(rows: dict[str, list[tuple[str, str]]], columns: Sequence[str], title: str) -> Figure:
    """A line for each name: boxes for states (of `STATES`), each with a label."""
    figure, ax = plt.subplots(figsize=(0.78 * len(columns) + 1.2, 0.42 * len(rows) + 1.3))
    for y, line in enumerate(rows.values()):
        for x, (state, label) in enumerate(line):
            fill_colour, hatch = STATES[state]
            ax.add_patch(Rectangle((x, y), 1, 1, facecolor=fill_colour, hatch=hatch, edgecolor="#555555", lw=0.8))
            box = {"facecolor": "white", "edgecolor": "none", "pad": 1.5} if hatch else None
            ax.text(x + 0.5, y + 0.5, label, ha="center", va="center", fontsize=9, bbox=box)
    ax.set(xlim=(0, len(columns)), ylim=(len(rows), 0))
    ax.set_xticks([x + 0.5 for x in range(len(columns))], columns, fontsize=8)
    ax.set_yticks([y + 0.5 for y in range(len(rows))], list(rows))
    ax.tick_params(length=0)
    ax.grid(False)
    ax.spines[:].set_visible(False)
    ax.set_title(title, fontsize=10)
    keys = [Rectangle((0, 0), 1, 1, facecolor=f, hatch=h, edgecolor="#555555") for f, h in STATES.values()]
    figure.legend(keys, list(STATES), loc="outside lower center", ncols=len(STATES), fontsize=9)
    return figure
