"""Memory of many gigabytes that costs nothing until it is written, and proof of which blocks of it were touched.

It lies in sparse files in memory, all zero. The file system itself says which blocks hold data (`SEEK_DATA`, so this is
for Linux): a stray byte anywhere cannot hide.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from refimpl import HostMemory, byte_offset, presets

GIB = 2**30

# K or V of one layer: 64 KiB a page, 5 GiB in all. One buffer of K and V is 20 GiB.
SPEC = presets.mha(layers=2, heads=4, head_dim=128, dtype=torch.bfloat16, page_size=64)
PAGES = 5 * GIB // (64 * 1024)


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
