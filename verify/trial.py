"""What tests of the adapter kit share: a case by its name, and commands as anybody runs them, elsewhere."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from verify.adapters import suite
from verify.adapters.protocol import Json

ROOT = Path(__file__).resolve().parents[1]


def only(group: str, test: str = "") -> tuple[suite.Group, Json]:
    (found,) = [g for g in suite.groups() if g.geometry["id"] == group]
    return found, next(t for t in found.tests if t["id"].endswith(test))


def command(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """As anybody runs it: elsewhere, with the project on the path."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), "."]), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )


def by_pytest(folder: Path, name: str, marker: str) -> subprocess.CompletedProcess[str]:
    options = ["-p", "verify.plugin", "-p", "no:cacheprovider", "--hostpool-adapter", name, "-m", marker, "-rN"]
    return command(folder, "-m", "pytest", *options)
