"""The port to a device: memory, streams, events, copies and kernel launches.

GPU backends are written against `Runtime`. On a GPU it is CUDA (`kernels_cupy.cuda_runtime`); for a CPU there is an
emulated device (`refimpl.emulated`).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from refimpl.teardown import call_all

BATCHED = "batch"  # the call that takes many copies

# Streams of our own on a device. A GPU serves all streams of a process from 8 queues, or as many as the environment's
# CUDA_DEVICE_MAX_CONNECTIONS says, 32 at most; work waits for whatever is before it in its queue. Four controllers
# have streams for themselves, the next ones share, which costs overlap and no order.
STREAMS = 12

Stream = Any  # whatever the runtime says


class Stuck(RuntimeError):
    """The device waits for an event that nothing will reach: something is held."""


class Event(Protocol):
    """A point in a stream."""

    def query(self) -> bool:
        """Whether the stream has passed it."""
        ...

    def synchronize(self) -> None:
        """Block until the stream has passed it. Raises what went wrong on the device."""
        ...


class Runtime(Protocol):
    """One device. What is submitted goes there, whichever device is the current one.

    name     of the device: "cuda:1"
    threads  of one block: as many as pay there
    """

    name: str
    threads: int

    def current(self) -> Stream:
        """The caller's stream on this device."""
        ...

    def compile(self) -> None:
        """Compile every kernel for this device, once. `ImportError` with the compiler's message where one fails."""
        ...

    def stream(self) -> Stream:
        """One of `STREAMS` of our own, dealt in turn."""
        ...

    def beside(self, stream: Stream) -> Stream:
        """The stream that shares the work of one of the caller's: always the same one, whoever asks."""
        ...

    def identity(self, stream: Stream) -> Hashable:
        """What tells a stream from others."""
        ...

    def on(self, stream: Stream) -> AbstractContextManager[None]:
        """Make a stream the caller's, and its device the current one."""
        ...

    def issue(self, stream: Stream, call: Callable[[], object]) -> None:
        """Call what submits work to the caller's stream, with `stream` as that; on a CPU it is the call that waits."""
        ...

    def gate(self, stream: Stream) -> Callable[[], object]:
        """The stream waits until the function that is returned is called."""
        ...

    def delay(self, stream: Stream, seconds: float) -> None:
        """The stream waits so long, about."""
        ...

    def batchable(self, stream: Stream) -> bool:
        """Whether the stream takes batched copies."""
        ...

    def record(self, stream: Stream, timed: bool = False) -> Event: ...

    def seconds(self, begin: Event, end: Event) -> float:
        """Between two timed events that have passed."""
        ...

    def wait(self, stream: Stream, event: Event) -> None:
        """What is submitted to the stream from now on runs after the event."""
        ...

    def empty(self, nbytes: int) -> torch.Tensor:
        """Device memory, uint8, aligned to 256 bytes. Usable on the caller's stream and on those that wait for it."""
        ...

    def upload(self, array: np.ndarray) -> torch.Tensor:
        """A copy in device memory, complete in order of the caller's stream. The host does not wait."""
        ...

    def download(self, stream: Stream, tensor: torch.Tensor) -> torch.Tensor:
        """A copy in host memory, complete in order of a stream."""
        ...

    def joined(self, lists: Sequence[torch.Tensor]) -> torch.Tensor:
        """Index lists in device memory as one of int64, complete in order of the caller's stream."""
        ...

    def found(self, look_up: Callable[[], torch.Tensor], count: int) -> torch.Tensor:
        """So many int64 numbers that torch looks up in device memory, complete in order of the caller's stream."""
        ...

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies in this device's memory. `ValueError` if it lies in another one's."""
        ...

    def keep(self, tensor: torch.Tensor) -> None:
        """Let a tensor's memory be, also when its owner lets go of it, until the caller's stream has come this far."""
        ...

    def copy(self, stream: Stream, to: np.ndarray, source: np.ndarray, nbytes: np.ndarray, no_batches: str = "") -> str:
        """Copies between host and device addresses (uint64), in no order; returns by which call.

        no_batches  why each must be a call of its own, if so
        """
        ...

    def launch(self, stream: Stream, kernel: str, blocks: int, arguments: np.ndarray) -> None:
        """Launch a kernel of `kernels_cupy.specs`. The struct of its arguments is not copied."""
        ...


def require_here(place: str, device: str) -> None:
    """`ValueError` for a list that lies on another device than the one that is to read it."""
    if place != device:
        raise ValueError(
            f"an index list lies on {place}, the pools on {device}: leave lists on the host, or copy them to {device}"
        )


@dataclass
class Completion:
    """What a receipt's `event` is: an event, and what is to be asked once it has passed.

    verdict  raises if the device found something wrong (an index list that it had to check)
    """

    event: Event
    verdict: Callable[[], None] | None = None

    def query(self) -> bool:
        return self.event.query()

    def synchronize(self) -> None:
        self.event.synchronize()
        if self.verdict:
            self.verdict()


class Mark:
    """The event behind work that is submitted to a stream. It has not passed before somebody says that it has ended.

    keep   memory that the work reads or writes, say: it is kept as long as the mark
    ended  whether all of the work is submitted, or nothing more of it will be
    """

    def __init__(self, runtime: Runtime, stream: Stream, keep: object) -> None:
        self._runtime, self._stream, self.keep = runtime, stream, keep
        self.ended = False
        self._event: Event | None = None

    @property
    def event(self) -> Event:
        """Recorded when it is first asked for: say so before other work is submitted."""
        if self._event is None:
            self._event = self._runtime.record(self._stream)
        return self._event

    def hold(self, other: Stream) -> None:
        """Let another stream go on behind it. The host waits if that one cannot be told to."""
        try:
            self._runtime.wait(other, self.event)
        except BaseException:
            self.synchronize()
            raise

    def query(self) -> bool:
        return self.ended and self.event.query()

    def synchronize(self) -> None:
        """Of work that goes on: what has been submitted by now."""
        event = self.event if self.ended else self._runtime.record(self._stream)
        event.synchronize()


class Pending:
    """Work under way: what a pool must wait for before it lets go of its memory."""

    def __init__(self) -> None:
        self._work: deque[Mark] = deque()
        self._lock = threading.RLock()  # of a thread that waits already: a signal handler may close a pool

    def begin(self, runtime: Runtime, keep: object, *streams: Stream) -> list[Mark]:
        """What is submitted to these streams from now on is under way: it is waited for, whatever fails.

        Whoever begins sets `ended` of the marks, in a `finally`, and there before any call: behind every call may come
        an interrupt. `keep` is kept until the work has passed and more comes.
        """
        marks = [Mark(runtime, stream, keep) for stream in streams]
        try:
            with self._lock:
                self._let_go()
                self._work.extend(marks)
        except BaseException:  # nobody is going to end them
            for mark in marks:
                mark.ended = True
            raise
        return marks

    def wait(self) -> None:
        """Block until all of it is done. Whoever calls this waits, also when another thread does so already."""
        with self._lock:
            work = list(self._work)
            over = [mark for mark in work if mark.ended]  # before it is waited for: more may be submitted meanwhile
        call_all(mark.synchronize for mark in work)
        with self._lock:
            for mark in over:
                if mark in self._work:  # mostly the first one
                    self._work.remove(mark)

    def _let_go(self) -> None:
        """Of what has passed."""
        while self._work and self._work[0].query():
            self._work.popleft()
