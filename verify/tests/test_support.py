"""The support table: closed, complete, and honest about why."""

from __future__ import annotations

from collections import Counter
from itertools import product
from typing import Any

import pytest
import torch

from refimpl import LAYOUTS, Path, PoolSpec, Refusal, UnsupportedPairing, presets, support
from refimpl.backends import registry
from refimpl.support import BACKENDS, DIRECTIONS, PLATFORMS, PROFILES, StartUp, capabilities, require, start_up
from verify.toys import TOYS

SPECS = {name: toy(4) for name, toy in TOYS.items()}
CELLS = list(product(SPECS, LAYOUTS, BACKENDS, DIRECTIONS, PLATFORMS))

# Every physical reason for which the reference refuses something, as it begins.
REASONS = (
    "page_head puts heads outside the tokens",
    "page_unified keeps a page in one object",
    "page_first_kv_split cuts a row in two",
    "staged copies whole pages",
    "torch moves bytes to and from cpu or cuda memory",
    "numba moves bytes to and from cpu memory",
    "direct moves bytes to and from cuda or emulated memory",
    "kernel moves bytes to and from cuda or emulated memory",
    "staged moves bytes to and from cuda or emulated memory",
    "auto moves bytes to and from cuda or emulated memory",
)


def test_refusals_are_a_closed_list_of_physical_reasons() -> None:
    refused: Counter[str] = Counter()
    for name, layout, backend, direction, platform in CELLS:
        answer = support(SPECS[name], layout, backend, direction, platform)
        if isinstance(answer, Refusal):
            reason = [known for known in REASONS if answer.reason.startswith(known)]
            assert len(reason) == 1, answer.reason
            refused[reason[0]] += 1
    assert set(refused) == set(REASONS)
    assert (len(CELLS), sum(refused.values())) == (4536, 2636)


@pytest.mark.parametrize("profile", PROFILES)
def test_what_a_refusal_recommends_is_allowed(profile: str) -> None:
    for name, layout, backend, direction, platform in CELLS:
        answer = support(SPECS[name], layout, backend, direction, platform, profile)
        if isinstance(answer, Refusal) and not answer.instead.startswith("no single change"):
            for advice in answer.instead.split(", or "):
                option, value = advice.split(" ")
                choice = {"layout": layout, "backend": backend, "platform": platform} | {option: value}
                assert support(SPECS[name], direction=direction, profile=profile, **choice), advice


def test_an_ascend_operator_is_refused_for_its_platform() -> None:
    for profile in PROFILES:
        answer = support(SPECS["mha"], "page_first_direct", "kernel_ascend", "load", "cuda", profile)
        assert isinstance(answer, Refusal)
        assert "NPU" in answer.reason


@pytest.mark.parametrize(("option", "value"), [("direction", "sideways"), ("platform", "tpu"), ("profile", "vllm")])
def test_unknown_questions_are_errors(option: str, value: str) -> None:
    question = {"direction": "load", "platform": "cpu", "profile": "reference"} | {option: value}
    with pytest.raises(ValueError, match=f"{option} must be one of .*{value}"):
        support(SPECS["mha"], "page_first", "torch", **question)


@pytest.mark.parametrize(
    ("pool", "reason"),
    [("mla", "no head axis in latent"), ("mamba", "no head axis in temporal, conv_0, conv_1, side_0, side_1")],
)
def test_one_component_and_several_are_refused_in_the_same_words(pool: str, reason: str) -> None:
    answer = support(SPECS[pool], "page_head", "torch", "backup")
    assert isinstance(answer, Refusal)
    assert answer.reason.endswith(reason)


def test_the_message_names_everything_needed_to_choose_again() -> None:
    with pytest.raises(UnsupportedPairing) as refused:
        require(SPECS["mla"], "page_head", "numba", "cpu", "reference")
    for told in (
        "'kv' (mla)",
        "'page_head'",
        "'numba'",
        "backup",
        "cpu",
        "no head axis in latent",
        "layout page_first",
    ):
        assert told in str(refused.value)


# pool, layout -> path of a write-back by `kernel` in each version (None: it failed). Rows of 72, 144 and 256 B are
# multiples of 8, 16 and 128.
VERSIONS = ("sglang-21631", "sglang-28434", "sglang")
STAGING: list[tuple[PoolSpec, str, tuple[str | None, ...]]] = [
    (presets.mha(2, 1, 128, torch.bfloat16, 16), "page_first", ("staged", "staged", "staged")),
    (presets.mha(2, 1, 72, torch.bfloat16, 16), "page_first", (None, "staged", "staged")),
    (presets.mha(2, 1, 36, torch.bfloat16, 16), "page_first", (None, "kernel", "kernel")),
    (presets.mha(2, 1, 128, torch.bfloat16, 16), "layer_first", ("kernel", "kernel", "kernel")),
    (presets.mla(2, 576, torch.uint8, 16), "page_first", (None, "staged", "staged")),
    (presets.dsa_indexer(2), "page_first", (None, "staged", "staged")),
    (presets.v4_paged("c4", 2, 37440), "page_first", (None, "staged", "staged")),
    (presets.v4_paged("c4", 2, 37440), "layer_first", ("kernel", "kernel", "kernel")),
    (presets.mamba(2, [(8, 4)]), "page_first", (None, "staged", "kernel")),
    (presets.mamba(2, [(8, 4)], side_states=[((7,), torch.uint8)]), "page_first", (None, "staged", "kernel")),
]


@pytest.mark.parametrize(("spec", "layout", "paths"), STAGING)
def test_sglang_stages_write_backs_by_version_layout_and_alignment(
    spec: PoolSpec, layout: str, paths: tuple[str | None, ...]
) -> None:
    found = [support(spec, layout, "kernel", "backup", "cuda", version) for version in VERSIONS]
    assert [answer.name if isinstance(answer, Path) else None for answer in found] == list(paths)
    assert all(support(spec, layout, "kernel", "load", "cuda", version) == Path("kernel") for version in VERSIONS[1:])


def test_write_backs_that_crashed_are_refused_with_what_they_said() -> None:
    answer = support(presets.dsa_indexer(2), "page_first", "kernel", "backup", "cuda", "sglang-21631")
    assert isinstance(answer, Refusal)
    assert "Destination indices must be a CUDA tensor" in answer.reason
    early = support(presets.v4_paged("c4", 2, 37440), "page_first", "kernel", "load", "cuda", "sglang-21631")
    assert isinstance(early, Refusal)
    assert "layer_first only" in early.reason


@pytest.mark.parametrize(("page_size", "scale_bytes", "allowed"), [(128, 16, True), (64, 16, False), (128, 8, False)])
def test_sglang_must_stage_payload_and_scales_of_mxfp8(page_size: int, scale_bytes: int, allowed: bool) -> None:
    spec = presets.mha_quantised(2, 1, 128, scale_bytes, page_size)
    assert bool(support(spec, "page_first", "kernel", "backup", "cuda", "sglang")) == allowed


@pytest.mark.parametrize(
    ("spec", "usable", "reason"),
    [
        (presets.mha(2, 1, 64, torch.bfloat16, 16), True, "register kernel"),  # 128 B
        (presets.mla(2, 576, torch.uint8, 64), True, "TMA kernel"),  # 32 rows a chunk
        (presets.mla(2, 576, torch.uint8, 16), False, "32 rows of 576 B"),
        (presets.mla(2, 41, torch.uint8, 64), False, "multiple of 16 B"),
        (presets.mha(2, 4, 192, v_head_dim=128), False, "unlike width"),
        (presets.v4_paged("c4", 2, 37440), False, "no JIT load"),
    ],
)
def test_when_sglang_can_use_its_jit_kernels(spec: PoolSpec, usable: bool, reason: str) -> None:
    flag = capabilities(spec, "page_first", "cuda", "sglang")["can_use_jit"]
    assert (flag.usable, reason in flag.reason) == (usable, True), flag.reason
    assert not capabilities(spec, "page_first", "cpu", "sglang")["can_use_jit"]


def test_the_reference_claims_only_what_it_can_load() -> None:
    """A capability is probed: no backend of this name, no flag."""
    spec = presets.mla(2, 576, torch.bfloat16, 64)
    for flag, backend in (("can_use_jit", "kernel"), ("can_use_write_back_jit", "staged")):
        for platform in ("cuda", "emulated"):
            missing = registry.unavailable(backend, platform)
            assert capabilities(spec, "page_first", platform)[flag].usable == (missing is None)


def test_sglang_refuses_rows_that_its_kernels_cannot_move() -> None:
    odd = presets.mla(2, 41, torch.uint8, 16)
    answer = support(odd, "page_first", "kernel", "load", "cuda", "sglang")
    assert isinstance(answer, Refusal)
    assert "multiple of 8 bytes, not latent (41 B)" in answer.reason
    assert support(odd, "page_first_direct", "direct", "load", "cuda", "sglang")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, ("page_first", "kernel")),
        ({"layout": "page_first_direct"}, ("page_first_direct", "direct")),
        ({"backend": "direct"}, ("page_first_direct", "direct")),
        ({"layout": "page_head", "backend": "direct"}, ("page_head", "direct")),  # not mended: fails later
        ({"layout": "layer_first", "storage": "mooncake"}, ("page_first", "kernel")),
        ({"layout": "layer_first", "backend": "direct", "storage": "mooncake"}, ("page_first_direct", "direct")),
        ({"layout": "layer_first", "storage": "mooncake", "dcp": 2, "mla": True}, ("layer_first", "kernel")),
        ({"layout": "layer_first", "storage": "file"}, ("layer_first", "kernel")),
        ({"layout": "page_first_direct", "unified_memory": True}, ("page_first", "kernel")),
        ({"decode_receives_early": True}, ("layer_first", "kernel")),
        ({"npu": True}, ("page_first_direct", "kernel_ascend")),
        ({"npu": True, "mla": True}, ("page_first_kv_split", "kernel_ascend")),
    ],
)
def test_start_up_rewrites(options: dict[str, Any], expected: tuple[str, str]) -> None:
    result = start_up(**options)
    assert (result.layout, result.backend) == expected
    assert bool(result.changes) == (expected != (options.get("layout", "page_first"), options.get("backend", "kernel")))


def test_start_up_refuses_a_contradiction() -> None:
    with pytest.raises(ValueError, match="mooncake"):
        start_up(decode_receives_early=True, storage="mooncake")
    assert isinstance(start_up(decode_receives_early=True), StartUp)
    with pytest.raises(NotImplementedError, match="dcp=2 needs a model with MLA"):
        start_up(dcp=2)


@pytest.mark.parametrize(("option", "value"), [("layout", "page_unified"), ("backend", "staged")])
def test_start_up_takes_what_the_command_line_takes(option: str, value: str) -> None:
    with pytest.raises(ValueError, match=f"{option} must be one of .*{value}"):
        start_up(**{option: value})  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("profile", PROFILES)
def test_every_capability_has_a_reason(profile: str) -> None:
    for spec, layout, platform in product(SPECS.values(), LAYOUTS, PLATFORMS):
        flags = capabilities(spec, layout, platform, profile)
        assert list(flags) == ["can_use_jit", "can_use_write_back_jit"]
        assert all(flag.reason for flag in flags.values())


def test_the_flags_of_upstream() -> None:
    mha, mamba = presets.mha(2, 1, 128, torch.bfloat16, 16), presets.mamba(2, [(8, 4)])
    v4 = presets.v4_paged("c4", 2, 37440)
    assert all(capabilities(mha, "page_first", "cuda", "sglang").values())
    assert not capabilities(mha, "layer_first", "cuda", "sglang")["can_use_write_back_jit"]
    assert not capabilities(v4, "page_first", "cuda", "sglang")["can_use_jit"]
    assert capabilities(v4, "page_first", "cuda", "sglang")["can_use_write_back_jit"]
    forced = capabilities(mamba, "page_first", "cuda", "sglang")["can_use_write_back_jit"]
    assert forced
    assert forced.reason.startswith("forced")
