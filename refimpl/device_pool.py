"""The device side of a pool: one buffer per component and layer, our own or somebody else's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import torch

from refimpl.devices import absent, memory_of, settled
from refimpl.geometry import Component, PoolSpec, require_spec

# Index units of a wrapped pool that stores nothing: it has no buffer to count them in, and nothing can go wrong.
UNLIMITED = 2**62


class DevicePool:
    """Per-layer device buffers of a pool.

    A buffer is `(slots, heads, *dim)` for token rows (heads is 1 where the row has none), `(pages, item)` for page rows
    and `(slots, *shape)` for states. Page 0 is an ordinary page here; engines keep it as padding.

    device    where the buffers lie, as torch says it; "cuda" is the GPU that is current when the pool is made
    platform  the same by the name that host pools use. "emulated:1" lies in host memory, which torch calls "cpu"; what
              lies on "cpu" without being an emulated device's may be used by any of them

    Raises `ValueError` for a number of pages or a device that cannot be, `MemoryError` where there is no room.
    """

    def __init__(self, spec: PoolSpec, num_pages: int, device: str | torch.device = "cpu") -> None:
        require_spec(spec)
        spec.require_pages(num_pages)
        platform = settled(str(device))
        if missing := absent(platform):
            raise ValueError(f"pool {spec.name!r}: {missing}; device='cpu' is always here")
        where = torch.device(memory_of(platform))
        try:
            tensors = {
                c.name: [
                    torch.zeros(_rows(spec, c, num_pages), *row_shape(c), dtype=c.dtype, device=where)
                    for _ in spec.layers_of(c)
                ]
                for c in spec.components
            }
        except (RuntimeError, TypeError) as failure:  # torch has no room, or no number for it
            taken, first_line = f"{num_pages * spec.page_bytes:,} bytes", str(failure).partition("\n")[0]
            why = "a size past int64" if isinstance(failure, TypeError) else first_line
            raise MemoryError(
                f"pool {spec.name!r}: {num_pages:,} pages take {taken}, which are not to be had on {platform} ({why}); "
                "take fewer pages"
            ) from failure
        self._adopt(spec, tensors, num_pages, where, platform)

    @classmethod
    def wrap(cls, spec: PoolSpec, tensors: Mapping[str, Sequence[torch.Tensor]]) -> DevicePool:
        """A pool over existing buffers, one tensor per component and owned layer. Rows may be strided, not their lanes.

        Raises `TypeError` for a buffer that is no tensor, `ValueError` for a missing or extra buffer, another shape or
        element size, rows that are not packed, buffers of unequal length (a draft layer shorter than its target, say),
        and rows that overlap, inside a buffer or between two. Buffers may be interleaved (K and V in one engine
        tensor, say).
        """
        require_spec(spec)
        names = [c.name for c in spec.components]
        if sorted(tensors) != sorted(names):
            raise ValueError(f"pool {spec.name!r} has components {names}, got buffers for {list(tensors)}")
        lengths: dict[str, int] = {}
        rows: dict[str, Rows] = {}
        for c in spec.components:
            layers = spec.layers_of(c)
            if len(tensors[c.name]) != len(layers):
                raise ValueError(f"{c.name}: {len(layers)} layers own rows, got {len(tensors[c.name])} buffers")
            for layer, tensor in zip(layers, tensors[c.name], strict=True):
                what = f"{c.name} of layer {layer}"
                _require_rows(what, c, tensor)
                lengths[what] = _pages(spec, c, tensor)
                rows[what] = Rows.of(tensor, c.row_bytes)
        if len(set(lengths.values())) > 1:
            raise ValueError(f"pool {spec.name!r}: all buffers must hold the same number of pages, got {lengths}")
        for c in spec.components:
            strides = {t.stride(0) for t in tensors[c.name] if t.shape[0] > 1}
            if len(strides) > 1:
                raise ValueError(f"{c.name}: all layers must share one row stride, got {sorted(strides)}")
        devices = {t.device for buffers in tensors.values() for t in buffers}
        if len(devices) > 1:
            raise ValueError(f"pool {spec.name!r}: buffers lie on several devices: {sorted(map(str, devices))}")
        if torch.device("meta") in devices:
            raise ValueError(f"pool {spec.name!r}: buffers on the meta device have no bytes; wrap those in memory")
        for (what, mine), (other, theirs) in combinations(rows.items(), 2):
            if mine.overlap(theirs):
                raise ValueError(f"pool {spec.name!r}: {other} lies on the same bytes as {what}")
        pool = cls.__new__(cls)
        stored = {c.name: [_as_stored(c, t) for t in tensors[c.name]] for c in spec.components}
        num_pages = next(iter(lengths.values()), UNLIMITED // spec.page_size)
        device = next(iter(devices), torch.device("cpu"))
        pool._adopt(spec, stored, num_pages, device, settled(str(device)))
        return pool

    def _adopt(
        self,
        spec: PoolSpec,
        tensors: dict[str, list[torch.Tensor]],
        num_pages: int,
        device: torch.device,
        platform: str,
    ) -> None:
        self.spec, self.num_pages, self.device, self.platform = spec, num_pages, device, platform
        self._tensors = tensors
        self._in_order = [tensor for buffers in tensors.values() for tensor in buffers]

    @property
    def size(self) -> int:
        """Index units in the pool (tokens, or state slots)."""
        return self.num_pages * self.spec.page_size

    def buffer(self, component: str, layer: int | None = None) -> torch.Tensor:
        """The buffer of one model layer (None for a side state)."""
        c = self.spec.component(component)
        layers = self.spec.layers_of(c)
        if layer not in layers:
            raise KeyError(f"{component} of pool {self.spec.name!r} owns no layer {layer}, it owns {layers}")
        return self._tensors[component][layers.index(layer)]

    def buffers(self) -> Iterable[torch.Tensor]:
        """All of them, in storage order."""
        return iter(self._in_order)

    def addresses(self) -> tuple[int, ...]:
        """Where the buffers lie now, in storage order."""
        return tuple(map(torch.Tensor.data_ptr, self._in_order))

    def view(self, component: str, layer: int | None) -> torch.Tensor:
        """One layer as `[page, token, group, head, lane]`, sharing memory."""
        c = self.spec.component(component)
        rows = self.buffer(component, layer)
        groups = self.spec.head_groups if c.heads is not None else 1
        lanes = rows.unflatten(0, (self.num_pages, self.spec.tokens_per_page(c))).flatten(-len(c.row_shape))
        if c.unit == "token":
            return lanes.unflatten(2, (groups, c.head_count // groups))
        return lanes[:, :, None, None, :]


@dataclass(frozen=True)
class Rows:
    """`count` rows of `width` bytes, `pitch` bytes apart."""

    begin: int
    count: int
    pitch: int
    width: int

    @classmethod
    def of(cls, tensor: torch.Tensor, width: int) -> Rows:
        pitch = tensor.stride(0) * tensor.dtype.itemsize if tensor.shape[0] > 1 else width
        return cls(tensor.data_ptr(), tensor.shape[0], pitch, width)

    def overlap(self, other: Rows) -> bool:
        """Whether some row of one shares a byte with some row of the other."""
        if not (self.width and other.width and self.count and other.count):
            return False
        if self._end() <= other.begin or other._end() <= self.begin:
            return False
        if self.pitch == other.pitch:  # layers interleaved in one tensor: many pairs, each of many rows
            phase = (other.begin - self.begin) % self.pitch
            return phase < self.width or self.pitch - phase < other.width
        theirs, mine = (rows.begin + rows.pitch * np.arange(rows.count) for rows in (other, self))
        begun_before = np.searchsorted(theirs, mine + self.width)
        ended_before = np.searchsorted(theirs + other.width, mine, side="right")
        return bool((begun_before > ended_before).any())

    def _end(self) -> int:
        return self.begin + self.pitch * (self.count - 1) + self.width


def byte_range(tensor: torch.Tensor) -> tuple[int, int]:
    """Addresses of the first byte of a tensor and behind its last one; all between, if it has gaps."""
    last = sum((extent - 1) * stride for extent, stride in zip(tensor.shape, tensor.stride(), strict=True))
    begin = tensor.data_ptr()
    return begin, begin + (last + 1) * tensor.dtype.itemsize if tensor.numel() else begin


def row_shape(c: Component) -> tuple[int, ...]:
    """Shape of one device row: `(heads, *dim)` of a token, `dim` of a page or a state."""
    return (c.head_count, *c.row_shape) if c.unit == "token" else c.row_shape


def _rows(spec: PoolSpec, c: Component, num_pages: int) -> int:
    return num_pages * spec.tokens_per_page(c)


def _pages(spec: PoolSpec, c: Component, tensor: torch.Tensor) -> int:
    pages, rest = divmod(tensor.shape[0], spec.tokens_per_page(c))
    if rest:
        raise ValueError(f"{c.name}: {tensor.shape[0]} rows are no whole number of pages of {spec.page_size}")
    return pages


def _require_rows(what: str, c: Component, tensor: torch.Tensor) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{what}: a buffer must be a tensor (torch.as_tensor makes one), got {tensor!r:.80}")
    if tensor.layout != torch.strided:
        raise ValueError(f"{what}: a buffer must be dense (to_dense() makes it so), got {tensor.layout}")
    if tensor.is_conj() or tensor.is_neg():
        raise ValueError(
            f"{what}: a buffer must hold its values as they are (resolve_conj() and resolve_neg() see to it)"
        )
    if tuple(tensor.shape[1:]) != row_shape(c):
        raise ValueError(f"{what}: rows must be {row_shape(c)}, got a buffer of shape {tuple(tensor.shape)}")
    if tensor.dtype.itemsize != c.dtype.itemsize:
        raise ValueError(f"{what}: elements must have {c.dtype.itemsize} bytes ({c.dtype}), got {tensor.dtype}")
    packed = 1
    for extent, stride in zip(reversed(tensor.shape[1:]), reversed(tensor.stride()[1:]), strict=True):
        if extent != 1 and stride != packed:
            raise ValueError(f"{what}: lanes of a row must be packed, got strides {tensor.stride()}")
        packed *= max(extent, 1)  # rows without lanes have the strides of rows with one
    if tensor.shape[0] > 1 and tensor.stride(0) < packed:
        raise ValueError(f"{what}: rows overlap, {packed} elements at a stride of {tensor.stride(0)}")


def _as_stored(c: Component, tensor: torch.Tensor) -> torch.Tensor:
    """The same bytes under the component's dtype: FP8 may come as uint8."""
    return tensor if tensor.dtype == c.dtype else tensor.view(c.dtype)
