"""Pools past 2 and 4 GiB: offsets that do not fit 32 bits, on memory that costs nothing until it is written.

Both sides lie in sparse files in memory, all zero. After a transfer the file system itself says which blocks hold data
(`SEEK_DATA`): exactly the expected ones may, so that no stray byte anywhere in many gigabytes can hide.
"""

from __future__ import annotations

import mmap
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import psutil
import pytest
import torch

from refimpl import DevicePool, HostMemory, HostPool, byte_offset, presets, slots_of
from refimpl.device_pool import row_shape

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memfd and SEEK_DATA are Linux")

GIB = 2**30

# K or V of one layer: 64 KiB a page, 5 GiB in all. One buffer of K and V is 20 GiB.
SPEC = presets.mha(layers=2, heads=4, head_dim=128, dtype=torch.bfloat16, page_size=64)
PAGES = 5 * GIB // (64 * 1024)
LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")

in_every_layout = pytest.mark.parametrize("layout", LAYOUTS)
on_every_backend = pytest.mark.parametrize("backend", ["torch", "numba"])


class Sparse:
    """Zeroed memory in a file without blocks."""

    def __init__(self, nbytes: int) -> None:
        self.file = os.memfd_create("big pool")
        os.ftruncate(self.file, nbytes)
        self.block = os.fstat(self.file).st_blksize
        self.tensor = torch.frombuffer(mmap.mmap(self.file, nbytes), dtype=torch.uint8)

    def __del__(self) -> None:
        os.close(self.file)

    def data(self) -> list[tuple[int, int]]:
        """`(first, end)` of every range of blocks that hold data."""
        ranges, end = [], 0
        while True:
            try:
                first = os.lseek(self.file, end, os.SEEK_DATA)
            except OSError:  # only holes are left
                return ranges
            end = os.lseek(self.file, first, os.SEEK_HOLE)
            ranges.append((first, end))

    def read(self, first: int, end: int) -> bytes:
        """Without touching the mapping: reading a hole there would give it a block."""
        return os.pread(self.file, end - first, first)


class SparseMemory(HostMemory):
    def __init__(self) -> None:
        super().__init__()
        self.maps: list[Sparse] = []

    def map(self, nbytes: int) -> torch.Tensor:
        self.maps.append(Sparse(nbytes))
        return self.maps[-1].tensor


@dataclass
class Pools:
    """A host pool in one sparse file and a device pool in one for each component and layer."""

    host: HostPool
    device: DevicePool
    host_file: Sparse
    device_files: dict[tuple[str, int], Sparse]


def sparse_pools(layout: str, backend: str) -> Pools:
    memory = SparseMemory()
    host = HostPool(SPEC, layout, PAGES, backend, memory=memory)
    files: dict[tuple[str, int], Sparse] = {}
    buffers: dict[str, list[torch.Tensor]] = {}
    for c in SPEC.components:
        for layer in range(SPEC.layers):
            files[c.name, layer] = Sparse(PAGES * SPEC.page_size * c.row_bytes)
            rows = files[c.name, layer].tensor.view(c.dtype).view(-1, *row_shape(c))
            buffers.setdefault(c.name, []).append(rows)
    (host_file,) = memory.maps
    return Pools(host, DevicePool.wrap(SPEC, buffers), host_file, files)


Pieces = dict[int, bytes]  # what the bytes from an offset on must be


def far_pages(layout: str) -> list[int]:
    """The last page, and those around 2 and 4 GiB from the beginning of K in the host buffer or in a layer of it."""
    step = byte_offset(SPEC, layout, PAGES, "k", 1, 0) - byte_offset(SPEC, layout, PAGES, "k", 0, 0)
    edges = [gib * GIB // step for gib in (2, 4)]
    return [PAGES - 1, *(page + near for page in edges for near in (-1, 0)), 0]


def rows_of(name: str, layer: int, page: int) -> np.ndarray:
    """Bytes 1..255 of a page, `[token, head, byte]`, unlike those of any other page here."""
    return np.random.default_rng([ord(name), layer, page]).integers(1, 256, (64, 4, 256), np.uint8)


def host_pieces(layout: str, pairs: list[tuple[int, int]]) -> Pieces:
    """The host buffer with device pages at their host pages."""
    pieces: Pieces = {}
    for host_page, device_page in pairs:
        for name in ("k", "v"):
            for layer in range(SPEC.layers):
                rows = rows_of(name, layer, device_page)
                for token in range(64):
                    for head in range(4):
                        at = byte_offset(SPEC, layout, PAGES, name, host_page, layer, token, head)
                        pieces[at] = rows[token, head].tobytes()
    return pieces


def device_pieces(name: str, layer: int, pairs: list[tuple[int, int]]) -> Pieces:
    """A device buffer with the rows of some pages (second of each pair) at others (first)."""
    page_bytes = 64 * 1024
    return {to * page_bytes: rows_of(name, layer, source).tobytes() for to, source in pairs}


def fill(file: Sparse, pieces: Pieces) -> None:
    for at, content in pieces.items():
        os.pwrite(file.file, content, at)


def require_exactly(file: Sparse, pieces: Pieces, what: str) -> None:
    """Fails unless the file holds those pieces and is zero elsewhere: no other block was touched, even to read."""
    allowed = np.array(sorted({b for at, content in pieces.items() for b in blocks(file, at, len(content))}), np.int64)
    touched = np.array([b for first, end in file.data() for b in blocks(file, first, end - first)], np.int64)
    stray = np.setdiff1d(touched, allowed)
    assert not len(stray), f"{what}: {len(stray)} blocks were touched that must not be, the first at {stray[0]:#x}"
    for first, end in spans(allowed, file.block):
        end = min(end, len(file.tensor))
        expected = bytearray(end - first)
        for at, content in pieces.items():
            if first <= at < end:
                expected[at - first : at - first + len(content)] = content
        found = file.read(first, end)
        if found != bytes(expected):
            wrong = next(i for i, (a, b) in enumerate(zip(found, expected, strict=True)) if a != b)
            pytest.fail(f"{what}: byte {first + wrong:#x} is {found[wrong]}, expected {expected[wrong]}")


def blocks(file: Sparse, first: int, length: int) -> range:
    """Where the blocks begin that a range lies in."""
    return range(first // file.block * file.block, first + length, file.block)


def spans(starts: np.ndarray, block: int) -> Iterator[tuple[int, int]]:
    """Neighbouring blocks joined: `(first, end)`."""
    if not len(starts):
        return
    for run in np.split(starts, np.flatnonzero(np.diff(starts) != block) + 1):
        yield int(run[0]), int(run[-1]) + block


@on_every_backend
@in_every_layout
def test_pages_far_out_are_saved_and_nothing_else_is_touched(layout: str, backend: str) -> None:
    pools = sparse_pools(layout, backend)
    host_pages = far_pages(layout)
    device_pages = [*host_pages[1:], host_pages[0]]
    assert pools.host_file.tensor.numel() > 16 * GIB
    filled = {key: device_pieces(*key, [(p, p) for p in device_pages]) for key in pools.device_files}
    for key, file in pools.device_files.items():
        fill(file, filled[key])
    before = psutil.Process().memory_info().rss
    pools.host.backup(pools.device, slots_of(host_pages, 64), slots_of(device_pages, 64))
    pairs = list(zip(host_pages, device_pages, strict=True))
    require_exactly(pools.host_file, host_pieces(layout, pairs), f"host in {layout}")
    for key, file in pools.device_files.items():
        require_exactly(file, filled[key], f"device {key}, which was only read")
    assert psutil.Process().memory_info().rss - before < 100 * 2**20, "memory that nobody wrote to was taken"


@on_every_backend
@in_every_layout
def test_pages_far_out_are_restored_and_nothing_else_is_touched(layout: str, backend: str) -> None:
    pools = sparse_pools(layout, backend)
    host_pages = far_pages(layout)
    device_pages = [*host_pages[1:], host_pages[0]]
    filled = host_pieces(layout, [(page, page) for page in host_pages])
    fill(pools.host_file, filled)
    before = psutil.Process().memory_info().rss
    transfer = pools.host.prepare(pools.device, slots_of(host_pages, 64), slots_of(device_pages, 64), "load")
    transfer.run((1,))
    pairs = list(zip(device_pages, host_pages, strict=True))
    for (name, layer), file in pools.device_files.items():
        arrived = device_pieces(name, layer, pairs) if layer == 1 else {}
        require_exactly(file, arrived, f"device {name} of layer {layer} after layer 1")
    transfer.run((0,))
    for (name, layer), file in pools.device_files.items():
        require_exactly(file, device_pieces(name, layer, pairs), f"device {name} of layer {layer}")
    require_exactly(pools.host_file, filled, "host, which was only read")
    assert psutil.Process().memory_info().rss - before < 100 * 2**20, "memory that nobody wrote to was taken"


@in_every_layout
def test_a_single_page_far_out_is_seen_and_set_in_place(layout: str) -> None:
    """Page accessors compute offsets too."""
    pools = sparse_pools(layout, "torch")
    last, before = PAGES - 1, PAGES - 2
    fill(pools.host_file, host_pieces(layout, [(last, 7)]))
    for layer in range(SPEC.layers):
        expected = rows_of("v", layer, 7)
        assert pools.host.page(last)["v"][layer].view(torch.uint8).numpy().tobytes() == expected.tobytes()
    pools.host.set_from_flat_data_page(before * 64, pools.host.get_data_page(last * 64))
    require_exactly(pools.host_file, host_pieces(layout, [(last, 7), (before, 7)]), f"host in {layout}")


@on_every_backend
@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct"])
def test_single_entries_far_out_move_alone(layout: str, backend: str) -> None:
    spec = presets.v4_paged("c4", 2, item_bytes=37440)
    pages = 5 * GIB // 37440
    memory = SparseMemory()
    host = HostPool(spec, layout, pages, backend, memory=memory)
    device = DevicePool(spec, 1)
    payload = torch.arange(37440, dtype=torch.int32).remainder(251).add(1).to(torch.uint8)
    for layer in range(2):
        device.buffer("c4", layer).copy_(payload.view(1, -1) if layer == 0 else payload.flip(0).view(1, -1))
    host.backup_entries(device, torch.tensor([pages * 64 - 1]), torch.tensor([5]))
    files: dict[int, Pieces] = {}
    for layer in range(2):
        row = raw_row(device, layer)
        begin = byte_offset(spec, layout, pages, "c4", pages - 1, layer)
        pieces = files.setdefault(layer if layout == "layer_first" else 0, {})
        pieces[begin + 63 * 576] = row[5 * 576 : 6 * 576]
        pieces[begin + 64 * 576 + 63 * 8] = row[64 * 576 + 5 * 8 : 64 * 576 + 6 * 8]
    for i, file in enumerate(memory.maps):
        require_exactly(file, files[i], f"host tensor {i} in {layout}")


def raw_row(device: DevicePool, layer: int) -> bytes:
    return device.buffer("c4", layer)[0].numpy().tobytes()


def test_the_proof_notices_a_stray_byte() -> None:
    """The harness itself: one byte in a block of its own, and one next to expected bytes."""
    for stray in (3 * GIB, 4100):
        file = Sparse(4 * GIB)
        fill(file, {4096: b"\1\2\3"})
        require_exactly(file, {4096: b"\1\2\3"}, "as it should be")
        fill(file, {stray: b"\1"})
        with pytest.raises((AssertionError, pytest.fail.Exception), match=f"{stray:#x}"):
            require_exactly(file, {4096: b"\1\2\3"}, "with a stray byte")
