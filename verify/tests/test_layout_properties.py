"""Layouts of any geometry: every byte has one place, and every way to look at a pool agrees about it.

The first half draws pools that no model has. The second half pins the exact shapes, flat pages and pointer lists that
SGLang's pools show (`srt/mem_cache/pool_host/*.py`, `srt/mem_cache/memory_pool_host.py`, version 0.5.23).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from refimpl import LAYOUTS, Component, HostPool, PoolSpec, Segment, byte_offset, oracle, presets, support
from refimpl.geometry import UNITS
from refimpl.layout import Buffer
from refimpl.plan import loop_offsets, plan
from verify import properties  # noqa: F401 - chooses how hard to try
from verify.guarded import GuardedDevice
from verify.reported import POISON, poison, raw, slots, whole

DTYPES = (torch.uint8, torch.bfloat16, torch.float32, torch.float64)
BYTE, BF16 = torch.uint8, torch.bfloat16

# ---- Pools that no model has


@st.composite
def components(draw: st.DrawFn, name: str, size: PoolSpec, layout: str) -> Component:
    """Rows of any kind that the layout takes, for a pool of that many layers, tokens a page and head groups."""
    owned = tuple(draw(st.permutations(range(size.layers)))[: draw(st.integers(0, 4))]) if draw(sometimes()) else None
    dtype = draw(st.sampled_from(DTYPES))
    if layout == "page_head":
        return Component(name, dtype, heads=size.head_groups * draw(st.integers(1, 2)), dim=draw(dims()), layers=owned)
    if layout == "page_first_kv_split" and name == "latent":
        split = (draw(st.integers(1, 3)), draw(st.integers(1, 3)))
        return Component(name, dtype, dim=sum(split), split=split, layers=owned)
    unit = draw(st.sampled_from(UNITS if size.page_size == 1 else UNITS[:2]))
    heads = size.head_groups * draw(st.integers(1, 2)) if unit == "token" and draw(st.booleans()) else None
    side = draw(sometimes())
    return Component(name, dtype, dim=draw(dims()), heads=heads, unit=unit, layers=None if side else owned, side=side)


def dims() -> st.SearchStrategy[int | tuple[int, ...]]:
    return st.integers(1, 5) | st.lists(st.integers(1, 3), min_size=1, max_size=3).map(tuple)


def sometimes() -> st.SearchStrategy[bool]:
    return st.integers(0, 3).map(lambda n: n == 3)


NAMES = (["k", "v"], ["latent"], ["latent", "index_k"], ["temporal", "conv_0", "side_0"])
ROWS = {"page_head": NAMES[:1], "page_unified": NAMES[:2], "page_first_kv_split": NAMES[1:3]}
FAMILIES = ("custom", "mha", "mamba", "dsa", "v4_paged", "v4_state")


@st.composite
def specs(draw: st.DrawFn, layout: str) -> PoolSpec:
    layers = 0 if draw(st.integers(0, 9)) == 9 else draw(st.integers(1, 4))
    size = PoolSpec("kv", layers, draw(st.integers(1, 3)), (), head_groups=draw(st.integers(1, 2)))
    names = draw(st.sampled_from(ROWS.get(layout, NAMES)))
    rows = [draw(components(name, size, layout)) for name in names]
    if names[0] == "k" and (layout == "page_unified" or draw(st.booleans())):
        rows[1] = replace(rows[0], name="v")
    return replace(size, components=tuple(rows), family=draw(st.sampled_from(FAMILIES)))


@st.composite
def entry_specs(draw: st.DrawFn, layout: str) -> PoolSpec:
    """Pools whose rows move entry by entry."""
    layers, entries = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    rows = []
    for name in ("payload", "scale")[: 1 if layout == "page_unified" else draw(st.integers(1, 2))]:
        segments = tuple(Segment(entries, width) for width in draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)))
        dim = sum(s.entries * s.bytes for s in segments) + draw(st.integers(0, 3))
        owned = tuple(draw(st.permutations(range(layers)))[: draw(st.integers(1, layers))])
        rows.append(Component(name, BYTE, dim=dim, unit="page", layers=owned, segments=segments))
    return PoolSpec("c4", layers, draw(st.integers(1, 8)), tuple(rows), draw(st.sampled_from(FAMILIES)))


@st.composite
def pools(draw: st.DrawFn, layout: str, of: Callable[[str], st.SearchStrategy[PoolSpec]] = specs) -> HostPool:
    """A poisoned host pool."""
    host = HostPool(draw(of(layout)), layout, draw(st.integers(1, 4)))
    poison(host)
    return host


in_every_layout = pytest.mark.parametrize("layout", LAYOUTS)


@dataclass(frozen=True)
class Place:
    """One head of one token of one layer, as far as it lies in one buffer: where its bytes are, by `byte_offset`."""

    component: Component
    layer: int | None
    page: int
    token: int
    head: int
    part: int
    first_lane: int
    tensor: torch.Tensor
    offset: int
    nbytes: int

    @property
    def address(self) -> int:
        return self.tensor.data_ptr() + self.offset


def places(host: HostPool, pages: list[int] | None = None) -> Iterator[Place]:
    """Every place of a pool (or of some of its pages), in no particular order."""
    spec = host.spec
    for c in spec.components:
        holding = [(buffer, tensors) for buffer, tensors in host.storage if c in buffer.components]
        for part, (buffer, tensors) in enumerate(holding):
            for layer in spec.layers_of(c):
                for page in range(host.num_pages) if pages is None else pages:
                    for token in range(spec.tokens_per_page(c)):
                        for head in range(c.head_count):
                            offset = byte_offset(
                                spec, host.layout, host.num_pages, c.name, page, layer, token, head, part
                            )
                            tensor = tensor_of(buffer, tensors, layer)
                            nbytes = buffer.extents["lane"] * c.dtype.itemsize
                            yield Place(c, layer, page, token, head, part, buffer.first_lane, tensor, offset, nbytes)


def tensor_of(buffer: Buffer, tensors: list[torch.Tensor], layer: int | None) -> torch.Tensor:
    return next(t for layers, t in zip(buffer.tensor_layers, tensors, strict=True) if layer in layers)


def addresses_of(host: HostPool, page: int) -> list[int]:
    """Addresses of all bytes of a page, ascending."""
    return sorted(place.address + i for place in places(host, [page]) for i in range(place.nbytes))


def spread(addresses: list[int], sizes: list[int]) -> list[int]:
    """Addresses of all bytes of some ranges, ascending: a byte that two ranges hold comes twice."""
    return sorted(address + i for address, size in zip(addresses, sizes, strict=True) for i in range(size))


def content(spec: PoolSpec, num_pages: int) -> dict[str, np.ndarray]:
    """Random bytes other than poison for every row: `{component: [layer, page, token, head, byte]}`."""
    draw = np.random.default_rng(num_pages)
    return {
        c.name: draw.integers(
            0,
            POISON,
            (len(spec.layers_of(c)), num_pages, spec.tokens_per_page(c), c.head_count, c.lanes * c.dtype.itemsize),
            np.uint8,
        )
        for c in spec.components
    }


def write(host: HostPool, rows: dict[str, np.ndarray]) -> None:
    """Put rows where `byte_offset` says, past every view."""
    for place in places(host):
        layer = host.spec.layers_of(place.component).index(place.layer)
        row = rows[place.component.name][layer, place.page, place.token, place.head]
        first = place.first_lane * place.component.dtype.itemsize
        memory = place.tensor.reshape(-1).view(BYTE)
        memory[place.offset : place.offset + place.nbytes] = torch.from_numpy(row[first : first + place.nbytes])


def canonical(spec: PoolSpec, rows: dict[str, np.ndarray], page: int) -> dict[str, bytes]:
    return {c.name: rows[c.name][:, page].tobytes() for c in spec.components}


def pages_of(host: HostPool) -> list[dict[str, bytes]]:
    return [{name: raw(row).tobytes() for name, row in host.page(page).items()} for page in range(host.num_pages)]


def memory_of(host: HostPool) -> list[bytes]:
    return [raw(tensor).tobytes() for _, tensors in host.storage for tensor in tensors]


def blank(host: HostPool, layout: str | None = None) -> HostPool:
    """Another pool of the same spec and size, poisoned."""
    other = HostPool(host.spec, layout or host.layout, host.num_pages)
    poison(other)
    return other


@in_every_layout
@given(data=st.data())
def test_every_byte_of_every_buffer_has_exactly_one_place(layout: str, data: st.DataObject) -> None:
    host = data.draw(pools(layout))
    hits = [np.zeros(tensor.numel() * tensor.element_size(), int) for _, tensors in host.storage for tensor in tensors]
    tensors = [tensor for _, held in host.storage for tensor in held]
    for place in places(host):
        at = next(i for i, tensor in enumerate(tensors) if tensor is place.tensor)
        hits[at][place.offset : place.offset + place.nbytes] += 1
    assert sum(map(len, hits)) == host.nbytes == host.num_pages * host.spec.page_bytes
    for counts in hits:
        assert (counts == 1).all(), f"byte {int(np.argmax(counts != 1))} has {counts[counts != 1][0]} places"


@in_every_layout
@given(data=st.data())
def test_views_lead_to_the_same_bytes(layout: str, data: st.DataObject) -> None:
    host = data.draw(pools(layout))
    groups = {c.name: host.spec.head_groups if c.heads is not None else 1 for c in host.spec.components}
    for place in places(host):
        c = place.component
        view = host.layer_view(c.name, place.layer, place.part)
        in_group = c.head_count // groups[c.name]
        lanes = place.nbytes // c.dtype.itemsize
        assert view.shape == (host.num_pages, host.spec.tokens_per_page(c), groups[c.name], in_group, lanes)
        assert lanes == 1 or view.stride(-1) == 1, "lanes of a head lie next to each other"
        at = (place.page, place.token, *divmod(place.head, in_group))
        first = view.storage_offset() + sum(i * step for i, step in zip(at, view.stride(), strict=False))
        assert view.untyped_storage().data_ptr() + first * c.dtype.itemsize == place.address
        assert view[at].data_ptr() == place.address


@in_every_layout
@given(data=st.data())
def test_pointer_tables_hold_where_page_0_begins(layout: str, data: st.DataObject) -> None:
    host = data.draw(pools(layout))
    begins = {(p.component.name, p.layer, p.part): p.address for p in places(host, [0]) if p.token == 0 == p.head}
    for c in host.spec.components:
        parts = len({part for name, _, part in begins if name == c.name})
        expected = [begins[c.name, layer, part] for layer in host.spec.layers_of(c) for part in range(parts)]
        assert [view.data_ptr() for view in host.data_refs[c.name]] == expected
        assert host.data_ptrs[c.name].tolist() == expected
        assert host.data_ptrs[c.name].dtype == host.device_ptrs[c.name].dtype == torch.uint64
        assert host.device_ptrs[c.name].tolist() == expected, "pageable memory has the same address for all"


@in_every_layout
@given(data=st.data())
def test_contiguous_ranges_cover_each_page_exactly_once(layout: str, data: st.DataObject) -> None:
    host = data.draw(pools(layout))
    begins, sizes, steps = host.get_contiguous_buf_infos()
    assert [size // host.num_pages for size in sizes] == steps
    for page in range(host.num_pages):
        assert spread([b + page * step for b, step in zip(begins, steps, strict=True)], steps) == addresses_of(
            host, page
        )


@in_every_layout
@given(data=st.data())
def test_buffer_meta_covers_each_page_exactly_once(layout: str, data: st.DataObject) -> None:
    host = data.draw(pools(layout))
    order = data.draw(st.permutations(range(host.num_pages)))
    addresses, sizes = host.get_page_buffer_meta(slots([*order, order[0]], host.page_size))
    assert len(addresses) % (len(order) + 1) == 0
    per_page = len(addresses) // (len(order) + 1)
    for i, page in enumerate([*order, order[0]]):
        ours = slice(i * per_page, (i + 1) * per_page)
        assert spread(addresses[ours], sizes[ours]) == addresses_of(host, page), f"page {page}"


@in_every_layout
@given(data=st.data())
def test_split_heads_divide_each_page_between_the_ranks(layout: str, data: st.DataObject) -> None:
    """Either every rank gets the same heads of every component of the page, or the split is refused."""
    host, split = data.draw(pools(layout)), data.draw(st.integers(1, 4))
    try:
        addresses, sizes = host.get_split_heads_page_buffer_meta(slots([0], host.page_size), split)
    except ValueError:
        outer = {"page_head": lambda c: c.heads, "page_unified": lambda c: host.spec.head_groups if c.heads else 1}
        counts = [outer[host.layout](c) for c in host.spec.components] if host.layout in outer else []
        assert not counts or any(count % split for count in counts)
        return
    for rank in range(split):
        mine = len(addresses) // split
        ours = slice(rank * mine, (rank + 1) * mine)
        heads = [p for p in places(host, [0]) if p.head * split // p.component.head_count == rank]
        assert spread(addresses[ours], sizes[ours]) == sorted(p.address + i for p in heads for i in range(p.nbytes))


def test_each_rank_is_told_the_sizes_of_its_own_pieces() -> None:
    """Heads of K have one byte, those of V two."""
    spec = PoolSpec(
        "kv", 1, 1, (Component("k", torch.uint8, heads=2, dim=1), Component("v", torch.uint8, heads=2, dim=2))
    )
    host = HostPool(spec, "page_head", 2)
    (k, v), wholes = host.get_page_buffer_meta(torch.tensor([1]))
    assert wholes == [2, 4]
    assert host.get_split_heads_page_buffer_meta(torch.tensor([1]), 2) == ([k, v, k + 1, v + 2], [1, 2, 1, 2])


@in_every_layout
@given(data=st.data())
def test_a_page_is_the_same_in_every_layout(layout: str, data: st.DataObject) -> None:
    host = data.draw(pools(layout))
    rows = content(host.spec, host.num_pages)
    expected = [canonical(host.spec, rows, page) for page in range(host.num_pages)]
    for layout in LAYOUTS:
        if support(host.spec, layout, "torch", "backup"):
            other = blank(host, layout)
            write(other, rows)
            assert pages_of(other) == expected, layout


@in_every_layout
@given(data=st.data())
def test_the_canonical_page_names_its_axes(layout: str, data: st.DataObject) -> None:
    host = data.draw(pools(layout))
    for c in host.spec.components:
        row = c.row_shape if c.unit != "token" else (host.spec.tokens_per_page(c), c.head_count, c.lanes)
        layers = () if c.side and c.unit != "token" else (len(host.spec.layers_of(c)),)
        assert host.page(0)[c.name].shape == (*layers, *row), c
        assert host.page(0)[c.name].dtype == c.dtype


@in_every_layout
@given(data=st.data())
def test_a_flat_page_comes_back_in_another_place(layout: str, data: st.DataObject) -> None:
    host = data.draw(pools(layout))
    rows = content(host.spec, host.num_pages)
    write(host, rows)
    source, target = (data.draw(st.integers(0, host.num_pages - 1)) for _ in range(2))
    flat = host.get_data_page(source * host.page_size)
    assert flat.dtype == BYTE
    assert flat.shape == host.get_dummy_flat_data_page().shape == (host.spec.page_bytes,)
    other = blank(host)
    before = pages_of(other)
    other.set_from_flat_data_page(target * host.page_size, flat)
    before[target] = canonical(host.spec, rows, source)
    assert pages_of(other) == before
    assert torch.equal(other.get_data_page(target * host.page_size), flat)


@in_every_layout
@given(data=st.data())
def test_shapes_show_the_same_bytes_as_the_storage(layout: str, data: st.DataObject) -> None:
    """Upstream's shapes merge, keep and drop axes; they never move a byte."""
    host = data.draw(pools(layout))
    write(host, content(host.spec, host.num_pages))
    shown = host.kv_buffer if isinstance(host.kv_buffer, list) else [host.kv_buffer]
    assert [raw(tensor).tobytes() for tensor in shown] == memory_of(host)
    assert [tensor.data_ptr() for tensor in shown] == [t.data_ptr() for _, tensors in host.storage for t in tensors]
    for c in host.spec.components:
        if host.layout != "page_unified":
            held = host.buffer(c.name)
            begins = min((p.address for p in places(host) if p.component is c), default=0)
            assert min((t.data_ptr() for t in (held if isinstance(held, list) else [held])), default=0) == begins


# ---- Plans and the oracle


@dataclass(frozen=True)
class Case:
    """A host pool, a device pool of random rows (with gaps between them or without), its twin, and pages to pair."""

    host: HostPool
    device: GuardedDevice
    twin: GuardedDevice
    host_pages: list[int]
    device_pages: list[int]


@st.composite
def cases(draw: st.DrawFn, layout: str, of: Callable[[str], st.SearchStrategy[PoolSpec]] = specs) -> Case:
    host = draw(pools(layout, of))
    device_pages, gap = draw(st.integers(1, 4)), draw(st.sampled_from([0, 8, 24]))
    device, twin = (GuardedDevice(host.spec, device_pages, gap) for _ in range(2))
    limit = min(device.pool.num_pages, device_pages)  # a pool that stores nothing has any number of pages
    count = 0 if draw(st.integers(0, 9)) == 9 else draw(st.integers(1, min(host.num_pages, limit)))
    ours, theirs = (draw(st.permutations(range(pages)))[:count] for pages in (host.num_pages, limit))
    bytes_of = np.random.default_rng(count)
    for memory, same in zip(device.whole, twin.whole, strict=True):
        memory.copy_(torch.from_numpy(bytes_of.integers(0, POISON, memory.numel(), np.uint8)))
        same.copy_(memory)
    return Case(host, device, twin, ours, theirs)


def assigned(case: Case, host: HostPool, device: GuardedDevice, direction: str, assign: oracle.Assign) -> None:
    indices = slots(case.host_pages, host.page_size), slots(case.device_pages, host.page_size)
    oracle._transfer(host, device.pool, *indices, direction, None, assign)


def bytes_of(device: GuardedDevice) -> list[bytes]:
    return [raw(memory).tobytes() for memory in device.whole]


def filled_twin(case: Case, direction: str) -> HostPool:
    """A second host pool; before a load both hold the same random rows, before a backup poison."""
    other = blank(case.host)
    if direction == "load":
        for host in (case.host, other):
            write(host, content(host.spec, host.num_pages))
    return other


directions = pytest.mark.parametrize("direction", ["backup", "load"])


@in_every_layout
@directions
@given(data=st.data())
def test_the_two_oracles_agree(layout: str, direction: str, data: st.DataObject) -> None:
    case = data.draw(cases(layout))
    other = filled_twin(case, direction)
    source = bytes_of(case.device) if direction == "backup" else memory_of(other)
    assigned(case, case.host, case.device, direction, oracle.assign_by_loops)
    assigned(case, other, case.twin, direction, oracle.assign_by_indexing)
    assert memory_of(case.host) == memory_of(other)
    assert bytes_of(case.device) == bytes_of(case.twin)
    assert source == (bytes_of(case.device) if direction == "backup" else memory_of(other)), "the source has changed"


@in_every_layout
@directions
@given(data=st.data())
def test_the_runs_of_a_plan_are_the_bytes_of_the_oracle(layout: str, direction: str, data: st.DataObject) -> None:
    case = data.draw(cases(layout))
    other = filled_twin(case, direction)
    assigned(case, other, case.twin, direction, oracle.assign_by_indexing)
    written: list[int] = []
    items = np.array(case.host_pages, np.int64), np.array(case.device_pages, np.int64)
    layers = (None, *range(case.host.spec.layers))
    for host_runs, device_runs, nbytes in plan(case.host, case.device.pool).runs(*items, layers):
        for host, device in zip(host_runs.tolist(), device_runs.tolist(), strict=True):
            ctypes.memmove(*((host, device) if direction == "backup" else (device, host)), nbytes)
            written += range(host, host + nbytes)
    assert memory_of(case.host) == memory_of(other)
    assert bytes_of(case.device) == bytes_of(case.twin)
    paged = [address for page in case.host_pages for address in addresses_of(case.host, page)]
    assert sorted(written) == sorted(paged), "each byte of the pages once, and no other"


@in_every_layout
@given(data=st.data())
def test_no_two_runs_of_a_page_could_be_one(layout: str, data: st.DataObject) -> None:
    case = data.draw(cases(layout))
    for move in plan(case.host, case.device.pool).moves:
        host, device = loop_offsets(move.loops)
        pairs = set(zip(host.tolist(), device.tolist(), strict=True))
        assert len(pairs) == move.runs_per_item
        joined = [(a, b) for a, b in pairs if (a + move.run, b + move.run) in pairs]
        assert not joined, (
            f"{move.component}: runs of {move.run} bytes at {joined[0]} and behind it are one on both sides"
        )


@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct", "page_unified"])
@directions
@given(data=st.data())
def test_entries_of_page_rows_are_the_bytes_of_the_oracle(layout: str, direction: str, data: st.DataObject) -> None:
    case = data.draw(cases(layout, entry_specs))
    spec, per_page = case.host.spec, case.host.spec.entries
    other = filled_twin(case, direction)
    limits = case.host.num_pages * per_page, case.device.pool.num_pages * per_page
    count = data.draw(st.integers(1, min(4, *limits)))
    entries = [data.draw(st.permutations(range(limit)))[:count] for limit in limits]
    move, right = {
        "backup": (case.host.backup_entries, oracle.backup_entries),
        "load": (case.host.load_entries, oracle.load_entries),
    }[direction]
    receipt = move(case.device.pool, *map(torch.tensor, entries))
    right(other, case.twin.pool, *entries)
    assert memory_of(case.host) == memory_of(other)
    assert bytes_of(case.device) == bytes_of(case.twin)
    segments = [(len(spec.layers_of(c)), s.bytes) for c in spec.components for s in c.segments]
    assert receipt.bytes == count * sum(layers * nbytes for layers, nbytes in segments)
    assert receipt.descriptors == count * sum(layers for layers, _ in segments)


def label(value: object) -> str:
    """A readable part of a test id."""
    if not isinstance(value, PoolSpec):
        return "" if callable(value) else str(value)
    heads = {c.heads for c in value.components if c.heads}
    grouped = f"-{value.head_groups}groups" if value.head_groups > 1 else ""
    return f"{value.family}-L{value.layers}" + (f"-H{max(heads)}" if heads else "") + grouped


MHA, GROUPED = presets.mha(3, 4, 8, BF16, 2), presets.mha(3, 4, 8, BF16, 2, head_groups=2)
ONE_HEAD, ONE_LAYER = presets.mha(1, 1, 8, BF16, 2), presets.mha(1, 4, 8, BF16, 2)
SPLIT = presets.mla(3, 12, BYTE, 2, split=(8, 4))
RUNS = [
    # gap between device rows -> bytes of the runs of a page in one layer, nested loops around them
    (MHA, "layer_first", 0, 128, 0),  # all tokens of the page
    (MHA, "layer_first", 8, 64, 1),  # a token
    (MHA, "page_first", 0, 64, 1),  # a token: the host has other layers in between
    (MHA, "page_first_direct", 0, 128, 0),
    (MHA, "page_head", 0, 16, 2),  # a head of a token
    (GROUPED, "page_head", 0, 16, 2),  # groups of heads and heads in a group are one loop
    (ONE_LAYER, "page_head", 0, 16, 2),
    (ONE_HEAD, "page_head", 0, 32, 0),  # with one head and one layer nothing is in between
    (ONE_HEAD, "page_first", 0, 32, 0),
    (MHA, "page_unified", 0, 128, 0),
    (GROUPED, "page_unified", 0, 32, 2),  # the heads of a group
    (SPLIT, "page_first_kv_split", 0, 8, 1),  # of two tokens each 8 and 4 bytes, the device has both together
    (SPLIT, "page_first_direct", 0, 24, 0),
    (presets.dsa_indexer(3, 8, 8, 2), "page_first", 8, 24, 0),
]


@pytest.mark.parametrize(("spec", "layout", "gap", "run", "loops"), RUNS, ids=label)
def test_the_longest_run_of_well_known_pairs(spec: PoolSpec, layout: str, gap: int, run: int, loops: int) -> None:
    first = plan(HostPool(spec, layout, 3), GuardedDevice(spec, 3, gap).pool).moves[0]
    assert (first.run, len(first.loops)) == (run, loops)


# ---- Fewer pages than layers: upstream's per-layer views of some layouts index pages instead, and fail


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_pool_may_have_fewer_pages_than_layers(layout: str) -> None:
    spec = (
        presets.mla(5, 8, BF16, 2, split=(6, 2)) if layout == "page_first_kv_split" else presets.mha(5, 2, 4, BF16, 2)
    )
    host = HostPool(spec, layout, 2)
    write(host, content(spec, 2))
    for c in spec.components:
        assert len(host.data_refs[c.name]) == len(host.data_ptrs[c.name]) == 5 * (2 if c.split else 1)
        assert all(view.shape[:2] == (2, 2) for view in host.data_refs[c.name])
        starts = host.data_ptrs[c.name].tolist()
        assert len(set(starts)) == len(starts), "two layers have one address"


# ---- Alignment for O_DIRECT


@pytest.mark.parametrize(
    ("spec", "layout", "aligned"),
    [
        (presets.mla(2, 32, BYTE, 64), "page_first", True),  # pages of 4096 B
        (presets.mla(2, 32, BYTE, 64), "page_first_direct", True),
        (presets.mla(2, 32, BYTE, 64), "page_unified", True),
        (presets.mla(2, 64, BYTE, 64), "layer_first", False),  # of any size: a page is scattered over layers
        (presets.mla(2, 33, BYTE, 64), "page_first", False),  # pages of 4224 B
        (presets.mha(2, 2, 16, BYTE, 64), "page_first", True),
        (presets.mha(2, 2, 16, BYTE, 64), "page_head", True),
        (presets.mha(2, 2, 16, BYTE, 64, v_head_dim=8), "page_first", False),  # V pages of 2048 B
        (presets.v4_paged("c4", 21, 37440), "page_first", False),  # 786,240 B: DeepSeek V4 Flash
        (presets.v4_state("c4_state", 21, 8, 8192), "page_first", True),
    ],
)
def test_pages_that_begin_on_a_block_edge(spec: PoolSpec, layout: str, aligned: bool) -> None:
    assert HostPool(spec, layout, 3).is_stride_page_aligned() == aligned


def test_the_edge_can_be_chosen() -> None:
    host = HostPool(presets.mla(2, 33, BYTE, 64), "page_first", 3)
    assert host.is_stride_page_aligned(128)
    assert not host.is_stride_page_aligned(256)


# ---- Upstream's shapes


@dataclass(frozen=True)
class Size:
    """L layers, N pages, P tokens a page, H heads."""

    L: int
    N: int
    P: int
    H: int

    @property
    def S(self) -> int:
        return self.N * self.P


SIZES = (Size(3, 5, 4, 2), Size(1, 1, 1, 1), Size(2, 1, 4, 1), Size(1, 3, 1, 4))
D, DV, C = 8, 6, 12
Shapes = Mapping[str, tuple[int, ...] | list[tuple[int, ...]]]


def kv_with_index(z: Size) -> PoolSpec:
    """What the Ascend MLA pool holds: latent and rope, index keys of some layers, and their scales."""
    index = Component("index_k", BYTE, dim=5, layers=(0,))
    scale = Component("index_scale", torch.float32, dim=1, layers=(0,))
    latent = Component("latent", BF16, dim=C, split=(8, 4))
    return PoolSpec("kv", z.L, z.P, (latent, index, scale), "mla")


def states(z: Size) -> PoolSpec:
    return presets.mamba(z.L, [(6, 3), (2, 2)], BF16, (4, 2, 3), torch.float32, [((7,), BYTE)])


# pool, layout -> shape of each component's buffer
UPSTREAM: dict[tuple[str, str], tuple[Callable[[Size], PoolSpec], Callable[[Size], Shapes]]] = {}


def shapes_of(pool: str, make: Callable[[Size], PoolSpec], **layouts: Callable[[Size], Shapes]) -> None:
    UPSTREAM.update({(pool, layout): (make, shapes) for layout, shapes in layouts.items()})


shapes_of(
    "mha",
    lambda z: presets.mha(z.L, z.H, D, BF16, z.P),
    layer_first=lambda z: {"kv": (2, z.L, z.S, z.H, D), "k": (z.L, z.S, z.H, D), "v": (z.L, z.S, z.H, D)},
    page_first=lambda z: {"kv": (2, z.S, z.L, z.H, D), "k": (z.S, z.L, z.H, D), "v": (z.S, z.L, z.H, D)},
    page_first_direct=lambda z: {"kv": (2, z.N, z.L, z.P, z.H, D), "k": (z.N, z.L, z.P, z.H, D)},
    page_head=lambda z: {"kv": (2, z.N, z.H, z.P, z.L, D), "v": (z.N, z.H, z.P, z.L, D)},
    page_unified=lambda z: {"kv": (z.N, 1, z.L, 2, z.P, z.H, D)},
)
shapes_of(
    "mha in head groups",
    lambda z: presets.mha(z.L, 2 * z.H, D, BF16, z.P, head_groups=2),
    page_unified=lambda z: {"kv": (z.N, 2, z.L, 2, z.P, z.H, D)},
)
shapes_of(
    "asymmetric",
    lambda z: presets.mha(z.L, z.H, D, BF16, z.P, v_head_dim=DV),
    page_first=lambda z: {"kv": [(z.S, z.L, z.H, D), (z.S, z.L, z.H, DV)], "v": (z.S, z.L, z.H, DV)},
    page_first_direct=lambda z: {"kv": [(z.N, z.L, z.P, z.H, D), (z.N, z.L, z.P, z.H, DV)]},
)
shapes_of(
    "k only",
    lambda z: presets.mha_k_only(z.L, z.H, D, BF16, z.P),
    layer_first=lambda z: {"kv": (z.L, z.S, z.H, D)},
    page_first=lambda z: {"kv": (z.S, z.L, z.H, D)},
    page_first_direct=lambda z: {"kv": (z.N, z.L, z.P, z.H, D)},
)
shapes_of(
    "mla",
    lambda z: presets.mla(z.L, C, BF16, z.P, split=(8, 4)),
    layer_first=lambda z: {"kv": (z.L, z.S, 1, C), "latent": (z.L, z.S, 1, C)},
    page_first=lambda z: {"kv": (z.S, z.L, 1, C)},
    page_first_direct=lambda z: {"kv": (z.N, z.L, z.P, 1, C)},
    page_unified=lambda z: {"kv": (z.N, z.L, z.P, C)},
    page_first_kv_split=lambda z: {"latent": [(z.N, z.L, z.P, 1, 8), (z.N, z.L, z.P, 1, 4)]},
)
shapes_of(
    "mla with index keys",
    kv_with_index,
    page_first_kv_split=lambda z: {
        "latent": [(z.N, z.L, z.P, 1, 8), (z.N, z.L, z.P, 1, 4)],
        "index_k": (z.N, 1, z.P, 1, 5),
        "index_scale": (z.N, 1, z.P, 1, 1),
    },
)


def state_shapes(z: Size) -> Shapes:
    """The same in both layouts."""
    return {
        "temporal": (z.S, z.L, 1, 4, 2, 3),
        "conv_0": (z.S, z.L, 1, 6, 3),
        "conv_1": (z.S, z.L, 1, 2, 2),
        "side_0": (z.S, 7),
    }


shapes_of("mamba", states, page_first=state_shapes, page_first_direct=state_shapes)
for _pool, _make in {
    "v4 paged": lambda z: presets.v4_paged("c4", z.L, 24, 16),
    "v4 state": lambda z: presets.v4_state("c4_state", z.L, 8, 3, 16),
}.items():
    shapes_of(
        _pool,
        _make,
        layer_first=lambda z: {"kv": [(z.N, 24)] * z.L},
        page_first=lambda z: {"kv": (z.N, z.L, 24)},
        page_first_direct=lambda z: {"kv": (z.N, z.L, 1, 24)},
    )
shapes_of(
    "dsa",
    lambda z: presets.dsa_indexer(z.L, 8, 8, z.P),
    layer_first=lambda z: {"index_k": (z.L, z.N, z.P * 12)},
    page_first=lambda z: {"index_k": (z.N, z.L, 1, z.P * 12)},
    page_first_direct=lambda z: {"index_k": (z.N, z.L, 1, z.P * 12)},
)


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize(("pool", "layout"), UPSTREAM)
def test_buffers_have_the_shapes_of_upstream(pool: str, layout: str, size: Size) -> None:
    make, shapes = UPSTREAM[pool, layout]
    if pool == "mamba":
        size = replace(size, P=1)
    host = HostPool(make(size), layout, size.N)
    for name, expected in shapes(size).items():
        held = host.kv_buffer if name == "kv" else host.buffer(name)
        if isinstance(expected, list) and len(expected) > 1:
            assert isinstance(held, list), name
            assert [tuple(tensor.shape) for tensor in held] == expected, name
        else:
            assert isinstance(held, torch.Tensor), name
            assert tuple(held.shape) == (expected[0] if isinstance(expected, list) else expected), name


@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct", "page_head"])
def test_k_and_v_are_the_halves_of_one_tensor(layout: str) -> None:
    host = HostPool(presets.mha(3, 2, D, BF16, 4), layout, 5)
    both = host.kv_buffer
    assert isinstance(both, torch.Tensor)
    for half, name in enumerate(("k", "v")):
        assert whole(host, name).data_ptr() == both[half].data_ptr()
        assert whole(host, name).is_contiguous()


@pytest.mark.parametrize("difference", [{"side": True}, {"layers": (1, 0)}, {"dtype": torch.int16}, {"dim": 3}])
def test_k_and_v_lie_apart_when_they_are_not_alike(difference: dict[str, Any]) -> None:
    k = Component("k", BF16, dim=2, unit="page")
    host = HostPool(PoolSpec("kv", 2, 1, (k, replace(k, name="v", **difference))), "page_first", 3)
    assert len(host.storage) == 2
    write(host, content(host.spec, 3))
    assert pages_of(host) == [canonical(host.spec, content(host.spec, 3), page) for page in range(3)]


def test_a_pool_without_components_has_no_buffer() -> None:
    host = HostPool(PoolSpec("kv", 0, 4, (), "logical"), "page_first", 3)
    assert host.kv_buffer == []
    assert host.page(0) == host.data_ptrs == {}


# ---- Upstream's flat pages: the bytes of a page in storage order

Rows = dict[str, np.ndarray]  # of one page: {component: [layer, token, head, byte]}


def order(*axes: int) -> Callable[[np.ndarray], np.ndarray]:
    return lambda rows: rows.transpose(axes)


LAYER_TOKEN, TOKEN_LAYER, HEAD_TOKEN_LAYER = order(0, 1, 2, 3), order(1, 0, 2, 3), order(2, 1, 0, 3)


def each(names: str, arrange: Callable[[np.ndarray], np.ndarray]) -> Callable[[Rows], list[np.ndarray]]:
    """Components one after another, each arranged in the same way."""
    return lambda rows: [arrange(rows[name]) for name in names.split()]


def fused(groups: int) -> Callable[[Rows], list[np.ndarray]]:
    """page_unified: head group, layer, K/V, token, head in group."""

    def arranged(rows: Rows) -> list[np.ndarray]:
        both = np.stack([rows["k"], rows["v"]])  # component, layer, token, head, byte
        by_group = both.reshape(*both.shape[:3], groups, -1, both.shape[-1])
        return [by_group.transpose(3, 1, 0, 2, 4, 5)]

    return arranged


Z = Size(3, 5, 4, 2)
_MHA, _MLA = presets.mha(3, 2, D, BF16, 4), presets.mla(3, C, BF16, 4, split=(8, 4))
_STATES, _V4, _DSA = states(Z), presets.v4_paged("c4", 3, 24, 16), presets.dsa_indexer(3, 8, 8, 4)
FLAT: list[tuple[PoolSpec, str, Callable[[Rows], list[np.ndarray]]]] = [
    (_MHA, "layer_first", each("k v", LAYER_TOKEN)),
    (_MHA, "page_first", each("k v", TOKEN_LAYER)),
    (_MHA, "page_first_direct", each("k v", LAYER_TOKEN)),
    (_MHA, "page_head", each("k v", HEAD_TOKEN_LAYER)),
    (_MHA, "page_unified", fused(1)),
    (replace(_MHA, head_groups=2), "page_unified", fused(2)),
    (presets.mha(3, 2, D, BF16, 4, v_head_dim=DV), "page_first", each("k v", TOKEN_LAYER)),
    (_MLA, "layer_first", each("latent", LAYER_TOKEN)),
    (_MLA, "page_first", each("latent", TOKEN_LAYER)),
    (_MLA, "page_first_direct", each("latent", LAYER_TOKEN)),
    (_MLA, "page_unified", each("latent", LAYER_TOKEN)),
    (_MLA, "page_first_kv_split", lambda rows: [rows["latent"][..., :16], rows["latent"][..., 16:]]),
    *[(_STATES, layout, each("temporal conv_0 conv_1 side_0", LAYER_TOKEN)) for layout in LAYOUTS[1:3]],
    *[(_V4, layout, each("c4", LAYER_TOKEN)) for layout in LAYOUTS[:3]],
    *[(_DSA, layout, each("index_k", LAYER_TOKEN)) for layout in LAYOUTS[:3]],
    (PoolSpec("kv", 0, 4, (), "logical"), "page_first", lambda rows: [np.empty(0, np.uint8)]),
]


@pytest.mark.parametrize(("spec", "layout", "arrange"), FLAT, ids=label)
def test_flat_pages_have_the_order_of_upstream(
    spec: PoolSpec, layout: str, arrange: Callable[[Rows], list[np.ndarray]]
) -> None:
    host = HostPool(spec, layout, 5)
    rows = content(spec, 5)
    write(host, rows)
    flat = b"".join(np.ascontiguousarray(part).tobytes() for part in arrange({c: r[:, 3] for c, r in rows.items()}))
    assert host.get_data_page(3 * spec.page_size).numpy().tobytes() == flat


# ---- Upstream's pointer lists: the pieces of pages 3 and 1


_ROW = 4 * 2 * D * 2  # P*H*D*b: one layer of K of a page
META: list[tuple[PoolSpec, str, list[tuple[str, int | None, int]]]] = [
    # component, layer at which the piece begins, bytes
    (_MHA, "layer_first", [(name, layer, _ROW) for layer in range(3) for name in ("k", "v")]),
    *[(_MHA, layout, [("k", 0, 3 * _ROW), ("v", 0, 3 * _ROW)]) for layout in LAYOUTS[1:4]],
    (_MHA, "page_unified", [("k", 0, 6 * _ROW)]),
    (presets.mha(3, 2, D, BF16, 4, v_head_dim=DV), "page_first", [("k", 0, 3 * _ROW), ("v", 0, 3 * _ROW * DV // D)]),
    (_MLA, "layer_first", [("latent", layer, 4 * C * 2) for layer in range(3)]),
    *[(_MLA, layout, [("latent", 0, 3 * 4 * C * 2)]) for layout in (*LAYOUTS[1:3], "page_unified")],
    *[
        (_STATES, layout, [("temporal", 0, 3 * 96), ("conv_0", 0, 3 * 36), ("conv_1", 0, 3 * 8), ("side_0", None, 7)])
        for layout in LAYOUTS[1:3]
    ],
    (_V4, "layer_first", [("c4", layer, 24) for layer in range(3)]),
    *[(_V4, layout, [("c4", 0, 3 * 24)]) for layout in LAYOUTS[1:3]],
    (_DSA, "layer_first", [("index_k", layer, 48) for layer in range(3)]),
    *[(_DSA, layout, [("index_k", 0, 3 * 48)]) for layout in LAYOUTS[1:3]],
    (PoolSpec("kv", 0, 4, (), "logical"), "page_first", []),
]


@pytest.mark.parametrize(("spec", "layout", "parts"), META, ids=lambda v: "" if isinstance(v, list) else label(v))
def test_page_buffer_meta_has_the_order_of_upstream(
    spec: PoolSpec, layout: str, parts: list[tuple[str, int | None, int]]
) -> None:
    host = HostPool(spec, layout, 5)
    addresses, sizes = host.get_page_buffer_meta(slots([3, 1], spec.page_size))
    assert sizes == [size for _, _, size in parts] * 2
    begins = {(p.component.name, p.layer, p.page): p.address for p in places(host) if p.token == 0 == p.head}
    assert addresses == [begins[name, layer, page] for page in (3, 1) for name, layer, _ in parts]
    if spec.family == "mha" and layout in LAYOUTS[1:4]:
        assert addresses[1] - addresses[0] == host.nbytes // 2, "V is half a buffer after K"
