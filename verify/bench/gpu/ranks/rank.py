"""One rank: a process with a device, pools and host memory of its own, that moves bytes when the others do."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from multiprocessing.connection import Connection
from multiprocessing.shared_memory import SharedMemory
from typing import Any

import numpy as np
import torch

from kernels_cupy.runtimes import runtime
from refimpl import HostPool, Receipt, numa
from refimpl.devices import memory_of
from refimpl.runtime import Event
from refimpl.support import DIRECTIONS
from verify.arena import ALIGNMENT, Arena
from verify.bench.gpu.ranks.cases import Play, Task, plays
from verify.bench.gpu.ranks.meeting import Meeting
from verify.bench.gpu.results import gpu
from verify.bench.gpu.rig import Rig, Stage
from verify.bench.measure import SPARE_PAGES

Run = Callable[[], object]
Answer = dict[str, Any]

IN_FLIGHT = 2  # transfers of a rank, so that the device need not wait for the host
WARM = 2  # of a play, not counted: others begin some microseconds sooner or later
PLAIN = "plain copies are what the others are held against"


@dataclass(frozen=True)
class Orders:
    """What all ranks are told alike.

    samples  transfers of a rank that count in a play
    slow_s   a cell whose transfers take longer is left out: every play repeats them
    until    no task is begun after that, on the clock that all processes share (`time.monotonic`)
    """

    devices: tuple[str, ...]
    tasks: tuple[Task, ...]
    payload_bytes: int
    samples: int
    slow_s: float
    seed: int
    until: float


def main(orders: Orders, rank: int, shared: str, tell: Connection) -> None:
    """Tell what this rank's device is, then the samples of plain copies, then an answer for every task."""
    memory = SharedMemory(shared)
    try:
        port = runtime(orders.devices[rank])
        with port.on(port.stream()):
            assert memory.buf is not None
            at_work = Rank(orders, rank, Meeting(memory.buf, rank, len(orders.devices)))
            tell.send({"device": orders.devices[rank], "gpu": gpu(), "numa_node": numa.nearest(orders.devices[rank])})
            for answer in at_work.answers():
                tell.send(answer)
            at_work.close()
            del at_work
    finally:
        tell.close()
        memory.close()


class Rank:
    def __init__(self, orders: Orders, rank: int, meeting: Meeting) -> None:
        self.orders, self.rank, self.meeting = orders, rank, meeting
        self.device = orders.devices[rank]
        self.port = runtime(self.device)
        self.plays = plays(len(orders.devices))
        self.arena = Arena(memory_needed(orders))
        self._stage: tuple[object, Stage] | None = None

    def close(self) -> None:
        self._stage = None
        self.arena.close()

    def answers(self) -> Iterator[Answer]:
        yield self._played(self._plain_copies())
        for task in self.orders.tasks:
            if not self.meeting.meet(time.monotonic() < self.orders.until):
                yield {"status": "left out", "reason": "the time was up"}
                continue
            yield self._answer(task)

    def _answer(self, task: Task) -> Answer:
        """Verified, played, verified again; a fault of one rank keeps none of the others waiting."""
        self.arena.reset()
        attempt, found = None, {"status": "measured", "reason": ""}
        try:
            attempt = Attempt(self, task)
            found |= attempt.verify(self.orders.slow_s)
        except Exception as error:
            found = _failed(error)
        if self.meeting.meet(found["status"] == "measured") and attempt:
            found |= self._played(attempt.runs)
            found |= attempt.verify_again() if found["status"] == "measured" else {}
        elif found["status"] == "measured":
            found = {"status": "left out", "reason": "another rank could not take part"}
        if attempt:
            attempt.host.close()
        return found

    def stage_of(self, task: Task) -> Stage:
        """Made anew for another pool or layout."""
        spec = task.case.spec
        if self._stage is None or self._stage[0] != (spec, task.layout):
            self._stage = None
            pages = task.case.pages_of(self.orders.payload_bytes)
            rig = Rig(spec, pages, True, memory_of(self.device), self.orders.seed + self.rank)
            self._stage = (spec, task.layout), Stage(rig, task.layout)
        return self._stage[1]

    def _plain_copies(self) -> dict[str, Run]:
        """One call for the whole payload, each way."""
        nbytes = self.orders.payload_bytes
        host = self.arena.map(nbytes).fill_(1)
        device = torch.ones(nbytes, dtype=torch.uint8, device=memory_of(self.device))
        ends = {"backup": (host, device), "load": (device, host)}

        def copy(to: torch.Tensor, source: torch.Tensor) -> None:
            there, here, size = (np.array([n], np.uint64) for n in (to.data_ptr(), source.data_ptr(), nbytes))
            self.port.copy(self.port.current(), there, here, size, no_batches=PLAIN)

        return {direction: partial(copy, *ends[direction]) for direction in DIRECTIONS}

    # ---- plays

    def _played(self, runs: dict[str, Run]) -> Answer:
        """Samples of every play, empty where this rank rests. After an error the others' plays go on without it."""
        found: Answer = {"samples": []}
        for play in self.plays:
            self.meeting.meet()
            self.meeting.begin()
            try:
                found["samples"].append(self._play(play, runs) if "status" not in found else [])
            except Exception as error:
                found |= _failed(error)
            self.meeting.rest()
        return found

    def _play(self, play: Play, runs: dict[str, Run]) -> list[float]:
        """Transfer after transfer, until everybody has enough of them."""
        direction = play.directions[self.rank]
        if direction is None:
            return []
        stream, run = self.port.current(), runs[direction]
        marks = [self.port.record(stream, timed=True)]
        under_way: deque[Event] = deque()
        while not self.meeting.all_ended():
            run()
            under_way.append(self.port.record(stream, timed=True))
            if len(under_way) < IN_FLIGHT:
                continue
            under_way[0].synchronize()
            mark = under_way.popleft()
            if len(marks) <= WARM + self.orders.samples:
                marks.append(mark)
            else:
                self.meeting.end()
        while under_way:
            under_way.popleft().synchronize()
        return [self.port.seconds(before, after) for before, after in pairwise(marks[WARM:])]


class Attempt:
    """A host pool of a rank, filled and verified by the oracle.

    runs  a transfer each way, prepared
    """

    def __init__(self, rank: Rank, task: Task) -> None:
        self.stage = rank.stage_of(task)
        spec, pages = self.stage.rig.spec, self.stage.rig.num_pages
        self.host = HostPool(spec, task.layout, pages, task.backend, memory=rank.arena, platform=rank.device)
        self.runs: dict[str, Run] = {}

    def verify(self, slow_s: float) -> Answer:
        """A transfer each way is right; then host and device agree, so that plays may go either way."""
        receipts: dict[str, Receipt] = {}
        seconds = 0.0
        for direction in ("load", "backup"):
            self.stage.fill(self.host, direction)
            transfer = self.host.prepare(self.stage.rig.work, *self.stage.at, direction)
            self.runs[direction] = partial(transfer.run, side_states=True)
            receipts[direction] = transfer.run()
            receipts[direction].wait()
            fault = self.stage.fault(self.host, direction)
            if fault:
                return {"status": "wrong", "reason": f"{direction}: {fault}"}
            begin = time.perf_counter()
            transfer.run(side_states=True).wait()
            seconds = max(seconds, time.perf_counter() - begin)
        if seconds > slow_s:
            return {"status": "left out", "reason": f"a transfer takes {seconds:.2g} s, and every play repeats it"}
        told = [receipts[direction] for direction in DIRECTIONS]
        return {"path": [r.path for r in told], "descriptors": [r.descriptors for r in told]}

    def verify_again(self) -> Answer:
        fault = self.stage.fault(self.host, "backup")
        return {"status": "wrong", "reason": f"after the plays: {fault}"} if fault else {}


def _failed(error: Exception) -> Answer:
    return {"status": "failed", "reason": f"{type(error).__name__}: {error}"}


def memory_needed(orders: Orders) -> int:
    """Bytes of host memory that the largest pool takes, with what alignment loses."""
    pools = [
        (case.pages_of(orders.payload_bytes) + SPARE_PAGES) * case.spec.page_bytes
        + ALIGNMENT * (1 + 2 * len(case.spec.components) * (1 + case.spec.layers))
        for case in {task.case for task in orders.tasks}
    ]
    return max([orders.payload_bytes, *pools])
