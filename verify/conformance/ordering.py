"""The checks. Each gets a `Rig` that was entered, and raises `AssertionError` saying what is wrong.

B numbers are those of `test_reported_faults.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import numpy as np
import torch

from refimpl.layer_done import SETS
from refimpl.operations import DESTINATION
from refimpl.runtime import Stream
from refimpl.support import DIRECTIONS
from refimpl.windows import Window
from verify.conformance.rig import PAGE, PAGES, Content, Rig, Seen, Slots, cut, joined, overlap

Check = Callable[[Rig], None]
CHECKS: list[Check] = []
Function = TypeVar("Function", bound=Check)
Asked = dict[str, int]


def check(*needs: str, races: bool = True) -> Callable[[Function], Function]:
    """Of stacks that have something of each kind ("states", "recurrent", "windows"); "device": not on a CPU.

    races  whether it depends on the order in which a device works: then it is worth another try
    """

    def listed(function: Function) -> Function:
        function.needs, function.races = needs, races  # type: ignore[attr-defined]
        CHECKS.append(function)
        return function

    return listed


# ---- after the model's work


@check()
def check_backup_reads_what_the_caller_wrote(rig: Rig) -> None:
    _backup_reads_what_was_written_on(rig, rig.model)


@check()
def check_backup_reads_what_a_forward_pass_wrote(rig: Rig) -> None:
    """A finished request is cached while the next forward pass still writes its last token."""
    _backup_reads_what_was_written_on(rig, rig.write_fence)


def _backup_reads_what_was_written_on(rig: Rig, stream: Stream) -> None:
    slots, _ = rig.on_device()
    new = rig.random_bytes("what was written last", slots)
    release = rig.gate(stream)
    rig.put(slots, new, stream)
    operation = rig.backup(slots)
    rig.let_run()
    release()
    rig.finish()
    rig.require_host("a backup behind a writer that was held", rig.slots_of("host", operation), new)


@check()
def check_load_leaves_what_the_caller_reads(rig: Rig) -> None:
    _load_leaves_what_is_read_on(rig, rig.model)


@check()
def check_load_leaves_what_a_forward_pass_reads(rig: Rig) -> None:
    """Pages of a finished request are given to the next one while the forward pass is still at work (36738)."""
    _load_leaves_what_is_read_on(rig, rig.load_fence)


def _load_leaves_what_is_read_on(rig: Rig, stream: Stream) -> None:
    host, stored = rig.on_host()
    slots, old = rig.on_device()
    release = rig.gate(stream)
    seen = rig.see(slots, stream)
    rig.load(host, slots)
    rig.let_run()
    release()
    rig.finish()
    rig.require("a reader that was held, and a load behind it", seen.rows, old)
    rig.require_device("a load behind a reader that was held", slots, stored)


# ---- both directions at once


@check()
def check_load_of_what_is_being_backed_up(rig: Rig) -> None:
    slots, content = rig.on_device()
    target = rig.take()
    with rig.held("backup"):
        operation = rig.backup(slots)
        rig.load(rig.slots_of("host", operation), target)
        rig.let_run()
    rig.finish()
    rig.require_device("a load of host slots whose backup was in flight", target, content)


@check()
def check_backup_of_what_is_being_loaded(rig: Rig) -> None:
    host, stored = rig.on_host()
    slots = rig.take()
    with rig.held("load"):
        rig.load(host, slots)
        operation = rig.backup(slots)
        rig.let_run()
    rig.finish()
    rig.require_host("a backup of slots whose load was in flight", rig.slots_of("host", operation), stored)


@check()
def check_load_over_what_is_being_backed_up(rig: Rig) -> None:
    host, stored = rig.on_host()
    slots, content = rig.on_device()
    with rig.held("backup"):
        operation = rig.backup(slots)
        rig.load(host, slots)
        rig.let_run()
    rig.finish()
    rig.require_host("a backup, and a load over its slots", rig.slots_of("host", operation), content)
    rig.require_device("a load over slots whose backup was in flight", slots, stored)


@check()
def check_backup_over_what_is_being_loaded(rig: Rig) -> None:
    host, stored = rig.on_host()
    slots, content = rig.on_device()
    target = rig.take()
    with rig.held("load"):
        rig.load(host, target)
        rig.backup(slots, host)
        rig.let_run()
    rig.finish()
    rig.require_device("a load, and a backup over its host slots", target, stored)
    rig.require_host("a backup over host slots that were being loaded", host, content)


@check()
def check_a_backup_comes_after_every_load_of_its_slots(rig: Rig) -> None:
    """Two are under way, and it is the later one that is late."""
    slots, loads = [rig.take() for _ in range(2)], [rig.on_host(f"load {i}") for i in range(2)]
    rig.load(loads[0][0], slots[0])
    with rig.held("load"):
        rig.load(loads[1][0], slots[1])
        operation = rig.backup(joined(*slots))
        rig.let_run()
    rig.finish()
    for host, (_, stored) in zip(cut(rig.slots_of("host", operation), 2), loads, strict=True):
        rig.require_host("a backup of slots of two loads", host, stored)


@check()
def check_a_load_comes_after_every_backup_of_its_slots(rig: Rig) -> None:
    hosts, backups = [rig.take("host") for _ in range(2)], [rig.on_device(f"backup {i}") for i in range(2)]
    target = rig.take("device", 4)
    rig.backup(backups[0][0], hosts[0])
    with rig.held("backup"):
        rig.backup(backups[1][0], hosts[1])
        rig.load(joined(*hosts), target)
        rig.let_run()
    rig.finish()
    for part, (_, content) in zip(cut(target, 2), backups, strict=True):
        rig.require_device("a load of slots of two backups", part, content)


@check()
def check_loads_come_one_after_another(rig: Rig) -> None:
    """The first is behind a stream that is held, the second is not, and overwrites it even so."""
    slots = rig.take()
    loads = [rig.on_host(f"load {i}") for i in range(2)]
    release = rig.gate(rig.model)
    rig.load(loads[0][0], slots)
    with rig.runtime.on(rig.runtime.stream()):
        rig.load(loads[1][0], slots)
    rig.let_run()
    release()
    rig.finish()
    rig.require_device("two loads into the same slots", slots, loads[1][1])


@check()
def check_backups_come_one_after_another(rig: Rig) -> None:
    host = rig.take("host")
    backups = [rig.on_device(f"backup {i}") for i in range(2)]
    release = rig.gate(rig.model)
    rig.backup(backups[0][0], host)
    with rig.runtime.on(rig.runtime.stream()):
        rig.backup(backups[1][0], host)
    rig.let_run()
    release()
    rig.finish()
    rig.require_host("two backups to the same slots", host, backups[1][1])


@check()
def check_queued_operations_keep_their_order(rig: Rig) -> None:
    """A load of what is queued to be backed up is asked for first, and must come second, whoever submits the backup."""
    slots, content = rig.on_device()
    target = rig.take()
    backup = rig.queue("backup", slots, None)
    rig.queue("load", target, rig.slots_of("host", backup))
    if rig.controller.start_loading() is None:
        rig.start("backup")
        rig.start("load")
    rig.finish()
    rig.require_device("a load that was queued behind a backup", target, content)


@check()
def check_directions_do_not_wait_for_each_other(rig: Rig) -> None:
    host, stored = rig.on_host()
    slots, content = rig.on_device()
    for first, second in (DIRECTIONS, DIRECTIONS[::-1]):
        work = {"backup": lambda: rig.backup(slots), "load": lambda: rig.load(host)}
        with rig.held(*[first] * (rig.backend != "staged")):  # there they take turns at one buffer
            operations = {first: work[first]()}
            with rig.runtime.on(rig.runtime.stream()):  # states are protected: the model waits for their backup
                operations[second] = work[second]()
            said = _acknowledged(rig, second)
            assert second in said, f"a {second} waits for a {first} of other slots"
        rig.finish()
        rig.require_host("a backup beside a load", rig.slots_of("host", operations["backup"]), content)
        rig.require_device("a load beside a backup", rig.slots_of("device", operations["load"]), stored)


# ---- sources that do not stay as they are


@check("states")
def check_states_overwritten_by_the_caller(rig: Rig) -> None:
    _states_overwritten_on(rig, rig.model)


@check("states")
def check_states_overwritten_by_a_forward_pass(rig: Rig) -> None:
    _states_overwritten_on(rig, rig.write_fence)


def _states_overwritten_on(rig: Rig, stream: Stream) -> None:
    slots, content = rig.on_device("the states when the backup was submitted")
    states = {name: slots[name] for name in rig.states}
    after = rig.random_bytes("the states of the next step", states)
    with rig.held("backup"):
        operation = rig.backup(slots)
        rig.put(states, after, stream)
        rig.let_run()
    rig.finish()
    rig.require_host("a backup, and the next step in place", rig.slots_of("host", operation), content)
    rig.require_device("the next step", states, after)


@check("states")
def check_states_do_not_wait_for_other_backups(rig: Rig) -> None:
    """Backups of other pools are under way and held: the model goes on as soon as its states are read.

    What is saved beside the states is not there yet, and who loads it waits for it.
    """
    with_states = {rig.stack.owner(name) for name in rig.states}
    busy, slots = rig.runtime.stream(), {name: rig.on_device() for name in ("before", "now")}
    others = {name: some for name, some in slots["before"][0].items() if rig.stack.owner(name) not in with_states}
    release = rig.gate(busy)
    with rig.runtime.on(busy):
        before = rig.backup(others)
    now = rig.backup(slots["now"][0])
    states = {name: slots["now"][0][name] for name in rig.states}
    rig.put(states, rig.random_bytes("the states of the next step", states), rig.model)
    assert rig.arrives(rig.see(states, rig.model)), "the next step waits for a backup that was submitted before"
    load = rig.load(rig.slots_of("host", now))
    assert rig.acknowledged() == [], "a backup is acknowledged before it is done"
    release()
    rig.finish()
    rig.require_device("a load of what is beside states", rig.slots_of("device", load), slots["now"][1])
    rig.require_host("a backup that was held", rig.slots_of("host", before), slots["before"][1])
    rig.require_host("a backup, and the next step in place", rig.slots_of("host", now), slots["now"][1])


@check()
def check_device_slots_freed_under_a_backup(rig: Rig) -> None:
    slots, content = rig.on_device()
    operation = rig.queue("backup", slots, None)
    rig.free("device", slots)
    _require_for_nobody(rig, "device", slots, "a backup is queued that reads them")
    with rig.held("backup"):
        rig.start("backup")
        _require_for_nobody(rig, "device", slots, "a backup reads them")
    rig.finish()
    rig.require_host("a backup of slots that were freed", rig.slots_of("host", operation), content)
    assert overlap(slots, rig.all_that_is_left("device")), "nobody gets slots again after their backup"


@check()
def check_host_slots_freed_under_a_load(rig: Rig) -> None:
    host, stored = rig.on_host()
    operation = rig.queue("load", None, host)
    rig.free("host", host)
    _require_for_nobody(rig, "host", host, "a load is queued that reads them")
    with rig.held("load"):
        rig.start("load")
        _require_for_nobody(rig, "host", host, "a load reads them")
    rig.finish()
    rig.require_device("a load of slots that were freed", rig.slots_of("device", operation), stored)
    assert overlap(host, rig.all_that_is_left("host")), "nobody gets slots again after their load"


def _require_for_nobody(rig: Rig, side: str, slots: Slots, why: str) -> None:
    got = rig.all_that_is_left(side)
    taken = overlap(slots, got)
    if taken:
        raise AssertionError(f"{side} slots of {taken} were freed and go to somebody else while {why}")
    rig.free(side, got)


@check(races=False)
def check_one_list_for_both_sides(rig: Rig) -> None:
    """The caller may name the same numbers by the same tensor; slots are locked on either side."""
    taken = {side: rig.take(side, 4) for side in ("device", "host")}
    both = {name: s[torch.isin(s, taken["device"][name])] for name, s in taken["host"].items()}
    stored = rig.random_bytes("what the host has", both)
    rig.put_on_host(both, stored)
    rig.queue("load", both, both)
    for side in taken:
        rig.free(side, both)
        _require_for_nobody(rig, side, both, "a load is queued that uses them")
    rig.start("load")
    rig.finish()
    rig.require_device("a load by one list for both sides", both, stored)


@check(races=False)
def check_loads_name_what_they_read(rig: Rig) -> None:
    before = rig.counts()
    slots = rig.take()
    try:
        rig.controller.load(None, rig.transfers(slots, None))
    except ValueError:
        rig.free("device", slots)
        assert rig.counts() == before, "a load that was refused keeps slots"
        return
    raise AssertionError("a load is accepted that says nothing of where it reads")


@check()
def check_slots_are_locked_once_for_each_operation(rig: Rig) -> None:
    """Two operations read the same slots; the first one's end does not unlock them for the second."""
    slots, content = rig.on_device()
    rig.backup(slots)
    second = rig.queue("backup", slots, None)
    rig.finish()
    rig.free("device", slots)
    _require_for_nobody(rig, "device", slots, "a second backup is queued that reads them")
    rig.start("backup")
    rig.finish()
    rig.require_host("the second backup", rig.slots_of("host", second), content)


@check(races=False)
def check_a_drop_gives_everything_back(rig: Rig) -> None:
    before = rig.counts()
    slots, _ = rig.on_device()
    host, _ = rig.on_host()
    for operation in (rig.queue("backup", slots, None), rig.queue("load", None, host)):
        rig.controller.drop(operation)
    rig.free("device", slots)
    rig.free("host", host)
    assert rig.counts() == before, f"slots are lost with what was dropped: {before} before, {rig.counts()} after"
    assert rig.controller.start_loading() is None, "a load is submitted although it was dropped"


@check(races=False)
def check_a_drop_leaves_the_others(rig: Rig) -> None:
    """One of three in each direction is taken back, and its end is told as the failure that it is."""
    backups, loads = ([make(f"{i} of three") for i in range(3)] for make in (rig.on_device, rig.on_host))
    queued = {
        "backup": [rig.queue("backup", slots, None, tag) for tag, (slots, _) in enumerate(backups)],
        "load": [rig.queue("load", None, slots, tag) for tag, (slots, _) in enumerate(loads)],
    }
    for operations in queued.values():
        rig.controller.drop(operations[1])
    rig.controller.start_writing()
    rig.controller.start_loading()
    acks = rig.controller.acknowledge(wait=True)
    rig.rest()
    for direction in DIRECTIONS:
        failed = {ack.tag: ack.error is not None for ack in acks if ack.direction == direction}
        assert failed == {0: False, 1: True, 2: False}, f"{direction} 1 of 0, 1, 2 was dropped, failures are {failed}"
    for tag in (0, 2):
        host, device = rig.slots_of("host", queued["backup"][tag]), rig.slots_of("device", queued["load"][tag])
        rig.require_host("a backup beside one that was dropped", host, backups[tag][1])
        rig.require_device("a load beside one that was dropped", device, loads[tag][1])


@check(races=False)
def check_closing_drops_what_is_queued(rig: Rig) -> None:
    """And waits for what is under way, whatever is held; all of it is told."""
    before = rig.counts()
    (slots, content), (host, _) = rig.on_device(), rig.on_host()
    for step in ("backup copy", "backup relayout"):
        rig.hold(step)
    operation = rig.queue("backup", slots, None, "under way")
    rig.start("backup")
    rig.queue("backup", slots, None, "queued")
    rig.queue("load", None, host, "queued too")
    rig.controller.close()
    failed = {ack.tag: ack.error is not None for ack in rig.controller.acknowledge()}
    right = {"under way": False, "queued": True, "queued too": True}
    assert failed == right, f"a controller was closed, failures are {failed}"
    rig.require_host("a backup that was under way", rig.slots_of("host", operation), content)
    for side, mine in (("device", slots), ("host", host), ("host", rig.slots_of("host", operation))):
        rig.free(side, mine)
    assert rig.counts() == before, f"slots are lost with what was queued: {before} before, {rig.counts()} after"


# ---- lists


@check(races=False)
def check_lists_may_be_changed(rig: Rig) -> None:
    """The caller's lists are his own again as soon as an operation is queued, whatever their type."""
    for dtype in (torch.int64, torch.int32):
        slots, content = rig.on_device()
        host = rig.take("host")
        lists = [{name: slots.to(dtype, copy=True) for name, slots in side.items()} for side in (slots, host)]
        rig.queue("backup", *lists)
        _spoil(*lists)
        rig.start("backup")
        rig.finish()
        rig.require_host(f"a backup whose {dtype} lists were changed after it was queued", host, content)
        target = rig.take()
        lists = [{name: slots.to(dtype, copy=True) for name, slots in side.items()} for side in (target, host)]
        rig.queue("load", *lists)
        rig.start("load")
        _spoil(*lists)
        rig.finish()
        rig.require_device(f"a load whose {dtype} lists were changed after it was submitted", target, content)


@check(races=False)
def check_lists_may_be_dropped(rig: Rig) -> None:
    """Nobody but the controller keeps them, and by the time that the copy runs their memory holds others."""
    slots, content = rig.on_device()
    host, target = rig.take("host"), rig.take()
    for direction, device in (("backup", slots), ("load", target)):
        memory = [{name: slots.numpy().copy() for name, slots in side.items()} for side in (device, host)]
        rig.queue(direction, *_over(memory))
        _spoil(*_over(memory))
        rig.start(direction)
        rig.finish()
    rig.require_host("a backup whose lists were dropped", host, content)
    rig.require_device("a load whose lists were dropped", target, content)


def _over(memory: list[dict[str, np.ndarray]]) -> list[Slots]:
    return [{name: torch.from_numpy(array) for name, array in side.items()} for side in memory]


@check("device")
def check_lists_on_the_device_are_read_in_order(rig: Rig) -> None:
    """They are written just before an operation is queued and again just after; another stream submits it."""
    slots, content = rig.on_device()
    host, target = rig.take("host"), rig.take()
    for direction, device in (("backup", slots), ("load", target)):
        right = [{name: side[name] for name in rig.owners} for side in (device, host)]
        wrong = [{name: slots.clone() for name, slots in side.items()} for side in right]
        _spoil(*wrong)
        lists = [{name: rig.on_the_device(slots) for name, slots in side.items()} for side in wrong]
        release = rig.gate(rig.model) if rig.backend == "kernel" else None  # others read a list back: the host waits
        _rewrite(rig, lists, right)
        rig.queue(direction, *lists)
        _rewrite(rig, lists, wrong)
        with rig.runtime.on(rig.runtime.stream()):
            rig.start(direction)
        rig.let_run()
        if release:
            release()
        rig.finish()
    rig.require_host("a backup by lists on the device", host, content)
    rig.require_device("a load by lists on the device", target, content)


def _rewrite(rig: Rig, lists: list[Slots], new: list[Slots]) -> None:
    for to, source in zip(lists, new, strict=True):
        for name in to:
            rig.rewrite(to[name], source[name])


@check(races=False)
def check_sources_may_be_named_twice(rig: Rig) -> None:
    slots, content = rig.on_device()
    host = cut(rig.slots_of("host", rig.backup(joined(slots, slots))), 2)
    rig.finish()
    for half in host:
        rig.require_host("a backup of slots that are named twice", half, content)
    device = cut(rig.slots_of("device", rig.load(joined(host[0], host[0]))), 2)
    rig.finish()
    for half in device:
        rig.require_device("a load of slots that are named twice", half, content)


@check(races=False)
def check_nothing_to_do(rig: Rig) -> None:
    """It is done, and acknowledged as such, also beside something."""
    slots, content = rig.on_device()
    before = rig.counts()
    nothing = {name: some[:0] for name, some in slots.items()}
    for other in (None, nothing):
        rig.queue("backup", nothing, other, "nothing")
        rig.queue("load", other, nothing, "nothing")
    operation = rig.backup(slots)
    rig.start("load")
    moved = [sum(ack.bytes.values()) for ack in rig.finish() if ack.tag == "nothing"]
    assert moved == [0] * 4, f"four operations have nothing to move, bytes told are {moved}"
    rig.require_host("a backup beside two of nothing", rig.slots_of("host", operation), content)
    rig.free("host", rig.slots_of("host", operation))
    assert rig.counts() == before, "an operation of nothing keeps slots"


@check(races=False)
def check_refused_lists_keep_nothing(rig: Rig) -> None:
    """Of several pools the last one's list is wrong: the others have been given slots by then."""
    before = rig.counts()
    for direction, side in (("backup", "device"), ("load", "host")):
        slots = rig.take(side)
        last = rig.owners[-1]
        wrong = slots | {last: slots[last] + PAGES * PAGE}
        try:
            rig.ask(direction, *((wrong, None) if direction == "backup" else (None, wrong)))
        except ValueError:
            rig.free(side, slots)
            assert rig.counts() == before, f"a {direction} is refused and keeps slots"
            continue
        raise AssertionError(f"a {direction} is accepted of slots that there are not")


@check(races=False)
def check_full_pools_are_reclaimed(rig: Rig) -> None:
    """Whoever can make room is asked for what is lacking; if that is of no use, nothing is taken."""
    for direction, side in (("backup", "host"), ("load", "device")):
        source, content = rig.on_device() if direction == "backup" else rig.on_host()
        lists = (source, None) if direction == "backup" else (None, source)
        some = rig.take(side, 1)
        taken = rig.all_that_is_left(side)
        rig.free(side, some)
        before = rig.counts()
        asked: Asked = {}

        def make_room(pool: str, lacking: int, of: tuple[str, Slots] = (side, taken), asked: Asked = asked) -> None:
            asked[pool] = lacking
            rig.free(of[0], {pool: of[1][pool]})

        assert rig.ask(direction, *lists) is None, f"a {direction} finds slots in full pools"
        assert rig.ask(direction, *lists, reclaim=lambda *of_no_use: None) is None, f"a {direction} finds slots"
        assert rig.counts() == before, f"a {direction} finds no room and keeps slots"
        operation = rig.ask(direction, *lists, reclaim=make_room)
        lacks = {name: source[name].numel() // 2 for name in rig.owners}
        assert asked == lacks, f"a {direction} lacks {lacks}, and room was asked for: {asked}"
        assert operation is not None, f"a {direction} finds no slots although room was made"
        rig.start(direction)
        rig.finish()
        if direction == "backup":
            rig.require_host("a backup for which room was made", rig.slots_of("host", operation), content)
        else:
            rig.require_device("a load for which room was made", rig.slots_of("device", operation), content)


def _spoil(*lists: Slots) -> None:
    """Other slots, and legal ones: an error would not be the worst."""
    for side in lists:
        for slots in side.values():
            size = 1 if slots.numel() < 2 or slots[1] != slots[0] + 1 else PAGE
            slots.add_(size * 5).remainder_(size * PAGES)


@check()
def check_staging_is_used_again_when_it_is_free(rig: Rig) -> None:
    """Several times what it holds, twice in a row, with one end of it held."""
    slots, contents = zip(*(rig.on_device(f"backup {i}", 4) for i in range(2)), strict=True)
    with rig.held("backup copy"):
        operations = [rig.backup(each) for each in slots]
        rig.let_run()
    rig.finish()
    for operation, content in zip(operations, contents, strict=True):
        rig.require_host("a backup that takes turns", rig.slots_of("host", operation), content)
    targets = [rig.take("device", 3) for _ in range(2)]
    hosts, contents = zip(*(rig.on_host(f"load {i}", 3) for i in range(2)), strict=True)
    with rig.held("load relayout"):
        for host, target in zip(hosts, targets, strict=True):
            rig.load(host, target)
        rig.let_run()
    rig.finish()
    for target, content in zip(targets, contents, strict=True):
        rig.require_device("a load that takes turns", target, content)


# ---- whoever waits for layers


@check()
def check_readers_of_layers(rig: Rig) -> None:
    """A reader waits for its layer and for no later one, and then the layer is there."""
    host, stored = rig.on_host()
    slots = rig.take()
    layers = range(rig.stack.num_layers)
    holds = [rig.hold(f"load layer {layer}") for layer in layers]
    rig.load(host, slots)
    seen = []
    for layer in layers:
        rig.promptly(lambda layer=layer: rig.controller.wait_until(layer))
        seen.append(rig.see(slots, rig.model, [layer]))
    for layer in layers:
        assert not _already(rig, seen[layer]), f"a reader of layer {layer} does not wait for it"
        holds[layer].release()
        assert rig.arrives(seen[layer]), f"a reader of layer {layer} waits for more than that layer"
        rig.require(f"a reader of layer {layer}", seen[layer].rows, stored)
    rig.finish()
    rig.require_device("a load layer by layer", slots, stored)


def _already(rig: Rig, seen: Seen) -> bool:
    assert seen.event is not None
    rig.run_all()
    return seen.event.query()


@check("recurrent")
def check_whole_states(rig: Rig) -> None:
    """B24: slot 3 is copied to slot 9 as soon as its load is queued, and half of its layers are late."""
    (pool, *_) = rig.recurrent
    layers = rig.stack.specs[pool].owned_layers
    middle = layers[len(layers) // 2]
    host, stored = rig.on_host()
    slots, copy = rig.take(), rig.take()
    with rig.held(f"load layer {middle}"):
        rig.load(host, slots)
        rig.promptly(lambda: rig.controller.wait_for_all_of(pool))
        rig.move({pool: slots[pool]}, {pool: copy[pool]}, rig.model)
        with rig.runtime.on(reader := rig.runtime.stream()):
            rig.promptly(lambda: rig.controller.wait_until(middle - 1))
            seen = rig.see(slots, reader, [middle - 1])
        assert rig.arrives(seen), f"a reader of layer {middle - 1} waits for layer {middle}"
        rig.let_run()
    rig.finish()
    rig.require("a reader of one layer", seen.rows, stored)
    rig.require_device("a whole state copied behind its load", {pool: copy[pool]}, stored)


@check(races=False)
def check_layers_of_nobody_never_block(rig: Rig) -> None:
    """A pool's reader does not wait for layers that the pool does not own, nor a pass that depends on no load."""
    host, _ = rig.on_host()
    layers = range(rig.stack.num_layers)
    with rig.held(*(f"load layer {layer}" for layer in layers)):
        rig.load(host)
        for pool, spec in rig.stack.specs.items():
            for layer in set(layers) - set(spec.owned_layers):
                rig.controller.wait_until(layer, pool)
        assert rig.arrives(rig.see(rig.take(), rig.model)), "a reader waits for layers that its pool does not own"
        rig.controller.set_consumer(None)
        rig.controller.wait_until(layers[-1])
        assert rig.arrives(rig.see(rig.take(), rig.model)), "a forward pass waits that depends on no load"
    rig.finish()


@check(races=False)
def check_layers_that_there_are_not(rig: Rig) -> None:
    for layer in (-1, rig.stack.num_layers):
        try:
            rig.controller.wait_until(layer)
        except ValueError:
            continue
        raise AssertionError(f"a wait for layer {layer} of {rig.stack.num_layers} passes")


def _begins(rig: Rig) -> bool:
    """Whether loads that are queued are submitted. To refuse is as good as to put them off."""
    try:
        return rig.controller.start_loading() is not None
    except RuntimeError:
        return False


@check()
def check_no_more_loads_than_sets_of_events(rig: Rig) -> None:
    """Every load's readers wait for that load, and one load too many waits for an acknowledgement."""
    loads = [(*rig.on_host(f"load {i}", 1), rig.take("device", 1)) for i in range(SETS + 1)]
    seen = []
    with rig.held("load"):
        for host, _, slots in loads[:-1]:
            rig.load(host, slots)
            with rig.runtime.on(reader := rig.runtime.stream()):
                rig.controller.wait_until(rig.stack.num_layers - 1)
                seen.append(rig.see(slots, reader))
        host, last, slots = loads[-1]
        rig.queue("load", slots, host)
        assert not _begins(rig), f"{SETS + 1} loads are under way at once"
        rig.let_run()
    rig.finish()
    for i, each in enumerate(seen):
        rig.require(f"a reader of load {i}", each.rows, loads[i][1])
    rig.start("load")
    rig.finish()
    rig.require_device("a load that was put off", slots, last)


# ---- windows


@check("windows")
def check_windows_as_they_were_queued(rig: Rig) -> None:
    """B27: slot 7 has row 2; that row is copied, though the table is zeroed or rebuilt meanwhile."""
    for becomes in ("another", "zero"):
        pool, full, mapping, rows = _window(rig)
        slots, content = rows["old"]
        operation = rig.queue("backup", {pool: Window(full, mapping, "queued")}, None)
        mapping[full] = 0 if becomes == "zero" else rows["new"][0][pool]
        rig.start("backup")
        rig.finish()
        host = {pool: rig.slots_of("host", operation)[pool]}
        rig.require_host(f"a window whose table became {becomes} after it was queued", host, content)
        rig.free("device", slots)


@check("windows")
def check_windows_as_they_run(rig: Rig) -> None:
    """B27: the table was rebuilt, 7 -> 3 instead of 2: that row is copied. One that was zeroed is an error."""
    pool, full, mapping, rows = _window(rig)
    operation = rig.queue("backup", {pool: Window(full, mapping, "running")}, None)
    mapping[full] = rows["new"][0][pool]
    rig.start("backup")
    rig.finish()
    host = {pool: rig.slots_of("host", operation)[pool]}
    rig.require_host("a window that was rebuilt before it was copied", host, rows["new"][1])
    rig.queue("backup", {pool: Window(full, mapping, "running")}, None)
    mapping[full] = 0
    rig.start("backup")
    (ack,) = rig.controller.acknowledge(wait=True)
    assert isinstance(ack.error, ValueError), f"rows that were zeroed are copied: {ack}"
    assert "no row in the window" in str(ack.error), f"an error that does not say what is wrong: {ack.error}"


@check("windows", "device")
def check_windows_of_a_table_on_the_device(rig: Rig) -> None:
    """Engines keep it there: it is read in order of streams, and nobody waits."""
    pool, full, mapping, rows = _window(rig)
    rebuilt = mapping.clone()
    rebuilt[full] = rows["new"][0][pool]
    table = rig.on_the_device(mapping)
    for held in (False, rig.backend not in ("direct", "auto")):  # whose descriptors may need the host to wait
        rig.rewrite(table, mapping)
        release = rig.gate(rig.model) if held else None
        rig.rewrite(table, rebuilt)
        operation = rig.queue("backup", {pool: Window(full, table, "running")}, None)
        rig.start("backup")
        rig.let_run()
        if release:
            release()
        rig.finish()
        host = {pool: rig.slots_of("host", operation)[pool]}
        rig.require_host("a window that was rebuilt on the device", host, rows["new"][1])
    operation = rig.queue("backup", {pool: Window(full, table, "queued")}, None)
    rig.rewrite(table, torch.zeros_like(mapping))
    rig.start("backup")
    rig.finish()
    host = {pool: rig.slots_of("host", operation)[pool]}
    rig.require_host("a window that was zeroed on the device after it was queued", host, rows["new"][1])
    rig.queue("backup", {pool: Window(full, table, "running")}, None)
    rig.start("backup")
    (ack,) = rig.controller.acknowledge(wait=True)
    assert isinstance(ack.error, ValueError), f"rows that were zeroed are copied: {ack}"
    assert "no row in the window" in str(ack.error), f"an error that does not say what is wrong: {ack.error}"


def _window(rig: Rig) -> tuple[str, torch.Tensor, torch.Tensor, dict[str, tuple[Slots, Content]]]:
    """A pool, slots of the full pool, the table, and rows before and after a rebuild."""
    (pool,) = rig.windows
    rows = {name: rig.on_device(f"the {name} row") for name in ("old", "new")}
    rows = {name: ({pool: slots[pool]}, content) for name, (slots, content) in rows.items()}
    size = rig.stack.specs[pool].page_size
    mapping = torch.zeros(PAGES * size, dtype=torch.int64)
    full = torch.arange(7 * size, 9 * size)
    mapping[full] = rows["old"][0][pool]
    return pool, full, mapping, rows


# ---- operations that are submitted together


@check()
def check_two_loads_of_the_same_slots(rig: Rig) -> None:
    """The later one wins, and both are acknowledged."""
    slots = rig.take()
    loads = [rig.on_host(f"load {i}") for i in range(2)]
    for tag, (host, _) in enumerate(loads):
        rig.queue("load", slots, host, tag)
    rig.start("load")
    rig.promptly(lambda: rig.controller.wait_until(rig.stack.num_layers - 1))
    seen = rig.see(slots, rig.model)
    tags = [ack.tag for ack in rig.finish()]
    rig.require("a reader behind two loads into the same slots", seen.rows, loads[1][1])
    rig.require_device("two loads into the same slots", slots, loads[1][1])
    assert tags == [0, 1], f"loads 0 and 1 were queued, acknowledged were {tags}"


@check()
def check_two_backups_to_the_same_slots(rig: Rig) -> None:
    host = rig.take("host")
    backups = [rig.on_device(f"backup {i}") for i in range(2)]
    with rig.held("backup"):
        for tag, (slots, _) in enumerate(backups):
            rig.queue("backup", slots, host, tag)
        rig.start("backup")
        rig.let_run()
    tags = [ack.tag for ack in rig.finish()]
    rig.require_host("two backups to the same slots", host, backups[1][1])
    assert tags == [0, 1], f"backups 0 and 1 were queued, acknowledged were {tags}"


@check(races=False)
def check_the_third_of_three_over_the_first(rig: Rig) -> None:
    """A, B, and A again: it is not only the neighbour that counts."""
    backups, loads = ([make(f"{i} of three") for i in range(3)] for make in (rig.on_device, rig.on_host))
    hosts, targets = ([rig.take(side), rig.take(side)] for side in ("host", "device"))
    for i in range(3):
        rig.queue("backup", backups[i][0], hosts[i % 2])
        rig.queue("load", targets[i % 2], loads[i][0])
    rig.start("backup")
    rig.start("load")
    rig.finish()
    for i in (1, 2):
        rig.require_host("backups to A, B and A again", hosts[i % 2], backups[i][1])
        rig.require_device("loads into A, B and A again", targets[i % 2], loads[i][1])


@check(races=False)
def check_disjoint_operations_are_merged(rig: Rig) -> None:
    backups = [rig.on_device(f"backup {i}") for i in range(3)]
    operations = [rig.queue("backup", slots, None, tag) for tag, (slots, _) in enumerate(backups)]
    batches = rig.start("backup")
    assert batches == 1, f"three backups of different slots are {batches} batches"
    acks = rig.finish()
    assert [ack.tag for ack in acks] == [0, 1, 2], f"backups 0, 1, 2 were queued, acknowledged were {acks}"
    for operation, (_, content) in zip(operations, backups, strict=True):
        rig.require_host("one of three backups in a batch", rig.slots_of("host", operation), content)
    for ack in acks:
        for name, spec in rig.stack.specs.items():
            assert ack.bytes[name] == 2 * spec.page_bytes, f"2 pages of {name!r} were moved, told are {ack.bytes} bytes"
            assert ack.tokens[name] == 2 * spec.page_size, (
                f"2 pages of {name!r} were moved, told are {ack.tokens} slots"
            )


# ---- acknowledgements


@check()
def check_backups_are_acknowledged_when_their_bytes_are_there(rig: Rig) -> None:
    slots, content = rig.on_device()
    with rig.held("backup"):
        operation = rig.backup(slots)
        assert rig.acknowledged() == [], "a backup is acknowledged before it is done"
    _require_acknowledged(rig)
    rig.require_host("a backup that was acknowledged", rig.slots_of("host", operation), content)


@check()
def check_loads_are_acknowledged_when_their_bytes_are_there(rig: Rig) -> None:
    for step in ("load", *(f"load layer {layer}" for layer in range(rig.stack.num_layers))):
        host, stored = rig.on_host("what this load brings", 1)
        slots = rig.take("device", 1)
        with rig.held(step):
            rig.load(host, slots)
            assert rig.acknowledged() == [], f"a load is acknowledged while {step!r} is held"
        _require_acknowledged(rig)
        rig.require_device("a load that was acknowledged", slots, stored)


@check(races=False)
def check_steps_on_the_host_can_be_held(rig: Rig) -> None:
    """What is queued is not submitted, what has finished is not reported."""
    slots, content = rig.on_device()
    operation = rig.queue("backup", slots, None)
    with rig.held("backup submit"):
        assert not rig.controller.start_writing(), "a backup is submitted although that is held"
    with rig.held("backup acknowledge"):
        rig.start("backup")
        assert rig.acknowledged() == [], "a backup is acknowledged although that is held"
    _require_acknowledged(rig)
    rig.require_host("a backup that was held", rig.slots_of("host", operation), content)


def _require_acknowledged(rig: Rig) -> None:
    """Without anybody waiting."""
    assert _acknowledged(rig), "it is not acknowledged although nothing is held"


def _acknowledged(rig: Rig, direction: str = "") -> list[str]:
    """Directions of what is acknowledged as things are, until one comes that is awaited."""
    said: list[str] = []
    for _ in range(100):
        for ack in rig.acknowledged():
            assert ack.error is None, f"a {ack.direction} failed: {ack.error}"
            said.append(ack.direction)
        if direction in said or (said and not direction):
            break
    return said


# ---- failures


class Broken(Exception):
    """The failure that a check asked for."""


@check(races=False)
def check_backups_that_fail(rig: Rig) -> None:
    """At any step: it is reported, its slots are free again, the next one works."""
    slots, content = rig.on_device()
    for step in rig.steps("backup"):
        before = rig.counts()
        rig.hooks.fail(step, Broken(step))
        rig.backup(slots)
        _require_failed(rig, step)
        assert rig.counts() == before, f"a backup fails at {step!r} and keeps its host slots"
        operation = rig.backup(slots)
        rig.finish()
        rig.require_host(f"a backup after one that failed at {step!r}", rig.slots_of("host", operation), content)


@check(races=False)
def check_loads_that_fail(rig: Rig) -> None:
    """The same, and the host still has what it had; no consumer takes what has not come."""
    host, stored = rig.on_host()
    last = rig.stack.num_layers - 1
    for step in (*rig.steps("load"), "load layer 0", f"load layer {last}"):
        before = rig.counts()
        rig.hooks.fail(step, Broken(step))
        rig.load(host)
        if step != "load acknowledge":  # by then its layers are there
            _require_refused(rig, step)
        _require_failed(rig, step)
        assert rig.counts() == before, f"a load fails at {step!r} and keeps its device slots"
        rig.require_host(f"the host after a load that failed at {step!r}", host, stored)
        operation = rig.load(host)
        rig.controller.wait_until(last)
        seen = rig.see(rig.slots_of("device", operation), rig.model)
        rig.finish()
        rig.require(f"a load after one that failed at {step!r}", seen.rows, stored)


def _require_failed(rig: Rig, step: str) -> None:
    acks = rig.controller.acknowledge(wait=True)
    assert [str(ack.error) for ack in acks] == [step], f"an operation fails at {step!r}, what is told is {acks}"
    assert not acks[0].bytes, f"an operation fails at {step!r}, and is said to have moved {acks[0].bytes}"
    rig.rest()


def _require_refused(rig: Rig, step: str) -> None:
    try:
        rig.controller.wait_until(0)
    except RuntimeError:
        return
    raise AssertionError(f"a load fails at {step!r}, and a consumer of layer 0 goes on")


@check(races=False)
def check_a_failure_leaves_the_caller_his_slots(rig: Rig) -> None:
    """Those that he gave are his; those that he freed meanwhile, of what was allocated, are free already."""
    (device, _), (host, _) = rig.on_device(), rig.on_host()
    given = {"backup": (device, rig.take("host")), "load": (rig.take(), host)}
    for direction, lists in given.items():
        before = rig.counts()
        rig.hooks.fail(f"{direction} submit", Broken(f"{direction} submit"))
        rig.queue(direction, *lists)
        rig.start(direction)
        _require_failed(rig, f"{direction} submit")
        assert rig.counts() == before, f"a {direction} fails, and frees slots that are the caller's"
    for direction, lists in {"backup": (device, None), "load": (None, host)}.items():
        before, side = rig.counts(), DESTINATION[direction]
        rig.hooks.fail(f"{direction} acknowledge", Broken(f"{direction} acknowledge"))
        operation = rig.queue(direction, *lists)
        rig.start(direction)
        rig.free(side, rig.slots_of(side, operation))
        try:
            _require_failed(rig, f"{direction} acknowledge")
        except ValueError as error:
            raise AssertionError(f"a {direction} fails, and frees slots that were freed already: {error}") from error
        assert rig.counts() == before, (
            f"a {direction} fails whose slots were freed: {before} before, {rig.counts()} after"
        )


@check()
def check_a_failure_lets_nothing_run_on(rig: Rig) -> None:
    """A load fails after its first layers were submitted: whoever gets its slots next is not overwritten by them."""
    host, _ = rig.on_host()
    rig.hooks.delay("load layer 0", 1e-2)
    rig.hooks.fail(f"load layer {rig.stack.num_layers - 1}", Broken())
    operation = rig.load(host)
    assert rig.controller.acknowledge(wait=True)[0].error, "a load fails and is reported as done"
    slots = rig.slots_of("device", operation)
    mine = rig.random_bytes("what the next owner wrote", slots)
    rig.put(slots, mine)
    rig.rest()
    rig.require_device("slots that a failed load gave back", slots, mine)


@check()
def check_consumers_hear_of_every_batch(rig: Rig) -> None:
    """Two loads share some slots, so they are two batches. The first one fails: its other slots hold nothing."""
    steps = [step for step in rig.steps("load") if step not in ("load submit", "load acknowledge")]
    step = steps[-1] if steps else "load submit"
    slots = rig.take("device", 3)
    hosts = [rig.on_host()[0] for _ in range(2)]
    parts = [
        {name: s[: s.numel() // 3 * 2] for name, s in slots.items()},
        {n: s[s.numel() // 3 :] for n, s in slots.items()},
    ]
    for host, part in zip(hosts, parts, strict=True):
        rig.queue("load", part, host)
    rig.hooks.fail(step, Broken(step))
    rig.start("load")
    _require_refused(rig, step)
    errors = [ack.error for ack in rig.controller.acknowledge(wait=True)]
    assert [bool(error) for error in errors] == [True, False], f"the first of two loads fails, what is told is {errors}"


@check()
def check_what_was_to_come_from_a_failure_fails_with_it(rig: Rig) -> None:
    """A backup of slots whose load fails, a load of slots whose backup fails."""
    for first, second in (DIRECTIONS, DIRECTIONS[::-1]):
        for step in (f"{first} submit", f"{first} acknowledge"):
            source, _ = rig.on_device() if first == "backup" else rig.on_host()
            between = rig.take(DESTINATION[first])
            before = rig.counts()
            rig.hooks.fail(step, Broken(step))
            with rig.held(f"{first} acknowledge"):
                rig.queue(first, *((source, between) if first == "backup" else (between, source)), first)
                rig.start(first)
                rig.queue(second, *((between, None) if second == "backup" else (None, between)), second)
                rig.start(second)
                told = [ack.tag for ack in rig.acknowledged() if not ack.error]
                assert not told, f"a {second} is done that reads what a {first} is still to write"
            failed = {ack.tag: ack.error is not None for ack in rig.controller.acknowledge(wait=True)}
            assert failed == {first: True, second: True}, f"a {first} fails at {step!r}, failures are {failed}"
            assert rig.counts() == before, f"a {second} of what a {first} did not bring keeps its slots"


# ---- trees over a controller


@check()
def check_nothing_is_saved_that_was_made_of_what_never_came(rig: Rig) -> None:
    """A prefix is computed behind one that is being loaded, and its backup is over before the load is known to fail."""
    cache, tokens = rig.tree(rig.controller), range(4 * PAGE)
    cache.insert(tokens[: 2 * PAGE], _of_tokens(rig, rig.on_device()[0], 2 * PAGE))
    rig.start("backup")
    cache.check(wait=True)
    for name in rig.owners:
        cache.evict(name, PAGES * PAGE)
    match = cache.match(tokens)
    assert match.length == 2 * PAGE, f"of a prefix on the host {match.length} tokens are found"
    assert cache.load_back(match), "there is room, and a prefix on the host is not loaded"
    rig.hooks.fail("load acknowledge", Broken())
    with rig.held("load acknowledge"):
        rig.start("load")
        rig.controller.wait_until(rig.stack.num_layers - 1)
        own, _ = rig.on_device("what was computed")
        given = _of_tokens(rig, own, 2 * PAGE)
        cache.insert(tokens, given | {cache.anchor: torch.cat([match.slots(cache.anchor), given[cache.anchor]])})
        rig.start("backup")
        rig.run_all()
        cache.check()
    cache.check(wait=True)
    found = cache.match(tokens).length
    assert found <= 2 * PAGE, f"a load of {2 * PAGE} tokens fails, and {found} are found with what was made of them"


def _of_tokens(rig: Rig, slots: Slots, tokens: int) -> Slots:
    """What a tree takes: slots of so many tokens, one of a state."""
    return {name: slots[name] if slots[name].numel() == tokens else slots[name][-1:] for name in rig.owners}


@check()
def check_nodes_are_cut_while_they_are_saved(rig: Rig) -> None:
    """B23: either part of a node gets its part of the backup."""
    slots, content = rig.on_device("the prefix", 4)
    cache = rig.tree(rig.controller)
    tokens = range(4 * PAGE)
    with rig.held("backup"):
        cache.insert(tokens, _of_tokens(rig, slots, len(tokens)))
        rig.start("backup")
        cache.match(tokens[: 2 * PAGE])
        rig.let_run()
    cache.check(wait=True)
    rig.rest()
    nodes = [node for node in cache.root.subtree() if node.parent]
    assert [len(node.key) for node in nodes] == [2 * PAGE] * 2, f"four pages cut in the middle are {nodes}"
    for part, node in enumerate(nodes):
        held = len(node.host.get(cache.anchor, ()))
        assert held == 2 * PAGE, f"part {part} of a node that was cut has {held} host slots for {2 * PAGE} tokens"
        half = Content(content.name, {place: rows.chunk(2)[part] for place, rows in content.rows.items()})
        riders = [name for name in rig.stack.specs if rig.stack.owner(name) == cache.anchor]
        rig.require_host(f"part {part} of a node that was cut", dict.fromkeys(riders, node.host[cache.anchor]), half)


# ---- the host


@check()
def check_the_host_does_not_wait(rig: Rig) -> None:
    """Everything is held for a while, and every call returns at once."""
    slots, content = rig.on_device()
    host, stored = rig.on_host()
    target = rig.take()
    limit = 0.02 if rig.platform == "cuda" else 1.0
    for turn in range(2):  # the first time things may have to be made ready
        seconds = limit if turn else 10.0
        releases = [rig.gate(stream) for stream in (rig.model, rig.write_fence, rig.load_fence)]
        backup = rig.queue("backup", slots, None)
        rig.queue("load", target, host)
        rig.promptly(rig.controller.start_writing, seconds)
        producer = rig.promptly(rig.controller.start_loading, seconds)
        rig.controller.set_consumer(producer)
        rig.promptly(lambda: rig.controller.wait_until(0), seconds)
        assert rig.promptly(rig.controller.acknowledge, seconds) == [], "something is acknowledged while all is held"
        for release in releases:
            release()
        rig.finish()
        rig.require_host("a backup behind streams that were held", rig.slots_of("host", backup), content)
        rig.require_device("a load behind streams that were held", target, stored)
