"""The GPU benchmark, without a GPU: what it writes down follows from samples, and wrong bytes are never timed."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch

from kernels_cupy.runtimes import emulated
from refimpl import HostMemory, HostPool
from refimpl.backends.torch_backend import TorchBackend
from refimpl.indices import Items
from refimpl.plan import Plan
from refimpl.receipt import Receipt
from verify.arena import ALIGNMENT, Arena
from verify.bench.gpu import __main__ as program
from verify.bench.gpu import calls, cases, matmul, measure, report, targets
from verify.bench.gpu.cases import Case, Mover, Portion
from verify.bench.gpu.clock import HostClock, Series, Start, clock
from verify.bench.gpu.results import SCHEMA, Results, sglang
from verify.bench.gpu.variants import VARIANTS
from verify.bench.report import as_text
from verify.toys import TOYS

EFFORT = measure.Effort(seconds=0, repeats=(2, 3), latencies=2, matmul=matmul.Loop(8, 2, 2))
SIZES = (2000, 4000)
COUNTS = (1, 3, 8)
HERE = (Mover("torch"), Mover("torch", layerwise=True), Mover("one staging buffer"), Mover("memcpy one by one"))
TOY = Case("toy", TOYS["mha"](2), pages=3)


def portion(movers: tuple[Mover, ...], *layouts: str, interference: bool = False) -> Portion:
    return Portion((TOY,), layouts, lambda case, pages: movers, (1000,), interference=interference)


def measured(portions: dict[str, Portion], platform: str = "cpu", path: Path | None = None) -> dict[str, Any]:
    results = Results(path, resume=True)
    program.run(results, portions, platform, 0, EFFORT, SIZES, COUNTS)
    return results.content


def cells(content: dict[str, Any], status: str) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    return [(row, cell) for row in content["rows"] for cell in row["cells"] if cell["status"] == status]


@pytest.fixture(scope="module")
def content() -> dict[str, Any]:
    """Backend torch and all variants, in two portions."""
    layouts = ("layer_first", "page_first", "page_head", "page_first_kv_split")
    return measured({"core": portion(HERE, *layouts), "matmul": portion(HERE[:1], "page_first", interference=True)})


def test_a_result_file_follows_its_schema(content: dict[str, Any]) -> None:
    jsonschema.validate(content, json.loads(SCHEMA.read_text()))


def test_every_figure_follows_from_the_samples(content: dict[str, Any]) -> None:
    (session,) = content["sessions"]
    ceilings = {
        c["direction"]: c["payload_bytes"] / statistics.median(c["timing"]["samples_s"]) / 1e9
        for c in session["ceilings"]
        if c["payload_bytes"] == SIZES[0]
    }
    found = cells(content, "measured")
    assert len(found) == 19 + 2
    for row, cell in found:
        for timing in (cell["timing"], cell["submit"], cell["latency"]):
            assert timing["median_s"] == statistics.median(timing["samples_s"])
        assert cell["gb_per_s"] == row["payload_bytes"] / cell["timing"]["median_s"] / 1e9
        assert cell["percent_of_ceiling"] == pytest.approx(100 * cell["gb_per_s"] / ceilings[row["direction"]])
        assert sum(run["bytes"] * run["count"] for run in row["runs"]) == row["payload_bytes"]


def test_calls_are_timed_only_inside() -> None:
    device = emulated()
    before = vars(device).keys()
    with calls.spent("emulated") as found:
        event = device.record(device.current())
        device.wait("another", event)
    assert len(found) == 3
    assert all(seconds > 0 for seconds in found)
    device.record(device.current()).synchronize()
    assert len(found) == 3
    assert vars(device).keys() == before


def test_a_matmul_is_measured_beside_transfers(content: dict[str, Any]) -> None:
    for row, cell in cells(content, "measured"):
        beside = cell["interference"]
        assert (beside is not None) == (row["portion"] == "matmul")
        if beside:
            ratio = statistics.median(beside["beside_per_s"]) / statistics.median(beside["alone_per_s"])
            assert beside["slowdown"] == 1 - ratio


def test_refused_cells_are_listed_with_their_reason(content: dict[str, Any]) -> None:
    reasons = {cell["reason"] for _, cell in cells(content, "refused")}
    assert any("a backup moves all layers" in reason for reason in reasons)
    assert any("there is no page to stage" in reason for reason in reasons)
    assert any("no split is named" in reason for reason in reasons)
    assert not cells(content, "wrong")
    assert not cells(content, "failed")


def test_the_report_shows_every_row_and_the_ratio_of_variants(content: dict[str, Any]) -> None:
    text = as_text(report.table(content, "core"))
    assert "one staging buffer" in text
    assert "memcpy backup 1.95 KiB" in text
    assert len(report.table(content, "core").body) == 8


def test_the_report_tells_what_its_columns_are(content: dict[str, Any]) -> None:
    """Above all that what is called as SGLang's path is ours."""
    table = report.table(content, "core")
    told = " ".join(table.title.splitlines())
    assert "SGLang's path" not in table.head
    for column in ("moved", "run", "piece", *report.VERDICTS):
        assert column in table.head
        assert f"{column}: " in told
    assert "those of our backends that are named like the paths that SGLang takes" in told
    assert "`python -m verify audit`" in told


class LastItemForgotten(TorchBackend):
    def execute(self, plan: Plan, layers: tuple[int | None, ...], items: Items, direction: str) -> Receipt:
        host, device = items.checked()
        short = super().execute(plan, layers, Items(host[:-1], device[:-1]), direction)
        return replace(short, bytes=short.bytes // 2 * 3)


class Broken(TorchBackend):
    def execute(self, plan: Plan, layers: tuple[int | None, ...], items: Items, direction: str) -> Receipt:
        raise RuntimeError("no more descriptors")


@pytest.mark.parametrize(
    ("backend", "status", "reason"),
    [(LastItemForgotten, "wrong", "tensor 0 is 0xa5, not"), (Broken, "failed", "RuntimeError: no more descriptors")],
)
def test_a_wrong_or_broken_backend_is_told_and_not_timed(
    backend: type[TorchBackend], status: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("refimpl.backends.torch_backend.TorchBackend", backend)
    monkeypatch.setattr("refimpl.backends.registry._load", lambda name: backend)
    found = measured({"core": portion(HERE[:1] + HERE[3:], "page_first")})
    jsonschema.validate(found, json.loads(SCHEMA.read_text()))
    broken = cells(found, status)
    assert len(broken) == 2
    assert all(reason in cell["reason"] for _, cell in broken)
    assert len(cells(found, "measured")) == 2  # the variant beside it


def test_a_run_is_resumed(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    first = measured({"core": portion(HERE[:1], "page_first")}, path=path)
    second = measured({"core": portion(HERE[:1], "page_first", "layer_first")}, path=path)
    assert second["rows"][:2] == first["rows"]
    assert [row["session"] for row in second["rows"]] == [0, 0, 1, 1]
    assert json.loads(path.read_text()) == second


def test_a_file_is_reported_without_measuring(
    content: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "results.json"
    path.write_text(json.dumps(content))
    assert program.main(["--report-only", "--out", str(path)]) == 0
    told = capsys.readouterr().out
    assert as_text(report.table(content, "core")) in told
    assert told.endswith("Targets are those of a GPU: nothing of this is judged.\n"), "they were measured here"
    assert json.loads(path.read_text()) == content
    of_a_gpu = content | {
        "sessions": [s | {"settings": s["settings"] | {"platform": "cuda"}} for s in content["sessions"]]
    }
    path.write_text(json.dumps(of_a_gpu))
    assert program.main(["--report-only", "--out", str(path)]) == 0
    assert "Targets, and how many figures reach them:\n" in capsys.readouterr().out


def test_portions_are_unambiguous_and_fit_into_the_arena() -> None:
    portions = cases.portions(256 << 20)
    assert list(portions) == list(program.NAMES)
    for wanted in portions.values():
        for case in wanted.cases:
            movers = [mover.name for mover in wanted.movers(case, case.pages_of(wanted.payloads[0]))]
            assert len(set(movers)) == len(movers)
    assert measure.memory_needed(list(portions.values())) < 400 << 20


def test_no_row_is_begun_when_the_budget_is_spent(capsys: pytest.CaptureFixture[str]) -> None:
    results = Results(None)
    wanted = {"core": portion(HERE[:1], "page_first"), "pages": portion(HERE[:1], "page_first")}
    program.run(results, wanted, "cpu", 0, EFFORT, SIZES, budget_s=0)
    assert results.content["rows"] == []
    assert len(results.content["sessions"]) == 1, "the ceilings are there"
    assert "pages: not begun, the budget is spent" in capsys.readouterr().err


def test_every_portion_has_its_share_of_a_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """What one leaves is shared by those after it: none is left out because another one took all."""
    now, shares, takes = [1000.0], list[float](), iter((25, 5, 35, 0))

    def measured(*portion: Any) -> None:
        shares.append(portion[-1] - now[0])
        now[0] += next(takes)

    monkeypatch.setattr(program, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(program, "_measure", measured)
    wanted = {name: portion(HERE[:1], "page_first") for name in ("core", "matmul", "pages", "contiguous")}
    program.run(Results(None), wanted, "cpu", 0, EFFORT, SIZES, budget_s=100)
    assert shares == [25, 25, 35, 35]


def test_other_pages_are_measured_where_they_make_another_pool() -> None:
    names = ("qwen3-next", "deepseek-v4-flash")
    found = cases.portions(1 << 20, names, ("page_head",), (1, 64, 256))
    assert [(case.name, case.spec.name) for case in found["pages"].cases] == [
        ("qwen3-next, page 1", "kv"),  # its states do not depend on it, 64 is the preset's
        ("qwen3-next, page 256", "kv"),
    ]
    everything = [(case.name, case.spec.name) for case in (*found["core"].cases, *found["pages"].cases)]
    assert [(case.name, case.spec.name) for case in found["contiguous"].cases] == everything
    assert not found["contiguous"].scattered
    assert {found[name].layouts for name in ("core", "pages", "contiguous")} == {("page_head",)}


@pytest.mark.emulated
def test_the_gpu_backends_are_measured_on_an_emulated_device() -> None:
    movers = (*cases.BACKENDS, *cases.BY_LAYER, Mover("kernel", blocks=2), Mover("staged", staging_pages=2))
    found = measured({"core": portion((*movers, *HERE[2:]), "page_first", "page_first_direct")}, "emulated")
    jsonschema.validate(found, json.loads(SCHEMA.read_text()))
    assert not [cell["reason"] for _, cell in [*cells(found, "wrong"), *cells(found, "failed")]]
    assert {cell["mover"] for _, cell in cells(found, "measured")} == {m.name for m in (*movers, *HERE[2:])}
    for _, cell in cells(found, "measured"):
        ours = cell["mover"] not in VARIANTS
        assert (cell["own_s"] is not None) == ours, "of a submit it is told what is no call of the device"
        assert not ours or cell["own_s"] > 0


# ---- targets


def row(mover_rates: dict[str, float], run: int = 4096, piece: int = 0, direction: str = "backup") -> dict[str, Any]:
    return {
        "portion": "sglang",
        "session": 0,
        "case": "MHA Llama-8B, page 64",
        "pool": "kv",
        "layout": "page_head",
        "direction": direction,
        "payload_bytes": 2**28,
        "runs": [{"bytes": run, "count": 2**28 // run}],
        "piece_bytes": piece,
        "cells": [
            {
                "mover": mover,
                "backend": mover.partition(", ")[0],
                "status": "measured",
                "layerwise": mover.endswith(", by layer"),
                "descriptors": 100,
                "gb_per_s": percent / 2,
                "timing": {"median_s": 2**28 / (percent / 2 * 1e9)},
                "percent_of_ceiling": percent,
                "submit": {"median_s": 50e-6},
                "interference": None,
            }
            for mover, percent in mover_rates.items()
        ],
    }


@pytest.mark.parametrize(
    ("run", "piece", "direction", "required"),
    [
        (2048, 0, "backup", 0.94),
        (2048, 0, "load", 0.91),
        (1152, 0, "load", 0.88),
        (256, 0, "backup", 0.90),
        (255, 0, "backup", None),
        (255, 512 << 10, "load", 0.95),
        (2048, 4 << 20, "load", 0.97),
    ],
)
def test_the_rate_that_a_row_must_reach(run: int, piece: int, direction: str, required: float | None) -> None:
    assert targets.required(row({}, run, piece, direction)) == required


def test_verdicts() -> None:
    lines = targets.verdicts(
        {"sessions": [{}], "rows": [row({"kernel": 96, "auto": 94}), row({"kernel": 93, "auto": 50})]}, sglang()
    )
    assert [line.split(";")[0] for line in lines] == [
        "MISSED: rate of the best backend, backup: 1 of 2",
        "met: submit of kernel: 2 of 2",
        "MISSED: against SGLang's choice, all layers: 1 of 2",
        "MISSED: auto against the best backend: 1 of 2",
        "MISSED: share of rows with auto within 3 %: 0 of 1",
        "MISSED: auto against the best backend, the device's time alone: 1 of 2",
        "MISSED: share of rows with auto within 3 %, the device's time alone: 0 of 1",
    ]


def test_a_submit_is_judged_without_the_calls_that_it_makes() -> None:
    found: dict[str, Any] = row({"direct": 90, "staged": 90, "kernel": 90}) | {"portion": "descriptors"}
    for cell, submit, own in zip(found["cells"], (250e-6, 600e-6, 70e-6), (50e-6, 400e-6, 20e-6), strict=True):
        cell |= {"submit": {"median_s": submit}, "own_s": own, "held": True}
    waited: dict[str, Any] = row({"direct": 90})  # for room in the queue
    waited["cells"][0] |= {"submit": {"median_s": 9.0}, "own_s": 9.0, "held": False}
    half: dict[str, Any] = row({"staged": 90}) | {"payload_bytes": 2**27}
    half["cells"][0] |= {"own_s": 300e-6, "held": True}
    unknown = row({"staged": 90})
    lines = targets.verdicts({"sessions": [{}], "rows": [found, waited, half, unknown]}, sglang())
    assert [line for line in lines if "taken away" in line] == [
        "met: submit of direct, the calls taken away: 1 of 1; worst 5e-05 s against 0.0001 s "
        "(MHA Llama-8B, page 64 kv, page_head, backup)",
        "MISSED: submit of staged, the calls taken away: 1 of 2; worst 0.0003 s against 0.00025 s "
        "(MHA Llama-8B, page 64 kv, page_head, backup)",
        "met: submit of kernel, the calls taken away: 1 of 1; worst 2e-05 s against 6e-05 s "
        "(MHA Llama-8B, page 64 kv, page_head, backup)",
    ]


def test_auto_is_judged_by_what_lasts_and_by_the_device_alone() -> None:
    found = row({"direct": 100, "kernel": 95, "auto": 100})
    slow = found["payload_bytes"] / 30e9  # the host describes copies at 30 GB/s
    for cell in found["cells"]:
        cell["submit"] = {"median_s": slow if cell["mover"] != "kernel" else 50e-6}
    lines = targets.verdicts({"sessions": [{}], "rows": [found]}, sglang())
    assert [line.split(";")[0] for line in lines if "auto against the best backend" in line] == [
        "MISSED: auto against the best backend: 0 of 1",
        "met: auto against the best backend, the device's time alone: 1 of 1",
    ]


def test_auto_layer_by_layer_is_judged_by_what_others_reach_layer_by_layer() -> None:
    found = row({"direct": 100, "auto": 100, "direct, by layer": 99, "kernel, by layer": 80, "auto, by layer": 88})
    lines = targets.verdicts({"sessions": [{}], "rows": [found]}, sglang())
    told = [line.partition(" (")[0] for line in lines if "auto " in line]
    assert told == [
        f"{verdict}: {target}{how}: {figures}"
        for how in ("", ", the device's time alone")
        for verdict, target, figures in (
            ("met", "auto against the best backend", "1 of 1; worst 1 against 0.9"),
            ("met", "share of rows with auto within 3 %", "1 of 1; worst 1 against 0.95"),
        )
    ] + [
        f"MISSED: {target}, by layer{how}: {figures}"
        for how in ("", ", the device's time alone")
        for target, figures in (
            ("auto against the best backend", "0 of 1; worst 0.8889 against 0.9"),
            ("share of rows with auto within 3 %", "0 of 1; worst 0 against 0.95"),
        )
    ]


@pytest.mark.emulated
def test_single_calls_are_timed_on_runs_that_lie_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    copied: Counter[int] = Counter()
    device = emulated()
    copy = device.copy

    def counted(stream: Any, to: np.ndarray, source: np.ndarray, nbytes: np.ndarray) -> str:
        copied[len(nbytes)] += 1
        return copy(stream, to, source, nbytes)

    monkeypatch.setattr(device, "copy", counted)
    arena = Arena(calls.memory_needed(COUNTS))
    single = calls.measure(clock("emulated"), arena, COUNTS)
    arena.close()
    batches = [("batch", count) for count in COUNTS]
    assert [(call.name, call.count) for call in single] == [*batches, ("launch", 1), ("event", 1)]
    assert all(len(call.submit.samples_s) == calls.SAMPLES for call in single)
    assert copied == dict.fromkeys(COUNTS, 2 + 2 * calls.SAMPLES), "each batch has as many copies as it says"
    begins = np.sort(calls.places(np.random.default_rng(0), 8, 8))
    assert begins.dtype == np.uint64
    assert np.diff(begins).tolist() == [calls.APART * calls.RUN] * 7
    assert begins[-1] + calls.RUN <= calls.memory_needed((8,))
    with pytest.raises(MemoryError):
        calls.measure(clock("emulated"), Arena(calls.memory_needed(COUNTS) - 1), COUNTS)


def test_a_call_is_the_host_time_of_the_second_of_two() -> None:
    class Fixed(HostClock):
        def series(self, start: Start, count: int, submit_s: float) -> Series:
            start()()
            return Series([9.0] * count, [0.5, 0.25][:count], submit_s == 0.5)

    arena = Arena(calls.memory_needed((1,)))
    single = calls.measure(Fixed("emulated"), arena, (1,))
    arena.close()
    assert [(call.submit.median_s, call.held) for call in single] == [(0.25, True)] * 3


def test_a_matmul_is_judged_beside_each_number_of_blocks() -> None:
    slowdowns = {"kernel, 1 block": 0.05, "kernel, 2 blocks": 0.06, "kernel, 4 blocks": 0.07, "kernel, 8 blocks": 0.5}
    beside: dict[str, Any] = row(dict.fromkeys(slowdowns, 90)) | {"portion": "matmul"}
    for cell in beside["cells"]:
        cell["interference"] = {"slowdown": slowdowns[cell["mover"]]}
    assert [line.split(";")[0] for line in targets.verdicts({"sessions": [{}], "rows": [beside]}, sglang())] == [
        "met: slowdown of a matmul by kernel, 1 block: 1 of 1",
        "met: slowdown of a matmul by kernel, 2 blocks: 1 of 1",
        "MISSED: slowdown of a matmul by kernel, 4 blocks: 0 of 1",
    ]


def test_the_table_of_sglang_names_our_cases() -> None:
    figures = sglang()["figures"]
    assert {figure["case"] for figure in figures} == {case.name for case in cases.SGLANG_CASES}
    assert {figure["layout"] for figure in figures} == set(cases.SGLANG_LAYOUTS)
    assert [case.spec.page_bytes % case.spec.components[0].row_bytes for case in cases.SGLANG_CASES] == [0] * 11
    assert all(0 < figure["fraction"] < 1 for figure in figures)


# ---- the arena


@pytest.fixture
def arena() -> Iterator[Arena]:
    made = Arena(3 * ALIGNMENT)
    yield made
    made.close()


def test_an_arena_hands_out_aligned_pieces_until_it_is_full(arena: Arena) -> None:
    first, second = arena.map(10), arena.map(ALIGNMENT)
    assert second.data_ptr() - first.data_ptr() == ALIGNMENT
    assert (first.numel(), second.numel()) == (10, ALIGNMENT)
    with pytest.raises(MemoryError, match="8,192 of them taken, and 4,097 are asked for"):
        arena.map(ALIGNMENT + 1)
    arena.reset()
    assert arena.map(3 * ALIGNMENT).data_ptr() == first.data_ptr()


def test_pools_share_an_arena(arena: Arena) -> None:
    assert isinstance(arena, HostMemory)
    with HostPool(TOY.spec, "page_first", 2, memory=arena) as pool:
        assert pool.layer_view("k", 0).data_ptr() == arena._whole.data_ptr()
        assert not arena.pinned or arena._whole.is_pinned()
    assert not arena.pinned or arena._whole.is_pinned()
    assert arena._whole.dtype == torch.uint8


def test_a_closed_arena_has_nothing_left(arena: Arena) -> None:
    arena.close()
    arena.close()
    with pytest.raises(MemoryError):
        arena.map(1)
