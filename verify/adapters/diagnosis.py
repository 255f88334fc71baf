"""Why a case failed: its first wrong word, decoded, and which known faults all failures have in common."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from verify.adapters import suite
from verify.adapters.protocol import Json
from verify.adapters.suite import Group, Outcome
from verify.consumers import check_vectors as plain
from verify.vectors.payload import POISON, SIDE, WORD, Place, place

Sides = Mapping[str, Sequence[np.ndarray]]


def explain(group: Group, test: Json, refusal: str | None, left: Sides) -> Iterator[str]:
    """What is wrong with the buffers as they were left, destination first."""
    to = plain.destination(test)
    if refusal and test["result"] == "ok":
        yield f"was refused ({refusal})"
    if not refusal and test["result"] == "must-refuse":
        yield f"was not refused, though it must be: {test['reason']}"
    moved = not refusal and test["result"] != "must-refuse"
    expected = plain.move(group.geometry, test) if moved else [np.full_like(b, POISON) for b in left[to]]
    if refusal and test["result"] == "ok" and all((b == POISON).all() for b in left[to]):
        expected = left[to]
    for side, right in (to, expected), (suite.other(to), group.filled[suite.other(to)]):
        yield from _first_wrong(group, side, left[side], right, "" if side == to else "the source was changed: ")


def _first_wrong(
    group: Group, side: str, left: Sequence[np.ndarray], right: Sequence[np.ndarray], prefix: str
) -> Iterator[str]:
    for buffer, ours, theirs, full in zip(group.geometry[side], left, right, group.filled[side], strict=True):
        wrong = np.flatnonzero(ours != theirs)
        if wrong.size:
            word = _word(buffer, int(wrong[0]))
            where, due, found = (decoded(group.geometry, data[word].tobytes()) for data in (full, theirs, ours))
            yield (
                f"{prefix}{side} buffer {buffer['name']}, byte {wrong[0]} (of {where}): expected {due}, found {found}; "
                f"{wrong.size} of {ours.size} bytes are wrong"
            )
            return


def _word(buffer: Json, byte: int) -> slice:
    """The word around a byte of a buffer. Words are counted from a head's first lane; a buffer may hold later ones."""
    first, lanes = buffer["first_byte"], buffer["head_bytes"]
    head, inside = byte // lanes * lanes - first, first + byte % lanes
    begin = max(inside // WORD * WORD, first)
    return slice(head + begin, head + min(inside // WORD * WORD + WORD, first + lanes))


def decoded(geometry: Json, word: bytes) -> str:
    """The place that a word names, in the pool's own words."""
    if set(word) == {POISON}:
        return "poison (nothing was written)"
    at = place(word)
    places = [at] if at else _places_of_a_tail(geometry, word) if len(word) < WORD else []
    named = {c["id"]: c for c in geometry["components"]}
    known = [p for p in places if p.component in named]
    if not known:
        why = "which is partly poison" if POISON in word else "which no place has"
        return f"bytes {word.hex(' ')}, {why}"
    also = f" (or one of {len(known) - 1} others)" if len(known) > 1 else ""
    return _text(named[known[0].component], known[0]) + also


def _places_of_a_tail(geometry: Json, tail: bytes) -> list[Place]:
    """Where lanes end in these bytes, fewer than a word."""
    found, pages = [], range(max(geometry["host_pages"], geometry["device_pages"]))
    for c in geometry["components"]:
        width = c["lanes"] * c["element_bytes"]
        if width % WORD != len(tail):
            continue
        for layer in c["layers"]:
            ends = plain.rows_on(geometry, c, layer, pages)[..., width // WORD * WORD :]
            same = np.argwhere((ends == np.frombuffer(tail, np.uint8)).all(axis=-1))
            found += [Place(c["id"], layer, int(p), int(t), int(h), width // WORD) for p, t, h in same]
    return found


def _text(component: Json, at: Place) -> str:
    layer = "side state" if at.layer == SIDE else f"layer {at.layer}"
    token = f" token {at.token}" if component["unit"] == "token" else ""
    head = f" head {at.head}" if component["heads"] else ""
    return f"{component['name']} {layer} page {at.page}{token}{head} byte {at.word * WORD}"


def in_common(failing: Sequence[tuple[Group, Json, Outcome]], passing: Sequence[tuple[Group, Json, Outcome]]) -> str:
    """What failing cases of one result (`ok` or `must-refuse`) have in common, in a sentence."""
    if not passing and all(not o.refused and o.sha256 == suite.unmoved(g, t) for g, t, o in failing):
        return "none of them moves or refuses anything"
    if all(o.refused for _, _, o in failing):
        return "all of them are refused"
    shared = set.intersection(*(suite.flags(g, t) for g, t, _ in failing))
    fitting = sorted(shared.difference(*(suite.flags(g, t) for g, t, _ in passing)))
    rest = sorted(shared.difference(fitting))
    effects = suite.manifest()["flags"]
    said = [f"{flag}, which shows in these and in no others: {effects[flag]}" for flag in fitting]
    if rest:
        said.append(f"All of them also catch {', '.join(rest)}, but so do cases that pass.")
    return " ".join(said) or "no known fault is common to all of them"


def summary(outcomes: Iterable[tuple[Group, Json, Outcome]]) -> Iterator[str]:
    """How many fail that must move, how many that must be refused, and the faults that would explain it."""
    seen = [o for o in outcomes if o[2].status in ("passed", "failed", "expected")]
    for result, what in ("ok", "must move"), ("must-refuse", "must be refused"):
        failing, passing = (
            [o for o in seen if o[1]["result"] == result and (o[2].status == "passed") is good]
            for good in (False, True)
        )
        if failing:
            count = f"{len(failing)} of {len(failing) + len(passing)} cases that {what} are wrong"
            yield f"{count}; {in_common(failing, passing)}"
