"""The cases in a process of their own, so that an implementation that crashes is a failed case and not the end."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Iterator, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

from verify.adapters import runner, suite
from verify.adapters.plain import Null
from verify.adapters.protocol import Json, Loaded, NoAdapter, load
from verify.adapters.suite import Group, Outcome

DEATHS = 10  # so often it is started again


class Isolated:
    """An adapter that is loaded by a child. `adapter` has what it says of itself, but cannot be called."""

    def __init__(self, name: str | None) -> None:
        self.name = name
        self._child, self._pipe, self.adapter = _start(name)

    def run(self, groups: Sequence[Group]) -> Iterator[tuple[Group, Json, Outcome]]:
        """Like `runner.run`; a case in which the child dies has failed, and the rest goes on in another child."""
        left, deaths = [(group, test) for group in groups for test in group.tests], 0
        self._pipe.send(_ids(left))
        while left:
            group, test = left.pop(0)
            try:
                outcome = self._pipe.recv()
            except EOFError:
                deaths += 1
                outcome = Outcome(test["id"], "failed", message=f"{test['id']}: {self._why()}")
                outcome = _as_expected(self.adapter, outcome)
                if deaths < DEATHS:
                    self._child, self._pipe, self.adapter = _start(self.name)
                    self._pipe.send(_ids(left))
                else:
                    yield group, test, outcome
                    yield from ((g, t, _not_run(t)) for g, t in left)
                    return
            yield group, test, outcome
        self._child.join()

    def _why(self) -> str:
        self._child.join()
        code = self._child.exitcode or 0
        return f"the process died ({signal.Signals(-code).name if code < 0 else f'exit code {code}'})"


def can_isolate() -> bool:
    return "fork" in multiprocessing.get_all_start_methods()


def _start(name: str | None) -> tuple[Any, Connection, Loaded]:
    ours, theirs = multiprocessing.Pipe()
    child = multiprocessing.get_context("fork").Process(target=_serve, args=(name, theirs, ours), daemon=True)
    child.start()
    theirs.close()
    try:
        answer = ours.recv()
    except EOFError as error:
        raise NoAdapter(f"adapter {name!r} ends the process when it is loaded") from error
    if isinstance(answer, NoAdapter):
        raise answer
    return child, ours, answer


def _serve(name: str | None, pipe: Connection, other_end: Connection) -> None:
    other_end.close()
    try:
        adapter = load(name)
    except NoAdapter as error:
        return pipe.send(error)
    pipe.send(replace(adapter, run=Null()))
    wanted: set[str] = set(pipe.recv())
    for group in suite.groups():
        for test in group.tests:
            if test["id"] in wanted:
                pipe.send(runner.check(adapter, group, test))
    return None


def _ids(cases: Sequence[tuple[Group, Json]]) -> list[str]:
    return [test["id"] for _, test in cases]


def _as_expected(adapter: Loaded, outcome: Outcome) -> Outcome:
    return replace(outcome, status="expected") if adapter.why_expected(outcome.id) else outcome


def _not_run(test: Json) -> Outcome:
    return Outcome(test["id"], "failed", message=f"{test['id']}: not run, the process had died {DEATHS} times")
