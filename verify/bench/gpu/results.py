"""The result file: sessions and rows as JSON, described by `data/schemas/bench_gpu.schema.json`.

Each start of the benchmark is a session: provenance, settings, ceilings. One file may hold rows of several sessions.
"""

from __future__ import annotations

import json
import subprocess
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from refimpl.support import DIRECTIONS
from verify.bench import files
from verify.bench.files import Form, NoResults
from verify.bench.gpu.measure import NAMES, Key, key
from verify.bench.gpu.record import Call, Ceiling, Row
from verify.bench.provenance import ROOT, provenance

SCHEMA = files.SCHEMAS / "bench_gpu.schema.json"
SGLANG = ROOT / "data" / "results" / "sglang-0.5.23-h200.json"
SGLANG_HERE = "sglang_rates.json"  # of `verify.bench.gpu.sglang`, in the folder of a result file of the same GPU

Content = dict[str, Any]


def _fault(content: Content) -> str:
    """Rows refer to sessions, are held against plain copies in their own direction, and are there once."""
    sessions = content["sessions"]
    for number, session in enumerate(sessions):
        lacking = set(DIRECTIONS) - {ceiling["direction"] for ceiling in session["ceilings"]}
        if lacking:
            return f"$.sessions[{number}].ceilings: no {' and no '.join(sorted(lacking))}"
    wrong = next((n for n, row in enumerate(content["rows"]) if row["session"] >= len(sessions)), None)
    if wrong is not None:
        return f"$.rows[{wrong}].session: {content['rows'][wrong]['session']}, there are {len(sessions)}"
    return files.repeated(content["rows"], NAMES) if sessions else "$.sessions: there is none"


FORM = Form(SCHEMA, _fault)
SGLANG_FORM = Form(files.SCHEMAS / "sglang_rates.schema.json")


class Results:
    """The content of a result file, which grows row by row. `path` None: kept in memory only."""

    def __init__(self, path: Path | None, resume: bool = False) -> None:
        self.path = path
        self.content: Content = {"sessions": [], "rows": []}
        if path and resume and path.exists():
            self.content = files.read(path, FORM)[1]

    def require(self, platform: str) -> None:
        """`NoResults` where sessions were on another platform or GPU: such files are compared, not mixed."""
        here = _device(platform, gpu())
        for session in self.content["sessions"]:
            there = _device(session["settings"]["platform"], session["provenance"]["gpu"])
            if there != here:
                raise NoResults(f"{self.path} has results of {there}, and here is {here}: give another --out")

    def begin(
        self,
        command: list[str],
        settings: dict[str, Any],
        ceilings: list[Ceiling],
        calls: list[Call],
        commit: str | None = None,
    ) -> int:
        """A new session; its position."""
        source = provenance(command, settings["seed"], commit) | {"gpu": gpu()}
        session = {
            "provenance": source,
            "settings": settings,
            "ceilings": [asdict(c) for c in ceilings],
            "calls": [asdict(c) for c in calls],
        }
        self.content["sessions"].append(plain(session))
        return len(self.content["sessions"]) - 1

    def done(self) -> set[Key]:
        """Rows that need not be measured again: no cell of theirs failed."""
        return {key(row) for row in self.content["rows"] if all(cell["status"] != "failed" for cell in row["cells"])}

    def add(self, row: Row) -> None:
        """Keep a row, in place of an earlier one of the same key."""
        new = plain(asdict(row))
        self.content["rows"] = [old for old in self.content["rows"] if key(old) != key(new)] + [new]

    def write(self) -> None:
        """Without a session there is nothing to keep."""
        if self.path and self.content["sessions"]:
            files.write(self.path, as_text(self.content))


def _device(platform: str, gpu: Content | None) -> str:
    return f"{platform} ({gpu['name'] if gpu else 'no GPU'})"


def as_text(content: dict[str, Any]) -> str:
    """JSON with a line for each row: files are large, and lines are what version control compares."""
    head = json.dumps({name: value for name, value in content.items() if name != "rows"}, indent=1)
    rows = ",\n  ".join(json.dumps(row) for row in content["rows"])
    return head.removesuffix("\n}") + f',\n "rows": [\n  {rows}\n ]\n}}\n'


def plain(value: Any) -> Any:
    """The same of JSON types only."""
    return json.loads(json.dumps(value))


def sglang(beside: Path | None = None) -> Content:
    """SGLang's published figures, as fractions of the memcpy of their own run.

    beside  a result file; `here` are the figures that were measured on the same GPU, if its folder has such
    """
    content = json.loads(SGLANG.read_text(encoding="utf-8"))
    measured = beside and beside.with_name(SGLANG_HERE)
    if measured and measured.exists():
        content["here"] = files.read(measured, SGLANG_FORM)[1]["rows"]
    return content


def gpu() -> Content | None:
    """The device, its driver and its bus; None without one. What cannot be found out is None."""
    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        "name": properties.name,
        "sms": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        "cuda": torch.version.cuda,
        "cupy": _cupy_version(),
    } | (_by_nvml() or _by_tool())


def _by_nvml() -> Content | None:
    try:
        import pynvml

        pynvml.nvmlInit()
        device = pynvml.nvmlDeviceGetHandleByIndex(torch.cuda.current_device())
        return {
            "driver": str(pynvml.nvmlSystemGetDriverVersion()),
            "pcie_generation": pynvml.nvmlDeviceGetCurrPcieLinkGeneration(device),
            "pcie_width": pynvml.nvmlDeviceGetCurrPcieLinkWidth(device),
        }
    except Exception:  # not installed, or any of the library's own errors
        return None


def _by_tool() -> Content:
    """What nvidia-smi answers."""
    names = ("driver_version", "pcie.link.gen.current", "pcie.link.width.current")
    command = ["nvidia-smi", f"--query-gpu={','.join(names)}", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout
        driver, generation, width = (part.strip() for part in answer.splitlines()[0].split(","))
    except (OSError, subprocess.SubprocessError, IndexError, ValueError):
        return {"driver": None, "pcie_generation": None, "pcie_width": None}
    return {"driver": driver, "pcie_generation": _number(generation), "pcie_width": _number(width)}


def _number(text: str) -> int | None:
    return int(text) if text.isdigit() else None


def _cupy_version() -> str | None:
    try:
        import cupy
    except ImportError:
        return None
    return cupy.__version__
