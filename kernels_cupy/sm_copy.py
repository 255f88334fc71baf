"""Backend `kernel`: a few blocks read one memory and write the other, run by run.

Best for runs too short for the copy engine. Host memory is mapped into the device, so there is nothing in between: the
work of a transfer is one launch (one for every shape of run), on the caller's stream.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from kernels_cupy.jobs import Job, jobs, mapped, needs_table, require_reach, runs_and_bytes, table_of
from kernels_cupy.launches import Launch, Shape, launches, shape_for
from kernels_cupy.lists import SIDES, completion, place, read, tell_uploads
from kernels_cupy.runtimes import runtime
from refimpl.backends.protocol import Setup
from refimpl.indices import Items
from refimpl.plan import Plan
from refimpl.receipt import Receipt
from refimpl.runtime import Pending, Stream

# Runs of so many bytes and more -> blocks that fill the bus.
BLOCKS = ((2048, 4), (512, 8), (0, 16))


class SmCopy:
    launches_kernels = True

    def __init__(self, setup: Setup) -> None:
        self._runtime = runtime(setup.platform)
        self._runtime.compile()
        self._blocks = setup.blocks
        self._pending = Pending()

    def stays(self, side: str, indices: torch.Tensor) -> bool:
        return self._runtime.holds(indices)

    def read(self, indices: torch.Tensor) -> torch.Tensor:
        return read(self._runtime, indices)

    def place(self, plan: Callable[[], Plan], layers: tuple[int | None, ...], items: Items, direction: str) -> None:
        place(self._runtime, self._runtime.current(), items, SIDES)

    def execute(self, plan: Plan, layers: tuple[int | None, ...], items: Items, direction: str) -> Receipt:
        stream, count = self._runtime.current(), len(items)
        placed = place(self._runtime, stream, items, SIDES)
        prepared = self._prepared(plan, layers, direction, stream)
        (end,) = self._pending.begin(self._runtime, plan, stream)
        try:
            for launch in prepared:
                launch.submit(self._runtime, stream, placed.host, placed.device, count, placed.fault_address)
        finally:
            end.ended = True
            moved = end.event
        done = completion(self._runtime, stream, placed, moved)
        runs, nbytes = runs_and_bytes(plan, layers, count)
        return Receipt("kernel", nbytes, runs, len(prepared), tell_uploads(items), event=done)

    def close(self) -> None:
        self._pending.wait()

    def _prepared(self, plan: Plan, layers: tuple[int | None, ...], direction: str, stream: Stream) -> list[Launch]:
        """Worked out once; a table of registrations is brought to the device in order of a stream, and so again."""
        key = "launches", layers, direction, self._runtime.identity(stream) if needs_table(plan) else None
        prepared = plan.derived.get(key)
        if prepared is None:
            require_reach(plan)
            table = table_of(self._runtime, plan.registrations)
            found = [
                launch
                for job in jobs(plan, layers)
                for launch in across_the_bus(
                    plan, job, direction, shape_for(job.run, direction, self._blocks or blocks_for(job.run)), table
                )
            ]
            prepared = plan.derived[key] = table, found
        return prepared[1]


def across_the_bus(
    plan: Plan, job: Job, direction: str, shape: Shape, table: torch.Tensor | None = None
) -> list[Launch]:
    """A job between host memory and a device pool; `table` if host addresses have to be looked up."""
    host = mapped(plan, job.host)
    return launches(host, job.device, job.loops, job.run, direction, shape, job.keeps_page_together, table)


def blocks_for(run: int) -> int:
    return next(blocks for shortest, blocks in BLOCKS if run >= shortest)
