"""What a caller may get wrong: each mistake is an error that names it, and no byte has moved and no memory been taken.

At the end: uses that look like mistakes and are none.
"""

from __future__ import annotations

import gc
import itertools
import os
import re
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
import torch

from refimpl import (
    LAYOUTS,
    Component,
    DevicePool,
    HostMemory,
    HostPool,
    HostPoolGroup,
    LogicalPool,
    PoolSpec,
    Receipt,
    Segment,
    UnsupportedPairing,
    byte_offset,
    oracle,
    presets,
    slots_of,
    support,
)
from refimpl.allocator import Budget
from refimpl.backends.protocol import Backend, OnTheHost
from refimpl.device_pool import Rows
from refimpl.indices import Items
from refimpl.plan import Plan
from refimpl.sizing import common_pages, pages_for_bytes, pages_for_ratio, slots_for_bytes
from verify.reported import POISON, fill, poison, raw, slots

BYTE, BF16 = torch.uint8, torch.bfloat16
SPEC = presets.mha(3, 2, 4, BF16, 4)
STATES = presets.mamba((0, 2), [(3, 2)], BF16, (2, 2), torch.float32, [((5,), BYTE)])
ANY: Any = "fitt"
KINDS = {"k": 0, "v": 1, "temporal": 2, "conv_0": 3, "side_0": 4, "latent": 5, "c4": 6}

on_every_backend = pytest.mark.parametrize("backend", ["torch", "numba"])
both_ways = pytest.mark.parametrize("direction", ["backup", "load"])


def pair(backend: str = "torch", layout: str = "page_first", spec: PoolSpec = SPEC) -> tuple[HostPool, DevicePool]:
    """A poisoned host pool of five pages and a filled device pool of six."""
    host, device = HostPool(spec, layout, 5, backend), DevicePool(spec, 6)
    poison(host)
    fill(device, KINDS)
    return host, device


def image(host: HostPool, device: DevicePool) -> list[bytes]:
    """Every byte of both pools."""
    spec = device.spec
    buffers = [device.buffer(c.name, layer) for c in spec.components for layer in spec.layers_of(c)]
    return [raw(t).tobytes() for t in (*(t for _, held in host.storage for t in held), *buffers)]


def only_poison(tensor: torch.Tensor) -> bool:
    return set(raw(tensor)) <= {POISON}


class Untouched(HostMemory):
    """Memory that nobody may ask for."""

    def map(self, nbytes: int) -> torch.Tensor:
        raise AssertionError(f"{nbytes} bytes were taken before the mistake was noticed")


# ---- Index lists

GOOD = slots([2, 0], 4)
WRONG_TYPE = "indices must be a 1-D int64 or int32 tensor, got"
BAD_INDICES: dict[str, tuple[torch.Tensor, str]] = {
    "floats": (GOOD.float(), f"{WRONG_TYPE} torch.float32"),
    "16-bit integers": (GOOD.short(), f"{WRONG_TYPE} torch.int16"),
    "a mask": (GOOD > 0, f"{WRONG_TYPE} torch.bool"),
    "a table": (GOOD.view(2, 4), f"{WRONG_TYPE} torch.int64 of shape (2, 4)"),
    "a page that begins inside one": (GOOD + 1, "index 9 begins a page but is no multiple of 4"),
    "tokens in descending order": (GOOD.flip(0), "index 3 begins a page but is no multiple of 4"),
    "two tokens exchanged": (
        GOOD[[0, 2, 1, 3, 4, 5, 6, 7]],
        "index 10 breaks its page: the 4 tokens must be consecutive",
    ),
    "a token twice": (GOOD[[0, 1, 2, 2, 4, 5, 6, 7]], "index 10 breaks its page"),
    "the second page is broken": (GOOD[[0, 1, 2, 3, 4, 5, 7, 6]], "index 3 breaks its page"),
    "less than zero": (GOOD - 4, "index -4 is outside the pool's 0.."),
    "a page past the end": (GOOD + 16, "index 24 is outside the pool's 0.."),
    "without numbers": (
        GOOD.to("meta"),
        "indices must be a dense tensor in memory, got one that is torch.strided on meta",
    ),
    "sparse": (GOOD.to_sparse(), "indices must be a dense tensor in memory, got one that is torch.sparse_coo on cpu"),
    "far past the end": (GOOD + 2**40, f"index {2**40 + 8} is outside the pool's 0.."),
}


@on_every_backend
@both_ways
@pytest.mark.parametrize("side", ["host", "device"])
@pytest.mark.parametrize("mistake", BAD_INDICES)
def test_a_bad_index_list_is_refused_by_side_and_value(mistake: str, side: str, direction: str, backend: str) -> None:
    bad, reason = BAD_INDICES[mistake]
    host, device = pair(backend)
    before = image(host, device)
    lists = (bad, slots([1, 3], 4)) if side == "host" else (slots([1, 3], 4), bad)
    with pytest.raises(ValueError, match=re.escape(f"{side} {reason}")):
        host.prepare(device, lists[0], lists[1], direction).run()
    assert image(host, device) == before
    assert host.available_size() == 20


def test_a_single_number_is_no_index_list() -> None:
    host, device = pair()
    for use in (lambda: host.backup(device, torch.tensor(0), torch.tensor(0)), lambda: host.free(torch.tensor(0))):
        with pytest.raises(ValueError, match=r"must be a 1-D int64 or int32 tensor, got torch.int64 of shape \(\)"):
            use()


NO_TENSORS: list[Any] = [[8, 9, 10, 11], (8, 9, 10, 11), np.arange(8, 12), range(8, 12), [], 8, "8"]


@pytest.mark.parametrize("given", NO_TENSORS, ids=repr)
@pytest.mark.parametrize("other", [None, GOOD], ids=["beside None", "beside a list"])
def test_what_is_no_tensor_is_told_how_to_become_one(given: Any, other: torch.Tensor | None) -> None:
    host, device = pair()
    before = image(host, device)
    uses = {
        "host": lambda: host.backup(device, given, other),
        "device": lambda: host.load_all(device, other, given),
        "freed": lambda: host.free(given),
    }
    for side, use in uses.items():
        told = f"{side} indices must be a 1-D int64 or int32 tensor, got {given!r}; torch.as_tensor() makes one"
        with pytest.raises(TypeError, match=re.escape(told)):
            use()
    assert image(host, device) == before


@pytest.mark.parametrize("pages", [[1.5], [True, False], [[0, 1]], 3, np.array([0.0])], ids=repr)
def test_slots_are_of_pages_by_number(pages: Any) -> None:
    """Not of 1.5 as of page 1, nor of a mask as of pages 0 and 1."""
    with pytest.raises(ValueError, match="pages must be a 1-D list of numbers, got torch"):
        slots_of(pages, 4)
    assert slots_of([], 4).dtype == torch.int64


@pytest.mark.parametrize("page_size", [0, -2, 4.0, True, "4"])
def test_slots_are_of_pages_of_some_size(page_size: Any) -> None:
    with pytest.raises(ValueError, match=rf"page_size must be a whole number \(int\) from 1 on, got {page_size!r}"):
        slots_of([1], page_size)


@pytest.mark.parametrize("page", [2**62, 2**61, -(2**61), -(2**63)])
def test_slots_of_pages_too_far_are_not_those_of_others(page: int) -> None:
    """Not of page 0, where the product begins anew."""
    with pytest.raises(ValueError, match=rf"pages of 4 slots have numbers up to 1,152,.*, got \[1, {page}\]"):
        slots_of([1, page], 4)
    assert slots_of([2**60, -(2**60)], 4)[[0, 4]].tolist() == [2**62, -(2**62)]


def test_an_empty_list_costs_nothing_however_large_a_page_is() -> None:
    spec, nothing = PoolSpec("one page would be a TiB", 1, 2**40, (Component("k", BYTE, dim=1),)), torch.arange(0)
    assert HostPool(spec, "page_first", 0).backup(DevicePool(spec, 0), nothing, nothing).bytes == 0


@both_ways
@pytest.mark.parametrize("side", ["host", "device"])
def test_the_end_of_each_pool_is_its_own(side: str, direction: str) -> None:
    """Five pages on the host, six on the device: the sixth exists on one side only."""
    host, device = pair()
    sixth, first = slots([5], 4), slots([0], 4)
    if side == "device":
        host.prepare(device, first, sixth, direction).run()
        return
    with pytest.raises(ValueError, match=r"host index 20 is outside the pool's 0\.\.19"):
        host.prepare(device, sixth, first, direction)


@on_every_backend
@pytest.mark.parametrize("count", [(4, 8), (8, 4), (0, 4), (4, 0)])
@both_ways
def test_lists_of_unequal_length_are_refused(direction: str, count: tuple[int, int], backend: str) -> None:
    host, device = pair(backend)
    before = image(host, device)
    with pytest.raises(ValueError, match=f"must be equally long, got {count[0]} and {count[1]}"):
        host.prepare(device, torch.arange(count[0]), torch.arange(count[1]), direction).run()
    assert image(host, device) == before


@both_ways
def test_nothing_on_one_side_and_something_on_the_other_is_refused(direction: str) -> None:
    host, device = pair()
    with pytest.raises(ValueError, match="one index list is None while the other one is not empty"):
        host.prepare(device, None, GOOD, direction)
    with pytest.raises(ValueError, match="one index list is None while the other one is not empty"):
        host.prepare(device, GOOD, None, direction)


@on_every_backend
@both_ways
def test_a_page_cannot_be_written_twice_but_it_can_be_read_twice(direction: str, backend: str) -> None:
    host, device = pair(backend)
    twice, apart = slots([1, 3, 1], 4), slots([0, 2, 4], 4)
    before = image(host, device)
    written, to, source = ("host", twice, apart) if direction == "backup" else ("device", apart, twice)
    with pytest.raises(ValueError, match=f"{written} index 4 is written twice by one transfer"):
        host.prepare(device, to, source, direction).run()
    assert image(host, device) == before
    host.prepare(device, source, to, direction).run()
    if direction == "backup":
        assert torch.equal(host.page(0)["k"].view(BYTE), host.page(4)["k"].view(BYTE))
        assert not only_poison(host.page(4)["k"])


@pytest.mark.parametrize(
    ("host_entries", "device_entries", "reason"),
    [
        ([0, 5 * 4], [0, 1], r"host index 20 is outside the pool's 0\.\.19"),
        ([0, 1], [0, -1], r"device index -1 is outside the pool's 0\.\.23"),
        ([3, 3], [0, 1], "host index 3 is written twice"),
        ([0], [0, 1], "equally long, got 1 and 2"),
    ],
)
def test_bad_lists_of_entries_are_refused(host_entries: list[int], device_entries: list[int], reason: str) -> None:
    host, device = pair(spec=presets.v4_paged("c4", 2, 50, 16, entries=4, entry_bytes=(9, 2)))
    before = image(host, device)
    with pytest.raises(ValueError, match=reason):
        host.backup_entries(device, torch.tensor(host_entries), torch.tensor(device_entries))
    assert image(host, device) == before


def test_rows_without_entries_move_only_as_pages() -> None:
    host, device = pair()
    before = image(host, device)
    with pytest.raises(ValueError, match="rows of pool 'kv' are not made of entries, only whole pages move"):
        host.backup_entries(device, torch.tensor([0]), torch.tensor([0]))
    assert image(host, device) == before


# ---- Pools that do not belong together


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"page_size": 2}, "page_size=2"),
        ({"layers": 4}, "layers=4"),
        ({"components": SPEC.components[:1]}, "name='k'"),
        ({"components": SPEC.components[::-1]}, "name='v'"),
        ({"components": tuple(replace(c, dtype=torch.float16) for c in SPEC.components)}, "torch.float16"),
        ({"components": tuple(replace(c, layers=(0, 2, 1)) for c in SPEC.components)}, "(0, 2, 1)"),
        ({"head_groups": 2}, "head_groups=2"),
    ],
    ids=str,
)
@both_ways
def test_pools_of_different_specs_are_refused_and_both_are_named(
    direction: str, change: dict[str, Any], told: str
) -> None:
    host, _ = pair()
    device = DevicePool(replace(SPEC, **change), 6)
    with pytest.raises(ValueError, match="are not of one spec") as refused:
        host.prepare(device, GOOD, GOOD, direction)
    assert told in str(refused.value)
    assert all(only_poison(tensor) for _, held in host.storage for tensor in held)


def rows(layers: int = 3, count: int = 24) -> list[torch.Tensor]:
    return [torch.zeros(count, 2, 4, dtype=BF16) for _ in range(layers)]


def wide(stride: int = 12) -> list[torch.Tensor]:
    return [torch.zeros(24 * 12, dtype=BF16).as_strided((24, 2, 4), (stride, 4, 1)) for _ in range(3)]


SAME = torch.zeros(24, 2, 4, dtype=BF16)
BAD_BUFFERS: dict[str, tuple[Callable[[], dict[str, list[torch.Tensor]]], str]] = {
    "V is missing": (lambda: {"k": rows()}, r"has components \['k', 'v'\], got buffers for \['k'\]"),
    "one too many": (lambda: {"k": rows(), "v": rows(), "z": rows()}, r"got buffers for \['k', 'v', 'z'\]"),
    "a layer is missing": (lambda: {"k": rows(2), "v": rows()}, "k: 3 layers own rows, got 2 buffers"),
    "a layer too many": (lambda: {"k": rows(), "v": rows(4)}, "v: 3 layers own rows, got 4 buffers"),
    "heads and lanes exchanged": (
        lambda: {"k": rows(), "v": [*rows(2), torch.zeros(24, 4, 2, dtype=BF16)]},
        r"v of layer 2: rows must be \(2, 4\), got a buffer of shape \(24, 4, 2\)",
    ),
    "heads merged": (
        lambda: {"k": [t.flatten(1) for t in rows()], "v": rows()},
        r"k of layer 0: rows must be \(2, 4\)",
    ),
    "no rows at all": (lambda: {"k": [torch.tensor(0, dtype=BF16)] * 3, "v": rows()}, r"got a buffer of shape \(\)"),
    "wider elements": (
        lambda: {"k": rows(), "v": [t.float() for t in rows()]},
        r"v of layer 0: elements must have 2 bytes \(torch.bfloat16\), got torch.float32",
    ),
    "negated when it is read": (
        lambda: {"k": [cast(Any, torch)._neg_view(t) for t in rows()], "v": rows()},
        "k of layer 0: a buffer must hold its values as they are",
    ),
    "heads inside lanes": (
        lambda: {"k": [torch.zeros(24, 4, 2, dtype=BF16).mT for _ in range(3)], "v": rows()},
        r"k of layer 0: lanes of a row must be packed, got strides \(8, 1, 2\)",
    ),
    "every other lane": (
        lambda: {"k": rows(), "v": [torch.zeros(24, 2, 8, dtype=BF16)[..., ::2] for _ in range(3)]},
        "v of layer 0: lanes of a row must be packed",
    ),
    "rows that overlap": (
        lambda: {"k": wide(4), "v": rows()},
        "k of layer 0: rows overlap, 8 elements at a stride of 4",
    ),
    "one row repeated": (
        lambda: {"k": [t[:1].expand(24, 2, 4) for t in rows()], "v": rows()},
        "k of layer 0: rows overlap, 8 elements at a stride of 0",
    ),
    "one buffer for two layers": (
        lambda: {"k": [SAME, *rows(1), SAME], "v": rows()},
        "k of layer 2 lies on the same bytes as k of layer 0",
    ),
    "one buffer for K and V": (
        lambda: {"k": [SAME, *rows(2)], "v": [SAME, *rows(2)]},
        "v of layer 0 lies on the same bytes as k of layer 0",
    ),
    "part of a page": (lambda: {"k": rows(count=22), "v": rows()}, "k: 22 rows are no whole number of pages of 4"),
    "one layer shorter": (
        lambda: {"k": rows(), "v": [*rows(2), *rows(1, 20)]},
        "must hold the same number of pages, got .*'v of layer 1': 6, 'v of layer 2': 5",
    ),
    "rows at different distances": (
        lambda: {"k": [*wide()[:2], *rows(1)], "v": rows()},
        r"k: all layers must share one row stride, got \[8, 12\]",
    ),
    "sparse": (lambda: {"k": rows(), "v": [t.to_sparse() for t in rows()]}, "v of layer 0: a buffer must be dense"),
    "no memory": (
        lambda: {c: [t.to("meta") for t in rows()] for c in ("k", "v")},
        "pool 'kv': buffers on the meta device have no bytes",
    ),
    "several devices": (
        lambda: {"k": rows(), "v": [*rows(2), rows()[0].to("meta")]},
        r"buffers lie on several devices: \['cpu', 'meta'\]",
    ),
}


@pytest.mark.parametrize("buffer", [np.zeros((24, 2, 4), np.uint16), [[0]], None], ids=["array", "list", "None"])
def test_a_device_buffer_is_a_tensor(buffer: Any) -> None:
    with pytest.raises(TypeError, match=r"k of layer 1: a buffer must be a tensor \(torch.as_tensor makes one\)"):
        DevicePool.wrap(SPEC, {"k": [*rows(1), buffer, *rows(1)], "v": rows()})


def test_a_device_pool_lies_on_a_device_that_is_here() -> None:
    missing = r"there is no cuda:99: the last GPU here is cuda:|a CUDA device is needed, and there is none"
    with pytest.raises(ValueError, match=f"pool 'kv': ({missing}).*; device='cpu' is always here"):
        DevicePool(SPEC, 1, "cuda:99")


@pytest.mark.parametrize("device", [None, GOOD, DevicePool, "device", HostPool(SPEC, "page_first", 5)], ids=type)
@both_ways
def test_a_transfer_is_with_a_device_pool(direction: str, device: Any) -> None:
    host, _ = pair()
    with pytest.raises(TypeError, match=r"pool 'kv': a device pool must be a DevicePool \(DevicePool.wrap makes one\)"):
        host.prepare(device, GOOD, GOOD, direction)
    assert all(only_poison(tensor) for _, held in host.storage for tensor in held)


@pytest.mark.parametrize("num_pages", [-1, 2.0, True, np.int32(6)])
@pytest.mark.parametrize("spec", [SPEC, LogicalPool(1, 4).spec], ids=["rows", "no rows"])
def test_a_device_pool_has_a_whole_number_of_pages(spec: PoolSpec, num_pages: Any) -> None:
    with pytest.raises(ValueError, match=r"num_pages must be a whole number \(int\) from 0 on, got"):
        DevicePool(spec, num_pages)


def test_rows_without_lanes_may_be_wrapped() -> None:
    spec = presets.mha(1, 2, 4, BF16, 4, v_head_dim=0)
    device = DevicePool.wrap(spec, {"k": rows(1), "v": [torch.zeros(24, 2, 0, dtype=BF16)]})
    assert HostPool(spec, "page_first", 5).backup(device, GOOD, GOOD).bytes == 2 * spec.page_bytes


@pytest.mark.parametrize("mistake", BAD_BUFFERS)
def test_device_buffers_that_do_not_fit_are_refused(mistake: str) -> None:
    buffers, reason = BAD_BUFFERS[mistake]
    with pytest.raises(ValueError, match=reason):
        DevicePool.wrap(SPEC, buffers())


# ---- Pools that cannot be built


@pytest.mark.parametrize("spec", [presets.model("deepseek-v3"), "mha", None, SPEC.components], ids=type)
@pytest.mark.parametrize(
    "use",
    [
        lambda spec: HostPool(spec, "page_first", 1, memory=Untouched()),
        lambda spec: DevicePool(spec, 1),
        lambda spec: DevicePool.wrap(spec, {}),
        lambda spec: support(spec, "page_first", "torch", "backup"),
    ],
    ids=["host", "device", "wrap", "support"],
)
def test_a_pool_is_made_of_one_spec(use: Callable[[Any], object], spec: Any) -> None:
    with pytest.raises(TypeError, match="a pool is made of one PoolSpec .*, got " + re.escape(f"{spec!r:.80}")):
        use(spec)


class Careless(HostMemory):
    """Memory of somebody who has not read what it is to be."""

    def __init__(self, take: Callable[[int], torch.Tensor]) -> None:
        super().__init__()
        self.take = take

    def map(self, nbytes: int) -> torch.Tensor:
        return self.take(nbytes)


@pytest.mark.parametrize(
    ("take", "told"),
    [
        (lambda n: torch.zeros(n - 1, dtype=BYTE), "torch.uint8 of shape (959,) and strides (1,)"),
        (lambda n: torch.zeros(n + 1, dtype=BYTE), "torch.uint8 of shape (961,) and strides (1,)"),
        (lambda n: torch.zeros(2, n // 2, dtype=BYTE), "torch.uint8 of shape (2, 480) and strides (480, 1)"),
        (lambda n: torch.zeros(n), "torch.float32 of shape (960,) and strides (1,)"),
        (lambda n: torch.zeros(2 * n, dtype=BYTE)[::2], "torch.uint8 of shape (960,) and strides (2,)"),
    ],
)
def test_memory_is_as_many_bytes_as_were_asked_for(take: Callable[[int], torch.Tensor], told: str) -> None:
    """Bytes with gaps between them would be accepted by torch, and copied as if there were none."""
    budget, spec = Budget(10**6), PoolSpec("kv", 3, 4, (Component("k", BYTE, dim=16),))
    with pytest.raises(
        ValueError,
        match=re.escape(f"`HostMemory.map(960)` must return as many bytes in a row (torch.uint8), got {told}"),
    ):
        HostPool(spec, "page_first", 5, memory=Careless(take), budget=budget)
    assert budget.available == budget.total


BAD_SIZES: dict[str, tuple[Callable[[], int], str]] = {
    "a rule for bytes": (
        lambda: pages_for_bytes(SPEC, 10**6, ANY),
        "rule must be one of ('fit', 'sglang'), got 'fitt'",
    ),
    "a rule for a ratio": (lambda: pages_for_ratio(SPEC, 1000, 2, ANY), "rule must be one of ('fit', 'sglang')"),
    "a rule for stages": (lambda: common_pages([SPEC], 10**6, ANY), "rule must be one of ('fit', 'sglang')"),
    "less than no bytes": (lambda: pages_for_bytes(SPEC, -1), "nbytes must be a whole number (int) from 0 on, got -1"),
    "less for stages": (lambda: common_pages([SPEC], -1, "sglang"), "nbytes must be a whole number (int) from 0 on"),
    "bytes in words": (lambda: slots_for_bytes(SPEC, ANY), "nbytes must be a whole number (int) from 0 on, got 'fitt'"),
    "slots": (lambda: pages_for_ratio(SPEC, -4, 2), "device_slots must be a whole number (int) from 0 on, got -4"),
    "a ratio": (lambda: pages_for_ratio(SPEC, 1000, -2), "ratio must be a number of host pages for each device page"),
    "no number": (lambda: pages_for_ratio(SPEC, 1000, float("nan")), "page from 0 to 1,000,000, got nan"),
    "a ratio in words": (lambda: pages_for_ratio(SPEC, 1000, ANY, "sglang"), "from 0 to 1,000,000, got 'fitt'"),
}


@pytest.mark.parametrize("mistake", BAD_SIZES)
def test_a_pool_is_sized_by_numbers_and_a_rule_that_there_is(mistake: str) -> None:
    ask, told = BAD_SIZES[mistake]
    with pytest.raises(ValueError, match=re.escape(told)):
        ask()


@pytest.mark.parametrize(
    ("arguments", "error", "told"),
    [
        ({"layout": "page_fist"}, UnsupportedPairing, "there is no layout 'page_fist', only layer_first, page_first"),
        ({"backend": "tourch"}, UnsupportedPairing, "there is no backend 'tourch', only torch, numba"),
        ({"backend": "kernel"}, UnsupportedPairing, "kernel moves bytes to and from cuda or emulated memory, not cpu"),
        ({"layout": "page_first_kv_split"}, UnsupportedPairing, "no split is named for k, v"),
        ({"platform": "tpu"}, ValueError, "platform must be one of ('cpu', 'cuda', 'emulated'), got 'tpu'"),
        ({"profile": "vllm"}, ValueError, "profile must be one of ('reference', 'sglang'"),
        ({"memory": 42}, TypeError, "pool 'kv': memory must be a HostMemory, or None; got 42"),
        ({"memory": GOOD}, TypeError, "pool 'kv': memory must be a HostMemory, or None; got tensor([ 8,"),
        ({"backend": "kernel", "platform": f"emulated:{10**20}"}, ValueError, f"'emulated:{10**20}' names no device"),
        ({"num_pages": -1}, ValueError, "num_pages must be a whole number (int) from 0 on, got -1"),
        ({"num_pages": 2.0}, ValueError, "num_pages must be a whole number (int) from 0 on, got 2.0"),
        ({"num_pages": True}, ValueError, "num_pages must be a whole number (int) from 0 on, got True"),
        ({"num_pages": np.int32(5)}, ValueError, "num_pages must be a whole number (int) from 0 on, got np.int32(5)"),
    ],
    ids=str,
)
def test_a_pool_that_cannot_be_built_takes_no_memory(arguments: dict[str, Any], error: type, told: str) -> None:
    options: dict[str, Any] = {"layout": "page_first", "num_pages": 5, "platform": "cpu", "memory": Untouched()}
    with pytest.raises(error, match=re.escape(told)):
        HostPool(SPEC, **options | arguments)


@pytest.mark.parametrize("what", ["direction", "platform", "profile"])
def test_the_support_table_knows_its_words(what: str) -> None:
    words = {"direction": "backup", "platform": "cpu", "profile": "reference"} | {what: "elsewhere"}
    with pytest.raises(ValueError, match=f"{what} must be one of .*, got 'elsewhere'"):
        support(SPEC, "page_first", "torch", **words)


BAD_COMPONENTS: list[tuple[dict[str, Any], str]] = [
    ({"dim": -1}, "dim must not be negative, got -1"),
    ({"dim": (-2, -2)}, r"dim must not be negative, got \(-2, -2\)"),
    ({"dim": ()}, "dim needs an axis"),
    ({"unit": "row"}, r"unit must be one of \('token', 'page', 'slot'\), got 'row'"),
    ({"heads": 0}, "heads must be at least 1 or None, got 0"),
    ({"heads": 2, "unit": "page"}, "only token rows have heads, this is a page row"),
    ({"split": (3, 4)}, r"split \(3, 4\) must sum to 8 lanes"),
    ({"split": (8, 0)}, r"split \(8, 0\) has an empty part"),
    ({"segments": (Segment(2, 4),)}, "only page rows are made of segments"),
    ({"unit": "page", "segments": (Segment(3, 4),)}, "segments take 12 of 8 bytes"),
    ({"unit": "page", "segments": (Segment(2, 2), Segment(1, 2))}, "must hold the same number of entries"),
    ({"unit": "page", "segments": (Segment(0, 2),)}, "segments must not be empty"),
    ({"unit": "page", "segments": (Segment(2, -1),)}, "segments must not be empty"),
    ({"unit": "page", "segments": (Segment(2, 4),), "split": (4, 4)}, "cut into parts or made of segments, not both"),
    ({"unit": "slot", "side": True, "layers": (0,)}, "a side state has no layers"),
    ({"layers": (0, 0)}, r"layers \(0, 0\) must be distinct ids"),
    ({"layers": (0, -1)}, r"layers \(0, -1\) must be distinct ids"),
    ({"layers": [0, 1]}, r"layers must be a tuple, got \[0, 1\]"),
    ({"layers": range(2)}, r"layers must be a tuple, got range\(0, 2\)"),
    ({"layers": (0, 1.0)}, r"layers must be whole numbers \(int\), got \(0, 1.0\)"),
    ({"split": [4, 4]}, r"split must be a tuple, got \[4, 4\]"),
    ({"split": (4.0, 4)}, r"split must be whole numbers \(int\), got \(4.0, 4\)"),
    ({"segments": [Segment(2, 4)], "unit": "page"}, r"segments must be a tuple, got \[Segment"),
    ({"segments": (Segment(2, True),), "unit": "page"}, r"segments must be whole numbers \(int\), got \(Segment"),
    ({"segments": ((2, 4),), "unit": "page"}, r"segments are `Segment`s, got \(\(2, 4\),\)"),
    ({"dim": [2, 4]}, r"dim must be whole numbers \(int\), got \[2, 4\]"),
    ({"dim": 8.0}, r"dim must be whole numbers \(int\), got 8.0"),
    ({"dim": np.int32(8)}, r"dim must be whole numbers \(int\), got np.int32\(8\)"),
    ({"heads": True}, r"heads must be whole numbers \(int\), got True"),
]


@pytest.mark.parametrize(("arguments", "reason"), BAD_COMPONENTS, ids=str)
def test_a_component_that_makes_no_sense_is_refused_by_name(arguments: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=f"component 'latent': .*{reason}"):
        Component("latent", BYTE, **dict[str, Any](dim=8) | arguments)


K = Component("k", BYTE, heads=3, dim=2)
BAD_SPECS: list[tuple[dict[str, Any], str]] = [
    ({"layers": -1}, "layers must not be negative, got -1"),
    ({"page_size": 0}, "page_size must be at least 1, got 0"),
    ({"head_groups": 0}, "head_groups must be at least 1, got 0"),
    ({"head_groups": 2}, "3 heads of 'k' do not split into 2 groups"),
    ({"components": (K, replace(K, dim=3))}, r"component names must differ, got \['k', 'k'\]"),
    ({"components": (replace(K, layers=(0, 2)),)}, r"component 'k' owns layers \[2\], the pool has 2"),
    ({"components": (Component("s", BYTE, dim=1, unit="slot"),)}, "state slots need page_size 1, got 4"),
    ({"components": [K]}, r"components must be a tuple, got \[Component"),
    ({"components": K}, r"components must be a tuple, got Component"),
    ({"layers": 2.0}, r"layers must be a whole number \(int\), got 2.0"),
    ({"page_size": True}, r"page_size must be a whole number \(int\), got True"),
    ({"head_groups": np.int64(1)}, r"head_groups must be a whole number \(int\), got np.int64\(1\)"),
]


@pytest.mark.parametrize(("arguments", "reason"), BAD_SPECS, ids=str)
def test_a_spec_that_makes_no_sense_is_refused_by_name(arguments: dict[str, Any], reason: str) -> None:
    right: dict[str, Any] = {"name": "mine", "layers": 2, "page_size": 4, "components": (K,)}
    PoolSpec(**right)
    with pytest.raises(ValueError, match=f"pool 'mine': {reason}"):
        PoolSpec(**right | arguments)


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (lambda: presets.model("llama-4"), "no model 'llama-4'; there are llama-3.1-8b"),
        (lambda: presets.model("llama-3.1-8b", tp=3), "8 KV heads cannot be shared by 3 ranks"),
        (lambda: presets.model("deepseek-v4-flash", page_size=64), "pages of 256 tokens, got page_size 64"),
        (lambda: STATES.with_pages_of(16), "'mamba': page and slot rows fix their page size at 1"),
    ],
)
def test_a_preset_that_does_not_exist_is_refused_by_name(build: Callable[[], object], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        build()


# ---- Words that a pool does not know

UNKNOWN: dict[str, tuple[Callable[[HostPool, DevicePool], object], type, str]] = {
    "component of a spec": (lambda h, d: h.spec.component("q"), KeyError, r"no component 'q', it has \['k', 'v'\]"),
    "buffer of the host": (lambda h, d: h.buffer("q"), KeyError, "no component 'q'"),
    "buffer of the device": (lambda h, d: d.buffer("q", 0), KeyError, "no component 'q'"),
    "view of a component": (lambda h, d: h.layer_view("q", 0), KeyError, "no component 'q'"),
    "view of a layer": (lambda h, d: h.layer_view("k", 3), KeyError, "k of pool 'kv' owns no layer 3"),
    "view of no layer": (lambda h, d: h.layer_view("k", None), KeyError, "owns no layer None"),
    "device layer": (lambda h, d: d.buffer("v", 3), KeyError, r"owns no layer 3, it owns \(0, 1, 2\)"),
    "offset of a component": (lambda h, d: offset(component="q"), KeyError, "no component 'q'"),
    "offset in a layout": (lambda h, d: offset(layout="lf"), KeyError, "there is no layout 'lf', only layer_first"),
    "offset in a layer": (lambda h, d: offset(layer=3), KeyError, r"k owns no layer 3, it owns \(0, 1, 2\)"),
    "offset in a page": (lambda h, d: offset(page=5), IndexError, r"k: page 5 is outside 0\.\.4"),
    "offset before page 0": (lambda h, d: offset(page=-1), IndexError, r"k: page -1 is outside 0\.\.4"),
    "offset of a token": (lambda h, d: offset(token=4), IndexError, r"k: token 4 is outside 0\.\.3"),
    "offset of a head": (lambda h, d: offset(head=2), IndexError, r"k: head 2 is outside 0\.\.1"),
    "offset before head 0": (lambda h, d: offset(head=-1), IndexError, r"k: head -1 is outside 0\.\.1"),
    "offset in a part": (
        lambda h, d: offset(part=1),
        IndexError,
        "k lies in 1 parts in page_first, there is no part 1",
    ),
    "page": (lambda h, d: h.page(5), IndexError, r"pool 'kv' has pages 0\.\.4, there is no page 5"),
    "page before the first": (lambda h, d: h.page(-1), IndexError, "there is no page -1"),
    "flat page": (lambda h, d: h.get_data_page(20), ValueError, "slot 20 begins none of the 5 pages of 4 of pool 'kv'"),
    "middle of a page": (lambda h, d: h.get_data_page(2), ValueError, "slot 2 begins none of the 5 pages"),
    "no slot": (lambda h, d: h.get_data_page(ANY), TypeError, "the first slot of a page is a whole number, got "),
    "no page": (lambda h, d: h.page(ANY), TypeError, "the page is a whole number, got "),
    "one layer": (lambda h, d: h.prepare(d, None, None, "load").run(cast(Any, 1)), TypeError, "layers are several"),
    "slot before the first": (lambda h, d: h.get_data_page(-4), ValueError, "slot -4 begins none of the 5 pages"),
    "part of a page": (lambda h, d: h.get_page_buffer_meta(GOOD[:3]), ValueError, "whole pages of 4, got 3 indices"),
    "page outside": (lambda h, d: h.get_page_buffer_meta(GOOD + 16), ValueError, "page index 24 is outside"),
    "heads": (lambda h, d: h.get_split_heads_page_buffer_meta(GOOD, 2), ValueError, "page_first .* keeps no heads"),
    "direction": (lambda h, d: h.prepare(d, GOOD, GOOD, "up"), ValueError, r"one of \('backup', 'load'\), got 'up'"),
    "layers of a backup": (
        lambda h, d: h.prepare(d, GOOD, GOOD, "backup").run((0,)),
        ValueError,
        r"a backup moves all layers in one run, got layers=\(0,\)",
    ),
    "backend of a backup": (
        lambda h, d: h.backup_from_device_all_layer(d, GOOD, GOOD, "direct"),
        ValueError,
        "pool 'kv' was built for backend 'torch', got 'direct'",
    ),
    "backend of a load": (
        lambda h, d: h.load_to_device_per_layer(d, GOOD, GOOD, 0, "kernel"),
        ValueError,
        "pool 'kv' was built for backend 'torch', got 'kernel'",
    ),
}


def offset(
    layout: str = "page_first", component: str = "k", page: int = 0, layer: int = 0, token: int = 0, **rest: int
) -> int:
    return byte_offset(SPEC, layout, 5, component, page, layer, token, **rest)


@pytest.mark.parametrize("what", UNKNOWN)
def test_what_a_pool_does_not_have_is_named(what: str) -> None:
    ask, error, reason = UNKNOWN[what]
    host, device = pair()
    before = image(host, device)
    with pytest.raises(error, match=reason):
        ask(host, device)
    assert image(host, device) == before


@pytest.mark.parametrize("split", [0, -1, 3])
def test_heads_are_split_between_one_or_more_ranks(split: int) -> None:
    host, _ = pair(layout="page_head")
    with pytest.raises(
        ValueError, match=f"keeps 2 heads outermost in a page, they cannot be split between {split} ranks"
    ):
        host.get_split_heads_page_buffer_meta(GOOD, split)


def test_heads_of_every_component_must_split() -> None:
    two, three = (Component(name, BYTE, heads=heads, dim=1) for name, heads in (("k", 2), ("v", 3)))
    host = HostPool(PoolSpec("kv", 1, 1, (two, three)), "page_head", 1)
    with pytest.raises(ValueError, match="keeps 2 and 3 heads outermost in a page, they cannot be split between 2"):
        host.get_split_heads_page_buffer_meta(torch.arange(1), 2)
    with pytest.raises(ValueError, match="keeps no heads outermost in a page"):
        LogicalPool(1, 1, layout="page_head").get_split_heads_page_buffer_meta(torch.arange(1), 1)


@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_unified"])
@pytest.mark.parametrize(
    ("index", "nbytes", "reason"),
    [
        (4, SPEC.page_bytes - 1, f"a page of 'kv' has {SPEC.page_bytes} bytes, got {SPEC.page_bytes - 1}"),
        (4, 2 * SPEC.page_bytes, f"got {2 * SPEC.page_bytes}"),
        (4, 0, "got 0"),
        (20, SPEC.page_bytes, "slot 20 begins none"),
        (3, SPEC.page_bytes, "slot 3 begins none"),
    ],
)
def test_a_flat_page_that_does_not_fit_is_refused_and_nothing_written(
    index: int, nbytes: int, reason: str, layout: str
) -> None:
    host, device = pair(layout=layout)
    before = image(host, device)
    with pytest.raises(ValueError, match=reason):
        host.set_from_flat_data_page(index, torch.zeros(nbytes, dtype=BYTE))
    assert image(host, device) == before


def test_a_pool_that_was_made_in_inference_mode_is_as_good_as_any() -> None:
    with torch.inference_mode():
        host, _ = pair()
    page = torch.arange(SPEC.page_bytes).to(BYTE)
    host.set_from_flat_data_page(4, page)
    assert torch.equal(host.get_data_page(4), page)


@pytest.mark.parametrize("page", [bytes(SPEC.page_bytes), np.zeros(SPEC.page_bytes, np.uint8), None], ids=type)
def test_a_flat_page_is_a_tensor(page: Any) -> None:
    host, device = pair()
    before = image(host, device)
    with pytest.raises(TypeError, match=r"a flat page is a tensor \(torch.frombuffer makes one of bytes\), got"):
        host.set_from_flat_data_page(4, page)
    assert image(host, device) == before


# ---- A closed pool

AFTER_CLOSING: dict[str, Callable[[HostPool, DevicePool], object]] = {
    "backup": lambda h, d: h.backup(d, GOOD, GOOD),
    "load": lambda h, d: h.load(d, GOOD, GOOD, 0),
    "load_all": lambda h, d: h.load_all(d, GOOD, GOOD),
    "empty backup": lambda h, d: h.backup(d, None, None),
    "prepare": lambda h, d: h.prepare(d, GOOD, GOOD, "load"),
    "buffer": lambda h, d: h.buffer("k"),
    "kv_buffer": lambda h, d: h.kv_buffer,
    "page": lambda h, d: h.page(0),
    "layer_view": lambda h, d: h.layer_view("k", 0),
    "data_refs": lambda h, d: h.data_refs,
    "data_ptrs": lambda h, d: h.data_ptrs,
    "device_ptrs": lambda h, d: h.device_ptrs,
    "get_data_page": lambda h, d: h.get_data_page(0),
    "set_from_flat_data_page": lambda h, d: h.set_from_flat_data_page(0, h.get_dummy_flat_data_page()),
    "get_page_buffer_meta": lambda h, d: h.get_page_buffer_meta(GOOD),
    "get_split_heads_page_buffer_meta": lambda h, d: h.get_split_heads_page_buffer_meta(GOOD, 1),
    "get_contiguous_buf_infos": lambda h, d: h.get_contiguous_buf_infos(),
    "is_stride_page_aligned": lambda h, d: h.is_stride_page_aligned(),
}


@pytest.mark.parametrize("use", AFTER_CLOSING)
def test_a_closed_pool_says_so(use: str) -> None:
    host, device = pair(layout="page_head")
    host.close()
    before = image(host, device)
    with pytest.raises(ValueError, match="pool 'kv' is closed"):
        AFTER_CLOSING[use](host, device)
    assert image(host, device) == before


@both_ways
def test_a_transfer_prepared_before_its_pool_was_closed_does_not_run(direction: str) -> None:
    host, device = pair()
    held = host.buffer("k")
    transfer = host.prepare(device, GOOD, GOOD, direction)
    before = raw(held).tobytes(), image(host, device)[1:]
    host.close()
    with pytest.raises(ValueError, match="pool 'kv' is closed"):
        transfer.run()
    assert (raw(held).tobytes(), image(host, device)) == before


def test_slots_of_a_closed_pool_can_still_be_given_back() -> None:
    """Whoever tears down a tree frees its slots, in whatever order."""
    host, _ = pair()
    mine = host.alloc(8)
    assert mine is not None
    host.close()
    assert host.free(mine) == 8


def test_a_transfer_keeps_the_pool_it_needs() -> None:
    host, device = pair()
    view = host.layer_view("k", 0)
    transfer = host.prepare(device, GOOD, GOOD, "backup")
    del host
    assert transfer.run().bytes == 2 * SPEC.page_bytes
    assert not only_poison(view[0])


# ---- A registrar that fails when it is to undo


class Stubborn:
    """Registers everything, and refuses to undo one of the registrations."""

    def __init__(self, refuses: int) -> None:
        self.live: list[int] = []
        self.refuses = refuses

    def register(self, address: int, nbytes: int) -> None:
        self.live.append(address)

    def unregister(self, address: int) -> None:
        if self.live.index(address) == self.refuses:
            raise RuntimeError("no such registration")
        self.live[self.live.index(address)] = 0

    def device_address(self, address: int, device: str) -> int:
        return address


@pytest.mark.parametrize("refuses", range(5))
def test_one_registration_that_cannot_be_undone_does_not_keep_the_others(refuses: int) -> None:
    registrar = Stubborn(refuses)
    spec = replace(SPEC, components=SPEC.components[:1])
    host = HostPool(spec, "page_first", 5, memory=HostMemory(registrar), registration_limit=spec.page_bytes)
    assert len(registrar.live) == 5
    with pytest.raises(RuntimeError, match="no such registration"):
        host.close()
    assert [i for i, address in enumerate(registrar.live) if address] == [refuses]


# ---- Layers that a pool does not own, and states that have none


@on_every_backend
@pytest.mark.parametrize("layer", [1, 3, 99])
def test_loading_a_layer_that_is_not_owned_moves_nothing(layer: int, backend: str) -> None:
    host, device = pair(backend, spec=STATES)
    before = image(host, device)
    receipt = host.load(device, torch.tensor([1]), torch.tensor([2]), layer)
    assert (receipt.path, receipt.bytes, receipt.descriptors) == (backend, 0, 0)
    assert image(host, device) == before


class Recording(OnTheHost):
    """A real backend whose calls are written down."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.calls: list[tuple[int | None, ...]] = []

    def execute(self, plan: Plan, layers: tuple[int | None, ...], items: Items, direction: str) -> Receipt:
        self.calls.append(layers)
        return self.backend.execute(plan, layers, items, direction)


@pytest.mark.parametrize("kind", [list, iter, np.array, torch.tensor])
def test_layers_may_come_as_anything_that_counts(kind: Callable[[list[int]], Any]) -> None:
    """Each is moved once."""
    host, device = pair()
    moved = host.prepare(device, GOOD, GOOD, "load").run(kind([1, 0, 1]))
    assert moved.bytes == host.prepare(device, GOOD, GOOD, "load").run((0, 1)).bytes > 0


@pytest.mark.parametrize("value", [0, -1, 2.5, True, "4", 10**20])
@pytest.mark.parametrize("option", ["staging_pages", "blocks", "registration_limit"])
def test_an_option_that_is_no_sensible_number_is_refused(option: str, value: Any) -> None:
    budget = Budget(10**9)
    with pytest.raises(ValueError, match=rf"{option} must be from \d to [\d,]+, or None; got {value!r}"):
        HostPool(SPEC, "page_first", 4, "torch", budget=budget, **{option: value})
    assert budget.available == budget.total


@pytest.mark.parametrize("option", ["budget", "device_budget"])
def test_a_budget_is_no_number(option: str) -> None:
    with pytest.raises(TypeError, match="a budget is a Budget, which pools share, got 1000"):
        HostPool(SPEC, "page_first", 4, "staged", platform="emulated", **{option: 1000})  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("total", [-1, 2.5, "x", None, True])
def test_a_budget_is_a_whole_number_of_bytes(total: Any) -> None:
    with pytest.raises(ValueError, match=f"a budget is a whole number of bytes, got {total!r}"):
        Budget(total)


@pytest.mark.parametrize("ranks", [0, -1, 1.5, "2"])
def test_memory_is_shared_by_whole_ranks(ranks: Any) -> None:
    with pytest.raises(ValueError, match=f"memory is shared by one rank or more, got {ranks!r}"):
        Budget.of_this_machine(ranks)


def test_a_pool_is_closed_also_when_a_registration_cannot_be_undone() -> None:
    class Stubborn:
        def register(self, address: int, nbytes: int) -> None:
            pass

        def unregister(self, address: int) -> None:
            raise RuntimeError("the driver is gone")

        def device_address(self, address: int, device: str) -> int:
            return address

    budget = Budget(10**9)
    host = HostPool(SPEC, "layer_first", 4, memory=HostMemory(Stubborn()), budget=budget)
    with pytest.raises(RuntimeError, match="the driver is gone"):
        host.close()
    assert host.closed
    assert budget.available == budget.total
    with pytest.raises(ValueError, match="is closed"):
        host.backup(DevicePool(SPEC, 4), GOOD, GOOD)


def test_a_group_closes_every_pool_riders_first_whatever_one_of_them_raises() -> None:
    closed: list[str] = []

    class Pool(HostPool):
        def close(self) -> None:
            super().close()
            closed.append(self.spec.name)
            if self.spec.name == "rider":
                raise RuntimeError("the driver is gone")

    rider = replace(SPEC, name="rider", indices_from="kv")
    group = HostPoolGroup([Pool(spec, "page_first", 4) for spec in (SPEC, rider, replace(rider, name="last"))])
    with pytest.raises(RuntimeError, match="the driver is gone"):
        group.close()
    assert closed == ["last", "rider", "kv"]


@pytest.mark.parametrize("nbytes", [2**46, 2**70])
def test_memory_that_the_system_does_not_have_is_told_in_bytes(nbytes: int) -> None:
    spec, budget = PoolSpec("kv", 1, 1, (Component("k", BYTE, dim=1),)), Budget(2 * nbytes)
    with pytest.raises(MemoryError, match=f"{nbytes:,} bytes of host memory are not to be had .*; take fewer pages"):
        HostPool(spec, "page_first", nbytes, budget=budget)
    assert budget.available == budget.total
    with pytest.raises(MemoryError, match=f"take {nbytes:,} bytes, which are not to be had on cpu .*; take fewer"):
        DevicePool(spec, nbytes)


def moved_layers(direction: str, runs: Sequence[Sequence[int] | None]) -> list[tuple[int | None, ...]]:
    """Layers of each call that a transfer makes of a real backend."""
    host, device = pair(spec=STATES)
    transfer = host.prepare(device, torch.tensor([1]), torch.tensor([2]), direction)
    recording = Recording(transfer.backend)
    transfer.backend = recording
    for layers in runs:
        transfer.run(layers)
    return recording.calls


@pytest.mark.parametrize(
    ("runs", "calls"),
    [
        ([None], [(None,), (0, 2)]),
        ([(0,), (2,)], [(None,), (0,), (2,)]),
        ([(2,), (0,)], [(None,), (2,), (0,)]),
        ([(2, 0)], [(None,), (2, 0)]),
        ([(1, 2), (0, 1)], [(None,), (2,), (0,)]),
    ],
    ids=str,
)
def test_side_states_are_restored_once_before_any_layer(
    runs: Sequence[Sequence[int] | None], calls: list[tuple[int | None, ...]]
) -> None:
    """In whatever order the layers are asked for, and in a call of its own: a backend may move layers in any order."""
    assert [call for call in moved_layers("load", runs) if call] == calls


def test_side_states_are_saved_after_all_layers() -> None:
    assert [call for call in moved_layers("backup", [None]) if call] == [(0, 2), (None,)]


@on_every_backend
@pytest.mark.parametrize(
    "spec", [STATES, PoolSpec("mamba", 3, 1, STATES.components[-1:])], ids=["owns 0 and 2", "owns none"]
)
def test_layer_wise_loads_restore_side_states_with_the_first_layer_only(spec: PoolSpec, backend: str) -> None:
    host, device = pair(backend, spec=spec)
    host.backup(device, torch.tensor([1]), torch.tensor([2]))
    wanted = device.buffer("side_0", None)[2].clone()
    for layer, comes in ((2, False), (1, False), (0, True)):
        poison(device)
        host.load(device, torch.tensor([1]), torch.tensor([3]), layer)
        got = device.buffer("side_0", None)
        assert torch.equal(got[3], wanted) if comes else only_poison(got), f"layer {layer}"
        assert only_poison(got[:3])


# ---- No mistakes


@on_every_backend
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "page_first_kv_split"])
def test_device_rows_of_all_layers_may_lie_in_turn(layout: str, backend: str) -> None:
    """One buffer [token, layer, K/V, head, lane]: the rows of a layer are strided, and other rows lie in between."""
    host, plain = pair(backend, layout)
    together = torch.empty(24, 3, 2, 2, 4, dtype=BF16)
    together.view(BYTE).fill_(POISON)
    names = {"k": 0, "v": 1}
    strided = DevicePool.wrap(SPEC, {c: [together[:, layer, at] for layer in range(3)] for c, at in names.items()})
    for c in names:
        for layer in range(3):
            strided.buffer(c, layer).copy_(plain.buffer(c, layer))
    right = HostPool(SPEC, layout, 5)
    poison(right)
    host_slots, device_slots = slots([4, 1], 4), slots([5, 2], 4)
    oracle.backup(right, plain, host_slots, device_slots)
    host.backup(strided, host_slots, device_slots)
    assert image(host, plain) == image(right, plain)
    together.view(BYTE).fill_(POISON)
    host.load(strided, host_slots, slots([0, 3], 4), 1)
    arrived = together.clone()
    for c, at in names.items():
        for to, source in ((0, 5), (3, 2)):
            page = arrived[to * 4 : to * 4 + 4, 1, at]
            assert torch.equal(page.view(BYTE), plain.buffer(c, 1)[source * 4 : source * 4 + 4].view(BYTE))
            page.view(BYTE).fill_(POISON)
    assert only_poison(arrived), "a row of another layer, page or component was written"


def test_a_fork_leaves_memory_where_the_driver_has_it() -> None:
    """What is pinned stays: parent and child write to the same bytes, and neither gets a copy unknown to devices."""
    host, _ = pair()
    memory = host.storage[0][1][0].view(BYTE).view(-1)
    child = os.fork()
    if not child:
        memory[0] = 7
        os._exit(0)
    os.waitpid(child, 0)
    assert memory[:2].tolist() == [7, POISON]


def test_eight_bit_floats_may_come_as_bytes() -> None:
    spec = presets.mla(2, 8, torch.float8_e4m3fn, 4)
    given = [torch.arange(1, 193, dtype=BYTE).view(24, 1, 8), torch.zeros(24, 1, 8, dtype=BYTE)]
    device, host = DevicePool.wrap(spec, {"latent": given}), HostPool(spec, "page_first", 5)
    host.backup(device, slots([3], 4), slots([1], 4))
    assert torch.equal(host.page(3)["latent"][0].view(BYTE), given[0][4:8])


def test_names_of_upstream_do_the_same() -> None:
    host, device = pair()
    host.backup_from_device_all_layer(device, GOOD, GOOD, io_backend="torch")
    right, _ = pair()
    oracle.backup(right, device, GOOD, GOOD)
    assert image(host, device) == image(right, device)
    loaded, wanted = DevicePool(SPEC, 6), DevicePool(SPEC, 6)
    host.load_to_device_per_layer(loaded, GOOD, GOOD + 8, layer_id=1, io_backend="torch")
    oracle.load(right, wanted, GOOD, GOOD + 8, (1,))
    assert image(host, loaded) == image(right, wanted)
    host.destroy()
    assert host.closed


def test_a_pool_without_memory_completes_every_transfer() -> None:
    anchor = LogicalPool(5, 4)
    device = DevicePool(anchor.spec, 6)
    assert anchor.backup(device, GOOD, GOOD).bytes == anchor.load(device, GOOD, GOOD, 0).bytes == 0
    with pytest.raises(ValueError, match="host index 1 begins a page"):
        anchor.backup(device, GOOD[:4] - 7, GOOD[:4])


@pytest.mark.parametrize("backend", ["torch", "numba"])
def test_buffers_that_an_engine_has_moved_are_found_again(backend: str) -> None:
    """A plan is made for addresses; memory that was given back must not be read through an old one."""
    host, device = HostPool(SPEC, "page_first", 6, backend), DevicePool(SPEC, 6)
    host.backup(device, GOOD, GOOD)
    for c in SPEC.components:
        for layer in SPEC.layers_of(c):
            buffer = device.buffer(c.name, layer)
            buffer.data = torch.full_like(buffer, 3)
    host.backup(device, GOOD, GOOD)
    right = HostPool(SPEC, "page_first", 6)
    oracle.backup(right, device, GOOD, GOOD)
    assert image(host, device) == image(right, device)


def test_a_closed_pool_lets_go_of_its_memory() -> None:
    """Although the device pool, for which it had made a plan, and a prepared transfer live on."""
    host, device = pair()
    host.backup(device, GOOD, GOOD)
    transfer = host.prepare(device, GOOD, GOOD, "load")
    transfer.run((0,))
    memory = weakref.ref(host.storage[0][1][0])
    host.close()
    gc.collect()
    assert memory() is None
    with pytest.raises(ValueError, match="is closed"):
        transfer.run()


@pytest.mark.parametrize("layer", [-1, "0", None, (0, 1)])
def test_what_is_no_layer_is_refused(layer: Any) -> None:
    """A layer that the pool does not own is skipped; a mistake is not."""
    host, device = pair()
    before = image(host, device)
    with pytest.raises(ValueError, match="is no model layer"):
        host.load(device, GOOD, GOOD, layer)
    assert image(host, device) == before
    assert host.load(device, GOOD, GOOD, 99).bytes == 0


@pytest.mark.parametrize("begin", range(-14, 15))
@pytest.mark.parametrize("pitches", [(4, 4), (4, 6), (3, 7)])
@pytest.mark.parametrize("counts", [(1, 3), (3, 1), (3, 2)])
def test_rows_overlap_where_they_share_a_byte(begin: int, pitches: tuple[int, int], counts: tuple[int, int]) -> None:
    """Against sets of bytes."""
    for widths in itertools.product((1, 2, 3), repeat=2):
        one = Rows(100, counts[0], pitches[0], widths[0])
        other = Rows(100 + begin, counts[1], pitches[1], widths[1])
        bytes_of = [{r.begin + i * r.pitch + b for i in range(r.count) for b in range(r.width)} for r in (one, other)]
        assert one.overlap(other) == other.overlap(one) == bool(bytes_of[0] & bytes_of[1]), (one, other)


def test_interleaved_buffers_are_welcome_and_shifted_ones_are_not() -> None:
    spec = presets.mha(2, 2, 8, torch.float32, 4)
    fused = torch.zeros(20, 4, 2, 8)
    DevicePool.wrap(spec, {"k": [fused[:, 0], fused[:, 1]], "v": [fused[:, 2], fused[:, 3]]})
    long, alone = torch.zeros(24, 2, 8), [torch.zeros(20, 2, 8), torch.zeros(20, 2, 8)]
    with pytest.raises(ValueError, match="k of layer 1 lies on the same bytes as k of layer 0"):
        DevicePool.wrap(spec, {"k": [long[:20], long[4:]], "v": alone})


@pytest.mark.parametrize(
    ("dtype", "rule"),
    [(torch.bool, "store the bytes as torch.uint8"), ("uint8", "must be a torch.dtype, got 'uint8'")],
)
def test_types_whose_bits_a_copy_would_change_are_refused(dtype: Any, rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        Component("row", dtype, dim=4)


def kept(dtype: torch.dtype) -> bool:
    """Whether torch copies rows of this type bit for bit, and can pick some of them."""
    bits = torch.arange(64, dtype=BYTE).view(2, -1) * 37 + 200
    try:
        rows = bits.view(dtype)
        return torch.equal(torch.zeros_like(rows).copy_(rows)[torch.tensor([0, 1])].view(BYTE), bits)
    except (NotImplementedError, RuntimeError):
        return False


@pytest.mark.filterwarnings("ignore:.*(ComplexHalf|quantize)")
@pytest.mark.parametrize(
    "dtype", sorted({t for t in vars(torch).values() if isinstance(t, torch.dtype)}, key=str), ids=str
)
def test_a_type_is_refused_where_torch_does_not_keep_its_bits(dtype: torch.dtype) -> None:
    if kept(dtype):
        spec = PoolSpec("kv", 1, 1, (Component("k", dtype, dim=2),))
        assert HostPool(spec, "page_first", 1).backup(DevicePool(spec, 1), torch.arange(1), torch.arange(1)).bytes
        return
    with pytest.raises(ValueError, match=f"torch does not keep every bit of {dtype} in a copy; store the bytes as"):
        Component("k", dtype, dim=2)
