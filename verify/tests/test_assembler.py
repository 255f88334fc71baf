"""Stacks: every kind round-trips every pool; sizes and owners; what is refused, and that nothing was taken by then."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from refimpl import (
    Budget,
    Component,
    DevicePool,
    HostMemory,
    HostPool,
    PoolSpec,
    PoolTransfer,
    Refusal,
    Stack,
    UnsupportedPairing,
    build_stack,
    oracle,
    presets,
    support,
)
from refimpl.backends import registry
from refimpl.layout import LAYOUTS, buffers
from refimpl.pinned import Block
from refimpl.sizing import pages_for_ratio
from verify import fill
from verify.toys import STACKS

P = 4  # tokens a page


class CountedMemory(HostMemory):
    """Counts the blocks asked for; the one numbered `failing` cannot be had."""

    def __init__(self, failing: int | None = None) -> None:
        super().__init__()
        self.asked, self.failing = 0, failing

    def allocate(self, nbytes: int, piece_bytes: int, registration_limit: int | None = None) -> Block:
        self.asked += 1
        if self.asked - 1 == self.failing:
            raise OSError("no more memory")
        return super().allocate(nbytes, piece_bytes, registration_limit)


def refused_pools(kind: str, layout: str) -> list[str]:
    """Pools that cannot have the layout, by the support table; Mamba states have page_first_direct of themselves."""
    return [
        spec.name
        for spec in STACKS[kind](P).values()
        if isinstance(support(spec, layout, "torch", "load"), Refusal)
        and (spec.family, layout) != ("mamba", "page_first_kv_split")
    ]


ALLOWED = [(kind, layout) for kind in STACKS for layout in LAYOUTS if not refused_pools(kind, layout)]
REFUSED = [(kind, layout) for kind in STACKS for layout in LAYOUTS if refused_pools(kind, layout)]


def test_every_kind_of_stack_has_the_three_layouts_that_are_everybodys() -> None:
    for layout in ("layer_first", "page_first", "page_first_direct"):
        assert {kind for kind, other in ALLOWED if other == layout} == set(STACKS)
    assert len(ALLOWED) == 3 * len(STACKS) + 12


def images(pool: HostPool | DevicePool) -> list[np.ndarray]:
    owned = [(c.name, layer) for c in pool.spec.components for layer in pool.spec.layers_of(c)]
    if isinstance(pool, HostPool):
        return [fill.host_image(pool, name, layer) for name, layer in owned]
    return [fill.device_image(pool, name, layer) for name, layer in owned]


def require_alike(found: HostPool | DevicePool, expected: HostPool | DevicePool) -> None:
    for mine, right in zip(images(found), images(expected), strict=True):
        np.testing.assert_array_equal(mine, right)


ON_THE_HOST = [(kind, layout, backend) for kind, layout in ALLOWED for backend in ("torch", "numba")]
ON_A_DEVICE = [
    pytest.param(kind, "page_first", backend, marks=pytest.mark.emulated)
    for kind in ("swa-mamba", "v4")
    for backend in ("direct", "kernel", "staged", "auto")
]


@pytest.mark.parametrize(("kind", "layout", "backend"), [*ON_THE_HOST, *ON_A_DEVICE])
def test_pages_of_every_pool_come_back(kind: str, layout: str, backend: str) -> None:
    platform = "cpu" if backend in ("torch", "numba") else "emulated"
    with build_stack(STACKS[kind](P), layout, backend, device_pages=4, host_ratio=1.5, platform=platform) as stack:
        rows = {name: slots.alloc(2 * _unit(stack, name)) for name, slots in stack.device_slots.items()}
        resolved = stack.host.resolve([PoolTransfer(name, None, rows.get(name)) for name in reversed(stack.specs)])
        assert resolved is not None
        for t in resolved:
            host, device = stack.host.pools[t.name], stack.device[t.name]
            fill.fill_device(device)
            taken = rows[stack.owner(t.name)]
            assert t.device_indices is taken
            expected = HostPool(host.spec, host.layout, host.num_pages)
            oracle.backup(expected, device, t.host_indices, taken)
            host.backup(device, t.host_indices, taken).wait()
            require_alike(host, expected)
            back, right = (DevicePool(host.spec, device.num_pages) for _ in range(2))
            oracle.load(expected, right, t.host_indices, taken)
            host.load_all(back, t.host_indices, taken).wait()
            require_alike(back, right)
        assert stack.host.release(resolved) == sum(2 * _unit(stack, name) for name in stack.device_slots)


def _unit(stack: Stack, name: str) -> int:
    return stack.specs[name].page_size


# ---- layouts and backends


@pytest.mark.parametrize(("kind", "layout"), REFUSED)
def test_a_layout_that_a_pool_cannot_have_is_refused_naming_it_and_the_way_out(kind: str, layout: str) -> None:
    memory = CountedMemory()
    first = refused_pools(kind, layout)[0]
    with pytest.raises(UnsupportedPairing, match=rf"pool '{first}' .*pools={{'{first}': \(layout, backend\)}}"):
        build_stack(STACKS[kind](P), layout, device_pages=4, host_ratio=1, memory=memory)
    assert memory.asked == 0


def test_a_pool_may_have_a_layout_and_a_backend_of_its_own() -> None:
    specs = STACKS["dsa"](P)
    pools = {"indexer": ("layer_first", "numba")}
    with build_stack(specs, "page_first_kv_split", pools=pools, device_pages=4, host_ratio=1) as stack:
        pairs = {name: (pool.layout, pool.backend) for name, pool in stack.host.pools.items()}
    assert pairs == {"kv": ("page_first_kv_split", "torch"), "indexer": ("layer_first", "numba")}


def test_states_beside_split_rows_are_kept_in_page_first_direct() -> None:
    specs = STACKS["mla-mamba"](P)
    with build_stack(specs, "page_first_kv_split", device_pages=4, host_ratio=1) as stack:
        assert [pool.layout for pool in stack.host.pools.values()] == ["page_first_kv_split", "page_first_direct"]
    chosen = {"mamba": ("layer_first", "torch")}
    with build_stack(specs, "page_first_kv_split", pools=chosen, device_pages=4, host_ratio=1) as stack:
        assert stack.host.pools["mamba"].layout == "layer_first"


@pytest.mark.parametrize(
    ("pair", "told"),
    [
        (("page_first", "kernel"), "pool 'c128' .* not cpu"),
        (("sideways", "torch"), "pool 'c128' .* no layout 'sideways'"),
        (("page_first", "teleport"), "pool 'c128' .* no backend 'teleport'"),
    ],
)
def test_a_pair_that_cannot_be_is_refused_also_for_one_pool(pair: tuple[str, str], told: str) -> None:
    memory = CountedMemory()
    with pytest.raises(UnsupportedPairing, match=told):
        build_stack(STACKS["v4"](P), pools={"c128": pair}, device_pages=4, host_ratio=1, platform="cpu", memory=memory)
    assert memory.asked == 0


def test_a_backend_that_is_not_here_is_refused_before_memory_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "unavailable", lambda name, platform: "no compiler" if name == "numba" else None)
    memory = CountedMemory()
    with pytest.raises(
        UnsupportedPairing, match="pool 'swa' with layout 'page_first' and backend 'numba': no compiler"
    ):
        build_stack(
            STACKS["swa"](P), pools={"swa": ("page_first", "numba")}, device_pages=4, host_ratio=1, memory=memory
        )
    assert memory.asked == 0


def test_the_rules_of_an_engine_can_be_asked_for() -> None:
    with pytest.raises(UnsupportedPairing, match=r"pool 'kv' .*profile 'sglang'.* 'torch' is no I/O backend of SGLang"):
        build_stack(STACKS["mha"](P), device_pages=4, host_ratio=1, profile="sglang")


# ---- pools and their order


def riding(spec: PoolSpec, source: str | None) -> PoolSpec:
    return replace(spec, indices_from=source)


KV, SWA = STACKS["swa"](P).values()


@pytest.mark.parametrize(
    ("specs", "told"),
    [
        ({}, "at least its anchor, got no pools"),
        ({"k": KV}, "pool 'kv' stands under the name 'k'"),
        ({"kv": riding(KV, "swa"), "swa": SWA}, "the first pool is the anchor .* 'kv' rides on 'swa'"),
        ({"kv": KV, "swa": riding(SWA, "full")}, r"'swa' rides on 'full', which must come before it .*\['kv'\]"),
        ({"kv": KV, "swa": riding(SWA, "swa")}, "'swa' rides on 'swa', which must come before it"),
        ({"kv": KV, "swa": riding(replace(SWA, page_size=8), "kv")}, "'swa' has pages of 8, but 'kv', .* pages of 4"),
    ],
)
def test_pools_that_make_no_stack_are_refused(specs: dict[str, PoolSpec], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        build_stack(specs, device_pages=4, host_ratio=1)


def test_a_model_by_name_is_that_of_a_rank() -> None:
    with build_stack("gpt-oss-20b", tp=4, page_size=16, device_pages=2, host_ratio=1) as stack:
        assert stack.specs == presets.model("gpt-oss-20b", 4, 16)
        assert stack.specs["kv"].owned_layers == tuple(range(1, 24, 2))
        assert stack.specs["kv"].page_bytes == 16 * 12 * 2 * 2 * 64 * 2 == stack.specs["swa"].page_bytes
        assert stack.layer_map("swa") == {layer: layer // 2 for layer in range(0, 24, 2)}


@pytest.mark.parametrize("options", [{"tp": 2}, {"page_size": 64}])
def test_pools_have_their_own_geometry(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="are for models by name"):
        build_stack(STACKS["mha"](P), device_pages=4, host_ratio=1, **options)


@pytest.mark.parametrize(
    ("kind", "owners"),
    [
        ("mha-draft", {"kv": "kv", "draft": "kv"}),
        ("swa", {"kv": "kv", "swa": "swa"}),
        ("swa-mamba", {"kv": "kv", "swa": "swa", "mamba": "mamba"}),
        ("v4", {"kv": "kv", "swa": "swa"} | dict.fromkeys(("c4", "c4_indexer", "c128"), "kv")),
        ("v4", dict.fromkeys(("c4_state", "c4_indexer_state"), "swa")),
    ],
)
def test_each_pool_has_an_owner_of_its_indices(kind: str, owners: dict[str, str]) -> None:
    with build_stack(STACKS[kind](P), device_pages=4, host_ratio=1) as stack:
        assert {name: stack.owner(name) for name in owners} == owners
        assert set(stack.device_slots) == {name for name in stack.specs if stack.owner(name) == name}
        with pytest.raises(KeyError, match="no pool 'c3', it has"):
            stack.owner("c3")


def test_a_rider_of_a_rider_uses_the_indices_of_the_first() -> None:
    second = replace(SWA, name="draft_2", indices_from="draft")
    specs = {"kv": KV, "draft": replace(SWA, name="draft", indices_from="kv"), "draft_2": second}
    with build_stack(specs, device_pages=4, host_ratio=2) as stack:
        assert stack.owner("draft_2") == "kv"
        assert {pool.num_pages for pool in stack.host.pools.values()} == {8}


@pytest.mark.parametrize(
    ("kind", "pool", "positions", "spanned"),
    [
        ("swa", "kv", {1: 0, 3: 1}, 5),
        ("swa", "swa", {0: 0, 2: 1, 4: 2}, 5),
        ("mamba", "mamba", {0: 0, 1: 1, 3: 2}, 5),  # side states have no layer
        ("dsa", "indexer", {0: 0, 2: 1}, 4),
        ("mha-draft", "draft", {2: 0}, 3),
        ("v4", "kv", {}, 5),
        ("v4", "c128", {3: 0}, 5),
        ("v4", "c4_state", {2: 0, 4: 1}, 5),
    ],
)
def test_model_layers_have_places_in_a_pool(kind: str, pool: str, positions: dict[int, int], spanned: int) -> None:
    with build_stack(STACKS[kind](P), device_pages=2, host_ratio=1) as stack:
        assert stack.layer_map(pool) == positions
        assert stack.num_layers == spanned


def test_a_layer_map_follows_the_order_in_which_layers_are_stored() -> None:
    spec = PoolSpec("kv", 4, P, (Component("row", torch.uint8, dim=3, layers=(3, 1)),))
    with build_stack({"kv": spec}, device_pages=2, host_ratio=1) as stack:
        assert stack.layer_map("kv") == {3: 0, 1: 1}


# ---- DeepSeek V4


def test_deepseek_v4_flash_has_the_sizes_of_the_model() -> None:
    pages = {"kv": 3, "swa": 2}
    with build_stack("deepseek-v4-flash", device_pages=pages, host_ratio=1.5) as stack:
        host = stack.host.pools
        held: dict[str, int] = {"kv": 0, "swa": 0}
        for name, pool in host.items():
            held[stack.owner(name)] += pool.nbytes
        assert (host["kv"].num_pages, host["swa"].num_pages) == (4, 3)  # rounded down, as upstream does here
        assert held == {"kv": 4 * 998_208, "swa": 3 * 8_160_000}
        assert round(held["kv"] / host["kv"].size) == 3_899
        assert [len(stack.layer_map(name)) for name in ("kv", "swa", "c4", "c128")] == [0, 43, 21, 20]
        assert stack.layer_map("c4") == {layer: layer // 2 - 1 for layer in range(2, 43, 2)}
        assert stack.layer_map("c128") == {layer: (layer - 3) // 2 for layer in range(3, 42, 2)}
        assert stack.num_layers == 43
        assert {name: pool.num_pages for name, pool in stack.device.items()} == {
            **dict.fromkeys(("kv", "c4", "c4_indexer", "c128"), 3),
            **dict.fromkeys(("swa", "c4_state", "c4_indexer_state"), 2),
        }


# ---- sizes


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"device_pages": 4}, "give host_ratio or host_bytes, one of them; got None and None"),
        ({"device_pages": 4, "host_ratio": 2, "host_bytes": 9}, "one of them; got 2 and 9"),
        ({"host_ratio": 2}, r"device_pages must be one number, or one for each .*\['kv', 'swa'\]; got None"),
        ({"device_pages": {"kv": 4}, "host_ratio": 2}, r"\['kv', 'swa'\]; got {'kv': 4}"),
        ({"device_pages": {"kv": 4, "swa": 4, "c4": 4}, "host_ratio": 2}, r"\['kv', 'swa'\]; got"),
        ({"device_pages": {"kv": 4, "swa": -1}, "host_ratio": 2}, "'swa': device_pages must not be negative, got -1"),
        ({"device_pages": {"kv": 8, "swa": 1}, "host_ratio": 0.5}, "host_ratio=0.5 leaves pool 'swa' no page on the"),
        ({"device_pages": 4, "host_ratio": 0}, "host_ratio=0 leaves pool 'kv' no page on the host for 4"),
        ({"device_pages": {"kv": 4, 7: 4}, "host_ratio": 1}, r"\['kv', 'swa'\]; got {'kv': 4, 7: 4}"),
        ({"device_pages": 4, "host_bytes": 400}, "host_bytes=400 leaves pool 'kv' no page .* takes 74 bytes"),
        ({"device_pages": 4, "host_ratio": 1, "staging_pages": 1}, "'kv': staging_pages must be from 2"),
        ({"device_pages": 4, "host_ratio": 1, "pools": {"c3": ("page_first", "torch")}}, r"pools names \['c3'\]"),
    ],
)
def test_sizes_that_are_missing_or_come_to_nothing_are_refused(options: dict[str, Any], told: str) -> None:
    memory = CountedMemory()
    with pytest.raises(ValueError, match=told):
        build_stack(STACKS["v4"](P), memory=memory, **options)
    assert memory.asked == 0


PAIR = r"pools={'c128': \(layout, backend\)} is two names"
V4 = STACKS["v4"](P)


@pytest.mark.parametrize(
    ("options", "error", "told"),
    [
        ({"device_pages": True}, TypeError, "device_pages must be a whole number.*; got True"),
        ({"device_pages": 8.0}, TypeError, "device_pages must be a whole number.*; got 8.0"),
        ({"device_pages": "8"}, TypeError, "device_pages must be a whole number.*; got '8'"),
        ({"device_pages": {"kv": 4.0, "swa": 4}}, TypeError, "one for each pool by name; got {'kv': 4.0, 'swa': 4}"),
        ({"device_pages": {"kv": 4, "swa": None}}, TypeError, "one for each pool by name; got {'kv': 4, 'swa': None}"),
        ({"device_pages": {"kv": 4, "swa": True}}, TypeError, "one for each pool by name; got {'kv': 4, 'swa': True}"),
        ({"host_bytes": 1e6}, TypeError, "host_bytes must be a whole number of bytes, got 1000000.0"),
        ({"host_bytes": "9000"}, TypeError, "host_bytes must be a whole number of bytes, got '9000'"),
        ({"host_bytes": True}, TypeError, "host_bytes must be a whole number of bytes, got True"),
        ({"host_ratio": float("nan")}, ValueError, "host_ratio must be a number of host pages .*, got nan"),
        ({"host_ratio": float("inf")}, ValueError, "host_ratio must be a number of host pages .*, got inf"),
        ({"host_ratio": -1}, ValueError, "host_ratio must be a number of host pages .* from 0 to 1,000,000, got -1"),
        ({"host_ratio": 1e300}, ValueError, r"host_ratio must be a number of host pages .*, got 1e\+300"),
        ({"host_ratio": "2"}, ValueError, "host_ratio must be a number of host pages .*, got '2'"),
        ({"budget": "1GB"}, TypeError, "host memory: a budget is a Budget, which pools share, got '1GB'"),
        ({"device_budget": 9}, TypeError, "device memory for staging: a budget is a Budget, which pools share, got 9"),
        ({"pools": {"c128": "page_first"}}, TypeError, f"{PAIR}, got 'page_first'"),
        ({"pools": {"c128": "pf"}}, TypeError, f"{PAIR}, got 'pf'"),
        ({"pools": {"c128": ("page_first",)}}, TypeError, PAIR),
        ({"pools": {"c128": ["page_first", "torch"]}}, TypeError, PAIR),
        ({"pools": {"c128": ("page_first", None)}}, TypeError, PAIR),
        ({"device": {"kv": None}}, TypeError, "device={'kv': …} must be a DevicePool .*, got None"),
        ({"device": {"kv": V4["kv"]}}, TypeError, "device={'kv': …} must be a DevicePool .*, got PoolSpec"),
        ({"model": list(V4.values())}, TypeError, r"a model's name or PoolSpecs by name, got \[PoolSpec"),
        ({"model": V4["swa"]}, TypeError, "a model's name or PoolSpecs by name, got PoolSpec"),
        ({"model": {"kv": "mha"}}, TypeError, "a model's name or PoolSpecs by name, got {'kv': 'mha'}"),
        ({"model": None}, TypeError, "a model's name or PoolSpecs by name, got None"),
    ],
)
@pytest.mark.parametrize("platform", [None, "cpu"])
def test_what_is_of_the_wrong_kind_is_refused_by_name(
    options: dict[str, Any], error: type[Exception], told: str, platform: str | None
) -> None:
    memory, budget = CountedMemory(), Budget(10**6)
    asked: dict[str, Any] = {"model": V4, "device_pages": 4, "platform": platform, "budget": budget, **options}
    if "host_bytes" not in options:
        asked.setdefault("host_ratio", 1)
    with pytest.raises(error, match=told):
        build_stack(**asked, memory=memory)
    assert (memory.asked, budget.available) == (0, 10**6)


@pytest.mark.parametrize(("pages", "ratio", "exact"), [(100, 1.16, 116), (6, 4 / 6, 4), (7, 1, 7), (3, 0.5, 1)])
def test_a_ratio_is_what_is_written(pages: int, ratio: float, exact: int) -> None:
    """100 times 1.16 is 116, though not in floating point."""
    assert pages_for_ratio(presets.mla(layers=1, page_size=4), 4 * pages, ratio) == exact


def test_a_ratio_counts_pool_by_pool_and_rounds_down() -> None:
    pages = {"kv": 5, "swa": 3, "mamba": 9}
    with build_stack(STACKS["swa-mamba"](P), device_pages=pages, host_ratio=1.5) as stack:
        assert {name: pool.num_pages for name, pool in stack.host.pools.items()} == {"kv": 7, "swa": 4, "mamba": 13}
        assert {name: pool.num_pages for name, pool in stack.device.items()} == pages


def test_one_gigabyte_is_divided_three_to_one_and_not_given_twice() -> None:
    """A full and a window pool of 3:1 bytes on the device share 1 GB as 0.75 and 0.25 (vLLM 50443, sglang 32373)."""
    kv = presets.mha(3, 8, 128, page_size=64)
    swa = presets.mha(1, 8, 128, page_size=64, name="swa")
    specs = {"kv": kv, "swa": swa}
    with build_stack(specs, device_pages=2, host_bytes=10**9) as stack:
        held = [pool.nbytes for pool in stack.host.pools.values()]
        assert held == [750_000_000 // kv.page_bytes * kv.page_bytes, 250_000_000 // swa.page_bytes * swa.page_bytes]
    pages = {"kv": 2, "swa": 6}
    with build_stack(specs, device_pages=pages, host_bytes=10**9, budget=Budget(10**9)) as stack:
        halves = [500_000_000 // kv.page_bytes, 500_000_000 // swa.page_bytes]
        assert [pool.num_pages for pool in stack.host.pools.values()] == halves


def test_bytes_of_riders_count_for_their_owner() -> None:
    specs = STACKS["v4"](P)
    full, window = 36 + 24 + 14, 245 + 88 + 48
    given = 10 * full + 5 * window
    with build_stack(specs, device_pages={"kv": 4, "swa": 2}, host_bytes=given) as stack:
        assert stack.host.pools["kv"].num_pages == stack.host.pools["c128"].num_pages == 10
        assert stack.host.pools["swa"].num_pages == stack.host.pools["c4_state"].num_pages == 5
        assert sum(pool.nbytes for pool in stack.host.pools.values()) == given


def test_pools_without_layers_or_bytes_are_built_and_move_nothing() -> None:
    """A rank may own no layer of a pool (FlexKV 269, sglang 38426)."""
    specs = {"kv": presets.mha(0, 2, 8, page_size=P), "swa": SWA, "mamba": presets.mamba((0, 1), [(0, 3)])}
    memory = CountedMemory()
    with build_stack(specs, device_pages=4, host_bytes=6 * SWA.page_bytes, memory=memory) as stack:
        assert [pool.num_pages for pool in stack.host.pools.values()] == [6, 6, 6]
        assert [stack.get_hybrid_pool_buffer(name) for name in ("kv", "mamba")] == [[], []]
        for name in ("kv", "mamba"):
            pool = stack.host.pools[name]
            rows, slots = stack.device_slots[name].alloc(pool.page_size), pool.alloc(pool.page_size)
            assert pool.backup(stack.device[name], slots, rows).bytes == 0
            assert pool.load_all(stack.device[name], slots, rows).bytes == 0
    nothing = {name: specs[name] for name in ("kv", "mamba")}
    with build_stack(nothing, device_pages=4, host_bytes=10**9) as stack:
        assert [pool.num_pages for pool in stack.host.pools.values()] == [4, 4]
    with build_stack(specs, device_pages=0, host_ratio=1) as stack:
        assert stack.host.size == 0


def test_page_0_of_the_device_is_padding() -> None:
    with build_stack(STACKS["mamba"](P), device_pages=3, host_ratio=1) as stack:
        assert {name: slots.available_size() for name, slots in stack.device_slots.items()} == {"kv": 8, "mamba": 2}
        assert stack.device_slots["kv"].alloc(4).tolist() == [4, 5, 6, 7]  # pyright: ignore[reportOptionalMemberAccess]
        assert stack.host.size == 3 * P


# ---- device pools that exist already


def test_device_pools_of_an_engine_are_used_as_they_are() -> None:
    specs = STACKS["v4"](P)
    swa = DevicePool(specs["swa"], 6)
    states = DevicePool.wrap(specs["c4_state"], {"c4_state": [torch.zeros(7, 44, dtype=torch.uint8) for _ in range(2)]})
    wrapped = {"swa": swa, "c4_state": states}
    with build_stack(specs, device=wrapped, device_pages=3, host_ratio=1) as stack:
        assert stack.device["swa"] is swa
        assert stack.device["c4_state"] is states
        assert {name: pool.num_pages for name, pool in stack.host.pools.items()} == {
            **dict.fromkeys(("kv", "c4", "c4_indexer", "c128"), 3),
            **dict.fromkeys(("swa", "c4_state", "c4_indexer_state"), 6),
        }
        assert stack.device_slots["swa"].num_pages == 6


TARGET = replace(presets.mla(4, 64, page_size=16), name="kv")
DRAFT = replace(presets.mla((4,), 64, page_size=16), name="draft", indices_from="kv")


@pytest.mark.parametrize(
    ("device", "options", "told"),
    [
        (
            {"kv": DevicePool(TARGET, 8), "draft": DevicePool(DRAFT, 4)},
            {},
            "'draft' has 4 pages, but 'kv', whose indices it shares, has 8; give it as many",
        ),
        ({"draft": DevicePool(DRAFT, 4)}, {"device_pages": 8}, "'draft' has 4 pages, but 'kv', .* has 8"),
        ({"kv": DevicePool(replace(TARGET, page_size=8), 4)}, {}, "device pool 'kv' stores .* the stack's stores"),
        ({"eagle": DevicePool(DRAFT, 4)}, {"device_pages": 4}, r"device names \['eagle'\], which the stack lacks"),
        ({"kv": DevicePool(TARGET, 8)}, {"device_pages": 8}, r"device_pages must be .*: \[\]; got 8"),
        ({"kv": DevicePool(TARGET, 8, "meta")}, {}, "device pool 'kv' lies on meta, platform 'cpu' does not"),
    ],
)
def test_device_pools_that_do_not_fit_are_refused(
    device: dict[str, DevicePool], options: dict[str, Any], told: str
) -> None:
    """A draft pool with physical rows, riding on wider logical indices, would fail at high ones (sglang 27953)."""
    memory = CountedMemory()
    with pytest.raises(ValueError, match=told):
        build_stack({"kv": TARGET, "draft": DRAFT}, device=device, host_ratio=1, memory=memory, **options)
    assert memory.asked == 0


def test_pages_of_a_wrapped_pool_without_buffers_cannot_be_counted() -> None:
    specs = STACKS["v4"](P)
    with pytest.raises(ValueError, match=r"device pool 'kv' wraps no buffer .* leave it out of `device`"):
        build_stack(specs, device={"kv": DevicePool.wrap(specs["kv"], {})}, device_pages=4, host_ratio=1)


# ---- budgets, failures, closing


@pytest.mark.parametrize("kind", STACKS)
def test_pools_that_exceed_the_budget_together_are_refused_before_memory_is_taken(kind: str) -> None:
    specs = STACKS[kind](P)
    needed = 4 * sum(spec.page_bytes for spec in specs.values())
    memory, budget = CountedMemory(), Budget(needed - 1)
    with pytest.raises(MemoryError, match=f"the stack needs {needed:,} bytes of host memory .* {needed - 1:,} are"):
        build_stack(specs, device_pages=4, host_ratio=1, memory=memory, budget=budget)
    assert (memory.asked, budget.available) == (0, needed - 1)
    enough = Budget(needed)
    with build_stack(specs, device_pages=4, host_ratio=1, memory=memory, budget=enough) as stack:
        assert memory.asked > 0
        assert enough.available == 0
    assert enough.available == needed
    assert all(pool.closed for pool in stack.host.pools.values())


@pytest.mark.parametrize("kind", STACKS)
def test_a_failure_half_way_closes_what_was_built(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[HostPool] = []
    construct = HostPool.__init__

    def noted(pool: HostPool, *args: Any, **options: Any) -> None:
        construct(pool, *args, **options)
        built.append(pool)

    monkeypatch.setattr(HostPool, "__init__", noted)
    specs, budget, memory = STACKS[kind](P), Budget(10**6), CountedMemory()
    build_stack(specs, "layer_first", device_pages=2, host_ratio=1, memory=memory).close()
    for failing in range(memory.asked):
        built.clear()
        with pytest.raises(OSError, match="no more memory"):
            build_stack(
                specs, "layer_first", device_pages=2, host_ratio=1, memory=CountedMemory(failing), budget=budget
            )
        assert budget.available == 10**6
        assert all(pool.closed for pool in built)
    assert len(built) == len(specs) - 1


def test_device_memory_that_cannot_be_had_closes_the_host_pools(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object, **more: object) -> None:
        raise torch.OutOfMemoryError("no more device memory")

    monkeypatch.setattr(torch, "zeros", full)
    budget = Budget(10**6)
    with pytest.raises(MemoryError, match="no more device memory"):
        build_stack(STACKS["v4"](P), device_pages=2, host_ratio=1, budget=budget)
    assert budget.available == 10**6


def test_closing_goes_on_when_a_pool_cannot_close(monkeypatch: pytest.MonkeyPatch) -> None:
    budget = Budget(10**6)
    order: list[str] = []
    close = HostPool.close

    def closing(pool: HostPool) -> None:
        order.append(pool.spec.name)
        close(pool)
        if pool.spec.name == "c128" and order.count("c128") == 1:
            raise RuntimeError("stuck")

    monkeypatch.setattr(HostPool, "close", closing)
    stack = build_stack(STACKS["v4"](P), device_pages=2, host_ratio=1, budget=budget)
    before = budget.available
    with pytest.raises(RuntimeError, match="stuck"):
        stack.close()
    assert order == list(reversed(stack.specs))
    assert budget.available == before + sum(pool.nbytes for pool in stack.host.pools.values())
    stack.close()  # again, which finds nothing to do


@pytest.mark.emulated
def test_staging_of_all_pools_together_must_fit_into_device_memory() -> None:
    specs, memory = STACKS["v4"](P), CountedMemory()
    needed = 2 * sum(spec.page_bytes for name, spec in specs.items() if name != "c128")
    pools = {"c128": ("page_first", "kernel")}

    def build(device_budget: Budget) -> Stack:
        return build_stack(
            specs,
            "page_first",
            "staged",
            pools,
            device_pages=4,
            host_ratio=1,
            platform="emulated",
            staging_pages=2,
            memory=memory,
            device_budget=device_budget,
        )

    with pytest.raises(MemoryError, match=f"the stack needs {needed:,} bytes of device memory for staging .*swa 490"):
        build(Budget(needed - 1))
    assert memory.asked == 0
    budget = Budget(needed)
    with build(budget) as stack:
        assert budget.available == 0
        assert sum(pool.staging_bytes for pool in stack.host.pools.values()) == needed
        assert (stack.host.pools["swa"].staging_bytes, stack.host.pools["c128"].staging_bytes) == (490, 0)
        assert f"{needed}" in str(stack).splitlines()[-1].replace(",", "")
    assert budget.available == needed
    assert stack.host.pools["swa"].staging_bytes == 0


@pytest.mark.emulated
def test_what_the_choice_of_a_backend_can_do_without_is_not_asked_for() -> None:
    """Backend auto stages where there is room, and else does not."""
    with build_stack(
        STACKS["mha"](P),
        "page_first",
        "auto",
        device_pages=4,
        host_ratio=1,
        platform="emulated",
        device_budget=Budget(0),
    ) as stack:
        assert stack.host.pools["kv"].staging_bytes == 0


# ---- what others see


@pytest.mark.parametrize(("kind", "layout"), ALLOWED)
def test_registered_tensors_are_all_bytes_of_a_pool_once(kind: str, layout: str) -> None:
    with build_stack(STACKS[kind](P), layout, device_pages=3, host_ratio=1) as stack:
        for name, pool in stack.host.pools.items():
            tensors = stack.get_hybrid_pool_buffer(name)
            assert all(tensor.is_contiguous() for tensor in tensors)
            ranges = sorted((t.data_ptr(), t.data_ptr() + t.numel() * t.dtype.itemsize) for t in tensors)
            assert all(end <= begin for (_, end), (begin, _) in pairwise(ranges))
            assert sum(end - begin for begin, end in ranges) == pool.nbytes
            held = [block for _, blocks in pool.storage for block in blocks]
            assert {t.untyped_storage().data_ptr() for t in tensors} == {
                t.untyped_storage().data_ptr() for t in held if t.numel()
            }


@pytest.mark.parametrize(
    ("kind", "layout", "pool", "shapes"),
    [
        ("mha", "page_first", "kv", [(12, 3, 2, 8)] * 2),  # K, V
        ("mha", "page_unified", "kv", [(3, 1, 3, 2, 4, 2, 8)]),  # a page keeps them together
        ("sparse", "page_first", "kv", [(12, 3, 2, 9), (12, 3, 2, 4)]),
        ("sparse", "page_first", "indexer", [(12, 3, 1, 5)]),
        ("mla", "page_first_kv_split", "kv", [(3, 3, 4, 1, 32), (3, 3, 4, 1, 4)]),
        ("dsa", "page_first", "indexer", [(3, 2, 1, 48)]),
        ("mamba", "page_first", "mamba", [(3, 3, 1, 2, 3, 4), (3, 3, 1, 5, 3), (3, 3, 1, 3, 2), (3, 7), (3, 3)]),
        ("v4", "page_first", "c4", [(3, 2, 18)]),
        ("v4", "layer_first", "c4", [(3, 18)] * 2),
        ("v4", "page_first", "kv", []),
    ],
)
def test_registered_tensors_have_the_engines_shapes(
    kind: str, layout: str, pool: str, shapes: list[tuple[int, ...]]
) -> None:
    with build_stack(STACKS[kind](P), layout, pools=_others(kind, pool), device_pages=3, host_ratio=1) as stack:
        assert [tuple(t.shape) for t in stack.get_hybrid_pool_buffer(pool)] == shapes
        with pytest.raises(KeyError, match="no pool 'c3', it has"):
            stack.get_hybrid_pool_buffer("c3")


def _others(kind: str, pool: str) -> dict[str, tuple[str, str]]:
    return {name: ("layer_first", "torch") for name in STACKS[kind](P) if name != pool}


def test_printing_a_stack_tells_what_was_built() -> None:
    with build_stack(STACKS["v4"](P), pools={"swa": ("layer_first", "numba")}, device_pages=5, host_ratio=2) as stack:
        lines = str(stack).splitlines()
        made, sizes = (
            [" ".join(line.split()) for line in part.splitlines() if not line.startswith("-")]
            for part in str(stack).split("\n\n")
        )
        assert [row.split()[0] for row in made] == ["pool", *stack.specs]
        assert [row.split()[0] for row in sizes] == ["pool", *stack.specs, "total"]
        assert made[1] == "kv kv page_first torch torch torch none"
        assert made[2] == "swa swa layer_first numba numba numba 5 × uint8 (10, 49)"
        assert made[6] == "c4_state swa page_first torch torch torch uint8 (10, 2, 44)"
        assert sizes[1] == "kv 5 10 0 0"
        assert sizes[2] == "swa 5 10 2,450 0"
        assert sizes[6] == "c4_state 5 10 880 0"
        assert sizes[-1] == "total 4,550 0"
        assert stack.describe() == str(stack)
    assert str(stack).splitlines() == lines


@pytest.mark.parametrize("model", presets.MODELS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_printed_stack_fits_into_a_terminal(model: str, layout: str) -> None:
    """Every tensor of a pool has a line of its own."""
    specs = presets.model(model, tp=8)
    others = {
        n: ("page_first_direct", "torch") for n, spec in specs.items() if not support(spec, layout, "torch", "load")
    }
    with build_stack(model, layout, pools=others, tp=8, device_pages=2, host_ratio=1) as stack:
        lines = str(stack).splitlines()
    assert max(map(len, lines)) <= 110
    shapes = sum(line.count("(") for line in lines)
    assert shapes == sum(len(buffers(pool.spec, pool.layout, pool.num_pages)) for pool in stack.host.pools.values())
