"""Host pools of one model: an anchor that owns indices, sidecars that ride on them, pools with indices of their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from refimpl.geometry import PoolSpec
from refimpl.host_pool import HostPool
from refimpl.indices import require_list
from refimpl.teardown import call_all
from refimpl.windows import Window


class LogicalPool(HostPool):
    """An anchor without memory: it only owns indices (DeepSeek V4's `kv`). Its transfers complete and move nothing."""

    def __init__(self, num_pages: int, page_size: int, name: str = "kv", layout: str = "page_first") -> None:
        super().__init__(PoolSpec(name, 0, page_size, (), family="logical"), layout, num_pages)


@dataclass(frozen=True)
class PoolTransfer:
    """What one pool is to move. Host indices of None are filled in: allocated, or taken from the pool it rides on."""

    name: str
    host_indices: torch.Tensor | None = None
    device_indices: torch.Tensor | Window | None = None

    def __post_init__(self) -> None:
        if self.host_indices is not None:
            require_list(self.host_indices, 1, f"pool {self.name!r}: host")
        if self.device_indices is not None and not isinstance(self.device_indices, Window):
            require_list(self.device_indices, 1, f"pool {self.name!r}: device")

    def lists(self) -> tuple[torch.Tensor | None, torch.Tensor | Window | None]:
        return self.host_indices, self.device_indices


class HostPoolGroup:
    """The anchor first, then its side pools. Layout, page size and size of the group are the anchor's.

    Raises `ValueError` for no pools, two of one name, a sidecar of an unknown pool, and a sidecar with other pages or
    fewer slots than the pool it rides on (a draft pool sized by physical rows, say).
    """

    def __init__(self, pools: Sequence[HostPool]) -> None:
        if not pools:
            raise ValueError("a group needs at least its anchor")
        self.anchor = pools[0]
        self.pools: dict[str, HostPool] = {}
        for pool in pools:
            self.add(pool)

    def add(self, pool: HostPool) -> None:
        name, source = pool.spec.name, pool.spec.indices_from
        if name in self.pools:
            raise ValueError(f"the group already has a pool {name!r}")
        if source and source not in self.pools:
            raise ValueError(f"pool {name!r} rides on {source!r}, which the group lacks (it has {list(self.pools)})")
        if source and pool.page_size != self.pools[source].page_size:
            raise ValueError(
                f"pool {name!r} has pages of {pool.page_size}, but {source!r}, whose indices it shares, has pages of "
                f"{self.pools[source].page_size}"
            )
        if source and pool.size < self.pools[source].size:
            raise ValueError(
                f"pool {name!r} has {pool.size} slots, but {source!r}, whose indices it shares, has "
                f"{self.pools[source].size}; give it as many pages"
            )
        self.pools[name] = pool

    @property
    def layout(self) -> str:
        return self.anchor.layout

    @property
    def page_size(self) -> int:
        return self.anchor.page_size

    @property
    def size(self) -> int:
        return self.anchor.size

    @property
    def can_use_write_back_jit(self) -> bool:
        """Information only: every member could write back through staging."""
        return all(pool.can_use_write_back_jit for pool in self.pools.values())

    @property
    def supports_per_pool_backup_indices(self) -> bool:
        """Information only: some member could. Where indices live is for each pool to decide."""
        return any(pool.can_use_write_back_jit for pool in self.pools.values())

    def owner(self, name: str) -> str:
        """The pool whose indices a pool uses: its own, or those of the one it rides on."""
        source = self.pools[name].spec.indices_from
        return self.owner(source) if source else name

    def alloc(
        self, need: int, pool: str | None = None, reclaim: Callable[[int], object] | None = None
    ) -> torch.Tensor | None:
        """Slots of the anchor (or of another pool); when it is full, one retry after `reclaim(slots that it lacks)`."""
        owner = self.pools[pool] if pool else self.anchor
        slots = owner.alloc(need)
        if slots is None and reclaim is not None:
            reclaim(need - owner.available_size())
            slots = owner.alloc(need)
        return slots

    def resolve(
        self, transfers: Sequence[PoolTransfer], reclaim: Callable[[str, int], object] | None = None
    ) -> list[PoolTransfer] | None:
        """Fill in host indices: own slots first, in order of names so that all ranks agree, then those taken over.

        None when a pool is full, also after `reclaim(name, slots that it lacks)`. Then, and when anything here raises,
        all slots that were taken are given back.
        """
        self.require_known(transfers)
        wanted = {t.name: t for t in transfers}
        taken: dict[str, torch.Tensor] = {}
        try:
            for name in sorted(wanted):
                transfer = wanted[name]
                if transfer.host_indices is None and not self.pools[name].spec.indices_from:
                    need = 0 if transfer.device_indices is None else transfer.device_indices.numel()
                    slots = self.alloc(need, name, reclaim and partial(reclaim, name))
                    if slots is None:
                        self._give_back(taken)
                        return None
                    taken[name] = slots
            resolved = {name: replace(t, host_indices=taken.get(name, t.host_indices)) for name, t in wanted.items()}
            for name in wanted:
                self._take_over(name, resolved)
        except BaseException:
            self._give_back(taken)
            raise
        return [resolved[t.name] for t in transfers]

    def require_known(self, transfers: Sequence[PoolTransfer]) -> None:
        """`ValueError` unless each is of a pool of this group, and of another one than the rest."""
        names = [t.name for t in transfers]
        if len(set(names)) < len(names):
            raise ValueError(f"a pool can have one transfer at a time, got {names}")
        unknown = [name for name in names if name not in self.pools]
        if unknown:
            raise ValueError(f"no pools {unknown} in this group, it has {list(self.pools)}")

    def require_open(self) -> None:
        """`ValueError` if one of its pools was closed."""
        for pool in self.pools.values():
            pool.require_open()

    def release(self, transfers: Sequence[PoolTransfer]) -> int:
        """Free the slots of resolved transfers; what a sidecar took over is not its own. Returns the slots freed."""
        return sum(self.pools[t.name].free(t.host_indices) for t in transfers if t.host_indices is not None)

    def close(self) -> None:
        """Close every pool, riders first, whatever the others raise. Idempotent."""
        call_all(pool.close for pool in reversed(self.pools.values()))

    def _take_over(self, name: str, resolved: dict[str, PoolTransfer]) -> None:
        """The lists that a sidecar does not have from the pool it rides on."""
        source, own = self.pools[name].spec.indices_from, resolved[name]
        if source is None or (own.host_indices is not None and own.device_indices is not None):
            return
        if source not in resolved:
            raise ValueError(f"pool {name!r} takes its indices from {source!r}, which is not part of this transfer")
        self._take_over(source, resolved)
        origin = resolved[source]
        host = origin.host_indices if own.host_indices is None else own.host_indices
        device = origin.device_indices if own.device_indices is None else own.device_indices
        resolved[name] = PoolTransfer(name, host, device)

    def _give_back(self, taken: Mapping[str, torch.Tensor]) -> None:
        for name, slots in taken.items():
            self.pools[name].free(slots)
