"""The cases, before anybody has computed what is right: pools, lists of pages, and what must be refused.

One table of pools a family, and one table of page lists. Every pool meets every layout, the refused ones too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from refimpl import LAYOUTS, Component, PoolSpec, presets, support

BF16, BYTE, FP32 = torch.bfloat16, torch.uint8, torch.float32
DIRECTIONS = ("backup", "load", "backup_entries", "load_entries")
RESULTS = ("ok", "must-refuse", "unspecified")
REASONS = (
    "layout",  # the pool cannot be kept in it
    "unequal lengths",
    "partial page",
    "misaligned",  # a page begins at no multiple of the page size
    "not consecutive",
    "out of range",
    "written twice",
)


@dataclass(frozen=True)
class Geometry:
    """A pool with its size on both sides.

    ids      number of each component in the payload; default: 0, 1, …
    sets     which tables of page lists it meets
    layouts  default: all
    threads  public reports that this pool stands for
    since    the version of the vectors that it came with
    """

    name: str
    spec: PoolSpec
    sets: tuple[str, ...] = ("some",)
    host_pages: int = 6
    device_pages: int = 7
    ids: tuple[int, ...] = ()
    layouts: tuple[str, ...] = LAYOUTS
    threads: tuple[str, ...] = ()
    since: int = 1

    @property
    def numbers(self) -> dict[str, int]:
        """Component -> its number in the payload."""
        names = [c.name for c in self.spec.components]
        return dict(zip(names, self.ids or range(len(names)), strict=True))

    def allowed(self, layout: str) -> bool:
        return bool(support(self.spec, layout, "torch", "backup"))


@dataclass(frozen=True)
class Case:
    """One transfer. `host` and `device` are pages, or slots (`unit` "indices"), or entries of page rows.

    layers  model layers that a load asks for (None among them: side states); None: all there is
    crc32   CRC-32 of a component's buffers under the formula of the public reports, from a program of its own
    """

    name: str
    direction: str
    host: tuple[int, ...]
    device: tuple[int, ...]
    note: str
    unit: str = "pages"
    layers: tuple[int | None, ...] | None = None
    result: str = "ok"
    reason: str = ""
    threads: tuple[str, ...] = ()
    crc32: dict[str, str] = field(default_factory=dict, hash=False)


TINY = ("all", "refused")


def _many_pages(name: str, spec: PoolSpec, threads: tuple[str, ...] = ()) -> Geometry:
    return Geometry(name, spec, ("many",), 131, 137, threads=threads)


# Sizes of real pools, where a mask, a byte, a block of threads or a tile ends; the rest is as small as can be. There is
# one of each for each kind of row: of tokens, in pairs or single; of a state; of a whole page.


def _layers(name: str, spec: PoolSpec) -> Geometry:
    return Geometry(name, spec, ("layers",), 3, 4, since=2)


def _lists(name: str, spec: PoolSpec) -> Geometry:
    return Geometry(name, spec, ("lists",), 263, 269, since=2)


def _row(name: str, spec: PoolSpec) -> Geometry:
    return Geometry(name, spec, ("rows",), 2, 3, since=2)


def _split_with_index() -> PoolSpec:
    latent = Component("latent", BF16, dim=12, split=(8, 4))
    return PoolSpec("kv", 3, 2, (latent, Component("index_k", BYTE, dim=13, layers=(0, 2))))


def _summaries() -> PoolSpec:
    """Token rows and a row a page in one pool, elements of four bytes."""
    keys = Component("k", FP32, heads=2, dim=3)
    return PoolSpec("kv", 2, 4, (keys, Component("summary", BF16, dim=10, unit="page", layers=(1,))))


def _fp4_indexer() -> PoolSpec:
    rows = [Component(n, BYTE, dim=4 * w, unit="page", layers=(1, 2)) for n, w in (("payload", 16), ("scale", 3))]
    return PoolSpec("c4_indexer", 3, 16, tuple(rows), "v4_paged", "kv")


_STATES = [(5, 3), (3, 4)]
_SIDES = [((9,), BYTE), ((5,), BF16)]
_DRAFT = ("sglang#27953", "sglang#30393", "sglang#35221")
_SCALES = ("sglang#36121",)
_INDEX = ("sglang#17085", "sglang#38212", "sglang#31218")
_V4 = ("sglang#25889", "sglang#35043")

# One file each.
FAMILIES: dict[str, tuple[Geometry, ...]] = {
    "mha": (
        Geometry("mha-tiny", presets.mha(2, 2, 4, BF16, 2), TINY),
        Geometry("mha-odd", presets.mha(3, 3, 7, BYTE, 4)),
        Geometry("mha-grouped", presets.mha(2, 4, 6, BF16, 4, head_groups=2), threads=("sglang#11615", "sglang#11644")),
        Geometry("mha-hybrid-drafts", presets.mha((1, 3), 2, 8, BF16, 4, drafts=1), threads=_DRAFT),
        Geometry("mha-wide", presets.mha(2, 8, 128, BF16, 4)),
        Geometry("mha-page-64", presets.mha(2, 2, 16, BYTE, 64)),
        _many_pages("mha-many", presets.mha(2, 1, 4, BF16, 2)),
        _many_pages("mha-token-pages", presets.mha(2, 2, 8, BYTE, 1)),
        _layers("mha-layers-70", presets.mha(70, 2, 4, BF16, 2)),
        _lists("mha-lists-260", presets.mha(2, 2, 4, BF16, 2)),
        _row("mha-row-32768", presets.mha(2, 1, 16384, BF16, 1)),
        _row("mha-row-66080", presets.mha(2, 2, 16520, BF16, 1)),
        _row("mha-row-33003", presets.mha(2, 1, 33003, BYTE, 1)),
    ),
    "asymmetric": (
        Geometry("asymmetric-tiny", presets.mha(2, 2, 8, BF16, 2, v_head_dim=4), TINY),
        Geometry("asymmetric-odd", presets.mha(2, 3, 11, BYTE, 4, v_head_dim=9)),
        Geometry("asymmetric-wide", presets.mha(2, 4, 192, BF16, 4, v_head_dim=128)),
        _many_pages("asymmetric-many", presets.mha(2, 1, 8, BYTE, 2, v_head_dim=9)),
    ),
    "k_only": (
        Geometry("k_only-tiny", presets.mha_k_only(3, 2, 9, BYTE, 2), TINY),
        Geometry("k_only-wide", presets.mha_k_only(2, 1, 128, BF16, 16)),
        _many_pages("k_only-many", presets.mha_k_only(3, 1, 9, BYTE, 2)),
    ),
    "quantised": (
        Geometry("quantised-tiny", presets.mha_quantised(2, 2, 16, 2, 2), TINY, threads=_SCALES),
        Geometry("quantised-fp4", presets.mha_quantised(2, 2, 64, 8, 8), threads=_SCALES),
        _many_pages("quantised-many", presets.mha_quantised(1, 1, 8, 1, 2), _SCALES),
    ),
    "mla": (
        Geometry("mla-tiny", presets.mla(2, 12, BF16, 2, split=(8, 4)), TINY),
        Geometry("mla-packed-draft", presets.mla(2, 41, BYTE, 4, drafts=1), threads=_DRAFT),
        Geometry("mla-wide", presets.mla(2, 576, BF16, 4, split=(512, 64))),
        Geometry("mla-fp8-rows", presets.mla(2, 656, BYTE, 4)),
        _many_pages("mla-many", presets.mla(2, 10, BYTE, 2, split=(8, 2))),
        _layers("mla-layers-130", presets.mla(130, 8, BF16, 2, split=(4, 4))),
        _lists("mla-lists-260", presets.mla(2, 8, BF16, 2, split=(4, 4))),
        _row("mla-row-32768", presets.mla(2, 16384, BF16, 1)),
        _row("mla-row-33040", presets.mla(2, 16520, BF16, 1, split=(16456, 64))),
        _row("mla-row-33003", presets.mla(2, 33003, BYTE, 1, split=(32995, 8))),
    ),
    "dsa": (
        Geometry("dsa-tiny", presets.dsa_indexer((0, 2), 8, 8, 2), TINY, threads=_INDEX),
        Geometry("dsa-wide", presets.dsa_indexer(2, 128, 128, 16), threads=_INDEX),
        _many_pages("dsa-many", presets.dsa_indexer(2, 8, 8, 2), _INDEX),
    ),
    "mamba": (
        Geometry("mamba-tiny", presets.mamba((0, 1, 3), _STATES, BF16, (2, 3, 4), FP32, _SIDES), TINY),
        Geometry("mamba-conv-only", presets.mamba((0, 2), [(7, 3)], BF16)),
        _many_pages("mamba-many", presets.mamba(2, [(3, 3)], BF16, (2, 1, 2), FP32, _SIDES[:1])),
        _layers("mamba-layers-70", presets.mamba(70, [(4, 2)], BF16)),
        _lists("mamba-lists-260", presets.mamba(2, [(4, 2)], BF16)),
        _row("mamba-row-33040", presets.mamba(2, [(1652, 10)], BF16, (2, 64, 64), FP32)),
    ),
    "v4_paged": (
        Geometry("v4_paged-tiny", presets.v4_paged("c4", (1, 3), 25, 4, 2, (9, 2)), TINY, threads=_V4),
        Geometry("v4_paged-fp4-indexer", _fp4_indexer(), threads=("sglang#36121",)),
        Geometry("v4_paged-indexer", presets.v4_paged("c4_indexer", (2, 4), 8 * 132, 32, 8, (128, 4)), threads=_V4),
        _many_pages("v4_paged-many", presets.v4_paged("c128", (1,), 27, 2, 2, (9, 2)), _V4),
        _layers("v4_paged-layers-70", presets.v4_paged("c4", range(1, 141, 2), 24, 8, 2, (8, 2))),
        _lists("v4_paged-lists-260", presets.v4_paged("c4", (1, 3), 24, 8, 2, (8, 2))),
        _row("v4_paged-row-32768", presets.v4_paged("c4", (1, 3), 32768, 256, 64, (504, 8))),
        _row("v4_paged-row-33040", presets.v4_paged("c4", (1, 3), 33040, 256, 64, (508, 8))),
        _row("v4_paged-row-33003", presets.v4_paged("c4", (1, 3), 33003, 256, 64, (507, 8))),
    ),
    "v4_state": (
        Geometry("v4_state-tiny", presets.v4_state("c4_state", (1, 3), 4, 11, 4), TINY, threads=_V4),
        Geometry("v4_state-wide", presets.v4_state("c4_state", (2, 4), 8, 512, 16), threads=_V4),
        _many_pages("v4_state-many", presets.v4_state("c4_state", (1,), 4, 5, 2), _V4),
    ),
    "custom": (
        Geometry("custom-split-with-index", _split_with_index(), TINY, threads=_INDEX),
        Geometry("custom-summaries", _summaries(), TINY),
    ),
}


def of(geometry: Geometry, layout: str) -> Iterator[Case]:
    """Every case of a pool in a layout."""
    if not geometry.allowed(layout):
        for direction in ("backup", "load"):
            name, note = NO_LAYOUT[layout]
            yield Case(name, direction, (0,), (0,), note, result="must-refuse", reason="layout")
        return
    for lists in geometry.sets:
        if lists != "refused" or layout in ("layer_first", "page_first_direct"):
            yield from SETS[lists](geometry)
    if geometry.spec.entries and not {"some", "all"}.isdisjoint(geometry.sets):
        yield from _entries(geometry)


NO_LAYOUT = {
    "page_head": ("no-heads", "Rows without heads cannot have heads outside the tokens: refuse when the pool is made."),
    "page_unified": ("not-alike", "Rows that are not alike cannot lie in one object: refuse when the pool is made."),
    "page_first_kv_split": ("no-parts", "No row here is said to be in parts: refuse when the pool is made."),
}

# name: host pages, device pages, what it guards, reports. Of 6 and 7 pages.
Lists = tuple[Sequence[int], Sequence[int], str, tuple[str, ...]]
SOME: dict[str, Lists] = {
    "scattered": ((4, 0, 2), (1, 6, 3), "No two pages are neighbours on either side, and neither list is sorted.", ()),
    "one-side-joined": ((5, 1, 3), (2, 3, 4), "Neighbours on the device only: they make no run.", ("FlexKV#193",)),
    "other-side-joined": ((1, 2, 3), (5, 0, 3), "Neighbours on the host only: they make no run.", ("FlexKV#186",)),
    "joined": ((4, 5), (2, 3), "Neighbours on both sides, up to the last host page: one run at most.", ("FlexKV#193",)),
}
MORE: dict[str, Lists] = {
    "one-page": ((5,), (6,), "The last page of either side.", ()),
    "reversed": ((0, 1, 2, 3), (5, 4, 3, 2), "Neighbours in opposite order make no run.", ("vllm-ascend#11021",)),
    "whole-pool": ((3, 5, 1, 0, 4, 2), (2, 0, 6, 4, 1, 5), "Every host page; pages 0 are ordinary pages.", ()),
    "same-numbers": ((1, 2, 4), (1, 2, 4), "Pages keep their numbers: right by luck if the lists are mixed up.", ()),
}


def _some(g: Geometry) -> Iterator[Case]:
    yield from _both_ways(SOME)
    yield from _layer_by_layer(g)


def _all(g: Geometry) -> Iterator[Case]:
    yield from _some(g)
    yield from _both_ways(MORE)
    twice = "A source named twice: refuse it, or both destinations get it."
    yield Case("source-twice", "backup", (4, 1), (3, 3), twice, result="unspecified")
    yield Case("source-twice", "load", (3, 3), (1, 4), twice, result="unspecified")
    for direction in ("backup", "load"):
        note = "Nothing to do: refuse it, or do nothing, and complete."
        threads = ("FlexKV#269", "sglang#38426")
        yield Case("zero-pages", direction, (), (), note, result="unspecified", threads=threads)


def _many(g: Geometry) -> Iterator[Case]:
    """The edges of batches and staging buffers."""
    lists = {f"{n}-scattered": _scattered(g, n) for n in (63, 64, 65)} | {
        "65-reversed": ([*range(10, 75)], [*range(130, 65, -1)]),
        "65-joined": ([*range(10, 75)], [*range(20, 85)]),
    }
    for name, (host, device) in lists.items():
        for direction in ("backup", "load") if name in ("65-scattered", "65-joined") else ("backup",):
            note = "Pages at the edge of a batch or of a staging buffer of 64."
            yield Case(name, direction, tuple(host), tuple(device), note)


def _scattered(g: Geometry, pages: int) -> tuple[list[int], list[int]]:
    """A list for each side. Both counts of pages are prime, so steps visit each page once."""
    return [7 * i % g.host_pages for i in range(pages)], [(3 * i + 5) % g.device_pages for i in range(pages)]


def _layers_of_a_big_model(g: Geometry) -> Iterator[Case]:
    owned, host, device = g.spec.owned_layers, (0, 2), (3, 1)
    note = "As many layers as big models have: a mask, a byte or a block of threads ends before."
    yield from _both_ways({"many-layers": (host, device, note, ())})
    few = owned[64], owned[-1], owned[1]
    yield Case("layer-64", "load", host, device, "A late layer is none of the first ones.", layers=few)


def _lists_of_a_long_prefix(g: Geometry) -> Iterator[Case]:
    note = "As many pages as a long prefix has: a byte or a block of threads ends before."
    lists = {f"{n}-scattered": (*_scattered(g, n), note, ()) for n in (130, 260)}
    last = [g.host_pages - 1, 1, 256], [256, g.device_pages - 1, 0]
    yield from _both_ways(lists | {"beyond-256": (*last, "The numbers of these pages are no bytes.", ())})


def _rows_of_many_tiles(g: Geometry) -> Iterator[Case]:
    note = "Rows wider than the tile or the shared memory that moves them: whole tiles, or with a tail."
    yield from _both_ways({"wide-rows": ((0, 1), (2, 1), note, ())})


def _both_ways(table: Mapping[str, Lists]) -> Iterator[Case]:
    for name, (host, device, note, threads) in table.items():
        for direction in ("backup", "load"):
            yield Case(name, direction, tuple(host), tuple(device), note, threads=threads)


def _layer_by_layer(g: Geometry) -> Iterator[Case]:
    """Loads of some layers; side states come with the first of them. The rest of the pool stays as it is."""
    host, device, *_ = SOME["scattered"]
    owned = g.spec.owned_layers
    sides = (None,) if any(c.side for c in g.spec.components) else ()
    asked: dict[str, tuple[int | None, ...]] = {"first-layer": owned[:1], "last-layer": owned[-1:]}
    if len(owned) > 2:
        asked["two-layers"] = (owned[2], owned[0])
    if sides:
        asked = {name: sides + layers for name, layers in asked.items()} | {"side-states": sides}
    for name, layers in asked.items():
        yield Case(name, "load", tuple(host), tuple(device), "Only what was asked for arrives.", layers=layers)


def _entries(g: Geometry) -> Iterator[Case]:
    """Single entries of page rows: values first, then scales, so an entry is several ranges of bytes."""
    e, note = g.spec.entries, "One entry is a value and a scale, apart from each other; its neighbours stay."
    last = (g.host_pages * e - 1, g.device_pages * e - 1)
    lists: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
        "entries-scattered": ((4 * e, 1, 2 * e + 1), (e + 1, 5 * e, 3 * e + 1)),
        "entries-over-an-edge": ((e - 1, e), (2 * e - 1, 2 * e)),
        "last-entry": (last[:1], last[1:]),
    }
    for direction in DIRECTIONS[2:]:
        for name, (host, device) in lists.items():
            yield Case(name, direction, host, device, note, unit="entries", threads=("sglang#31218",))


BAD = {
    "unequal lengths": "Lists of unequal length pair nothing with something.",
    "partial page": "Whole pages move; half a page would take its neighbour's rows along or leave some behind.",
    "misaligned": "Whoever reads only the first index of a page rounds it down, and moves another page.",
    "not consecutive": "Whoever reads only the first index of a page moves rows that nobody asked for.",
    "out of range": "Unchecked, this reads or writes beside the pool.",
    "written twice": "Two writers of one page have no right answer.",
}


def refused(g: Geometry) -> Iterator[Case]:
    """Each list breaks one rule, and nothing may move."""
    p = g.spec.page_size

    def slots(*pages: int) -> list[int]:
        return [page * p + token for page in pages for token in range(p)]

    good, bad = slots(4, 1), dict[str, tuple[list[int], list[int], str]]()
    bad["device-longer"] = (slots(4), slots(2, 5), "unequal lengths")
    bad["host-longer"] = (slots(4, 1), slots(2), "unequal lengths")
    bad["beyond-device"] = (good, slots(2, g.device_pages), "out of range")
    bad["beyond-host"] = (slots(4, g.host_pages), slots(2, 5), "out of range")
    bad["negative-device"] = (good, slots(2, -1), "out of range")
    bad["negative-host"] = (slots(-2, 4), slots(2, 5), "out of range")
    bad["beyond-32-bits"] = (good, [2**32 + i for i in slots(2, 5)], "out of range")
    if p > 1:
        bad["shifted-device"] = (good, [i + 1 for i in slots(2, 5)], "misaligned")
        bad["shifted-host"] = ([i + 1 for i in good], slots(2, 5), "misaligned")
        bad["gap"] = (good, [*slots(2), 5 * p, *range(6 * p + 1, 7 * p)], "not consecutive")
        bad["first-token-repeated"] = (good, [*[2 * p] * p, *slots(5)], "not consecutive")
        bad["last-token-missing"] = (good[:-1], slots(2, 5)[:-1], "partial page")
    for name, (host, device, reason) in bad.items():
        for direction in ("backup", "load"):
            note = BAD[reason]
            yield Case(
                name, direction, tuple(host), tuple(device), note, "indices", result="must-refuse", reason=reason
            )
    yield from _refused_entries(g)
    twice, apart, note = tuple(slots(3, 3)), tuple(slots(1, 4)), BAD["written twice"]
    for direction, host, device in (("backup", twice, apart), ("load", apart, twice)):
        yield Case(
            "destination-twice", direction, host, device, note, "indices", result="must-refuse", reason="written twice"
        )


def _refused_entries(g: Geometry) -> Iterator[Case]:
    e, d = g.spec.entries, g.device_pages
    lists = {
        "entry-beyond": ((1,), (d * e,), "out of range"),
        "entry-before": ((-1,), (1,), "out of range"),
        "entry-unequal": ((1, 2), (1,), "unequal lengths"),
        "entry-twice": ((1, 1), (0, 2), "written twice"),
    }
    for name, (host, device, reason) in lists.items() if e else ():
        for direction in DIRECTIONS[2:]:
            if name == "entry-twice" and direction == "load_entries":
                host, device = device, host
            yield Case(name, direction, host, device, BAD[reason], "entries", result="must-refuse", reason=reason)


SETS = {
    "some": _some,
    "all": _all,
    "many": _many,
    "layers": _layers_of_a_big_model,
    "lists": _lists_of_a_long_prefix,
    "rows": _rows_of_many_tiles,
    "refused": refused,
}
