"""Operations of a controller, the batches in which they are submitted, and their acknowledgements, as data."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

import torch

from refimpl.allocator import PageAllocator
from refimpl.pool_group import PoolTransfer
from refimpl.receipt import Receipt
from refimpl.runtime import Event
from refimpl.transfer import Transfer
from refimpl.windows import Window

Touched = dict[tuple[str, str], set[int] | None]  # pages by side and pool; None: only the device knows which
Places = dict[str, tuple[bool | None, bool | None]]

DESTINATION = {"backup": "host", "load": "device"}


class Dropped(RuntimeError):
    """What the acknowledgement of an operation says that was dropped before it was submitted."""


@dataclass(eq=False)
class Lock:
    """Slots that nobody gets meanwhile. It is set once and undone once, wherever an interrupt comes.

    Whether that came before or after the allocator had done it only the allocator knows: its first page tells.
    """

    allocator: PageAllocator
    slots: torch.Tensor
    held: bool = False

    def set(self) -> None:
        self._change(self.allocator.lock, True)

    def undo(self) -> None:
        if self.held:
            self._change(self.allocator.unlock, False)

    def _change(self, change: Callable[[torch.Tensor], None], held: bool) -> None:
        before = self._times()
        try:
            change(self.slots)
            self.held = held
        except BaseException:
            if self._times() != before:
                self.held = held
            raise

    def _times(self) -> int:
        pages = self.slots[:1].numpy() // self.allocator.page_size
        if not self.allocator.num_pages:
            return 0
        return int(self.allocator.locks.take(pages, mode="clip").sum())  # a page outside is for the allocator to refuse


@dataclass(eq=False)
class Operation:
    """What one call of `write` or `load` asked for; its lists are copies, so the caller may drop or change his.

    tag       comes back in the acknowledgement
    taken     slots that were allocated for it, by side and pool: they are freed if it fails
    number    of operations in the order in which they were queued
    touched   pages that it reads or writes
    places    by pool, whether its lists (host, device) lie on the device when they are used; None where there is none
    locks     on its slots, until it has ended
    ack       how it has ended, once that is told
    listed    passed when lists that lie on the device are as they were when the operation was queued
    """

    tag: Hashable
    direction: str
    transfers: tuple[PoolTransfer, ...]
    taken: list[tuple[str, str, torch.Tensor]]
    number: int
    touched: Touched = field(default_factory=dict)
    places: Places = field(default_factory=dict)
    listed: Event | None = None
    locks: list[Lock] = field(default_factory=list)
    ack: Ack | None = None

    def host_indices(self, name: str) -> torch.Tensor | None:
        return self.transfer(name).host_indices

    def device_indices(self, name: str) -> torch.Tensor | Window | None:
        return self.transfer(name).device_indices

    def transfer(self, name: str) -> PoolTransfer:
        """What one pool moves. `KeyError` for a pool that has no part in it."""
        for t in self.transfers:
            if t.name == name:
                return t
        names = [t.name for t in self.transfers]
        raise KeyError(f"pool {name!r} has no part in this {self.direction}, which moves {names}")


@dataclass(frozen=True)
class Ack:
    """An operation that has ended.

    tokens    index units moved, by pool; `bytes` likewise
    seconds   of the device, for all operations that were submitted together; where states are among them, from the
              first state on, which does not wait for earlier backups as the rest does
    error     why it failed (operations that were submitted together fail together, unless one was `Dropped` before);
              its destinations then hold nothing that can be relied on, its sources are untouched
    receipts  by pool of what was submitted together, one for each run (a load has one a layer): path, descriptors, …
    """

    tag: Hashable
    direction: str
    tokens: dict[str, int]
    bytes: dict[str, int]
    seconds: float
    error: BaseException | None = None
    receipts: dict[str, list[Receipt]] = field(default_factory=dict)


@dataclass(eq=False)
class Batch:
    """Operations that are submitted together, one transfer for each pool.

    producer   of a load: the number under which its layers are waited for
    sources    transfers the other way, under way when it was submitted, which were to bring what it reads; or may
               be, where the host does not know the slots: better a backup too few than one of what never came
    looked_up  slots of windows that are looked up when the copy runs
    verdicts   raise what only the device knew
    concluded  it is known how it has ended; `operations` are then those that are still to be told
    """

    direction: str
    operations: list[Operation] = field(default_factory=list)
    touched: Touched = field(default_factory=dict)
    written: Touched = field(default_factory=dict)
    producer: int | None = None
    sources: list[Batch] = field(default_factory=list)
    transfers: dict[str, Transfer] = field(default_factory=dict)
    receipts: dict[str, list[Receipt]] = field(default_factory=dict)
    looked_up: dict[Window, torch.Tensor] = field(default_factory=dict)
    verdicts: list[Callable[[], None]] = field(default_factory=list)
    kept: list[torch.Tensor | None] = field(default_factory=list)
    begun: Event | None = None
    finished: Event | None = None
    seconds: float = 0.0
    error: BaseException | None = None
    concluded: bool = False

    def add(self, operation: Operation) -> None:
        self.operations.append(operation)
        for place, pages in operation.touched.items():
            add_pages(self.touched, place, pages)
            if place[0] == DESTINATION[self.direction]:
                add_pages(self.written, place, pages)

    def attempt(self, call: Callable[[], object], even_so: bool = False) -> None:
        """Once something has failed, what was to follow is left out (but for what is to be done even so)."""
        if self.error is None or even_so:
            try:
                call()
            except Exception as failure:
                self.error = self.error or failure

    def judge(self, verdict: Callable[[], None]) -> None:
        """What only the device knew says more than a list that was refused for it."""
        try:
            if self.error is None or isinstance(self.error, ValueError):
                verdict()
        except ValueError as failure:
            self.error = failure

    def names(self) -> list[str]:
        return list(dict.fromkeys(t.name for operation in self.operations for t in operation.transfers))

    def transfers_of(self, name: str) -> list[PoolTransfer]:
        return [t for operation in self.operations for t in operation.transfers if t.name == name]


def opposite(direction: str) -> str:
    return "load" if direction == "backup" else "backup"


def overlap(mine: Touched, theirs: Touched) -> bool:
    """Whether some slot may be in both."""
    for place in mine.keys() & theirs.keys():
        a, b = mine[place], theirs[place]
        if a is None or b is None or not a.isdisjoint(b):
            return True
    return False


def add_pages(touched: Touched, place: tuple[str, str], pages: set[int] | None) -> None:
    before = touched.setdefault(place, set())
    if pages is None or before is None:
        touched[place] = None
    else:
        before |= pages


def count(t: PoolTransfer) -> int:
    return 0 if t.host_indices is None else t.host_indices.numel()
