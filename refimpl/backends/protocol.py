"""What a backend is: made for a pool, and able to execute a plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from refimpl.geometry import PoolSpec
from refimpl.indices import Items
from refimpl.plan import Plan
from refimpl.receipt import Receipt


@dataclass(frozen=True)
class Setup:
    """The pool that a backend is made for.

    platform       the device that it works on, by name: "cuda:1"
    staging_pages  pages that a staging buffer in device memory holds; None: what was measured to be enough
    blocks         blocks of a copy kernel; None: what was measured to be best
    book           to be asked before device memory is taken: raises if there is none to spare, else returns what gives
                   it back
    """

    spec: PoolSpec
    layout: str
    num_pages: int
    platform: str = "cpu"
    staging_pages: int | None = None
    blocks: int | None = None
    book: Callable[[int], Callable[[], None]] = lambda nbytes: lambda: None


class Backend(Protocol):
    """Moves bytes as a plan says. It never looks at a layout or a pool, only at addresses, strides and runs.

    Made by a class that takes a `Setup`. If it cannot do without device memory of its own, the class says beforehand
    how much by `staging_bytes(setup)`.
    """

    def stays(self, side: str, indices: torch.Tensor) -> bool:
        """Whether an index list of a side ("host", "device") is left on the device and checked there."""
        ...

    def read(self, indices: torch.Tensor) -> torch.Tensor:
        """A list that is not, on the host, as the caller's stream has left it: the host waits for that."""
        ...

    def place(self, plan: Callable[[], Plan], layers: tuple[int | None, ...], items: Items, direction: str) -> None:
        """When a transfer is prepared: bring what it needs of its lists to the device, whichever layers move first."""
        ...

    def execute(self, plan: Plan, layers: tuple[int | None, ...], items: Items, direction: str) -> Receipt:
        """Move `items` of the given layers, in any order. `direction` is "backup" (to the host) or "load"."""
        ...

    def close(self) -> None:
        """Wait for what was submitted, let go of device memory. Idempotent."""
        ...


class OnTheHost:
    """What backends without a device have in common: nothing to prepare, nothing left behind."""

    def __init__(self, setup: Setup) -> None:
        pass

    def stays(self, side: str, indices: torch.Tensor) -> bool:
        return False

    def read(self, indices: torch.Tensor) -> torch.Tensor:
        return indices.cpu()

    def place(self, plan: Callable[[], Plan], layers: tuple[int | None, ...], items: Items, direction: str) -> None:
        pass

    def close(self) -> None:
        pass
