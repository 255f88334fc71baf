"""What calls of the runtime take of the host: a backend that makes them cannot take less.

Those of a transfer, which the verdicts of `targets` take away from what backends need to submit; and single ones, timed
as transfers are, behind a held stream. They tell hosts apart, and the times of day of one host: a batched copy costs so
much to begin and so much for each descriptor, nearly all of it inside the driver.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np

from kernels_cupy.copy_engine import BATCH
from kernels_cupy.runtimes import runtime
from kernels_cupy.specs import CHECK_INDICES
from refimpl.runtime import Runtime
from verify.arena import Arena
from verify.bench.gpu.clock import Clock, Run
from verify.bench.gpu.record import Call
from verify.bench.record import Timing

COUNTS = (1, 16, 256, BATCH)  # descriptors of a batch, the most that backends put into one among them
RUN = 8 << 10  # bytes of each
APART = 8  # runs lie so many times their bytes apart, as pages of a pool do: an address costs the driver a look-up
SAMPLES = 20

PORT = ("current", "record", "wait", "copy", "launch")  # what a prepared transfer calls of a device


def measure(clock: Clock, arena: Arena, counts: Sequence[int] = COUNTS) -> list[Call]:
    """Copies to the host in batches of several sizes, a launch that finds nothing to do, and an event that is awaited.

    Nothing where the CPU moves the bytes.
    """
    if clock.platform == "cpu":
        return []
    arena.reset()
    device = runtime(clock.platform)
    nbytes = memory_needed(counts)
    host, source = arena.map(nbytes), device.empty(nbytes)
    found = [
        _timed(clock, name, count, run)
        for name, count, run in _calls(device, host.data_ptr(), source.data_ptr(), counts)
    ]
    device.record(device.current()).synchronize()  # the memory is somebody else's next
    return found


@contextmanager
def spent(platform: str) -> Iterator[list[float]]:
    """Seconds of each call of the device inside, which is CUDA, CuPy and torch, and a few microseconds of ours."""
    device, found = runtime(platform), list[float]()

    def timed(call: Callable[..., Any]) -> Callable[..., Any]:
        def within(*arguments: Any, **more: Any) -> Any:
            begin = time.perf_counter()
            try:
                return call(*arguments, **more)
            finally:
                found.append(time.perf_counter() - begin)

        return within

    for name in PORT:
        setattr(device, name, timed(getattr(device, name)))
    try:
        yield found
    finally:
        for name in PORT:
            delattr(device, name)


def memory_needed(counts: Sequence[int] = COUNTS) -> int:
    """Bytes of host memory that `measure` takes."""
    return APART * max(counts) * RUN


def _timed(clock: Clock, name: str, count: int, run: Run) -> Call:
    """Pairs, whose second call counts: the first behind a hold finds caches cold, and a queue has room for few."""
    warm = clock.series(lambda: run, 2, 0).submit_s[-1]
    pairs = [clock.series(lambda: run, 2, 2 * warm) for _ in range(SAMPLES)]
    held = all(pair.held for pair in pairs) if pairs[0].held is not None else None
    return Call(name, count, Timing([pair.submit_s[-1] for pair in pairs]), held)


def _calls(device: Runtime, to: int, source: int, counts: Sequence[int]) -> Iterator[tuple[str, int, Run]]:
    stream, random = device.current(), np.random.default_rng(0)
    for count in counts:
        nbytes = np.full(count, RUN, np.uint64)
        there, here = (np.uint64(begin) + places(random, count, max(counts)) for begin in (to, source))
        yield "batch", count, partial(device.copy, stream, there, here, nbytes)
    device.compile()
    nothing = np.zeros((), CHECK_INDICES)
    nothing["page_size"] = 1
    yield "launch", 1, partial(device.launch, stream, "check_indices", 1, nothing)
    yield "event", 1, lambda: device.wait(stream, device.record(stream))


def places(random: np.random.Generator, count: int, most: int) -> np.ndarray:
    """Bytes (uint64) to so many runs, scattered over the memory of `most`, each in a place of its own."""
    return (random.permutation(most)[:count] * APART * RUN).astype(np.uint64)
