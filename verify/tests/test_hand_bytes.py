"""One tiny page in every layout and pool kind, with the expected bytes written out by hand.

This pins the table of axis orders that oracle and plan share. Every byte is a letter: device page 0 holds the
letters, it is backed up to host page 1, and a dot is poison. Nobody may make these strings follow the code.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import pytest
import torch

from refimpl import LAYOUTS, Component, DevicePool, HostMemory, HostPool, PoolSpec, oracle, presets, slots_of, support
from refimpl.support import BACKENDS
from verify.fill import POISON
from verify.guarded import GuardedMemory
from verify.matrix import without_a_gpu
from verify.toys import TOYS

BYTE = torch.uint8


@dataclass(frozen=True)
class Page:
    """Rows of device page 0, `{(component, layer): letters}`, and the host tensors expected in each layout."""

    spec: PoolSpec
    rows: Mapping[tuple[str, int | None], str]
    layouts: dict[str, list[str]]


# K of layer 0 is "ab" (heads 0 and 1 of token 0) then "cd" (token 1); layer 1 "ef", "gh"; V the same in capitals.
HEADS: dict[tuple[str, int | None], str] = {("k", 0): "abcd", ("k", 1): "efgh", ("v", 0): "ABCD", ("v", 1): "EFGH"}

PAGES: dict[str, Page] = {
    "mha": Page(
        presets.mha(layers=2, heads=2, head_dim=1, dtype=BYTE, page_size=2),
        HEADS,
        {
            "layer_first": ["....abcd....efgh....ABCD....EFGH"],
            "page_first": ["........abefcdgh........ABEFCDGH"],
            "page_first_direct": ["........abcdefgh........ABCDEFGH"],
            "page_head": ["........aecgbfdh........AECGBFDH"],
            "page_unified": ["................abcdABCDefghEFGH"],
        },
    ),
    "mha in two head groups": Page(
        presets.mha(layers=2, heads=2, head_dim=1, dtype=BYTE, page_size=2, head_groups=2),
        HEADS,
        {
            "layer_first": ["....abcd....efgh....ABCD....EFGH"],
            "page_first": ["........abefcdgh........ABEFCDGH"],
            "page_first_direct": ["........abcdefgh........ABCDEFGH"],
            "page_head": ["........aecgbfdh........AECGBFDH"],
            "page_unified": ["................acACegEGbdBDfhFH"],
        },
    ),
    "mha with V narrower than K": Page(
        presets.mha(layers=2, heads=1, head_dim=2, dtype=BYTE, page_size=2, v_head_dim=1),
        {("k", 0): "abcd", ("k", 1): "efgh", ("v", 0): "AB", ("v", 1): "CD"},
        {
            "layer_first": ["....abcd....efgh", "..AB..CD"],
            "page_first": ["........abefcdgh", "....ACBD"],
            "page_first_direct": ["........abcdefgh", "....ABCD"],
            "page_head": ["........abefcdgh", "....ACBD"],
        },
    ),
    "mha, K only": Page(
        presets.mha_k_only(layers=2, heads=2, head_dim=1, dtype=BYTE, page_size=2),
        {("k", 0): "abcd", ("k", 1): "efgh"},
        {
            "layer_first": ["....abcd....efgh"],
            "page_first": ["........abefcdgh"],
            "page_first_direct": ["........abcdefgh"],
            "page_head": ["........aecgbfdh"],
            "page_unified": ["........abcdefgh"],
        },
    ),
    "mha with scales": Page(
        presets.mha_quantised(layers=2, heads=1, head_bytes=2, scale_bytes=1, page_size=2),
        {
            ("k", 0): "abcd",
            ("k", 1): "efgh",
            ("v", 0): "ABCD",
            ("v", 1): "EFGH",
            ("k_scale", 0): "12",
            ("k_scale", 1): "34",
            ("v_scale", 0): "56",
            ("v_scale", 1): "78",
        },
        {
            "layer_first": ["....abcd....efgh....ABCD....EFGH", "..12..34", "..56..78"],
            "page_first": ["........abefcdgh........ABEFCDGH", "....1324", "....5768"],
            "page_first_direct": ["........abcdefgh........ABCDEFGH", "....1234", "....5678"],
            "page_head": ["........abefcdgh........ABEFCDGH", "....1324", "....5768"],
        },
    ),
    "mla": Page(
        presets.mla(layers=2, latent_dim=3, dtype=BYTE, page_size=2, split=(2, 1)),
        {("latent", 0): "abcdef", ("latent", 1): "ghijkl"},
        {
            "layer_first": ["......abcdef......ghijkl"],
            "page_first": ["............abcghidefjkl"],
            "page_first_direct": ["............abcdefghijkl"],
            "page_unified": ["............abcdefghijkl"],
            "page_first_kv_split": ["........abdeghjk", "....cfil"],
        },
    ),
    "mla with index keys of one layer": Page(
        PoolSpec(
            "kv",
            2,
            2,
            (Component("latent", BYTE, dim=3, split=(2, 1)), Component("index_k", BYTE, dim=1, layers=(1,))),
        ),
        {("latent", 0): "abcdef", ("latent", 1): "ghijkl", ("index_k", 1): "xy"},
        {
            "layer_first": ["......abcdef......ghijkl", "..xy"],
            "page_first": ["............abcghidefjkl", "..xy"],
            "page_first_direct": ["............abcdefghijkl", "..xy"],
            "page_first_kv_split": ["........abdeghjk", "....cfil", "..xy"],
        },
    ),
    # Values "ab", scales "AB", padding "p": one row a page, layers 1 and 3.
    "v4 page rows": Page(
        presets.v4_paged("c4", (1, 3), item_bytes=5, page_size=8, entries=2, entry_bytes=(1, 1)),
        {("c4", 1): "abABp", ("c4", 3): "cdCDq"},
        {
            "layer_first": [".....abABp", ".....cdCDq"],
            "page_first": ["..........abABpcdCDq"],
            "page_first_direct": ["..........abABpcdCDq"],
            "page_unified": ["..........abABpcdCDq"],
        },
    ),
    "v4 state rings": Page(
        presets.v4_state("c4_state", (1, 3), ring=2, slot_bytes=2, page_size=8),
        {("c4_state", 1): "abcd", ("c4_state", 3): "efgh"},
        {
            "layer_first": ["....abcd", "....efgh"],
            "page_first": ["........abcdefgh"],
            "page_first_direct": ["........abcdefgh"],
            "page_unified": ["........abcdefgh"],
        },
    ),
    "dsa index pages": Page(
        presets.dsa_indexer((0, 2), head_dim=1, quant_block=4, page_size=2),
        {("index_k", 0): "abAB", ("index_k", 2): "cdCD"},
        {
            "layer_first": ["....abAB....cdCD"],
            "page_first": ["........abABcdCD"],
            "page_first_direct": ["........abABcdCD"],
            "page_unified": ["........abABcdCD"],
        },
    ),
    "mamba states": Page(
        presets.mamba(2, [(1,)], BYTE, (2,), BYTE, side_states=[((2,), BYTE)]),
        {
            ("temporal", 0): "ab",
            ("temporal", 1): "cd",
            ("conv_0", 0): "e",
            ("conv_0", 1): "f",
            ("side_0", None): "xy",
        },
        {
            "layer_first": ["..ab..cd", ".e.f", "..xy"],
            "page_first": ["....abcd", "..ef", "..xy"],
            "page_first_direct": ["....abcd", "..ef", "..xy"],
        },
    ),
}
MOVERS = ("oracle", *BACKENDS)


def can(mover: str, spec: PoolSpec, layout: str) -> bool:
    return mover == "oracle" or bool(support(spec, layout, mover, "backup", without_a_gpu(mover)))


CASES = [
    (kind, layout, mover)
    for kind, page in PAGES.items()
    for layout in page.layouts
    for mover in MOVERS
    if can(mover, page.spec, layout)
]


def pool(spec: PoolSpec, layout: str, mover: str, memory: HostMemory | None = None) -> HostPool:
    """Two host pages; the oracle needs no backend of its own."""
    backend = "torch" if mover == "oracle" else mover
    return HostPool(spec, layout, 2, backend, memory=memory, platform=without_a_gpu(backend))


def device_with(page: Page) -> DevicePool:
    """Three device pages, page 0 holding the letters."""
    device = DevicePool(page.spec, num_pages=3)
    for (component, layer), letters in page.rows.items():
        rows = device.view(component, layer)[0]
        rows.copy_(torch.tensor(list(letters.encode()), dtype=BYTE).view(rows.shape))
    return device


def letters(tensor: torch.Tensor) -> str:
    return bytes(tensor.reshape(-1).tolist()).replace(bytes([POISON]), b".").decode()


def letters_of(host: HostPool) -> list[str]:
    return [letters(tensor) for _, tensors in host.storage for tensor in tensors]


@pytest.mark.parametrize(("kind", "layout", "mover"), CASES, ids=map("-".join, CASES))
def test_a_page_lies_where_it_was_written_by_hand(kind: str, layout: str, mover: str) -> None:
    page = PAGES[kind]
    device = device_with(page)
    host = pool(page.spec, layout, mover, GuardedMemory())
    at = slots_of([1], page.spec.page_size), slots_of([0], page.spec.page_size)
    oracle.backup(host, device, *at) if mover == "oracle" else host.backup(device, *at).wait()
    assert letters_of(host) == page.layouts[layout]


@pytest.mark.parametrize(("kind", "layout", "mover"), CASES, ids=map("-".join, CASES))
def test_a_page_written_by_hand_is_read_back(kind: str, layout: str, mover: str) -> None:
    page = PAGES[kind]
    host = pool(page.spec, layout, mover)
    tensors = [tensor for _, held in host.storage for tensor in held]
    for tensor, text in zip(tensors, page.layouts[layout], strict=True):
        tensor.copy_(torch.tensor(list(text.encode()), dtype=BYTE).view(tensor.shape))
    device = DevicePool(page.spec, num_pages=3)
    at = slots_of([1], page.spec.page_size), slots_of([2], page.spec.page_size)
    oracle.load(host, device, *at) if mover == "oracle" else host.load_all(device, *at).wait()
    assert {key: letters(device.view(*key)[2]) for key in page.rows} == page.rows
    assert all(not device.view(*key)[:2].any() for key in page.rows)


@pytest.mark.parametrize("mover", MOVERS)
@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        ("layer_first", [".....b.B..", ".....d.D.."]),
        ("page_first", ["..........b.B..d.D.."]),
        ("page_first_direct", ["..........b.B..d.D.."]),
    ],
)
def test_a_single_entry_is_its_value_and_its_scale(layout: str, expected: list[str], mover: str) -> None:
    """Entry 1 of device page 0 goes to entry 0 of host page 1: two bytes a layer, five apart they would be wrong."""
    page = PAGES["v4 page rows"]
    if not can(mover, page.spec, layout):
        pytest.skip(f"{mover} refuses {layout}")
    device = device_with(page)
    host = pool(page.spec, layout, mover, GuardedMemory())
    if mover == "oracle":
        oracle.backup_entries(host, device, [2], [1])
    else:
        host.backup_entries(device, torch.tensor([2]), torch.tensor([1])).wait()
    assert letters_of(host) == expected


@pytest.mark.parametrize(
    ("layout", "piece"), [("layer_first", 4), ("page_first", 8), ("page_head", 8), ("page_unified", 16)]
)
def test_the_first_piece_of_a_page(layout: str, piece: int) -> None:
    """One layer of K, all of K, or K and V: as long as the letters above are together."""
    host = HostPool(PAGES["mha"].spec, layout, 2)
    assert host.get_page_buffer_element_size(slots_of([1], 2)) == piece
    assert host.get_page_buffer_element_size(slots_of([], 2)) == 0


def test_every_layout_and_family_is_pinned() -> None:
    """A new layout or pool family needs its bytes written here."""
    assert {layout for page in PAGES.values() for layout in page.layouts} == set(LAYOUTS)
    pinned = {page.spec.family for page in PAGES.values()}
    assert {toy(4).family for toy in TOYS.values()} - pinned == {"logical"}
