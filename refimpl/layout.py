"""Where a byte lies: a layout is a cut of the lanes into parts and an order of axes.

Everything about a host layout follows from the table of axes below: shapes, strides, byte offsets and views. The oracle
and the transfer plan share these descriptions of buffers and nothing else; they are pinned by bytes written out by hand
(`verify/tests/test_hand_bytes.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch

from refimpl.geometry import Component, PoolSpec

# Outermost axis first. `component` stacks K and V where they are equally wide, `group` is a group of heads.
AXES: dict[str, tuple[str, ...]] = {
    "layer_first": ("component", "layer", "page", "token", "group", "head", "lane"),
    "page_first": ("component", "page", "token", "layer", "group", "head", "lane"),
    "page_first_direct": ("component", "page", "layer", "token", "group", "head", "lane"),
    "page_head": ("component", "page", "group", "head", "token", "layer", "lane"),
    "page_unified": ("page", "group", "layer", "component", "token", "head", "lane"),
    "page_first_kv_split": ("component", "page", "layer", "token", "group", "head", "lane"),
}
LAYOUTS = tuple(AXES)

# Every pool, device or host, can be looked at layer by layer in this order of axes.
CANONICAL = ("page", "token", "group", "head", "lane")

# Components that are kept as the two halves of one tensor where their rows are alike.
STACKED = ("k", "v")

# Pools that keep one host tensor per layer in `layer_first` (upstream: a list).
ONE_TENSOR_PER_LAYER = ("v4_paged", "v4_state")


@dataclass(frozen=True)
class Buffer:
    """One host buffer: which lanes of which components it holds, and the axes it holds them in.

    A buffer is one tensor, or one tensor per layer (`per_layer`) with the same axes less `layer`.
    """

    components: tuple[Component, ...]
    layers: tuple[int | None, ...]
    first_lane: int
    axes: tuple[str, ...]
    extents: dict[str, int]
    per_layer: bool

    @property
    def dtype(self) -> torch.dtype:
        return self.components[0].dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Length of every axis, in memory order."""
        return tuple(self.extents[a] for a in self.axes)

    @property
    def strides(self) -> dict[str, int]:
        """Bytes from one index of an axis to the next."""
        strides, step = {}, self.dtype.itemsize
        for axis in reversed(self.axes):
            strides[axis] = step
            step *= self.extents[axis]
        return strides

    @property
    def nbytes(self) -> int:
        """Bytes of one tensor of this buffer."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def tensor_layers(self) -> tuple[tuple[int | None, ...], ...]:
        """The layers that each tensor of this buffer holds."""
        return tuple((layer,) for layer in self.layers) if self.per_layer else (self.layers,)

    @property
    def keeps_page_together(self) -> bool:
        """True where all layers of a page form one range of bytes (per component, unless fused)."""
        return not self.per_layer and set(self.axes[: self.axes.index("page")]) <= {"component"}

    @cached_property
    def interleaves_layers(self) -> bool:
        """Whether bytes of other layers lie between those that a page has of a layer."""
        inside = self.axes[self.axes.index("page") + 1 :]
        if "layer" not in inside or len(self.layers) < 2:
            return False
        return any(self.extents[axis] > 1 for axis in inside[: inside.index("layer")])

    @property
    def piece_bytes(self) -> int:
        """Bytes of the largest range that holds nothing but one page: the unit of registration."""
        inside = self.axes[self.axes.index("page") + 1 :]
        return math.prod(self.extents[a] for a in inside) * self.dtype.itemsize

    def position(self, component: str) -> int:
        return [c.name for c in self.components].index(component)

    def byte_offset(self, component: str, page: int, layer: int | None, token: int = 0, head: int = 0) -> int:
        """Byte at which a head's lanes begin, from the start of the tensor that holds the layer.

        `KeyError` for a layer that the component does not own, `IndexError` for a page, token or head outside.
        """
        if layer not in self.layers:
            raise KeyError(f"{component} owns no layer {layer}, it owns {self.layers}")
        heads = self.extents["group"] * self.extents["head"]
        limits = {"page": (page, self.extents["page"]), "token": (token, self.extents["token"]), "head": (head, heads)}
        for axis, (index, count) in limits.items():
            if not 0 <= index < count:
                raise IndexError(f"{component}: {axis} {index} is outside 0..{count - 1}")
        group, head_in_group = divmod(head, self.extents["head"])
        at = {"component": self.position(component), "page": page, "token": token}
        at |= {"layer": self.layers.index(layer), "group": group, "head": head_in_group, "lane": 0}
        return sum(at[axis] * step for axis, step in self.strides.items())

    def view(self, tensor: torch.Tensor, component: str, layer: int | None) -> torch.Tensor:
        """One layer of one component as `[page, token, group, head, lane]`, sharing memory with `tensor`.

        `tensor` is the tensor of this buffer that holds the layer, shaped `self.shape`.
        """
        at = {"component": self.position(component)}
        if not self.per_layer:
            at["layer"] = self.layers.index(layer)
        remaining = list(self.axes)
        for axis, index in at.items():
            tensor = tensor.select(remaining.index(axis), index)
            remaining.remove(axis)
        return tensor.permute([remaining.index(axis) for axis in CANONICAL])


def buffers(spec: PoolSpec, layout: str, num_pages: int) -> tuple[Buffer, ...]:
    """The host buffers of a pool in a layout, in storage order. Assumes that `support` allows the pair."""
    return tuple(
        _buffer(spec, layout, num_pages, stack, first_lane, lanes)
        for stack in stacks(spec)
        for first_lane, lanes in parts(stack[0], layout)
    )


def stacks(spec: PoolSpec) -> Iterator[tuple[Component, ...]]:
    """Components that share a buffer: K with V where their rows are alike, every other one alone."""
    by_name = {c.name: c for c in spec.components}
    pair = [by_name[name] for name in STACKED if name in by_name]
    fused = len(pair) == 2 and _rows_alike(*pair)
    for c in spec.components:
        if not fused or c.name not in STACKED:
            yield (c,)
        elif c is pair[0]:
            yield tuple(pair)


def parts(component: Component, layout: str) -> Iterator[tuple[int, int]]:
    """`(first lane, lanes)` of each buffer that a row is cut into: one, except in `page_first_kv_split`."""
    first = 0
    for lanes in component.split if layout == "page_first_kv_split" and component.split else (component.lanes,):
        yield first, lanes
        first += lanes


def byte_offset(
    spec: PoolSpec,
    layout: str,
    num_pages: int,
    component: str,
    page: int,
    layer: int | None,
    token: int = 0,
    head: int = 0,
    part: int = 0,
) -> int:
    """Byte at which a head's lanes begin in the buffer of its component (of the layer, where each has a tensor).

    Assumes, as `buffers` does, that `support` allows the pair. Raises as `Buffer.byte_offset` does, and `KeyError` for
    a layout or a component that there is not.

    >>> import torch; from refimpl import presets
    >>> spec = presets.mha(layers=3, heads=4, head_dim=16, dtype=torch.bfloat16, page_size=4)
    >>> byte_offset(spec, "page_head", num_pages=3, component="k", page=1, layer=2, token=2, head=3)
    2944
    """
    if layout not in AXES:
        raise KeyError(f"there is no layout {layout!r}, only {', '.join(LAYOUTS)}")
    held = spec.component(component)
    holding = [b for b in buffers(spec, layout, num_pages) if held in b.components]
    if not 0 <= part < len(holding):
        raise IndexError(f"{component} lies in {len(holding)} parts in {layout}, there is no part {part}")
    return holding[part].byte_offset(component, page, layer, token, head)


def upstream_shape(buffer: Buffer, family: str, layout: str) -> tuple[int, ...]:
    """The shape in which SGLang's pools present the same bytes.

    They merge page and token, and groups and heads, where the two are neighbours, and drop some axes of length 1.
    Source: `srt/mem_cache/pool_host/*.py`, `srt/mem_cache/memory_pool_host.py` (0.5.23).
    """
    row = buffer.components[0]
    shape: list[int] = []
    for axis, extent in zip(buffer.axes, buffer.shape, strict=True):
        if axis == "token" and row.unit == "token" and layout in ("layer_first", "page_first"):
            shape[-1] *= extent
        elif axis == "group" and layout != "page_unified":
            continue  # one axis with the heads, which are its neighbours
        elif axis == "head" and layout != "page_unified" and row.heads is not None:
            shape.append(row.heads)
        elif axis == "lane":
            shape += row.row_shape if buffer.first_lane == 0 and extent == row.lanes else (extent,)
        elif extent > 1 or axis in _kept_axes(row, family, layout, len(buffer.components)):
            shape.append(extent)
    return tuple(shape)


def _kept_axes(row: Component, family: str, layout: str, stacked: int) -> set[str]:
    """Axes that a shape shows although their length is 1."""
    kept = {"page", "token", "head"} if row.unit == "token" else {"page"}
    if not row.side:
        kept.add("layer")
    if stacked > 1:
        kept.add("component")
    if layout == "page_unified":
        if row.heads is None:
            kept.discard("head")
        else:
            kept.add("group")
    one_after_layer = ("page_first", "page_first_direct") if family in ("mamba", "dsa") else ("page_first_direct",)
    if row.unit != "token" and layout in one_after_layer and not row.side:
        kept.add("token")
    return kept


def _buffer(
    spec: PoolSpec, layout: str, num_pages: int, stack: tuple[Component, ...], first_lane: int, lanes: int
) -> Buffer:
    row = stack[0]
    layers = spec.layers_of(row)
    groups = spec.head_groups if row.heads is not None else 1
    extents = {
        "component": len(stack),
        "layer": len(layers),
        "page": num_pages,
        "token": spec.tokens_per_page(row),
        "group": groups,
        "head": row.head_count // groups,
        "lane": lanes,
    }
    # With one row a page the two page-major layouts hold the same bytes; upstream shows them in this order.
    axes = AXES["page_first_direct" if layout == "page_first" and row.unit != "token" else layout]
    per_layer = layout == "layer_first" and spec.family in ONE_TENSOR_PER_LAYER
    if per_layer:
        axes = tuple(a for a in axes if a != "layer")
    return Buffer(stack, layers, first_lane, axes, extents, per_layer)


def _rows_alike(a: Component, b: Component) -> bool:
    def kind(c: Component) -> tuple[object, ...]:
        return c.dtype, c.row_shape, c.heads, c.unit, c.layers, c.side

    return kind(a) == kind(b)
