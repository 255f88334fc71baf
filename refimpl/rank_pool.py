"""One host pool for all tensor-parallel ranks: every rank moves its own heads, a reader with other ranks finds pages.

Ranks of one host share its memory. Where heads lie outermost in a page (`page_head`, `page_unified`), those of a rank
are one stretch of it, so that a page that TP 2 wrote is read by TP 1, or the other way round, and nobody converts it.
Any other layout with heads works as well, in shorter runs.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import NoReturn

import torch

from refimpl.allocator import Budget
from refimpl.geometry import PoolSpec, is_int
from refimpl.host_pool import HostPool
from refimpl.layout import Buffer
from refimpl.pinned import Block, HostMemory


class RankPool(HostPool):
    """The heads of one rank in every page of a host pool.

    It moves bytes like a pool of its own, to and from a device pool with `part(whole.spec, ranks)`. Memory and slots
    are those of `whole`, which stays as it is when ranks are closed. The pool that owns the memory waits for the copies
    of all ranks before it lets go of it.

    whole    the pool with all heads, or a rank that is shared out again; its memory must be pinned for a rank that
             copies on a GPU
    rank     from 0 on, in order of heads
    backend  of this rank, as `platform` and what follows (see `HostPool`); None: the whole pool's
    """

    def __init__(
        self,
        whole: HostPool,
        rank: int,
        ranks: int,
        backend: str | None = None,
        platform: str | None = None,
        staging_pages: int | None = None,
        device_budget: Budget | None = None,
        blocks: int | None = None,
    ) -> None:
        if not isinstance(whole, HostPool):
            raise TypeError(f"ranks share a HostPool, got {whole!r:.80}")
        spec = part(whole.spec, ranks)
        if not is_int(rank) or not 0 <= rank < ranks:
            raise ValueError(f"there is no rank {rank!r} of {ranks}: they are numbered 0..{ranks - 1}")
        self.whole, self.rank = whole, rank
        self._leave: Callable[[], object] = lambda: None  # already now: what cannot be made is closed
        whole.require_open()
        super().__init__(
            spec,
            whole.layout,
            whole.num_pages,
            backend or whole.backend,
            whole.profile,
            platform=platform or whole.platform,
            staging_pages=staging_pages,
            device_budget=device_budget,
            blocks=blocks,
        )
        self._slots = whole.allocator
        self.users = whole.users
        shared = [*whole._memory()]
        self._leave = partial(_leave, shared, self._mover.close)
        weakref.finalize(self, self._leave)
        for block in shared:
            block.close_after(self._mover.close)

    def _uses(self) -> list[tuple[int, HostPool, object]]:
        return [use for use in super()._uses() if self._has(use[1])]

    def _has(self, pool: HostPool) -> bool:
        """Whether it is this one, or shares this one's memory as a rank of it."""
        return pool is self or (isinstance(pool, RankPool) and self._has(pool.whole))

    def _ends(self) -> tuple[Callable[[], object], ...]:
        return *super()._ends(), self._leave

    def _tensors(self, buffer: Buffer, memory: HostMemory, limit: int | None) -> list[torch.Tensor]:
        """Views of the whole pool's."""
        whole, tensors = self.whole.storage[len(self.storage)]
        axis = next(a for a in ("group", "head") if buffer.extents[a] < whole.extents[a])
        length = buffer.extents[axis]
        return [tensor.narrow(buffer.axes.index(axis), self.rank * length, length) for tensor in tensors]

    def _memory(self) -> list[Block]:
        return self.whole._memory()

    def require_open(self) -> None:
        self.whole.require_open()
        super().require_open()

    @property
    def kv_buffer(self) -> torch.Tensor | list[torch.Tensor]:
        """`ValueError`: what upstream registers is contiguous."""
        self._refuse()

    def _pieces(self) -> list[tuple[int, int, int]]:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise ValueError(
            f"rank {self.rank} owns a part of every page of pool {self.spec.name!r}: ask the whole pool where its "
            f"pages lie, get_split_heads_page_buffer_meta() tells it rank by rank"
        )


def _leave(shared: Iterable[Block], close: Callable[[], None]) -> None:
    """Of memory that others use on."""
    close()
    for block in shared:
        block.forget(close)


def part(spec: PoolSpec, ranks: int) -> PoolSpec:
    """What one of `ranks` stores of a pool: fewer heads. `ValueError` where they cannot be shared out evenly."""
    if not is_int(ranks) or ranks < 2:
        raise ValueError(f"pool {spec.name!r} is shared by two ranks or more, got {ranks!r}")
    without = [c.name for c in spec.components if c.heads is None]
    if without or not spec.components:
        raise ValueError(f"pool {spec.name!r}: {', '.join(without) or 'it'} has no heads, every rank stores all of it")
    by_group = spec.head_groups > 1
    odd = [c.name for c in spec.components if c.head_count % ranks] if not by_group else []
    if odd or (by_group and spec.head_groups % ranks):
        held = f"{spec.head_groups} groups of heads" if by_group else f"the heads of {', '.join(odd)}"
        raise ValueError(f"pool {spec.name!r}: {held} cannot be shared out between {ranks} ranks")
    rows = tuple(replace(c, heads=c.head_count // ranks) for c in spec.components)
    return replace(spec, components=rows, head_groups=spec.head_groups // ranks if by_group else 1)
