"""Test memory: buffers between guard bands, that begin where they are told to, with gaps between rows if wanted.

And index lists in the memory of the emulated device.
"""

from __future__ import annotations

from functools import cache

import torch

from kernels_cupy.runtimes import emulated
from refimpl import DevicePool, HostMemory, PoolSpec
from refimpl.device_pool import row_shape
from verify.arena import Arena
from verify.fill import POISON

GUARD = 64  # bytes on either side
ARENA = 256 << 20  # bytes of pinned memory, more than any cell takes


@cache
def shared_arena() -> Arena:
    return Arena(ARENA)


def on_the_device(indices: torch.Tensor, complete: bool = False) -> torch.Tensor:
    """The list in the emulated device's memory, where it arrives in order of the stream; `complete`: it has."""
    memory = emulated().upload(indices.numpy()).view(indices.dtype)
    if complete:
        emulated().synchronize()
    return memory


class GuardedMemory(HostMemory):
    """Host memory of poison, with guard bands; `shift` bytes past an aligned address.

    pinned  taken from one arena that all share: the memory before it is handed out again by then
    """

    def __init__(self, shift: int = 0, pinned: bool = False) -> None:
        super().__init__()
        self.shift = shift
        self.arena = shared_arena() if pinned else None
        if self.arena:
            self.arena.reset()
        self.whole: list[torch.Tensor] = []

    def map(self, nbytes: int) -> torch.Tensor:
        room = nbytes + 2 * GUARD + self.shift
        self.whole.append(self.arena.map(room).fill_(POISON) if self.arena else _poison(room))
        first = GUARD + self.shift
        return self.whole[-1][first : first + nbytes]


class GuardedDevice:
    """A device pool of poison over guarded buffers: rows `gap` bytes apart, starts shifted by `shift` bytes."""

    def __init__(self, spec: PoolSpec, num_pages: int, gap: int = 0, shift: int = 0, device: str = "cpu") -> None:
        self.whole: list[torch.Tensor] = []
        buffers: dict[str, list[torch.Tensor]] = {}
        for c in spec.components:
            rows, pitch = num_pages * spec.tokens_per_page(c), c.row_bytes + gap
            buffers[c.name] = []
            for _ in spec.layers_of(c):
                self.whole.append(_poison(rows * pitch + 2 * GUARD + shift, device))
                first = GUARD + shift
                lines = self.whole[-1][first : first + rows * pitch].view(rows, pitch)[:, : c.row_bytes]
                buffers[c.name].append(lines.view(c.dtype).unflatten(1, row_shape(c)))
        self.pool = DevicePool.wrap(spec, buffers) if self.whole else DevicePool(spec, num_pages, device)

    def poison(self) -> None:
        for whole in self.whole:
            whole.fill_(POISON)


def _poison(nbytes: int, device: str = "cpu") -> torch.Tensor:
    # The allocator of torch aligns to 64 bytes; a shift counts from there.
    return torch.full((nbytes,), POISON, dtype=torch.uint8, device=device)
