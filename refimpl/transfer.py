"""A prepared transfer: indices checked once, run as often and in such portions as the caller likes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from refimpl.backends.protocol import Backend
from refimpl.indices import Items
from refimpl.plan import Plan
from refimpl.receipt import Receipt


class Transfer:
    """Pages (or entries) on their way between a host and a device pool. It keeps the host pool alive, not open.

    Side states, which have no layer, are restored before the first layer of a load and written after the last layer of
    a backup.
    """

    def __init__(
        self,
        backend: Backend,
        path: str,
        plan: Plan,
        items: Items,
        direction: str,
        layers: tuple[int, ...],
        require_open: Callable[[], None],
    ) -> None:
        self.path, self.direction, self.layers, self.items = path, direction, layers, items
        self._backend, self._plan, self._require_open = backend, plan, require_open
        self.side_states_due = direction == "load"

    def run(self, layers: Sequence[int] | None = None) -> Receipt:
        """Move the given model layers (None: all). Layers that the pool does not own are skipped."""
        self._require_open()
        if self.direction == "backup" and layers is not None:
            raise ValueError("a backup moves all layers in one run, got layers=" + repr(tuple(layers)))
        owned = self.layers if layers is None else tuple(i for i in layers if i in self.layers)
        if self.direction == "backup":
            return self._move((*owned, None))
        waited_for = owned or layers is None or (layers and not self.layers)
        due = (None,) if self.side_states_due and waited_for else ()
        self.side_states_due = False if due else self.side_states_due
        return self._move((*due, *owned))

    def _move(self, layers: tuple[int | None, ...]) -> Receipt:
        receipt = Receipt(self.path, host_syncs=self.items.host_syncs)
        if not len(self.items) or not layers:
            return receipt
        return receipt + self._backend.execute(self._plan, layers, self.items, self.direction)
