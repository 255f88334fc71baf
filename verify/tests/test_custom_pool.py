"""A pool that this repository knows nothing about gets every layout, backend and check by being a spec."""

from __future__ import annotations

import pytest
import torch

from refimpl import LAYOUTS, Component, PoolSpec, support
from verify import matrix
from verify.matrix import BACKENDS, DIRECTIONS, Cell

# Rows of any byte size; and a pool that mixes token rows, a page row of some layers, and a side state of 8-byte words.
CUSTOM = PoolSpec(
    "custom",
    layers=3,
    page_size=4,
    components=(
        Component("k", torch.uint8, heads=1, dim=132),
        Component("v", torch.uint8, heads=1, dim=132),
    ),
)
MIXED = PoolSpec(
    "mixed",
    layers=4,
    page_size=4,
    components=(
        Component("rows", torch.float64, heads=3, dim=(1, 5)),
        Component("summary", torch.int16, dim=7, unit="page", layers=(3, 1)),
        Component("counters", torch.int64, dim=2, unit="page", side=True),
    ),
)
CELLS = [
    (spec, Cell("custom", layout, backend, direction, rows="strided", start="shifted"))
    for spec in (CUSTOM, MIXED)
    for layout in LAYOUTS
    for backend in BACKENDS
    for direction in DIRECTIONS
    if support(spec, layout, backend, "load")
]


@pytest.mark.parametrize(("spec", "cell"), CELLS, ids=[f"{spec.name}-{cell}" for spec, cell in CELLS])
def test_a_pool_from_outside_passes_the_whole_matrix(spec: PoolSpec, cell: Cell) -> None:
    matrix.run(cell, spec)


def test_it_is_refused_nothing_without_a_reason() -> None:
    allowed = {spec.name: {c.layout for s, c in CELLS if s is spec} for spec in (CUSTOM, MIXED)}
    assert set(LAYOUTS) - allowed["custom"] == {"page_first_kv_split"}  # nothing to split
    assert set(LAYOUTS) - allowed["mixed"] == {"page_head", "page_unified", "page_first_kv_split"}
