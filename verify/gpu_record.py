"""`python -m verify.gpu_record`: everything that needs a GPU, run on this one and written down.

Machines without a GPU take its word (`verify/tests/test_recorded.py`), as long as it is about the kernels at hand.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as xml
from collections import Counter
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kernels_cupy.specs import HASH
from refimpl.cudart import cudart
from verify.arguments import Parser, new_file
from verify.bench import files
from verify.bench.gpu.results import gpu
from verify.bench.provenance import ROOT, command_line, provenance

SCHEMA = ROOT / "data" / "schemas" / "verify.schema.json"
RECORDS = ROOT / "data" / "results"

# They hold streams and measure how long calls take: beside other processes on the GPU they would measure those.
ALONE = ("verify/tests/test_gpu.py",)

# Where tests are that need a GPU, long ones first; other files may need packages that a GPU box does not have.
FILES = (
    "verify/tests/test_pinned_gpu.py",
    "verify/tests/test_leaks.py",
    "verify/tests/test_stack_machine.py",
    "verify/tests/test_kl.py",
    "verify/tests/test_conformance.py",
    "verify/tests/test_matrix.py",
    "verify/tests/test_dispatch.py",
    "verify/tests/test_reported_stacks.py",
)

# Nobody is given many tests ahead. More processes would wait for each other: they share one GPU by turns.
PARALLEL = ("-n", "auto", "--maxprocesses", "10", "--dist", "load", "--maxschedchunk", "1")

# What the cells of the matrix, and the random workloads, are called among the tests.
CELLS = {
    "complete": "test_every_allowed_pair_moves_exactly_the_right_bytes",
    "covered": "test_sizes_patterns_strides_and_alignments",
    "refused": "test_refused_pairs_are_refused_before_memory_is_taken",
    "seeds": "test_a_mixed_workload_agrees_with_the_oracle",
}

OUTCOMES = {"failure": "failed", "error": "failed", "skipped": "skipped"}


def run_tests(*arguments: str) -> list[xml.Element]:
    """The test cases of one run of pytest, as JUnit has them."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        timeout = ["--timeout", "600"] if find_spec("pytest_timeout") else []
        command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu and not slow", *timeout, f"--junit-xml={report}"]
        status = subprocess.run([*command, "-o", "junit_family=xunit1", *arguments], cwd=ROOT).returncode
        if status not in (0, 1):  # all passed; some failed
            raise RuntimeError(f"pytest did not get to its tests (status {status})")
        return list(xml.parse(report).iter("testcase"))


def outcome(case: xml.Element) -> str:
    return next((OUTCOMES[child.tag] for child in case if child.tag in OUTCOMES), "passed")


def counted(cases: Iterable[xml.Element]) -> list[dict[str, Any]]:
    """Test functions with their outcomes, in order of their names."""
    outcomes: dict[tuple[str, str], Counter[str]] = {}
    seconds: Counter[tuple[str, str]] = Counter()
    for case in cases:
        where = case.attrib["file"], case.attrib["name"].split("[")[0]
        outcomes.setdefault(where, Counter())[outcome(case)] += 1
        seconds[where] += float(case.attrib["time"])  # pyright: ignore[reportArgumentType]
    return [
        {"file": file, "test": test}
        | {kind: counts[kind] for kind in ("passed", "failed", "skipped")}
        | {"seconds": round(seconds[file, test], 3)}
        for (file, test), counts in sorted(outcomes.items())
    ]


def properties(cases: Iterable[xml.Element]) -> dict[str, float]:
    """What tests measured by the way."""
    return {p.attrib["name"]: float(p.attrib["value"]) for case in cases for p in case.iter("property")}


def sanitized(log: Path) -> dict[str, Any]:
    """What a log of `compute-sanitizer`, named after the tool, says of a run of `verify.sanitize`."""
    text = log.read_text(encoding="utf-8", errors="replace")
    errors, cells = re.search(r"SUMMARY: (\d+) ", text), re.search(r"^sanitized cells: (\d+)$", text, re.MULTILINE)
    if not errors or not cells:
        raise ValueError(f"{log} does not tell {'how it ended' if cells else 'that all cells were run'}")
    return {"tool": log.stem, "errors": int(errors[1]), "cells": int(cells[1])}


def record(command: list[str], logs: Sequence[Path], commit: str | None, pytest: Sequence[str]) -> dict[str, Any]:
    source = provenance(command, 0, commit) | {"gpu": gpu()}
    sanitizers = [sanitized(log) for log in logs]
    began = time.perf_counter()
    parallel = PARALLEL if find_spec("xdist") else ()
    cases = run_tests(*FILES, *parallel, *pytest) + run_tests(*ALONE, *pytest)
    tests = counted(cases)
    return {
        "provenance": source,
        "cuda": {"runtime": cudart().version, "driver": cudart().driver},
        "kernels": HASH,
        "seconds": round(time.perf_counter() - began, 1),
        "outcomes": {kind: sum(test[kind] for test in tests) for kind in ("passed", "failed", "skipped")},
        "cells": {
            kind: sum(test["passed"] for test in tests if test["test"] == function) for kind, function in CELLS.items()
        },
        "measured": properties(cases),
        "failures": [f"{c.attrib['file']}::{c.attrib['name']}" for c in cases if outcome(c) == "failed"],
        "tests": tests,
        "sanitizers": sanitizers,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser(prog="python -m verify.gpu_record", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=new_file, required=True, help="data/results/<device>/verify.json, say")
    parser.add_argument("--sanitizer", type=Path, nargs="+", default=[], metavar="LOG", help="memcheck.log, …")
    parser.add_argument("--commit", help="where git is not at hand: the commit that this is a clean copy of")
    options, pytest = parser.parse_known_args(arguments)
    found = record(command_line("verify.gpu_record"), options.sanitizer, options.commit, pytest)
    files.write(options.out, json.dumps(found, indent=1) + "\n")
    print(f"{options.out}: {found['outcomes']}, cells {found['cells']}, sanitizers {found['sanitizers']}")
    return 1 if found["failures"] or any(s["errors"] for s in found["sanitizers"]) else 0


if __name__ == "__main__":
    sys.exit(main())
