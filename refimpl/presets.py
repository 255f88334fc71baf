"""Kinds of pools, and the pools of real models, each number with its source.

Geometry is that of one tensor-parallel rank. Sources: [H] a public model config, [W] the SGLang 0.5.23 package,
[K] general knowledge of a public config that was not read, [2] second-hand: articles or cut-down configs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from refimpl.geometry import Component, PoolSpec, Segment, is_int, require_whole

Layers = int | Sequence[int]


# ---- pool kinds


def mha(
    layers: Layers,
    heads: int,
    head_dim: int,
    dtype: torch.dtype = torch.bfloat16,
    page_size: int = 64,
    v_head_dim: int | None = None,
    head_groups: int = 1,
    drafts: int = 0,
    name: str = "kv",
) -> PoolSpec:
    """K and V rows per head; `v_head_dim` where V is not as wide as K; `drafts` appends draft layers.

    `layers` may name the layers that own rows: the attention layers of a hybrid model, say.
    """
    ids, count = _layer_ids(layers, drafts)
    k = Component("k", dtype, heads=heads, dim=head_dim, layers=ids)
    v = Component("v", dtype, heads=heads, dim=head_dim if v_head_dim is None else v_head_dim, layers=ids)
    family = "mha" if k.dim == v.dim else "asymmetric"
    return PoolSpec(name, count, page_size, (k, v), family, head_groups=head_groups)


def mha_k_only(
    layers: int,
    heads: int,
    head_dim: int,
    dtype: torch.dtype = torch.bfloat16,
    page_size: int = 64,
    name: str = "indexer",
    indices_from: str | None = "kv",
) -> PoolSpec:
    """K rows without V: the index keys of a sparse MHA model, riding on its KV pool."""
    return PoolSpec(
        name, layers, page_size, (Component("k", dtype, heads=heads, dim=head_dim),), "k_only", indices_from
    )


def mha_quantised(
    layers: int,
    heads: int,
    head_bytes: int,
    scale_bytes: int,
    page_size: int = 64,
    name: str = "kv",
) -> PoolSpec:
    """Quantised K and V (FP8 or packed FP4 as bytes), with their scales carried along in buffers of their own."""
    rows = [Component(c, torch.uint8, heads=heads, dim=head_bytes) for c in ("k", "v")]
    scales = [Component(f"{c}_scale", torch.uint8, heads=heads, dim=scale_bytes) for c in ("k", "v")]
    return PoolSpec(name, layers, page_size, (*rows, *scales), "mxfp8")


def mla(
    layers: Layers,
    latent_dim: int = 576,
    dtype: torch.dtype = torch.bfloat16,
    page_size: int = 64,
    split: tuple[int, ...] = (),
    drafts: int = 0,
    name: str = "kv",
) -> PoolSpec:
    """One latent row per token, no heads; `split=(512, 64)` cuts latent and rope for `page_first_kv_split`.

    Packed FP8 rows with inline scales are this pool with `dtype=torch.uint8` and their bytes as `latent_dim`.
    """
    ids, count = _layer_ids(layers, drafts)
    latent = Component("latent", dtype, dim=latent_dim, layers=ids, split=split)
    return PoolSpec(name, count, page_size, (latent,), "mla")


def dsa_indexer(
    layers: Layers,
    head_dim: int = 128,
    quant_block: int = 128,
    page_size: int = 64,
    name: str = "indexer",
    indices_from: str | None = "kv",
) -> PoolSpec:
    """Index keys of sparse attention: a page row of all keys (FP8), then all scales (4 B per `quant_block` lanes).

    `layers` may name the layers that own an indexer; the others share another layer's choice and store nothing.
    """
    require_whole("quant_block", quant_block, least=1)
    scale = 4 * head_dim // quant_block
    segments = (Segment(page_size, head_dim), Segment(page_size, scale))
    return _page_rows("index_k", layers, page_size * (head_dim + scale), page_size, segments, "dsa", name, indices_from)


def mamba(
    layers: Layers,
    conv_shapes: Sequence[tuple[int, ...]],
    conv_dtype: torch.dtype = torch.bfloat16,
    temporal_shape: tuple[int, ...] = (),
    temporal_dtype: torch.dtype = torch.float32,
    side_states: Sequence[tuple[tuple[int, ...], torch.dtype]] = (),
    name: str = "mamba",
) -> PoolSpec:
    """Recurrent states, one slot per checkpoint: temporal state (none for conv-only models), conv states, side states.

    Upstream stores the temporal state first, then each conv state, then side states (which have no layer axis).
    """
    ids, count = _layer_ids(layers)
    rows = (
        [Component("temporal", temporal_dtype, dim=temporal_shape, unit="slot", layers=ids)] if temporal_shape else []
    )
    rows += [
        Component(f"conv_{i}", conv_dtype, dim=shape, unit="slot", layers=ids) for i, shape in enumerate(conv_shapes)
    ]
    rows += [
        Component(f"side_{i}", dtype, dim=shape, unit="slot", side=True) for i, (shape, dtype) in enumerate(side_states)
    ]
    return PoolSpec(name, count, 1, tuple(rows), "mamba")


def v4_paged(
    name: str,
    layers: Layers,
    item_bytes: int,
    page_size: int = 256,
    entries: int = 0,
    entry_bytes: tuple[int, ...] = (576, 8),
    indices_from: str | None = None,
) -> PoolSpec:
    """DeepSeek V4 page rows of `item_bytes`; with `entries`, that many values of each width in `entry_bytes`, in turn.

    Without, the rows of the model are known by their bytes (`V4_ROWS`), and others move only as a whole. `ValueError`
    for entries that take more than the row.
    """
    if not entries and page_size == 256:
        entries, entry_bytes = V4_ROWS.get(item_bytes, (0, ()))
    segments = tuple(Segment(entries, width) for width in entry_bytes) if entries else ()
    return _page_rows(name, layers, item_bytes, page_size, segments, "v4_paged", name, indices_from)


def v4_state(
    name: str,
    layers: Layers,
    ring: int,
    slot_bytes: int,
    page_size: int = 256,
    indices_from: str | None = "swa",
) -> PoolSpec:
    """DeepSeek V4 compression state: one ring of `ring` slots per sliding-window page, moved as a row.

    The C128 state has no pool: 256 % 128 == 0, so no C128 group is half done at a page edge, and only those are kept.
    """
    return _page_rows(name, layers, ring * slot_bytes, page_size, (), "v4_state", name, indices_from)


def _page_rows(
    component: str,
    layers: Layers,
    row_bytes: int,
    page_size: int,
    segments: tuple[Segment, ...],
    family: str,
    name: str,
    indices_from: str | None,
) -> PoolSpec:
    ids, count = _layer_ids(layers)
    row = Component(component, torch.uint8, dim=row_bytes, unit="page", layers=ids, segments=segments)
    return PoolSpec(name, count, page_size, (row,), family, indices_from)


def _layer_ids(layers: Layers, drafts: int = 0) -> tuple[tuple[int, ...] | None, int]:
    """Owned layer ids (None: all) and the number of layers spanned, `drafts` appended to both."""
    if not all(map(is_int, (drafts, *(layers if isinstance(layers, Iterable) else (layers,))))):
        raise ValueError(f"layers are a number (int) or ids, drafts a number; got {layers!r} and {drafts!r}")
    if isinstance(layers, int):
        return None, layers + drafts
    count = max(layers, default=-1) + 1
    return (*layers, *range(count, count + drafts)), count + drafts


# ---- DeepSeek V4: bytes of a page of 256 tokens [W deepseek_v4_memory_pool.py]

# bytes of a row -> entries in it, bytes of each entry's value and scale: SWA, C4, C128, C4 indexer
V4_ROWS: dict[int, tuple[int, tuple[int, ...]]] = {
    149760: (256, (576, 8)),
    37440: (64, (576, 8)),
    1728: (2, (576, 8)),
    8448: (64, (128, 4)),
}


def padded(nbytes: int, multiple: int = 576) -> int:
    """V4 page rows are padded to a multiple of 576 B.

    >>> [padded(n * 584) for n in (256, 64, 2)]      # SWA, C4, C128
    [149760, 37440, 1728]
    """
    return -(-nbytes // multiple) * multiple


def _v4(layers: int, ratios: Callable[[int], int], page_size: int) -> dict[str, PoolSpec]:
    if page_size != 256:
        raise ValueError(f"DeepSeek V4 has pages of 256 tokens, got page_size {page_size}")
    every = tuple(range(layers))
    c4 = tuple(i for i in every if ratios(i) == 4)
    c128 = tuple(i for i in every if ratios(i) == 128)
    pools = [
        PoolSpec("kv", 0, 256, (), "logical"),
        v4_paged("swa", every, padded(256 * 584), 256, 256, (576, 8)),
        v4_paged("c4", c4, padded(64 * 584), 256, 64, (576, 8), indices_from="kv"),
        v4_paged("c4_indexer", c4, 64 * (128 + 4), 256, 64, (128, 4), indices_from="kv"),
        v4_paged("c128", c128, padded(2 * 584), 256, 2, (576, 8), indices_from="kv"),
        v4_state("c4_state", c4, ring=8, slot_bytes=8192),
        v4_state("c4_indexer_state", c4, ring=8, slot_bytes=2048),
    ]
    return {pool.name: pool for pool in pools}


# ---- models: name -> pools, given tensor-parallel size and page size


def _shared(total: int, tp: int, what: str) -> int:
    """A rank's part of `total`, which is replicated when there are fewer than ranks (KV heads, groups of states)."""
    if total % tp and tp % total:
        raise ValueError(f"{total} {what} cannot be shared by {tp} ranks")
    return max(total // tp, 1)


def _states(heads: int, head_dim: int, groups: int, state: int, tp: int) -> tuple[tuple[int, int], tuple[int, ...]]:
    """Shapes of a rank's conv state (kernel of 4) and temporal state. Groups are replicated, heads never [W].

    >>> _states(128, 64, 8, 128, tp=1), _states(128, 64, 8, 128, tp=16)
    (((10240, 3), (128, 64, 128)), ((768, 3), (8, 64, 128)))
    """
    if heads % tp:
        raise ValueError(f"{heads} state heads cannot be shared by {tp} ranks")
    own = heads // tp
    return (own * head_dim + 2 * _shared(groups, tp, "state groups") * state, 3), (own, head_dim, state)


def _gqa(layers: int, kv_heads: int, head_dim: int) -> Callable[[int, int], dict[str, PoolSpec]]:
    def build(tp: int, page_size: int) -> dict[str, PoolSpec]:
        return {"kv": mha(layers, _shared(kv_heads, tp, "KV heads"), head_dim, page_size=page_size)}

    return build


def _windowed(
    layers: int, full: Sequence[int], kv_heads: int, head_dim: int
) -> Callable[[int, int], dict[str, PoolSpec]]:
    """Layers of full attention, and the others of sliding-window attention with indices of their own."""

    def build(tp: int, page_size: int) -> dict[str, PoolSpec]:
        heads = _shared(kv_heads, tp, "KV heads")
        window = [i for i in range(layers) if i not in full]
        return {
            "kv": mha(full, heads, head_dim, page_size=page_size),
            "swa": mha(window, heads, head_dim, page_size=page_size, name="swa"),
        }

    return build


def _hybrid(
    attention: Sequence[int],
    kv_heads: int,
    head_dim: int,
    states: Sequence[int],
    state_heads: int,
    state_head_dim: int,
    groups: int,
    state: int,
) -> Callable[[int, int], dict[str, PoolSpec]]:
    """Attention layers and recurrent layers."""

    def build(tp: int, page_size: int) -> dict[str, PoolSpec]:
        heads = _shared(kv_heads, tp, "KV heads")
        conv_shape, temporal_shape = _states(state_heads, state_head_dim, groups, state, tp)
        return {
            "kv": mha(attention, heads, head_dim, page_size=page_size),
            "mamba": mamba(states, [conv_shape], temporal_shape=temporal_shape),
        }

    return build


def _deepseek_v3(tp: int, page_size: int) -> dict[str, PoolSpec]:
    return {"kv": mla(61, 576, page_size=page_size, split=(512, 64))}


def _deepseek_v32(tp: int, page_size: int) -> dict[str, PoolSpec]:
    packed = mla(61, 656, torch.uint8, page_size=page_size)
    return {"kv": packed, "indexer": dsa_indexer(61, page_size=page_size)}


def _mimo_like(tp: int, page_size: int) -> dict[str, PoolSpec]:
    return {"kv": mha(48, _shared(4, tp, "KV heads"), 192, v_head_dim=128, page_size=page_size)}


def _flash_ratio(layer: int) -> int:
    """[2] A synopsis of the model card and a config cut to five layers: 0, 0, 4, 128, 4."""
    return 0 if layer < 2 else 4 if layer % 2 == 0 else 128


def _pro_ratio(layer: int) -> int:
    """[2] An article."""
    return 128 if layer < 2 else 4 if layer % 2 == 0 else 128


_QWEN3_NEXT_ATTENTION = tuple(range(3, 48, 4))
_QWEN3_NEXT_STATES = tuple(i for i in range(48) if i not in _QWEN3_NEXT_ATTENTION)
# [W] default pattern of Nemotron-H: M a Mamba layer, * attention, - an MLP
_NEMOTRON = "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"
_NEMOTRON_STATES = tuple(i for i, kind in enumerate(_NEMOTRON) if kind == "M")
_NEMOTRON_ATTENTION = tuple(i for i, kind in enumerate(_NEMOTRON) if kind == "*")

MODELS: dict[str, Callable[[int, int], dict[str, PoolSpec]]] = {
    "llama-3.1-8b": _gqa(32, 8, 128),  # [K]
    "llama-3.1-70b": _gqa(80, 8, 128),  # [K]
    "qwen3-8b": _gqa(36, 8, 128),  # [H]
    "qwen3-32b": _gqa(64, 8, 128),  # [H]
    "deepseek-v3": _deepseek_v3,  # [H] 61 layers, 512 + 64
    "deepseek-v3.2": _deepseek_v32,  # [W] packed row of 656 B, [H] 61 layers, index_head_dim 128
    "deepseek-v4-flash": lambda tp, page_size: _v4(43, _flash_ratio, page_size),  # [W] layers and rows, [2] ratios
    "deepseek-v4-pro": lambda tp, page_size: _v4(61, _pro_ratio, page_size),  # [W] rows, [2] layers and ratios
    "qwen3-next": _hybrid(  # [W] 36 recurrent and 12 attention layers; 32 V heads, and as groups 16 K heads, all of 128
        _QWEN3_NEXT_ATTENTION, 2, 256, _QWEN3_NEXT_STATES, state_heads=32, state_head_dim=128, groups=16, state=128
    ),
    "nemotron-h": _hybrid(  # [W] defaults: 24 recurrent, 4 attention layers of 52
        _NEMOTRON_ATTENTION, 8, 128, _NEMOTRON_STATES, state_heads=128, state_head_dim=64, groups=8, state=128
    ),
    "gpt-oss-20b": _windowed(24, range(1, 24, 2), 8, 64),  # [K] window and full layers by turns, window first
    "gpt-oss-120b": _windowed(36, range(1, 36, 2), 8, 64),  # [K]
    "mimo-like": _mimo_like,  # [W] K 192, V 128, 4 heads; the number of layers is ours
}


def model(name: str, tp: int = 1, page_size: int | None = None) -> dict[str, PoolSpec]:
    """The host pools of one rank of a model, by name. Pages hold 64 tokens unless said otherwise (V4: always 256)."""
    if name not in MODELS:
        raise ValueError(f"no model {name!r}; there are {', '.join(MODELS)}")
    require_whole("tp", tp, least=1)
    if page_size is None:
        page_size = 256 if name.startswith("deepseek-v4") else 64
    return MODELS[name](tp, page_size)
