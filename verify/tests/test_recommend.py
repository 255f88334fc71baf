"""Advice follows from samples: what lasts counts, noise decides nothing, and one pair serves all pools."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from refimpl import presets, support
from refimpl.support import DIRECTIONS
from verify.bench.gpu import here, recommend
from verify.bench.gpu.cases import MODELS, name_of
from verify.bench.gpu.nearest import nearest, sentence
from verify.bench.gpu.recommend import Way, advice, choose, crossover, lacking, pairs, rows_of, rows_of_model, ways
from verify.bench.noise import FLOOR, Fraction, fraction

BYTES = 10**9
Times = dict[tuple[str, str], tuple[float, float]]  # (layout, backend) -> seconds of the device, and of the host


def timing(median: float, spread: float = 0.0) -> dict[str, Any]:
    return {"median_s": median, "quartiles_s": [median * (1 - spread), median * (1 + spread)]}


def row(pool: str, direction: str, layout: str, cells: dict[str, tuple[float, float]], **more: Any) -> dict[str, Any]:
    made: list[dict[str, Any]] = [
        {"mover": backend, "status": "measured", "timing": timing(device), "submit": timing(host), "interference": None}
        for backend, (device, host) in cells.items()
    ]
    made.append({"mover": "staged", "status": "refused", "timing": None, "submit": None, "interference": None})
    for cell in made:
        cell["backend"] = cell["mover"]
    page_bytes = presets.model("qwen3-next")[pool].page_bytes
    fixed = {"session": 0, "portion": "core", "case": "qwen3-next", "scattered": True, "runs": []}
    of_row = {"pool": pool, "direction": direction, "layout": layout, "payload_bytes": BYTES, "page_bytes": page_bytes}
    return fixed | of_row | {"cells": made} | more


def results(*rows: dict[str, Any]) -> dict[str, Any]:
    """A plain copy of the same bytes takes a second."""
    plain = [
        {"direction": d, "payload_bytes": BYTES, "timing": timing(1.0), "gb_per_s": 1.0} for d in ("backup", "load")
    ]
    return {"sessions": [{"ceilings": plain}], "rows": list(rows)}


def way(
    backend: str, value: float, host_s: float = 0.0, lost_s: float = 0.0, pool: str = "kv", direction: str = "load"
) -> Way:
    return Way(pool, direction, "page_first", backend, Fraction(value, value, value), value, host_s, lost_s, False)


def test_the_slower_of_device_and_host_counts() -> None:
    content = results(row("kv", "load", "page_first", {"direct": (2.0, 4.0), "kernel": (2.0, 0.1)}))
    direct, kernel = ways(content, content["rows"])
    assert (direct.fraction.value, direct.host_bound) == (0.25, True)
    assert (kernel.fraction.value, kernel.host_bound) == (0.5, False)
    assert (direct.gb_per_s, direct.submit_s) == (0.25, 4.0)


def test_quartiles_of_transfer_and_plain_copy_are_both_in_the_spread() -> None:
    found = fraction(timing(2.0, 0.5), BYTES, timing(1.0, 0.1), BYTES)
    assert (found.low, found.value, found.high) == pytest.approx((0.9 / 3, 0.5, 1.1))


def test_a_plain_copy_of_other_bytes_is_scaled() -> None:
    assert fraction(timing(2.0), BYTES, timing(1.0), 2 * BYTES).value == 0.25


@pytest.mark.parametrize(
    ("value", "taken"),
    [(1 - FLOOR / 2, "kernel"), (1 - 2 * FLOOR, "direct")],
    ids=["level, and the call is cheaper", "behind, however cheap"],
)
def test_noise_decides_nothing(value: float, taken: str) -> None:
    choice = choose([way("direct", 1.0, host_s=1.0), way("kernel", value, host_s=0.1)])
    assert choice.taken.backend == taken
    assert choice.fastest.backend == "direct"
    assert len(choice.level) == (2 if taken == "kernel" else 1)
    assert (choice.behind is None) == (taken == "kernel")


def test_of_level_ways_the_one_is_advised_that_takes_least_of_host_and_model() -> None:
    level = [way("kernel", 1.0, host_s=0.1, lost_s=2.0), way("staged", 1.0, host_s=0.5), way("direct", 1.0, host_s=1.0)]
    assert choose(level).taken.backend == "staged"


def test_what_a_model_loses_is_that_of_the_fastest_blocks_for_as_long_as_bytes_move() -> None:
    beside = row("kv", "load", "page_first", {"kernel, 1 block": (1.0, 0.1), "kernel, 4 blocks": (1.0, 0.1)})
    for cell, rate, slowdown in zip(beside["cells"], (20.0, 50.0), (0.1, 0.4), strict=False):
        cell |= {"backend": "kernel", "interference": {"gb_per_s": rate, "slowdown": slowdown}}
    content = results(row("kv", "load", "page_first", {"kernel": (2.0, 0.1), "direct": (2.0, 0.1)}), beside)
    assert recommend.losses(content) == {("kernel", "load"): 0.4}
    kernel, direct = ways(content, content["rows"][:1])
    assert (kernel.lost_s, direct.lost_s) == (pytest.approx(0.8), 0.0)


def test_one_pair_for_all_pools_is_the_one_that_takes_the_least_time() -> None:
    """kernel is best nowhere, and never far behind; direct is best in one pool and poor in the other."""
    found = [
        *(way("direct", 1.0, pool="kv", direction=d) for d in ("backup", "load")),
        *(way("kernel", 0.8, pool="kv", direction=d) for d in ("backup", "load")),
        *(way("direct", 0.2, pool="mamba", direction=d) for d in ("backup", "load")),
        *(way("kernel", 0.8, pool="mamba", direction=d) for d in ("backup", "load")),
        way("staged", 1.0, pool="mamba"),
    ]
    able = {pair.backend: pair for pair in pairs(found)}
    assert set(able) == {"direct", "kernel"}, "a pair must work for every pool and direction"
    # Four equal shares of the best time: 4 units; kernel takes 1.25 + 1.25 + 1 + 1.25.
    assert able["kernel"].fraction.value == pytest.approx(4 / 4.75)
    assert able["direct"].fraction.value == pytest.approx(4 / (1 + 1 + 4 + 5))
    worst, share = able["direct"].least
    assert (worst.pool, worst.direction, share) == ("mamba", "load", pytest.approx(0.2))
    assert choose(list(able.values())).taken.backend == "kernel"


def test_rows_of_a_model_are_found_by_the_bytes_of_its_pages() -> None:
    small = presets.model("qwen3-next", page_size=16)["kv"].page_bytes
    cells = {"direct": (1.0, 0.1)}
    content = results(
        row("kv", "load", "page_first", cells),
        row("mamba", "load", "page_first", cells),
        row("kv", "load", "page_first", cells, case="qwen3-next, page 16", portion="pages", page_bytes=small),
        row("kv", "load", "page_first", cells, portion="contiguous", scattered=False),
        row("kv", "load", "page_first", cells, portion="blocks"),
        row("kv", "load", "page_first", cells, case="qwen3-next-80b"),
    )
    native, states, other, consecutive, *_ = content["rows"]
    assert rows_of(content, "qwen3-next") == [native, states]
    assert rows_of(content, "qwen3-next", 16) == [states, other]
    assert rows_of(content, "qwen3-next", scattered=False) == [consecutive]
    assert rows_of(content, "qwen3-next", layouts=("page_head",)) == []
    assert rows_of_model(content, "qwen3-next") == [native, states, other, consecutive]


def test_advice_names_pairs_margins_and_what_is_level() -> None:
    cells = {"direct": (2.0, 0.1), "kernel": (1.0, 0.1), "auto": (1.25, 0.1)}
    content = results(
        *(row("kv", direction, "page_first", cells) for direction in ("backup", "load")),
        *(row("kv", direction, "page_unified", {"direct": (1.01, 0.5)}) for direction in ("backup", "load")),
    )
    content["rows"][0]["cells"][1]["interference"] = {"slowdown": 0.25, "gb_per_s": 1.0}
    backup, load, both, absent, auto, beside = advice(content, content["rows"])
    assert absent.startswith("mamba backup, mamba load: not measured with such pages")
    assert backup.startswith("kv backup: take page_first with kernel: 1.0 GB/s, 100.0% (100.0% to 100.0%) of the")
    assert "Level within noise: direct in page_unified. Behind: page_first with direct, 0.50 of the fastest." in load
    assert "The fastest" not in load, "it is the one that is advised"
    assert both.startswith("kv both ways: take page_first with kernel: 100.0% (100.0% to 100.0%) of what the best")
    assert "takes 100,000 µs of the host, and a matmul beside it 250,000 µs longer" in backup
    assert beside == "while bytes move, a matmul loses of its rate (medians): kernel backup 25.0%"
    assert "80.0% of the rate of the best backend in the same layout (median of 2)" in auto


def test_advice_says_why_it_is_not_the_fastest() -> None:
    """kernel is level with direct, and takes less of host and model."""
    cells = {"direct": (1.0, 0.5), "kernel": (1.01, 0.1)}
    content = results(*(row("kv", direction, "page_first", cells) for direction in DIRECTIONS))
    content["rows"][0]["cells"][0]["interference"] = {"slowdown": 0.25, "gb_per_s": 1.0}
    backup, load, both, *_ = advice(content, content["rows"])
    why = (
        "The fastest figure is that of page_first with direct, 100.0%, but noise does not tell it from what is "
        "advised, which takes less of the host and of a matmul beside it:"
    )
    for text, taking, its, mine in (
        (backup, "a transfer", "750,000", "100,000"),
        (load, "a transfer", "500,000", "100,000"),
        (both, "a transfer of each pool each way", "1,250,000", "200,000"),
    ):
        assert f"{why} {mine} µs for {taking}, not {its} µs. " in text


def test_advice_on_all_pools_is_given_where_all_were_measured_both_ways() -> None:
    cells = {"direct": (1.0, 0.1)}
    whole = [row(pool, direction, "page_first", cells) for pool in ("kv", "mamba") for direction in DIRECTIONS]
    content = results(*whole)
    assert "all 2 pools both ways: take page_first with direct" in " ".join(advice(content, whole))
    del whole[-1]
    told = advice(content, whole)
    assert any(line.startswith("mamba load: not measured with such pages") for line in told)
    assert not any(line.startswith("all") for line in told)


def test_a_pool_without_bytes_lacks_nothing() -> None:
    specs = presets.model("deepseek-v4-flash")
    names = [name for name, spec in specs.items() if spec.page_bytes]
    assert "kv" in specs.keys() - set(names), "the anchor of a V4 stack"
    found = [way("direct", 1.0, pool=name, direction=direction) for name in names for direction in DIRECTIONS]
    assert lacking(found, specs.values()) == []


def test_nothing_measured_is_no_advice() -> None:
    content = results(row("kv", "load", "page_first", {}))
    assert advice(content, content["rows"]) == []


def measured(
    *models: str, layouts: tuple[str, ...] = ("page_first", "page_head"), page_size: int | None = None
) -> dict[str, Any]:
    """Results of some models: every pool both ways, in each layout slower than in the one before."""
    of_pools = [
        row("kv", direction, layout, {"kernel": (seconds, 0.1)})
        | {"case": name_of(model, page_size), "pool": name, "page_bytes": spec.page_bytes}
        for model in models
        for name, spec in presets.model(model, page_size=page_size).items()
        for direction in ("backup", "load")
        for seconds, layout in enumerate(layouts, 1)
        if spec.page_bytes and support(spec, layout, "kernel", direction, "cuda")
    ]
    return results(*of_pools)


@pytest.mark.parametrize(
    ("model", "among", "found"),
    [
        ("llama-3.1-8b", ("deepseek-v3", "gpt-oss-20b"), "gpt-oss-20b"),  # family before runs
        ("llama-3.1-8b", ("gpt-oss-120b", "nemotron-h"), "nemotron-h"),  # runs before pages
        ("qwen3-8b", ("llama-3.1-70b", "llama-3.1-8b", "qwen3-32b"), "llama-3.1-8b"),  # of equal runs, pages
        ("nemotron-h", ("llama-3.1-8b", "qwen3-next"), "qwen3-next"),  # it has states, too
        ("deepseek-v3.2", ("qwen3-next", "deepseek-v3", "deepseek-v4-flash"), "deepseek-v3"),  # one of two families
        ("mimo-like", ("llama-3.1-8b", "deepseek-v3"), "deepseek-v3"),  # of no family
        ("deepseek-v4-pro", ("deepseek-v3", "deepseek-v4-flash", "qwen3-next"), "deepseek-v4-flash"),
    ],
)
def test_the_nearest_model_has_the_families_then_the_runs_then_the_pages(
    model: str, among: tuple[str, ...], found: str
) -> None:
    near = nearest(measured(*among), presets.model(model).values())
    assert near
    assert near.model == found


def test_the_nearest_model_is_named_with_its_pair_and_the_reason() -> None:
    content = measured("llama-3.1-8b", "deepseek-v3")
    assert sentence(content, presets.model("qwen3-8b").values()) == (
        "nearest is llama-3.1-8b, for which page_first with kernel is best: it has pools of the same families; "
        "furthest apart in that layout are kv and its kv, with runs of 2 KiB and 2 KiB, pages of 9 MiB and 8 MiB"
    )
    assert "runs of 256 B and 256 B" in sentence(content, presets.model("qwen3-8b").values(), ("page_head",))
    assert sentence(content, presets.model("deepseek-v3.2").values()) == (
        "nearest is deepseek-v3, for which page_first with kernel is best: it has no pool of family dsa; furthest "
        "apart in that layout are indexer and its kv, with runs of 8.25 KiB and 1.12 KiB, pages of 503 KiB and 4.29 MiB"
    )


def test_of_a_near_model_only_pools_of_families_asked_for_have_a_say() -> None:
    """Its states are far slower in page_first_direct, so both of its pools together are best in page_first."""
    content = measured("qwen3-next", layouts=("page_first_direct", "page_first"))
    for row in content["rows"]:
        if (row["pool"], row["layout"]) == ("mamba", "page_first_direct"):
            row["cells"][0]["timing"] = timing(9.0)
    both = nearest(content, presets.model("qwen3-next").values())
    assert both
    assert (both.taken.layout, both.alone) == ("page_first", ())
    asked = presets.model("gpt-oss-20b").values()
    alone = nearest(content, asked)
    assert alone
    assert (alone.taken.layout, alone.alone) == ("page_first_direct", ("kv",))
    assert sentence(content, asked) == (
        "nearest is qwen3-next, for whose kv alone page_first_direct with kernel is best: it has pools of the same "
        "families, and in that layout runs and pages are as long as its own"
    )


def test_where_a_near_model_has_no_family_that_is_asked_for_all_its_pools_have_a_say() -> None:
    near = nearest(measured("qwen3-next"), presets.model("deepseek-v3").values())
    assert near
    assert (near.taken.layout, near.alone) == ("page_first", ())
    assert {other.pool for _, other in near.beside} <= {"kv", "mamba"}


def test_no_model_is_near_that_has_no_pair_for_the_pools() -> None:
    heads = measured("llama-3.1-8b", layouts=("page_head",))
    assert nearest(heads, presets.model("deepseek-v3").values()) is None
    assert nearest(heads, presets.model("qwen3-8b").values(), ("page_first",)) is None
    assert nearest(results(), presets.model("qwen3-8b").values()) is None
    assert nearest(heads, []) is None


@pytest.mark.parametrize(
    ("model", "layouts", "page_size", "reason"),
    [
        ("deepseek-v3", ("page_head",), 16, "no measured model has a pair that these pools can have"),
        ("qwen3-8b", ("page_first",), 16, "nothing was measured in these layouts, with such pages"),
        ("qwen3-8b", ("page_head",), 32, "nothing was measured in these layouts, with such pages"),
    ],
    ids=["no pair", "no layout", "no pages"],
)
def test_why_no_model_is_near(model: str, layouts: tuple[str, ...], page_size: int, reason: str) -> None:
    heads = measured("llama-3.1-8b", layouts=("page_head",), page_size=16)
    assert sentence(heads, presets.model(model, page_size=page_size).values(), layouts, page_size).startswith(reason)


@pytest.mark.parametrize(
    ("model", "sizes", "found", "page_bytes"),
    [
        ("llama-3.1-8b", (None, 16), "llama-3.1-8b, page 16", 2 << 20),
        ("llama-3.1-8b", (16,), "llama-3.1-8b, page 16", 2 << 20),
        ("llama-3.1-8b", (None,), "llama-3.1-8b", 8 << 20),
        ("qwen3-next", (None,), "qwen3-next", 3 << 19),  # its states are the same with either
        ("deepseek-v4-flash", (None,), "deepseek-v4-flash", 34560),  # it cannot have others
    ],
)
def test_a_near_model_has_the_pages_asked_for_where_all_its_pools_were_measured_so(
    model: str, sizes: tuple[int | None, ...], found: str, page_bytes: int
) -> None:
    content = results(*(row for size in sizes for row in measured(model, page_size=size)["rows"]))
    near = nearest(content, presets.model("qwen3-8b", page_size=16).values(), page_size=16)
    assert near
    assert near.model == found
    assert [other.page_bytes for _, other in near.beside] == [page_bytes]


def test_a_measured_model_is_nearest_to_itself() -> None:
    content = json.loads(here.committed("bench").read_text(encoding="utf-8"))
    found = {model: nearest(content, presets.model(model).values()) for model in MODELS}
    assert {model: near and near.model for model, near in found.items()} == {model: model for model in MODELS}
    assert {near and near.distance for near in found.values()} == {(0, 0, 0)}


@pytest.mark.parametrize(
    ("rate", "runs"),
    [
        ({1024: 1.0, 4096: 4.0}, 2048.0),
        ({1024: 2.0, 4096: 2.0}, 0.0),
        ({1024: 9.0, 4096: 1.0}, math.inf),
        ({1024: 1.0, 4096: 4.0, 16384: 1.0, 65536: 4.0}, 32768.0),
        ({2048: 9.0}, math.inf),
    ],
    ids=["rises above", "never below", "falls below", "counts the last time", "nothing in common"],
)
def test_crossover(rate: dict[int, float], runs: float) -> None:
    assert crossover(rate, dict.fromkeys((1024, 4096, 16384, 65536), 2.0)) == pytest.approx(runs)


def test_curves_are_by_number_and_length_of_runs() -> None:
    cells = {"direct": (2.0, 0.1), "kernel": (1.0, 0.1)}
    runs = [{"bytes": 512, "count": 64}]
    content = results(row("kv", "load", "layer_first", cells, portion="descriptors", runs=runs))
    assert recommend.curves(content) == {("load", "direct"): {64: {512: 0.5}}, ("load", "kernel"): {64: {512: 1.0}}}


def test_a_folder_has_results_of_some_kinds(tmp_path: Path) -> None:
    """What `make run` measured lies in one; every notebook asks it for its own kind."""
    content = json.loads(here.committed("bench").read_text(encoding="utf-8"))
    content["rows"] = content["rows"][:1]
    (tmp_path / "bench.json").write_text(json.dumps(content), encoding="utf-8")
    assert here.shown("bench", str(tmp_path)) == (tmp_path / "bench.json", content)
    assert here.shown("overlap", str(tmp_path))[0] == here.committed("overlap")


def test_committed_results_are_shown_where_a_file_is_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert here.shown("bench")[0] == here.shown("bench", "committed")[0] == here.committed("bench")
    path, content = here.shown("bench", "committed")
    assert here.label(path, content).startswith("committed results, data/results/h200/bench.json: NVIDIA H200; ")


@pytest.mark.slow
@pytest.mark.emulated
def test_a_machine_is_measured_by_the_command_that_anybody_can_give(tmp_path: Path) -> None:
    path = tmp_path / "out" / "bench.json"
    small: dict[str, Any] = {"payload": 1 << 17, "layouts": ("page_first",), "portions": ("pages",)}
    here.measure_bench(path, ("llama-3.1-8b",), 2, budget_s=60, platform="emulated", **small)
    _, content = here.shown("bench", str(path))
    rows = recommend.rows_of(content, "llama-3.1-8b", 2)
    assert [(row["pool"], row["layout"], row["direction"]) for row in rows] == [
        ("kv", "page_first", "backup"),
        ("kv", "page_first", "load"),
    ]
    assert advice(content, rows)[0].startswith("kv backup: take page_first with ")
    assert here.label(path, content).startswith("this machine: ")
    with pytest.raises(RuntimeError, match="there is no model 'llama-9'"):
        here.measure_bench(path, ("llama-9",))
