"""Ceilings: what one plain memcpy between pinned memory and the device reaches, in the same run and the same memory.

Percent in this benchmark is percent of these. A short copy does not fill the bus, so rows of small payloads are held
against a copy that is as small.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from refimpl.support import DIRECTIONS
from verify.arena import Arena
from verify.bench.gpu.clock import Clock
from verify.bench.gpu.record import Ceiling
from verify.bench.record import Timing

MIB = 1 << 20
SIZES = (1 * MIB, 16 * MIB, 256 * MIB)
COPIES = 12


def measure(clock: Clock, arena: Arena, sizes: Sequence[int] = SIZES) -> list[Ceiling]:
    """Each size in each direction, and the largest one in both at once (bytes of both, counted together)."""
    arena.reset()
    host = [arena.map(max(sizes)).fill_(1) for _ in range(2)]
    device = [torch.ones(max(sizes), dtype=torch.uint8, device=clock.device) for _ in range(2)]
    found = []
    for nbytes in sizes:
        for direction in DIRECTIONS:
            copy = _copy(host[0][:nbytes], device[0][:nbytes], direction)
            clock.series(lambda copy=copy: copy, 2, 0)
            samples = clock.series(lambda copy=copy: copy, COPIES, 0).samples_s
            found.append(_ceiling(direction, nbytes, samples))
    both = [_copy(h, d, direction) for h, d, direction in zip(host, device, DIRECTIONS, strict=True)]
    samples = [max(clock.beside([both[0]] * COPIES, [both[1]] * COPIES)) / COPIES for _ in range(3)]
    return [*found, _ceiling("both", 2 * max(sizes), samples)]


def memory_needed(sizes: Sequence[int] = SIZES) -> int:
    """Bytes of host memory that `measure` takes."""
    return 2 * max(sizes) + 2 * MIB


def of(ceilings: Sequence[dict[str, Any]], direction: str, payload_bytes: int) -> float:
    """GB/s of the copy that a payload is held against."""
    return fitting(ceilings, direction, payload_bytes)["gb_per_s"]


def fitting(ceilings: Sequence[dict[str, Any]], direction: str, payload_bytes: int) -> dict[str, Any]:
    """The smallest copy that has as many bytes, or else the largest one."""
    sizes = {c["payload_bytes"]: c for c in ceilings if c["direction"] == direction}
    return sizes[min((size for size in sizes if size >= payload_bytes), default=max(sizes))]


def _copy(host: torch.Tensor, device: torch.Tensor, direction: str) -> Callable[[], None]:
    to, source = (host, device) if direction == "backup" else (device, host)

    def run() -> None:
        to.copy_(source, non_blocking=True)

    return run


def _ceiling(direction: str, nbytes: int, samples: list[float]) -> Ceiling:
    timing = Timing(samples)
    return Ceiling(direction, nbytes, timing, nbytes / timing.median_s / 1e9)
