"""How many pages a host pool gets: our rule and upstream's, which differ by a page.

GB means 1e9 bytes, as upstream's `--hicache-size` does. `rule="fit"` never exceeds what was asked for;
`rule="sglang"` adds upstream's extra page (`HostKVCache`: `page_num = size // page_size + 1`), which may exceed a byte
budget by part of a page and a ratio by up to a page.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from refimpl.geometry import PoolSpec

Rule = Literal["fit", "sglang"]
GB = 10**9


def pages_for_bytes(spec: PoolSpec, nbytes: int, rule: Rule = "fit") -> int:
    """Pages for a byte budget.

    >>> import torch; from refimpl import presets
    >>> spec = presets.mha(layers=32, heads=8, head_dim=128, dtype=torch.bfloat16, page_size=64)
    >>> pages_for_bytes(spec, 1 * GB), pages_for_bytes(spec, 1 * GB, rule="sglang")
    (119, 120)
    """
    _require_bytes(spec)
    return nbytes // spec.page_bytes if rule == "fit" else _padded(slots_for_bytes(spec, nbytes), spec.page_size)


def pages_for_ratio(spec: PoolSpec, device_slots: int, ratio: float, rule: Rule = "fit") -> int:
    """Pages for `ratio` host slots per device slot.

    >>> import torch; from refimpl import presets
    >>> spec = presets.mha(layers=1, heads=1, head_dim=8, dtype=torch.uint8, page_size=64)
    >>> pages_for_ratio(spec, 1000, 2.0), pages_for_ratio(spec, 1024, 2.0, rule="sglang")
    (31, 33)
    """
    slots = int(device_slots * ratio)
    return slots // spec.page_size if rule == "fit" else _padded(slots, spec.page_size)


def slots_for_bytes(spec: PoolSpec, nbytes: int) -> int:
    """Index units whose bytes fit, pages not yet considered."""
    _require_bytes(spec)
    return nbytes * spec.page_size // spec.page_bytes


def common_pages(stages: Sequence[PoolSpec], nbytes: int, rule: Rule = "fit") -> int:
    """Pages that every pipeline rank can hold: ranks own different layers but must agree on page numbers.

    A rank that owns no layers of the pool holds any number of them.
    """
    storing = [spec for spec in stages if spec.page_bytes]
    if not storing:
        raise ValueError(f"none of {len(stages)} pipeline ranks stores a byte of this pool; size it by its anchor")
    if rule == "fit":
        return min(pages_for_bytes(spec, nbytes) for spec in storing)
    return _padded(min(slots_for_bytes(spec, nbytes) for spec in storing), storing[0].page_size)


def shares(device_bytes: Mapping[str, int], nbytes: int) -> dict[str, int]:
    """One budget divided between pools in proportion to their device bytes, never more than the whole.

    >>> shares({"full": 3, "window": 1}, 1 * GB)
    {'full': 750000000, 'window': 250000000}
    """
    whole = sum(device_bytes.values())
    return {name: nbytes * part // whole if whole else 0 for name, part in device_bytes.items()}


def _require_bytes(spec: PoolSpec) -> None:
    if not spec.page_bytes:
        raise ValueError(f"pool {spec.name!r} stores no bytes; size it by its anchor")


def _padded(slots: int, page_size: int) -> int:
    return slots // page_size + 1
