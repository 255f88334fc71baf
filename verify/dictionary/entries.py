"""The table: every layout of other engines that we know, in our words for the axes.

An order of axes is written outermost first. What stands before a bar is no axis of a tensor but of a list of tensors;
`(page token)` are two axes merged into one, `1` is an axis of length one. `head` means all heads, unless `group`, the
outer part of them, stands in the order too. `component` counts K and V, `part` the pieces that lanes are cut into.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Rows = Literal["kv", "latent", "index"]

KV: tuple[Rows, ...] = ("kv",)  # K and V of attention heads
LATENT: tuple[Rows, ...] = ("latent",)  # one MLA row a token, no heads
BOTH = KV + LATENT
INDEX: tuple[Rows, ...] = ("index",)  # an opaque row for each page: index keys of sparse attention


@dataclass(frozen=True)
class Entry:
    """One name of one engine.

    rows    what it holds; where several, axes that these rows lack have length 1
    source  a file and its version, or a thread
    read    "file": the source itself was read; "thread": only what its pull request says
    """

    engine: str
    name: str
    axes: str
    rows: tuple[Rows, ...]
    source: str
    read: Literal["file", "thread"]

    def __str__(self) -> str:
        return f"{self.engine} {self.name}"


_POOL_HOST = "0.5.23, srt/mem_cache/pool_host and memory_pool_host.py"
_KV_CACHE_LAYOUT = "vllm/v1/kv_cache_layout.py at 14f7a27"
_LEGACY = "before PR #51718, as LMCache's csrc/engine_kv_format.h has it"
_FORMATS = "csrc/engine_kv_format.h at 893b24c"
_FUSED = "csrc/engine_kv_format.h since PR #4220"
_SPECS = "lmcache/v1/gpu_connector/kv_format/specs at "
_BLOCK = "lib/kvbm-physical/src/layout/kv_block_layout.rs at 090512f"
_SEPARATE = "lib/kvbm-physical/src/layout/layer_separate.rs at 08d8331"
_STORAGE = "flexkv/common/storage.py"

# engine, name, axes, rows, source, how it was read
_TABLE: tuple[tuple[str, str, str, tuple[Rows, ...], str, Literal["file", "thread"]], ...] = (
    ("SGLang", "layer_first", "component layer (page token) head lane", KV, _POOL_HOST, "file"),
    ("SGLang", "page_first", "component (page token) layer head lane", KV, _POOL_HOST, "file"),
    ("SGLang", "page_first_direct", "component page layer token head lane", KV, _POOL_HOST, "file"),
    ("SGLang", "page_head", "component page head token layer lane", KV, _POOL_HOST, "file"),
    ("SGLang", "page_unified", "page group layer component token head lane", KV, _POOL_HOST, "file"),
    ("SGLang", "page_blob_direct", "page component layer token head lane", KV, "PR #31136, open", "thread"),
    ("SGLang", "layer_first", "layer (page token) 1 lane", LATENT, _POOL_HOST, "file"),
    ("SGLang", "page_first", "(page token) layer 1 lane", LATENT, _POOL_HOST, "file"),
    ("SGLang", "page_first_direct", "page layer token 1 lane", LATENT, _POOL_HOST, "file"),
    ("SGLang", "page_unified", "page layer token lane", LATENT, _POOL_HOST, "file"),
    ("SGLang", "page_first_kv_split", "part | page layer token 1 lane", LATENT, _POOL_HOST, "file"),
    ("SGLang", "flat page of layer_first", "page | (component layer token head lane)", BOTH, _POOL_HOST, "file"),
    ("SGLang", "flat page of page_first", "page | (component token layer head lane)", BOTH, _POOL_HOST, "file"),
    ("SGLang", "flat page of page_first_direct", "page | (component layer token head lane)", BOTH, _POOL_HOST, "file"),
    ("SGLang", "flat page of page_head", "page | (component head token layer lane)", KV, _POOL_HOST, "file"),
    ("vLLM", "LBHNC", "layer page head token (component lane)", BOTH, _KV_CACHE_LAYOUT, "file"),
    ("vLLM", "LBNHC", "layer page token head (component lane)", BOTH, _KV_CACHE_LAYOUT, "file"),
    ("vLLM", "LHBNC", "layer head page token (component lane)", BOTH, _KV_CACHE_LAYOUT, "file"),
    ("vLLM", "BLHNC", "page layer head token (component lane)", BOTH, _KV_CACHE_LAYOUT, "file"),
    ("vLLM", "BLNHC", "page layer token head (component lane)", BOTH, _KV_CACHE_LAYOUT, "file"),
    ("vLLM", "BHLNC", "page head layer token (component lane)", BOTH, _KV_CACHE_LAYOUT, "file"),
    ("vLLM", "NHD (FlashAttention)", "layer | component page token head lane", KV, _LEGACY, "file"),
    ("vLLM", "HND (FlashAttention)", "layer | component page head token lane", KV, _LEGACY, "file"),
    ("vLLM", "NHD (FlashInfer)", "layer | page component token head lane", KV, _LEGACY, "file"),
    ("vLLM", "HND (FlashInfer)", "layer | page component head token lane", KV, _LEGACY, "file"),
    ("LMCache", "NB_NL_TWO_BS_NH_HS", "page layer component token head lane", KV, _FORMATS, "file"),
    ("LMCache", "NL_X_TWO_NB_BS_NH_HS", "layer | component page token head lane", KV, _FORMATS, "file"),
    ("LMCache", "NL_X_NB_TWO_BS_NH_HS", "layer | page component token head lane", KV, _FORMATS, "file"),
    ("LMCache", "NL_X_NB_BS_HS", "layer | page token lane", LATENT, _FORMATS, "file"),
    ("LMCache", "TWO_X_NL_X_NBBS_NH_HS", "component | layer | (page token) head lane", KV, _FORMATS, "file"),
    ("LMCache", "NL_X_NBBS_ONE_HS", "layer | (page token) 1 lane", LATENT, _FORMATS, "file"),
    ("LMCache", "NL_X_TWO_NB_NH_BS_HS", "layer | component page head token lane", KV, _FORMATS, "file"),
    ("LMCache", "NL_X_NB_TWO_NH_BS_HS", "layer | page component head token lane", KV, _FORMATS, "file"),
    ("LMCache", "NB_NL_TWO_NH_BS_HS", "page layer component head token lane", KV, _FORMATS, "file"),
    ("LMCache", "TWO_X_NL_X_NB_BS_NH_HS", "component | layer | page token head lane", KV, _FORMATS, "file"),
    ("LMCache", "NL_X_NB_NH_BS_TWO_HS", "layer | page head token component lane", KV, _FORMATS, "file"),
    ("LMCache", "NL_X_NB_BS_NH_TWO_HS", "layer | page token head component lane", KV, _FUSED, "file"),
    ("LMCache", "NL_X_NB_NH_BS_CS", "layer | page head token (component lane)", KV, _FUSED, "file"),
    ("LMCache", "NL_X_NB_BS_NH_CS", "layer | page token head (component lane)", KV, _FUSED, "file"),
    ("LMCache", "NL_X_NB_BSV_BSS", "layer | page lane", INDEX, _FUSED, "file"),
    ("LMCache", "NL_X_TWO_NB_NH_ONE_BS_HS", "layer | component page head 1 token lane", KV, _SPECS + "7a5fc99", "file"),
    ("LMCache", "NL_X_TWO_X_NB_BS_NH_HS", "layer | component | page token head lane", KV, _SPECS + "9fed071", "file"),
    ("LMCache", "NL_X_NP_X_NB_BS_ONE_HS", "layer | part | page token 1 lane", LATENT, _SPECS + "2ddc651", "file"),
    ("LMCache", "NB_NL_NH_BS_CS", "page layer head token (component lane)", BOTH, "PR #4729", "thread"),
    ("LMCache", "NB_NL_BS_NH_CS", "page layer token head (component lane)", BOTH, _SPECS + "1055ccf", "file"),
    ("Dynamo KVBM", "FullyContiguous NHD", "page layer component token head lane", BOTH, _BLOCK, "file"),
    ("Dynamo KVBM", "FullyContiguous HND", "page layer component head token lane", BOTH, _BLOCK, "file"),
    ("Dynamo KVBM", "UniversalTP", "page head layer component token lane", BOTH, _BLOCK, "file"),
    ("Dynamo KVBM", "UniversalPP", "page layer head component token lane", BOTH, _BLOCK, "file"),
    ("Dynamo KVBM", "LayerSeparate NHD", "layer | page component token head lane", BOTH, _SEPARATE, "file"),
    ("Dynamo KVBM", "LayerSeparate HND", "layer | page component head token lane", BOTH, _SEPARATE, "file"),
    ("Dynamo KVBM", "LayerSeparate outer first NHD", "layer | component page token head lane", BOTH, _SEPARATE, "file"),
    ("Dynamo KVBM", "LayerSeparate outer first HND", "layer | component page head token lane", BOTH, _SEPARATE, "file"),
    ("FlexKV", "LAYERFIRST", "layer component page token head lane", BOTH, f"{_STORAGE} at 0079590", "file"),
    ("FlexKV", "BLOCKFIRST", "page layer component token head lane", BOTH, f"{_STORAGE} at 0079590", "file"),
    ("FlexKV", "LAYERBLOCK", "layer page component token head lane", BOTH, f"{_STORAGE}, for vLLM from 0.23", "file"),
)  # fmt: skip

ENTRIES = tuple(Entry(*row) for row in _TABLE)
