"""Clocks: how long work takes that was handed to a device.

On a GPU the stream is held by a kernel that spins until the host has submitted everything. What is timed then is the
device and nothing else; what the host took to submit is a figure of its own. The emulated clock has no device to wait
for, so there the two are one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import torch

Run = Callable[[], Any]  # enqueues work on the current stream; a receipt, if it returns one, can be waited for
Start = Callable[[], Run]  # prepares work

CALIBRATION_CYCLES = 50_000_000
SLACK_S = 0.003  # a hold outlasts what it is expected to cover by this, and by half
LONGEST_HOLD_S = 1.5


@dataclass
class Series:
    """Runs one after another.

    samples_s  device time of each
    submit_s   host time of each, from the call to its return
    held       whether everything was submitted before the device began; None where there is no device
    """

    samples_s: list[float]
    submit_s: list[float]
    held: bool | None


class Clock(Protocol):
    """`platform` and `device` are where pools lie while this clock runs."""

    platform: str
    device: str

    def session(self) -> AbstractContextManager[None]: ...
    def finish(self) -> None: ...
    def series(self, start: Start, count: int, submit_s: float) -> Series: ...
    def beside(self, front: Sequence[Run], back: Sequence[Run]) -> tuple[float, float]: ...


def wait(receipts: Sequence[Any]) -> None:
    """Wait for transfers, and raise where one failed. Other work has no receipt."""
    for receipt in receipts:
        if hasattr(receipt, "wait"):
            receipt.wait()


def latencies(clock: Clock, start: Start, count: int) -> list[float]:
    """Seconds from submitting a prepared transfer until it is complete, the device being idle before."""
    found = []
    for _ in range(count):
        run = start()
        clock.finish()
        begin = time.perf_counter()
        wait([run()])
        clock.finish()
        found.append(time.perf_counter() - begin)
    return found


class CudaClock:
    """Events on a stream that is held."""

    platform = device = "cuda"

    def __init__(self) -> None:
        self.stream, self.other = torch.cuda.Stream(), torch.cuda.Stream()
        with self.session():
            self.cycles_per_s = CALIBRATION_CYCLES / min(self.series(lambda: self._spin, 3, 0).samples_s)

    cycles_per_s = 1e9  # until calibrated

    @contextmanager
    def session(self) -> Iterator[None]:
        """Everything inside is enqueued on the clock's stream."""
        with torch.cuda.stream(self.stream):
            yield
        self.stream.synchronize()

    def finish(self) -> None:
        torch.cuda.synchronize()

    def series(self, start: Start, count: int, submit_s: float) -> Series:
        """Time `count` runs behind a hold that covers `submit_s` of host time; once more if that was too short.

        Where no hold is long enough there is none: the device waits for the host then, as it would in use. A single
        run only says how long the hold of others must be.
        """
        found = self._series([start() for _ in range(count)], _hold_for(submit_s))
        if count > 1 and not found.held and _hold_for(sum(found.submit_s)) > SLACK_S:
            found = self._series([start() for _ in range(count)], _hold_for(sum(found.submit_s)))
        return found

    def beside(self, front: Sequence[Run], back: Sequence[Run]) -> tuple[float, float]:
        """Device seconds of two series that begin together on two streams.

        `front` is enqueued first: its launches must fit into the queue of a stream that is held.
        """
        self.finish()
        gate = torch.cuda.Event()
        self._hold(0.05)
        gate.record()
        marks = self._behind(self.stream, gate, front), self._behind(self.other, gate, back)
        self.finish()
        return marks[0][0].elapsed_time(marks[0][1]) / 1e3, marks[1][0].elapsed_time(marks[1][1]) / 1e3

    def _behind(self, stream: torch.cuda.Stream, gate: torch.cuda.Event, runs: Sequence[Run]) -> list[Any]:
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        with torch.cuda.stream(stream):
            stream.wait_event(gate)
            marks[0].record()
            for run in runs:
                run()
            marks[1].record()
        return marks

    def _series(self, runs: Sequence[Run], hold: float) -> Series:
        self.finish()
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(len(runs) + 1)]
        submit, receipts = [], []
        self._hold(hold)
        marks[0].record()
        for run, mark in zip(runs, marks[1:], strict=True):
            begin = time.perf_counter()
            receipts.append(run())
            submit.append(time.perf_counter() - begin)
            mark.record()
        held = not marks[0].query()
        wait(receipts)
        self.finish()
        return Series([a.elapsed_time(b) / 1e3 for a, b in pairwise(marks)], submit, held)

    def _hold(self, seconds: float) -> None:
        torch.cuda._sleep(int(seconds * self.cycles_per_s))

    @staticmethod
    def _spin() -> None:
        torch.cuda._sleep(CALIBRATION_CYCLES)


def _hold_for(submit_s: float) -> float:
    hold = 1.5 * submit_s + SLACK_S
    return hold if hold <= LONGEST_HOLD_S else SLACK_S


class HostClock:
    """The wall clock, for devices that are emulated: a run is submitted and waited for."""

    device = "cpu"

    def __init__(self, platform: str = "emulated") -> None:
        self.platform = platform

    @contextmanager
    def session(self) -> Iterator[None]:
        yield

    def finish(self) -> None:
        """Nothing runs on."""

    def series(self, start: Start, count: int, submit_s: float) -> Series:
        return self._series([start() for _ in range(count)])

    def _series(self, runs: Sequence[Run]) -> Series:
        samples, submit = [], []
        for run in runs:
            begin = time.perf_counter()
            receipt = run()
            submit.append(time.perf_counter() - begin)
            wait([receipt])
            samples.append(time.perf_counter() - begin)
        return Series(samples, submit, None)

    def beside(self, front: Sequence[Run], back: Sequence[Run]) -> tuple[float, float]:
        """One after the other: there is nothing to overlap with."""
        return sum(self._series(front).samples_s), sum(self._series(back).samples_s)


def clock(platform: str) -> Clock:
    return CudaClock() if platform == "cuda" else HostClock(platform)
