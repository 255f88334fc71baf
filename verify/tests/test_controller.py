"""What a controller promises beside order: what is refused, what waiting costs, and that nothing is lost on the way.

Order and lifetimes, which any controller must keep to, are in `conformance`.
"""

from __future__ import annotations

import dis
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch

from kernels_cupy.runtimes import emulated
from refimpl import HostPool, HostPoolGroup, PoolTransfer, build_stack, presets
from refimpl.controller import Controller
from refimpl.hooks import Hooks
from refimpl.layer_done import SETS
from refimpl.operations import DESTINATION, Batch, Dropped
from refimpl.runtime import STREAMS, Stuck
from refimpl.support import DIRECTIONS
from refimpl.windows import WHEN, Window
from verify import fill
from verify.conformance import Rig
from verify.conformance.rig import PAGE, PAGES, cut, joined

pytestmark = pytest.mark.ordering

HALF: Any = 1.5
PAGE_1 = torch.arange(PAGE, 2 * PAGE)

Way = tuple[str, str, str]
EMULATED = {"direct": "page_first_direct", "kernel": "page_first", "staged": "page_first"}
WAYS = [("cpu", "torch", "layer_first"), *(("emulated", backend, layout) for backend, layout in EMULATED.items())]
every_way = pytest.mark.parametrize(
    "way", [pytest.param(w, id=w[1], marks=[pytest.mark.emulated] * (w[0] == "emulated")) for w in WAYS]
)
every_direction = pytest.mark.parametrize("direction", DIRECTIONS)
on_kernels = pytest.mark.parametrize("rig", [("emulated", "kernel", "page_first")], indirect=True, ids=["kernel"])


@pytest.fixture
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    platform, backend, layout = getattr(request, "param", WAYS[0])
    with Rig(Controller, "mha", platform, backend, layout) as rig:
        yield rig


def by_layer(way: Way) -> Way:
    """With a layout that `staged` too loads layer by layer."""
    return ("emulated", "staged", "page_first_direct") if way[1] == "staged" else way


def locked(rig: Rig) -> bool:
    held = [*rig.stack.device_slots.values(), *(rig.stack.host.pools[name].allocator for name in rig.owners)]
    return any(bool(allocator.locks.any()) for allocator in held)


# ---- waiting


@every_way
@every_direction
def test_to_wait_for_what_is_held_is_to_be_stuck_and_nothing_has_ended(direction: str, way: Way) -> None:
    with Rig(Controller, "mha", *way) as rig:
        make, require = (
            (rig.on_device, rig.require_host) if direction == "backup" else (rig.on_host, rig.require_device)
        )
        slots, content = make()
        before = rig.counts()
        for step in rig.steps(direction)[1:-1]:  # those in a stream
            with rig.held(step):
                operation = rig.backup(slots) if direction == "backup" else rig.load(slots)
                for _ in range(2):
                    with pytest.raises(Stuck, match="is something held"):
                        rig.controller.acknowledge(wait=True)
                    assert locked(rig)
                    assert rig.counts() != before, "what was allocated is not free"
                assert rig.acknowledged() == []
            rig.finish()
            assert not locked(rig)
            to = rig.slots_of(DESTINATION[direction], operation)
            require("what was held", to, content)
            rig.free(DESTINATION[direction], to)
            assert rig.counts() == before


# ---- interrupts


@every_way
@pytest.mark.parametrize("step", ["backup submit", "load submit", "backup copy", "load copy", "load layer 1"])
@pytest.mark.parametrize("several", [False, True], ids=["one batch", "several"])
def test_an_interrupt_loses_nothing(step: str, several: bool, way: Way) -> None:
    """The call is left in the middle; what it had taken from the queue has failed or has come."""
    direction, where = step.split(" ", 1)
    if where == "copy" and way[1] == "kernel":
        step = f"{direction} relayout"  # its copies
    with Rig(Controller, "mha", *by_layer(way)) as rig:
        slots, content = rig.on_device() if direction == "backup" else rig.on_host()
        before = rig.counts()
        to = rig.take(DESTINATION[direction]) if several else None  # two of one destination are two batches
        for tag in range(1 + several):
            rig.queue(direction, *((slots, to) if direction == "backup" else (to, slots)), tag)
        rig.hooks.fail(step, KeyboardInterrupt())
        begin = rig.controller.start_writing if direction == "backup" else rig.controller.start_loading
        with pytest.raises(KeyboardInterrupt):
            begin()
        acks = rig.controller.acknowledge(wait=True)
        assert [ack.tag for ack in acks] == list(range(1 + several))
        assert acks[0].error is not None
        assert not locked(rig)
        if to:
            rig.free(DESTINATION[direction], to)
        assert rig.counts() == before, "neither slots that were allocated nor the caller's are lost"
        rig.rest()
        operation = rig.backup(slots) if direction == "backup" else rig.load(slots)
        rig.finish()
        require = rig.require_host if direction == "backup" else rig.require_device
        require("what comes next", rig.slots_of(DESTINATION[direction], operation), content)


@on_kernels
def test_an_operation_whose_end_cannot_be_recorded_has_not_ended_before_it_has(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its slots are free when it is told, and others get them next."""
    slots, _ = rig.on_device()
    operation = rig.queue("backup", slots, None)
    record, ends = rig.runtime.record, iter((False, True))  # its begin is recorded with the time, and then its end

    def fails_at_the_end(stream: Any, timed: bool = False) -> Any:
        if timed and next(ends, False):
            raise RuntimeError("no event is left")
        return record(stream, timed)

    with monkeypatch.context() as patch:
        patch.setattr(rig.runtime, "record", fails_at_the_end)
        rig.controller.start_writing()
    (ack,) = rig.controller.acknowledge()
    assert "no event is left" in str(ack.error)
    assert ack.tag == operation.tag
    assert not locked(rig)
    storage = [tensor.view(torch.uint8) for _, tensors in rig.stack.host.pools["kv"].storage for tensor in tensors]
    then = [tensor.clone() for tensor in storage]
    rig.rest()
    assert all(map(torch.equal, storage, then)), "bytes arrived in slots that were free already"


@every_way
def test_an_interrupt_lets_nothing_run_on(way: Way) -> None:
    """A load is left after its first layer was submitted; whoever gets its slots next is not overwritten."""
    with Rig(Controller, "mha", *by_layer(way)) as rig:
        operation = rig.queue("load", None, rig.on_host()[0])
        rig.hooks.fail("load layer 1", KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            rig.controller.start_loading()
        (ack,) = rig.controller.acknowledge(wait=True)
        assert ack.error is not None
        slots = rig.slots_of("device", operation)
        mine = rig.random_bytes("what the next owner wrote", slots)
        rig.put(slots, mine)
        rig.rest()
        rig.require_device("slots that an interrupted load gave back", slots, mine)


def test_an_interrupted_acknowledgement_is_made_up_for(rig: Rig) -> None:
    slots, content = rig.on_device()
    operations = [rig.queue("backup", slots, None, tag) for tag in range(2)]
    rig.hooks.fail("backup acknowledge", KeyboardInterrupt())
    rig.start("backup")
    with pytest.raises(KeyboardInterrupt):
        rig.controller.acknowledge(wait=True)
    assert [(ack.tag, ack.error) for ack in rig.controller.acknowledge(wait=True)] == [(0, None), (1, None)]
    for operation in operations:
        rig.require_host("a backup", rig.slots_of("host", operation), content)
    assert not locked(rig)


# Where CPython looks for signals: behind calls, where a function begins or goes on, where a loop begins again.
LOOKS = ("CALL", "RESUME", "JUMP_BACKWARD")
IN = ("controller.py", "queueing.py", "operations.py", "layer_done.py", "teardown.py", "allocator.py")


def interrupted(call: Callable[[], object], at: int) -> bool:
    """Interrupt a call where CPython looks for signals, the time of that number; whether there is such a place.

    In the controller's modules and the allocator, and in the context managers that they enter.
    """
    seen, before = 0, dict[FrameType, int]()

    def is_in(frame: FrameType | None) -> bool:
        name = Path(frame.f_code.co_filename).name if frame else ""
        return name in IN or (frame is not None and name == "contextlib.py" and is_in(frame.f_back))

    def look() -> None:
        nonlocal seen
        seen += 1
        if seen == at:
            sys.settrace(None)
            raise KeyboardInterrupt

    def watch(frame: FrameType, event: str, arg: object) -> Any:
        if event == "call" and frame not in before:
            if not is_in(frame):
                return None
            frame.f_trace_opcodes = True
            before[frame] = frame.f_lasti
            look()
        elif event == "opcode":
            behind, before[frame] = before[frame], frame.f_lasti
            if behind != frame.f_lasti and dis.opname[frame.f_code.co_code[behind]].startswith(LOOKS):
                look()
        return watch

    sys._getframe().f_trace_opcodes = True  # Python 3.12 traces opcodes only if some frame wants it beforehand
    sys.settrace(watch)
    try:
        call()
    except KeyboardInterrupt:
        assert seen == at
        return True
    finally:
        sys.settrace(None)
    assert seen < at, "an interrupt that nobody met"
    return False


def tags(controller: Controller) -> list[object]:
    """Of what is queued or under way."""
    return [o.tag for each in DIRECTIONS for o in (*controller.queued(each), *controller.under_way(each))]


@pytest.mark.emulated
@on_kernels
@pytest.mark.parametrize("fails", [False, True], ids=["what has come", "what has failed"])
def test_an_acknowledgement_may_be_interrupted_anywhere(fails: bool, rig: Rig) -> None:
    """The next one makes up for it: everything is told once, unlocked once, and locks of others stay."""
    slots, _ = rig.on_device()
    before, device, at = rig.counts(), rig.stack.device_slots["kv"], 0
    for at in count(1):
        operations = [rig.queue("backup", slots, None, tag) for tag in range(2)]
        if fails:
            rig.hooks.fail("backup relayout", RuntimeError("told to fail"))
        assert rig.controller.start_writing() == 1
        operations.append(rig.queue("backup", slots, None, "later"))
        acks = list[Any]()
        met = interrupted(lambda acks=acks: acks.extend(rig.controller.acknowledge(wait=True)), at)
        others = rig.all_that_is_left("host")
        acks += rig.controller.acknowledge(wait=True)
        assert [(ack.tag, bool(ack.error)) for ack in acks] == [(0, fails), (1, fails)]
        rig.free("host", others)
        assert device.locks.sum() == 2, "two pages are locked once, by what is queued"
        rig.start("backup")
        assert [(ack.tag, ack.error) for ack in rig.controller.acknowledge(wait=True)] == [("later", None)]
        assert not locked(rig)
        for operation in operations[2 * fails :]:
            rig.free("host", rig.slots_of("host", operation))
        assert rig.counts() == before
        if not met:
            break
    assert at > 50


@pytest.mark.emulated
@on_kernels
@every_direction
def test_submitting_may_be_interrupted_anywhere(direction: str, rig: Rig) -> None:
    """An operation is queued, or it is under way and has failed or come; it is never lost, nor submitted again."""
    (first, _), second, at = rig.on_host(), rig.take("host"), 0
    between, last, before = rig.take(), rig.take(), rig.counts()
    start = rig.controller.start_writing if direction == "backup" else rig.controller.start_loading
    for at in count(1):
        if direction == "backup":
            rig.queue("backup", between, first, 0)
            rig.queue("backup", between, second, 1)
            rig.queue("backup", last, second, 2)  # to the same place: another batch
        else:  # one brings the next
            rig.queue("load", between, first, 0)
            rig.queue("backup", between, second, 1)
            rig.queue("load", last, second, 2)
        met = interrupted(start, at)
        assert sorted(map(str, tags(rig.controller))) == ["0", "1", "2"]
        rig.controller.start_loading()
        rig.controller.start_writing()
        acks = rig.controller.acknowledge(wait=True)
        assert sorted(str(ack.tag) for ack in acks) == ["0", "1", "2"]
        assert not locked(rig)
        assert rig.counts() == before
        if not met:
            break
    assert at > 50


@pytest.mark.emulated
@on_kernels
@pytest.mark.parametrize("what", ["drop", "close"])
def test_dropping_and_closing_may_be_interrupted_anywhere(what: str, rig: Rig) -> None:
    """Whoever closes then finds what is left, and everything is told once."""
    slots, host, at = rig.take(), rig.take("host"), 0
    before = rig.counts()
    for at in count(1):
        rig.queue("backup", slots, host, "under way")
        rig.start("backup")
        dropped = [rig.queue("load", None, host, tag) for tag in range(2)]
        call = partial(rig.controller.drop, dropped[0]) if what == "drop" else rig.controller.close
        met = interrupted(call, at)
        rig.controller.close()
        acks = {ack.tag: ack.error for ack in rig.controller.acknowledge()}
        assert {tag: type(error) for tag, error in acks.items()} == {"under way": type(None), 0: Dropped, 1: Dropped}
        assert not locked(rig)
        assert rig.counts() == before
        if not met:
            break
    assert at > 50


# ---- what is refused


@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("slot", [-1, -PAGE, PAGES * PAGE, 1 << 40])
def test_slots_that_a_table_does_not_have_are_named(slot: int, when: Any) -> None:
    """A negative one would be looked up from the end."""
    with Rig(Controller, "swa-mamba", *WAYS[0]) as rig:
        full, mapping = torch.arange(slot, slot + PAGE), rig.take("device", PAGES - 2)["swa"]
        mapping = torch.cat([torch.zeros(PAGES * PAGE - len(mapping), dtype=torch.int64), mapping])
        before, transfers = rig.counts(), [PoolTransfer("swa", None, Window(full, mapping, when))]
        told = f"slot {slot} is outside the table of {PAGES * PAGE} slots"
        if when == "queued":
            with pytest.raises(ValueError, match=told):
                rig.controller.write(1, transfers)
        else:
            assert rig.controller.write(1, transfers)
            rig.start("backup")
            (ack,) = rig.controller.acknowledge(wait=True)
            assert isinstance(ack.error, ValueError)
            assert told in str(ack.error)
        assert rig.counts() == before


ROWS = torch.arange(PAGES * PAGE)


@pytest.mark.parametrize(
    ("full", "mapping", "told"),
    [
        (ROWS[:PAGE].double(), ROWS, "a window's full indices must be a 1-D int64 or int32 tensor, got torch.float64"),
        (ROWS[:PAGE], ROWS.double(), "a window's mapping: indices must be .* got torch.float64"),
        (ROWS[:PAGE], ROWS.float(), "a window's mapping: indices must be .* got torch.float32"),
        (ROWS[:PAGE], ROWS[None], r"a window's mapping: indices must be .* of shape \(1, "),
        (ROWS[:PAGE], None, "a window's mapping: indices must be .* got None"),
        ([0, 1], ROWS, r"a window's full indices must be .* got \[0, 1\]"),
    ],
)
def test_a_window_is_made_of_lists_of_slots(full: Any, mapping: Any, told: str) -> None:
    """A table of fractions would be cut off to other rows."""
    with pytest.raises((TypeError, ValueError), match=told):
        Window(full, mapping)


def test_hooks_are_no_name_of_a_step(rig: Rig) -> None:
    with pytest.raises(TypeError, match="hooks are a Hooks, which holds, delays or fails steps; got 'backup copy'"):
        Controller(rig.stack, hooks="backup copy")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("wrong", [[0, 1], "01", (0, 1), torch.zeros(2), torch.zeros(2, 2, dtype=torch.int64)])
@pytest.mark.parametrize("side", ["host", "device"])
def test_a_transfer_is_made_of_lists_of_slots(side: str, wrong: Any) -> None:
    lists = {f"{side}_indices": wrong}
    with pytest.raises((TypeError, ValueError), match=f"pool 'kv': {side} indices must be a 1-D int64 or int32 tensor"):
        PoolTransfer("kv", **lists)


REFUSED: dict[str, tuple[Callable[[Controller], object], str]] = {
    "a wait for a pool": (lambda c: c.wait_until(0, "draft"), r"no pool 'draft' in this stack, it has \['kv'\]"),
    "a wait for all of a pool": (lambda c: c.wait_for_all_of("draft"), "no pool 'draft'"),
    "a layer below": (lambda c: c.wait_until(-1), r"no layer -1: the stack has layers 0\.\.2"),
    "a layer above": (lambda c: c.wait_until(3), "no layer 3"),
    "half a layer": (lambda c: c.wait_until(1.5), r"no layer 1\.5"),  # pyright: ignore[reportArgumentType]
    "a layer of a pool": (lambda c: c.wait_until(3, "kv"), "no layer 3"),
    "a load to come": (lambda c: c.set_consumer(0), "there is no load 0: 0 have begun"),
    "a load below": (lambda c: c.set_consumer(-1), "there is no load -1"),
    "no load": (lambda c: c.set_consumer(HALF), "there is no load 1.5"),
    "a backup of a pool": (lambda c: c.write(1, [PoolTransfer("draft")]), r"no pools \['draft'\]"),
    "a load of a pool": (lambda c: c.load(1, [PoolTransfer("draft")]), r"no pools \['draft'\]"),
    "twice the same": (lambda c: c.load(1, [PoolTransfer("kv"), PoolTransfer("kv")]), "one transfer at a time"),
    "a load of nothing": (lambda c: c.load(1, [PoolTransfer("kv", None, PAGE_1)]), "a load needs the host slots"),
    "free host slots": (lambda c: c.load(1, [PoolTransfer("kv", PAGE_1)]), "pool 'kv': host slot 4 is not allocated"),
    "free device slots": (
        lambda c: c.write(1, [PoolTransfer("kv", None, PAGE_1)]),
        "pool 'kv': device slot 4 is not allocated",
    ),
}


@pytest.mark.parametrize(("call", "told"), REFUSED.values(), ids=REFUSED)
def test_what_there_is_not_is_refused_by_name(call: Callable[[Controller], object], told: str, rig: Rig) -> None:
    before = rig.counts()
    with pytest.raises(ValueError, match=told):
        call(rig.controller)
    assert rig.counts() == before
    assert not locked(rig)
    assert rig.controller.start_loading() is None


def test_a_pool_that_has_no_part_in_an_operation_is_named(rig: Rig) -> None:
    operation = rig.queue("backup", rig.take(), None)
    with pytest.raises(KeyError, match="pool 'draft' has no part in this backup, which moves"):
        operation.host_indices("draft")


# ---- dropping and closing


@every_direction
def test_what_was_dropped_or_submitted_cannot_be_dropped(direction: str, rig: Rig) -> None:
    slots, _ = rig.on_device() if direction == "backup" else rig.on_host()
    lists = (slots, None) if direction == "backup" else (None, slots)
    before = rig.counts()
    dropped = rig.queue(direction, *lists, "dropped")
    rig.controller.drop(dropped)
    assert rig.counts() == before
    submitted = rig.queue(direction, *lists, "submitted")
    rig.start(direction)
    for operation in (dropped, submitted):
        with pytest.raises(ValueError, match=f"'{operation.tag}' is not queued: it was submitted or dropped"):
            rig.controller.drop(operation)
    acks = {ack.tag: ack for ack in rig.controller.acknowledge(wait=True)}
    assert isinstance(acks["dropped"].error, Dropped)
    assert f"{direction} 'dropped' was dropped" in str(acks["dropped"].error)
    assert not acks["dropped"].bytes
    assert acks["submitted"].error is None
    with pytest.raises(ValueError, match="is not queued"):
        rig.controller.drop(submitted)
    assert not locked(rig)


@every_way
def test_a_controller_may_be_left_in_the_middle_of_everything(way: Way) -> None:
    """Steps are held, some operations are under way, some queued; each of them is told once."""
    with Rig(Controller, "mha", *way) as rig:
        (slots, content), (host, stored) = rig.on_device(), rig.on_host()
        before, hooks = rig.counts(), Hooks()
        with Controller(rig.stack, hooks, runtime=rig.runtime) as controller:
            for step in (*rig.steps("backup"), *rig.steps("load"), "load layer 1"):
                if "submit" not in step:
                    hooks.hold(step)
            backup = controller.write("backup", rig.transfers(slots, None))
            load = controller.load("load", rig.transfers(None, host))
            assert backup is not None
            assert load is not None
            controller.start_writing()
            controller.start_loading()
            hooks.hold("backup submit")
            assert controller.write("queued", rig.transfers(slots, None))
            assert controller.start_writing() == 0
        controller.close()
        acks = {ack.tag: ack.error for ack in controller.acknowledge()}
        assert {tag: type(error) for tag, error in acks.items()} == {
            "backup": type(None),
            "load": type(None),
            "queued": Dropped,
        }
        assert controller.acknowledge(wait=True) == []
        assert not locked(rig)
        rig.require_host("a backup under way", rig.slots_of("host", backup), content)
        rig.require_device("a load under way", rig.slots_of("device", load), stored)
        for side, operation in (("host", backup), ("device", load)):
            rig.free(side, rig.slots_of(side, operation))
        assert rig.counts() == before


def test_on_a_cpu_what_is_held_is_submitted_all_the_same() -> None:
    """Only the host cannot wait for the copies of states that a hook holds; what is queued beside them is not lost."""
    stack = build_stack("qwen3-next", "page_first", "numba", device_pages=5, host_ratio=2.0, page_size=4)
    controller = Controller(stack)
    slots = {name: stack.device_slots[name].alloc(4 if name == "kv" else 1) for name in ("kv", "mamba")}
    hold = controller.hooks.hold("backup copy")
    assert controller.write("held", [PoolTransfer(name, None, held) for name, held in slots.items()])
    with pytest.raises(Stuck):
        controller.start_writing()
    hold.release()
    (ack,) = controller.acknowledge(wait=True)
    assert ack.error is None
    assert all(nbytes == sum(r.bytes for r in ack.receipts[name]) > 0 for name, nbytes in ack.bytes.items())
    controller.close()
    stack.close()


def test_on_a_cpu_the_host_waits_where_a_stream_would() -> None:
    """What a model computes there is done at once: before it overwrites a state, and before it reads a layer."""
    stack = build_stack("qwen3-next", "page_first", "numba", device_pages=5, host_ratio=2.0, page_size=4)
    controller, device = Controller(stack), stack.device["mamba"]
    slots = stack.device_slots["mamba"].alloc(1)
    assert slots is not None
    state = int(slots[0])
    layers = device.spec.owned_layers
    states = [device.buffer("temporal", layer) for layer in layers]
    for rows in states:
        rows[state] = 1.0
    saved = controller.write("saved", [PoolTransfer("mamba", None, slots)])
    assert saved
    controller.start_writing()
    for rows in states:
        rows[state] = 2.0  # the model's next step
    assert [ack.error for ack in controller.acknowledge(wait=True)] == [None]
    controller.load("back", [PoolTransfer("mamba", saved.host_indices("mamba"), slots)])
    controller.set_consumer(controller.start_loading())
    for layer, rows in zip(layers, states, strict=True):
        controller.wait_until(layer)
        assert (rows[state] == 1.0).all(), f"layer {layer} is read before it has arrived"
    controller.close()
    stack.close()


@every_direction
def test_where_an_operation_has_come_to_can_be_asked_for(direction: str, rig: Rig) -> None:
    slots, _ = rig.on_device() if direction == "backup" else rig.on_host()
    operation = rig.queue(direction, *((slots, None) if direction == "backup" else (None, slots)), "mine")

    def come_to() -> tuple[bool, bool, list[object]]:
        queued, under_way = rig.controller.queued(direction), rig.controller.under_way(direction)
        return queued == (operation,), under_way == (operation,), [ack.tag for ack in rig.controller.ended]

    assert come_to() == (True, False, [])
    rig.start(direction)
    assert come_to() == (False, True, [])
    rig.controller.close()
    assert come_to() == (False, False, ["mine"])
    assert [ack.tag for ack in rig.controller.acknowledge()] == ["mine"]
    assert come_to() == (False, False, [])


# ---- room


def test_a_load_says_how_many_device_slots_it_lacks(rig: Rig) -> None:
    host, _ = rig.on_host(pages=3)
    mine = rig.take("device", PAGES - 1 - 2)  # page 0 is padding
    asked: list[tuple[str, int]] = []

    def make_room(pool: str, lacking: int) -> None:
        asked.append((pool, lacking))
        rig.free("device", cut(mine, PAGES - 3)[0])

    assert rig.controller.load(1, rig.transfers(None, host), lambda *lacks: asked.append(lacks)) is None
    assert rig.controller.load(1, rig.transfers(None, host), make_room)
    assert asked == [("kv", PAGE)] * 2


def test_a_group_says_how_many_host_slots_it_lacks() -> None:
    spec = presets.mla(1, 8, torch.uint8, PAGE)
    group, asked = HostPoolGroup([HostPool(spec, "page_first", 4)]), list[Any]()
    taken = group.alloc(3 * PAGE)
    assert taken is not None
    assert group.alloc(3 * PAGE, reclaim=asked.append) is None
    transfers = [PoolTransfer("kv", None, torch.arange(2 * PAGE))]
    assert group.resolve(transfers, lambda *lacks: asked.append(lacks)) is None
    assert asked == [2 * PAGE, ("kv", PAGE)]
    assert group.resolve(transfers, lambda name, lacking: group.anchor.free(taken[:lacking]))
    assert group.anchor.available_size() == 0


# ---- states


@pytest.mark.emulated
def test_an_interrupt_between_states_and_the_rest_ends_with_the_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their copies run on a stream of their own: until they have ended the slots are nobody else's."""
    move = Controller._move

    def interrupted(batch: Batch, name: str) -> None:
        move(rig.controller, batch, name)
        raise KeyboardInterrupt

    with Rig(Controller, "mamba", "emulated", "kernel", "page_first") as rig:
        slots, _ = rig.on_device()
        rig.queue("backup", slots, None)
        with monkeypatch.context() as patched, rig.held("backup"):
            patched.setattr(rig.controller, "_move", interrupted)
            with pytest.raises(KeyboardInterrupt):
                rig.controller.start_writing()
            with pytest.raises(Stuck, match="is something held"):
                rig.controller.acknowledge(wait=True)
            assert locked(rig)
        (ack,) = rig.controller.acknowledge(wait=True)
        assert ack.error
        assert not locked(rig)


# ---- lists in device memory


@pytest.mark.emulated
@pytest.mark.parametrize("seed", range(4))
def test_lists_queued_on_one_stream_and_started_on_another_are_read_as_they_were(seed: int) -> None:
    """The copy of a list is behind a stream that is held; who submits the backup is not."""
    with Rig(Controller, "mha", "emulated", "kernel", "page_first", seed=seed) as rig:
        slots, content = rig.on_device()
        there = rig.on_the_device(torch.zeros_like(slots["kv"]))
        release = rig.gate(rig.model)
        rig.rewrite(there, slots["kv"])
        operation = rig.queue("backup", {"kv": there}, None)
        assert operation.listed is not None
        rig.rewrite(there, torch.zeros_like(slots["kv"]))
        with rig.runtime.on(rig.runtime.stream()):
            rig.start("backup")
        assert rig.acknowledged() == []
        release()
        rig.finish()
        rig.require_host("a backup by a list on the device", rig.slots_of("host", operation), content)


WINDOWS = ("swa-mamba", "emulated", "kernel", "page_first")


@pytest.mark.emulated
def test_what_is_looked_up_on_the_device_is_merged_with_lists_that_lie_there() -> None:
    """And not with those that the host has, wherever the slots lie that are looked up: what is joined lies together."""
    with Rig(Controller, *WINDOWS) as rig:
        (pool,) = rig.windows
        slots, content = rig.on_device(pages=3)
        thirds, mapping = cut(slots, 3), torch.zeros(PAGES * PAGE, dtype=torch.int64)
        mapping[PAGE_1] = thirds[0][pool]
        table, there = rig.on_the_device(mapping), rig.on_the_device(thirds[1][pool])
        lists = Window(PAGE_1, table, "running"), there, thirds[2][pool]
        operations = [rig.queue("backup", {pool: each}, None) for each in lists]
        assert [operation.places[pool] for operation in operations] == [(False, True), (False, True), (False, False)]
        assert rig.controller.start_writing() == 2
        assert [ack.error for ack in rig.controller.acknowledge(wait=True)] == [None] * 3
        host = torch.cat([rig.slots_of("host", operation)[pool] for operation in operations])
        rig.require_host("a window, a list there and one here", {pool: host}, content)


@pytest.mark.emulated
@pytest.mark.parametrize("when", WHEN)
def test_slots_on_the_device_are_not_looked_up_in_a_table_of_the_host(when: Any) -> None:
    with Rig(Controller, *WINDOWS) as rig:
        before, mapping = rig.counts(), torch.arange(PAGES * PAGE)
        window = Window(rig.on_the_device(PAGE_1), mapping, when)
        told = r"full slots lie on emulated:0, its mapping on cpu: .* bring the slots there \(full\.cpu\(\)\)"
        with pytest.raises(ValueError, match=told):
            rig.controller.write(1, [PoolTransfer("swa", None, window)])
        assert rig.counts() == before
        assert not locked(rig)


@pytest.mark.emulated
def test_an_emulated_device_joins_no_lists_of_two_places() -> None:
    """Neither does torch."""
    with Rig(Controller, *WINDOWS) as rig:
        there = rig.on_the_device(PAGE_1)
        with pytest.raises(RuntimeError, match="all lists to be on the same device, not all 2 are on emulated:0"):
            rig.runtime.joined([there, PAGE_1])
        assert rig.runtime.holds(rig.runtime.joined([there, there]))


TWO_OWNERS = {name: presets.mha(2, 1, 8, torch.uint8, page_size=PAGE, name=name) for name in ("kv", "draft")}


@pytest.mark.emulated
def test_pools_that_own_their_slots_may_be_given_one_list() -> None:
    """Each is put in order by pages of its own: a load of the second pool comes after the backup of both."""
    for seed in range(10):
        emulated().reseed(seed)
        with build_stack(
            TWO_OWNERS, "page_first", "kernel", device_pages=9, host_ratio=2, platform="emulated"
        ) as stack:
            controller = Controller(stack)
            device, host = stack.device_slots["kv"].alloc(2 * PAGE), stack.host.pools["kv"].alloc(2 * PAGE)
            assert device is not None
            assert host is not None
            same = stack.device_slots["draft"].alloc(2 * PAGE), stack.host.pools["draft"].alloc(2 * PAGE)
            assert all(
                other is not None and torch.equal(a, other) for a, other in zip((device, host), same, strict=True)
            )
            fill.fill_device(stack.device["draft"], 1)
            there = stack.device_slots["draft"].alloc(2 * PAGE)
            written = controller.write("both", [PoolTransfer(name, host, device) for name in TWO_OWNERS])
            assert written
            assert written.touched["device", "draft"] == written.touched["device", "kv"]
            controller.start_writing()
            controller.load("one", [PoolTransfer("draft", host, there)])
            controller.start_loading()
            assert [ack.error for ack in controller.acknowledge(wait=True)] == [None, None]
            buffer = stack.device["draft"].buffer("k", 0)
            assert torch.equal(buffer[there], buffer[device])


@pytest.mark.emulated
def test_a_list_of_two_pools_is_held_against_the_smaller_one_too() -> None:
    pages = {"kv": 9, "draft": 4}
    with build_stack(
        TWO_OWNERS, "page_first", "kernel", device_pages=pages, host_ratio=1, platform="emulated"
    ) as stack:
        device, host = stack.device_slots["kv"].alloc(8 * PAGE), stack.host.pools["kv"].alloc(8 * PAGE)
        with pytest.raises(ValueError, match=r"pool .draft.: .* is outside the pool.s"):
            Controller(stack).write("both", [PoolTransfer(name, host, device) for name in TWO_OWNERS])


@pytest.mark.emulated
@on_kernels
def test_a_load_that_the_device_refuses_tells_its_consumers_once_it_is_acknowledged(rig: Rig) -> None:
    """Before that nobody knows."""
    host, _ = rig.on_host()
    bad = rig.on_the_device(torch.full_like(host["kv"], PAGES * PAGE))
    rig.queue("load", {"kv": bad}, host)
    rig.start("load")
    rig.controller.wait_until(0)
    (ack,) = rig.controller.acknowledge(wait=True)
    assert isinstance(ack.error, ValueError)
    with pytest.raises(RuntimeError, match="layer 0 will not arrive, its load has failed: device index"):
        rig.controller.wait_until(0)
    rig.load(host)
    rig.controller.wait_until(0)
    rig.finish()


# ---- layers


@every_way
def test_a_consumer_of_a_load_long_gone_passes(way: Way) -> None:
    """Its events are another's by now, which is late, and fails. A producer is never the number of two loads."""
    with Rig(Controller, "mha", *way) as rig:
        loads, last = [rig.on_host(pages=1)[0] for _ in range(SETS + 2)], rig.stack.num_layers - 1
        producers = []
        for host in loads[:-1]:
            rig.load(host)
            producers.append(rig.producer)
            rig.finish()
        rig.hooks.fail("load submit", RuntimeError("told to fail"))
        with rig.held("load layer 1"):
            rig.load(loads[-1])
            producers.append(rig.producer)
            assert producers == list(range(SETS + 2))
            for producer in producers[:2]:
                rig.controller.set_consumer(producer)
                rig.controller.wait_until(last)
                assert rig.arrives(rig.see(rig.take("device", 1), rig.model))
        rig.controller.set_consumer(producers[-1])
        with pytest.raises(RuntimeError, match="has failed: told to fail"):
            rig.controller.wait_until(0)
        rig.controller.acknowledge(wait=True)


@pytest.mark.parametrize("known", ["at once", "late"])
def test_a_consumer_of_a_failed_load_is_told_so_however_late_it_comes(known: str, rig: Rig) -> None:
    """When its events are another's, too, and if nobody knew before."""
    rig.load(rig.on_host(pages=1)[0])
    failed, layers = rig.producer, rig.controller.layers
    assert failed is not None
    rig.finish()
    for late in range(SETS + 2):
        if late == (0 if known == "at once" else SETS + 1):
            layers.fail(failed, RuntimeError("boom"))
        rig.load(rig.on_host(pages=1)[0])
        rig.finish()
    rig.controller.wait_until(0)
    rig.controller.set_consumer(failed)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="layer 0 will not arrive, its load has failed: boom"):
            rig.controller.wait_until(0)


@every_way
def test_loads_that_do_not_merge_come_layer_by_layer_all_the_same(way: Way) -> None:
    with Rig(Controller, "mha", *by_layer(way)) as rig:
        slots, loads = rig.take("device", 3), [rig.on_host() for _ in range(2)]
        thirds = cut(slots, 3)
        rig.queue("load", joined(*thirds[:2]), loads[0][0])
        rig.queue("load", joined(*thirds[1:]), loads[1][0])
        with rig.held("load layer 1"):
            rig.start("load")
            assert [len(flight.operations) for flight in rig.controller._in_flight["load"]] == [1, 1]
            rig.controller.wait_until(0)
            seen = rig.see(joined(*thirds[1:]), rig.model, [0])
            assert rig.arrives(seen), "a reader of layer 0 waits for layer 1"
            rig.require("a reader of layer 0", seen.rows, loads[1][1])
            assert rig.acknowledged() == []
        rig.finish()
        rig.require_device("two loads", joined(*thirds[1:]), loads[1][1])


@every_way
def test_a_load_brings_the_backups_with_it_that_it_must_come_after(way: Way) -> None:
    """And they the loads before them: host to device, to the host, and to the device again, with one call."""
    with Rig(Controller, "mha", *way) as rig:
        (first, stored), (other, unrelated) = rig.on_host(), rig.on_device("another backup")
        between, second, last = rig.take(), rig.take("host"), rig.take()
        rig.queue("load", between, first, "load")
        rig.queue("backup", between, second, "backup")
        behind = rig.queue("backup", other, None, "another backup")
        rig.queue("load", last, second, "load again")
        producer = rig.promptly(rig.controller.start_loading)
        assert producer == 0
        rig.controller.set_consumer(producer)
        rig.controller.wait_until(rig.stack.num_layers - 1)
        seen = rig.see(last, rig.model)
        assert {ack.tag for ack in rig.finish()} == {"load", "backup", "another backup", "load again"}
        rig.require("a reader behind all of it", seen.rows, stored)
        rig.require_device("a load behind a backup behind a load", last, stored)
        rig.require_host("a backup behind a load", second, stored)
        rig.require_host("a backup beside them", rig.slots_of("host", behind), unrelated)


def test_a_load_waits_for_a_backup_that_is_held_before_it_is_submitted(rig: Rig) -> None:
    slots, content = rig.on_device()
    host, target = rig.take("host"), rig.take()
    rig.queue("backup", slots, host)
    rig.queue("load", target, host)
    with rig.held("backup submit"):
        assert rig.controller.start_loading() is None
    rig.start("load")
    rig.finish()
    rig.require_device("a load behind a backup", target, content)


@pytest.mark.emulated
@on_kernels
def test_four_controllers_of_a_device_hold_each_other_up_in_nothing(rig: Rig) -> None:
    """A dozen streams are dealt in turn; the fifth controller shares those of the first."""
    others = [Controller(rig.stack, runtime=rig.runtime) for _ in range(STREAMS // 3 - 1)]
    with rig.held("backup"):
        rig.backup(rig.on_device()[0])
        for other in others:
            slots, content = rig.on_device("what another one saves")
            operation = other.write(None, rig.transfers(slots, None))
            assert operation
            other.start_writing()
            rig.run_all()
            assert [ack.error for ack in other.acknowledge()] == [None]
            rig.require_host("a backup beside one that is held", rig.slots_of("host", operation), content)
    rig.finish()


@every_way
def test_a_load_of_what_a_backup_did_not_bring_tells_its_consumers(way: Way) -> None:
    """As soon as it is submitted, if the backup has failed by then."""
    with Rig(Controller, "mha", *way) as rig:
        (slots, _), host, before = rig.on_device(), rig.take("host"), rig.counts()
        rig.hooks.fail("backup submit", RuntimeError("told to fail"))
        rig.backup(slots, host)
        rig.load(host)
        with pytest.raises(RuntimeError, match=r"layer 0 will not arrive.* a backup failed .* told to fail"):
            rig.controller.wait_until(0)
        acks = rig.controller.acknowledge(wait=True)
        assert [(ack.direction, "told to fail" in str(ack.error)) for ack in acks] == [("backup", True), ("load", True)]
        assert rig.counts() == before


# ---- hooks

LATE = 0.05  # seconds


@pytest.mark.parametrize("step", ["backup submit", "backup copy", "backup acknowledge", "load layer 1"])
def test_steps_can_be_delayed(step: str, rig: Rig) -> None:
    """Those of the host take the host's time, also with a backend of the CPU."""
    slots, _ = rig.on_device()
    rig.hooks.delay(step, LATE)

    def taken() -> float:
        begun = time.perf_counter()
        operation = rig.backup(slots) if "backup" in step else rig.load(rig.on_host()[0])
        rig.finish()
        assert operation
        return time.perf_counter() - begun

    assert taken() >= LATE
    rig.hooks.delay(step, 0)
    assert min(taken() for _ in range(3)) < LATE


@every_direction
def test_a_backend_of_the_cpu_has_the_step_at_which_it_copies(direction: str, rig: Rig) -> None:
    slots, content = rig.on_device() if direction == "backup" else rig.on_host()
    move = rig.backup if direction == "backup" else rig.load
    step = f"{direction} copy"
    rig.hooks.fail(step, RuntimeError("told to fail"))
    move(slots)
    (ack,) = rig.controller.acknowledge(wait=True)
    assert str(ack.error) == "told to fail"
    with rig.held(step):
        operation = move(slots)
        assert rig.acknowledged() == []
    rig.finish()
    require = rig.require_host if direction == "backup" else rig.require_device
    require("what was held", rig.slots_of(DESTINATION[direction], operation), content)


@pytest.mark.parametrize("seconds", [-1, -1e-9, float("nan")])
def test_no_step_is_early(seconds: float) -> None:
    with pytest.raises(ValueError, match="'load submit' cannot be delayed by"):
        Hooks().delay("load submit", seconds)


@pytest.mark.parametrize("error", ["broken", None, RuntimeError])
def test_steps_fail_by_exceptions(error: Any) -> None:
    with pytest.raises(TypeError, match="'load submit' fails by raising an exception, got"):
        Hooks().fail("load submit", error)


@pytest.mark.parametrize("step", ["backup", "backup layer 1", "load layer", "load layer -1", "copy", "store copy"])
def test_steps_that_there_are_not_are_refused(step: str) -> None:
    calls: list[Callable[[Hooks], object]] = [
        lambda hooks: hooks.hold(step),
        lambda hooks: hooks.delay(step, 0),
        lambda hooks: hooks.fail(step, RuntimeError()),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=f"no step '{step}'"):
            call(Hooks())


# ---- many operations


def test_the_work_of_queueing_grows_with_the_operations_not_with_their_square() -> None:
    """Backups and loads of one page each, of pages of their own."""
    most = 4000
    spec = presets.mla(1, 8, torch.uint8, 1)
    with build_stack({"kv": spec}, device_pages=2 * most + 1, host_ratio=1) as stack:
        device, host = stack.device_slots["kv"].alloc(2 * most), stack.host.alloc(most)
        assert device is not None
        assert host is not None

        def seconds(count: int) -> float:
            with Controller(stack) as controller:
                begun = time.process_time()
                for at in range(count):
                    page = device[at : at + 1], device[most + at : most + at + 1], host[at : at + 1]
                    assert controller.write(at, [PoolTransfer("kv", None, page[0])])
                    assert controller.load(at, [PoolTransfer("kv", page[2], page[1])])
                controller.start_loading()
                assert controller.start_writing() == 1
                taken = time.process_time() - begun
                acks = controller.acknowledge(wait=True)
            assert len(acks) == 2 * count
            assert not any(ack.error for ack in acks)
            for slots in (host, device):
                assert len(np.unique(slots.numpy())) == len(slots)
            stack.host.anchor.clear()
            assert stack.host.alloc(most) is not None
            return taken

        seconds(100)
        few = min(seconds(most // 4) for _ in range(2))
        ratio = seconds(most) / few
        assert ratio < 8, f"four times as many operations take {ratio:.1f} times as long"
