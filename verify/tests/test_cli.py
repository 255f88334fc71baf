"""The command line: mistakes are told in one line, and the pages say what was computed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch

from refimpl import LAYOUTS, presets
from refimpl.support import BACKENDS
from verify import cli, matrix, notebooks, report, run
from verify.bench import results
from verify.bench.gpu import cases, here, recommend
from verify.toys import TOYS


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--model", "llama-9"], "there is no model 'llama-9'; there are llama-3.1-8b, "),
        (["--model", "llama-3.1-8b,"], "there is no model ''; there are "),
        (["--pages", "0"], "must be a positive integer, got '0'"),
        (["--pages", "-3"], "must be a positive integer, got '-3'"),
        (["--pages", "many"], "must be a positive integer, got 'many'"),
        (["--pages", "1000000000"], "ask for fewer --pages"),
        (["--payload", "9999999GiB"], "ask for a smaller --payload"),
        (["--model", "qwen3-8b", "--page-size", "99999999999"], "ask for a smaller --page-size"),
        (["--model", "qwen3-8b", "--page-size", "99999999999", "--pages", "9"], "ask for a smaller --page-size"),
        (
            ["--model", "deepseek-v4-flash", "--page-size", "64"],
            "DeepSeek V4 has pages of 256 tokens, got page_size 64",
        ),
        (["--backends", "kernel"], "there is no backend 'kernel'; there are torch, numba"),
        (["--payload", "big"], "must be a size such as 16MiB, in bytes or KiB, MiB, GiB, KB, MB, GB, got 'big'"),
        (["--payload", "1TB"], "in bytes or KiB, MiB, GiB, KB, MB, GB, got '1TB'"),
        (["--notebooks", "nope.ipynb"], "there is no file 'nope.ipynb'"),
        (["--notebooks", __file__], f"'{__file__}' is no notebook"),
        (["--notebooks", str(results.SCHEMA)], f"'{results.SCHEMA}' is no notebook"),
        (["--out", __file__], f"nothing can be written to '{__file__}': File exists"),
    ],
)
def test_a_mistake_ends_in_one_line(arguments: list[str], error: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["run", *arguments])
    assert stopped.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert error in line


def test_run_writes_the_matrix_and_its_samples(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(presets.MODELS, "toy", lambda tp, page_size: {"kv": TOYS["mha"](page_size)})
    tiny = ["--model", "toy", "--layouts", "page_head,page_first_kv_split", "--pages", "1", "--seconds", "0"]
    assert cli.main(["run", *tiny, "--out", str(tmp_path), "--notebooks"]) == 0
    content = json.loads((tmp_path / "results.json").read_text())
    printed, index = capsys.readouterr().out, (tmp_path / "index.html").read_text()
    for cell in content["rows"][0]["cells"]:
        assert f"{cell['gb_per_s']:.2f} " in printed
        assert f"{cell['gb_per_s']:.2f} " in index
    for shown in (printed, index):
        assert "[1] page_first_kv_split cuts a row in two" in shown
        assert "toy: not among these results, which have llama-3.1-8b, " in shown
        assert re.search(r"; nearest is \S+(, page \d+)?, for which page_head with ", shown)
    assert "4 cells measured, 4 cells refused, 0 cells wrong" in printed


@pytest.mark.parametrize("gpu", [False, True], ids=["no GPU", "a GPU"])
def test_run_advises_for_this_device_or_for_the_committed_one(
    gpu: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU, if there were one: the file that measuring it writes is put there."""
    asked: list[tuple[object, ...]] = []

    def measure(path: Path, *rest: object) -> None:
        asked.append(rest)
        path.write_text(here.committed("bench").read_text())

    monkeypatch.setattr("torch.cuda.is_available", lambda: gpu)
    monkeypatch.setattr(here, "measure_bench", measure)
    options = ["--model", "llama-3.1-8b", "--page-size", "64", "--pages", "1", "--seconds", "0", "--budget", "9"]
    options += ["--layouts", "page_first"]
    assert cli.main(["run", *options, "--out", str(tmp_path), "--notebooks"]) == 0
    assert asked == ([(("llama-3.1-8b",), 64, cases.PAYLOAD, ("page_first",), 9)] if gpu else [])
    index = (tmp_path / "index.html").read_text()
    content = json.loads(here.committed("bench").read_text())
    rows = recommend.rows_of(content, "llama-3.1-8b", layouts=("page_first",))
    for text in (index, capsys.readouterr().out):
        assert ("this machine: NVIDIA" in text) == gpu
        assert ("committed results, data/results/h200/bench.json: NVIDIA H200" in text) == (not gpu)
        for sentence in recommend.advice(content, rows):
            assert f"llama-3.1-8b, {sentence}" in text
    assert ('<a href="bench.json">bench.json</a>' in index) == gpu, "the file to send back"


@pytest.mark.parametrize(
    ("pages", "said"),
    [
        ("32", "llama-3.1-8b: not among these results with such pages; nearest is "),
        ("16", "llama-3.1-8b, kv backup: take page_first with "),
        (
            "16",
            "qwen3-8b: not among these results, which have llama-3.1-8b, deepseek-v3; "
            "nearest is llama-3.1-8b, page 16, for",
        ),
    ],
)
def test_run_knows_with_which_pages_a_model_was_measured(
    pages: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU, if there were one, on which two models were measured, one of them with other pages than its preset's."""

    def measure(path: Path, *_: object) -> None:
        content = json.loads(here.committed("bench").read_text())
        known = ("llama-3.1-8b, page 16", "deepseek-v3")
        content["rows"] = [row for row in content["rows"] if row["case"] in known]
        path.write_text(json.dumps(content))

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr(here, "measure_bench", measure)
    options = ["--model", "llama-3.1-8b,qwen3-8b", "--page-size", pages, "--pages", "1", "--seconds", "0"]
    options += ["--layouts", "page_first"]
    assert cli.main(["run", *options, "--out", str(tmp_path), "--notebooks"]) == 0
    assert said in capsys.readouterr().out


def in_one_layout() -> dict[str, Any]:
    """The committed results, as if all had been measured in one layout only."""
    content = json.loads(here.committed("bench").read_text())
    return content | {"rows": [row for row in content["rows"] if row["layout"] == "page_first"]}


@pytest.mark.parametrize(
    ("model", "layouts", "said"),
    [
        ("deepseek-v3", "page_head", "no pool of it can have such a layout: page_head puts heads outside the tokens, "),
        ("llama-3.1-8b", "page_first_kv_split", "no pool of it can have such a layout: page_first_kv_split cuts "),
        ("deepseek-v3", "page_head,page_first_direct", "not among these results in page_head or page_first_direct; "),
        (
            "deepseek-v3",
            "page_unified",
            "not among these results in page_unified; nothing was measured in these layouts, ",
        ),
    ],
)
def test_what_no_pool_can_have_is_not_called_unmeasured(model: str, layouts: str, said: str, tmp_path: Path) -> None:
    args = run.parser().parse_args(["--layouts", layouts, "--out", str(tmp_path)])
    (line,) = run._advice(in_one_layout(), model, args)
    assert line.startswith(f"{model}: {said}")
    assert line.endswith("; on a GPU it is measured") == ("no pool" not in said)


def command(*arguments: str, python: tuple[str, ...] = (), **options: Any) -> subprocess.CompletedProcess[str]:
    """`python -m verify` in a process of its own."""
    given = [sys.executable, *python, "-m", "verify", *arguments]
    return subprocess.run(given, cwd=notebooks.ROOT, stderr=subprocess.PIPE, text=True, check=False, **options)


@pytest.mark.parametrize("arguments", [["dictionary"], ["--help"], ["audit", "--help"]], ids=" ".join)
def test_a_reader_that_has_enough_ends_a_command_quietly(arguments: list[str]) -> None:
    reads, writes = os.pipe()
    os.close(reads)
    with os.fdopen(writes, "w") as pipe:
        done = command(*arguments, stdout=pipe, env=os.environ | {"PYTHONUNBUFFERED": ""})
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_a_package_that_is_missing_is_named_with_the_way_out(name: str) -> None:
    """To a Python that has only its own library."""
    done = command(name, python=("-S",), stdout=subprocess.PIPE)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert re.fullmatch(r"python -m verify: No module named '\w+'; `make run` makes \.venv, and .* has it", line)


def test_a_module_of_our_own_that_is_missing_is_a_fault() -> None:
    code = "import runpy, sys; sys.modules['verify.docs'] = None; sys.argv = ['', 'docs']; runpy.run_module('verify')"
    done = subprocess.run([sys.executable, "-c", code], cwd=notebooks.ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "Traceback" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--jobs", "0"], "must be a positive integer, got '0'"),
        (["--only", "zzzz"], "there is no mutant whose fault or file contains 'zzzz'"),
    ],
)
def test_mutants_that_there_are_not(arguments: list[str], error: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(["mutants", *arguments])
    (line,) = capsys.readouterr().err.splitlines()
    assert error in line


@pytest.mark.parametrize(
    ("arguments", "parameters"),
    [
        ([], {}),
        (["--model", "qwen3-8b,deepseek-v3", "--pages", "3"], {"MODEL": "qwen3-8b", "PAGES": "3"}),
        (["--page-size", "16", "--payload", "1MiB"], {"PAGE_SIZE": "16", "PAYLOAD": "1048576"}),
        (["--layouts", "page_head,page_first"], {"LAYOUTS": "page_head,page_first"}),
    ],
)
def test_notebooks_get_the_parameters_that_were_asked_for(
    arguments: list[str], parameters: dict[str, str], tmp_path: Path
) -> None:
    found = run.for_notebooks(run.parser().parse_args(arguments), tmp_path)
    assert found == parameters | {"RESULTS": str(tmp_path)}
    assert found.keys() <= notebooks.PARAMETERS.keys()


class Rows(HTMLParser):
    """Cells of every table row of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag == "tr":
            self.rows.append([])
        if tag == "td":
            self.rows[-1].append("")

    def handle_data(self, data: str) -> None:
        if self.rows and self.rows[-1] and data.strip():
            self.rows[-1][-1] += data


POOLS = ("mha", "mla-packed", "mamba", "v4-c4", "logical")


@pytest.fixture(scope="module")
def entries() -> list[report.Entry]:
    return list(report.entries(POOLS))


def test_the_report_has_a_row_for_every_pair(entries: list[report.Entry]) -> None:
    rows = [row for row in Rows(report.as_page(entries)).rows if row]
    pairs = [(layout, backend) for layout in LAYOUTS for backend in BACKENDS]
    assert [tuple(row[:2]) for row in rows] == pairs * len(POOLS)
    for row in rows:
        statuses, reason = row[2:-1], row[-1]
        assert set(statuses) <= set(report.STATUSES)
        assert len(statuses) == len(report.WAYS)
        assert (reason == "") == (set(statuses) == {"pass"})


def test_the_report_verifies_what_a_cpu_can_run(entries: list[report.Entry]) -> None:
    passed = [e for e in entries if e.status == "pass"]
    assert {(e.pool, e.layout, e.backend, e.direction) for e in passed} == {
        pair
        for platform in ("cpu", "emulated")
        for pair in matrix.pairs(platform)
        if pair[0] in POOLS and pair[-1] in ("backup", "load") and matrix.refusal(*pair, platform) is None
    }
    assert {e.platform for e in passed} == {"cpu", "emulated"} | ({"cuda"} if torch.cuda.is_available() else set())
    assert report.tally(entries)["fail"] == 0
    assert len(entries) == report.count(POOLS)


def test_a_wrong_cell_is_reported_as_such() -> None:
    def wrong(cell: matrix.Cell) -> None:
        raise matrix.Mismatch("k of layer 0: expected this, found that")

    assert report.verdict("mha", "page_first", "torch", "cpu", "backup", run=wrong) == (
        "fail",
        "k of layer 0: expected this, found that",
    )


def test_pages_need_no_network(entries: list[report.Entry]) -> None:
    assert not re.search(r"(src|href)=\"https?:", report.as_page(entries))
