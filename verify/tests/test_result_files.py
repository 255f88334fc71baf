"""Result files that are no such thing, and measurements that cannot be had: one line, and nothing has begun."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from kernels_cupy import calibrate
from verify import cli, devices_record, gpu_record
from verify.adapters import sglang_record
from verify.bench import __main__ as cpu_program
from verify.bench import files
from verify.bench.files import NoResults
from verify.bench.gpu import __main__ as gpu_program
from verify.bench.gpu import here, matmul, results
from verify.bench.gpu.cases import Case, Mover, Portion
from verify.bench.gpu.measure import Effort
from verify.bench.gpu.overlap import __main__ as overlap_program
from verify.bench.gpu.overlap.cases import TOYS as TOY_WORKLOADS
from verify.bench.gpu.results import Results
from verify.toys import TOYS

Content = dict[str, Any]
Captured = pytest.CaptureFixture[str]


def measured(path: Path | None, platform: str = "cpu") -> Content:
    portion = Portion((Case("toy", TOYS["mha"](2), pages=3),), ("page_first",), lambda *_: (Mover("torch"),), (1000,))
    effort = Effort(seconds=0, repeats=(2, 2), latencies=2, matmul=matmul.Loop(8, 2, 2))
    found = Results(path, resume=True)
    gpu_program.run(found, {"core": portion}, platform, 0, effort, (2000, 4000), (1, 3))
    return found.content


@pytest.fixture(scope="module")
def content() -> Content:
    return measured(None)


def told(program: Callable[..., Any], arguments: list[str], capsys: Captured) -> str:
    """The one line on stderr with which a program ends, with exit code 2."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as stopped:
        sys.exit(program(arguments))
    assert stopped.value.code == 2
    out, err = capsys.readouterr()
    (line,) = err.splitlines()
    assert not out
    return line


# ---- reading


def of_a_session_that_is_not_there(content: Content) -> Content:
    content["rows"][-1]["session"] = 1
    return content


def without_time(content: Content) -> Content:
    cell = next(cell for row in content["rows"] for cell in row["cells"] if cell["timing"])
    cell["timing"]["median_s"] = 0
    return content


def without_a_plain_load(content: Content) -> Content:
    for limit in content["sessions"][0]["ceilings"]:
        limit["direction"] = "backup"
    return content


def of_loads_while_computing() -> Content:
    *_, found = overlap_program.run("cpu", TOY_WORKLOADS["cpu"], seconds=0, sizes=(2000, 4000))
    return found


def of_the_same_row_twice(content: Content) -> Content:
    content["rows"].append(content["rows"][0])
    return content


def as_bytes(change: Callable[[Content], Any]) -> Callable[[Content], bytes]:
    return lambda content: json.dumps(change(content)).encode()


UNFIT: dict[str, tuple[Callable[[Content], bytes], str]] = {
    "truncated": (lambda content: json.dumps(content).encode()[:-100], "(char "),
    "binary": (lambda content: b"\xff\x00", "can't decode byte 0xff"),
    "a list": (as_bytes(lambda content: []), "bench_gpu.schema.json"),
    "rows of nothing": (as_bytes(lambda content: content | {"rows": [{}]}), "$.rows[0]: 'portion' is a required"),
    "another kind": (lambda content: json.dumps(of_loads_while_computing()).encode(), "bench_gpu.schema.json"),
    "another session": (as_bytes(of_a_session_that_is_not_there), "$.rows[1].session: 1, there are 1"),
    "no time": (as_bytes(without_time), "$.rows[0].cells[0].timing: "),
    "no number": (
        lambda content: re.sub(rb'"median_s": [^,]*', b'"median_s": NaN', json.dumps(content).encode()),
        "NaN",
    ),
    "no end": (
        lambda content: re.sub(rb'"median_s": [^,]*', b'"median_s": 1e999', json.dumps(content).encode()),
        "1e999",
    ),
    "no plain load": (as_bytes(without_a_plain_load), "$.sessions[0].ceilings: no load"),
    "a row twice": (as_bytes(of_the_same_row_twice), "$.rows[2]: the same as $.rows[0], core, toy, kv, page_first, "),
    "no session": (as_bytes(lambda content: {"sessions": [], "rows": []}), "$.sessions: there is none"),
}
READERS: dict[str, Callable[[list[str]], Any]] = {
    "report": lambda paths: gpu_program.main(["--report-only", "--out", *paths]),
    "resume": lambda paths: gpu_program.main(["--resume", "--platform", "emulated", "--out", *paths]),
    "compare": lambda paths: cli.main(["compare", *paths, *paths]),
}


@pytest.fixture(params=UNFIT)
def unfit(request: pytest.FixtureRequest, content: Content, tmp_path: Path) -> tuple[Path, str]:
    """A file, and what is wrong with it."""
    make, error = UNFIT[request.param]
    (tmp_path / "bench.json").write_bytes(make(deepcopy(content)))
    return tmp_path / "bench.json", error


def test_what_is_no_result_file_is_not_shown(unfit: tuple[Path, str]) -> None:
    path, error = unfit
    with pytest.raises(NoResults, match=re.escape(error)) as refused:
        here.shown("bench", str(path))
    assert str(refused.value).startswith(f"{path}: ")
    assert str(refused.value).endswith(f"; {here.WAY_OUT}")


@pytest.mark.parametrize("reader", READERS)
def test_what_is_no_result_file_is_refused_in_a_line(reader: str, unfit: tuple[Path, str], capsys: Captured) -> None:
    path, error = unfit
    before = path.read_bytes()
    line = told(READERS[reader], [str(path)], capsys)
    assert f"{path}: " in line
    assert error in line
    assert path.read_bytes() == before


@pytest.mark.parametrize("there", [False, True], ids=["nothing", "a folder"])
def test_a_path_without_a_file_has_nothing_to_report_or_show(there: bool, tmp_path: Path, capsys: Captured) -> None:
    path = tmp_path / "new" / "bench.json"
    if there:
        (path / "bench.json").mkdir(parents=True)
    assert f"{path}: " in told(gpu_program.main, ["--report-only", "--out", str(path)], capsys)
    assert path.exists() == there
    with pytest.raises(NoResults, match=f"^{re.escape(str(path))}.*RESULTS=committed"):
        here.shown("bench", str(path))


@pytest.mark.parametrize("option", ["--resume", "--report-only"])
def test_a_file_has_to_be_named(option: str, capsys: Captured) -> None:
    assert told(gpu_program.main, [option], capsys).endswith(f"{option} needs a file: --out FILE.json")


def test_a_file_without_rows_can_be_reported(content: Content, tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    path.write_text(json.dumps(content | {"rows": []}))
    assert gpu_program.main(["--report-only", "--out", str(path)]) == 0


def test_a_file_without_rows_is_not_shown(content: Content, tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    path.write_text(json.dumps(content | {"rows": []}))
    with pytest.raises(NoResults, match="has no rows; `make run`"):
        here.shown("bench", str(path))


@pytest.mark.parametrize("name", here.FORMS)
def test_committed_results_are_of_their_kind_and_no_other(name: str) -> None:
    form, content = files.read(here.committed(name), *here.FORMS.values())
    assert form is here.FORMS[name]
    assert here.shown(name, "committed") == (here.committed(name), content)
    (other,) = (form for form in here.FORMS.values() if form is not here.FORMS[name])
    with pytest.raises(NoResults, match=f"{name}.json: does not follow {other.schema.name}: "):
        files.read(here.committed(name), other)


@pytest.mark.parametrize("damaged", ['{"rows": [', "[]", '{"rows": []}'])
def test_sglangs_rates_that_are_damaged_are_told_before_anything_is_measured(
    damaged: str, tmp_path: Path, capsys: Captured
) -> None:
    (tmp_path / results.SGLANG_HERE).write_text(damaged)
    line = told(gpu_program.main, ["--platform", "emulated", "--out", str(tmp_path / "bench.json")], capsys)
    assert f"{tmp_path / results.SGLANG_HERE}: " in line


# ---- resuming


def on_a_gpu(content: Content) -> Content:
    content["sessions"][0]["provenance"]["gpu"] = {
        **dict.fromkeys(("cuda", "cupy", "driver", "pcie_generation", "pcie_width")),
        "name": "NVIDIA Toy",
        "sms": 1,
        "memory_bytes": 1,
    }
    return content


@pytest.mark.parametrize(
    ("change", "platform", "there", "now"),
    [
        (lambda content: content, "emulated", "cpu (no GPU)", "emulated (no GPU)"),
        (on_a_gpu, "cpu", "cpu (NVIDIA Toy)", "cpu (no GPU)"),
    ],
    ids=["platform", "GPU"],
)
def test_results_of_two_devices_do_not_get_into_one_file(
    change: Callable[[Content], Content],
    platform: str,
    there: str,
    now: str,
    content: Content,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    path = tmp_path / "bench.json"
    path.write_text(before := json.dumps(change(deepcopy(content) | {"rows": []})))
    error = f"{path} has results of {there}, and here is {now}: give another --out"
    with pytest.raises(NoResults, match=f"^{re.escape(error)}$"):
        measured(path, platform)
    assert path.read_text() == before


def test_the_program_refuses_to_resume_committed_results_elsewhere(tmp_path: Path, capsys: Captured) -> None:
    path = tmp_path / "bench.json"
    found = json.loads(here.committed("bench").read_text())
    path.write_text(json.dumps(found | {"rows": []}))
    line = told(gpu_program.main, ["--resume", "--platform", "emulated", "--out", str(path)], capsys)
    assert "has results of cuda (NVIDIA H200), and here is emulated (" in line


# ---- writing


def test_a_write_that_is_interrupted_leaves_the_old_file(tmp_path: Path) -> None:
    path, link = tmp_path / "new" / "bench.json", tmp_path / "link.json"
    files.write(path, "old")
    link.symlink_to(path)
    with pytest.raises(UnicodeEncodeError):
        files.write(path, "half, and then a character that cannot be written: \ud800")
    assert path.read_text() == "old"
    files.write(link, "new")
    assert path.read_text() == "new"
    assert link.is_symlink()
    assert sorted(path.parent.iterdir()) == [path]


def test_there_is_no_file_before_there_is_a_session(tmp_path: Path) -> None:
    Results(tmp_path / "bench.json").write()
    assert not list(tmp_path.iterdir())


PROGRAMS: dict[str, tuple[Callable[..., Any], list[str]]] = {
    "bench": (cpu_program.main, []),
    "bench.gpu": (gpu_program.main, ["--platform", "emulated"]),
    "bench.gpu.overlap": (overlap_program.main, ["--platform", "cpu"]),
    "gpu_record": (gpu_record.main, []),
    "devices_record": (devices_record.main, []),
    "sglang_record": (sglang_record.main, [__file__, "--commit", "0" * 40]),
}


@pytest.mark.parametrize(
    ("out", "why"), [(".", "it is no file"), ("taken/bench.json", "File exists"), ("taken/new/bench.json", "Not a dir")]
)
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_file_that_cannot_be_written_is_told_before_anything_is_measured(
    name: str, out: str, why: str, tmp_path: Path, capsys: Captured
) -> None:
    (tmp_path / "taken").write_text("")
    program, options = PROGRAMS[name]
    path = tmp_path / out
    line = told(program, [*options, "--out", str(path)], capsys)
    assert f"argument --out: nothing can be written to '{path}': {why}" in line
    assert [file.name for file in tmp_path.iterdir()] == ["taken"]


# ---- what cannot be measured


@pytest.mark.parametrize(
    "program", [gpu_program.main, overlap_program.main, calibrate.main], ids=["bench.gpu", "overlap", "calibrate"]
)
def test_a_gpu_is_needed(program: Callable[..., Any], capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert "a CUDA device is needed, and there is none" in told(program, [], capsys)


@pytest.mark.parametrize(
    ("device", "why"),
    [
        ("foo", "'foo' is none: write 'cuda:1'"),
        ("cpu", "'cpu' is none: write 'cuda:1'"),
        ("emulated", "'emulated' is none: write 'cuda:1'"),
        ("cuda:x", "'cuda:x' names no device: write 'cuda:1'"),
        ("cuda:2", "there is no cuda:2: the last GPU here is cuda:1"),
    ],
)
def test_only_a_gpu_that_is_there_is_calibrated(
    device: str, why: str, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a host with two."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert why in told(calibrate.main, ["--device", device], capsys)


@pytest.mark.parametrize("out", [".", "taken/table.json"])
def test_a_table_that_cannot_be_written_is_not_measured(
    out: str, tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a host with a GPU, which is not touched."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    (tmp_path / "taken").write_text("")
    line = told(calibrate.main, ["--device", "cuda:0", "--out", str(tmp_path / out)], capsys)
    assert str(tmp_path) in line
    assert [file.name for file in tmp_path.iterdir()] == ["taken"]


@pytest.mark.parametrize(
    ("given", "error"),
    [
        (["--seconds", "-1"], "must be a number of seconds, 0 or more, got '-1'"),
        (["--seconds", "nan"], "must be a number of seconds, 0 or more, got 'nan'"),
        (["--seconds", "inf"], "must be a number of seconds, 0 or more, got 'inf'"),
        (["--seconds", "soon"], "must be a number of seconds, 0 or more, got 'soon'"),
        (["--seed", "-1"], "must be an integer of at most 18 digits, 0 or more, got '-1'"),
        (["--seed", "9" * 19], f"must be an integer of at most 18 digits, 0 or more, got '{'9' * 19}'"),
    ],
)
@pytest.mark.parametrize("name", ["bench", "bench.gpu", "bench.gpu.overlap"])
def test_times_and_seeds_that_there_are_not(name: str, given: list[str], error: str, capsys: Captured) -> None:
    program, options = PROGRAMS[name]
    assert error in told(program, [*options, *given], capsys)


@pytest.mark.parametrize("name", ["bench", "bench.gpu"])
def test_more_than_there_is_memory_for_is_refused(name: str, capsys: Captured) -> None:
    program, options = PROGRAMS[name]
    line = told(program, [*options, "--payload", "99999GiB"], capsys)
    assert re.search(r"this needs [\d,.]+ GB of memory, [\d,.]+ GB are free: ask for a smaller --payload", line)


def test_pages_that_are_too_large_are_told_as_such(capsys: Captured) -> None:
    options = ["--platform", "emulated", "--portion", "pages", "--page-sizes", "99999999999"]
    assert told(gpu_program.main, options, capsys).endswith("ask for a smaller page in --page-sizes")


def test_loads_while_computing_need_memory_too(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlap_program, "memory_needed", lambda workloads: 1 << 60)
    line = told(overlap_program.main, ["--platform", "cpu"], capsys)
    assert "this needs 1,152,921,504.6 GB of memory" in line
