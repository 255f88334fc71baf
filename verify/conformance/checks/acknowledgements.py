"""An operation is acknowledged when it is done, not before, and without anybody waiting."""

from __future__ import annotations

from verify.conformance.checks.registry import check
from verify.conformance.rig import Rig


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
    assert acknowledged(rig), "it is not acknowledged although nothing is held"


def acknowledged(rig: Rig, direction: str = "") -> list[str]:
    """Directions of what is acknowledged as things are, until one comes that is awaited."""
    said: list[str] = []
    for _ in range(100):
        for ack in rig.acknowledged():
            assert ack.error is None, f"a {ack.direction} failed: {ack.error}"
            said.append(ack.direction)
        if direction in said or (said and not direction):
            break
    return said
