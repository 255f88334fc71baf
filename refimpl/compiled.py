"""Loops that numba compiles, and keeps on disk where it can."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import njit


def compiled(*signature: Any, **options: Any) -> Callable[[Callable[..., Any]], Any]:
    """`numba.njit` without the GIL. With a signature it compiles at once; with none, when it is first called."""

    def decorate(function: Callable[..., Any]) -> Any:
        try:
            return njit(*signature, nogil=True, cache=True, **options)(function)
        except RuntimeError:  # there is no folder that can be written: compiled anew in each process
            return njit(*signature, nogil=True, **options)(function)

    return decorate
