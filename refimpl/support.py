"""What is allowed: one table for every pool, layout, backend, direction, platform and profile.

`support` answers with the path that a transfer will take, or with a refusal: its reason and what would work instead. It
is asked when a pool is built, before memory is taken. Profile "reference" allows every pair that can be done bit for
bit, also slow ones; each of its refusals has a physical reason. The "sglang" profiles answer as that engine does
(`refimpl.sglang`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from refimpl import sglang
from refimpl.answers import Capability, Path, Refusal, StartUp, UnsupportedPairing
from refimpl.backends import registry
from refimpl.devices import platform_of
from refimpl.geometry import PoolSpec, require_spec
from refimpl.layout import LAYOUTS, buffers, stacks
from refimpl.sglang import SGLANG_PAIRS, start_up

__all__ = [
    "BACKENDS",
    "DIRECTIONS",
    "PLATFORMS",
    "PROFILES",
    "SGLANG_PAIRS",
    "Capability",
    "Path",
    "Refusal",
    "StartUp",
    "UnsupportedPairing",
    "capabilities",
    "require",
    "start_up",
    "support",
]

DIRECTIONS = ("backup", "load")
PLATFORMS = ("cpu", "cuda", "emulated")
PROFILES = ("reference", *sglang.ENGINES)

# Backend -> platforms whose memory it can reach. "emulated" is a CUDA device made of CPU memory, a queue and the real
# kernels compiled for the CPU (`refimpl.emulated`): slow, exact, and late on purpose.
BACKENDS: dict[str, tuple[str, ...]] = {
    "torch": ("cpu", "cuda"),
    "numba": ("cpu",),
    "direct": ("cuda", "emulated"),
    "kernel": ("cuda", "emulated"),
    "staged": ("cuda", "emulated"),
    "auto": ("cuda", "emulated"),
}

# Where the tensors of a device pool lie, as torch says it.
MEMORY = {"cpu": "cpu", "cuda": "cuda", "emulated": "cpu"}


def support(
    spec: PoolSpec, layout: str, backend: str, direction: str, platform: str = "cpu", profile: str = "reference"
) -> Path | Refusal:
    """Whether a pool may use a layout with a backend in one direction, and how; on any device of a platform."""
    require_spec(spec)
    platform = platform_of(platform)
    if direction not in DIRECTIONS:
        raise ValueError(f"direction must be one of {DIRECTIONS}, got {direction!r}")
    if platform not in PLATFORMS:
        raise ValueError(f"platform must be one of {PLATFORMS}, got {platform!r}")
    if profile not in PROFILES:
        raise ValueError(f"profile must be one of {PROFILES}, got {profile!r}")
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
    In a group they are information only: index placement belongs to each pool. A pool without rows vetoes nothing.
    The reference claims what it can load here; an engine's flags are those that it would set on such a platform.
    """
    flags = {"can_use_jit": "kernel", "can_use_write_back_jit": "staged"}
    if not spec.components:
        return {flag: Capability(True, "nothing to move") for flag in flags}
    if profile != "reference":
        return sglang.capabilities(spec, layout, _engine_platform(platform), sglang.ENGINES[profile])
    return {flag: _capability(spec, layout, backend, platform) for flag, backend in flags.items()}


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
    "page_head": Rule(_without_heads, "page_head puts heads outside the tokens, and there is no head axis in {rows}"),
    "page_unified": Rule(_not_one_stack, "page_unified keeps a page in one object, and rows of {rows} are not alike"),
    "page_first_kv_split": Rule(
        _nothing_to_split, "page_first_kv_split cuts a row in two, and no split is named for {rows}"
    ),
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


def _answer(spec: PoolSpec, layout: str, backend: str, direction: str, platform: str, profile: str) -> Path | Refusal:
    if layout not in LAYOUTS:
        return Refusal(f"there is no layout {layout!r}, only {', '.join(LAYOUTS)}")
    if profile != "reference":
        return sglang.answer(spec, layout, backend, direction, _engine_platform(platform), sglang.ENGINES[profile])
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


def _engine_platform(platform: str) -> str:
    """An engine knows no emulation: it would see a CUDA device."""
    return "cuda" if platform_of(platform) == "emulated" else platform_of(platform)


def _capability(spec: PoolSpec, layout: str, backend: str, platform: str) -> Capability:
    """Of the reference: the pair is allowed, and the backend can be loaded (it is asked, never assumed)."""
    answer = support(spec, layout, backend, "backup", platform)
    if isinstance(answer, Refusal):
        return Capability(False, answer.reason)
    missing = registry.unavailable(backend, platform)
    return Capability(not missing, missing or f"path {answer.name}")
