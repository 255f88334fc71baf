"""What a page of JupyterLab lacks is found, and nothing else; tiny notebooks in a real server and a real browser."""

from pathlib import Path

import nbformat
import psutil
import pytest
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_notebook, new_output

from verify import lab, notebooks

TEXT, PICTURE = "application/vnd.jupyter.stdout", "image/png"
PLOT = "import matplotlib.pyplot as plt\nplt.plot([1, 3, 2])\nplt.show()"


def as_shown(*cells: list[str]) -> lab.Outputs:
    return [[(kind, "text") for kind in kinds] for kinds in cells]


COMMITTED = as_shown([], [TEXT, PICTURE], [TEXT])


@pytest.mark.parametrize(
    ("shown", "said"),
    [
        (COMMITTED, []),
        (as_shown([], [TEXT], [TEXT]), [f"code cell 1 shows {TEXT}, not {TEXT}, {PICTURE}"]),
        (as_shown([], [TEXT, "blank"], [TEXT]), [f"code cell 1 shows {TEXT}, blank, not {TEXT}, {PICTURE}"]),
        (as_shown([TEXT], [TEXT, PICTURE], [TEXT]), [f"code cell 0 shows {TEXT}, not nothing"]),
        (as_shown([], [TEXT, PICTURE], [TEXT, TEXT]), [f"code cell 2 shows {TEXT}, {TEXT}, not {TEXT}"]),
        (as_shown([], [TEXT, PICTURE]), [f"code cell 2 shows nothing, not {TEXT}"]),
        (as_shown([], [PICTURE, TEXT], [TEXT]), [f"code cell 1 shows {PICTURE}, {TEXT}, not {TEXT}, {PICTURE}"]),
    ],
)
def test_what_is_missing_added_blank_or_of_another_kind_is_named(shown: lab.Outputs, said: list[str]):
    assert lab.differences(COMMITTED, shown) == said


def test_after_a_cell_that_failed_the_rest_is_not_listed():
    failed: lab.Outputs = [[], [(lab.STDERR, "Traceback …\nKeyError: 'k'\n")], []]
    assert lab.differences(COMMITTED, failed) == [
        f"code cell 1 shows {lab.STDERR}, not {TEXT}, {PICTURE}",
        "KeyError: 'k'",
    ]


def test_lab_shows_a_picture_rather_than_its_text():
    picture = new_output("display_data", {"text/plain": "<Figure>", "image/png": ""})
    printed = new_output("stream", name="stdout", text="1\n")
    nb = new_notebook(cells=[new_code_cell(outputs=[printed, picture])])
    assert [[kind for kind, _ in cell] for cell in lab.stored(nb)] == [[TEXT, PICTURE]]


def tiny(path: Path, *sources: str) -> Path:
    """A notebook as it is committed: run, with its outputs."""
    nb: NotebookNode = new_notebook(cells=[new_code_cell(source) for source in sources])
    nb.metadata.kernelspec = nbformat.from_dict(notebooks.KERNEL)
    assert not notebooks.run(nb, path.parent, timeout=60)
    nbformat.write(notebooks.stripped(nb), path)
    return path


@pytest.mark.skipif(bool(lab.missing()), reason=f"JupyterLab is not opened, {lab.missing()}")
def test_a_page_is_compared_with_what_is_committed(tmp_path: Path):
    """The first notebook is as it was; of the others something is changed after they were stored."""
    folder = tmp_path / "notebooks"
    folder.mkdir()
    (folder / "beside.py").write_text("import refimpl\nVALUE = 3\n")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "rows.txt").write_text("8 rows")
    reads = "from pathlib import Path\nimport beside\nprint(beside.VALUE, Path('../data/rows.txt').read_text())"
    good = tiny(folder / "good.ipynb", reads, PLOT, "object()")
    edits = {"failing": (PLOT, "1 / 0"), "plotless": ("plt.show()", "plt.close()")}
    for name, (old, new) in edits.items():
        (folder / f"{name}.ipynb").write_text(good.read_text())
        nb = nbformat.read(folder / f"{name}.ipynb", as_version=4)
        nb.cells[1].source = nb.cells[1].source.replace(old, new)
        nbformat.write(nb, folder / f"{name}.ipynb")
    before = {path: path.read_bytes() for path in folder.iterdir()}

    said = lab.look([good, folder / "failing.ipynb", folder / "plotless.ipynb"], tmp_path / "pictures")
    assert said == [
        f"failing.ipynb: code cell 1 shows {lab.STDERR}, not {PICTURE}",
        "failing.ipynb: ZeroDivisionError: division by zero",
        f"plotless.ipynb: code cell 1 shows nothing, not {PICTURE}",
    ]
    assert {path: path.read_bytes() for path in folder.iterdir()} == before, "committed notebooks are left alone"
    assert {path.name for path in (tmp_path / "pictures").iterdir()} == {
        "good.png",
        "failing.png",
        "plotless.png",
    }
    left = [child.name() for child in psutil.Process().children(recursive=True)]
    assert not any("jupyter" in name or "chrom" in name for name in left), "server, kernels and browser are gone"
