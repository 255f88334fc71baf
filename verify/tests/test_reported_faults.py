"""Inputs of publicly reported faults, each with the right answer known in advance.

A number such as B13 is that of the report's case: its checksums come from a program that shares no code with this one.
Every case runs on every CPU backend and on the oracle, on destinations filled with 0xFF, and compares whole buffers.
"""

from __future__ import annotations

import ctypes
import gc
import itertools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from refimpl import (
    Budget,
    Component,
    DevicePool,
    HostMemory,
    HostPool,
    HostPoolGroup,
    PageAllocator,
    PoolSpec,
    PoolTransfer,
    UnsupportedPairing,
    oracle,
    presets,
    support,
)
from refimpl.sizing import GB, common_pages, pages_for_bytes, pages_for_ratio, shares, slots_for_bytes
from refimpl.support import DIRECTIONS, start_up
from verify.reported import (
    B13_SPEC,
    INDEX,
    LAYOUTS,
    MOVERS,
    POISON,
    K,
    T,
    V,
    backup,
    crc,
    crc_of,
    expected,
    fill,
    fill_host,
    fill_many,
    host_pool,
    layer_crc,
    load,
    pages,
    poison,
    raw,
    rows,
    slots,
    whole,
)

BF16, BYTE = torch.bfloat16, torch.uint8
MIB = 2**20

every_mover = pytest.mark.parametrize("mover", MOVERS)
cpu_backend = pytest.mark.parametrize("backend", ["torch", "numba"])


def page_image(host: HostPool, page: int) -> dict[str, bytes]:
    return {name: raw(rows).tobytes() for name, rows in host.page(page).items()}


# ---- The formula itself


PROBES = [((0, 0, 0, 0), 38), ((0, 1, 2, 3), 56), ((1, 2, 3, 4), 134), ((2, 0, 5, 8191), 175)]


@pytest.mark.parametrize(("place", "byte"), PROBES)
def test_the_formula_yields_the_probes_of_the_cases(place: tuple[int, int, int, int], byte: int) -> None:
    assert int(T(*place)) == byte


def test_the_plain_arrays_yield_a_known_checksum() -> None:
    image = expected("ph", K, (3, 3, 4, 4, 32), pages([2, 1], 4), pages([1, 2], 4))
    assert crc_of(image) == "cb553f3a"


# ---- B01  The first write-back is handed indices of another device or type


@every_mover
@pytest.mark.parametrize("host_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("device_dtype", [torch.int32, torch.int64])
def test_a_sidecar_and_its_anchor_take_the_same_indices_of_either_type(
    mover: str, host_dtype: torch.dtype, device_dtype: torch.dtype
) -> None:
    """B01"""
    anchor, sidecar = presets.mha(4, 2, 64, BF16, 16), presets.dsa_indexer(4, 128, 128, 16)
    host_slots, device_slots = slots([5, 0, 3], 16, host_dtype), slots([1, 4, 2], 16, device_dtype)
    hosts = [host_pool(spec, "pf", 6, mover) for spec in (anchor, sidecar)]
    HostPoolGroup(hosts)
    for host, kinds in zip(hosts, ({"k": K, "v": V}, {"index_k": INDEX}), strict=True):
        device = DevicePool(host.spec, 6)
        fill(device, kinds)
        backup(mover, host, device, host_slots, device_slots)
    assert crc(hosts[0].buffer("k")) == "7c9e7a16"
    assert crc(hosts[0].buffer("v")) == "e61773fc"
    assert crc(hosts[1].buffer("index_k")) == "bf797e33"


# ---- B04  The index keys of sparse attention are not mirrored

B04_ROWS = {"lf": "4b5bb53a", "pf": "1bbe0c5f", "pfd": "44e8fafa"}
B04_INDEX = {"lf": "78fd2fb9", "pf": "878077b5", "pfd": "878077b5"}


def dsa_as_two_pools() -> list[PoolSpec]:
    return [presets.mla(2, 576, BYTE, 64), presets.dsa_indexer(2, page_size=64)]


def dsa_as_one_pool() -> list[PoolSpec]:
    anchor, sidecar = dsa_as_two_pools()
    return [PoolSpec("kv", 2, 64, anchor.components + sidecar.components)]


@every_mover
@pytest.mark.parametrize("layout", B04_ROWS)
@pytest.mark.parametrize("pools", [dsa_as_two_pools, dsa_as_one_pool])
def test_index_keys_travel_with_the_latents_they_belong_to(
    pools: Callable[[], list[PoolSpec]], layout: str, mover: str
) -> None:
    """B04"""
    hosts = [host_pool(spec, layout, 4, mover) for spec in pools()]
    devices = [DevicePool(spec, 4) for spec in pools()]
    before = {}
    for host, device in zip(hosts, devices, strict=True):
        fill(device, {"latent": K, "index_k": INDEX})
        before |= {c.name: layer_crc(device, c.name) for c in host.spec.components}
        backup(mover, host, device, slots([1], 64), slots([3], 64))
    mirrored = {c.name: crc(host.buffer(c.name)) for host in hosts for c in host.spec.components}
    assert mirrored == {"latent": B04_ROWS[layout], "index_k": B04_INDEX[layout]}
    for host, device in zip(hosts, devices, strict=True):
        for c in host.spec.components:
            for layer in device.spec.layers_of(c):
                device.buffer(c.name, layer)[3 * host.spec.tokens_per_page(c) :].view(BYTE).fill_(POISON)
        load(mover, host, device, slots([1], 64), slots([3], 64))
    after = {c.name: layer_crc(device, c.name) for device in devices for c in device.spec.components}
    assert after == before


@pytest.mark.parametrize("layout", B04_ROWS)
def test_a_host_pool_without_index_keys_refuses_a_device_pool_that_has_them(layout: str) -> None:
    """B04: the plain MLA pool must never serve in place of its richer relative."""
    plain, rich = dsa_as_two_pools()[0], dsa_as_one_pool()[0]
    host = host_pool(plain, layout, 4)
    with pytest.raises(ValueError, match="not of one spec") as refused:
        host.backup(DevicePool(rich, 4), slots([1], 64), slots([3], 64))
    assert "index_k" in str(refused.value)
    assert set(raw(host.kv_buffer)) == {POISON}


# ---- B05  Token numbers index a buffer whose rows are pages


@every_mover
@pytest.mark.parametrize(("layout", "checksum"), [("lf", "8ca085a4"), ("pf", "b13fa6f0"), ("pfd", "b13fa6f0")])
def test_token_slots_name_the_page_row_they_lie_in(layout: str, checksum: str, mover: str) -> None:
    """B05"""
    spec = presets.dsa_indexer(2, page_size=64)
    host, device = host_pool(spec, layout, 8, mover), DevicePool(spec, 8)
    fill(device, {"index_k": INDEX})
    backup(mover, host, device, torch.arange(128, 192), torch.arange(320, 384))
    assert crc(host.buffer("index_k")) == checksum
    row = raw(host.page(2)["index_k"][0])
    assert row[7 * 128 : 7 * 128 + 4].tolist() == [55, 31, 125, 90], "key of token 7"
    assert row[8220:8224].tolist() == [215, 2, 185, 151], "scale of token 7"


@cpu_backend
@pytest.mark.parametrize("layout", ["lf", "pf", "pfd"])
def test_one_entry_of_a_page_row_is_its_key_and_its_scale_and_nothing_else(layout: str, backend: str) -> None:
    """B05: entry 7 of page 5 goes to entry 7 of page 2."""
    spec = presets.dsa_indexer(2, page_size=64)
    host, device = host_pool(spec, layout, 8, backend), DevicePool(spec, 8)
    fill(device, {"index_k": INDEX})
    receipt = host.backup_entries(device, torch.tensor([2 * 64 + 7]), torch.tensor([5 * 64 + 7]))
    assert (receipt.bytes, receipt.descriptors) == (2 * 132, 2 * 2), "a key and a scale a layer"
    for layer in range(2):
        right = np.full(8448, POISON, np.uint8)
        for begin, length in ((896, 128), (8220, 4)):
            right[begin : begin + length] = T(INDEX, layer, 5, np.arange(begin, begin + length))
        assert np.array_equal(raw(host.page(2)["index_k"][layer]), right)
    others = [page for page in range(8) if page != 2]
    assert all(set(raw(host.page(page)["index_k"])) == {POISON} for page in others)


@every_mover
@pytest.mark.parametrize("layout", ["lf", "pf", "pfd"])
def test_with_one_token_a_page_a_row_is_a_token(layout: str, mover: str) -> None:
    """B05 at page size 1"""
    spec = presets.dsa_indexer(2, page_size=1)
    host, device = host_pool(spec, layout, 200, mover), DevicePool(spec, 400)
    fill(device, {"index_k": INDEX})
    backup(mover, host, device, torch.arange(128, 192), torch.arange(320, 384))
    right = expected(layout, INDEX, (2, 200, 1, 1, 132), range(320, 384), range(128, 192))
    assert crc(host.buffer("index_k")) == crc_of(right)


@cpu_backend
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("count", [1, 63, 65, 127])
def test_part_of_a_page_is_refused_and_nothing_is_written(count: int, direction: str, backend: str) -> None:
    """B05, B27, and B14: skipping the part of a page that the device already holds is not on offer."""
    spec = presets.dsa_indexer(2, page_size=64)
    host, device = host_pool(spec, "pf", 8, backend), DevicePool(spec, 8)
    poison(device)
    with pytest.raises(ValueError, match=f"whole pages of 64, got {count} indices"):
        host.prepare(device, torch.arange(count), torch.arange(count), direction).run()
    assert set(raw(host.kv_buffer)) == {POISON}
    assert layer_crc(device, "index_k") == crc_of(np.full((2, 8, 8448), POISON, np.uint8))


def test_a_hit_inside_a_host_page_is_refused_before_any_write() -> None:
    """B14: host pages of 64, device pages of 16. A transfer moves pages that both sides have."""
    spec = presets.mha(2, 2, 16, BF16, 64)
    host, device = host_pool(spec, "pf", 4), DevicePool(spec.with_pages_of(16), 8)
    poison(device)
    with pytest.raises(ValueError, match="not of one spec"):
        host.load(device, torch.arange(80, 128), torch.arange(16, 64), 0)
    device = DevicePool(spec, 2)
    poison(device)
    with pytest.raises(ValueError, match="whole pages of 64, got 48 indices"):
        host.load(device, torch.arange(80, 128), torch.arange(16, 64), 0)
    assert layer_crc(device, "k") == crc_of(np.full((2, 128, 64), POISON, np.uint8))


# ---- B06, B07  Limits of pinned memory


class Registrar:
    """Stands in for the driver: keeps what is registered, refuses what a driver would, maps to another address."""

    ALIAS = 2**40  # device address minus host address

    def __init__(self, refuses_call: int | None = None) -> None:
        self.live: dict[int, int] = {}
        self.calls: list[tuple[int, int]] = []
        self.undone: list[int] = []
        self.refuses_call = refuses_call

    def register(self, address: int, nbytes: int) -> None:
        self.calls.append((address, nbytes))
        if len(self.calls) == self.refuses_call:
            raise RuntimeError("the driver has had enough")
        overlapping = [a for a, n in self.live.items() if a < address + nbytes and address < a + n]
        assert not overlapping, f"{address:#x} is registered already"
        self.live[address] = nbytes

    def unregister(self, address: int) -> None:
        assert is_mapped(address), f"{address:#x} was unmapped before it was unregistered"
        del self.live[address]
        self.undone.append(address)

    def device_address(self, address: int, device: str) -> int:
        return address + self.ALIAS


def is_mapped(address: int) -> bool:
    ranges = (line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines())
    return any(int(first, 16) <= address < int(end, 16) for first, end in ranges)


UNIT = 215_040  # one page of one component: 7 layers, 64 tokens, 480 B
pinned_layouts = pytest.mark.parametrize("layout", ["page_first", "page_first_direct"])


def keys_alone() -> PoolSpec:
    return presets.mha_k_only(7, 3, 80, BF16, 64, indices_from=None)


def pinned(spec: PoolSpec, layout: str, registrar: Registrar, backend: str = "torch") -> HostPool:
    return HostPool(spec, layout, 21, backend, memory=HostMemory(registrar), registration_limit=MIB)


@pinned_layouts
def test_registrations_end_on_page_edges(layout: str) -> None:
    """B06"""
    registrar = Registrar()
    with pinned(keys_alone(), layout, registrar) as host:
        begin = whole(host, "k").data_ptr()
        chunks = [(address - begin, nbytes) for address, nbytes in registrar.calls]
        assert chunks == [(i * 860_160, 860_160) for i in range(5)] + [(5 * 860_160, UNIT)]
        assert sum(nbytes for _, nbytes in chunks) == host.nbytes == 21 * UNIT
    assert not registrar.live
    assert len(registrar.undone) == 6


@pinned_layouts
def test_keys_and_values_in_one_tensor_share_registrations(layout: str) -> None:
    """B06: 42 units, four to a registration"""
    registrar = Registrar()
    with pinned(presets.mha(7, 3, 80, BF16, 64), layout, registrar):
        assert len(registrar.calls) == 11
        assert all(nbytes % UNIT == 0 for _, nbytes in registrar.calls)


@cpu_backend
@pinned_layouts
def test_a_page_next_to_a_registration_edge_comes_back(layout: str, backend: str) -> None:
    """B06: page 4 spans 860,160..1,075,199, which a plain edge at 1 MiB would cut."""
    spec = keys_alone()
    registrar = Registrar()
    with pinned(spec, layout, registrar, backend) as host:
        poison(host)
        begin = host.get_page_buffer_meta(torch.arange(4 * 64, 5 * 64))[0][0]
        assert any(address <= begin and begin + UNIT <= address + nbytes for address, nbytes in registrar.live.items())
        device = DevicePool(spec, 3)
        fill(device, {"k": K})
        saved = layer_crc(device, "k")
        host.backup(device, slots([4], 64), slots([1], 64))
        assert page_image(host, 3)["k"] == page_image(host, 5)["k"] == bytes([POISON]) * UNIT
        for layer in range(7):
            device.buffer("k", layer)[64:128].view(BYTE).fill_(POISON)
        host.load_all(device, slots([4], 64), slots([1], 64))
        assert layer_crc(device, "k") == saved


@pinned_layouts
def test_a_failing_registration_undoes_the_earlier_ones(layout: str) -> None:
    """B06"""
    registrar = Registrar(refuses_call=3)
    with pytest.raises(RuntimeError, match="had enough"):
        pinned(keys_alone(), layout, registrar)
    assert len(registrar.calls) == 3
    assert not registrar.live
    assert sorted(registrar.undone) == [address for address, _ in registrar.calls[:2]]


def test_a_failing_registration_of_a_later_buffer_undoes_those_of_the_earlier_buffers() -> None:
    """B06: K and V of unequal width are two buffers; the second one fails."""
    registrar = Registrar(refuses_call=8)
    with pytest.raises(RuntimeError, match="had enough"):
        pinned(presets.mha(7, 3, 80, BF16, 64, v_head_dim=40), "page_first", registrar)
    assert not registrar.live
    assert len(registrar.undone) == 7


def test_a_forgotten_pool_undoes_its_registrations_before_its_memory_goes() -> None:
    """B06: what is unmapped while registered poisons whatever is mapped there next."""
    registrar = Registrar()
    host = pinned(keys_alone(), "page_first", registrar)
    alive = weakref.ref(host)
    del host
    gc.collect()
    assert alive() is None
    assert len(registrar.undone) == 6
    assert not registrar.live


def test_a_page_larger_than_the_limit_is_refused_and_nothing_registered() -> None:
    """B06"""
    registrar = Registrar()
    with pytest.raises(ValueError, match=r"limit of 215,039 bytes cannot hold one page of 215,040"):
        HostPool(keys_alone(), "page_first", 21, memory=HostMemory(registrar), registration_limit=UNIT - 1)
    assert not registrar.calls


def test_pinned_memory_has_the_size_that_was_asked_for() -> None:
    """B06: allocators that round up would take 256 MiB."""
    spec = presets.mha_k_only(1, 1, 1024, BYTE, 64)
    asked = 2072 * 64 * 1024
    assert asked == 129.5 * MIB
    gc.collect()
    process = psutil.Process()
    before = process.memory_info()
    registrar = Registrar()
    with HostPool(spec, "page_first", 2072, memory=HostMemory(registrar)) as host:
        poison(host)
        after = process.memory_info()
        assert sum(registrar.live.values()) == asked
        for what in ("rss", "vms"):
            grown = getattr(after, what) - getattr(before, what)
            assert abs(grown - asked) < 16 * MIB, f"{what} grew by {grown / MIB:.1f} MiB"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_tables_for_a_device_hold_the_device_address(layout: str) -> None:
    """B07"""
    spec = presets.mha(3, 2, 8, BF16, 4)
    memory = HostMemory(Registrar())
    with HostPool(spec, LAYOUTS[layout], 5, memory=memory) as host:
        for name, pointers in host.data_ptrs.items():
            aliases = [int(p) for p in host.device_ptrs[name].tolist()]
            assert aliases == [int(p) + Registrar.ALIAS for p in pointers.tolist()]


# ---- B13, B08  Index lists of two sides are paired wrongly

B13 = [
    ((1, 6, 3), (7, 2, 5), "lf", "35e278fd", "138d677f"),
    ((1, 6, 3), (7, 2, 5), "pf", "6a9f3caa", "03d83a62"),
    ((1, 6, 3), (7, 2, 5), "pfd", "dada6bbb", "972c3f8d"),
    ((1, 6, 3), (7, 2, 5), "ph", "6e1a2177", "5b3dceae"),
    # runs that join on one side only
    ((9, 3, 4), (4, 5, 6), "lf", "03bb54e5", "6751afc1"),
    ((9, 3, 4), (4, 5, 6), "pf", "6686d011", "3634cabe"),
    ((9, 3, 4), (4, 5, 6), "pfd", "e84c1b02", "db047046"),
    ((9, 3, 4), (4, 5, 6), "ph", "6fa7af04", "2cedd41d"),
]


@every_mover
@pytest.mark.parametrize(("device_pages", "host_pages", "layout", "keys", "values"), B13)
def test_each_page_goes_to_its_partner(
    device_pages: Sequence[int], host_pages: Sequence[int], layout: str, keys: str, values: str, mover: str
) -> None:
    """B13; in page_first_direct it is also the data of B08"""
    host, device = host_pool(B13_SPEC, layout, 8, mover), DevicePool(B13_SPEC, 10)
    fill(device, {"k": K, "v": V})
    backup(mover, host, device, slots(host_pages, 4), slots(device_pages, 4))
    assert (crc(host.buffer("k")), crc(host.buffer("v"))) == (keys, values)


@every_mover
@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_page_comes_from_its_partner(layout: str, mover: str) -> None:
    """B13, the other way"""
    host, device = host_pool(B13_SPEC, layout, 8, mover), DevicePool(B13_SPEC, 10)
    fill_host(host, layout, {"k": K, "v": V})
    poison(device)
    load(mover, host, device, slots([7, 2, 5], 4), slots([1, 6, 3], 4))
    assert (layer_crc(device, "k"), layer_crc(device, "v")) == ("46e6d52b", "b4e5f567")


UNLISTED = {
    "page_unified": B13_SPEC,
    "page_unified, two head groups": replace(B13_SPEC, head_groups=2),
    "page_unified, latents": presets.mla(2, 64, BYTE, 4),
    "page_first_kv_split": presets.mla(2, 64, BYTE, 4, split=(56, 8)),
}


@cpu_backend
@pytest.mark.parametrize("case", UNLISTED)
def test_layouts_without_a_checksum_agree_with_the_oracle_and_with_page_first(case: str, backend: str) -> None:
    """B13 in the layouts that the case does not list"""
    spec, layout = UNLISTED[case], case.partition(",")[0]
    device = DevicePool(spec, 10)
    fill(device, {"k": K, "v": V, "latent": K})
    host, right, plain = host_pool(spec, layout, 8, backend), host_pool(spec, layout, 8), host_pool(spec, "pf", 8)
    host_slots, device_slots = slots([7, 2, 5], 4), slots([1, 6, 3], 4)
    host.backup(device, host_slots, device_slots)
    oracle.backup(right, device, host_slots, device_slots)
    oracle.backup(plain, device, host_slots, device_slots)
    assert [crc(t) for _, held in host.storage for t in held] == [crc(t) for _, held in right.storage for t in held]
    assert [page_image(host, page) for page in range(8)] == [page_image(plain, page) for page in range(8)]
    loaded, wanted = DevicePool(spec, 10), DevicePool(spec, 10)
    host.load_all(loaded, host_slots, slots([8, 0, 9], 4))
    oracle.load(plain, wanted, host_slots, slots([8, 0, 9], 4))
    for c in spec.components:
        assert layer_crc(loaded, c.name) == layer_crc(wanted, c.name)


# ---- B16  Heads of one page are mixed up between tensor-parallel sizes

B16_SPEC = presets.mha(3, 4, 16, BF16, 4)


def head_major(mover: str = "oracle") -> HostPool:
    host, device = host_pool(B16_SPEC, "ph", 3, mover), DevicePool(B16_SPEC, 3)
    fill(device, {"k": K, "v": V})
    backup(mover, host, device, slots([1, 2], 4), slots([2, 1], 4))
    return host


def at_address(address: int, nbytes: int) -> bytes:
    return ctypes.string_at(address, nbytes)


@every_mover
def test_heads_lie_outside_tokens_and_layers_inside(mover: str) -> None:
    """B16"""
    host = head_major(mover)
    assert (crc(host.buffer("k")), crc(host.buffer("v"))) == ("cb553f3a", "54bf3587")
    keys = raw(host.buffer("k"))
    assert keys[2944:2948].tolist() == [39, 243, 184, 16], "token 6, head 3, layer 2"


def test_each_rank_of_two_finds_its_heads_in_one_run() -> None:
    """B16"""
    host = head_major()
    addresses, sizes = host.get_split_heads_page_buffer_meta(slots([1], 4), split=2)
    assert sizes == [768] * 4
    rank_0, _, rank_1, _ = addresses  # of each rank K, then V
    assert rank_0 - whole(host, "k").data_ptr() == 1536
    assert rank_1 == rank_0 + 768
    checksums = [crc_of(np.frombuffer(at_address(a, 768), np.uint8)) for a in (rank_0, rank_1)]
    assert checksums == ["8856bf70", "90f1b8c4"]
    assert [a - b for a, b in zip(addresses[1::2], addresses[::2], strict=True)] == [3 * 1536] * 2, "V half a buffer on"


@pytest.mark.parametrize(("heads", "split"), [(3, 2), (4, 3), (2, 4)])
def test_heads_that_do_not_divide_between_the_ranks_are_refused(heads: int, split: int) -> None:
    """B16"""
    host = host_pool(presets.mha(3, heads, 16, BF16, 4), "ph", 3)
    with pytest.raises(ValueError, match=f"keeps {heads} heads .* cannot be split between {split} ranks"):
        host.get_split_heads_page_buffer_meta(slots([1], 4), split)


# ---- B18  Draft layers are left out, or their pool is too short

B18_PACKED = presets.mla(4, 32, BF16, 16, drafts=1)
B18_TARGET = presets.mla(4, 32, BF16, 16)
B18_DRAFT = replace(presets.mla(1, 32, BF16, 16), name="draft", indices_from="kv")
DRAFT = 4  # the kind of draft rows


def draft_last(kind: int, layer: int) -> tuple[int, int]:
    return (DRAFT, 0) if layer == 4 else (kind, layer)


@every_mover
@pytest.mark.parametrize(("layout", "checksum"), [("lf", "aff612c5"), ("pf", "6373f298")])
def test_a_draft_pool_moves_with_its_target(layout: str, checksum: str, mover: str) -> None:
    """B18"""
    hosts = [host_pool(spec, layout, 9, mover) for spec in (B18_TARGET, B18_DRAFT)]
    HostPoolGroup(hosts)
    for host, kind, right in zip(hosts, (K, DRAFT), (checksum, "efb8e10e"), strict=True):
        device = DevicePool(host.spec, 8)
        fill(device, {"latent": kind})
        backup(mover, host, device, slots([8], 16), slots([7], 16))
        assert crc(host.buffer("latent")) == right


@every_mover
@pytest.mark.parametrize(("layout", "checksum"), [("lf", "4de335dc"), ("pf", "5a1f744a")])
def test_draft_layers_packed_last_are_saved_and_restored(layout: str, checksum: str, mover: str) -> None:
    """B18"""
    host, device = host_pool(B18_PACKED, layout, 9, mover), DevicePool(B18_PACKED, 8)
    fill(device, {"latent": K}, named=draft_last)
    before = layer_crc(device, "latent")
    backup(mover, host, device, slots([8], 16), slots([7], 16))
    assert crc(host.buffer("latent")) == checksum
    assert np.array_equal(raw(host.page(8)["latent"][4]), rows(DRAFT, 0, 128, 64)[112:].reshape(-1))
    for layer in range(5):
        device.buffer("latent", layer)[112:].view(BYTE).fill_(POISON)
    load(mover, host, device, slots([8], 16), slots([7], 16))
    assert layer_crc(device, "latent") == before


def test_a_draft_pool_sized_by_physical_rows_is_refused_at_construction() -> None:
    """B18: 64 rows on each of two ranks, but the shared indices run to 128."""
    target, draft = HostPool(B18_TARGET, "page_first", 8), HostPool(B18_DRAFT, "page_first", 4)
    with pytest.raises(ValueError, match=r"'draft' has 64 slots, but 'kv', .*has 128"):
        HostPoolGroup([target, draft])
    buffers = [torch.zeros(128, 1, 32, dtype=BF16) for _ in range(4)] + [torch.zeros(64, 1, 32, dtype=BF16)]
    with pytest.raises(ValueError, match=r"same number of pages, got .*'latent of layer 4': 4"):
        DevicePool.wrap(B18_PACKED, {"latent": buffers})


# ---- B19  Quantised storage

B19 = {
    "lf": ("39e78d37", "5ae1369f"),
    "pf": ("02a9f740", "18a0077d"),
    "pfd": ("818ffcfa", "6e442431"),
    "ph": ("7d3e7df8", "bacf3f82"),
}


def every_code(kind: int, layer: int, slot: int, byte: np.ndarray) -> np.ndarray:
    return ((byte + 17 * slot + 101 * layer + 53 * kind) % 256).astype(np.uint8)


@every_mover
@pytest.mark.parametrize("stored_as", [torch.float8_e4m3fn, torch.float8_e5m2, BYTE])
@pytest.mark.parametrize("layout", B19)
def test_all_codes_of_a_byte_survive(layout: str, stored_as: torch.dtype, mover: str) -> None:
    """B19: NaNs and all"""
    spec = presets.mha(2, 2, 64, stored_as, 8)
    assert spec.page_bytes // spec.page_size == 512, "bytes a token: storage counts, not the model's dtype"
    host, device = host_pool(spec, layout, 4, mover), DevicePool(spec, 4)
    fill(device, {"k": K, "v": V}, every_code)
    backup(mover, host, device, slots([1, 2], 8), slots([3, 0], 8))
    assert (crc(host.buffer("k")), crc(host.buffer("v"))) == B19[layout]
    moved = np.concatenate([raw(host.page(page)["k"]) for page in (1, 2)])
    assert len(np.unique(moved)) == 256
    assert np.count_nonzero(moved == 0x7F) == 18


@every_mover
@pytest.mark.parametrize("layout", LAYOUTS)
def test_scales_are_carried_along_with_packed_values(layout: str, mover: str) -> None:
    """B19, FP4: two values a byte, one scale for 16 of them, in buffers of their own"""
    spec = presets.mha_quantised(2, 2, 32, 4, 8)
    kinds = {"k": K, "v": V, "k_scale": 8, "v_scale": 9}
    host, device = host_pool(spec, layout, 4, mover), DevicePool(spec, 4)
    fill(device, kinds)
    before = {name: layer_crc(device, name) for name in kinds}
    backup(mover, host, device, slots([1, 2], 8), slots([3, 0], 8))
    for name, kind in kinds.items():
        shape = (2, 4, 8, 2, 4 if name.endswith("scale") else 32)
        right = expected(layout, kind, shape, pages([3, 0], 8), pages([1, 2], 8))
        assert crc(host.buffer(name)) == crc_of(right), name
    for name, layer in itertools.product(kinds, range(2)):
        for page in (3, 0):
            device.buffer(name, layer)[page * 8 : page * 8 + 8].fill_(POISON)
    load(mover, host, device, slots([1, 2], 8), slots([3, 0], 8))
    assert {name: layer_crc(device, name) for name in kinds} == before


# ---- B20  Slots are freed twice


def test_slots_freed_twice_are_refused_and_the_pool_never_grows() -> None:
    """B20"""
    allocator = PageAllocator(4, 16)
    a = allocator.alloc(32)
    assert a is not None
    assert allocator.free(a) == 32
    with pytest.raises(ValueError, match=f"slot {int(a[0])} is not allocated"):
        allocator.free(a)
    assert allocator.available_size() == 64
    everything = allocator.alloc(64)
    assert everything is not None
    assert sorted(everything.tolist()) == list(range(64))
    assert allocator.alloc(16) is None


def test_freeing_nothing_is_nothing() -> None:
    """B20"""
    allocator = PageAllocator(4, 16)
    assert allocator.free(torch.empty(0, dtype=torch.int64)) == 0
    assert allocator.available_size() == 64


@pytest.mark.parametrize("pool", [PageAllocator(4, 16), HostPool(presets.mla(1, 8, BYTE, 16), "page_first", 4)])
def test_part_of_a_page_cannot_be_had_and_too_much_is_none(pool: PageAllocator | HostPool) -> None:
    """B20"""
    with pytest.raises(ValueError, match="cannot allocate 24 slots: pages hold 16"):
        pool.alloc(24)
    with pytest.raises(TypeError, match="'float' object cannot be interpreted as an integer"):
        pool.alloc(16.0)  # pyright: ignore[reportArgumentType]
    assert pool.alloc(80) is None
    assert pool.available_size() == 64
    assert pool.alloc(64) is not None


def test_freeing_through_a_sidecar_has_no_effect() -> None:
    """B20: it shares the anchor's indices and owns none."""
    anchor = HostPool(presets.mla(2, 8, BYTE, 16), "page_first", 4)
    sidecar = HostPool(presets.dsa_indexer(2, 8, 8, 16), "page_first", 4)
    group = HostPoolGroup([anchor, sidecar])
    wanted = [PoolTransfer("kv", device_indices=torch.arange(32)), PoolTransfer("indexer")]
    resolved = group.resolve(wanted)
    assert resolved is not None
    assert torch.equal(resolved[1].host_indices, resolved[0].host_indices)  # type: ignore[arg-type]
    assert sidecar.free(resolved[1].host_indices) == 0  # type: ignore[arg-type]
    assert anchor.available_size() == 32
    assert group.release(resolved) == 32
    assert anchor.available_size() == 64


def test_a_slice_that_is_kept_does_not_keep_the_free_list() -> None:
    """B20"""
    allocator = PageAllocator(10**6, 1)
    kept = allocator.alloc(16)
    assert kept is not None
    assert kept.untyped_storage().nbytes() == 16 * 8
    large = allocator.alloc(999_000)
    assert large is not None
    allocator.free(large)
    gone = weakref.ref(large)
    del large
    assert gone() is None, "the allocator keeps what was freed"


# ---- B27  Sub-pools of compressed attention


@every_mover
@pytest.mark.parametrize(("layout", "checksum"), [("lf", "11798744"), ("pf", "b3770278"), ("pfd", "b3770278")])
def test_two_entries_make_a_row_of_a_compressed_pool(layout: str, checksum: str, mover: str) -> None:
    """B27: rows of 1728 B = 16 x 108, no multiple of 128; entries are the indices of this pool."""
    spec = presets.v4_paged("c128", 3, 1728, page_size=2)
    host, device = host_pool(spec, layout, 6, mover), DevicePool(spec, 6)
    fill(device, {"c128": 6})
    backup(mover, host, device, torch.tensor([4, 5, 8, 9]), torch.tensor([10, 11, 0, 1]))
    assert crc(host.buffer("c128")) == checksum


@pytest.mark.parametrize("mover", [mover for mover in MOVERS if mover != "oracle"])
@pytest.mark.parametrize("layout", ["lf", "pf", "pfd"])
def test_single_entries_of_a_compressed_row_leave_its_padding_alone(layout: str, mover: str) -> None:
    """B27: with pages of 256 tokens the same entries are two values and two scales a row; the padding stays."""
    spec = presets.v4_paged("c128", 3, 1728, page_size=256)
    host, device = host_pool(spec, layout, 6, mover), DevicePool(spec, 6)
    fill(device, {"c128": 6})
    receipt = host.backup_entries(device, torch.tensor([4, 5, 8, 9]), torch.tensor([10, 11, 0, 1]))
    receipt.wait()
    joined = mover == "direct" and layout == "lf"  # neighbours, unless a page's layers come between them
    assert receipt.descriptors == 3 * 2 * (2 if joined else 4), "values and scales are never one range"
    right = np.full((6, 3, 1728), POISON, np.uint8)
    for to, source in ((2, 5), (4, 0)):
        for layer in range(3):
            right[to, layer, : 2 * 576 + 2 * 8] = T(6, layer, source, np.arange(2 * 576 + 2 * 8))
    got = np.stack([raw(host.page(page)["c128"]).reshape(3, 1728) for page in range(6)])
    assert np.array_equal(got, right)


@every_mover
@pytest.mark.parametrize(("layout", "checksum"), [("lf", "ac844b10"), ("pf", "66fe3dc2"), ("pfd", "66fe3dc2")])
def test_one_window_page_is_one_ring_of_states(layout: str, checksum: str, mover: str) -> None:
    """B27"""
    spec = presets.v4_state("c4_state", 2, ring=8, slot_bytes=512, page_size=256)
    host, device = host_pool(spec, layout, 4, mover), DevicePool(spec, 4)
    fill(device, {"c4_state": 7})
    backup(mover, host, device, torch.arange(256, 512), torch.arange(512, 768))
    assert crc(host.buffer("c4_state")) == checksum


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_part_of_a_window_is_refused(direction: str) -> None:
    """B27"""
    spec = presets.v4_state("c4_state", 2, ring=8, slot_bytes=512, page_size=256)
    host, device = host_pool(spec, "pf", 4), DevicePool(spec, 4)
    with pytest.raises(ValueError, match="whole pages of 256, got 255 indices"):
        host.prepare(device, torch.arange(256, 511), torch.arange(512, 767), direction)
    assert set(raw(host.kv_buffer)) == {POISON}


# ---- B28  Capacity arithmetic

LLAMA = presets.mha(32, 8, 128, BF16, 64)


def test_one_gigabyte_is_1e9_bytes_and_holds_119_whole_pages() -> None:
    """B28: "fit" stays below the budget, "sglang" adds upstream's page and exceeds it."""
    assert LLAMA.page_bytes == 64 * 131_072
    assert slots_for_bytes(LLAMA, GB) == 7_629
    assert pages_for_bytes(LLAMA, GB) == 119
    assert pages_for_bytes(LLAMA, GB, rule="sglang") == 120
    assert 119 * LLAMA.page_bytes <= GB < 120 * LLAMA.page_bytes == 1_006_632_960


@pytest.mark.parametrize(("device_slots", "fit", "sglang"), [(1024, 32, 33), (1000, 31, 32)])
def test_a_ratio_counts_slots_before_pages(device_slots: int, fit: int, sglang: int) -> None:
    """B28"""
    assert pages_for_ratio(LLAMA, device_slots, 2.0) == fit
    assert pages_for_ratio(LLAMA, device_slots, 2.0, rule="sglang") == sglang


def test_pipeline_ranks_agree_on_what_the_largest_of_them_can_hold() -> None:
    """B28"""
    stages = [presets.mha(layers, 8, 128, BF16, 64) for layers in (30, 31)]
    assert [slots_for_bytes(stage, GB) for stage in stages] == [8_138, 7_875]
    assert common_pages(stages, GB) == 7_875 // 64 == 123
    assert common_pages(stages, GB, rule="sglang") == 124
    assert common_pages(stages[::-1], GB) == 123


@pytest.mark.parametrize("rule", ["fit", "sglang"])
def test_a_pipeline_rank_without_layers_does_not_limit_the_others(rule: str) -> None:
    """B28, B29: it stores no bytes, so any number of pages fits."""
    stages = [presets.mha(layers, 8, 128, BF16, 64) for layers in (0, 31)]
    assert common_pages(stages, GB, rule) == common_pages(stages[1:], GB, rule)  # type: ignore[arg-type]


def test_one_budget_is_divided_not_given_to_each_pool() -> None:
    """B28"""
    assert shares({"full": 3, "window": 1}, GB) == {"full": 750_000_000, "window": 250_000_000}


# pool, device slots, ratio -> pages of upstream
RATIOS: list[tuple[PoolSpec, int, float, int]] = [
    (presets.mha(2, 2, 8, BF16, 64), 1000, 1.5, 24),
    (presets.mha(2, 2, 8, BF16, 64, v_head_dim=4), 1000, 1.5, 24),
    (presets.mha_k_only(2, 2, 8, BF16, 64), 1000, 1.5, 24),
    (presets.mla(2, 8, BF16, 64), 1000, 1.5, 24),
    (presets.mha_quantised(2, 2, 8, 1, 64), 1000, 1.5, 24),
    (replace(presets.mla(2, 8, BF16, 64), family="custom"), 1000, 1.5, 24),
    (presets.mamba(2, [(3, 2)]), 100, 1.5, 151),
    (presets.v4_paged("c4", 2, 37440), 1000, 1.5, 6),  # ceil(1000 / 256) = 4 pages on the device
    (presets.v4_paged("c4", 2, 37440), 1025, 1.5, 7),
    (presets.v4_paged("c4", 2, 37440), 1024, 2.0, 8),
    (presets.v4_state("c4_state", 2, 8, 8192), 1000, 1.5, 6),
    (PoolSpec("kv", 0, 256, (), "logical"), 1000, 1.5, 6),
]


@pytest.mark.parametrize(("spec", "device_slots", "ratio", "right"), RATIOS)
def test_the_padding_page_of_upstream_depends_on_the_kind_of_pool(
    spec: PoolSpec, device_slots: int, ratio: float, right: int
) -> None:
    """B28: token pools and states get one more, DeepSeek V4 none; "fit" is the same for all."""
    assert pages_for_ratio(spec, device_slots, ratio, rule="sglang") == right
    assert pages_for_ratio(spec, device_slots, ratio) == int(device_slots * ratio) // spec.page_size


@pytest.mark.parametrize(("page_size", "anchor_pages", "right"), [(64, 24, 25), (2, 751, 752), (1, 1501, 1503)])
def test_an_indexer_has_more_pages_than_its_anchor(page_size: int, anchor_pages: int, right: int) -> None:
    """B28: (size + P + 1) // P, where size is the anchor's slots on the host, its padding page included."""
    anchor, indexer = presets.mla(2, 8, BF16, page_size), presets.dsa_indexer(2, page_size=page_size)
    assert pages_for_ratio(anchor, 1000, 1.5, rule="sglang") == anchor_pages
    size = anchor_pages * page_size
    assert pages_for_ratio(indexer, size, 1, rule="sglang") == (size + page_size + 1) // page_size == right
    assert pages_for_ratio(indexer, size, 1) == anchor_pages


def test_bytes_buy_states_and_one_more() -> None:
    """B28"""
    spec = presets.mamba(1, [(50,)], BYTE)
    assert pages_for_bytes(spec, 999) == 19
    assert pages_for_bytes(spec, 999, rule="sglang") == 20


@pytest.mark.parametrize(
    "spec",
    [
        presets.v4_paged("c4", 2, 37440),
        presets.v4_state("c4_state", 2, 8, 8192),
        presets.dsa_indexer(2, page_size=64),
    ],
    ids=lambda spec: spec.family,
)
def test_what_upstream_does_not_size_by_bytes_is_refused(spec: PoolSpec) -> None:
    """B28: `--hicache-size` is refused for DeepSeek V4, an indexer follows its anchor; "fit" takes bytes for all."""
    for ask in (lambda: pages_for_bytes(spec, GB, "sglang"), lambda: common_pages([spec], GB, "sglang")):
        with pytest.raises(ValueError, match=f"sizes no {spec.family} pool by bytes"):
            ask()
    assert pages_for_bytes(spec, GB) == common_pages([spec], GB) == GB // spec.page_bytes


V2, V1_IN_GROUP = ("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")
V1 = ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes")


def limit(root: Path, names: tuple[str, str], allowed: int | str, used: int) -> None:
    for name, value in zip(names, (allowed, used), strict=True):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{value}\n")


@pytest.mark.parametrize("names", [V2, V1], ids=["v2", "v1"])
def test_a_budget_stays_below_the_limit_of_the_container(names: tuple[str, str], tmp_path: Path) -> None:
    """B28: (limit - usage - reserve) // ranks, exactly; no machine that runs this has less than 3 MB left."""
    limit(tmp_path, names, 5_000_000, 2_000_000)
    totals = {
        (ranks, reserve): Budget.of_this_machine(ranks, reserve, tmp_path).total
        for ranks, reserve in [(1, 0), (2, 0), (1, 1_000_000), (3, 1_000_000), (1, 3_000_001)]
    }
    assert list(totals.values()) == [3_000_000, 1_500_000, 2_000_000, 666_666, 0]


def test_the_tighter_of_two_limits_counts(tmp_path: Path) -> None:
    """B28"""
    limit(tmp_path, V2, 5_000_000, 2_000_000)
    limit(tmp_path, V1, 4_000_000, 2_000_000)
    assert Budget.of_this_machine(1, 0, tmp_path).total == 2_000_000
    limit(tmp_path, V2, 5_000_000, 6_000_000)
    assert Budget.of_this_machine(1, 0, tmp_path).total == 0


@pytest.mark.parametrize("case", ["absent", "max", "more than there is"])
def test_without_a_limit_the_memory_of_the_machine_counts(case: str, tmp_path: Path) -> None:
    """B28: what is available changes all the time, so only bounds are known."""
    if case == "max":
        limit(tmp_path, V2, "max", 2_000_000)
    elif case == "more than there is":
        limit(tmp_path, V1, 2**63 - 4096, 2_000_000)
    assert 3_000_000 < Budget.of_this_machine(1, 0, tmp_path).total <= psutil.virtual_memory().total
    assert Budget.of_this_machine(1, 2**62, tmp_path).total == 0


@pytest.mark.skipif(not Path("/proc/self/cgroup").exists(), reason="control groups are Linux's")
def test_the_group_of_this_process_counts_like_those_around_it(tmp_path: Path) -> None:
    """B28"""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "memory"):
            root = tmp_path / (controllers or "unified")
            limit(root / controllers / path[1:], V1_IN_GROUP if controllers else V2, 5_000_000, 2_000_000)
            assert Budget.of_this_machine(1, 0, root).total == 3_000_000
    assert sum(shares({"a": 1, "b": 1, "c": 1}, GB).values()) <= GB


# ---- B29  Nothing to do

EVERY_KIND = {
    "mha": presets.mha(2, 2, 4, BF16, 4),
    "mla": presets.mla(2, 12, BYTE, 4, split=(8, 4)),
    "index keys": presets.dsa_indexer((0, 2), 4, 4, 4),
    "states": presets.mamba(2, [(3, 2)], BF16, (2, 2), torch.float32, [((3,), BYTE)]),
    "compressed": presets.v4_paged("c4", 2, 25, 4, entries=1, entry_bytes=(9, 2)),
}


def allowed(specs: dict[str, PoolSpec]) -> list[tuple[str, str, str]]:
    """`(spec, layout, backend)` of every pair that a CPU allows."""
    layouts = [*LAYOUTS.values(), "page_unified", "page_first_kv_split"]
    return [
        (name, layout, backend)
        for name, layout, backend in itertools.product(specs, layouts, ("torch", "numba"))
        if support(specs[name], layout, backend, "backup")
    ]


@pytest.mark.parametrize(
    "nothing", [torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int32), None], ids=str
)
@pytest.mark.parametrize(("kind", "layout", "backend"), allowed(EVERY_KIND))
def test_no_indices_complete_and_move_nothing(
    kind: str, layout: str, backend: str, nothing: torch.Tensor | None
) -> None:
    """B29"""
    spec = EVERY_KIND[kind]
    host, device = host_pool(spec, layout, 3, backend), DevicePool(spec, 3)
    poison(device)
    receipts = [
        host.backup(device, nothing, nothing),
        host.load_all(device, nothing, nothing),
        host.load(device, nothing, nothing, 0),
        host.prepare(device, nothing, nothing, "load").run((1, 0)),
    ]
    assert all((r.path, r.bytes, r.descriptors, r.kernels) == (backend, 0, 0, 0) for r in receipts)
    for _, held in host.storage:
        assert all(set(raw(tensor)) == {POISON} for tensor in held)
    for c in spec.components:
        for layer in spec.layers_of(c):
            assert set(raw(device.buffer(c.name, layer))) == {POISON}


EMPTY = {
    "no layers": presets.mha(0, 2, 4, BF16, 4),
    "a rank that owns no index layers": PoolSpec(
        "indexer", 3, 4, (Component("index_k", BYTE, dim=8, unit="page", layers=()),)
    ),
    "rows of no bytes": presets.mla(2, 0, BF16, 4),
    "no pool at all": PoolSpec("kv", 0, 4, (), "logical"),
}


@pytest.mark.parametrize(("kind", "layout", "backend"), allowed(EMPTY))
def test_a_pool_that_stores_nothing_registers_nothing_and_moves_nothing(kind: str, layout: str, backend: str) -> None:
    """B29"""
    spec, registrar = EMPTY[kind], Registrar()
    host = HostPool(spec, layout, 3, backend, memory=HostMemory(registrar), registration_limit=MIB)
    device = DevicePool(spec, 3)
    some = slots([2, 0], 4)
    for receipt in (
        host.backup(device, some, some),
        host.load_all(device, some, some),
        host.load(device, some, some, 0),
    ):
        assert receipt.bytes == 0
    assert host.nbytes == 0 == host.get_data_page(4).numel()
    assert host.alloc(12) is not None, "it still owns its slots"
    assert {name: len(p) for name, p in host.device_ptrs.items()} == {n: len(r) for n, r in host.data_refs.items()}
    assert sum(host.get_contiguous_buf_infos()[1]) == 0
    host.close()
    assert not registrar.calls


@cpu_backend
@pytest.mark.parametrize("layout", ["page_first", "page_first_direct"])
def test_a_state_without_elements_lies_beside_one_that_has_some(layout: str, backend: str) -> None:
    """B29: conv-only models keep a temporal state of no elements."""
    spec = presets.mamba(2, [(3, 2)], BF16, (0, 4))
    registrar = Registrar()
    with HostPool(spec, layout, 5, backend, memory=HostMemory(registrar)) as host:
        assert list(registrar.live.values()) == [5 * 2 * 12]
        device = DevicePool(spec, 5)
        fill(device, {"conv_0": 3, "temporal": 5})
        before = [device.buffer("conv_0", layer)[4].clone() for layer in range(2)]
        host.backup(device, torch.tensor([1]), torch.tensor([4]))
        assert torch.equal(host.page(1)["conv_0"].view(BYTE), torch.stack(before).view(BYTE))
        assert host.page(1)["temporal"].shape == (2, 0, 4)
        assert host.device_ptrs["conv_0"].tolist() == [p + Registrar.ALIAS for p in host.data_ptrs["conv_0"].tolist()]


def test_an_optional_side_pool_may_have_nothing_to_move() -> None:
    """B29"""
    anchor, states = HostPool(EVERY_KIND["mha"], "page_first", 3), HostPool(EVERY_KIND["states"], "page_first", 3)
    resolved = HostPoolGroup([anchor, states]).resolve(
        [PoolTransfer("kv", device_indices=torch.arange(8)), PoolTransfer("mamba")]
    )
    assert resolved is not None
    device, slots = DevicePool(states.spec, 3), resolved[1].device_indices
    assert slots is None
    receipt = states.backup(device, resolved[1].host_indices, slots)
    assert receipt.bytes == 0
    assert states.available_size() == 3


# ---- B31  Very many descriptors


@every_mover
@pytest.mark.parametrize(
    ("layout", "keys", "values"),
    [("lf", "1f3b3f6c", "d5b1a5c2"), ("pfd", "78da3635", "ab747a79"), ("pf", "78da3635", "ab747a79")],
)
def test_sixty_thousand_runs_in_one_transfer(layout: str, keys: str, values: str, mover: str) -> None:
    """B31"""
    spec = presets.mha(30, 2, 16, BF16, 1)
    host, device = host_pool(spec, layout, 1009, mover), DevicePool(spec, 1000)
    fill_many(device)
    host_slots, device_slots = torch.arange(1000) * 7 % 1009, torch.arange(999, -1, -1)
    if mover != "oracle":
        receipt = host.backup(device, host_slots, device_slots)
        receipt.wait()
        assert (receipt.bytes, receipt.descriptors) == (60_000 * 64, 60_000)
    else:
        backup(mover, host, device, host_slots, device_slots)
    assert (crc(host.buffer("k")), crc(host.buffer("v"))) == (keys, values)


@cpu_backend
@pytest.mark.parametrize("count", [8_192, 8_193])
def test_descriptor_counts_on_either_side_of_a_driver_limit(count: int, backend: str) -> None:
    """B31"""
    spec = presets.mha_k_only(1, 1, 4, BYTE, 1)
    host, device = host_pool(spec, "lf", count, backend), DevicePool(spec, count)
    device.buffer("k", 0).copy_(torch.arange(count, dtype=torch.int32).view(BYTE).view(count, 1, 4))
    receipt = host.backup(device, torch.arange(count), torch.arange(count).flip(0))
    assert receipt.descriptors == count
    assert torch.equal(whole(host, "k").view(torch.int32).flatten(), torch.arange(count, dtype=torch.int32).flip(0))


# ---- B36  An option is changed silently, or an illegal pair is run

MHA = presets.mha(2, 2, 64, BF16, 16)
STATES = presets.mamba(2, [(8, 4)], BF16, (4, 4))
LEGAL = {
    ("layer_first", "kernel"),
    ("layer_first", "direct"),
    ("page_first", "kernel"),
    ("page_first_direct", "direct"),
    ("page_head", "kernel"),
}
STATE_LAYOUTS = ("page_first", "page_first_direct")
NAMES = [*LAYOUTS.values(), "page_unified", "page_first_kv_split", "page_last"]
ENGINES = ["kernel", "direct", "warp"]
PAIRS = list(itertools.product(NAMES, ENGINES))


class RecordingMemory(HostMemory):
    """Remembers what was asked of it."""

    def __init__(self) -> None:
        super().__init__()
        self.taken: list[int] = []

    def map(self, nbytes: int) -> torch.Tensor:
        self.taken.append(nbytes)
        return super().map(nbytes)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(("layout", "backend"), PAIRS)
def test_the_engine_accepts_exactly_its_legal_pairs(layout: str, backend: str, direction: str) -> None:
    """B36"""
    assert bool(support(MHA, layout, backend, direction, "cuda", "sglang")) == ((layout, backend) in LEGAL)
    is_state_pair = layout in STATE_LAYOUTS and backend in ("kernel", "direct")
    assert bool(support(STATES, layout, backend, direction, "cuda", "sglang")) == is_state_pair


@pytest.mark.parametrize(
    ("spec", "layout", "backend"),
    [(MHA, *pair) for pair in PAIRS if pair not in LEGAL]
    + [(STATES, *pair) for pair in PAIRS if pair[0] not in STATE_LAYOUTS or pair[1] == "warp"],
    ids=lambda value: value.name if isinstance(value, PoolSpec) else value,
)
def test_an_illegal_pair_is_refused_by_name_before_memory_is_taken(spec: PoolSpec, layout: str, backend: str) -> None:
    """B36"""
    memory = RecordingMemory()
    with pytest.raises(UnsupportedPairing) as refused:
        HostPool(spec, layout, 4, backend, profile="sglang", memory=memory, platform="cuda")
    for told in (repr(layout), repr(backend), "sglang", "What would work"):
        assert told in str(refused.value)
    assert memory.taken == []


def test_a_legal_pair_does_take_memory() -> None:
    """B36: the proof that the recording memory of the test above would have seen it"""
    memory = RecordingMemory()
    HostPool(MHA, "page_first", 4, "torch", memory=memory)
    assert memory.taken == [4 * MHA.page_bytes]


def test_state_slots_are_not_paged() -> None:
    """B36"""
    assert STATES.page_size == 1
    with pytest.raises(ValueError, match="state slots need page_size 1, got 16"):
        replace(STATES, page_size=16)


OPTIONS = {
    "layout": [*LAYOUTS.values(), "page_first_kv_split"],
    "backend": ["kernel", "direct"],
    "storage": [None, "file", "mooncake"],
    "unified_memory": [False, True],
    "dcp": [1, 2],
    "npu": [False, True],
    "mla": [False, True],
}


@pytest.mark.parametrize("decode_receives_early", [False, True])
def test_start_up_settles_on_a_pair_that_it_would_not_change_again(decode_receives_early: bool) -> None:
    """B36: layout and backend are settled after the options they depend on, not before."""
    settled = 0
    for values in itertools.product(*OPTIONS.values()):
        options = dict(zip(OPTIONS, values, strict=True)) | {"decode_receives_early": decode_receives_early}
        if decode_receives_early and options["storage"] == "mooncake" and options["dcp"] == 1:
            with pytest.raises(ValueError, match="stores pages"):
                start_up(**options)  # type: ignore[arg-type]
            continue
        if options["dcp"] == 2 and not options["mla"]:
            with pytest.raises(NotImplementedError, match="needs a model with MLA"):
                start_up(**options)  # type: ignore[arg-type]
            continue
        first = start_up(**options)  # type: ignore[arg-type]
        if options["npu"]:
            assert first.backend == "kernel_ascend"
            continue
        pair = {"layout": first.layout, "backend": first.backend}
        again = start_up(**options | pair)  # type: ignore[arg-type]
        assert (again.layout, again.backend, again.changes) == (first.layout, first.backend, ()), options
        changed = any(options[name] != value for name, value in pair.items())
        assert bool(first.changes) == changed, options
        settled += 1
    assert settled > 50


@pytest.mark.parametrize(
    ("options", "pair"),
    [
        ({}, ("page_first", "kernel")),
        ({"layout": "page_first_direct"}, ("page_first_direct", "direct")),
        ({"backend": "direct"}, ("page_first_direct", "direct")),
        ({"layout": "layer_first", "storage": "mooncake"}, ("page_first", "kernel")),
        ({"layout": "layer_first", "storage": "mooncake", "backend": "direct"}, ("page_first_direct", "direct")),
        ({"layout": "layer_first", "storage": "mooncake", "dcp": 2, "mla": True}, ("layer_first", "kernel")),
        ({"backend": "direct", "unified_memory": True}, ("page_first", "kernel")),
        ({"decode_receives_early": True}, ("layer_first", "kernel")),
        ({"layout": "page_head", "backend": "direct"}, ("page_head", "direct")),  # not mended: the pool refuses it
    ],
    ids=str,
)
def test_start_up_reaches_the_pair_that_the_engine_would_use(options: dict[str, str], pair: tuple[str, str]) -> None:
    """B36"""
    result = start_up(**options)  # type: ignore[arg-type]
    assert (result.layout, result.backend) == pair
    asked = (options.get("layout", "page_first"), options.get("backend", "kernel"))
    assert bool(result.changes) == (pair != asked), "a change is told, and only a change"
