"""The notebook gate: `make verify` fails on what changed, and on nothing else.

Tiny notebooks are run for real, then altered, then compared by the very command of `make verify` (B37).
"""

import json
import os
import re
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
import zlib
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import nbformat
import pytest
from nbformat import NotebookNode

from verify import notebooks
from verify.bench.gpu import here
from verify.trial import interrupted

TINY = """\
# %% [markdown]
# # A tiny notebook
# It goes on in [another one](other.ipynb).

# %%
import os
import time
import zlib

from tqdm import tqdm

# %%
print(f"{zlib.crc32(b'page 3'):08x}")

# %%
print(f"copied in {time.perf_counter():.3f} ms")
print(f"this machine: device {os.getpid()}")
object()

# %%
for _ in tqdm(range(3)):
    time.sleep(0.01)
"""


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of notebooks with the gate of the real one, and `tiny` in it, refreshed."""
    folder = tmp_path_factory.mktemp("house") / "notebooks"
    (folder / "py").mkdir(parents=True)
    shutil.copy(notebooks.NOTEBOOKS / "conftest.py", folder)
    shutil.copy(notebooks.ROOT / "jupytext.toml", folder.parent)
    (folder / "py" / "tiny.py").write_text(TINY)
    notebooks.refresh([folder / "tiny.ipynb"])
    return folder


def nbval(folder: Path, *names: str) -> dict[str, str]:
    """{notebook: "passed", "failed" or "skipped"}, by the command that `make verify` runs."""
    report = folder / "report.xml"
    command = notebooks.nbval_command([folder / f"{name}.ipynb" for name in names], workers="0")
    done = subprocess.run([*command, f"--rootdir={folder}", f"--junit-xml={report}"], capture_output=True, text=True)
    verdicts = {}
    for case in ET.parse(report).iter("testcase"):
        verdict = {"failure": "failed", "error": "failed"}.get(case[0].tag, "skipped") if len(case) else "passed"
        where = f"{case.get('classname')} {case.get('name')}"
        (name,) = [name for name in names if name in where]
        verdicts[name] = "failed" if "failed" in (verdict, verdicts.get(name)) else verdict
    assert set(verdicts) == set(names), done.stdout + done.stderr
    assert done.returncode == ("failed" in verdicts.values()), done.stdout + done.stderr
    return verdicts


def altered(house: Path, name: str, edit: Callable[[list[NotebookNode]], None]) -> None:
    nb = nbformat.read(house / "tiny.ipynb", as_version=4)
    edit(notebooks.code_cells(nb))
    nbformat.write(nb, house / f"{name}.ipynb")


# What is done to the stored notebook, and what must come of it. Cells: imports, checksum, noise, bar.


def unchanged(cells: list[NotebookNode]) -> None:
    pass


def checksum(cells: list[NotebookNode]) -> None:
    cells[1].outputs[0].text = "00000000\n"


def noise(cells: list[NotebookNode]) -> None:
    cells[2].outputs[0].text = "copied in 77.7 ms\nthis machine: device 8 of another kind\n"
    cells[2].outputs[1].data["text/plain"] = "<object at 0x123456789abc>"


def progress(cells: list[NotebookNode]) -> None:
    cells[3].outputs[0].text = "\r 50%|##   | 1/2 [00:07<00:07, 7.0s/it]\r100%|#####| 2/2 [00:14<00:00, 7.0s/it]\n"


def lost_output(cells: list[NotebookNode]) -> None:
    cells[1].outputs = []


def never_run(cells: list[NotebookNode]) -> None:
    cells[1].outputs, cells[1].execution_count = [], None


def order(cells: list[NotebookNode]) -> None:
    cells[1].execution_count, cells[2].execution_count = 3, 2


def new_bad_magic(cells: list[NotebookNode]) -> None:
    cells[0].source += "\n%no_such_magic"


def stored_bad_magic(cells: list[NotebookNode]) -> None:
    new_bad_magic(cells)
    message = "UsageError: Line magic function `%no_such_magic` not found.\n"
    cells[0].outputs = [nbformat.v4.new_output("stream", name="stderr", text=message)]


def stored_error(cells: list[NotebookNode]) -> None:
    cells[0].source += "\n1 / 0"
    cells[0].outputs = [nbformat.v4.new_output("error", ename="ZeroDivisionError", evalue="", traceback=[])]


def long_line(cells: list[NotebookNode]) -> None:
    cells[1].source = f"print('—' * {notebooks.LONGEST + 1})"
    cells[1].outputs[0].text = "—" * (notebooks.LONGEST + 1) + "\n"


PASS = [unchanged, noise, progress]
FAIL = [checksum, lost_output, never_run, order, new_bad_magic, stored_bad_magic, stored_error, long_line]


@pytest.mark.timeout(120)
def test_what_changed_fails_and_what_must_differ_passes(house: Path):
    for edit in PASS + FAIL:
        altered(house, edit.__name__, edit)
    right = {edit.__name__: "passed" for edit in PASS} | {edit.__name__: "failed" for edit in FAIL}
    assert nbval(house, *right) == right


@pytest.mark.slow
def test_a_cell_silent_for_twenty_seconds_passes(house: Path):
    def silence(cells: list[NotebookNode]) -> None:
        cells[1].source = "time.sleep(20)\n" + cells[1].source

    altered(house, "silent", silence)
    assert nbval(house, "silent") == {"silent": "passed"}


@pytest.mark.skipif(notebooks.have_gpu(), reason="shows what happens without a GPU")
def test_a_gpu_notebook_is_skipped_whole_and_keeps_its_outputs(house: Path, tmp_path: Path):
    altered(house, "onlygpu", checksum)  # would fail if it ran
    nb = nbformat.read(house / "onlygpu.ipynb", as_version=4)
    nb.metadata.kv = {"device": "gpu"}
    nbformat.write(nb, house / "onlygpu.ipynb")
    assert nbval(house, "onlygpu") == {"onlygpu": "skipped"}
    (result,) = notebooks.execute([house / "onlygpu.ipynb"], tmp_path)
    assert result.skipped
    assert not result.error
    assert "00000000" in result.html.read_text()


def test_refreshed_notebooks_are_clean_and_others_are_found_out(house: Path, tmp_path: Path):
    shutil.copytree(house.parent, tmp_path, dirs_exist_ok=True)
    tiny = tmp_path / "notebooks" / "tiny.ipynb"
    assert notebooks.check([tiny]) == []

    before = tiny.read_bytes()
    nb = nbformat.read(tiny, as_version=4)
    nb.metadata.language_info.version = "3.11.0"
    nbformat.write(nb, tiny)
    assert notebooks.check([tiny]) == ["tiny.ipynb: is not stripped"]
    tiny.write_bytes(before)

    text = notebooks.pair(tiny)
    text.write_text(text.read_text().replace("page 3", "page 4"))
    assert notebooks.check([tiny]) == ["tiny.ipynb: differs from its text pair py/tiny.py"]

    (text.parent / "lost.py").write_text("# %%\n")
    assert notebooks.check([tiny])[-1] == "py/lost.py: has no notebook"


@pytest.mark.parametrize("edited", ["notebook", "text"])
def test_refresh_takes_the_side_that_was_edited_last(house: Path, tmp_path: Path, edited: str):
    shutil.copytree(house.parent, tmp_path, dirs_exist_ok=True)
    tiny = tmp_path / "notebooks" / "tiny.ipynb"
    ids = [cell.id for cell in nbformat.read(tiny, as_version=4).cells]
    side = tiny if edited == "notebook" else notebooks.pair(tiny)
    side.write_text(side.read_text().replace("page 3", "page 4"))
    os.utime(side, (time.time() + 5, time.time() + 5))
    notebooks.refresh([tiny])
    assert notebooks.check([tiny]) == []
    nb = nbformat.read(tiny, as_version=4)
    assert "page 4" in notebooks.code_cells(nb)[1].source
    assert notebooks.code_cells(nb)[1].outputs[0].text == f"{zlib.crc32(b'page 4'):08x}\n"
    assert [cell.id for cell in nb.cells] == ids


def test_executing_goes_on_after_a_failure_and_leaves_pages_that_need_no_network(
    house: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    def failing(cells: list[NotebookNode]) -> None:
        cells[1].source = "import refimpl\nprint(os.environ['KV_TEST'])\n1 / 0"

    altered(house, "failing", failing)
    altered(house, "magic", new_bad_magic)
    books = [house / f"{name}.ipynb" for name in ("failing", "magic", "tiny")]
    before = [book.read_bytes() for book in books]
    bad, magic, good = notebooks.execute(books, tmp_path / "out", env={"KV_TEST": "heard"})
    assert [book.read_bytes() for book in books] == before
    assert bad.error == "ZeroDivisionError: division by zero (at 1 / 0)"
    assert "UsageError" in magic.error
    assert not good.error

    cells = notebooks.code_cells(nbformat.read(bad.notebook, as_version=4))
    assert cells[1].outputs[0].text == "heard\n"
    assert [cell.execution_count for cell in cells] == [1, 2, None, None]
    assert cells[3].outputs == []  # not the old ones

    page = good.html.read_text()
    assert 'src="http' not in page
    assert "import(" not in page
    assert 'href="other.html"' in page
    out, err = capfd.readouterr()
    assert out == ""
    assert "12/12" not in err  # the failed notebook did not reach its last two cells
    assert "cell" in err


def test_an_interrupt_ends_the_notebook_and_the_command(house: Path, tmp_path: Path):
    """In a word: whatever becomes of the kernel, of its cell and of nbclient, nobody asked for it."""

    def hanging(cells: list[NotebookNode]) -> None:
        there = tmp_path / "hangs"
        cells[1].source = f"import pathlib\npathlib.Path({str(there)!r}).touch()\ntime.sleep(300)"

    altered(house, "hanging", hanging)
    done = interrupted(tmp_path, ["run", "--notebooks", str(house / "hanging.ipynb"), "--out", "out"])
    assert (done.returncode, done.stderr.splitlines()[-1]) == (130, "interrupted")
    assert "Traceback" not in done.stderr


def test_first_cells_read_known_parameters_and_what_is_committed_ran_without_any():
    """Whatever a shell or `make` has set, nbval and refresh see what everybody sees."""
    read = {
        (text.stem, name)
        for text in (notebooks.NOTEBOOKS / "py").glob("*.py")
        for name in re.findall(r"environ\.get\(\"(\w+)\"\)", text.read_text())
    }
    assert read
    assert {name for _, name in read} <= notebooks.PARAMETERS.keys()
    assert {value for name, value in notebooks.PARAMETERS.items() if name != "RESULTS"} == {""}


def test_parameters_of_the_shell_do_not_reach_what_is_committed(
    house: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    shutil.copytree(house.parent, tmp_path, dirs_exist_ok=True)
    text = notebooks.pair(tmp_path / "notebooks" / "tiny.ipynb")
    text.write_text('# %%\nimport os\n\nprint(os.environ["MODEL"] or "none", os.environ["RESULTS"])\n')
    os.utime(text, (time.time() + 5, time.time() + 5))
    monkeypatch.setenv("MODEL", "llama-9")
    notebooks.refresh([tmp_path / "notebooks" / "tiny.ipynb"])
    (cell,) = notebooks.code_cells(nbformat.read(tmp_path / "notebooks" / "tiny.ipynb", as_version=4))
    assert cell.outputs[0].text == "none committed\n"


@pytest.mark.parametrize("action", ["check", "refresh", "nbval"])
@pytest.mark.parametrize(
    ("path", "error"), [("nope.ipynb", "there is no file 'nope.ipynb'"), (__file__, f"'{__file__}' is no notebook")]
)
def test_what_is_no_notebook_is_told_in_a_line(action: str, path: str, error: str):
    program = [sys.executable, "-m", "verify.notebooks", action, path]
    done = subprocess.run(program, cwd=notebooks.ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.endswith(error)


def test_a_notebook_may_be_made_of_its_text_pair(house: Path, tmp_path: Path):
    shutil.copytree(house.parent, tmp_path, dirs_exist_ok=True)
    tiny = tmp_path / "notebooks" / "tiny.ipynb"
    tiny.unlink()
    assert notebooks.notebook_or_pair(str(tiny)) == tiny


def said(nb: NotebookNode) -> str:
    """All that cells print, and sentences that they show."""
    outputs = [output for cell in notebooks.code_cells(nb) for output in cell.outputs]
    return "\n".join(o.get("text") or o.get("data", {}).get("text/markdown", "") for o in outputs)


def headings(nb: NotebookNode) -> list[str]:
    """What tables of a notebook's outputs are headed by: the line above each rule."""
    lines = [line for c in notebooks.code_cells(nb) for o in c.outputs for line in o.get("text", "").splitlines()]
    return [" ".join(above.split()) for above, line in pairwise(lines) if re.fullmatch(r"-[- ]+-", line)]


def test_readers_with_and_without_a_gpu_get_the_same_text_and_tables(tmp_path: Path):
    """Another device's results, and the committed ones: other figures, the same article."""
    other = json.loads(here.committed("bench").read_text())
    for session in other["sessions"]:
        session["provenance"]["gpu"]["name"] = "NVIDIA Toy"
    for row in other["rows"]:
        for cell in row["cells"]:
            if cell["mover"] == "direct" and cell["timing"]:
                cell["timing"] |= {"median_s": 9.0, "quartiles_s": [9.0, 9.0]}
    (tmp_path / "bench.json").write_text(json.dumps(other))
    path = notebooks.NOTEBOOKS / "04_pairings.ipynb"
    (live,) = notebooks.execute([path], tmp_path, env=notebooks.PARAMETERS | {"RESULTS": str(tmp_path / "bench.json")})
    assert not live.error
    here_shown, committed = (nbformat.read(which, as_version=4) for which in (live.notebook, path))
    assert [c.source for c in here_shown.cells] == [c.source for c in committed.cells]
    assert headings(here_shown) == headings(committed)
    assert len(headings(committed)) >= 4
    assert "this machine: NVIDIA Toy; " in said(here_shown)
    assert re.search(r"kv backup: take \w+ with (kernel|staged)", said(here_shown)), "direct is slow on that device"


@pytest.mark.parametrize("rows", [1, 11])
def test_results_that_a_budget_has_cut_short_are_shown_as_far_as_they_go(rows: int, tmp_path: Path):
    """So many rows of each portion: a budget is shared out between them."""
    content = json.loads(here.committed("bench").read_text())
    seen = Counter[str]()
    for row in content["rows"]:
        seen[row["portion"]] += 1
        row["kept"] = seen[row["portion"]] <= rows
    content["rows"] = [row for row in content["rows"] if row.pop("kept")]
    (tmp_path / "bench.json").write_text(json.dumps(content))
    path = notebooks.NOTEBOOKS / "04_pairings.ipynb"
    (live,) = notebooks.execute([path], tmp_path, env=notebooks.PARAMETERS | {"RESULTS": str(tmp_path / "bench.json")})
    assert not live.error
