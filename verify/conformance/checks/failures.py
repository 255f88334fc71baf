"""Operations that fail: it is told, nothing is kept, nothing runs on, and what was to come from them fails too."""

from __future__ import annotations

from refimpl.operations import DESTINATION
from refimpl.support import DIRECTIONS
from verify.conformance.checks.registry import check
from verify.conformance.rig import Rig


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
