"""Sizes of the real models' pools, typed from public configs and upstream's shapes; what cannot be shared."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from refimpl import Component, PoolSpec, presets
from verify.toys import TOYS

MiB = 2**20

# model, ranks, pool -> layers that store something, bytes a token (all of them)
TOKENS = [
    ("llama-3.1-8b", 1, "kv", 32, 131_072),
    ("llama-3.1-8b", 8, "kv", 32, 16_384),
    ("llama-3.1-70b", 1, "kv", 80, 327_680),
    ("llama-3.1-70b", 8, "kv", 80, 40_960),
    ("llama-3.1-70b", 16, "kv", 80, 40_960),  # more ranks than KV heads: each head is on two
    ("qwen3-8b", 1, "kv", 36, 147_456),
    ("qwen3-8b", 8, "kv", 36, 18_432),
    ("qwen3-32b", 1, "kv", 64, 262_144),
    ("qwen3-32b", 8, "kv", 64, 32_768),
    ("qwen3-next", 1, "kv", 12, 24_576),
    ("qwen3-next", 2, "kv", 12, 12_288),
    ("qwen3-next", 8, "kv", 12, 12_288),
    ("nemotron-h", 1, "kv", 4, 16_384),
    ("mimo-like", 1, "kv", 48, 48 * (1_536 + 1_024)),
    ("mimo-like", 4, "kv", 48, 48 * (384 + 256)),
    ("deepseek-v3", 1, "kv", 61, 70_272),
    ("deepseek-v3", 8, "kv", 61, 70_272),  # latents are on every rank
    ("deepseek-v3.2", 1, "kv", 61, 40_016),
    ("deepseek-v3.2", 8, "kv", 61, 40_016),
    ("deepseek-v3.2", 1, "indexer", 61, 8_052),
]


@pytest.mark.parametrize(("model", "tp", "pool", "layers", "nbytes"), TOKENS)
def test_bytes_of_a_token(model: str, tp: int, pool: str, layers: int, nbytes: int) -> None:
    for page_size in (1, 64):
        spec = presets.model(model, tp, page_size)[pool]
        assert len(spec.owned_layers) == layers
        assert spec.page_bytes == nbytes * page_size


def test_index_keys_of_deepseek_v32_lie_in_rows_of_8448_bytes() -> None:
    spec = presets.model("deepseek-v3.2")["indexer"]
    (row,) = spec.components
    assert (row.row_bytes, spec.page_bytes) == (8_448, 515_328)


# pool of DeepSeek V4 -> bytes of a row, entries in it, layers of Flash and Pro, whose indices it uses
V4 = {
    "swa": (149_760, 256, 43, 61, None),
    "c4": (37_440, 64, 21, 30, "kv"),
    "c128": (1_728, 2, 20, 31, "kv"),
    "c4_indexer": (8_448, 64, 21, 30, "kv"),
    "c4_state": (65_536, 0, 21, 30, "swa"),
    "c4_indexer_state": (16_384, 0, 21, 30, "swa"),
}


@pytest.mark.parametrize("tp", [1, 8])
@pytest.mark.parametrize("pool", V4)
def test_rows_of_deepseek_v4(pool: str, tp: int) -> None:
    item, entries, flash, pro, indices_from = V4[pool]
    for model, layers in (("deepseek-v4-flash", flash), ("deepseek-v4-pro", pro)):
        spec = presets.model(model, tp)[pool]
        (row,) = spec.components
        assert (row.row_bytes, spec.entries, len(spec.owned_layers)) == (item, entries, layers)
        assert (spec.page_size, spec.indices_from) == (256, indices_from)


@pytest.mark.parametrize(
    ("model", "full", "per_token", "window"),
    [("deepseek-v4-flash", 998_208, 3_899, 8_160_000), ("deepseek-v4-pro", 1_430_208, 5_587, 11_592_960)],
)
def test_a_page_of_deepseek_v4(model: str, full: int, per_token: int, window: int) -> None:
    pools = presets.model(model)
    assert set(pools) == {"kv", *V4}
    assert pools["kv"].page_bytes == 0
    assert sum(pools[name].page_bytes for name in ("c4", "c128", "c4_indexer")) == full
    assert round(full / 256) == per_token
    assert sum(pools[name].page_bytes for name in ("swa", "c4_state", "c4_indexer_state")) == window


def test_deepseek_v4_has_pages_of_256_tokens() -> None:
    with pytest.raises(ValueError, match="256 tokens, got page_size 64"):
        presets.model("deepseek-v4-flash", page_size=64)


# model, ranks -> conv channels, bytes of a layer's conv and temporal state, bytes of a slot
STATES = [
    ("qwen3-next", 1, 8_192, 49_152, 2 * MiB, 36 * 2_146_304),
    ("qwen3-next", 2, 4_096, 24_576, 1 * MiB, 36 * 1_073_152),
    ("qwen3-next", 4, 2_048, 12_288, MiB // 2, 36 * 536_576),
    ("qwen3-next", 16, 512, 3_072, MiB // 8, 36 * 134_144),
    ("qwen3-next", 32, 384, 2_304, MiB // 16, 36 * 67_840),  # 16 K heads, each on two ranks: not 256
    ("nemotron-h", 1, 10_240, 61_440, 4 * MiB, 24 * 4_255_744),
    ("nemotron-h", 8, 1_280, 7_680, MiB // 2, 24 * 531_968),
    ("nemotron-h", 16, 768, 4_608, MiB // 4, 24 * 266_752),  # 8 groups, each on two ranks: not 640
]


@pytest.mark.parametrize(("model", "tp", "channels", "conv", "temporal", "slot"), STATES)
def test_states_of_a_slot(model: str, tp: int, channels: int, conv: int, temporal: int, slot: int) -> None:
    spec = presets.model(model, tp)["mamba"]
    assert [c.row_bytes for c in spec.components] == [temporal, conv]
    assert spec.component("conv_0").row_shape == (channels, 3)
    assert spec.page_bytes == slot


@pytest.mark.parametrize(
    ("model", "tp", "told"),
    [
        ("llama-3.1-8b", 3, "8 KV heads cannot be shared by 3 ranks"),
        ("mimo-like", 6, "4 KV heads cannot be shared by 6 ranks"),
        ("qwen3-next", 64, "32 state heads cannot be shared by 64 ranks"),
        ("nemotron-h", 256, "128 state heads cannot be shared by 256 ranks"),
        ("nemotron-h", 0, r"tp must be a whole number \(int\) from 1 on, got 0"),
        ("nemotron-h", "2", r"tp must be a whole number \(int\) from 1 on, got '2'"),
        ("gpt-2", 1, "no model 'gpt-2'; there are llama-3.1-8b, "),
    ],
)
def test_what_cannot_be_shared_is_refused(model: str, tp: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        presets.model(model, tp)


ANY: Any = "2"


@pytest.mark.parametrize(
    ("build", "told"),
    [
        (lambda: presets.mha(ANY, 2, 4), "layers are a number (int) or ids, drafts a number; got '2' and 0"),
        (lambda: presets.mla(1, drafts=ANY), "got 1 and '2'"),
        (lambda: presets.mla(float(2)), "got 2.0 and 0"),  # pyright: ignore[reportArgumentType]
        (lambda: presets.mamba((0, ANY), [(3, 2)]), "got (0, '2') and 0"),
        (lambda: presets.dsa_indexer(1, quant_block=0), "quant_block must be a whole number (int) from 1 on, got 0"),
        (lambda: presets.dsa_indexer(1, quant_block=ANY), "a whole number (int) from 1 on, got '2'"),
    ],
)
def test_a_preset_is_made_of_numbers(build: Callable[[], PoolSpec], told: str) -> None:
    with pytest.raises(ValueError, match=re.escape(told)):
        build()


def test_state_groups_that_cannot_be_shared_are_refused() -> None:
    """Upstream would take 12 groups here, 4 of them of nobody."""
    with pytest.raises(ValueError, match="8 state groups cannot be shared by 12 ranks"):
        presets._states(heads=24, head_dim=64, groups=8, state=128, tp=12)


# ---- entries of V4 rows


def v4_row(spec: PoolSpec) -> Component:
    (row,) = spec.components
    return row


@pytest.mark.parametrize("name", ["c4", "anything"])
@pytest.mark.parametrize(
    ("item", "entries", "widths"),
    [
        (149_760, 256, [576, 8]),
        (37_440, 64, [576, 8]),
        (1_728, 2, [576, 8]),
        (8_448, 64, [128, 4]),
        (8_449, 0, []),
    ],
)
def test_rows_of_the_model_are_known_by_their_bytes(name: str, item: int, entries: int, widths: list[int]) -> None:
    spec = presets.v4_paged(name, layers=2, item_bytes=item, page_size=256)
    assert spec.entries == entries
    assert [s.bytes for s in v4_row(spec).segments] == widths
    assert presets.v4_paged(name, layers=2, item_bytes=item, page_size=128).entries == 0


@pytest.mark.parametrize("name", ["swa", "c4", "c128", "c4_indexer"])
def test_entries_are_what_they_are_told_to_be(name: str) -> None:
    spec = presets.v4_paged(name, 2, 37_440, 256, entries=3, entry_bytes=(9, 2, 1))
    assert spec.entries == 3
    assert [s.bytes for s in v4_row(spec).segments] == [9, 2, 1]


def test_entries_that_do_not_fit_are_refused() -> None:
    assert presets.v4_paged("c4", 2, 64 * 584, entries=64).entries == 64
    with pytest.raises(ValueError, match="'c4': segments take 37376 of 37375 bytes of the row"):
        presets.v4_paged("c4", 2, 64 * 584 - 1, entries=64)


@pytest.mark.parametrize("page_size", [1, 4, 256])
def test_toys_with_single_entries(page_size: int) -> None:
    toys = {name: make(page_size) for name, make in TOYS.items()}
    assert {name: spec.entries for name, spec in toys.items() if spec.entries} == {
        "dsa": page_size,
        "v4-swa": page_size,
        "v4-c4": max(page_size // 4, 1),
        "v4-c128": max(page_size // 128, 1),
        "v4-indexer": max(page_size // 4, 1),
    }
    assert [s.bytes for s in v4_row(toys["v4-indexer"]).segments] == [8, 4]
