"""Giving back: every part of it is done, whatever the others raise."""

from __future__ import annotations

from collections.abc import Callable, Iterable


def call_all(calls: Iterable[Callable[[], object]]) -> None:
    """Call them in order, also those behind one that fails. Raises what the last failing one raised.

    The failures before it are its context, behind its own. An interrupt (no `Exception`) ends it there, for what comes
    next may rely on what was interrupted: whoever is interrupted calls again.
    """
    failure: Exception | None = None
    for call in tuple(calls):
        try:
            call()
        except Exception as error:
            _append(error, failure)
            failure = error
    try:
        if failure:
            raise failure
    finally:
        del failure  # its traceback names this frame, which would keep all that the callers' frames name


def _append(error: Exception, before: Exception | None) -> None:
    """The failure before an error, behind all that this one came of; not if they share a part, which made a ring."""
    if before and not {*map(id, _chain(error))} & {*map(id, _chain(before))}:
        _chain(error)[-1].__context__ = before


def _chain(error: BaseException) -> list[BaseException]:
    found = [error]
    while context := found[-1].__context__:
        found.append(context)
    return found
