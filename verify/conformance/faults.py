"""Controllers with one fault each, and which checks find it: a check that finds nothing proves nothing."""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeGuard

import numpy as np
import torch

from refimpl import PoolTransfer, slots_of
from refimpl.controller import Controller
from refimpl.layer_done import SETS
from refimpl.operations import Ack, Batch, Operation, opposite, overlap
from refimpl.queueing import Locks, Reclaim
from refimpl.radix import Node, PrefixCache, Ticket
from refimpl.runtime import Event, Stream
from refimpl.transfer import Transfer
from refimpl.windows import When, Window
from verify.conformance.checks import (
    Check,
    acknowledgements,
    failures,
    layers,
    lifetimes,
    lists,
    order,
    queueing,
    trees,
)


@dataclass(frozen=True)
class Fault:
    """
    checks    each must find it, alone
    says      what is said then (a pattern): bytes that are wrong, not an exception on the way there
    kind      of a stack on which it shows
    backends  with which it does, or backends and layouts ("staged page_first"); none: with all
    """

    make: Callable[..., Any]
    checks: tuple[Check, ...]
    says: str
    kind: str
    backends: tuple[str, ...]

    def shows_with(self, backend: str, layout: str) -> bool:
        return not self.backends or not {backend, f"{backend} {layout}"}.isdisjoint(self.backends)


FAULTS: list[Fault] = []

# What loads a pool layer by layer: `staged` does not where the layers of a page lie together.
BY_LAYER = ("torch", "numba", "direct", "kernel", "auto", "staged page_first_direct")


def found_by(*checks: Check, says: str, kind: str = "mha", backends: tuple[str, ...] = ()) -> Callable[[type], type]:
    def listed(make: type) -> type:
        FAULTS.append(Fault(make, checks, says, kind, backends))
        return make

    return listed


# ---- order


@found_by(
    order.check_backup_reads_what_the_caller_wrote,
    order.check_load_leaves_what_the_caller_reads,
    says="writer that was held: .* holds what was there before|reader that was held, .* holds what the host has",
)
class ForgetsTheCaller(Controller):
    def _events_before(self, batch: Batch) -> list[Event]:
        with self.runtime.on(self.runtime.stream()):
            return super()._events_before(batch)


@found_by(
    order.check_backup_reads_what_a_forward_pass_wrote, says="writer that was held: .* holds what was there before"
)
class ForgetsTheWriteFence(Controller):
    def _events_before(self, batch: Batch) -> list[Event]:
        return _without_fence(self, "backup", partial(super()._events_before, batch))


@found_by(order.check_load_leaves_what_a_forward_pass_reads, says="reader that was held, .* holds what the host has")
class ForgetsTheLoadFence(Controller):
    def _events_before(self, batch: Batch) -> list[Event]:
        return _without_fence(self, "load", partial(super()._events_before, batch))


@found_by(
    order.check_load_of_what_is_being_backed_up,
    order.check_backup_of_what_is_being_loaded,
    order.check_load_over_what_is_being_backed_up,
    order.check_backup_over_what_is_being_loaded,
    says="in flight: .* holds what lay on|a (backup|load), and a (load|backup) over its .* holds what",
    backends=("torch", "numba", "direct", "kernel"),  # staged: half of the order comes with its buffer
)
class ForgetsTheOtherDirection(Controller):
    def _events_before(self, batch: Batch) -> list[Event]:
        flights, self._in_flight = self._in_flight, {direction: type(q)() for direction, q in self._in_flight.items()}
        try:
            return super()._events_before(batch)
        finally:
            self._in_flight = flights


@found_by(
    order.check_a_backup_comes_after_every_load_of_its_slots,
    order.check_a_load_comes_after_every_backup_of_its_slots,
    says="slots of two (loads|backups): .* holds what lay on",
    backends=("torch", "numba", "direct", "kernel"),
)
class WaitsForTheOldestConflict(Controller):
    def _events_before(self, batch: Batch) -> list[Event]:
        flights, other = self._in_flight, opposite(batch.direction)
        conflicts = [each for each in flights[other] if overlap(batch.touched, each.touched)]
        self._in_flight = flights | {other: deque(conflicts[:1])}
        try:
            return super()._events_before(batch)
        finally:
            self._in_flight = flights


@found_by(
    order.check_directions_do_not_wait_for_each_other,
    says="a load waits for a backup of other slots",
    backends=("torch", "numba", "direct", "kernel", "auto"),
)
class OneStreamForAll(Controller):
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._streams = dict.fromkeys(self._streams, self.runtime.stream())


@found_by(
    order.check_loads_come_one_after_another,
    order.check_backups_come_one_after_another,
    says="holds (load|backup) 0, not (load|backup) 1",
    backends=("torch", "numba", "direct", "kernel", "auto"),  # staged has one buffer for all
)
class AStreamForEveryBatch(Controller):
    def _begin(self, batch: Batch) -> None:
        self._streams[batch.direction] = self.runtime.stream()
        super()._begin(batch)


@found_by(order.check_queued_operations_keep_their_order, says="queued behind a backup: .* holds what lay on the host")
class TakesAllThatIsQueued(Controller):
    def _head(self, direction: str) -> list[Operation]:
        return list(self._queued[direction])


@found_by(order.check_the_host_does_not_wait, says="waits for what is held: the device waits for an event")
class TheHostWaits(Controller):
    def start_writing(self) -> int:
        self.runtime.record(self.runtime.current()).synchronize()
        return super().start_writing()


# ---- lifetimes


@found_by(
    lifetimes.check_host_slots_freed_under_a_load, says="host slots .* go to somebody else while a load is queued"
)
class LocksNothingOnTheHost(Controller):
    def _locks(self, operation: Operation) -> Locks:
        return {where: lock for where, lock in super()._locks(operation).items() if where[0] != "host"}


@found_by(
    lifetimes.check_device_slots_freed_under_a_backup,
    lifetimes.check_slots_are_locked_once_for_each_operation,
    says="device slots .* go to somebody else while a (second )?backup is queued",
)
class LocksNothingOnTheDevice(Controller):
    def _locks(self, operation: Operation) -> Locks:
        return {where: lock for where, lock in super()._locks(operation).items() if where[0] != "device"}


@found_by(
    lifetimes.check_states_overwritten_by_the_caller,
    lifetimes.check_states_overwritten_by_a_forward_pass,
    says="holds the states of the next step",
    kind="mamba",
)
@found_by(lifetimes.check_states_overwritten_by_the_caller, says="holds the states of the next step", kind="v4")
class LetsStatesBeOverwritten(Controller):
    def _protect(self, copied: Event) -> None:
        pass


@found_by(lifetimes.check_states_overwritten_by_a_forward_pass, says="holds the states of the next step", kind="mamba")
class LetsForwardPassesOverwriteStates(Controller):
    def _protect(self, copied: Event) -> None:
        _without_fence(self, "backup", partial(super()._protect, copied))


@found_by(lifetimes.check_states_do_not_wait_for_other_backups, says="the next step waits for a backup", kind="mamba")
class CopiesStatesBehindOtherBackups(Controller):
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._streams["states"] = self._streams["backup"]


@found_by(
    lifetimes.check_states_do_not_wait_for_other_backups,
    says="a load of what is beside states: .* holds what lay on the host",
    kind="mamba",
    backends=("torch", "numba", "direct", "kernel", "auto"),  # staged: part of the order comes with its buffer
)
class ForgetsWhatIsBesideStates(Controller):
    """A batch has ended when its states are copied."""

    def _end(self, batch: Batch) -> None:
        batch.finished = self.runtime.record(self._streams_of(batch)[0], timed=True)


@found_by(lifetimes.check_one_list_for_both_sides, says="host slots .* go to somebody else")
class LocksEveryListOnce(Controller):
    def _locks(self, operation: Operation) -> Locks:
        return {("any", "any", where[2]): lock for where, lock in super()._locks(operation).items()}


@found_by(lists.check_loads_name_what_they_read, says="a load is accepted that says nothing")
class ReadsFromAnywhere(Controller):
    def load(
        self, tag: Hashable, transfers: Sequence[PoolTransfer], reclaim: Reclaim | None = None
    ) -> Operation | None:
        return super().load(tag, self.host.resolve(transfers) or (), reclaim)


@found_by(
    lists.check_lists_may_be_changed,
    lists.check_lists_may_be_dropped,
    says="int64 lists were changed .* holds|lists were dropped: .* holds",
)
class KeepsTheCallersLists(Controller):
    def _pinned(self, transfers: Sequence[PoolTransfer]) -> tuple[PoolTransfer, ...]:
        return tuple(transfers)

    def _locks(self, operation: Operation) -> Locks:
        return {}  # what was locked could not be found again


@found_by(
    lists.check_windows_as_they_were_queued,
    says="became another after it was queued: .* holds the new row",
    kind="swa-mamba",
)
class LooksWindowsUpLate(Controller):
    def _pinned(self, transfers: Sequence[PoolTransfer]) -> tuple[PoolTransfer, ...]:
        return super()._pinned(_looked_up(transfers, "running"))


@found_by(lists.check_windows_as_they_run, says="rebuilt before it was copied: .* holds the old row", kind="swa-mamba")
class LooksWindowsUpEarly(Controller):
    def _pinned(self, transfers: Sequence[PoolTransfer]) -> tuple[PoolTransfer, ...]:
        return super()._pinned(_looked_up(transfers, "queued"))


@found_by(lifetimes.check_staging_is_used_again_when_it_is_free, says="takes turns: .* holds", backends=("staged",))
class UsesStagingEarly(Controller):
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        for pool in self.host.pools.values():
            pool._mover._free = Unchanging(pool._mover._free)  # type: ignore[attr-defined]


class Unchanging(list[Event]):
    def __setitem__(self, *at: object) -> None:
        pass


@found_by(queueing.check_a_drop_gives_everything_back, says="slots are lost with what was dropped")
class DropsWhatItKeeps(Controller):
    def drop(self, operation: Operation) -> None:
        self._queued[operation.direction].remove(operation)


@found_by(
    queueing.check_a_drop_leaves_the_others, says="1 of 0, 1, 2 was dropped, failures are {0: True, 1: True, 2: True}"
)
class DropsAllThatIsQueued(Controller):
    def drop(self, operation: Operation) -> None:
        for each in list(self._queued[operation.direction]):
            super().drop(each)


@found_by(queueing.check_closing_drops_what_is_queued, says="closed, failures are {'under way': False}")
class ClosesWithoutDropping(Controller):
    def close(self) -> None:
        self.hooks.release()
        self._told = self.acknowledge(wait=True)


# ---- lists


@found_by(lists.check_lists_may_be_changed, says="int32 lists were changed .* holds")
class CopiesNoShortLists(Controller):
    def _as_it_is_now(self, indices: torch.Tensor | Window) -> torch.Tensor | Window:
        return indices if _is(indices, torch.int32) else super()._as_it_is_now(indices)

    def _locks(self, operation: Operation) -> Locks:
        return {}


@found_by(lists.check_lists_may_be_dropped, says="lists were dropped: .* holds")
class KeepsTheAddressesOfLists(Controller):
    def _as_it_is_now(self, indices: torch.Tensor | Window) -> torch.Tensor | Window:
        if not _is(indices, torch.int64):
            return super()._as_it_is_now(indices)
        there = (ctypes.c_int64 * indices.numel()).from_address(indices.data_ptr())
        return torch.from_numpy(np.ctypeslib.as_array(there))

    def _locks(self, operation: Operation) -> Locks:
        return {}


@found_by(lists.check_lists_on_the_device_are_read_in_order, says="lists on the device: .* holds")
class KeepsListsOnTheDevice(Controller):
    """As the caller left them, and then as they are later."""

    def _as_it_is_now(self, indices: torch.Tensor | Window) -> torch.Tensor | Window:
        there = isinstance(indices, torch.Tensor) and self.runtime.holds(indices)
        return indices if there else super()._as_it_is_now(indices)


@found_by(lists.check_lists_on_the_device_are_read_in_order, says="lists on the device: .* holds")
class ReadsListsBeforeTheyAreThere(Controller):
    def _as_it_is_now(self, indices: torch.Tensor | Window) -> torch.Tensor | Window:
        if not isinstance(indices, torch.Tensor) or not self.runtime.holds(indices):
            return super()._as_it_is_now(indices)
        with self.runtime.on(self.runtime.stream()):
            return self.runtime.joined([indices])


@found_by(
    lists.check_windows_of_a_table_on_the_device,
    says="rebuilt on the device: .* holds the old row",
    kind="swa-mamba",
)
class ReadsTablesBeforeTheyAreThere(Controller):
    def _looked_up(self, window: Window) -> torch.Tensor:
        return window.slots()


@found_by(lists.check_sources_may_be_named_twice, says="is refused that is right: .* twice")
class RefusesASourceNamedTwice(Controller):
    def _check_lists(self, t: PoolTransfer, direction: str) -> None:
        super()._check_lists(t, opposite(direction))
        super()._check_lists(t, direction)


@found_by(lists.check_nothing_to_do, says="is refused that is right: nothing to do")
class RefusesEmptyLists(Controller):
    def _check_lists(self, t: PoolTransfer, direction: str) -> None:
        super()._check_lists(t, direction)
        if t.host_indices is not None and not t.host_indices.numel():
            raise ValueError("nothing to do")


@found_by(lists.check_refused_lists_keep_nothing, says="is refused and keeps slots", kind="swa-mamba")
class KeepsTheSlotsOfARefusal(Controller):
    def _check(self, operation: Operation) -> None:
        taken, operation.taken = operation.taken, []
        super()._check(operation)
        operation.taken = taken


@found_by(queueing.check_full_pools_are_reclaimed, says="room was asked for: {}")
class AsksNobodyForRoom(Controller):
    def write(
        self, tag: Hashable, transfers: Sequence[PoolTransfer], reclaim: Reclaim | None = None
    ) -> Operation | None:
        return super().write(tag, transfers)

    def load(
        self, tag: Hashable, transfers: Sequence[PoolTransfer], reclaim: Reclaim | None = None
    ) -> Operation | None:
        return super().load(tag, transfers)


@found_by(queueing.check_full_pools_are_reclaimed, says="lacks {'kv': 4}, and room was asked for: {'kv': 8}")
class AsksForMoreRoomThanItLacks(Controller):
    def write(
        self, tag: Hashable, transfers: Sequence[PoolTransfer], reclaim: Reclaim | None = None
    ) -> Operation | None:
        need = {t.name: t.device_indices.numel() for t in transfers if t.device_indices is not None}
        return super().write(tag, transfers, reclaim and (lambda name, lacking: reclaim(name, need[name])))


# ---- batches


class _LetsTheFirstWriterWin(Controller):
    """Two operations in one transfer that write a page: any order is possible, if nobody refuses it."""

    def _prepare(self, batch: Batch, name: str, stream: Stream) -> Transfer:
        parts, pool = batch.transfers_of(name), self.host.pools[name]
        host = self._joined([t.host_indices for t in parts])
        device = self._joined([self._slots(batch, t.device_indices, stream) for t in parts])
        written = host if batch.direction == "backup" else device
        if host is None or device is None or written is None:
            return super()._prepare(batch, name, stream)
        first = np.unique(written[:: pool.page_size].numpy(), return_index=True)[1]
        rows = slots_of(np.sort(first), pool.page_size)
        return pool.prepare(self.stack.device[name], host[rows], device[rows], batch.direction)

    def _require_complete(self, batch: Batch) -> None:
        pass


@found_by(
    queueing.check_two_loads_of_the_same_slots,
    queueing.check_two_backups_to_the_same_slots,
    says="holds (load|backup) 0, not (load|backup) 1",
)
class MergesWhatOverlaps(_LetsTheFirstWriterWin):
    def _mergeable(self, batch: Batch, operation: Operation) -> bool:
        return True


@found_by(
    queueing.check_the_third_of_three_over_the_first,
    says="A again: .* holds 0 of three, not 2 of three|B and A again: .* holds 0",
)
class ComparesWithTheLastOperation(_LetsTheFirstWriterWin):
    def _mergeable(self, batch: Batch, operation: Operation) -> bool:
        last = Batch(batch.direction)
        last.add(batch.operations[-1])
        return super()._mergeable(last, operation)


@found_by(
    queueing.check_two_loads_of_the_same_slots,
    queueing.check_two_backups_to_the_same_slots,
    says="holds (load|backup) 0, not (load|backup) 1",
)
class TheFirstWins(Controller):
    def _merged(self, direction: str, operations: Sequence[Operation]) -> list[Batch]:
        return super()._merged(direction, operations)[::-1]


@found_by(queueing.check_disjoint_operations_are_merged, says="are 3 batches")
class MergesNothing(Controller):
    def _mergeable(self, batch: Batch, operation: Operation) -> bool:
        return False


@found_by(
    order.check_load_of_what_is_being_backed_up,
    says="in flight: .* holds what lay on the host",
    backends=("torch", "numba", "direct", "kernel"),
)
class SeesNoConflictOnTheHost(Controller):
    def _begin(self, batch: Batch) -> None:
        batch.touched = {place: pages for place, pages in batch.touched.items() if place[0] == "device"}
        super()._begin(batch)


# ---- layers


@found_by(
    layers.check_whole_states,
    says="a whole state copied .* holds what lay on the device",
    kind="mamba",
    backends=BY_LAYER,
)
@found_by(
    layers.check_whole_states,
    says="a whole state copied .* holds what lay on the device",
    kind="six-states",
    backends=BY_LAYER,
)
class WaitsForTheFirstLayerOfAState(Controller):
    def wait_for_all_of(self, pool: str) -> None:
        self.layers.wait_until(min(self.host.pools[pool].spec.owned_layers))


@found_by(
    layers.check_readers_of_layers,
    layers.check_whole_states,
    says="waits for more than that layer|waits for layer",
    kind="six-states",
)
class WaitsForTheLastLayer(Controller):
    def wait_until(self, layer: int, pool: str | None = None) -> None:
        super().wait_until(self.layers.layers - 1, pool)


@found_by(layers.check_readers_of_layers, says="layer 0 does not wait for it")
class RecordsALayerBeforeIt(Controller):
    def _load_layer(self, batches: Sequence[Batch], layer: int, producer: int) -> None:
        self.layers.record(producer, self._streams["load"])
        super()._load_layer(batches, layer, producer)


@found_by(layers.check_layers_of_nobody_never_block, says="layers that its pool does not own", kind="mamba")
class WaitsForLayersOfOtherPools(Controller):
    def wait_until(self, layer: int, pool: str | None = None) -> None:
        self.layers.wait_until(layer)


@found_by(layers.check_layers_of_nobody_never_block, says="waits that depends on no load")
class WaitsForLoadsOfOthers(Controller):
    def set_consumer(self, producer: int | None) -> None:
        super().set_consumer(0 if producer is None else producer)


@found_by(layers.check_layers_that_there_are_not, says="a wait for layer -1 .* passes")
class WaitsForNoSuchLayer(Controller):
    def wait_until(self, layer: int, pool: str | None = None) -> None:
        if 0 <= layer < self.layers.layers:
            super().wait_until(layer, pool)


@found_by(layers.check_no_more_loads_than_sets_of_events, says="4 loads are under way at once")
class ForgetsWhoseEventsTheyAre(Controller):
    def start_loading(self) -> int | None:
        flights, self._in_flight["load"] = self._in_flight["load"], type(self._in_flight["load"])()
        self.layers._sets[self.layers._produced % SETS] = []
        try:
            return super().start_loading()
        finally:
            self._in_flight["load"] = type(flights)([*flights, *self._in_flight["load"]])


# ---- acknowledgements and failures


@found_by(
    acknowledgements.check_backups_are_acknowledged_when_their_bytes_are_there,
    acknowledgements.check_loads_are_acknowledged_when_their_bytes_are_there,
    says="is acknowledged (before it is done|while 'load' is held)",
)
class AcknowledgesAtOnce(Controller):
    def arrived(self, batch: Batch) -> bool:
        return True

    def _conclude(self, batch: Batch) -> None:
        pass


@found_by(
    acknowledgements.check_loads_are_acknowledged_when_their_bytes_are_there,
    says="acknowledged while 'load layer 1' is held",
)
class AcknowledgesLoadsByTheirFirstLayer(Controller):
    def arrived(self, batch: Batch) -> bool:
        assert batch.producer is not None
        return self.layers._sets[batch.producer % SETS][0].query()

    def _conclude(self, batch: Batch) -> None:
        pass


@found_by(
    acknowledgements.check_backups_are_acknowledged_when_their_bytes_are_there,
    acknowledgements.check_loads_are_acknowledged_when_their_bytes_are_there,
    acknowledgements.check_steps_on_the_host_can_be_held,
    says="it is not acknowledged although nothing is held",
)
class AcknowledgesOnlyWhenAsked(Controller):
    def arrived(self, batch: Batch) -> bool:
        return False


@found_by(acknowledgements.check_steps_on_the_host_can_be_held, says="submitted although that is held")
class CannotBeHeldBack(Controller):
    def _batches(self, direction: str) -> list[Batch]:
        return self._merged(direction, self._head(direction))


@found_by(
    failures.check_backups_that_fail,
    failures.check_loads_that_fail,
    says="fails at '(backup|load) submit', what is told is .*error=None",
)
class CallsAFailureASuccess(Controller):
    def _ended(self, operation: Operation, batch: Batch) -> Ack:
        batch.error = None
        return super()._ended(operation, batch)


@found_by(
    failures.check_backups_that_fail,
    failures.check_loads_that_fail,
    says="fails at .* and keeps its (host|device) slots",
)
class KeepsTheSlotsOfAFailure(Controller):
    def _ended(self, operation: Operation, batch: Batch) -> Ack:
        operation.taken.clear()
        return super()._ended(operation, batch)


@found_by(
    failures.check_loads_that_fail, failures.check_consumers_hear_of_every_batch, says="a consumer of layer 0 goes on"
)
class ConsumersHearOfNoFailure(Controller):
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.layers.fail = lambda producer, error: None


@found_by(failures.check_a_failure_lets_nothing_run_on, says="a failed load gave back: .* holds what the host has")
class LeavesAFailureRunning(Controller):
    def _conclude(self, batch: Batch) -> None:
        if not batch.error:
            super()._conclude(batch)


@found_by(
    failures.check_a_failure_leaves_the_caller_his_slots, says="a backup fails, and frees slots that are the caller's"
)
class FreesWhatTheCallerGave(Controller):
    def _ended(self, operation: Operation, batch: Batch) -> Ack:
        owners = [t for t in operation.transfers if t.name == self.host.owner(t.name)]
        operation.taken = [("host", t.name, t.host_indices) for t in owners if t.host_indices is not None]
        return super()._ended(operation, batch)


@found_by(failures.check_a_failure_leaves_the_caller_his_slots, says="frees slots that were freed already")
class FreesWhatTheCallerFreed(Controller):
    def _give_back(self, taken: Iterable[tuple[str, str, torch.Tensor]]) -> None:
        assert isinstance(taken, list)
        while taken:
            side, name, slots = taken.pop()
            (self.host.pools[name] if side == "host" else self.stack.device_slots[name]).free(slots)


@found_by(
    failures.check_what_was_to_come_from_a_failure_fails_with_it,
    says="is done that reads what a (backup|load) is still to write",
)
class ForgetsWhatItReads(Controller):
    def _begin(self, batch: Batch) -> None:
        super()._begin(batch)
        batch.sources.clear()


@found_by(
    failures.check_what_was_to_come_from_a_failure_fails_with_it,
    says="failures are {'(backup|load)': True, '(backup|load)': False}",
)
class SucceedsWithWhatNeverCame(Controller):
    def _require_sources(self, batch: Batch) -> None:
        pass


# ---- trees


class NotesWhatHasEnded(PrefixCache):
    """A backup counts as soon as it is told, though a load of what it was made of may fail still."""

    @staticmethod
    def _is_early(ticket: Ticket) -> bool:
        return False


@found_by(trees.check_nothing_is_saved_that_was_made_of_what_never_came, says="16 are found with what was made of")
class BelowATreeThatTrustsLoads(Controller):
    tree = NotesWhatHasEnded


class LeavesTicketsBelow(PrefixCache):
    """What is under way for a node that is cut goes to its lower part alone."""

    def _split(self, lower: Node, at: int) -> Node:
        ticket, lower.ticket = lower.ticket, None
        upper = super()._split(lower, at)
        lower.ticket = ticket
        return upper


@found_by(trees.check_nodes_are_cut_while_they_are_saved, says="part 0 of a node that was cut has 0 host slots")
class BelowATreeThatLosesTickets(Controller):
    tree = LeavesTicketsBelow


def _is(indices: torch.Tensor | Window, dtype: torch.dtype) -> TypeGuard[torch.Tensor]:
    return isinstance(indices, torch.Tensor) and indices.dtype == dtype and not indices.is_cuda


def _without_fence(controller: Controller, direction: str, call: Callable[[], Any]) -> Any:
    fences, controller.fences = controller.fences, controller.fences | {direction: None}
    try:
        return call()
    finally:
        controller.fences = fences


def _looked_up(transfers: Sequence[PoolTransfer], when: When) -> list[PoolTransfer]:
    """Windows at another time than the caller said."""
    windows = {t.name: t.device_indices for t in transfers if isinstance(t.device_indices, Window)}
    return [
        replace(t, device_indices=replace(windows[t.name], when=when)) if t.name in windows else t for t in transfers
    ]
