"""The result file: settings, provenance and rows as JSON, described by `data/schemas/bench.schema.json`."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from verify.bench import files
from verify.bench.files import Form
from verify.bench.measure import Settings
from verify.bench.provenance import provenance
from verify.bench.record import Row

SCHEMA = files.SCHEMAS / "bench.schema.json"
NAMES = ("model", "pool", "layout", "direction", "pages")  # of a row
FORM = Form(SCHEMA, lambda content: files.repeated(content["rows"], NAMES))


def as_json(settings: Settings, rows: Iterable[Row], command: list[str]) -> dict[str, Any]:
    """The content of a result file, of plain JSON types only."""
    content = {
        "provenance": provenance(command, settings.seed),
        "settings": asdict(settings),
        "rows": [asdict(row) for row in rows],
    }
    return json.loads(json.dumps(content))


def write(path: Path, content: dict[str, Any]) -> None:
    files.write(path, json.dumps(content, indent=1) + "\n")
