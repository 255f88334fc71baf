"""Host memory of a pool, and every way to look at it: tensors, per-layer views, pointer tables, pages.

All of it follows from the buffers that `layout.buffers` describes, so it is right in every layout. (Upstream leaves
some of these tables empty, missing or wrong outside `layer_first`.)
"""

from __future__ import annotations

import math
import operator
from itertools import product
from typing import SupportsIndex

import torch

from refimpl.geometry import PoolSpec
from refimpl.indices import check
from refimpl.layout import Buffer, buffers, upstream_shape
from refimpl.pinned import Block, HostMemory
from refimpl.plan import Registration
from refimpl.teardown import call_all


class HostBuffers:
    """The buffers of a pool in one layout.

    storage   each `layout.Buffer` with its tensors, which have the buffer's own (unmerged) axes
    platform  the device that the memory is for, by name: addresses on a device are those of this one
    """

    platform = "cpu"

    def __init__(
        self, spec: PoolSpec, layout: str, num_pages: int, memory: HostMemory, registration_limit: int | None
    ) -> None:
        self.spec, self.layout, self.num_pages = spec, layout, num_pages
        self.page_size, self.nbytes = spec.page_size, num_pages * spec.page_bytes
        self.closed = False
        self.storage: list[tuple[Buffer, list[torch.Tensor]]] = []
        self._blocks: list[Block] = []
        try:
            with torch.inference_mode(False):  # whichever mode this is, pages are written in any
                for buffer in buffers(spec, layout, num_pages):
                    self.storage.append((buffer, self._tensors(buffer, memory, registration_limit)))
        except BaseException:
            self.close()
            raise

    def _tensors(self, buffer: Buffer, memory: HostMemory, limit: int | None) -> list[torch.Tensor]:
        return [self._take(buffer, memory, limit) for _ in buffer.tensor_layers]

    def _take(self, buffer: Buffer, memory: HostMemory, limit: int | None) -> torch.Tensor:
        self._blocks.append(memory.allocate(buffer.nbytes, buffer.piece_bytes, limit))
        tensor = self._blocks[-1].tensor
        if tensor.dtype != torch.uint8 or tensor.shape != (buffer.nbytes,) or not tensor.is_contiguous():
            raise ValueError(
                f"pool {self.spec.name!r}: `HostMemory.map({buffer.nbytes})` must return as many bytes in a row "
                f"(torch.uint8), got {tensor.dtype} of shape {tuple(tensor.shape)} and strides {tensor.stride()}"
            )
        return tensor.view(buffer.dtype).view(buffer.shape)

    def close(self) -> None:
        """Undo registrations and let go of the memory. Views that are still held stay readable. Idempotent."""
        call_all((*(block.close for block in self._blocks), self._drop))

    def _drop(self) -> None:
        self._blocks, self.storage, self.closed = [], [], True

    def require_open(self) -> None:
        """`ValueError` if it was closed."""
        if self.closed:
            raise ValueError(f"pool {self.spec.name!r} is closed")

    def buffer(self, component: str) -> torch.Tensor | list[torch.Tensor]:
        """A component in memory order, as upstream shapes it; a list where it lies in several tensors."""
        self.spec.component(component)
        held: list[torch.Tensor] = []
        for buffer, shaped in self._upstream():
            if component not in [c.name for c in buffer.components]:
                continue
            if len(buffer.components) > 1:  # stacked: upstream shows the axis, and it is where it lies in memory
                stack = buffer.axes.index("component")
                shaped = [tensor.select(stack, buffer.position(component)) for tensor in shaped]
            held += shaped
        return held[0] if len(held) == 1 else held

    @property
    def kv_buffer(self) -> torch.Tensor | list[torch.Tensor]:
        """Every host tensor, as upstream shapes it: one tensor, or a list where there are several."""
        shaped = [tensor for _, tensors in self._upstream() for tensor in tensors]
        return shaped[0] if len(shaped) == 1 else shaped

    def _upstream(self) -> list[tuple[Buffer, list[torch.Tensor]]]:
        """The storage under upstream's shapes."""
        self.require_open()
        return [
            (buffer, [t.view(upstream_shape(buffer, self.spec.family, self.layout)) for t in tensors])
            for buffer, tensors in self.storage
        ]

    def part_views(self, component: str, layer: int | None) -> tuple[torch.Tensor, ...]:
        """One layer as `[page, token, group, head, lane]` views, one for each part that the lanes are cut into."""
        self.require_open()
        c = self.spec.component(component)
        if layer not in self.spec.layers_of(c):
            raise KeyError(f"{component} of pool {self.spec.name!r} owns no layer {layer}")
        return tuple(
            buffer.view(tensors[buffer.layers.index(layer) if buffer.per_layer else 0], component, layer)
            for buffer, tensors in self.storage
            if c in buffer.components
        )

    def layer_view(self, component: str, layer: int | None, part: int = 0) -> torch.Tensor:
        """One layer as `[page, token, group, head, lane]`, sharing memory with the pool, in every layout."""
        return self.part_views(component, layer)[part]

    @property
    def data_refs(self) -> dict[str, list[torch.Tensor]]:
        """Per component the views of its layers, in storage order (part after part where lanes are cut)."""
        return {
            c.name: [view for layer in self.spec.layers_of(c) for view in self.part_views(c.name, layer)]
            for c in self.spec.components
        }

    @property
    def data_ptrs(self) -> dict[str, torch.Tensor]:
        """Address of page 0 of each view of `data_refs`, as uint64."""
        return {
            name: torch.tensor([view.data_ptr() for view in views], dtype=torch.uint64)
            for name, views in self.data_refs.items()
        }

    @property
    def device_ptrs(self) -> dict[str, torch.Tensor]:
        """`data_ptrs` as a device sees them; 0 where it has no address for them."""
        return {
            name: torch.tensor([self._device_address(int(p)) or 0 for p in pointers.tolist()], dtype=torch.uint64)
            for name, pointers in self.data_ptrs.items()
        }

    @property
    def registrations(self) -> list[Registration]:
        """Pinned ranges by address, and where a device finds them."""
        ranges = [
            Registration(begin, begin + nbytes, block.device_address(begin, self.platform))
            for block in self._memory()
            for begin, nbytes in block.chunks
        ]
        return sorted(ranges, key=lambda r: r.begin)

    def _device_address(self, address: int) -> int | None:
        if not address:
            return 0  # a view without elements lies nowhere
        for block in self._memory():
            first = block.tensor.data_ptr()
            if first <= address < first + block.tensor.numel():
                return block.device_address(address, self.platform)
        raise ValueError(f"address {address:#x} is not in pool {self.spec.name!r}")

    def _memory(self) -> list[Block]:
        """The blocks that the tensors lie in."""
        return self._blocks

    # ---- pages, as storage tiers and other engines see them

    def page(self, page: int) -> dict[str, torch.Tensor]:
        """A copy of one page, the same in every layout: `{component: [layer, token, head, lane]}`.

        Page rows and states come as `[layer, *row]`, side states as `[*row]`.
        """
        self.require_open()
        page = _number(page, "page")
        if not 0 <= page < self.num_pages:
            raise IndexError(f"pool {self.spec.name!r} has pages 0..{self.num_pages - 1}, there is no page {page}")
        return {c.name: self._page_of(c.name, page) for c in self.spec.components}

    def _page_of(self, component: str, page: int) -> torch.Tensor:
        c = self.spec.component(component)
        rows = [
            torch.cat([view[page].flatten(1, 2) for view in self.part_views(component, layer)], dim=-1)
            for layer in self.spec.layers_of(c)
        ]
        tokens = self.spec.tokens_per_page(c)
        whole = torch.stack(rows) if rows else torch.empty(0, tokens, c.head_count, c.lanes, dtype=c.dtype)
        if c.unit == "token":
            return whole
        return whole.reshape(c.row_shape if c.side else (len(rows), *c.row_shape))

    def get_data_page(self, index: int) -> torch.Tensor:
        """The page that begins at slot `index`, flat, as bytes in storage order (so it depends on the layout)."""
        page = self._page_at(index)
        slices = [
            tensor.select(buffer.axes.index("page"), page).contiguous().reshape(-1).view(torch.uint8)
            for buffer, tensors in self.storage
            for tensor in tensors
        ]
        return torch.cat(slices) if slices else torch.empty(0, dtype=torch.uint8)

    def set_from_flat_data_page(self, index: int, data_page: torch.Tensor) -> None:
        """Write back what `get_data_page` returned. `ValueError`, and nothing written, for another number of bytes."""
        if not isinstance(data_page, torch.Tensor):
            raise TypeError(f"a flat page is a tensor (torch.frombuffer makes one of bytes), got {data_page!r:.80}")
        page, flat = self._page_at(index), data_page.reshape(-1).view(torch.uint8)
        if flat.numel() != self.spec.page_bytes:
            raise ValueError(f"a page of {self.spec.name!r} has {self.spec.page_bytes} bytes, got {flat.numel()}")
        first = 0
        for buffer, tensors in self.storage:
            for tensor in tensors:
                target = tensor.select(buffer.axes.index("page"), page)
                nbytes = target.numel() * buffer.dtype.itemsize
                # Torch views bytes as wider elements only from an even start.
                aligned = flat[first : first + nbytes].clone()
                target.copy_(aligned.view(buffer.dtype).view(target.shape))
                first += nbytes

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        """A zeroed flat page."""
        return torch.zeros(self.spec.page_bytes, dtype=torch.uint8)

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        """Addresses and bytes of the contiguous pieces of each page; of a scattered one layer by layer, K before V."""
        pieces = sorted(self._pieces(), key=lambda piece: piece[0])
        pages = check(indices, self.page_size, self.num_pages, "page", unique=False)
        addresses = [first + int(page) * size for page in pages for _, first, size in pieces]
        return addresses, [size for _ in pages for _, _, size in pieces]

    def get_page_buffer_element_size(self, indices: torch.Tensor) -> int:
        """Bytes of the first piece that `get_page_buffer_meta` names; 0 if it names none."""
        return next(iter(self.get_page_buffer_meta(indices)[1]), 0)

    def get_split_heads_page_buffer_meta(self, indices: torch.Tensor, split: int) -> tuple[list[int], list[int]]:
        """The same for one of `split` ranks after the other, where heads lie outermost in a page.

        `ValueError` where they do not, or where those of some component cannot be shared out evenly.
        """
        self.require_open()
        counts = self._outer_heads()
        if not counts or split < 1 or any(count % split for count in counts):
            raise ValueError(
                f"{self.layout} of pool {self.spec.name!r} keeps {' and '.join(map(str, counts)) or 'no'} heads "
                f"outermost in a page, they cannot be split between {split} ranks"
            )
        pieces = list(zip(*self.get_page_buffer_meta(indices), strict=True))
        per_page = len(self._pieces())
        found = [
            (first + rank * (size // split), size // split)
            for at in range(0, len(pieces), per_page)
            for rank in range(split)
            for first, size in pieces[at : at + per_page]
        ]
        return [address for address, _ in found], [size for _, size in found]

    def get_contiguous_buf_infos(self) -> tuple[list[int], list[int], list[int]]:
        """The fewest ranges in which page i begins at `address + i * item`: addresses, bytes, item bytes."""
        pieces = self._pieces()
        return (
            [first for _, first, _ in pieces],
            [size * self.num_pages for _, _, size in pieces],
            [size for _, _, size in pieces],
        )

    def is_stride_page_aligned(self, alignment: int = 4096) -> bool:
        """Whether every page of a page-major layout begins at a multiple of `alignment` (for O_DIRECT)."""
        together = all(buffer.keeps_page_together for buffer, _ in self.storage)
        return together and all(first % alignment == 0 == size % alignment for _, first, size in self._pieces())

    def _pieces(self) -> list[tuple[int, int, int]]:
        """`(layer position, address of page 0, bytes)` of each contiguous piece of a page, in storage order."""
        self.require_open()
        pieces = []
        for buffer, tensors in self.storage:
            outside = buffer.axes[: buffer.axes.index("page")]
            for number, tensor in enumerate(tensors):
                for indices in product(*(range(buffer.extents[axis]) for axis in outside)):
                    at = dict(zip(outside, indices, strict=True))
                    first = tensor.data_ptr() + sum(buffer.strides[axis] * index for axis, index in at.items())
                    pieces.append((number + at.get("layer", 0), first, buffer.piece_bytes))
        return pieces

    def _outer_heads(self) -> list[int]:
        """How many heads (or groups of heads) are outermost ranges of every page: each number that a buffer has."""
        axes = {"page_head": ("group", "head"), "page_unified": ("group",)}.get(self.layout)
        return sorted({math.prod(b.extents[axis] for axis in axes) for b, _ in self.storage}) if axes else []

    def _page_at(self, index: int) -> int:
        self.require_open()
        page, inside = divmod(_number(index, "first slot of a page"), self.page_size)
        if inside or not 0 <= page < self.num_pages:
            raise ValueError(
                f"slot {index} begins none of the {self.num_pages} pages of {self.page_size} of pool {self.spec.name!r}"
            )
        return page


def _number(given: SupportsIndex, what: str) -> int:
    try:
        return operator.index(given)
    except TypeError:
        raise TypeError(f"the {what} is a whole number, got {given!r:.80}") from None
