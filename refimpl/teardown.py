"""Giving back: every part of it is done, whatever the others raise."""

from __future__ import annotations

from collections.abc import Callable, Iterable


def call_all(calls: Iterable[Callable[[], object]]) -> None:
    """Call them in order, also those behind one that fails. Raises what the last failing one raised.

    The failures before it are its context, behind its own; one that is raised twice forgets those in between. An
    interrupt (no `Exception`) ends it there, for what comes next may rely on what was interrupted: whoever is
    interrupted calls again.
    """
    failure: Exception | None = None
    for call in tuple(calls):
        try:
            call()
        except Exception as error:
            if failure:
                _append(error, failure)
            failure = error
    if failure:
        context = failure.__context__
        try:
            raise failure
        finally:
            failure.__context__ = context  # raising it forgets them where the caller handles an error himself
            del failure, context  # tracebacks name this frame, which would keep what the frames of its callers name


def _append(error: Exception, before: Exception) -> None:
    """The failure before an error, behind all that this one came of and before what both came of: never in a ring."""
    known = set[int]()
    each: BaseException | None = before
    while each:
        known.add(id(each))
        each = each.__context__
    last: BaseException = error
    while last.__context__ and id(last.__context__) not in known:
        last = last.__context__
    if id(error) not in known:
        last.__context__ = before
