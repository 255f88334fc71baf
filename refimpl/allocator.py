"""Slots of a pool and bytes of a stack: who owns what, and what is left."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Iterator
from operator import index
from pathlib import Path

import numpy as np
import psutil
import torch

from refimpl.geometry import is_int, require_whole
from refimpl.indices import check, slots_of


class PageAllocator:
    """Hands out whole pages of token slots, first freed first reused.

    Semantics of upstream's host pools (`srt/mem_cache/pool_host/base.py`): `alloc` returns an int64 CPU tensor or None
    when the pool is full, `free` returns the number of slots it took back. Unlike upstream, every pool refuses double
    frees, foreign slots and partial pages, and slots that a transfer reads or writes can be locked: they may be freed,
    but nobody gets them before the last lock is gone. Whoever was handed slots may hand them on, once, to somebody who
    keeps them until they are freed (a tree of prefixes). Safe to call from several threads.

    reserved  pages, from page 0 on, that are never handed out (engines keep one as padding on the device)
    """

    def __init__(self, num_pages: int, page_size: int, reserved: int = 0) -> None:
        require_whole("num_pages", num_pages)
        require_whole("page_size", page_size, least=1)
        require_whole("reserved", reserved)
        self.num_pages, self.page_size, self.reserved = num_pages, page_size, min(reserved, num_pages)
        self._lock = threading.RLock()
        self._locks = np.zeros(num_pages, np.int64)
        self.clear()

    def clear(self) -> None:
        """Take every page back; those that are locked follow when they no longer are."""
        with self._lock:
            # A ring of page numbers: freed pages queue up behind the free ones, and no tensor handed out shares it.
            self._ring = np.zeros(self.num_pages, np.int64)
            self._head, self._count = 0, 0
            self._used, self._kept = np.zeros(self.num_pages, bool), np.zeros(self.num_pages, bool)
            self._leaving = self._locks > 0
            self._leaving[: self.reserved] = False
            free = np.flatnonzero(~self._leaving[self.reserved :]) + self.reserved
            self._ring[: len(free)], self._count = free, len(free)

    @property
    def size(self) -> int:
        """Slots in the pool, used or not."""
        return self.num_pages * self.page_size

    def available_size(self) -> int:
        return self._count * self.page_size

    def alloc(self, need: int) -> torch.Tensor | None:
        """`need` slots as whole pages; None when that many are not free.

        `ValueError` for part of a page, `TypeError` for what is no whole number.
        """
        need = index(need)
        if need < 0 or need % self.page_size:
            raise ValueError(f"cannot allocate {need} slots: pages hold {self.page_size}, ask for a multiple of it")
        count = need // self.page_size
        with self._lock:
            if count > self._count:
                return None
            pages = self._ring[(self._head + np.arange(count)) % max(self.num_pages, 1)]
            self._head, self._count = (self._head + count) % max(self.num_pages, 1), self._count - count
            self._used[pages] = True
        return slots_of(pages, self.page_size)

    def free(self, indices: torch.Tensor) -> int:
        """Take slots back. `ValueError`, with nothing freed, for slots that are not allocated."""
        pages = check(indices, self.page_size, self.num_pages, "freed", unique=True)
        with self._lock:
            self._require_used(pages)
            locked = self._locks[pages] > 0
            leaving, gone = pages[locked], pages[~locked]
            places, count = self._behind(gone)
            # Nothing is called from here on: an interrupt finds all of it done, or nothing.
            self._used[pages] = self._kept[pages] = False
            self._leaving[leaving] = True
            self._ring[places], self._count = gone, count
        return len(pages) * self.page_size

    def free_rest(self, indices: torch.Tensor) -> int:
        """Take back those pages of a list that are still allocated. Returns how many slots that are."""
        pages = check(indices, self.page_size, self.num_pages, "freed", unique=True)
        with self._lock:
            return self.free(slots_of(pages[self._used[pages]], self.page_size))

    def require_allocated(self, indices: torch.Tensor) -> None:
        """`ValueError` for a slot that is not allocated. Parts of pages will do."""
        pages = indices.cpu().numpy().astype(np.int64) // self.page_size
        outside = pages[(pages < 0) | (pages >= self.num_pages)]
        if len(outside):
            raise ValueError(f"page {outside[0]} is outside the pool's {self.num_pages} pages")
        with self._lock:
            self._require_used(pages)

    def keep(self, indices: torch.Tensor) -> None:
        """From now on these slots are somebody's who keeps them, until they are freed.

        `ValueError`, and nothing changes, for slots that are not allocated or kept already.
        """
        pages = check(indices, self.page_size, self.num_pages, "kept", unique=True)
        with self._lock:
            self._require_used(pages)
            twice = pages[self._kept[pages]]
            if len(twice):
                raise ValueError(f"slot {twice[0] * self.page_size} is kept already, until it is freed")
            self._kept[pages] = True

    def lock(self, indices: torch.Tensor) -> None:
        """Nobody gets these slots before `unlock`, whoever frees them meanwhile. Locks are counted.

        `ValueError`, with nothing locked, for slots that are not allocated.
        """
        pages = check(indices, self.page_size, self.num_pages, "locked", unique=False)
        with self._lock:
            self._require_used(pages)
            np.add.at(self._locks, pages, 1)

    def unlock(self, indices: torch.Tensor) -> None:
        """Undo one `lock`. `ValueError`, with nothing unlocked, for slots that are not locked so often."""
        pages = check(indices, self.page_size, self.num_pages, "unlocked", unique=False)
        with self._lock:
            distinct, times = np.unique(pages, return_counts=True)
            short = distinct[self._locks[distinct] < times]
            if len(short):
                raise ValueError(f"slot {short[0] * self.page_size} is not locked so often")
            left = self._locks[distinct] - times
            gone = distinct[self._leaving[distinct] & (left == 0)]
            places, count = self._behind(gone)
            # As in `free`: nothing is called from here on.
            self._locks[distinct] = left
            self._leaving[gone] = False
            self._ring[places], self._count = gone, count

    # ---- what is known of each page, `[num_pages]`, to be read only

    @property
    def used(self) -> np.ndarray:
        """Whether it was handed out and not freed since."""
        return _read_only(self._used)

    @property
    def kept(self) -> np.ndarray:
        """Whether somebody keeps it."""
        return _read_only(self._kept)

    @property
    def locks(self) -> np.ndarray:
        """How often it is locked."""
        return _read_only(self._locks)

    @property
    def leaving(self) -> np.ndarray:
        """Whether it was freed while it was locked: it is free when the last lock is gone."""
        return _read_only(self._leaving)

    def _require_used(self, pages: np.ndarray) -> None:
        idle = pages[~self._used[pages]]
        if len(idle):
            raise ValueError(f"slot {idle[0] * self.page_size} is not allocated: freed twice, or never handed out")

    def _behind(self, pages: np.ndarray) -> tuple[np.ndarray, int]:
        """Where in the ring pages come that are free again, and how many there are then."""
        places = (self._head + self._count + np.arange(len(pages))) % max(self.num_pages, 1)
        return places, self._count + len(pages)


def _read_only(array: np.ndarray) -> np.ndarray:
    """The array itself: it shows what becomes of the pages, until the pool is cleared."""
    view = array.view()
    view.flags.writeable = False
    return view


class Booking:
    """`nbytes` of a budget, until they are given back."""

    def __init__(self, owner: str, nbytes: int, returned: deque[Booking]) -> None:
        self.owner, self.nbytes, self.given_back = owner, nbytes, False
        self._returned = returned

    def give_back(self) -> None:
        """Calling it again does nothing."""
        self.given_back = True
        self._returned.append(self)


class Budget:
    """Bytes that all pools of a stack share, booked as they are taken so that two pools cannot both have the last.

    Safe to call from several threads. What is given back goes into a queue, without a lock: a pool that is forgotten
    gives its bytes back whenever the garbage collector runs, and that may be while this thread is booking.
    """

    def __init__(self, total: int) -> None:
        if not is_int(total) or total < 0:
            raise ValueError(f"a budget is a whole number of bytes, got {total!r}")
        self.total = total
        self._lock = threading.RLock()
        self._booked: set[Booking] = set()
        self._returned: deque[Booking] = deque()

    @classmethod
    def of_this_machine(
        cls, ranks: int = 1, reserve: int = 10 * 2**30, cgroups: Path = Path("/sys/fs/cgroup")
    ) -> Budget:
        """One rank's share of the memory that is available now, less a reserve for everything else (as upstream).

        What the machine has and what the limits of its control groups (a container's, say) leave: the less counts.
        """
        if not is_int(ranks) or ranks < 1:
            raise ValueError(f"memory is shared by one rank or more, got {ranks!r}")
        available = min([psutil.virtual_memory().available, *_headrooms(cgroups)])
        return cls(max(available - reserve, 0) // ranks)

    @property
    def available(self) -> int:
        with self._lock:
            while self._returned:
                self._booked.discard(self._returned.popleft())
            return self.total - sum(booking.nbytes for booking in self._booked)

    def book(self, owner: str, nbytes: int) -> Booking:
        """Take bytes for `owner`, or raise `MemoryError` and take nothing."""
        if not is_int(nbytes) or nbytes < 0:
            raise ValueError(f"a whole number of bytes is booked, got {nbytes!r}")
        with self._lock:
            if nbytes > self.available:
                booked: Counter[str] = Counter()
                for booking in self._booked:
                    booked[booking.owner] += booking.nbytes
                raise MemoryError(
                    f"{owner} needs {nbytes:,} bytes, {self.available:,} of the budget of {self.total:,} are left "
                    f"(booked: {dict(+booked) or 'nothing'})"
                )
            taken = Booking(owner, nbytes, self._returned)
            self._booked.add(taken)
            return taken


def require_budget(budget: Budget, owner: str) -> None:
    """`TypeError` for a number, say."""
    if not isinstance(budget, Budget):
        raise TypeError(f"{owner}: a budget is a Budget, which pools share, got {budget!r:.80}")


def _headrooms(cgroups: Path) -> Iterator[int]:
    """Bytes that each limit on this process leaves: of its control group and of all groups around it, v2 and v1."""
    own = Path("/proc/self/cgroup")
    groups = [line.split(":", 2) for line in own.read_text().splitlines()] if own.exists() else []
    for root, controller, limit, usage in (
        (cgroups, "", "memory.max", "memory.current"),
        (cgroups / "memory", "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        paths = [path for _, controllers, path in groups if controller in controllers.split(",")]
        # In a container the path may be the host's, and then nothing lies there: the root is the container's own group.
        folders = {root} | {root / part for path in paths for part in (Path(path[1:]), *Path(path[1:]).parents)}
        for folder in folders:
            try:
                limited, used = (folder / limit).read_text().strip(), (folder / usage).read_text()
            except OSError:
                continue
            if limited != "max":
                yield int(limited) - int(used)
