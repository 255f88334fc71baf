"""Buffers of a vector in memory that SGLang's transfers can reach, in the shapes that they take."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from verify.adapters.protocol import Buffers, Json

BROKEN = 70  # exit code of a process whose CUDA context has failed
MARGIN_BYTE = 0xFE  # neither payload nor poison
ALIGNMENT = 256


class Slab:
    """A buffer between margins as large as itself, so that an index somewhat out of range harms nobody else."""

    def __init__(self, data: np.ndarray, device: str) -> None:
        self.margin = -(-data.size // ALIGNMENT) * ALIGNMENT
        shape, pinned = (data.size + 2 * self.margin,), device == "cpu" and torch.cuda.is_available()
        self.whole = torch.full(shape, MARGIN_BYTE, dtype=torch.uint8, pin_memory=pinned, device=device)
        self.view = self.whole[self.margin : self.margin + data.size]
        self.view.copy_(torch.from_numpy(data))

    def damaged(self) -> bool:
        before, after = self.whole[: self.margin], self.whole[self.margin + self.view.numel() :]
        return any(bool((edge != MARGIN_BYTE).any()) for edge in (before, after))


def addresses(tensors: Iterable[torch.Tensor], where: str | torch.device) -> torch.Tensor:
    """A table of them on that device; pinned memory has one address for both sides."""
    return torch.tensor([tensor.data_ptr() for tensor in tensors], dtype=torch.uint64, device=where)


def require_undamaged(slabs: Iterable[Slab]) -> None:
    """`MemoryError` where somebody wrote beside a buffer."""
    if any(slab.damaged() for slab in slabs):
        raise MemoryError("memory beside a buffer was written")


@dataclass(frozen=True)
class Bundle:
    """What one call moves: K and V together where they are alike, else a single component."""

    geometry: Json
    layout: str
    parts: Sequence[Json]

    @property
    def name(self) -> str:
        """Of its component, or of the first."""
        return self.parts[0]["name"]

    @property
    def layers(self) -> list[int]:
        return self.parts[0]["layers"]

    @property
    def page(self) -> int:
        """Rows of a page: tokens, or one."""
        return self.geometry["page_size"] if self.parts[0]["unit"] == "token" else 1

    @property
    def heads(self) -> int:
        return self.parts[0]["heads"] or 1

    @property
    def lane_bytes(self) -> int:
        return self.parts[0]["lanes"] * self.parts[0]["element_bytes"]

    @property
    def row(self) -> int:
        """Bytes of a row."""
        return self.heads * self.lane_bytes

    @property
    def group_row(self) -> int:
        """Bytes of the heads of one group."""
        return self.row // (self.geometry["head_groups"] if self.parts[0]["heads"] else 1)

    def items(self, indices: np.ndarray) -> torch.Tensor:
        """What the functions are told: token indices, or numbers of pages, worked out as SGLang's pools do."""
        given, tokens = torch.from_numpy(indices), self.geometry["page_size"]
        return given if self.parts[0]["unit"] == "token" else given.reshape(-1, tokens)[:, 0] // tokens

    def reaches(self, side: str, items: torch.Tensor) -> bool:
        """Whether all these rows lie in a buffer or its margins."""
        rows = self.geometry[f"{side}_pages"] * self.page
        return not items.numel() or bool(-rows <= items.min() and items.max() + self.page <= 2 * rows)

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Axes of the host tensor of a part (of the bundle, in `page_unified`), bytes last."""
        pages, layers, groups = self.geometry["host_pages"], len(self.layers), self.row // self.group_row
        return {
            "layer_first": (layers, pages * self.page, self.row),
            "page_first": (pages * self.page, layers, self.row),
            "page_first_direct": (pages, layers, self.page, self.row),
            "page_head": (pages, self.heads, self.page, layers, self.lane_bytes),
            "page_unified": (
                (pages, layers, self.page, self.row)
                if len(self.parts) == 1
                else (pages, groups, layers, len(self.parts), self.page, self.heads // groups, self.lane_bytes)
            ),
        }[self.layout]


def why_never(geometry: Json, layout: str, direction: str) -> str | None:
    """Why no version of SGLang has such a transfer."""
    if not geometry["host"]:
        return f"{layout} is no layout of this pool"
    if direction.endswith("_entries"):
        return "SGLang moves single entries only of its own C4 pages of 64"
    return None


def bundles(geometry: Json, layout: str) -> Iterator[Bundle]:
    parts = list(geometry["components"])
    while parts:
        alike = [{**part, "name": "", "id": 0} for part in parts[:2]]
        pair = [part["name"] for part in parts[:2]] == ["k", "v"] and alike[0] == alike[1]
        taken, parts = (parts[:2], parts[2:]) if pair else (parts[:1], parts[1:])
        yield Bundle(geometry, layout, taken)


class Memory:
    """Both sides of a transfer, in pinned memory and on the GPU."""

    def __init__(self, geometry: Json, host: Buffers, device: Buffers, where: str) -> None:
        self.where, self.geometry, self._given = where, geometry, {"host": host, "device": device}
        self._slabs = {
            "host": {name: Slab(data, "cpu") for name, data in host.items()},
            "device": {name: Slab(data, where) for name, data in device.items()},
        }

    def wholes(self, bundle: Bundle) -> list[torch.Tensor]:
        """Host tensor of each part, or the one that has them all."""
        names = dict.fromkeys(self._of("host", part)[0]["name"] for part in bundle.parts)
        return [self._slabs["host"][name].view.view(bundle.shape) for name in names]

    def host_layers(self, bundle: Bundle) -> list[list[torch.Tensor]]:
        """Rows `[row, byte]` of each part and layer, strided in `page_first`."""
        if bundle.layout == "page_first":
            return [[whole[:, at] for at in range(len(bundle.layers))] for whole in self.wholes(bundle)]
        return [self._layers("host", part, bundle.row) for part in bundle.parts]

    def device_layers(self, bundle: Bundle) -> list[list[torch.Tensor]]:
        return [self._layers("device", part, bundle.row) for part in bundle.parts]

    def hand_back(self) -> None:
        """The caller gets its bytes; damage beside them is an error."""
        for side, slabs in self._slabs.items():
            for name, slab in slabs.items():
                self._given[side][name][:] = slab.view.cpu().numpy()
        require_undamaged(slab for slabs in self._slabs.values() for slab in slabs.values())

    def _of(self, side: str, part: Json) -> list[Json]:
        return [buffer for buffer in self.geometry[side] if part["name"] in buffer["components"]]

    def _layers(self, side: str, part: Json, row: int) -> list[torch.Tensor]:
        """A buffer holds one layer or all of them, one after the other."""
        return [
            layer
            for buffer in self._of(side, part)
            for layer in self._slabs[side][buffer["name"]].view.view(len(buffer["layers"]), -1, row)
        ]


@contextmanager
def on_a_stream(where: str) -> Iterator[None]:
    """Calls on a stream of their own, since batched copies refuse the default one; done when this ends.

    A context in which a kernel has failed answers every later call with that error, which would pass for a refusal:
    such a process ends, and the suite goes on in another.
    """
    if where == "cpu":
        yield
        return
    try:
        with torch.cuda.stream(torch.cuda.Stream()):
            yield
    finally:
        try:
            torch.cuda.synchronize()
        except Exception:
            os._exit(BROKEN)
