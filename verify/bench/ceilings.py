"""The plain copy: contiguous memory, as many bytes, between the same two kinds of memory.

It is the faster of two copies that everybody has at hand, by the median of the row it stands next to. It is a yardstick
and no ceiling: a backend that bypasses the caches where these two do not can be faster.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from refimpl import HostMemory

PLAIN_COPIES: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
    "torch copy_": lambda to, source: to.copy_(source),
    "numpy copyto": lambda to, source: np.copyto(to.numpy(), source.numpy()),
}


def threads(copy: str) -> int:
    """CPU threads that a plain copy uses: numpy's is one memcpy, torch divides it between its threads."""
    return torch.get_num_threads() if copy == "torch copy_" else 1


class Stretch:
    """Two stretches of memory, one as host pools have it and one as device pools do, touched and ready to be copied."""

    def __init__(self, nbytes: int) -> None:
        self.host = HostMemory().map(nbytes).fill_(1)
        self.device = torch.ones(nbytes, dtype=torch.uint8)

    def copies(self, nbytes: int, direction: str) -> dict[str, Callable[[], object]]:
        """By name, calls that copy the first `nbytes` from one to the other."""
        to, source = (self.host, self.device) if direction == "backup" else (self.device, self.host)
        to, source = to[:nbytes], source[:nbytes]
        return {name: lambda copy=copy: copy(to, source) for name, copy in PLAIN_COPIES.items()}
