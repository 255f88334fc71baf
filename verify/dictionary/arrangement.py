"""What an order of axes means: the tensors of an entry, their bytes from and to a canonical array, its twin among ours.

The canonical array holds what `HostPool.page` gives, page after page: `[page, component, layer, token, group, head,
lane]`. Nothing here uses the strides or offsets of `refimpl.layout`, only its table of axes, to find the layout that an
entry equals; that the bytes are the same is a matter of `verify/tests/test_dictionary.py`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from itertools import combinations, product

import numpy as np
import torch

from refimpl import LAYOUTS, PoolSpec, presets, support
from refimpl.layout import AXES
from verify.dictionary.entries import Entry, Rows

CANONICAL = ("page", "component", "layer", "token", "group", "head", "lane")

# Axes that rows of a kind have. The others have length 1, and where they stand does not matter.
HAS: dict[Rows, frozenset[str]] = {
    "kv": frozenset(CANONICAL),
    "latent": frozenset(CANONICAL) - {"component", "group", "head"},
    "index": frozenset(("page", "layer", "lane")),
}

# Special ways of holding heads in groups, in which one of the two axes has length 1.
ALONE = {"one group": "group", "one head a group": "head"}

Index = tuple[int, ...]


def lists(entry: Entry) -> tuple[str, ...]:
    """Axes of the lists that the entry's tensors lie in, outermost first."""
    *before, _ = entry.axes.split("|")
    return tuple(axis.strip() for axis in before)


def dims(entry: Entry) -> tuple[tuple[str, ...], ...]:
    """Axes of one tensor: for each of its dimensions the axes merged in it, none for a dimension of length one.

    >>> from verify.dictionary.entries import ENTRIES
    >>> dims(next(e for e in ENTRIES if e.name == "NL_X_NBBS_ONE_HS"))
    (('page', 'token'), (), ('lane',))
    """
    words = re.findall(r"\(([^)]*)\)|(\S+)", entry.axes.split("|")[-1])
    groups = [tuple((merged or alone).split()) if alone != "1" else () for merged, alone in words]
    split = any("group" in axes for axes in groups)
    return tuple(tuple(part for axis in axes for part in _parts_of(axis, split)) for axes in groups)


def _parts_of(axis: str, split: bool) -> tuple[str, ...]:
    return ("group", "head") if axis == "head" and not split else (axis,)


def order(entry: Entry) -> tuple[str, ...]:
    """All axes in the order of bytes, lists first."""
    return (*lists(entry), *(axis for axes in dims(entry) for axis in axes))


def shape(entry: Entry, extents: Mapping[str, int]) -> tuple[int, ...]:
    """Shape of a tensor (of the first, where lanes are cut into parts of several lengths)."""
    return tuple(math.prod(extents[axis] for axis in axes) for axes in dims(entry))


def to_theirs(entry: Entry, canonical: np.ndarray, split: Sequence[int] = ()) -> dict[Index, np.ndarray]:
    """The entry's tensors, by their place in its lists, C-contiguous, holding the bytes of `canonical`.

    `split`: lanes of each part, where the entry cuts them. `ValueError` where the array has an axis that it lacks.
    """
    return {
        at: np.ascontiguousarray(view).reshape(_merged(entry, view.shape))
        for at, view in _views(entry, canonical, split).items()
    }


def to_ours(
    entry: Entry, theirs: Mapping[Index, np.ndarray], extents: Mapping[str, int], split: Sequence[int] = ()
) -> np.ndarray:
    """The canonical array of the entry's tensors. The inverse of `to_theirs`."""
    dtype = next(iter(theirs.values())).dtype
    canonical = np.empty([extents[axis] for axis in CANONICAL], dtype)
    for at, view in _views(entry, canonical, split).items():
        view[...] = theirs[at].reshape(view.shape)
    return canonical


def _views(entry: Entry, canonical: np.ndarray, split: Sequence[int]) -> dict[Index, np.ndarray]:
    """For each tensor the part of the canonical array that it holds, with the tensor's axes, none of them merged."""
    extents = dict(zip(CANONICAL, canonical.shape, strict=True)) | {"part": len(split)}
    inside = order(entry)[len(lists(entry)) :]
    missing = [axis for axis in CANONICAL if extents[axis] > 1 and axis not in order(entry)]
    if missing:
        raise ValueError(f"{entry} has no axis {', '.join(missing)}")
    found = {}
    for at in product(*(range(extents[axis]) for axis in lists(entry))):
        place = dict(zip(lists(entry), at, strict=True))
        chosen = [slice(place[axis], place[axis] + 1) if axis in place else slice(None) for axis in CANONICAL]
        if "part" in place:
            first = sum(split[: place["part"]])
            chosen[CANONICAL.index("lane")] = slice(first, first + split[place["part"]])
        outside = [axis for axis in CANONICAL if axis not in inside]
        view = canonical[tuple(chosen)].transpose([CANONICAL.index(axis) for axis in (*outside, *inside)])
        found[at] = view[(0,) * len(outside)]
    return found


def _merged(entry: Entry, extents: Sequence[int]) -> tuple[int, ...]:
    return shape(entry, dict(zip(order(entry)[len(lists(entry)) :], extents, strict=True)))


# ---- which of our layouts it is


def counterparts(entry: Entry, rows: Rows) -> list[tuple[str, str]]:
    """Our layouts that hold these rows in the same tensors: `(layout, "")`, or a way of `ALONE` in which alone they do.

    Where the entry has a list of tensors, the layout keeps each of them in one piece.
    """
    same = [(layout, groups) for layout, groups, moved in _compared(entry, rows) if not moved]
    return [found for found in same if not found[1] or (found[0], "") not in same]


def difference(entry: Entry, rows: Rows) -> str:
    """What keeps the entry from being the layout of ours that is nearest to it."""
    layout, groups, moved = min(_compared(entry, rows), key=lambda found: len(found[2]))
    inside: dict[str, dict[str, None]] = {}
    for outer, inner in moved:
        inside.setdefault(word(outer), {})[word(inner)] = None
    but = [f"{outer} outside {' and '.join(inner)}" for outer, inner in inside.items()]
    return f"{layout}{groups and f' with {groups}'}, but {', '.join(but)}"


def _compared(entry: Entry, rows: Rows) -> list[tuple[str, str, list[tuple[str, str]]]]:
    """For each layout that may hold the rows: pairs of axes that the entry has the other way round."""
    found = []
    for layout in LAYOUTS:
        cut = "part" in lists(entry)
        if cut != (layout == "page_first_kv_split") or not support(SPECS[rows], layout, "torch", "backup"):
            continue
        for groups in ("", *ALONE) if layout == "page_unified" and rows == "kv" else ("",):
            kept = HAS[rows] - {ALONE.get(groups)}
            ours, theirs = ([axis for axis in axes if axis in kept] for axes in (AXES[layout], order(entry)))
            free = set(lists(entry))  # how lists are nested in lists is no order of bytes
            pairs = [(a, b) for a, b in combinations(theirs, 2) if not {a, b} <= free and ours.index(a) > ours.index(b)]
            found.append((layout, groups, pairs))
    return found


def word(axis: str) -> str:
    """An axis as people call it."""
    return {"component": "K/V", "group": "head"}.get(axis, axis)


# A pool of each kind of rows, to ask what is allowed.
SPECS: dict[Rows, PoolSpec] = {
    "kv": presets.mha(2, 2, 4, torch.bfloat16, 2),
    "latent": presets.mla(2, 6, torch.bfloat16, 2, split=(4, 2)),
    "index": presets.dsa_indexer(2, 4, 4, 2),
}
