"""A prepared transfer: indices checked once, run as often and in such portions as the caller likes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from operator import index
from typing import TYPE_CHECKING, TypeVar

from refimpl.backends.protocol import Backend
from refimpl.geometry import NO_LAYER
from refimpl.indices import Items
from refimpl.plan import Plan
from refimpl.receipt import Receipt

if TYPE_CHECKING:
    from refimpl.host_pool import HostPool


Result = TypeVar("Result")


class Transfer:
    """Pages (or entries) on their way between a host and a device pool. It keeps the host pool alive, not open.

    plan   asked at every run: it fails once the pool is closed, and follows device buffers that were moved

    Side states, which have no layer, come with the first run of a load, before any layer, and are written last by a
    backup.
    """

    def __init__(
        self,
        pool: HostPool,
        backend: Backend,
        path: str,
        plan: Callable[[], Plan],
        items: Items,
        direction: str,
        layers: tuple[int, ...],
    ) -> None:
        self.path, self.direction, self.layers, self.items = path, direction, layers, items
        self.backend, self.plan, self._pool = backend, plan, pool
        self._side_states_due = direction == "load"
        self._host_syncs = items.host_syncs  # those of the check, told by the first receipt

    def place(self) -> None:
        """Bring lists to the device, as far as the backend wants them there."""
        self._used(lambda: self.backend.place(self.plan, self.layers, self.items, self.direction))

    def run(self, layers: Iterable[int] | None = None, side_states: bool | None = None) -> Receipt:
        """Move the given model layers (None: all), each once. Layers that the pool does not own are skipped.

        side_states  whether a load restores them now; None: if it has not yet
        """
        chosen = None if layers is None else _distinct(layers)
        return self._used(lambda: self._run(self.plan(), chosen, side_states))

    def _used(self, call: Callable[[], Result]) -> Result:
        """Call what uses the pool: it is not closed meanwhile."""
        use, users = (threading.get_ident(), self._pool, object()), self._pool.users
        try:  # no call comes between the two, or behind the last one: an interrupt may come behind any
            users.append(use)
            return call()
        finally:
            if use in users:
                users.remove(use)

    def _run(self, plan: Plan, layers: tuple[int, ...] | None, side_states: bool | None) -> Receipt:
        if self.direction == "backup" and layers is not None:
            raise ValueError(f"a backup moves all layers in one run, got layers={layers!r}")
        owned = self.layers if layers is None else tuple(i for i in layers if i in self.layers)
        host_syncs, self._host_syncs = self._host_syncs, 0
        receipts = [*self._moved(plan, owned, self._side_states_due if side_states is None else side_states)]
        if len(receipts) == 1 and not host_syncs:  # most runs, and the host's time is short
            return receipts[0]
        return sum(receipts, Receipt(self.path, host_syncs=host_syncs))

    def _moved(self, plan: Plan, owned: tuple[int, ...], side_states: bool) -> Iterator[Receipt]:
        """Move layers and side states in their order; a receipt for either, if it has anything to move."""
        if self.direction == "load" and side_states:
            yield from self._move(plan, NO_LAYER)
            self._side_states_due = False
        yield from self._move(plan, owned)
        if self.direction == "backup":
            yield from self._move(plan, NO_LAYER)

    def _move(self, plan: Plan, layers: tuple[int | None, ...]) -> Iterator[Receipt]:
        if len(self.items) and not plan.layers.isdisjoint(layers):
            yield self.backend.execute(plan, layers, self.items, self.direction)


def _distinct(layers: Iterable[int]) -> tuple[int, ...]:
    """Model layers as plain numbers, each once, in the order asked for."""
    if not isinstance(layers, Iterable):
        raise TypeError(f"layers are several, or None for all; got {layers!r:.80}, ({layers!r:.80},) names one")
    numbers = []
    for layer in layers:
        try:
            numbers.append(index(layer))
        except TypeError:
            numbers.append(-1)
        if numbers[-1] < 0:
            raise ValueError(f"{layer!r} is no model layer: layers are numbers from 0 on")
    return tuple(dict.fromkeys(numbers))
