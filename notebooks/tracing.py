"""Notebook 07: a device that notes what it is told and what it moves, and drawings of where those bytes went."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from unittest.mock import patch

import matplotlib.pyplot as plt
import numpy as np
import torch
from book import LAYER_COLOURS, OTHER, layers, raw
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Polygon, Rectangle

from kernels_cupy import emu
from refimpl import DevicePool, HostPool, PoolSpec
from refimpl.emulated import QueueRuntime
from refimpl.runtime import Event, Stream
from verify import fill

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


# ---- where bytes went


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
