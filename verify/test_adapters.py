"""Other implementations: right ones pass, wrong ones are told what is wrong, and only true reports verify."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import xml.etree.ElementTree as ET
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from refimpl.support import BACKENDS
from verify import cli
from verify.adapters import diagnosis, protocol, report, runner, suite, wrong
from verify.adapters.plain import Numpy
from verify.adapters.protocol import Expected, Loaded, NoAdapter
from verify.adapters.suite import Outcome

pytestmark = pytest.mark.vectors

Json = dict[str, Any]
ROOT = Path(__file__).resolve().parents[1]


def results(adapter: Loaded, layouts: tuple[str, ...] = ()) -> list[tuple[suite.Group, Json, Outcome]]:
    """All cases, or those of some layouts."""
    return [*runner.run(adapter, [g for g in suite.groups() if not layouts or g.geometry["layout"] in layouts])]


def failed(found: list[tuple[suite.Group, Json, Outcome]]) -> dict[str, str]:
    return {outcome.id: outcome.message for _, _, outcome in found if outcome.status == "failed"}


def only(group: str, test: str = "") -> tuple[suite.Group, Json]:
    (found,) = [g for g in suite.groups() if g.geometry["id"] == group]
    return found, next(t for t in found.tests if t["id"].endswith(test))


# ---- right ones


@pytest.mark.parametrize("name", ["numpy", *(f"ours-{backend}" for backend in BACKENDS)])
def test_a_right_adapter_passes_every_case(name: str) -> None:
    adapter = protocol.load(name)
    for group, test, outcome in results(adapter):
        assert outcome.status in ("passed", "unsupported"), outcome.message
        if outcome.status == "unsupported":
            assert adapter.run.capabilities(group.geometry, group.geometry["layout"], test["direction"])


# ---- wrong ones


def test_whoever_does_nothing_fails_whatever_must_be_done() -> None:
    found = results(protocol.load("null"), ("layer_first", "page_head"))
    passed = [test for _, test, outcome in found if outcome.status == "passed"]
    assert {test["note"] for test in passed} == {"zero-pages"}
    assert "found poison (nothing was written)" in failed(found)["mha-tiny/layer_first/backup/scattered"]
    moved, refused = diagnosis.summary(found)
    assert "none of them moves or refuses anything" in moved
    assert "none of them moves or refuses anything" in refused


REFUSALS = ("Unchecked", "Accepted", "Trusted", "Writers")  # lists that must be refused are not in every layout


@pytest.mark.parametrize("flag", wrong.FLAGS)
def test_a_known_fault_fails_exactly_where_it_shows_and_is_named(flag: str) -> None:
    adapter = protocol.load(f"verify.adapters.wrong:{flag}")
    found = results(adapter, ("layer_first", "page_head") if flag.endswith(REFUSALS) else ("page_first",))
    certain = [(g, t, o) for g, t, o in found if t["result"] != "unspecified"]
    assert failed(certain).keys() == {t["id"] for g, t, _ in certain if flag in suite.flags(g, t)} != set()
    assert any(f"{flag}, which shows in these and in no others: " in line for line in diagnosis.summary(found))
    assert all(message.startswith(f"{case}: ") for case, message in failed(found).items())


@pytest.mark.parametrize(
    ("flag", "case", "said"),
    [
        (
            "LayersSwapped",
            "mha-tiny/page_head/backup/scattered",
            "host buffer k, byte 0 (of k layer 0 page 0 token 0 head 0 byte 0): expected k layer 0 page 6 token 0 "
            "head 0 byte 0, found k layer 1 page 6 token 0 head 0 byte 0",
        ),
        ("KeyValueSwapped", "mha-odd/page_first/load/joined", "found v layer 0 page 4 token 0 head 0 byte 0"),
        ("FirstSourceRunsOn", "mla-tiny/layer_first/load/scattered", "found latent layer 0 page 0 token 0 byte 0"),
        ("SideStatesLost", "mamba-tiny/page_first/load/side-states", "side state page 4 byte 0, found poison"),
        ("RunTooLong", "mha-tiny/layer_first/backup/scattered", "expected poison (nothing was written), found k layer"),
        (
            "BoundsUnchecked",
            "mha-tiny/layer_first/load/beyond-host",
            "was not refused, though it must be: out of range",
        ),
    ],
)
def test_the_message_decodes_the_first_wrong_word(flag: str, case: str, said: str) -> None:
    outcome = runner.check(protocol.load(f"verify.adapters.wrong:{flag}"), *only(case.rsplit("/", 2)[0], case))
    assert outcome.status == "failed"
    assert said in outcome.message


class Careless(Numpy):
    """Moves what is right and then does `harm`."""

    def __init__(self, harm: Callable[..., None]) -> None:
        self.harm = harm

    def transfer(self, *arguments: Any, **named: Any) -> None:
        super().transfer(*arguments, **named)
        self.harm(*arguments[3:5])


def beside(buffers: protocol.Buffers, distance: int) -> None:
    """Write before the first buffer, or behind it."""
    data = next(iter(buffers.values()))
    assert data.base is not None
    first = data.ctypes.data - data.base.ctypes.data
    data.base[first + distance if distance < 0 else first + data.size + distance - 1] = 7


def spoil(buffers: protocol.Buffers) -> None:
    next(iter(buffers.values()))[3] ^= 1


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (lambda host, device: beside(host, 1), "host memory was written 1 bytes after buffer k"),
        (lambda host, device: beside(device, -2), "device memory was written 2 bytes before buffer k@0"),
        (lambda host, device: spoil(device), "the source was changed: device buffer k@0, byte 3 "),
    ],
)
def test_memory_that_must_stay_is_watched(harm: Callable[..., None], said: str) -> None:
    adapter = Loaded("careless", Careless(harm), {}, "CPU", ())
    outcome = runner.check(adapter, *only("mha-tiny/page_first", "backup/scattered"))
    assert outcome.status == "failed"
    assert said in outcome.message


def test_a_refusal_after_something_moved_is_none() -> None:
    def late(host: protocol.Buffers, device: protocol.Buffers) -> None:
        raise ValueError("too late")

    adapter = Loaded("late", Careless(late), {}, "CPU", ())
    outcome = runner.check(adapter, *only("mha-tiny/page_first", "backup/scattered"))
    assert (outcome.status, outcome.refused) == ("failed", True)
    assert "was refused (ValueError: too late)" in outcome.message
    assert "expected poison (nothing was written)" in outcome.message


# ---- expected failures


def test_expected_failures_are_honoured_and_stale_ones_reported() -> None:
    lines = (
        Expected("mha-*/page_first/*", "layers, we know"),
        Expected("*/page_head/*/no-heads", "passes"),
        Expected("mha-tiny/page_first/backup/nothing", "gone"),
    )
    adapter = replace(protocol.load("verify.adapters.wrong:LayersSwapped"), expected=lines)
    found = results(adapter, ("page_first", "page_head"))
    expected = {o.id for _, _, o in found if o.status == "expected"}
    assert expected == {o.id for _, _, o in found if o.status != "passed" and o.id.startswith("mha-") and "t/" in o.id}
    assert runner.stale(adapter, [o for _, _, o in found]) == [
        "*/page_head/*/no-heads: passes, but was expected to fail: passes",
        "mha-tiny/page_first/backup/nothing: is no case, but was expected to fail: gone",
    ]
    elsewhere = replace(adapter, expected=lines[:1])
    assert runner.stale(elsewhere, [o for _, _, o in found if o.id.startswith("mla-")]) == []


def test_a_line_without_a_reason_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "known.txt"
    file.write_text("# ours\n\nmha-*  a reason of  words\nmla-*\n")
    with pytest.raises(NoAdapter, match=r"known.txt:4: mla-\* has no reason"):
        protocol.expected_failures(file)
    file.write_text("# ours\n\nmha-*  a reason of  words\n")
    assert protocol.expected_failures(file) == [Expected("mha-*", "a reason of  words")]


# ---- reports


@pytest.fixture(scope="module")
def truth() -> Json:
    adapter = protocol.load("numpy")
    return report.as_json(adapter, results(adapter), [])


def problems(content: Json, folder: Path) -> list[str]:
    report.write(folder, content)
    return [*report.problems(folder / "report.json")]


def test_a_true_report_verifies(truth: Json, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert problems(truth, tmp_path) == []
    assert cli.main(["check-report", str(tmp_path / "report.json")]) == 0
    assert f"verified, {suite.manifest()['cases']} passed, 0 unsupported" in capsys.readouterr().out
    assert len((tmp_path / "report.json").read_text().splitlines()) > suite.manifest()["cases"]


def _set(key: str, value: object, at: int = 0) -> Callable[[Json], None]:
    return lambda content: content["cases"][at].update({key: value})


TAMPERED: dict[str, tuple[Callable[[Json], object], str]] = {
    "a case left out": (lambda c: c["cases"].pop(), "1 cases are missing"),
    "a case twice": (lambda c: c["cases"].append(c["cases"][0]), "cases stand there twice"),
    "a case of its own": (_set("id", "mine/page_first/backup/best"), "1 cases are none of the vectors'"),
    "another digest": (_set("sha256", "0" * 64), "these are not the bytes of a case that passed"),
    "another answer": (_set("refused", True), "these are not the bytes of a case that passed"),
    "no digest": (_set("sha256", None), "does not follow report.schema.json: $.cases[0].sha256"),
    "other vectors": (lambda c: c["vectors"].update(sha256="0" * 64), "it is of other vectors"),
    "other counts": (lambda c: c["counts"].update(passed=1), "its counts are not those of its cases"),
    "another number of cases": (lambda c: c["vectors"].update(cases=1), "its counts are not those of its cases"),
    "something added": (lambda c: c.update(approved=True), "does not follow report.schema.json: $"),
    "a failure": (lambda c: _restate(c, "failed", 1), " passed, 1 failed, 0 expected"),
    "an expected failure": (lambda c: _restate(c, "expected", 1), "0 failed, 1 expected"),
    "a case not offered": (lambda c: _restate(c, "unsupported", 1), "is unsupported in some cases only"),
    "nothing offered": (lambda c: _restate(c, "unsupported", len(c["cases"])), "nothing was moved"),
}


def _restate(content: Json, status: str, number: int) -> None:
    for case in content["cases"][:number]:
        case.update(status=status, message="as we say")
    content["counts"] = report.tally(case["status"] for case in content["cases"])


@pytest.mark.parametrize("how", TAMPERED)
def test_a_tampered_report_does_not_verify(how: str, truth: Json, tmp_path: Path) -> None:
    change, said = TAMPERED[how]
    content = deepcopy(truth)
    change(content)
    assert any(said in problem for problem in problems(content, tmp_path))


@pytest.mark.parametrize("name", ["null", "verify.adapters.wrong:LayersSwapped", "verify.adapters.wrong:TwoWriters"])
def test_the_report_of_a_wrong_adapter_never_verifies(name: str, tmp_path: Path) -> None:
    """Nor when it says that all is well."""
    adapter = protocol.load(name)
    content = report.as_json(adapter, results(adapter), [])
    assert any("it does not conform" in problem for problem in problems(content, tmp_path))
    _restate(content, "passed", len(content["cases"]))
    assert any("these are not the bytes" in problem for problem in problems(content, tmp_path))


def test_what_is_no_report_does_not_verify(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "report.json"
    assert cli.main(["check-report", str(file)]) == 1
    file.write_text("{")
    assert cli.main(["check-report", str(file)]) == 1
    assert capsys.readouterr().out.count("it cannot be read: ") == 2


def test_page_and_badge_say_what_the_report_says(truth: Json) -> None:
    text, number = report.as_page(truth), suite.manifest()["cases"]
    assert f"numpy: {number} of {number} passed" in text
    assert all(f"<td>{g.geometry['id'].replace('/', '</td><td>')}</td>" in text for g in suite.groups())
    assert "http" not in text
    content = deepcopy(truth)
    _restate(content, "failed", 1)
    for shown, passed, colour in (truth, number, "#2a7a3b"), (content, number - 1, "#a33"):
        root = ET.fromstring(report.as_badge(shown))
        assert root.get("aria-label") == f"KV host pools: {passed} of {number} passed"
        assert colour in {rect.get("fill") for rect in root.iter("{http://www.w3.org/2000/svg}rect")}
    assert "as we say" in report.as_page(content)


# ---- as a new user has it: an empty folder, a file of one's own


PYTHON = '''
"""Pages of one layout, by slices."""

class Mine:
    versions = {"mine": "0.1"}
    device = "a machine"
    expected_failures = "known.txt"

    def capabilities(self, geometry, layout, direction):
        if layout != "page_first_direct" or direction.endswith("entries"):
            return "only whole pages in page_first_direct"

    def transfer(self, geometry, layout, direction, host, device, host_indices, device_indices, layers):
        size, lists = geometry["page_size"], {"host": host_indices.tolist(), "device": device_indices.tolist()}
        assert len(lists["host"]) == len(lists["device"])
        for side, indices in lists.items():
            pages = [i // size for i in indices[::size]]
            assert indices == [page * size + i for page in pages for i in range(size)]
            assert all(0 <= page < geometry[side + "_pages"] for page in pages)
            if (side == "host") == (direction == "backup"):
                assert len(set(pages)) == len(pages)
            lists[side] = pages
        for buffer in geometry["host"]:
            pages = host[buffer["name"]].reshape(geometry["host_pages"], len(buffer["layers"]), -1)
            for position, layer in enumerate(buffer["layers"]):
                if layers is None or layer in layers:
                    held = buffer["components"], [layer]
                    (name,) = [b["name"] for b in geometry["device"] if (b["components"], b["layers"]) == held]
                    rows = device[name].reshape(geometry["device_pages"], -1)
                    for a, b in zip(lists["host"], lists["device"]):
                        if direction == "backup":
                            pages[a, position] = rows[b]
                        else:
                            rows[b] = pages[a, position]
'''

C = """
#include <stdint.h>
#include <string.h>

static int bad(const int64_t *at, int64_t n, int64_t size, int64_t pages, int once) {
    if (n % size) return 1;
    for (int64_t i = 0; i < n; i++) {
        if (at[i / size * size] % size || at[i] != at[i / size * size] + i % size) return 2;
        if (at[i] < 0 || at[i] / size >= pages) return 3;
        for (int64_t k = 0; once && k < i; k++) if (at[k] == at[i]) return 4;
    }
    return 0;
}

int check(const int64_t *to, int64_t n, int64_t to_pages, const int64_t *from, int64_t m, int64_t from_pages,
          int64_t size) {
    return n != m ? 5 : bad(to, n, size, to_pages, 1) + bad(from, n, size, from_pages, 0);
}

void move(char *to, const int64_t *at, const char *from, const int64_t *origin, int64_t n, int64_t size,
          int64_t bytes, int64_t pages) {
    for (int64_t i = 0; i < n && pages; i += size)
        memcpy(to + at[i] / size * bytes, from + origin[i] / size * bytes, bytes);
}
"""

BINDING = '''
"""layer_first, in C."""

import ctypes, pathlib

LIBRARY = ctypes.CDLL(str(pathlib.Path(__file__).with_name("mover.so")))

def capabilities(geometry, layout, direction):
    if layout != "layer_first" or direction.endswith("entries"):
        return "only whole pages in layer_first"

def number(*values):
    return [ctypes.c_int64(value) for value in values]

def transfer(geometry, layout, direction, host, device, host_indices, device_indices, layers):
    ends = [(host, host_indices, geometry["host_pages"]), (device, device_indices, geometry["device_pages"])]
    (_, to, to_pages), (_, origin, pages) = ends if direction == "backup" else ends[::-1]
    size, n = geometry["page_size"], len(to)
    at, where = ctypes.c_void_p(to.ctypes.data), ctypes.c_void_p(origin.ctypes.data)
    if LIBRARY.check(at, *number(n, to_pages), where, *number(len(origin), pages, size)):
        raise ValueError("no such lists")
    for buffer in geometry["host"]:
        each = buffer["bytes"] // len(buffer["layers"])
        for position, layer in enumerate(buffer["layers"]):
            if layers is None or layer in layers:
                address = host[buffer["name"]].ctypes.data + position * each
                held = buffer["components"], [layer]
                (name,) = [b["name"] for b in geometry["device"] if (b["components"], b["layers"]) == held]
                two = [address, device[name].ctypes.data]
                a, b = map(ctypes.c_void_p, two if direction == "backup" else two[::-1])
                LIBRARY.move(a, at, b, where, *number(n, size, each // geometry["host_pages"], pages))
'''


def command(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """As anybody runs it: elsewhere, with the project on the path."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), "."]), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )


def by_pytest(folder: Path, name: str, marker: str) -> subprocess.CompletedProcess[str]:
    options = ["-p", "verify.plugin", "-p", "no:cacheprovider", "--hostpool-adapter", name, "-m", marker, "-rN"]
    return command(folder, "-m", "pytest", *options)


def written(folder: Path, text: str, *changes: tuple[str, str]) -> str:
    for old, new in changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    (folder / "known.txt").write_text("# nothing yet\n")
    return text


def test_a_python_adapter_in_a_suite_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(written(tmp_path, PYTHON))
    (tmp_path / "test_mine.py").write_text("def test_mine(): pass\n")
    done = by_pytest(tmp_path, "mine:Mine", "hostpool_mla or hostpool_mamba or not hostpool")
    assert done.returncode == 0, done.stdout
    assert "host pools: adapter mine:Mine, mine 0.1, a machine, vectors 1 (" in done.stdout
    number = sum(len(g.tests) for g in suite.groups(["mla", "mamba"]))
    moved = sum(len(g.tests) for g in suite.groups(["mla", "mamba"]) if g.geometry["layout"] == "page_first_direct")
    refused = sum(t.get("reason") == "layout" for g in suite.groups(["mla", "mamba"]) for t in g.tests)
    assert f"{moved + refused + 1} passed, {number - moved - refused} skipped" in done.stdout


def test_a_wrong_python_adapter_in_a_suite_of_its_own(tmp_path: Path) -> None:
    swapped = ("rows = device[name]", "rows = device[name.replace('@0', '@1')]")
    (tmp_path / "mine.py").write_text(written(tmp_path, PYTHON, swapped))
    (tmp_path / "known.txt").write_text("mha-odd/*  an odd pool\nmha-tiny/page_first/*  passes, or is not offered\n")
    done = by_pytest(tmp_path, "mine:Mine", "hostpool_mha and not hostpool_page_first_kv_split")
    assert done.returncode == 1
    place = "k layer 0 page 0 token 0 head 0 byte 0"
    assert f"mha-tiny/page_first_direct/backup/scattered: host buffer k, byte 0 (of {place}): expected k" in done.stdout
    assert "found k layer 1 page 6 token 0 head 0 byte 0" in done.stdout
    assert "xfailed" in done.stdout
    assert "LayersSwapped" in done.stdout
    assert "stale: mha-tiny/page_first/*" in done.stdout
    assert "Traceback" not in done.stdout


def compiled(folder: Path, *changes: tuple[str, str]) -> None:
    (folder / "mover.c").write_text(written(folder, C, *changes))
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", "mover.c", "-o", "mover.so"], cwd=folder, check=True, timeout=60)
    (folder / "binding.py").write_text(BINDING)


def test_an_adapter_in_c(tmp_path: Path) -> None:
    compiled(tmp_path)
    done = command(tmp_path, "-m", "verify", "adapter", "binding", "--out", "out")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 failed, 0 expected" in done.stdout
    assert command(tmp_path, "-m", "verify", "check-report", "out/report.json").returncode == 0
    assert by_pytest(tmp_path, "binding", "hostpool_dsa").returncode == 0


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("origin[i] / size * bytes", "(origin[0] + i) / size % pages * bytes"), "FirstSourceRunsOn, which shows in"),
        (("i < n && pages", "i < n - size && pages"), "LastOneLost, which shows in these and in no others"),
        (("at[i] < 0 || at[i] / size >= pages", "0"), "beyond-32-bits: the process died (SIGSEGV)"),
        (("n != m ? 5 : ", ""), "LengthsUnchecked"),
    ],
)
def test_a_wrong_adapter_in_c(change: tuple[str, str], said: str, tmp_path: Path) -> None:
    compiled(tmp_path, change)
    done = command(tmp_path, "-m", "verify", "adapter", "binding", "--family", "k_only", "mla", "--out", "out")
    assert done.returncode == 1, done.stdout + done.stderr
    content = json.loads((tmp_path / "out" / "report.json").read_text())
    assert any(said in line for line in [*content["diagnosis"], *(case["message"] for case in content["cases"])])
    assert {case["status"] for case in content["cases"] if "the process died" in case["message"]} <= {"failed"}
    assert "layer_first/" in done.stdout
    assert command(tmp_path, "-m", "verify", "check-report", "out/report.json").returncode == 1


# ---- the command line


def test_adapters_are_named_or_come_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.delenv(protocol.VARIABLE, raising=False)
    tiny = ["--family", "custom", "--same-process"]
    assert cli.main(["adapter", *tiny]) == 2
    assert "HOSTPOOL_ADAPTER; shipped are ours-torch, " in capsys.readouterr().err
    for name, said in {
        "nowhere:X": "there is no adapter 'nowhere:X'",
        "verify.adapters.wrong:X": "there is no fault 'X'; there are ",
        "json": "has no function capabilities and no function transfer",
    }.items():
        assert cli.main(["adapter", name, *tiny]) == 2
        assert said in capsys.readouterr().err
    monkeypatch.setenv(protocol.VARIABLE, "null")
    assert cli.main(["adapter", *tiny]) == 1
    assert cli.main(["adapter", "--adapter", "numpy", *tiny, "--out", str(tmp_path)]) == 0
    assert {file.name for file in tmp_path.iterdir()} == {"report.json", "index.html", "badge.svg"}
    assert any("cases are missing" in problem for problem in report.problems(tmp_path / "report.json"))


def test_the_suite_needs_numpy_alone() -> None:
    """Whoever checks a library in C has no torch."""
    code = """
        import sys
        for name in ("torch", "numba", "tqdm", "psutil"): sys.modules[name] = None
        from verify import cli
        sys.exit(cli.main(["adapter", "numpy", "--family", "custom"]))
    """
    assert command(ROOT, "-c", textwrap.dedent(code)).returncode == 0
