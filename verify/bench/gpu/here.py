"""Results to show: of this machine where it has a GPU, and committed ones where it has none."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from refimpl import LAYOUTS
from verify.bench.gpu.cases import MIB, PAGE_SIZES
from verify.bench.provenance import ROOT

Content = dict[str, Any]

COMMITTED = ROOT / "data" / "results" / "h200" / "bench.json"
MEASURED = ROOT / "out" / "bench.json"
PORTIONS = ("core", "matmul", "descriptors", "pages", "contiguous")
BUDGET_S = 240
PAYLOAD = 256 * MIB


def shown(source: str = "", **asked: Any) -> tuple[Path, Content]:
    """A result file and its content.

    source  the path of one, or "committed", or "": measured now on the GPU of this machine, committed if there is none
    asked   for `measure`, where it measures
    """
    if source or not torch.cuda.is_available():
        path = COMMITTED if source in ("", "committed") else ROOT / source
    else:
        path = MEASURED
        measure(path, **asked)
    return path, json.loads(path.read_text(encoding="utf-8"))


def measure(
    path: Path,
    models: Sequence[str],
    page_size: int | None = None,
    payload: int = PAYLOAD,
    layouts: Sequence[str] = LAYOUTS,
    budget_s: float = BUDGET_S,
    portions: Sequence[str] = PORTIONS,
    platform: str = "cuda",
) -> None:
    """A new file, by the command that anybody can give. `RuntimeError` with the end of what it said if it fails.

    Cells that are wrong are no failure of the command: the file has them, with what was wrong.
    """
    options = {
        "out": path,
        "portion": ",".join(portions),
        "models": ",".join(models),
        "layouts": ",".join(layouts),
        "page-sizes": ",".join(map(str, sorted({*PAGE_SIZES, page_size or PAGE_SIZES[0]}))),
        "payload": payload,
        "budget": budget_s,
        "platform": platform,
    }
    path.unlink(missing_ok=True)
    command = [sys.executable, "-m", "verify.bench.gpu", *(f"--{name}={value}" for name, value in options.items())]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode not in (0, 1) or not path.exists():
        raise RuntimeError(f"{' '.join(command)}:\n{done.stderr[-2000:]}")


def label(path: Path, content: Content) -> str:
    """Whose figures these are. A line that begins with `this machine: ` is not compared by nbval."""
    from verify.bench.compare import gpu_origin

    if path == COMMITTED:
        return f"committed results, {path.relative_to(ROOT).as_posix()}: {gpu_origin(content)}"
    return f"this machine: {gpu_origin(content)}"
