"""The runtime of each device, one for all that work on it: GPUs, and emulated ones."""

from __future__ import annotations

import itertools
from functools import cache

import numpy as np

from refimpl.devices import number_of, platform_of, settled
from refimpl.emulated import QueueRuntime
from refimpl.runtime import Runtime


def runtime(device: str) -> Runtime:
    """`ImportError` with the reason where the platform is not to be had."""
    number = number_of(settled(device))
    return emulated(number) if platform_of(device) == "emulated" else _cuda(number)


def emulated(number: int = 0) -> QueueRuntime:
    """A CUDA device made of CPU memory; threads run in another order at every launch."""
    return _emulated(number)


def cuda() -> Runtime:
    """The GPU that is current."""
    return runtime("cuda")


@cache
def _emulated(number: int) -> QueueRuntime:
    from kernels_cupy import emu

    orders = itertools.cycle(range(5))

    def launch(instance: str, blocks: int, threads: int, arguments: np.ndarray) -> None:
        emu.launch(instance, blocks, threads, arguments, next(orders))

    return QueueRuntime(launch, emu.prepare, name=f"emulated:{number}")


@cache
def _cuda(number: int) -> Runtime:
    from kernels_cupy.cuda_runtime import CudaRuntime

    return CudaRuntime(number)
