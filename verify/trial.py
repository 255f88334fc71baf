"""What tests of the command line share: a case by its name, and commands as anybody runs them, and ends them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
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


def interrupted(folder: Path, arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """`python -m verify` by Ctrl-C, which a terminal sends to all its processes, when a file "hangs" is there."""
    # Whoever is started in the background ignores it from the start.
    handler = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)"
    child = subprocess.Popen(
        [sys.executable, "-c", f"{handler}; sys.argv[1:] = {[*arguments]}; import verify.__main__"],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), "."])},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    until = time.monotonic() + 60
    while not (folder / "hangs").exists() and time.monotonic() < until:
        time.sleep(0.05)
    os.killpg(child.pid, signal.SIGINT)
    try:
        out, err = child.communicate(timeout=60)
    finally:
        child.kill()
    return subprocess.CompletedProcess([], child.returncode, out, err)


def by_pytest(folder: Path, name: str, marker: str) -> subprocess.CompletedProcess[str]:
    options = ["-p", "verify.plugin", "-p", "no:cacheprovider", "--hostpool-adapter", name, "-m", marker, "-rN"]
    return command(folder, "-m", "pytest", *options)
