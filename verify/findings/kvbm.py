"""Dynamo KVBM: what the fill of its tests can tell apart."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations, product

from verify.findings.finding import Finding

Place = tuple[int, ...]
FILL = "ai-dynamo/dynamo, lib/kvbm-physical/src/transfer/fill.rs at 090512f, FillPattern::Sequential"
GRID = {"block": 8, "layer": 4, "outer": 2}  # outer: K and V


def sequential(block: int, layer: int, outer: int, size: int = 512) -> bytes:
    """A region; which of K and V it is does not enter."""
    return bytes((block + layer + offset) % 256 for offset in range(size))


def fill_aliases(region: Callable[..., bytes] = sequential) -> Finding:
    places = [*product(*map(range, GRID.values()))]
    regions = {place: region(*place) for place in places}
    blocks, layers, _ = GRID.values()
    swapped = [_block(regions, b, layers, (1, 0)) == _block(regions, b, layers, (0, 1)) for b in range(blocks)]
    pairs = [(a, b) for a, b in combinations(places, 2) if regions[a] == regions[b]]
    of_outer = sum(a[:2] == b[:2] for a, b in pairs)
    diagonal = sum(a[0] != b[0] and a[1] != b[1] for a, b in pairs)
    share = len(pairs) / (len(places) * (len(places) - 1) / 2)
    return Finding(
        title="K and V are filled alike, and one block further is one layer less",
        engine="Dynamo KVBM",
        source=FILL,
        cell="any layout and direction that is tested with this fill",
        claim="The sequential fill gives different regions the same bytes.",
        evidence=(
            f"{len(places)} regions ({blocks} blocks, {layers} layers, K and V) hold "
            f"{len(set(regions.values()))} different contents; {share:.1%} of all pairs are alike.",
            f"{of_outer} of {len(places) // 2} blocks and layers have the same bytes for K and for V; with K and V "
            f"exchanged, {sum(swapped)} of {blocks} blocks keep every byte, and so any checksum.",
            f"{diagonal} of these pairs differ in block and in layer.",
        ),
        confirmed=all(swapped) and diagonal > 0,
        consequence="A byte that depends on K or V, on the block and on the layer, each by a factor of its own, would "
        "let the checksums that the tests take see these.",
    )


def _block(regions: Mapping[Place, bytes], block: int, layers: int, outers: Sequence[int]) -> bytes:
    return b"".join(regions[block, layer, outer] for layer in range(layers) for outer in outers)
