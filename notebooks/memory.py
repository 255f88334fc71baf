"""Notebook 01: what each word of a host pool's memory is, and drawings of pages and rows as they lie there."""

from __future__ import annotations

from collections.abc import Sequence

import book
import matplotlib.pyplot as plt
import numpy as np
import torch
from book import LAYER_COLOURS, OTHER
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import ConnectionPatch, Rectangle

from refimpl import DevicePool, HostPool, PoolSpec, oracle, presets, slots_of
from verify import fill

# ---- where bytes lie


def labelled(spec: PoolSpec, layout: str, num_pages: int) -> HostPool:
    """A host pool whose every word names its place, put there by the oracle."""
    device, host = DevicePool(spec, num_pages), HostPool(spec, layout, num_pages)
    fill.fill_device(device)
    slots = slots_of(list(range(num_pages)), spec.page_size)
    oracle.backup(host, device, slots, slots)
    return host


def places(host: HostPool) -> list[list[fill.Place | None]]:
    """What each word of each host tensor says of itself, read from raw memory."""
    return [
        [fill.place(host.spec, host.num_pages, fill.number(word)) for word in memory.reshape(-1, fill.WORD)]
        for memory in book.raw(host)
    ]


def ranges(wanted: np.ndarray) -> list[tuple[int, int]]:
    """`(first, length)` of each range of true values."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], np.asarray(wanted, np.int8), [0]))))
    return [(int(a), int(b - a)) for a, b in edges.reshape(-1, 2)]


def marked_ranges(
    spec: PoolSpec,
    layout: str,
    components: Sequence[str],
    layers: slice = slice(None),
    tokens: slice = slice(None),
    heads: slice = slice(None),
    lanes: slice = slice(None),
    scale: int = 1,
) -> list[int]:
    """Lengths in bytes of the contiguous ranges that a selection of page 1 (of 3) takes in host memory.

    The selection is marked on the device, the oracle backs it up, and raw host memory is searched for marks. A byte
    of the pool stands for `scale` bytes, so that a real geometry can be looked at in a small pool.
    """
    device, host = DevicePool(spec, 3), HostPool(spec, layout, 3)
    for component in components:
        for layer in spec.layers_of(spec.component(component))[layers]:
            device.view(component, layer)[1].flatten(1, 2)[tokens, heads, lanes].view(torch.uint8).fill_(1)
    slots = slots_of([0, 1, 2], spec.page_size)
    oracle.backup(host, device, slots, slots)
    return [length * scale for memory in book.raw(host) for _, length in ranges(memory == 1)]


def counted(lengths: Sequence[int]) -> str:
    """`4 × 8 B` for four ranges of eight bytes."""
    return " + ".join(f"{lengths.count(n):,} × {book.size(n)}" for n in sorted(set(lengths), reverse=True))


# ---- drawings


def draw_page(host: HostPool, page: int, line: int) -> Figure:
    """Host memory, `line` words to a line, each tensor by itself; the words of one page say what they are."""
    held = places(host)
    lines = [-(-len(words) // line) for words in held]
    figure, axes = plt.subplots(
        len(held), 1, squeeze=False, figsize=(9.6, 0.44 * sum(lines) + 0.75 * len(held) + 0.35), height_ratios=lines
    )
    for tensor, (ax, words) in enumerate(zip(axes[:, 0], held, strict=True)):
        mine = np.array([place is not None and place.page == page for place in words])
        for at, place in enumerate(words):
            _draw_word(ax, at % line, at // line, place if mine[at] else None)
        for first, length in ranges(mine):
            _frame(ax, first, first + length, line)
        name = f" (tensor {tensor + 1} of {len(held)})" if len(held) > 1 else ""
        found = counted([length * fill.WORD for _, length in ranges(mine)])
        ax.set_title(f"{host.layout}{name}: page {page} is {found}", fontsize=10)
        _memory_axes(ax, line, lines[tensor])
    axes[-1, 0].set_xlabel("byte within the line", fontsize=8)
    return figure


def draw_overview() -> Figure:
    """The README's picture: page 1 of a pool of two pages, in one strip of memory for each layout that MHA has."""
    tiny = presets.mha(layers=2, heads=2, head_dim=4, dtype=torch.uint8, page_size=2)
    layouts = book.allowed_layouts(tiny)
    figure, axes = plt.subplots(len(layouts), 1, figsize=(12.8, 0.86 * len(layouts)))
    for ax, layout in zip(axes, layouts, strict=True):
        (words,) = places(labelled(tiny, layout, 2))
        mine = np.array([place is not None and place.page == 1 for place in words])
        for at, place in enumerate(words):
            _draw_word(ax, at, 0, place if mine[at] else None)
        for first, length in ranges(mine):
            _frame(ax, first, first + length, len(words))
        ax.set(xlim=(0, len(words)), ylim=(1, 0), xticks=[], yticks=[])
        ax.grid(False)
        ax.spines[:].set_visible(False)
        ax.set_title(f"{layout}: {counted([length * fill.WORD for _, length in ranges(mine)])}", fontsize=10)
    return figure


def _draw_word(ax: Axes, x: int, y: int, place: fill.Place | None) -> None:
    colour = OTHER if place is None else LAYER_COLOURS[place.layer]
    ax.add_patch(Rectangle((x, y), 1, 1, facecolor=colour, edgecolor="#999999", lw=0.5))
    if place is None:
        return
    if place.component == "v":
        ax.add_patch(Rectangle((x, y + 0.8), 1, 0.2, facecolor="white", edgecolor="#444444", lw=0.4, hatch="//////"))
    kind = {"k": "K", "v": "V"}.get(place.component, "")
    last = f"h{place.head}" if kind else f"w{place.word}"
    ax.text(x + 0.5, y + 0.4, f"L{place.layer} {kind}\nt{place.token} {last}", ha="center", va="center", fontsize=6.4)


def _frame(ax: Axes, first: int, end: int, line: int) -> None:
    """A thick line around a range of words; open where the range goes on in the next line."""
    thick = {"color": "black", "lw": 2.4, "ls": "-", "marker": "", "clip_on": False, "solid_capstyle": "projecting"}
    for at in range(first, end):
        y, x = divmod(at, line)
        if at - line < first:
            ax.plot((x, x + 1), (y, y), **thick)
        if at + line >= end:
            ax.plot((x, x + 1), (y + 1, y + 1), **thick)
        for edge, x_edge in ((first, x), (end - 1, x + 1)):
            if at == edge:
                ax.plot((x_edge, x_edge), (y, y + 1), **thick)


def _memory_axes(ax: Axes, line: int, lines: int) -> None:
    ax.set(xlim=(0, line), ylim=(lines, 0))
    ax.grid(False)
    ax.spines[:].set_visible(False)
    step = 4 if line % 4 == 0 else 3
    ax.set_xticks(range(0, line + 1, step), [str(x * fill.WORD) for x in range(0, line + 1, step)], fontsize=8)
    ax.set_yticks([y + 0.5 for y in range(lines)], [str(y * line * fill.WORD) for y in range(lines)], fontsize=8)
    ax.set_ylabel("line's first byte", fontsize=8)
    ax.tick_params(length=2)


def draw_key() -> Figure:
    """How to read `draw_page`."""
    figure, ax = plt.subplots(figsize=(9.6, 0.75))
    ax.set(xlim=(0, 24), ylim=(1.05, -0.05))
    ax.axis("off")
    samples = [
        (fill.Place("k", 0, 1, 2, 1, 0), "layer 0, K,\ntoken 2, head 1"),
        (fill.Place("k", 1, 1, 0, 0, 0), "layer 1, K"),
        (fill.Place("k", 2, 1, 0, 0, 0), "layer 2, K"),
        (fill.Place("v", 0, 1, 0, 0, 0), "hatched foot:\nV instead of K"),
        (None, "another page"),
    ]
    for i, (place, text) in enumerate(samples):
        x = (0, 5.2, 9.2, 13.2, 18)[i]
        _draw_word(ax, x, 0, place)
        ax.text(x + 1.2, 0.5, text, va="center", fontsize=8.5)
    return figure


def draw_row(spec: PoolSpec, entry_ranges: Sequence[tuple[int, int]], zoom: int) -> Figure:
    """A page row and its segments, to scale, and its last `zoom` bytes enlarged; `entry_ranges` are filled."""
    (row,) = spec.components
    segments, padding = row.segments, row.row_bytes - sum(s.entries * s.bytes for s in row.segments)
    figure, (top, bottom) = plt.subplots(2, 1, figsize=(9.6, 3.8))
    for ax, first in ((top, 0), (bottom, row.row_bytes - zoom)):
        begin = 0
        for segment, colour in zip(segments, LAYER_COLOURS, strict=False):
            edges = {"edgecolor": "#777777", "lw": 0.4 if segment.bytes > (row.row_bytes - first) / 300 else 0}
            for x in range(begin, begin + segment.entries * segment.bytes, segment.bytes):
                ax.add_patch(Rectangle((x, 0), segment.bytes, 1, facecolor=colour, **edges))
            begin += segment.entries * segment.bytes
        ax.add_patch(
            Rectangle((begin, 0), padding, 1, facecolor="white", hatch="xxx" if ax is bottom else "", lw=0.6)
        )
        for x, length in entry_ranges:
            ax.add_patch(Rectangle((x, 0), length, 1, facecolor="black", lw=0))
        ax.add_patch(Rectangle((0, 0), row.row_bytes, 1, fill=False, lw=1.2))
        ax.set(xlim=(first, row.row_bytes), ylim=(-0.02, 1.02), yticks=[])
        ax.spines[:].set_visible(False)
        ax.grid(False)
        ax.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")
    figure.get_layout_engine().set(hspace=0.14)
    top.xaxis.tick_top()
    top.set_title(
        f"{spec.name}: one page row of {row.row_bytes:,} B, above, and the last {zoom:,} B of it", fontsize=10
    )
    bottom.set_xlabel("byte of the row", fontsize=9)
    for x in (row.row_bytes - zoom, row.row_bytes):
        ends = {"xyA": (x, 0), "coordsA": top.transData, "xyB": (x, 1), "coordsB": bottom.transData}
        figure.add_artist(ConnectionPatch(**ends, color="#555555", ls=":", lw=1))
    looks = [(LAYER_COLOURS[0], ""), (LAYER_COLOURS[1], ""), ("white", "xxx"), ("black", "")]
    shapes = [Rectangle((0, 0), 1, 1, facecolor=c, edgecolor="#777777", lw=0.6, hatch=h) for c, h in looks]
    values, scales = (f"{s.entries} × {s.bytes} B" for s in segments)
    names = [f"values, {values}", f"scales, {scales}", f"padding, {padding} B", "one entry: a value and its scale"]
    figure.legend(shapes, names, ncols=4, loc="outside lower center")
    return figure


if __name__ == "__main__":
    draw_overview().savefig(book.HERE / "figures/layouts.svg", metadata={"Date": None, "Creator": None})
