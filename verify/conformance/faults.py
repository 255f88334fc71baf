"""Controllers with one fault each, and which checks find it: a check that finds nothing proves nothing."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from refimpl import PageAllocator, PoolTransfer
from refimpl.controller import Controller
from refimpl.host_pool import HostPool
from refimpl.layer_done import SETS
from refimpl.operations import Ack, Batch, Operation
from refimpl.queueing import Reclaim
from refimpl.runtime import Event
from refimpl.windows import When, Window
from verify.conformance import ordering
from verify.conformance.ordering import Check

Locks = Iterable[tuple[HostPool | PageAllocator, torch.Tensor]]


@dataclass(frozen=True)
class Fault:
    """
    checks    each must find it, alone
    kind      of a stack on which it shows
    backends  with which it does, or backends and layouts ("staged page_first"); none: with all
    """

    make: Callable[..., Any]
    checks: tuple[Check, ...]
    kind: str
    backends: tuple[str, ...]

    def shows_with(self, backend: str, layout: str) -> bool:
        return not self.backends or not {backend, f"{backend} {layout}"}.isdisjoint(self.backends)


FAULTS: list[Fault] = []

# What loads a pool layer by layer: `staged` does not where the layers of a page lie together.
BY_LAYER = ("torch", "numba", "direct", "kernel", "auto", "staged page_first_direct")


def found_by(*checks: Check, kind: str = "mha", backends: tuple[str, ...] = ()) -> Callable[[type], type]:
    def listed(make: type) -> type:
        FAULTS.append(Fault(make, checks, kind, backends))
        return make

    return listed


# ---- order


@found_by(ordering.check_backup_reads_what_the_caller_wrote, ordering.check_load_leaves_what_the_caller_reads)
class ForgetsTheCaller(Controller):
    def _events_before(self, batch: Batch) -> list[Event]:
        with self.runtime.on(self.runtime.stream()):
            return super()._events_before(batch)


@found_by(ordering.check_backup_reads_what_a_forward_pass_wrote)
class ForgetsTheWriteFence(Controller):
    def _events_before(self, batch: Batch) -> list[Event]:
        return _without_fence(self, "backup", partial(super()._events_before, batch))


@found_by(ordering.check_load_leaves_what_a_forward_pass_reads)
class ForgetsTheLoadFence(Controller):
    def _events_before(self, batch: Batch) -> list[Event]:
        return _without_fence(self, "load", partial(super()._events_before, batch))


@found_by(
    ordering.check_load_of_what_is_being_backed_up,
    ordering.check_backup_of_what_is_being_loaded,
    ordering.check_load_over_what_is_being_backed_up,
    ordering.check_backup_over_what_is_being_loaded,
    backends=("torch", "numba", "direct", "kernel"),  # staged: half of the order comes with its buffer
)
class ForgetsTheOtherDirection(Controller):
    def _events_before(self, batch: Batch) -> list[Event]:
        flights, self._in_flight = self._in_flight, {direction: type(q)() for direction, q in self._in_flight.items()}
        try:
            return super()._events_before(batch)
        finally:
            self._in_flight = flights


@found_by(ordering.check_directions_do_not_wait_for_each_other, backends=("torch", "numba", "direct", "kernel", "auto"))
class OneStreamForAll(Controller):
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._streams = dict.fromkeys(self._streams, self.runtime.stream())


@found_by(
    ordering.check_loads_come_one_after_another,
    ordering.check_backups_come_one_after_another,
    backends=("torch", "numba", "direct", "kernel", "auto"),  # staged has one buffer for all
)
class AStreamForEveryBatch(Controller):
    def _begin(self, batch: Batch) -> None:
        self._streams[batch.direction] = self.runtime.stream()
        super()._begin(batch)


@found_by(ordering.check_queued_operations_keep_their_order)
class TakesAllThatIsQueued(Controller):
    def _take(self, direction: str) -> list[Operation]:
        taken, self._queued[direction] = self._queued[direction], []
        return taken


@found_by(ordering.check_the_host_does_not_wait)
class TheHostWaits(Controller):
    def _begin(self, batch: Batch) -> None:
        super()._begin(batch)
        assert batch.begun is not None
        batch.begun.synchronize()


# ---- lifetimes


@found_by(ordering.check_host_slots_freed_under_a_load)
class LocksNothingOnTheHost(Controller):
    def _locks(self, operation: Operation) -> Locks:
        return [(owner, slots) for owner, slots in super()._locks(operation) if not isinstance(owner, HostPool)]


@found_by(ordering.check_device_slots_freed_under_a_backup, ordering.check_slots_are_locked_once_for_each_operation)
class LocksNothingOnTheDevice(Controller):
    def _locks(self, operation: Operation) -> Locks:
        return [(owner, slots) for owner, slots in super()._locks(operation) if isinstance(owner, HostPool)]


@found_by(
    ordering.check_states_overwritten_by_the_caller, ordering.check_states_overwritten_by_a_forward_pass, kind="mamba"
)
@found_by(ordering.check_states_overwritten_by_the_caller, kind="v4")
class LetsStatesBeOverwritten(Controller):
    def _protect(self) -> None:
        pass


@found_by(ordering.check_states_overwritten_by_a_forward_pass, kind="mamba")
class LetsForwardPassesOverwriteStates(Controller):
    def _protect(self) -> None:
        _without_fence(self, "backup", super()._protect)


@found_by(ordering.check_one_list_for_both_sides)
class LocksEveryListOnce(Controller):
    def _locks(self, operation: Operation) -> Locks:
        return {id(slots): (owner, slots) for owner, slots in super()._locks(operation)}.values()


@found_by(ordering.check_loads_name_what_they_read)
class ReadsFromAnywhere(Controller):
    def load(
        self, tag: Hashable, transfers: Sequence[PoolTransfer], reclaim: Reclaim | None = None
    ) -> Operation | None:
        return super().load(tag, self.host.resolve(transfers) or (), reclaim)


@found_by(ordering.check_lists_may_be_changed)
class KeepsTheCallersLists(Controller):
    def _pinned(self, transfers: Sequence[PoolTransfer]) -> tuple[PoolTransfer, ...]:
        return tuple(transfers)

    def _locks(self, operation: Operation) -> Locks:
        return []  # what was locked could not be found again


@found_by(ordering.check_windows_as_they_were_queued, kind="swa-mamba")
class LooksWindowsUpLate(Controller):
    def _pinned(self, transfers: Sequence[PoolTransfer]) -> tuple[PoolTransfer, ...]:
        return super()._pinned(_looked_up(transfers, "running"))


@found_by(ordering.check_windows_as_they_run, kind="swa-mamba")
class LooksWindowsUpEarly(Controller):
    def _pinned(self, transfers: Sequence[PoolTransfer]) -> tuple[PoolTransfer, ...]:
        return super()._pinned(_looked_up(transfers, "queued"))


@found_by(ordering.check_staging_is_used_again_when_it_is_free, backends=("staged",))
class UsesStagingEarly(Controller):
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        for pool in self.host.pools.values():
            pool._mover._free = Unchanging(pool._mover._free)  # type: ignore[attr-defined]


class Unchanging(list[Event]):
    def __setitem__(self, *at: object) -> None:
        pass


@found_by(ordering.check_a_drop_gives_everything_back)
class DropsWhatItKeeps(Controller):
    def drop(self, operation: Operation) -> None:
        self._queued[operation.direction].remove(operation)


# ---- batches


@found_by(ordering.check_two_loads_of_the_same_slots, ordering.check_two_backups_to_the_same_slots)
class MergesWhatOverlaps(Controller):
    def _mergeable(self, batch: Batch, operation: Operation) -> bool:
        return True


@found_by(ordering.check_two_loads_of_the_same_slots, ordering.check_two_backups_to_the_same_slots)
class TheFirstWins(Controller):
    def _merged(self, direction: str, operations: Sequence[Operation]) -> list[Batch]:
        return super()._merged(direction, operations)[::-1]


@found_by(ordering.check_disjoint_operations_are_merged)
class MergesNothing(Controller):
    def _mergeable(self, batch: Batch, operation: Operation) -> bool:
        return False


@found_by(ordering.check_load_of_what_is_being_backed_up, backends=("torch", "numba", "direct", "kernel"))
class SeesNoConflictOnTheHost(Controller):
    def _begin(self, batch: Batch) -> None:
        batch.touched = {place: pages for place, pages in batch.touched.items() if place[0] == "device"}
        super()._begin(batch)


# ---- layers


@found_by(ordering.check_whole_states, kind="mamba", backends=BY_LAYER)
@found_by(ordering.check_whole_states, kind="six-states", backends=BY_LAYER)
class WaitsForTheFirstLayerOfAState(Controller):
    def wait_for_all_of(self, pool: str) -> None:
        self.layers.wait_until(min(self.host.pools[pool].spec.owned_layers))


@found_by(ordering.check_readers_of_layers, ordering.check_whole_states, kind="six-states")
class WaitsForTheLastLayer(Controller):
    def wait_until(self, layer: int, pool: str | None = None) -> None:
        super().wait_until(self.layers.layers - 1, pool)


@found_by(ordering.check_readers_of_layers)
class RecordsALayerBeforeIt(Controller):
    def _load_layer(self, batches: Sequence[Batch], layer: int, producer: int) -> None:
        self.layers.record(producer, self._streams["load"])
        super()._load_layer(batches, layer, producer)


@found_by(ordering.check_layers_of_nobody_never_block, kind="mamba")
class WaitsForLayersOfOtherPools(Controller):
    def wait_until(self, layer: int, pool: str | None = None) -> None:
        self.layers.wait_until(layer)


@found_by(ordering.check_layers_of_nobody_never_block)
class WaitsForLoadsOfOthers(Controller):
    def set_consumer(self, producer: int | None) -> None:
        super().set_consumer(0 if producer is None else producer)


@found_by(ordering.check_layers_that_there_are_not)
class WaitsForNoSuchLayer(Controller):
    def wait_until(self, layer: int, pool: str | None = None) -> None:
        if 0 <= layer < self.layers.layers:
            super().wait_until(layer, pool)


@found_by(ordering.check_no_more_loads_than_sets_of_events)
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
    ordering.check_backups_are_acknowledged_when_their_bytes_are_there,
    ordering.check_loads_are_acknowledged_when_their_bytes_are_there,
)
class AcknowledgesAtOnce(Controller):
    def arrived(self, batch: Batch) -> bool:
        return True

    def _settle(self, batch: Batch) -> list[Ack]:
        return [self._ended(operation, batch, 0.0) for operation in batch.operations]


@found_by(ordering.check_loads_are_acknowledged_when_their_bytes_are_there)
class AcknowledgesLoadsByTheirFirstLayer(Controller):
    def arrived(self, batch: Batch) -> bool:
        assert batch.producer is not None
        return self.layers._sets[batch.producer % SETS][0].query()

    def _settle(self, batch: Batch) -> list[Ack]:
        return [self._ended(operation, batch, 0.0) for operation in batch.operations]


@found_by(
    ordering.check_backups_are_acknowledged_when_their_bytes_are_there,
    ordering.check_loads_are_acknowledged_when_their_bytes_are_there,
    ordering.check_steps_on_the_host_can_be_held,
)
class AcknowledgesOnlyWhenAsked(Controller):
    def arrived(self, batch: Batch) -> bool:
        return False


@found_by(ordering.check_steps_on_the_host_can_be_held)
class CannotBeHeldBack(Controller):
    def _batches(self, direction: str) -> list[Batch]:
        return self._merged(direction, self._take(direction))


@found_by(ordering.check_backups_that_fail, ordering.check_loads_that_fail)
class CallsAFailureASuccess(Controller):
    def _ended(self, operation: Operation, batch: Batch, seconds: float) -> Ack:
        batch.error = None
        return super()._ended(operation, batch, seconds)


@found_by(ordering.check_backups_that_fail, ordering.check_loads_that_fail)
class KeepsTheSlotsOfAFailure(Controller):
    def _ended(self, operation: Operation, batch: Batch, seconds: float) -> Ack:
        operation.taken.clear()
        return super()._ended(operation, batch, seconds)


@found_by(ordering.check_loads_that_fail, ordering.check_consumers_hear_of_every_batch)
class ConsumersHearOfNoFailure(Controller):
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.layers.fail = lambda producer, error: None


@found_by(ordering.check_a_failure_lets_nothing_run_on)
class LeavesAFailureRunning(Controller):
    def _settle(self, batch: Batch) -> list[Ack]:
        return [self._ended(o, batch, 0.0) for o in batch.operations] if batch.error else super()._settle(batch)


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
