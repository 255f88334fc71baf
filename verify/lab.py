"""JupyterLab as a reader opens it: each notebook in a browser, all cells run, every output seen on the page.

nbval compares what a kernel sends; this looks at what arrives on the page. A notebook is opened from a copy without
outputs, so whatever is shown has just been made, and it must be what the committed notebook holds: as many outputs of
the same kinds in the same cells, every picture drawn. A picture of each whole page is left in out/lab/.

    python -m verify.lab [NOTEBOOK ...]

Needs playwright (the extra `browser`) and a Chromium: of the system, or the one that playwright installs.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING

import nbformat
import psutil
from nbformat import NotebookNode

from verify.arguments import Parser
from verify.notebooks import (
    CELL_TIMEOUT,
    PARAMETERS,
    ROOT,
    build_font_cache,
    code_cells,
    committed,
    notebook,
    skip_reason,
)

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

OUT = ROOT / "out" / "lab"
BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
WIDTH, HEIGHT = 1440, 900  # of the window, before it grows to the length of a notebook
START_TIMEOUT = 60  # seconds
# Lab shows the first of these that an output offers.
SHOWN = ("text/html", "text/markdown", "image/svg+xml", "image/png", "text/plain")
STDERR = "application/vnd.jupyter.stderr"  # tracebacks too
# Lab would ask every new reader whether it may fetch news.
SETTINGS = {"@jupyterlab/apputils-extension:notification": {"fetchNews": "false", "checkForUpdates": False}}

# ---- in the page

# Every cell has run, or one has failed and none is waiting any more.
DONE = """() => {
    const prompts = [...document.querySelectorAll(".jp-CodeCell .jp-InputPrompt")].map(prompt => prompt.textContent);
    const failed = document.querySelector('[data-mime-type="application/vnd.jupyter.stderr"]');
    return prompts.every(text => /\\d/.test(text)) || (failed && !prompts.some(text => text.includes("*")));
}"""
# The height of a window that has the whole notebook in it.
LENGTH = """() => {
    const panel = document.querySelector(".jp-WindowedPanel-outer");
    panel.scrollTop = 0;
    const cells = [...panel.querySelectorAll(".jp-Cell")];
    const length = cells.at(-1).getBoundingClientRect().bottom - cells[0].getBoundingClientRect().top;
    return window.innerHeight - panel.clientHeight + Math.ceil(length) + 30;
}"""
# [[kind and text of each output] of each code cell]; a picture without a pixel on the page has the kind "blank".
OUTPUTS = """async () => {
    const drawn = async image => {
        await image.decode().catch(() => null);
        return image.naturalWidth > 1 && image.getBoundingClientRect().width > 1;
    };
    const seen = async output => {
        const pictures = await Promise.all([...output.querySelectorAll("img")].map(drawn));
        const kind = pictures.every(Boolean) ? output.dataset.mimeType : "blank";
        return [kind, output.textContent];
    };
    const cells = [...document.querySelectorAll(".jp-Notebook .jp-CodeCell")];
    return Promise.all(cells.map(
        cell => Promise.all([...cell.querySelectorAll(".jp-OutputArea-output")].map(seen))));
}"""

Outputs = list[list[tuple[str, str]]]  # kind and text of each output, of each code cell


def look(paths: Sequence[Path], out: Path = OUT) -> list[str]:
    """Open notebooks of one folder, run them, and say what their pages lack; pictures of the pages in `out`."""
    out.mkdir(parents=True, exist_ok=True)
    found = []
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        stage(paths[0].resolve().parent, root)
        with lab(root) as (address, token), browser() as chromium:
            for path in paths:
                begin = time.perf_counter()
                nb = nbformat.read(path, as_version=4)
                emptied(nb, root / "notebooks" / path.name)
                page = chromium.new_page(viewport={"width": WIDTH, "height": HEIGHT})
                page.goto(f"{address}lab/tree/notebooks/{path.name}?reset&token={token}")
                wrong = run(page)
                stretch(page)
                wrong += differences(stored(nb), [[(k, text) for k, text in cell] for cell in page.evaluate(OUTPUTS)])
                page.screenshot(path=out / f"{path.stem}.png")
                page.close()
                found += [f"{path.name}: {what}" for what in wrong]
                print(f"{path.name}: {'; '.join(wrong) or 'as committed'} ({time.perf_counter() - begin:.0f} s)")
    return found


def run(page: Page) -> list[str]:
    """Run > Run All Cells, as soon as the kernel is there; waits for the last cell."""
    from playwright.sync_api import TimeoutError

    page.get_by_text("| Idle").wait_for(timeout=1000 * START_TIMEOUT)
    page.get_by_role("menuitem", name="Run", exact=True).click()
    page.locator('[data-command="runmenu:run-all"]').click()
    try:
        page.wait_for_function(DONE, timeout=1000 * CELL_TIMEOUT)
    except TimeoutError:
        return [f"had not run through after {CELL_TIMEOUT:.0f} s"]
    return []


def stretch(page: Page) -> None:
    """Make the window as long as the notebook. Lab guesses the heights of what is not drawn yet."""
    height = 0
    while (length := max(HEIGHT, page.evaluate(LENGTH))) != height:
        height = length
        page.set_viewport_size({"width": WIDTH, "height": height})
        page.wait_for_timeout(200)


# ---- what is compared


def stored(nb: NotebookNode) -> Outputs:
    """The outputs that a notebook holds, by the kind that Lab would show."""
    return [[(kind(output), output.get("text", "")) for output in cell.outputs] for cell in code_cells(nb)]


def kind(output: NotebookNode) -> str:
    if output.output_type == "stream":
        return f"application/vnd.jupyter.{output.name}"
    if output.output_type == "error":
        return STDERR
    return next(name for name in SHOWN if name in output.data)


def differences(stored: Outputs, shown: Outputs) -> list[str]:
    """Outputs that are missing, added, of another kind or blank, up to the first cell that failed.

    Texts are for the message only: nbval compares them.
    """
    found = []
    for number, (want, have) in enumerate(zip_longest(stored, shown, fillvalue=[])):
        seen, wanted = (", ".join(kind for kind, _ in outputs) or "nothing" for outputs in (have, want))
        if seen != wanted:
            found.append(f"code cell {number} shows {seen}, not {wanted}")
            if errors := [text.strip().splitlines()[-1] for kind, text in have if kind == STDERR]:
                return [*found, *errors]
    return found


def stage(notebooks: Path, root: Path) -> None:
    """A copy of the notebooks in `root`, and links to whatever lies beside their folder."""
    for path in notebooks.parent.iterdir():
        if path != notebooks and not path.name.startswith("."):
            (root / path.name).symlink_to(path)
    shutil.copytree(notebooks, root / "notebooks")


def emptied(nb: NotebookNode, path: Path) -> None:
    """Write a notebook to `path` without its outputs."""
    bare = nbformat.from_dict(nb)
    for cell in code_cells(bare):
        cell.outputs, cell.execution_count = [], None
    nbformat.write(bare, path)


# ---- server and browser


@contextmanager
def lab(root: Path) -> Iterator[tuple[str, str]]:
    """JupyterLab of this Python on `root`, on a free port, with nobody's settings. Yields its address and token.

    At the end the server is stopped, and with it every kernel it has started.
    """
    settings = root / "jupyter" / "config" / "labconfig" / "default_setting_overrides.json"
    settings.parent.mkdir(parents=True)
    settings.write_text(json.dumps(SETTINGS))
    own = {f"JUPYTER_{what.upper()}_DIR": str(root / "jupyter" / what) for what in ("config", "data", "runtime")}
    search = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--ServerApp.port=0"]
    log = root / "jupyter" / "log"
    with log.open("w") as stream:
        server = psutil.Popen(
            [*command, f"--ServerApp.root_dir={root}"],
            env={**os.environ, **own, **PARAMETERS, "PYTHONPATH": search},
            stdout=stream,
            stderr=stream,
        )
    try:
        yield address(server, root / "jupyter" / "runtime", log)
    finally:
        family = [server, *server.children(recursive=True)]
        server.terminate()
        for process in psutil.wait_procs(family, timeout=30)[1]:
            process.kill()


def address(server: psutil.Popen, runtime: Path, log: Path) -> tuple[str, str]:
    """Where the server listens and the token it wants. `RuntimeError` with the end of its log if it does not."""
    until = time.monotonic() + START_TIMEOUT
    while time.monotonic() < until and server.poll() is None:
        for path in runtime.glob("jpserver-*.json"):
            if text := path.read_text():
                info = json.loads(text)
                return info["url"], info["token"]
        time.sleep(0.1)
    raise RuntimeError(f"JupyterLab did not start:\n{log.read_text()[-2000:]}")


@contextmanager
def browser() -> Iterator[Browser]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=executable())
        yield chromium
        chromium.close()


def executable() -> str | None:
    """The system's Chromium; None: the one that playwright installed."""
    return next(filter(None, map(shutil.which, BROWSERS)), None)


def missing() -> str:
    """What there is no browser for, and the way out; "" if there is one."""
    if not find_spec("playwright"):
        return "playwright is not installed: pip install -e .[browser]"
    if executable():
        return ""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        if Path(playwright.chromium.executable_path).exists():
            return ""
    return f"no Chromium: apt-get install {BROWSERS[0]}, or {sys.executable} -m playwright install chromium"


def main(arguments: Iterable[str] | None = None) -> int:
    parser = Parser(prog="python -m verify.lab")
    parser.add_argument("paths", nargs="*", type=notebook, metavar="NOTEBOOK", help="of one folder; default: all")
    parser.add_argument("--if-browser", action="store_true", help="without a browser say so, and succeed")
    args = parser.parse_args(arguments)
    if why := missing():
        print(f"JupyterLab was not opened, {why}")
        return 0 if args.if_browser else 1
    build_font_cache()
    paths = [path for path in args.paths or committed() if not skip_reason(nbformat.read(path, as_version=4))]
    found = look(paths)
    print(f"JupyterLab: {len(found)} faults in {len(paths)} notebooks; pictures in {OUT.relative_to(ROOT)}")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
