"""The suite's mutation score: as it was measured, and of which sources. Nothing is said of others."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / "out" / "mutants.json"
PACKAGES = ("refimpl", "kernels_cupy", "verify")
DATA = ("data/schemas", "data/vectors")  # what tests of the packages read


def sources(root: Path = ROOT) -> str:
    """SHA-256 of the names and contents of all files that mutants and their killers are made of."""
    files = (file for folder in (*PACKAGES, *DATA) for file in (root / folder).rglob("*") if file.is_file())
    named = {file.relative_to(root).as_posix(): file for file in files if "__pycache__" not in file.parts}
    lines = (f"{hashlib.sha256(named[name].read_bytes()).hexdigest()} {name}\n" for name in sorted(named))
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def keep(killed: int, total: int, measured: str) -> None:
    """What a run over all mutants came to; `measured` are the sources that it began with."""
    FILE.parent.mkdir(parents=True, exist_ok=True)
    FILE.write_text(json.dumps({"killed": killed, "total": total, "sources": measured}) + "\n", encoding="utf-8")


def kept(measured: str) -> dict[str, Any] | None:
    """`killed` and `total` as measured for these sources; None where they were not."""
    try:
        found = json.loads(FILE.read_text("utf-8"))
        return {name: int(found[name]) for name in ("killed", "total")} if found["sources"] == measured else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
