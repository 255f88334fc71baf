"""The benchmark: what it writes down can be checked, and it never times bytes that are wrong."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch

from refimpl import presets
from refimpl.backends import registry
from refimpl.backends.torch_backend import TorchBackend
from refimpl.indices import Items
from refimpl.plan import Plan
from refimpl.receipt import Receipt
from verify.arguments import nbytes
from verify.bench import measure, report, results
from verify.bench.provenance import ROOT, command_line
from verify.bench.results import SCHEMA
from verify.toys import TOYS

COMMITTED = sorted((ROOT / "data" / "results").rglob("*.json"))

TINY = measure.Settings(
    models=("toy",),
    layouts=("page_first", "page_first_kv_split"),
    backends=("torch", "numba"),
    pages=2,
    seconds=0,
    rounds=(2, 3),
)


@pytest.fixture(scope="module", autouse=True)
def toy_model() -> Iterator[None]:
    """A model that the presets lack."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(presets.MODELS, "toy", lambda tp, page_size: {"kv": TOYS["mha"](page_size)})
        yield


@pytest.fixture(scope="module")
def content() -> dict[str, Any]:
    return results.as_json(TINY, measure.rows(TINY), ["python", "-m", "verify.bench"])


def cells(content: dict[str, Any], status: str) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    return [(row, cell) for row in content["rows"] for cell in row["cells"] if cell["status"] == status]


def test_a_result_file_follows_its_schema(content: dict[str, Any]) -> None:
    jsonschema.validate(content, json.loads(SCHEMA.read_text()))


def test_the_schema_takes_no_measured_cell_without_samples(content: dict[str, Any]) -> None:
    broken = json.loads(json.dumps(content))
    cells(broken, "measured")[0][1]["timing"] = None
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(broken, json.loads(SCHEMA.read_text()))


def test_every_figure_follows_from_the_samples(content: dict[str, Any]) -> None:
    measured = cells(content, "measured")
    assert len(measured) == 4
    for row, cell in measured:
        median = statistics.median(cell["timing"]["samples_s"])
        copy = min(statistics.median(copy["timing"]["samples_s"]) for copy in row["copies"])
        assert cell["timing"]["median_s"] == median
        assert cell["gb_per_s"] == row["payload_bytes"] / median / 1e9
        assert cell["percent_of_copy"] == 100 * copy / median
        assert sum(run["bytes"] * run["count"] for run in row["runs"]) == row["payload_bytes"]


def test_refused_cells_are_listed_with_their_reason(content: dict[str, Any]) -> None:
    refused = cells(content, "refused")
    assert [(row["layout"], row["direction"], cell["backend"]) for row, cell in refused] == [
        ("page_first_kv_split", direction, backend) for direction in ("backup", "load") for backend in TINY.backends
    ]
    assert all("no split is named" in cell["reason"] for _, cell in refused)
    assert "[1] page_first_kv_split cuts a row in two" in report.as_text(report.matrix(content))


class LastItemForgotten(TorchBackend):
    def execute(self, plan: Plan, layers: tuple[int | None, ...], items: Items, direction: str) -> Receipt:
        host, device = items.checked()
        short = Items(host[:-1], device[:-1])
        whole = super().execute(plan, layers, items, direction) if not len(short) else Receipt("torch")
        return whole + super().execute(plan, layers, short, direction)


class SourceTouched(TorchBackend):
    def execute(self, plan: Plan, layers: tuple[int | None, ...], items: Items, direction: str) -> Receipt:
        receipt = super().execute(plan, layers, items, direction)
        side = plan.moves[-1].device if direction == "backup" else plan.moves[-1].host
        side.tensors[-1].view(torch.uint8).view(-1)[-1] ^= 1
        return receipt


class WrongFromTheSecondCallOn(TorchBackend):
    calls = 0

    def execute(self, plan: Plan, layers: tuple[int | None, ...], items: Items, direction: str) -> Receipt:
        self.calls += 1
        if self.calls == 1:
            return super().execute(plan, layers, items, direction)
        return super().execute(plan, layers[:-2], items, direction)


@pytest.mark.parametrize("backend", [LastItemForgotten, SourceTouched, WrongFromTheSecondCallOn])
def test_wrong_bytes_get_no_figure(backend: type[TorchBackend], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_load", lambda name: backend)
    settings = replace(TINY, layouts=("page_first",), backends=("torch",))
    content = results.as_json(settings, measure.rows(settings), ["python"])
    wrong = cells(content, "wrong")
    assert len(wrong) == 2
    assert all("tensor" in cell["reason"] and cell["gb_per_s"] is None for _, cell in wrong)
    jsonschema.validate(content, json.loads(SCHEMA.read_text()))
    assert "wrong [1]" in report.as_text(report.matrix(content))


@pytest.mark.parametrize(
    ("text", "expected"), [("4096", 4096), ("16KiB", 1 << 14), ("256 mib", 1 << 28), ("1GB", 10**9)]
)
def test_sizes(text: str, expected: int) -> None:
    assert nbytes(text) == expected


def test_verdicts_count_rows_and_name_the_worst(content: dict[str, Any]) -> None:
    """Computed again from the cells, in another way."""
    rows = {id(row): row for row, _ in cells(content, "measured")}.values()
    figures = [{c["backend"]: c for c in row["cells"]} for row in rows]
    ratios = [c["numba"]["gb_per_s"] / c["torch"]["gb_per_s"] for c in figures]
    lines = report.verdicts(content, share=0.5, run_bytes=1)
    assert f"in {sum(r >= 1 for r in ratios)} of {len(ratios)} rows" in lines[-1]
    assert f"ratio is {min(ratios):.2f} " in lines[-1]
    numba = [c["numba"]["percent_of_copy"] for c in figures]
    assert f"numba: {sum(p >= 50 for p in numba)} of {len(numba)} rows" in lines[1]
    assert f"the lowest is {min(numba):.0f}%" in lines[1]
    assert report.verdicts(content, run_bytes=1 << 40) == lines[-1:]


def test_a_command_is_told_without_paths_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    given = ["--out", "/elsewhere/bench.json", f"--from={ROOT}/out/bench.json", "--portion=core,sglang", "out/b.json"]
    monkeypatch.setattr("sys.argv", ["program", *given])
    told = ["--out", "bench.json", "--from=out/bench.json", "--portion=core,sglang", "out/b.json"]
    assert command_line("verify.bench") == ["python", "-m", "verify.bench", *told]


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_committed_results_have_no_path_of_a_machine(path: Path) -> None:
    assert re.findall(r'"(?:--[a-z-]+=)?/[^"]*"', path.read_text(encoding="utf-8")) == []
