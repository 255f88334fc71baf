"""Every order in which an emulated device can do what it was given, one after the other.

Seeds sample orders; small scenarios can be run in all of them, and then nothing is left to luck.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from refimpl.emulated import HostQueue

T = TypeVar("T")


class Orders:
    """Stands for the device's random choices, and makes each sequence of them once, like an odometer."""

    def __init__(self) -> None:
        self._script: list[int] = []
        self._sizes: list[int] = []

    def choice(self, ready: Sequence[T]) -> T:
        at = len(self._sizes)
        self._sizes.append(len(ready))
        if at == len(self._script):
            self._script.append(0)
        return ready[self._script[at]]

    def random(self) -> float:
        return 0.0  # streams take turns; to rank them would be one of these orders again

    def shuffle(self, copies: list[Any]) -> None:
        """Copies of one batch are done in the order in which they stand: they are of different bytes."""

    def next(self) -> bool:
        """Whether there is another sequence: the last choice that can be made otherwise is."""
        del self._script[len(self._sizes) :]
        while self._script and self._script[-1] + 1 == self._sizes[len(self._script) - 1]:
            self._script.pop()
        if self._script:
            self._script[-1] += 1
        self._sizes = []
        return bool(self._script)


def in_every_order(scenario: Callable[[HostQueue], object]) -> int:
    """Run a scenario on a new device once for each order. Returns how many there are."""
    orders, count = Orders(), 0
    while True:
        queue = HostQueue()
        queue._random = orders  # type: ignore[assignment]
        scenario(queue)
        count += 1
        if not orders.next():
            return count
