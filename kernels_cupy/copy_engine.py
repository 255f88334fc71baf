"""Backend `direct`: the copy engine, one descriptor a run, many descriptors a call.

Runs that continue each other on both sides become one. The batched call refuses CUDA's legacy default stream, which is
torch's default: then a stream beside it takes over, from the caller's last work to the caller's next.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from kernels_cupy.descriptors import describe_runs
from kernels_cupy.jobs import begins_and_offsets, device_addresses, device_begins, jobs, out_of_reach
from kernels_cupy.lists import read
from kernels_cupy.runtimes import runtime
from refimpl.backends.protocol import Setup
from refimpl.indices import Items
from refimpl.plan import Plan
from refimpl.receipt import Receipt
from refimpl.runtime import BATCHED, Completion, Pending, Runtime, Stream

# Descriptors of one call. Some drivers have hung on tens of thousands (vLLM issues 49276, 43018).
BATCH = 4096

Descriptors = tuple[np.ndarray, np.ndarray, np.ndarray]  # host and device addresses, bytes


class CopyEngine:
    def __init__(self, setup: Setup) -> None:
        self._runtime = runtime(setup.platform)
        self._pending = Pending()

    def stays(self, side: str, indices: torch.Tensor) -> bool:
        return False  # descriptors are made on the host

    def read(self, indices: torch.Tensor) -> torch.Tensor:
        return read(self._runtime, indices)

    def place(self, plan: Callable[[], Plan], layers: tuple[int | None, ...], items: Items, direction: str) -> None:
        """The copy engine needs no lists."""

    def execute(self, plan: Plan, layers: tuple[int | None, ...], items: Items, direction: str) -> Receipt:
        host, device, nbytes = descriptors(plan, layers, items)
        caller = self._runtime.current()
        with_batches = caller if self._runtime.batchable(caller) else self._runtime.beside(caller)
        if with_batches is not caller:
            self._runtime.wait(with_batches, self._runtime.record(caller))
        to, source = (host, device) if direction == "backup" else (device, host)
        (end,) = self._pending.begin(self._runtime, plan, with_batches)
        try:
            call = submit(self._runtime, with_batches, to, source, nbytes, out_of_reach(plan))
        finally:  # some batches may be on their way even if another one failed
            end.ended = True
            if with_batches is not caller:
                end.hold(caller)
            moved = end.event
        path = "direct" if call == BATCHED else f"direct ({call})"
        return Receipt(path, int(nbytes.sum()), len(nbytes), event=Completion(moved))

    def close(self) -> None:
        self._pending.wait()


def submit(
    runtime: Runtime, stream: Stream, to: np.ndarray, source: np.ndarray, nbytes: np.ndarray, no_batches: str = ""
) -> str:
    """Copy in batches, unless there is a reason against it; returns the call that took them."""
    call = BATCHED
    for first in range(0, len(nbytes), BATCH):
        part = slice(first, first + BATCH)
        call = runtime.copy(stream, to[part], source[part], nbytes[part], no_batches=no_batches)
    return call


def descriptors(plan: Plan, layers: tuple[int | None, ...], items: Items) -> Descriptors:
    """Every run of the layers, merged where possible, addresses as the device sees them."""
    host_items, device_items = items.checked()
    order = np.argsort(host_items, kind="stable")
    host_items, device_items = host_items[order], device_items[order]
    found, begins = jobs(plan, layers), (begins_and_offsets(plan)[0].view(np.int64), device_begins(plan))
    copies, count = np.empty((3, len(items) * sum(job.runs_per_item for job in found)), np.int64), 0
    for job in found:  # page after page if the host keeps one together: the bus likes addresses near each other
        host, device = job.ends
        together = job.keeps_page_together
        count = describe_runs(copies, count, host, host_items, device, device_items, job.run, together, *begins)
    host, device, nbytes = copies[:, :count].view(np.uint64)
    return device_addresses(plan, host), device, nbytes


def joined_items(items: Items) -> int:
    """How many items lie right behind the one before them on both sides; none that are known while lists are unread."""
    if items.unchecked:
        return 0
    if "joined" not in items.placed:
        host, device = items.checked()
        items.placed["joined"] = int(np.count_nonzero((np.diff(host) == 1) & (np.diff(device) == 1)))
    return items.placed["joined"]


def count_descriptors(plan: Plan, layers: tuple[int | None, ...], items: Items) -> int:
    """How many there will be, or nearly: without making them."""
    joined = joined_items(items)
    return sum(
        job.runs_per_item * len(items)
        - (joined * len(job.host.starts) if job.run == job.host.page == job.device.page else 0)
        for job in jobs(plan, layers)
    )
