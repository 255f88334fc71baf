"""The runtime on a GPU: torch's streams, events and memory, CuPy's kernels, CUDA's batched copy.

CuPy's current stream is not torch's, so every launch names its stream. Memory is torch's and in order of the stream it
was taken on; since every transfer ends on the caller's stream, whatever a transfer took may be let go at once.
"""

from __future__ import annotations

import threading
from collections import deque
from functools import cache
from typing import Any

import numpy as np
import torch

from kernels_cupy.copies import Copies
from kernels_cupy.specs import KERNELS, OPTIONS, kernel_of, source
from refimpl.runtime import Event, Stream

PINNED_BYTES = 8 << 20
ALIGNMENT = 256

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
        self._cupy_streams: dict[tuple[int, int], Any] = {}
        self._pinned = PinnedRing(PINNED_BYTES)
        self._one_at_a_time = threading.Lock()

    def compile(self) -> None:
        for kernel in KERNELS:
            try:
                for instance in kernel.instances:
                    _function(instance)
            except self._cupy.cuda.compiler.CompileException as failure:
                raise ImportError(f"{kernel.file} does not compile:\n{failure}") from failure

    # ---- streams

    def current(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream()

    def stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream()

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
        target = torch.empty(array.nbytes, dtype=torch.uint8, device="cuda")
        with self._one_at_a_time:
            source = self._pinned.take(array.nbytes)
            source.numpy()[:] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            target.copy_(source, non_blocking=True)
            self._pinned.in_use_until(self.record(self.current()))
        return target

    def download(self, stream: Stream, tensor: torch.Tensor) -> torch.Tensor:
        with torch.cuda.stream(stream):
            return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)

    def holds(self, tensor: torch.Tensor) -> bool:
        return tensor.is_cuda

    def keep(self, tensor: torch.Tensor) -> None:
        tensor.record_stream(self.current())

    # ---- work

    def copy(self, stream: Stream, to: np.ndarray, source: np.ndarray, nbytes: np.ndarray, no_batches: str = "") -> str:
        return self._copies.submit(stream.cuda_stream, to, source, nbytes, no_batches=no_batches)

    def launch(self, stream: Stream, kernel: str, blocks: int, arguments: np.ndarray) -> None:
        expected = kernel_of(kernel).arguments
        if arguments.dtype != expected:
            raise TypeError(f"{kernel} takes {expected}, got {arguments.dtype}")
        # As one opaque value: CuPy asks NumPy to describe a struct, at every launch, and that takes longer than it.
        opaque = np.ndarray((), _opaque(arguments.nbytes), arguments)
        with self._cupy_stream(stream):
            _function(kernel)((blocks,), (self.threads,), (opaque,))

    def _cupy_stream(self, stream: torch.cuda.Stream) -> Any:
        """CuPy's view of a stream of torch's; it keeps the stream alive."""
        key = stream.device_index, stream.cuda_stream
        if key not in self._cupy_streams:
            self._cupy_streams[key] = self._cupy.cuda.Stream.from_external(stream)
        return self._cupy_streams[key]


class PinnedRing:
    """A little pinned memory, handed out piece after piece, for lists on their way to the device.

    A piece is free again once the event after its copy has passed. When the next one is not, memory comes from torch:
    it takes longer, and nobody waits.
    """

    def __init__(self, nbytes: int) -> None:
        self._memory = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        self._in_use: deque[tuple[int, int, Event]] = deque()
        self._head = 0
        self._taken: tuple[int, int] | None = None

    def take(self, nbytes: int) -> torch.Tensor:
        """`nbytes` of pinned memory. Say next how long they are in use."""
        begin = self._head if self._head + nbytes <= len(self._memory) else 0
        while self._in_use and self._in_use[0][2].query():
            self._in_use.popleft()
        end = begin + -(-nbytes // ALIGNMENT) * ALIGNMENT
        if nbytes > len(self._memory) or any(begin < last and first < end for first, last, _ in self._in_use):
            self._taken = None
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        self._head, self._taken = end, (begin, end)
        return self._memory[begin : begin + nbytes]

    def in_use_until(self, event: Event) -> None:
        if self._taken:
            self._in_use.append((*self._taken, event))


@cache
def _opaque(nbytes: int) -> np.dtype:
    return np.dtype((np.void, nbytes))


@cache
def _function(kernel: str) -> Any:
    return _module(kernel_of(kernel).file).get_function(kernel)


@cache
def _module(file: str) -> Any:
    """One module a file, compiled by NVRTC when first used; CuPy keeps it on disk, by source and options."""
    import cupy

    kernel = next(k for k in KERNELS if k.file == file)
    return cupy.RawModule(code=source(kernel), options=OPTIONS, name_expressions=list(kernel.instances))
