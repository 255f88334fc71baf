"""The runtime on a GPU: torch's events and memory, CuPy's kernels, CUDA's batched copy.

Streams of our own are none of torch's 32, which are everybody's: who was dealt the same one would be held up with us.
They are never destroyed, for torch may keep memory in their order. CuPy's current stream is not torch's, so a launch
names its stream. Memory is torch's and in order of the stream it was taken on; since every transfer ends on the
caller's stream, whatever a transfer took may be let go at once.

Torch finds the GPU of a stream or a tensor by itself. Launches and copies by address go to the current GPU, and a
handle of 0 is the default stream of that one: for them it is made current if it is not.
"""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from typing import Any

import numpy as np
import torch

from kernels_cupy.copies import Copies
from kernels_cupy.specs import KERNELS, OPTIONS, kernel_of, source
from refimpl.hooks import reached
from refimpl.runtime import STREAMS, Event, Stream, require_here

PINNED_BYTES = 8 << 20

ALIGNMENT = 256

EQUAL = ctypes.c_uint(1)  # CU_STREAM_WAIT_VALUE_EQ
CYCLES_A_SECOND = 1.8e9  # of an SM, about

LEGACY_DEFAULT = (0, 1)  # handles of the stream that synchronises with all others
PER_THREAD_DEFAULT = 2  # another stream in each thread

CURRENT: AbstractContextManager[Any] = nullcontext()  # made once: submitting a transfer takes microseconds


class CudaRuntime:
    """number  of the GPU"""

    threads = 1024

    def __init__(self, number: int) -> None:
        try:
            import cupy
        except ImportError as missing:
            raise ImportError(f"CuPy cannot be imported ({missing}); it launches the kernels") from missing
        self.name, self._number, self._device = f"cuda:{number}", number, torch.device("cuda", number)
        self._cupy: Any = cupy
        # A GPU that torch has not used yet is not current, though it may say so.
        torch.empty(1, device=self._device)
        self._copies = Copies()
        self._cupy_streams: dict[int, Any] = {}
        self._dealt: deque[torch.cuda.Stream] = deque()  # the one that was dealt last comes last
        self._beside: dict[Hashable, torch.cuda.Stream] = {}
        self._pinned = PinnedRing(PINNED_BYTES)
        self._gates: list[tuple[Event, torch.Tensor]] = []
        self._one_at_a_time = threading.Lock()

    def compile(self) -> None:
        for kernel in KERNELS:
            try:
                with self._current():
                    _module(kernel.file).compile()  # CuPy keeps one for each GPU
                    for instance in kernel.instances:
                        _function(instance)
            except self._cupy.cuda.compiler.CompileException as failure:
                raise ImportError(f"{kernel.file} does not compile:\n{failure}") from failure

    def _current(self) -> AbstractContextManager[Any]:
        """Inside, this GPU is the current one, as it mostly is."""
        return CURRENT if torch.cuda.current_device() == self._number else torch.cuda.device(self._number)

    # ---- streams

    def current(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self._number)

    def stream(self) -> torch.cuda.Stream:
        with self._one_at_a_time:
            if len(self._dealt) < STREAMS:
                self._dealt.append(self._new_stream())
            else:
                self._dealt.rotate(-1)
            return self._dealt[-1]

    def beside(self, stream: Stream) -> torch.cuda.Stream:
        key = self.identity(stream)
        if key not in self._beside:
            with self._one_at_a_time:
                if key not in self._beside:
                    self._beside[key] = self._new_stream()
        return self._beside[key]

    def identity(self, stream: Stream) -> Hashable:
        handle = stream.cuda_stream
        return handle, threading.get_ident() if handle == PER_THREAD_DEFAULT else 0

    def _new_stream(self) -> torch.cuda.Stream:
        with self._current():
            own = self._cupy.cuda.Stream(non_blocking=True)
        self._cupy_streams[own.ptr] = own
        return torch.cuda.ExternalStream(own.ptr, self._device)

    def on(self, stream: Stream) -> AbstractContextManager[None]:
        return torch.cuda.stream(stream)

    def issue(self, stream: Stream, call: Callable[[], object]) -> None:
        with torch.cuda.stream(stream):
            call()

    def gate(self, stream: Stream) -> Callable[[], object]:
        """The stream looks at a word of pinned memory until it is 1; neither the host nor an SM is kept busy."""
        with self._one_at_a_time:
            self._gates = [(event, word) for event, word in self._gates if not event.query()]
        word = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        with self._current():
            error = ctypes.CDLL("libcuda.so.1").cuStreamWaitValue32_v2(
                ctypes.c_void_p(stream.cuda_stream), ctypes.c_uint64(word.data_ptr()), ctypes.c_uint32(1), EQUAL
            )
        if error:
            raise RuntimeError(f"a stream cannot wait for a word in memory here: CUDA driver error {error}")
        with self._one_at_a_time:
            self._gates.append((self.record(stream), word))
        return partial(word.fill_, 1)

    def delay(self, stream: Stream, seconds: float) -> None:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(int(seconds * CYCLES_A_SECOND))

    def batchable(self, stream: Stream) -> bool:
        """The batched copy returns an error on the legacy default stream (vLLM issue 46345)."""
        return stream.cuda_stream not in LEGACY_DEFAULT

    def record(self, stream: Stream, timed: bool = False) -> Event:
        event = torch.cuda.Event(enable_timing=timed)
        event.record(stream)
        return event

    def seconds(self, begin: Event, end: Event) -> float:
        assert isinstance(begin, torch.cuda.Event)
        assert isinstance(end, torch.cuda.Event)
        return begin.elapsed_time(end) / 1e3

    def wait(self, stream: Stream, event: Event) -> None:
        stream.wait_event(event)

    # ---- memory

    def empty(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def upload(self, array: np.ndarray) -> torch.Tensor:
        """Through pinned memory: a copy from pageable memory may wait for the stream."""
        target = torch.empty(array.nbytes, dtype=torch.uint8, device=self._device)
        with self._one_at_a_time:
            source = self._pinned.take(array.nbytes)
            source.numpy()[:] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            target.copy_(source, non_blocking=True)
            self._pinned.in_use_until(self.record(self.current()))
        return target

    def download(self, stream: Stream, tensor: torch.Tensor) -> torch.Tensor:
        with torch.cuda.stream(stream):
            return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)

    def joined(self, lists: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.cat([indices.to(torch.int64) for indices in lists])

    def found(self, look_up: Callable[[], torch.Tensor], count: int) -> torch.Tensor:
        return look_up()

    def holds(self, tensor: torch.Tensor) -> bool:
        if tensor.is_cuda and tensor.get_device() != self._number:
            require_here(str(tensor.device), self.name)
        return tensor.is_cuda

    def keep(self, tensor: torch.Tensor) -> None:
        tensor.record_stream(self.current())

    # ---- work

    def copy(self, stream: Stream, to: np.ndarray, source: np.ndarray, nbytes: np.ndarray, no_batches: str = "") -> str:
        reached("copy", self, stream)
        with self._current():
            return self._copies.submit(stream.cuda_stream, to, source, nbytes, no_batches=no_batches)

    def launch(self, stream: Stream, kernel: str, blocks: int, arguments: np.ndarray) -> None:
        expected = kernel_of(kernel).arguments
        if arguments.dtype != expected:
            raise TypeError(f"{kernel} takes {expected}, got {arguments.dtype}")
        reached("relayout", self, stream)
        # As one opaque value: CuPy asks NumPy to describe a struct, at every launch, and that takes longer than it.
        opaque = np.ndarray((), _opaque(arguments.nbytes), arguments)
        # To name the stream takes less time than to make it CuPy's current one and then the one before it again.
        with self._current():
            _function(kernel)((blocks,), (self.threads,), (opaque,), stream=self._cupy_stream(stream))

    def _cupy_stream(self, stream: torch.cuda.Stream) -> Any:
        """The same stream to CuPy; of one that is torch's, it keeps it alive."""
        key = stream.cuda_stream
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
