"""Backend `staged`: whole pages by the copy engine, brought into shape in a buffer on the device.

The host keeps a page in few pieces, the device in one for every layer. A backup gathers pages into the staging buffer,
laid out as the host will have them, and copies each piece at once; a load copies pieces in and scatters them. The
buffer has two halves: while one is copied, the other is filled or emptied. A half is used again only after the event
of its last use, whichever stream that was on, so two callers of one pool take turns.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch

from kernels_cupy.copy_engine import merged, submit
from kernels_cupy.jobs import (
    Copy,
    End,
    Job,
    Shape,
    completion,
    device_addresses,
    jobs,
    launch,
    mapped,
    place,
    registration_of,
    table_of,
)
from kernels_cupy.runtimes import runtime
from refimpl.backends.protocol import Setup
from refimpl.indices import Items
from refimpl.plan import Loop, Plan
from refimpl.receipt import Receipt
from refimpl.runtime import Event

HALVES = 2

# Relayout touches device memory only and is soon done: the whole device may help.
RELAYOUT = Shape(blocks=128, lanes=32, piece=2048)


@dataclass(frozen=True)
class Piece:
    """Bytes of an item that lie together in host memory: where they begin in item 0, how many, and how to go on."""

    begin: int
    nbytes: int
    page: int
    entries: int
    entry_bytes: int

    def addresses(self, items: np.ndarray) -> np.ndarray:
        pages, entries = np.divmod(items, self.entries)
        return (self.begin + pages * self.page + entries * self.entry_bytes).astype(np.uint64)

    @property
    def end(self) -> End:
        return End(np.array([self.begin], np.uint64), self.page, self.entries, self.entry_bytes)


class Staged:
    def __init__(self, setup: Setup) -> None:
        self._runtime = runtime(setup.platform)
        page_bytes = setup.spec.page_bytes
        if setup.staging_pages < HALVES:
            raise ValueError(f"staging_pages must be at least {HALVES}, one page a half; got {setup.staging_pages}")
        self._half = setup.staging_pages // HALVES * page_bytes
        setup.book(HALVES * self._half)
        self._buffer: torch.Tensor | None = self._runtime.empty(HALVES * self._half)
        self._free: list[Event | None] = [None] * HALVES
        self._turn = 0
        self._one_at_a_time = threading.Lock()

    def stays(self, side: str, indices: torch.Tensor) -> bool:
        return side == "device" and self._runtime.holds(indices)  # the host's are in descriptors

    def execute(self, plan: Plan, layers: tuple[int | None, ...], items: Items, direction: str) -> Receipt:
        with self._one_at_a_time:
            steps = Steps(self, plan, layers, items, direction)
            return steps.backup() if direction == "backup" else steps.load()

    def next_half(self) -> int:
        """Halves take turns from one transfer to the next, too."""
        self._turn = (self._turn + 1) % HALVES
        return self._turn

    def address(self, half: int) -> int:
        if self._buffer is None:
            raise ValueError("the staging buffer is closed")
        return self._buffer.data_ptr() + half * self._half

    def close(self) -> None:
        for event in self._free:
            if event:
                event.synchronize()
        self._buffer = None


@dataclass
class Steps:
    """One transfer through the staging buffer, chunk by chunk."""

    staged: Staged
    plan: Plan
    layers: tuple[int | None, ...]
    items: Items
    direction: str

    def __post_init__(self) -> None:
        self.runtime = self.staged._runtime
        self.caller, self.copies = self.runtime.current(), self.runtime.private("staged")
        self.pieces = pieces(self.plan, self.layers, exact=self.direction == "backup")
        host_items = self.items.host
        assert isinstance(host_items, np.ndarray)
        self.host_items = host_items
        sides = ("host", "device") if self.items.unchecked and self.direction == "backup" else ("device",)
        self.placed = place(self.runtime, self.items, sides)
        self.item_bytes = sum(piece.nbytes for piece in self.pieces)
        self.receipt = Receipt("staged", index_uploads=self.placed.uploads)

    def backup(self) -> Receipt:
        """Gather on the caller's stream, copy on ours; the caller's goes on when the last copy is done."""
        try:
            for half, chunk in self._chunks():
                self._gather(half, chunk)
                self.runtime.wait(self.copies, self.runtime.record(self.caller))
                self._copy(half, chunk)
                self.staged._free[half] = self.runtime.record(self.copies)
        finally:
            self.runtime.wait(self.caller, self.runtime.record(self.copies))
        return self._done()

    def load(self) -> Receipt:
        """Copy on our stream, scatter on the caller's."""
        self.runtime.wait(self.copies, self.runtime.record(self.caller))
        try:
            for half, chunk in self._chunks():
                self._copy(half, chunk)
                self.runtime.wait(self.caller, self.runtime.record(self.copies))
                self._relayout(half, chunk)
                self.staged._free[half] = self.runtime.record(self.caller)
        finally:
            self.runtime.wait(self.caller, self.runtime.record(self.copies))
        return self._done()

    def _done(self) -> Receipt:
        return self.receipt + Receipt("staged", event=completion(self.runtime, self.caller, self.placed))

    # ---- chunks

    @property
    def most(self) -> int:
        """Items that a half holds."""
        return self.staged._half // self.item_bytes

    def _chunks(self) -> Iterator[tuple[int, slice]]:
        """Halves in turn, each once the event of its last use has passed on the stream that writes it first."""
        writer = self.caller if self.direction == "backup" else self.copies
        for first, last in chunks(len(self.items), self.most):
            half = self.staged.next_half()
            free = self.staged._free[half]
            if free:
                self.runtime.wait(writer, free)
            yield half, slice(first, last)

    def _begin(self, half: int, number: int) -> int:
        """Where piece `number` of a chunk's items lies in a half."""
        before = sum(piece.nbytes for piece in self.pieces[:number])
        return self.staged.address(half) + self.most * before

    def _copy(self, half: int, chunk: slice) -> None:
        """Between the half and the host's pages, pieces that continue each other as one."""
        found = []
        items = self.host_items[chunk]
        for number, piece in enumerate(self.pieces):
            staging = self._begin(half, number) + piece.nbytes * np.arange(len(items))
            found.append(
                merged(piece.addresses(items), staging.astype(np.uint64), piece.nbytes, self.plan.registrations)
            )
        host, staging, nbytes = (np.concatenate(arrays) for arrays in zip(*found, strict=True))
        host = device_addresses(self.plan.registrations, host)
        to, source = (host, staging) if self.direction == "backup" else (staging, host)
        submit(self.runtime, self.copies, to, source, nbytes)
        self.receipt += Receipt("staged", descriptors=len(nbytes))

    def _gather(self, half: int, chunk: slice) -> None:
        self._relayout(half, chunk)
        if self.placed.fault is not None:
            self._keep_the_host(half, chunk)

    def _relayout(self, half: int, chunk: slice) -> None:
        """Between the half and the device pool, every run of the chunk."""
        count = chunk.stop - chunk.start
        for part in parts(self.plan, self.layers, exact=self.direction == "backup"):
            begins = np.array([self._begin(half, number) for number in part.pieces]) + part.offsets
            staging = End(begins.astype(np.uint64), part.item_bytes), 0
            copy = Copy(staging, (part.device, self.placed.device + 8 * chunk.start), part.loops, part.run, count)
            kernels = launch(
                self.runtime, copy.towards(self.direction), RELAYOUT, True, fault=self.placed.fault_address
            )
            runs = len(begins) * count * part.runs_per_item
            self.receipt += Receipt("staged", runs * part.run, 0, kernels)

    def _keep_the_host(self, half: int, chunk: slice) -> None:
        """If the device refuses the list it checks, the copies that follow bring the host's own bytes back to it.

        Copies cannot be called off by the device, and the host has not waited to hear its verdict.
        """
        table = table_of(self.runtime, self.plan.registrations)
        for number, piece in enumerate(self.pieces):
            staging = End(np.array([self._begin(half, number)], np.uint64), piece.nbytes)
            ends = (mapped(self.plan, piece.end), self.placed.host + 8 * chunk.start), (staging, 0)
            copy = Copy(*ends, (), piece.nbytes, chunk.stop - chunk.start, to_host=False)
            launch(self.runtime, copy, RELAYOUT, True, self.placed.fault_address, True, table)


def chunks(count: int, most: int) -> Iterator[tuple[int, int]]:
    """Ranges of items, `most` at a time."""
    for first in range(0, count, most):
        yield first, min(first + most, count)


# ---------------------------------------------------------------------------------------------------------------------
# What of an item lies together in host memory.


@dataclass(frozen=True)
class Part:
    """Runs of one shape whose layers begin in pieces of one size: `offsets` bytes after the begin of `pieces`."""

    pieces: tuple[int, ...]
    offsets: np.ndarray
    item_bytes: int
    device: End
    loops: tuple[Loop, ...]
    run: int

    @property
    def runs_per_item(self) -> int:
        return int(np.prod([loop.count for loop in self.loops], dtype=np.int64))


def pieces(plan: Plan, layers: tuple[int | None, ...], exact: bool) -> list[Piece]:
    """Pieces of host memory that hold every run of an item; `exact`: nothing else, for they will be overwritten."""
    key = ("pieces", layers, exact)
    if key not in plan.derived:
        plan.derived[key] = list(_pieces(plan, layers, exact))
    return plan.derived[key]


def _pieces(plan: Plan, layers: tuple[int | None, ...], exact: bool) -> Iterator[Piece]:
    strides: dict[tuple[int, int, int], list[np.ndarray]] = {}
    for job in jobs(plan, layers):
        begins = (job.host.starts.astype(np.int64)[:, None] + host_offsets(job.loops)).reshape(-1)
        steps = job.host.page, job.host.entries, job.host.entry_bytes
        strides.setdefault(steps, []).append(np.stack([begins, begins + job.run], axis=1))
    for (page, entries, entry_bytes), spans in strides.items():
        longest = entry_bytes if entries > 1 else page
        for begin, end in joined(np.concatenate(spans), longest, exact, plan):
            yield Piece(begin, end - begin, page, entries, entry_bytes)


def host_offsets(loops: tuple[Loop, ...]) -> np.ndarray:
    """Bytes from an item's start to each of its runs, in host memory."""
    offsets = np.zeros(1, np.int64)
    for loop in loops:
        offsets = (offsets[:, None] + np.arange(loop.count) * loop.host).reshape(-1)
    return offsets


def joined(spans: np.ndarray, longest: int, exact: bool, plan: Plan) -> Iterator[tuple[int, int]]:
    """Spans `[begin, end)` of one registration joined up to a length: all that fit, or (`exact`) those that touch."""
    spans = spans[np.argsort(spans[:, 0], kind="stable")]
    place = registration_of(plan.registrations, spans[:, 0].astype(np.uint64))
    touching = (spans[1:, 0] == spans[:-1, 1]) & (place[1:] == place[:-1])
    first = np.flatnonzero(np.append(True, ~touching))
    last = np.append(first[1:], len(spans)) - 1
    begin, end, where = 0, 0, -1
    for low, high, there in zip(*(a.tolist() for a in (spans[first, 0], spans[last, 1], place[first])), strict=True):
        if not exact and there == where and high - begin <= longest:
            end = high
            continue
        if where >= 0:
            yield begin, end
        begin, end, where = low, high, there
    yield begin, end


def parts(plan: Plan, layers: tuple[int | None, ...], exact: bool) -> list[Part]:
    """The jobs of some layers, their host side within the pieces."""
    key = ("parts", layers, exact)
    if key not in plan.derived:
        found = pieces(plan, layers, exact)
        plan.derived[key] = [part for job in jobs(plan, layers) for part in _parts(job, found)]
    return plan.derived[key]


def _parts(job: Job, found: list[Piece]) -> Iterator[Part]:
    steps = job.host.page, job.host.entries, job.host.entry_bytes
    begins = np.array([p.begin if (p.page, p.entries, p.entry_bytes) == steps else -1 for p in found])
    ends = begins + np.array([p.nbytes for p in found])
    low = job.host.starts.astype(np.int64)[:, None]
    high = low + host_offsets(job.loops).max() + job.run
    inside = (begins >= 0) & (begins <= low) & (high <= ends)
    if not inside.any(axis=1).all():
        raise RuntimeError("a run of the plan lies in no piece of host memory")
    at = inside.argmax(axis=1)
    sizes = np.array([p.nbytes for p in found])[at]
    for size in np.unique(sizes):
        mine = sizes == size
        device = replace(job.device, starts=job.device.starts[mine])
        offsets = low[mine, 0] - begins[at[mine]]
        yield Part(tuple(at[mine].tolist()), offsets, int(size), device, job.loops, job.run)
