"""A tree of prefixes that is checked after every call: whatever a test does with it, no rule is broken unseen."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import torch

from refimpl.invariants import require_invariants
from refimpl.operations import Ack
from refimpl.radix import Match, PrefixCache, Slots

Tokens = Sequence[int] | np.ndarray


class CheckedCache(PrefixCache):
    """Calls that it makes itself, to have room in the middle of another, are checked with that one."""

    _depth = 0

    @contextmanager
    def _checked(self) -> Iterator[None]:
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if not self._depth:
                require_invariants(self)

    def match(self, tokens: Tokens) -> Match:
        with self._checked():
            return super().match(tokens)

    def insert(self, tokens: Tokens, slots: Mapping[str, torch.Tensor]) -> Slots:
        with self._checked():
            return super().insert(tokens, slots)

    def load_back(self, match: Match) -> bool:
        with self._checked():
            return super().load_back(match)

    def use(self, match: Match) -> None:
        with self._checked():
            super().use(match)

    def release(self, match: Match) -> None:
        with self._checked():
            super().release(match)

    def check(self, wait: bool = False) -> list[Ack]:
        with self._checked():
            return super().check(wait)

    def evict(self, name: str, need: int) -> int:
        with self._checked():
            return super().evict(name, need)

    def evict_host(self, name: str, need: int) -> int:
        with self._checked():
            return super().evict_host(name, need)

    def clear(self) -> None:
        with self._checked():
            super().clear()
