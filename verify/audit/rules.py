"""Published rules of other engines, as pure functions of geometry and device, each with its source."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from refimpl import PoolSpec, Refusal, sglang, support
from refimpl.support import capabilities
from verify.bench.report import size

KIB = 1 << 10

# A staged write-back of SGLang copies the pages of a chunk in one call if one has at least so many bytes.
STAGED_BATCH = 128 * KIB
# vLLM loads by an SM kernel if every copy has fewer bytes than this, whole words, and there are enough of them.
TRITON_BELOW, TRITON_WORD, TRITON_COPIES = 28 * KIB, 8, 16
# FlexKV's copy engine takes the direct path of LAYERFIRST up to so many contiguous segments.
FLEXKV_SEGMENTS = 8

SGLANG_POOLS = "SGLang 0.5.23, srt/mem_cache/pool_host and srt/arg_groups/hicache_hook.py"
SGLANG_TMA = "SGLang 0.5.23, kernels/ops/kvcache/hicache.py (PR #40278)"
SGLANG_STAGED = "SGLang 0.5.23, kernels/jit/csrc/kvcacheio/staged_write_back.cuh"
VLLM = "vLLM, v1/kv_offload/cpu/swap_blocks_triton.py at 00d8649 and gpu_worker.py (PR #42212)"
FLEXKV_KERNEL = "FlexKV, flexkv/common/config.py: copy engine off, 4 thread blocks (PR #227)"
FLEXKV_PATHS = "FlexKV, csrc/ce_transfer.cu at 1d2196c (PR #203)"


@dataclass(frozen=True)
class Device:
    """What rules ask of a device. `batched_copies`: its driver has `cudaMemcpyBatchAsync` (12.8)."""

    name: str = "NVIDIA H200"
    capability: tuple[int, int] = (9, 0)
    batched_copies: bool = True


H200 = Device()


@dataclass(frozen=True)
class Choice:
    """The path that an engine takes with one of its settings.

    apart  why nothing measured here can stand for it, although the path is one that was measured
    """

    engine: str
    setting: str
    path: str
    why: str
    source: str
    apart: str = ""


def choices(
    spec: PoolSpec,
    layout: str,
    direction: str,
    pages: int,
    device: Device = H200,
    beside: Sequence[PoolSpec] = (),
) -> Iterator[Choice]:
    """What every engine that has this layout would do with a transfer of some pages, none next to another.

    beside  all pools of the model (vLLM looks at the longest copy of any)
    """
    yield from sglang_choices(spec, layout, direction, device)
    yield from vllm_choices(spec, layout, direction, pages, beside)
    yield from flexkv_choices(spec, layout, direction, segments=pages)


def sglang_choices(spec: PoolSpec, layout: str, direction: str, device: Device = H200) -> Iterator[Choice]:
    """For each backend with which a server ends up in the layout."""
    asked: dict[str, list[str]] = {}
    for option, backend in product(sglang.CLI_LAYOUTS, ("kernel", "direct")):
        used = sglang.start_up(layout=option, backend=backend)
        if used.layout == layout:
            asked.setdefault(used.backend, []).extend(used.changes)
    for backend, changes in asked.items():
        answer = support(spec, layout, backend, direction, "cuda", "sglang")
        if not isinstance(answer, Refusal):
            path, why, source = _sglang_path(spec, layout, direction, answer.name, device)
            yield Choice("SGLang", backend, path, "; ".join([why, *dict.fromkeys(changes)]), source)


def _sglang_path(spec: PoolSpec, layout: str, direction: str, name: str, device: Device) -> tuple[str, str, str]:
    if name == "staged":
        first = spec.component_page_bytes(spec.components[0])
        if device.batched_copies and first >= STAGED_BATCH:
            return "staged, one batch", f"a page of the first buffer has {size(STAGED_BATCH)} or more", SGLANG_STAGED
        return "staged, a copy a page", f"a page of the first buffer has less than {size(STAGED_BATCH)}", SGLANG_STAGED
    if name == "direct":
        return "direct", f"{layout} goes by the copy engine", SGLANG_POOLS
    if spec.family == "mamba":
        return "Mamba kernel", "states have a kernel of their own", SGLANG_POOLS
    if layout == "page_head" or (layout, direction) == ("page_first", "backup"):
        return "AOT kernel", f"a {direction} of {layout} that is not staged has no other kernel", SGLANG_POOLS
    if not capabilities(spec, layout, "cuda", "sglang")["can_use_jit"]:
        return "AOT kernel", f"no other kernel for {spec.family} pools, or for such rows", SGLANG_POOLS
    if device.capability >= (9, 0) and not sglang.why_not_tma(spec):
        return "TMA kernel", "SM 9.0, rows of a multiple of 16 B, pages of whole chunks", SGLANG_TMA
    if any(c.row_bytes % 128 for c in spec.components):
        return "AOT kernel", "no TMA, and rows are no multiple of 128 B", SGLANG_TMA
    return "register kernel", "no TMA, and rows of a multiple of 128 B", SGLANG_TMA


VLLM_FAMILIES = ("mha", "mla", "dsa", "v4_paged")


def vllm_choices(
    spec: PoolSpec, layout: str, direction: str, pages: int, beside: Sequence[PoolSpec] = ()
) -> Iterator[Choice]:
    """vLLM keeps a tensor of pages for each layer and copies whole pages, K with V."""
    if layout != "layer_first" or spec.family not in VLLM_FAMILIES:
        return
    own = vllm_copy_bytes(spec)
    longest = [vllm_copy_bytes(pool) for pool in (spec, *beside) if pool.family in VLLM_FAMILIES]
    path, why = vllm_path(direction, longest, pages * len(spec.owned_layers))
    apart = f"copies of {size(own)}, K with V" if len(spec.components) > 1 else ""
    yield Choice("vLLM", "offloading", path, why, VLLM, apart)


def vllm_copy_bytes(spec: PoolSpec) -> int:
    """Bytes of one page of one layer."""
    return sum(spec.tokens_per_page(c) * c.row_bytes for c in spec.components)


def vllm_path(direction: str, copies: Sequence[int], count: int) -> tuple[str, str]:
    """Path and reason for `count` copies; `copies` are the lengths that the model has."""
    if direction == "backup":
        return "batched copy", "stores always go by the copy engine"
    if max(copies) >= TRITON_BELOW:
        return "batched copy", f"a copy of the model has {size(TRITON_BELOW)} or more"
    if any(nbytes % TRITON_WORD for nbytes in copies):
        return "batched copy", f"a copy is no multiple of {TRITON_WORD} B"
    if count < TRITON_COPIES:
        return "batched copy", f"fewer than {TRITON_COPIES} copies"
    return "Triton kernel", f"{TRITON_COPIES} copies or more, each below {size(TRITON_BELOW)}"


def flexkv_choices(spec: PoolSpec, layout: str, direction: str, segments: int) -> Iterator[Choice]:
    """FlexKV as it comes, and with its copy engine switched on. BLOCKFIRST is `page_unified` where there are heads."""
    one_group = spec.family == "mha" and spec.head_groups == 1
    block_first = {"mha": "page_unified" if one_group else "", "mla": "page_first_direct"}.get(spec.family)
    if spec.family not in ("mha", "mla") or layout not in ("layer_first", block_first):
        return
    yield Choice("FlexKV", "default", "SM kernel", "the copy engine is off unless asked for", FLEXKV_KERNEL)
    chunk = spec.page_size * spec.components[0].row_bytes
    heads = spec.components[0].head_count
    path, why = flexkv_path(layout != "layer_first", direction, segments, chunk, heads)
    yield Choice("FlexKV", "copy engine", path, why, FLEXKV_PATHS)


def flexkv_path(block_first: bool, direction: str, segments: int, chunk: int, heads: int) -> tuple[str, str]:
    """The branch of `choose_path` for packed pages on the device, one rank, all of a block at once.

    chunk  bytes of a page of one layer and one of K and V
    heads  1 also stands for a latent: every rank has the same rows, and writes a share of them
    """
    scattered = ("SEGMENT_SCATTER" if chunk % 8 else "GATHER_SCATTER"), f"more than {FLEXKV_SEGMENTS} segments"
    if block_first:
        shared = direction == "backup" and heads == 1 and segments > FLEXKV_SEGMENTS
        return scattered if shared else ("GATHER_DIRECT", "BLOCKFIRST on the host, packed pages on the device")
    if segments == 1:
        return "CONTIG_DIRECT", "one segment"
    return scattered if segments > FLEXKV_SEGMENTS else ("SEGMENT_DIRECT", f"{FLEXKV_SEGMENTS} segments at most")
