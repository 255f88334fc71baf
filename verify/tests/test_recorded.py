"""What was proven on a GPU is on record, complete, without a failure, and about the kernels as they are now."""

from __future__ import annotations

import json
import xml.etree.ElementTree as xml
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from kernels_cupy.specs import HASH
from refimpl import LAYOUTS, Refusal, support
from verify import gpu_record, matrix, sanitize
from verify.toys import TOYS

RECORDS = sorted(gpu_record.RECORDS.glob("*/verify.json"))
AGAIN = "run `make verify-gpu` on a machine with a GPU and commit data/results/<device>/verify.json"

every_record = pytest.mark.parametrize(
    "record", [json.loads(path.read_text(encoding="utf-8")) for path in RECORDS], ids=[p.parent.name for p in RECORDS]
)


def test_there_is_a_record() -> None:
    assert RECORDS, f"nothing on record: {AGAIN}"


@every_record
def test_a_record_follows_its_schema(record: dict[str, Any]) -> None:
    jsonschema.validate(record, json.loads(gpu_record.SCHEMA.read_text(encoding="utf-8")))


@every_record
def test_a_record_is_about_the_kernels_as_they_are(record: dict[str, Any]) -> None:
    assert record["kernels"] == HASH, f"the kernels have changed since: {AGAIN}"


@every_record
def test_a_record_is_of_a_clean_tree(record: dict[str, Any]) -> None:
    source = record["provenance"]
    assert source["commit"], f"of no commit: {AGAIN}"
    assert source["dirty"] is False, f"something was not committed: {AGAIN}"


@every_record
def test_every_cell_of_the_matrix_is_on_record(record: dict[str, Any]) -> None:
    assert record["cells"] == {
        "complete": len(matrix.complete("cuda")),
        "covered": len(matrix.covered("cuda")),
        "refused": len(matrix.refused("cuda")),
        "seeds": 20,
    }, f"the matrix is another one now: {AGAIN}"


@every_record
def test_nothing_failed_and_nothing_was_skipped(record: dict[str, Any]) -> None:
    assert record["failures"] == []
    for kind, count in record["outcomes"].items():
        assert sum(test[kind] for test in record["tests"]) == count
    assert (record["outcomes"]["failed"], record["outcomes"]["skipped"]) == (0, 0)


@every_record
def test_sanitizers_ran_over_every_cell_and_found_nothing(record: dict[str, Any]) -> None:
    cells = len(sanitize.cells("cuda"))
    assert [run["tool"] for run in record["sanitizers"]] == ["memcheck", "initcheck", "synccheck"], AGAIN
    for run in record["sanitizers"]:
        assert (run["errors"], run["cells"]) == (0, cells), f"{run['tool']}: {AGAIN}"


# ---- How a record is made


def test_sanitizers_see_every_pool_in_every_layout_by_every_backend() -> None:
    seen = {(cell.pool, cell.layout, cell.backend) for cell in sanitize.cells("cuda")}
    assert seen == {
        (pool, layout, backend)
        for pool, toy in TOYS.items()
        for layout in LAYOUTS
        for backend in sanitize.BACKENDS
        if not isinstance(support(toy(4), layout, backend, "load", "cuda"), Refusal)
    }


REPORT = """
<testsuites><testsuite>
  <testcase classname="verify.tests.test_a" name="test_one[x[0]]" file="verify/tests/test_a.py" time="0.5"/>
  <testcase classname="verify.tests.test_a" name="test_one[y]" file="verify/tests/test_a.py" time="0.25">
    <properties><property name="cold_s" value="1.5"/></properties><failure message="no"/>
  </testcase>
  <testcase classname="verify.tests.test_b" name="test_two" file="verify/tests/test_b.py" time="0"><skipped/></testcase>
  <testcase classname="verify.tests.test_b" name="test_three" file="verify/tests/test_b.py" time="0"><error/></testcase>
</testsuite></testsuites>
"""


def test_outcomes_are_counted_by_test() -> None:
    cases = list(xml.fromstring(REPORT).iter("testcase"))
    assert gpu_record.counted(cases) == [
        {"file": "verify/tests/test_a.py", "test": "test_one", "passed": 1, "failed": 1, "skipped": 0, "seconds": 0.75},
        {"file": "verify/tests/test_b.py", "test": "test_three", "passed": 0, "failed": 1, "skipped": 0, "seconds": 0},
        {"file": "verify/tests/test_b.py", "test": "test_two", "passed": 0, "failed": 0, "skipped": 1, "seconds": 0},
    ]
    assert gpu_record.properties(cases) == {"cold_s": 1.5}


def test_the_log_of_a_sanitizer_is_read(tmp_path: Path) -> None:
    log = tmp_path / "memcheck.log"
    log.write_text("========= COMPUTE-SANITIZER\nsanitized cells: 210\n========= ERROR SUMMARY: 3 errors\n")
    assert gpu_record.sanitized(log) == {"tool": "memcheck", "errors": 3, "cells": 210}


@pytest.mark.parametrize("text", ["========= ERROR SUMMARY: 0 errors\n", "sanitized cells: 210\n"])
def test_the_log_of_a_sanitizer_that_was_cut_short_is_refused(text: str, tmp_path: Path) -> None:
    log = tmp_path / "memcheck.log"
    log.write_text(text)
    with pytest.raises(ValueError, match=r"memcheck\.log does not tell"):
        gpu_record.sanitized(log)


def test_the_tests_that_are_counted_as_cells_are_there() -> None:
    texts = [(Path(__file__).parent / name).read_text(encoding="utf-8") for name in ("test_matrix.py", "test_gpu.py")]
    for function in gpu_record.CELLS.values():
        assert any(f"def {function}(" in text for text in texts)


def test_every_file_with_tests_that_need_a_gpu_is_run() -> None:
    here = Path(__file__).parent
    with_gpu = {f"verify/tests/{p.name}" for p in here.glob("test_*.py") if "mark.gpu" in p.read_text(encoding="utf-8")}
    apart = {"verify/tests/test_recorded.py", "verify/tests/test_live_book.py"}  # this one, and minutes of notebooks
    assert with_gpu - apart == {*gpu_record.FILES, *gpu_record.ALONE}
