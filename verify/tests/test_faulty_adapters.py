"""Adapters that hang, die, answer nonsense or touch what is not theirs: each is told in a line."""

from __future__ import annotations

import json
import re
import subprocess
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from verify.adapters import report, runner, suite
from verify.adapters.plain import Numpy
from verify.adapters.protocol import Json, Loaded
from verify.trial import by_pytest, command, interrupted, only

pytestmark = pytest.mark.vectors

CASES = [test["id"] for group in suite.groups(["custom"]) for test in group.tests]
COUNT = len(CASES)
MINE = ["adapter", "mine", "--family", "custom"]


def adapter(folder: Path, transfer: str = "pass", capabilities: str = "pass") -> None:
    """`mine`: right, if it were not for these lines at the begin of its functions."""
    (folder / "mine.py").write_text(f"""\
import os, pathlib, threading
from verify.adapters.plain import Numpy
right = Numpy()
def capabilities(geometry, layout, direction):
    {capabilities}
    return right.capabilities(geometry, layout, direction)
def transfer(geometry, layout, direction, host, device, host_indices, device_indices, layers):
    {transfer}
    right.transfer(geometry, layout, direction, host, device, host_indices, device_indices, layers)
""")


def run(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return command(folder, "-m", "verify", *MINE, *options)


def reported(folder: Path) -> dict[str, dict[str, Any]]:
    """Cases by their ids."""
    return {case["id"]: case for case in json.loads((folder / "out" / "report.json").read_text())["cases"]}


HANGS = "threading.Event().wait()"
ONE = "custom-summaries/page_first/backup/zero-pages"
THERE = "geometry['id'] == 'custom-summaries/page_first' and direction == 'backup' and not len(host_indices)"


def test_a_case_that_does_not_return_has_failed_and_the_rest_goes_on(tmp_path: Path) -> None:
    adapter(tmp_path, f"if {THERE}: {HANGS}")
    done = run(tmp_path, "--seconds-a-case", "5", "--out", "out")
    assert (done.returncode, done.stderr) == (1, "")
    assert f"mine: {COUNT - 1} passed, 1 failed, 0 expected, 0 unsupported\n" in done.stdout
    assert reported(tmp_path)[ONE]["message"] == f"{ONE}: did not return within 5 s"


@pytest.mark.parametrize(
    ("line", "said", "times"),
    [(HANGS, "did not return within 1 s", 3), ("os._exit(3)", "the process died (exit code 3)", 12)],
)
def test_cases_that_were_not_run_are_no_failures(line: str, said: str, times: int, tmp_path: Path) -> None:
    adapter(tmp_path, line)
    done = run(tmp_path, "--seconds-a-case", "1", "--out", "out")
    assert (done.returncode, done.stderr) == (1, "")
    assert [case["message"] for case in reported(tmp_path).values()] == [f"{c}: {said}" for c in CASES[:times]]
    assert f"{times} of {times} cases to be moved are not finished. Of them: {said} ({times}).\n" in done.stdout
    assert f"mine: 0 passed, {times} failed, 0 expected, 0 unsupported; {COUNT - times} not run, " in done.stdout
    (missing,) = [problem for problem in report.problems(tmp_path / "out" / "report.json") if "missing" in problem]
    assert f"{suite.manifest()['cases'] - times} cases are missing" in missing


def test_a_run_that_did_not_end_is_no_success(tmp_path: Path) -> None:
    """Though nothing failed that was not expected to."""
    adapter(tmp_path, "if direction == 'load': os._exit(3)")
    with (tmp_path / "mine.py").open("a") as file:
        file.write("expected_failures = 'known.txt'\n")
    (tmp_path / "known.txt").write_text("*/load/*  dies\n")
    done = run(tmp_path)
    assert re.search(r"mine: \d+ passed, 0 failed, 12 expected, 0 unsupported; \d+ not run, ", done.stdout)
    assert done.returncode == 1


@pytest.mark.parametrize(
    ("where", "said"),
    [
        ([], f"interrupted in {ONE}\n"),
        (["--same-process"], rf"interrupted in {ONE}, at threading\.py:\d+\n"),
    ],
    ids=["isolated", "in the same process"],
)
def test_an_interrupt_tells_the_case_in_a_line(where: list[str], said: str, tmp_path: Path) -> None:
    adapter(tmp_path, f"if {THERE}: pathlib.Path('hangs').touch(); {HANGS}")
    done = interrupted(tmp_path, [*MINE, *where])
    assert done.returncode == 130
    assert re.fullmatch(said, done.stderr), done.stderr


def test_an_interrupt_while_an_adapter_is_loaded_is_told(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(f"import pathlib, threading\npathlib.Path('hangs').touch()\n{HANGS}\n")
    done = interrupted(tmp_path, MINE)
    assert (done.returncode, done.stderr) == (130, "interrupted where no case was running\n")


# ---- whatever `capabilities` does


def test_capabilities_that_raise_are_failed_cases(tmp_path: Path) -> None:
    adapter(tmp_path, capabilities="if direction == 'load': return geometry['nowhere']")
    done = run(tmp_path, "--out", "out")
    assert (done.returncode, done.stderr) == (1, "")
    failed = {case["id"]: case["message"] for case in reported(tmp_path).values() if case["status"] == "failed"}
    assert failed.keys() == {case for case in CASES if "/load/" in case}
    assert {text.split(": ", 1)[1] for text in failed.values()} == {
        "capabilities raised mine.py:5: KeyError: 'nowhere'"
    }
    assert "not run" not in done.stdout


@pytest.mark.parametrize("answer", ["True", "False", "0", "['no']"])
def test_capabilities_that_answer_nonsense_are_told_once(answer: str, tmp_path: Path) -> None:
    said = f"capabilities must return None or text, got {answer}"
    adapter(tmp_path, capabilities=f"return {answer}")
    for where in [], ["--same-process"]:
        done = run(tmp_path, *where)
        assert (done.returncode, done.stdout, done.stderr) == (2, "", f"adapter 'mine': {said}\n")
    done = by_pytest(tmp_path, "mine", "hostpool_custom")
    assert (done.returncode, done.stdout.count(said), "1 failed, " in done.stdout) == (1, 1, True), done.stdout


# ---- what is not the adapter's


class Takes(Numpy):
    """Writes a wrong byte and changes whatever it was given."""

    def capabilities(self, geometry: Json, layout: str, direction: str) -> str | None:
        answer = super().capabilities(geometry, layout, direction)
        geometry["host"][0].clear()
        return answer

    def transfer(self, *arguments: Any, **named: Any) -> None:
        super().transfer(*arguments, **named)
        geometry, _, _, host, device, *_, layers = arguments
        next(iter(device.values()))[0] = 7
        geometry["device"][0].clear()
        layers.clear()
        for data in (*host.values(), *device.values()):
            data.shape = (-1, 1)


def test_what_an_adapter_does_to_its_arguments_stays_with_it() -> None:
    group, test = only("mha-tiny/page_first", "load/first-layer")
    before = json.dumps([group.geometry, test])
    outcome = runner.check(Loaded("mine", Takes(), {}, "CPU", ()), group, test)
    assert re.search(r": device buffer k@0, byte 0 .*; 1 of \d+ bytes are wrong$", outcome.message)
    assert json.dumps([group.geometry, test]) == before


def test_a_buffer_that_is_replaced_is_told_with_its_line(tmp_path: Path) -> None:
    adapter(tmp_path, "host[geometry['host'][0]['name']] = b'mine'")
    done = run(tmp_path)
    assert done.returncode == 1
    assert "was refused (mine.py:8: TypeError: 'mappingproxy' object does not support item assignment)" in done.stdout


class Late(Numpy):
    """Returns before its thread has written the last byte."""

    def __init__(self) -> None:
        self.goes_on = threading.Event()

    def transfer(self, *arguments: Any, **named: Any) -> None:
        super().transfer(*arguments, **named)
        data = next(iter(arguments[3].values()))
        data[0] ^= 1
        self.thread = threading.Thread(target=self.finish, args=(data,), daemon=True)
        self.thread.start()

    def finish(self, data: np.ndarray) -> None:
        self.goes_on.wait()
        data[0] ^= 1


class Slow(suite.Group):
    """Its content is asked for before a transfer, and when a failure is explained: by then the thread has written."""

    late: Late

    @property
    def filled(self) -> dict[str, list[np.ndarray]]:  # pyright: ignore[reportIncompatibleVariableOverride]
        if hasattr(self.late, "thread"):
            self.late.goes_on.set()
            self.late.thread.join()
        return super().filled


def checked(run: Numpy, kind: type[suite.Group] = suite.Group) -> str:
    """What is said of a backup."""
    group, test = only("mha-tiny/page_first", "backup/scattered")
    outcome = runner.check(Loaded("mine", run, {}, "CPU", ()), kind(group.family, group.geometry, group.tests), test)
    assert outcome.status == "failed"
    return outcome.message


def test_buffers_that_change_after_it_returned_are_told() -> None:
    Slow.late = Late()
    said = ": host buffer k, byte 0 .* 1 of 384 bytes are wrong; its buffers changed after it returned$"
    assert re.search(said, checked(Slow.late, Slow))


class Beside(Numpy):
    """Writes or reads what lies around the first buffer of a side."""

    def __init__(self, side: int, begin: int, bytes: int, reads: bool = False) -> None:
        self.side, self.begin, self.bytes, self.reads = side, begin, bytes, reads

    def transfer(self, *arguments: Any, **named: Any) -> None:
        super().transfer(*arguments, **named)
        data = next(iter(arguments[3 + self.side].values()))
        whole, first = data.base, data.ctypes.data - data.base.ctypes.data
        begin = first + self.begin + (data.size if self.begin >= 0 else 0)
        part = whole[begin : begin + self.bytes]
        if self.reads:
            next(iter(arguments[3].values()))[: part.size] = part
        else:
            part[:] = 7


HOST, DEVICE = 0, 1


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (Beside(DEVICE, 0, 12), "device memory was written after buffer k@0: 12 bytes, the nearest at distance 1"),
        (Beside(HOST, 40, 3), "host memory was written after buffer k: 3 bytes, the nearest at distance 41"),
        (Beside(HOST, -20, 4), "host memory was written before buffer k: 4 bytes, the nearest at distance 17"),
        (Beside(HOST, 0, 9999), r"written after buffer k: \d{3} bytes or more, the nearest at distance 1"),
        (Beside(DEVICE, 0, 6, reads=True), r"; \d+ of 384 bytes are wrong; 6 bytes of it were read beside the source"),
        (Beside(DEVICE, -6, 6, reads=True), r"; \d+ of 384 bytes are wrong; 6 bytes of it were read beside the source"),
    ],
)
def test_bytes_beside_a_buffer_are_told_with_their_number(fault: Beside, said: str) -> None:
    assert re.search(f"{said}$", checked(fault))


# ---- inside a suite of one's own


def by_id(folder: Path, *ids: str) -> subprocess.CompletedProcess[str]:
    options = ["-p", "verify.plugin", "-p", "no:cacheprovider", "--hostpool-adapter", "mine"]
    return command(folder, "-m", "pytest", *options, *ids)


def test_a_failed_node_id_runs_again(tmp_path: Path) -> None:
    adapter(tmp_path, f"if {THERE}: next(iter(host.values()))[0] ^= 1")
    (tmp_path / "test_other.py").write_text("def test_other(): pass\n")
    done = by_id(tmp_path, "-m", "hostpool_custom")
    (failed,) = re.findall(r"^FAILED (\S+)", done.stdout, re.MULTILINE)
    assert "1 failed in " in by_id(tmp_path, failed).stdout
    sound = failed.replace("backup", "load")
    assert "1 failed, 2 passed in " in by_id(tmp_path, "test_other.py", failed, sound).stdout
    assert "1 passed in " in by_id(tmp_path, f"../hostpool::{sound.partition('::')[2]}").stdout
    done = by_id(tmp_path, sound, f"{sound}-not")
    assert (done.returncode, "there is no vector" in done.stderr) == (4, True)


def test_a_conftest_file_finds_what_tests_have(tmp_path: Path) -> None:
    adapter(tmp_path)
    (tmp_path / "conftest.py").write_text("""\
def pytest_collection_modifyitems(items):
    for item in items:
        names = item.function.__name__, item.function.__doc__, item.module.__name__, item.path
        if item.cls is None and "slow" in item.fixturenames:
            item.add_marker("slow")
""")
    assert by_pytest(tmp_path, "mine", "hostpool_custom").returncode == 0


# ---- what an adapter needs


@pytest.mark.parametrize(
    ("module", "code", "said"),
    [
        ("mine", "import no_such_package.part", "it needs 'no_such_package', which is neither installed nor on PYTHON"),
        (
            "mine:Mine",
            "class Mine:\n    def __init__(self): import gone",
            "it needs 'gone', which is neither installed",
        ),
        ("mine:Nobody", "", "AttributeError: module 'mine' has no attribute 'Nobody'"),
        ("yours", "", "there is no adapter 'yours': No module named 'yours'; is its folder on PYTHONPATH?"),
    ],
)
def test_the_module_that_is_missing_is_named(module: str, code: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(code)
    done = command(tmp_path, "-m", "verify", "adapter", module)
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert said in done.stderr
