"""Where figures come from: code, machine, versions, command."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def provenance(command: list[str], seed: int, commit: str | None = None) -> dict[str, Any]:
    """What a reader needs to judge figures, or to get them again. `commit` and `dirty` are None outside a checkout.

    commit  outside a checkout: that of the clean tree from which this is a copy
    """
    import numba
    import psutil
    import torch

    status = git("status", "--porcelain")
    clean_copy = status is None and commit is not None
    return {
        "commit": commit if clean_copy else git("rev-parse", "HEAD"),
        "dirty": False if clean_copy else None if status is None else bool(status),
        "command": command,
        "seed": seed,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "versions": {"python": platform.python_version()}
        | {name: importlib.metadata.version(name) for name in ("torch", "numpy", "numba")},
        "threads": {"torch": torch.get_num_threads(), "numba": numba.get_num_threads()},
    }


def origin(content: Mapping[str, Any]) -> str:
    """Devices, commits and days of a result file, which has one provenance, or one for each session."""
    sources = [part["provenance"] for part in content.get("sessions", [content])]
    devices = {s["gpu"]["name"] if s.get("gpu") else f"{s['cpu']}, {s['cores']} cores" for s in sources}
    commits = {str(s["commit"])[:7] + (" with changes" if s["dirty"] else "") for s in sources}
    days = sorted({s["time"][:10] for s in sources})
    when = " to ".join(dict.fromkeys((days[0], days[-1])))
    return f"{', '.join(sorted(devices))}; commit {', '.join(sorted(commits))}; {when}"


def command_line(module: str) -> list[str]:
    """The command that this process was started with, without the paths of this machine."""
    return ["python", "-m", module, *map(_anywhere, sys.argv[1:])]


def _anywhere(argument: str) -> str:
    """An absolute path from the root of the checkout, or outside of it by its name alone; anything else as it is.

    >>> _anywhere("--out=/elsewhere/bench.json"), _anywhere(f"{ROOT}/out/bench.json"), _anywhere("core,sglang")
    ('--out=bench.json', 'out/bench.json', 'core,sglang')
    """
    option, equals, value = argument.rpartition("=")
    path = Path(value)
    if not path.is_absolute():
        return argument
    return f"{option}{equals}{path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else path.name}"


def git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def cpu_model() -> str:
    """The processor's name; Linux tells it in a file only."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
