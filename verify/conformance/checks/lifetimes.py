"""What is read does not change before it was read: states, slots, and the staging buffer."""

from __future__ import annotations

import torch

from refimpl.runtime import Stream
from verify.conformance.checks.registry import check
from verify.conformance.rig import Rig, Slots, overlap

# ---- states


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


# ---- slots


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


# ---- staging


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
