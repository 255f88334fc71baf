"""README and code say the same."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import re

import pytest

import refimpl
import verify
from verify import docs
from verify.environment import missing

MODULES = [
    module.name
    for package in (refimpl, verify)
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
    if "test_" not in module.name and "conftest" not in module.name and "__main__" not in module.name
]


def test_the_computed_parts_of_the_readme_are_current() -> None:
    text = docs.README.read_text()
    assert set(docs.COMPUTED) == {name for _, name, _ in docs.MARKED.findall(text)}
    assert docs.rewritten(text) == text, "run `python -m verify docs`"


@pytest.mark.parametrize("module", MODULES)
def test_examples_in_docstrings_run(module: str) -> None:
    if module == "verify.notebooks" and missing("notebooks"):
        pytest.skip(f"needs {', '.join(missing('notebooks'))}")
    failed, _ = doctest.testmod(importlib.import_module(module))
    assert not failed


def test_files_named_in_the_documents_exist() -> None:
    root = docs.README.parent
    here = {path for path in root.iterdir() if path.name[0] != "." and path.name != "out"}
    files = [f"/{file.relative_to(root).as_posix()}" for top in here for file in (top, *top.rglob("*"))]
    for document in ("README.md", "ARCHITECTURE.md"):
        for path in re.findall(
            r"`([\w./-]+\.(?:py|cuh?|c|md|json|ipynb|toml|yml|html))`|\]\(([\w./-]+)\)", (root / document).read_text()
        ):
            name = next(filter(None, path)).rstrip("/")
            if not name.startswith(("srt/", "out/")):
                assert any(file.endswith(f"/{name}") for file in files), f"{document} names {name}"
