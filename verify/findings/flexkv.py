"""FlexKV: what the fill of its tests can tell apart, and what they compare."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import product

import numpy as np

from verify.findings.finding import Finding

TEST = "taco-project/FlexKV, tests/test_kv_transfer_correctness.py at 016c290, fill_gpu and spot_check_gpu"
SIZES = {"ds3-mini": (4, 8, 16, 512), "ds3": (61, 256, 16, 512)}  # layers, blocks, tokens, lanes
TOLERANCE = 1e-3


def number_of(layer: int, block: int, token: int, lane: int = 0) -> int:
    """Before it is divided by 997; K of GPU 0."""
    return (layer * 10000 + block * 1000 + token * 10 + lane) % 997


def fill_aliases(number: Callable[[int, int, int], int] = number_of) -> Finding:
    lines, alike = [], []
    for name, (layers, blocks, tokens, lanes) in SIZES.items():
        rows = Counter(number(*place) for place in product(range(layers), range(blocks), range(tokens)))
        total, twins = rows.total(), sum(count for count in rows.values() if count > 1)
        compared = 2 * 2 * 2  # first and last layer, block and lane
        lines.append(
            f"{name}: {twins:,} of {total:,} rows have the very values of another row; "
            f"{compared} of {total * lanes:,} values are compared."
        )
        alike.append(twins)
    exact = np.arange(997) / 997.0
    near = int((np.abs(exact[1:].astype(np.float16).astype(np.float64) - exact[:-1]) < TOLERANCE).sum())
    return Finding(
        title="Rows repeat, neighbours are within the tolerance, corners are compared",
        engine="FlexKV",
        source=TEST,
        cell="GPU to CPU and back, as test_non_mla_roundtrip and test_mla_roundtrip_modes check it",
        claim="The fill repeats within a buffer, and its comparison accepts some wrong values.",
        evidence=(
            *lines,
            f"One layer further is ten blocks further: {number(1, 0, 0)} and {number(0, 10, 0)} before the division.",
            f"{near} of 996 values in fp16 pass for the next smaller one, which is {1 / 997:.2e} away; the tolerance "
            f"is {TOLERANCE:.0e}.",
            "Block lists are the same on both sides, so a mapping that is wrong both ways leads back.",
        ),
        confirmed=all(alike) and near > 0,
        consequence="Integers that name the place, compared as bytes, over the whole buffer and on the host too.",
    )
