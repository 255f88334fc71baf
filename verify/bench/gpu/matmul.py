"""What transfers cost a model that computes meanwhile: a loop of matmuls, alone and beside a loop of transfers."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass

import torch

from verify.bench.gpu.clock import Clock, Run, wait
from verify.bench.gpu.record import Interference
from verify.bench.record import Timing


@dataclass(frozen=True)
class Loop:
    """`count` products of two bf16 matrices of `size` × `size`; `rounds` alone and as many beside transfers."""

    size: int = 8192
    count: int = 120
    rounds: int = 3


def interference(clock: Clock, transfer: Run, payload: int, timing: Timing | None, loop: Loop) -> Interference:
    """Matmuls a second without and with transfers on another stream, which outlast them."""
    a, b = (torch.randn(loop.size, loop.size, device=clock.device).to(torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    front: list[Run] = [lambda: torch.matmul(a, b, out=out)] * loop.count
    alone_s, _ = clock.beside(front, [])
    one = timing.median_s if timing else alone_s
    count = max(2, math.ceil(1.3 * alone_s / one))
    alone, beside, rates = [], [], []
    while len(beside) < loop.rounds:
        alone.append(loop.count / clock.beside(front, [])[0])
        front_s, back_s = clock.beside(front, [transfer] * count)
        if back_s < front_s and clock.platform == "cuda":
            # Transfers ended first, so some matmuls had no company. Double them, and the round does not count.
            count *= 2
            alone.pop()
            continue
        beside.append(loop.count / front_s)
        rates.append(count * payload / back_s / 1e9)
    slowdown = 1 - statistics.median(beside) / statistics.median(alone)
    return Interference(alone, beside, slowdown, statistics.median(rates), kernel_seconds(clock, transfer))


def kernel_seconds(clock: Clock, transfer: Run, count: int = 3) -> float | None:
    """Seconds a transfer in which kernels ran (copies by an engine are none), or None where profiling is not allowed.

    A profiler leaves traces in the driver, so this comes last.
    """
    if clock.platform != "cuda":
        return None
    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            wait([transfer() for _ in range(count)])
            clock.finish()
    except RuntimeError:
        return None
    events = [e for e in profile.key_averages() if not e.key.startswith(("Memcpy", "Memset"))]
    return sum(e.self_device_time_total for e in events) / count / 1e6
