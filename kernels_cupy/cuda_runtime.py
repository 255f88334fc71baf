"""The runtime on a GPU: torch's streams, events and memory, CuPy's kernels, CUDA's batched copy.

CuPy's current stream is not torch's, so every launch names its stream. Memory is torch's and in order of the stream it
was taken on; since every transfer ends on the caller's stream, whatever a transfer took may be let go at once.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch

from kernels_cupy.copies import Copies
from kernels_cupy.specs import KERNELS, OPTIONS, kernel_of, source
from refimpl.runtime import Event, Stream

LEGACY_DEFAULT = (0, 1)  # handles of the stream that synchronises with all others


class CudaRuntime:
    threads = 1024

    def __init__(self) -> None:
        try:
            import cupy
        except ImportError as missing:
            raise ImportError(f"CuPy cannot be imported ({missing}); it launches the kernels") from missing
        self._cupy: Any = cupy
        self._copies = Copies()
        self._private: dict[tuple[str, int], torch.cuda.Stream] = {}

    # ---- streams

    def current(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream()

    def private(self, purpose: str) -> torch.cuda.Stream:
        key = purpose, torch.cuda.current_device()
        if key not in self._private:
            self._private[key] = torch.cuda.Stream()
        return self._private[key]

    def batchable(self, stream: Stream) -> bool:
        """The batched copy returns an error on the legacy default stream (vLLM issue 46345)."""
        return stream.cuda_stream not in LEGACY_DEFAULT

    def record(self, stream: Stream) -> Event:
        event = torch.cuda.Event()
        event.record(stream)
        return event

    def wait(self, stream: Stream, event: Event) -> None:
        stream.wait_event(event)

    # ---- memory

    def empty(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device="cuda")

    def upload(self, array: np.ndarray) -> torch.Tensor:
        """Through pinned memory: a copy from pageable memory may wait for the stream."""
        pinned = torch.empty(array.nbytes, dtype=torch.uint8, pin_memory=True)
        pinned.numpy()[:] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        return pinned.to("cuda", non_blocking=True)

    def holds(self, tensor: torch.Tensor) -> bool:
        return tensor.is_cuda

    def keep(self, tensor: torch.Tensor) -> None:
        tensor.record_stream(self.current())

    # ---- work

    def copy(self, stream: Stream, to: np.ndarray, source: np.ndarray, nbytes: np.ndarray) -> str:
        return self._copies.submit(stream.cuda_stream, to, source, nbytes)

    def launch(self, stream: Stream, kernel: str, blocks: int, arguments: np.ndarray) -> None:
        expected = kernel_of(kernel).arguments
        if arguments.dtype != expected:
            raise TypeError(f"{kernel} takes {expected}, got {arguments.dtype}")
        with self._cupy.cuda.Stream.from_external(stream):
            _function(kernel)((blocks,), (self.threads,), (arguments,))


@cache
def _function(kernel: str) -> Any:
    return _module(kernel_of(kernel).file).get_function(kernel)


@cache
def _module(file: str) -> Any:
    """One module a file, compiled by NVRTC when first used; CuPy keeps it on disk, by source and options."""
    import cupy

    kernel = next(k for k in KERNELS if k.file == file)
    return cupy.RawModule(code=source(kernel), options=OPTIONS, name_expressions=list(kernel.instances))
