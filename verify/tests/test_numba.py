"""Backend `numba` on the lengths and alignments at which it changes its way of copying."""

from __future__ import annotations

from typing import Any

import numba
import pytest
import torch

from refimpl import Component, PoolSpec, compiled
from refimpl.backends.numba_backend import LINE, STREAM_FROM
from verify import matrix
from verify.matrix import Cell

# Around the length from which runs are streamed, and around whole lines after it.
WIDTHS = [STREAM_FROM + d for d in (-1, 0, 1)] + [STREAM_FROM + LINE + d for d in (-1, 0, 1, 2 * LINE - 1)]


@pytest.mark.parametrize("layout", ["layer_first", "page_first"])
@pytest.mark.parametrize("start", ["aligned", "shifted"])
@pytest.mark.parametrize("width", WIDTHS)
def test_streamed_runs_are_exact_at_every_length(width: int, start: str, layout: str) -> None:
    """Rows are apart on the device, so that one row is one run; odd widths put later rows at every alignment."""
    spec = PoolSpec("rows", 2, 4, (Component("row", torch.uint8, dim=width),))
    for direction in ("backup", "load"):
        matrix.run(Cell("rows", layout, "numba", direction, rows="strided", start=start), spec)


def test_loops_are_compiled_also_where_nothing_can_be_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a container that is read only, numba refuses to cache."""

    def njit(*signature: Any, cache: bool = False, **options: Any) -> Any:
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        return numba.njit(*signature, **options)

    monkeypatch.setattr(compiled, "njit", njit)
    assert compiled.compiled("int64(int64)")(lambda number: 2 * number)(4) == 8
