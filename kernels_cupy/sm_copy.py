"""Backend `kernel`: a few blocks read one memory and write the other, run by run.

Best for runs too short for the copy engine. Host memory is mapped into the device, so there is nothing in between: the
work of a transfer is one launch (one for every shape of run), on the caller's stream.
"""

from __future__ import annotations

import torch

from kernels_cupy.jobs import Copy, Shape, completion, jobs, launch, mapped, place, table_of
from kernels_cupy.runtimes import runtime
from refimpl.backends.protocol import Setup
from refimpl.indices import Items
from refimpl.plan import Plan
from refimpl.receipt import Receipt
from refimpl.runtime import Event

IN_FLIGHT = 4  # loads of a thread, as in copy_runs.cu

# Runs of so many bytes and more -> blocks that fill the bus.
BLOCKS = ((2048, 4), (512, 8), (0, 16))


class SmCopy:
    def __init__(self, setup: Setup) -> None:
        self._runtime = runtime(setup.platform)
        self._blocks = setup.blocks
        self._last: Event | None = None

    def stays(self, side: str, indices: torch.Tensor) -> bool:
        return self._runtime.holds(indices)

    def execute(self, plan: Plan, layers: tuple[int | None, ...], items: Items, direction: str) -> Receipt:
        placed = place(self._runtime, items)
        table = table_of(self._runtime, plan.registrations)
        receipt = Receipt("kernel", index_uploads=placed.uploads)
        for job in jobs(plan, layers):
            runs = job.runs_per_item * len(items)
            copy = Copy(
                (mapped(plan, job.host), placed.host), (job.device, placed.device), job.loops, job.run, len(items)
            )
            kernels = launch(
                self._runtime,
                copy.towards(direction),
                shape_for(job.run, self._blocks),
                items_outermost=job.keeps_page_together,
                fault=placed.fault_address,
                registrations=table,
            )
            receipt += Receipt("kernel", runs * job.run, runs, kernels)
        done = completion(self._runtime, self._runtime.current(), placed)
        self._last = done.event
        return receipt + Receipt("kernel", event=done)

    def close(self) -> None:
        if self._last:
            self._last.synchronize()


def shape_for(run: int, blocks: int | None = None) -> Shape:
    """Blocks by run length; a warp a run, or part of one where runs are short."""
    lanes = 32
    while lanes > 1 and lanes * 16 > run:
        lanes //= 2
    blocks = blocks or next(blocks for shortest, blocks in BLOCKS if run >= shortest)
    return Shape(blocks, lanes, lanes * 16 * IN_FLIGHT)
