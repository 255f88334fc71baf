"""Index lists of a transfer in device memory; those that lie there already are checked there."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch

from kernels_cupy.specs import CHECK_INDICES
from refimpl.indices import Items, Pages, Unchecked
from refimpl.runtime import Completion, Event, Runtime, Stream

INDICES_OF_A_BLOCK = 8192
SIDES = ("host", "device")
UPLOADS = "uploads"


@dataclass(eq=False)
class Placed:
    """Index lists of a transfer in device memory, as addresses of page numbers.

    fault  int32 that the device sets to 1 when a list that it checks is wrong; None: all were checked on the host
    """

    host: int
    device: int
    fault: torch.Tensor | None
    unchecked: list[Unchecked]
    kept: list[torch.Tensor] = field(default_factory=list)

    @property
    def fault_address(self) -> int:
        return 0 if self.fault is None else self.fault.data_ptr()

    def raise_if(self, fault: torch.Tensor) -> None:
        """Raise what is wrong with a list, if the device says so (bytes of its int32)."""
        if fault.any():
            for pages in self.unchecked:
                pages.check()
            raise ValueError("an index list was refused by the device, and has been changed since: nothing was moved")


def place(runtime: Runtime, stream: Stream, items: Items, sides: tuple[str, ...]) -> Placed:
    """Bring the lists of some sides to the device, once for all runs of a transfer on the caller's stream.

    Where both are there already, they serve whoever needs one.
    """
    on = runtime.identity(stream)
    placed = items.placed.get((SIDES, on)) or items.placed.get((sides, on))
    if placed is None:
        placed = items.placed[sides, on] = _place(runtime, items, sides)
    return placed


def tell_uploads(items: Items) -> int:
    """Index tensors that were sent to the device since a receipt told so, for whatever backend and stream."""
    return items.placed.pop(UPLOADS, 0)


def read(runtime: Runtime, indices: torch.Tensor) -> torch.Tensor:
    """A list on the host, as the caller's stream has left it."""
    if not runtime.holds(indices):
        return indices
    told = runtime.download(runtime.current(), indices)
    runtime.record(runtime.current()).synchronize()
    return told


def _place(runtime: Runtime, items: Items, sides: tuple[str, ...]) -> Placed:
    lists: dict[str, Pages] = {side: getattr(items, side) for side in sides}
    here = {side: pages for side, pages in lists.items() if isinstance(pages, np.ndarray)}
    placed = Placed(0, 0, None, items.unchecked)
    items.placed[UPLOADS] = items.placed.get(UPLOADS, 0) + len(here)
    if here:
        placed.kept.append(runtime.upload(np.concatenate([*here.values()])))
        first = placed.kept[0].data_ptr()
        for at, side in enumerate(here):
            setattr(placed, side, first + 8 * at * len(items))
    if items.unchecked:
        placed.fault = runtime.upload(np.zeros(1, np.int32))
    for pages in items.unchecked:
        numbers = _check_there(runtime, pages, placed)
        if pages.side in sides:
            setattr(placed, pages.side, numbers)
    return placed


def _check_there(runtime: Runtime, pages: Unchecked, placed: Placed) -> int:
    """Check a list on the device; returns the address of the page numbers it stands for."""
    assert placed.fault is not None
    numbers = runtime.empty(8 * len(pages))
    placed.kept.append(numbers)
    arguments = np.zeros((), CHECK_INDICES)
    if pages.unique:
        placed.kept.append(runtime.upload(np.zeros(-(-pages.num_pages // 32), np.uint32)))
        arguments["claimed"] = placed.kept[-1].data_ptr()
    indices = pages.indices
    if not indices.is_contiguous():  # copied here and not before: in order of this stream
        indices = runtime.joined([indices])
        placed.kept.append(indices)
    arguments["indices"], arguments["pages"] = indices.data_ptr(), numbers.data_ptr()
    arguments["fault"], arguments["count"] = placed.fault.data_ptr(), indices.numel()
    arguments["page_size"], arguments["num_pages"] = pages.page_size, pages.num_pages
    arguments["index_bytes"] = indices.dtype.itemsize
    blocks = -(-indices.numel() // INDICES_OF_A_BLOCK)
    runtime.launch(runtime.current(), "check_indices", min(blocks, 32), arguments)
    runtime.keep(pages.indices)
    return numbers.data_ptr()


def completion(runtime: Runtime, stream: Stream, placed: Placed, moved: Event) -> Completion:
    """The end of a transfer: the event behind what it moves, and the verdict on lists that the device checks.

    The verdict comes to the host in order of the stream: whoever waits does not wait for anything else.
    """
    if placed.fault is None:
        return Completion(moved)
    told = runtime.download(stream, placed.fault)
    return Completion(runtime.record(stream), partial(placed.raise_if, told))
