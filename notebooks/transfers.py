"""Notebook 02: what a plan says, the runs that it makes of a page, and which words of a fill tell layers apart."""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib.pyplot as plt
import numpy as np
from book import LAYER_COLOURS, OTHER, as_bytes, as_count, plan_of, tensors
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Polygon, Rectangle

from refimpl import LAYOUTS, DevicePool, HostPool, PoolSpec, plan
from refimpl.plan import Move, Plan

MARKERS = dict(zip(LAYOUTS, ("o", "s", "^", "D", "v", "x"), strict=True))
COLOURS = dict(zip(LAYOUTS, ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00"), strict=True))


# ---- plans and runs


def show_move(move: Move) -> None:
    """A move as the loop nest that a backend runs."""
    print(f"{move.component}:  for each of {len(move.layers)} layers (a table of {len(move.layers)} starts a side)")
    print(f"  for each page:       host += {move.host.page:,} B   device += {move.device.page:,} B")
    for depth, loop in enumerate(move.loops):
        indent = "  " * (depth + 2)
        print(f"{indent}for {loop.count} steps:".ljust(22), f"host += {loop.host:,} B   device += {loop.device:,} B")
    print("  " * (len(move.loops) + 2) + f"copy {move.run:,} B")


def run_facts(spec: PoolSpec, layout: str) -> dict[str, tuple[list[int], int]]:
    """Component -> run bytes of its moves, and runs that one page takes over all layers."""
    facts: dict[str, tuple[list[int], int]] = {}
    for move in plan_of(spec, layout).moves:
        runs, count = facts.get(move.component, ([], 0))
        facts[move.component] = ([*runs, move.run], count + move.runs_per_item * len(move.layers))
    return facts


def runs_of(
    spec: PoolSpec, layout: str, component: str, layer: int, page: int
) -> tuple[np.ndarray, np.ndarray, int, int, int]:
    """The runs of one layer of a page, in pools of two pages whose component lies in one host tensor.

    First bytes on the host and on the device, bytes of each run, then the bytes of the host tensor and of the device
    buffer that these offsets count in.
    """
    host, device = HostPool(spec, layout, 2), DevicePool(spec, 2)
    of_component = Plan(tuple(move for move in plan(host, device).moves if move.component == component))
    ((to, source, run),) = of_component.runs(np.array([page]), np.array([page]), (layer,))
    (memory,), buffer = tensors(host), device.buffer(component, layer)
    return to - memory.data_ptr(), source - buffer.data_ptr(), run, memory.nbytes, buffer.nbytes


# ---- drawings


def draw_runs(spec: PoolSpec, layouts: Sequence[str], component: str, layer: int, page: int) -> Figure:
    """The runs of one layer of one page: from its device buffer (above) to host memory (below), layout by layout."""
    figure, axes = plt.subplots(len(layouts), 1, figsize=(9.6, 1.5 * len(layouts)), sharex=True)
    for ax, layout in zip(axes, layouts, strict=True):
        to, source, run, host_bytes, device_bytes = runs_of(spec, layout, component, layer, page)
        _strip(ax, 2.2, device_bytes)
        _strip(ax, 0, host_bytes)
        for number, (a, b) in enumerate(zip(to.tolist(), source.tolist(), strict=True)):
            look = {"facecolor": LAYER_COLOURS[1 + number % 2], "edgecolor": "black", "lw": 0.7}
            ax.add_patch(Rectangle((a, 0), run, 0.6, **look))
            ax.add_patch(Rectangle((b, 2.2), run, 0.6, **look))
            corners = [(a, 0.6), (a + run, 0.6), (b + run, 2.2), (b, 2.2)]
            ax.add_patch(Polygon(corners, facecolor=look["facecolor"], edgecolor="#555555", lw=0.3, alpha=0.45))
        ax.set_title(f"{layout}: {len(to)} × {run} B", fontsize=10)
        ax.set(ylim=(-0.15, 2.95), yticks=[0.3, 2.5], yticklabels=["host", "device"])
        ax.spines[:].set_visible(False)
        ax.grid(False)
    for ax in axes[:-1]:
        ax.tick_params(axis="x", length=0)
    axes[-1].set_xlabel("byte of the buffer", fontsize=9)
    return figure


def _strip(ax: Axes, y: float, nbytes: int) -> None:
    ax.add_patch(Rectangle((0, y), nbytes, 0.6, facecolor=OTHER, edgecolor="#777777", lw=0.6))
    ax.set_xlim(-2, max(ax.get_xlim()[1], nbytes + 2))


def draw_dots(labels: Sequence[str], panels: dict[str, list[list[tuple[str, int]]]]) -> Figure:
    """One band per label; in it one line per layout, a mark for each of its values, on a log scale per panel."""
    figure, axes = plt.subplots(1, len(panels), figsize=(9.6, 0.7 * len(labels) + 1.3), sharey=True)
    for ax, (unit, bands) in zip(axes, panels.items(), strict=True):
        for band, marks in enumerate(bands):
            for layout, value in marks:
                y = band + (LAYOUTS.index(layout) - 2.5) / 6.8
                ax.plot(value, y, marker=MARKERS[layout], color=COLOURS[layout], ls="", ms=5, mew=1.3)
            if band:
                ax.axhline(band - 0.5, color="#888888", lw=0.6)
        ax.set(xscale="log", xlabel=unit, ylim=(len(labels) - 0.5, -0.5))
        ax.set_xscale("log", base=2)
        ax.xaxis.set_major_formatter(as_bytes if "byte" in unit else as_count)
        ax.set_yticks(range(len(labels)), labels)
        ax.grid(axis="y", visible=False)
        ax.tick_params(axis="y", length=0)
        ax.tick_params(axis="x", labelsize=8)
    shown = sorted({layout for bands in panels.values() for marks in bands for layout, _ in marks}, key=LAYOUTS.index)
    keys = [Line2D([], [], marker=MARKERS[n], color=COLOURS[n], ls="", ms=5, mew=1.3, label=n) for n in shown]
    figure.legend(handles=keys, ncols=6, loc="outside lower center", fontsize=9, columnspacing=1.2, handletextpad=0.2)
    return figure


def draw_shares(blocks: np.ndarray, shares: dict[str, list[float]], compared: tuple[int, int]) -> Figure:
    """Percentage of words in each block, from the end of the one before; and the words that were compared."""
    figure, ax = plt.subplots(figsize=(8, 3.6))
    for (name, share), width in zip(shares.items(), (2.6, 1.8), strict=True):
        ax.plot(blocks, share, drawstyle="steps-pre", marker="", lw=width, label=f"tell {name}")
    ax.axvspan(
        *compared,
        facecolor="#EEEEEE",
        edgecolor="#999999",
        hatch="//",
        lw=0.5,
        label="words compared, in rows of any width",
        zorder=0,
    )
    ax.set_xscale("log", base=2)
    ax.set_xticks(blocks[::2], [f"{n:,}" for n in blocks[::2]], fontsize=8)
    ax.minorticks_off()
    ax.set(xlabel="word of the buffer", ylabel="words that differ, %")
    ax.legend(loc="lower left")
    return figure
