"""Tables and drawings that the notebooks share. What is drawn is read from real pools; nothing is decided here."""

from __future__ import annotations

import ctypes
import hashlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from unittest.mock import patch

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent))  # a checkout works without being installed

import matplotlib.pyplot as plt  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
from IPython.display import Markdown, display  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402
from matplotlib.lines import Line2D  # noqa: E402
from matplotlib.patches import ConnectionPatch, Polygon, Rectangle  # noqa: E402

from refimpl import LAYOUTS, DevicePool, HostPool, PoolSpec, oracle, plan, presets, slots_of, support  # noqa: E402
from refimpl.device_pool import row_shape  # noqa: E402
from refimpl.emulated import QueueRuntime  # noqa: E402
from refimpl.plan import Move, Plan  # noqa: E402
from refimpl.runtime import Event, Stream  # noqa: E402
from refimpl.support import BACKENDS, DIRECTIONS  # noqa: E402
from verify import fill  # noqa: E402

plt.style.use(HERE / "kv.mplstyle")

PLATFORMS = {"cpu": "CPU", "cuda": "GPU", "emulated": "emulated GPU"}
# Light enough for black text, and apart from one another in grey too.
LAYER_COLOURS = ("#FFF7D6", "#A9D8F2", "#DE9B72")
OTHER = "#F4F4F4"
# Layout names as headings of narrow columns.
HEADINGS = {name: name.replace("page_first_", "page_first\n_") for name in LAYOUTS}
MARKERS = dict(zip(LAYOUTS, ("o", "s", "^", "D", "v", "x"), strict=True))
COLOURS = dict(zip(LAYOUTS, ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00"), strict=True))


# ---- text


def say(*paragraphs: str) -> None:
    """Show sentences as Markdown, which a page breaks between words; `1. …` and `- …` are items of lists."""
    display(Markdown("\n\n".join(paragraphs)))


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table, numbers with separators and to the right. Headings and cells may have several lines."""
    stacked = [name.split("\n") for name in header]
    height = max(map(len, stacked))
    heads = [["", *[""] * (height - len(lines) - 1), *lines][-height:] for lines in stacked]
    text = [line for row in rows for line in _lines(row)]
    right = [all(isinstance(row[i], int) for row in rows) for i in range(len(header))]
    columns = [[*head, *(line[i] for line in text)] for i, head in enumerate(heads)]
    widths = [max(map(len, column)) for column in columns]
    for number, line in enumerate(zip(*columns, strict=True)):
        if number == height:
            print("  ".join("-" * w for w in widths))
        print(
            "  ".join(c.rjust(w) if r else c.ljust(w) for c, w, r in zip(line, widths, right, strict=True)).rstrip()
        )


def _lines(row: Sequence[object]) -> Iterator[tuple[str, ...]]:
    """A row of a table, line by line."""
    cells = [f"{cell:,}" if isinstance(cell, int) else str(cell) for cell in row]
    return zip_longest(*(cell.split("\n") for cell in cells), fillvalue="")


def size(nbytes: int) -> str:
    """Exact bytes for a reader: `960 B`, `2 KiB`, `1.5 MiB`, but `37,440 B`."""
    for unit, step in (("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= step and nbytes * 10 % step == 0:
            return f"{nbytes / step:,.1f}".removesuffix(".0") + f" {unit}"
    return f"{nbytes:,} B"


def digest(*arrays: np.ndarray | torch.Tensor | Sequence[object]) -> str:
    """Twelve hex digits of the SHA-256 of all bytes, in order. Pictures are not compared by CI; this is."""
    sha = hashlib.sha256()
    for array in arrays:
        if isinstance(array, torch.Tensor):
            array = array.contiguous().reshape(-1).view(torch.uint8).numpy()
        sha.update(array.tobytes() if isinstance(array, np.ndarray) else repr(array).encode())
    return sha.hexdigest()[:12]


def tensors(host: HostPool) -> list[torch.Tensor]:
    """Every host tensor, in storage order, as upstream shapes it."""
    held = host.kv_buffer
    return held if isinstance(held, list) else [held]


def raw(host: HostPool) -> list[np.ndarray]:
    """The bytes of every host tensor, in memory order."""
    return [t.reshape(-1).view(torch.uint8).numpy() for t in tensors(host)]


def layers(pool: DevicePool) -> Iterator[tuple[str, int | None]]:
    """Component and layer of every buffer of a device pool (layer None: a side state)."""
    return ((c.name, layer) for c in pool.spec.components for layer in pool.spec.layers_of(c))


def differing(a: HostPool, b: HostPool) -> int:
    """Bytes of host memory in which two pools of one layout differ."""
    return sum(int((x != y).sum()) for x, y in zip(raw(a), raw(b), strict=True))


def page_digest(pool: HostPool, pages: Sequence[int]) -> str:
    """Checksum of pages in their canonical form, which no layout changes."""
    return digest(*(rows for page in pages for rows in pool.page(int(page)).values()))


# ---- the support table


def support_rows(spec: PoolSpec, profile: str = "reference") -> tuple[list[list[str]], dict[str, str]]:
    """Layout × backend: the platforms on which both directions work, or the letter of a reason; and the reasons."""
    letters: dict[str, str] = {}
    rows = []
    for layout in LAYOUTS:
        row = [layout]
        for backend, reach in BACKENDS.items():
            answers = {p: [support(spec, layout, backend, d, p, profile) for d in DIRECTIONS] for p in reach}
            allowed = [PLATFORMS[p] for p, both in answers.items() if all(both)]
            refused = [a.reason for both in answers.values() for a in both if not a]
            if not allowed:
                letters.setdefault(refused[0], f"({chr(ord('a') + len(letters))})")
            row.append(" ".join(allowed) or letters[refused[0]])
        rows.append(row)
    return rows, {letter: reason for reason, letter in letters.items()}


def show_support(specs: dict[str, PoolSpec]) -> None:
    """The table of every pool, pools with equal tables together; reasons in the words of the first of them."""
    alike: dict[str, list[str]] = {}
    for name, spec in specs.items():
        alike.setdefault(repr(support_rows(spec)[0]), []).append(name)
    for names in alike.values():
        rows, reasons = support_rows(specs[names[0]])
        print(f"pool {', '.join(names)}\n")
        table(["layout", *BACKENDS], rows)
        for letter, reason in reasons.items():
            print(f"{letter} {reason}")
        print()


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
        for memory in raw(host)
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
    return [length * scale for memory in raw(host) for _, length in ranges(memory == 1)]


def counted(lengths: Sequence[int]) -> str:
    """`4 × 8 B` for four ranges of eight bytes."""
    return " + ".join(f"{lengths.count(n):,} × {size(n)}" for n in sorted(set(lengths), reverse=True))


# ---- plans


def plan_of(spec: PoolSpec, layout: str, single_entries: bool = False) -> Plan:
    """The plan between two pools of one page. No byte of either is touched, so real models cost no memory."""
    buffers = {
        c.name: [torch.empty(spec.tokens_per_page(c), *row_shape(c), dtype=c.dtype) for _ in spec.layers_of(c)]
        for c in spec.components
    }
    return plan(HostPool(spec, layout, 1), DevicePool.wrap(spec, buffers), single_entries)


def allowed_layouts(spec: PoolSpec) -> list[str]:
    return [layout for layout in LAYOUTS if support(spec, layout, "torch", "backup")]


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
    layouts = allowed_layouts(tiny)
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


def _as_bytes(x: float, _: object) -> str:
    return size(int(x))


def as_count(x: float, _: object) -> str:
    return f"{x:,.0f}"


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
        ax.xaxis.set_major_formatter(_as_bytes if "byte" in unit else as_count)
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


# ---- what a device is told


@dataclass(frozen=True)
class Told:
    """Something that was submitted.

    what    "upload", "launch", "copy", "record" or "wait"
    detail  the kernel and its blocks, or the number of copies
    event   that is recorded or waited for
    """

    what: str
    stream: Stream
    detail: str = ""
    event: Event | None = None


@dataclass(frozen=True)
class Moved:
    """Bytes that one run or one descriptor took from address to address; `by` "kernel" or "copy engine"."""

    by: str
    to: int
    source: int
    nbytes: int


class NotingDevice(QueueRuntime):
    """An emulated device that notes what it is told (when it is told) and what it moves (when it does)."""

    def __init__(self, seed: int = 0) -> None:
        from kernels_cupy import emu

        def launch(kernel: str, blocks: int, threads: int, arguments: np.ndarray) -> None:
            if kernel.startswith("copy_runs"):
                self.moved += [Moved("kernel", *run) for run in runs_of_launch(arguments)]
            emu.launch(kernel, blocks, threads, arguments)

        super().__init__(launch, seed=seed)
        self.told: list[Told] = []
        self.moved: list[Moved] = []

    def pool(self, spec: PoolSpec, layout: str, num_pages: int, backend: str, **more: int) -> HostPool:
        """A host pool whose backend works with this device."""
        with patch("kernels_cupy.runtimes.emulated", lambda number: self):
            return HostPool(spec, layout, num_pages, backend, platform="emulated", **more)

    def upload(self, array: np.ndarray) -> torch.Tensor:
        self.told.append(Told("upload", self.current(), f"{array.nbytes} B"))
        return super().upload(array)

    def launch(self, stream: Stream, kernel: str, blocks: int, arguments: np.ndarray) -> None:
        self.told.append(Told("launch", stream, f"{kernel}, {blocks} blocks"))
        super().launch(stream, kernel, blocks, arguments)

    def copy(
        self, stream: Stream, to: np.ndarray, source: np.ndarray, nbytes: np.ndarray, *options: str, **named: str
    ) -> str:
        self.told.append(Told("copy", stream, f"{len(nbytes)} descriptors"))
        copies = zip(to.tolist(), source.tolist(), nbytes.tolist(), strict=True)
        self.moved += [Moved("copy engine", *copy) for copy in copies]
        return super().copy(stream, to, source, nbytes, *options, **named)

    def record(self, stream: Stream, timed: bool = False) -> Event:
        event = super().record(stream, timed)
        self.told.append(Told("record", stream, event=event))
        return event

    def wait(self, stream: Stream, event: Event) -> None:
        self.told.append(Told("wait", stream, event=event))
        super().wait(stream, event)


def runs_of_launch(arguments: np.ndarray) -> Iterator[tuple[int, int, int]]:
    """Destination, source and bytes of every run of a `CopyRuns` struct; its lists of items must be there by now."""

    def address(side: np.ndarray, start: int, item: int, loops: tuple[int, ...]) -> int:
        listed = int(side["items"])
        number = ctypes.c_int64.from_address(listed + 8 * item).value if listed else item
        page, entry = divmod(number, int(side["entries"]))
        within = sum(i * int(step) for i, step in zip(loops, side["steps"], strict=True))
        return int(side["starts"][start]) + page * int(side["page"]) + entry * int(side["entry_bytes"]) + within

    counts = int(arguments["starts"]), int(arguments["items"]), *arguments["counts"].tolist()
    for start, item, *loops in np.ndindex(*counts):
        to, source = (address(arguments[side], start, item, tuple(loops)) for side in ("to", "source"))
        yield to, source, int(arguments["run"])


@dataclass(frozen=True)
class Strip:
    """A stretch of memory in a picture: `x` is where its first byte is drawn."""

    lane: str
    name: str
    memory: np.ndarray
    x: float

    @property
    def address(self) -> int:
        return self.memory.ctypes.data


def strips(host: HostPool, device: DevicePool, staging: torch.Tensor | None = None) -> list[Strip]:
    """Device buffers side by side, and the host tensor and staging memory centred below them."""
    found, x = [], 0.0
    for component, layer in layers(device):
        buffer = device.buffer(component, layer).reshape(-1).view(torch.uint8).numpy()
        found.append(Strip("pool", f"{component.upper()}, layer {layer}", buffer, x))
        x += len(buffer) + 8
    middle = (x - 8) / 2
    for lane, held in (("staging", [] if staging is None else [staging.numpy()]), ("host", raw(host))):
        found += [Strip(lane, "", memory, middle - len(memory) / 2) for memory in held]
    return found


@dataclass(frozen=True)
class Piece:
    """What moved, by byte `to` of strip number `to_strip` and so on."""

    by: str
    to_strip: int
    to: int
    source_strip: int
    source: int
    nbytes: int


def pieces(found: Sequence[Strip], moved: Sequence[Moved]) -> list[Piece]:
    """The same with places in strips for addresses."""

    def at(address: int) -> tuple[int, int]:
        return next((n, address - s.address) for n, s in enumerate(found) if 0 <= address - s.address < len(s.memory))

    return [Piece(move.by, *at(move.to), *at(move.source), move.nbytes) for move in moved]


def draw_way(title: str, pool: DevicePool, page: int, found: Sequence[Strip], moved: Sequence[Piece]) -> Figure:
    """Memory and what moved in it. A word that names a place in `page` is coloured by its layer."""
    lanes = [lane for lane in ("host", "staging", "pool") if any(s.lane == lane for s in found)]
    heights = {"host": 0.0, "staging": 2.0, "pool": 2.0 * (len(lanes) - 1)}
    looks = {"copy engine": {"facecolor": "#E3E3E3", "hatch": "//"}, "kernel": {"facecolor": "#FBEBD3"}}
    figure, ax = plt.subplots(figsize=(9.6, 0.9 + 0.85 * len(lanes)))
    for piece in moved:
        ends = (found[piece.to_strip], piece.to), (found[piece.source_strip], piece.source)
        (low, below), (high, above) = sorted((heights[strip.lane], strip.x + first) for strip, first in ends)
        corners = [(below, low + 0.7), (below + piece.nbytes, low + 0.7), (above + piece.nbytes, high), (above, high)]
        ax.add_patch(Polygon(corners, edgecolor="#555555", lw=0.6, alpha=0.75, **looks[piece.by]))
    for strip in found:
        y = heights[strip.lane]
        for at, word in enumerate(strip.memory.reshape(-1, fill.WORD)):
            number = fill.number(word)
            place = None if number is None else fill.place(pool.spec, pool.num_pages, number)
            _draw_small_word(ax, strip.x + at * fill.WORD, y, place if place and place.page == page else None)
        ax.text(strip.x + len(strip.memory) / 2, y + 0.76, strip.name, ha="center", va="bottom", fontsize=7.5)
    right = max(s.x + len(s.memory) for s in found)
    ax.axhline(1.62, color="#777777", lw=1, ls=(0, (6, 4)), marker="")
    ax.text(right + 1, 1.66, "the bus", fontsize=8, va="bottom", ha="right", color="#555555")
    ax.set(xlim=(-1, right + 1), ylim=(-0.1, heights["pool"] + 1.05), xticks=[])
    ax.set_yticks([heights[lane] + 0.35 for lane in lanes], [{"pool": "device\npool"}.get(n, n) for n in lanes])
    ax.tick_params(length=0)
    ax.grid(False)
    ax.spines[:].set_visible(False)
    ax.set_title(title, fontsize=10)
    names = {
        "copy engine": "by the copy engine, one descriptor each",
        "kernel": "by threads of a kernel, one run each",
    }
    shown = [by for by in looks if any(piece.by == by for piece in moved)]
    shapes = [Rectangle((0, 0), 1, 1, edgecolor="#555555", lw=0.6, **looks[by]) for by in shown]
    figure.legend(shapes, [names[by] for by in shown], loc="outside lower center", ncols=2, fontsize=8.5)
    return figure


def _draw_small_word(ax: Axes, x: float, y: float, place: fill.Place | None) -> None:
    colour = OTHER if place is None else LAYER_COLOURS[place.layer]
    ax.add_patch(Rectangle((x, y), fill.WORD, 0.7, facecolor=colour, edgecolor="#888888", lw=0.5))
    if place is not None:
        text = f"{place.component.upper()}{place.layer}\nt{place.token}"
        ax.text(x + fill.WORD / 2, y + 0.35, text, ha="center", va="center", fontsize=6)


# ---- a timeline

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
        ax.set_yticks([0.25, 1.25], ["our stream:\ncopies", "caller's stream:\nkernels"])
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


# ---- measured rates

WAYS = {"direct": ("#0072B2", "o", -0.14), "kernel": ("#E69F00", "s", 0.0), "staged": ("#009E73", "^", 0.14)}


def draw_rates(points: dict[str, dict[str, list[tuple[int, float]]]]) -> Figure:
    """A panel for each direction: percent of the ceiling over bytes a run, a mark for each row of each backend."""
    figure, axes = plt.subplots(1, len(points), figsize=(9.6, 4.2), sharey=True, squeeze=False)
    for ax, (direction, by_backend) in zip(axes[0], points.items(), strict=True):
        ax.axhline(100, color="#555555", lw=1, ls="--", marker="")
        for backend, marks in by_backend.items():
            colour, marker, shift = WAYS[backend]
            xs, ys = [run * 2**shift for run, _ in marks], [percent for _, percent in marks]
            ax.plot(xs, ys, marker=marker, color=colour, ls="", ms=6, mfc="none", mew=1.3, label=backend)
        ax.set_xscale("log", base=2)
        ax.xaxis.set_major_formatter(_as_bytes)
        ax.minorticks_off()
        ax.tick_params(axis="x", labelsize=8)
        ax.set(xlabel="bytes a run", ylim=(0, 106))
        ax.set_title(direction, fontsize=10)
    axes[0][0].set_ylabel("% of the bus ceiling")
    handles, names = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=3)
    return figure


def draw_capacity(lines: dict[str, dict[str, list[tuple[float, float]]]]) -> Figure:
    """A panel for each direction: percent of the ceiling over MiB of staging memory, a line for each series."""
    least = min(percent for by_name in lines.values() for marks in by_name.values() for _, percent in marks)
    figure, axes = plt.subplots(1, len(lines), figsize=(9.6, 4.2), sharey=True, squeeze=False)
    for ax, (direction, by_name) in zip(axes[0], lines.items(), strict=True):
        for name, marks in by_name.items():
            ax.plot([mib for mib, _ in marks], [percent for _, percent in marks], label=name)
        ax.axhline(100, color="#555555", lw=1, ls="--", marker="")
        ax.set_xscale("log", base=2)
        ax.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
        ax.yaxis.set_major_formatter(lambda y, _: f"{y:g}")
        ax.set(xlabel="MiB of staging, both halves", ylim=(10 * (least // 10), 101))
        ax.set_title(direction, fontsize=10)
    axes[0][0].set_ylabel("% of the bus ceiling")
    handles, names = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=2, fontsize=9)
    return figure


Spread = tuple[int, float, float, float, bool]  # descriptors; slowest, median and fastest rate; held


def draw_descriptors(
    series: dict[str, dict[int, list[Spread]]], described: dict[int, float], bus: float, queue: tuple[int, int]
) -> Figure:
    """A panel for each direction: GB/s over descriptors, a line for each length of runs.

    Filled marks are of transfers that had all been submitted before the device began. Dashed is what a host
    describes, the band is what a queue holds.
    """
    figure, axes = plt.subplots(1, len(series), figsize=(9.6, 4.8), sharey=True, squeeze=False)
    looks = list(zip(("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#000000"), "os^Dv", strict=True))
    for ax, (direction, by_run) in zip(axes[0], series.items(), strict=True):
        ax.axhline(bus, color="#555555", lw=1, ls="-", marker="")
        ax.axvspan(*queue, color="#D0D0D0", lw=0)
        for number, ((run, spreads), (colour, marker)) in enumerate(zip(by_run.items(), looks, strict=False)):
            aside = 2 ** (0.22 * (number - 2))  # marks of one number of descriptors would hide each other
            xs = [s[0] * aside for s in spreads]
            ax.plot(xs, [s[2] for s in spreads], color=colour, lw=0.9, ls="-", marker="")
            for x, (_, slowest, median, fastest, held) in zip(xs, spreads, strict=True):
                ax.plot([x] * 2, [slowest, fastest], color=colour, lw=1, ls="-", marker="")
                fill = colour if held else "#FFFFFF"
                ax.plot(x, median, marker=marker, color=colour, mfc=fill, ms=6.5, mew=1.3, ls="")
            if described[run] < bus:
                ax.plot([2048, 90000], [described[run]] * 2, color=colour, lw=1.3, ls="--", marker="")
                ax.text(95000, described[run], size(run), fontsize=8, va="center")
        ax.set_xscale("log", base=2)
        ax.set_yscale("log")
        ax.set_xticks([64, 256, 1024, 4096, 16384, 60000])
        ax.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")
        ax.set_yticks([0.5, 1, 2, 5, 10, 20, 50])
        ax.yaxis.set_major_formatter(lambda y, _: f"{y:g}")
        ax.minorticks_off()
        ax.set(xlabel="descriptors of a transfer", ylim=(0.33, 80))
        ax.set_title(direction, fontsize=10)
    axes[0][0].set_ylabel("GB/s")
    keys = [
        Line2D([], [], color=colour, marker=marker, ls="", ms=6.5, label=f"runs of {size(run)}")
        for run, (colour, marker) in zip(described, looks, strict=False)
    ]
    keys += [
        Line2D([], [], color="#555555", marker="o", ls="", mfc="#FFFFFF", mew=1.3, label="open: the queue was full"),
        Line2D([], [], color="#555555", marker="", ls="--", lw=1.3, label="what the host can describe"),
        Line2D([], [], color="#555555", marker="", ls="-", lw=1, label="plain memcpy"),
        Rectangle((0, 0), 1, 1, facecolor="#D0D0D0", lw=0, label="what the queue holds"),
    ]
    figure.legend(handles=keys, loc="outside lower center", ncols=4, fontsize=9)
    return figure


BESIDE = {  # movers, as marks that differ in shape
    "direct": ("#0072B2", "o"),
    "staged": ("#009E73", "^"),
    "kernel, 1 block": ("#E69F00", "s"),
    "kernel, 2 blocks": ("#CC79A7", "D"),
    "kernel, 4 blocks": ("#D55E00", "v"),
}


def draw_slowdowns(marks: Sequence[tuple[str, str, float, float]]) -> Figure:
    """What transfers take of a matmul beside them (a fraction) over their own GB/s; filled for backups."""
    figure, ax = plt.subplots(figsize=(8.4, 4.8))
    for mover, direction, rate, slowdown in marks:
        colour, marker = BESIDE[mover]
        fill = colour if direction == "backup" else "none"
        ax.plot(rate, 100 * slowdown, marker=marker, color=colour, mfc=fill, ms=8, mew=1.5, ls="")
    ax.set_yscale("log")
    ax.set_yticks([0.5, 1, 2, 5, 10, 20, 50])
    ax.yaxis.set_major_formatter(lambda y, _: f"{y:g} %")
    ax.minorticks_off()
    ax.set(xlabel="GB/s of the transfers, beside the matmul", ylabel="slowdown of the matmul", xlim=(0, 60))
    ax.set_ylim(0.3, 70)
    keys = [Line2D([], [], color=c, marker=m, ls="", ms=8, mew=1.5, label=name) for name, (c, m) in BESIDE.items()]
    for name, fill in (("filled: backup", "#555555"), ("open: load", "none")):
        keys.append(Line2D([], [], color="#555555", mfc=fill, marker="o", ls="", ms=8, mew=1.5, label=name))
    figure.legend(handles=keys, loc="outside lower center", ncols=4, fontsize=9)
    return figure


# ---- wrong bytes

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


if __name__ == "__main__":
    draw_overview().savefig(HERE / "figures/layouts.svg", metadata={"Date": None, "Creator": None})
