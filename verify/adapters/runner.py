"""Every case of the golden vectors against an adapter: buffers between guards, and a verdict with its reason."""

from __future__ import annotations

import hashlib
import traceback
from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from verify.adapters import diagnosis, suite
from verify.adapters.protocol import Buffers, Json, Loaded, NoAdapter
from verify.adapters.suite import SIDES, Group, Outcome
from verify.consumers import check_vectors as plain
from verify.vectors.payload import POISON

GUARD, GUARD_BYTE = 256, 0xFE  # a byte that is neither payload nor poison


class Interrupted(KeyboardInterrupt):
    """Where somebody ended it: `in` a case."""


def run(adapter: Loaded, groups: Iterable[Group]) -> Iterator[tuple[Group, Json, Outcome]]:
    for group in groups:
        for test in group.tests:
            try:
                outcome = check(adapter, group, test)
            except KeyboardInterrupt as error:
                raise Interrupted(f"in {test['id']}, at {_raised_at(error)}") from None
            yield group, test, outcome


def check(adapter: Loaded, group: Group, test: Json) -> Outcome:
    """One case, start to end."""
    try:
        answer = adapter.run.capabilities(deepcopy(group.geometry), group.geometry["layout"], test["direction"])
    except Exception as error:
        return wrong(adapter, test, [f"capabilities raised {_told(error)}"])
    refusal = _declined(adapter, answer)
    if refusal and test.get("reason") != "layout":
        return Outcome(test["id"], "unsupported", message=refusal)
    memory = {side: Memory(group, side, poisoned=side == plain.destination(test)) for side in SIDES}
    if not refusal:
        refusal = _moved(adapter, deepcopy(group.geometry), deepcopy(test), memory)
    left = {side: memory[side].copied() for side in SIDES}
    digest = suite.combined("host", *([*map(sha256, left[side])] for side in SIDES))
    guards = [damage for side in SIDES for damage in memory[side].damaged()]
    if (bool(refusal), digest) in suite.right(group, test) and not guards:
        return Outcome(test["id"], "passed", bool(refusal), digest)
    reasons, differs = diagnosis.explain(group, test, refusal, left)
    reasons += [*_read_beside(left[plain.destination(test)]), *guards]
    if any(memory[side].changed(left[side]) for side in SIDES):
        reasons.append("its buffers changed after it returned")
    return wrong(adapter, test, reasons, refused=bool(refusal), sha256=digest, differs=differs)


def wrong(adapter: Loaded, test: Json, reasons: Iterable[str], **known: Any) -> Outcome:
    """A case that failed, expected or not."""
    status = "expected" if adapter.why_expected(test["id"]) else "failed"
    return Outcome(test["id"], status, message=f"{test['id']}: {'; '.join(reasons)}", **known)


def _declined(adapter: Loaded, answer: object) -> str | None:
    if answer is None or isinstance(answer, str):
        return answer
    raise NoAdapter(f"adapter {adapter.name!r}: capabilities must return None or text, got {answer!r}")


def _moved(adapter: Loaded, geometry: Json, test: Json, memory: Mapping[str, Memory]) -> str | None:
    """None, or what it raised."""
    layout, direction = geometry["layout"], test["direction"]
    host, device = (memory[side].handed() for side in SIDES)
    host_list, device_list = (indices(geometry, test, side) for side in SIDES)
    try:
        adapter.run.transfer(geometry, layout, direction, host, device, host_list, device_list, test.get("layers"))
    except Exception as error:
        return _told(error)
    return None


def _told(error: BaseException) -> str:
    return f"{_raised_at(error)}: {type(error).__name__}: {error}"


def _raised_at(error: BaseException) -> str:
    """The file and line: a refusal that nobody meant is a mistake to be found."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{Path(frame.filename).name}:{frame.lineno}"


def _read_beside(destination: Iterable[np.ndarray]) -> Iterator[str]:
    """Guards are of a byte that no payload has: it arrives by reading them."""
    if number := sum(np.count_nonzero(data == GUARD_BYTE) for data in destination):
        yield f"{number} bytes of it were read beside the source"


class Memory:
    """The buffers of a side, each a stretch of its own between guards."""

    def __init__(self, group: Group, side: str, poisoned: bool) -> None:
        self.side, self._whole = side, dict[str, np.ndarray]()
        self.views = dict[str, np.ndarray]()
        for buffer, full in zip(group.geometry[side], group.filled[side], strict=True):
            whole = np.full(full.size + 3 * GUARD, GUARD_BYTE, np.uint8)
            first = GUARD + -whole.ctypes.data % GUARD
            view = whole[first : first + full.size]
            view[:] = POISON if poisoned else full
            self._whole[buffer["name"]], self.views[buffer["name"]] = whole, view

    def handed(self) -> Buffers:
        """For an adapter: what it does to a name, a shape or a dtype stays with it."""
        return MappingProxyType({name: view.view() for name, view in self.views.items()})

    def copied(self) -> list[np.ndarray]:
        return [view.copy() for view in self.views.values()]

    def changed(self, copied: list[np.ndarray]) -> bool:
        return not all(map(np.array_equal, self.views.values(), copied))

    def damaged(self) -> Iterator[str]:
        for name, whole in self._whole.items():
            first = self.views[name].ctypes.data - whole.ctypes.data
            guards = {"before": whole[:first][::-1], "after": whole[first + self.views[name].size :]}
            for where, guard in guards.items():
                touched = np.flatnonzero(guard != GUARD_BYTE) + 1  # 1: next to the buffer
                if touched.size:
                    size = f"{touched.size} bytes{' or more' if touched[-1] == guard.size else ''}"
                    near = f"the nearest at distance {touched[0]}"
                    yield f"{self.side} memory was written {where} buffer {name}: {size}, {near}"


def indices(geometry: Json, test: Json, side: str) -> np.ndarray:
    """The list of a side as adapters get it: `page_size` indices for a page, or entries."""
    if f"{side}_pages" not in test:
        return np.array(test.get(f"{side}_indices", test.get(f"{side}_entries")), np.int64)
    size = geometry["page_size"]
    return np.array([page * size + i for page in test[f"{side}_pages"] for i in range(size)], np.int64)


def sha256(data: np.ndarray) -> str:
    return hashlib.sha256(data.data).hexdigest()


def stale(adapter: Loaded, outcomes: Iterable[Outcome]) -> list[str]:
    """Expected failures of which none failed, though some of these cases were run; and those of cases there are not."""
    ran = [o for o in outcomes if o.status != "unsupported"]
    every = [t["id"] for g in suite.groups() for t in g.tests] if adapter.expected else []
    found = []
    for line in adapter.expected:
        met = [o.status for o in ran if line.matches(o.id)]
        why = "passes" if met and "expected" not in met else "" if any(map(line.matches, every)) else "is no case"
        if why:
            found.append(f"{line.pattern}: {why}, but was expected to fail: {line.reason}")
    return found
