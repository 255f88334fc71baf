"""What is asked of a controller, until it is submitted: slots, lists, locks, and what can go together.

Lists are copied when an operation is queued, so that the caller may drop or change his. Slots are locked on both sides
from then on: they can be freed, but nobody gets them before the operation has ended. Two things cannot be locked,
because the host does not know them: slots in a list that lies on a GPU, and those of a window that is looked up when
the copy runs. Whoever hands these out keeps them until the acknowledgement.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import torch

from refimpl.allocator import PageAllocator
from refimpl.backends import registry
from refimpl.device_pool import DevicePool
from refimpl.hooks import Hooks
from refimpl.indices import check_pair
from refimpl.operations import Batch, Lock, Operation, Touched, add_pages, opposite, overlap
from refimpl.pool_group import HostPoolGroup, PoolTransfer
from refimpl.runtime import Runtime
from refimpl.support import DIRECTIONS
from refimpl.teardown import call_all
from refimpl.windows import Window, require_rows

Reclaim = Callable[[str, int], object]  # called with a pool that is full, and the slots that it lacks
Locks = dict[tuple[str, str, int], Lock]  # by side, owner and list


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


class Queues:
    """One for each direction. `hooks`: steps to hold, delay or let fail."""

    def __init__(self, stack: Stack, hooks: Hooks | None = None, runtime: Runtime | None = None) -> None:
        if not isinstance(hooks, Hooks | None):
            raise TypeError(f"hooks are a Hooks, which holds, delays or fails steps; got {hooks!r:.80}")
        self.stack, self.host, self.hooks = stack, stack.host, hooks or Hooks()
        self.runtime = runtime or registry.runtime(stack.platform)
        self._numbers = itertools.count()
        self._queued: dict[str, list[Operation]] = {direction: [] for direction in DIRECTIONS}

    def write(
        self, tag: Hashable, transfers: Sequence[PoolTransfer], reclaim: Reclaim | None = None
    ) -> Operation | None:
        """Queue a backup. Host indices of None are allocated, or taken over by a sidecar.

        None, and nothing is taken, when a host pool is full, also after `reclaim(pool, slots that it lacks)`.
        `ValueError` for lists that no transfer would accept, and for slots that are not allocated.
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

        None, and nothing is taken, when a device pool is full, also after `reclaim(pool, slots that it lacks)`.
        Errors as of `write`.
        """
        self.host.require_known(transfers)
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

    def queued(self, direction: str) -> tuple[Operation, ...]:
        """What waits to be submitted, in order."""
        return tuple(self._queued[direction])

    # ---- what an operation takes

    def _device_slots(self, name: str, need: int, reclaim: Reclaim | None) -> torch.Tensor | None:
        slots = self.stack.device_slots[name].alloc(need)
        if slots is None and reclaim is not None:
            reclaim(name, need - self.stack.device_slots[name].available_size())
            slots = self.stack.device_slots[name].alloc(need)
        return slots

    def _queue(self, operation: Operation) -> Operation:
        """Copy the lists, check them, lock the slots. What fails leaves nothing behind."""
        try:
            operation.transfers = self._pinned(operation.transfers)
            operation.places = {
                t.name: (self._holds(t.host_indices), self._holds(t.device_indices)) for t in operation.transfers
            }
            if any(True in places for places in operation.places.values()):
                operation.listed = self.runtime.record(self.runtime.current())
            self._check(operation)
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
        """A copy, made in order of the caller's stream if it lies on the device."""
        if isinstance(indices, torch.Tensor):
            return self.runtime.joined([indices]) if self.runtime.holds(indices) else indices.clone()
        if indices.when == "running":
            full = self._as_it_is_now(indices.full)
            assert isinstance(full, torch.Tensor)
            return replace(indices, full=full)
        slots = self._looked_up(indices)
        if self.runtime.holds(slots):
            slots = self.runtime.download(self.runtime.current(), slots)
            self.runtime.record(self.runtime.current()).synchronize()
        require_rows(indices, slots)
        return slots

    def _looked_up(self, window: Window) -> torch.Tensor:
        """Slots of a window as its table stands now, in order of the caller's stream if that lies on the device."""
        if not self.runtime.holds(window.full):  # of a list that does, the rows that are missing tell it later
            window.require_inside()
        if self._looked_up_there(window):
            return self.runtime.found(window.slots, window.numel())
        return window.slots()

    def _looked_up_there(self, window: Window) -> bool:
        """Whether its slots are found on the device. `ValueError` for a list there and a table that is not."""
        full, mapping = self.runtime.holds(window.full), self.runtime.holds(window.mapping)
        if full and not mapping:
            raise ValueError(
                f"a window's full slots lie on {self.runtime.name}, its mapping on {window.mapping.device}: a table is "
                f"read where it lies; bring the slots there (full.cpu()), or keep the table on {self.runtime.name}"
            )
        return mapping

    def _holds(self, indices: torch.Tensor | Window | None) -> bool | None:
        """Whether a list lies on the device, or what a window is looked up in does."""
        if isinstance(indices, Window):
            return self._looked_up_there(indices)
        return None if indices is None else self.runtime.holds(indices)

    def _check(self, operation: Operation) -> None:
        """What a transfer would refuse, now and for this operation alone. Riders share their owner's lists."""
        done: set[tuple[str, int, int]] = set()
        for t in sorted(operation.transfers, key=lambda t: t.name != self.host.owner(t.name)):
            lists = self.host.owner(t.name), id(t.host_indices), id(t.device_indices)
            if lists not in done:
                done.add(lists)
                self._check_lists(t, operation.direction)
                self._note_pages(t, operation.touched)

    def _check_lists(self, t: PoolTransfer, direction: str) -> None:
        if isinstance(t.device_indices, Window):
            return
        host, device = self.host.pools[t.name], self.stack.device[t.name]
        sizes = host.page_size, host.num_pages, device.num_pages
        try:
            check_pair(t.host_indices, t.device_indices, *sizes, direction, lambda side, i: self.runtime.holds(i))
        except ValueError as wrong:
            raise ValueError(f"pool {t.name!r}: {wrong}") from wrong

    def _note_pages(self, t: PoolTransfer, touched: Touched) -> None:
        owner = self.host.owner(t.name)
        unit = self.host.pools[owner].page_size
        for side, slots in (("host", t.host_indices), ("device", t.device_indices)):
            if isinstance(slots, Window) or (slots is not None and self.runtime.holds(slots)):
                add_pages(touched, (side, owner), None)
            elif slots is not None:
                add_pages(touched, (side, owner), set((slots.numpy()[::unit] // unit).tolist()))

    def _lock(self, operation: Operation) -> None:
        locks = self._locks(operation)
        operation.locks = list(locks.values())
        try:
            for (side, owner, _), lock in locks.items():
                try:
                    lock.set()
                except ValueError as wrong:
                    raise ValueError(f"pool {owner!r}: {side} {wrong}") from wrong
        except BaseException:
            call_all(lock.undo for lock in operation.locks)
            raise

    def _locks(self, operation: Operation) -> Locks:
        """Slots of an operation on both sides, with what hands them out. Lists on a GPU are their owner's affair."""
        lists: Locks = {}  # riders' and owner's are one
        for t in operation.transfers:
            owner, device = self.host.owner(t.name), t.device_indices
            if t.host_indices is not None and not self.runtime.holds(t.host_indices):
                lists["host", owner, id(t.host_indices)] = Lock(self.host.pools[owner].allocator, t.host_indices)
            if owner not in self.stack.device_slots or not isinstance(device, torch.Tensor):
                continue
            if not self.runtime.holds(device):
                lists["device", owner, id(device)] = Lock(self.stack.device_slots[owner], device)
        return lists

    def _give_back(self, taken: list[tuple[str, str, torch.Tensor]]) -> None:
        """But for what was freed meanwhile, and once: later the same slots may be somebody else's."""
        while taken:
            side, name, slots = taken[0]
            (self.host.pools[name] if side == "host" else self.stack.device_slots[name]).free_rest(slots)
            del taken[0]

    # ---- what can be submitted

    def _batches(self, direction: str) -> list[Batch]:
        """Of the operations at the head of a queue; they stay there."""
        return [] if self.hooks.held(f"{direction} submit") else self._merged(direction, self._head(direction))

    def _head(self, direction: str) -> list[Operation]:
        """What is queued, up to the first that must come after something the other way that is queued still."""
        return self._queued[direction][: self._ready(direction)]

    def _ready(self, direction: str) -> int:
        """How many at the head of a queue need not wait for what was queued before them, the other way."""
        before: Touched = {}
        others = deque(self._queued[opposite(direction)])
        for ready, operation in enumerate(self._queued[direction]):
            while others and others[0].number < operation.number:
                for place, pages in others.popleft().touched.items():
                    add_pages(before, place, pages)
            if overlap(operation.touched, before):
                return ready
        return len(self._queued[direction])

    def _merged(self, direction: str, operations: Sequence[Operation]) -> list[Batch]:
        """Neighbours together, as long as no slot is written by two of them: which one would win?"""
        batches: list[Batch] = []
        for operation in operations:
            if not batches or not self._mergeable(batches[-1], operation):
                batches.append(Batch(direction))
            batches[-1].add(operation)
        return batches

    def _mergeable(self, batch: Batch, operation: Operation) -> bool:
        alike = batch.operations[-1].places == operation.places
        written = {place: pages for place, pages in operation.touched.items() if place in batch.written}
        return alike and not overlap(batch.written, written)
