"""Between queueing an operation and submitting it: room is made, batches are formed, operations are dropped."""

from __future__ import annotations

from refimpl.support import DIRECTIONS
from verify.conformance.checks.registry import check
from verify.conformance.rig import Rig, Slots

Asked = dict[str, int]


# ---- room


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


# ---- operations that are taken back


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
