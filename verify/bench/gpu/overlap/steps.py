"""A step of a model whose prefix lies in host memory, timed by the host's clock and the device's.

The loads go through a real controller, which the model waits for layer by layer; nothing is held or replayed, so the
host's time is part of every step as it is in use. Host pages are scattered. Device pages are neighbours, so that
attention can read them where they lie.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import numpy as np
import torch

from refimpl import DevicePool, PoolSpec, PoolTransfer, build_stack, oracle, slots_of
from refimpl.assembler import Stack
from refimpl.controller import Controller
from refimpl.emulated import QueueRuntime
from refimpl.host_buffers import HostBuffers
from refimpl.layer_done import LayerDone
from refimpl.receipt import Receipt
from refimpl.runtime import Event, Runtime, Stream
from verify.arena import Arena
from verify.bench.gpu.clock import Clock
from verify.bench.gpu.overlap.layers import Layer, Rows
from verify.bench.gpu.overlap.record import Sample
from verify.bench.gpu.rig import OnDevice
from verify.bench.measure import POISON, copy, host_tensors, wipe


class Arrivals(LayerDone):
    """It also notes when the layers of the last load arrived, on the device's clock."""

    def __init__(self, runtime: Runtime, layers: int) -> None:
        super().__init__(runtime, layers)
        self.marks: list[Event] = []

    def produce(self) -> int:
        self.marks = []
        return super().produce()

    def record(self, producer: int, stream: Stream) -> None:
        self.marks.append(self._runtime.record(stream, timed=True))
        super().record(producer, stream)


class Steps:
    """A model whose prefixes lie in host memory.

    layer        computes
    work         what it computes on
    device_slots of the prefix, neighbours; new tokens follow them
    stream       of the model, dealt right after the controller's, and so none of them
    """

    def __init__(self, layer: Layer, stack: Stack, host_slots: torch.Tensor, device_slots: torch.Tensor) -> None:
        self.layer, self.stack = layer, stack
        self.pool, self.work = stack.host.pools["kv"], stack.device["kv"]
        self.slots, self.first, self.end = (host_slots, device_slots), int(device_slots[0]), int(device_slots[-1]) + 1
        self.controller = Controller(stack)
        self.runtime = self.controller.runtime
        self.controller.layers = self.arrivals = Arrivals(self.runtime, self.work.spec.layers)
        self.stream = self.runtime.stream()
        self.receipts: list[Receipt] = []  # of the last load

    def wipe(self) -> None:
        """The prefix is no longer on the device."""
        for rows in prefix_rows(self.work, self.first, self.end):
            rows.view(torch.uint8).fill_(POISON)

    def run(self, x: torch.Tensor | None, how: str = "resident", prefix: bool = True) -> tuple[Sample, torch.Tensor]:
        """One step of `x` after the prefix, or after none; None computes nothing."""
        first = self.end if prefix else self.first
        rows = Rows(self.first, first, first + (0 if x is None else len(x)))
        began = time.perf_counter()
        begin = self._mark()
        arrived = self._load(how)
        submitted = time.perf_counter() - began
        begun, finished, state = [], [], [x]
        for layer in range(self.work.spec.layers):
            if how == "by layer":
                self.controller.wait_until(layer)
            begun.append(self._mark())
            if x is not None:
                self._submit(partial(self._compute, state, layer, rows))
            finished.append(self._mark())
        finished[-1].synchronize()
        total = time.perf_counter() - began
        self._settle(arrived)
        times = ([self.runtime.seconds(begin, mark) for mark in marks] for marks in (arrived, begun, finished))
        result = state[0]
        return Sample(total, submitted, *times), torch.empty(0) if result is None else result

    def _compute(self, state: list[torch.Tensor | None], layer: int, rows: Rows) -> None:
        x = state[0]
        assert x is not None
        state[0] = self.layer(x, self.work, layer, rows)

    def _load(self, how: str) -> list[Event]:
        """Submit the load; marks of what arrives: of each layer, or of all at once."""
        self.receipts = []
        self.controller.set_consumer(None)
        if how == "by layer":
            assert self.controller.load("prefix", [PoolTransfer("kv", *self.slots)])
            self.controller.set_consumer(self.controller.start_loading())
            return self.arrivals.marks
        if how == "at once":
            transfer = self.pool.prepare(self.work, *self.slots, "load")
            self.runtime.issue(self.runtime.current(), lambda: self.receipts.append(transfer.run()))
            return [self._mark()]
        return []

    def _settle(self, arrived: Sequence[Event]) -> None:
        """Everything that was under way has ended, and well."""
        for event in arrived:
            event.synchronize()
        for ack in self.controller.acknowledge(wait=True):
            if ack.error:
                raise ack.error
            self.receipts = ack.receipts["kv"]
        for receipt in self.receipts:
            receipt.wait()

    def _mark(self) -> Event:
        return self.runtime.record(self.runtime.current(), timed=True)

    def _submit(self, work: Callable[[], None]) -> None:
        if isinstance(self.runtime, QueueRuntime):
            self.runtime.submit(work)
        else:
            work()


def prefix_rows(pool: DevicePool, first: int, end: int) -> list[torch.Tensor]:
    spec = pool.spec
    return [pool.buffer(c.name, layer)[first:end] for c in spec.components for layer in spec.layers_of(c)]


class Prefix:
    """A prefix of random rows on the device, and the same in host memory of any layout, as the oracle has it.

    pages  of the device pools: padding, the prefix, room for new tokens
    """

    def __init__(self, clock: Clock, arena: Arena, spec: PoolSpec, tokens: int, pages: int, seed: int) -> None:
        self.clock, self.arena, self.spec, self.tokens = clock, arena, spec, tokens
        device = clock.device
        self.source, self.work = (DevicePool(spec, pages, device) for _ in range(2))
        generator = torch.Generator(device).manual_seed(seed)
        for rows in prefix_rows(self.source, 0, self.source.size):
            rows.normal_(generator=generator)
        chosen = np.random.default_rng(seed).permutation(pages)[: tokens // spec.page_size]
        self.host_slots = slots_of(chosen, spec.page_size)
        self.first, self.end = spec.page_size, spec.page_size + tokens  # page 0 is padding

    @contextmanager
    def steps(self, layer: Layer, layout: str, backend: str) -> Iterator[Steps]:
        """With the prefix in host memory, and not on the device."""
        self.arena.reset()
        stack = build_stack(
            {"kv": self.spec},
            layout,
            backend,
            device={"kv": self.work},
            host_ratio=1.0,
            platform=self.clock.platform,
            memory=self.arena,
        )
        with stack:
            device_slots = stack.device_slots["kv"].alloc(self.tokens)
            every = stack.host.pools["kv"].alloc(stack.host.pools["kv"].size)
            assert device_slots is not None
            assert every is not None
            assert (int(device_slots[0]), int(device_slots[-1])) == (self.first, self.end - 1)
            stored = HostBuffers(self.spec, layout, self.source.num_pages, OnDevice(self.clock.device), None)
            wipe(host_tensors(stored))
            oracle.backup(stored, self.source, self.host_slots, device_slots)
            copy(host_tensors(stack.host.pools["kv"]), host_tensors(stored))
            del stored
            steps = Steps(layer, stack, self.host_slots, device_slots)
            self.clock.finish()
            try:
                with steps.runtime.on(steps.stream):
                    yield steps
            finally:
                self.clock.finish()
                steps.controller.close()

    def make_resident(self) -> None:
        for to, rows in zip(self._rows(self.work), self._rows(self.source), strict=True):
            to.copy_(rows)
        self.clock.finish()

    def fault(self) -> str:
        """Where the prefix on the device is not what it should be; empty if nowhere."""
        for number, (there, right) in enumerate(zip(self._rows(self.work), self._rows(self.source), strict=True)):
            differ = (there.view(torch.uint8) != right.view(torch.uint8)).flatten(1).any(1)
            if differ.any():
                return f"token {int(differ.nonzero()[0])} of device buffer {number} is not what the oracle stored"
        return ""

    def _rows(self, pool: DevicePool) -> list[torch.Tensor]:
        return prefix_rows(pool, self.first, self.end)
