"""One book for readers with and without a GPU: figures of another device change numbers, and nothing that is said.

`here.shown` takes the figures of this machine's GPU where it has one. Here they are of a device that never was: the
committed results on a GPU that is slower throughout, so that every comparison within them comes out as before.
"""

import json
import re
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbformat import NotebookNode

from verify import notebooks
from verify.bench.gpu import here

SLOWER = 1.04  # too little for another unit: 970 µs stay below a millisecond
GPU = "NVIDIA Toy"
ARTICLES = sorted(text.stem for text in notebooks.NOTEBOOKS.glob("py/*.py") if "here.shown(" in text.read_text())


def slower(content: Any, key: str = "") -> Any:
    """The same results of a slower device: durations (`…_s`) are longer, rates (`…_per_s`) lower."""
    match content:
        case dict():
            return {
                name: GPU if (key, name) == ("gpu", "name") else slower(part, name) for name, part in content.items()
            }
        case list():
            return [slower(part, key) for part in content]
        case float() if key.endswith("_per_s"):
            return content / SLOWER
        case float() if key.endswith("_s"):
            return content * SLOWER
    return content


def skeleton(nb: NotebookNode) -> list[list[str]]:
    """What each code cell shows, without what a device decides: numbers, digests of them, whose results they are."""
    return [[line for output in cell.outputs for line in bare(output)] for cell in notebooks.code_cells(nb)]


def bare(output: NotebookNode) -> list[str]:
    if "text" not in output:
        return sorted(output.data)
    text = re.sub(r"(?m)^(committed results, |this machine: ).*$", "whose results", output.text)
    text = re.sub(r"(digest of [^:]*:) \w+", r"\1 digest", text)
    text = re.sub(r"\d+([.,]\d+)*(e[+-]?\d+)?", "0", text)
    return [re.sub(r"[ -]{2,}", "  ", line).strip() for line in text.splitlines()]


@pytest.mark.parametrize("name", ARTICLES)
def test_another_devices_figures_change_numbers_and_nothing_else(name: str, tmp_path: Path):
    path = notebooks.NOTEBOOKS / f"{name}.ipynb"
    (kind,) = re.findall(r'here\.shown\(\s*"(\w+)"', notebooks.pair(path).read_text())
    results = tmp_path / "results.json"
    results.write_text(json.dumps(slower(json.loads(here.committed(kind).read_text()))))
    (live,) = notebooks.execute([path], tmp_path, env=notebooks.PARAMETERS | {"RESULTS": str(results)})
    assert not live.error
    theirs, committed = (nbformat.read(which, as_version=4) for which in (live.notebook, path))
    assert [cell.source for cell in theirs.cells] == [cell.source for cell in committed.cells]
    assert skeleton(theirs) == skeleton(committed)

    said, before = (
        "".join(output.get("text", "") for cell in notebooks.code_cells(nb) for output in cell.outputs)
        for nb in (theirs, committed)
    )
    assert f"this machine: {GPU}" in said, "and a reader is told whose they are"
    assert said.count("digest of") == before.count("digest of") > 0
    assert said != before, "the figures are those of the other device"


def test_every_article_of_device_figures_is_compared():
    assert len(ARTICLES) >= 2


def stream(text: str) -> NotebookNode:
    return nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(outputs=[nbformat.v4.new_output("stream", name="stdout", text=text)])]
    )


@pytest.mark.parametrize(
    ("other", "same"),
    [
        ("pool  GB/s\n----  -----\nkv     7.25\n", True),
        ("pool   GB/s\n-----  ----\nkv      7.2\n", True),
        ("pool  GB/s\n----  -----\nmamba  7.25\n", False),
        ("pool  µs\n----  -----\nkv     7.25\n", False),
        ("pool  GB/s\n----  -----\nkv     7.25\nkv     7.25\n", False),
        ("pool  GB/s\n----  -----\nkv     none\n", False),
    ],
)
def test_a_table_is_compared_by_its_headings_and_rows(other: str, same: bool):
    assert (skeleton(stream(other)) == skeleton(stream("pool  GB/s\n----  -----\nkv    53.10\n"))) is same
