"""Backend `torch`: the plan as torch operations, on any device.

Each move is two strided byte views, `[page, *loops, run]`, one of either side; a copy is an indexed assignment.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from refimpl.backends.protocol import OnTheHost
from refimpl.indices import Items
from refimpl.plan import Move, Plan, Side
from refimpl.receipt import Receipt
from refimpl.runtime import Event

WORDS = ((8, torch.int64), (4, torch.int32), (2, torch.int16), (1, torch.uint8))


class TorchBackend(OnTheHost):
    def execute(self, plan: Plan, layers: tuple[int | None, ...], items: Items, direction: str) -> Receipt:
        receipt = Receipt("torch")
        for _, move, at in plan.select(layers):
            host = strided(move, move.host, at, [loop.host for loop in move.loops])
            device = strided(move, move.device, at, [loop.device for loop in move.loops])
            host, device = widest(host, device)
            uploads = _assign(move, host, device, items, direction)
            runs = len(items) * move.runs_per_item
            receipt += Receipt(
                "torch", runs * move.run, runs, index_uploads=uploads, host_syncs=int(host.device != device.device)
            )
        return replace(receipt, event=_behind(plan)) if direction == "load" else receipt


def _behind(plan: Plan) -> Event | None:
    """Torch on a GPU returns before it has written: the event behind that; None on a CPU."""
    device = next((tensor.device for move in plan.moves for tensor in move.device.tensors if tensor.is_cuda), None)
    return torch.cuda.current_stream(device).record_event() if device else None


def strided(move: Move, side: Side, at: int, loop_strides: list[int]) -> torch.Tensor:
    """Bytes of one side of a move in layer number `at`: `[page, *loops, run]`, or `[page, entry, run]`."""
    tensor = side.tensors[at]
    whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
    entries = [(move.entries, move.entry_bytes)] if move.entries > 1 else []
    axes = [(side.pages, side.page), *entries, *zip((loop.count for loop in move.loops), loop_strides, strict=True)]
    shape, strides = zip(*axes, (move.run, 1), strict=True)
    return whole.as_strided(shape, strides, side.starts[at] - whole.data_ptr())


def widest(*views: torch.Tensor) -> list[torch.Tensor]:
    """The same bytes in the widest words that every start, stride and run allows."""
    fits = 0
    for view in views:
        fits |= int(view.storage_offset()) | view.shape[-1]
        for extent, stride in zip(view.shape[:-1], view.stride()[:-1], strict=True):
            fits |= int(stride) if extent > 1 else 0
    word = next(dtype for size, dtype in WORDS if fits % size == 0)
    return [_as_words(view, word) for view in views]


def _as_words(view: torch.Tensor, word: torch.dtype) -> torch.Tensor:
    size = word.itemsize
    whole = torch.empty(0, dtype=torch.uint8, device=view.device).set_(view.untyped_storage())
    words = whole[: whole.numel() // size * size].view(word)
    strides = [stride // size if extent > 1 else 0 for extent, stride in zip(view.shape, view.stride(), strict=True)]
    return words.as_strided(
        [*view.shape[:-1], view.shape[-1] // size], [*strides[:-1], 1], view.storage_offset() // size
    )


def _assign(move: Move, host: torch.Tensor, device: torch.Tensor, items: Items, direction: str) -> int:
    """`to[items] = source[items]`; returns how many index tensors were sent to a GPU."""
    host_items, device_items = items.checked()
    host_at = _index(host_items, move.entries, host.device)
    device_at = _index(device_items, move.entries, device.device)
    if direction == "backup":
        host[host_at] = device[device_at].to(host.device)
    else:
        device[device_at] = host[host_at].to(device.device)
    return int(device.is_cuda)


def _index(items: np.ndarray, entries: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    axes = np.divmod(items, entries) if entries > 1 else (items,)
    return tuple(torch.from_numpy(axis).to(device) for axis in axes)
