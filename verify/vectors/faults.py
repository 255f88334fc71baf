"""Faults that movers have had, each simulated on every case: a case is flagged with those that change its bytes.

A flag is therefore a fact, not an intention: whoever makes this mistake fails this case. Nothing here knows of layouts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache

import numpy as np

from refimpl import Component, PoolSpec
from verify.vectors.cases import Case, Geometry
from verify.vectors.payload import POISON, SIDE, rows

Pairs = list[tuple[int, int]]  # destination and source: pages, or entries
Image = dict[tuple[str, int], np.ndarray]


@dataclass(frozen=True)
class Task:
    """What a mover is asked: pairs of pages or entries, and how many there are on either side."""

    geometry: Geometry
    case: Case
    pairs: Pairs
    counts: tuple[int, int]

    @property
    def spec(self) -> PoolSpec:
        return self.geometry.spec


@dataclass(frozen=True)
class Fault:
    """What is done, where one who does it right does something else."""

    effect: str
    pairs: Callable[[Task], Pairs] = lambda t: t.pairs
    moves: Callable[[Task, Component, int | None], bool] = lambda t, c, layer: asked(t, layer)
    source: Callable[[Task, Component, int | None], tuple[Component, int | None]] = lambda t, c, layer: (c, layer)
    turned: tuple[int, int] = (0, 0)  # tokens and heads that the source is off by
    kept: Callable[[Task, Component], int] = lambda t, c: c.row_bytes  # bytes of a row that are moved
    ranges: Callable[[Component, int], Sequence[tuple[int, int]]] = lambda c, entry: entry_ranges(c, entry)


def asked(task: Task, layer: int | None) -> bool:
    return task.case.layers is None or layer in task.case.layers


def entry_ranges(c: Component, entry: int) -> list[tuple[int, int]]:
    """First byte and bytes of each part of an entry, within its row."""
    begins = np.cumsum([0, *(s.entries * s.bytes for s in c.segments)])
    return [(int(b) + entry * s.bytes, s.bytes) for b, s in zip(begins, c.segments, strict=False)]


def _next_layer(t: Task, c: Component, layer: int | None) -> tuple[Component, int | None]:
    layers = t.spec.layers_of(c)
    return c, layers[(layers.index(layer) + 1) % len(layers)]


def _id_as_position(t: Task, c: Component, layer: int | None) -> tuple[Component, int | None]:
    layers = t.spec.layers_of(c)
    return c, layer if layer is None else layers[layer % len(layers)]


def _other_of_k_and_v(t: Task, c: Component, layer: int | None) -> tuple[Component, int | None]:
    names = [other.name for other in t.spec.components]
    if c.name not in ("k", "v") or not {"k", "v"} <= set(names):
        return c, layer
    other = t.spec.component("v" if c.name == "k" else "k")
    return (other if other.row_bytes == c.row_bytes else c), layer


def _as_one_range(c: Component, entry: int) -> list[tuple[int, int]]:
    width = sum(s.bytes for s in c.segments)
    return [(entry * width, width)]


def _runs_on(t: Task) -> Pairs:
    to, source = t.counts
    beyond = [(a + 1, b + 1) for a, b in t.pairs if a + 1 < to and b + 1 < source]
    return [*beyond, *t.pairs]


def _sorted_source(t: Task) -> Pairs:
    return list(zip([to for to, _ in t.pairs], sorted(source for _, source in t.pairs), strict=True))


def _from_the_first(t: Task) -> Pairs:
    return [(to, (t.pairs[0][1] + i) % t.counts[1]) for i, (to, _) in enumerate(t.pairs)]


def _to_the_first(t: Task) -> Pairs:
    return [((t.pairs[0][0] + i) % t.counts[0], source) for i, (_, source) in enumerate(t.pairs)]


def _sides_mixed_up(t: Task) -> Pairs:
    return [(source % t.counts[0], to % t.counts[1]) for to, source in t.pairs]


def _token_as_row(t: Task) -> Pairs:
    p = t.spec.page_size
    return [(to * p % t.counts[0], source * p % t.counts[1]) for to, source in t.pairs]


def _page_numbers_as_bytes(t: Task) -> Pairs:
    return t.pairs if t.case.unit == "entries" else [(to % 256, source % 256) for to, source in t.pairs]


def first_pages(count: int) -> Callable[[Task], Pairs]:
    return lambda t: t.pairs[:count]


def first_layers(count: int) -> Callable[[Task, Component, int | None], bool]:
    return lambda t, c, layer: asked(t, layer) and t.spec.layers_of(c).index(layer) < count


def first_bytes(count: int) -> Callable[[Task, Component], int]:
    return lambda t, c: min(c.row_bytes, count)


def whole_tiles(width: int) -> Callable[[Task, Component], int]:
    return lambda t, c: c.row_bytes // width * width or c.row_bytes


def _payload_bytes(t: Task, c: Component) -> int:
    return sum(s.entries * s.bytes for s in c.segments) or c.row_bytes


# A limit is simulated once; another one shows in the same cases as long as no pool and no list has a size in between.
FLAGS: dict[str, Fault] = {
    "FirstSourceRunsOn": Fault(
        "Only the first source page is read from the list; the rest follow it.", _from_the_first
    ),
    "FirstDestinationRunsOn": Fault(
        "Only the first destination is read from the list; the rest follow it.", _to_the_first
    ),
    "PairingLost": Fault(
        "The source list is sorted (or built in another order), the destinations are not.", _sorted_source
    ),
    "SidesMixedUp": Fault("Host numbers are used on the device, and device numbers on the host.", _sides_mixed_up),
    "RunTooLong": Fault("A run of pages is one page too long.", _runs_on),
    "LastOneLost": Fault("The last page of a list is left out.", pairs=lambda t: t.pairs[:-1]),
    "BatchTailLost": Fault(
        "What is left after whole batches of 64 is lost.", lambda t: t.pairs[: len(t.pairs) // 64 * 64 or None]
    ),
    "PagesBeyond128Lost": Fault(
        "Of a list only the first 128 pages, or another number from 65 to 129, are moved.", first_pages(128)
    ),
    "PagesBeyond256Lost": Fault(
        "Of a list only the first 256 pages, or another number from 130 to 259, are moved.", first_pages(256)
    ),
    "PageNumbersAsBytes": Fault("Of the number of a page only the lower 8 bits are used.", _page_numbers_as_bytes),
    "RowsOfPagesByToken": Fault("Rows are addressed by the number of a token, not of its page.", _token_as_row),
    "LayersSwapped": Fault("A layer gets the bytes of the next one.", source=_next_layer),
    "FirstLayerOnly": Fault(
        "Every layer gets the bytes of the first.", source=lambda t, c, layer: (c, t.spec.layers_of(c)[0])
    ),
    "LayerIdAsPosition": Fault("The model's layer number is used as the position in the pool.", source=_id_as_position),
    "LastLayerLost": Fault(
        "The last layer (a draft's, say) is left out.",
        moves=lambda t, c, layer: asked(t, layer) and layer != t.spec.layers_of(c)[-1],
    ),
    "LayersBeyond64Lost": Fault(
        "Layers beyond the first 64, or another number from 5 to 69, are left out, or taken for others.",
        moves=first_layers(64),
    ),
    "LayersBeyond128Lost": Fault(
        "Layers beyond the first 128, or another number from 70 to 129, are left out, or taken for others.",
        moves=first_layers(128),
    ),
    "LayersNotAskedFor": Fault("A load of some layers moves all of them.", moves=lambda t, c, layer: True),
    "SideStatesLost": Fault(
        "States without a layer are left out.", moves=lambda t, c, layer: asked(t, layer) and not c.side
    ),
    "OtherComponentsLost": Fault(
        "Only the first component is moved: V, scales, index keys stay behind.",
        moves=lambda t, c, layer: asked(t, layer) and c is t.spec.components[0],
    ),
    "KeyValueSwapped": Fault("K gets the bytes of V, and V those of K.", source=_other_of_k_and_v),
    "TokensShifted": Fault("Tokens of a page are off by one.", turned=(1, 0)),
    "HeadsShifted": Fault("Heads of a row are off by one.", turned=(0, 1)),
    "TailOf16Lost": Fault(
        "Bytes of a row beyond a multiple of 16 stay behind.", kept=lambda t, c: c.row_bytes // 16 * 16
    ),
    "TailOf128Lost": Fault(
        "Bytes of a row beyond a multiple of 128 stay behind.", kept=lambda t, c: c.row_bytes // 128 * 128
    ),
    "BeyondFirst16KLost": Fault(
        "Bytes of a row beyond the first 16,384, or another number from 8,448 to 32,767, stay behind.",
        kept=first_bytes(16384),
    ),
    "TailOf16KLost": Fault(
        "Of rows that have whole tiles of 16 or 32 KiB, what is behind these stays behind.", kept=whole_tiles(16384)
    ),
    "PaddingLost": Fault("The padding of an opaque row stays behind.", kept=_payload_bytes),
    "EntryAsOneRange": Fault(
        "An entry is moved as one range of its row, as if its scale followed it.", ranges=_as_one_range
    ),
    "ScalesLost": Fault("Of an entry only the value is moved.", ranges=lambda c, entry: entry_ranges(c, entry)[:1]),
}

# What a mover lacks that goes on where it must refuse.
REFUSALS = {
    "layout": ("PairingUnchecked", "A pool is made in a layout that it cannot have, and fails or corrupts when used."),
    "unequal lengths": ("LengthsUnchecked", "The longer list is cut, or read beyond the shorter one's end."),
    "partial page": ("PartialPageAccepted", "A page is moved whole, or not at all, though a part was asked for."),
    "misaligned": (
        "FirstIndexTrusted",
        "Only the first index of a page is read, and other rows are moved than were named.",
    ),
    "not consecutive": (
        "FirstIndexTrusted",
        "Only the first index of a page is read, and other rows are moved than were named.",
    ),
    "out of range": ("BoundsUnchecked", "Memory beside the pool is read or written, or a number wraps around into it."),
    "written twice": ("TwoWriters", "Which of two sources remains depends on the order of copies."),
}


def described() -> dict[str, str]:
    """Flag -> what goes wrong, for a manifest."""
    return {name: fault.effect for name, fault in FLAGS.items()} | dict(REFUSALS.values())


@cache
def flags(geometry: Geometry, case: Case) -> tuple[str, ...]:
    """The faults that a case catches, in whatever layout."""
    if case.result == "must-refuse":
        return (REFUSALS[case.reason][0],)
    if not case.host:
        return ()
    return tuple(name for name, fault in FLAGS.items() if shows(fault, geometry, case))


def shows(fault: Fault, geometry: Geometry, case: Case) -> bool:
    """Whether a fault changes the bytes of a transfer."""
    return _differ(_right(geometry, case), _image(_task(geometry, case), fault))


@lru_cache(maxsize=1)
def _right(geometry: Geometry, case: Case) -> Image:
    return _image(_task(geometry, case), Fault(""))


def _task(geometry: Geometry, case: Case) -> Task:
    each = geometry.spec.entries if case.unit == "entries" else 1
    sides = [(case.host, geometry.host_pages * each), (case.device, geometry.device_pages * each)]
    to, source = sides if case.direction.startswith("backup") else reversed(sides)
    return Task(geometry, case, list(zip(to[0], source[0], strict=True)), (to[1], source[1]))


def _image(task: Task, fault: Fault) -> Image:
    """The destination, layer by layer, `[page, row bytes]`, after a transfer with a fault."""
    image: Image = {}
    each = task.spec.entries if task.case.unit == "entries" else 1
    pairs = fault.pairs(task)
    for c in task.spec.components:
        for layer in task.spec.layers_of(c):
            to = np.full((task.counts[0] // each, task.spec.tokens_per_page(c), c.row_bytes), POISON, np.uint8)
            if fault.moves(task, c, layer) and pairs:
                kept = fault.kept(task, c)
                source = _source(task, *fault.source(task, c, layer), fault.turned, task.counts[1] // each)
                if task.case.unit == "entries":
                    _move_entries(to[:, 0], source[:, 0], pairs, c, fault)
                else:
                    pages, origins = map(list, zip(*pairs, strict=True))
                    to[pages, :, :kept] = source[origins][..., :kept]
            image[c.name, SIDE if layer is None else layer] = to
    return image


def _move_entries(to: np.ndarray, source: np.ndarray, pairs: Pairs, c: Component, fault: Fault) -> None:
    for a, b in pairs:
        (row, entry), (other_row, other_entry) = divmod(a, c.entries), divmod(b, c.entries)
        for (begin, width), (other, _) in zip(fault.ranges(c, entry), fault.ranges(c, other_entry), strict=True):
            to[row, begin : begin + width] = source[other_row, other : other + width]


def _source(task: Task, c: Component, layer: int | None, turned: tuple[int, int], pages: int) -> np.ndarray:
    """Rows that are filled, `[page, token, byte]`."""
    number = task.geometry.numbers[c.name], SIDE if layer is None else layer
    filled = filled_rows(*number, pages, task.spec.tokens_per_page(c), c.head_count, c.row_bytes // c.head_count)
    return np.roll(filled, (-turned[0], -turned[1]), axis=(1, 2)).reshape(pages, -1, c.row_bytes)


filled_rows = lru_cache(maxsize=128)(rows)


def _differ(a: Image, b: Image) -> bool:
    return any(not np.array_equal(a[place], b[place]) for place in a)
