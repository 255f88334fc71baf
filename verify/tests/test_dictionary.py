"""The dictionary: names mean what their engines say, bytes go there and back, and names that mislead do so here."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from refimpl import LAYOUTS, HostPool, byte_offset, presets, support
from refimpl.geometry import PoolSpec
from refimpl.layout import buffers, upstream_shape
from verify import cli
from verify.dictionary import tables
from verify.dictionary.arrangement import (
    CANONICAL,
    HAS,
    counterparts,
    lists,
    order,
    shape,
    to_ours,
    to_theirs,
)
from verify.dictionary.entries import ENTRIES, Entry, Rows
from verify.dictionary.twins import Extents, Twins, geometries, numbered, twins
from verify.fill import fill_host
from verify.reported import poison, raw

CASES: list[tuple[Entry, Rows]] = [(entry, rows) for entry in ENTRIES for rows in entry.rows]
PAGES = 3
SPLIT = (4, 3)  # lanes of each part, where lanes are cut

# Every axis of another length, and one with lengths that coincide.
UNLIKE: Extents = dict(zip(CANONICAL, (3, 2, 4, 5, 2, 3, 7), strict=True))
ALIKE: Extents = dict(zip(CANONICAL, (2, 2, 2, 2, 2, 1, 7), strict=True))

every_entry = pytest.mark.parametrize(("entry", "rows"), CASES, ids=[f"{entry}-{rows}" for entry, rows in CASES])


def of(extents: Extents, rows: Rows) -> Extents:
    """Without the axes that the rows lack, and with the number of parts."""
    return {axis: extents[axis] if axis in HAS[rows] else 1 for axis in CANONICAL} | {"part": len(SPLIT)}


# ---- names


def test_every_name_is_told_once() -> None:
    named = [(str(entry), rows) for entry, rows in CASES]
    assert len(set(named)) == len(named)


def test_every_entry_names_its_source() -> None:
    for entry in ENTRIES:
        assert re.search(r"#\d+|at \w{7}|\d+\.\d+", entry.source), f"{entry}: {entry.source!r} has no version or thread"


LETTERS = {"L": "layer", "B": "page", "H": "head", "N": "token", "C": "(component lane)"}
WORDS = {
    "NL": "layer",
    "NB": "page",
    "TWO": "component",
    "BS": "token",
    "NH": "head",
    "HS": "lane",
    "NBBS": "(page token)",
    "CS": "(component lane)",
    "NP": "part",
    "ONE": "1",
}


@pytest.mark.parametrize("entry", [e for e in ENTRIES if re.fullmatch("[LBHNC]{5}", e.name)], ids=str)
def test_vllm_names_spell_their_axes(entry: Entry) -> None:
    assert entry.axes == " ".join(LETTERS[letter] for letter in entry.name)


@pytest.mark.parametrize(
    "entry", [e for e in ENTRIES if e.engine == "LMCache" and e.name != "NL_X_NB_BSV_BSS"], ids=str
)
def test_lmcache_names_spell_their_axes(entry: Entry) -> None:
    """`_X_` separates lists, `_` dimensions (`csrc/engine_kv_format.h`). BSV_BSS: values of a block, then scales."""
    tensors = [" ".join(WORDS[word] for word in part.split("_")) for part in entry.name.split("_X_")]
    assert entry.axes == " | ".join(tensors)


@pytest.mark.parametrize(
    "entry", [pytest.param(e, id=f"{e}-{e.rows[0]}") for e in ENTRIES if e.engine == "SGLang" and e.name in LAYOUTS]
)
def test_sglang_shapes_are_those_of_its_pools(entry: Entry) -> None:
    (rows,) = entry.rows
    spec = pools(rows)[0]
    extents = extents_of(spec, rows)
    for buffer in buffers(spec, entry.name, PAGES):
        assert shape(entry, extents | {"lane": buffer.extents["lane"]}) == upstream_shape(
            buffer, spec.family, entry.name
        )


# ---- there and back


@pytest.mark.parametrize("extents", [UNLIKE, ALIKE], ids=["unlike", "alike"])
@every_entry
def test_every_element_arrives_once_and_comes_back(entry: Entry, rows: Rows, extents: Extents) -> None:
    extents = of(extents, rows)
    canonical = numbered(extents)
    theirs = to_theirs(entry, canonical, SPLIT)
    elements = np.concatenate([tensor.ravel() for tensor in theirs.values()])
    assert np.array_equal(np.sort(elements), np.arange(canonical.size))
    assert np.array_equal(to_ours(entry, theirs, extents, SPLIT), canonical)


@every_entry
def test_an_element_lies_where_strides_by_name_say(entry: Entry, rows: Rows) -> None:
    """The same places by arithmetic: an axis steps over all that stands inside it."""
    extents = of(UNLIKE, rows)
    theirs, inside = to_theirs(entry, numbered(extents), SPLIT), order(entry)[len(lists(entry)) :]
    for number, values in enumerate(np.ndindex(*(extents[axis] for axis in CANONICAL))):
        at: dict[str, int] = dict(zip(CANONICAL, values, strict=True))
        lengths = dict(extents)
        if "part" in lists(entry):
            at["part"] = int(at["lane"] >= SPLIT[0])
            at["lane"] -= at["part"] * SPLIT[0]
            lengths["lane"] = SPLIT[at["part"]]
        offset = 0
        for axis in inside:
            offset = offset * lengths[axis] + at[axis]
        tensor = theirs[tuple(at[axis] for axis in lists(entry))]
        assert tensor.reshape(-1)[offset] == number


def test_an_array_with_an_axis_that_an_entry_lacks_is_refused() -> None:
    latent = next(e for e in ENTRIES if e.name == "NL_X_NB_BS_HS")
    with pytest.raises(ValueError, match="LMCache NL_X_NB_BS_HS has no axis component, group, head"):
        to_theirs(latent, numbered(UNLIKE))


# ---- to our layouts


def pools(rows: Rows) -> list[PoolSpec]:
    """Pools of a kind of rows, heads in groups of every sort: `["", "one group", "one head a group"]`."""
    if rows == "latent":
        return [presets.mla(4, 7, torch.bfloat16, 5, split=SPLIT)]
    if rows == "index":
        return [presets.dsa_indexer(4, 8, 4, 5, indices_from=None)]
    spec = presets.mha(4, 6, 7, torch.bfloat16, 5, head_groups=2)
    return [spec, replace(spec, head_groups=1), replace(spec, head_groups=6)]


def fit(spec: PoolSpec, groups: str) -> bool:
    heads = spec.components[0].head_count // spec.head_groups
    return {"": True, "one group": spec.head_groups == 1, "one head a group": heads == 1}[groups]


def extents_of(spec: PoolSpec, rows: Rows) -> Extents:
    c = spec.components[0]
    lengths = (PAGES, len(spec.components), spec.layers, spec.tokens_per_page(c), spec.head_groups)
    heads, lane_bytes = c.head_count // spec.head_groups, c.lanes * c.dtype.itemsize
    return of(dict(zip(CANONICAL, (*lengths, heads, lane_bytes), strict=True)), rows)


def canonical_bytes(host: HostPool, rows: Rows) -> np.ndarray:
    """What `host.page` gives, as one array of bytes with canonical axes."""
    extents = extents_of(host.spec, rows)
    pages = [np.stack([raw(c).ravel() for c in host.page(page).values()]) for page in range(PAGES)]
    return np.stack(pages).reshape([extents[axis] for axis in CANONICAL])


def filled(spec: PoolSpec, layout: str) -> HostPool:
    host = HostPool(spec, layout, PAGES)
    fill_host(host)
    return host


def memory(host: HostPool, part: int) -> np.ndarray:
    """The bytes of one of our tensors, to read and to write."""
    return host.storage[part][1][0].reshape(-1).view(torch.uint8).numpy()


def begins(host: HostPool, entry: Entry, place: tuple[int, ...], rows: Rows) -> tuple[int, int]:
    """Which of our tensors holds one of theirs, and from which byte on, by our own formula."""
    at = dict(zip(lists(entry), place, strict=True))
    component = host.spec.components[at.get("component", 0)].name
    page, layer, part = at.get("page", 0), at.get("layer", 0), at.get("part", 0)
    return part, byte_offset(host.spec, host.layout, PAGES, component, page, layer, part=part)


def same_bytes() -> Iterator[tuple[Entry, Rows, str, PoolSpec]]:
    for entry, rows in CASES:
        for layout, groups in counterparts(entry, rows):
            for spec in pools(rows):
                if fit(spec, groups):
                    yield entry, rows, layout, spec


@pytest.mark.parametrize(
    ("entry", "rows", "layout", "spec"),
    [pytest.param(*case, id=f"{case[0]}-{case[1]}-{case[2]}-{case[3].head_groups}") for case in same_bytes()],
)
def test_a_layout_of_ours_holds_the_very_bytes(entry: Entry, rows: Rows, layout: str, spec: PoolSpec) -> None:
    host, blank = filled(spec, layout), HostPool(spec, layout, PAGES)
    poison(blank)
    split = [lanes * spec.components[0].dtype.itemsize for lanes in spec.components[0].split]
    canonical = canonical_bytes(host, rows)
    theirs = to_theirs(entry, canonical, split)
    for place, tensor in theirs.items():
        part, first = begins(host, entry, place, rows)
        here, there = (memory(pool, part) for pool in (host, blank))
        assert here[first : first + tensor.size].tobytes() == tensor.tobytes(), f"tensor {place}"
        there[first : first + tensor.size] = tensor.reshape(-1)
    assert np.array_equal(canonical_bytes(blank, rows), canonical)
    assert np.array_equal(to_ours(entry, theirs, extents_of(spec, rows), split), canonical)


@pytest.mark.parametrize(
    ("entry", "rows"),
    [pytest.param(e, r, id=f"{e}-{r}") for e, r in CASES if not counterparts(e, r)],
)
def test_no_layout_of_ours_holds_the_bytes_of_the_others(entry: Entry, rows: Rows) -> None:
    for spec in pools(rows):
        split = [lanes * spec.components[0].dtype.itemsize for lanes in spec.components[0].split]
        for layout in LAYOUTS:
            if support(spec, layout, "torch", "backup"):
                host = filled(spec, layout)
                theirs = to_theirs(entry, canonical_bytes(host, rows), split)
                whole = [memory(host, part).tobytes() for part in range(len(host.storage))]
                found = [any(tensor.tobytes() in ours for ours in whole) for tensor in theirs.values()]
                assert not all(found), f"{layout} with {spec.head_groups} groups"


def test_a_difference_names_axes_that_stand_the_other_way_round() -> None:
    named = {e.name: tables.ours(e, "kv") for e in ENTRIES if e.engine in ("FlexKV", "vLLM")}
    assert named["BLOCKFIRST"] == "page_unified, one group"
    assert named["LAYERFIRST"] == "none; layer_first, but layer outside K/V"
    assert named["BHLNC"] == "none; page_unified with one head a group, but token outside K/V"


# ---- twins

every_pair = pytest.mark.parametrize(
    "pair", twins(), ids=lambda pair: f"{pair.names[0][0]}-{pair.names[1][0]}-{pair.rows}"
)


def test_names_that_people_confused_are_found() -> None:
    """LMCache PR #2495, #4253 and #4467; a store whose keys do not name the layout; K/V taken for two layers."""
    found = {(str(a), str(b)): pair.when for pair in twins() for a in pair.names[0] for b in pair.names[1]}
    assert found["vLLM NHD (FlashAttention)", "vLLM HND (FlashAttention)"] == "heads = tokens"
    assert found["LMCache NL_X_TWO_NB_BS_NH_HS", "LMCache NL_X_NB_TWO_BS_NH_HS"] == "2 = pages"
    assert found["LMCache NL_X_NB_TWO_BS_NH_HS", "LMCache NL_X_NB_NH_BS_TWO_HS"] == "2 = heads"
    assert found["SGLang page_first_direct", "FlexKV LAYERBLOCK"] == "2 = layers"
    assert found["SGLang flat page of page_first_direct", "SGLang flat page of page_first"] == ""
    assert found["vLLM LBHNC", "vLLM LBNHC"] == "heads = tokens"


@every_pair
def test_twins_look_alike_and_mean_other_bytes(pair: Twins) -> None:
    canonical = numbered(pair.smallest)
    for one in pair.names[0]:
        for other in pair.names[1]:
            a, b = to_theirs(one, canonical), to_theirs(other, canonical)
            assert [t.shape for t in a.values()] == [t.shape for t in b.values()]
            assert any(x.tobytes() != y.tobytes() for x, y in zip(a.values(), b.values(), strict=True))
            read = to_ours(other, dict(zip(b, a.values(), strict=True)), pair.smallest)
            assert not np.array_equal(read, canonical), "who takes one for the other reads another page"
    here, there = tables.misread(pair)
    assert here != there


@pytest.mark.parametrize("rows", ["kv", "latent"])
def test_shapes_tell_entries_apart_where_no_lengths_coincide(rows: Rows) -> None:
    extents = of(UNLIKE | {"group": 1, "head": 6}, rows)
    pairs = [pair for pair in twins() if pair.rows == rows and pair.when]
    assert pairs
    for pair in pairs:
        one, other = pair.names[0][0], pair.names[1][0]
        seen = [([extents[axis] for axis in lists(e)], shape(e, extents)) for e in (one, other)]
        assert seen[0] != seen[1], f"{one} and {other} when {pair.when}"


@every_pair
def test_twins_occur_exactly_when_the_lengths_agree(pair: Twins) -> None:
    one, other = pair.names[0][0], pair.names[1][0]
    agreeing = [extents for extents in geometries(pair.rows) if agrees(pair.when, extents)]
    alike = [e for e in agreeing if shape(one, e) == shape(other, e) and not same(one, other, e)]
    assert len(alike) == pair.geometries
    assert pair.smallest in alike


def agrees(when: str, extents: Extents) -> bool:
    def length(text: str) -> int:
        names = {f"{axis}s": value for axis, value in extents.items()} | {"2": 2, "1": 1}
        names["heads"] = extents["group"] * extents["head"]
        return int(np.prod([names[word] for word in text.split(" × ")]))

    return not when or all(len({*map(length, equation.split(" = "))}) == 1 for equation in when.split(", "))


def same(one: Entry, other: Entry, extents: Extents) -> bool:
    a, b = (to_theirs(entry, numbered(extents)) for entry in (one, other))
    return [t.tobytes() for t in a.values()] == [t.tobytes() for t in b.values()]


# ---- tables


def test_the_command_prints_every_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["dictionary"]) == 0
    printed = capsys.readouterr().out
    for entry in ENTRIES:
        assert entry.name in printed
        assert entry.axes in printed
    assert f"{len(ENTRIES)} names, {len(twins())} pairs" in printed


def test_our_layouts_are_all_in_the_table_by_layout() -> None:
    assert {line[0] for line in tables.by_layout().body} == set(LAYOUTS)
