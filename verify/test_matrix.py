"""Every pool × layout × backend × direction, bit for bit; and that a wrong byte anywhere would have been seen."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from refimpl import LAYOUTS, HostPool, UnsupportedPairing
from verify import matrix
from verify.guarded import GuardedMemory
from verify.matrix import Cell
from verify.toys import TOYS

REFUSED = [pair for pair in matrix.pairs() if matrix.refusal(*pair) is not None]


@pytest.mark.parametrize("cell", matrix.complete(), ids=str)
def test_every_allowed_pair_moves_exactly_the_right_bytes(cell: Cell) -> None:
    matrix.run(cell)


@pytest.mark.parametrize("cell", matrix.covered(), ids=str)
def test_sizes_patterns_strides_and_alignments(cell: Cell) -> None:
    matrix.run(cell)


@pytest.mark.parametrize("pair", REFUSED, ids="-".join)
def test_refused_pairs_are_refused_before_memory_is_taken(pair: tuple[str, str, str, str]) -> None:
    pool, layout, backend, _ = pair
    memory = GuardedMemory()
    with pytest.raises(UnsupportedPairing) as refused:
        HostPool(TOYS[pool](4), layout, 3, backend, memory=memory)
    assert not memory.whole
    refusal = matrix.refusal(*pair)
    assert refusal is not None
    for told in (repr(layout), repr(backend), refusal.reason, refusal.instead):
        assert told in str(refused.value)


def test_the_number_of_cells_is_what_it_was() -> None:
    """A cell that vanishes (or a refusal that spreads) must be noticed and agreed to."""
    counts = Counter("allowed" if matrix.refusal(*pair) is None else "refused" for pair in matrix.pairs())
    assert counts == {"allowed": 800, "refused": 328}
    assert len(matrix.covered()) == 2232


ON_GPU = [replace(cell, device="cuda") for cell in matrix.complete() if cell.backend == "torch"]


@pytest.mark.gpu
@pytest.mark.parametrize("cell", ON_GPU, ids=str)
def test_device_pools_on_a_gpu(cell: Cell) -> None:
    """Backend torch reaches any device; device indices are on the GPU too."""
    matrix.run(cell)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("backend", matrix.BACKENDS)
def test_every_combination_of_five_axes(layout: str, backend: str) -> None:
    """One test for thousands of cells: there are too many for a name each, and a `Mismatch` names its cell."""
    for cell in matrix.covered(strength=5):
        if (cell.layout, cell.backend) == (layout, backend):
            matrix.run(cell)
