"""From a row of the published table to calls of SGLang's functions, on memory of our benchmark.

Its pools keep views of layers and tables of their addresses, and its controller puts lists where a function reads them.
None of that is part of a transfer, so all of it is made beforehand.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from types import ModuleType
from typing import Any

import torch

from refimpl import DevicePool, PoolSpec
from refimpl.geometry import Component
from refimpl.host_buffers import HostBuffers
from verify.adapters import sglang_pieces
from verify.adapters.protocol import Json
from verify.adapters.sglang_functions import PATHS, Call, Path, ops_limit
from verify.adapters.sglang_memory import Bundle, Memory, bundles
from verify.bench.gpu.clock import Run
from verify.bench.measure import Indices, flat


def ops_backup_by_layer(ops: ModuleType, call: Call) -> None:
    """What a pool does that has no backup of all layers at once: the function that loads a layer, the other way."""
    (sources,), (targets,) = call.device, call.host
    for source, target in zip(sources, targets, strict=True):
        ops.transfer_kv_per_layer_mla(
            src=source,
            dst=target,
            src_indices=call.device_items,
            dst_indices=call.host_items,
            item_size=call.bundle.row,
        )


# By the names of `data/results/sglang-*.json`. How many blocks or warps a path takes is left to its defaults.
BY_NAME = {
    "AOT": PATHS["ops"],
    "AOT per layer": Path("ops", {"backup": (ops_backup_by_layer, ["layer_first"])}, ops_limit),
    "JIT": PATHS["register"],
    "TMA": PATHS["bulk"],
    "Mamba kernel": PATHS["mamba"],
    "staged": PATHS["staged"],
    "direct": PATHS["direct"],
}
PIECES = tuple(dict.fromkeys(path.piece for path in BY_NAME.values()))
# Sides whose lists are read on the host; the others' lie on the GPU.
READ_ON_HOST = {"staged": ("host",), "direct": ("host", "device")}


class InPlace(Memory):
    """Both sides where they lie, instead of copies between margins. What a call asks for is made once."""

    def __init__(self, host: HostBuffers, device: DevicePool, where: str) -> None:
        self.host, self.device, self.where = host, device, where
        self._made: dict[tuple[str, str], Any] = {}

    def wholes(self, bundle: Bundle) -> list[torch.Tensor]:
        return self._once(
            "wholes", bundle, lambda: [self._bytes("host", p)[0].view(bundle.shape) for p in bundle.parts]
        )

    def host_layers(self, bundle: Bundle) -> list[list[torch.Tensor]]:
        return self._once("host", bundle, lambda: Memory.host_layers(self, bundle))

    def device_layers(self, bundle: Bundle) -> list[list[torch.Tensor]]:
        return self._once("device", bundle, lambda: Memory.device_layers(self, bundle))

    def _once(self, what: str, bundle: Bundle, make: Callable[[], Any]) -> Any:
        key = what, bundle.name
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def _layers(self, side: str, part: Json, row: int) -> list[torch.Tensor]:
        rows = self.host.num_pages * (self.host.page_size if part["unit"] == "token" else 1)
        return [layer for tensor in self._bytes(side, part) for layer in tensor.view(-1, rows, row)]

    def _bytes(self, side: str, part: Json) -> list[torch.Tensor]:
        """Bytes of a component: K and V are halves of one host tensor."""
        if side == "device":
            return [flat(self.device.buffer(part["name"], layer)) for layer in part["layers"]]
        return [
            flat(tensor[buffer.position(part["name"])] if buffer.axes[0] == "component" else tensor)
            for buffer, tensors in self.host.storage
            if part["name"] in [c.name for c in buffer.components]
            for tensor in tensors
        ]


class Prepared(Call):
    """A call whose tables of addresses are made once."""

    def addresses(self, layers: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
        if layers is self.device:
            return self._of_device
        if layers is self.host:
            return self._of_host
        raise ValueError(
            f"a table of {sum(map(len, layers))} layers of {self.bundle.name}: only the lists `device` and `host` "
            "of the call have one"
        )

    @cached_property
    def _of_device(self) -> list[torch.Tensor]:
        return super().addresses(self.device)

    @cached_property
    def _of_host(self) -> list[torch.Tensor]:
        return super().addresses(self.host)


def transfer(figure: Json, host: HostBuffers, device: DevicePool, at: Indices, where: str) -> Run:
    """One transfer of all layers. `ValueError` where the path has no such transfer, or cannot be run here."""
    path, direction, layout = BY_NAME[figure["path"]], figure["direction"], figure["layout"]
    memory, calls = InPlace(host, device, where), []
    for bundle in bundles(described(host.spec, host.num_pages), layout):
        if reason := path.refusal(bundle, direction, where):
            raise ValueError(f"{figure['path']}: {reason}")
        host_items, device_items = lists(bundle, at, figure, where)
        calls.append(Prepared(bundle, memory, host_items, device_items, range(len(bundle.layers))))
    piece, move = sglang_pieces.piece(path.piece), path.moves[direction][0]

    def run() -> None:
        for call in calls:
            move(piece, call)

    return run


def lists(bundle: Bundle, at: Indices, figure: Json, where: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of the host and of the device, where SGLang's controller puts them, and in its order."""
    items = {side: bundle.items(slots.numpy()) for side, slots in zip(("host", "device"), at, strict=True)}
    if (figure["path"], figure["layout"]) == ("direct", "layer_first"):
        ascending = items["host"].argsort()
        items = {side: rows[ascending] for side, rows in items.items()}
    on_host = READ_ON_HOST.get(figure["path"], ())
    placed = {side: rows if side in on_host else rows.to(where) for side, rows in items.items()}
    return placed["host"], placed["device"]


def described(spec: PoolSpec, num_pages: int) -> Json:
    """A pool as the golden vectors describe it, as far as a call asks."""
    return {
        "page_size": spec.page_size,
        "host_pages": num_pages,
        "head_groups": spec.head_groups,
        "components": [_component(spec, c) for c in spec.components],
    }


def _component(spec: PoolSpec, c: Component) -> dict[str, Any]:
    return {
        "name": c.name,
        "element_bytes": c.dtype.itemsize,
        "heads": c.heads,
        "lanes": c.lanes,
        "unit": c.unit,
        "layers": list(spec.layers_of(c)),
    }
