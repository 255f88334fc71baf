"""The runtime of each platform: CUDA, or the emulated device."""

from __future__ import annotations

import itertools
from functools import cache

import numpy as np

from refimpl.emulated import QueueRuntime
from refimpl.runtime import Runtime


def runtime(platform: str) -> Runtime:
    """`ImportError` with the reason where the platform is not to be had."""
    return emulated() if platform == "emulated" else cuda()


@cache
def emulated() -> QueueRuntime:
    """A CUDA device made of CPU memory; threads run in another order at every launch."""
    from kernels_cupy import emu

    orders = itertools.cycle(range(5))

    def launch(instance: str, blocks: int, threads: int, arguments: np.ndarray) -> None:
        emu.launch(instance, blocks, threads, arguments, next(orders))

    return QueueRuntime(launch, emu.prepare)


@cache
def cuda() -> Runtime:
    from kernels_cupy.cuda_runtime import CudaRuntime

    return CudaRuntime()
