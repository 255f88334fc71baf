"""A hundred thousand small operations leave nothing behind: no slot, no lock, no object, no memory."""

from __future__ import annotations

import gc
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import psutil
import pytest
import torch

from kernels_cupy.runtimes import runtime
from refimpl import presets
from refimpl.assembler import Stack, build_stack
from refimpl.controller import Controller
from refimpl.emulated import QueuedEvent
from refimpl.hooks import Hooks
from refimpl.layer_done import SETS
from refimpl.operations import Batch, Operation
from refimpl.pool_group import PoolTransfer

pytestmark = pytest.mark.ordering

MIB = 2**20
PAGES = 12
AT_ONCE = 8  # operations that are submitted together, at most
STEPS = ("submit", "copy", "acknowledge")
Record = Callable[[str, object], None]

COUNTED = (torch.Tensor, torch.cuda.Event, QueuedEvent, Batch, Operation)


@dataclass(frozen=True)
class Held:
    """What the process and the stack hold while nothing is under way."""

    objects: Counter[str]
    host_bytes: int
    device_bytes: int
    pinned_bytes: int


def held() -> Held:
    gc.collect()
    found = Counter(kind.__name__ for o in gc.get_objects() for kind in COUNTED if type(o) is kind)
    gpu = torch.cuda.is_available()
    return Held(
        found,
        psutil.Process().memory_info().rss,
        torch.cuda.memory_allocated() if gpu else 0,
        torch.cuda.host_memory_stats().get("allocated_bytes.current", 0) if gpu else 0,
    )


class Traffic:
    """Pages go to the host and come back, a few at once, and now and then a step fails."""

    def __init__(self, stack: Stack, seed: int = 0) -> None:
        self.stack, self.hooks, self.random = stack, Hooks(), random.Random(seed)
        self.controller = Controller(stack, self.hooks)
        self.device, self.host = stack.device_slots["kv"], stack.host.pools["kv"]
        self.operations = self.failed = 0
        self.failing = 0.02

    def run(self, operations: int) -> None:
        end = self.operations + operations
        while self.operations < end:
            self.there_and_back(self.random.randint(1, AT_ONCE))

    def rest(self) -> None:
        """The latest events are kept until the next operation finds that they have passed: one more, when they have."""
        failing, self.failing = self.failing, 0.0
        for _ in range(SETS):
            self.there_and_back(1)
        self.failing = failing
        if self.stack.platform.startswith("cuda"):
            torch.cuda.synchronize()
            runtime(self.stack.platform).upload(np.zeros(1))  # lists on their way to the device have their own events

    def there_and_back(self, count: int) -> None:
        wanted = [self.device.alloc(self.device.page_size) for _ in range(count)]
        saved = [self._kept(self.controller.write, device_indices=slots) for slots in wanted]
        self._submit("backup")
        for slots in wanted:
            assert slots is not None
            self.device.free(slots)
        on_host = [o.host_indices("kv") for o in saved if o.tag]
        loaded = [self._kept(self.controller.load, host_indices=slots) for slots in on_host]
        self._submit("load")
        for slots in on_host:
            assert slots is not None
            self.host.free(slots)
        for slots in (o.device_indices("kv") for o in loaded if o.tag):
            assert isinstance(slots, torch.Tensor)
            self.device.free(slots)
        self.operations += len(wanted) + len(on_host)

    def _kept(self, queue: Callable[..., Operation | None], **slots: torch.Tensor | None) -> Operation:
        """Queue an operation of both pools. Its tag, a list, holds something as long as it has not failed."""
        operation = queue(["well"], [PoolTransfer("kv", **slots), PoolTransfer("indexer")])
        assert operation is not None
        return operation

    def _submit(self, direction: str) -> None:
        if self.random.random() < self.failing:
            self.hooks.fail(f"{direction} {self.random.choice(STEPS)}", RuntimeError("told to fail"))
        self.controller.start_writing() if direction == "backup" else self.controller.start_loading()
        for ack in self.controller.acknowledge(wait=True):
            if ack.error:
                self.failed += 1
                assert isinstance(ack.tag, list)
                ack.tag.clear()


def leaves_nothing(stack: Stack, operations: int, record_property: Record) -> None:
    traffic = Traffic(stack)
    traffic.run(operations // 10)  # what is kept once and for all is there by now
    traffic.rest()
    before = held()
    traffic.run(operations)
    traffic.rest()
    after = held()
    grown = after.host_bytes - before.host_bytes
    figures = {
        "operations": traffic.operations,
        "failed": traffic.failed,
        "growth of resident memory, bytes": grown,
        "growth of device memory, bytes": after.device_bytes - before.device_bytes,
        "growth of pinned memory, bytes": after.pinned_bytes - before.pinned_bytes,
    }
    for name, figure in figures.items():
        record_property(f"{stack.host.pools['kv'].backend}: {name}", figure)
    print("; ".join(f"{name}: {figure:,}" for name, figure in figures.items()))

    assert traffic.failed > operations // 1000
    assert not any(traffic.controller._queued.values())
    assert not any(traffic.controller._in_flight.values())
    for allocator in (traffic.device, traffic.host.allocator):
        assert allocator.available_size() == (PAGES - allocator.reserved) * allocator.page_size
        assert not allocator.locks.any()
        assert not allocator._leaving.any()
    assert after.objects == before.objects
    assert after.device_bytes == before.device_bytes
    assert after.pinned_bytes == before.pinned_bytes
    assert grown < 4 * MIB


def stack(platform: str, backend: str) -> Stack:
    specs = {"kv": presets.mla(1, 8, torch.uint8, 2), "indexer": presets.dsa_indexer(1, 4, 4, 2)}
    return build_stack(specs, "page_first", backend, device_pages=PAGES, host_ratio=1, platform=platform)


def test_what_is_kept_is_noticed() -> None:
    before = held()
    kept = [torch.empty(1), Batch("load", [], {})]
    assert held().objects - before.objects == Counter(Tensor=1, Batch=1)
    assert kept


def test_a_failure_keeps_nothing() -> None:
    """An exception keeps the frames that it came through, and what they worked on."""
    with stack("cpu", "torch") as pools:
        traffic = Traffic(pools)
        for _ in range(SETS):  # each has a set of events from then on
            traffic.there_and_back(1)
        before = held()
        traffic.hooks.fail("load copy", RuntimeError("told to fail"))
        traffic.there_and_back(1)
        assert traffic.failed == 1
        assert held().objects == before.objects


@pytest.mark.parametrize("operations", [20_000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_small_operations_leave_nothing_behind(operations: int, record_property: Record) -> None:
    with stack("cpu", "torch") as pools:
        leaves_nothing(pools, operations, record_property)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["kernel", "direct", "staged", "auto"])
def test_small_operations_leave_nothing_behind_on_a_gpu(backend: str, record_property: Record) -> None:
    """A hundred thousand in all."""
    with stack("cuda", backend) as pools:
        leaves_nothing(pools, 25_000, record_property)
