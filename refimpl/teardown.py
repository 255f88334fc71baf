"""Giving back: every part of it is done, whatever the others raise."""

from __future__ import annotations

from collections.abc import Callable, Iterable


def call_all(calls: Iterable[Callable[[], object]]) -> None:
    """Call them in order, also those behind one that fails. Raises what the last failing one raised.

    An interrupt (no `Exception`) ends it there, for what comes next may rely on what was interrupted. So whoever is
    interrupted calls again, and what can be interrupted can be called again.
    """
    rest = iter(tuple(calls))
    try:
        for call in rest:
            call()
    except Exception:
        call_all(rest)
        raise
