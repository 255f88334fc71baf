"""SGLang's own transfers as they are timed, without a GPU: which functions are called, with what, and what is kept.

Stand-ins move the bytes (`verify/sglang_stand_in.py`), the oracle judges them.
"""

from __future__ import annotations

import json
import re
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from refimpl import slots_of
from refimpl.host_buffers import HostBuffers
from refimpl.pinned import HostMemory
from refimpl.support import DIRECTIONS
from verify.adapters import sglang_functions, sglang_pieces
from verify.adapters.protocol import Json
from verify.adapters.sglang_memory import bundles
from verify.arena import Arena
from verify.bench.gpu import cases, here, results, targets
from verify.bench.gpu.clock import HostClock, Series, Start
from verify.bench.gpu.measure import Bench, Effort, memory_needed
from verify.bench.gpu.rig import Rig, Stage
from verify.bench.gpu.sglang import __main__ as program
from verify.bench.gpu.sglang import measure
from verify.bench.gpu.sglang.calls import InPlace, Prepared, described, lists, transfer
from verify.bench.provenance import ROOT
from verify.sglang_stand_in import StandIn

EFFORT = Effort(seconds=0, repeats=(2, 3))
CLOCK = HostClock()
SIZES = (2000, 4000)
# The copy that mutants are built into has no results: tests that are to catch them ask for `BOTH_WAYS`.
PUBLISHED = results.sglang()["figures"] if results.SGLANG.exists() else []
FIGURES = measure.wanted(PUBLISHED)
CELL = ("case", "layout", "direction", "path")
BOTH_WAYS = [
    {"case": "MLA DeepSeek-V3, page 64", "layout": "page_first", "direction": direction, "path": "AOT", "chosen": False}
    for direction in DIRECTIONS
]
# As SGLang has them, less most of their layers and pages.
SMALL = {case.name: replace(case, spec=replace(case.spec, layers=3), pages=3) for case in cases.SGLANG_CASES}


class Noted(StandIn):
    """Notes what is called, and then does it."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Json]] = []

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        return self.noted(name, found) if name.startswith("transfer_") else found

    def __getattr__(self, name: str) -> Callable[..., Any]:
        found = super().__getattr__(name)
        return self.noted(name, found) if name.startswith("transfer_") else found

    def noted(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def called(*given: Any, **named: Any) -> None:
            self.calls.append((name, named))
            function(*given, **named)

        return called


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> Noted:
    kernels = Noted()
    monkeypatch.setattr(sglang_pieces, "piece", lambda _: kernels)
    return kernels


@cache
def stage(case: str, layout: str) -> Stage:
    return Stage(Rig(SMALL[case].spec, 3, True, "cpu", 0), layout)


def cell(figure: Json) -> str:
    return ", ".join(figure[name] for name in CELL)


every_figure = pytest.mark.parametrize("figure", FIGURES, ids=cell)


def host_of(at: Stage) -> HostBuffers:
    return HostBuffers(at.rig.spec, at.layout, at.rig.num_pages, HostMemory(), None)


# ---- what is called


def function(figure: Json) -> str:
    """The one that SGLang's pools call for this path."""
    mla = "" if figure["case"].startswith("MHA") else "_mla"
    backup, layout = figure["direction"] == "backup", figure["layout"]
    short = {"page_first": "pf", "page_head": "ph"}.get(layout, "")
    way = short and (f"_lf_{short}" if backup else f"_{short}_lf")
    return {
        "AOT": f"transfer_kv_{'all' if backup else 'per'}_layer{mla}{way}",
        "AOT per layer": "transfer_kv_per_layer_mla",
        "JIT": f"transfer_hicache_{'all' if backup else 'one'}_layer{mla}",
        "TMA": f"transfer_hicache_{'all' if backup else 'one'}_layer{mla}",
        "Mamba kernel": f"transfer_kv_mamba{way}",
        "staged": f"transfer_hicache_all_layer{mla}_staged_lf_pf",
        "direct": (
            "transfer_kv_direct"
            if layout == "layer_first"
            else f"transfer_kv_{'all_layer_direct_lf_pf' if backup else 'per_layer_direct_pf_lf'}"
        ),
    }[figure["path"]]


@every_figure
def test_each_row_calls_its_function_once_or_once_a_layer_and_moves_the_right_bytes(figure: Json, noted: Noted) -> None:
    at = stage(figure["case"], figure["layout"])
    host = host_of(at)
    at.fill(host, figure["direction"])
    transfer(figure, host, at.rig.work, at.at, "cpu")()
    assert not at.fault(host, figure["direction"])
    once = figure["direction"] == "backup" and figure["path"] != "AOT per layer"
    assert [name for name, _ in noted.calls] == [function(figure)] * (1 if once else 3)


@every_figure
def test_how_much_of_the_device_is_used_is_left_to_sglang(figure: Json, noted: Noted) -> None:
    at = stage(figure["case"], figure["layout"])
    transfer(figure, host_of(at), at.rig.work, at.at, "cpu")()
    for _, named in noted.calls:
        assert not {"block_quota", "num_warps_per_block", "unroll"} & named.keys()
        if figure["path"] in ("JIT", "TMA"):  # the page size tells one from the other
            assert named["page_size"] == {"JIT": 1, "TMA": None}[figure["path"]]


@every_figure
def test_lists_lie_where_the_function_reads_them_and_name_the_same_pairs(figure: Json) -> None:
    spec = SMALL[figure["case"]].spec
    (bundle,) = bundles(described(spec, 4), figure["layout"])
    at = slots_of([2, 0, 3], spec.page_size), slots_of([1, 3, 0], spec.page_size)
    host, device = lists(bundle, at, figure, "meta")
    read_on_host = {"staged": (True, False), "direct": (True, True)}.get(figure["path"], (False, False))
    assert (not host.is_meta, not device.is_meta) == read_on_host
    host, device = lists(bundle, at, figure, "cpu")
    pages = {side: (rows[:: bundle.page] // bundle.page).tolist() for side, rows in (("h", host), ("d", device))}
    sorted_first = (figure["path"], figure["layout"]) == ("direct", "layer_first")
    assert pages == ({"h": [0, 2, 3], "d": [3, 1, 0]} if sorted_first else {"h": [2, 0, 3], "d": [1, 3, 0]})


@every_figure
def test_a_second_transfer_makes_no_view_and_no_table(
    figure: Json, noted: Noted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A table that is sent to the device while the stream is held would wait until it is not."""
    made: list[object] = []

    def counted(of: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *given: made.append(of) or of(*given)

    monkeypatch.setattr(sglang_functions, "addresses", counted(sglang_functions.addresses))
    monkeypatch.setattr(InPlace, "_bytes", counted(InPlace._bytes))
    at = stage(figure["case"], figure["layout"])
    run = transfer(figure, host_of(at), at.rig.work, at.at, "cpu")
    run()
    first = len(made)
    run()
    assert first
    assert len(made) == first


def test_only_the_two_sides_of_a_call_have_tables(noted: Noted) -> None:
    at = stage("MHA Llama-8B, page 64", "layer_first")
    (bundle,) = bundles(described(at.rig.spec, at.rig.num_pages), at.layout)
    memory = InPlace(host_of(at), at.rig.work, "cpu")
    call = Prepared(bundle, memory, *at.at, range(3))
    tables = [[table.tolist() for table in call.addresses(side)] for side in (call.device, call.host)]
    assert tables == [[[layer.data_ptr() for layer in part] for part in side] for side in (call.device, call.host)]
    with pytest.raises(ValueError, match=r"^a table of 2 layers of k: only the lists `device` and `host` of the call"):
        call.addresses([part[:1] for part in call.device])


# ---- which rows


def test_every_choice_of_sglang_is_measured_and_what_findings_hold_against_it() -> None:
    beside = {cell(figure) for figure in FIGURES if not figure["chosen"]}
    assert [f for f in FIGURES if f["chosen"]] == [f for f in PUBLISHED if f["chosen"]]
    assert beside >= {
        *(f"{name}, page 1, page_first, backup, AOT" for name in ("MHA Llama-8B", "MLA DeepSeek-V3")),
        *(
            f"{name} rows of 8,448 B, {layout}, load, TMA"
            for name in ("V4-like", "DSA index")
            for layout in ("layer_first", "page_first")
        ),
    }
    assert len(beside) < 10


# ---- what is kept


def portion(figures: list[Json]) -> cases.Portion:
    named = [SMALL[name] for name in dict.fromkeys(figure["case"] for figure in figures)]
    return replace(cases.portions(cases.MIB)["sglang"], cases=tuple(named))


def written(
    kernels: StandIn, out: Path, figures: list[Json], clock: HostClock = CLOCK, effort: Effort = EFFORT
) -> Json:
    """The file that the program writes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sglang_pieces, "piece", lambda _: kernels)
        content = program.run(out, clock, portion(figures), figures, effort, SIZES)
    assert read(out) == content
    jsonschema.validate(content, read(results.SGLANG_FORM.schema))
    return content


def read(file: Path) -> Json:
    return json.loads(file.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory) -> Json:
    return written(StandIn(), tmp_path_factory.mktemp("sglang") / "rates.json", FIGURES)


def test_every_row_is_measured_once(content: Json) -> None:
    assert sorted(map(cell, content["rows"])) == sorted(map(cell, FIGURES))
    assert {row["status"] for row in content["rows"]} == {"measured"}, [row["reason"] for row in content["rows"]]


def test_every_figure_follows_from_the_samples(content: Json) -> None:
    limits = {c["direction"]: c["gb_per_s"] for c in content["ceilings"] if c["payload_bytes"] == max(SIZES)}
    for row in content["rows"]:
        assert row["payload_bytes"] == 3 * SMALL[row["case"]].spec.page_bytes
        median_s = statistics.median(row["timing"]["samples_s"])
        assert row["gb_per_s"] == pytest.approx(row["payload_bytes"] / median_s / 1e9)
        assert row["fraction"] == pytest.approx(row["gb_per_s"] / limits[row["direction"]])


def test_a_row_is_held_against_the_copy_in_its_own_direction(noted: Noted) -> None:
    limits = {"backup": 2.0, "load": 3.0, "both": 4.0}
    ceilings = [{"direction": way, "payload_bytes": 1, "gb_per_s": rate} for way, rate in limits.items()]
    arena = Arena(memory_needed([portion(BOTH_WAYS)]))
    found = list(measure.rows(Bench(CLOCK, arena, EFFORT, 0, 0, ceilings), portion(BOTH_WAYS), BOTH_WAYS))
    assert [row.direction for row in found] == [*DIRECTIONS]
    for row in found:
        assert row.gb_per_s
        assert row.fraction == pytest.approx(row.gb_per_s / limits[row.direction])


class Noting(HostClock):
    """Notes the host time that a series is expected to take."""

    submit_s = 0.0

    def series(self, start: Start, count: int, submit_s: float) -> Series:
        self.submit_s = submit_s
        return super().series(start, count, submit_s)


@pytest.mark.parametrize(("first_s", "count"), [(0.001, 10), (0.013, 4), (0.1, 3), (0.15, 3), (0.16, 2)])
def test_samples_are_as_many_as_the_effort_allows(first_s: float, count: int) -> None:
    clock, effort = Noting(), Effort(seconds=0.06, slow_s=0.15, repeats=(3, 10))
    series = effort.series(clock, lambda: lambda: None, Series([first_s], [0.002], None))
    assert len(series.samples_s) == count
    assert clock.submit_s == pytest.approx(count * 0.002)


@pytest.mark.parametrize(("slow_s", "count"), [(0.0, 2), (60.0, 3)])
def test_a_slow_row_is_timed_twice_and_no_more(slow_s: float, count: int, tmp_path: Path) -> None:
    effort = Effort(seconds=0, slow_s=slow_s, repeats=(3, 5))
    (row,) = written(StandIn(), tmp_path / "rates.json", BOTH_WAYS[:1], effort=effort)["rows"]
    assert len(row["timing"]["samples_s"]) == count


class Lost(HostClock):
    """Of a device that does not recover."""

    def finish(self) -> None:
        raise RuntimeError("the device is lost")


def test_a_device_that_does_not_recover_ends_the_session_and_its_row_is_kept(tmp_path: Path) -> None:
    out = tmp_path / "rates.json"
    with pytest.raises(RuntimeError, match="the device is lost"):
        written(StandIn(), out, BOTH_WAYS, Lost())
    (row,) = read(out)["rows"]
    assert (row["status"], row["reason"]) == ("failed", "RuntimeError: the device is lost")


class Tires(StandIn):
    """Moves the layers of so many transfers, and then nothing."""

    def __init__(self, transfers: int) -> None:
        self.left = 3 * transfers

    def transfer_hicache_one_layer_mla(self, **named: Any) -> None:
        if self.left:
            super().transfer_hicache_one_layer_mla(**named)
            self.left -= 1


class Raises(StandIn):
    def transfer_hicache_one_layer_mla(self, **_: Any) -> None:
        raise RuntimeError("no")


@pytest.mark.parametrize(
    ("kernels", "status", "reason"),
    [
        (Tires(0), "wrong", r"byte [\d,]+ of device tensor 0 is 0xa5, not 0x.."),
        (Tires(1), "wrong", r"after timing: byte [\d,]+ of device tensor 0 is 0xa5, not 0x.."),
        (Raises(), "failed", "RuntimeError: no"),
    ],
)
def test_a_row_that_does_not_arrive_is_told_and_the_others_go_on(
    kernels: StandIn, status: str, reason: str, tmp_path: Path
) -> None:
    loads = [f for f in FIGURES if (f["case"], f["direction"]) == ("MLA DeepSeek-V3, page 64", "load")]
    found = {row["path"]: row for row in written(kernels, tmp_path / "rates.json", loads[:1] + loads[2:])["rows"]}
    assert found["TMA"]["status"] == status
    assert re.fullmatch(reason, found["TMA"]["reason"])
    assert found["direct"]["status"] == "measured"


def test_a_path_that_cannot_be_had_here_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StandIn, "can_use_write_back_jit_kernel", lambda *_, **__: False, raising=False)
    (staged,) = (f for f in FIGURES if (f["case"], f["path"]) == ("DSA index rows of 8,448 B", "staged"))
    (row,) = written(StandIn(), tmp_path / "rates.json", [staged])["rows"]
    assert row["reason"] == "ValueError: staged: its kernel for rows of 8448 bytes does not build or fit here"


def test_without_sglang_or_a_gpu_nothing_is_measured(tmp_path: Path) -> None:
    if program.why_not_here() is None:
        pytest.skip("this machine has both")
    command = ["-m", "verify.bench.gpu.sglang", "--out", str(tmp_path / "rates.json")]
    done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2
    assert done.stderr.strip() == program.why_not_here()
    assert not [*tmp_path.iterdir()]


# ---- our backends against it


def judged(beside: Path) -> dict[str, str]:
    """What is said of our committed results, by target."""
    content = read(here.committed("bench"))
    content["rows"] = [row for row in content["rows"] if row["portion"] == "sglang"]
    lines = [line.split(": ", 2) for line in targets.verdicts(content, results.sglang(beside))]
    return {target: f"{verdict}: {rest}" for verdict, target, rest in lines if target.startswith("against")}


NOT_MOVED = {"status": "failed", "reason": "raised", **dict.fromkeys(("held", "timing", "gb_per_s", "fraction"))}


def test_our_backends_are_judged_against_what_was_measured_on_the_same_gpu(content: Json, tmp_path: Path) -> None:
    bench, rates = tmp_path / "bench.json", tmp_path / results.SGLANG_HERE
    fractions = {cell(figure): figure["fraction"] for figure in PUBLISHED}
    as_published = [row | {"fraction": fractions[cell(row)]} for row in content["rows"]]
    published = judged(bench)
    assert [*published] == [f"against SGLang's choice, {how}" for how in ("all layers", "by layer")]
    rates.write_text(json.dumps(content | {"rows": as_published}), encoding="utf-8")
    both = judged(bench)
    again = {target.replace("choice", "choice, measured here"): said for target, said in published.items()}
    assert both == published | again
    slow = [row | {"fraction": row["fraction"] / 100} for row in as_published[:-1]]
    failed = [row | NOT_MOVED for row in as_published[-1:]]
    rates.write_text(json.dumps(content | {"rows": slow + failed}), encoding="utf-8")
    assert {said.split(":")[0] for target, said in judged(bench).items() if "here" in target} == {"met"}


def require_whole(content: Json) -> None:
    """A file may be on record that follows its schema and has every choice of SGLang's."""
    jsonschema.validate(content, read(results.SGLANG_FORM.schema))
    absent = {cell(f) for f in PUBLISHED if f["chosen"]} - {cell(row) for row in content["rows"]}
    assert not absent, f"no row of {'; '.join(sorted(absent))}"


def test_what_is_on_record_is_whole(content: Json) -> None:
    on_record = sorted((ROOT / "data" / "results").glob(f"*/{results.SGLANG_HERE}"))
    for found in [content, *map(read, on_record)]:
        require_whole(found)


def test_a_file_that_lacks_a_choice_or_a_figure_is_not_whole(content: Json) -> None:
    first, *others = content["rows"]
    with pytest.raises(AssertionError, match=f"^no row of {re.escape(cell(first))}\n"):
        require_whole(content | {"rows": others})
    with pytest.raises(jsonschema.ValidationError, match="None is not of type 'number'"):
        require_whole(content | {"rows": [first | {"fraction": None}, *others]})
