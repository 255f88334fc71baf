"""CUDA's copies by address: the batched call through ctypes, plain ones where it is not to be had.

The bindings of cuda-python take lists, and turn 50,000 descriptors into C arrays in 13 ms; NumPy's arrays are C arrays.
"""

from __future__ import annotations

import ctypes

import numpy as np

from refimpl.cudart import Library, cudart
from refimpl.runtime import BATCHED

BATCHES_SINCE = 12080  # driver version
IN_STREAM_ORDER = 1  # cudaMemcpySrcAccessOrderStream
OVERLAP_WITH_COMPUTE = 1  # cudaMemcpyFlagPreferOverlapWithCompute
DEFAULT = 4  # cudaMemcpyDefault: the addresses say which way


class Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class Attributes(ctypes.Structure):
    """cudaMemcpyAttributes."""

    _fields_ = (
        ("order", ctypes.c_int),
        ("source", Location),
        ("to", Location),
        ("flags", ctypes.c_uint),
    )


class Copies:
    """
    library  None: the one that torch has loaded
    batches  whether the batched call is wanted, where it is to be had
    """

    batches = True

    def __init__(self, library: Library | None = None) -> None:
        self._library = library or cudart()
        self.why_not = self._no_batches()

    def _no_batches(self) -> str:
        """Why the batched call is not to be had; empty if it is."""
        if not self.batches:
            return "as was asked for"
        if self._library.driver < BATCHES_SINCE:
            return f"driver {self._library.driver} has no batched copy"
        if not hasattr(self._library.handle, "cudaMemcpyBatchAsync"):
            return f"CUDA runtime {self._library.version} has no batched copy"
        return ""

    def submit(self, stream: int, to: np.ndarray, source: np.ndarray, nbytes: np.ndarray, no_batches: str = "") -> str:
        """Copy `nbytes[i]` from `source[i]` to `to[i]` (uint64 each), in no order; returns by which call."""
        arrays = tuple(np.ascontiguousarray(a, np.uint64) for a in (to, source, nbytes))
        if self.why_not or no_batches:
            for copy in zip(*(a.tolist() for a in arrays), strict=True):
                self._plain(stream, *copy)
            return f"one by one: {self.why_not or no_batches}"
        self._batch(stream, *arrays)
        return BATCHED

    def _batch(self, stream: int, to: np.ndarray, source: np.ndarray, nbytes: np.ndarray) -> None:
        """One attribute for all: the list of what it applies to has one entry, 0, whatever the number of copies."""
        attributes = Attributes(order=IN_STREAM_ORDER, flags=OVERLAP_WITH_COMPUTE)
        first, size = ctypes.c_size_t(0), ctypes.c_size_t
        pointers = [ctypes.c_void_p(a.ctypes.data) for a in (to, source, nbytes)]
        failed = [] if self._library.version >= 13000 else [ctypes.byref(size())]
        error = self._library.handle.cudaMemcpyBatchAsync(
            *pointers,
            size(len(nbytes)),
            ctypes.byref(attributes),
            ctypes.byref(first),
            size(1),
            *failed,
            ctypes.c_void_p(stream),
        )
        self._library.check(error, f"a batch of {len(nbytes):,} copies")

    def _plain(self, stream: int, to: int, source: int, nbytes: int) -> None:
        pointer = ctypes.c_void_p
        error = self._library.handle.cudaMemcpyAsync(
            pointer(to), pointer(source), ctypes.c_size_t(nbytes), DEFAULT, pointer(stream)
        )
        self._library.check(error, f"a copy of {nbytes:,} bytes")
