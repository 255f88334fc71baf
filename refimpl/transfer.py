"""A prepared transfer: indices checked once, run as often and in such portions as the caller likes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from refimpl.backends.protocol import Backend
from refimpl.geometry import NO_LAYER
from refimpl.indices import Items
from refimpl.plan import Plan
from refimpl.receipt import Receipt


class Transfer:
    """Pages (or entries) on their way between a host and a device pool. It keeps the host pool alive, not open.

    plan  asked at every run: it fails once the pool is closed, and follows device buffers that were moved.

    Side states, which have no layer, come with the first run of a load, before any layer, and are written last by a
    backup.
    """

    def __init__(
        self,
        backend: Backend,
        path: str,
        plan: Callable[[], Plan],
        items: Items,
        direction: str,
        layers: tuple[int, ...],
    ) -> None:
        self.path, self.direction, self.layers, self.items = path, direction, layers, items
        self.backend, self.plan = backend, plan
        self._side_states_due = direction == "load"
        self._host_syncs = items.host_syncs  # those of the check, told by the first receipt

    def run(self, layers: Sequence[int] | None = None, side_states: bool | None = None) -> Receipt:
        """Move the given model layers (None: all). Layers that the pool does not own are skipped.

        side_states  whether a load restores them now; None: if it has not yet
        """
        plan = self.plan()
        if self.direction == "backup" and layers is not None:
            raise ValueError("a backup moves all layers in one run, got layers=" + repr(tuple(layers)))
        wrong = [i for i in layers or () if not isinstance(i, int) or i < 0]
        if wrong:
            raise ValueError(f"{wrong[0]!r} is no model layer: layers are numbers from 0 on")
        owned = self.layers if layers is None else tuple(i for i in layers if i in self.layers)
        receipt = Receipt(self.path, host_syncs=self._host_syncs)
        self._host_syncs = 0
        if self.direction == "backup":
            return receipt + self._move(plan, owned) + self._move(plan, NO_LAYER)
        if self._side_states_due if side_states is None else side_states:
            receipt += self._move(plan, NO_LAYER)
            self._side_states_due = False
        return receipt + self._move(plan, owned)

    def _move(self, plan: Plan, layers: tuple[int | None, ...]) -> Receipt:
        if not len(self.items) or next(plan.select(layers), None) is None:
            return Receipt(self.path)
        return self.backend.execute(plan, layers, self.items, self.direction)
