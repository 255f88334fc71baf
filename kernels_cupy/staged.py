"""Backend `staged`: whole pages by the copy engine, brought into shape in a buffer on the device.

The host keeps a page in few pieces, the device in one for every layer. A backup gathers pages into the staging buffer,
laid out as the host will have them, and copies each piece at once; a load copies pieces in and scatters them. The
buffer has two halves: while one is copied, the other is filled or emptied. A half is used again only after the event
of its last use, whichever stream that was on, so two callers of one pool take turns.

A load of some layers copies whatever lies between the first and the last of them: the whole page in `page_first`, so
that a load layer by layer takes the bus once for every layer; just the layer in `page_first_direct`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from kernels_cupy.copy_engine import submit
from kernels_cupy.descriptors import describe_chunks
from kernels_cupy.jobs import (
    End,
    begins_and_offsets,
    device_addresses,
    mapped,
    needs_table,
    out_of_reach,
    require_reach,
    runs_and_bytes,
    table_of,
)
from kernels_cupy.launches import Launch, launches, shape_for
from kernels_cupy.lists import SIDES, Placed, completion, place, read, tell_uploads
from kernels_cupy.pieces import Piece, parts, pieces, strides_of
from kernels_cupy.runtimes import runtime
from refimpl.backends.protocol import Setup
from refimpl.indices import Items
from refimpl.plan import Plan
from refimpl.receipt import Receipt
from refimpl.runtime import Pending, Stream
from refimpl.teardown import call_all

HALVES = 2

# Of a half, unless the caller says otherwise. Less is faster by a hair until the host cannot keep up with the chunks.
HALF_BYTES = 64 << 20

# Blocks of the relayout: it touches device memory only, and is soon done.
BLOCKS = 128

Layers = tuple[int | None, ...]


class Staged:
    launches_kernels = True

    def __init__(self, setup: Setup) -> None:
        self._runtime = runtime(setup.platform)
        self._runtime.compile()
        self.half_bytes = self.staging_bytes(setup) // HALVES
        self._give_back = setup.book(HALVES * self.half_bytes)
        try:
            self._buffer: torch.Tensor | None = self._runtime.empty(HALVES * self.half_bytes)
        except BaseException:
            self._give_back()
            raise
        # Passed when a half may be written (again): who had this memory before may still be at work on it.
        self._free = [self._runtime.record(self._runtime.current())] * HALVES
        self._pending = Pending()
        self._turn = 0
        self._one_at_a_time = threading.RLock()  # of a thread that submits already: a signal handler is told so
        self._submits = False

    @staticmethod
    def staging_bytes(setup: Setup) -> int:
        """Bytes of the buffer: whole pages in each half."""
        pages, page_bytes = setup.staging_pages, setup.spec.page_bytes
        if pages is None:
            pages = HALVES * max(1, min(HALF_BYTES // max(page_bytes, 1), -(-setup.num_pages // HALVES)))
        return HALVES * (pages // HALVES * page_bytes)

    def stays(self, side: str, indices: torch.Tensor) -> bool:
        return side == "device" and self._runtime.holds(indices)  # the host's are in descriptors

    def read(self, indices: torch.Tensor) -> torch.Tensor:
        return read(self._runtime, indices)

    def place(self, plan: Callable[[], Plan], layers: Layers, items: Items, direction: str) -> None:
        self._lists(self._runtime.current(), items, direction)

    def execute(self, plan: Plan, layers: Layers, items: Items, direction: str) -> Receipt:
        with self._one_at_a_time:
            if self._submits:
                raise RuntimeError(
                    "a signal handler cannot use a pool of backend 'staged' while a transfer of it is submitted, for "
                    "both would fill one buffer: let it set a flag"
                )
            if self._buffer is None:
                raise ValueError("the staging buffer is closed")
            self._submits = True
            try:
                return self._backup(plan, layers, items) if direction == "backup" else self._load(plan, layers, items)
            finally:
                self._submits = False

    def close(self) -> None:
        with self._one_at_a_time:
            call_all((self._pending.wait, self._drop))

    def _drop(self) -> None:
        self._buffer = None
        self._give_back()

    def _backup(self, plan: Plan, layers: Layers, items: Items) -> Receipt:
        """Gather on the caller's stream, copy on the one beside it; the caller's goes on when the last copy is done."""
        if items.unchecked:  # before anything is submitted: a list that is refused has to be undone by a kernel
            require_reach(plan)
        caller = self._runtime.current()
        copies = self._runtime.beside(caller)
        lists = self._lists(caller, items, "backup")
        chunks = self._chunks(plan, layers, items, "backup")

        def submitted(chunk: Chunk) -> int:
            self._runtime.wait(caller, self._free[chunk.half])
            kernels = self._relayout(plan, layers, "backup", chunk, lists, caller)
            if items.unchecked:
                kernels += self._rescue(plan, layers, chunk, lists, caller)
            self._runtime.wait(copies, self._runtime.record(caller))
            submit(self._runtime, copies, chunk.host, chunk.staging, chunk.nbytes, out_of_reach(plan))
            self._free[chunk.half] = self._runtime.record(copies)
            return kernels

        return self._submitted(plan, layers, items, chunks, lists, caller, copies, submitted)

    def _load(self, plan: Plan, layers: Layers, items: Items) -> Receipt:
        """Copy on the stream beside the caller's, which begins where that has come to; scatter on the caller's."""
        caller = self._runtime.current()
        copies = self._runtime.beside(caller)
        lists = self._lists(caller, items, "load")
        chunks = self._chunks(plan, layers, items, "load")
        self._runtime.wait(copies, self._runtime.record(caller))

        def submitted(chunk: Chunk) -> int:
            self._runtime.wait(copies, self._free[chunk.half])
            submit(self._runtime, copies, chunk.staging, chunk.host, chunk.nbytes, out_of_reach(plan))
            self._runtime.wait(caller, self._runtime.record(copies))
            kernels = self._relayout(plan, layers, "load", chunk, lists, caller)
            self._free[chunk.half] = self._runtime.record(caller)
            return kernels

        return self._submitted(plan, layers, items, chunks, lists, caller, copies, submitted)

    def _submitted(
        self,
        plan: Plan,
        layers: Layers,
        items: Items,
        chunks: list[Chunk],
        lists: Placed,
        caller: Stream,
        copies: Stream,
        submitted: Callable[[Chunk], int],
    ) -> Receipt:
        """Submit chunk after chunk; the caller's stream goes on when all of it is done, also after a failure."""
        end, copied = self._pending.begin(self._runtime, plan, caller, copies)
        try:
            kernels = sum(map(submitted, chunks))
            copied.hold(caller)
        except BaseException:
            self._free_after(caller, copies)
            raise
        finally:
            end.ended = copied.ended = True
            moved = end.event
        _, nbytes = runs_and_bytes(plan, layers, len(items))
        descriptors = sum(len(chunk.nbytes) for chunk in chunks)
        done = completion(self._runtime, caller, lists, moved)
        return Receipt("staged", nbytes, descriptors, kernels, tell_uploads(items), event=done)

    def _free_after(self, caller: Stream, copies: Stream) -> None:
        """Halves are free, and the caller goes on, after what was submitted. If even that fails, the host waits."""
        try:
            for other in (*self._free, self._runtime.record(copies)):
                self._runtime.wait(caller, other)
            self._free = [self._runtime.record(caller)] * HALVES
        except BaseException:
            call_all(self._runtime.record(stream).synchronize for stream in (copies, caller))
            raise

    def _lists(self, stream: Stream, items: Items, direction: str) -> Placed:
        """The device's in device memory; the host's too where a backup may have to be rescued."""
        rescue = direction == "backup" and items.unchecked
        return place(self._runtime, stream, items, SIDES if rescue else ("device",))

    # ---- chunks

    def _chunks(self, plan: Plan, layers: Layers, items: Items, direction: str) -> list[Chunk]:
        """As many items at a time as a half holds, the halves in turn, with what the copy engine has to do."""
        exact = direction == "backup"
        found = pieces(plan, layers, exact)
        most = self.half_bytes // sum(piece.nbytes for piece in found)
        firsts = range(0, len(items), most)
        halves = (np.arange(len(firsts)) + self._turn) % HALVES
        self._turn += len(firsts)
        begins = begins_and_offsets(plan)[0].view(np.int64)
        copies, edges = np.empty((3, len(items) * len(found)), np.int64), np.zeros(len(firsts) + 1, np.int64)
        strides, numbers = strides_of(plan, layers, exact), np.ascontiguousarray(items.host)
        places = self._begins(found, most), halves * self.half_bytes
        describe_chunks(copies, edges, strides, numbers, most, *places, begins)
        host, staging, nbytes = copies[:, : edges[-1]].view(np.uint64)
        host = device_addresses(plan, host)
        return [
            Chunk(first, min(most, len(items) - first), half, host[a:b], staging[a:b], nbytes[a:b])
            for first, half, (a, b) in zip(firsts, halves.tolist(), pairwise(edges.tolist()), strict=True)
        ]

    def _begins(self, found: list[Piece], most: int) -> np.ndarray:
        """Where each piece's copies begin in the first half."""
        assert self._buffer is not None
        sizes = np.array([piece.nbytes for piece in found], np.int64)
        return self._buffer.data_ptr() + most * (np.cumsum(sizes) - sizes)

    def _relayout(self, plan: Plan, layers: Layers, direction: str, chunk: Chunk, lists: Placed, caller: Stream) -> int:
        """Between a half and the device pool, if the device has nothing against the lists; returns the launches."""
        made = self._launches(plan, layers, direction, chunk.half)
        for launch in made:
            at = lists.device + 8 * chunk.first
            launch.submit(self._runtime, caller, 0, at, chunk.count, lists.fault_address)
        return len(made)

    def _launches(self, plan: Plan, layers: Layers, direction: str, half: int) -> list[Launch]:
        """Those of a half, worked out once."""
        key = "relayout", layers, direction, half
        if key not in plan.derived:
            found = pieces(plan, layers, exact=direction == "backup")
            begins = self._begins(found, self.half_bytes // sum(piece.nbytes for piece in found))
            launches_of_half = []
            for part in parts(plan, layers, exact=direction == "backup"):
                starts = begins[list(part.pieces)] + half * self.half_bytes + part.offsets
                staging = End(starts.astype(np.uint64), part.item_bytes)
                launches_of_half += launches(
                    staging, part.device, part.loops, part.run, direction, shape_for(part.run, direction, BLOCKS)
                )
            plan.derived[key] = launches_of_half
        return plan.derived[key]

    def _rescue(self, plan: Plan, layers: Layers, chunk: Chunk, lists: Placed, caller: Stream) -> int:
        """Fill a half with what the host has, if the device refuses the list of a backup; returns the launches.

        Copies cannot be called off by the device, and the host does not wait for its verdict. So they bring the host's
        own bytes back to it.
        """
        made = self._rescues(plan, layers, chunk.half, caller)
        for launch in made:
            at = lists.host + 8 * chunk.first
            launch.submit(self._runtime, caller, at, 0, chunk.count, lists.fault_address, if_fault=True)
        return len(made)

    def _rescues(self, plan: Plan, layers: Layers, half: int, caller: Stream) -> list[Launch]:
        """Launches for a half, worked out once; a table of registrations is uploaded for each stream that needs it."""
        key = "rescue", layers, half, self._runtime.identity(caller) if needs_table(plan) else None
        if key not in plan.derived:
            found = pieces(plan, layers, exact=True)
            table = table_of(self._runtime, plan.registrations)
            begins = self._begins(found, self.half_bytes // sum(piece.nbytes for piece in found))
            made = [
                launch
                for begin, piece in zip(begins + half * self.half_bytes, found, strict=True)
                for launch in launches(
                    mapped(plan, piece.end),
                    End(np.array([begin], np.uint64), piece.nbytes),
                    (),
                    piece.nbytes,
                    "load",
                    shape_for(piece.nbytes, "load", BLOCKS),
                    registrations=table,
                )
            ]
            plan.derived[key] = table, made
        return plan.derived[key][1]


@dataclass(frozen=True)
class Chunk:
    """Items that a half takes at a time, from number `first` on, and the copies between it and the host."""

    first: int
    count: int
    half: int
    host: np.ndarray
    staging: np.ndarray
    nbytes: np.ndarray
