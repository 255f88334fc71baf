"""The oracle: what a transfer must do, written to be checked by eye.

Both pools are looked at through canonical views `[page, token, group, head, lane]`, one per component and layer; a
transfer assigns pages of one to pages of the other. It is written twice, as a loop nest and as tensor indexing, and the
two are tested equal. The oracle is not a backend: nothing here is fast, and no backend calls it.

It takes index lists at their word: what comes of those that `indices.check_pair` refuses is not defined.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from refimpl.device_pool import DevicePool
from refimpl.geometry import Component
from refimpl.host_buffers import HostBuffers
from refimpl.indices import Indices

Assign = Callable[[torch.Tensor, torch.Tensor, list[int], list[int]], None]


def backup(host: HostBuffers, device: DevicePool, host_indices: Indices, device_indices: Indices) -> None:
    """Device to host, every layer."""
    _transfer(host, device, host_indices, device_indices, "backup", None, assign_by_indexing)


def load(
    host: HostBuffers,
    device: DevicePool,
    host_indices: Indices,
    device_indices: Indices,
    layers: tuple[int | None, ...] | None = None,
) -> None:
    """Host to device, every layer and side state, or only the model layers given (None names the side states)."""
    _transfer(host, device, host_indices, device_indices, "load", layers, assign_by_indexing)


def _transfer(
    host: HostBuffers,
    device: DevicePool,
    host_indices: Indices,
    device_indices: Indices,
    direction: str,
    layers: tuple[int | None, ...] | None,
    assign: Assign,
) -> None:
    """Page by page, for each component, each of its layers and each part that its lanes are cut into."""
    if host_indices is None or device_indices is None:
        return
    host_pages = _pages(host_indices, host.spec.page_size)
    device_pages = _pages(device_indices, host.spec.page_size)
    for component in host.spec.components:
        for layer in host.spec.layers_of(component):
            if layers is not None and layer not in layers:
                continue
            first = 0
            for host_view in host.part_views(component.name, layer):
                lanes = slice(first, first + host_view.shape[-1])
                device_view = device.view(component.name, layer)[..., lanes]
                if direction == "backup":
                    assign(host_view, device_view, host_pages, device_pages)
                else:
                    assign(device_view, host_view, device_pages, host_pages)
                first = lanes.stop


def _pages(indices: torch.Tensor, page_size: int) -> list[int]:
    """Of a list that names whole pages: the first token of each tells."""
    return [first // page_size for first in indices.tolist()[::page_size]]


def assign_by_loops(
    to: torch.Tensor,
    source: torch.Tensor,
    to_pages: list[int],
    source_pages: list[int],
) -> None:
    """`to[p] = source[q]` for each pair of pages, one element at a time."""
    _, tokens, groups, heads, lanes = to.shape
    for p, q in zip(to_pages, source_pages, strict=True):
        for token in range(tokens):
            for group in range(groups):
                for head in range(heads):
                    for lane in range(lanes):
                        to[p, token, group, head, lane] = source[q, token, group, head, lane]


def assign_by_indexing(to: torch.Tensor, source: torch.Tensor, to_pages: list[int], source_pages: list[int]) -> None:
    """The same as one assignment."""
    to[to_pages] = source[source_pages].to(to.device)


# ---- single entries of page rows


def backup_entries(host: HostBuffers, device: DevicePool, host_entries: list[int], device_entries: list[int]) -> None:
    """Single entries of page rows, device to host: their values, their scales, nothing else of the row."""
    for to, source in _entries(host, device, host_entries, device_entries):
        to.copy_(source)


def load_entries(host: HostBuffers, device: DevicePool, host_entries: list[int], device_entries: list[int]) -> None:
    """Single entries of page rows, host to device."""
    for source, to in _entries(host, device, host_entries, device_entries):
        to.copy_(source)


def _entries(
    host: HostBuffers, device: DevicePool, host_entries: list[int], device_entries: list[int]
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The bytes of each pair of entries, host and device, one pair a segment, in every layer."""
    for component, host_rows, device_rows in _rows(host, device):
        for h, d in zip(host_entries, device_entries, strict=True):
            for at, other in entry_bytes(component, h % component.entries, d % component.entries):
                yield host_rows[h // component.entries, at], device_rows[d // component.entries, other]


def _rows(host: HostBuffers, device: DevicePool) -> Iterator[tuple[Component, torch.Tensor, torch.Tensor]]:
    """Page rows of every layer as bytes, `[page, byte]`."""
    for component in host.spec.components:
        for layer in host.spec.layers_of(component):
            (host_view,) = host.part_views(component.name, layer)
            yield (
                component,
                host_view[:, 0, 0, 0].view(torch.uint8),
                device.view(component.name, layer)[:, 0, 0, 0].view(torch.uint8),
            )


def entry_bytes(component: Component, host_entry: int, device_entry: int) -> Iterator[tuple[slice, slice]]:
    """For each segment of a row, the bytes of an entry on the host and on the device."""
    begin = 0
    for segment in component.segments:
        first = begin + host_entry * segment.bytes
        other = begin + device_entry * segment.bytes
        yield slice(first, first + segment.bytes), slice(other, other + segment.bytes)
        begin += segment.entries * segment.bytes
