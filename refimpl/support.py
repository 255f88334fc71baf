"""What is allowed: one table for every pool, layout, backend, direction, platform and profile.

`support` answers with the path that a transfer will take, or with a refusal: its reason and what would work instead. It
is asked when a pool is built, before memory is taken. Profile "reference" allows every pair that can be done bit for
bit, also slow ones; each of its refusals has a physical reason. The "sglang" profiles answer as that engine does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from refimpl.geometry import PoolSpec
from refimpl.layout import LAYOUTS, buffers, stacks

DIRECTIONS = ("backup", "load")
PLATFORMS = ("cpu", "cuda")

# Backend -> platforms whose memory it can reach.
BACKENDS: dict[str, tuple[str, ...]] = {
    "torch": ("cpu", "cuda"),
    "numba": ("cpu",),
    "direct": ("cuda",),
    "kernel": ("cuda",),
    "staged": ("cuda",),
    "auto": ("cuda",),
}


@dataclass(frozen=True)
class Path:
    """The pair is allowed; bytes go by `name`."""

    name: str

    def __bool__(self) -> bool:
        return True


@dataclass(frozen=True)
class Refusal:
    """The pair is refused for `reason`."""

    reason: str
    instead: str = ""

    def __bool__(self) -> bool:
        return False


@dataclass(frozen=True)
class Capability:
    """Whether a path can be used, and why (not)."""

    usable: bool
    reason: str

    def __bool__(self) -> bool:
        return self.usable


class UnsupportedPairing(ValueError):
    """A pool was asked for with a layout and backend that do not go together."""


def support(
    spec: PoolSpec, layout: str, backend: str, direction: str, platform: str = "cpu", profile: str = "reference"
) -> Path | Refusal:
    """Whether a pool may use a layout with a backend in one direction, and how."""
    if direction not in DIRECTIONS:
        raise ValueError(f"direction must be one of {DIRECTIONS}, got {direction!r}")
    if platform not in PLATFORMS:
        raise ValueError(f"platform must be one of {PLATFORMS}, got {platform!r}")
    if profile not in PROFILES:
        raise ValueError(f"profile must be one of {tuple(PROFILES)}, got {profile!r}")
    answer = _answer(spec, layout, backend, direction, platform, profile)
    if isinstance(answer, Refusal):
        return Refusal(answer.reason, _instead(spec, layout, backend, direction, platform, profile))
    return answer


@cache
def require(spec: PoolSpec, layout: str, backend: str, platform: str, profile: str) -> dict[str, Path]:
    """The path of each direction, or `UnsupportedPairing` naming everything that a reader needs to choose again."""
    paths = {}
    for direction in DIRECTIONS:
        answer = support(spec, layout, backend, direction, platform, profile)
        if isinstance(answer, Refusal):
            raise UnsupportedPairing(
                f"pool {spec.name!r} ({spec.family}) with layout {layout!r} and backend {backend!r} cannot {direction} "
                f"on {platform} (profile {profile!r}): {answer.reason}. What would work: {answer.instead}"
            )
        paths[direction] = answer
    return paths


def capabilities(spec: PoolSpec, layout: str, platform: str, profile: str = "reference") -> dict[str, Capability]:
    """Upstream's two flags, each with its reason.

    `can_use_jit`: the SM kernel serves this pool. `can_use_write_back_jit`: the staged write-back does.
    In a group they are information only: index placement belongs to each pool.
    """
    if profile != "reference":
        return _sglang_capabilities(spec, layout, platform, PROFILES[profile])
    flags = {"can_use_jit": "kernel", "can_use_write_back_jit": "staged"}
    return {flag: _capability(support(spec, layout, backend, "backup", platform)) for flag, backend in flags.items()}


# ---------------------------------------------------------------------------------------------------------------------
# Profile "reference": a closed list of refusals, each with a physical reason.


@dataclass(frozen=True)
class Rule:
    """Refuse where `applies`; `reason` may name `{rows}`, the components at fault."""

    applies: Callable[[PoolSpec], list[str]]
    reason: str


def _without_heads(spec: PoolSpec) -> list[str]:
    return [c.name for c in spec.components if c.heads is None]


def _not_one_stack(spec: PoolSpec) -> list[str]:
    return [c.name for c in spec.components] if len(list(stacks(spec))) > 1 else []


def _nothing_to_split(spec: PoolSpec) -> list[str]:
    return [] if any(c.split for c in spec.components) else [c.name for c in spec.components]


LAYOUT_RULES: dict[str, Rule] = {
    "page_head": Rule(_without_heads, "page_head puts heads outside the tokens, and {rows} has no head axis"),
    "page_unified": Rule(_not_one_stack, "page_unified keeps a page in one object, and rows of {rows} are not alike"),
    "page_first_kv_split": Rule(_nothing_to_split, "page_first_kv_split cuts a row in two, and {rows} names no split"),
}


def _reference(spec: PoolSpec, layout: str, backend: str, platform: str) -> Path | Refusal:
    rule = LAYOUT_RULES.get(layout)
    rows = rule.applies(spec) if rule else []
    if rule and rows:
        return Refusal(rule.reason.format(rows=", ".join(rows)))
    if platform not in BACKENDS[backend]:
        return Refusal(f"{backend} moves bytes to and from {' or '.join(BACKENDS[backend])} memory, not {platform}")
    scattered = [c.name for b in buffers(spec, layout, 1) if not b.keeps_page_together for c in b.components]
    if backend == "staged" and scattered:
        return Refusal(f"staged copies whole pages, and {layout} scatters a page of {', '.join(scattered)} over layers")
    return Path(backend)


# ---------------------------------------------------------------------------------------------------------------------
# Profiles "sglang…": what that engine's pools accept, from `srt/mem_cache/pool_host/*` and
# `srt/mem_cache/memory_pool_host.py`; `kernel` there means an SM kernel or, writing back page_first, the staged path.


@dataclass(frozen=True)
class Engine:
    """A version of SGLang, as far as its host pools differ.

    staged           families that write back through staging
    staged_multiple  row bytes must be a multiple of this for it
    """

    version: str
    staged: tuple[str, ...]
    staged_multiple: int


ATTENTION = ("mha", "asymmetric", "mla")
PROFILES: dict[str, Engine] = {
    "reference": Engine("", (), 0),
    "sglang": Engine("0.5.23", (*ATTENTION, "dsa", "v4_paged", "v4_state", "mxfp8"), 16),
    "sglang-28434": Engine(
        "right after PR #28434 (2026-06-19)", (*ATTENTION, "dsa", "v4_paged", "v4_state", "mamba"), 16
    ),
    "sglang-21631": Engine("from PR #21631 to PR #28434", ("mha", "mla"), 128),
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

# Bytes that one row must be a multiple of in an SM kernel; checked by the engine in C++, late.
_KERNEL_MULTIPLE = {"mamba": 16}


def _sglang(spec: PoolSpec, layout: str, backend: str, direction: str, platform: str, engine: Engine) -> Path | Refusal:
    if spec.family not in SGLANG_PAIRS:
        return Refusal(f"SGLang has no host pool of family {spec.family!r}")
    if backend == "kernel_ascend":
        return Refusal("kernel_ascend is an NPU operator, and there is no NPU platform here")
    if backend not in ("kernel", "direct"):
        return Refusal(f"{backend!r} is no I/O backend of SGLang")
    if (layout, backend) not in SGLANG_PAIRS[spec.family]:
        return Refusal(f"SGLang's {spec.family} pool has no transfer for layout {layout!r} with backend {backend!r}")
    if platform != "cuda":
        return Refusal(f"{backend} needs a CUDA device, and the platform is {platform}")
    if backend == "direct":
        return Path("direct")
    multiple = _KERNEL_MULTIPLE.get(spec.family, 8)
    odd = [f"{c.name} ({c.row_bytes} B)" for c in spec.components if c.row_bytes % multiple]
    if odd:
        return Refusal(f"SGLang's kernels move rows of a multiple of {multiple} bytes, not {', '.join(odd)}")
    staged = direction == "backup" and _stages(spec, layout, engine)
    return Path("staged" if staged else "kernel")


def _stages(spec: PoolSpec, layout: str, engine: Engine) -> bool:
    even = all(c.row_bytes % engine.staged_multiple == 0 for c in spec.components)
    return layout == "page_first" and spec.family in engine.staged and even


def _sglang_capabilities(spec: PoolSpec, layout: str, platform: str, engine: Engine) -> dict[str, Capability]:
    odd = [c.name for c in spec.components if c.row_bytes % 128]
    if spec.family not in ("mha", "asymmetric", "mla", "k_only"):
        jit = Capability(False, f"{spec.family} pools never use the register kernel")
    else:
        jit = Capability(not odd, f"rows of {', '.join(odd)} are no multiple of 128 B" if odd else "rows of 128 B")
    if spec.family in ("mamba", "logical"):
        staged = Capability(True, "forced: the engine ANDs this flag over a group, and this pool must not veto it")
    elif platform != "cuda":
        staged = Capability(False, f"staging needs a CUDA device, and the platform is {platform}")
    elif _stages(spec, layout, engine):
        staged = Capability(True, f"{layout}, rows of a multiple of {engine.staged_multiple} B")
    else:
        staged = Capability(
            False,
            f"needs page_first and rows of a multiple of {engine.staged_multiple} B in {', '.join(engine.staged)}",
        )
    return {"can_use_jit": jit, "can_use_write_back_jit": staged}


@dataclass(frozen=True)
class StartUp:
    """The pair that a server really uses, and what it changed on the way."""

    layout: str
    backend: str
    changes: tuple[str, ...]


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
    mla                    the model's attention is MLA (decides the NPU layout)

    >>> start_up(layout="page_first_direct", backend="kernel")
    StartUp(layout='page_first_direct', backend='direct', changes=('page_first_direct needs backend direct',))
    """
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
    if npu:
        ascend = "page_first_kv_split" if mla else "page_first_direct"
        layout, backend = change((ascend, "kernel_ascend"), "an NPU uses kernel_ascend")
    return StartUp(layout, backend, tuple(changes))


# ---------------------------------------------------------------------------------------------------------------------


def _answer(spec: PoolSpec, layout: str, backend: str, direction: str, platform: str, profile: str) -> Path | Refusal:
    if layout not in LAYOUTS:
        return Refusal(f"there is no layout {layout!r}, only {', '.join(LAYOUTS)}")
    if profile != "reference":
        return _sglang(spec, layout, backend, direction, platform, PROFILES[profile])
    if backend == "kernel_ascend":
        return Refusal("kernel_ascend is an NPU operator, and there is no NPU platform here")
    if backend not in BACKENDS:
        return Refusal(f"there is no backend {backend!r}, only {', '.join(BACKENDS)}")
    return _reference(spec, layout, backend, platform)


def _instead(spec: PoolSpec, layout: str, backend: str, direction: str, platform: str, profile: str) -> str:
    """Other choices of one option that the table allows, the rest being kept."""
    allowed = [f"layout {other}" for other in LAYOUTS if _answer(spec, other, backend, direction, platform, profile)]
    allowed += [f"backend {other}" for other in BACKENDS if _answer(spec, layout, other, direction, platform, profile)]
    allowed += [f"platform {other}" for other in PLATFORMS if _answer(spec, layout, backend, direction, other, profile)]
    return ", or ".join(allowed) or "no single change; see support() for this pool"


def _capability(answer: Path | Refusal) -> Capability:
    if isinstance(answer, Refusal):
        return Capability(False, answer.reason)
    return Capability(True, f"path {answer.name}")
