"""Giving back: every part of it is done, whatever the others raise."""

from __future__ import annotations

from collections.abc import Callable, Iterable


def call_all(calls: Iterable[Callable[[], object]]) -> None:
    """Call them in order, also those behind one that fails. Raises what the last failing one raised.

    The failure before it is its context. An interrupt (no `Exception`) ends it there, for what comes next may rely on
    what was interrupted: whoever is interrupted calls again.
    """
    failure: Exception | None = None
    for call in tuple(calls):
        try:
            call()
        except Exception as error:
            error.__context__ = error.__context__ or failure
            failure = error
    if failure:
        raise failure
