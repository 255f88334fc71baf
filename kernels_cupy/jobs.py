"""From a plan to what is submitted: jobs, index lists in device memory, addresses as the device sees them."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import torch

from kernels_cupy.specs import CHECK_INDICES, COPY_RUNS, MAX_LOOPS, MAX_STARTS, SIDE, WORDS
from refimpl.indices import Items, Pages, Unchecked
from refimpl.plan import Loop, Move, Plan, Registration
from refimpl.runtime import Completion, Event, Runtime, Stream

THREADS_TO_CHECK = 8192  # indices of a list that one block checks


@dataclass(frozen=True)
class End:
    """One side of a job: where page 0 of each layer begins, and bytes to the next page and to the next entry."""

    starts: np.ndarray
    page: int
    entries: int = 1
    entry_bytes: int = 0

    def addresses(self, items: np.ndarray, offsets: np.ndarray) -> np.ndarray:
        """Of every run, `[layer, item, run in the item]`; `offsets` are those of runs from an item's start."""
        pages, entries = np.divmod(items, self.entries)
        places = (pages * self.page + entries * self.entry_bytes).astype(np.uint64)
        return self.starts[:, None, None] + places[:, None] + offsets


@dataclass(frozen=True)
class Job:
    """Moves of one shape, their layers in one list: K and V of all layers, say."""

    host: End
    device: End
    loops: tuple[Loop, ...]
    run: int

    @cached_property
    def offsets(self) -> tuple[np.ndarray, np.ndarray]:
        """Bytes from an item's start to each of its runs, host and device."""
        host = device = np.zeros(1, np.uint64)
        for loop in self.loops:
            steps = np.arange(loop.count, dtype=np.uint64)
            host = (host[:, None] + steps * np.uint64(loop.host)).reshape(-1)
            device = (device[:, None] + steps * np.uint64(loop.device)).reshape(-1)
        return host, device

    @cached_property
    def runs_per_item(self) -> int:
        return len(self.host.starts) * len(self.offsets[0])

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


def runs_and_bytes(plan: Plan, layers: tuple[int | None, ...], count: int) -> tuple[int, int]:
    """Runs of `count` items, and the bytes they come to."""
    per_item = [(job.runs_per_item, job.run) for job in jobs(plan, layers)]
    return count * sum(runs for runs, _ in per_item), count * sum(runs * run for runs, run in per_item)


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
    uploads  index tensors that were sent there, until a receipt has told so
    """

    host: int
    device: int
    fault: torch.Tensor | None
    uploads: int
    unchecked: list[Unchecked]
    kept: list[torch.Tensor] = field(default_factory=list)

    def tell_uploads(self) -> int:
        told, self.uploads = self.uploads, 0
        return told

    @property
    def fault_address(self) -> int:
        return 0 if self.fault is None else self.fault.data_ptr()

    def verdict(self) -> None:
        """Raise what is wrong with a list that the device refused."""
        if self.fault is not None and int(self.fault.view(torch.int32)[0]):
            for pages in self.unchecked:
                pages.check()
            raise ValueError("an index list was refused by the device, and has been changed since: nothing was moved")


def place(runtime: Runtime, stream: Stream, items: Items, sides: tuple[str, ...]) -> Placed:
    """Bring the lists of some sides to the device, once for all runs of a transfer on the caller's stream."""
    key: Hashable = sides, stream
    if key not in items.placed:
        items.placed[key] = _place(runtime, items, sides)
    return items.placed[key]


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
    runtime.keep(pages.indices)
    return numbers.data_ptr()


# ---------------------------------------------------------------------------------------------------------------------
# Launches of copy_runs.


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
        # As plain words: NumPy takes a hundred times as long to copy and to fill a nested struct.
        words = self.arguments.reshape(1).view(np.uint64).copy()
        to, source = (host_items, device_items) if self.host_side == "to" else (device_items, host_items)
        words[TO_ITEMS], words[SOURCE_ITEMS], words[ITEMS], words[FAULT] = to, source, count, fault
        arguments = words.view(COPY_RUNS).reshape(())
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


class Pending:
    """The last event of every stream that was given work: what a pool must wait for before it lets go of its memory."""

    def __init__(self) -> None:
        self._events: dict[Stream, Event] = {}
        self._lock = threading.Lock()

    def add(self, stream: Stream, event: Event) -> None:
        with self._lock:
            self._events = {s: e for s, e in self._events.items() if not e.query()} | {stream: event}

    def wait(self) -> None:
        with self._lock:
            events, self._events = self._events, {}
        for event in events.values():
            event.synchronize()


def completion(runtime: Runtime, stream: Stream, placed: Placed) -> Completion:
    """An event after all that a stream was given so far, and the verdict on lists that the device checks."""
    return Completion(runtime.record(stream), None if placed.fault is None else placed.verdict)
