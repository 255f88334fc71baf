"""Results to show: of this machine where it has a GPU, and committed ones where it has none."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from refimpl import LAYOUTS
from verify.bench import files
from verify.bench.files import SCHEMAS, Form, NoResults
from verify.bench.gpu import results
from verify.bench.gpu.cases import PAGE_SIZES, PAYLOAD
from verify.bench.provenance import ROOT, origin

Content = dict[str, Any]

COMMITTED = ROOT / "data" / "results" / "h200"
MEASURED = ROOT / "out"
WAY_OUT = "`make run` measures this machine's GPU, RESULTS=committed shows the committed results"
PORTIONS = ("core", "matmul", "descriptors", "pages", "contiguous")
BUDGET_S = 240
FORMS = {"bench": results.FORM, "overlap": Form(SCHEMAS / "overlap.schema.json")}


def shown(name: str, source: str = "", **asked: Any) -> tuple[Path, Content]:
    """A result file and its content. `NoResults` with the way out where it has none to show.

    name    one of `MEASURE`
    source  the path of a file, or of a folder (its file of that name, or else the committed one), or "committed", or
            "": measured now on this machine's GPU, committed if there is none
    asked   for the function that measures, where it does
    """
    if source or not torch.cuda.is_available():
        path = _chosen(name, source)
    else:
        path = MEASURED / f"{name}.json"
        MEASURE[name](path, **asked)
    return path, _content(path, FORMS[name])


def _content(path: Path, form: Form) -> Content:
    """Committed files were held against their schema when they were committed: that takes seconds."""
    try:
        content = files.read(path, form)[1] if path.parent != COMMITTED else files.parsed(path)
    except NoResults as error:
        raise NoResults(f"{error}; {WAY_OUT}") from error
    if not content["rows"]:
        raise NoResults(f"{path}: has no rows; {WAY_OUT}")
    return content


def _chosen(name: str, source: str) -> Path:
    if source in ("", "committed"):
        return committed(name)
    path = ROOT / source
    if path.is_dir():
        return path / f"{name}.json" if (path / f"{name}.json").exists() else committed(name)
    return path


def committed(name: str) -> Path:
    return COMMITTED / f"{name}.json"


def label(path: Path, content: Content) -> str:
    """Whose figures these are. A line that begins with `this machine: ` is not compared by nbval."""
    whose = f"committed results, {path.relative_to(ROOT).as_posix()}" if path.parent == COMMITTED else "this machine"
    return f"{whose}: {origin(content)}"


def measure_bench(
    path: Path,
    models: Sequence[str],
    page_size: int | None = None,
    payload: int = PAYLOAD,
    layouts: Sequence[str] = LAYOUTS,
    budget_s: float = BUDGET_S,
    portions: Sequence[str] = PORTIONS,
    platform: str = "cuda",
) -> None:
    """A new file of `verify.bench.gpu`. Errors as of `_measure`."""
    options = {
        "portion": ",".join(portions),
        "models": ",".join(models),
        "layouts": ",".join(layouts),
        "page-sizes": ",".join(map(str, sorted({*PAGE_SIZES, page_size or PAGE_SIZES[0]}))),
        "payload": payload,
        "budget": budget_s,
        "platform": platform,
    }
    _measure("verify.bench.gpu", path, options)


def measure_overlap(path: Path) -> None:
    """A new file of `verify.bench.gpu.overlap`. Errors as of `_measure`."""
    _measure("verify.bench.gpu.overlap", path, {})


def _measure(module: str, path: Path, options: dict[str, Any]) -> None:
    """By the command that anybody can give. `RuntimeError` with the end of what it said if it fails.

    Cells that are wrong are no failure of the command: the file has them, with what was wrong.
    """
    path.unlink(missing_ok=True)
    given = [f"--{name}={value}" for name, value in {"out": path, **options}.items()]
    command = [sys.executable, "-m", module, *given]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode not in (0, 1) or not path.exists():
        raise RuntimeError(f"{' '.join(command)}:\n{done.stderr[-2000:]}")


MEASURE: dict[str, Callable[..., None]] = {"bench": measure_bench, "overlap": measure_overlap}
