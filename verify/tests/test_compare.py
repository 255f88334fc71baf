"""Two result files side by side: what differs, what is noise, what cannot be compared."""

from __future__ import annotations

import json
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from verify import cli
from verify.bench import compare, measure, results
from verify.bench.gpu import __main__ as gpu_program
from verify.bench.gpu import matmul
from verify.bench.gpu.cases import Case, Mover, Portion
from verify.bench.gpu.measure import Effort
from verify.bench.gpu.results import Results
from verify.bench.noise import FLOOR
from verify.toys import TOYS

Content = dict[str, Any]
FIGURES = {"check_s", "timing", "submit", "latency", "gb_per_s", "percent_of_copy", "percent_of_ceiling"}
MOVERS = (Mover("torch"), Mover("memcpy one by one"))


def measured_by_the_gpu_bench() -> Content:
    """On a CPU, with what it has there; the same cells in two portions."""
    case = Case("toy", TOYS["mha"](2), pages=3)
    portion = Portion((case,), ("page_first", "page_first_kv_split"), lambda *_: MOVERS, (1000,))
    found = Results(None)
    effort = Effort(seconds=0, repeats=(2, 2), latencies=2, matmul=matmul.Loop(8, 2, 2))
    gpu_program.run(found, {"core": portion, "variants": portion}, "cpu", 0, effort, (2000, 4000))
    return found.content


def measured_by_the_cpu_bench() -> Content:
    layouts = ("page_first", "page_first_kv_split")
    settings = measure.Settings(("qwen3-8b",), layouts, ("torch", "numba"), 1, seconds=0, page_size=1)
    return results.as_json(settings, measure.rows(settings), ["python"])


@pytest.fixture(scope="module", params=[measured_by_the_gpu_bench, measured_by_the_cpu_bench], ids=["GPU", "CPU"])
def content(request: pytest.FixtureRequest) -> Content:
    """A result file of each kind, steady: every sample of a timing is its median."""
    found = request.param()
    for timing in timings(found):
        timing["quartiles_s"] = [timing["median_s"]] * 2
    return found


def timings(content: Content) -> list[Content]:
    """Of every measured cell and every plain copy."""
    of_cells = [cell["timing"] for row in content["rows"] for cell in row["cells"] if cell["timing"]]
    copies = [copy["timing"] for row in content["rows"] for copy in row.get("copies", [])]
    return of_cells + copies + [c["timing"] for s in content.get("sessions", []) for c in s["ceilings"]]


def times(content: Content, factor: float, wanted: Callable[[Content], bool]) -> None:
    """Make some timings longer, or shorter."""
    for timing in filter(wanted, timings(content)):
        timing["median_s"] *= factor
        timing["quartiles_s"] = [seconds * factor for seconds in timing["quartiles_s"]]


def of_cell(content: Content) -> Content:
    return next(cell["timing"] for row in content["rows"] for cell in row["cells"] if cell["timing"])


def compared(a: Content, b: Content, tmp_path: Path) -> compare.Comparison:
    """As the command does it: both are written, read and held against their schema."""
    for name, one in (("a", a), ("b", b)):
        (tmp_path / f"{name}.json").write_text(json.dumps(one))
    (kind, a), (_, b) = (compare.read(tmp_path / f"{name}.json") for name in "ab")
    return compare.compare(kind, a, b)


def verdicts(found: compare.Comparison) -> dict[str, int]:
    told = [found.verdict(key) for key in found.both]
    return {verdict: told.count(verdict) for verdict in compare.VERDICTS if verdict in told}


def test_a_file_equals_itself(content: Content, tmp_path: Path) -> None:
    found = compared(content, content, tmp_path)
    assert verdicts(found) == {"within noise": len(found.both)}
    assert {found.ratio(key) for key in found.both} == {1.0}


@pytest.mark.parametrize(
    ("factor", "verdict"),
    [(2.0, "slower"), (0.5, "faster"), (1 + FLOOR / 2, "within noise"), (1 - FLOOR / 2, "within noise")],
)
def test_one_cell_that_changed_is_named(content: Content, tmp_path: Path, factor: float, verdict: str) -> None:
    other = deepcopy(content)
    times(other, factor, lambda timing: timing is of_cell(other))
    found = compared(content, other, tmp_path)
    changed = [key for key in found.both if found.ratio(key) != 1.0]
    assert len(changed) == 1
    assert found.ratio(changed[0]) == pytest.approx(1 / factor)
    assert found.verdict(changed[0]) == verdict


def test_a_difference_that_spreads_cover_is_noise(content: Content, tmp_path: Path) -> None:
    other = deepcopy(content)
    times(other, 2.0, lambda timing: timing is of_cell(other))
    of_cell(other)["quartiles_s"][0] /= 2.5  # a quarter of the samples was faster than all before
    assert verdicts(compared(content, other, tmp_path)).keys() == {"within noise"}


def test_a_slower_bus_is_no_slower_code(content: Content, tmp_path: Path) -> None:
    other = deepcopy(content)
    times(other, 3.0, lambda timing: True)
    found = compared(content, other, tmp_path)
    assert verdicts(found) == {"within noise": len(found.both)}


def test_cells_that_one_file_lacks_or_that_failed_are_told(content: Content, tmp_path: Path) -> None:
    other = deepcopy(content)
    gone = other["rows"].pop()
    cell = other["rows"][0]["cells"][0]
    cell |= dict.fromkeys(FIGURES & cell.keys()) | {"status": "wrong", "reason": "byte 0 of k"}
    lines = compare.summary(compared(content, other, tmp_path))
    told = [line for line in lines if "measured in A, wrong in B" in line]
    assert len(told) == 1
    assert any(line == f"  only in A: {len(gone['cells'])} cells of {next(iter(gone.values()))}" for line in lines)


def test_the_summary_comes_first_and_the_table_has_every_row(
    content: Content, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = compared(content, content, tmp_path)
    assert cli.main(["compare", str(tmp_path / "a.json"), str(tmp_path / "b.json")]) == 0
    a, b, summary, *_ = capsys.readouterr().out.splitlines()
    assert a.startswith(f"A: {tmp_path / 'a.json'}: ")
    assert b.startswith(f"B: {tmp_path / 'b.json'}: ")
    assert summary.startswith(f"B against A: 0 faster, 0 slower, {len(found.both)} within noise")
    measured = [row for row in content["rows"] if any(cell["timing"] for cell in row["cells"])]
    assert len(compare.table(found).body) == len(measured)


def test_how_well_a_file_repeats_itself_is_computed_from_its_portions() -> None:
    made = measured_by_the_gpu_bench()
    found = compare.compare(compare.KINDS[0], made, made)
    assert len(compare.repeats(found.a)) == len(found.both) // 2
    halved = {key: compare.Cell(c.status, c.fraction) for key, c in found.a.items() if key[0] == "core"}
    assert compare.repeats(halved) == []


def broken(content: Content) -> Content:
    return content | {"rows": [content["rows"][0] | {"direction": "sideways"}]}


@pytest.mark.parametrize(
    ("spoilt", "error"),
    [
        (
            lambda content: {"engine": "another", "figures": []},
            "follows neither bench_gpu.schema.json nor bench.schema",
        ),
        (lambda content: [content], "follows neither"),
        (broken, r"does not follow bench(_gpu)?.schema.json: \$.rows\[0\].direction: 'sideways' is not one of"),
    ],
    ids=["another schema", "a list", "a direction that there is not"],
)
def test_other_files_are_refused(
    content: Content, tmp_path: Path, spoilt: Callable[[Content], Any], error: str
) -> None:
    (tmp_path / "other.json").write_text(json.dumps(spoilt(content)))
    with pytest.raises(compare.NoResults, match=error):
        compare.read(tmp_path / "other.json")


def test_files_of_two_kinds_are_not_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [tmp_path / "gpu.json", tmp_path / "cpu.json"]
    for path, made in zip(paths, (measured_by_the_gpu_bench(), measured_by_the_cpu_bench()), strict=True):
        path.write_text(json.dumps(made))
    capsys.readouterr()
    with pytest.raises(SystemExit, match="2"):
        cli.main(["compare", *map(str, paths)])
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith(f"{paths[0]} follows bench_gpu.schema.json, {paths[1]} follows bench.schema.json")


def without_rows(content: Content) -> Content:
    return content | {"rows": []}


def of_another_number_of_pages(content: Content) -> Content:
    return content | {"rows": [row | {"pages": row["pages"] + 1} for row in content["rows"]]}


@pytest.mark.parametrize("other", [without_rows, of_another_number_of_pages])
def test_files_that_have_nothing_in_common_are_not_compared(
    content: Content, other: Callable[[Content], Content], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [tmp_path / "one.json", tmp_path / "other.json"]
    for path, made in zip(paths, (content, other(content)), strict=True):
        path.write_text(json.dumps(made))
    capsys.readouterr()
    with pytest.raises(SystemExit, match="2"):
        cli.main(["compare", *map(str, paths)])
    out, err = capsys.readouterr()
    (line,) = err.splitlines()
    assert line.endswith(f"{paths[0]} and {paths[1]} have no measured cell in common")
    assert not out


def test_a_row_that_is_there_twice_is_refused(content: Content, tmp_path: Path) -> None:
    rows = content["rows"]
    (tmp_path / "twice.json").write_text(json.dumps(content | {"rows": [*rows, rows[1]]}))
    where = rf"\$\.rows\[{len(rows)}\]: the same as \$\.rows\[1\], .*{rows[1]['layout']}"
    with pytest.raises(compare.NoResults, match=where):
        compare.read(tmp_path / "twice.json")


def test_a_file_that_is_not_there_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(["compare", str(tmp_path / "a.json"), str(tmp_path / "b.json")])
    assert "No such file" in capsys.readouterr().err
