"""The support table: closed, complete, and honest about why."""

from __future__ import annotations

from collections import Counter
from itertools import product
from typing import Any

import pytest
import torch

from refimpl import LAYOUTS, Path, PoolSpec, Refusal, UnsupportedPairing, presets, support
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
    "numba moves bytes to and from cpu memory",
    "direct moves bytes to and from cuda memory",
    "kernel moves bytes to and from cuda memory",
    "staged moves bytes to and from cuda memory",
    "auto moves bytes to and from cuda memory",
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
    assert (len(CELLS), sum(refused.values())) == (3024, 1804)


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


def test_the_message_names_everything_needed_to_choose_again() -> None:
    with pytest.raises(UnsupportedPairing) as refused:
        require(SPECS["mla"], "page_head", "numba", "cpu", "reference")
    for told in (
        "'kv' (mla)",
        "'page_head'",
        "'numba'",
        "backup",
        "cpu",
        "latent has no head axis",
        "layout page_first",
    ):
        assert told in str(refused.value)


# pool, layout -> path of `kernel` when writing back, by version. Rows of 72, 144 and 256 B: multiples of 8, 16 and 128.
STAGING = [
    (presets.mha(2, 1, 128, torch.bfloat16, 16), "page_first", ("staged", "staged", "staged")),
    (presets.mha(2, 1, 72, torch.bfloat16, 16), "page_first", ("kernel", "staged", "staged")),
    (presets.mha(2, 1, 36, torch.bfloat16, 16), "page_first", ("kernel", "kernel", "kernel")),
    (presets.mha(2, 1, 128, torch.bfloat16, 16), "layer_first", ("kernel", "kernel", "kernel")),
    (presets.mla(2, 576, torch.uint8, 16), "page_first", ("kernel", "staged", "staged")),
    (presets.v4_paged("c4", 2, 37440), "page_first", ("kernel", "staged", "staged")),
    (presets.mamba(2, [(8, 4)]), "page_first", ("kernel", "staged", "kernel")),
]


@pytest.mark.parametrize(("spec", "layout", "paths"), STAGING)
def test_sglang_stages_write_backs_by_version_layout_and_alignment(
    spec: PoolSpec, layout: str, paths: tuple[str, ...]
) -> None:
    versions = ("sglang-21631", "sglang-28434", "sglang")
    found = [support(spec, layout, "kernel", "backup", "cuda", version) for version in versions]
    assert found == [Path(path) for path in paths]
    assert all(support(spec, layout, "kernel", "load", "cuda", version) == Path("kernel") for version in versions)


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
        ({"layout": "layer_first", "storage": "mooncake", "dcp": 2}, ("layer_first", "kernel")),
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
