"""The dictionary as tables, for terminals, pages and notebooks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from refimpl import LAYOUTS
from verify.arguments import Parser
from verify.bench.report import Table, as_text
from verify.dictionary.arrangement import ALONE, counterparts, difference, to_theirs
from verify.dictionary.entries import ENTRIES, Entry, Rows
from verify.dictionary.twins import Twins, numbered, place, twins

HOLDS: dict[Rows, str] = {"kv": "K and V", "latent": "MLA", "index": "index pages"}


def entries() -> Table:
    """Every entry, and which of our layouts it is."""
    body = [
        [entry.engine, entry.name, HOLDS[rows], entry.axes, ours(entry, rows), _source(entry)]
        for entry in ENTRIES
        for rows in entry.rows
    ]
    title = (
        "Layouts of other engines, outermost axis first; before a bar: lists of tensors; (a b): merged into one axis.\n"
        "Ours: a layout with the same bytes, or the nearest and what stands the other way round"
    )
    return Table(title, ["engine", "name", "holds", "axes", "ours", "source"], body, [])


def by_layout() -> Table:
    """For each of our layouts and what it holds, the names that others have for the same bytes."""
    names: dict[tuple[str, Rows, str, str], list[str]] = {}
    for entry in ENTRIES:
        for rows in entry.rows:
            for layout, groups in counterparts(entry, rows):
                names.setdefault((layout, rows, groups, entry.engine), []).append(entry.name)
    body = [
        [layout, f"{HOLDS[rows]}{groups and f', {groups}'}", engine, "; ".join(named)]
        for (layout, rows, groups, engine), named in sorted(names.items(), key=_in_our_order)
    ]
    return Table("The same bytes under other names", ["layout", "holds", "engine", "names"], body, [])


def twin_table() -> Table:
    """Names that a shape cannot tell apart, when that is so, and the first element that is read as another one."""
    body = [
        [
            *(" / ".join(map(str, names)) for names in pair.names),
            HOLDS[pair.rows],
            pair.when or "always",
            *misread(pair),
        ]
        for pair in twins()
    ]
    title = "Same shape, other bytes: what the first element of a tensor that differs is, read by either name"
    return Table(title, ["one", "other", "holds", "when", "is here", "is there"], body, [])


def misread(pair: Twins) -> tuple[str, str]:
    """The first element that the two names place apart, in the smallest geometry, as either would call it."""
    one, other = (_elements(names[0], pair) for names in pair.names)
    at = int(np.argmax(one != other))
    return place(pair.smallest, int(one[at])), place(pair.smallest, int(other[at]))


def ours(entry: Entry, rows: Rows) -> str:
    same = [f"{layout}{groups and f', {groups}'}" for layout, groups in counterparts(entry, rows)]
    return " = ".join(same) or f"none; {difference(entry, rows)}"


def main(argv: Sequence[str]) -> int:
    """What other engines call the same bytes, and names that a shape cannot tell apart."""
    Parser(prog="python -m verify dictionary", description=main.__doc__).parse_args(argv)
    for table in (entries(), by_layout(), twin_table()):
        print(as_text(table, left=table.head), end="\n\n")
    print(f"{len(ENTRIES)} names, {len(twins())} pairs of names that a shape cannot tell apart")
    return 0


def _elements(entry: Entry, pair: Twins) -> np.ndarray:
    return np.concatenate([tensor.ravel() for tensor in to_theirs(entry, numbered(pair.smallest)).values()])


def _in_our_order(found: tuple[tuple[str, Rows, str, str], object]) -> tuple[int, int, int]:
    layout, rows, groups, _ = found[0]
    return LAYOUTS.index(layout), list(HOLDS).index(rows), ["", *ALONE].index(groups)


def _source(entry: Entry) -> str:
    return entry.source if entry.read == "file" else f"{entry.source} (thread only)"
