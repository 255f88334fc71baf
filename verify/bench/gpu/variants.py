"""Other strategies for the same bytes, as other engines use them, to hold ours against.

Each is a function that prepares a transfer. What they leave out is what makes the difference: no overlap of relayout
and copy, or no batches, so that each piece is a call to the driver. A call from Python costs more than one from C;
where a cell is marked as submitted slower than the device could run, that is part of its figure.
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from kernels_cupy.descriptors import describe_runs
from kernels_cupy.jobs import device_begins, jobs, runs_and_bytes
from kernels_cupy.launches import Shape
from kernels_cupy.lists import place
from kernels_cupy.runtimes import runtime
from kernels_cupy.sm_copy import across_the_bus
from refimpl import DevicePool, Receipt, UnsupportedPairing, plan
from refimpl.geometry import NO_LAYER
from refimpl.host_buffers import HostBuffers
from refimpl.indices import Items
from refimpl.runtime import Completion
from verify.bench.gpu.rig import OnDevice
from verify.bench.measure import Indices

Copy = Callable[[int, int, int], None]  # destination, source, bytes


def one_staging_buffer(
    host: HostBuffers, device: DevicePool, at: Indices, direction: str, platform: str
) -> Callable[[], Receipt]:
    """All pages are gathered into one buffer in the host's layout, then copied page by page; a load, in reverse.

    Upstream copies like this where a page has less than 128 KiB. Its relayout is one kernel, this one torch's by layer.
    """
    if not all(buffer.keeps_page_together for buffer, _ in host.storage):
        raise UnsupportedPairing(f"{host.layout} scatters a page, there is no page to stage")
    host_pages, device_pages = (_pages(slots, host.page_size) for slots in at)
    stage = HostBuffers(host.spec, host.layout, len(host_pages), OnDevice(str(device.device)), None)
    there = torch.from_numpy(device_pages).to(device.device)
    copies = np.concatenate([_pieces(h, s, host_pages) for h, s in zip(_firsts(host), _firsts(stage), strict=True)])
    to, source = (0, 1) if direction == "backup" else (1, 0)
    moves = copies[:, [to, source, 2]].tolist()

    def run() -> Receipt:
        if direction == "backup":
            _relayout(stage, device, there, direction)
        _copy_each(moves, platform)
        if direction == "load":
            _relayout(stage, device, there, direction)
        return Receipt("one staging buffer", int(copies[:, 2].sum()), len(moves))

    return run


def memcpy_one_by_one(
    host: HostBuffers, device: DevicePool, at: Indices, direction: str, platform: str
) -> Callable[[], Receipt]:
    """One driver call for each run of the plan, neighbours merged."""
    host_pages, device_pages = (_pages(slots, host.page_size) for slots in at)
    made = plan(host, device)
    runs = made.runs(host_pages, device_pages, (*host.spec.owned_layers, *NO_LAYER))
    found = [merged(h, d, nbytes, device_begins=device_begins(made).tolist()) for h, d, nbytes in runs]
    columns = [np.concatenate(arrays) for arrays in zip(*found, strict=True)]
    to, source = (0, 1) if direction == "backup" else (1, 0)
    moves = np.stack([columns[to], columns[source], columns[2]], axis=1).tolist()
    total = int(columns[2].sum())

    def run() -> Receipt:
        _copy_each(moves, platform)
        return Receipt("memcpy one by one", total, len(moves))

    return run


def words_of_eight_bytes(
    host: HostBuffers, device: DevicePool, at: Indices, direction: str, platform: str
) -> Callable[[], Receipt]:
    """Our kernel as upstream launches its older one: two blocks, words of 8 bytes, a warp for every KiB of a run."""
    device_runtime, layers = runtime(platform), host.spec.owned_layers
    stream, made = device_runtime.current(), plan(host, device)
    items = Items(_pages(at[0], host.page_size), _pages(at[1], host.page_size))
    lists = place(device_runtime, stream, items, ("host", "device"))
    shape = Shape(2, 32, 1024)
    wide = [launch for job in jobs(made, layers) for launch in across_the_bus(made, job, direction, shape)]
    if any(launch.kernel not in ("copy_runs<16>", "copy_runs<8>") for launch in wide):
        raise UnsupportedPairing("rows that are no multiple of 8 bytes")
    narrow = [replace(launch, kernel="copy_runs<8>") for launch in wide]

    def run() -> Receipt:
        for launch in narrow:
            launch.submit(device_runtime, stream, lists.host, lists.device, len(items))
        runs, nbytes = runs_and_bytes(made, layers, len(items))
        done = Completion(device_runtime.record(stream))
        return Receipt("words of 8 bytes", nbytes, runs, len(narrow), event=done)

    return run


def merged(
    host: np.ndarray, other: np.ndarray, run: int, begins: Sequence[int] = (), device_begins: Sequence[int] = ()
) -> np.ndarray:
    """Runs of so many bytes at addresses (64 bits): `[host, other, bytes]` of the copies that they come to.

    begins         of registrations, ascending
    device_begins  of the device's allocations, ascending
    """
    copies, only = np.empty((3, len(host)), np.int64), np.zeros(1, np.int64)
    there, here = ((np.ascontiguousarray(side).view(np.int64), only, 0, 1, 0) for side in (host, other))
    edges = [np.array(each, np.uint64).view(np.int64) for each in (begins, device_begins)]
    count = describe_runs(copies, 0, there, only, here, only, run, False, *edges)
    return copies[:, :count].view(np.uint64)


VARIANTS: dict[str, Callable[[HostBuffers, DevicePool, Indices, str, str], Callable[[], Receipt]]] = {
    "one staging buffer": one_staging_buffer,
    "memcpy one by one": memcpy_one_by_one,
    "2 blocks of 8-byte words": words_of_eight_bytes,
}


def _firsts(buffers: HostBuffers) -> list[tuple[int, int]]:
    """Address of page 0 and bytes from page to page, of every range that holds whole pages."""
    addresses, _, sizes = buffers.get_contiguous_buf_infos()
    return list(zip(addresses, sizes, strict=True))


def _pieces(host: tuple[int, int], stage: tuple[int, int], host_pages: np.ndarray) -> np.ndarray:
    """`(host, staging, bytes)` of each page."""
    (first, nbytes), (staged, _) = host, stage
    numbers = np.arange(len(host_pages))
    return np.stack([first + host_pages * nbytes, staged + numbers * nbytes, np.full(len(numbers), nbytes)], axis=1)


def _relayout(stage: HostBuffers, device: DevicePool, pages: torch.Tensor, direction: str) -> None:
    for c in stage.spec.components:
        for layer in stage.spec.layers_of(c):
            first = 0
            for staged in stage.part_views(c.name, layer):
                rows = device.view(c.name, layer)[..., first : first + staged.shape[-1]]
                first += staged.shape[-1]
                if direction == "backup":
                    staged.copy_(rows[pages])
                else:
                    rows[pages] = staged


def _copy_each(moves: list[list[int]], platform: str) -> None:
    call = _cuda_copy() if platform == "cuda" else ctypes.memmove
    for to, source, nbytes in moves:
        call(to, source, nbytes)


def _cuda_copy() -> Copy:
    runtime: Any = importlib.import_module("cupy.cuda").runtime
    stream, kind, copy = torch.cuda.current_stream().cuda_stream, runtime.memcpyDefault, runtime.memcpyAsync
    return lambda to, source, nbytes: copy(to, source, nbytes, kind, stream)


def _pages(slots: torch.Tensor, page_size: int) -> np.ndarray:
    return slots[::page_size].numpy() // page_size
