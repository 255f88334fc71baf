"""Twins: entries whose tensors cannot be told apart by shape, although their bytes mean something else.

They are found by trying: every geometry of a small set, every pair of entries. Engines and connectors that detect a
layout by its shape are wrong exactly there (LMCache PR #4467 and #2495, vLLM 0.26 read by older connectors).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import combinations, product

import numpy as np

from verify.dictionary.arrangement import CANONICAL, HAS, Index, dims, lists, shape, to_theirs, word
from verify.dictionary.entries import ENTRIES, Entry, Rows

Extents = dict[str, int]

# Small enough to try them all, and every pair of axes is of one length somewhere.
LENGTHS = {"page": (2, 3, 4), "layer": (2, 3, 4), "token": (2, 3, 4), "group": (1, 2), "head": (1, 2, 3), "lane": (2,)}


@dataclass(frozen=True)
class Twins:
    """Two groups of names. Those of one group always mean the same bytes in tensors of one shape.

    when        lengths that must agree for the shapes to be one; empty: they always are
    geometries  how many of the geometries tried show the pair
    smallest    the smallest of them
    """

    rows: Rows
    names: tuple[tuple[Entry, ...], tuple[Entry, ...]]
    when: str
    geometries: int
    smallest: Extents


def geometries(rows: Rows) -> Iterator[Extents]:
    """Lengths of all canonical axes, smallest first."""
    lengths = {axis: LENGTHS.get(axis, (2,)) if axis in HAS[rows] else (1,) for axis in CANONICAL}
    found = [dict(zip(lengths, values, strict=True)) for values in product(*lengths.values())]
    yield from sorted(found, key=lambda extents: int(np.prod([*extents.values()])))


def numbered(extents: Extents) -> np.ndarray:
    """A canonical array in which every element is its own number."""
    lengths = [extents[axis] for axis in CANONICAL]
    return np.arange(np.prod(lengths), dtype=np.uint32).reshape(lengths)


def place(extents: Extents, number: int) -> str:
    """What an element of `numbered` names."""
    at = np.unravel_index(number, [extents[axis] for axis in CANONICAL])
    return ", ".join(f"{word(axis)} {int(i)}" for axis, i in zip(CANONICAL, at, strict=True) if extents[axis] > 1)


@cache
def twins() -> tuple[Twins, ...]:
    """Every pair there is, those first that the fewest coincidences bring about."""
    found = [pair for rows in HAS for pair in _twins_of(rows)]
    return tuple(sorted(found, key=lambda pair: (pair.when.count("="), pair.rows)))


def _twins_of(rows: Rows) -> Iterator[Twins]:
    synonyms: dict[object, list[Entry]] = {}
    for entry in ENTRIES:
        if rows in entry.rows and "part" not in lists(entry):
            synonyms.setdefault(_written(entry, rows), []).append(entry)
    shown: dict[tuple[int, int], list[Extents]] = {}
    names = [tuple(entries) for entries in synonyms.values()]
    for extents in geometries(rows):
        looks = [(_look(first, extents), _bytes(first, extents)) for first, *_ in names]
        for (i, a), (j, b) in combinations(enumerate(looks), 2):
            if a[0] == b[0] and a[1] != b[1]:
                shown.setdefault((i, j), []).append(extents)
    for (i, j), where in shown.items():
        when = _coincidences(names[i][0], names[j][0], rows)
        yield Twins(rows, (names[i], names[j]), when, len(where), where[0])


def _written(entry: Entry, rows: Rows) -> object:
    """The same for two entries if their tensors are, whatever the geometry."""
    return lists(entry), _long(entry, rows)


def _look(entry: Entry, extents: Extents) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """All that can be seen of the tensors: how many there are in each list, and their shape."""
    return tuple(extents[axis] for axis in lists(entry)), shape(entry, extents)


def _bytes(entry: Entry, extents: Extents) -> dict[Index, bytes]:
    return {at: tensor.tobytes() for at, tensor in to_theirs(entry, numbered(extents)).items()}


def _coincidences(a: Entry, b: Entry, rows: Rows) -> str:
    """What must be equal, dimension by dimension."""
    seen = [[*((axis,) for axis in lists(entry)), *_long(entry, rows)] for entry in (a, b)]
    unlike = [(_length(x), _length(y)) for x, y in zip(*seen, strict=True) if sorted(x) != sorted(y)]
    return ", ".join(dict.fromkeys(" = ".join(sorted(pair)) for pair in unlike))


def _long(entry: Entry, rows: Rows) -> tuple[tuple[str, ...], ...]:
    return tuple(tuple(axis for axis in axes if axis in HAS[rows]) for axes in dims(entry))


def _length(axes: tuple[str, ...]) -> str:
    names = dict.fromkeys({"component": "2", "group": "heads", "head": "heads"}.get(axis, f"{axis}s") for axis in axes)
    return " × ".join(names) or "1"
