"""Backups and loads of a stack: queued, merged, put in order with the model's work and each other, acknowledged.

A backup begins after what the caller's stream was given so far, after the write fence (the stream of a forward pass
that may still write the rows) and after loads that touch the same slots; a load likewise. One stream carries all
backups, one all loads. Loads are submitted layer by layer over all pools, and `wait_until` lets the model's stream
wait for one layer. Slots of an operation are locked, on both sides, from when it is queued until it is acknowledged:
they can be freed meanwhile, but nobody gets them. States that a model overwrites in place are read before the caller's
stream goes on.

Steps and rules of upstream's `srt/managers/cache_controller.py` and `srt/mem_cache/l2_transfer.py`.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Protocol

import torch

from refimpl.allocator import PageAllocator
from refimpl.backends import registry
from refimpl.device_pool import DevicePool
from refimpl.geometry import PoolSpec
from refimpl.hooks import Hooks
from refimpl.host_pool import HostPool
from refimpl.indices import check_pair
from refimpl.layer_done import SETS, LayerDone
from refimpl.operations import (
    Ack,
    Batch,
    LookedUp,
    Operation,
    Touched,
    add_pages,
    count,
    opposite,
    overlap,
)
from refimpl.pool_group import HostPoolGroup, PoolTransfer
from refimpl.runtime import Event, Runtime, Stream
from refimpl.support import DIRECTIONS
from refimpl.teardown import call_all
from refimpl.transfer import Transfer
from refimpl.windows import Window, require_rows

Reclaim = Callable[[str, int], object]  # called with a pool that is full, and the slots that it lacks


class Stack(Protocol):
    """What a controller needs to know of the pools of a model (see `assembler.Stack`).

    device_slots  allocators of device slots, for pools that own indices; an engine with its own passes none
    num_layers    model layers of all pools, holes included
    """

    @property
    def host(self) -> HostPoolGroup: ...
    @property
    def device(self) -> Mapping[str, DevicePool]: ...
    @property
    def device_slots(self) -> Mapping[str, PageAllocator]: ...
    @property
    def platform(self) -> str: ...
    @property
    def num_layers(self) -> int: ...


class Controller:
    """
    hooks        steps to hold, delay or let fail
    write_fence  the stream of forward passes that may still write what is backed up, where it is not the caller's
    load_fence   the stream of forward passes that may still use device slots that are loaded into, likewise
    """

    def __init__(
        self,
        stack: Stack,
        hooks: Hooks | None = None,
        write_fence: Stream | None = None,
        load_fence: Stream | None = None,
        runtime: Runtime | None = None,
    ) -> None:
        self.stack, self.host, self.hooks = stack, stack.host, hooks or Hooks()
        self.runtime = runtime or registry.runtime(stack.platform)
        self.layers = LayerDone(self.runtime, stack.num_layers)
        self.fences = {"backup": write_fence, "load": load_fence}
        self._numbers = itertools.count()
        self._streams = {direction: self.runtime.stream() for direction in DIRECTIONS}
        self._queued: dict[str, list[Operation]] = {direction: [] for direction in DIRECTIONS}
        self._in_flight: dict[str, deque[Batch]] = {direction: deque() for direction in DIRECTIONS}

    # ---- queueing

    def write(
        self, tag: Hashable, transfers: Sequence[PoolTransfer], reclaim: Reclaim | None = None
    ) -> Operation | None:
        """Queue a backup. Host indices of None are allocated, or taken over by a sidecar.

        None, and nothing is taken, when a host pool is full, also after `reclaim`. `ValueError` for lists that no
        transfer would accept, and for slots that are not allocated.
        """
        resolved = self.host.resolve(transfers, reclaim)
        if resolved is None:
            return None
        given = {t.name for t in transfers if t.host_indices is not None}
        owners = [t for t in resolved if t.name == self.host.owner(t.name) and t.name not in given]
        taken = [("host", t.name, t.host_indices) for t in owners if t.host_indices is not None]
        return self._queue(Operation(tag, "backup", tuple(resolved), taken, next(self._numbers)))

    def load(
        self, tag: Hashable, transfers: Sequence[PoolTransfer], reclaim: Reclaim | None = None
    ) -> Operation | None:
        """Queue a load. Device indices of None are allocated, or taken over by a sidecar.

        None, and nothing is taken, when a device pool is full, also after `reclaim`. Errors as of `write`.
        """
        taken: list[tuple[str, str, torch.Tensor]] = []
        filled: dict[str, PoolTransfer] = {}
        try:
            for t in sorted(transfers, key=lambda t: t.name):
                filled[t.name] = t
                if t.host_indices is None and t.device_indices is not None and self.host.owner(t.name) == t.name:
                    raise ValueError(f"pool {t.name!r}: a load needs the host slots that it is to read")
                if t.device_indices is None and t.host_indices is not None and t.name in self.stack.device_slots:
                    slots = self._device_slots(t.name, t.host_indices.numel(), reclaim)
                    if slots is None:
                        self._give_back(taken)
                        return None
                    taken.append(("device", t.name, slots))
                    filled[t.name] = replace(t, device_indices=slots)
            resolved = self.host.resolve([filled[t.name] for t in transfers])
            assert resolved is not None, "a load allocates no host slots"
        except BaseException:
            self._give_back(taken)
            raise
        return self._queue(Operation(tag, "load", tuple(resolved), taken, next(self._numbers)))

    def _device_slots(self, name: str, need: int, reclaim: Reclaim | None) -> torch.Tensor | None:
        slots = self.stack.device_slots[name].alloc(need)
        if slots is None and reclaim is not None:
            reclaim(name, need)
            slots = self.stack.device_slots[name].alloc(need)
        return slots

    def _queue(self, operation: Operation) -> Operation:
        """Pin the lists, check them, lock the slots. What fails leaves nothing behind."""
        try:
            operation.transfers = self._pinned(operation.transfers)
            for t in operation.transfers:
                self._check(t, operation.direction)
                self._note_pages(t, operation.touched)
            self._lock(operation)
        except BaseException:
            self._give_back(operation.taken)
            raise
        self._queued[operation.direction].append(operation)
        return operation

    def _pinned(self, transfers: Sequence[PoolTransfer]) -> tuple[PoolTransfer, ...]:
        """With copies of the lists, shared where they were, and windows as they are now where that is what counts."""
        copies: dict[int, torch.Tensor | Window] = {}

        def pinned(indices: torch.Tensor | Window) -> torch.Tensor | Window:
            if id(indices) not in copies:
                copies[id(indices)] = self._as_it_is_now(indices)
            return copies[id(indices)]

        found = []
        for t in transfers:
            host = None if t.host_indices is None else pinned(t.host_indices)
            assert not isinstance(host, Window), "windows are of the device"
            found.append(PoolTransfer(t.name, host, None if t.device_indices is None else pinned(t.device_indices)))
        return tuple(found)

    def _as_it_is_now(self, indices: torch.Tensor | Window) -> torch.Tensor | Window:
        if isinstance(indices, torch.Tensor):
            return self.runtime.joined([indices]) if self.runtime.holds(indices) else indices.clone()
        if indices.when == "running":
            return replace(indices, full=indices.full.clone())
        slots = indices.slots().cpu()
        require_rows(indices, slots)
        return slots

    def _check(self, t: PoolTransfer, direction: str) -> None:
        """What a transfer would refuse, now and for this operation alone."""
        if isinstance(t.device_indices, Window):
            return
        host, device = self.host.pools[t.name], self.stack.device[t.name]
        check_pair(
            t.host_indices,
            t.device_indices,
            host.page_size,
            host.num_pages,
            device.num_pages,
            direction,
            lambda side, indices: self.runtime.holds(indices),
        )

    def _lock(self, operation: Operation) -> None:
        done: list[Callable[[], None]] = []
        try:
            for allocator, slots in self._locks(operation):
                allocator.lock(slots)
                done.append(partial(allocator.unlock, slots))
        except BaseException:
            call_all(done)
            raise

    def _locks(self, operation: Operation) -> Iterable[tuple[HostPool | PageAllocator, torch.Tensor]]:
        """Slots of an operation on both sides, with what hands them out. Lists on a GPU are their owner's affair."""
        lists: dict[Hashable, tuple[HostPool | PageAllocator, torch.Tensor]] = {}  # riders' and owner's are one
        for t in operation.transfers:
            owner, device = self.host.owner(t.name), t.device_indices
            if t.host_indices is not None and not self.runtime.holds(t.host_indices):
                lists["host", owner, id(t.host_indices)] = self.host.pools[owner], t.host_indices
            if owner not in self.stack.device_slots or not isinstance(device, torch.Tensor):
                continue
            if not self.runtime.holds(device):
                lists["device", owner, id(device)] = self.stack.device_slots[owner], device
        return lists.values()

    def _give_back(self, taken: Iterable[tuple[str, str, torch.Tensor]]) -> None:
        """But for what was freed meanwhile."""
        for side, name, slots in taken:
            (self.host.pools[name] if side == "host" else self.stack.device_slots[name]).free_rest(slots)

    # ---- submitting

    def start_writing(self) -> int:
        """Submit the backups that are queued. Returns in how many batches."""
        batches = self._batches("backup")
        for batch in batches:
            self._begin(batch)
            in_place = [name for name in batch.names() if overwritten_in_place(self.host.pools[name].spec)]
            others = [name for name in batch.names() if name not in in_place]
            for name in in_place:
                self._move(batch, name)
            if in_place:
                self._protect()
            for name in others:
                self._move(batch, name)
            self._end(batch)
        return len(batches)

    def start_loading(self) -> int | None:
        """Submit the loads that are queued, once for each step of the model. Returns the producer to wait for.

        None when there is nothing to load, while `SETS` batches of loads are waiting to be acknowledged, and while
        the first load in the queue must come after a backup that is queued still: submit backups first.
        """
        batches = self._batches("load") if len(self._in_flight["load"]) < SETS else []
        if not batches:
            return None
        *first, last = batches
        for batch in first:  # what `last` overwrites again
            self._begin(batch)
            for name in batch.names():
                self._move(batch, name)
            self._end(batch)
        producer = self.layers.produce()
        self._begin(last)
        for layer in range(self.stack.num_layers):
            self._load_layer(last, layer, producer)
        self._end(last)
        for batch in batches:
            if batch.error:
                self.layers.fail(producer, batch.error)
        return producer

    def _load_layer(self, batch: Batch, layer: int, producer: int) -> None:
        """One layer of every pool, and the event of its arrival."""
        batch.attempt(partial(self.hooks.reached, f"load layer {layer}", self.runtime, self._streams["load"]))
        for name in batch.names():
            by_layer = loads_by_layer(self.host.pools[name])
            if layer == 0 or by_layer:
                self._move(batch, name, (layer,) if by_layer else None)
        self.layers.record(producer, self._streams["load"])

    def _batches(self, direction: str) -> list[Batch]:
        if self.hooks.held(f"{direction} submit"):
            return []
        return [Batch(direction, group, self._touched(group)) for group in self._merged(self._take(direction))]

    def _take(self, direction: str) -> list[Operation]:
        """What is queued, up to the first that must come after something the other way that is queued still."""
        queued = self._queued[direction]
        others = self._queued[opposite(direction)]
        ready = 0
        for operation in queued:
            before = (other for other in others if other.number < operation.number)
            if any(overlap(operation.touched, other.touched) for other in before):
                break
            ready += 1
        taken, self._queued[direction] = queued[:ready], queued[ready:]
        return taken

    def _merged(self, operations: Sequence[Operation]) -> list[list[Operation]]:
        """Neighbours together, as long as no slot is written by two of them: which one would win?"""
        groups: list[list[Operation]] = []
        for operation in operations:
            if groups and self._mergeable(groups[-1], operation):
                groups[-1].append(operation)
            else:
                groups.append([operation])
        return groups

    def _mergeable(self, group: Sequence[Operation], operation: Operation) -> bool:
        conflict = any(overlap(operation.written, other.written) for other in group)
        return not conflict and all(self._places(operation) == self._places(other) for other in group[-1:])

    def _places(self, operation: Operation) -> dict[str, list[bool | None]]:
        """Whether the lists of each pool lie on the device; None where there is no list yet."""
        return {
            t.name: [self.runtime.holds(i) if isinstance(i, torch.Tensor) else None for i in t.lists()]
            for t in operation.transfers
        }

    def _touched(self, operations: Iterable[Operation]) -> Touched:
        found: Touched = {}
        for place, pages in (item for operation in operations for item in operation.touched.items()):
            add_pages(found, place, pages)
        return found

    def _note_pages(self, t: PoolTransfer, touched: Touched) -> None:
        owner = self.host.owner(t.name)
        unit = self.host.pools[owner].page_size
        for side, slots in (("host", t.host_indices), ("device", t.device_indices)):
            if isinstance(slots, Window) or (slots is not None and self.runtime.holds(slots)):
                add_pages(touched, (side, owner), None)
            elif slots is not None:
                add_pages(touched, (side, owner), set((slots.numpy()[::unit] // unit).tolist()))

    def _begin(self, batch: Batch) -> None:
        """Put the batch in order with everything that it must come after."""
        stream = self._streams[batch.direction]
        for event in self._events_before(batch):
            self.runtime.wait(stream, event)
        batch.begun = self.runtime.record(stream, timed=True)
        batch.attempt(partial(self.hooks.reached, f"{batch.direction} submit"))

    def _events_before(self, batch: Batch) -> list[Event]:
        """The caller's work so far, the forward passes', and transfers the other way of the same slots."""
        streams = [stream for stream in (self.runtime.current(), self.fences[batch.direction]) if stream is not None]
        earlier = [other for other in self._in_flight[opposite(batch.direction)] if batch.conflicts(other)]
        return [self.runtime.record(s) for s in streams] + [other.finished for other in earlier if other.finished]

    def _move(self, batch: Batch, name: str, layers: tuple[int, ...] | None = None) -> None:
        """Some layers of a pool, or whatever is left of it."""
        stream = self._streams[batch.direction]

        def move() -> None:
            if name not in batch.transfers:
                batch.transfers[name] = self._prepare(batch, name, stream)
            batch.receipts.setdefault(name, []).append(batch.transfers[name].run(layers))

        with self.hooks.watching(batch.direction):
            batch.attempt(partial(self.runtime.issue, stream, partial(batch.attempt, move)))

    def _prepare(self, batch: Batch, name: str, stream: Stream) -> Transfer:
        parts = batch.transfers_of(name)
        host = self._joined([t.host_indices for t in parts])
        device = self._joined([self._slots(batch, t.device_indices, stream) for t in parts])
        batch.kept += [host, device]
        return self.host.pools[name].prepare(self.stack.device[name], host, device, batch.direction)

    def _joined(self, lists: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
        present = [indices for indices in lists if indices is not None]
        if any(self.runtime.holds(indices) for indices in present):
            return self.runtime.joined(present)
        return torch.cat([indices.to(torch.int64) for indices in present]) if present else None

    def _slots(self, batch: Batch, slots: torch.Tensor | Window | None, stream: Stream) -> torch.Tensor | None:
        """Device slots; those of a window are looked up now, once for all pools that share them."""
        if not isinstance(slots, Window):
            return slots
        for kept in batch.kept:
            if isinstance(kept, LookedUp) and kept.window is slots:
                return kept.slots
        found = slots.slots()
        if self.runtime.holds(found):
            told = self.runtime.download(stream, found)
            batch.verdicts.append(partial(require_rows, slots, told))
        else:
            require_rows(slots, found)
        batch.kept.append(LookedUp(slots, found))
        return found

    def _end(self, batch: Batch) -> None:
        batch.finished = self.runtime.record(self._streams[batch.direction], timed=True)
        self._in_flight[batch.direction].append(batch)

    def _protect(self) -> None:
        """The model's next step, which overwrites states in place, comes after the copies so far."""
        copied = self.runtime.record(self._streams["backup"])
        for stream in (self.runtime.current(), self.fences["backup"]):
            if stream is not None:
                self.runtime.wait(stream, copied)

    # ---- waiting

    def set_consumer(self, producer: int | None) -> None:
        """What `start_loading` returned, for the forward pass that is submitted next; None if it loads nothing."""
        self.layers.set_consumer(producer)

    def wait_until(self, layer: int, pool: str | None = None) -> None:
        """Let the current stream wait for a model layer, or not, if `pool` owns nothing of it. The host goes on."""
        if pool is None or layer in self.host.pools[pool].spec.owned_layers:
            self.layers.wait_until(layer)

    def wait_for_all_of(self, pool: str) -> None:
        """Let the current stream wait for every layer of a pool: for consumers of whole states (SGLang issue 36743)."""
        owned = self.host.pools[pool].spec.owned_layers
        self.layers.wait_until(max(owned, default=0))

    def acknowledge(self, wait: bool = False) -> list[Ack]:
        """Operations that have ended since, in the order in which they were submitted; `wait`: all, as they end.

        Their slots are no longer locked. What a failed one had allocated is free again.
        """
        acks: list[Ack] = []
        for direction in DIRECTIONS:
            flights = self._in_flight[direction]
            while flights and not self.hooks.held(f"{direction} acknowledge") and (wait or self.arrived(flights[0])):
                acks += self._settle(flights.popleft())
        return acks

    def arrived(self, batch: Batch) -> bool:
        """Every byte is where it belongs, and visible."""
        return batch.finished is not None and batch.finished.query()

    def _settle(self, batch: Batch) -> list[Ack]:
        assert batch.begun is not None
        assert batch.finished is not None
        batch.attempt(batch.finished.synchronize, even_so=True)  # before its slots go to others
        for receipt in (r for receipts in batch.receipts.values() for r in receipts):
            batch.attempt(receipt.wait)
        for verdict in batch.verdicts:
            batch.attempt(verdict)
        batch.attempt(partial(self._require_complete, batch))
        batch.attempt(partial(self.hooks.reached, f"{batch.direction} acknowledge"))
        seconds = 0.0 if batch.error else self.runtime.seconds(batch.begun, batch.finished)
        return [self._ended(operation, batch, seconds) for operation in batch.operations]

    def _require_complete(self, batch: Batch) -> None:
        for name in batch.names():
            expected = sum(map(self._bytes, batch.transfers_of(name)))
            moved = sum(receipt.bytes for receipt in batch.receipts.get(name, []))
            if moved != expected:
                raise RuntimeError(f"pool {name!r}: {moved:,} of {expected:,} bytes were moved")

    def _bytes(self, t: PoolTransfer) -> int:
        spec = self.host.pools[t.name].spec
        return count(t) // spec.page_size * spec.page_bytes

    def _ended(self, operation: Operation, batch: Batch, seconds: float) -> Ack:
        if batch.error:
            self._give_back(operation.taken)
        call_all(partial(allocator.unlock, slots) for allocator, slots in self._locks(operation))
        if batch.error:
            return Ack(operation.tag, batch.direction, {}, {}, seconds, batch.error)
        tokens = {t.name: count(t) for t in operation.transfers}
        nbytes = {t.name: self._bytes(t) for t in operation.transfers}
        return Ack(operation.tag, batch.direction, tokens, nbytes, seconds, receipts=batch.receipts)

    def drop(self, operation: Operation) -> None:
        """Take back what is queued and was not submitted; slots that it had allocated are free again."""
        self._queued[operation.direction].remove(operation)
        self._give_back(operation.taken)
        call_all(partial(allocator.unlock, slots) for allocator, slots in self._locks(operation))

    def close(self) -> None:
        """Drop what is queued, wait for what is under way. Idempotent; the pools stay open."""
        for operation in [o for queued in self._queued.values() for o in queued]:
            self.drop(operation)
        with suppress(Exception):
            self.acknowledge(wait=True)


def overwritten_in_place(spec: PoolSpec) -> bool:
    """Whether a model writes the same rows at every step: recurrent states, and the state rings of DeepSeek V4."""
    return spec.family == "v4_state" or any(c.unit == "slot" for c in spec.components)


def loads_by_layer(pool: HostPool) -> bool:
    """Not with `staged` where a page's layers are interleaved: every layer would take the bus for the whole page."""
    return not (pool.backend == "staged" and pool.layout != "page_first_direct")
