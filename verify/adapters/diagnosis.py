"""Why a case failed: its first wrong word, decoded; and what all failing cases have in common, in faults or in kind."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import combinations

import numpy as np

from verify.adapters import suite
from verify.adapters.protocol import Json
from verify.adapters.suite import Group, Outcome
from verify.consumers import check_vectors as plain
from verify.vectors.payload import POISON, SIDE, WORD, Place, place

Sides = Mapping[str, Sequence[np.ndarray]]
Results = Sequence[tuple[Group, Json, Outcome]]


def explain(group: Group, test: Json, refusal: str | None, left: Sides) -> tuple[list[str], str]:
    """What is wrong with the answer and the buffers as they were left, destination first; and `Outcome.differs`."""
    reasons, differs = [*_wrong_answer(test, refusal)], list[str]()
    for side, right in _expected(group, test, refusal, left).items():
        if found := _first_wrong(group, side, left[side], right):
            reasons.append(found[0] if side == plain.destination(test) else f"the source was changed: {found[0]}")
            differs.append(found[1])
    return reasons, next(iter(differs), "")


def _wrong_answer(test: Json, refusal: str | None) -> Iterator[str]:
    if refusal:
        yield f"was refused ({refusal})" + ("" if test["result"] == "ok" else ", but something had been written")
    if not refusal and test["result"] == "must-refuse":
        yield f"was not refused, though it must be: {test['reason']}"


def _expected(group: Group, test: Json, refusal: str | None, left: Sides) -> dict[str, Sequence[np.ndarray]]:
    """Both sides, destination first, as they ought to be after this answer: whoever refuses has moved nothing."""
    to = plain.destination(test)
    moved = not refusal and test["result"] != "must-refuse"
    right = plain.move(group.geometry, test) if moved else [np.full_like(b, POISON) for b in left[to]]
    return {to: right, suite.other(to): group.filled[suite.other(to)]}


def _first_wrong(
    group: Group, side: str, left: Sequence[np.ndarray], right: Sequence[np.ndarray]
) -> tuple[str, str] | None:
    """The first wrong word of a side, in a sentence, and how it differs from the right one."""
    for buffer, ours, theirs, full in zip(group.geometry[side], left, right, group.filled[side], strict=True):
        wrong = np.flatnonzero(ours != theirs)
        if wrong.size:
            word = _word(buffer, int(wrong[0]))
            place, due, found = (data[word].tobytes() for data in (full, theirs, ours))
            where, expected, instead = (decoded(group.geometry, w) for w in (place, due, found))
            return (
                f"{side} buffer {buffer['name']}, byte {wrong[0]} (of {where}): expected {expected}, found {instead}; "
                f"{wrong.size} of {ours.size} bytes are wrong"
            ), difference(group.geometry, due, found)
    return None


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
    named, known = {c["id"]: c for c in geometry["components"]}, _places(geometry, word)
    if not known:
        why = "which is partly poison" if POISON in word else "which no place has"
        return f"bytes {word.hex(' ')}, {why}"
    also = f" (or one of {len(known) - 1} others)" if len(known) > 1 else ""
    return _text(named[known[0].component], known[0]) + also


def difference(geometry: Json, due: bytes, found: bytes) -> str:
    """How a wrong word differs from the right one: which parts of the place that it names are others."""
    if set(found) == {POISON}:
        return "nothing was written"
    if set(due) == {POISON}:
        return "written where nothing was due"
    pairs = [(a, b) for a in _places(geometry, due) for b in _places(geometry, found)]
    if not pairs:
        return "bytes of no place"
    parts = min(([part for part in asdict(a) if getattr(a, part) != getattr(b, part)] for a, b in pairs), key=len)
    return f"another {' and '.join(parts)}"


def _places(geometry: Json, word: bytes) -> list[Place]:
    at = place(word)
    places = [at] if at else _places_of_a_tail(geometry, word) if len(word) < WORD else []
    ids = {c["id"] for c in geometry["components"]}
    return [p for p in places if p.component in ids]


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


# ---- over all cases


def summary(outcomes: Iterable[tuple[Group, Json, Outcome]]) -> Iterator[str]:
    """How many fail of those to be moved and of those to be refused, and what would explain it."""
    became: dict[tuple[str, str], list[tuple[Group, Json, Outcome]]] = defaultdict(list)
    for case in outcomes:
        if case[2].status in ("passed", "failed", "expected"):
            became[_became(*case[1:])].append(case)
    for due in "moved", "refused":
        passing, total = became[due, "passed"], sum(len(became[due, how]) for how in ("passed", *FAILING))
        for how in FAILING:
            if failing := became[due, how]:
                count = f"{len(failing)} of {total} cases to be {due} are {how}"
                yield f"{count}. {' '.join(in_common(failing, passing))}"


FAILING = ("refused", "not finished", "wrong")


def _became(test: Json, outcome: Outcome) -> tuple[str, str]:
    """What was due, and what became of it. A refusal that comes too late is wrong; whoever dies has not finished."""
    due = "refused" if _to_be_refused(test, outcome) else "moved"
    if outcome.status == "passed":
        return due, "passed"
    if outcome.sha256 is None:
        return due, "not finished"
    return due, "refused" if outcome.refused and due == "moved" else "wrong"


def _to_be_refused(test: Json, outcome: Outcome) -> bool:
    """What may be moved or refused is what it was taken for."""
    return test["result"] == "must-refuse" or (test["result"] == "unspecified" and outcome.refused)


def _idle(group: Group, test: Json, outcome: Outcome) -> bool:
    return not outcome.refused and outcome.sha256 == suite.unmoved(group, test)


def in_common(failing: Results, passing: Results) -> Iterator[str]:
    """What failing cases, all to be moved or all to be refused, have in common, in sentences."""
    if all(_idle(*case) for case in (*failing, *passing)):
        yield "None of them moves or refuses anything."
        return
    refused = all(o.refused for _, _, o in failing)
    unfinished = all(o.sha256 is None for _, _, o in failing)
    if refused:
        yield from _refusals(failing)
    if unfinished:
        yield _counted("Of them", (o.message.removeprefix(f"{o.id}: ") for _, _, o in failing))
    # Faults are of where bytes go, or of lists that nobody checks: who refuses or dies shows neither.
    silent = refused or unfinished
    shared = set[str]() if silent else set.intersection(*(suite.flags(g, t) for g, t, _ in failing))
    fitting = sorted(shared.difference(*(suite.flags(g, t) for g, t, _ in passing)))
    for flag in fitting:
        yield f"{flag}, which shows in these and in none that passes: {suite.manifest()['flags'][flag]}"
    if not fitting and not silent:
        yield "No known fault shows in exactly these."
    if ways := [o.differs for _, _, o in failing if o.differs]:
        yield _counted("The first wrong word, against the right one", ways)
    if fitting:
        return
    if apart := apart_from(failing, passing):
        yield apart
    elif shared:
        yield f"They would all show {' or '.join(sorted(shared))}, but so would cases that pass."


def _counted(what: str, told: Iterable[str]) -> str:
    return f"{what}: {', '.join(f'{text} ({number})' for text, number in Counter(told).most_common())}."


def _refusals(failing: Results) -> Iterator[str]:
    if any(_to_be_refused(t, o) for _, t, o in failing):
        yield "All of them are refused, but something had been written."
    errors = [*dict.fromkeys(_error(o) for _, _, o in failing)]
    which = "The error" if len(errors) == 1 else f"{len(errors)} different errors, the first"
    yield f"{which}: {errors[0][:LONGEST].rstrip('.')}."


def _error(outcome: Outcome) -> str:
    """The first line of what `explain` says of a refusal.

    >>> _error(Outcome("a", "failed", message="a: was refused (x.py:1: TypeError: f() takes 2); host buffer k, byte 0"))
    'x.py:1: TypeError: f() takes 2'
    """
    said = re.search(r"was refused \((.*?)(\)(, but .*)?(; (host|device|the source) .*)?)?$", outcome.message, re.M)
    return said[1] if said else outcome.message


LONGEST = 240  # letters of an error
FEW = 0.1  # the part of the cases that pass which may have a property too, if it is to explain anything
MOST = 3  # words of a label, or properties, that are named


def _listed(group: Group, test: Json) -> int:
    """Indices or entries in the list of the destination."""
    to = plain.destination(test)
    if f"{to}_pages" in test:
        return group.geometry["page_size"] * len(test[f"{to}_pages"])
    return len(test.get(f"{to}_indices", []) or test.get(f"{to}_entries", []))


def _row_bytes(group: Group) -> list[int]:
    return [(c["heads"] or 1) * c["lanes"] * c["element_bytes"] for c in group.geometry["components"]]


# What a fault that nobody has foreseen may depend on: words and numbers of a case.
LABELS: dict[str, Callable[[Group, Json], str]] = {
    "reason": lambda g, t: t.get("reason", ""),
    "note": lambda g, t: t["note"],
    "direction": lambda g, t: t["direction"],
    "layout": lambda g, t: g.geometry["layout"],
    "family": lambda g, t: g.family,
}
MEASURES: dict[str, Callable[[Group, Json], int]] = {
    "layers": lambda g, t: len({layer for c in g.geometry["components"] for layer in c["layers"] if layer != SIDE}),
    "components": lambda g, t: len(g.geometry["components"]),
    "pages in the list": lambda g, t: _listed(g, t) // g.geometry["page_size"],
    "indices in the list": _listed,
    "tokens a page": lambda g, t: g.geometry["page_size"],
    "bytes in the longest row": lambda g, t: max(_row_bytes(g)),
    "bytes in the shortest row": lambda g, t: min(_row_bytes(g)),
}
STEPS = (2, 4, 8, 16, 32, 64, 128)


def apart_from(failing: Results, passing: Results) -> str | None:
    """What every failing case has and few that pass, or none: the best property, or the best few together."""
    if not passing:
        return None
    having = {said: {i for i, (g, t, _) in enumerate(passing) if has(g, t)} for has, said in _properties(failing)}

    def left(several: Sequence[str]) -> int:
        return len(set.intersection(*(having[said] for said in several)))

    every = [several for number in range(1, MOST + 1) for several in combinations(having, number)]
    best = min(every, key=lambda several: left(several) << len(several))  # one more has to halve what is left
    as_good = [said for said in having if left([said]) == left(best)]
    named = best if len(best) > 1 else as_good[:MOST]
    also, these = left(named), " and ".join(named)
    if not also:
        return f"All of them, and nothing that passes, have {these}."
    if also <= FEW * len(passing):
        return f"All of them have {these}; so have {also} of the {len(passing)} that pass."
    return None


def _properties(failing: Results) -> Iterator[tuple[Callable[[Group, Json], bool], str]]:
    """What every failing case has: one of some words, a number within a bound, or one that is no multiple."""
    for noun, label in LABELS.items():
        of = {label(g, t) for g, t, _ in failing}
        if len(of) <= MOST and "" not in of:
            yield lambda g, t, of=of, label=label: label(g, t) in of, f"{noun} {' or '.join(sorted(of))}"
    for noun, measure in MEASURES.items():
        found = [measure(g, t) for g, t, _ in failing]
        least, most = min(found), max(found)
        yield lambda g, t, n=least, m=measure: m(g, t) >= n, f"{least} or more {noun}"
        yield lambda g, t, n=most, m=measure: m(g, t) <= n, f"{most} or fewer {noun}" if most else f"no {noun}"
        step = next((step for step in STEPS if all(n % step for n in found)), 0)
        if step:
            said = f"a number of {noun} that is no multiple of {step}"
            yield lambda g, t, n=step, m=measure: m(g, t) % n > 0, said
