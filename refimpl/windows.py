"""Device slots of a sliding-window pool, named by slots of the pool with the whole sequence.

Engines keep a table from one to the other. Eviction from the window zeroes its entries, and a rebuild moves rows: when
the table is read decides what is copied (SGLang issues 25889, 27294). So whoever queues a transfer says when.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch

from refimpl.indices import require_list

When = Literal["queued", "running"]
WHEN: tuple[When, ...] = get_args(When)


@dataclass(frozen=True, eq=False)
class Window:
    """
    full     slots of the full pool, whole pages
    mapping  for each slot of the full pool its slot in the window pool; 0 (padding on a device): it has none
    when     "queued": as the table stands when the transfer is queued, whatever becomes of it;
             "running": as it stands when the copy runs, for rows that are moved about meanwhile. A table on the GPU is
             read in order of the copy's stream, one on the CPU when the copy is submitted there
    """

    full: torch.Tensor
    mapping: torch.Tensor
    when: When = "queued"

    def __post_init__(self) -> None:
        if self.when not in WHEN:
            raise ValueError(f"a window is looked up when {' or '.join(map(repr, WHEN))}, got {self.when!r}")
        require_list(self.full, 1, "a window's full")
        require_list(self.mapping, 1, "a window's mapping:")

    def numel(self) -> int:
        return self.full.numel()

    def require_inside(self) -> None:
        """`ValueError` for a slot that the table does not have."""
        outside = self.full[(self.full < 0) | (self.full >= len(self.mapping))]
        if len(outside):
            raise ValueError(f"slot {outside[0].item()} is outside the table of {len(self.mapping)} slots")

    def slots(self) -> torch.Tensor:
        """Slots of the window pool now, where the table lies; outside of it there is no row. A host does not wait."""
        full = self.full.to(torch.int64)
        inside = (full >= 0) & (full < len(self.mapping))
        full = torch.where(inside, full, 0)
        if self.mapping.is_cuda and not full.is_cuda:
            full, inside = (t.pin_memory().to(self.mapping.device, non_blocking=True) for t in (full, inside))
        return torch.where(inside, self.mapping[full], 0).to(torch.int64)


def require_rows(window: Window, slots: torch.Tensor) -> None:
    """`ValueError` for a slot without a row: its entry was zeroed, and row 0 is not what is meant."""
    missing = (slots == 0).nonzero()
    if len(missing):
        slot = window.full.reshape(-1)[int(missing[0])].item()
        raise ValueError(
            f"slot {slot} has no row in the window: it was evicted. Look the window up when the transfer is queued "
            f'(when="queued"), or keep the entry until it is acknowledged'
        )
