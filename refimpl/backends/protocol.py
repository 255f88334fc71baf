"""What a backend is: a name, and a way to execute one move of a plan."""

from __future__ import annotations

from typing import Protocol

from refimpl.indices import Items
from refimpl.plan import Plan
from refimpl.receipt import Receipt


class Backend(Protocol):
    """Moves bytes as a plan says. It never looks at a layout or a pool, only at addresses, strides and runs."""

    def execute(self, plan: Plan, layers: tuple[int | None, ...], items: Items, direction: str) -> Receipt:
        """Move `items` of the given layers, in any order. `direction` is "backup" (to the host) or "load"."""
        ...
