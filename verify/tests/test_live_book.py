"""Run All on a machine with a GPU: every notebook runs and shows what the committed one shows, of this GPU."""

import json
from pathlib import Path

import jsonschema
import nbformat
import pytest
import torch
from nbformat import NotebookNode

from verify import notebooks
from verify.bench.gpu import here, results
from verify.bench.gpu.overlap import __main__ as overlap

pytestmark = [pytest.mark.gpu, pytest.mark.slow]  # minutes, and figures want the GPU to themselves

BUDGET_S = "65"  # a share for each portion
SCHEMAS = {"bench": results.SCHEMA, "overlap": overlap.SCHEMA}


def kinds(nb: NotebookNode) -> list[set[str]]:
    """What sorts of output each code cell has: printed text by stream, anything else by its representations."""
    return [
        {output.get("name") or "+".join(sorted(output.data)) for output in cell.outputs}
        for cell in notebooks.code_cells(nb)
    ]


@pytest.mark.parametrize("path", notebooks.committed(), ids=lambda path: path.stem)
def test_a_notebook_runs_live_and_shows_what_the_committed_one_shows(path: Path, tmp_path: Path) -> None:
    live_parameters = notebooks.PARAMETERS | {"RESULTS": "", "BUDGET": BUDGET_S}
    (live,) = notebooks.execute([path], tmp_path, env=live_parameters)
    assert not live.error
    shown, committed = (nbformat.read(which, as_version=4) for which in (live.notebook, path))
    assert [cell.source for cell in shown.cells] == [cell.source for cell in committed.cells]
    assert kinds(shown) == kinds(committed)
    if measured := notebooks.results_of(path):
        assert f"this machine: {torch.cuda.get_device_name()}" in str(shown)
        require_whole(measured)


def require_whole(name: str) -> None:
    """What a notebook has just measured can be sent back as it is."""
    content = json.loads((here.MEASURED / f"{name}.json").read_text(encoding="utf-8"))
    jsonschema.validate(content, json.loads(SCHEMAS[name].read_text(encoding="utf-8")))
    assert content["rows"]
