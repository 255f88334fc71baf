"""The toy pools of the suite: every kind of pool, small enough to check every byte of it thousands of times.

Each is a function of the page size. Rows are chosen to be awkward: widths that are no multiple of 16, 8, 4 or 2,
layers that own nothing, padding, components of several dtypes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from refimpl import Component, PoolSpec, presets

BF16, FP8, FP32, BYTE = torch.bfloat16, torch.float8_e4m3fn, torch.float32, torch.uint8


def _mla_with_index(page_size: int) -> PoolSpec:
    """MLA with its index keys in the same pool: `page_first_kv_split` puts them into a third buffer."""
    latent = Component("latent", BF16, dim=12, split=(8, 4))
    keys = Component("index_k", BYTE, dim=5, layers=(0, 2))
    return PoolSpec("kv", 3, page_size, (latent, keys), "custom")


def _fp4_indexer(page_size: int) -> PoolSpec:
    """The FP4 indexer of DeepSeek V4: payload and scales in two buffers, both page rows."""
    entries = max(page_size // 4, 1)
    rows = [
        Component(name, BYTE, dim=entries * width, unit="page", layers=(1, 2))
        for name, width in (("payload", 16), ("scale", 1))
    ]
    return PoolSpec("c4_indexer", 3, page_size, tuple(rows), "v4_paged", "kv")


def _v4(
    name: str,
    ratio: int,
    padding: int,
    page_size: int,
    widths: tuple[int, int] = (9, 2),
    layers: tuple[int, ...] = (1, 3),
    indices_from: str | None = None,
) -> PoolSpec:
    entries = max(page_size // ratio, 1)
    item = entries * sum(widths) + padding
    return presets.v4_paged(name, layers, item, page_size, entries, widths, indices_from)


def _mamba(page_size: int, temporal: bool = True) -> PoolSpec:
    """Slots are their own pages, whatever page size the rest of the model has."""
    shape, sides = ((2, 3, 4), [((7,), BYTE), ((3,), BF16)]) if temporal else ((), [])
    return presets.mamba((0, 1, 3), [(5, 3), (3, 2)], BF16, shape, FP32, sides)


def _logical(page_size: int) -> PoolSpec:
    return PoolSpec("kv", 0, page_size, (), "logical")


TOYS: dict[str, Callable[[int], PoolSpec]] = {
    "mha": lambda p: presets.mha(3, 2, 8, BF16, p),
    "mha-odd": lambda p: presets.mha(2, 3, 7, BYTE, p),
    "mha-grouped": lambda p: presets.mha(2, 4, 6, BF16, p, head_groups=2),
    "mha-fp8": lambda p: presets.mha(2, 2, 16, FP8, p),
    "mha-drafts": lambda p: presets.mha(2, 1, 10, BF16, p, drafts=1),
    "mha-uneven": lambda p: presets.mha(2, 2, 12, BF16, p, v_head_dim=8),
    "mha-k-only": lambda p: presets.mha_k_only(3, 2, 9, BYTE, p),
    "mha-quantised": lambda p: presets.mha_quantised(2, 2, 16, 2, p),
    "mla": lambda p: presets.mla(3, 36, BF16, p, split=(32, 4)),
    "mla-packed": lambda p: presets.mla(3, 41, BYTE, p, drafts=1),
    "mla-index": _mla_with_index,
    "dsa": lambda p: presets.dsa_indexer((0, 2, 3), 8, 8, p),
    "mamba": _mamba,
    "mamba-conv-only": partial(_mamba, temporal=False),
    "v4-swa": partial(_v4, "swa", 1, 5),
    "v4-c4": partial(_v4, "c4", 4, 7),
    "v4-c128": partial(_v4, "c128", 128, 3),
    "v4-indexer": partial(_v4, "c4_indexer", 4, 0, widths=(8, 4)),
    "v4-fp4-indexer": _fp4_indexer,
    "v4-state": lambda p: presets.v4_state("c4_state", (1, 3), 4, 11, p),
    "logical": _logical,
}


# ---- stacks: the pools of one model, anchor first, riders after the pool whose indices they use


def _stack(*pools: PoolSpec) -> dict[str, PoolSpec]:
    return {pool.name: pool for pool in pools}


def _v4_stack(page_size: int) -> dict[str, PoolSpec]:
    """DeepSeek V4 cut to five layers of ratios 0, 0, 4, 128, 4: a logical anchor, and two pools that own indices."""
    c4, c128 = (2, 4), (3,)
    return _stack(
        _logical(page_size),
        _v4("swa", 1, 5, page_size, layers=(0, 1, 2, 3, 4)),
        _v4("c4", 4, 7, page_size, layers=c4, indices_from="kv"),
        _v4("c4_indexer", 4, 0, page_size, (8, 4), c4, "kv"),
        _v4("c128", 128, 3, page_size, layers=c128, indices_from="kv"),
        presets.v4_state("c4_state", c4, 4, 11, page_size),
        presets.v4_state("c4_indexer_state", c4, 4, 6, page_size),
    )


# kind of stack -> its pools, given the page size. Layers that nothing owns, widths that nothing divides.
STACKS: dict[str, Callable[[int], dict[str, PoolSpec]]] = {
    "mha": lambda p: _stack(presets.mha(3, 2, 8, BF16, p)),
    "mha-draft": lambda p: _stack(
        presets.mha(2, 2, 7, BYTE, p), replace(presets.mha((2,), 1, 5, BF16, p, name="draft"), indices_from="kv")
    ),
    "mla": lambda p: _stack(presets.mla(3, 36, BF16, p, split=(32, 4))),
    "dsa": lambda p: _stack(presets.mla(4, 41, BYTE, p, split=(36, 5)), presets.dsa_indexer((0, 2), 8, 8, p)),
    "swa": lambda p: _stack(presets.mha((1, 3), 2, 7, BF16, p), presets.mha((0, 2, 4), 1, 5, BF16, p, name="swa")),
    "mamba": lambda p: _stack(presets.mha((2, 4), 2, 8, BF16, p), _mamba(p)),
    "mla-mamba": lambda p: _stack(presets.mla((1, 3), 12, BF16, p, split=(8, 4)), _mamba(p, temporal=False)),
    "swa-mamba": lambda p: _stack(
        presets.mha((2,), 2, 7, BYTE, p), presets.mha((4, 5), 1, 9, BYTE, p, name="swa"), _mamba(p)
    ),
    "sparse": lambda p: _stack(presets.mha(3, 2, 9, BYTE, p, v_head_dim=4), presets.mha_k_only(3, 1, 5, BYTE, p)),
    "v4": _v4_stack,
}
