"""A tree of prefixes that is checked after every call: whatever a test does with it, no rule is broken unseen."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from refimpl.invariants import require_invariants
from refimpl.radix import PrefixCache

CALLS = ("match", "insert", "load_back", "use", "release", "check", "evict", "evict_host", "clear")


class CheckedCache(PrefixCache):
    """Calls that it makes itself, to have room in the middle of another, are checked with that one."""

    depth = 0  # of calls within calls


def _checked(call: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(call)
    def checked(self: CheckedCache, *args: Any, **options: Any) -> Any:
        self.depth += 1
        try:
            return call(self, *args, **options)
        finally:
            self.depth -= 1
            if not self.depth:
                require_invariants(self)

    return checked


for name in CALLS:
    setattr(CheckedCache, name, _checked(getattr(PrefixCache, name)))
