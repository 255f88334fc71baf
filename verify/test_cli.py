"""The command line: mistakes are told in one line, and the pages say what was computed."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch

from refimpl import LAYOUTS, presets
from refimpl.support import BACKENDS
from verify import cli, matrix, report
from verify.toys import TOYS


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--model", "llama-9"], "there is no model 'llama-9'; there are llama-3.1-8b, "),
        (["--model", "llama-3.1-8b,"], "there is no model ''; there are "),
        (["--pages", "0"], "must be a positive integer, got '0'"),
        (["--pages", "-3"], "must be a positive integer, got '-3'"),
        (["--pages", "many"], "must be a positive integer, got 'many'"),
        (["--pages", "1000000000"], "ask for fewer pages"),
        (["--backends", "kernel"], "there is no backend 'kernel'; there are torch, numba"),
        (["--payload", "big"], "must be a size such as 16MiB, got 'big'"),
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
    assert "4 cells measured, 4 cells refused, 0 cells wrong" in printed


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
