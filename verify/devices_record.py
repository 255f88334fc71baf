"""`python -m verify.devices_record`: everything that needs several GPUs, run on these and written down.

Beside `verify.gpu_record`, which one GPU is enough for. `test_devices.py` reads the record.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import torch

from kernels_cupy.specs import HASH
from refimpl import numa
from refimpl.cudart import cudart
from verify.arguments import Parser, new_file
from verify.bench import files
from verify.bench.gpu.results import gpu
from verify.bench.provenance import ROOT, command_line, provenance
from verify.gpu_record import OUTCOMES, counted, outcome, run_tests

SCHEMA = ROOT / "data" / "schemas" / "devices.schema.json"
FILE = "verify/tests/test_devices.py"
MARKER = "several_gpus"


def record(command: list[str], commit: str | None, pytest: Sequence[str]) -> dict[str, Any]:
    began = time.perf_counter()
    parallel = ["-n", "8", "--dist", "worksteal"] if find_spec("xdist") else []
    cases = run_tests(FILE, "-m", MARKER, *parallel, *pytest)
    tests = counted(cases)
    return {
        "provenance": provenance(command, 0, commit),
        "devices": devices(),
        "cuda": {"runtime": cudart().version, "driver": cudart().driver},
        "kernels": HASH,
        "seconds": round(time.perf_counter() - began, 1),
        "outcomes": {kind: sum(test[kind] for test in tests) for kind in ("passed", *sorted(set(OUTCOMES.values())))},
        "failures": [f"{case.attrib['file']}::{case.attrib['name']}" for case in cases if outcome(case) == "failed"],
        "tests": tests,
    }


def devices() -> list[dict[str, Any]]:
    """Every GPU, and the NUMA node that it is attached to."""
    found = []
    for number in range(torch.cuda.device_count()):
        with torch.cuda.device(number):
            found.append({"device": f"cuda:{number}", "gpu": gpu(), "numa_node": numa.nearest(f"cuda:{number}")})
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser(prog="python -m verify.devices_record", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=new_file, required=True, help="data/results/<device>-x2/devices.json, say")
    parser.add_argument("--commit", help="where git is not at hand: the commit that this is a clean copy of")
    options, pytest = parser.parse_known_args(arguments)
    if torch.cuda.device_count() < 2:
        print(f"two GPUs are needed at least, here are {torch.cuda.device_count()}", file=sys.stderr)
        return 2
    found = record(command_line("verify.devices_record"), options.commit, pytest)
    files.write(options.out, json.dumps(found, indent=1) + "\n")
    print(f"{options.out}: {found['outcomes']} on {len(found['devices'])} GPUs")
    return int(bool(found["failures"] or not found["outcomes"]["passed"]))


if __name__ == "__main__":
    sys.exit(main())
