"""Who waits for whom: copies for the model's work and for each other, and the host for nobody."""

from __future__ import annotations

from refimpl.runtime import Stream
from refimpl.support import DIRECTIONS
from verify.conformance.checks.acknowledgements import acknowledged
from verify.conformance.checks.registry import check
from verify.conformance.rig import Rig, cut, joined

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
            said = acknowledged(rig, second)
            assert second in said, f"a {second} waits for a {first} of other slots"
        rig.finish()
        rig.require_host("a backup beside a load", rig.slots_of("host", operations["backup"]), content)
        rig.require_device("a load beside a backup", rig.slots_of("device", operations["load"]), stored)


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
