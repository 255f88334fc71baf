"""Notebooks as part of the suite: run them, refresh what is committed, say what is wrong with it.

    execute(paths, out_dir)   run top to bottom; executed copies and HTML in out_dir
    refresh(paths)            run in place, strip, write the text pairs
    check(paths)              problems in committed notebooks, nothing is run
    nbval_command(paths)      run again and compare with the stored outputs

The pair of notebooks/NAME.ipynb is notebooks/py/NAME.py. A notebook whose metadata says
`kv: {device: gpu}` needs a GPU; without one it is skipped whole and keeps its stored outputs.

A notebook's first cell reads its parameters from the environment (`PARAMETERS`). What is committed was run without any,
and with committed results, on every machine; `make run` and JupyterLab hand on what they are given.

    python -m verify.notebooks check|refresh|nbval [NOTEBOOK ...]
"""

import argparse
import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import ipykernel.kernelspec
import jupytext
import nbformat
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import AsyncKernelManager
from jupytext.combine import combine_inputs_with_outputs
from jupytext.config import load_jupytext_config
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from nbconvert import HTMLExporter
from nbformat import NotebookNode
from nbstripout import strip_output
from tqdm import tqdm

from verify.arguments import Parser, file

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = ROOT / "notebooks"
CELL_TIMEOUT = 300.0  # seconds

# Metadata that depends on who ran the notebook, and where.
STRIP = [
    "metadata.jupytext",
    "metadata.language_info.version",
    "metadata.signature",
    "metadata.widgets",
    "cell.metadata.collapsed",
    "cell.metadata.ExecuteTime",
    "cell.metadata.execution",
    "cell.metadata.scrolled",
]
KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}
# Environment variables that first cells read, and their values in what is committed: "" is as if not given.
PARAMETERS: dict[str, str] = {
    "MODEL": "",
    "PAGE_SIZE": "",
    "PAGES": "",
    "PAYLOAD": "",
    "LAYOUT": "",
    "LAYOUTS": "",
    "BACKEND": "",
    "BUDGET": "",
    "RESULTS": "committed",
}
PROGRESS_BAR = re.compile(r"\d+%\|")
LONGEST = 110  # columns of a printed line: JupyterLab breaks longer ones, in the middle of a word


@dataclass(frozen=True)
class Result:
    """One executed notebook. It is good if `error` is empty; `skipped` says why nothing ran."""

    source: Path
    notebook: Path
    html: Path
    seconds: float
    error: str = ""
    skipped: str = ""


def committed() -> list[Path]:
    return sorted(NOTEBOOKS.glob("*.ipynb"))


def notebook(text: str) -> Path:
    """A type for argparse: a file that is a notebook."""
    path = file(text)
    try:
        nbformat.read(path, as_version=4)
    except Exception as error:  # nbformat raises whatever a file leads it to
        raise argparse.ArgumentTypeError(f"{text!r} is no notebook") from error
    return path


def notebook_or_pair(text: str) -> Path:
    """The same, or one that is yet to be made of its text pair."""
    return Path(text) if not Path(text).exists() and pair(Path(text)).is_file() else notebook(text)


def pair(notebook: Path) -> Path:
    return notebook.parent / "py" / f"{notebook.stem}.py"


def results_of(notebook: Path) -> str:
    """The kind of results that a notebook has from `here.shown`, which measures them on a GPU; "" if none."""
    found = re.search(r'here\.shown\(\s*"(\w+)"', pair(notebook).read_text(encoding="utf-8"))
    return found[1] if found else ""


def execute(
    paths: Iterable[Path],
    out_dir: Path,
    timeout: float = CELL_TIMEOUT,
    env: Mapping[str, str] | None = None,
) -> list[Result]:
    """Run notebooks one after the other, each in a fresh kernel of this Python.

    A failed notebook is written as far as it came, and the next one is run. `timeout` holds for a
    cell; `env` is added to the environment of the kernels. The only progress bar is on stderr.
    """
    out_dir.mkdir(parents=True, exist_ok=True)
    books = [(path, nbformat.read(path, as_version=4)) for path in paths]
    build_font_cache()
    results = []
    with tqdm(total=sum(len(code_cells(nb)) for _, nb in books), unit="cell") as bar:
        for path, nb in books:
            bar.set_description(path.stem)
            begin, error, skipped = time.perf_counter(), "", skip_reason(nb)
            if skipped:
                bar.update(len(code_cells(nb)))
            else:
                error = run(nb, path.parent, timeout, env, on_cell=bar.update)
            copy = out_dir / path.name
            nbformat.write(nb, copy)
            html = copy.with_suffix(".html")
            html.write_text(to_html(nb, path), encoding="utf-8")
            seconds = time.perf_counter() - begin
            results.append(Result(path, copy, html, seconds, error, skipped))
    return results


def refresh(paths: Iterable[Path], timeout: float = CELL_TIMEOUT) -> None:
    """Take text from the newer of notebook and text pair, run, strip, write both.

    A notebook that fails is left as it was.
    """
    build_font_cache()
    for path in paths:
        nb = newest(path)
        nb.metadata.kernelspec = nbformat.from_dict(KERNEL)
        if reason := skip_reason(nb):
            print(f"{path.name}: {reason}, outputs kept")
        elif error := run(nb, path.parent, timeout, PARAMETERS):
            raise SystemExit(f"{path.name}: {error}")
        nbformat.write(stripped(nb), path)
        pair(path).parent.mkdir(exist_ok=True)
        pair(path).write_text(as_text(nb, path), encoding="utf-8")
        print(f"{path.name}: refreshed")


def check(paths: Iterable[Path]) -> list[str]:
    """What is wrong with committed notebooks: content, clean diff, text pair. Nothing is run."""
    found = []
    for path in paths:
        nb = nbformat.read(path, as_version=4)
        wrong = problems(nb)
        if stripped(nb) != nb:
            wrong.append("is not stripped")
        if not pair(path).exists() or pair(path).read_text(encoding="utf-8") != as_text(nb, path):
            wrong.append(f"differs from its text pair py/{pair(path).name}")
        found += [f"{path.name}: {what}" for what in wrong]
    for folder in {path.parent for path in paths}:
        orphans = {p.stem for p in folder.glob("py/*.py")} - {p.stem for p in folder.glob("*.ipynb")}
        found += [f"py/{name}.py: has no notebook" for name in sorted(orphans)]
    return found


def nbval_command(paths: Iterable[Path], workers: str = "auto") -> list[str]:
    """The one pytest command that compares notebooks with their stored outputs.

    A worker gets whole notebooks and their cells in order, hence loadfile and no shuffling.
    The folder of the notebooks holds conftest.py, which fails notebooks that nbval would pass.
    """
    return [
        sys.executable, "-m", "pytest", "-c", str(ROOT / "pyproject.toml"),
        "--nbval", "--nbval-current-env", "--nbval-cell-timeout", f"{CELL_TIMEOUT:.0f}",
        "--nbval-sanitize-with", str(NOTEBOOKS / "sanitize.cfg"),
        "-p", "no:randomly", "-n", workers, "--maxprocesses", "8", "--dist", "loadfile",
        "-rs", "--continue-on-collection-errors",
        *map(str, paths),
    ]  # fmt: skip


def problems(nb: NotebookNode) -> list[str]:
    """What nbval would not notice: cells that never ran, stored errors, broken magics and lines that are too long."""
    counts = [cell.execution_count for cell in code_cells(nb)]
    found = []
    if None in counts:
        found.append(f"code cell {counts.index(None)} never ran, its output would not be compared")
    elif counts != list(range(1, len(counts) + 1)):
        found.append("cells were not run once each from top to bottom")
    return found + faults(nb) + long_lines(nb)


def faults(nb: NotebookNode) -> list[str]:
    """Stored errors, and anything on stderr that is no progress bar.

    IPython reports a broken magic on stderr and goes on, as if the cell had passed.
    """
    found = []
    for number, cell in enumerate(code_cells(nb)):
        may_raise = "raises-exception" in cell.metadata.get("tags", [])
        for output in cell.outputs:
            if output.output_type == "error" and not may_raise:
                found.append(f"code cell {number} failed: {output.ename}: {output.evalue}")
            elif output.output_type == "stream" and output.name == "stderr":
                lines = [line for line in output.text.splitlines() if line.strip()]
                stray = [line for line in lines if not PROGRESS_BAR.search(line)]
                if stray:
                    found.append(f"code cell {number} writes to stderr: {stray[0]}")
    return found


def long_lines(nb: NotebookNode) -> list[str]:
    """Printed lines that a reader would see broken. Markdown is not among them, it is wrapped between words."""
    found = []
    for number, cell in enumerate(code_cells(nb)):
        shown = [output.get("text") or output.get("data", {}).get("text/plain", "") for output in cell.outputs]
        for line, text in enumerate("\n".join(shown).splitlines(), 1):
            if len(text) > LONGEST:
                found.append(f"code cell {number}, line {line} has {len(text)} columns of {LONGEST}: {text[:40]}…")
    return found


def newest(path: Path) -> NotebookNode:
    """The notebook as last edited, on whichever side of the pair that was."""
    text = pair(path)
    nb = nbformat.read(path, as_version=4) if path.exists() else None
    if nb is not None and (not text.exists() or text.stat().st_mtime <= path.stat().st_mtime):
        return nb
    edited = jupytext.reads(text.read_text(encoding="utf-8"), "py:percent")
    return edited if nb is None else combine_inputs_with_outputs(edited, nb, "py:percent")


def stripped(nb: NotebookNode) -> NotebookNode:
    """A copy without what differs from run to run; outputs and counts stay, nbval needs them."""
    return strip_output(deepcopy(nb), True, True, True, extra_keys=STRIP)


def as_text(nb: NotebookNode, path: Path) -> str:
    return jupytext.writes(stripped(nb), "py:percent", config=load_jupytext_config(str(path)))


def code_cells(nb: NotebookNode) -> list[NotebookNode]:
    return [cell for cell in nb.cells if cell.cell_type == "code"]


def skip_reason(nb: NotebookNode) -> str:
    needs_gpu = nb.metadata.get("kv", {}).get("device") == "gpu"
    return "needs an NVIDIA GPU" if needs_gpu and not have_gpu() else ""


@cache
def have_gpu() -> bool:
    """By torch alone: with a GPU and without CuPy the notebook shall fail, not be skipped."""
    import torch  # takes a second, and few notebooks ask

    return torch.cuda.is_available()


class ThisPython(AsyncKernelManager):
    """Starts kernels of the running interpreter, whatever "python3" means in the user's folders."""

    @property
    def kernel_spec(self) -> KernelSpec:
        spec = ipykernel.kernelspec.get_kernel_dict()
        return KernelSpec(resource_dir=ipykernel.kernelspec.RESOURCES, **spec)


class Client(NotebookClient):
    """Ctrl-C cancels it: nbclient's own handler ends the kernel, and the cell then fails in one way or another."""

    stopped = False

    @property
    def interrupted(self) -> bool:
        """By our handler, or by nbclient's own as long as the kernel starts, which leaves a cleaning up behind."""
        return self.stopped or hasattr(self, "_async_cleanup_kernel_future")

    @asynccontextmanager
    async def async_setup_kernel(self, **options: Any) -> AsyncGenerator[None, None]:
        async with super().async_setup_kernel(**options):
            with suppress(RuntimeError):  # in another thread signals do not come
                asyncio.get_running_loop().add_signal_handler(signal.SIGINT, self._stop, asyncio.current_task())
            yield

    def _stop(self, task: asyncio.Task[Any] | None) -> None:
        self.stopped = True
        self.shutdown_kernel = "immediate"  # the terminal interrupts the kernel as well
        assert task
        task.cancel()


def run(
    nb: NotebookNode,
    folder: Path,
    timeout: float,
    env: Mapping[str, str] | None = None,
    on_cell: Callable[[], object] = lambda: None,
) -> str:
    """Run every cell of `nb` in `folder`, replacing outputs. Returns the error, "" if none."""
    for cell in code_cells(nb):
        cell.outputs, cell.execution_count = [], None  # a cell that is not reached shows nothing
    client = Client(
        nb,
        timeout=timeout,
        resources={"metadata": {"path": str(folder)}},
        record_timing=False,
        coalesce_streams=True,  # pieces of a stream differ from run to run
        extra_arguments=["--log-level=ERROR"],
        kernel_manager_class=ThisPython,
        on_cell_executed=lambda **_: on_cell(),
    )
    # The checkout need not be installed.
    search = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    try:
        client.execute(env={**os.environ, "PYTHONPATH": search, **(env or {})})
    except CellExecutionError as error:
        return f"{error.ename}: {error.evalue}".rstrip(": ") + _where(error.traceback)
    except (CellTimeoutError, DeadKernelError) as error:
        return str(error)
    finally:
        if client.interrupted:  # whatever became of the kernel and its cell
            raise KeyboardInterrupt from None
    return "; ".join(faults(nb))


def _where(traceback: str) -> str:
    """The line of the cell that failed, as IPython marks it: the first one, others are of what it called."""
    found = re.search(r"(?m)^-+> ?\d+ (.*)$", re.sub(r"\x1b\[[\d;]*m", "", traceback))
    return f" (at {found[1].strip()})" if found else ""


def to_html(nb: NotebookNode, path: Path) -> str:
    """The notebook as one file that needs no network: pictures inside, links to other pages kept.

    The template's scripts from elsewhere (widgets, typeset formulas) are dropped: write formulas
    as code.
    """
    place = {"metadata": {"name": path.stem, "path": str(path.parent)}}
    html, _ = HTMLExporter(template_name="lab", embed_images=True).from_notebook_node(nb, place)
    html = re.sub(r'<script[^>]*\bsrc="https?:[^>]*>\s*</script>', "", html)
    html = re.sub(r'<script type="module">.*?</script>', "", html, flags=re.DOTALL)  # mermaid
    return re.sub(r'(href="(?!https?:)[^"]*)\.ipynb(["#])', r"\1.html\2", html)


def build_font_cache() -> None:
    """Matplotlib announces this on stderr when a first import does it, which nbval would compare."""
    import matplotlib.font_manager  # noqa: F401


def main() -> int:
    parser = Parser(prog="python -m verify.notebooks")
    actions = parser.add_subparsers(dest="action", required=True, parser_class=Parser)
    for action, kind in (("check", notebook), ("refresh", notebook_or_pair), ("nbval", notebook)):
        actions.add_parser(action).add_argument("paths", nargs="*", type=kind, metavar="NOTEBOOK", help="default: all")
    args = parser.parse_args()
    if args.action == "refresh":
        new = [NOTEBOOKS / f"{text.stem}.ipynb" for text in NOTEBOOKS.glob("py/*.py")]
        refresh(args.paths or sorted({*committed(), *new}))
        return 0
    if args.action == "check":
        found = check(args.paths or committed())
        print("\n".join(found) or "notebooks: run, stripped, in step with their text pairs")
        return bool(found)
    build_font_cache()
    return subprocess.run(nbval_command(args.paths or [NOTEBOOKS]), env={**os.environ, **PARAMETERS}).returncode


if __name__ == "__main__":
    sys.exit(main())
