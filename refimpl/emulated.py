"""A device without hardware, for a CPU: queues that run what was submitted as late as they can, in any legal order.

A backend or a controller that forgets an event, reuses a buffer early or reads its source at submit is found out by it
without a GPU.
"""

from __future__ import annotations

import ctypes
import itertools
import random
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from refimpl.hooks import reached
from refimpl.runtime import BATCHED, STREAMS, Event, Stream, Stuck, require_here

POISON = 0xDB
ALIGNMENT = 256  # of device memory
CALLERS: Stream = "default"  # the stream that is current where nobody has chosen another

Launcher = Callable[[str, int, int, np.ndarray], None]

# Address of device memory -> the device whose memory it is.
_OWNERS: dict[int, QueueRuntime] = {}


@dataclass
class QueuedEvent:
    queue: QueueRuntime
    passed: bool = False
    at: float = 0.0

    def query(self) -> bool:
        return self.passed

    def synchronize(self) -> None:
        self.queue.run_until(self)


@dataclass
class Queued:
    """Runs when its `after` has passed and it has come to the front of its stream."""

    what: Callable[[], object]
    after: QueuedEvent | None = None
    runs: bool = False


class QueueRuntime:
    """A device without hardware: everything waits in queues until somebody waits for it.

    Several devices do not know of each other: each has its memory, and streams that advance when it is waited for.

    launcher  runs a kernel on the CPU: (instance, blocks, threads, arguments)
    compiler  compiles what the launcher will run
    seed      of the order in which streams take turns and descriptors of a batch are copied
    """

    threads = 32

    def __init__(
        self, launcher: Launcher, compiler: Callable[[], None] = lambda: None, seed: int = 0, name: str = "emulated:0"
    ) -> None:
        self._launcher, self.compile, self.name = launcher, compiler, name
        self._random = random.Random(seed)
        self._streams = itertools.cycle(range(STREAMS))
        self._queues: dict[Hashable, deque[Queued]] = {}
        self._lock = threading.RLock()
        self._here = threading.local()

    def reseed(self, seed: int) -> None:
        """Another order, or the same one again."""
        self._random.seed(seed)

    # ---- streams

    def current(self) -> Stream:
        return getattr(self._here, "stream", CALLERS)

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before, self._here.stream = self.current(), stream
        try:
            yield
        finally:
            self._here.stream = before

    def stream(self) -> Stream:
        return f"private {next(self._streams)}"

    def beside(self, stream: Stream) -> Stream:
        return f"beside {stream}"

    def identity(self, stream: Stream) -> Hashable:
        return stream

    def issue(self, stream: Stream, call: Callable[[], object]) -> None:
        with self.on(stream):
            call()

    def gate(self, stream: Stream) -> Callable[[], object]:
        event = QueuedEvent(self)
        self.wait(stream, event)

        def open_it() -> None:
            event.passed = True

        return open_it

    def delay(self, stream: Stream, seconds: float) -> None:
        self.submit(lambda: time.sleep(seconds), stream)

    def batchable(self, stream: Stream) -> bool:
        return stream != CALLERS

    def submit(self, what: Callable[[], object], stream: Stream = None, after: QueuedEvent | None = None) -> None:
        """Queue anything, as a user's own kernel would be."""
        with self._lock:
            self._queues.setdefault(stream or self.current(), deque()).append(Queued(what, after))

    def record(self, stream: Stream, timed: bool = False) -> QueuedEvent:
        event = QueuedEvent(self)

        def passed() -> None:
            event.passed, event.at = True, time.perf_counter()

        self.submit(passed, stream)
        return event

    def seconds(self, begin: Event, end: Event) -> float:
        assert isinstance(begin, QueuedEvent)
        assert isinstance(end, QueuedEvent)
        return end.at - begin.at

    def wait(self, stream: Stream, event: Event) -> None:
        assert isinstance(event, QueuedEvent)
        self.submit(lambda: None, stream, event)

    # ---- memory

    def empty(self, nbytes: int) -> torch.Tensor:
        """Poison, before anything is written and again when nobody refers to it any more.

        As with CUDA's allocators it is free for others in order of the stream it was allocated on, no sooner.
        """
        room = np.full(nbytes + ALIGNMENT, POISON, np.uint8)
        first = -room.ctypes.data % ALIGNMENT
        memory = room[first : first + nbytes]
        address, stream = memory.ctypes.data, self.current()

        def freed() -> None:
            _OWNERS.pop(address, None)
            self.submit(lambda: room.fill(POISON), stream)

        _OWNERS[address] = self
        weakref.finalize(memory, freed).atexit = False  # the storage of every view keeps this array alive
        return torch.from_numpy(memory)

    def upload(self, array: np.ndarray) -> torch.Tensor:
        held = array.copy()
        memory = self.empty(array.nbytes)
        address = memory.data_ptr()
        self.submit(lambda: ctypes.memmove(address, held.ctypes.data, held.nbytes))
        return memory

    def download(self, stream: Stream, tensor: torch.Tensor) -> torch.Tensor:
        copy = torch.full_like(tensor, POISON)
        self.submit(lambda: copy.copy_(tensor), stream)
        return copy

    def joined(self, lists: Sequence[torch.Tensor]) -> torch.Tensor:
        if len({self.holds(indices) for indices in lists}) > 1:
            raise RuntimeError(f"expected all lists to be on the same device, not all {len(lists)} are on {self.name}")
        count = sum(map(torch.Tensor.numel, lists))
        return self.found(lambda: torch.cat([indices.to(torch.int64) for indices in lists]), count)

    def found(self, look_up: Callable[[], torch.Tensor], count: int) -> torch.Tensor:
        found = self.empty(8 * count).view(torch.int64)
        self.submit(lambda: found.copy_(look_up()))
        return found

    def holds(self, tensor: torch.Tensor) -> bool:
        owner = _OWNERS.get(tensor.untyped_storage().data_ptr())
        if owner is not None:
            require_here(owner.name, self.name)
        return owner is not None

    def keep(self, tensor: torch.Tensor) -> None:
        self.submit(lambda: tensor)

    # ---- work

    def copy(self, stream: Stream, to: np.ndarray, source: np.ndarray, nbytes: np.ndarray, no_batches: str = "") -> str:
        """One operation for the whole batch, its copies in any order."""
        reached("copy", self, stream)
        copies = list(zip(to.tolist(), source.tolist(), nbytes.tolist(), strict=True))
        self._random.shuffle(copies)

        def run() -> None:
            for copy in copies:
                ctypes.memmove(*copy)

        self.submit(run, stream)
        return f"one by one: {no_batches}" if no_batches else BATCHED

    def launch(self, stream: Stream, kernel: str, blocks: int, arguments: np.ndarray) -> None:
        reached("relayout", self, stream)
        self.submit(lambda: self._launcher(kernel, blocks, self.threads, arguments), stream)

    # ---- running

    def run_until(self, event: QueuedEvent) -> None:
        """Run operations in any legal order, no more than it takes to pass the event.

        Half of the times streams take turns at random, else some always go before others: as far ahead as they may.
        """
        with self._lock:
            take_turns, ranks = self._random.random() < 0.5, dict[Hashable, float]()
            while not event.passed:
                ready = self._ready()
                if not ready:
                    raise Stuck("the device waits for an event that nothing will reach: is something held?")
                for stream in ready:
                    ranks.setdefault(stream, self._random.random())
                chosen = self._random.choice(ready) if take_turns else max(ready, key=ranks.__getitem__)
                self._run_first_of(self._queues[chosen])

    def advance(self, most: int = 1) -> int:
        """Run so many operations in any legal order, or as many as there are. Returns how many."""
        with self._lock:
            for count in range(most):
                ready = self._ready()
                if not ready:
                    return count
                self._run_first_of(self._queues[self._random.choice(ready)])
        return most

    @staticmethod
    def _run_first_of(queue: deque[Queued]) -> None:
        """An interrupt leaves it in the queue, to be run again; an error does not."""
        first = queue[0]
        try:
            first.runs = True
            first.what()
            queue.popleft()
        except Exception:
            queue.popleft()
            raise
        except BaseException:
            first.runs = False
            raise

    def _ready(self) -> list[Hashable]:
        """Streams whose next operation may run."""
        fronts = [(stream, queue[0]) for stream, queue in list(self._queues.items()) if queue]
        return [s for s, first in fronts if not first.runs and (first.after is None or first.after.passed)]

    def synchronize(self) -> None:
        """Run everything, and forget streams that have nothing left to do."""
        for stream in list(self._queues):
            self.run_until(self.record(stream))
        with self._lock:
            self._queues = {stream: queue for stream, queue in self._queues.items() if queue}


class HostQueue(QueueRuntime):
    """The same for backends of the CPU, which do their work in the call: there it is the calls that are queued."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(_no_kernels, seed=seed, name="cpu")

    def issue(self, stream: Stream, call: Callable[[], object]) -> None:
        self.submit(call, stream)


class WaitingHost(HostQueue):
    """For a caller whose own work is in no queue, since it is done at once: where his stream is to wait, he does."""

    def wait(self, stream: Stream, event: Event) -> None:
        super().wait(stream, event)
        if stream == CALLERS:
            self.record(stream).synchronize()


def _no_kernels(kernel: str, blocks: int, threads: int, arguments: np.ndarray) -> None:
    raise RuntimeError(f"a backend of the CPU launched {kernel}")
