"""Pools past 2 and 4 GiB: offsets that do not fit 32 bits, on memory that costs nothing until it is written.

After a transfer exactly the expected blocks may hold data, so that no stray byte anywhere can hide (`verify.sparse`).
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import psutil
import pytest
import torch

from refimpl import DevicePool, HostPool, byte_offset, presets, slots_of
from refimpl.device_pool import row_shape
from verify.sparse import (
    GIB,
    PAGES,
    SPEC,
    Pieces,
    Sparse,
    SparseMemory,
    device_pieces,
    far_pages,
    fill,
    host_pieces,
    require_exactly,
    rows_of,
)

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memfd and SEEK_DATA are Linux")

LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")

in_every_layout = pytest.mark.parametrize("layout", LAYOUTS)
on_every_backend = pytest.mark.parametrize("backend", ["torch", "numba"])


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
