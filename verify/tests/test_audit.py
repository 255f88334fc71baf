"""The dispatch audit: rules at their edges, SGLang's choices as it was measured, and costs that are never guessed."""

from __future__ import annotations

import re
from functools import cache

import pytest
import torch

from refimpl import LAYOUTS, PoolSpec, presets
from verify import cli
from verify.audit import costs, rules
from verify.audit.costs import STANDS_FOR, Cell, Row
from verify.audit.rules import H200, Device
from verify.bench.gpu import cases, here, results

BYTE = torch.uint8
AMPERE = Device("an older one", (8, 0))


def path(spec: PoolSpec, layout: str, direction: str, device: Device = H200, backend: str = "kernel") -> str | None:
    """What SGLang takes with a backend; None where a server cannot get there."""
    found = {c.setting: c.path for c in rules.sglang_choices(spec, layout, direction, device)}
    return found.get(backend)


def rows_of(nbytes: int, page_size: int, layers: int = 1) -> PoolSpec:
    return presets.mla(layers, nbytes, BYTE, page_size)


# ---- SGLang


@pytest.mark.parametrize(
    ("spec", "device", "expected"),
    [
        (rows_of((128 << 10) - 16, 1), H200, "staged, a copy a page"),
        (rows_of(128 << 10, 1), H200, "staged, one batch"),
        (rows_of(128 << 10, 1), Device(batched_copies=False), "staged, a copy a page"),
        (rows_of(2 << 10, 16, layers=4), H200, "staged, one batch"),  # all layers of a page count
        (rows_of(2 << 10, 15, layers=4), H200, "staged, a copy a page"),
        (presets.mha(32, 8, 128, page_size=1), H200, "staged, a copy a page"),  # K and V are copied apart
        (presets.mha(64, 8, 128, page_size=1), H200, "staged, one batch"),
        (rows_of(24, 64), H200, "AOT kernel"),  # no multiple of 16 B
    ],
)
def test_sglang_stages_a_write_back_of_page_first(spec: PoolSpec, device: Device, expected: str) -> None:
    assert path(spec, "page_first", "backup", device) == expected


@pytest.mark.parametrize("layout", ["layer_first", "page_first"])
@pytest.mark.parametrize(
    ("row", "page_size", "device", "expected"),
    [
        (2048, 16, H200, "TMA kernel"),  # 16 rows of 2 KiB fill a stage of 32 KiB
        (2048, 15, H200, "register kernel"),
        (2048, 1, H200, "register kernel"),
        (2048, 16, AMPERE, "register kernel"),
        (1152, 16, H200, "TMA kernel"),
        (1152, 8, H200, "register kernel"),
        (576, 32, H200, "TMA kernel"),
        (576, 16, H200, "AOT kernel"),  # no multiple of 128 B either
        (576, 32, AMPERE, "AOT kernel"),
        (256, 64, H200, "register kernel"),  # a stage takes at most 128 rows
        (256, 128, H200, "TMA kernel"),
        (48, 128, H200, "TMA kernel"),
        (40, 128, H200, "AOT kernel"),  # no multiple of 16 B
        (20, 128, H200, None),  # no multiple of 8 B: no kernel moves it
    ],
)
def test_sglang_loads_by_tma_where_pages_are_whole_chunks(
    layout: str, row: int, page_size: int, device: Device, expected: str | None
) -> None:
    assert path(rows_of(row, page_size), layout, "load", device) == expected


LLAMA = presets.mha(32, 8, 128, page_size=64)


@pytest.mark.parametrize("direction", ["backup", "load"])
def test_sglang_comes_to_a_layout_only_as_its_start_up_allows(direction: str) -> None:
    by_layout = {
        layout: {c.setting: c.path for c in rules.sglang_choices(LLAMA, layout, direction)} for layout in LAYOUTS
    }
    page_first = {"backup": "staged, one batch", "load": "TMA kernel"}[direction]
    assert by_layout == {
        "layer_first": {"kernel": "TMA kernel", "direct": "direct"},
        "page_first": {"kernel": page_first},
        "page_first_direct": {"direct": "direct"},
        "page_head": {"kernel": "AOT kernel"},
        "page_unified": {},
        "page_first_kv_split": {},
    }


def test_a_rewritten_option_is_told() -> None:
    (choice,) = rules.sglang_choices(LLAMA, "page_first_direct", "load")
    assert "page_first_direct needs backend direct" in choice.why
    assert "direct needs layout page_first_direct" in choice.why


def test_sglang_moves_states_and_page_rows_by_their_own_kernels() -> None:
    states = presets.mamba(2, [], temporal_shape=(64,))
    assert path(states, "page_first", "backup") == path(states, "page_first", "load") == "Mamba kernel"
    page_rows = presets.v4_paged("v4", 30, 8448, entries=64, entry_bytes=(128, 4))
    assert path(page_rows, "layer_first", "load") == path(page_rows, "page_first", "load") == "AOT kernel"


MEASURED_PATHS = {"TMA": "TMA kernel", "JIT": "register kernel", "AOT": "AOT kernel", "Mamba kernel": "Mamba kernel"}


def test_sglang_took_the_paths_that_its_rules_say() -> None:
    """Its own choices, as they were recorded beside its measured figures."""
    for case in cases.SGLANG_CASES:
        for figure in results.sglang()["figures"]:
            if figure["case"] != case.name or not figure["chosen"]:
                continue
            if (case.spec.family, figure["layout"]) == ("mamba", "layer_first"):
                continue  # measured with kernels of an older version, which had this layout
            backend = "direct" if figure["path"] == "direct" else "kernel"
            told = path(case.spec, figure["layout"], figure["direction"], backend=backend)
            assert told, figure
            assert told.split(",")[0] == MEASURED_PATHS.get(figure["path"], figure["path"]), figure


# ---- vLLM


@pytest.mark.parametrize(
    ("direction", "copies", "count", "expected"),
    [
        ("load", [28672 - 8], 16, "Triton kernel"),
        ("load", [28672], 16, "batched copy"),
        ("load", [int(27.9 * 1024) // 8 * 8], 16, "Triton kernel"),
        ("load", [28672 - 8], 15, "batched copy"),
        ("load", [28672 - 4], 16, "batched copy"),
        ("load", [1728, 149760], 5000, "batched copy"),  # the longest copy of the model decides
        ("load", [1728, 8448], 5000, "Triton kernel"),
        ("backup", [1728], 5000, "batched copy"),
    ],
)
def test_vllm_loads_short_copies_by_a_kernel(direction: str, copies: list[int], count: int, expected: str) -> None:
    assert rules.vllm_path(direction, copies, count)[0] == expected


def test_vllm_copies_a_page_of_a_layer_k_with_v() -> None:
    assert rules.vllm_copy_bytes(LLAMA) == 2 * 64 * 2048
    (choice,) = rules.vllm_choices(LLAMA, "layer_first", "load", pages=32)
    assert choice.apart == "copies of 256 KiB, K with V"
    (latent,) = rules.vllm_choices(presets.mla(61, 576, page_size=16), "layer_first", "load", pages=1)
    assert (latent.path, latent.apart) == ("Triton kernel", "")
    assert not [*rules.vllm_choices(LLAMA, "page_first", "load", pages=32)]


def test_vllm_counts_a_copy_for_every_layer_and_page() -> None:
    fifteen, sixteen = (presets.mla(layers, 576, page_size=16) for layers in (5, 4))
    assert [c.path for c in rules.vllm_choices(fifteen, "layer_first", "load", pages=3)] == ["batched copy"]
    assert [c.path for c in rules.vllm_choices(sixteen, "layer_first", "load", pages=4)] == ["Triton kernel"]


# ---- FlexKV


@pytest.mark.parametrize(
    ("block_first", "direction", "segments", "chunk", "heads", "expected"),
    [
        (False, "load", 1, 4096, 8, "CONTIG_DIRECT"),
        (False, "load", 2, 4096, 8, "SEGMENT_DIRECT"),
        (False, "backup", 8, 4096, 8, "SEGMENT_DIRECT"),
        (False, "backup", 9, 4096, 8, "GATHER_SCATTER"),
        (False, "backup", 9, 4100, 8, "SEGMENT_SCATTER"),
        (True, "load", 1, 4096, 8, "GATHER_DIRECT"),
        (True, "load", 9, 4096, 1, "GATHER_DIRECT"),
        (True, "backup", 9, 4096, 8, "GATHER_DIRECT"),
        (True, "backup", 8, 4096, 1, "GATHER_DIRECT"),
        (True, "backup", 9, 4096, 1, "GATHER_SCATTER"),
        (True, "backup", 9, 4100, 1, "SEGMENT_SCATTER"),
    ],
)
def test_flexkv_chooses_by_segments_and_order(
    block_first: bool, direction: str, segments: int, chunk: int, heads: int, expected: str
) -> None:
    assert rules.flexkv_path(block_first, direction, segments, chunk, heads)[0] == expected


def test_flexkv_has_the_layouts_that_the_dictionary_says() -> None:
    """LAYERFIRST moves the runs of `layer_first`; BLOCKFIRST is another layout of ours with heads and without."""
    for spec, block_first in ((LLAMA, "page_unified"), (presets.mla(61, 576, page_size=64), "page_first_direct")):
        having = {layout for layout in LAYOUTS if [*rules.flexkv_choices(spec, layout, "load", 32)]}
        assert having == {"layer_first", block_first}


# ---- costs


@cache
def committed() -> list[Row]:
    return costs.rows(here.shown("bench", "committed")[1], results.sglang())


def test_the_committed_results_are_audited_for_every_engine() -> None:
    assert {row.choice.engine for row in committed()} == {"SGLang", "vLLM", "FlexKV"}
    measured = [row.regret for row in committed() if row.regret is not None]
    assert len(measured) > 100
    assert min(measured) == 1
    assert max(measured) > 100


def test_nothing_is_faster_than_the_best() -> None:
    for row in committed():
        if row.stands_in:
            assert row.best
            assert row.best.fraction >= row.stands_in.fraction
            assert row.stands_in.mover in STANDS_FOR[row.choice.path]


def test_every_choice_names_its_rule_and_source() -> None:
    for row in committed():
        assert row.choice.why
        assert re.search(r"#\d+|at \w{7}|0\.5\.23", row.choice.source), row.choice


def test_what_was_not_measured_is_not_guessed() -> None:
    found = costs.rows({"rows": []}, {"figures": []}, "llama-3.1-8b", 16)
    assert {row.cell.spec.page_size for row in found} == {16}
    assert [row.regret for row in found] == [None] * len(found)
    assert all(line[-2] == "not measured" for line in costs.table(found).body)


def figures(spec_of: cases.Case, layout: str, direction: str, movers: dict[str, float]) -> dict[str, object]:
    cells = [{"mover": m, "status": "measured", "percent_of_ceiling": percent} for m, percent in movers.items()]
    return {
        "case": spec_of.name,
        "pool": spec_of.spec.name,
        "layout": layout,
        "direction": direction,
        "scattered": True,
        "pages": 32,
        "cells": cells,
    }


def test_the_cost_is_a_ratio_of_shares_of_each_ones_own_session() -> None:
    case = next(case for case in cases.SGLANG_CASES if case.name == "MHA Llama-8B, page 64")
    content = {"rows": [figures(case, "page_first", "backup", {"staged": 99.0, "direct": 3.0})]}
    theirs = {"case": case.name, "layout": "page_first", "direction": "backup", "path": "staged", "fraction": 0.33}
    (row,) = costs.rows(content, {"figures": [theirs]})
    assert row.stands_in == costs.Measured("SGLang's staged", 0.33)
    assert row.best == costs.Measured("staged", 0.99)
    assert row.regret == pytest.approx(3)


def test_only_the_largest_transfer_of_scattered_pages_is_compared() -> None:
    case = next(case for case in cases.SGLANG_CASES if case.name == "MLA DeepSeek-V3, page 64")
    most = figures(case, "layer_first", "backup", {"direct": 50.0, "kernel": 60.0})
    few = figures(case, "layer_first", "backup", {"direct": 90.0}) | {"pages": 2}
    neighbours = figures(case, "layer_first", "backup", {"direct": 99.0}) | {"scattered": False, "pages": 64}
    for order in ([most, few, neighbours], [neighbours, few, most]):
        known = costs.known({"rows": order}, {"figures": []})
        (one,) = known.values()
        assert (one.pages, [figure.fraction for figure in one.figures]) == (32, [0.5, 0.6])


def test_pools_of_the_same_rows_are_one_cell_whatever_their_name() -> None:
    measured = next(case.spec for case in cases.SGLANG_CASES if case.name == "MLA DeepSeek-V3, page 16")
    preset = presets.model("deepseek-v3", page_size=16)["kv"]
    assert Cell.of(measured, "page_first", "load") == Cell.of(preset, "page_first", "load")
    assert Cell.of(measured, "page_first", "load") != Cell.of(preset, "page_first", "backup")
    assert Cell.of(measured, "page_first", "load") != Cell.of(measured.with_pages_of(64), "page_first", "load")


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ([], "SGLang: "),
        (["--model", "llama-3.1-8b", "--page-size", "1"], "staged, a copy a page"),
        (["--model", "qwen3-8b"], "not measured"),
        (["--page-size", "16"], "deepseek-v3, page 16"),
        (["--model", "llama-3.1-8b", "--page-size", "7"], "llama-3.1-8b was measured with pages of 1, 16, 64\n"),
        (["--model", "qwen3-8b"], "nothing of qwen3-8b was measured\n"),
    ],
)
def test_the_command_prints_a_table(arguments: list[str], shown: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["audit", *arguments]) == 0
    assert shown in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--model", "llama-9"], "invalid choice: 'llama-9'"),
        (["--page-size", "0"], "must be a positive integer, got '0'"),
        (["--page-size", "7"], "nothing was measured with pages of 7, only of 1, 16, 64, 256; name a model"),
        (["--model", "deepseek-v4-flash", "--page-size", "1"], "DeepSeek V4 has pages of 256 tokens, got page_size 1"),
    ],
)
def test_a_mistake_ends_in_one_line(arguments: list[str], error: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["audit", *arguments])
    assert stopped.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert error in line
