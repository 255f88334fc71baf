"""One stretch of host memory, registered once, from which many host pools take theirs in turn.

Registering pins every page, which costs most of a second per GiB. Suite and benchmark build thousands of pools, one
after another, so they share a registration.
"""

from __future__ import annotations

import mmap
import weakref

import torch

from refimpl import HostMemory
from refimpl.pinned import Block, CudaRegistrar

ALIGNMENT = 4096


class Arena(HostMemory):
    """`nbytes` of host memory: pinned where there is CUDA, pageable elsewhere.

    Pools neither register nor unregister their pieces. A piece holds whatever the pool before left there.
    """

    def __init__(self, nbytes: int) -> None:
        super().__init__()
        self.nbytes, self.used = nbytes, 0
        self._whole = torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8)
        self.pinned = torch.cuda.is_available()
        self._unregister = lambda: None
        if self.pinned:
            registrar, address = CudaRegistrar(), self._whole.data_ptr()
            registrar.register(address, nbytes)
            # The finaliser holds the tensor: memory must not be unmapped before it is unregistered.
            self._unregister = weakref.finalize(self, _release, registrar, self._whole)

    def allocate(self, nbytes: int, piece_bytes: int, registration_limit: int | None = None) -> Block:
        """A piece as a block that is registered already; there is nothing left to limit."""
        tensor = self.map(nbytes)
        pinned = self.pinned and nbytes > 0
        return Block(tensor, _InPlace() if pinned else None, [(tensor.data_ptr(), nbytes)] if pinned else [])

    def map(self, nbytes: int) -> torch.Tensor:
        """The next `nbytes`, beginning at a multiple of 4096 bytes. `MemoryError` when the arena is full."""
        begin = -(-self.used // ALIGNMENT) * ALIGNMENT
        if begin + nbytes > self.nbytes:
            raise MemoryError(
                f"the arena has {self.nbytes:,} bytes, {self.used:,} of them taken, and {nbytes:,} are asked for: "
                f"make it larger, or reset() it once the pools in it are closed"
            )
        self.used = begin + nbytes
        return self._whole[begin : begin + nbytes]

    def reset(self) -> None:
        """Hand out everything again. Pools that were made before must not be used any more."""
        self.used = 0

    def close(self) -> None:
        """Unregister; the memory is unmapped when its last view is gone. Idempotent."""
        self._unregister()
        self.nbytes = self.used = 0


class _InPlace(CudaRegistrar):
    """For blocks inside a registration: what they undo when they are closed is not theirs."""

    def unregister(self, address: int) -> None:
        pass


def _release(registrar: CudaRegistrar, whole: torch.Tensor) -> None:
    registrar.unregister(whole.data_ptr())
