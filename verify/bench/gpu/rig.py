"""One pool on the device, and what every byte of either side must be before and after a transfer.

The oracle runs on the device: it is given host buffers that lie there, so that hundreds of MiB take milliseconds. Host
pools are compared after uploading them.
"""

from __future__ import annotations

import numpy as np
import torch

from refimpl import DevicePool, HostMemory, PoolSpec, oracle, slots_of
from refimpl.host_buffers import HostBuffers
from verify.bench.measure import POISON, SPARE_PAGES, Indices, copy, device_tensors, host_tensors, wipe

Bytes = list[torch.Tensor]  # flat, one for each tensor of a side


class OnDevice(HostMemory):
    """Where the oracle's host buffers lie."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device = device

    def map(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)


class Rig:
    """A device pool of random bytes, which stays as it is, and one to work with.

    at  token slots of the pages that move, on the host and on the device
    """

    def __init__(self, spec: PoolSpec, pages: int, scattered: bool, device: str, seed: int) -> None:
        self.spec, self.pages, self.num_pages, self.device = spec, pages, pages + SPARE_PAGES, device
        self.source, self.work, self.loaded = (DevicePool(spec, self.num_pages, device) for _ in range(3))
        generator = torch.Generator(device).manual_seed(seed)
        for tensor in device_tensors(self.source):
            tensor.random_(0, 256, generator=generator)
        random = np.random.default_rng(seed)
        self.at: Indices = self._places(scattered, random), self._places(scattered, random)

    def _places(self, scattered: bool, random: np.random.Generator) -> torch.Tensor:
        order = random.permutation(self.num_pages) if scattered else np.arange(self.num_pages)
        return slots_of(order[: self.pages], self.spec.page_size)


class Stage:
    """A rig with one host layout: the bytes of both sides, as the oracle has them, for both directions."""

    def __init__(self, rig: Rig, layout: str) -> None:
        self.rig, self.layout, self.at = rig, layout, rig.at
        self._stored = HostBuffers(rig.spec, layout, rig.num_pages, OnDevice(rig.device), None)
        self.stored = host_tensors(self._stored)
        wipe(self.stored)
        oracle.backup(self._stored, rig.source, *rig.at)
        wipe(device_tensors(rig.loaded))
        oracle.load(self._stored, rig.loaded, *rig.at)

    @property
    def piece_bytes(self) -> int:
        """Bytes of a host page that lie together, in the buffer where they are fewest; 0 where layers lie apart."""
        held = [buffer for buffer, _ in self._stored.storage]
        return min(b.piece_bytes for b in held) if all(b.keeps_page_together for b in held) else 0

    def fill(self, host: HostBuffers, direction: str) -> None:
        """The bytes that are read, and poison where bytes will be written."""
        held, work = host_tensors(host), device_tensors(self.rig.work)
        if direction == "backup":
            copy(held, [torch.full_like(tensor, POISON) for tensor in self.stored])
            copy(work, device_tensors(self.rig.source))
        else:
            copy(held, self.stored)
            wipe(work)

    def fault(self, host: HostBuffers, direction: str) -> str:
        """The first byte of either side that is not what the oracle has; empty if there is none."""
        right = device_tensors(self.rig.source if direction == "backup" else self.rig.loaded)
        return _difference("host", host_tensors(host), self.stored) or _difference(
            "device", device_tensors(self.rig.work), right
        )


def _difference(side: str, held: Bytes, right: Bytes) -> str:
    for number, (there, b) in enumerate(zip(held, right, strict=True)):
        a = there.to(b.device)
        if not torch.equal(a, b):
            first = int((a != b).nonzero()[0])
            return f"byte {first:,} of {side} tensor {number} is {int(a[first]):#04x}, not {int(b[first]):#04x}"
    return ""
