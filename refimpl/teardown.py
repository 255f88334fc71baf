"""Giving back: every part of it is done, whatever the others raise."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack


def call_all(calls: Iterable[Callable[[], object]]) -> None:
    """Call them in order. Raises what the last failing one raised, with the ones before as its context."""
    with ExitStack() as last_first:
        for call in reversed(list(calls)):
            last_first.callback(call)
