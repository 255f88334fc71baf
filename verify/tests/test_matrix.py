"""Every pool × layout × backend × direction, bit for bit; and that a wrong byte anywhere would have been seen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from _pytest.mark import ParameterSet

from refimpl import LAYOUTS, HostPool, UnsupportedPairing
from verify import matrix
from verify.guarded import GuardedMemory
from verify.matrix import Cell
from verify.toys import TOYS

# Where cells run: on a CPU, on a CPU that plays the device (the same kernels, late and out of order), on a GPU.
PLATFORMS = (
    pytest.param("cpu", id="cpu"),
    pytest.param("emulated", id="emulated", marks=pytest.mark.emulated),
    pytest.param("cuda", id="cuda", marks=pytest.mark.gpu),
)


def marked(cells: Callable[[str], Sequence[object]], names: Callable[[Any], str] = str) -> list[ParameterSet]:
    """Cells of every platform, with its mark."""
    return [
        pytest.param(cell, id=names(cell), marks=platform.marks)
        for platform in PLATFORMS
        for cell in cells(str(platform.values[0]))
    ]


@pytest.mark.parametrize("cell", marked(matrix.complete))
def test_every_allowed_pair_moves_exactly_the_right_bytes(cell: Cell) -> None:
    matrix.run(cell)


@pytest.mark.parametrize("cell", marked(matrix.covered))
def test_sizes_patterns_strides_and_alignments(cell: Cell) -> None:
    matrix.run(cell)


@pytest.mark.parametrize("pair", marked(matrix.refused, "-".join))
def test_refused_pairs_are_refused_before_memory_is_taken(pair: tuple[str, str, str, str, str]) -> None:
    pool, layout, backend, _, platform = pair
    memory = GuardedMemory()
    with pytest.raises(UnsupportedPairing) as refused:
        HostPool(TOYS[pool](4), layout, 3, backend, memory=memory, platform=platform)
    assert not memory.whole
    refusal = matrix.refusal(*pair)
    assert refusal is not None
    for told in (repr(layout), repr(backend), refusal.reason, refusal.instead):
        assert told in str(refused.value)


def test_the_number_of_cells_is_what_it_was() -> None:
    """A cell that vanishes (or a refusal that spreads) must be noticed and agreed to."""
    found = {
        platform: (len(matrix.complete(platform)), len(matrix.refused(platform)), len(matrix.covered(platform)))
        for platform in ("cpu", "emulated", "cuda")
    }
    assert found == {"cpu": (800, 328, 2232), "emulated": (1510, 746, 4255), "cuda": (1910, 910, 5371)}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("platform", PLATFORMS)
def test_every_combination_of_five_axes(layout: str, platform: str) -> None:
    """One test for thousands of cells: there are too many for a name each, and a `Mismatch` names its cell."""
    for cell in matrix.covered(platform, strength=5):
        if cell.layout == layout:
            matrix.run(cell)
