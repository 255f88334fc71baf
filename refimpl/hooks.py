"""Named steps of a controller's work, which a test or a curious engineer may hold, delay or let fail.

| step                 | where it is                                                                         |
|----------------------|-------------------------------------------------------------------------------------|
| `backup submit`      | on the host, before a batch of what is queued is submitted                          |
| `backup relayout`    | in a stream, before a kernel: of `staged`, or the copy itself with backend `kernel` |
| `backup copy`        | in a stream, before a copy, or all the work of a backend of the CPU                 |
| `backup acknowledge` | on the host, before a batch that has finished is reported                           |
| `load …`             | the same four of a load                                                             |
| `load layer 3`       | in the stream of loads, before layer 3                                              |

What is held in a stream holds what comes behind it in that stream, nothing else. The host does not wait, with two
exceptions. A backend that must read an index list back from the device (`direct`; `staged` those of the host) waits for
all that comes before it in the stream, a hold included. And on a CPU the host waits for copies of states: if they are
held, `start_writing` submits everything and then raises `Stuck`.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Protocol

Stream = object

STEP = re.compile(r"(backup|load) (submit|relayout|copy|acknowledge)|load layer \d+")


class Streams(Protocol):
    """What holding and delaying needs of a runtime."""

    def gate(self, stream: Stream) -> Callable[[], object]: ...
    def delay(self, stream: Stream, seconds: float) -> None: ...


@dataclass(eq=False)
class Hold:
    """Released by `release`, or at the end of a `with` block."""

    step: str
    _open: list[Callable[[], object]] = field(default_factory=list)
    released: bool = False

    def release(self) -> None:
        self.released = True
        while self._open:
            self._open.pop()()

    def __enter__(self) -> Hold:
        return self

    def __exit__(self, *exception: object) -> None:
        self.release()


class Hooks:
    def __init__(self) -> None:
        self._holds: list[Hold] = []
        self._delays: dict[str, float] = {}
        self._failures: dict[str, BaseException] = {}

    def hold(self, step: str) -> Hold:
        """Whoever reaches the step waits there until the hold is released."""
        hold = Hold(_known(step))
        self._holds.append(hold)
        return hold

    def delay(self, step: str, seconds: float) -> None:
        """Whoever reaches the step waits so long; 0 undoes it."""
        if not seconds >= 0:
            raise ValueError(f"{step!r} cannot be delayed by {seconds} seconds")
        self._delays[_known(step)] = seconds

    def fail(self, step: str, error: BaseException) -> None:
        """The next one to reach the step raises `error`, an exception."""
        if not isinstance(error, BaseException):
            raise TypeError(f"{step!r} fails by raising an exception, got {error!r}")
        self._failures[_known(step)] = error

    def release(self) -> None:
        """Release every hold."""
        for hold in self._holds:
            hold.release()

    def held(self, step: str) -> bool:
        """Asked by the host, which comes back later."""
        self._holds = [hold for hold in self._holds if not hold.released]
        return any(hold.step == step for hold in self._holds)

    def reached(self, step: str, runtime: Streams | None = None, stream: Stream = None) -> None:
        """Raise if the step is to fail; hold or delay the stream."""
        if step in self._failures:
            raise self._failures.pop(step)
        seconds = self._delays.get(step, 0.0)
        if runtime is None:
            time.sleep(seconds)
            return
        if seconds:
            runtime.delay(stream, seconds)
        for hold in self._holds:
            if hold.step == step and not hold.released:
                hold._open.append(runtime.gate(stream))

    @contextmanager
    def watching(self, direction: str) -> Iterator[None]:
        """What runtimes do meanwhile, they do for transfers in this direction under these hooks."""
        before = _watched.set((self, direction))
        try:
            yield
        finally:
            _watched.reset(before)


_watched: ContextVar[tuple[Hooks, str] | None] = ContextVar("watched", default=None)


def reached(step: str, runtime: Streams, stream: Stream) -> None:
    """Called by runtimes: "relayout" or "copy" comes next in a stream."""
    watched = _watched.get()
    if watched:
        hooks, direction = watched
        hooks.reached(f"{direction} {step}", runtime, stream)


def _known(step: str) -> str:
    if not STEP.fullmatch(step):
        raise ValueError(
            f"no step {step!r}: there are 'load layer N', and submit, relayout, copy, acknowledge of backup and load"
        )
    return step
