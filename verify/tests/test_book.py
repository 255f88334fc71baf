"""The notebooks as one book: each begins with its summary, leads to others, and prints lines that fit on a page.

And one for readers with and without a GPU: figures of another device change numbers, and nothing that is said.
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
ARTICLES = [path.stem for path in notebooks.committed() if notebooks.results_of(path)]


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


def shown_by(nb: NotebookNode) -> list[NotebookNode]:
    return [output for cell in notebooks.code_cells(nb) for output in cell.outputs]


def words(output: NotebookNode) -> str:
    """What is printed, or a sentence that is shown; nothing of a picture."""
    return output.get("text") or output.get("data", {}).get("text/markdown", "")


def skeleton(nb: NotebookNode) -> list[list[str]]:
    """What each code cell shows, without what a device decides: numbers, digests of them, whose results they are."""
    return [[line for output in cell.outputs for line in bare(output)] for cell in notebooks.code_cells(nb)]


def bare(output: NotebookNode) -> list[str]:
    if not words(output):
        return sorted(output.data)
    text = re.sub(r"(?m)^(committed results, |this machine: ).*$", "whose results", words(output))
    text = re.sub(r"(digest of [^:]*:) \w+", r"\1 digest", text)
    text = re.sub(r"\d+([.,]\d+)*(e[+-]?\d+)?", "0", text)
    return [re.sub(r"[ -]{2,}", "  ", line).strip() for line in text.splitlines()]


@pytest.mark.parametrize("name", ARTICLES)
def test_another_devices_figures_change_numbers_and_nothing_else(name: str, tmp_path: Path):
    path = notebooks.NOTEBOOKS / f"{name}.ipynb"
    results = tmp_path / "results.json"
    results.write_text(json.dumps(slower(json.loads(here.committed(notebooks.results_of(path)).read_text()))))
    (live,) = notebooks.execute([path], tmp_path, env=notebooks.PARAMETERS | {"RESULTS": str(results)})
    assert not live.error
    theirs, committed = (nbformat.read(which, as_version=4) for which in (live.notebook, path))
    assert [cell.source for cell in theirs.cells] == [cell.source for cell in committed.cells]
    assert skeleton(theirs) == skeleton(committed)

    said, before = ("".join(map(words, shown_by(nb))) for nb in (theirs, committed))
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


NAMES = [text.stem for text in sorted((notebooks.NOTEBOOKS / "py").glob("*.py"))]


def links(markdown: str) -> set[str]:
    """Notebooks that a text has links to, by name."""
    found = re.findall(r"\]\(([^)#:]+)\.ipynb(?:#[^)]*)?\)", markdown)
    return {name.removeprefix("notebooks/") for name in found}


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_leads_to_others_that_are_there(name: str):
    """Its last cell names at least the one before it and the one after it."""
    cells = nbformat.read(notebooks.NOTEBOOKS / f"{name}.ipynb", as_version=4).cells
    told = [cell.source for cell in cells if cell.cell_type == "markdown"]
    at = NAMES.index(name)
    assert links("\n".join(told)) <= set(NAMES) - {name}
    assert "## Where to go next" in told[-1]
    assert links(told[-1]) >= {*NAMES[max(at - 1, 0) : at], *NAMES[at + 1 : at + 2]}


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_begins_with_its_summary(name: str):
    first = nbformat.read(notebooks.NOTEBOOKS / f"{name}.ipynb", as_version=4).cells[0]
    assert first.cell_type == "markdown"
    assert first.source.startswith("# ")
    summary = first.source.partition("\nIn short:\n\n")[2]
    assert summary.startswith("- ")
    assert summary.partition("\n\n")[0].count("\n- ") >= 2


LONG = "x" * (notebooks.LONGEST + 1)


@pytest.mark.parametrize(
    ("output", "line"),
    [
        (nbformat.v4.new_output("stream", name="stdout", text=f"{LONG}\n"), 1),
        (nbformat.v4.new_output("stream", name="stdout", text=f"a head\n{LONG[:-1]}\n{LONG}\n"), 3),
        (nbformat.v4.new_output("execute_result", data={"text/plain": f"[1,\n{LONG}"}), 2),
        (nbformat.v4.new_output("stream", name="stdout", text=f"{LONG[:-1]}\n"), None),
        (nbformat.v4.new_output("display_data", data={"text/plain": "<Markdown>", "text/markdown": LONG}), None),
    ],
    ids=["printed", "third line", "last expression", "just fits", "markdown"],
)
def test_a_line_that_a_page_would_break_is_a_problem(output: NotebookNode, line: int | None):
    """With its cell and line; `check` puts the notebook's name before them."""
    cells = [nbformat.v4.new_code_cell(execution_count=n, outputs=shown) for n, shown in ((1, []), (2, [output]))]
    (*found,) = notebooks.problems(nbformat.v4.new_notebook(cells=cells))
    told = f"code cell 1, line {line} has {notebooks.LONGEST + 1} columns of {notebooks.LONGEST}: {'x' * 40}…"
    assert found == ([told] if line else [])
