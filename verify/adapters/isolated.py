"""The cases in a process of their own: one that crashes or hangs is a failed case, and the end if it goes on so."""

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

LIVES, HANG = 12, 4  # a death costs one of these, a case that never returns four: somebody waits for it


class Ended(Exception):
    """Why the child has no outcome of a case, and what that costs."""

    def __init__(self, why: str, cost: int) -> None:
        super().__init__(why)
        self.cost = cost


class Isolated:
    """An adapter that is loaded by a child. `adapter` has what it says of itself, but cannot be called.

    seconds  what a case may take
    """

    def __init__(self, name: str | None, seconds: int) -> None:
        self.name, self.seconds = name, seconds
        self._child, self._pipe, self.adapter = _start(name)

    def run(self, groups: Sequence[Group]) -> Iterator[tuple[Group, Json, Outcome]]:
        """Like `runner.run`; a case in which the child ends has failed, and the rest goes on in another child.

        Where that happens again and again, the rest is not run and has no outcome.
        """
        left, lives = [(group, test) for group in groups for test in group.tests], LIVES
        self._pipe.send(_ids(left))
        while left and lives > 0:
            group, test = left.pop(0)
            try:
                outcome = self._outcome(test)
            except Ended as ended:
                outcome = runner.wrong(self.adapter, test, [str(ended)])
                lives -= ended.cost
                if left and lives > 0:
                    self._child, self._pipe, self.adapter = _start(self.name)
                    self._pipe.send(_ids(left))
            yield group, test, outcome
        self._child.join(self.seconds)

    def _outcome(self, test: Json) -> Outcome:
        try:
            if not self._pipe.poll(self.seconds):
                self._kill()
                raise Ended(f"did not return within {self.seconds} s", HANG)
            answer = self._pipe.recv()
        except EOFError:
            raise Ended(self._death(), 1) from None
        except KeyboardInterrupt:
            self._kill()
            raise runner.Interrupted(f"in {test['id']}") from None
        if isinstance(answer, NoAdapter):
            raise answer
        return answer

    def _kill(self) -> None:
        self._child.kill()
        self._child.join()

    def _death(self) -> str:
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
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # who started this is told, and tells
    other_end.close()
    try:
        adapter = load(name)
        pipe.send(replace(adapter, run=Null()))
        wanted: set[str] = set(pipe.recv())
        for group in suite.groups():
            for test in group.tests:
                if test["id"] in wanted:
                    pipe.send(runner.check(adapter, group, test))
    except NoAdapter as error:
        pipe.send(error)


def _ids(cases: Sequence[tuple[Group, Json]]) -> list[str]:
    return [test["id"] for _, test in cases]
