"""Host memory of exact size, registered with the driver in chunks that no page straddles.

Pinned allocators round up to a power of two, so a pool maps its own memory and registers it (`cudaHostRegister`).
One registration has a size limit and one copy may not span two, therefore chunks end on page edges. Memory that is
unmapped while still registered poisons whatever is mapped there next, therefore a registration is always undone first:
on failure, on `close()`, and when the pool is forgotten.
"""

from __future__ import annotations

import ctypes
import mmap
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

import torch

from refimpl import numa
from refimpl.cudart import cudart
from refimpl.devices import current, settled
from refimpl.teardown import call_all


class Registrar(Protocol):
    """What pins memory. Raises on failure.

    Whatever is registered is registered for all devices. `device_address` is the address that one of them, "cuda:1"
    say, uses for a host address; None where it has none and only the copy engine can reach the memory.
    """

    def register(self, address: int, nbytes: int) -> None: ...
    def unregister(self, address: int) -> None: ...
    def device_address(self, address: int, device: str) -> int | None: ...


class Block:
    """`nbytes` of host memory as a uint8 tensor. The memory itself lives as long as any tensor that shares it."""

    def __init__(self, tensor: torch.Tensor, registrar: Registrar | None, chunks: list[tuple[int, int]]) -> None:
        self.tensor = tensor
        self.chunks = chunks
        self._registrar = registrar
        self._first: list[Callable[[], None]] = []
        self._doubtful: list[tuple[int, int]] = []
        weakref.finalize(self, _forgotten, self._first, registrar, chunks, self._doubtful)

    def close_after(self, call: Callable[[], None]) -> None:
        """Call this before registrations are undone, however that comes about: it waits for whoever uses the memory."""
        self._first.append(call)

    def forget(self, call: Callable[[], None]) -> None:
        """Undo one `close_after`, for somebody who uses the memory no longer."""
        if call in self._first:
            self._first.remove(call)

    def device_address(self, address: int, device: str) -> int | None:
        """The address under which a device reaches `address`, if it has one; the same one for pageable memory."""
        return self._registrar.device_address(address, device) if self._registrar else address

    def close(self) -> None:
        """Undo every registration. Calling it again does what an interrupt has left."""
        _close(self._first, self._registrar, self.chunks, self._doubtful)


class HostMemory:
    """Where host pools take their memory: pageable, or pinned when there is a `registrar`.

    numa_node  the node that it lies on, and no other (`numa.nearest` knows a GPU's); None: wherever the system puts it.
               `ValueError` for a node that is not there, `OSError` where the system refuses
    """

    def __init__(self, registrar: Registrar | None = None, numa_node: int | None = None) -> None:
        if numa_node is not None:
            numa.require_node(numa_node)
        self.registrar, self.numa_node = registrar, numa_node

    def allocate(self, nbytes: int, piece_bytes: int, registration_limit: int | None = None) -> Block:
        """Exactly `nbytes`, registered in chunks that are multiples of `piece_bytes` (no piece spans two chunks).

        registration_limit  the most bytes that one registration may hold; None: no limit
        """
        tensor = self.map(nbytes)
        if self.registrar is None or not nbytes:
            return Block(tensor, None, [])
        done, doubtful = list[tuple[int, int]](), list[tuple[int, int]]()
        try:
            for chunk in chunk_ranges(tensor.data_ptr(), nbytes, piece_bytes, registration_limit):
                doubtful += (chunk,)  # before: an interrupt comes behind the call, or before the driver was asked
                try:
                    self.registrar.register(*chunk)
                except Exception:
                    doubtful.clear()
                    raise
                done += doubtful
                del doubtful[:]
            return Block(tensor, self.registrar, done)
        except BaseException:
            with suppress(Exception):  # the reason is what counts
                _unregister(self.registrar, done, doubtful)
            raise

    def map(self, nbytes: int) -> torch.Tensor:
        """Fresh zeroed memory; `MemoryError` where there is none. An override may take it from elsewhere."""
        if not nbytes:
            return torch.empty(0, dtype=torch.uint8)
        try:
            # Shared with forked children: of private memory a writer would get a copy, and the driver keep the old.
            memory = mmap.mmap(-1, nbytes, mmap.MAP_SHARED | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError) as failure:
            raise MemoryError(
                f"{nbytes:,} bytes of host memory are not to be had ({failure}); take fewer pages"
            ) from failure
        tensor = torch.frombuffer(memory, dtype=torch.uint8)
        if self.numa_node is not None:
            numa.bind(tensor.data_ptr(), nbytes, self.numa_node)
        return tensor


def chunk_ranges(address: int, nbytes: int, piece_bytes: int, limit: int | None) -> Iterator[tuple[int, int]]:
    """`(address, bytes)` of each registration: the most whole pieces that the limit allows, and a last short one."""
    if limit is not None and limit < piece_bytes:
        raise ValueError(
            f"a registration limit of {limit:,} bytes cannot hold one page of {piece_bytes:,} bytes; raise the limit"
        )
    step = nbytes if limit is None else limit // piece_bytes * piece_bytes
    for start in range(0, nbytes, step):
        yield address + start, min(step, nbytes - start)


NOT_SUPPORTED = 801  # cudaErrorNotSupported


class CudaRegistrar:
    """Pins memory for all CUDA devices.

    device  the one whose context asks the driver for it ("cuda": the one that is current now)
    """

    PORTABLE_AND_MAPPED = 0x01 | 0x02

    def __init__(self, device: str = "cuda") -> None:
        self.device = settled(device)

    def register(self, address: int, nbytes: int) -> None:
        self._call("cudaHostRegister", address, ctypes.c_size_t(nbytes), self.PORTABLE_AND_MAPPED)

    def unregister(self, address: int) -> None:
        self._call("cudaHostUnregister", address)

    def device_address(self, address: int, device: str) -> int | None:
        """Usually the same. Not where a device cannot use the host's addresses (upstream issue 40232)."""
        alias, library = ctypes.c_void_p(), cudart()
        with current(device):
            error = library.handle.cudaHostGetDevicePointer(ctypes.byref(alias), ctypes.c_void_p(address), 0)
        if error == NOT_SUPPORTED:
            library.handle.cudaGetLastError()
            return None
        library.check(error, f"cudaHostGetDevicePointer at {address:#x}")
        return alias.value

    def _call(self, function: str, address: int, *arguments: Any) -> None:
        torch.cuda.init()
        library = cudart()
        with current(self.device):
            error = getattr(library.handle, function)(ctypes.c_void_p(address), *arguments)
        library.check(error, f"{function} at {address:#x}")


def _close(
    first: list[Callable[[], None]],
    registrar: Registrar | None,
    chunks: list[tuple[int, int]],
    doubtful: list[tuple[int, int]],
) -> None:
    call_all((*first, partial(_unregister, registrar, chunks, doubtful)))


def _forgotten(*block: Any) -> None:
    """Nobody can call again what is interrupted here."""
    try:
        _close(*block)
    except BaseException:
        _close(*block)
        raise


def _unregister(registrar: Registrar | None, chunks: list[tuple[int, int]], doubtful: list[tuple[int, int]]) -> None:
    """The last one first, each taken off the list; whatever the others raise.

    doubtful  chunks at which an interrupt came: whether the driver knows them by now nobody can tell but the driver
    """
    if registrar is None:
        return
    for address, _ in doubtful:
        with suppress(Exception):
            registrar.unregister(address)
    del doubtful[:]
    failure: Exception | None = None
    while chunks:
        doubtful += chunks[-1:]
        del chunks[-1]  # nothing is called between these two
        try:
            registrar.unregister(doubtful[-1][0])
        except Exception as error:
            failure = error
        del doubtful[:]
    try:
        if failure:
            raise failure
    finally:
        del failure  # its traceback names this frame
