"""Several devices in one host: every pool works on its own, ranks share the host's memory, and nothing crosses over.

Emulated devices do not advance unless they are waited for, so what went to the wrong one stays in its queue and is
seen. Tests marked `several_gpus` make the same claims with two GPUs, the first of which is the current one throughout.
"""

from __future__ import annotations

import itertools
import json
import mmap
import multiprocessing
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch

from kernels_cupy import calibrate
from kernels_cupy.runtimes import emulated, runtime
from kernels_cupy.specs import HASH
from refimpl import (
    Controller,
    DevicePool,
    Hooks,
    HostMemory,
    HostPool,
    PoolSpec,
    PoolTransfer,
    RankPool,
    Refusal,
    UnsupportedPairing,
    build_stack,
    devices,
    numa,
    oracle,
    presets,
    slots_of,
    support,
)
from refimpl.backends.protocol import Setup
from refimpl.operations import Operation
from refimpl.pinned import CudaRegistrar, Registrar
from refimpl.rank_pool import part
from verify import devices_record, fill, matrix, reported, sanitize

BYTE = torch.uint8
PAGE, PAGES, RANKS = 4, 6, 2
HOST, DEVICE = [4, 1, 3], [2, 5, 0]  # pages that move, in this order

# Pools with heads: as one host pool keeps them for all ranks.
SPECS: dict[str, Callable[[int], PoolSpec]] = {
    "mha": lambda groups: presets.mha(3, 4, 12, BYTE, PAGE, head_groups=groups),
    "asymmetric": lambda groups: presets.mha(3, 4, 12, BYTE, PAGE, v_head_dim=5, head_groups=groups),
    "quantised": lambda groups: replace(presets.mha_quantised(2, 4, 16, 3, PAGE), head_groups=groups),
}
GROUPS = {"page_unified": RANKS}
LAYOUTS = ("page_head", "page_unified", "layer_first", "page_first", "page_first_direct")
CPUS, EMULATED, GPUS = ("cpu", "cpu"), ("emulated:0", "emulated:1"), ("cuda:0", "cuda:1")
GPU_BACKENDS = ("direct", "kernel", "staged", "auto")

emulated_ways = pytest.mark.parametrize("backend", GPU_BACKENDS)
two_gpus = pytest.mark.several_gpus


@pytest.fixture(autouse=True)
def _nothing_is_queued() -> None:
    for number in range(RANKS):
        emulated(number).synchronize()


# ---- one host pool, a rank on each device


class Ranks:
    """A host pool with all heads, a rank of TP 2 on each device, and a reader of TP 1 on the first.

    only  the rank that this process is; it has no reader then
    """

    def __init__(
        self,
        pool: str,
        layout: str,
        backend: str,
        where: tuple[str, str],
        memory: HostMemory | None = None,
        only: int | None = None,
    ) -> None:
        self.spec = SPECS[pool](GROUPS.get(layout, 1))
        if memory is None and where == GPUS:
            memory = HostMemory(CudaRegistrar())
        all_heads = (backend, where[0]) if only is None else ("torch", "cpu")
        self.whole = HostPool(self.spec, layout, PAGES, all_heads[0], platform=all_heads[1], memory=memory)
        numbers = range(RANKS) if only is None else (only,)
        self.ranks = {rank: RankPool(self.whole, rank, RANKS, backend, where[rank]) for rank in numbers}
        self.devices = {rank: DevicePool(part(self.spec, RANKS), PAGES, where[rank]) for rank in numbers}
        if only is None:
            self.reader = DevicePool(self.spec, PAGES, where[0])

    def fill_ranks(self) -> None:
        """Words of a rank's rows name the place that they have in the pool with all heads."""
        for rank, device in self.devices.items():
            for name, layer in self.rows():
                rows = self.heads(self.content(name, layer), rank)
                buffer = device.buffer(name, layer)
                buffer.copy_(torch.from_numpy(rows.copy()).reshape(buffer.shape))
        synchronise(*self.devices.values())

    def rows(self) -> Iterator[tuple[str, int | None]]:
        yield from ((c.name, layer) for c in self.spec.components for layer in self.spec.layers_of(c))

    def content(self, name: str, layer: int | None) -> np.ndarray:
        return fill.layer_bytes(self.spec, PAGES, name, layer)

    def heads(self, rows: np.ndarray, rank: int) -> np.ndarray:
        """Those of a rank, of rows `[page, token, head, byte]`."""
        return np.array_split(rows, RANKS, axis=2)[rank]

    def move(self, direction: str, rank: int, host: list[int] = HOST, device: list[int] = DEVICE) -> None:
        pool = self.ranks[rank]
        move = pool.backup if direction == "backup" else pool.load_all
        move(self.devices[rank], slots_of(host, PAGE), slots_of(device, PAGE)).wait()


def synchronise(*pools: DevicePool) -> None:
    for pool in pools:
        if pool.device.type == "cuda":
            torch.cuda.synchronize(pool.device)


def ways(where: tuple[str, str], backends: tuple[str, ...]) -> list[Any]:
    """Pools with heads × layouts × backends, as far as the support table allows them."""
    return [
        pytest.param(pool, layout, backend, where, id=f"{pool}-{layout}-{backend}-{where[1]}")
        for pool in SPECS
        for layout in LAYOUTS
        for backend in backends
        if not isinstance(support(SPECS[pool](GROUPS.get(layout, 1)), layout, backend, "load", where[0]), Refusal)
    ]


with_two_ranks = pytest.mark.parametrize(
    ("pool", "layout", "backend", "where"),
    [
        *ways(CPUS, ("torch", "numba")),
        *(pytest.param(*way.values, id=way.id, marks=pytest.mark.emulated) for way in ways(EMULATED, GPU_BACKENDS)),
        *(pytest.param(*way.values, id=way.id, marks=two_gpus) for way in ways(GPUS, ("torch", *GPU_BACKENDS))),
    ],
)


@with_two_ranks
def test_a_reader_with_all_heads_finds_what_two_ranks_wrote(
    pool: str, layout: str, backend: str, where: tuple[str, str]
) -> None:
    """Each rank writes its heads and nothing else: the other's are poison until it has written them."""
    tp = Ranks(pool, layout, backend, where)
    tp.fill_ranks()
    reported.poison(tp.whole)
    written: list[int] = []
    for rank in (1, 0):
        tp.move("backup", rank)
        written.append(rank)
        for name, layer in tp.rows():
            held, right = fill.host_image(tp.whole, name, layer), tp.content(name, layer)
            expected = np.full_like(held, fill.POISON)
            for done in written:
                tp.heads(expected, done)[HOST] = tp.heads(right, done)[DEVICE]
            assert np.array_equal(held, expected), f"{name} of layer {layer} after ranks {written}"
    tp.whole.load_all(tp.reader, slots_of(HOST, PAGE), slots_of(DEVICE, PAGE)).wait()
    for name, layer in tp.rows():
        assert np.array_equal(fill.device_image(tp.reader, name, layer)[DEVICE], tp.content(name, layer)[DEVICE])


@with_two_ranks
def test_two_ranks_find_what_a_writer_with_all_heads_wrote(
    pool: str, layout: str, backend: str, where: tuple[str, str]
) -> None:
    tp = Ranks(pool, layout, backend, where)
    fill.fill_device(tp.reader)
    synchronise(tp.reader)
    tp.whole.backup(tp.reader, slots_of(HOST, PAGE), slots_of(DEVICE, PAGE)).wait()
    for rank, device in tp.devices.items():
        tp.move("load", rank)
        for name, layer in tp.rows():
            expected = np.zeros_like(tp.heads(tp.content(name, layer), rank))
            expected[DEVICE] = tp.heads(tp.content(name, layer), rank)[DEVICE]
            assert np.array_equal(fill.device_image(device, name, layer), expected), f"rank {rank}, {name}, {layer}"


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_a_rank_stores_the_pool_that_a_model_with_as_many_ranks_has(groups: int) -> None:
    whole = presets.mha(3, 8, 64, page_size=16, head_groups=groups)
    assert part(whole, 2) == presets.mha(3, 4, 64, page_size=16, head_groups=max(groups // 2, 1))


@pytest.mark.parametrize(
    ("spec", "ranks", "reason"),
    [
        (presets.mla(2, 64), 2, "latent has no heads, every rank stores all of it"),
        (presets.mha(2, 3, 64), 2, "the heads of k, v cannot be shared out between 2 ranks"),
        (presets.mha(2, 6, 64, head_groups=3), 2, "3 groups of heads cannot be shared out between 2 ranks"),
        (presets.mha(2, 4, 64), 1, "shared by two ranks or more, got 1"),
        (presets.mha(2, 4, 64), "2", "shared by two ranks or more, got '2'"),
        (presets.mha(2, 4, 64), 2.0, "shared by two ranks or more, got 2.0"),
    ],
)
def test_heads_that_cannot_be_shared_out_are_refused(spec: PoolSpec, ranks: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        RankPool(HostPool(spec, "page_first", 2), 0, ranks)


@pytest.mark.emulated
@pytest.mark.parametrize("layout", ["page_first", "page_first_direct", "page_head", "page_unified"])
def test_a_rank_loads_through_the_smallest_buffer_of_its_own_pages(layout: str) -> None:
    """Between its heads lie those of others, for which there is no room."""
    spec = presets.mha(layers=2, heads=4, head_dim=8, page_size=4)
    with HostPool(spec, layout, 2, "staged", platform="emulated", staging_pages=2) as whole:
        fill.fill_host(whole)
        reader = DevicePool(spec, 2)
        oracle.load(whole, reader, slots_of([0, 1], 4), slots_of([1, 0], 4))
        for rank in range(2):
            own = RankPool(whole, rank, 2)
            device = DevicePool(own.spec, 2)
            own.load_all(device, slots_of([0, 1], 4), slots_of([1, 0], 4)).wait()
            for name, layer in itertools.product("kv", range(2)):
                heads = reader.buffer(name, layer)[:, 2 * rank : 2 * rank + 2]
                assert torch.equal(device.buffer(name, layer), heads), f"{name} of layer {layer}, rank {rank}"


def test_ranks_share_the_slots_of_the_whole_pool_and_its_end() -> None:
    tp = Ranks("mha", "page_head", "torch", CPUS)
    slots = tp.ranks[0].alloc(2 * PAGE)
    assert slots is not None
    assert tp.whole.available_size() == tp.ranks[1].available_size() == (PAGES - 2) * PAGE
    assert tp.ranks[1].free(slots) == 2 * PAGE
    for rank in 2, -1, 0.5, True, "0":
        with pytest.raises(ValueError, match=f"there is no rank {rank!r} of 2"):
            RankPool(tp.whole, rank, RANKS)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="ranks share a HostPool, got None"):
        RankPool(None, 0, RANKS)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"get_split_heads_page_buffer_meta\(\) tells it rank by rank"):
        tp.ranks[0].get_page_buffer_meta(slots_of([0], PAGE))
    with pytest.raises(ValueError, match=r"get_split_heads_page_buffer_meta\(\) tells it rank by rank"):
        _ = tp.ranks[0].kv_buffer
    tp.whole.close()
    with pytest.raises(ValueError, match="is closed"):
        tp.move("backup", 0)
    with pytest.raises(ValueError, match="is closed"):
        tp.ranks[0].page(0)


@pytest.mark.emulated
@emulated_ways
def test_the_whole_pool_waits_for_its_ranks_before_it_lets_go_of_memory(backend: str) -> None:
    tp = Ranks("mha", "page_head", backend, EMULATED)
    tp.fill_ranks()
    receipts = [
        pool.backup(device, slots_of(HOST, PAGE), slots_of(DEVICE, PAGE))
        for pool, device in zip(tp.ranks.values(), tp.devices.values(), strict=True)
    ]
    tp.whole.close()
    assert all(receipt.event and receipt.event.query() for receipt in receipts)


@pytest.mark.emulated
@emulated_ways
def test_a_rank_that_is_shared_out_again_is_waited_for_too(backend: str) -> None:
    spec = presets.mha(2, 4, 8, BYTE, PAGE)
    whole = HostPool(spec, "page_head", PAGES, backend, platform="emulated:0")
    half = RankPool(whole, 0, 2, platform="emulated:1")
    quarter = RankPool(half, 1, 2, platform="emulated:2")
    device = DevicePool(quarter.spec, PAGES, "emulated:2")
    fill.fill_device(device)
    receipt = quarter.backup(device, slots_of(HOST, PAGE), slots_of(DEVICE, PAGE))
    whole.close()
    assert receipt.event
    assert receipt.event.query()


@pytest.mark.emulated
def test_a_rank_over_memory_that_is_not_pinned_says_so() -> None:
    """On a GPU a rank finds that out while it is made, and is closed then."""

    class OnAGpu(RankPool):
        def _acquire(self, setup: Setup, memory: HostMemory | None, registration_limit: int | None) -> None:
            super()._acquire(setup, memory, registration_limit)
            self._require_pinned()

    whole = HostPool(presets.mha(2, 4, 8, BYTE, PAGE), "page_head", PAGES, "kernel", platform="emulated")
    with pytest.raises(ValueError, match="backend 'kernel' needs pinned memory on a GPU"):
        OnAGpu(whole, 0, 2)
    assert not whole.closed


def test_ranks_that_have_ended_are_forgotten() -> None:
    whole = HostPool(presets.mha(2, 4, 8, BYTE, PAGE), "page_head", PAGES, "torch")
    lasting = RankPool(whole, 0, 2)
    before = [len(block._first) for block in whole._memory()]
    for _ in range(3):
        ended = RankPool(whole, 1, 2)
        ended.close()
        ended.close()
    assert [len(block._first) for block in whole._memory()] == before
    assert not lasting.closed


# ---- nothing crosses over


def one(device: str, backend: str, layout: str = "page_first", pages: int = PAGES) -> tuple[HostPool, DevicePool]:
    """Pools of one device, filled."""
    spec = presets.mha(3, 2, 12, BYTE, PAGE)
    host, pool = (
        HostPool(spec, layout, pages, backend, platform=device, staging_pages=4),
        DevicePool(spec, pages, device),
    )
    fill.fill_device(pool)
    synchronise(pool)
    return host, pool


def require_saved(host: HostPool, device: DevicePool, host_pages: list[int], device_pages: list[int]) -> None:
    for c in host.spec.components:
        for layer in host.spec.layers_of(c):
            right = fill.layer_bytes(host.spec, device.num_pages, c.name, layer)[device_pages]
            assert np.array_equal(fill.host_image(host, c.name, layer)[host_pages], right), f"{c.name} of layer {layer}"


@pytest.mark.emulated
@pytest.mark.parametrize("lists", ["on the host", "on the device"])
@emulated_ways
def test_a_transfer_uses_streams_and_memory_of_its_own_device(backend: str, lists: str) -> None:
    """Each device has a caller's stream of its own, as torch has one for each GPU."""
    first, second = emulated(0), emulated(1)
    host, device = one("emulated:1", backend)
    places = slots_of(HOST, PAGE), slots_of(DEVICE, PAGE)
    with first.on("of the first"), second.on("of the second"):
        if lists == "on the device" and backend != "direct":  # which reads them back, and waits for that
            places = places[0], second.upload(places[1].numpy()).view(torch.int64)
        open_gate = second.gate(second.current())
        receipt = host.backup(device, *places)
        assert receipt.event is not None
        second.advance(1000)
        assert not receipt.event.query(), "it begins where the caller's stream has come to"
        open_gate()
        receipt.wait()
        host.load_all(device, *places).wait()
    require_saved(host, device, HOST, DEVICE)
    host.close()
    assert first.advance() == 0, "something went to the other device"


@pytest.mark.emulated
def test_a_staging_buffer_lies_on_the_pools_device() -> None:
    (host, _), (other, _) = one("emulated:1", "staged"), one("emulated:0", "staged")
    for number, pool in ((1, host), (0, other)):
        buffer = pool._mover._buffer  # pyright: ignore[reportAttributeAccessIssue]
        assert emulated(number).holds(buffer)
        with pytest.raises(ValueError, match=rf"lies on emulated:{number}, the pools on emulated:{1 - number}"):
            emulated(1 - number).holds(buffer)


@pytest.mark.emulated
@emulated_ways
def test_waiting_for_one_device_leaves_the_other_alone(backend: str) -> None:
    pairs = [one(device, backend) for device in EMULATED]
    receipts = [host.backup(device, slots_of(HOST, PAGE), slots_of(DEVICE, PAGE)) for host, device in pairs]
    receipts[1].wait()
    require_saved(*pairs[1], HOST, DEVICE)
    assert receipts[0].event is not None
    assert not receipts[0].event.query()
    receipts[0].wait()
    require_saved(*pairs[0], HOST, DEVICE)


@pytest.mark.emulated
@emulated_ways
def test_a_device_pool_of_another_device_is_refused(backend: str) -> None:
    host, _ = one("emulated:1", backend)
    with pytest.raises(
        ValueError, match=r"lies on emulated:0, .* made for emulated:1; make one for it with platform='emulated:0'"
    ):
        host.backup(one("emulated:0", backend)[1], slots_of(HOST, PAGE), slots_of(DEVICE, PAGE))


@pytest.mark.emulated
@emulated_ways
def test_a_list_on_another_device_is_refused(backend: str) -> None:
    host, device = one("emulated:1", backend)
    elsewhere = emulated(0).upload(slots_of(DEVICE, PAGE).numpy()).view(torch.int64)
    with pytest.raises(ValueError, match="an index list lies on emulated:0, the pools on emulated:1"):
        host.backup(device, slots_of(HOST, PAGE), elsewhere)


@pytest.mark.emulated
def test_a_controller_refuses_a_list_on_another_device_and_keeps_no_slots() -> None:
    specs = {"kv": presets.mha(3, 2, 12, BYTE, PAGE)}
    elsewhere = emulated(0).upload(slots_of(DEVICE, PAGE).numpy()).view(torch.int64)
    with build_stack(specs, "page_first", "kernel", platform="emulated:1", device_pages=PAGES, host_ratio=1.0) as stack:
        free = stack.host.pools["kv"].available_size()
        with pytest.raises(ValueError, match="an index list lies on emulated:0, the pools on emulated:1"):
            Controller(stack).write("elsewhere", [PoolTransfer("kv", None, elsewhere)])
        assert stack.host.pools["kv"].available_size() == free


@pytest.mark.emulated
def test_a_calibration_measures_the_device_that_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    few = {name: replace(p, sizes=p.sizes[:2], payload=1 << 14, most=4) for name, p in calibrate.PROBES.items()}
    monkeypatch.setattr(calibrate, "PROBES", few)
    assert set(calibrate.measure("emulated:1")["backends"]) == set(few)
    assert emulated(0).advance() == 0, "something went to the other device"


@pytest.mark.emulated
def test_a_stack_and_its_controller_belong_to_one_device() -> None:
    specs = {"kv": presets.mha(3, 2, 12, BYTE, PAGE)}
    sizes: dict[str, Any] = {"device_pages": PAGES, "host_ratio": 1.0}
    with build_stack(specs, "page_first", "kernel", platform="emulated:1", **sizes) as stack:
        assert (stack.platform, stack.device["kv"].platform) == ("emulated:1", "emulated:1")
        saved_and_loaded(Controller(stack))
        wrapped: dict[str, Any] = {"device": stack.device, "host_ratio": 1.0}
        with build_stack(specs, "page_first", "kernel", **wrapped) as own:
            assert own.platform == "emulated:1", "where the pools lie that it was given"
        with pytest.raises(ValueError, match="'kv' lies on emulated:1, platform 'emulated:0' does not reach there"):
            build_stack(specs, "page_first", "kernel", platform="emulated", **wrapped)
    assert emulated(0).advance() == 0, "something went to the other device"


def saved_and_loaded(controller: Controller) -> None:
    """A page there and back, layer by layer."""
    fill.fill_device(controller.stack.device["kv"])
    synchronise(*controller.stack.device.values())
    saved = a_backup(controller)
    controller.start_writing()
    loaded = controller.load("loaded", [PoolTransfer("kv", saved.host_indices("kv"))])
    assert loaded is not None
    controller.set_consumer(controller.start_loading())
    for layer in range(3):
        controller.wait_until(layer)
    assert [ack.error for ack in controller.acknowledge(wait=True)] == [None, None]
    source, destination = (int(o.device_indices("kv")[0]) // PAGE for o in (saved, loaded))  # pyright: ignore[reportOptionalSubscript, reportIndexIssue]
    assert source != destination
    for name, layer in (("k", 0), ("v", 2)):
        rows = fill.device_image(controller.stack.device["kv"], name, layer)
        assert np.array_equal(rows[destination], rows[source]), f"{name} of layer {layer}"


def a_backup(controller: Controller) -> Operation:
    """Of one page, queued."""
    saved = controller.write("saved", [PoolTransfer("kv", None, controller.stack.device_slots["kv"].alloc(PAGE))])
    assert saved is not None
    return saved


@pytest.mark.emulated
def test_what_fails_on_one_device_leaves_the_others_work_alone() -> None:
    """A step that raises and a list that the device refuses on the first, a whole round on the second meanwhile."""
    specs, hooks = {"kv": presets.mha(3, 2, 12, BYTE, PAGE)}, Hooks()
    stacks = [
        build_stack(specs, "page_first", "staged", platform=device, device_pages=PAGES, host_ratio=1.0)
        for device in EMULATED
    ]
    failing = Controller(stacks[0], hooks)
    hooks.fail("backup copy", RuntimeError("the copy engine is out of order"))
    a_backup(failing)
    failing.start_writing()
    saved_and_loaded(Controller(stacks[1]))
    assert [str(ack.error) for ack in failing.acknowledge(wait=True)] == ["the copy engine is out of order"]
    broken = emulated(0).upload(np.arange(1, 1 + PAGE)).view(torch.int64)
    refused = stacks[0].host.pools["kv"].backup(stacks[0].device["kv"], slots_of([1], PAGE), broken)
    saved_and_loaded(Controller(stacks[1]))
    with pytest.raises(ValueError, match="index 1 begins a page but is no multiple"):
        refused.wait()
    for stack in stacks:
        stack.close()


class AliasesPerDevice:
    """Each device finds the host's memory somewhere else (upstream issue 40232)."""

    def __init__(self) -> None:
        self.begin = 0
        self.there: dict[str, np.ndarray] = {}

    def register(self, address: int, nbytes: int) -> None:
        self.begin = address
        self.there = {device: np.full(nbytes, fill.POISON, np.uint8) for device in EMULATED}

    def unregister(self, address: int) -> None:
        pass

    def device_address(self, address: int, device: str) -> int:
        return self.there[device].ctypes.data + address - self.begin


@pytest.mark.emulated
@emulated_ways
@pytest.mark.parametrize("rank", [0, 1])
def test_each_device_reaches_host_memory_at_the_address_that_it_has_there(rank: int, backend: str) -> None:
    aliases = AliasesPerDevice()
    registrar: Registrar = aliases
    tp = Ranks("mha", "page_head", backend, EMULATED, HostMemory(registrar))
    tp.fill_ranks()
    tp.move("backup", rank)
    untouched = {device: bool((memory == fill.POISON).all()) for device, memory in aliases.there.items()}
    assert untouched == {device: at != rank for at, device in enumerate(EMULATED)}
    pointers = tp.ranks[rank].device_ptrs["k"].tolist()
    assert all(0 <= p - aliases.there[EMULATED[rank]].ctypes.data < tp.whole.nbytes for p in pointers)


@pytest.mark.parametrize("backend", ["torch", "kernel"])
def test_a_gpu_that_is_not_there_is_refused(backend: str) -> None:
    """Before memory is taken, and whatever the backend."""
    missing = r"there is no cuda:99: the last GPU here is cuda:|a CUDA device is needed, and there is none"
    with pytest.raises(UnsupportedPairing, match=missing):
        HostPool(presets.mha(1, 2, 8, BYTE, PAGE), "page_first", 2, backend, platform="cuda:99")


@pytest.mark.emulated
def test_a_name_without_a_number_is_settled_when_a_pool_is_made() -> None:
    host, device = one("emulated", "kernel")
    assert (host.platform, device.platform, device.device) == ("emulated:0", "emulated:0", torch.device("cpu"))
    host.backup(device, slots_of(HOST, PAGE), slots_of(DEVICE, PAGE)).wait()
    require_saved(host, device, HOST, DEVICE)


@pytest.mark.parametrize("name", ["cuda:x", "cuda1", "emulated:", "emulated:01", f"emulated:{10**20}", "cpu:x", ""])
def test_a_name_that_names_no_device_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="names no device: write 'cuda:1' for the second GPU"):
        devices.settled(name)


@pytest.mark.parametrize("device", [5, None, b"cuda"])
def test_a_device_is_named_by_text(device: Any) -> None:
    with pytest.raises(ValueError, match=f"{device!r} names no device"):
        devices.platform_of(device)
    if device is not None:
        with pytest.raises(ValueError, match=f"{device!r} names no device"):
            HostPool(presets.mha(1, 2, 8, BYTE, PAGE), "page_first", 2, platform=device)


# ---- two at once


def rounds_of(rank: int, tp: Ranks, turns: int = 8) -> None:
    """There and back on other pages at every turn, which are this rank's alone, but for the page with the result."""
    random = np.random.default_rng(rank)
    tp.move("backup", rank, [0], [0])
    for _ in range(turns):
        host, device = (random.permutation(np.arange(1, PAGES))[:2].tolist() for _ in range(2))
        tp.move("load", rank, [0], [device[0]])
        tp.move("backup", rank, host, [device[0], 0])
        tp.move("load", rank, [host[0]], [0])
        tp.move("backup", rank, [0], [0])


def require_page_0(tp: Ranks, ranks: list[int]) -> None:
    """The heads of ranks, however often they were moved."""
    for name, layer in tp.rows():
        held, right = fill.host_image(tp.whole, name, layer), tp.content(name, layer)
        for rank in ranks:
            assert np.array_equal(tp.heads(held, rank)[0], tp.heads(right, rank)[0]), f"rank {rank}, {name}, {layer}"


both_kinds = pytest.mark.parametrize(
    "where",
    [pytest.param(EMULATED, marks=pytest.mark.emulated), pytest.param(GPUS, marks=two_gpus)],
    ids=["emulated", "gpus"],
)
every_backend = pytest.mark.parametrize("backend", GPU_BACKENDS)


@both_kinds
@every_backend
@pytest.mark.parametrize("layout", ["page_head", "page_unified"])
def test_two_threads_of_one_process_each_work_on_their_device(
    layout: str, backend: str, where: tuple[str, str]
) -> None:
    tp = Ranks("mha", layout, backend, where)
    tp.fill_ranks()
    failures: list[BaseException] = []

    def work(rank: int) -> None:
        try:
            rounds_of(rank, tp)
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not failures
    require_page_0(tp, [0, 1])


def rounded(nbytes: int) -> int:
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


class Shared(HostMemory):
    """Memory that other processes map as well: a file that lies in memory. Pools take theirs one after another."""

    def __init__(self, path: str, registrar: Registrar | None) -> None:
        super().__init__(registrar)
        with open(path, "r+b") as file:
            self._whole = mmap.mmap(file.fileno(), 0)
        self._used = 0

    def map(self, nbytes: int) -> torch.Tensor:
        """On pages of its own: no page can be registered twice."""
        begin, self._used = self._used, self._used + rounded(nbytes)
        return torch.frombuffer(self._whole, dtype=torch.uint8, count=nbytes, offset=begin)


IN_ONE_MEMORY = [(layout, backend) for layout in ("page_head", "page_unified") for backend in GPU_BACKENDS]


def rank_of(path: str, where: tuple[str, str], rank: int, fails: bool) -> None:
    """A process of its own: its heads of pools that lie in a file. One that `fails` ends in an error."""
    memory = Shared(path, CudaRegistrar(where[rank]) if where == GPUS else None)
    for layout, backend in IN_ONE_MEMORY:
        tp = Ranks("mha", layout, backend, where, memory, only=rank)
        tp.fill_ranks()
        rounds_of(rank, tp)
        if fails:
            tp.move("backup", rank, [0], [PAGES])


@both_kinds
@pytest.mark.parametrize("fails", [False, True], ids=["both work", "one fails"])
def test_two_processes_work_on_one_memory(fails: bool, where: tuple[str, str]) -> None:
    """Each maps and registers it. When the second ends in an error, the first one's bytes are right nevertheless."""
    spawn = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
    nbytes = sum(rounded(PAGES * SPECS["mha"](GROUPS.get(layout, 1)).page_bytes) for layout, _ in IN_ONE_MEMORY)
    with tempfile.NamedTemporaryFile(dir="/dev/shm") as file:
        file.truncate(nbytes)
        given = [(file.name, where, rank, fails and rank == 1) for rank in range(RANKS)]
        processes = [spawn.Process(target=rank_of, args=arguments) for arguments in given]
        for process in processes:
            process.start()
        for process in processes:
            process.join(240)
        assert [process.exitcode for process in processes] == [0, int(fails)]
        memory = Shared(file.name, None)
        for at, (layout, _) in enumerate(IN_ONE_MEMORY):
            whole = Ranks("mha", layout, "torch", CPUS, memory)
            require_page_0(whole, [0, 1] if not fails or at == 0 else [0])


# ---- the matrix on the second GPU


@two_gpus
@pytest.mark.parametrize("cell", [replace(cell, platform="cuda:1") for cell in sanitize.cells("cuda")], ids=str)
def test_every_pool_moves_exactly_the_right_bytes_on_the_second_gpu(cell: matrix.Cell) -> None:
    assert torch.cuda.current_device() == 0
    matrix.run(cell)
    assert torch.cuda.current_device() == 0, "the current GPU is the caller's"


@pytest.mark.emulated
@pytest.mark.parametrize(
    "cell",
    [replace(cell, platform="emulated:1") for cell in sanitize.cells("emulated") if cell.pool in ("mha", "v4_paged")],
    ids=str,
)
def test_every_path_moves_exactly_the_right_bytes_on_the_second_emulated_device(cell: matrix.Cell) -> None:
    matrix.run(cell)
    assert emulated(0).advance() == 0, "something went to the other device"


HELD_S = 0.5  # longer than anything here takes once it has been done before


@two_gpus
@every_backend
def test_a_pool_on_the_second_gpu_needs_nothing_of_the_first(backend: str) -> None:
    """The caller's stream of the first is held meanwhile, and no memory of it is taken, also for lists on the GPU."""
    host, device = one("cuda:1", backend)
    places = slots_of(HOST, PAGE), slots_of(DEVICE, PAGE)
    on_gpu = places[0], places[1] if backend == "direct" else places[1].to("cuda:1")
    host.backup(device, *on_gpu).wait()  # kernels are compiled
    before, port = torch.cuda.memory_allocated(0), runtime("cuda:0")
    port.delay(port.current(), HELD_S)
    free = port.record(port.current())
    host.backup(device, *places).wait()
    host.load_all(device, *on_gpu).wait()
    assert not free.query(), "the transfers have waited for the first GPU"
    free.synchronize()
    require_saved(host, device, HOST, DEVICE)
    assert torch.cuda.memory_allocated(0) == before
    assert torch.cuda.current_device() == 0


@two_gpus
@every_backend
def test_a_transfer_is_ordered_by_the_current_stream_of_its_own_gpu(backend: str) -> None:
    """Which is the second's, whichever GPU is current: what is queued there before it is what it copies."""
    host, device = one("cuda:1", backend)
    places = slots_of(HOST, PAGE), slots_of(DEVICE, PAGE)
    host.backup(device, *places).wait()
    stream, port = torch.cuda.Stream(1), runtime("cuda:1")
    with torch.cuda.stream(stream), torch.cuda.device(0):
        port.delay(stream, HELD_S)
        device.buffer("k", 0).fill_(7)
        receipt = host.backup(device, *places)
        assert receipt.event is not None
        assert not receipt.event.query(), "it has not waited for the stream"
    receipt.wait()
    assert (fill.host_image(host, "k", 0)[HOST] == 7).all()


@two_gpus
@every_backend
def test_what_lies_on_the_first_gpu_is_refused_by_a_pool_of_the_second(backend: str) -> None:
    host, device = one("cuda:1", backend)
    there, here = slots_of(HOST, PAGE), slots_of(DEVICE, PAGE)
    with pytest.raises(ValueError, match="the device pool lies on cuda:0, the host pool was made for cuda:1"):
        host.backup(one("cuda:0", backend)[1], there, here)
    with pytest.raises(ValueError, match="an index list lies on cuda:0, the pools on cuda:1"):
        host.backup(device, there, here.to("cuda:0"))


@two_gpus
@every_backend
def test_a_controller_works_on_the_second_gpu(backend: str) -> None:
    specs = {"kv": presets.mha(3, 2, 12, BYTE, PAGE)}
    with build_stack(specs, "page_first", backend, platform="cuda:1", device_pages=PAGES, host_ratio=1.0) as stack:
        saved_and_loaded(Controller(stack))
    assert torch.cuda.current_device() == 0


# ---- memory of a NUMA node

needs_numa = pytest.mark.skipif(not numa.nodes() or not Path("/proc/self/numa_maps").exists(), reason="no NUMA here")


@needs_numa
def test_memory_lies_on_the_node_that_was_chosen() -> None:
    node = numa.nodes()[-1]
    host = HostPool(presets.mha(4, 2, 64, BYTE, 64), "page_first", 64, memory=HostMemory(numa_node=node))
    assert isinstance(host.kv_buffer, torch.Tensor)
    host.kv_buffer.fill_(1)
    address = f"{host.kv_buffer.data_ptr():x}"
    (line,) = [line for line in Path("/proc/self/numa_maps").read_text().splitlines() if line.startswith(address)]
    assert f" bind:{node} " in line
    placed = [word for word in line.split() if word.startswith("N")]
    assert [word.split("=")[0] for word in placed] == [f"N{node}"], f"pages lie elsewhere: {line}"


def test_a_node_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match=r"numa_node=99: there is no such node here, only .*; numa_node=None leaves"):
        HostMemory(numa_node=99)


@pytest.mark.parametrize(("text", "node"), [("1\n", 1), ("0\n", 0), ("-1\n", None), (None, None)])
def test_the_node_of_a_pci_device_is_what_the_system_says(
    text: str | None, node: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if text is not None:
        (tmp_path / "0000:1b:00.0").mkdir()
        (tmp_path / "0000:1b:00.0" / "numa_node").write_text(text)
    monkeypatch.setattr(numa, "PCI_DEVICES", tmp_path)
    assert numa.node_of("0000:1B:00.0") == node


@two_gpus
@pytest.mark.parametrize("number", range(RANKS))
def test_the_node_of_a_gpu_can_be_asked_for_and_used(number: int) -> None:
    node = numa.nearest(f"cuda:{number}")
    assert node is None or node in numa.nodes()
    memory = HostMemory(CudaRegistrar(f"cuda:{number}"), numa_node=node)
    spec = presets.mha(3, 2, 12, BYTE, PAGE)
    with HostPool(spec, "page_first", PAGES, "kernel", platform=f"cuda:{number}", memory=memory) as host:
        device = DevicePool(spec, PAGES, f"cuda:{number}")
        fill.fill_device(device)
        synchronise(device)
        host.backup(device, slots_of(HOST, PAGE), slots_of(DEVICE, PAGE)).wait()
        require_saved(host, device, HOST, DEVICE)


# ---- what is on record

RECORDS = sorted((devices_record.ROOT / "data" / "results").glob("*/devices.json"))
AGAIN = "run `make verify-gpus` on a machine with several GPUs and commit data/results/<device>-x2/devices.json"


def test_there_is_a_record() -> None:
    assert RECORDS, f"nothing on record: {AGAIN}"


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.parent.name)
def test_a_record_is_whole_clean_and_about_the_code_as_it_is(path: Path) -> None:
    record = json.loads(path.read_text(encoding="utf-8"))
    jsonschema.validate(record, json.loads(devices_record.SCHEMA.read_text(encoding="utf-8")))
    assert record["kernels"] == HASH, f"the kernels have changed since: {AGAIN}"
    assert record["provenance"]["commit"], f"of no commit: {AGAIN}"
    assert record["provenance"]["dirty"] is False, f"something was not committed: {AGAIN}"
    assert record["failures"] == []
    assert (record["outcomes"]["failed"], record["outcomes"]["skipped"]) == (0, 0), AGAIN


def test_a_record_without_several_gpus_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.device_count() > 1:
        pytest.skip("there are several")
    assert devices_record.main(["--out", str(tmp_path / "devices.json")]) == 2
    assert "two GPUs are needed at least" in capsys.readouterr().err


def test_the_tests_that_are_recorded_are_these() -> None:
    assert Path(__file__).relative_to(devices_record.ROOT).as_posix() == devices_record.FILE
    assert two_gpus.name == devices_record.MARKER
