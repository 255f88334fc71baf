"""Slots, bytes and groups of pools: nothing is handed out twice, nothing is lost, also when something fails midway."""

from __future__ import annotations

import gc
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from refimpl import (
    Budget,
    HostMemory,
    HostPool,
    HostPoolGroup,
    LogicalPool,
    PageAllocator,
    PoolSpec,
    PoolTransfer,
    presets,
)
from verify import properties  # noqa: F401 - chooses how hard to try

BYTE = torch.uint8


def slots(pages: list[int], page_size: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.tensor([page * page_size + token for page in pages for token in range(page_size)], dtype=dtype)


class Allocator(RuleBasedStateMachine):
    """The allocator next to the plainest model of it: a queue of free pages, a set of used ones, and counted locks.

    leaving  pages that were freed while they were locked
    kept     pages that somebody keeps
    """

    @initialize(pages=st.integers(0, 6), page_size=st.integers(1, 4), reserved=st.sampled_from([0, 0, 1, 2]))
    def start(self, pages: int, page_size: int, reserved: int) -> None:
        self.pages, self.page_size = pages, page_size
        self.real = PageAllocator(pages, page_size, reserved)
        self.reserved = set(range(min(reserved, pages)))
        self.free = [page for page in range(pages) if page not in self.reserved]
        self.used: set[int] = set()
        self.locks: Counter[int] = Counter()
        self.leaving: set[int] = set()
        self.kept: set[int] = set()

    @property
    def idle(self) -> list[int]:
        """Pages that nobody has."""
        return sorted({*self.free, *self.leaving, *self.reserved})

    @rule(count=st.integers(0, 7))
    def alloc(self, count: int) -> None:
        got = self.real.alloc(count * self.page_size)
        if count > len(self.free):
            assert got is None, f"{count} pages were handed out, {len(self.free)} were free"
            return
        pages, self.free = self.free[:count], self.free[count:]
        self.used |= set(pages)
        assert got is not None, f"{count} pages were refused, {count + len(self.free)} were free"
        assert got.dtype == torch.int64
        assert got.tolist() == slots(pages, self.page_size).tolist(), "first freed must be first reused"

    @precondition(lambda self: self.page_size > 1)
    @rule(count=st.integers(0, 7), data=st.data())
    def alloc_part_of_a_page(self, count: int, data: st.DataObject) -> None:
        need = count * self.page_size + data.draw(st.integers(1, self.page_size - 1))
        with pytest.raises(ValueError, match=f"cannot allocate {need} slots: pages hold {self.page_size}"):
            self.real.alloc(need)

    @rule(need=st.integers(-9, -1))
    def alloc_less_than_nothing(self, need: int) -> None:
        with pytest.raises(ValueError, match=f"cannot allocate {need} slots"):
            self.real.alloc(need)

    @rule(data=st.data(), dtype=st.sampled_from([torch.int64, torch.int32]))
    def free_some(self, data: st.DataObject, dtype: torch.dtype) -> None:
        """Any used pages in any order, whoever got them."""
        pages = self._pages(data, self.used, at_least=min(1, len(self.used)))
        assert self.real.free(slots(pages, self.page_size, dtype)) == len(pages) * self.page_size
        self._left(pages)

    @precondition(lambda self: self.pages)
    @rule(data=st.data())
    def free_what_is_left_of_some(self, data: st.DataObject) -> None:
        pages = self._pages(data, set(range(self.pages)))
        left = [page for page in pages if page in self.used]
        assert self.real.free_rest(slots(pages, self.page_size)) == len(left) * self.page_size
        self._left(left)

    @precondition(lambda self: self.idle)
    @rule(data=st.data(), call=st.sampled_from(["free", "lock", "keep"]))
    def free_lock_or_keep_what_nobody_has(self, data: st.DataObject, call: str) -> None:
        """One such page among used ones spoils the call: none of them is freed, locked or kept."""
        pages = self._pages(data, self.used)
        idle = data.draw(st.sampled_from(self.idle))
        pages.insert(data.draw(st.integers(0, len(pages))), idle)
        with pytest.raises(ValueError, match=f"slot {idle * self.page_size} is not allocated"):
            getattr(self.real, call)(slots(pages, self.page_size))

    @rule(data=st.data())
    def keep_some(self, data: st.DataObject) -> None:
        pages = self._pages(data, self.used - self.kept, at_least=min(1, len(self.used - self.kept)))
        self.real.keep(slots(pages, self.page_size))
        self.kept |= set(pages)

    @precondition(lambda self: self.kept)
    @rule(data=st.data())
    def keep_what_is_kept(self, data: st.DataObject) -> None:
        """One such page spoils the call, until it is freed."""
        pages = self._pages(data, self.used - self.kept)
        kept = data.draw(st.sampled_from(sorted(self.kept)))
        pages.insert(data.draw(st.integers(0, len(pages))), kept)
        with pytest.raises(ValueError, match=f"slot {kept * self.page_size} is kept already"):
            self.real.keep(slots(pages, self.page_size))

    @rule(data=st.data())
    def lock_some(self, data: st.DataObject) -> None:
        """Any used pages, some of them perhaps several times."""
        pages = data.draw(st.lists(st.sampled_from(sorted(self.used)), max_size=8)) if self.used else []
        self.real.lock(slots(pages, self.page_size))
        self.locks.update(pages)

    @rule(data=st.data())
    def unlock_some(self, data: st.DataObject) -> None:
        locked = sorted(self.locks.elements())
        pages = data.draw(st.permutations(locked))[: data.draw(st.integers(0, len(locked)))]
        self.real.unlock(slots(pages, self.page_size))
        self.locks -= Counter(pages)
        back = sorted(page for page in self.leaving if not self.locks[page])
        self.leaving -= set(back)
        self.free += back

    @precondition(lambda self: self.pages)
    @rule(data=st.data())
    def unlock_too_often(self, data: st.DataObject) -> None:
        """One page too often among others spoils the call: none of them is unlocked."""
        page = data.draw(st.integers(0, self.pages - 1))
        others = [other for other in self._pages(data, set(self.locks.elements())) if other != page]
        pages = data.draw(st.permutations([*others, *[page] * (self.locks[page] + 1)]))
        with pytest.raises(ValueError, match=f"slot {page * self.page_size} is not locked so often"):
            self.real.unlock(slots(pages, self.page_size))

    @precondition(lambda self: self.used)
    @rule(data=st.data())
    def free_a_page_twice_in_one_call(self, data: st.DataObject) -> None:
        pages = self._pages(data, self.used, at_least=1)
        with pytest.raises(ValueError, match=f"freed index {pages[0] * self.page_size} is named twice"):
            self.real.free(slots([*pages, pages[0]], self.page_size))

    @rule(data=st.data(), foreign=st.integers(-3, 9))
    def free_a_page_of_another_pool(self, data: st.DataObject, foreign: int) -> None:
        foreign += self.pages * (foreign >= 0)
        pages = self._pages(data, self.used)
        pages.insert(data.draw(st.integers(0, len(pages))), foreign)
        with pytest.raises(ValueError, match=f"index {foreign * self.page_size} is outside"):
            self.real.free(slots(pages, self.page_size))

    @precondition(lambda self: self.page_size > 1 and self.used)
    @rule(data=st.data())
    def free_part_of_a_page(self, data: st.DataObject) -> None:
        whole = slots(self._pages(data, self.used, at_least=1), self.page_size)
        cut = data.draw(st.integers(1, self.page_size - 1))
        for part in (whole[:-cut], whole[cut:]):
            with pytest.raises(ValueError, match=f"must name whole pages of {self.page_size}, got {len(part)} indices"):
                self.real.free(part)

    @precondition(lambda self: self.page_size > 1 and self.used)
    @rule(data=st.data())
    def free_a_page_out_of_order(self, data: st.DataObject) -> None:
        whole = slots(self._pages(data, self.used, at_least=1), self.page_size)
        with pytest.raises(ValueError, match=r"no multiple of|must be consecutive"):
            self.real.free(whole.roll(1) if len(whole) > self.page_size else whole.flip(0))

    @rule()
    def clear(self) -> None:
        """Pages that are locked come back with their last lock."""
        self.real.clear()
        self.used, self.kept, self.leaving = set(), set(), set(self.locks.elements())
        self.free = [page for page in range(self.pages) if page not in self.leaving | self.reserved]

    @invariant()
    def counts_agree(self) -> None:
        if hasattr(self, "real"):
            assert self.real.available_size() == len(self.free) * self.page_size
            assert self.real.size == self.pages * self.page_size

    @invariant()
    def pages_are_told_one_by_one(self) -> None:
        if hasattr(self, "real"):
            real, every = self.real, range(self.pages)
            for told, pages in ((real.used, self.used), (real.kept, self.kept), (real.leaving, self.leaving)):
                assert told.tolist() == [page in pages for page in every]
            assert real.locks.tolist() == [self.locks[page] for page in every]

    def teardown(self) -> None:
        """What is left comes out in the order it went in."""
        if hasattr(self, "real"):
            rest = self.real.alloc(self.real.available_size())
            assert rest is not None
            assert rest.tolist() == slots(self.free, self.page_size).tolist()

    def _left(self, pages: list[int]) -> None:
        self.used -= set(pages)
        self.kept -= set(pages)
        self.leaving |= {page for page in pages if self.locks[page]}
        self.free += [page for page in pages if not self.locks[page]]

    def _pages(self, data: st.DataObject, among: set[int], at_least: int = 0) -> list[int]:
        if not among:
            return []
        return data.draw(st.lists(st.sampled_from(sorted(among)), unique=True, min_size=at_least))


TestAllocatorAgainstItsModel = Allocator.TestCase


@pytest.mark.parametrize("what", ["used", "kept", "locks", "leaving"])
def test_what_is_told_of_pages_cannot_be_changed(what: str) -> None:
    with pytest.raises(ValueError, match="read-only"):
        getattr(PageAllocator(4, 2), what)[0] = True


def test_first_freed_is_first_reused() -> None:
    """A freed page queues up behind those that are free already, in the order in which pages are freed."""
    pool = PageAllocator(5, 1)
    pool.alloc(3)
    pool.free(torch.tensor([2, 0]))
    rest = pool.alloc(4)
    assert rest is not None
    assert rest.tolist() == [3, 4, 2, 0]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ((4, 0), r"page_size must be a whole number \(int\) from 1 on, got 0"),
        ((4, 2.0), r"page_size must be a whole number \(int\) from 1 on, got 2.0"),
        ((-1, 2), r"num_pages must be a whole number \(int\) from 0 on, got -1"),
        (("4", 2), r"num_pages must be a whole number \(int\) from 0 on, got '4'"),
        ((4, 2, -1), r"reserved must be a whole number \(int\) from 0 on, got -1"),
    ],
)
def test_pages_are_counted_in_whole_numbers(arguments: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        PageAllocator(*arguments)


@pytest.mark.parametrize(("call", "side"), [("free", "freed"), ("free_rest", "freed"), ("keep", "kept")])
def test_slots_that_are_named_twice_are_called_so(call: str, side: str) -> None:
    pool = PageAllocator(4, 2)
    mine = pool.alloc(4)
    assert mine is not None
    with pytest.raises(ValueError, match=f"^{side} index 0 is named twice$"):
        getattr(pool, call)(torch.cat([mine, mine]))
    assert pool.used.tolist() == [True, True, False, False]


def test_slots_are_kept_once_until_they_are_freed() -> None:
    pool = PageAllocator(4, 2)
    mine = pool.alloc(4)
    assert mine is not None
    pool.keep(mine[:2])
    with pytest.raises(ValueError, match="slot 0 is kept already, until it is freed"):
        pool.keep(mine)
    assert pool.kept.tolist() == [True, False, False, False], "a call that is refused keeps nothing"
    pool.free(mine)
    assert not pool.kept.any()
    again = pool.alloc(8)
    assert again is not None
    pool.keep(again)
    pool.clear()
    assert not pool.kept.any()


def test_locked_slots_are_nobodys_before_the_last_lock_is_gone() -> None:
    """Page 0 is reserved. Pages 1 and 2 are freed while they are locked, 1 twice over."""
    pool = PageAllocator(4, 2, reserved=1)
    mine, other = pool.alloc(4), pool.alloc(2)
    assert mine is not None
    assert other is not None
    assert (mine.tolist(), other.tolist()) == ([2, 3, 4, 5], [6, 7])
    pool.lock(torch.cat([mine, mine[:2]]))
    assert pool.free(mine) == 4
    assert pool.free_rest(torch.cat([mine, other])) == 2
    assert pool.alloc(4) is None
    pool.unlock(mine)
    assert pool.available_size() == 4, "of page 1 one lock is left"
    again = pool.alloc(4)
    assert again is not None
    pool.lock(again)
    pool.unlock(again)
    assert pool.available_size() == 0, "they are somebody's"
    pool.lock(again)
    pool.clear()
    assert pool.available_size() == 0
    for wrong in (torch.tensor([2, 3, 2, 3, 2, 3]), torch.tensor([4, 5, 4, 5])):
        with pytest.raises(ValueError, match="is not locked so often"):
            pool.unlock(wrong)
    with pytest.raises(ValueError, match="slot 4 is not allocated"):
        pool.lock(torch.tensor([4, 5]))
    pool.unlock(torch.tensor([6, 7, 4, 5]))
    assert pool.available_size() == 4
    pool.unlock(torch.tensor([2, 3]))
    everything = pool.alloc(6)
    assert everything is not None
    assert everything.tolist() == [4, 5, 6, 7, 2, 3]


POOLS: dict[str, Callable[[], HostPool]] = {
    "mha": lambda: HostPool(presets.mha(1, 1, 2, BYTE, 4), "page_first", 3),
    "mla": lambda: HostPool(presets.mla(1, 2, BYTE, 4), "layer_first", 3),
    "states": lambda: HostPool(presets.mamba(1, [(2, 1)], BYTE), "page_first", 3),
    "window pages": lambda: HostPool(presets.v4_paged("swa", 1, 8, 4), "page_first_direct", 3),
    "logical anchor": lambda: LogicalPool(3, 4),
}


@pytest.mark.parametrize("kind", POOLS)
def test_every_pool_refuses_double_frees_foreign_slots_and_parts_of_pages(kind: str) -> None:
    pool = POOLS[kind]()
    mine = pool.alloc(2 * pool.page_size)
    assert mine is not None
    foreign = slots([3], pool.page_size)
    refused = {"outside the pool": foreign, "is not allocated": slots([2], pool.page_size)}
    if pool.page_size > 1:
        refused["whole pages"] = mine[:-1]
    for reason, indices in refused.items():
        with pytest.raises(ValueError, match=reason):
            pool.free(indices)
        assert pool.available_size() == pool.page_size
    assert pool.free(mine) == 2 * pool.page_size
    with pytest.raises(ValueError, match="is not allocated"):
        pool.free(mine)
    pool.clear()
    assert pool.available_size() == pool.size == 3 * pool.page_size


# ---- threads


def give_way(frame: FrameType, event: str, arg: object) -> Any:
    """A trace function that lets another thread go on at every line of the allocator."""
    if Path(frame.f_code.co_filename).name != "allocator.py":
        return None
    time.sleep(0)
    return give_way


def run_together(work: Callable[[int], None], threads: int = 4) -> None:
    """`work(i)` in as many threads, all starting at once; raises what any of them raised."""
    failures: list[BaseException] = []
    gate = threading.Barrier(threads)

    def guarded(i: int) -> None:
        try:
            gate.wait()
            sys.settrace(give_way)
            work(i)
        except BaseException as failure:
            failures.append(failure)

    running = [threading.Thread(target=guarded, args=(i,), daemon=True) for i in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join(timeout=60)
    assert not any(thread.is_alive() for thread in running), "a thread hangs"
    if failures:
        raise failures[0]


def test_no_slot_is_handed_to_two_threads() -> None:
    pages, page_size = 24, 2
    allocator = PageAllocator(pages, page_size)
    owner = np.full(pages, -1)

    def work(me: int) -> None:
        sizes = np.random.default_rng(me)
        for _ in range(100):
            got = allocator.alloc(int(sizes.integers(0, 9)) * page_size)
            if got is None:
                continue
            mine = got.numpy()[::page_size] // page_size
            assert (owner[mine] == -1).all(), f"pages {mine[owner[mine] != -1]} have two owners"
            owner[mine] = me
            owner[mine] = -1
            assert allocator.free(got) == len(got)

    run_together(work)
    assert allocator.available_size() == allocator.size
    everything = allocator.alloc(allocator.size)
    assert everything is not None
    assert sorted(everything.tolist()) == list(range(allocator.size))


# ---- the budget


class Recording(HostMemory):
    """Remembers what was asked of it; fails from the given request on."""

    def __init__(self, fails_at: int | None = None) -> None:
        super().__init__()
        self.taken: list[int] = []
        self.fails_at = fails_at

    def map(self, nbytes: int) -> torch.Tensor:
        if len(self.taken) == self.fails_at:
            raise OSError("no memory left")
        self.taken.append(nbytes)
        return super().map(nbytes)


SPEC = presets.mla(2, 8, BYTE, 4)  # 64 bytes a page
UNEVEN = presets.mha(1, 1, 8, BYTE, 4, v_head_dim=4)  # two buffers


def test_pools_of_one_budget_cannot_have_the_same_bytes() -> None:
    budget, memory = Budget(200), Recording()
    first = HostPool(SPEC, "page_first", 2, budget=budget, memory=memory)
    assert budget.available == 72
    with pytest.raises(
        MemoryError, match=r"kv needs 128 bytes, 72 of the budget of 200 are left \(booked: {'kv': 128}\)"
    ):
        HostPool(SPEC, "page_first", 2, budget=budget, memory=memory)
    assert memory.taken == [128], "memory was taken without a booking"
    assert budget.available == 72
    first.close()
    assert budget.available == 200
    first.close()
    assert budget.available == 200, "closed twice, released twice"


def test_the_last_byte_can_be_had() -> None:
    budget = Budget(128)
    with HostPool(SPEC, "page_first", 2, budget=budget):
        assert budget.available == 0
    assert budget.available == 128


def test_a_budget_is_released_when_memory_cannot_be_had() -> None:
    """Even while the error is still being handled: the handler may try a smaller pool."""
    budget, memory = Budget(1000), Recording(fails_at=1)
    with pytest.raises(OSError, match="no memory left") as failure:
        HostPool(UNEVEN, "page_first", 2, budget=budget, memory=memory)
    assert len(memory.taken) == 1, "the second buffer was to fail"
    assert budget.available == 1000
    assert failure.value.__traceback__ is not None


def test_a_refused_pool_books_nothing() -> None:
    budget = Budget(1000)
    with pytest.raises(ValueError, match="page_head"):
        HostPool(SPEC, "page_head", 2, budget=budget)
    with pytest.raises(ValueError, match=r"num_pages must be a whole number \(int\) from 0 on, got -1"):
        HostPool(SPEC, "page_first", -1, budget=budget)
    assert budget.available == 1000


def test_a_forgotten_pool_releases_its_bytes() -> None:
    budget = Budget(1000)
    pool = HostPool(SPEC, "page_first", 2, budget=budget)
    pool.itself = pool  # type: ignore[attr-defined] - a cycle, so that only the collector finds it
    assert budget.available == 1000 - 128
    gone = weakref.ref(pool)
    del pool
    assert gone() is not None
    gc.collect()
    assert gone() is None
    assert budget.available == 1000


def test_pools_without_bytes_come_and_go() -> None:
    budget = Budget(100)
    pools = [HostPool(presets.mla(0, 8, BYTE, 4), "page_first", 2, budget=budget) for _ in range(2)]
    pools.append(HostPool(SPEC, "page_first", 1, budget=budget))
    for pool in pools[::-1]:
        pool.close()
    assert budget.available == 100


@pytest.mark.parametrize("nbytes", [-1, 0.5, True, None])
def test_what_is_no_number_of_bytes_is_not_booked(nbytes: Any) -> None:
    budget = Budget(100)
    with pytest.raises(ValueError, match=f"a whole number of bytes is booked, got {nbytes}"):
        budget.book("kv", nbytes)
    assert budget.available == 100


def test_a_booking_is_given_back_once_whoever_says_so_again() -> None:
    budget = Budget(100)
    keys, index = budget.book("kv", 30), budget.book("indexer", 70)
    with pytest.raises(MemoryError, match=r"kv needs 1 bytes, 0 .* \(booked: \{'(kv|indexer)': .*(kv|indexer)': "):
        budget.book("kv", 1)
    for _ in range(2):
        keys.give_back()
        assert budget.available == 30
    index.give_back()
    assert budget.available == 100


def test_threads_never_book_more_than_there_is() -> None:
    budget = Budget(1000)
    booked: list[int] = []

    def work(me: int) -> None:
        for _ in range(60):
            try:
                budget.book(f"thread {me}", 7)
            except MemoryError:
                continue
            booked.append(7)

    run_together(work)
    assert sum(booked) == 994, "142 times 7 bytes fit"
    assert budget.available == 6


def test_threads_that_book_and_give_back_leave_everything() -> None:
    budget = Budget(10)

    def work(me: int) -> None:
        for _ in range(60):
            try:
                booking = budget.book("shared name", 7)
            except MemoryError:
                continue
            assert budget.available == 3, "only one of them can have 7"
            booking.give_back()
            assert budget.available in (3, 10)

    run_together(work)
    assert budget.available == 10


def test_bytes_may_be_given_back_at_any_moment_while_the_same_thread_books() -> None:
    """The garbage collector can run between any two instructions, and a forgotten pool then gives back its bytes."""

    def booked_with_a_release_at(instruction: int) -> tuple[Budget, bool]:
        budget, seen = Budget(10_000), 0
        booking = budget.book("kv", 10)

        def collector(frame: FrameType, event: str, arg: object) -> Any:
            nonlocal seen
            if Path(frame.f_code.co_filename).name != "allocator.py":
                return None
            frame.f_trace_opcodes = True
            seen += event == "opcode"
            if event == "opcode" and seen == instruction:
                booking.give_back()
            return collector

        sys._getframe().f_trace_opcodes = True  # Python 3.12 traces opcodes only if some frame wants it beforehand
        sys.settrace(collector)
        budget.book("kv", 7)
        sys.settrace(None)
        return budget, seen >= instruction

    instruction, released = 1, True
    while released:
        budget, released = booked_with_a_release_at(instruction)
        assert budget.available == 10_000 - 10 - 7 + 10 * released, f"released before instruction {instruction}"
        instruction += 1
    assert instruction > 20


def test_a_budget_of_this_machine_is_shared_by_its_ranks_and_leaves_a_reserve() -> None:
    one, two = Budget.of_this_machine(reserve=0).total, Budget.of_this_machine(ranks=2, reserve=0).total
    assert abs(one - 2 * two) < one / 4, "two ranks get half each (other programs come and go meanwhile)"
    assert Budget.of_this_machine(reserve=2**62).total == 0


# ---- groups


def pool(name: str, pages: int = 4, rides_on: str | None = None, page_size: int = 4) -> HostPool:
    return HostPool(PoolSpec(name, 1, page_size, SPEC.components, indices_from=rides_on), "page_first", pages)


def group(*pools: HostPool) -> HostPoolGroup:
    return HostPoolGroup(pools)


@pytest.mark.parametrize(
    ("pools", "reason"),
    [
        ((), "at least its anchor"),
        ((("kv",), ("kv",)), "already has a pool 'kv'"),
        ((("kv",), ("draft", 4, "target")), r"'draft' rides on 'target', which the group lacks \(it has \['kv'\]\)"),
        ((("draft", 4, "kv"), ("kv",)), "rides on 'kv', which the group lacks"),
        ((("kv",), ("draft", 3, "kv")), "'draft' has 12 slots, but 'kv', whose indices it shares, has 16"),
        ((("kv", 2), ("index", 9, "kv"), ("scale", 8, "index")), "'scale' has 32 slots, but 'index'.* has 36"),
    ],
)
def test_a_group_that_cannot_work_is_refused(pools: tuple[tuple[Any, ...], ...], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        group(*(pool(*each) for each in pools))


def test_a_pool_that_is_refused_does_not_join() -> None:
    members = group(pool("kv"))
    with pytest.raises(ValueError, match="'draft' has 4 slots"):
        members.add(pool("draft", 1, "kv"))
    assert list(members.pools) == ["kv"]
    members.add(pool("draft", 4, "kv"))
    assert list(members.pools) == ["kv", "draft"]


def test_a_group_has_the_layout_page_size_and_size_of_its_anchor() -> None:
    anchor = HostPool(presets.mla(1, 2, BYTE, 4), "page_first_direct", 3)
    states = HostPool(presets.mamba(1, [(2, 1)], BYTE), "page_first", 50)
    members = group(anchor, states)
    assert (members.layout, members.page_size, members.size) == ("page_first_direct", 4, 12)


def test_flags_of_a_group_are_all_and_any_of_its_members() -> None:
    """An anchor that moves nothing has nothing against it; a pool that no path stages does."""
    anchor = LogicalPool(1, 4)
    scattered = HostPool(presets.mla(2, 16, BYTE, 4, name="b"), "layer_first", 1)
    for members, every, some in (
        ([anchor], True, True),
        ([anchor, scattered], False, True),
        ([scattered], False, False),
    ):
        together = HostPoolGroup(members)
        assert (together.can_use_write_back_jit, together.supports_per_pool_backup_indices) == (every, some)


def test_allocation_retries_once_after_reclaiming() -> None:
    anchor, asked = pool("kv", 2), []
    held = anchor.alloc(8)
    assert held is not None

    def reclaim(need: int) -> None:
        asked.append(need)
        if len(asked) == 2:
            anchor.free(held)

    members = group(anchor)
    assert members.alloc(4, reclaim=reclaim) is None, "the first reclaim frees nothing, and there is no second"
    assert asked == [4]
    assert members.alloc(4, reclaim=reclaim) is not None
    assert asked == [4, 4]
    assert members.alloc(4, reclaim=reclaim) is not None
    assert asked == [4, 4], "room enough, nothing to reclaim"


def test_slots_are_taken_in_order_of_names_so_that_all_ranks_agree() -> None:
    members = group(pool("kv", 0), pool("a", 0), pool("z", 0))
    asked: list[tuple[str, int]] = []
    wanted = [PoolTransfer(name, device_indices=torch.arange(n)) for name, n in (("z", 12), ("kv", 8), ("a", 4))]
    assert members.resolve(wanted, lambda name, need: asked.append((name, need))) is None
    assert asked == [("a", 4)], "pool 'a' comes first, and its failure ends the matter"


def test_a_full_pool_leaves_the_others_as_they_were() -> None:
    members = group(pool("kv"), pool("a"), pool("z", 1))
    wanted = [PoolTransfer(name, device_indices=torch.arange(8)) for name in ("z", "kv", "a")]
    assert members.resolve(wanted) is None
    assert [p.available_size() for p in members.pools.values()] == [16, 16, 4]


@pytest.mark.parametrize(
    ("wanted", "reason"),
    [
        (
            [PoolTransfer("a", device_indices=torch.arange(8)), PoolTransfer("z", device_indices=torch.arange(3))],
            "3 slots",
        ),
        (
            [PoolTransfer("a", device_indices=torch.arange(8)), PoolTransfer("draft")],
            "'draft' takes its indices from 'kv'",
        ),
        ([PoolTransfer("a", device_indices=torch.arange(8)), PoolTransfer("nope")], r"no pools \['nope'\]"),
        ([PoolTransfer("a", device_indices=torch.arange(8)), PoolTransfer("a")], r"one transfer .* \['a', 'a'\]"),
    ],
)
def test_a_request_that_is_refused_leaves_all_pools_as_they_were(wanted: list[PoolTransfer], reason: str) -> None:
    members = group(pool("kv"), pool("a"), pool("z"), pool("draft", 4, "kv"))
    with pytest.raises(ValueError, match=reason):
        members.resolve(wanted)
    assert [p.available_size() for p in members.pools.values()] == [16] * 4


def test_slots_are_given_back_when_reclaiming_fails() -> None:
    members = group(pool("kv"), pool("z", 0))

    def reclaim(name: str, need: int) -> None:
        raise RuntimeError("the tree is busy")

    with pytest.raises(RuntimeError, match="busy"):
        members.resolve([PoolTransfer(name, device_indices=torch.arange(4)) for name in ("kv", "z")], reclaim)
    assert members.anchor.available_size() == 16


def test_sidecars_take_over_the_indices_of_what_they_ride_on_down_a_chain() -> None:
    members = group(pool("kv"), pool("index", 4, "kv"), pool("scale", 5, "index"), pool("swa"))
    device = torch.arange(8)
    wanted = [
        PoolTransfer("scale"),
        PoolTransfer("index", device_indices=device + 8),
        PoolTransfer("swa", device_indices=device[:4]),
        PoolTransfer("kv", device_indices=device),
    ]
    resolved = members.resolve(wanted)
    assert resolved is not None
    assert [t.name for t in resolved] == ["scale", "index", "swa", "kv"]
    by_name = {t.name: t for t in resolved}
    for name in ("scale", "index", "kv"):
        assert torch.equal(by_name[name].host_indices, torch.arange(8)), name  # type: ignore[arg-type]
    assert torch.equal(by_name["index"].device_indices, device + 8), "its own device indices stay"  # type: ignore[arg-type]
    assert torch.equal(by_name["scale"].device_indices, device + 8), "taken over from 'index'"  # type: ignore[arg-type]
    assert wanted[0].host_indices is None, "the request itself is left alone"
    assert [p.available_size() for p in members.pools.values()] == [8, 16, 20, 12]
    assert members.release(resolved) == 8 + 4
    assert [p.available_size() for p in members.pools.values()] == [16, 16, 20, 16]


def test_host_indices_that_were_given_are_kept() -> None:
    members = group(pool("kv"), pool("index", 4, "kv"))
    mine = slots([3, 1], 4)
    resolved = members.resolve([PoolTransfer("kv", mine, torch.arange(8)), PoolTransfer("index")])
    assert resolved is not None
    assert all(torch.equal(t.host_indices, mine) for t in resolved)  # type: ignore[arg-type]
    assert members.anchor.available_size() == 16


def test_a_sidecar_cannot_allocate() -> None:
    sidecar = pool("index", 4, "kv")
    with pytest.raises(ValueError, match="'index' owns no indices, allocate them in 'kv'"):
        sidecar.alloc(4)
    members = group(pool("kv"), sidecar)
    with pytest.raises(ValueError, match="'index' owns no indices"):
        members.alloc(4, "index")
    assert torch.equal(members.alloc(4, "kv"), torch.arange(4))  # type: ignore[arg-type]


def test_closing_a_group_closes_its_pools() -> None:
    budget = Budget(1000)
    pools = [HostPool(replace(SPEC, name=name), "page_first", 1, budget=budget) for name in ("kv", "b")]
    HostPoolGroup(pools).close()
    assert all(p.closed for p in pools)
    assert budget.available == 1000
