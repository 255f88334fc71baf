"""SGLang's own transfer functions: kernels that it compiles when asked, and the operators of `sglang-kernel`.

Each path is one way of moving rows, called as SGLang's pools call it, with nothing of the pools around it. `sglang` is
the first of them, in the order of `PATHS`, that has the cell. What a path cannot do it refuses beforehand, so that no
reason hides in an exception. Names are those of SGLang 0.5.23.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import torch

from verify.adapters import sglang_pieces
from verify.adapters.protocol import Buffers, Json
from verify.adapters.sglang_memory import Bundle, Memory, addresses, bundles, on_a_stream, why_never

STAGING_PAGES = 64  # of SGLang's pools
BULK_STAGE = 32 << 10  # bytes of the longest row of bulk copies: TMA_STAGE_BYTES of kernels/ops/kvcache/hicache.py


@dataclass(frozen=True)
class Call:
    """One bundle of one transfer. `positions` are the layers of a load, by their place in the pool."""

    bundle: Bundle
    memory: Memory
    host_items: torch.Tensor
    device_items: torch.Tensor
    positions: Sequence[int]

    def on_gpu(self, items: torch.Tensor) -> torch.Tensor:
        return items.to(self.memory.where)

    def addresses(self, layers: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
        """A table for each part."""
        return [addresses(of_part, self.memory.where) for of_part in layers]

    @property
    def mla(self) -> str:
        """Functions that move a single tensor say so in their names."""
        return "" if len(self.bundle.parts) == 2 else "_mla"

    @property
    def host(self) -> list[list[torch.Tensor]]:
        return self.memory.host_layers(self.bundle)

    @property
    def device(self) -> list[list[torch.Tensor]]:
        return self.memory.device_layers(self.bundle)

    @property
    def wholes(self) -> list[torch.Tensor]:
        return self.memory.wholes(self.bundle)

    @property
    def layout_row(self) -> int:
        """Bytes from one row of a page-first host tensor to the next."""
        return self.bundle.row * len(self.bundle.layers)

    def named(self, pattern: str, values: Sequence[Any]) -> dict[str, Any]:
        """Arguments `src_k`, `src_v` of a pair or `src` of a single tensor, from `src_{}`."""
        letters = ("",) if self.mla else ("k_", "v_")
        return {pattern.format(letter).rstrip("_"): value for letter, value in zip(letters, values, strict=True)}


# ---- operators of sglang-kernel: registers, a warp a row, eight bytes a lane


def ops_backup(ops: ModuleType, call: Call) -> None:
    bundle, layout = call.bundle, call.bundle.layout
    end, more = _page_head(bundle, "_lf_ph") if layout == "page_head" else ("_lf_pf", {})
    arguments = call.named("src_{}layers", call.addresses(call.device))
    if layout == "layer_first":
        end, arguments = "", arguments | call.named("dst_{}layers", call.addresses(call.host))
    else:
        arguments |= call.named("dst_{}", call.wholes) | {"dst_layout_dim": call.layout_row} | more
    function = getattr(ops, f"transfer_kv_all_layer{call.mla}{end}")
    function(
        src_indices=call.on_gpu(call.device_items),
        dst_indices=call.on_gpu(call.host_items),
        item_size=bundle.row,
        num_layers=len(bundle.layers),
        **arguments,
    )


def ops_load(ops: ModuleType, call: Call) -> None:
    bundle, layout = call.bundle, call.bundle.layout
    end, more = _page_head(bundle, "_ph_lf") if layout == "page_head" else ("_pf_lf", {})
    end = "" if layout == "layer_first" else end
    function = getattr(ops, f"transfer_kv_per_layer{call.mla}{end}")
    for at in call.positions:
        if layout == "layer_first":
            arguments = call.named("src_{}", [layers[at] for layers in call.host])
        else:
            arguments = call.named("src_{}", call.wholes) | {"layer_id": at, "src_layout_dim": call.layout_row} | more
        function(
            src_indices=call.on_gpu(call.host_items),
            dst_indices=call.on_gpu(call.device_items),
            item_size=bundle.row,
            **arguments,
            **call.named("dst_{}", [layers[at] for layers in call.device]),
        )


def _page_head(bundle: Bundle, end: str) -> tuple[str, dict[str, int]]:
    return end, {"page_size": bundle.page, "head_num": bundle.heads}


# ---- operators of sglang-kernel: the copy engine


def direct_backup(ops: ModuleType, call: Call) -> None:
    sources = [layer for layers in call.device for layer in layers]
    if call.bundle.layout == "layer_first":
        targets = [layer for layers in call.host for layer in layers]
        ops.transfer_kv_direct(sources, targets, call.device_items, call.host_items, call.bundle.page)
    else:
        ops.transfer_kv_all_layer_direct_lf_pf(
            sources, call.wholes, call.device_items, call.host_items, call.bundle.page
        )


def direct_load(ops: ModuleType, call: Call) -> None:
    for at in call.positions:
        targets = [layers[at] for layers in call.device]
        if call.bundle.layout == "layer_first":
            sources = [layers[at] for layers in call.host]
            ops.transfer_kv_direct(sources, targets, call.host_items, call.device_items, call.bundle.page)
        else:
            ops.transfer_kv_per_layer_direct_pf_lf(
                call.wholes, targets, call.host_items, call.device_items, at, call.bundle.page
            )


# ---- kernels compiled when asked: registers, or bulk copies; which one follows from the page size that is named


def hicache_backup(kernels: ModuleType, call: Call, page_size: int | None) -> None:
    before = "cache" if call.mla else "kv_cache"
    page_first = call.bundle.layout == "page_first"
    strides = {
        f"{before}_src_stride_bytes": call.bundle.row,
        f"{before}_dst_stride_bytes": call.layout_row if page_first else call.bundle.row,
    }
    getattr(kernels, f"transfer_hicache_all_layer{call.mla}")(
        indices_dst=call.on_gpu(call.host_items),
        indices_src=call.on_gpu(call.device_items),
        element_size=call.bundle.row,
        page_size=page_size,
        **strides,
        **call.named("{}ptr_dst", call.addresses(call.host)),
        **call.named("{}ptr_src", call.addresses(call.device)),
    )


def hicache_load(kernels: ModuleType, call: Call, page_size: int | None) -> None:
    for at in call.positions:
        getattr(kernels, f"transfer_hicache_one_layer{call.mla}")(
            indices_dst=call.on_gpu(call.device_items),
            indices_src=call.on_gpu(call.host_items),
            element_dim=call.bundle.row,
            page_size=page_size,
            **call.named("{}cache_dst", [layers[at] for layers in call.device]),
            **call.named("{}cache_src", [layers[at] for layers in call.host]),
        )


# A chunk of the bulk kernel is several rows, which pages of one row never tile: then the register kernel is taken.
# Without a page size the caller vouches for runs, and a row by itself is moved as one.
REGISTER, BULK = 1, None


def register_backup(kernels: ModuleType, call: Call) -> None:
    hicache_backup(kernels, call, REGISTER)


def register_load(kernels: ModuleType, call: Call) -> None:
    hicache_load(kernels, call, REGISTER)


def bulk_backup(kernels: ModuleType, call: Call) -> None:
    hicache_backup(kernels, call, BULK)


def bulk_load(kernels: ModuleType, call: Call) -> None:
    hicache_load(kernels, call, BULK)


def has_register(kernels: ModuleType, bundle: Bundle) -> bool:
    """A row so wide that a chunk holds one alone would go to the bulk kernel all the same."""
    return kernels.hicache_tma_rows_per_chunk(bundle.row) > 1 and kernels.can_use_hicache_jit_kernel(
        element_size=bundle.row, page_size=REGISTER
    )


def has_bulk(kernels: ModuleType, bundle: Bundle) -> bool:
    quota = kernels.TMA_BLOCK_QUOTA
    return kernels.use_hicache_tma_kernel(element_size=bundle.row, block_quota=quota, page_size=BULK)


def staged_backup(kernels: ModuleType, call: Call) -> None:
    bundle, wholes = call.bundle, call.wholes
    shape = (min(STAGING_PAGES, bundle.geometry["host_pages"]) * bundle.page, *wholes[0].shape[1:])
    staging = [torch.empty(shape, dtype=torch.uint8, device=call.memory.where) for _ in wholes]
    getattr(kernels, f"transfer_hicache_all_layer{call.mla}_staged_lf_pf")(
        src_indices=call.on_gpu(call.device_items),
        dst_indices=call.host_items,
        page_size=bundle.page,
        element_size=bundle.row,
        **call.named("{}ptr_src", call.addresses(call.device)),
        **call.named("staging_{}", staging),
        **call.named("dst_{}", wholes),
    )


def has_staged(kernels: ModuleType, bundle: Bundle) -> bool:
    return kernels.can_use_write_back_jit_kernel(element_size=bundle.row)


def unified_backup(kernels: ModuleType, call: Call) -> None:
    (whole,), page = call.wholes, call.bundle.page
    staging = torch.empty(
        (min(STAGING_PAGES, whole.shape[0]), *whole.shape[1:]), dtype=torch.uint8, device=call.memory.where
    )
    getattr(kernels, f"transfer_hicache_all_layer{call.mla}_staged_lf_page_unified")(
        src_pages=call.on_gpu(call.device_items[::page] // page),
        dst_pages=call.host_items[::page] // page,
        staging=staging,
        dst=whole,
        **call.named("{}ptr_src", call.addresses(call.device)),
    )


def unified_load(kernels: ModuleType, call: Call) -> None:
    for at in call.positions:
        rows = [layers[at].view(-1, call.bundle.heads, call.bundle.lane_bytes) for layers in call.device]
        getattr(kernels, f"transfer_hicache_one_layer{call.mla}_page_unified_lf")(
            src=call.wholes[0],
            src_indices=call.on_gpu(call.host_items),
            dst_indices=call.on_gpu(call.device_items),
            layer_id=at,
            **call.named("{}cache_dst", rows),
        )


def has_unified(kernels: ModuleType, bundle: Bundle) -> bool:
    return kernels.can_use_page_unified_load_back_jit_kernel(group_bytes=bundle.group_row)


# ---- kernels compiled when asked: a block a state


def mamba_backup(kernels: ModuleType, call: Call) -> None:
    kernels.transfer_kv_mamba_lf_pf(
        call.addresses(call.device)[0],
        call.wholes[0],
        call.on_gpu(call.device_items),
        call.on_gpu(call.host_items),
        call.bundle.row,
        call.layout_row,
        len(call.bundle.layers),
    )


def mamba_load(kernels: ModuleType, call: Call) -> None:
    for at in call.positions:
        kernels.transfer_kv_mamba_pf_lf(
            call.wholes[0],
            call.device[0][at],
            call.on_gpu(call.host_items),
            call.on_gpu(call.device_items),
            at,
            call.bundle.row,
            call.layout_row,
        )


# ---- which path has what


def always(_: ModuleType, __: Bundle) -> bool:
    return True


def rows_of(multiple: int) -> Callable[[Bundle], str | None]:
    def limit(bundle: Bundle) -> str | None:
        return f"rows of {bundle.row} bytes; it takes multiples of {multiple}" if bundle.row % multiple else None

    return limit


def ops_limit(bundle: Bundle) -> str | None:
    if bundle.layout == "page_head" and len(bundle.parts) == 1:
        return "in page_head it moves K and V that are alike"
    part = bundle.row // bundle.heads if bundle.layout == "page_head" else bundle.row
    return f"parts of {part} bytes; it takes multiples of 8" if part % 8 else None


def unified_limit(bundle: Bundle) -> str | None:
    part = bundle.group_row
    return f"groups of heads of {part} bytes; it takes multiples of 16" if part % 16 else None


def mamba_limit(bundle: Bundle) -> str | None:
    if bundle.parts[0]["unit"] == "token":
        return "it moves states and page rows"
    return rows_of(16)(bundle)


Move = Callable[[ModuleType, Call], None]


@dataclass(frozen=True)
class Path:
    """Functions by direction and the layouts that they know; `limit` and `built` say which rows they take."""

    piece: str
    moves: Mapping[str, tuple[Move, Sequence[str]]]
    limit: Callable[[Bundle], str | None] = lambda _: None
    built: Callable[[ModuleType, Bundle], bool] = always

    def refusal(self, bundle: Bundle, direction: str, where: str) -> str | None:
        """Why this path has no such transfer, or cannot be run here."""
        if direction not in self.moves or bundle.layout not in self.moves[direction][1]:
            return f"it has no {direction} in {bundle.layout}"
        if reason := self.limit(bundle) or sglang_pieces.why_absent(self.piece):
            return reason
        if where == "cuda" and not torch.cuda.is_available():
            return "there is no CUDA device"
        if not self.built(sglang_pieces.piece(self.piece), bundle):
            return f"its kernel for rows of {bundle.row} bytes does not build or fit here"
        return None


PAGES = ("page_first", "page_first_direct")  # the same bytes, where a row is a page
PATHS = {
    "unified": Path(
        "hicache",
        {"backup": (unified_backup, ["page_unified"]), "load": (unified_load, ["page_unified"])},
        unified_limit,
        has_unified,
    ),
    "mamba": Path("mamba", {"backup": (mamba_backup, PAGES), "load": (mamba_load, PAGES)}, mamba_limit),
    "staged": Path("hicache", {"backup": (staged_backup, ["page_first"])}, rows_of(16), has_staged),
    "bulk": Path(
        "hicache",
        {
            "backup": (bulk_backup, ["layer_first", "page_first"]),
            "load": (bulk_load, ["layer_first", "page_first"]),
        },
        rows_of(16),
        has_bulk,
    ),
    "register": Path(
        "hicache",
        {
            "backup": (register_backup, ["layer_first", "page_first"]),
            "load": (register_load, ["layer_first", "page_first"]),
        },
        rows_of(128),
        has_register,
    ),
    "ops": Path(
        "ops",
        {
            "backup": (ops_backup, ["layer_first", "page_first", "page_head"]),
            "load": (ops_load, ["layer_first", "page_first", "page_head"]),
        },
        ops_limit,
    ),
    "direct": Path(
        "ops",
        {
            "backup": (direct_backup, ["layer_first", "page_first_direct"]),
            "load": (direct_load, ["layer_first", "page_first_direct"]),
        },
    ),
}


class Functions:
    """An adapter of these paths; a cell goes to the first one that has it."""

    def __init__(self, *paths: str, where: str = "cuda") -> None:
        self.where, self.paths = where, {name: PATHS[name] for name in paths}
        self.expected_failures = sglang_pieces.expected_failures(paths[0] if len(paths) == 1 else "sglang")
        self.versions = sglang_pieces.versions(sorted({path.piece for path in self.paths.values()}))
        self.device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no CUDA device"

    def capabilities(self, geometry: Json, layout: str, direction: str) -> str | None:
        if reason := why_never(geometry, layout, direction):
            return reason
        if any(part["side"] for part in geometry["components"]):
            return "side states are copied by SGLang's pool itself, by no transfer function"
        reasons = {name: self._why_not(path, geometry, layout, direction) for name, path in self.paths.items()}
        if None in reasons.values():
            return None
        return "; ".join(f"{name}: {reason}" for name, reason in reasons.items())

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
        path = next(path for path in self.paths.values() if not self._why_not(path, geometry, layout, direction))
        lists = [(b, b.items(host_indices), b.items(device_indices)) for b in bundles(geometry, layout)]
        if not host_indices.size and not device_indices.size:
            return  # SGLang never asks for nothing; the operators would divide by the number of rows
        if not all(b.reaches("host", h) and b.reaches("device", d) for b, h, d in lists):
            return  # no function checks its lists: it would end the process; what stays undone counts as wrong
        memory, move = Memory(geometry, host, device, self.where), path.moves[direction][0]
        try:
            with on_a_stream(self.where):
                for bundle, host_items, device_items in lists:
                    asked = [at for at, layer in enumerate(bundle.layers) if layers is None or layer in layers]
                    move(sglang_pieces.piece(path.piece), Call(bundle, memory, host_items, device_items, asked))
        finally:
            memory.hand_back()

    def _why_not(self, path: Path, geometry: Json, layout: str, direction: str) -> str | None:
        reasons = (path.refusal(bundle, direction, self.where) for bundle in bundles(geometry, layout))
        return next((reason for reason in reasons if reason), None)


def __getattr__(name: str) -> Functions:
    """A path by its name, capitalised, or all of them as `Sglang`."""
    paths = {path.capitalize(): (path,) for path in PATHS} | {"Sglang": tuple(PATHS)}
    if name not in paths:
        raise AttributeError(f"there is no path {name!r}; there are {', '.join(paths)}")
    return Functions(*paths[name])
