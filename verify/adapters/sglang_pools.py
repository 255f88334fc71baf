"""SGLang's own host pools, built over the buffers of a vector and told to back up and load, as its controller does.

Its controller hands a pool the index lists where the backend wants them: on the CPU for the copy engine, on the GPU
for kernels, except host indices of a staged write-back. Names are those of SGLang 0.5.23.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from refimpl.teardown import call_all
from verify.adapters import sglang_pieces
from verify.adapters.protocol import Buffers, Json
from verify.adapters.sglang_memory import Bundle, Slab, addresses, bundles, on_a_stream, require_undamaged, why_never

LAYOUTS = {"kernel": ("layer_first", "page_first", "page_head"), "direct": ("layer_first", "page_first_direct")}


@dataclass(frozen=True)
class Kind:
    """How one of SGLang's pools is built: `make(geometry, layout, part or parts, device tensors by part)`.

    pages_taken  the layout in which it makes a table of its layers from as many pages, and raises if there are fewer
    """

    piece: str
    make: Callable[[Json, str, list[Bundle], dict[str, list[torch.Tensor]]], list[Any]]
    layouts: tuple[str, ...] = ("layer_first", "page_first", "page_first_direct")
    pages_taken: str = ""

    def refusal(self, geometry: Json, layout: str) -> str | None:
        """Why it is not built. It would raise after it has registered memory, and leave it so when it goes."""
        if layout not in self.layouts:
            return f"SGLang's pool has no {layout}"
        pages, layers = geometry["host_pages"], len(geometry["components"][0]["layers"])
        if layout == self.pages_taken and pages < layers:
            return f"SGLang's pool cannot be built with fewer host pages than layers in {layout}: {pages} and {layers}"
        return None


def mha(geometry: Json, layout: str, parts: list[Bundle], rows: dict[str, list[torch.Tensor]]) -> list[Any]:
    """K and V of one width or of two."""
    k, v = (part for bundle in parts for part in bundle.parts)
    heads, widths = k["heads"], [part["lanes"] * part["element_bytes"] for part in (k, v)]
    found = [[row.view(-1, heads, width) for row in rows[part]] for part, width in zip("kv", widths, strict=True)]
    module, info, where = sglang_pieces.piece("mha pools"), _infos(), found[0][0].device
    buffers = info.KVBuffers(
        k=tuple(found[0]),
        v=tuple(found[1]),
        k_data_ptrs=addresses(found[0], where),
        v_data_ptrs=addresses(found[1], where),
        layout=info.KVBufferLayout.NHD,
    )
    described = info.MHABufferInfo(
        buffers=buffers,
        page_size=geometry["page_size"],
        head_num=heads,
        head_dim=widths[0],
        v_head_dim=widths[1],
        dtype=torch.uint8,
        device=where,
    )
    kind = module.MHATokenToKVPoolHost if widths[0] == widths[1] else module.AsymmetricMHATokenToKVPoolHost
    return [kind(described, **_sizes(geometry, layout, len(found[0])))]


def mla(geometry: Json, layout: str, parts: list[Bundle], rows: dict[str, list[torch.Tensor]]) -> list[Any]:
    """A single latent row a token."""
    (bundle,), info = parts, _infos()
    found, width = [row.view(-1, 1, bundle.row) for row in rows[bundle.name]], bundle.row
    described = info.MLABufferInfo(
        buffers=tuple(found),
        data_ptrs=addresses(found, found[0].device),
        layer_indices=tuple(range(len(found))),
        device_layer_num=len(found),
        page_size=geometry["page_size"],
        kv_lora_rank=width,
        qk_rope_head_dim=0,
        kv_cache_dim=width,
        dtype=torch.uint8,
        device=found[0].device,
    )
    pool = sglang_pieces.piece("mla pools").MLATokenToKVPoolHost
    return [pool(described, target_layer_num=len(found), **_sizes(geometry, layout, len(found)))]


def page_rows(geometry: Json, layout: str, parts: list[Bundle], rows: dict[str, list[torch.Tensor]]) -> list[Any]:
    """Opaque rows of whole pages: a pool for each component, or none that keeps its memory registered."""
    kind, pools = sglang_pieces.piece("v4 pools").DeepSeekV4PagedHostPool, []
    with ExitStack() as built:
        for bundle in parts:
            pool = kind(
                pool_name=bundle.name,
                device_buffers=rows[bundle.name],
                item_bytes=bundle.row,
                num_host_pages=geometry["host_pages"],
                slot_page_size=geometry["page_size"],
                layout=layout,
                pin_memory=torch.cuda.is_available(),
                page_aligned_only=True,
            )
            pools.append(pool)
            built.callback(pool.destroy)
        built.pop_all()
    return pools


def states(geometry: Json, layout: str, parts: list[Bundle], rows: dict[str, list[torch.Tensor]]) -> list[Any]:
    """Rings of states, one row a page; a device pool is read for its tensor and its ring alone."""
    (bundle,) = parts
    of_layers = [
        SimpleNamespace(ring_size=1, kv_score_buffer=SimpleNamespace(kv_score=row)) for row in rows[bundle.name]
    ]
    pool = sglang_pieces.piece("v4 pools").DeepSeekV4StateHostPool
    return [
        pool(
            pool_name=bundle.name,
            state_pools=of_layers,
            num_host_pages=geometry["host_pages"],
            swa_page_size=geometry["page_size"],
            layout=layout,
            pin_memory=torch.cuda.is_available(),
        )
    ]


KINDS = {
    "mha": Kind("mha pools", mha, (*Kind.layouts, "page_head"), pages_taken="page_head"),
    "asymmetric": Kind("mha pools", mha, ("page_first", "page_first_direct")),
    "mla": Kind("mla pools", mla, pages_taken="page_first_direct"),
    "page rows": Kind("v4 pools", page_rows),
    "states": Kind("v4 pools", states),
}


def kind_of(geometry: Json) -> Kind | None:
    """By what the pool is made of, whatever the vectors call it."""
    parts = geometry["components"]
    if [part["name"] for part in parts] == ["k", "v"]:
        return KINDS["mha" if len([*bundles(geometry, "")]) == 1 else "asymmetric"]
    if all(part["unit"] == "page" for part in parts):
        return KINDS["states" if all("state" in part["name"] for part in parts) else "page rows"]
    one = len(parts) == 1 and parts[0]["unit"] == "token" and not parts[0]["heads"]
    return KINDS["mla"] if one else None


class Pools:
    """The pools with one of SGLang's two backends."""

    def __init__(self, backend: str, where: str = "cuda") -> None:
        self.backend, self.where = backend, where
        self.expected_failures = sglang_pieces.expected_failures(f"pools_{backend}")
        self.device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no CUDA device"
        self.versions = sglang_pieces.versions(sorted({kind.piece for kind in KINDS.values()} | {"ops"}))
        self.built: Built | None = None

    def capabilities(self, geometry: Json, layout: str, direction: str) -> str | None:
        if reason := why_never(geometry, layout, direction):
            return reason
        kind = kind_of(geometry)
        if kind is None:
            return "none of SGLang's pools is built over such components alone"
        if layout not in LAYOUTS[self.backend]:
            return f"SGLang's pool has no {self.backend} transfers in {layout}"
        if reason := kind.refusal(geometry, layout):
            return reason
        reasons = [self._limit(bundle) for bundle in bundles(geometry, layout)]
        if reason := next((reason for reason in reasons if reason), None):
            return reason
        for piece in (kind.piece, "ops"):
            if reason := sglang_pieces.why_absent(piece):
                return reason
        if self.where == "cuda" and not torch.cuda.is_available():
            return "there is no CUDA device"
        return self._why_not_built(geometry, layout)

    def _limit(self, bundle: Bundle) -> str | None:
        """Its kernels move words of eight bytes; that is found out when they are launched."""
        part = bundle.lane_bytes if bundle.layout == "page_head" else bundle.row
        return f"parts of {part} bytes; it takes multiples of 8" if self.backend == "kernel" and part % 8 else None

    def _why_not_built(self, geometry: Json, layout: str) -> str | None:
        """One group after the other: the last one is at hand."""
        last = self.built
        if last is not None and last.id == geometry["id"]:
            return None
        self.built = None
        try:
            if last is not None:
                last.close()
            self.built = Built(geometry, layout, self.where)
        except Exception as error:
            return f"its pool cannot be built: {type(error).__name__}: {error}"
        return None

    def transfer(
        self,
        geometry: Json,
        layout: str,
        direction: str,
        host: Buffers,
        device: Buffers,
        host_indices: np.ndarray,
        device_indices: np.ndarray,
        layers: Sequence[int] | None,
    ) -> None:
        if not host_indices.size and not device_indices.size:
            return  # SGLang's controller never asks for nothing; its operators would divide by the number of rows
        for side, given in ("host", host_indices), ("device", device_indices):
            rows = geometry[f"{side}_pages"] * geometry["page_size"]
            if given.size and not 0 <= given.min() <= given.max() < rows:
                return  # no pool checks its lists: the process would end; what stays undone counts as wrong
        pools = self.built
        assert pools is not None, "capabilities has built it"
        pools.fill(host, device)
        try:
            with on_a_stream(self.where):
                for pool in pools.pools:
                    self._move(pool, geometry, direction, host_indices, device_indices, layers)
        finally:
            pools.hand_back(host, device)

    def _move(
        self,
        pool: Any,
        geometry: Json,
        direction: str,
        host_indices: np.ndarray,
        device_indices: np.ndarray,
        layers: Sequence[int] | None,
    ) -> None:
        kept_here = direction == "backup" and pool.layout == "page_first" and pool.can_use_write_back_jit
        where = self.where if self.backend == "kernel" else "cpu"
        host_list = torch.from_numpy(host_indices).to("cpu" if kept_here else where)
        device_list = torch.from_numpy(device_indices).to(where)
        if direction == "backup":
            pool.backup_from_device_all_layer(None, host_list, device_list, self.backend)
            return
        for at, layer in enumerate(geometry["components"][0]["layers"]):
            if layers is None or layer in layers:
                pool.load_to_device_per_layer(None, host_list, device_list, at, self.backend)


class Built:
    """SGLang's pools of a group, one for each of its components or for all of them, and the device's buffers."""

    def __init__(self, geometry: Json, layout: str, where: str) -> None:
        kind, parts = kind_of(geometry), [*bundles(geometry, layout)]
        assert kind is not None, "capabilities has refused it"
        self.id = geometry["id"]
        self._slabs = {b["name"]: Slab(np.zeros(b["bytes"], np.uint8), where) for b in geometry["device"]}
        rows: dict[str, list[torch.Tensor]] = {}
        for part in geometry["components"]:
            held = [b["name"] for b in geometry["device"] if part["name"] in b["components"]]
            width = part["lanes"] * part["element_bytes"] * (part["heads"] or 1)
            rows[part["name"]] = [self._slabs[name].view.view(-1, width) for name in held]
        self.pools = kind.make(geometry, layout, parts, rows)

    def fill(self, host: Buffers, device: Buffers) -> None:
        """Both keep components and layers in order, however many tensors they cut them into."""
        joined, begin = torch.from_numpy(np.concatenate([*host.values()])), 0
        for tensor in self._host():
            tensor.copy_(joined[begin : begin + tensor.numel()])
            begin += tensor.numel()
        for name, data in device.items():
            self._slabs[name].view.copy_(torch.from_numpy(data))

    def hand_back(self, host: Buffers, device: Buffers) -> None:
        joined, begin = torch.cat(self._host()).numpy(), 0
        for data in host.values():
            data[:] = joined[begin : begin + data.size]
            begin += data.size
        for name, data in device.items():
            data[:] = self._slabs[name].view.cpu().numpy()
        require_undamaged(self._slabs.values())

    def close(self) -> None:
        """Before the memory goes: a range that stays registered would spoil the next pool that is given it."""
        call_all(pool.destroy for pool in self.pools)

    def _host(self) -> list[torch.Tensor]:
        owned = [pool.kv_buffer for pool in self.pools]
        tensors = [t for of_pool in owned for t in (of_pool if isinstance(of_pool, (list, tuple)) else [of_pool])]
        return [tensor.view(-1) for tensor in tensors]


def _infos() -> Any:
    return sglang_pieces.piece("device infos")


def _sizes(geometry: Json, layout: str, layers: int) -> Json:
    """Exactly the pages of the vector: a stated capacity gets no page on top."""
    size = geometry["page_size"]
    return {
        "host_to_device_ratio": 0.0,
        "host_size": 0,
        "page_size": size,
        "layout": layout,
        "device_capacity_tokens": geometry["device_pages"] * size,
        "host_token_capacity": geometry["host_pages"] * size,
        "pin_memory": torch.cuda.is_available(),
        "start_layer": 0,
        "end_layer": layers,
    }


def __getattr__(name: str) -> Pools:
    backends = {backend.capitalize(): backend for backend in LAYOUTS}
    if name not in backends:
        raise AttributeError(f"there is no backend {name!r}; there are {', '.join(backends)}")
    return Pools(backends[name])
