"""The transfer plan: what every backend executes.

A plan is read from the actual tensors of both sides, by the names of their axes. It says, for each component, how far
pages lie apart on either side, which strides are nested inside a page, and the longest run of bytes that is contiguous
on both. The oracle (`oracle.py`) derives the same copy from views; the two share only the description of buffers.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from refimpl.geometry import Component
from refimpl.layout import Buffer

if TYPE_CHECKING:
    from refimpl.device_pool import DevicePool
    from refimpl.host_buffers import HostBuffers


@dataclass(frozen=True)
class Side:
    """One end of a move.

    tensors  one per layer, kept alive as long as the plan
    starts   address of page 0, one per layer
    page     bytes from one page to the next
    pages    pages that exist
    """

    tensors: tuple[torch.Tensor, ...]
    starts: tuple[int, ...]
    page: int
    pages: int


@dataclass(frozen=True)
class Loop:
    """`count` steps of `host` and `device` bytes."""

    count: int
    host: int
    device: int


@dataclass(frozen=True)
class Move:
    """Copy, for every layer and every item of the index lists, the runs that the nested loops reach.

    An item is a page. Where single entries move it is an entry: item i lies in page `i // entries`, and `entry_bytes`
    separate one entry of a page from the next (on both sides alike: a page row is opaque).
    """

    component: str
    layers: tuple[int | None, ...]
    host: Side
    device: Side
    loops: tuple[Loop, ...]
    run: int
    entries: int = 1
    entry_bytes: int = 0

    @property
    def runs_per_item(self) -> int:
        return math.prod(loop.count for loop in self.loops)

    def offsets(self, side: Side, items: np.ndarray) -> np.ndarray:
        """Bytes from a layer's start to each item."""
        pages, entries = np.divmod(items, self.entries)
        return pages * side.page + entries * self.entry_bytes


def loop_offsets(loops: tuple[Loop, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Bytes from an item's start to each of its runs, host and device."""
    host = device = np.zeros(1, np.int64)
    for loop in loops:
        steps = np.arange(loop.count, dtype=np.int64)
        host = (host[:, None] + steps * loop.host).reshape(-1)
        device = (device[:, None] + steps * loop.device).reshape(-1)
    return host, device


@dataclass(frozen=True)
class Registration:
    """Host memory from `begin` to `end` that a device reaches at `alias` (upstream issue 40232: not always `begin`).

    Where it has no address there (None), only plain copies can reach it.
    """

    begin: int
    end: int
    alias: int | None


@dataclass(frozen=True)
class Plan:
    """All moves between one host pool and one device pool. Index lists are not part of it: a plan is made once.

    registrations  of the host memory, by address; no run crosses the edge of one
    derived        what backends worked out from the plan: it is valid as long as the plan
    """

    moves: tuple[Move, ...]
    registrations: tuple[Registration, ...] = ()
    derived: dict[Hashable, Any] = field(default_factory=dict, compare=False, repr=False)

    @cached_property
    def layers(self) -> frozenset[int | None]:
        """Layers in which there is anything to move; None among them if side states are."""
        return frozenset(layer for move in self.moves for layer in move.layers)

    def select(self, layers: tuple[int | None, ...]) -> Iterator[tuple[int | None, Move, int]]:
        """`(layer, move, position of the layer in the move)`, layer by layer in the order asked for."""
        for layer in layers:
            for move in self.moves:
                if layer in move.layers:
                    yield layer, move, move.layers.index(layer)

    def runs(
        self, host_items: np.ndarray, device_items: np.ndarray, layers: tuple[int | None, ...]
    ) -> Iterator[tuple[np.ndarray, np.ndarray, int]]:
        """Addresses of every run, as arrays `(host, device)` with the bytes of each, per layer and move."""
        for _, move, at in self.select(layers):
            host_in_item, device_in_item = loop_offsets(move.loops)
            host = move.host.starts[at] + move.offsets(move.host, host_items)
            device = move.device.starts[at] + move.offsets(move.device, device_items)
            yield (
                (host[:, None] + host_in_item).reshape(-1),
                (device[:, None] + device_in_item).reshape(-1),
                move.run,
            )


def plan(host: HostBuffers, device: DevicePool, single_entries: bool = False) -> Plan:
    """The plan between two pools of one spec; `single_entries` moves entries of page rows instead of pages."""
    make = _entry_moves if single_entries else _page_moves
    storage = [(buffer, tensors) for buffer, tensors in host.storage if buffer.layers]
    moves = tuple(move for buffer, tensors in storage for move in make(buffer, tensors, device))
    return Plan(moves, tuple(host.registrations))


def _page_moves(buffer: Buffer, tensors: list[torch.Tensor], device: DevicePool) -> Iterator[Move]:
    for component in buffer.components:
        host_side, host = _host_side(buffer, tensors, component)
        device_side, other = _device_side(buffer, device, component)
        nested = [Loop(buffer.extents[a], host[a], other[a]) for a in ("token", "group", "head")]
        loops, run = longest_run(nested, buffer.extents["lane"] * component.dtype.itemsize)
        if run:
            yield Move(component.name, buffer.layers, host_side, device_side, loops, run)


def _entry_moves(buffer: Buffer, tensors: list[torch.Tensor], device: DevicePool) -> Iterator[Move]:
    for component in buffer.components:
        host, _ = _host_side(buffer, tensors, component)
        other, _ = _device_side(buffer, device, component)
        begin = 0
        for segment in component.segments:
            ends = _shifted(host, begin), _shifted(other, begin)
            yield Move(component.name, buffer.layers, *ends, (), segment.bytes, segment.entries, segment.bytes)
            begin += segment.entries * segment.bytes


def longest_run(loops: list[Loop], run: int) -> tuple[tuple[Loop, ...], int]:
    """Take every loop that merely continues the run into the run, and fuse loops that continue each other.

    >>> longest_run([Loop(4, 64, 64), Loop(1, 64, 64), Loop(2, 32, 32)], run=32)      # rows packed on both sides
    ((), 256)
    >>> longest_run([Loop(4, 960, 64), Loop(2, 32, 32)], run=32)                      # a token every 960 bytes
    ((Loop(count=4, host=960, device=64),), 64)
    """
    kept: list[Loop] = []
    for loop in reversed([loop for loop in loops if loop.count != 1]):
        inner = kept[0] if kept else Loop(run, 1, 1)
        if (loop.host, loop.device) != (inner.count * inner.host, inner.count * inner.device):
            kept.insert(0, loop)
        elif kept:
            kept[0] = Loop(loop.count * inner.count, inner.host, inner.device)
        else:
            run *= loop.count
    return tuple(kept), run


def _host_side(buffer: Buffer, tensors: list[torch.Tensor], component: Component) -> tuple[Side, dict[str, int]]:
    """Where a component begins in each layer, and the byte stride of each axis, read from the tensors."""
    size = component.dtype.itemsize
    starts: list[int] = []
    kept: list[torch.Tensor] = []
    strides: dict[str, int] = {}
    for layers, tensor in zip(buffer.tensor_layers, tensors, strict=True):
        strides = {axis: step * size for axis, step in zip(buffer.axes, tensor.stride(), strict=True)}
        first = tensor.data_ptr() + buffer.position(component.name) * strides["component"]
        starts += [first + i * strides.get("layer", 0) for i in range(len(layers))]
        kept += [tensor] * len(layers)
    return Side(tuple(kept), tuple(starts), strides["page"], buffer.extents["page"]), strides


def _device_side(buffer: Buffer, device: DevicePool, component: Component) -> tuple[Side, dict[str, int]]:
    size = component.dtype.itemsize
    tensors = tuple(device.buffer(component.name, layer) for layer in buffer.layers)
    starts = tuple(t.data_ptr() + buffer.first_lane * size for t in tensors)
    row = tensors[0].stride(0) * size
    head = component.lanes * size
    strides = {"token": row, "group": head * buffer.extents["head"], "head": head}
    return Side(tensors, starts, row * buffer.extents["token"], device.num_pages), strides


def _shifted(side: Side, nbytes: int) -> Side:
    return Side(side.tensors, tuple(s + nbytes for s in side.starts), side.page, side.pages)
