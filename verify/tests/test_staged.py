"""Order and edges of what the GPU backends submit, on an emulated device that runs everything as late as it may.

Chunks are two pages, so a few pages show every edge. Sources are overwritten as soon as stream order allows, and
destinations are looked at no later, in several orders of whatever is free to run.
"""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from kernels_cupy import copy_engine
from kernels_cupy import staged as staging
from kernels_cupy.jobs import table_of
from kernels_cupy.pieces import joined, pieces
from kernels_cupy.runtimes import emulated
from kernels_cupy.staged import Staged
from refimpl import (
    LAYOUTS,
    Component,
    DevicePool,
    HostMemory,
    HostPool,
    PoolSpec,
    Refusal,
    oracle,
    presets,
    slots_of,
    support,
)
from refimpl.controller import loads_by_layer
from refimpl.geometry import Segment
from refimpl.receipt import Receipt
from refimpl.runtime import Stream
from verify import fill
from verify.guarded import on_the_device

pytestmark = pytest.mark.emulated

# K of a page is 4 KiB in layouts that keep it together: registrations may end behind every page.
SPEC = presets.mha(layers=2, heads=2, head_dim=64, dtype=torch.bfloat16, page_size=8)
PAGES = 9
STAGING = 4  # pages: two chunks of two

DIRECTIONS = ("backup", "load")
SEEDS = range(6)

both_ways = pytest.mark.parametrize("direction", DIRECTIONS)
on_every_backend = pytest.mark.parametrize("backend", ["kernel", "direct", "staged"])


@pytest.fixture(autouse=True)
def _an_idle_device() -> None:
    emulated().synchronize()


class Pools:
    """A host and a device pool, and what the oracle makes of the same transfers."""

    def __init__(
        self,
        backend: str,
        layout: str = "page_first",
        memory: HostMemory | None = None,
        limit: int | None = None,
        spec: PoolSpec = SPEC,
    ) -> None:
        self.spec = spec
        self.host = HostPool(
            spec, layout, PAGES, backend, memory=memory, registration_limit=limit, platform="emulated",
            staging_pages=STAGING,
        )  # fmt: skip
        self.device = DevicePool(spec, PAGES)
        self.expected_host, self.expected_device = HostPool(spec, layout, PAGES), DevicePool(spec, PAGES)

    def fill(self, direction: str) -> None:
        """The source full of names, the destination of something else."""
        for host, device in ((self.host, self.device), (self.expected_host, self.expected_device)):
            fill.fill_device(device, 0)
            fill.fill_host(host, 0)
            for tensor in (self._device(device), self._host(host))[direction == "backup"]:
                tensor.bitwise_not_()

    def move(self, direction: str, host: list[int], device: list[int]) -> Receipt:
        at = slots_of(host, self.spec.page_size), slots_of(device, self.spec.page_size)
        if direction == "backup":
            oracle.backup(self.expected_host, self.expected_device, *at)
            return self.host.backup(self.device, *at)
        oracle.load(self.expected_host, self.expected_device, *at)
        return self.host.load_all(self.device, *at)

    def source(self, direction: str) -> list[torch.Tensor]:
        return self._device(self.device) if direction == "backup" else self._host(self.host)

    def destination(self, direction: str) -> list[torch.Tensor]:
        return self._host(self.host) if direction == "backup" else self._device(self.device)

    def expected(self, direction: str) -> list[torch.Tensor]:
        return self._host(self.expected_host) if direction == "backup" else self._device(self.expected_device)

    @staticmethod
    def _host(host: HostPool) -> list[torch.Tensor]:
        return [t.view(torch.uint8) for _, tensors in host.storage for t in tensors]

    def _device(self, device: DevicePool) -> list[torch.Tensor]:
        return [
            device.buffer(c.name, i).view(torch.uint8) for c in self.spec.components for i in self.spec.layers_of(c)
        ]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def overwrite(tensors: list[torch.Tensor]) -> Callable[[], None]:
    def what() -> None:
        for tensor in tensors:
            tensor.fill_(fill.POISON)

    return what


# ---- in order of the caller's stream


@both_ways
@on_every_backend
@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 6, 7])
@pytest.mark.parametrize("stream", ["default", "mine"])
def test_a_transfer_lies_between_what_the_caller_did_before_and_does_after(
    stream: str, count: int, backend: str, direction: str
) -> None:
    """The source is written just before it and overwritten just after, the destination is looked at just after."""
    pools = Pools(backend)
    rng = np.random.default_rng(count)
    for seed in SEEDS:
        emulated().reseed(seed)
        pools.fill(direction)
        written, found = [t.clone() for t in pools.source(direction)], []
        overwrite(pools.source(direction))()

        def write(written: list[torch.Tensor] = written) -> None:
            for tensor, value in zip(pools.source(direction), written, strict=True):
                tensor.copy_(value)

        with emulated().on(stream):
            emulated().submit(write)
            pools.move(direction, *(rng.permutation(PAGES)[:count].tolist() for _ in "hd"))
            emulated().submit(overwrite(pools.source(direction)))
            emulated().submit(lambda found=found: found.extend(t.clone() for t in pools.destination(direction)))
            emulated().record(stream).synchronize()
        assert same(found, pools.expected(direction))


@both_ways
@on_every_backend
def test_a_receipt_has_passed_when_the_bytes_are_there(backend: str, direction: str) -> None:
    pools = Pools(backend)
    for seed in SEEDS:
        emulated().reseed(seed)
        pools.fill(direction)
        receipt = pools.move(direction, [4, 2, 7, 0, 5], [1, 3, 8, 6, 2])
        assert receipt.event is not None
        assert not receipt.event.query()
        receipt.wait()
        assert receipt.event.query()
        assert same(pools.destination(direction), pools.expected(direction))


# ---- transfers that share what a backend keeps


@pytest.mark.parametrize("directions", list(itertools.product(DIRECTIONS, DIRECTIONS)), ids="-".join)
@pytest.mark.parametrize("streams", [("mine", "mine"), ("mine", "yours")], ids=["one stream", "two streams"])
@pytest.mark.parametrize("counts", [(1, 1), (2, 1), (3, 4), (5, 3), (6, 6)], ids=str)
@on_every_backend
def test_transfers_in_a_row_share_the_halves_of_a_buffer(
    backend: str, counts: tuple[int, int], streams: tuple[str, str], directions: tuple[str, str]
) -> None:
    """Neither waits for the other but where they use one half: two callers have nothing else in common."""
    first, second = Pools(backend), Pools(backend)
    second.host._mover = first.host._mover
    for seed in SEEDS:
        emulated().reseed(seed)
        receipts: list[Receipt] = []
        for pools, direction, stream, count in zip((first, second), directions, streams, counts, strict=True):
            pools.fill(direction)
            with emulated().on(stream):
                receipts.append(pools.move(direction, list(range(count)), list(range(PAGES - count, PAGES))))
        for receipt in reversed(receipts):
            receipt.wait()
        for pools, direction in zip((first, second), directions, strict=True):
            assert same(pools.destination(direction), pools.expected(direction))


@both_ways
@on_every_backend
def test_a_transfer_may_be_run_on_another_stream(backend: str, direction: str) -> None:
    """What was brought to the device for one stream may not have arrived for another."""
    for seed in SEEDS:
        emulated().reseed(seed)
        memory = MemoryElsewhere()
        pools = Pools(backend, memory=memory, limit=32 << 10)
        pools.fill(direction)
        memory.give()
        at = slots_of([4, 2, 7, 0, 5], 8), slots_of([1, 3, 8, 6, 2], 8)
        (oracle.backup if direction == "backup" else oracle.load)(pools.expected_host, pools.expected_device, *at)
        transfer, receipts = pools.host.prepare(pools.device, *at, direction), []
        for stream in ("mine", "yours"):
            with emulated().on(stream):
                receipts.append(transfer.run())
        receipts[1].wait()
        memory.take()
        assert same(pools.destination(direction), pools.expected(direction))
        emulated().synchronize()


@both_ways
@on_every_backend
def test_a_closed_pool_has_nothing_under_way(backend: str, direction: str) -> None:
    for seed in SEEDS:
        emulated().reseed(seed)
        pools = Pools(backend)
        pools.fill(direction)
        destination = pools.destination(direction)
        with emulated().on("mine"):
            pools.move(direction, [4, 2, 7, 0, 5], [1, 3, 8, 6, 2])
        pools.host.close()
        assert same(destination, pools.expected(direction))


@both_ways
@on_every_backend
def test_a_prepared_transfer_follows_buffers_that_were_moved(backend: str, direction: str) -> None:
    """What was worked out for the old place must not be submitted: somebody else may have that memory."""
    pools = Pools(backend)
    pools.fill(direction)
    at = slots_of([4, 2, 7, 0, 5], 8), slots_of([1, 3, 8, 6, 2], 8)
    transfer = pools.host.prepare(pools.device, *at, direction)
    transfer.run().wait()
    before = []
    for c, layer in itertools.product(SPEC.components, range(2)):
        buffer = pools.device.buffer(c.name, layer)
        before.append(buffer.detach().view(torch.uint8))
        buffer.data = torch.empty_like(buffer)
    overwrite(before)()
    pools.fill(direction)
    (oracle.backup if direction == "backup" else oracle.load)(pools.expected_host, pools.expected_device, *at)
    transfer.run().wait()
    assert same(pools.destination(direction), pools.expected(direction))
    assert all((tensor == fill.POISON).all() for tensor in before)


@on_every_backend
def test_a_prepared_transfer_keeps_no_memory_of_a_closed_pool(backend: str) -> None:
    pools = Pools(backend)
    transfer = pools.host.prepare(pools.device, slots_of([4, 2], 8), slots_of([1, 3], 8), "load")
    transfer.run().wait()
    memory = weakref.ref(pools.host.storage[0][1][0])
    pools.host.close()
    gc.collect()
    assert memory() is None
    with pytest.raises(ValueError, match="is closed"):
        transfer.run()


def test_a_buffer_is_not_used_before_those_are_done_who_had_its_memory() -> None:
    """An allocator hands memory on in order of the stream that it was taken on, here the one the pool was made on."""
    queue, done = emulated(), []
    with queue.on("maker"):
        queue.submit(lambda: done.append("the memory's last reader"))
        pools = Pools("staged")
    with queue.on("caller"):
        receipt = pools.host.backup(pools.device, slots_of([4], 8), slots_of([1], 8))
    receipt.wait()
    assert done == ["the memory's last reader"]


def test_a_closed_buffer_is_refused() -> None:
    pools = Pools("staged")
    transfer = pools.host.prepare(pools.device, slots_of([1], 8), slots_of([2], 8), "load")
    mover = transfer.backend
    mover.close()
    with pytest.raises(ValueError, match="closed"):
        transfer.run()


# ---- chunks


@both_ways
@pytest.mark.parametrize(("count", "chunks"), [(1, 1), (2, 1), (3, 2), (5, 3), (9, 5)])
def test_a_chunk_is_half_the_buffer_and_halves_take_turns(count: int, chunks: int, direction: str) -> None:
    """Also from one transfer to the next: an odd number of chunks begins the next one in the other half."""
    pools = Pools("staged")
    staged = pools.host._mover
    assert isinstance(staged, Staged)
    transfer = pools.host.prepare(pools.device, slots_of(np.arange(count), 8), slots_of(np.arange(count), 8), direction)
    plan, layers, items = transfer.plan(), transfer.layers, transfer.items
    found = [staged._chunks(plan, layers, items, direction) for _ in range(2)]
    assert [[chunk.count for chunk in row] for row in found] == [[2] * (count // 2) + [1] * (count % 2)] * 2
    halves = [chunk.half for row in found for chunk in row]
    assert halves == [i % 2 for i in range(2 * chunks)]
    assert staged._buffer is not None
    for chunk in itertools.chain(*found):
        begin = staged._buffer.data_ptr() + chunk.half * staged.half_bytes
        end = begin + staged.half_bytes
        assert (chunk.staging >= begin).all()
        assert (chunk.staging + chunk.nbytes <= end).all()


def test_pages_that_follow_each_other_are_copied_at_once() -> None:
    """K of two pages, V of two pages: as many copies as there are pieces, in chunks of two pages."""
    pools = Pools("staged")
    pools.fill("backup")
    receipt = pools.move("backup", [3, 4, 5, 6], [8, 0, 2, 1])
    receipt.wait()
    assert (receipt.descriptors, receipt.kernels, receipt.index_uploads) == (4, 2, 1)
    assert same(pools.destination("backup"), pools.expected("backup"))


def test_a_layer_is_loaded_in_whole_pieces() -> None:
    """Its tokens lie apart, with other layers between them: bringing these too is cheaper than many copies."""
    pools = Pools("staged")
    receipt = pools.host.load(pools.device, slots_of([4, 2], 8), slots_of([1, 3], 8), layer=1)
    receipt.wait()
    assert receipt.descriptors == 2 * len(SPEC.components)


@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout != "layer_first"])
@pytest.mark.parametrize("name", ["mha", "mha of one token", "mha in groups", "mla", "mamba"])
def test_loads_come_by_layer_where_a_layer_takes_the_bus_for_itself_alone(name: str, layout: str) -> None:
    """What the controller asks of a layout is what the pieces of the backend say."""
    spec = {
        "mha": SPEC,
        "mha of one token": presets.mha(3, 2, 64, torch.bfloat16, page_size=1),
        "mha in groups": presets.mha(3, 4, 64, torch.bfloat16, page_size=8, head_groups=2),
        "mla": presets.mla(3, 64, torch.bfloat16, page_size=8),
        "mamba": presets.mamba((0, 2), [(6, 3)], torch.bfloat16, (2, 4, 4), torch.float32),
    }[name]
    if isinstance(support(spec, layout, "staged", "load", "emulated"), Refusal):
        pytest.skip("there is no such pair")
    host, device = HostPool(spec, layout, 3, "staged", platform="emulated"), DevicePool(spec, 3, "emulated")
    plan = host.prepare(device, slots_of([0], spec.page_size), slots_of([1], spec.page_size), "load").plan()
    layers = [(layer,) for layer in spec.owned_layers]
    across = sum(piece.nbytes for layer in layers for piece in pieces(plan, layer, exact=False))
    assert loads_by_layer(host) == (across == spec.page_bytes)


@pytest.mark.parametrize(
    ("longest", "exact", "pieces"),
    [
        (100, True, [(0, 24), (32, 40), (64, 72)]),
        (100, False, [(0, 72)]),
        (40, False, [(0, 40), (64, 72)]),
        (24, False, [(0, 24), (32, 40), (64, 72)]),
    ],
)
def test_spans_become_pieces(longest: int, exact: bool, pieces: list[tuple[int, int]]) -> None:
    spans = np.array([[16, 24], [0, 8], [8, 16], [32, 40], [64, 72]])
    assert list(joined(spans, longest, exact)) == pieces


@pytest.mark.parametrize("layout", ["page_first", "page_first_direct", "page_head", "page_unified"])
@pytest.mark.parametrize("layers", [(0, 3), (1,), (3, 0, 2)])
def test_some_layers_of_a_pool_of_one_page_are_loaded(layout: str, layers: tuple[int, ...]) -> None:
    """The end of K lies next to the beginning of V: neighbours in memory, and no piece."""
    spec = presets.mha(layers=4, heads=2, head_dim=8, dtype=torch.bfloat16, page_size=4)
    host, at = HostPool(spec, layout, 1, "staged", platform="emulated"), (slots_of([0], 4), slots_of([2], 4))
    fill.fill_host(host)
    device, right = DevicePool(spec, 4), DevicePool(spec, 4)
    transfer = host.prepare(device, *at, "load")
    transfer.run(layers).wait()
    oracle.load(host, right, *at, layers)
    assert all(torch.equal(device.buffer(c, i), right.buffer(c, i)) for c in "kv" for i in range(4))
    begin_of_v = host.layer_view("v", 0).data_ptr()
    if layout != "page_unified":  # K and V of a page are one piece there
        assert not any(p.begin < begin_of_v < p.begin + p.nbytes for p in pieces(transfer.plan(), layers, exact=False))


def test_entries_of_pages_that_hold_one_are_loaded_through_the_smallest_buffer() -> None:
    """Value and scale of every layer lie in one piece: a copy for each page, of no more bytes than it has."""
    row = Component("row", torch.uint8, dim=9, unit="page", segments=(Segment(1, 8), Segment(1, 1)))
    spec = PoolSpec("s", 4, 16, (row,))
    host = HostPool(spec, "page_first", 9, "staged", platform="emulated", staging_pages=2)
    fill.fill_host(host)
    device, right = DevicePool(spec, 9), DevicePool(spec, 9)
    entries = torch.tensor([7, 0, 3]), torch.tensor([1, 8, 4])
    receipt = host.load_entries(device, *entries)
    receipt.wait()
    assert receipt.descriptors == 3, receipt
    oracle.load_entries(host, right, *(e.tolist() for e in entries))
    assert all(torch.equal(device.buffer("row", i), right.buffer("row", i)) for i in range(4))


# ---- registered memory that a device sees elsewhere


class Elsewhere:
    """What a device has of every registration lies at an address of its own, and is not what the host has there."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.chunks: dict[int, torch.Tensor] = {}

    def register(self, address: int, nbytes: int) -> None:
        room = torch.full((nbytes + 2 * (64 << 10),), fill.POISON, dtype=torch.uint8)  # to run into, not to crash
        self.chunks[address] = room[64 << 10 :][:nbytes]

    def unregister(self, address: int) -> None:
        del self.chunks[address]

    def device_address(self, address: int, device: str) -> int:
        for first, there in self.chunks.items():
            if first <= address < first + len(there):
                return there.data_ptr() + address - first
        raise ValueError(f"{address:#x} is not registered")

    def pairs(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        begin = self.tensor.data_ptr()
        return [(self.tensor[first - begin :][: len(there)], there) for first, there in self.chunks.items()]


class MemoryElsewhere(HostMemory):
    """Host memory whose own addresses a device must not use: it reads nonsense there, and what it writes is lost."""

    def __init__(self) -> None:
        super().__init__()
        self.registrars: list[Elsewhere] = []

    def map(self, nbytes: int) -> torch.Tensor:
        tensor = super().map(nbytes)
        self.registrar = Elsewhere(tensor)
        self.registrars.append(self.registrar)
        return tensor

    def give(self) -> None:
        """To the device."""
        for here, there in self._pairs():
            there.copy_(here)
            here.fill_(fill.POISON)

    def take(self) -> None:
        for here, there in self._pairs():
            here.copy_(there)

    def _pairs(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [pair for registrar in self.registrars for pair in registrar.pairs()]


@pytest.mark.parametrize("limit", [None, 32 << 10], ids=["one registration", "several"])
@pytest.mark.parametrize(
    ("layout", "backend", "direction"),
    [
        case
        for case in itertools.product(LAYOUTS, ("kernel", "direct", "staged"), DIRECTIONS)
        if support(SPEC, *case, "emulated")
    ],
)
def test_memory_that_a_device_sees_elsewhere(limit: int | None, layout: str, backend: str, direction: str) -> None:
    """In order, so that whatever can be one copy would be, were there no edge; and in disorder."""
    memory = MemoryElsewhere()
    pools = Pools(backend, layout, memory, limit)
    assert (len(pools.host.registrations) > len(memory.registrars)) == (limit is not None)
    for pages in (range(9), (4, 2, 7, 0, 5)):
        pools.fill(direction)
        memory.give()
        pools.move(direction, list(pages), sorted(pages)).wait()
        memory.take()
        assert same(pools.destination(direction), pools.expected(direction))


@both_ways
@pytest.mark.parametrize("backend", ["kernel", "staged"])
def test_a_wrong_list_leaves_memory_alone_that_a_device_sees_elsewhere(backend: str, direction: str) -> None:
    memory = MemoryElsewhere()
    pools = Pools(backend, memory=memory, limit=32 << 10)
    pools.fill(direction)
    memory.give()
    wrong = slots_of([1, 3, 8, 6, 9], 8)  # there is no page 9
    receipt = pools.host.prepare(pools.device, slots_of([4, 2, 7, 0, 5], 8), on_the_device(wrong), direction).run()
    with pytest.raises(ValueError, match="outside"):
        receipt.wait()
    emulated().synchronize()
    memory.take()
    assert same(pools.destination(direction), pools.expected(direction))


# ---- what is submitted


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Stream, int]]:
    """Stream and size of every batch of copies."""
    found: list[tuple[Stream, int]] = []
    copy = emulated().copy

    def told(stream: Stream, to: np.ndarray, source: np.ndarray, nbytes: np.ndarray, no_batches: str) -> str:
        found.append((stream, len(nbytes)))
        return copy(stream, to, source, nbytes, no_batches)

    monkeypatch.setattr(emulated(), "copy", told)
    return found


@both_ways
@pytest.mark.parametrize("backend", ["direct", "staged"])
def test_batches_are_short_and_never_on_the_legacy_default_stream(
    backend: str, direction: str, calls: list[tuple[Stream, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copy_engine, "BATCH", 3)
    pools = Pools(backend, "page_first_direct")
    pools.fill(direction)
    receipt = pools.move(direction, [4, 2, 7, 0, 5], [1, 3, 8, 6, 2])
    receipt.wait()
    assert same(pools.destination(direction), pools.expected(direction))
    assert sum(size for _, size in calls) == receipt.descriptors
    assert max(size for _, size in calls) == 3
    assert all(emulated().batchable(stream) for stream, _ in calls)


@pytest.mark.parametrize(("limit", "tables"), [(None, 2), (32 << 10, 4)], ids=["one registration", "several"])
def test_what_undoes_a_refused_backup_is_made_once_for_a_half(
    limit: int | None, tables: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And once more for another stream, to which the table of several registrations may not have come."""
    asked: list[object] = []

    def told(*arguments: Any) -> torch.Tensor | None:
        asked.append(arguments)
        return table_of(*arguments)

    monkeypatch.setattr(staging, "table_of", told)
    for seed in SEEDS:
        emulated().reseed(seed)
        asked.clear()
        memory = MemoryElsewhere()
        pools = Pools("staged", memory=memory, limit=limit)
        pools.fill("backup")
        memory.give()
        wrong = on_the_device(slots_of([1, 3, 8, 6, 9], 8), complete=True)  # there is no page 9
        receipts = []
        for stream in ("mine", "yours", "mine"):
            with emulated().on(stream):
                receipts.append(pools.host.backup(pools.device, slots_of([4, 2, 7, 0, 5], 8), wrong))
        for receipt in reversed(receipts):
            with pytest.raises(ValueError, match="outside"):
                receipt.wait()
        memory.take()
        assert same(pools.destination("backup"), pools.expected("backup"))
        assert len(asked) == tables


def test_a_stream_that_takes_batches_gets_them(calls: list[tuple[Stream, int]]) -> None:
    pools = Pools("direct")
    with emulated().on("mine"):
        pools.move("load", [4, 2], [1, 3]).wait()
    assert {stream for stream, _ in calls} == {"mine"}


@pytest.mark.parametrize(
    ("backend", "direction", "here", "there"),
    [
        ("direct", "backup", 0, 0),
        ("direct", "load", 0, 0),
        ("kernel", "backup", 2, 1),
        ("kernel", "load", 2, 1),
        ("staged", "backup", 1, 1),  # the host's list, by which a half is filled if the device's turns out wrong
        ("staged", "load", 1, 0),
    ],
)
def test_lists_are_sent_once_and_only_if_they_are_needed(backend: str, direction: str, here: int, there: int) -> None:
    """Uploads when both lists are on the host, and when the device's is on the device."""
    pools = Pools(backend)
    host, device = slots_of([4, 2], 8), slots_of([1, 3], 8)
    for indices, uploads in ((device, here), (on_the_device(device, complete=True), there)):
        transfer = pools.host.prepare(pools.device, host, indices, direction)
        runs = [transfer.run() for _ in range(2)]
        assert [receipt.index_uploads for receipt in runs] == [uploads, 0]
        runs[-1].wait()


@pytest.mark.parametrize(("backend", "uploads"), [("kernel", 4), ("staged", 2)])
def test_the_first_receipt_tells_what_was_sent_for_any_stream(backend: str, uploads: int) -> None:
    pools = Pools(backend)
    transfer = pools.host.prepare(pools.device, slots_of([4, 2], 8), slots_of([1, 3], 8), "load")
    with emulated().on("another"):
        receipt = transfer.run()
    receipt.wait()
    assert receipt.index_uploads == uploads
