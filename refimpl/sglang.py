"""SGLang's host pools as profiles: the pairs that they accept, the path of each, their flags and start-up rewrites.

From `srt/mem_cache/pool_host/*`, `srt/mem_cache/memory_pool_host.py` and `srt/arg_groups/hicache_hook.py`. `kernel`
there means an SM kernel or, writing back page_first, the staged path: a relayout on the device, then copies of pages.
"""

from __future__ import annotations

from dataclasses import dataclass

from refimpl.answers import Capability, Path, Refusal, StartUp
from refimpl.geometry import PoolSpec
from refimpl.layout import LAYOUTS


@dataclass(frozen=True)
class Engine:
    """A version of SGLang, as far as its host pools differ.

    staged            families that write back through staging
    staged_multiple   row bytes must be a multiple of this for it
    state_multiple    and of this in the kernels that move Mamba states (their own ones came with PR #30535)
    forced            families that claim staging without using it, so as not to veto it for their group
    tma               the JIT kernels have a TMA variant (PR #40278)
    indices_on_cpu    every write-back of page_first keeps host indices on the CPU, where only staging can use them
    layer_first_only  families that had no other layout
    """

    version: str
    staged: tuple[str, ...]
    staged_multiple: int = 16
    state_multiple: int = 8
    forced: tuple[str, ...] = ()
    tma: bool = False
    indices_on_cpu: bool = False
    layer_first_only: tuple[str, ...] = ()


_V4 = ("v4_paged", "v4_state")
_STAGED = ("mha", "asymmetric", "mla", "dsa", *_V4)
ENGINES: dict[str, Engine] = {
    "sglang": Engine("0.5.23", (*_STAGED, "mxfp8"), state_multiple=16, forced=("mamba",), tma=True),
    "sglang-28434": Engine("right after PR #28434 (2026-06-19)", (*_STAGED, "mamba")),
    "sglang-21631": Engine(
        "from PR #21631 to PR #28434", ("mha", "mla"), 128, indices_on_cpu=True, layer_first_only=_V4
    ),
}

_PAGE_ROWS = {("layer_first", "kernel"), ("page_first", "kernel"), ("layer_first", "direct")} | {
    ("page_first_direct", "direct")
}
SGLANG_PAIRS: dict[str, set[tuple[str, str]]] = {
    "mha": _PAGE_ROWS | {("page_head", "kernel")},
    "asymmetric": {("page_first", "kernel"), ("page_first_direct", "direct")},
    "k_only": _PAGE_ROWS,
    "mxfp8": {("page_first", "kernel")},
    "mla": _PAGE_ROWS,
    "mamba": {(layout, backend) for layout in ("page_first", "page_first_direct") for backend in ("kernel", "direct")},
    "dsa": _PAGE_ROWS,
    "v4_paged": _PAGE_ROWS,
    "v4_state": _PAGE_ROWS,
    "logical": {(layout, backend) for layout in LAYOUTS for backend in ("kernel", "direct")},
}

# The device page of an MXFP8 pool, which its host page must equal.
MXFP8_PAGE = 128

# Families whose loads ask `can_use_jit`, K and V being equally wide.
_JIT = ("mha", "mla", "k_only", "mxfp8")
_TMA_STAGE, _TMA_ROWS = 32 << 10, 128


def answer(spec: PoolSpec, layout: str, backend: str, direction: str, platform: str, engine: Engine) -> Path | Refusal:
    """What the engine does with the pair: its path, or why it fails (at start, in a check, or by a crash)."""
    family = spec.family
    if family not in SGLANG_PAIRS:
        return Refusal(f"SGLang has no host pool of family {family!r}")
    if backend == "kernel_ascend":
        return Refusal("kernel_ascend is an NPU operator, and there is no NPU platform here")
    if backend not in ("kernel", "direct"):
        return Refusal(f"{backend!r} is no I/O backend of SGLang")
    if (layout, backend) not in SGLANG_PAIRS[family]:
        return Refusal(f"SGLang's {family} pool has no transfer for layout {layout!r} with backend {backend!r}")
    if family in engine.layer_first_only and layout != "layer_first":
        return Refusal(f"SGLang {engine.version} keeps {family} pools in layer_first only")
    unstaged = _why_not_staged(spec, layout, engine)
    if family == "mxfp8" and unstaged:
        return Refusal(f"SGLang's mxfp8 pool must stage payload and scales: {unstaged}")
    if platform != "cuda":
        return Refusal(f"{backend} needs a CUDA device, and the platform is {platform}")
    if backend == "direct":
        return Path("direct")
    multiple = engine.state_multiple if family == "mamba" else 8
    odd = _odd(spec, multiple)
    if odd:
        return Refusal(f"SGLang's kernels move rows of a multiple of {multiple} bytes, not {odd}")
    if direction == "load" or not spec.components:
        return Path("kernel")
    if unstaged and layout == "page_first" and engine.indices_on_cpu:
        return Refusal(
            f'"Destination indices must be a CUDA tensor": SGLang {engine.version} keeps the host indices of a '
            f"page_first write-back on the CPU, also where it is not staged; {unstaged}"
        )
    return Path("kernel" if unstaged else "staged")


def capabilities(spec: PoolSpec, layout: str, platform: str, engine: Engine) -> dict[str, Capability]:
    """The engine's two flags of a pool that moves something."""
    return {
        "can_use_jit": _jit(spec, platform, engine),
        "can_use_write_back_jit": _write_back_jit(spec, layout, platform, engine),
    }


def _write_back_jit(spec: PoolSpec, layout: str, platform: str, engine: Engine) -> Capability:
    if spec.family in engine.forced:
        return Capability(True, "forced: the engine ANDs this flag over a group, and this pool must not veto it")
    if platform != "cuda":
        return Capability(False, f"staging needs a CUDA device, and the platform is {platform}")
    unstaged = _why_not_staged(spec, layout, engine)
    return Capability(not unstaged, unstaged or f"{layout}, rows of a multiple of {engine.staged_multiple} B")


def _why_not_staged(spec: PoolSpec, layout: str, engine: Engine) -> str | None:
    if layout != "page_first":
        return f"staging writes page_first, not {layout}"
    if spec.family not in engine.staged:
        return f"SGLang {engine.version} stages {', '.join(engine.staged)}, not {spec.family}"
    if spec.family == "mxfp8" and spec.page_size != MXFP8_PAGE:
        return f"the host page must be the device page of {MXFP8_PAGE} tokens, not {spec.page_size}"
    odd = _odd(spec, engine.staged_multiple)
    return f"staging moves rows of a multiple of {engine.staged_multiple} B, not {odd}" if odd else None


def _jit(spec: PoolSpec, platform: str, engine: Engine) -> Capability:
    """JIT kernels move rows through registers, or else by TMA, which the engine probes on the device (SM 9.0 on)."""
    if platform != "cuda":
        return Capability(False, f"JIT kernels need a CUDA device, and the platform is {platform}")
    if spec.family == "asymmetric":
        return Capability(False, "K and V of unlike width go by single-buffer AOT kernels")
    if spec.family not in _JIT:
        return Capability(False, f"SGLang's {spec.family} pool has no JIT load")
    odd = _odd(spec, 128)
    if not odd:
        return Capability(True, "register kernel: rows of a multiple of 128 B")
    registers = f"the register kernel moves rows of a multiple of 128 B, not {odd}"
    if not engine.tma:
        return Capability(False, f"{registers}; SGLang {engine.version} has no TMA kernel")
    why_not = why_not_tma(spec)
    if why_not:
        return Capability(False, f"{registers}; {why_not}")
    return Capability(True, "TMA kernel, on SM 9.0 or later: rows of a multiple of 16 B, pages of whole chunks")


def why_not_tma(spec: PoolSpec) -> str | None:
    """Why the TMA kernel cannot move the rows of a pool, or None (`kernels/ops/kvcache/hicache.py`)."""
    odd = _odd(spec, 16)
    if odd:
        return f"TMA moves rows of a multiple of 16 B, not {odd}"
    for row in {c.row_bytes for c in spec.components if c.row_bytes}:
        chunk = rows_per_chunk(row)
        if not chunk:
            return f"a row of {row} B does not fit into a TMA stage of {_TMA_STAGE} B"
        if spec.page_size % chunk:
            return f"TMA moves {chunk} rows of {row} B at once, and a page of {spec.page_size} tokens is no multiple"
    return None


def rows_per_chunk(row_bytes: int) -> int:
    """Rows that a stage of the TMA kernel holds: a power of two, 128 at most (`hicache_tma.cuh`); 0 where none fits.

    >>> [rows_per_chunk(row) for row in (256, 512, 576, 656, 1024, 1152, 2048, 40000)]
    [128, 64, 32, 32, 32, 16, 16, 0]
    """
    rows = min(_TMA_STAGE // row_bytes, _TMA_ROWS)
    return 1 << rows.bit_length() - 1 if rows else 0


def _odd(spec: PoolSpec, multiple: int) -> str:
    """Rows that are no multiple of so many bytes; side states are left out, for plain copies move those."""
    rows = [c for c in spec.components if not c.side]
    return ", ".join(f"{c.name} ({c.row_bytes} B)" for c in rows if c.row_bytes % multiple)


# ---------------------------------------------------------------------------------------------------------------------
# From a server's options to the pair that it uses.

# What `--hicache-mem-layout` and `--hicache-io-backend` accept (`srt/arg_groups/fields/memory.py`).
CLI_LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_first_kv_split", "page_head")
CLI_BACKENDS = ("direct", "kernel", "kernel_ascend")


def start_up(
    *,
    layout: str = "page_first",
    backend: str = "kernel",
    storage: str | None = None,
    unified_memory: bool = False,
    decode_receives_early: bool = False,
    dcp: int = 1,
    npu: bool = False,
    mla: bool = False,
) -> StartUp:
    """SGLang's start-up rewrites: from the server's options to the effective pair (`srt/arg_groups/hicache_hook.py`).

    decode_receives_early  a decode server whose host-receive threshold is below 1
    dcp                    ranks that share the KV of a decode; more than one only with MLA
    mla                    the model's attention is MLA (decides the NPU layout)

    >>> start_up(layout="page_first_direct", backend="kernel")
    StartUp(layout='page_first_direct', backend='direct', changes=('page_first_direct needs backend direct',))
    """
    if layout not in CLI_LAYOUTS:
        raise ValueError(f"layout must be one of {CLI_LAYOUTS}, got {layout!r}")
    if backend not in CLI_BACKENDS:
        raise ValueError(f"backend must be one of {CLI_BACKENDS}, got {backend!r}")
    changes: list[str] = []

    def change(to: tuple[str, str], why: str) -> tuple[str, str]:
        if to != (layout, backend):
            changes.append(why)
        return to

    if decode_receives_early:
        layout, backend = change(("layer_first", backend), "a decode server that receives early needs layer_first")
    if (layout, backend) == ("page_first_direct", "kernel"):
        layout, backend = change((layout, "direct"), "page_first_direct needs backend direct")
    if (layout, backend) == ("page_first", "direct"):
        layout, backend = change(("page_first_direct", backend), "direct needs layout page_first_direct")
    pages_stored = storage in ("mooncake", "npu_memcache") and not (storage == "mooncake" and dcp > 1)
    page_layout = {"direct": "page_first_direct", "kernel": "page_first"}.get(backend)
    if pages_stored and layout == "layer_first" and page_layout:
        if decode_receives_early:
            raise ValueError(
                f"storage {storage!r} stores pages, and a decode server that receives early needs layer_first"
            )
        layout, backend = change((page_layout, backend), f"storage {storage} stores pages")
    if unified_memory and layout == "page_first_direct":
        layout, backend = change(("page_first", "kernel"), "unified memory has no page_first_direct")
    if dcp > 1 and not mla:
        raise NotImplementedError(f"dcp={dcp} needs a model with MLA: other host pools are not shared by dcp ranks")
    if npu:
        ascend = "page_first_kv_split" if mla else "page_first_direct"
        layout, backend = change((ascend, "kernel_ascend"), "an NPU uses kernel_ascend")
    return StartUp(layout, backend, tuple(changes))
