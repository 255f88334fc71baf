"""SGLang's transfer functions where SGLang is not: what its adapters hand over can be looked at on a CPU."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from itertools import product
from typing import Any

import torch


def pairs(sources: torch.Tensor, destinations: torch.Tensor, page: int = 1) -> list[tuple[int, int]]:
    """The first index of every page on both sides; the others are taken for granted."""
    assert len(sources) % page == 0
    return list(zip(sources.tolist(), destinations.tolist(), strict=True))[::page]


class StandIn:
    """Every function that the adapters call, by its documented arithmetic on addresses; row by row on a CPU.

    Of row `r` in bytes: layer-first `r * item`, page-first `r * layout_dim + layer * item`; page-head, head `h` of H,
    `r / P * P * layout_dim + (h * P + r % P) * layout_dim / H + layer * item / H`.
    """

    TMA_BLOCK_QUOTA = 4

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith(("can_use", "use_hicache_tma")):
            return lambda **_: True
        if not name.startswith("transfer_kv_"):
            raise AttributeError(name)
        return lambda **arguments: self._ops(name.removeprefix("transfer_kv_"), **arguments)

    def hicache_tma_rows_per_chunk(self, _: int) -> int:
        return 2

    def _ops(
        self, name: str, src_indices: torch.Tensor, dst_indices: torch.Tensor, item_size: int, **more: Any
    ) -> None:
        """Tables on both sides, or a tensor on the host's side, and of one layer on the device's too."""
        assert item_size % 8 == 0
        host = "dst" if name.startswith("all_layer") else "src"
        parts = ("",) if "mla" in name else ("_k", "_v")
        layers = range(more["num_layers"]) if host == "dst" else [more.get("layer_id", 0)]
        heads = more.get("head_num", 1)
        for (s, d), part, layer, head in product(pairs(src_indices, dst_indices), parts, layers, range(heads)):
            found = {}
            for end, row in ("src", s), ("dst", d):
                at, stride = head * item_size // heads, more.get(f"{end}_layout_dim")
                if f"{end}{part}_layers" in more:
                    found[end] = int(more[f"{end}{part}_layers"][layer]) + row * item_size + at
                elif stride is None:
                    found[end] = more[f"{end}{part}"].data_ptr() + row * item_size + at
                else:
                    page, column = more.get("page_size", 1), stride // heads
                    within = row // page * page * stride + head * page * column + row % page * column
                    found[end] = more[f"{end}{part}"].data_ptr() + within + layer * item_size // heads
            ctypes.memmove(found["dst"], found["src"], item_size // heads)

    def transfer_kv_direct(self, sources: Any, targets: Any, s: Any, d: Any, page: int) -> None:
        for source, target in zip(sources, targets, strict=True):
            for a, b in pairs(s, d, page):
                target[b : b + page] = source[a : a + page]

    def transfer_kv_all_layer_direct_lf_pf(self, sources: Any, targets: Any, s: Any, d: Any, page: int) -> None:
        layers = len(sources) // len(targets)
        for number, source in enumerate(sources):
            for a, b in pairs(s, d, page):
                targets[number // layers][b // page, number % layers] = source[a : a + page]

    def transfer_kv_per_layer_direct_pf_lf(
        self, sources: Any, targets: Any, s: Any, d: Any, layer: int, page: int
    ) -> None:
        for source, target in zip(sources, targets, strict=True):
            for a, b in pairs(s, d, page):
                target[b : b + page] = source[a // page, layer]

    def transfer_hicache_one_layer(self, **a: Any) -> None:
        for letter in ("k_", "v_"):
            self._one(a[f"{letter}cache_dst"], a["indices_dst"], a[f"{letter}cache_src"], a["indices_src"])

    def transfer_hicache_one_layer_mla(self, **a: Any) -> None:
        self._one(a["cache_dst"], a["indices_dst"], a["cache_src"], a["indices_src"])

    def _one(self, target: torch.Tensor, d: torch.Tensor, source: torch.Tensor, s: torch.Tensor) -> None:
        for a, b in pairs(s, d):
            target[b] = source[a]

    def transfer_hicache_all_layer(self, **a: Any) -> None:
        for letter in ("k_", "v_"):
            self._all(a[f"{letter}ptr_dst"], a[f"{letter}ptr_src"], "kv_cache", a)

    def transfer_hicache_all_layer_mla(self, **a: Any) -> None:
        self._all(a["ptr_dst"], a["ptr_src"], "cache", a)

    def _all(self, targets: torch.Tensor, sources: torch.Tensor, before: str, a: dict[str, Any]) -> None:
        for target, source in zip(targets.tolist(), sources.tolist(), strict=True):
            for s, d in pairs(a["indices_src"], a["indices_dst"]):
                to = target + d * a[f"{before}_dst_stride_bytes"]
                ctypes.memmove(to, source + s * a[f"{before}_src_stride_bytes"], a["element_size"])

    def transfer_hicache_all_layer_staged_lf_pf(self, **a: Any) -> None:
        for letter, of in ("k_", "_k"), ("v_", "_v"):
            self._staged(a[f"{letter}ptr_src"], a[f"staging{of}"], a[f"dst{of}"], a)

    def transfer_hicache_all_layer_mla_staged_lf_pf(self, **a: Any) -> None:
        self._staged(a["ptr_src"], a["staging"], a["dst"], a)

    def _staged(self, sources: torch.Tensor, staging: torch.Tensor, target: torch.Tensor, a: dict[str, Any]) -> None:
        page, element = a["page_size"], a["element_size"]
        assert staging.shape[1:] == target.shape[1:]
        assert (staging.shape[0] % page, element % 16) == (0, 0)
        for s, d in pairs(a["src_indices"], a["dst_indices"], page):
            for token in range(page):
                for layer, source in enumerate(sources.tolist()):
                    ctypes.memmove(target[d + token, layer].data_ptr(), source + (s + token) * element, element)

    def transfer_hicache_all_layer_staged_lf_page_unified(self, **a: Any) -> None:
        page = a["dst"].shape[4]
        for part, sources in enumerate((a["k_ptr_src"], a["v_ptr_src"])):
            for s, d in pairs(a["src_pages"], a["dst_pages"]):
                for layer, source in enumerate(sources.tolist()):
                    for group in range(a["dst"].shape[1]):
                        self._rows(a["dst"][d, group, layer, part], source, s * page, group, a["dst"].shape[1])

    @staticmethod
    def _rows(target: torch.Tensor, source: int, first: int, group: int, groups: int) -> None:
        width = target[0].numel()
        for token in range(target.shape[0]):
            ctypes.memmove(target[token].data_ptr(), source + ((first + token) * groups + group) * width, width)

    def transfer_hicache_all_layer_mla_staged_lf_page_unified(self, **a: Any) -> None:
        page = a["dst"].shape[2]
        for s, d in pairs(a["src_pages"], a["dst_pages"]):
            for layer, source in enumerate(a["ptr_src"].tolist()):
                self._rows(a["dst"][d, layer], source, s * page, 0, 1)

    def transfer_hicache_one_layer_page_unified_lf(self, **a: Any) -> None:
        source, page, groups = a["src"], a["src"].shape[4], a["src"].shape[1]
        for part, target in enumerate((a["k_cache_dst"], a["v_cache_dst"])):
            for s, d in pairs(a["src_indices"], a["dst_indices"]):
                heads = [source[s // page, g, a["layer_id"], part, s % page] for g in range(groups)]
                target[d] = torch.cat(heads)

    def transfer_hicache_one_layer_mla_page_unified_lf(self, **a: Any) -> None:
        page = a["src"].shape[2]
        for s, d in pairs(a["src_indices"], a["dst_indices"]):
            a["cache_dst"][d] = a["src"][s // page, a["layer_id"], s % page].view(a["cache_dst"][d].shape)

    def transfer_kv_mamba_lf_pf(
        self, table: Any, target: Any, s: Any, d: Any, item: int, row: int, layers: int
    ) -> None:
        for a, b in pairs(s, d):
            for layer in range(layers):
                ctypes.memmove(target.data_ptr() + b * row + layer * item, int(table[layer]) + a * item, item)

    def transfer_kv_mamba_pf_lf(
        self, source: Any, target: Any, s: Any, d: Any, layer: int, item: int, row: int
    ) -> None:
        for a, b in pairs(s, d):
            ctypes.memmove(target.data_ptr() + b * item, source.data_ptr() + a * row + layer * item, item)
