"""Result files: held against their schema when they are read, and written whole or not at all."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verify.bench.provenance import ROOT

Content = dict[str, Any]
SCHEMAS = ROOT / "data" / "schemas"


class NoResults(ValueError):
    """The file is not what can be used."""


@dataclass(frozen=True)
class Form:
    """What files of a kind follow: a schema, and what none can say. `fault` tells where a file does not, or nothing."""

    schema: Path
    fault: Callable[[Content], str] = lambda content: ""


def read(path: Path, *forms: Form) -> tuple[Form, Content]:
    """A result file and its form. `NoResults` if it cannot be read or follows none of the forms."""
    content = parsed(path)
    for form in forms:
        schema = json.loads(form.schema.read_text(encoding="utf-8"))
        if len(forms) == 1 or (isinstance(content, dict) and set(content) == set(schema["required"])):
            if fault := _fault(content, form, schema):
                raise NoResults(f"{path}: does not follow {form.schema.name}: {fault}")
            return form, content
    raise NoResults(f"{path}: follows neither {' nor '.join(form.schema.name for form in forms)}")


def parsed(path: Path) -> Any:
    """Any JSON of finite numbers. `NoResults` if the file has none."""
    try:
        return json.loads(path.read_text(encoding="utf-8"), parse_float=_finite, parse_constant=_finite)
    except (OSError, ValueError, RecursionError) as error:
        raise NoResults(f"{path}: {error}") from error


def _finite(text: str) -> float:
    if not math.isfinite(float(text)):
        raise ValueError(f"{text} is no finite number")
    return float(text)


def _fault(content: Any, form: Form, schema: Content) -> str:
    try:
        import jsonschema
    except ImportError as error:
        raise NoResults("reading results needs jsonschema: pip install jsonschema") from error
    fault = next(jsonschema.Draft202012Validator(schema).iter_errors(content), None)
    return f"{fault.json_path}: {fault.message[:120]}" if fault else form.fault(content)


def repeated(rows: list[Content], names: Sequence[str]) -> str:
    """Where a row stands that was there before, or nothing."""
    seen: dict[tuple[Any, ...], int] = {}
    for number, row in enumerate(rows):
        name = tuple(row[one] for one in names)
        if name in seen:
            return f"$.rows[{number}]: the same as $.rows[{seen[name]}], {', '.join(map(str, name))}"
        seen[name] = number
    return ""


def write(path: Path, text: str) -> None:
    """If this is interrupted, the old file stays."""
    path = path.resolve()
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.unfinished")
    unfinished.write_text(text, encoding="utf-8")
    unfinished.replace(path)
