"""The CUDA runtime that torch has loaded, for the calls that torch does not offer."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache

import torch


@dataclass(frozen=True)
class Library:
    """version, driver  of the runtime, and the newest that the driver knows: 13000 is CUDA 13.0"""

    handle: ctypes.CDLL
    version: int
    driver: int

    def check(self, error: int, what: str) -> None:
        """Raise for an error, and take it back from the context: it is told once, here."""
        if error:
            self.handle.cudaGetLastError()
            text = ctypes.c_char_p(self.handle.cudaGetErrorString(error)).value or b""
            raise RuntimeError(f"{what} failed: CUDA error {error} ({text.decode()})")


@cache
def cudart() -> Library:
    """`OSError` where torch has none."""
    handle = ctypes.CDLL(f"libcudart.so.{str(torch.version.cuda).split('.')[0]}")
    handle.cudaGetErrorString.restype = ctypes.c_void_p
    version, driver = ctypes.c_int(), ctypes.c_int()
    handle.cudaRuntimeGetVersion(ctypes.byref(version))
    handle.cudaDriverGetVersion(ctypes.byref(driver))
    return Library(handle, version.value, driver.value)
