"""Launches of copy_runs.cu: its arguments, and how it shares out its work."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from kernels_cupy.jobs import End
from kernels_cupy.specs import COPY_RUNS, MAX_LOOPS, MAX_STARTS, SIDE, WORDS
from refimpl.plan import Loop
from refimpl.runtime import Runtime, Stream

IN_FLIGHT = 4  # loads of a thread, as in copy_runs.cu
WIDEST = 16  # bytes of a word

# What a warp copies before it goes elsewhere: host memory likes to be written in long stretches. And the least that a
# group of its threads reads at once, a cache line.
STRETCH = {"backup": 8192, "load": 2048}
LINE = 128


@dataclass(frozen=True)
class Shape:
    """How a kernel shares out its work.

    blocks    thread blocks
    lanes     threads that share a piece of a run
    piece     bytes that they copy at most before they look for more
    together  neighbouring pieces that they take in turn
    """

    blocks: int
    lanes: int
    piece: int
    together: int = 1


def shape_for(run: int, direction: str, blocks: int) -> Shape:
    """As few threads to a run as can have all of it in flight."""
    lanes = 32
    while lanes * WIDEST > LINE and lanes // 2 * WIDEST * IN_FLIGHT >= run:
        lanes //= 2
    stretch = STRETCH[direction] * lanes // 32
    return Shape(blocks, lanes, stretch, max(stretch // run, 1))


def _word(struct: np.dtype, field: str) -> int:
    """Position of a field of eight bytes, in words."""
    return struct.fields[field][1] // 8  # pyright: ignore[reportOptionalSubscript, reportArgumentType]


TO_ITEMS, SOURCE_ITEMS = (_word(COPY_RUNS, side) + _word(SIDE, "items") for side in ("to", "source"))
ITEMS, FAULT = _word(COPY_RUNS, "items"), _word(COPY_RUNS, "fault")


@dataclass(frozen=True)
class Launch:
    """A kernel with its arguments, but for the lists of items. Lists of other transfers make it another transfer."""

    kernel: str
    blocks: int
    arguments: np.ndarray
    host_side: str

    @cached_property
    def _words(self) -> np.ndarray:
        return self.arguments.reshape(1).view(np.uint64)

    def submit(
        self,
        runtime: Runtime,
        stream: Stream,
        host_items: int,
        device_items: int,
        count: int,
        fault: int = 0,
        if_fault: bool = False,
    ) -> None:
        """
        host_items, device_items  addresses of lists in device memory; 0: the first `count` items
        fault                     address of what the check of index lists found; the copy runs if that is `if_fault`
        """
        # As plain words, and seen as a struct again without asking: NumPy takes its time over nested structs.
        words = self._words.copy()
        to, source = (host_items, device_items) if self.host_side == "to" else (device_items, host_items)
        words[TO_ITEMS], words[SOURCE_ITEMS], words[ITEMS], words[FAULT] = to, source, count, fault
        arguments = np.ndarray((), COPY_RUNS, words)
        if if_fault:
            arguments["if_fault"] = 1
        runtime.launch(stream, self.kernel, self.blocks, arguments)


def launches(
    host: End,
    device: End,
    loops: tuple[Loop, ...],
    run: int,
    direction: str,
    shape: Shape,
    items_outermost: bool = True,
    registrations: torch.Tensor | None = None,
) -> list[Launch]:
    """Copies between two ends, the host's (or what stands for it in a staging buffer) and a device pool's.

    items_outermost  page after page (where the host keeps one together), or layer after layer
    registrations    table for host addresses, if they need one
    """
    word = widest_word(host, device, loops, run)
    host_side, device_side = ("to", "source") if direction == "backup" else ("source", "to")
    arguments = np.zeros((), COPY_RUNS)
    loops = (Loop(1, 0, 0),) * (MAX_LOOPS - len(loops)) + loops
    for name, end, steps in (
        (host_side, host, [loop.host for loop in loops]),
        (device_side, device, [loop.device for loop in loops]),
    ):
        side = arguments[name]
        side["page"], side["entries"], side["entry_bytes"], side["steps"] = (
            end.page,
            end.entries,
            end.entry_bytes,
            steps,
        )
    if registrations is not None:
        table = arguments[host_side]
        table["registrations"], table["registration_count"] = registrations.data_ptr(), registrations.numel() // 24
    arguments["counts"], arguments["run"] = [loop.count for loop in loops], run
    arguments["lanes"], arguments["together"] = shape.lanes, shape.together
    arguments["piece"], arguments["items_outermost"] = max(shape.piece // word, 1) * word, items_outermost
    found = []
    for first in range(0, len(host.starts), MAX_STARTS):
        for name, end in ((host_side, host), (device_side, device)):
            starts = end.starts[first : first + MAX_STARTS]
            arguments["starts"], arguments[name]["starts"][: len(starts)] = len(starts), starts
        found.append(Launch(f"copy_runs<{word}>", shape.blocks, arguments.copy(), host_side))
    return found


def widest_word(host: End, device: End, loops: tuple[Loop, ...], run: int) -> int:
    """The widest word that every address, stride and run is a multiple of."""
    fits = run
    for end in (host, device):
        fits |= int(np.bitwise_or.reduce(end.starts)) | end.page | end.entry_bytes
    for loop in loops:
        fits |= loop.host | loop.device
    return next(word for word in WORDS if fits % word == 0)
