"""Order, lifetimes and failures, without a GPU: on a device that does everything as late as it may, in any legal order.

B numbers are those of `test_reported_faults.py`.
"""

from __future__ import annotations

import ctypes
import gc
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from kernels_cupy.auto import explain
from kernels_cupy.copies import Copies
from kernels_cupy.runtimes import emulated
from refimpl import DevicePool, HostMemory, HostPool, PoolSpec, Receipt, oracle, presets, slots_of
from refimpl.allocator import Budget
from refimpl.cudart import Library
from refimpl.emulated import QueuedEvent, QueueRuntime
from refimpl.runtime import Completion
from verify import fill, reported
from verify.bench.provenance import ROOT

pytestmark = [pytest.mark.ordering, pytest.mark.emulated]

BYTE = torch.uint8
SPEC = presets.mha(3, 2, 8, BYTE, 4)
HOST, DEVICE = [5, 0, 3], [1, 4, 2]  # pages that move unless a test says otherwise
BACKENDS = ("direct", "kernel", "staged", "auto")

every_backend = pytest.mark.parametrize("backend", BACKENDS)
every_layout = pytest.mark.parametrize("layout", ["page_first", "page_first_direct"])
every_direction = pytest.mark.parametrize("direction", ["backup", "load"])


@pytest.fixture(params=range(5), ids="seed{}".format)
def queue(request: pytest.FixtureRequest) -> Iterator[QueueRuntime]:
    """The device, its choices seeded, and nothing left to do afterwards."""
    queue = emulated()
    queue.reseed(request.param)
    yield queue
    queue.synchronize()


def host_pool(layout: str, backend: str, pages: int = 6, spec: PoolSpec = SPEC, **options: Any) -> HostPool:
    host = HostPool(spec, layout, pages, backend, platform="emulated", **options)
    reported.poison(host)
    return host


class Ends:
    """A host and a device pool full of poison, and pages that are to move from one to the other."""

    def __init__(self, backend: str, layout: str, direction: str, **options: Any) -> None:
        self.host, self.device, self.direction = host_pool(layout, backend, **options), DevicePool(SPEC, 6), direction
        reported.poison(self.device)
        self.source, self.to = ("device", "host") if direction == "backup" else ("host", "device")
        self.content, self.other = (self._random(seed) for seed in (1, 2))

    def submit(self) -> Receipt:
        return self.host.prepare(self.device, slots_of(HOST, 4), slots_of(DEVICE, 4), self.direction).run()

    def write(self, side: str, content: list[torch.Tensor]) -> None:
        for view, rows in zip(self._views(side), content, strict=True):
            view[self._pages(side)] = rows

    def read(self, side: str) -> list[torch.Tensor]:
        return [view[self._pages(side)].clone() for view in self._views(side)]

    def rest(self, side: str) -> list[torch.Tensor]:
        """Pages that are not to move."""
        rest = sorted(set(range(6)) - set(self._pages(side)))
        return [view[rest] for view in self._views(side)]

    def _views(self, side: str) -> list[torch.Tensor]:
        view = self.host.layer_view if side == "host" else self.device.view
        return [view(c.name, layer) for c in SPEC.components for layer in range(3)]

    def _pages(self, side: str) -> list[int]:
        return HOST if side == "host" else DEVICE

    def _random(self, seed: int) -> list[torch.Tensor]:
        """Bytes below poison."""
        generator = torch.Generator().manual_seed(seed)
        return [
            torch.randint(0, 255, (3, 4, 1, 2, 8), dtype=BYTE, generator=generator)
            for _ in range(3 * len(SPEC.components))
        ]


def equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, a, b)) and len(a) == len(b)


def is_poison(tensors: list[torch.Tensor]) -> bool:
    return all(bool((tensor == fill.POISON).all()) for tensor in tensors)


def tensors_of(host: HostPool) -> list[torch.Tensor]:
    return [tensor for _, held in host.storage for tensor in held]


def device_tensors(device: DevicePool) -> list[torch.Tensor]:
    """Copies."""
    return [device.buffer(c.name, layer).clone() for c in device.spec.components for layer in range(3)]


def event_of(receipt: Receipt) -> QueuedEvent:
    assert isinstance(receipt.event, Completion)
    assert isinstance(receipt.event.event, QueuedEvent)
    return receipt.event.event


# ---- One transfer


@every_direction
@every_layout
@every_backend
def test_nothing_has_moved_when_the_call_returns(
    backend: str, layout: str, direction: str, queue: QueueRuntime
) -> None:
    ends = Ends(backend, layout, direction)
    ends.write(ends.source, ends.content)
    receipt = ends.submit()
    assert not event_of(receipt).query()
    assert is_poison(ends.read(ends.to))
    receipt.wait()
    assert event_of(receipt).query()
    assert equal(ends.read(ends.to), ends.content)
    assert is_poison(ends.rest(ends.to))
    assert equal(ends.read(ends.source), ends.content)


@pytest.mark.parametrize("stream", ["default", "user"])
@every_direction
@every_layout
@every_backend
def test_a_transfer_takes_its_turn_on_the_callers_stream(
    backend: str, layout: str, direction: str, stream: str, queue: QueueRuntime
) -> None:
    """The source is being written when the call is made, and overwritten behind it; a reader queues up in between."""
    ends, seen = Ends(backend, layout, direction), []
    with queue.on(stream):
        queue.submit(lambda: ends.write(ends.source, ends.content))
        ends.submit()
        queue.submit(lambda: seen.extend(ends.read(ends.to)))
        queue.submit(lambda: ends.write(ends.source, ends.other))
    queue.synchronize()
    assert equal(seen, ends.content)
    assert equal(ends.read(ends.to), ends.content)
    assert equal(ends.read(ends.source), ends.other)


@every_direction
@every_layout
@every_backend
def test_a_stream_that_waits_for_the_event_sees_the_bytes(
    backend: str, layout: str, direction: str, queue: QueueRuntime
) -> None:
    ends, seen = Ends(backend, layout, direction), []
    with queue.on("user"):
        queue.submit(lambda: ends.write(ends.source, ends.content))
        receipt = ends.submit()
    queue.wait("other", event_of(receipt))
    queue.submit(lambda: seen.extend(ends.read(ends.to)), "other")
    queue.run_until(queue.record("other"))
    assert equal(seen, ends.content)


def on_the_device(queue: QueueRuntime, indices: torch.Tensor) -> torch.Tensor:
    """An index list in device memory, which is poisoned in order of the caller's stream once the list is dropped."""
    return queue.empty(indices.numel() * indices.itemsize).view(indices.dtype).copy_(indices)


@every_direction
@pytest.mark.parametrize("lists_on", ["host", "device"])
@every_backend
def test_index_lists_may_be_dropped_as_soon_as_the_call_returns(
    backend: str, lists_on: str, direction: str, queue: QueueRuntime
) -> None:
    """They lie in memory of another stream, which does not wait for ours before it gives memory to somebody else."""
    ends = Ends(backend, "page_first", direction)
    ends.write(ends.source, ends.content)
    lists = [slots_of(HOST, 4), slots_of(DEVICE, 4)]
    if lists_on == "device":
        lists = [on_the_device(queue, indices) for indices in lists]
    with queue.on("user"):
        ends.host.prepare(ends.device, *lists, direction).run()
    if lists_on == "host":
        for indices in lists:
            indices.zero_()
    lists.clear()
    gc.collect()
    queue.synchronize()
    assert equal(ends.read(ends.to), ends.content)
    assert is_poison(ends.rest(ends.to))


# ---- Several at once


class Twins:
    """A device pool and host pools, everything twice: for a backend, and for the oracle."""

    def __init__(self, backend: str, layout: str, pools: int = 1, pages: int = 16) -> None:
        self.device, self.right_device = DevicePool(SPEC, pages), DevicePool(SPEC, pages)
        self.hosts = [host_pool(layout, backend, pages, staging_pages=4) for _ in range(pools)]
        self.right_hosts = [reported.host_pool(SPEC, layout, pages) for _ in range(pools)]
        for device in (self.device, self.right_device):
            fill.fill_device(device)

    def expect(self, direction: str, host: torch.Tensor, device: torch.Tensor, at: int = 0) -> None:
        move = oracle.backup if direction == "backup" else oracle.load
        move(self.right_hosts[at], self.right_device, host, device)

    def move(self, direction: str, host: torch.Tensor, device: torch.Tensor, at: int = 0) -> Receipt:
        self.expect(direction, host, device, at)
        return self.hosts[at].prepare(self.device, host, device, direction).run()

    def compare(self) -> None:
        for c in SPEC.components:
            for layer in range(3):
                image, right = (fill.device_image(d, c.name, layer) for d in (self.device, self.right_device))
                assert np.array_equal(image, right), f"device, {c.name} of layer {layer}"
                for got, expected in zip(self.hosts, self.right_hosts, strict=True):
                    image, right = (fill.host_image(h, c.name, layer) for h in (got, expected))
                    assert np.array_equal(image, right), f"host, {c.name} of layer {layer}"


@pytest.mark.parametrize("pools", [1, 2])
@every_layout
@every_backend
def test_two_streams_at_once_never_get_into_each_others_way(
    backend: str, layout: str, pools: int, queue: QueueRuntime
) -> None:
    """Each moves its own pages to and fro, so a wrong one stays wrong to the end. `staged` shares its buffer."""
    twins, order = Twins(backend, layout, pools), np.random.default_rng(pools)
    for turn in range(8):
        for i, stream in enumerate(("one", "two")):
            host, device = (slots_of(8 * i + order.permutation(8), 4) for _ in range(2))
            with queue.on(stream):
                twins.move(("backup", "load")[turn % 2], host, device, at=i % pools)
    queue.synchronize()
    twins.compare()


@every_layout
@every_backend
def test_a_copied_slot_is_whole_and_a_reader_waits_for_its_layer_only(
    backend: str, layout: str, queue: QueueRuntime
) -> None:
    """B24: the load is held before layer 3; slot 3 is copied to slot 9 as soon as the load is queued."""
    spec = presets.mamba(6, [(5, 3)], torch.bfloat16, (2, 3, 4))
    host, device, gate = host_pool(layout, backend, 8, spec), DevicePool(spec, 12), QueuedEvent(queue)
    fill.fill_host(host)
    reported.poison(device)
    transfer = host.prepare(device, slots_of([7], 1), slots_of([3], 1), "load")

    def arrived(layer: int, slot: int) -> bool:
        """Whether a slot holds what the host has, or (no) is still poison in whole."""
        pairs = [(fill.device_image(device, n, layer)[slot], fill.host_image(host, n, layer)[7]) for n in names]
        whole, none = (all((a == b).all() for a, b in pairs), all((a == fill.POISON).all() for a, _ in pairs))
        assert whole or none
        return whole

    names = [c.name for c in spec.components]
    buffers = [device.buffer(name, layer) for name in names for layer in range(6)]
    with queue.on("user"):
        early = [transfer.run((layer,)) for layer in range(3)]
        queue.wait("user", gate)
        late = [transfer.run((layer,)) for layer in range(3, 6)]
        queue.submit(lambda: [buffer[9].copy_(buffer[3]) for buffer in buffers])
    early[2].wait()  # the gate is closed: whoever waits for more waits for ever, which the device tells
    transfer.run((6,)).wait()  # owned by nobody here
    assert [arrived(layer, 3) for layer in range(6)] == [True] * 3 + [False] * 3
    assert not event_of(late[0]).query()
    gate.passed = True
    queue.synchronize()
    assert all(arrived(layer, slot) for layer in range(6) for slot in (3, 9))


@every_direction
@every_layout
@every_backend
def test_closing_a_pool_waits_for_its_copies_on_every_stream(
    backend: str, layout: str, direction: str, queue: QueueRuntime
) -> None:
    """Of several streams, the one that was used last may be done first."""
    twins = Twins(backend, layout)
    if direction == "load":
        for pool in (*twins.hosts, *twins.right_hosts):
            fill.fill_host(pool)
    kept = tensors_of(twins.hosts[0])
    twins.expect(direction, slots_of([0, 1, 2], 4), slots_of([8, 9, 10], 4))
    for i, stream in enumerate(("one", "two", "three")):
        with queue.on(stream):
            twins.hosts[0].prepare(twins.device, slots_of([i], 4), slots_of([i + 8], 4), direction).run()
    twins.hosts[0].close()
    found = [tensor.clone() for tensor in kept], device_tensors(twins.device)
    queue.synchronize()  # copies that nobody waited for must not outlive their memory
    assert equal(found[0], tensors_of(twins.right_hosts[0]))
    assert equal(found[1], device_tensors(twins.right_device))


# ---- Receipts

# Runs of three pages, of 3 layers, K and V: rows of tokens, or pages; whole pages by `staged`, which are two pieces.
DESCRIPTORS = {
    ("direct", "page_first"): 72,
    ("direct", "page_first_direct"): 18,
    ("kernel", "page_first"): 72,
    ("kernel", "page_first_direct"): 18,
    ("staged", "page_first"): 6,
    ("staged", "page_first_direct"): 6,
}
UPLOADS = {"direct": 0, "kernel": 2, "staged": 1}  # `staged`: the device's list, the host's is in descriptors


@every_direction
@pytest.mark.parametrize(("backend", "layout"), DESCRIPTORS)
def test_a_receipt_counts_what_was_done(backend: str, layout: str, direction: str, queue: QueueRuntime) -> None:
    ends = Ends(backend, layout, direction)
    receipt = ends.submit()
    receipt.wait()
    assert receipt.path == backend
    assert receipt.bytes == 3 * SPEC.page_bytes
    assert receipt.descriptors == DESCRIPTORS[backend, layout]
    assert receipt.index_uploads == UPLOADS[backend]
    assert receipt.host_syncs == 0
    assert bool(receipt.kernels) == (backend != "direct")


@pytest.mark.parametrize("backend", UPLOADS)
def test_index_lists_are_uploaded_once_for_all_layers(backend: str, queue: QueueRuntime) -> None:
    ends = Ends(backend, "page_first", "load")
    transfer = ends.host.prepare(ends.device, slots_of(HOST, 4), slots_of(DEVICE, 4), "load")
    receipts = [transfer.run((layer,)) for layer in range(3)]
    receipts[-1].wait()
    assert [receipt.index_uploads for receipt in receipts] == [UPLOADS[backend], 0, 0]
    assert [receipt.bytes for receipt in receipts] == [SPEC.page_bytes] * 3


@every_direction
@pytest.mark.parametrize(("backend", "sides"), [("kernel", ("host", "device")), ("staged", ("device",))])
def test_lists_that_lie_on_the_device_stay_there(
    backend: str, sides: tuple[str, ...], direction: str, queue: QueueRuntime
) -> None:
    """But for the host's list of a staged backup: if the device refuses its own, the host's pages are put back."""
    ends = Ends(backend, "page_first", direction)
    lists = {"host": slots_of(HOST, 4), "device": slots_of(DEVICE, 4)}
    lists |= {side: on_the_device(queue, lists[side]) for side in sides}
    receipt = ends.host.prepare(ends.device, lists["host"], lists["device"], direction).run()
    receipt.wait()
    assert receipt.index_uploads == ((backend, direction) == ("staged", "backup"))
    assert receipt.host_syncs == 0


# ---- B07  Registered memory has another address on the device


class Elsewhere(HostMemory):
    """Memory that a device finds elsewhere: all of it at one distance, or every registration at another one."""

    def __init__(self, one_distance: bool, room: int = 4096) -> None:
        super().__init__(self)
        self.own, self.there = (torch.full((n,), fill.POISON, dtype=BYTE) for n in (room, 2 * room))
        self.used, self.step, self.registered = 0, 0 if one_distance else 48, []

    def map(self, nbytes: int) -> torch.Tensor:
        self.used += nbytes
        return self.own[self.used - nbytes : self.used]

    def register(self, address: int, nbytes: int) -> None:
        self.registered.append((address, nbytes))

    def unregister(self, address: int) -> None:
        pass

    def device_address(self, address: int, device: str) -> int:
        number = next(i for i, (begin, nbytes) in enumerate(self.registered) if begin <= address < begin + nbytes)
        return self.there.data_ptr() + address - self.own.data_ptr() + self.step * number

    def seen_by_the_device(self) -> torch.Tensor:
        """What lies at the aliases, in order; a copy."""
        return torch.cat([self.there[at : at + nbytes] for at, nbytes in self._aliases()])

    def write(self, content: torch.Tensor) -> None:
        """At the aliases."""
        sizes = [nbytes for _, nbytes in self.registered]
        for (at, nbytes), part in zip(self._aliases(), content.split(sizes), strict=True):
            self.there[at : at + nbytes] = part

    def holds(self, address: int, nbytes: int) -> bool:
        """Whether some alias of one registration covers a range."""
        at = address - self.there.data_ptr()
        return any(first <= at and at + nbytes <= first + size for first, size in self._aliases())

    def _aliases(self) -> Iterator[tuple[int, int]]:
        for address, nbytes in self.registered:
            yield self.device_address(address, "") - self.there.data_ptr(), nbytes


class Unreachable:
    """Registers anything, and has no address for it on the device."""

    def register(self, address: int, nbytes: int) -> None:
        pass

    def unregister(self, address: int) -> None:
        pass

    def device_address(self, address: int, device: str) -> None:
        return None


def watch(queue: QueueRuntime, monkeypatch: pytest.MonkeyPatch) -> list[tuple[np.ndarray, ...]]:
    """Every batch of copies: destinations, sources, bytes."""
    copy, batches = queue.copy, []

    def watched(stream: object, *batch: np.ndarray, no_batches: str) -> str:
        batches.append(batch)
        return copy(stream, *batch, no_batches=no_batches)

    monkeypatch.setattr(queue, "copy", watched)
    return batches


@every_direction
@every_layout
@pytest.mark.parametrize("backend", ["direct", "staged", "auto"])
def test_memory_without_an_address_on_the_device_is_reached_by_plain_copies(
    backend: str, layout: str, direction: str, queue: QueueRuntime
) -> None:
    """B07"""
    host = HostPool(SPEC, layout, 6, backend, memory=HostMemory(Unreachable()), platform="emulated", staging_pages=4)
    twin, device, right_device = reported.host_pool(SPEC, layout, 6), DevicePool(SPEC, 6), DevicePool(SPEC, 6)
    for pool in (device, right_device):
        reported.fill(pool, {"k": reported.K, "v": reported.V})
    lists = slots_of([5, 0, 3], 4), slots_of([1, 4, 2], 4)
    reported.poison(host)
    if direction == "backup":
        receipt = host.backup(device, *lists)
        oracle.backup(twin, right_device, *lists)
    else:
        oracle.backup(host, device, *lists)
        oracle.backup(twin, right_device, *lists)
        for pool in (device, right_device):
            reported.poison(pool)
        receipt = host.load_all(device, *lists)
        oracle.load(twin, right_device, *lists)
    receipt.wait()
    assert reported.crc(host.kv_buffer) == reported.crc(twin.kv_buffer)
    assert [reported.layer_crc(device, c) for c in "kv"] == [reported.layer_crc(right_device, c) for c in "kv"]
    assert ("one by one" in receipt.path) == ("direct" in receipt.path)


def test_a_kernel_refuses_memory_without_an_address_on_the_device() -> None:
    """B07"""
    host = HostPool(SPEC, "page_first", 6, "kernel", memory=HostMemory(Unreachable()), platform="emulated")
    with pytest.raises(ValueError, match="has no address on the device: use backend 'direct'"):
        host.backup(DevicePool(SPEC, 6), slots_of([1], 4), slots_of([2], 4))


@pytest.mark.parametrize(
    ("backend", "told"),
    [("staged", "has no address on the device: use backend 'direct'"), ("auto", "no backend can take this transfer")],
)
def test_a_list_on_the_device_is_refused_where_no_kernel_could_undo_a_wrong_one(
    backend: str, told: str, queue: QueueRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is submitted."""
    host = HostPool(SPEC, "page_first", 6, backend, memory=HostMemory(Unreachable()), platform="emulated")
    launched: list[str] = []
    monkeypatch.setattr(queue, "launch", lambda stream, kernel, blocks, arguments: launched.append(kernel))
    with pytest.raises(ValueError, match=told):
        host.backup(DevicePool(SPEC, 6), slots_of([1], 4), on_the_device(queue, slots_of([2], 4)))
    assert not [kernel for kernel in launched if kernel.startswith("copy")], "a list may have been checked, no more"


one_or_many = pytest.mark.parametrize("one_distance", [True, False], ids=["one distance", "many distances"])


@one_or_many
@every_direction
@every_layout
@pytest.mark.parametrize("backend", ["direct", "kernel", "staged"])
def test_host_memory_is_reached_by_its_device_address(
    backend: str,
    layout: str,
    direction: str,
    one_distance: bool,
    queue: QueueRuntime,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """B07. The host's own addresses are never touched."""
    memory, batches = Elsewhere(one_distance), watch(queue, monkeypatch)
    limit = 2 * SPEC.page_bytes // 2  # two pages of K, or of V
    host = HostPool(
        SPEC, layout, 6, backend, memory=memory, registration_limit=limit, platform="emulated", staging_pages=4
    )
    twin, device, right_device = reported.host_pool(SPEC, layout, 6), DevicePool(SPEC, 6), DevicePool(SPEC, 6)
    lists = slots_of([5, 0, 3, 1, 2], 4), slots_of([1, 4, 2, 3, 0], 4)
    assert len(memory.registered) == 6
    if direction == "backup":
        for pool in (device, right_device):
            fill.fill_device(pool)
        oracle.backup(twin, right_device, *lists)
        host.backup(device, *lists).wait()
    else:
        fill.fill_host(twin)
        memory.write(torch.cat([tensor.reshape(-1) for _, held in twin.storage for tensor in held]))
        oracle.load(twin, right_device, *lists)
        host.load_all(device, *lists).wait()
    queue.synchronize()
    expected = torch.cat([tensor.reshape(-1) for _, held in twin.storage for tensor in held])
    assert torch.equal(memory.seen_by_the_device(), expected)
    assert all(
        np.array_equal(fill.device_image(device, c.name, i), fill.device_image(right_device, c.name, i))
        for c in SPEC.components
        for i in range(3)
    )
    assert is_poison([memory.own])
    assert bool(batches) == (backend != "kernel")
    for to, source, nbytes in batches:
        for address, size in zip((to if direction == "backup" else source).tolist(), nbytes.tolist(), strict=True):
            assert memory.holds(address, size)


@one_or_many
@pytest.mark.parametrize("backend", ["direct", "staged"])
def test_neighbouring_pages_are_one_copy_up_to_the_edge_of_a_registration(
    backend: str, one_distance: bool, queue: QueueRuntime
) -> None:
    """B07, B06: eight pages in a row, three to a registration."""
    spec = presets.mha_k_only(1, 2, 8, BYTE, 4, indices_from=None)
    memory = Elsewhere(one_distance)
    limit = 3 * spec.page_bytes
    host = HostPool(
        spec, "page_first", 8, backend, memory=memory, registration_limit=limit, platform="emulated", staging_pages=16
    )
    device, every = DevicePool(spec, 8), slots_of(list(range(8)), 4)
    receipt = host.backup(device, every, every)
    receipt.wait()
    assert receipt.descriptors == len(memory.registered) == 3
    assert not memory.seen_by_the_device().any()  # zeros, as the device has them


@one_or_many
@pytest.mark.parametrize("backend", ["kernel", "staged"])
def test_a_list_refused_by_the_device_changes_nothing_at_the_device_address(
    backend: str, one_distance: bool, queue: QueueRuntime
) -> None:
    """A staged backup then brings the host's own pages back to it."""
    memory = Elsewhere(one_distance)
    host = HostPool(
        SPEC, "page_first", 6, backend, memory=memory, registration_limit=SPEC.page_bytes, platform="emulated"
    )
    content = torch.randint(0, 255, (6 * SPEC.page_bytes,), dtype=BYTE)
    memory.write(content)
    outside = on_the_device(queue, slots_of([1, 6, 2], 4))
    receipt = host.backup(DevicePool(SPEC, 6), slots_of(HOST, 4), outside)
    with pytest.raises(ValueError, match=r"device index 24 is outside the pool's 0\.\.23"):
        receipt.wait()
    assert torch.equal(memory.seen_by_the_device(), content)
    assert is_poison([memory.own])


# ---- B08  Which call copies


class FakeCuda:
    """What a CUDA runtime was asked to do."""

    TEXT = ctypes.create_string_buffer(b"invalid argument")

    def __init__(self, error: int = 0, batches: bool = True) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self._error = error
        if batches:
            self.cudaMemcpyBatchAsync = self._called("batch")
        self.cudaMemcpyAsync = self._called("plain")

    def _called(self, name: str) -> Callable[..., int]:
        def call(*arguments: Any) -> int:
            self.calls.append((name, arguments))
            return self._error

        return call

    def cudaGetLastError(self) -> int:
        self.calls.append(("taken back", ()))
        return self._error

    def cudaGetErrorString(self, error: int) -> int:
        return ctypes.addressof(self.TEXT)


def copies(cuda: FakeCuda, version: int = 13000, driver: int = 13000) -> Copies:
    return Copies(Library(cuda, version, driver))  # pyright: ignore[reportArgumentType]


def addresses(count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Destinations, sources and bytes of some copies."""
    numbers = np.arange(count, dtype=np.uint64)
    return numbers + 1000, numbers + 2000, numbers + 1


@pytest.mark.parametrize(
    ("driver", "version", "symbol", "call", "arguments"),
    [
        (12070, 12080, True, "plain", 5),
        (12070, 13000, True, "plain", 5),
        (12080, 12080, True, "batch", 9),
        (13000, 12080, True, "batch", 9),
        (13000, 13000, True, "batch", 8),
        (13000, 12040, False, "plain", 5),
    ],
)
def test_the_call_is_chosen_by_driver_runtime_and_symbol(
    driver: int, version: int, symbol: bool, call: str, arguments: int
) -> None:
    """B08: CUDA 13 dropped an argument, drivers before 12.8 lack the call."""
    cuda = FakeCuda(batches=symbol)
    said = copies(cuda, version, driver).submit(77, *addresses(3))
    assert [(name, len(passed)) for name, passed in cuda.calls] == [(call, arguments)] * (1 if call == "batch" else 3)
    assert (said == "batch") == (call == "batch")
    assert said == "batch" or said.startswith("one by one: ")
    streams = {passed[-1].value for _, passed in cuda.calls}
    assert streams == {77}


def test_plain_copies_are_of_the_same_bytes() -> None:
    """B08"""
    cuda = FakeCuda()
    copies(cuda, driver=12070).submit(77, *addresses(2))
    moved = [tuple(argument.value for argument in passed[:3]) for _, passed in cuda.calls]
    assert moved == [(1000, 2000, 1), (1001, 2001, 2)]


@pytest.mark.parametrize("version", [12080, 13000])
def test_one_attribute_applies_to_any_number_of_copies(version: int) -> None:
    """B31: the list of what attributes apply to has one entry, 0, and not one for each copy."""
    cuda = FakeCuda()
    copies(cuda, version).submit(77, *addresses(50_000))
    ((_, passed),) = cuda.calls
    count, _, first, attributes = passed[3:7]
    assert (count.value, first._obj.value, attributes.value) == (50_000, 0, 1)


def test_memory_without_an_address_on_the_device_is_copied_piece_by_piece() -> None:
    """B07: no alias exists, so neither kernels nor the batched call may be given one."""
    cuda = FakeCuda()
    said = copies(cuda).submit(77, *addresses(2), no_batches="host memory has no address on the device")
    assert said == "one by one: host memory has no address on the device"
    assert [name for name, _ in cuda.calls] == ["plain"] * 2


@pytest.mark.parametrize(("driver", "what"), [(13000, "a batch of 2 copies"), (12070, "a copy of 1 bytes")])
def test_an_error_is_told_in_cudas_words_and_taken_back(driver: int, what: str) -> None:
    """B08: what is left in the context would be blamed on whoever comes next."""
    cuda = FakeCuda(error=1)
    with pytest.raises(RuntimeError, match=rf"{what} failed: CUDA error 1 \(invalid argument\)"):
        copies(cuda, driver=driver).submit(77, *addresses(2))
    assert [name for name, _ in cuda.calls][1:] == ["taken back"]


def test_a_receipt_tells_when_copies_went_one_by_one(queue: QueueRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    """B08"""
    copy = queue.copy

    def plain(*batch: Any, no_batches: str) -> str:
        return copy(*batch) and "one by one: driver 12070 has no batched copy"

    monkeypatch.setattr(queue, "copy", plain)
    receipt = Ends("direct", "page_first_direct", "backup").submit()
    receipt.wait()
    assert receipt.path == "direct (one by one: driver 12070 has no batched copy)"


# ---- Pools beside one another


@pytest.mark.parametrize("caller", ["default", "user"])
@every_direction
def test_a_pool_that_waits_holds_up_nobody_else(caller: str, direction: str, queue: QueueRuntime) -> None:
    """Copies are on a stream beside the caller's, whichever pool they are of."""
    waiting, free = (Ends("staged", "page_first", direction) for _ in range(2))
    back = Ends("staged", "page_first", "load" if direction == "backup" else "backup")
    for ends in (waiting, free, back):
        ends.write(ends.source, ends.content)
    go = QueuedEvent(queue)
    with queue.on("waiting"):
        queue.wait("waiting", go)
        held = waiting.submit()
    with queue.on(caller):
        for ends in (free, back):
            ends.submit().wait()
            assert equal(ends.read(ends.to), ends.content)
    assert is_poison(waiting.read(waiting.to))
    go.passed = True
    held.wait()
    assert equal(waiting.read(waiting.to), waiting.content)


class Watching:
    """Registers anything, and looks at a page when a registration is undone."""

    page = torch.zeros(1)

    def __init__(self) -> None:
        self.seen: list[bool] = []

    def register(self, address: int, nbytes: int) -> None:
        pass

    def unregister(self, address: int) -> None:
        self.seen.append(bool((self.page == 0).all()))

    def device_address(self, address: int, device: str) -> int:
        return address


@pytest.mark.parametrize("closed_by", ["close", "garbage collection", "a cycle"])
@every_backend
def test_memory_is_unregistered_after_the_last_copy(backend: str, closed_by: str, queue: QueueRuntime) -> None:
    """Pages of zeros come over poison."""
    registrar, device = Watching(), DevicePool(SPEC, 6)
    host = host_pool("page_first", backend, memory=HostMemory(registrar))
    registrar.page = host.layer_view("v", 2)[3]
    host.backup(device, slots_of([5, 0, 3], 4), slots_of([1, 4, 2], 4))
    assert is_poison([registrar.page])
    if closed_by == "close":
        host.close()
    elif closed_by == "a cycle":
        host.cycle = host  # pyright: ignore[reportAttributeAccessIssue]
    del host
    gc.collect()
    assert registrar.seen
    assert all(registrar.seen)


@every_backend
def test_memory_is_unregistered_after_the_last_copy_whoever_closes_the_pool(backend: str, queue: QueueRuntime) -> None:
    """A thread that closes what another one is closing waits as well."""
    registrar, device = Watching(), DevicePool(SPEC, 6)
    host = host_pool("page_first", backend, memory=HostMemory(registrar))
    registrar.page = host.layer_view("v", 2)[3]
    queue.delay(queue.current(), 0.2)
    host.backup(device, slots_of([5, 0, 3], 4), slots_of([1, 4, 2], 4))
    closing = [threading.Thread(target=host.close) for _ in range(3)]
    for thread in closing:
        thread.start()
    for thread in closing:
        thread.join(60)
    assert registrar.seen
    assert all(registrar.seen)


@every_backend
@every_direction
def test_pools_and_lists_may_be_forgotten_while_they_are_at_work(
    backend: str, direction: str, queue: QueueRuntime
) -> None:
    """What a transfer reads and writes is kept until it has passed."""
    ends = Ends(backend, "page_first", direction)
    ends.write(ends.source, ends.content)
    host, views = ends.host, [view for side in ("host", "device") for view in ends._views(side)]
    places = [view.data_ptr() for view in views]
    receipt = ends.submit()
    del ends, views
    gc.collect()
    others = [torch.zeros(6, 4, 1, 2, 8, dtype=BYTE) for _ in range(64)]
    assert not {other.data_ptr() for other in others} & set(places)
    receipt.wait()
    host.close()


@every_backend
def test_each_of_several_transfers_keeps_its_own_device_pool(backend: str, queue: QueueRuntime) -> None:
    """On one stream, none of them done when its device pool is forgotten."""
    host, pages = host_pool("page_first", backend), range(5)
    kept: list[weakref.ref[DevicePool]] = []
    buffers: list[weakref.ref[torch.Tensor]] = []
    for page in pages:
        device = DevicePool(SPEC, 6)
        device.buffer("k", 0).fill_(page)
        host.backup(device, slots_of([page], 4), slots_of([page], 4))
        kept.append(weakref.ref(device))
        buffers.append(weakref.ref(device.buffer("k", 0)))
        del device
    gc.collect()
    assert not any(pool() for pool in kept)
    assert all(buffer() is not None for buffer in buffers)
    queue.synchronize()
    assert [set(host.layer_view("k", 0)[page].flatten().tolist()) for page in pages] == [{page} for page in pages]


@every_backend
def test_a_pool_that_is_closed_by_another_thread_closes_between_two_transfers(
    backend: str, queue: QueueRuntime
) -> None:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for _ in range(20):
            ends, refused = Ends(backend, "page_first", "backup"), threading.Event()

            def submit(ends: Ends = ends, refused: threading.Event = refused) -> None:
                while not refused.is_set():
                    try:
                        ends.submit().wait()
                    except ValueError as closed:
                        assert "is closed" in str(closed)  # noqa: PT017
                        refused.set()

            thread = threading.Thread(target=submit)
            thread.start()
            ends.host.close()
            thread.join(60)
            assert refused.is_set()
    finally:
        sys.setswitchinterval(interval)


def test_closing_waits_until_a_transfer_is_submitted(queue: QueueRuntime) -> None:
    ends, inside, go_on = Ends("kernel", "page_first", "backup"), threading.Event(), threading.Event()
    transfer = ends.host.prepare(ends.device, slots_of(HOST, 4), slots_of(DEVICE, 4), "backup")
    execute = transfer.backend.execute

    def slow(*arguments: Any) -> Receipt:
        inside.set()
        assert go_on.wait(60)
        return execute(*arguments)

    transfer.backend.execute = slow  # pyright: ignore[reportAttributeAccessIssue]
    submitting, closing = threading.Thread(target=transfer.run), threading.Thread(target=ends.host.close)
    submitting.start()
    assert inside.wait(60)
    closing.start()
    closing.join(0.2)
    assert closing.is_alive()
    go_on.set()
    for thread in (submitting, closing):
        thread.join(60)
    assert ends.host.closed


EXIT = """
import torch
from refimpl import DevicePool, HostMemory, HostPool, presets, slots_of
class Watching:
    page = torch.zeros(1)
    def register(self, address, nbytes): pass
    def unregister(self, address): print("copied" if bool((self.page == 0).all()) else "not copied")
    def device_address(self, address, device): return address
spec, registrar = presets.mha(2, 2, 8, torch.uint8, 4), Watching()
host = HostPool(spec, "page_first", 3, {backend!r}, memory=HostMemory(registrar), platform="emulated")
host.kv_buffer.fill_(7)
registrar.page, device = host.layer_view("v", 1)[2], DevicePool(spec, 3)
host.backup(device, slots_of([2], 4), slots_of([1], 4))
"""


@every_backend
def test_a_process_that_ends_unregisters_after_the_last_copy(backend: str) -> None:
    """Python calls finalisers then in an order of its own."""
    done = subprocess.run(
        [sys.executable, "-c", EXIT.format(backend=backend)], capture_output=True, text=True, cwd=ROOT, timeout=120
    )
    assert set(done.stdout.split("\n")) == {"copied", ""}, done.stderr


def test_auto_says_when_nobody_can_take_a_transfer(queue: QueueRuntime) -> None:
    host = HostPool(SPEC, "layer_first", 6, "auto", memory=HostMemory(Unreachable()), platform="emulated")
    with pytest.raises(ValueError, match=r"no backend can take .*kernel: .*direct: .*index lists on the host"):
        host.prepare(DevicePool(SPEC, 6), slots_of([1], 4), on_the_device(queue, slots_of([2], 4)), "load")


def test_auto_has_nothing_to_explain_where_nothing_moves(queue: QueueRuntime) -> None:
    host = host_pool("page_first", "auto")
    assert explain(host.prepare(DevicePool(SPEC, 6), None, None, "load")) == "nothing to move"


# ---- Errors


def filled_twins(backend: str, layout: str) -> Twins:
    """Host pools full of words that name their places."""
    twins = Twins(backend, layout)
    for pool in (*twins.hosts, *twins.right_hosts):
        fill.fill_host(pool)
    return twins


def fail_once(queue: QueueRuntime, monkeypatch: pytest.MonkeyPatch, call: str, number: int) -> None:
    """Let the `number`th launch or copy from now on raise, before it does anything."""
    done, function = 0, getattr(queue, call)

    def called(*arguments: Any, **named: Any) -> Any:
        nonlocal done
        done += 1
        if done == number:
            raise RuntimeError(f"this {call} fails")
        return function(*arguments, **named)

    monkeypatch.setattr(queue, call, called)


FAILURES = [
    ("direct", "copy", 1),
    ("kernel", "launch", 1),
    *(("staged", call, number) for call in ("copy", "launch") for number in (1, 2, 3)),
]


@every_direction
@every_layout
@pytest.mark.parametrize(("backend", "call", "number"), FAILURES)
def test_a_failure_is_told_and_leaves_the_pool_usable(
    backend: str,
    call: str,
    number: int,
    layout: str,
    direction: str,
    queue: QueueRuntime,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Six pages by way of two halves of two pages: the third call is in the middle."""
    twins = Twins(backend, layout)
    for pool in (*twins.hosts, *twins.right_hosts):
        fill.fill_host(pool)
    failing = slots_of([7, 2, 5, 0, 3, 1], 4), slots_of([9, 8, 12, 10, 13, 11], 4)
    fail_once(queue, monkeypatch, call, number)
    with pytest.raises(RuntimeError, match=f"this {call} fails"):
        twins.hosts[0].prepare(twins.device, *failing, direction).run()
    again = twins.move(direction, *failing)  # whatever had arrived, this brings all of it
    twins.move("load", slots_of([7, 6, 2], 4), slots_of([1, 2, 3], 4))
    assert not again.event or not again.event.query()
    queue.synchronize()
    twins.compare()
    twins.hosts[0].close()


@every_direction
@pytest.mark.parametrize("call", ["copy", "launch"])
def test_what_a_failed_transfer_left_behind_does_not_disturb_the_next_one(
    call: str, direction: str, queue: QueueRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On another stream: kernels of the failed one may still be waiting to use the staging buffer."""
    for late in range(16):
        twins = filled_twins("staged", "page_first")
        with monkeypatch.context() as patch, queue.on("failing"):
            for _ in range(late):
                queue.submit(lambda: None)
            fail_once(queue, patch, call, 3)
            failing = slots_of([0, 1, 2, 3, 4, 5], 4), slots_of([0, 1, 2, 3, 4, 5], 4)
            with pytest.raises(RuntimeError, match=f"this {call} fails"):
                twins.hosts[0].prepare(twins.device, *failing, direction).run()
        with queue.on("next"):
            twins.move("backup", slots_of([8, 9, 10, 11], 4), slots_of([15, 14, 13, 12], 4))
        queue.synchronize()
        got, right = (fill.host_image(pool, "k", 0)[8:12] for pool in (twins.hosts[0], twins.right_hosts[0]))
        assert np.array_equal(got, right)


@every_direction
@pytest.mark.parametrize("call", ["copy", "launch"])
def test_a_failed_transfer_forgets_nobody_elses_use_of_the_staging_buffer(
    call: str, direction: str, queue: QueueRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its half is one of two; the other one is still being emptied on another stream when it fails."""
    for late in range(16):
        twins = filled_twins("staged", "page_first")
        with queue.on("before"):
            for _ in range(late):
                queue.submit(lambda: None)
            twins.move("load", slots_of([12, 13], 4), slots_of([0, 1], 4))
        with monkeypatch.context() as patch, queue.on("failing"):
            fail_once(queue, patch, call, 1)
            with pytest.raises(RuntimeError, match=f"this {call} fails"):
                twins.hosts[0].prepare(twins.device, slots_of([3, 4], 4), slots_of([5, 6], 4), direction).run()
        with queue.on("next"):
            twins.move("backup", slots_of([8, 9], 4), slots_of([15, 14], 4))
        queue.synchronize()
        got, right = (fill.device_image(pool, "k", 0)[:2] for pool in (twins.device, twins.right_device))
        assert np.array_equal(got, right)
        got, right = (fill.host_image(pool, "k", 0)[8:10] for pool in (twins.hosts[0], twins.right_hosts[0]))
        assert np.array_equal(got, right)


# ---- Budget


def test_staging_is_booked_while_the_pool_is_open() -> None:
    budget = Budget(10 * SPEC.page_bytes)
    host = host_pool("page_first", "staged", staging_pages=6, device_budget=budget)
    assert budget.available == 4 * SPEC.page_bytes
    with pytest.raises(MemoryError, match="kv needs"):
        host_pool("page_first", "staged", staging_pages=6, device_budget=budget)
    gc.collect()
    assert budget.available == 4 * SPEC.page_bytes
    host.close()
    assert budget.available == 10 * SPEC.page_bytes


def test_memory_that_cannot_be_had_is_not_booked(queue: QueueRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(nbytes: int) -> torch.Tensor:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(queue, "empty", none_left)
    budget = Budget(10 * SPEC.page_bytes)
    with pytest.raises(RuntimeError, match="out of memory"):
        host_pool("page_first", "staged", staging_pages=6, device_budget=budget)
    assert budget.available == budget.total
    with host_pool("page_first", "auto", staging_pages=6, device_budget=budget):
        assert budget.available == budget.total


def test_too_small_a_budget_leaves_host_and_device_as_they_were() -> None:
    host, device = Budget(100 * SPEC.page_bytes), Budget(SPEC.page_bytes)
    with pytest.raises(MemoryError, match="kv needs"):
        host_pool("page_first", "staged", budget=host, device_budget=device)
    gc.collect()
    assert (host.available, device.available) == (host.total, device.total)


@every_direction
def test_auto_goes_on_without_staging_and_says_so(direction: str, queue: QueueRuntime) -> None:
    ends = Ends("auto", "page_first", direction, device_budget=Budget(SPEC.page_bytes))
    ends.write(ends.source, ends.content)
    transfer = ends.host.prepare(ends.device, slots_of(HOST, 4), slots_of(DEVICE, 4), direction)
    said = explain(transfer).splitlines()
    (staged,) = (line for line in said if line.startswith("staged"))
    assert "out: kv needs" in staged
    assert said[-1] in ("choice: kernel", "choice: direct")
    transfer.run().wait()
    assert equal(ends.read(ends.to), ends.content)


def test_auto_explains_every_candidate(queue: QueueRuntime) -> None:
    ends = Ends("auto", "page_first", "backup")
    said = explain(ends.host.prepare(ends.device, slots_of(HOST, 4), slots_of(DEVICE, 4), "backup")).splitlines()
    assert {line.split()[0] for line in said[:-1]} == {"kernel", "direct", "staged"}
    assert said[-1] == f"choice: {said[0].split()[0]}"
