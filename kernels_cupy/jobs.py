"""From a plan to what is submitted: jobs, index lists in device memory, addresses as the device sees them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from kernels_cupy.specs import CHECK_INDICES, COPY_RUNS, MAX_LOOPS, MAX_STARTS, WORDS
from refimpl.indices import Items, Pages, Unchecked
from refimpl.plan import Loop, Move, Plan, Registration
from refimpl.runtime import Completion, Runtime, Stream

THREADS_TO_CHECK = 8192  # indices of a list that one block checks


@dataclass(frozen=True)
class End:
    """One side of a job: where page 0 of each layer begins, and bytes to the next page and to the next entry."""

    starts: np.ndarray
    page: int
    entries: int = 1
    entry_bytes: int = 0


@dataclass(frozen=True)
class Job:
    """Moves of one shape, their layers in one list: K and V of all layers, say."""

    host: End
    device: End
    loops: tuple[Loop, ...]
    run: int

    @property
    def runs_per_item(self) -> int:
        return len(self.host.starts) * int(np.prod([loop.count for loop in self.loops], dtype=np.int64))

    @property
    def keeps_page_together(self) -> bool:
        """Whether the host's layers lie inside a page."""
        first, second = (*self.host.starts.tolist(), 0, 0)[:2]
        return 0 < second - first < self.host.page


def jobs(plan: Plan, layers: tuple[int | None, ...]) -> list[Job]:
    """What there is to do for some layers; worked out once."""
    key = ("jobs", layers)
    if key not in plan.derived:
        plan.derived[key] = list(_jobs(plan, layers))
    return plan.derived[key]


def _jobs(plan: Plan, layers: tuple[int | None, ...]) -> Iterator[Job]:
    alike: dict[tuple[object, ...], tuple[Move, list[int], list[int]]] = {}
    for move in plan.moves:
        shape = move.host.page, move.device.page, move.loops, move.run, move.entries, move.entry_bytes
        _, host, device = alike.setdefault(shape, (move, [], []))
        at = [move.layers.index(layer) for layer in layers if layer in move.layers]
        host += [move.host.starts[i] for i in at]
        device += [move.device.starts[i] for i in at]
    for move, host, device in alike.values():
        if host:
            yield Job(
                End(np.array(host, np.uint64), move.host.page, move.entries, move.entry_bytes),
                End(np.array(device, np.uint64), move.device.page, move.entries, move.entry_bytes),
                move.loops,
                move.run,
            )


# ---------------------------------------------------------------------------------------------------------------------
# Addresses of registered memory.


def one_offset(registrations: tuple[Registration, ...]) -> bool:
    """Whether the way from a host address to the device's is the same everywhere."""
    return len({r.alias - r.begin for r in registrations}) <= 1


def mapped(plan: Plan, end: End) -> End:
    """An end in host memory as the device sees it, unless its kernel will look up every address."""
    if not plan.registrations or not one_offset(plan.registrations):
        return end
    return replace(end, starts=device_addresses(plan.registrations, end.starts))


def table_of(runtime: Runtime, registrations: tuple[Registration, ...]) -> torch.Tensor | None:
    """For a kernel that has to look up every address; None where it has not."""
    if one_offset(registrations):
        return None
    return runtime.upload(np.array([(r.begin, r.end, r.alias) for r in registrations], np.uint64))


def registration_of(registrations: tuple[Registration, ...], addresses: np.ndarray) -> np.ndarray:
    """Number of the registration that holds each address."""
    begins = np.array([r.begin for r in registrations], np.uint64)
    return np.maximum(np.searchsorted(begins, addresses, side="right") - 1, 0)


def device_addresses(registrations: tuple[Registration, ...], addresses: np.ndarray) -> np.ndarray:
    """Host addresses as the device sees them."""
    if not registrations:
        return addresses
    offsets = np.array([r.alias - r.begin for r in registrations], np.int64).view(np.uint64)
    return addresses + offsets[registration_of(registrations, addresses)]


# ---------------------------------------------------------------------------------------------------------------------
# Index lists.


@dataclass(eq=False)
class Placed:
    """Index lists of a transfer in device memory, as addresses of page numbers.

    fault    int32 that the device sets to 1 when a list that it checks is wrong; None: all were checked on the host
    uploads  index tensors that were sent there
    """

    host: int
    device: int
    fault: torch.Tensor | None
    uploads: int
    unchecked: list[Unchecked]
    kept: list[torch.Tensor] = field(default_factory=list)

    @property
    def fault_address(self) -> int:
        return 0 if self.fault is None else self.fault.data_ptr()

    def verdict(self) -> None:
        """Raise what is wrong with a list that the device refused."""
        if self.fault is not None and int(self.fault.view(torch.int32)[0]):
            for pages in self.unchecked:
                pages.check()
            raise ValueError("an index list was refused by the device, and has been changed since: nothing was moved")


def place(runtime: Runtime, items: Items, sides: tuple[str, ...] = ("host", "device")) -> Placed:
    """Bring the lists of some sides to the device, once for all runs of a transfer on one stream."""
    key = sides, runtime.current()
    if key not in items.placed:
        items.placed[key] = _place(runtime, items, sides)
        return items.placed[key]
    return replace(items.placed[key], uploads=0)


def _place(runtime: Runtime, items: Items, sides: tuple[str, ...]) -> Placed:
    lists: dict[str, Pages] = {side: getattr(items, side) for side in sides}
    here = {side: pages for side, pages in lists.items() if isinstance(pages, np.ndarray)}
    placed = Placed(0, 0, None, len(here), items.unchecked)
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
    runtime.keep(pages.indices)
    arguments = np.zeros((), CHECK_INDICES)
    if pages.unique:
        placed.kept.append(runtime.upload(np.zeros(-(-pages.num_pages // 32), np.uint32)))
        arguments["claimed"] = placed.kept[-1].data_ptr()
    arguments["indices"], arguments["pages"] = pages.indices.data_ptr(), numbers.data_ptr()
    arguments["fault"], arguments["count"] = placed.fault.data_ptr(), pages.indices.numel()
    arguments["page_size"], arguments["num_pages"] = pages.page_size, pages.num_pages
    arguments["index_bytes"] = pages.indices.dtype.itemsize
    blocks = -(-pages.indices.numel() // THREADS_TO_CHECK)
    runtime.launch(runtime.current(), "check_indices", min(blocks, 32), arguments)
    return numbers.data_ptr()


# ---------------------------------------------------------------------------------------------------------------------
# Launches of copy_runs.


@dataclass(frozen=True)
class Shape:
    """How a kernel shares out its work.

    blocks  thread blocks
    lanes   threads that share a piece of a run
    piece   bytes that they copy before they take the next piece
    """

    blocks: int
    lanes: int
    piece: int


@dataclass(frozen=True)
class Copy:
    """`count` items between host memory (or what stands for it in a staging buffer) and a device pool.

    host, device  an end, and the address of its list of items (0: the first `count` ones)
    to_host       which way
    """

    host: tuple[End, int]
    device: tuple[End, int]
    loops: tuple[Loop, ...]
    run: int
    count: int
    to_host: bool = True

    def towards(self, direction: str) -> Copy:
        return replace(self, to_host=direction == "backup")

    @property
    def word(self) -> int:
        """The widest word that every address, stride and run is a multiple of."""
        fits = self.run
        for end, _ in (self.host, self.device):
            fits |= int(np.bitwise_or.reduce(end.starts)) | end.page | end.entry_bytes
        for loop in self.loops:
            fits |= loop.host | loop.device
        return next(word for word in WORDS if fits % word == 0)


def launch(
    runtime: Runtime,
    copy: Copy,
    shape: Shape,
    items_outermost: bool,
    fault: int = 0,
    if_fault: bool = False,
    registrations: torch.Tensor | None = None,
) -> int:
    """Copy on the caller's stream; returns the number of launches.

    items_outermost  page after page (where the host keeps one together), or layer after layer
    fault            address of what the check of index lists found; the copy runs if that is `if_fault`
    registrations    table for host addresses, if they need one
    """
    sides = {"to": copy.host, "source": copy.device} if copy.to_host else {"to": copy.device, "source": copy.host}
    arguments = np.zeros((), COPY_RUNS)
    loops = (Loop(1, 0, 0),) * (MAX_LOOPS - len(copy.loops)) + copy.loops
    for name, (end, items) in sides.items():
        side, is_host = arguments[name], end is copy.host[0]
        side["items"], side["page"], side["entries"], side["entry_bytes"] = (
            items,
            end.page,
            end.entries,
            end.entry_bytes,
        )
        side["steps"] = [loop.host if is_host else loop.device for loop in loops]
        if is_host and registrations is not None:
            side["registrations"], side["registration_count"] = registrations.data_ptr(), registrations.numel() // 24
    arguments["fault"], arguments["if_fault"] = fault, if_fault
    arguments["items"], arguments["counts"] = copy.count, [loop.count for loop in loops]
    arguments["run"], arguments["lanes"], arguments["items_outermost"] = copy.run, shape.lanes, items_outermost
    arguments["piece"] = max(shape.piece // copy.word, 1) * copy.word
    firsts = range(0, len(copy.host[0].starts), MAX_STARTS)
    for first in firsts:
        for name, (end, _) in sides.items():
            starts = end.starts[first : first + MAX_STARTS]
            arguments["starts"], arguments[name]["starts"][: len(starts)] = len(starts), starts
        runtime.launch(runtime.current(), f"copy_runs<{copy.word}>", shape.blocks, arguments)
    return len(firsts)


def completion(runtime: Runtime, stream: Stream, placed: Placed | None) -> Completion:
    """An event after everything submitted so far, and the verdict on lists that the device checked."""
    return Completion(runtime.record(stream), placed.verdict if placed and placed.fault is not None else None)
