"""What several notebooks share: text and tables, bytes of pools, plans, looks, and drawings of measured rates."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent))  # a checkout works without being installed

import matplotlib.pyplot as plt  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
from IPython.display import Markdown, display  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402
from matplotlib.lines import Line2D  # noqa: E402

from refimpl import LAYOUTS, DevicePool, HostPool, PoolSpec, plan, support  # noqa: E402
from refimpl.device_pool import row_shape  # noqa: E402
from refimpl.plan import Plan  # noqa: E402

plt.style.use(HERE / "kv.mplstyle")

# Light enough for black text, and apart from one another in grey too.
LAYER_COLOURS = ("#FFF7D6", "#A9D8F2", "#DE9B72")
OTHER = "#F4F4F4"
# Layout names as headings of narrow columns.
HEADINGS = {name: name.replace("page_first_", "page_first\n_") for name in LAYOUTS}


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


def as_bytes(x: float, _: object) -> str:
    return size(int(x))


def as_count(x: float, _: object) -> str:
    return f"{x:,.0f}"


def digest(*arrays: np.ndarray | torch.Tensor | Sequence[object]) -> str:
    """Twelve hex digits of the SHA-256 of all bytes, in order. Pictures are not compared by CI; this is."""
    sha = hashlib.sha256()
    for array in arrays:
        if isinstance(array, torch.Tensor):
            array = array.contiguous().reshape(-1).view(torch.uint8).numpy()
        sha.update(array.tobytes() if isinstance(array, np.ndarray) else repr(array).encode())
    return sha.hexdigest()[:12]


# ---- bytes of pools


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


# ---- measured rates

WAYS = {"direct": ("#0072B2", "o", -0.14), "kernel": ("#E69F00", "s", 0.0), "staged": ("#009E73", "^", 0.14)}
BESIDE = {  # movers, as marks that differ in shape
    "direct": ("#0072B2", "o"),
    "staged": ("#009E73", "^"),
    "kernel, 1 block": ("#E69F00", "s"),
    "kernel, 2 blocks": ("#CC79A7", "D"),
    "kernel, 4 blocks": ("#D55E00", "v"),
}


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
        ax.xaxis.set_major_formatter(as_bytes)
        ax.minorticks_off()
        ax.tick_params(axis="x", labelsize=8)
        ax.set(xlabel="bytes a run", ylim=(0, 106))
        ax.set_title(direction, fontsize=10)
    axes[0][0].set_ylabel("% of the bus ceiling")
    handles, names = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=3)
    return figure


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
