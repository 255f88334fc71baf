"""Inputs of publicly reported faults at the level of stacks and controllers, each with the right answer known before.

What one pool does about them is in `test_reported_faults.py`, what a tree does (B23) in `test_radix.py`, and what
order does (B24, and B27 while it is under way) in `conformance`; sizes (B28) are in `test_assembler.py`.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from refimpl import Component, HostPool, PoolSpec, UnsupportedPairing, presets
from refimpl.assembler import Stack, build_stack
from refimpl.controller import Controller
from refimpl.pool_group import PoolTransfer
from refimpl.windows import Window
from verify.guarded import shared_arena
from verify.reported import (
    INDEX,
    LAYOUTS,
    POISON,
    K,
    V,
    crc,
    fill,
    fill_host,
    layer_crc,
    poison,
    raw,
    slots,
)
from verify.toys import STACKS

BF16, BYTE = torch.bfloat16, torch.uint8
DRAFT, STATE = 4, 7  # kinds of rows

WAYS = [("cpu", "torch"), ("cpu", "numba"), *(("emulated", b) for b in ("kernel", "direct", "staged", "auto"))]
every_way = pytest.mark.parametrize(("platform", "backend"), WAYS)
# With `staged` there is nothing to gain where a page is scattered, and the pair is refused.
LAYOUT_WAYS = [("lf", *way) for way in WAYS if way[1] != "staged"] + [("pf", *way) for way in WAYS]
every_layout = pytest.mark.parametrize(("layout", "platform", "backend"), LAYOUT_WAYS)


class Rig:
    """A stack full of poison whose slots are all taken, but for the padding on the device, and a controller."""

    def __init__(
        self,
        specs: Mapping[str, PoolSpec],
        layout: str = "pf",
        platform: str = "cpu",
        backend: str = "torch",
        device_pages: int = 6,
        host_ratio: float = 1.0,
        take: bool = True,
    ) -> None:
        arena = shared_arena() if platform == "cuda" else None
        self.stack: Stack = build_stack(
            specs,
            LAYOUTS[layout],
            backend,
            device_pages=device_pages,
            host_ratio=host_ratio,
            platform=platform,
            memory=arena,
        )
        self.controller = Controller(self.stack)
        for name in specs:
            poison(self.host(name))
            poison(self.stack.device[name])
        for name in self.stack.device_slots if take else ():
            for allocator in (self.stack.device_slots[name], self.host(name)):
                assert allocator.alloc(allocator.available_size()) is not None

    def host(self, name: str = "kv") -> HostPool:
        return self.stack.host.pools[name]

    def write(self, *transfers: PoolTransfer) -> None:
        assert self.controller.write("a backup", transfers)
        assert self.controller.start_writing() == 1
        self.ended("a backup")

    def load(self, *transfers: PoolTransfer) -> None:
        assert self.controller.load("a load", transfers)
        assert self.controller.start_loading() is not None
        self.ended("a load")

    def ended(self, tag: str) -> None:
        (ack,) = self.controller.acknowledge(wait=True)
        assert (ack.tag, ack.error) == (tag, None)

    def untouched(self) -> bool:
        """Nothing but poison anywhere, and nothing locked."""
        tensors = [t for pool in self.stack.host.pools.values() for _, held in pool.storage for t in held]
        for device in self.stack.device.values():
            tensors += [device.buffer(c.name, i) for c in device.spec.components for i in device.spec.layers_of(c)]
        return all((raw(tensor) == POISON).all() for tensor in tensors) and not self.locked()

    def locked(self) -> bool:
        owners = self.stack.device_slots
        allocators = [*owners.values(), *(self.host(name).allocator for name in owners)]
        return any(bool(allocator.locks.any()) for allocator in allocators)


# ---- B01  The first write-back is handed indices of another device or type

B01 = {"kv": presets.mha(4, 2, 64, BF16, 16), "indexer": presets.dsa_indexer(4, 128, 128, 16)}
B01_KINDS = {"kv": {"k": K, "v": V}, "indexer": {"index_k": INDEX}}


def first_write_back(rig: Rig, host: torch.Tensor, device: torch.Tensor) -> None:
    """One operation for anchor and sidecar, one choice of lists for both."""
    for name, kinds in B01_KINDS.items():
        fill(rig.stack.device[name], kinds)
    rig.write(PoolTransfer("kv", host, device), PoolTransfer("indexer"))
    assert crc(rig.host().buffer("k")) == "7c9e7a16"
    assert crc(rig.host().buffer("v")) == "e61773fc"
    assert crc(rig.host("indexer").buffer("index_k")) == "bf797e33"
    assert not rig.locked()


@every_way
@pytest.mark.parametrize("host_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("device_dtype", [torch.int32, torch.int64])
def test_the_first_write_back_takes_lists_of_either_type(
    platform: str, backend: str, host_dtype: torch.dtype, device_dtype: torch.dtype
) -> None:
    """B01"""
    rig = Rig(B01, platform=platform, backend=backend)
    first_write_back(rig, slots([5, 0, 3], 16, host_dtype), slots([1, 4, 2], 16, device_dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["kernel", "direct", "staged", "auto"])
@pytest.mark.parametrize("device_at", ["cpu", "cuda"])
@pytest.mark.parametrize("host_at", ["cpu", "cuda"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_the_first_write_back_takes_lists_on_either_side(
    backend: str, host_at: str, device_at: str, dtype: torch.dtype
) -> None:
    """B01"""
    torch.cuda.synchronize()
    shared_arena().reset()
    rig = Rig(B01, platform="cuda", backend=backend)
    lists = slots([5, 0, 3], 16, dtype).to(host_at), slots([1, 4, 2], 16, dtype).to(device_at)
    first_write_back(rig, *lists)


@every_way
def test_operations_with_lists_of_several_types_are_merged(platform: str, backend: str) -> None:
    """B01"""
    rig = Rig(B01, platform=platform, backend=backend)
    for name, kinds in B01_KINDS.items():
        fill(rig.stack.device[name], kinds)
    types = itertools.product([torch.int32, torch.int64], repeat=2)
    for (to, source), (a, b) in zip(((5, 1), (0, 4), (3, 2)), types, strict=False):
        lists = slots([to], 16, a), slots([source], 16, b)
        assert rig.controller.write(to, [PoolTransfer("kv", *lists), PoolTransfer("indexer")])
    assert rig.controller.start_writing() == 1
    assert [(ack.tag, ack.error) for ack in rig.controller.acknowledge(wait=True)] == [(5, None), (0, None), (3, None)]
    assert crc(rig.host().buffer("k")) == "7c9e7a16"
    assert crc(rig.host("indexer").buffer("index_k")) == "bf797e33"


# ---- B14  A hit on the device ends inside what the host has


def b14(page_size: int) -> dict[str, PoolSpec]:
    return {"kv": presets.mha(2, 2, 16, BF16, page_size)}


@every_way
def test_a_load_begins_where_the_hit_on_the_device_ends(platform: str, backend: str) -> None:
    """B14: host tokens 64..127 are a hit, 16 of them are on the device already; pages of 16 on both sides."""
    rig = Rig(b14(16), platform=platform, backend=backend, device_pages=8)
    fill_host(rig.host(), "pf", {"k": K, "v": V})
    rig.load(PoolTransfer("kv", torch.arange(80, 128), torch.arange(16, 64)))
    device = rig.stack.device["kv"]
    assert (layer_crc(device, "k"), layer_crc(device, "v")) == ("a5e4a6a9", "d1696b56")
    assert all((raw(device.buffer(name, layer)[:16]) == POISON).all() for name in "kv" for layer in range(2))


@pytest.mark.parametrize("direction", ["write", "load"])
def test_part_of_a_page_is_refused_when_it_is_queued(direction: str) -> None:
    """B14: pages of 64 on both sides. Nothing is taken or locked, and nothing waits to go wrong later."""
    rig = Rig(b14(64), device_pages=4)
    with pytest.raises(ValueError, match="whole pages of 64, got 48 indices"):
        getattr(rig.controller, direction)(1, [PoolTransfer("kv", torch.arange(80, 128), torch.arange(80, 128))])
    assert rig.controller.start_writing() == 0
    assert rig.controller.start_loading() is None
    assert rig.untouched()


# ---- B18  The controller leaves the draft pool out

B18 = {
    "kv": presets.mla(4, 32, BF16, 16),
    "draft": PoolSpec("draft", 1, 16, (Component("latent", BF16, dim=32),), "mla", indices_from="kv"),
}


@every_layout
def test_a_draft_pool_is_saved_and_restored_with_its_target(layout: str, platform: str, backend: str) -> None:
    """B18"""
    rig = Rig(B18, layout, platform, backend, device_pages=8, host_ratio=9 / 8)
    for name, kind in (("kv", K), ("draft", DRAFT)):
        fill(rig.stack.device[name], {"latent": kind})
    before = {name: layer_crc(rig.stack.device[name], "latent") for name in B18}
    moved = PoolTransfer("kv", slots([8], 16), slots([7], 16)), PoolTransfer("draft")
    rig.write(*moved)
    assert crc(rig.host().buffer("latent")) == {"lf": "aff612c5", "pf": "6373f298"}[layout]
    assert crc(rig.host("draft").buffer("latent")) == "efb8e10e"
    for device in rig.stack.device.values():
        for layer in range(device.spec.layers):
            device.buffer("latent", layer)[112:].view(BYTE).fill_(POISON)
    rig.load(*moved)
    assert {name: layer_crc(rig.stack.device[name], "latent") for name in B18} == before


# ---- B20  Slots are freed twice, now with transfers under way

B20 = {"kv": presets.mla(2, 8, BYTE, 16), "indexer": presets.dsa_indexer(2, 8, 8, 16)}


@pytest.mark.parametrize("failing", [False, True])
def test_slots_that_are_freed_during_a_backup_come_back_once(failing: bool) -> None:
    """B20"""
    rig = Rig(B20, device_pages=5, host_ratio=0.8, take=False)
    host, mine = rig.host(), rig.stack.device_slots["kv"].alloc(32)
    hold = rig.controller.hooks.hold("backup copy")
    if failing:
        rig.controller.hooks.fail("backup acknowledge", RuntimeError("told to fail"))
    operation = rig.controller.write(1, [PoolTransfer("kv", device_indices=mine), PoolTransfer("indexer")])
    assert operation
    taken = operation.host_indices("kv")
    assert taken is not None
    rig.controller.start_writing()
    assert host.free(taken) == 32
    for again in (taken, taken[:16]):
        with pytest.raises(ValueError, match=f"slot {int(again[0])} is not allocated"):
            host.free(again)
    assert rig.host("indexer").free(taken) == 0, "it owns none"
    assert host.available_size() == 32, "nobody gets them yet"
    hold.release()
    (ack,) = rig.controller.acknowledge(wait=True)
    assert bool(ack.error) == failing
    assert host.available_size() == 64
    everything = host.alloc(64)
    assert everything is not None
    assert sorted(everything.tolist()) == list(range(64))
    assert host.alloc(16) is None


def test_what_a_full_pool_cannot_take_is_not_queued_and_takes_nothing() -> None:
    """B20: 80 slots of 64."""
    rig = Rig(B20, device_pages=6, host_ratio=4 / 6, take=False)
    mine = rig.stack.device_slots["kv"].alloc(80)
    assert rig.controller.write(1, [PoolTransfer("kv", device_indices=mine), PoolTransfer("indexer")]) is None
    assert rig.host().available_size() == 64
    assert rig.controller.start_writing() == 0
    assert rig.untouched()


# ---- B27  A window is looked up at the right time


@every_layout
@pytest.mark.parametrize("meanwhile", ["zeroed", "rebuilt"])
def test_states_of_a_window_are_saved_from_where_they_were(
    layout: str, meanwhile: str, platform: str, backend: str
) -> None:
    """B27: page 7 has row 2 of the window when the backup is queued, and another one or none before it is submitted."""
    specs = {"c4_state": presets.v4_state("c4_state", 2, ring=8, slot_bytes=512, page_size=256, indices_from=None)}
    rig = Rig(specs, layout, platform, backend, device_pages=4)
    fill(rig.stack.device["c4_state"], {"c4_state": STATE})
    mapping = torch.zeros(8 * 256, dtype=torch.int64)
    mapping[7 * 256 :] = torch.arange(512, 768)
    window = Window(slots([7], 256), mapping)
    assert rig.controller.write("a backup", [PoolTransfer("c4_state", torch.arange(256, 512), window)])
    mapping[7 * 256 :] = 0 if meanwhile == "zeroed" else torch.arange(768, 1024)
    rig.controller.start_writing()
    rig.ended("a backup")
    assert crc(rig.host("c4_state").buffer("c4_state")) == {"lf": "ac844b10", "pf": "66fe3dc2"}[layout]


# ---- B29  Nothing to do

NOTHING = [None, torch.empty(0, dtype=torch.int32), torch.empty(0, dtype=torch.int64)]


@every_way
@pytest.mark.parametrize("nothing", NOTHING, ids=["None", "int32", "int64"])
@pytest.mark.parametrize("kind", STACKS)
def test_nothing_to_do_is_done_and_acknowledged(
    kind: str, nothing: torch.Tensor | None, platform: str, backend: str
) -> None:
    """B29"""
    specs = STACKS[kind](4)
    rig = Rig(specs, platform=platform, backend=backend)
    rig.write(*(PoolTransfer(name, None, None if spec.indices_from else nothing) for name, spec in specs.items()))
    rig.load(*(PoolTransfer(name, *[None if spec.indices_from else nothing] * 2) for name, spec in specs.items()))
    rig.write()
    rig.load()
    assert rig.untouched()


@every_way
def test_an_optional_side_pool_has_nothing_while_the_anchor_has_something(platform: str, backend: str) -> None:
    """B29"""
    rig = Rig(STACKS["mamba"](4), platform=platform, backend=backend)
    some, nothing = slots([3, 1], 4), torch.empty(0, dtype=torch.int64)
    for states in (PoolTransfer("mamba"), PoolTransfer("mamba", nothing, nothing)):
        assert rig.controller.write(1, [PoolTransfer("kv", some, some), states])
        rig.controller.start_writing()
        (ack,) = rig.controller.acknowledge(wait=True)
        assert (ack.error, ack.tokens) == (None, {"kv": 8, "mamba": 0})
        assert ack.bytes == {"kv": 2 * rig.stack.specs["kv"].page_bytes, "mamba": 0}
    assert (raw(rig.host("mamba").storage[0][1]) == POISON).all()


@every_way
def test_a_rank_that_stores_nothing_takes_part(platform: str, backend: str) -> None:
    """B29: no layers, rows of no bytes, an anchor without memory. Slots are handed out and locked all the same."""
    specs = {
        "kv": PoolSpec("kv", 0, 4, (), "logical"),
        "none": presets.mla(0, 8, BF16, 4, name="none"),
        "empty": presets.mla(2, 0, BF16, 4, name="empty"),
    }
    rig, some = Rig(specs, platform=platform, backend=backend), slots([3, 1], 4)
    transfers = [PoolTransfer(name, some, some) for name in specs]
    rig.write(*transfers)
    rig.load(*transfers)
    assert rig.untouched()
    rig.stack.close()


# ---- B36  Pairs of layout and backend


@pytest.mark.parametrize(
    ("layout", "backend"),
    [("page_first", "direct"), ("page_first_direct", "kernel"), ("page_head", "direct"), ("page_last", "kernel")],
)
@pytest.mark.parametrize("alone", [False, True])
def test_an_illegal_pair_of_a_stack_is_refused_by_name(layout: str, backend: str, alone: bool) -> None:
    """B36: for the stack and for one pool of it, whatever stands before and after."""
    specs = {"kv": presets.mha(2, 2, 8, BF16, 4)}
    whole = ("layer_first", "kernel") if alone else (layout, backend)
    single = {"kv": (layout, backend)} if alone else {}
    with pytest.raises(UnsupportedPairing, match=f"'kv'.*{layout}.*{backend}"):
        build_stack(specs, *whole, single, device_pages=4, host_ratio=1, platform="emulated", profile="sglang")


def test_the_order_of_options_changes_nothing() -> None:
    """B36: of single pools among each other, and of arguments."""
    pairs = {"kv": ("layer_first", "numba"), "swa": ("page_first", "torch"), "mamba": ("page_first", "torch")}
    counts = {"kv": 4, "swa": 3, "mamba": 2}
    described = set()
    for names in itertools.permutations(pairs):
        single, device_pages = {name: pairs[name] for name in names}, {name: counts[name] for name in names}
        options: dict[str, Any] = {"pools": single, "device_pages": device_pages, "host_ratio": 2.0, "platform": "cpu"}
        for ordered in itertools.permutations(options.items()):
            with build_stack(STACKS["swa-mamba"](4), "page_first_direct", **dict(ordered)) as stack:
                described.add(str(stack))
    assert len(described) == 1
