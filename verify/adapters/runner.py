"""Every case of the golden vectors against an adapter: buffers between guards, and a verdict with its reason."""

from __future__ import annotations

import hashlib
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from verify.adapters import diagnosis, suite
from verify.adapters.protocol import Json, Loaded
from verify.adapters.suite import SIDES, Group, Outcome
from verify.consumers import check_vectors as plain
from verify.vectors.payload import POISON

GUARD, GUARD_BYTE = 256, 0xFE  # a byte that is neither payload nor poison


def run(adapter: Loaded, groups: Iterable[Group]) -> Iterator[tuple[Group, Json, Outcome]]:
    for group in groups:
        for test in group.tests:
            yield group, test, check(adapter, group, test)


def check(adapter: Loaded, group: Group, test: Json) -> Outcome:
    """One case, start to end."""
    geometry, layout, direction = group.geometry, group.geometry["layout"], test["direction"]
    refusal = adapter.run.capabilities(geometry, layout, direction)
    if refusal and test.get("reason") != "layout":
        return Outcome(test["id"], "unsupported", message=refusal)
    memory = {side: Memory(group, side, poisoned=side == plain.destination(test)) for side in SIDES}
    if not refusal:
        host, device = (memory[side].views for side in SIDES)
        host_list, device_list = (indices(geometry, test, side) for side in SIDES)
        try:
            adapter.run.transfer(geometry, layout, direction, host, device, host_list, device_list, test.get("layers"))
        except Exception as error:
            refusal = f"{_raised_at(error)}: {type(error).__name__}: {error}"
    digest = suite.combined("host", *([sha256(data) for data in memory[side].views.values()] for side in SIDES))
    guards = [damage for side in SIDES for damage in memory[side].damaged()]
    if (bool(refusal), digest) in suite.right(group, test) and not guards:
        return Outcome(test["id"], "passed", bool(refusal), digest)
    left = {side: [*memory[side].views.values()] for side in SIDES}
    reasons, differs = diagnosis.explain(group, test, refusal, left)
    expected = adapter.why_expected(test["id"])
    message = f"{test['id']}: {'; '.join([*reasons, *guards])}"
    return Outcome(test["id"], "expected" if expected else "failed", bool(refusal), digest, message, differs)


def _raised_at(error: Exception) -> str:
    """The file and line: a refusal that nobody meant is a mistake to be found."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{Path(frame.filename).name}:{frame.lineno}"


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

    def damaged(self) -> Iterator[str]:
        for name, whole in self._whole.items():
            first = self.views[name].ctypes.data - whole.ctypes.data
            last = first + self.views[name].size
            for where, at in ("before", np.arange(first)), ("after", np.arange(last, whole.size)):
                touched = at[whole[at] != GUARD_BYTE]
                if touched.size:
                    distance = first - touched[-1] if where == "before" else touched[0] - last + 1
                    yield f"{self.side} memory was written {distance} bytes {where} buffer {name}"


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
