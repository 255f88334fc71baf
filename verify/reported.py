"""What the tests of publicly reported faults share: the fill formula T, the page lists and the checksum.

The checksums were computed by a program that shares no code with this project, so the formula is spelled here as it is
there. T repeats beyond 64 layers and tells two bytes apart only with high probability: `fill` is what the matrix uses.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from refimpl import DevicePool, HostPool, PoolSpec, oracle, presets
from refimpl.indices import Indices
from verify.matrix import without_a_gpu

POISON = 0xFF
LAYOUTS = {"lf": "layer_first", "pf": "page_first", "pfd": "page_first_direct", "ph": "page_head"}

# Kinds of rows, as the formula numbers them.
K, V, INDEX = 0, 1, 2

# Of case B13, whose bytes are also those of B08.
B13_SPEC = presets.mha(2, 2, 16, torch.bfloat16, 4)

# Whatever can move bytes in every layout without a GPU: backends, and the oracle. (The matrix has backend `staged`.)
MOVERS = ("torch", "numba", "direct", "kernel", "auto", "oracle")

Formula = Callable[[int, int, int, np.ndarray], np.ndarray]
u64 = np.uint64


def T(kind: int, layer: int, slot: int, byte: np.ndarray | int) -> np.ndarray:
    """The byte (1 to 251) at `byte` of a row: a 64-bit mix of its place.

    >>> [int(T(*at)) for at in ((0, 0, 0, 0), (0, 1, 2, 3), (1, 2, 3, 4), (2, 0, 5, 8191))]
    [38, 56, 134, 175]
    """
    with np.errstate(over="ignore"):
        z = ((u64(kind) * u64(64) + u64(layer)) * u64(1 << 24) + u64(slot)) * u64(1 << 16) + np.asarray(byte, u64)
        z = z + u64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> u64(30))) * u64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> u64(27))) * u64(0x94D049BB133111EB)
        return ((z ^ (z >> u64(31))) % u64(251) + u64(1)).astype(np.uint8)


def pages(ids: Sequence[int], page_size: int) -> list[int]:
    """All tokens of those pages, in order."""
    return [page * page_size + token for page in ids for token in range(page_size)]


def slots(ids: Sequence[int], page_size: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """The same as an index tensor."""
    return torch.tensor(pages(ids, page_size), dtype=dtype)


def crc(*tensors: torch.Tensor | list[torch.Tensor]) -> str:
    """CRC-32 of whole buffers in memory order, one after the other."""
    return crc_of(np.concatenate([raw(held) for held in tensors]))


def raw(held: torch.Tensor | list[torch.Tensor]) -> np.ndarray:
    """The bytes of one or several tensors, flat, in the order of their axes."""
    tensors = held if isinstance(held, list) else [held]
    return np.concatenate([tensor.contiguous().reshape(-1).view(torch.uint8).numpy() for tensor in tensors])


def whole(host: HostPool, component: str) -> torch.Tensor:
    """The buffer of a component that lies in one tensor."""
    buffer = host.buffer(component)
    assert isinstance(buffer, torch.Tensor)
    return buffer


def rows(kind: int, layer: int, count: int, row_bytes: int, formula: Formula = T) -> np.ndarray:
    """`[slot, byte]` of one layer."""
    return np.stack([formula(kind, layer, slot, np.arange(row_bytes)) for slot in range(count)])


def fill(
    device: DevicePool,
    kinds: Mapping[str, int],
    formula: Formula = T,
    named: Callable[[int, int], tuple[int, int]] = lambda kind, layer: (kind, layer),
) -> None:
    """Every row of a device pool says which kind, layer and slot it is; `named` renames appended layers."""
    for c in device.spec.components:
        for position, layer in enumerate(device.spec.layers_of(c)):
            buffer = device.buffer(c.name, layer)
            content = rows(*named(kinds[c.name], position), buffer.shape[0], c.row_bytes, formula)
            buffer.copy_(torch.from_numpy(content.reshape(-1)).view(c.dtype).view(buffer.shape))


def fill_many(device: DevicePool) -> None:
    """`fill` of K and V in rows of 64 bytes, all slots of a layer at once."""
    slot, byte = np.arange(device.size)[:, None], np.arange(64)[None, :]
    for name, kind in (("k", K), ("v", V)):
        for layer in range(device.spec.layers):
            buffer = device.buffer(name, layer)
            content = T(kind, layer, slot, byte)  # type: ignore[arg-type]
            buffer.copy_(torch.from_numpy(content).view(buffer.dtype).view(buffer.shape))


def poison(pool: HostPool | DevicePool) -> None:
    """Every byte 0xFF, which T never yields."""
    if isinstance(pool, HostPool):
        tensors = [tensor for _, held in pool.storage for tensor in held]
    else:
        spec = pool.spec
        tensors = [pool.buffer(c.name, layer) for c in spec.components for layer in spec.layers_of(c)]
    for tensor in tensors:
        tensor.reshape(-1).view(torch.uint8).fill_(POISON)


def host_pool(spec: PoolSpec, layout: str, num_pages: int, mover: str = "oracle") -> HostPool:
    """A poisoned host pool; its backend is the mover, or any where the oracle moves."""
    backend = "torch" if mover == "oracle" else mover
    host = HostPool(spec, LAYOUTS.get(layout, layout), num_pages, backend, platform=without_a_gpu(backend))
    poison(host)
    return host


def backup(mover: str, host: HostPool, device: DevicePool, host_slots: Indices, device_slots: Indices) -> None:
    if mover == "oracle":
        oracle.backup(host, device, host_slots, device_slots)
    else:
        host.backup(device, host_slots, device_slots).wait()


def load(mover: str, host: HostPool, device: DevicePool, host_slots: Indices, device_slots: Indices) -> None:
    """Host to device; backends layer by layer, as an engine does."""
    if mover == "oracle":
        oracle.load(host, device, host_slots, device_slots)
    else:
        for layer in range(host.spec.layers):
            host.load(device, host_slots, device_slots, layer).wait()


def layer_crc(device: DevicePool, component: str) -> str:
    """CRC of all layers of a device component: its `layer_first` image."""
    c = device.spec.component(component)
    return crc([device.buffer(component, layer) for layer in device.spec.layers_of(c)])


def expected(
    layout: str,
    kind: int,
    shape: tuple[int, int, int, int, int],
    device_slots: Sequence[int],
    host_slots: Sequence[int],
) -> np.ndarray:
    """A host buffer after a backup, from plain arrays: `shape` is layers, pages, page size, heads, bytes of a head."""
    layers, count, page_size, heads, head_bytes = shape
    axes = {
        "lf": (layers, count * page_size, heads, head_bytes),
        "pf": (count * page_size, layers, heads, head_bytes),
        "pfd": (count, layers, page_size, heads, head_bytes),
        "ph": (count, heads, page_size, layers, head_bytes),
    }[layout]
    host = np.full(axes, POISON, np.uint8)
    for layer in range(layers):
        for d, s in zip(device_slots, host_slots, strict=True):
            row = T(kind, layer, d, np.arange(heads * head_bytes)).reshape(heads, head_bytes)
            page, token = divmod(s, page_size)
            if layout == "lf":
                host[layer, s] = row
            elif layout == "pf":
                host[s, layer] = row
            elif layout == "pfd":
                host[page, layer, token] = row
            else:
                host[page, :, token, layer] = row
    return host


def crc_of(array: np.ndarray) -> str:
    return f"{zlib.crc32(np.ascontiguousarray(array).tobytes()):08x}"


def fill_host(host: HostPool, layout: str, kinds: Mapping[str, int]) -> None:
    """Every token row of a host pool says where it lies, written through its raw buffers and no view of ours."""
    every = range(host.size)
    for c in host.spec.components:
        shape = (len(host.spec.layers_of(c)), host.num_pages, host.page_size, c.head_count, c.row_bytes // c.head_count)
        image = torch.from_numpy(expected(layout, kinds[c.name], shape, every, every).reshape(-1))
        buffer = whole(host, c.name)
        buffer.copy_(image.view(c.dtype).view(buffer.shape))
