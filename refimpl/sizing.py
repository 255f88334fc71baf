"""How many pages a host pool gets: our rule, the same for every pool, and upstream's, which depends on the family.

GB means 1e9 bytes, as upstream's `--hicache-size` does. `rule="fit"` never exceeds what was asked for. `rule="sglang"`:

| family                            | pages of upstream (`P` slots a page)         | sized by        |
|-----------------------------------|----------------------------------------------|-----------------|
| token pools, "custom"             | `size // P + 1`, `size` = slots asked for    | ratio or bytes  |
| "mamba" (`P` = 1)                 | the same: `size + 1`                         | ratio or bytes  |
| "dsa"                             | `(size + P + 1) // P`, `size` = anchor's     | its anchor      |
| "v4_paged", "v4_state", "logical" | `int(ceil(device_slots / P) * ratio)`        | ratio           |

The extra page may exceed a byte budget by part of a page and a ratio by up to a page. A DSA indexer's anchor counts
with its padded size, pages times `P`, extra page included: the indexer has at least one page more than its anchor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, get_args

from refimpl.geometry import PoolSpec, require_whole

Rule = Literal["fit", "sglang"]
GB = 10**9
MOST = 10**6  # host pages for each device page: what is beyond was not meant


def pages_for_bytes(spec: PoolSpec, nbytes: int, rule: Rule = "fit") -> int:
    """Pages for a byte budget. `ValueError` for families that upstream does not size by bytes.

    >>> import torch; from refimpl import presets
    >>> spec = presets.mha(layers=32, heads=8, head_dim=128, dtype=torch.bfloat16, page_size=64)
    >>> pages_for_bytes(spec, 1 * GB), pages_for_bytes(spec, 1 * GB, rule="sglang")
    (119, 120)
    """
    _require_rule(rule)
    _require_bytes(spec, nbytes)
    if rule == "fit":
        return nbytes // spec.page_bytes
    _require_sized_by_bytes(spec)
    return _padded(slots_for_bytes(spec, nbytes), spec.page_size)


def pages_for_ratio(spec: PoolSpec, device_slots: int, ratio: float, rule: Rule = "fit") -> int:
    """Pages for `ratio` host slots per device slot.

    With `rule="sglang"`, a DSA indexer has the size of its anchor: pass the anchor's padded host size (its pages times
    its page size) as `device_slots`, and a ratio of 1.

    >>> import torch; from refimpl import presets
    >>> spec = presets.mha(layers=1, heads=1, head_dim=8, dtype=torch.uint8, page_size=64)
    >>> pages_for_ratio(spec, 1000, 2.0), pages_for_ratio(spec, 1024, 2.0, rule="sglang")
    (31, 33)
    >>> indexer = presets.dsa_indexer(layers=1, page_size=64)
    >>> pages_for_ratio(indexer, 33 * 64, 1, rule="sglang")
    34
    """
    _require_rule(rule)
    require_whole("device_slots", device_slots)
    require_ratio("ratio", ratio)
    if rule == "fit":
        return _rounded_down(device_slots * ratio) // spec.page_size
    if spec.family in _PAGES_FOR_RATIO:
        return _PAGES_FOR_RATIO[spec.family](device_slots, ratio, spec.page_size)
    return _padded(int(device_slots * ratio), spec.page_size)


def slots_for_bytes(spec: PoolSpec, nbytes: int) -> int:
    """Index units whose bytes fit, pages not yet considered."""
    _require_bytes(spec, nbytes)
    return nbytes * spec.page_size // spec.page_bytes


def common_pages(stages: Sequence[PoolSpec], nbytes: int, rule: Rule = "fit") -> int:
    """Pages that every pipeline rank can hold: ranks own different layers but must agree on page numbers.

    A rank that owns no layers of the pool holds any number of them.
    """
    _require_rule(rule)
    storing = [spec for spec in stages if spec.page_bytes]
    if not storing:
        raise ValueError(f"none of {len(stages)} pipeline ranks stores a byte of this pool; size it by its anchor")
    if rule == "fit":
        return min(pages_for_bytes(spec, nbytes) for spec in storing)
    _require_sized_by_bytes(storing[0])
    return _padded(min(slots_for_bytes(spec, nbytes) for spec in storing), storing[0].page_size)


def shares(device_bytes: Mapping[str, int], nbytes: int) -> dict[str, int]:
    """One budget divided between pools in proportion to their device bytes, never more than the whole.

    >>> shares({"full": 3, "window": 1}, 1 * GB)
    {'full': 750000000, 'window': 250000000}
    """
    whole = sum(device_bytes.values())
    return {name: nbytes * part // whole if whole else 0 for name, part in device_bytes.items()}


def pages_for_shares(device_pages: Mapping[str, int], page_bytes: Mapping[str, int], nbytes: int) -> dict[str, int]:
    """Pages of pools that have one budget together, each with the whole pages of its share (see `shares`).

    page_bytes  bytes of a page, riders included. A pool whose pages take none has as many for each of the device's as
                the others, before rounding; if all are so, as many as the device

    >>> pages_for_shares({"full": 300, "window": 100, "logical": 40}, {"full": 5, "window": 5, "logical": 0}, 1000)
    {'full': 150, 'window': 50, 'logical': 20}
    """
    whole = sum(pages * page_bytes[name] for name, pages in device_pages.items())
    return {name: pages * nbytes // whole if whole else pages for name, pages in device_pages.items()}


def require_ratio(what: str, ratio: float) -> None:
    """`ValueError` for what is no number, or one that no machine has the memory for."""
    if not (isinstance(ratio, int | float) and 0 <= ratio <= MOST):
        told = f"must be a number of host pages for each device page from 0 to {MOST:,}"
        raise ValueError(f"{what} {told}, got {ratio!r}")


def _require_rule(rule: Rule) -> None:
    if rule not in get_args(Rule):
        raise ValueError(f"rule must be one of {get_args(Rule)}, got {rule!r}")


def _require_bytes(spec: PoolSpec, nbytes: int) -> None:
    require_whole("nbytes", nbytes)
    if not spec.page_bytes:
        raise ValueError(f"pool {spec.name!r} stores no bytes; size it by its anchor")


def _require_sized_by_bytes(spec: PoolSpec) -> None:
    if spec.family in _PAGES_FOR_RATIO:
        raise ValueError(f"SGLang sizes no {spec.family} pool by bytes ({spec.name!r}); use pages_for_ratio")


def _rounded_down(number: float) -> int:
    """What floating point leaves just below a whole number is that number: 100 times 1.16 is 116."""
    return round(number) if math.isclose(number, round(number), rel_tol=1e-15) else int(number)


def _padded(slots: int, page_size: int) -> int:
    return slots // page_size + 1


def _after_anchor(anchor_slots: int, ratio: float, page_size: int) -> int:
    return (int(anchor_slots * ratio) + page_size + 1) // page_size


def _unpadded(device_slots: int, ratio: float, page_size: int) -> int:
    return int(-(-device_slots // page_size) * ratio)


# Families without the padding page of token pools; upstream takes no byte budget for them.
_PAGES_FOR_RATIO: dict[str, Callable[[int, float, int], int]] = {
    "dsa": _after_anchor,
    "v4_paged": _unpadded,
    "v4_state": _unpadded,
    "logical": _unpadded,
}
