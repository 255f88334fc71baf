"""The lists of slots that a caller gives, wherever they are, and tables that take their place."""

from __future__ import annotations

import numpy as np
import torch

from refimpl.windows import Window
from verify.conformance.checks.registry import check
from verify.conformance.rig import PAGE, PAGES, Content, Rig, Slots, cut, joined

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


def _spoil(*lists: Slots) -> None:
    """Other slots, and legal ones: an error would not be the worst."""
    for side in lists:
        for slots in side.values():
            size = 1 if slots.numel() < 2 or slots[1] != slots[0] + 1 else PAGE
            slots.add_(size * 5).remainder_(size * PAGES)


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
