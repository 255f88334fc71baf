"""Memory is let go of when nothing is under way in it, whoever closes, fails, forgets or is interrupted."""

from __future__ import annotations

import dis
import gc
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

from kernels_cupy.runtimes import emulated
from refimpl import Component, DevicePool, HostPool, PoolSpec, presets, slots_of
from refimpl.allocator import Budget
from refimpl.emulated import QueueRuntime
from refimpl.pinned import Block, HostMemory
from refimpl.rank_pool import RankPool, part
from refimpl.runtime import Pending
from refimpl.support import DIRECTIONS
from refimpl.teardown import call_all
from verify import fill
from verify.guarded import on_the_device

pytestmark = pytest.mark.emulated

SPEC, PAGES = presets.mha(2, 1, 16, torch.uint8, page_size=2), 16
WIDE = presets.mha(2, 2, 16, torch.uint8, page_size=2)
HOST, DEVICE = slots_of([9, 3, 4, 1, 12], 2), slots_of([1, 2, 3, 5, 8], 2)  # three chunks of a staging buffer
CALLS = ("record", "wait", "copy", "launch", "upload", "download", "empty")

every_backend = pytest.mark.parametrize("backend", ["direct", "kernel", "staged", "auto"])
every_direction = pytest.mark.parametrize("direction", DIRECTIONS)
either_list = pytest.mark.parametrize("lists", ["on the host", "on the device"])


# ---- whichever call of the device's port fails


class OutOfOrder(RuntimeError):
    """What the port is made to raise."""


@pytest.fixture
def moving(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Pieces of work on a pool's memory that were submitted and have not run: how many, as its one element."""
    port, left, within = emulated(), [0], [False]
    submit, copy, launch = port.submit, port.copy, port.launch

    def counted(what: Callable[[], object], *rest: Any) -> object:
        if not within[0]:
            return submit(what, *rest)
        left[0] += 1

        def run() -> None:
            left[0] -= 1
            what()

        return submit(run, *rest)

    def moves(call: Callable[..., Any], kernel: str = "copy_runs") -> Callable[..., Any]:
        def noted(*arguments: Any, **more: Any) -> Any:
            within[0] = call is copy or arguments[1].startswith(kernel)
            try:
                return call(*arguments, **more)
            finally:
                within[0] = False

        return noted

    monkeypatch.setattr(port, "submit", counted)
    monkeypatch.setattr(port, "copy", moves(copy))
    monkeypatch.setattr(port, "launch", moves(launch))
    return left


@contextmanager
def failing(call: str, at: int, times: int = 1) -> Iterator[None]:
    """A call of the port raises, the one of that number from now on, and those right after it."""
    port, calls = emulated(), count(1)
    real = getattr(port, call)

    def fail(*arguments: Any, **more: Any) -> Any:
        if at <= next(calls) < at + times:
            raise OutOfOrder(call)
        return real(*arguments, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(port, call, fail)
        yield


def failures(
    backend: str, direction: str, lists: str, call: str, times: int = 1
) -> Iterator[tuple[HostPool, DevicePool]]:
    """Pools behind a transfer in which the first, the second ... such call failed, as long as there is one to fail."""
    for at in count(1):
        host = HostPool(SPEC, "page_first", PAGES, backend, platform="emulated", staging_pages=4)
        device = DevicePool(SPEC, PAGES, "emulated")
        fill.fill_device(device, 0)
        there = DEVICE if lists == "on the host" else on_the_device(DEVICE)
        transfer = host.prepare(device, HOST, there, direction)
        try:
            with failing(call, at, times):
                transfer.run()
        except OutOfOrder:
            yield host, device
        else:
            emulated().synchronize()
            return


@every_backend
@every_direction
@either_list
@pytest.mark.parametrize("another", [False, True], ids=["at once", "after another transfer"])
def test_a_pool_that_closes_waits_for_what_a_failed_transfer_has_submitted(
    backend: str, direction: str, lists: str, another: bool, moving: list[int]
) -> None:
    tried = []
    for call in CALLS:
        for host, device in failures(backend, direction, lists, call):
            tried.append(call)
            if another:  # on another stream, whose event says nothing of the first one
                with emulated().on("another"):
                    host.prepare(device, slots_of([15], 2), slots_of([15], 2), direction).run().wait()
            host.close()
            assert moving == [0], f"memory was let go of under copies: `{call}` had failed"
            emulated().synchronize()
    assert {"record", "copy" if backend == "direct" else "launch"} <= {*tried}


@every_backend
@every_direction
@either_list
def test_a_pool_goes_on_after_a_failed_transfer(backend: str, direction: str, lists: str) -> None:
    for call in CALLS:
        for host, device in failures(backend, direction, lists, call):
            emulated().submit(lambda device=device: fill.fill_device(device, 1))
            host.backup(device, slots_of([6, 7, 0], 2), slots_of([2, 0, 1], 2)).wait()
            for component in SPEC.components:
                for layer in SPEC.layers_of(component):
                    right = fill.layer_bytes(SPEC, PAGES, component.name, layer, 1)[[2, 0, 1]]
                    saved = fill.host_image(host, component.name, layer)[[6, 7, 0]]
                    assert (saved == right).all(), f"`{call}` had failed"
            host.close()
            emulated().synchronize()


@every_direction
@pytest.mark.parametrize("times", [2, 3])
def test_a_staging_buffer_that_cannot_be_put_in_order_is_waited_for(direction: str, times: int) -> None:
    """The stream cannot be told to wait, time and again; the next transfer, on another stream, has the right bytes."""
    for seed in range(8):
        emulated().reseed(seed)
        for host, device in failures("staged", direction, "on the host", "wait", times):
            with emulated().on("another"):
                emulated().submit(lambda device=device: fill.fill_device(device, 1))
                host.backup(device, slots_of([6, 7, 0, 2, 15], 2), slots_of([0, 1, 11, 13, 14], 2)).wait()
                right = fill.layer_bytes(SPEC, PAGES, "k", 1, 1)[[0, 1, 11, 13, 14]]
                assert (fill.host_image(host, "k", 1)[[6, 7, 0, 2, 15]] == right).all()
            emulated().synchronize()
            host.close()


# ---- whoever is interrupted

OURS = (
    *("host_pool.py", "host_buffers.py", "rank_pool.py", "transfer.py", "runtime.py", "pinned.py", "allocator.py"),
    *("copy_engine.py", "sm_copy.py", "staged.py", "lists.py", "launches.py", "teardown.py"),
)
THEIRS = ("threading.py", "contextlib.py", "weakref.py")


def interrupted(call: Callable[[], object], at: int, act: Callable[[], object]) -> bool:
    """Call, and act where CPython looks for signals, the time of that number; whether there is such a place.

    That is where a function begins or a generator goes on, behind a call of C, and where a loop begins anew. In modules
    that submit and close, and in those of the library that they use. A device's own calls are not interrupted, nor
    what the garbage collector calls.
    """
    seen = 0

    def place(frame: FrameType) -> None:
        nonlocal seen
        if Path(frame.f_code.co_filename).name in (*OURS, *THEIRS):
            seen += 1
            if seen == at:
                sys.setprofile(None)
                sys.settrace(None)
                act()

    def calls(frame: FrameType, event: str, arg: object) -> None:
        if event in ("call", "c_return"):
            place(frame)

    def loops(frame: FrameType, event: str, arg: object) -> Any:
        frame.f_trace_opcodes = True
        if event == "opcode" and dis.opname[frame.f_code.co_code[frame.f_lasti]].startswith("JUMP_BACKWARD"):
            place(frame)
        return loops

    sys._getframe().f_trace_opcodes = True  # Python 3.12 traces opcodes only if some frame wants it beforehand
    gc.disable()
    sys.settrace(loops)
    sys.setprofile(calls)
    try:
        call()
    finally:
        sys.setprofile(None)
        sys.settrace(None)
        gc.enable()
    return seen >= at


def interrupt() -> None:
    raise KeyboardInterrupt


class Driver:
    """Notes what is registered, and refuses to undo it while work is under way or when it is not registered."""

    def __init__(self, moving: list[int]) -> None:
        self.moving, self.registered, self.refused = moving, set[int](), list[str]()

    def register(self, address: int, nbytes: int) -> None:
        self.registered.add(address)

    def unregister(self, address: int) -> None:
        if self.moving != [0]:
            self.refused.append(f"{self.moving[0]} pieces of work are under way in memory that is unregistered")
        if address not in self.registered:
            raise RuntimeError(f"{address:#x} is not registered")
        self.registered.remove(address)

    def device_address(self, address: int, device: str) -> int:
        return address


swallowed = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@swallowed
@pytest.mark.parametrize("rank", [False, True], ids=["a pool", "with a rank of it"])
@pytest.mark.parametrize("backend", ["direct", "kernel", "staged"])
def test_a_closing_may_be_interrupted_anywhere(backend: str, rank: bool, moving: list[int]) -> None:
    """Nothing is let go of before the work in it is done, and the pool can be closed again, which does the rest."""
    at = 0
    for at in count(1):
        driver, budget, staging = Driver(moving), Budget(1 << 20), Budget(1 << 20)
        memory = HostMemory(driver)
        booked: dict[str, Any] = {"budget": budget, "staging_pages": 4, "device_budget": staging, "memory": memory}
        host = HostPool(WIDE, "page_head", PAGES, backend, platform="emulated", registration_limit=256, **booked)
        movers = [host, RankPool(host, 0, 2, staging_pages=4, device_budget=staging)] if rank else [host]
        device = [DevicePool(pool.spec, PAGES, "emulated") for pool in movers]
        fill.fill_device(device[0], 0)
        for pool, of in zip(movers, device, strict=True):
            pool.backup(of, HOST, DEVICE)
        met = True
        with suppress(KeyboardInterrupt):
            met = interrupted(host.close, at, interrupt)
        host.close()
        for pool in reversed(movers):
            closing = threading.Thread(target=pool.close, daemon=True)
            closing.start()
            closing.join(20)
            assert not closing.is_alive(), "the pool cannot be closed any more"
        assert (moving, driver.registered, driver.refused) == ([0], set(), [])
        assert (budget.available, staging.available) == (1 << 20, 1 << 20)
        if not met:
            break
    assert at > 40


@swallowed
@pytest.mark.parametrize("limit", [None, 256], ids=["one registration", "several"])
def test_an_interrupt_while_memory_is_registered_leaves_none_registered(limit: int | None, moving: list[int]) -> None:
    """Registering takes most of a second a GiB: that is when somebody loses patience."""
    at, met = 0, True
    while met:
        at += 1
        driver, blocks = Driver(moving), list[Block]()
        allocate = partial(HostMemory(driver).allocate, 1024, 256, limit)
        with suppress(KeyboardInterrupt):  # and nothing else, whatever it took to undo
            met = interrupted(lambda blocks=blocks, allocate=allocate: blocks.append(allocate()), at, interrupt)
        for block in blocks:
            block.close()
        assert not driver.registered
    assert at > 5


def test_an_interrupt_within_the_drivers_call_leaves_nothing_registered(moving: list[int]) -> None:
    class Impatient(Driver):
        def register(self, address: int, nbytes: int) -> None:
            super().register(address, nbytes)
            if len(self.registered) == 3:
                raise KeyboardInterrupt

    driver = Impatient(moving)
    with pytest.raises(KeyboardInterrupt):
        HostPool(SPEC, "page_first", PAGES, memory=HostMemory(driver), registration_limit=256)
    assert not driver.registered


@swallowed
@pytest.mark.parametrize("done", [False, True], ids=["before it is done", "when it is done"])
def test_an_interrupt_while_a_forgotten_pool_is_unregistered_leaves_nothing_registered(
    done: bool, moving: list[int]
) -> None:
    """Nobody can close it again."""
    for at in range(1, 9):

        class Impatient(Driver):
            calls = 0

            def unregister(self, address: int, at: int = at) -> None:
                self.calls += 1
                if self.calls == at and not done:
                    raise KeyboardInterrupt
                super().unregister(address)
                if self.calls == at:
                    raise KeyboardInterrupt

        driver = Impatient(moving)
        held = [HostPool(SPEC, "page_first", PAGES, memory=HostMemory(driver), registration_limit=256)]
        assert len(driver.registered) == 8
        held.clear()
        assert (driver.registered, driver.calls > at) == (set(), True)


@pytest.mark.parametrize("backend", ["direct", "staged"])
def test_a_signal_handler_closes_a_pool_wherever_its_closing_is(backend: str, moving: list[int]) -> None:
    at, met = 0, True
    while met:
        at += 1
        driver = Driver(moving)
        memory = HostMemory(driver)
        host = HostPool(SPEC, "page_first", PAGES, backend, platform="emulated", staging_pages=4, memory=memory)
        host.backup(DevicePool(SPEC, PAGES, "emulated"), HOST, DEVICE)
        met = interrupted(host.close, at, host.close)
        assert (moving, driver.registered, driver.refused) == ([0], set(), [])
    assert at > 20


def test_thousands_of_failures_keep_nothing_from_being_given_back() -> None:
    done: list[int] = []

    def fail(number: int) -> None:
        done.append(number)
        raise OutOfOrder(str(number))

    with pytest.raises(OutOfOrder, match="2999") as raised:
        call_all(partial(fail, number) for number in range(3000))
    assert done == list(range(3000))
    assert str(raised.value.__context__) == "2998"


def test_a_failure_is_told_with_all_that_it_came_of_and_all_before_it() -> None:
    same = OutOfOrder("a wait")

    def first() -> None:
        raise same

    def second() -> None:
        try:
            raise OutOfOrder("a copy")
        except OutOfOrder:
            raise OutOfOrder("a buffer") from None

    def told(*calls: Callable[[], object]) -> list[str]:
        found = list[str]()
        with pytest.raises(OutOfOrder) as raised:
            call_all(calls)
        error: BaseException | None = raised.value
        while error and len(found) < 99:
            found.append(str(error))
            error = error.__context__
        return found

    try:
        raise OutOfOrder("why")
    except OutOfOrder:
        assert told(first, second)[:4] == ["a buffer", "a copy", "a wait", "why"]
        assert told(first, second, first)[:2] == ["a wait", "why"]


@swallowed
@pytest.mark.parametrize("what", ["a wait", "the driver"])
def test_a_closing_that_failed_keeps_nothing(what: str, moving: list[int]) -> None:
    """A pool is large: it does not wait for Python's search for cycles."""

    class Refusing(Driver):
        def unregister(self, address: int) -> None:
            super().unregister(address)
            raise OutOfOrder("the driver")

    def fail() -> None:
        raise OutOfOrder("a wait")

    memory = HostMemory((Driver if what == "a wait" else Refusing)(moving))
    host = HostPool(SPEC, "page_first", PAGES, "staged", platform="emulated", memory=memory)
    if what == "a wait":
        getattr(host._mover, "_pending").wait = fail  # noqa: B009
    alive = weakref.ref(host)
    gc.disable()
    try:
        with suppress(OutOfOrder):
            host.close()
        getattr(host._mover, "_pending").__dict__.pop("wait", None)  # noqa: B009
        del host
        assert alive() is None
    finally:
        gc.enable()


def test_work_that_goes_on_is_not_over_because_somebody_waited() -> None:
    queue, ran, pending = QueueRuntime(lambda *_: None), list[int](), Pending()
    (mark,) = pending.begin(queue, None, "a stream")
    pending.wait()
    queue.submit(lambda: ran.append(1), "a stream")
    mark.ended = True
    assert not mark.query()
    pending.wait()
    assert ran == [1]


def test_work_that_ends_while_somebody_waits_for_what_was_there_is_not_over() -> None:
    queue, ran, pending = QueueRuntime(lambda *_: None), list[int](), Pending()
    (mark,) = pending.begin(queue, None, "a stream")
    wait = mark.synchronize

    def meanwhile() -> None:
        wait()
        queue.submit(lambda: ran.append(1), "a stream")
        mark.ended = True

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mark, "synchronize", meanwhile)
        pending.wait()
    pending.wait()
    assert ran == [1]


def test_a_rank_that_is_shared_out_again_waits_for_its_ranks() -> None:
    spec = presets.mha(2, 4, 16, torch.uint8, page_size=2)
    whole = HostPool(spec, "page_head", PAGES, "kernel", platform="emulated")
    half = RankPool(whole, 0, 2)
    quarter, submits, goes_on = RankPool(half, 0, 2), threading.Event(), threading.Event()
    transfer = quarter.prepare(DevicePool(quarter.spec, PAGES, "emulated"), HOST, DEVICE, "backup")
    execute = transfer.backend.execute

    def slow(*arguments: Any) -> Any:
        submits.set()
        goes_on.wait(20)
        return execute(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transfer.backend, "execute", slow)
        threads = [threading.Thread(target=transfer.run, daemon=True)]
        threads[0].start()
        assert submits.wait(20)
        threads.append(threading.Thread(target=half.close, daemon=True))
        threads[1].start()
        threads[1].join(0.1)
        assert threads[1].is_alive(), "closed, while a rank of it submits"
        goes_on.set()
        for thread in threads:
            thread.join(20)
    assert not any(thread.is_alive() for thread in threads)
    whole.close()


def test_whoever_closes_second_returns_when_the_pool_is_closed(moving: list[int]) -> None:
    leave = threading.Event()

    class Slow(Driver):
        def unregister(self, address: int) -> None:
            leave.wait(20)
            super().unregister(address)

    driver = Slow(moving)
    host = HostPool(SPEC, "page_first", PAGES, "kernel", platform="emulated", memory=HostMemory(driver))
    threads = [threading.Thread(target=host.close, daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
        thread.join(0.1)
    assert [thread.is_alive() for thread in threads] == [True, True], "closed, while memory is registered"
    leave.set()
    for thread in threads:
        thread.join(20)
    assert not driver.registered


def test_a_signal_handler_that_uses_the_staging_buffer_of_its_transfer_is_told_so() -> None:
    """Both would fill one buffer."""
    host = HostPool(SPEC, "page_first", PAGES, "staged", platform="emulated", staging_pages=4)
    device = DevicePool(SPEC, PAGES, "emulated")
    told: list[str] = []

    def again() -> None:
        try:
            host.backup(device, HOST, DEVICE)
        except RuntimeError as error:
            told.append(str(error))

    for at in count(1, step=7):
        if not interrupted(host.prepare(device, HOST, DEVICE, "backup").run, at, again):
            break
        host.backup(device, HOST, DEVICE).wait()
    assert len(told) > 10
    assert {text.partition(" while ")[0] for text in told} == {"a signal handler cannot use a pool of backend 'staged'"}
    host.close()


@swallowed
@pytest.mark.parametrize("backend", ["direct", "kernel", "staged"])
def test_a_transfer_may_be_interrupted_anywhere(backend: str, moving: list[int]) -> None:
    """It ends in the interrupt, and the pool goes on, forgets what has passed, and can be closed by another thread."""
    at = 0
    for at in count(1):
        host = HostPool(SPEC, "page_first", PAGES, backend, platform="emulated", staging_pages=8)
        device = DevicePool(SPEC, PAGES, "emulated")
        transfer = host.prepare(device, HOST, DEVICE, "backup")
        try:
            if not interrupted(transfer.run, at, interrupt):
                break
        except KeyboardInterrupt:  # or else Python has swallowed it, where a generator is thrown away
            pass
        for _ in range(3):
            host.backup(device, HOST, DEVICE).wait()
        pending = getattr(host._mover, "_pending")  # noqa: B009 - of every backend that submits
        assert len(pending._work) < 6, "work that has passed is not forgotten"
        closing = threading.Thread(target=host.close, daemon=True)
        closing.start()
        closing.join(20)
        assert not closing.is_alive(), "the pool cannot be closed any more"
        assert moving == [0]
        emulated().synchronize()
    assert at > 5


@pytest.mark.parametrize("backend", ["direct", "staged"])
@pytest.mark.parametrize("rank", [False, True], ids=["a pool", "a rank of it"])
def test_a_signal_handler_may_close_what_is_being_closed(backend: str, rank: bool, moving: list[int]) -> None:
    """The whole pool, while a rank of it is closed, too."""
    at = 0
    for at in count(1):
        host = HostPool(WIDE, "page_head", PAGES, backend, platform="emulated", staging_pages=4)
        pool = RankPool(host, 0, 2, staging_pages=4) if rank else host
        pool.backup(DevicePool(pool.spec, PAGES, "emulated"), HOST, DEVICE)
        met = interrupted(pool.close, at, host.close)
        pool.close()
        assert moving == [0]
        host.close()
        if not met:
            break
    assert at > 20


# ---- whoever closes


@pytest.mark.parametrize("backend", ["torch", "kernel"])
def test_a_signal_handler_that_closes_a_pool_within_its_transfer_is_told_so(backend: str) -> None:
    """It would wait for the call that it interrupts."""
    host = HostPool(SPEC, "page_first", PAGES, backend, platform=None if backend == "torch" else "emulated")
    device = DevicePool(SPEC, PAGES, "cpu" if backend == "torch" else "emulated")
    transfer = host.prepare(device, HOST, DEVICE, "backup")
    execute = transfer.backend.execute

    def interrupted(*arguments: Any) -> Any:
        signal.raise_signal(signal.SIGUSR1)
        return execute(*arguments)

    before = signal.signal(signal.SIGUSR1, lambda *_: host.close())
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(transfer.backend, "execute", interrupted)
            with pytest.raises(RuntimeError, match="closed inside a transfer that this thread submits"):
                transfer.run()
    finally:
        signal.signal(signal.SIGUSR1, before)
    transfer.run().wait()
    host.close()
    with pytest.raises(ValueError, match="is closed"):
        transfer.run()


def test_layers_may_be_made_by_a_generator_that_closes_the_pool() -> None:
    host, device = HostPool(SPEC, "page_first", PAGES), DevicePool(SPEC, PAGES)
    transfer = host.prepare(device, HOST, DEVICE, "load")

    def layers() -> Iterator[int]:
        yield 0
        host.close()

    with pytest.raises(ValueError, match="is closed"):
        transfer.run(layers())


def test_whoever_closes_a_rank_waits_and_so_does_the_whole_pool() -> None:
    """Several threads close it: none may return while another one waits."""
    whole = HostPool(WIDE, "page_head", PAGES, "kernel", platform="emulated")
    rank, device = RankPool(whole, 0, 2), DevicePool(part(WIDE, 2), PAGES, "emulated")
    gate = threading.Event()
    emulated().submit(lambda: gate.wait(20))
    rank.backup(device, HOST, DEVICE)
    closing = [threading.Thread(target=close, daemon=True) for close in (*[rank.close] * 3, whole.close)]
    for thread in closing:
        thread.start()
        thread.join(0.1)
    assert [thread.is_alive() for thread in closing] == [True] * 4, "who closes returned while copies were under way"
    gate.set()
    for thread in closing:
        thread.join(20)
    assert not any(thread.is_alive() for thread in closing)


@pytest.mark.parametrize("backend", ["kernel", "staged"])
def test_a_rank_that_is_forgotten_leaves_nothing_in_the_memory_it_shared(backend: str) -> None:
    whole = HostPool(WIDE, "page_head", PAGES, backend, platform="emulated")
    before = [len(block._first) for block in whole._memory()]
    rank, device = RankPool(whole, 0, 2), DevicePool(part(WIDE, 2), PAGES, "emulated")
    rank.backup(device, HOST, DEVICE).wait()
    gone = [weakref.ref(thing) for thing in (rank, rank._mover, device.buffer("k", 0))]
    del rank, device
    gc.collect()
    assert [ref() for ref in gone] == [None] * 3
    assert [len(block._first) for block in whole._memory()] == before
    whole.close()


# ---- lists that the caller changes


ROW = Component("latent", torch.uint8, dim=16)
EMPTY = Component("nothing", torch.uint8, dim=0)

# Of one layer and pages of one token, whose slots are their pages.
LATENTS = {
    "a layer": PoolSpec("kv", 1, 1, (ROW,)),
    "a side state": PoolSpec("kv", 0, 1, (replace(ROW, side=True),)),
    "a side state, layers without bytes": PoolSpec("kv", 1, 1, (EMPTY, replace(ROW, side=True))),
}


def latent(backend: str, spec: PoolSpec = LATENTS["a layer"]) -> tuple[HostPool, DevicePool]:
    device = DevicePool(spec, PAGES, "emulated")
    fill.fill_device(device, 0)
    return HostPool(spec, "page_first", PAGES, backend, platform="emulated"), device


@pytest.mark.parametrize("spec", LATENTS.values(), ids=LATENTS)
@pytest.mark.parametrize("backend", ["kernel", "staged", "auto"])
@every_direction
def test_a_list_on_the_device_is_read_when_the_transfer_is_prepared(
    backend: str, direction: str, spec: PoolSpec
) -> None:
    """What the caller writes into it next, in order of the stream, is of no matter."""
    for seed in range(5):
        emulated().reseed(seed)
        host, device = latent(backend, spec)
        fill.fill_host(host, 1)
        indices = on_the_device(torch.tensor([1, 2]))
        transfer = host.prepare(device, torch.tensor([10, 11]), indices, direction)
        emulated().submit(lambda indices=indices: indices.copy_(torch.tensor([5, 6])))
        transfer.run().wait()
        layer = None if host.spec.component("latent").side else 0
        saved, loaded = fill.host_image(host, "latent", layer), fill.device_image(device, "latent", layer)
        assert (saved[[10, 11]] == loaded[[1, 2]]).all()
        assert (saved[[10, 11]] != loaded[[5, 6]]).any()


@pytest.mark.parametrize("backend", ["kernel", "staged", "auto"])
def test_a_list_on_the_device_may_have_gaps(backend: str) -> None:
    """Every other number of a tensor, which is written just before the transfer."""
    for seed in range(5):
        emulated().reseed(seed)
        host, device = latent(backend)
        whole = on_the_device(torch.tensor([1, -7, 2, -7]))
        host.backup(device, torch.tensor([10, 11]), whole[::2]).wait()
        assert (fill.host_image(host, "latent", 0)[[10, 11]] == fill.device_image(device, "latent", 0)[[1, 2]]).all()


def test_nobody_waits_for_an_empty_list_on_the_device() -> None:
    host, device = (
        HostPool(SPEC, "page_first", PAGES, "kernel", platform="emulated"),
        DevicePool(SPEC, PAGES, "emulated"),
    )
    ran: list[bool] = []
    emulated().submit(lambda: ran.append(True))
    receipt = host.backup(device, HOST[:0], on_the_device(DEVICE)[:0])
    assert (receipt.host_syncs, receipt.bytes, ran) == (0, 0, [])
    emulated().synchronize()


# ---- memory of two pools


@pytest.mark.parametrize("backend", ["torch", "numba"])
def test_a_device_pool_in_the_memory_of_its_host_pool_is_refused(backend: str) -> None:
    """Pages would be read that the same transfer has just written, by some backends."""
    spec = presets.mla(2, 64, torch.float32, page_size=2)
    host = HostPool(spec, "layer_first", PAGES, backend)
    rows = [host.layer_view("latent", layer).reshape(2 * PAGES, 1, 64) for layer in range(2)]
    same = DevicePool.wrap(spec, {"latent": rows})
    assert same.addresses()[0] == host.layer_view("latent", 0).data_ptr()
    with pytest.raises(ValueError, match="the device pool lies in memory of this host pool"):
        host.backup(same, HOST, DEVICE)
