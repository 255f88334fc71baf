"""How strong the suite is: faults built into the shipped code one at a time, each of which a named test must catch.

A mutant is (file, exact text, new text, what must kill it); the table is `mutants.toml`. Each is applied to a copy of
the packages and its killers are run on that copy. A text that is not found exactly once is an error: the table
follows the code. The score of a run over all of them is kept (`verify.score`), for reports of implementations.
"""

from __future__ import annotations

import ast
import contextlib
import gc
import io
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from queue import SimpleQueue

import pytest

from verify import properties, score
from verify.arguments import Parser, positive
from verify.score import DATA, PACKAGES, ROOT

TABLE = Path(__file__).with_name("mutants.toml")
RESULTS = "data/results"  # which some killers read: without it they would fail whatever the code does
TIME_LIMIT = 300  # seconds; a mutant that hangs its killer is caught too
CONTROL = ("verify/tests/test_hand_bytes.py",)  # must pass on the unchanged copy
# Modules are imported before pytest sees them, on purpose.
OPTIONS = (
    "-x",
    "-q",
    "-p",
    "no:cacheprovider",
    "-p",
    "no:faulthandler",
    "-W",
    "ignore::pytest.PytestAssertRewriteWarning",
)


@dataclass(frozen=True)
class Mutant:
    """`fault` says what is wrong with the mutant, `killers` which tests (files or ids) must fail on it."""

    fault: str
    file: str
    old: str
    new: str
    killers: tuple[str, ...]


def table() -> list[Mutant]:
    rows = tomllib.loads(TABLE.read_text())["mutant"]
    return [Mutant(**row | {"killers": tuple(row["killers"])}) for row in rows]


def mutated(mutant: Mutant) -> str:
    """The text of the mutant's file. `ValueError` unless the old text stands there once and Python still reads it."""
    text = (ROOT / mutant.file).read_text()
    found = text.count(mutant.old)
    if found != 1:
        raise ValueError(f"{mutant.file}: {mutant.old!r} stands there {found} times, it must stand there once")
    changed = text.replace(mutant.old, mutant.new)
    if mutant.file.endswith(".py"):
        try:
            ast.parse(changed)
        except SyntaxError as error:
            raise ValueError(f"{mutant.file}: with {mutant.new!r} it is no Python: {error}") from error
    return changed


class Copy:
    """A copy of the packages at one path, so that compiled code of unchanged files is cached between mutants."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for package in (*PACKAGES, *DATA, RESULTS):
            if (ROOT / package).exists():
                shutil.copytree(ROOT / package, folder / package)
        shutil.copy2(ROOT / "pyproject.toml", folder)

    def catches(self, mutant: Mutant) -> bool:
        """Whether a killer fails with the mutant applied."""
        (self.folder / mutant.file).write_text(mutated(mutant))
        try:
            return self.fails(mutant.killers)
        finally:
            shutil.copy2(ROOT / mutant.file, self.folder / mutant.file)

    def fails(self, tests: tuple[str, ...]) -> bool:
        """Whether a test fails (or hangs), run in a child that imports the packages anew from this copy."""
        child: BaseProcess = multiprocessing.get_context("fork").Process(target=_run_tests, args=(self.folder, tests))
        child.start()
        child.join(TIME_LIMIT)
        if child.is_alive():
            child.kill()
            child.join()
            return True
        code = child.exitcode or 0
        if code > 0 and code != pytest.ExitCode.TESTS_FAILED:
            raise RuntimeError(f"pytest could not run {tests} (exit code {code})")
        return code != 0  # a negative one: killed by a signal, such as an address that is not mapped


class _AnyFailureWillDo:
    @pytest.hookimpl(trylast=True)  # after the suite's own choice
    def pytest_configure(self) -> None:
        properties.stop_at_the_first_failure()


def _run_tests(folder: Path, tests: tuple[str, ...]) -> None:
    for name in [m for m in sys.modules if m.split(".")[0] in PACKAGES]:
        del sys.modules[name]
    os.chdir(folder)
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # none is needed, and each takes its time
    sys.path[:] = [str(folder), *(p for p in sys.path if Path(p or ".").resolve() != ROOT)]
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = pytest.main([*OPTIONS, *tests], [_AnyFailureWillDo()])
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        print(said.getvalue(), file=sys.stderr, flush=True)
    os._exit(int(code))


def main(argv: list[str] | None = None) -> int:
    """Run every mutant (or those of `--only TEXT`); print them, survivors last, and the score."""
    parser = Parser(prog="python -m verify mutants", description="Run every mutant, print the survivors and the score.")
    parser.add_argument("--only", default="", metavar="TEXT", help="mutants whose fault or file contains TEXT")
    parser.add_argument("--jobs", type=positive, default=os.cpu_count() or 1, metavar="N")
    options = parser.parse_args(argv)
    every, measured = table(), score.sources()
    chosen = [m for m in every if options.only in m.fault or options.only in m.file]
    if not chosen:
        parser.error(f"there is no mutant whose fault or file contains {options.only!r}")
    for mutant in chosen:
        mutated(mutant)
        for killer in mutant.killers:
            if not (ROOT / killer.split("::")[0]).exists():
                raise ValueError(f"{mutant.fault}: there is no killer {killer}")
    _warm_up()
    with tempfile.TemporaryDirectory() as folder:
        copies: SimpleQueue[Copy] = SimpleQueue()
        for job in range(options.jobs):
            copy = Copy(Path(folder) / str(job))
            if copy.fails(CONTROL):
                sys.exit(f"{CONTROL[0]} fails on the code as it is; mend that first")
            copies.put(copy)

        def caught(mutant: Mutant) -> tuple[bool, float]:
            copy, start = copies.get(), time.perf_counter()
            try:
                return copy.catches(mutant), time.perf_counter() - start
            finally:
                copies.put(copy)

        with ThreadPoolExecutor(options.jobs) as pool:
            verdicts = list(pool.map(caught, chosen))
    survivors_last = sorted(zip(verdicts, chosen, strict=True), key=lambda row: row[0][0], reverse=True)
    for (killed, seconds), mutant in survivors_last:
        print(f"{'killed  ' if killed else 'SURVIVED'} {seconds:5.1f} s  {mutant.file}: {mutant.fault}")
    dead = sum(killed for killed, _ in verdicts)
    print(f"mutation score: {100 * dead / len(chosen):.1f}% ({dead}/{len(chosen)})")
    if chosen == every and score.sources() == measured:
        score.keep(dead, len(every), measured)
    return 0 if dead == len(chosen) else 1


def _warm_up() -> None:
    """Import what children need and no mutant touches, so that it is paid for once."""
    import covertable  # noqa: F401
    import hypothesis.stateful  # noqa: F401
    import jsonschema  # noqa: F401
    import numba
    import psutil  # noqa: F401
    import torch  # noqa: F401

    numba.njit(lambda: None)()  # the compiler is imported when it is first used
    gc.freeze()  # the children's garbage is their own
