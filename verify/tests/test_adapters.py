"""Other implementations: right ones pass, wrong ones are told what is wrong, and only true reports verify."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import textwrap
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from refimpl.support import BACKENDS
from verify import cli, mutants, score
from verify.adapters import diagnosis, protocol, report, runner, suite, wrong
from verify.adapters.plain import Numpy, Task
from verify.adapters.protocol import Expected, Loaded, NoAdapter
from verify.adapters.suite import Outcome
from verify.trial import ROOT, by_pytest, command, only

pytestmark = pytest.mark.vectors

Json = dict[str, Any]


def results(adapter: Loaded, layouts: tuple[str, ...] = ()) -> list[tuple[suite.Group, Json, Outcome]]:
    """All cases, or those of some layouts."""
    return [*runner.run(adapter, [g for g in suite.groups() if not layouts or g.geometry["layout"] in layouts])]


def failed(found: list[tuple[suite.Group, Json, Outcome]]) -> dict[str, str]:
    return {outcome.id: outcome.message for _, _, outcome in found if outcome.status == "failed"}


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
    assert "None of them moves or refuses anything" in moved
    assert "None of them moves or refuses anything" in refused


REFUSALS = ("Unchecked", "Accepted", "Trusted", "Writers")  # lists that must be refused are not in every layout


@pytest.mark.parametrize("flag", wrong.FLAGS)
def test_a_known_fault_fails_exactly_where_it_shows_and_is_named(flag: str) -> None:
    adapter = protocol.load(f"verify.adapters.wrong:{flag}")
    found = results(adapter, ("layer_first", "page_head") if flag.endswith(REFUSALS) else ("page_first",))
    certain = [(g, t, o) for g, t, o in found if t["result"] != "unspecified"]
    assert failed(certain).keys() == {t["id"] for g, t, _ in certain if flag in suite.flags(g, t)} != set()
    assert any(f"{flag}, which shows in these and in none that passes: " in line for line in diagnosis.summary(found))
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
        (
            lambda host, device: beside(host, 1),
            "host memory was written after buffer k: 1 bytes, the nearest at distance 1",
        ),
        (
            lambda host, device: beside(device, -2),
            "device memory was written before buffer k@0: 1 bytes, the nearest at distance 2",
        ),
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
    assert re.search(r"was refused \(test_adapters\.py:\d+: ValueError: too late\)", outcome.message)
    assert "expected poison (nothing was written)" in outcome.message


# ---- expected failures


def test_expected_failures_are_honoured_and_stale_ones_reported() -> None:
    lines = (
        Expected("mha-*/page_first/*", "layers, we know"),
        Expected("*/page_head/*/no-heads", "passes"),
        Expected("*/page_first_direct/*", "is not among these cases"),
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


# ---- what may be moved or refused


class AfterAll(Numpy):
    """Refuses a source that is named twice, but moves first."""

    def transfer(self, *arguments: Any, **named: Any) -> None:
        super().transfer(*arguments, **named)
        if any(len(set(items.tolist())) < len(items) for items in arguments[5:7]):
            raise ValueError("a page is read twice")


class AnyList(Numpy):
    """Writes a byte where the lists are empty."""

    def transfer(self, *arguments: Any, **named: Any) -> None:
        super().transfer(*arguments, **named)
        if not arguments[5].size:
            spoil(arguments[3 if arguments[2] == "backup" else 4])


@pytest.mark.parametrize(
    ("adapter", "said", "summed_up"),
    [
        (
            AfterAll(),
            "source-twice: was refused (test_adapters.py:{line}: ValueError: a page is read twice), but something had "
            "been written; host buffer k, byte ",
            "cases to be refused are wrong. All of them are refused, but something had been written. The error: "
            "test_adapters.py:{line}: ValueError: a page is read twice. The first wrong word, against the right one: "
            "written where nothing was due (",
        ),
        (
            AnyList(),
            "zero-pages: host buffer k, byte 3 (of k layer 0 page 0 token 0 head 0 byte 0): expected poison (nothing "
            "was written), found bytes ",
            "cases to be moved are wrong. No known fault shows in exactly these. The first wrong word, against the "
            "right one: written where nothing was due (",
        ),
    ],
    ids=["refused too late", "moved though there is nothing to move"],
)
def test_a_case_that_may_be_refused_fails_with_a_diagnosis(adapter: Numpy, said: str, summed_up: str) -> None:
    found = results(Loaded("odd", adapter, {}, "CPU", ()), ("page_first",))
    case = said.split(":")[0]
    said, summed_up = (re.escape(text).replace(re.escape("{line}"), r"\d+") for text in (said, summed_up))
    messages = failed(found)
    assert re.match(f"mha-tiny/page_first/backup/{said}", messages[f"mha-tiny/page_first/backup/{case}"])
    assert {key.rsplit("/", 1)[1] for key in messages} == {case}
    (line,) = diagnosis.summary(found)
    assert re.search(summed_up, line)
    assert f"All of them, and nothing that passes, have note {case}" in line


class BoundsCheckedLate(Numpy):
    """Writes a byte before it finds a list out of range."""

    def transfer(self, *arguments: Any, **named: Any) -> None:
        try:
            super().transfer(*arguments, **named)
        except ValueError as error:
            if str(error) == "out of range":
                spoil(arguments[3 if arguments[2].startswith("backup") else 4])
            raise


def test_what_is_refused_too_late_is_told_by_the_reason_to_refuse_it() -> None:
    found = results(Loaded("late", BoundsCheckedLate(), {}, "CPU", ()), ("layer_first",))
    (line,) = diagnosis.summary(found)
    assert re.search(r"something had been written\. The error: plain\.py:\d+: ValueError: out of range\. ", line)
    assert line.endswith(" All of them, and nothing that passes, have reason out of range.")


@pytest.mark.parametrize("flag", ["LayersSwapped", "FirstSourceRunsOn"])
def test_a_known_fault_is_named_by_what_may_be_refused_too(flag: str) -> None:
    found = results(protocol.load(f"verify.adapters.wrong:{flag}"), ("page_first",))
    may = [(g, t, o) for g, t, o in found if t["result"] == "unspecified"]
    assert {o.status for _, _, o in may} == {"passed", "failed"}
    (line,) = diagnosis.summary(found)
    assert f"{len(failed(found))} of " in line
    assert f" cases to be moved are wrong. {flag}, which shows in these and in none that passes: " in line


# ---- refused, though it must be moved


class NoLongLoads(wrong.Wrong):
    """Refuses loads of more than 64 indices once it is asked; and has a fault, or none."""

    def transfer(self, *arguments: Any, **named: Any) -> None:
        if arguments[2] == "load" and arguments[6].size > 64:
            raise KeyError(arguments[6].size)
        super().transfer(*arguments, **named)


def test_what_is_refused_everywhere_shows_an_error_and_no_known_fault() -> None:
    numpy: Any = Numpy()
    numpy.transfer = lambda host, device: None
    found = results(Loaded("of two arguments", numpy, {}, "CPU", ()), ("page_first",))
    (line,) = diagnosis.summary(found)
    assert re.fullmatch(
        r"(\d+) of \1 cases to be moved are refused\. The error: runner\.py:\d+: TypeError: "
        r".*<lambda>\(\) takes 2 positional arguments but 8 were given\.",
        line,
    )


def test_refusals_and_wrong_bytes_are_told_apart() -> None:
    found = results(Loaded("short", NoLongLoads("LayersSwapped"), {}, "CPU", ()), ("page_first",))
    sizes = dict.fromkeys(runner.indices(g.geometry, t, "device").size for g, t, o in found if "KeyError" in o.message)
    refused, wrongly = diagnosis.summary(found)
    assert len(sizes) > 1
    assert re.search(
        rf" cases to be moved are refused\. {len(sizes)} different errors, the first: test_adapters\.py:\d+: KeyError: "
        rf"{next(iter(sizes))}\. All of them, and nothing that passes, have direction load and 65 or more indices in "
        r"the list\.$",
        refused,
    )
    assert " cases to be moved are wrong. LayersSwapped, which shows in these and in none that passes: " in wrongly


# ---- faults that need several properties at once


class LoadsInBatches(Numpy):
    """What is left after whole batches of 64 pages is lost, in loads of one layout."""

    def pairs(self, task: Task) -> list[tuple[int, int]]:
        batched = task.direction == "load" and task.geometry["layout"] == "page_first"
        return task.pairs[: len(task.pairs) // 64 * 64 or None] if batched else task.pairs


class StaleBackups(Numpy):
    """The last page of a partial batch of 64 gets the bytes of the one before it, in backups."""

    def pairs(self, task: Task) -> list[tuple[int, int]]:
        *others, (to, source) = task.pairs
        stale = task.direction == "backup" and len(others) >= 64 and len(task.pairs) % 64
        return [*others, (to, others[-1][1] if stale else source)]


@pytest.mark.parametrize(
    ("adapter", "said"),
    [
        (LoadsInBatches(), "direction load and layout page_first and 65 or more pages in the list."),
        (StaleBackups(), "direction backup and 65 or more pages in the list."),
    ],
)
def test_properties_that_explain_nothing_alone_explain_it_together(adapter: Numpy, said: str) -> None:
    found = results(Loaded("partly", adapter, {}, "CPU", ()), ("layer_first", "page_first"))
    (line,) = diagnosis.summary(found)
    assert line.endswith(f" All of them, and nothing that passes, have {said}")


# ---- reports


@pytest.fixture(scope="module")
def truth() -> Json:
    adapter = protocol.load("numpy")
    return report.as_json(adapter, results(adapter), [])


def problems(content: Json, folder: Path) -> list[str]:
    """As `check-report` finds them."""
    report.write(folder, content)
    return [*report.problems(folder / "report.json")]


def test_a_true_report_verifies(truth: Json, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert problems(truth, tmp_path) == []
    assert cli.main(["check-report", str(tmp_path / "report.json")]) == 0
    assert f"verified, {suite.manifest()['cases']} passed, 0 unsupported" in capsys.readouterr().out
    assert len((tmp_path / "report.json").read_text().splitlines()) > suite.manifest()["cases"]


LONG = ("mha", "mla", "mamba", "v4_paged")  # families with a pool of more than 256 pages


class LongListsDeclined(Numpy):
    """Offers no layout whose pages lie in parts, and no loads in page_first for pools whose lists may be long."""

    def capabilities(self, geometry: Json, layout: str, direction: str) -> str | None:
        long = layout == "page_first" and direction == "load" and geometry["host_pages"] > 256
        declined = long or layout == "page_first_kv_split"
        return "not for us" if declined else super().capabilities(geometry, layout, direction)


def test_what_is_declined_for_some_pools_only_is_noted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    adapter = Loaded("declines", LongListsDeclined(), {}, "CPU", ())
    assert problems(report.as_json(adapter, results(adapter), []), tmp_path) == []
    assert cli.main(["check-report", str(tmp_path / "report.json")]) == 0
    *_, note = capsys.readouterr().out.partition(" unsupported\ndeclined for some pools of a family only:\n")
    cells = re.findall(r"^  (\w+)/page_first/load \(1 of (\d+)\)$", note, re.MULTILINE)
    loads = Counter(g.family for g in suite.groups() if _loads(g) and g.geometry["layout"] == "page_first")
    assert [(family, int(number)) for family, number in cells] == [(f, loads[f]) for f in LONG]
    assert note.count("/load (") == len(cells)


def _loads(group: suite.Group) -> bool:
    return any(test["direction"] == "load" for test in group.tests)


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
    "another machine": (lambda c: c["environment"].update(cpu="a faster one"), "it was edited: its sha256 is not that"),
    "another score": (
        lambda c: c["suite"].update(mutants={"killed": 9, "total": 9}),
        "it was edited: its sha256 is not that",
    ),
    "more killed than there are": (
        lambda c: c["suite"].update(mutants={"killed": 999, "total": 1}),
        "of 1 mutants 999 were killed",
    ),
    "a stale line": (lambda c: c.update(stale=["mha-*: passes"]), "1 expected failures are none, mha-*: passes"),
    "something added": (lambda c: c.update(approved=True), "does not follow report.schema.json: $"),
    "a diagnosis of nothing": (lambda c: c.update(diagnosis=["all is well"]), "its diagnosis is not that of its cases"),
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
    """Nor when it says that all is well, nor that something else is wrong."""
    adapter, edited = protocol.load(name), "its diagnosis is not that of its cases"
    content = report.as_json(adapter, results(adapter), [])
    found = problems(content, tmp_path)
    assert any("it does not conform" in problem for problem in found)
    assert edited not in found
    another = content | {"diagnosis": [line.replace("cases", "minor cases") for line in content["diagnosis"]]}
    assert edited in problems(report.sealed(another), tmp_path)
    _restate(content, "passed", len(content["cases"]))
    assert any("these are not the bytes" in problem for problem in problems(report.sealed(content), tmp_path))


def test_what_is_no_report_does_not_verify(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "report.json"
    with pytest.raises(SystemExit) as stopped:
        cli.main(["check-report", str(file)])
    assert (stopped.value.code, f"there is no file '{file}'" in capsys.readouterr().err) == (2, True)
    for text in ("{", "[" * 100_000):
        file.write_text(text)
        assert cli.main(["check-report", str(file)]) == 1
        assert "it cannot be read: " in capsys.readouterr().out


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


# ---- as a new user has it: an empty folder, files of one's own

CONSUMERS = ROOT / "verify" / "consumers"
Change = tuple[str, str]


def written(folder: Path, name: str, *changes: Change) -> None:
    """An adapter that was copied, and changed."""
    text = (CONSUMERS / name).read_text()
    for old, new in changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    (folder / name).write_text(text)


def compiled(folder: Path, *changes: Change) -> None:
    written(folder, "mover.c", *changes)
    written(folder, "pages_in_c.py")
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", "mover.c", "-o", "mover.so"], cwd=folder, check=True, timeout=60)


@pytest.mark.parametrize("language", ["python", "c"])
def test_an_adapter_to_copy_from_passes_and_its_report_verifies(language: str, tmp_path: Path) -> None:
    name = {"python": "pages", "c": "pages_in_c"}[language]
    written(tmp_path, "pages.py") if language == "python" else compiled(tmp_path)
    done = command(tmp_path, "-m", "verify", "--adapter", name, "--report", "out")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 failed, 0 expected" in done.stdout
    checked = command(tmp_path, "-m", "verify", "check-report", "out/report.json")
    assert checked.returncode == 0, checked.stdout
    assert re.search(r"out/report\.json: verified, \d+ passed, \d+ unsupported\n$", checked.stdout)
    assert by_pytest(tmp_path, name, "hostpool_dsa").returncode == 0


# Faults that are none of the simulated ones: in which file, what was changed, and what is said of it.
LOST, BACKWARDS = "(i + page_size == n && n % 4 ? bytes / page_size : 0)", '[:: -1 if len(buffer["layers"]) > 2 else 1]'
EACH_PAGE = "for a, b in zip(host_pages, device_pages, strict=True):"
K_ROWS = 'device[device_name(geometry, buffer, layer).replace("v@", "k@")].reshape(geometry["device_pages"], -1)'
FOREIGN: dict[str, tuple[str, tuple[Change, ...], tuple[str, ...]]] = {
    "the last token of a partial chunk of 4 is lost": (
        "mover.c",
        (("from_list[i] / page_size * bytes, bytes);", f"from_list[i] / page_size * bytes, bytes - {LOST});"),),
        (
            "mha-tiny/layer_first/backup/scattered: host buffer k, byte 80 (of k layer 0 page 2 token 1 head 0 byte 0)"
            ": expected k layer 0 page 3 token 1 head 0 byte 0, found poison (nothing was written); 32 of 384 bytes",
            "All of them, and nothing that passes, have a number of indices in the list that is no multiple of 4.",
        ),
    ),
    "layers come in reverse where there are more than two": (
        "pages.py",
        (('enumerate(buffer["layers"])', f'enumerate(buffer["layers"]{BACKWARDS})'),),
        (
            "mha-odd/page_first_direct/load/scattered: device buffer k@0, byte 84 (of k layer 0 page 1 token 0 head 0 "
            "byte 0): expected k layer 0 page 4 token 0 head 0 byte 0, found k layer 2 page 4 token 0 head 0 byte 0; ",
            "The first wrong word, against the right one: another layer (",
            "All of them have 3 or more layers and 1 or more pages in the list; so have 1 of the ",
        ),
    ),
    "V is read at the place of K for the page behind the 64th": (
        "pages.py",
        (
            (EACH_PAGE, "for i, (a, b) in enumerate(zip(host_pages, device_pages)):"),
            ("rows[a, position] = device_rows[b]", "rows[a, position] = device_rows[b] if i != 64 else k_rows[b]"),
            ("device_rows = ", f"k_rows = {K_ROWS}\n            device_rows = "),
        ),
        (
            "mha-many/page_first_direct/backup/65-scattered: host buffer v, byte 1760 (of v layer 0 page 55 token 0 "
            "head 0 byte 0): expected v layer 0 page 60 token 0 head 0 byte 0, found k layer 0 page 60 token 0 head 0 ",
            "All of them, and nothing that passes, have direction backup and family mha or quantised and 65 or more "
            "pages in the list.",
        ),
    ),
}


@pytest.mark.parametrize("fault", FOREIGN)
def test_a_fault_that_nobody_foresaw_is_decoded_and_narrowed_down(fault: str, tmp_path: Path) -> None:
    """Written elsewhere, in Python and in C. Their reports never verify, whatever is done to them by hand."""
    file, changes, said = FOREIGN[fault]
    name = "pages_in_c" if file == "mover.c" else "pages"
    compiled(tmp_path, *changes) if file == "mover.c" else written(tmp_path, file, *changes)
    done = command(tmp_path, "-m", "verify", "adapter", name, "--out", "out")
    assert done.returncode == 1, done.stdout + done.stderr
    for sentence in said:
        assert sentence in done.stdout
    assert "No known fault shows in exactly these" in done.stdout
    assert command(tmp_path, "-m", "verify", "check-report", "out/report.json").returncode == 1
    for forge in (_all_is_well, _nothing_failed, _digests_made_up):
        content = json.loads((tmp_path / "out" / "report.json").read_text())
        forge(content)
        content["counts"] = report.tally(case["status"] for case in content["cases"])
        assert "it was edited: its sha256 is not that of its content" in problems(content, tmp_path)
        assert problems(report.sealed(content), tmp_path) != []


def _all_is_well(content: Json) -> None:
    for case in content["cases"]:
        if case["status"] == "failed":
            case.update(status="passed")


def _nothing_failed(content: Json) -> None:
    content["cases"] = [case for case in content["cases"] if case["status"] != "failed"]


def _digests_made_up(content: Json) -> None:
    good = next(case["sha256"] for case in content["cases"] if case["status"] == "passed")
    for case in content["cases"]:
        if case["status"] == "failed":
            case.update(status="passed", sha256=good)


@pytest.mark.parametrize(
    ("change", "flag"),
    [
        (("from_list[i] / page_size * bytes, bytes)", "(from_list[0] + i) / page_size * bytes, bytes)"), "FirstSource"),
        (("i < n; i += page_size)", "i < n - page_size; i += page_size)"), "LastOneLost"),
    ],
)
def test_a_known_fault_in_c_is_named(change: Change, flag: str, tmp_path: Path) -> None:
    compiled(tmp_path, change)
    done = command(tmp_path, "-m", "verify", "adapter", "pages_in_c", "--family", "k_only", "mla")
    assert done.returncode == 1, done.stdout + done.stderr
    assert re.search(rf"{flag}\w*, which shows in these and in none that passes: ", done.stdout)


# Faults that need as many layers, pages or bytes as real pools have: file, change, flag, the first message.
ALL, ROWS = "page_first_direct/backup/", "from_list[i] / page_size * bytes, bytes)"
AT_SIZE: dict[str, tuple[str, Change, str, str]] = {
    "a mask of 64 bits has no bit for layer 64": (
        "pages.py",
        ("if layers is not None and layer not in layers:", "if position >= 64 or layers and layer not in layers:"),
        "LayersBeyond64Lost",
        f"mha-layers-70/{ALL}many-layers: host buffer k, byte 2048 (of k layer 64 page 0 token 0 head 0 byte 0): "
        "expected k layer 64 page 3 token 0 head 0 byte 0, found poison (nothing was written); ",
    ),
    "layer 64 is taken for layer 0": (
        "pages.py",
        ("device_name(geometry, buffer, layer)]", "device_name(geometry, buffer, layer % 64)]"),
        "LayersBeyond64Lost",
        f"mha-layers-70/{ALL}many-layers: host buffer k, byte 2048 (of k layer 64 page 0 token 0 head 0 byte 0): "
        "expected k layer 64 page 3 token 0 head 0 byte 0, found k layer 0 page 3 token 0 head 0 byte 0; ",
    ),
    "96 threads take a page each": (
        "pages.py",
        (EACH_PAGE, "for a, b in [*zip(host_pages, device_pages)][:96]:"),
        "PagesBeyond128Lost",
        f"mha-lists-260/{ALL}130-scattered: host buffer k, byte 128 (of k layer 0 page 2 token 0 head 0 byte 0): "
        "expected k layer 0 page 75 token 0 head 0 byte 0, found poison (nothing was written); ",
    ),
    "the index of a list is a byte": (
        "pages.py",
        (EACH_PAGE, "for a, b in [*zip(host_pages, device_pages)][:256]:"),
        "PagesBeyond256Lost",
        f"mha-lists-260/{ALL}260-scattered: host buffer k, byte 13696 (of k layer 0 page 214 token 0 head 0 byte 0): "
        "expected k layer 0 page 235 token 0 head 0 byte 0, found poison (nothing was written); ",
    ),
    "the number of a page is a byte": (
        "pages.py",
        ("    return pages\n", "    return [page % 256 for page in pages]\n"),
        "PageNumbersAsBytes",
        f"mha-lists-260/{ALL}130-scattered: host buffer k, byte 3968 (of k layer 0 page 62 token 0 head 0 byte 0): "
        "expected k layer 0 page 257 token 0 head 0 byte 0, found k layer 0 page 1 token 0 head 0 byte 0; ",
    ),
    "one tile of a row is copied": (
        "mover.c",
        (ROWS, f"{ROWS[:-6]}bytes < 16384 ? bytes : 16384)"),
        "BeyondFirst16KLost",
        "mha-row-32768/layer_first/backup/wide-rows: host buffer k, byte 16384 (of k layer 0 page 0 token 0 head 0 "
        "byte 16384): expected k layer 0 page 2 token 0 head 0 byte 16384, found poison (nothing was written); ",
    ),
    "what is behind the last whole tile of a row is forgotten": (
        "mover.c",
        (ROWS, f"{ROWS[:-6]}bytes < 16384 ? bytes : bytes / 16384 * 16384)"),
        "TailOf16KLost",
        "mha-row-66080/layer_first/backup/wide-rows: host buffer k, byte 65536 (of k layer 0 page 0 token 0 head 1 "
        "byte 32496): expected k layer 0 page 2 token 0 head 1 byte 32496, found poison (nothing was written); ",
    ),
}


@pytest.mark.parametrize("fault", AT_SIZE)
def test_a_fault_of_real_sizes_is_decoded_and_named(fault: str, tmp_path: Path) -> None:
    file, change, flag, said = AT_SIZE[fault]
    compiled(tmp_path, change) if file == "mover.c" else written(tmp_path, file, change)
    done = command(
        tmp_path, "-m", "verify", "adapter", Path(file).stem.replace("mover", "pages_in_c"), "--family", "mha"
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stdout.splitlines()[1].startswith(said), done.stdout.splitlines()[1]
    assert f" to be moved are wrong. {flag}, which shows in these and in none that passes: " in done.stdout


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            ("if (list[i] < 0 || list[i] / page_size >= pages) return 3;", ""),
            "beyond-32-bits: the process died (SIGSEGV)",
        ),
        (("if (n != m) return 5;", ""), "was not refused, though it must be: unequal lengths"),
    ],
)
def test_an_unchecked_list_in_c_is_a_failed_case_and_not_the_end(change: Change, said: str, tmp_path: Path) -> None:
    compiled(tmp_path, change)
    done = command(tmp_path, "-m", "verify", "adapter", "pages_in_c", "--family", "k_only", "--out", "out")
    assert done.returncode == 1, done.stdout + done.stderr
    content = json.loads((tmp_path / "out" / "report.json").read_text())
    assert any(said in case["message"] for case in content["cases"] if case["status"] == "failed")


def test_an_adapter_in_a_suite_of_its_own(tmp_path: Path) -> None:
    written(tmp_path, "pages.py", ('versions = {"pages": "1.0"}', 'versions, device = {"pages": "1.0"}, "a machine"'))
    (tmp_path / "test_mine.py").write_text("def test_mine(): pass\n")
    done = by_pytest(tmp_path, "pages", "hostpool_mla or hostpool_mamba or not hostpool")
    assert done.returncode == 0, done.stdout
    assert f"host pools: adapter pages, pages 1.0, a machine, vectors {suite.manifest()['version']} (" in done.stdout
    number = sum(len(g.tests) for g in suite.groups(["mla", "mamba"]))
    moved = sum(len(g.tests) for g in suite.groups(["mla", "mamba"]) if g.geometry["layout"] == "page_first_direct")
    refused = sum(t.get("reason") == "layout" for g in suite.groups(["mla", "mamba"]) for t in g.tests)
    assert f"{moved + refused + 1} passed, {number - moved - refused} skipped" in done.stdout


def test_a_wrong_adapter_in_a_suite_of_its_own(tmp_path: Path) -> None:
    known = ('versions = {"pages": "1.0"}', 'expected_failures = "known.txt"')
    written(tmp_path, "pages.py", known, ('enumerate(buffer["layers"])', 'enumerate(buffer["layers"][::-1])'))
    (tmp_path / "known.txt").write_text(
        "mha-odd/*  an odd pool\nmha-tiny/page_first/*  is not offered\nmha-*/no-parts  passes\n"
    )
    done = by_pytest(tmp_path, "pages", "hostpool_mha")
    assert done.returncode == 1
    place = "k layer 0 page 0 token 0 head 0 byte 0"
    assert f"mha-tiny/page_first_direct/backup/scattered: host buffer k, byte 0 (of {place}): expected k" in done.stdout
    assert "found k layer 1 page 6 token 0 head 0 byte 0" in done.stdout
    assert "xfailed" in done.stdout
    assert "another layer (" in done.stdout
    assert done.stdout.count("stale: ") == 1
    assert "stale: mha-*/no-parts: passes, but was expected to fail: passes" in done.stdout
    assert "Traceback" not in done.stdout


# ---- without Python


def consumed(folder: Path, *changes: Change) -> subprocess.CompletedProcess[str]:
    """The consumer in C with a mover of one's own, over all vectors."""
    written(folder, "my_move.c", *changes)
    written(folder, "check_vectors.c")
    options = ["-std=c99", "-O2", "-Wall", "-Wextra", "-Werror", '-DMOVER="my_move.c"']
    subprocess.run(["cc", *options, "check_vectors.c", "-o", "check"], cwd=folder, check=True, timeout=60)
    files = sorted(map(str, suite.FOLDER.glob("*.txt")))
    return subprocess.run(["./check", *files], cwd=folder, capture_output=True, text=True, timeout=60)


def test_a_mover_in_c_is_checked_without_python(tmp_path: Path) -> None:
    done = consumed(tmp_path)
    offered = [t for g in suite.groups() if g.geometry["layout"] == "page_first_direct" for t in g.tests]
    skipped = suite.manifest()["cases"] - sum(not t["direction"].endswith("entries") for t in offered)
    assert done.returncode == 0, done.stdout
    assert done.stdout == f"{suite.manifest()['cases']} cases checked, 0 wrong, {skipped} unsupported\n"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            ("+ at * each;", "+ (layers > 2 ? layers - 1 - at : at) * each;"),
            "mha-odd/page_first_direct/load/scattered: device buffer 0, byte 84: expected component 0 layer 0 page 4 "
            "token 0 head 0 byte 0, found component 0 layer 2 page 4 token 0 head 0 byte 0\n",
        ),
        (
            ("memcpy(host, device, each)", "memcpy(host, device, each / 16 * 16)"),
            "asymmetric-odd/page_first_direct/backup/scattered: host buffer 0, byte 128: expected component 0 layer 0 "
            "page 6 token 3 head 2 byte 0, found poison (nothing was written)\n",
        ),
        (
            ("memcpy(device, host, each)", "memcpy(device, host, each), *host ^= 1"),
            "mha-tiny/page_first_direct/load/scattered: host buffer 0, byte 0: expected component 0 layer 0 page ",
        ),
        (
            ("if (reason) return reason;", "if (reason && reason != WRITTEN_TWICE) return reason;"),
            "mha-tiny/page_first_direct/backup/destination-twice: was not refused, though it must be; ",
        ),
        (
            ("if (reason) return reason;", "if (reason || t->layers.n > 1) return 1;"),
            "mha-odd/page_first_direct/load/two-layers: was refused; \n",
        ),
        (("if (reason) return reason;", "if (reason) abort();"), "/device-longer: died of signal 6; "),
    ],
)
def test_a_wrong_mover_in_c_is_told_where_and_what(change: Change, said: str, tmp_path: Path) -> None:
    done = consumed(tmp_path, change)
    assert done.returncode == 1, done.stdout
    assert said in done.stdout


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
    assert {file.name for file in tmp_path.iterdir()} == {"report.json", "conformance.html", "badge.svg"}
    assert any("cases are missing" in problem for problem in report.problems(tmp_path / "report.json"))


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("def capabilities(: pass", "cannot be loaded: SyntaxError: "),
        ("import ctypes\nctypes.CDLL('./no.so')", "cannot be loaded: OSError: "),
        ("import no_such_package", "it needs 'no_such_package', which is neither installed nor on PYTHONPATH"),
    ],
)
def test_an_adapter_that_cannot_be_loaded_is_told_in_a_line(
    code: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "not_ready.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "not_ready", raising=False)
    assert cli.main(["adapter", "not_ready", "--family", "custom", "--same-process"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


def test_a_folder_that_cannot_be_written_is_told_before_any_case(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "taken").write_text("")
    with pytest.raises(SystemExit) as stopped:
        cli.main(["adapter", "null", "--out", str(tmp_path / "taken")])
    said = capsys.readouterr()
    assert (stopped.value.code, said.out) == (2, "")
    (line,) = said.err.splitlines()
    assert f"nothing can be written to '{tmp_path / 'taken'}': File exists" in line


def test_the_reference_reports_on_itself_where_no_adapter_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def reported() -> str:
        assert cli.main(["--report", str(tmp_path), "--family", "custom"]) == 0
        return json.loads((tmp_path / "report.json").read_text())["adapter"]["name"]

    monkeypatch.delenv(protocol.VARIABLE, raising=False)
    assert reported() == "ours-torch"
    monkeypatch.setenv(protocol.VARIABLE, "numpy")
    assert reported() == "numpy"


def test_one_failure_of_each_pool_layout_and_direction_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["adapter", "null", "--family", "custom"]) == 1
    lines = capsys.readouterr().out.splitlines()
    shown = [line.split(": ")[0].rsplit("/", 1)[0] for line in lines if line.startswith("custom-")]
    assert len(shown) == len(set(shown)) > 4
    failing = sum(test["result"] != "unspecified" or test["host_pages"] != [] for _, test in of_family("custom"))
    assert f"… and {failing - len(shown)} more; --out FOLDER writes down all of them" in lines


def of_family(name: str) -> list[tuple[suite.Group, Json]]:
    return [(group, test) for group in suite.groups([name]) for test in group.tests]


def test_whoever_offers_nothing_has_shown_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.py").write_text("def capabilities(*_): return 'not installed'\ndef transfer(*_): raise OSError\n")
    done = command(tmp_path, "-m", "verify", "adapter", "mine", "--out", "out")
    assert done.returncode == 1
    assert "nothing was moved, so nothing is shown" in done.stdout
    assert "#a33" in (tmp_path / "out" / "badge.svg").read_text()
    assert "it does not conform: " in "".join(report.problems(tmp_path / "out" / "report.json"))


def test_what_passing_cases_have_too_explains_nothing() -> None:
    found = results(protocol.load("null"), ("page_head",))
    assert diagnosis.apart_from(found, found) is None
    assert diagnosis.apart_from(found, []) is None


def test_a_property_that_takes_few_cases_away_is_not_named() -> None:
    every = [(g, t, Outcome(t["id"], "")) for g in suite.groups(["mha", "mla"]) for t in g.tests]
    there = [case for case in every if case[0].geometry["layout"] == "page_first"]
    failing = [case for at, case in enumerate(there) if at % 8 and case[1]["note"] != "zero-pages"]
    passing = [case for case in every if case not in failing]
    also = len(there) - len(failing)
    assert diagnosis.apart_from(failing, passing) == (
        f"All of them have layout page_first; so have {also} of the {len(passing)} that pass."
    )


# ---- the mutation score


def test_a_report_has_the_mutation_score_of_these_very_sources_or_says_that_there_is_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def reported() -> Json:
        return report.as_json(adapter, found, [])

    monkeypatch.setattr(score, "FILE", tmp_path / "mutants.json")
    adapter, found = protocol.load("numpy"), results(protocol.load("numpy"), ("page_head",))
    sources = reported()["suite"]["sources"]
    assert reported()["suite"]["mutants"] is None
    assert "mutation score not measured for these sources" in report.as_page(reported())
    score.keep(7, 8, "0" * 64)
    assert reported()["suite"]["mutants"] is None
    score.keep(7, 8, sources)
    assert reported()["suite"]["mutants"] == {"killed": 7, "total": 8}
    assert "mutation score 7 of 8" in report.as_page(reported())
    score.FILE.write_text("{}")
    assert reported()["suite"]["mutants"] is None


def test_sources_are_names_and_contents_of_what_mutants_are_made_of(tmp_path: Path) -> None:
    (tmp_path / "verify" / "__pycache__").mkdir(parents=True)
    (tmp_path / "refimpl").mkdir()
    seen = [score.sources(tmp_path)]
    for name, text in ("verify/a.py", "1"), ("verify/b.py", "1"), ("refimpl/a.py", "1"), ("verify/b.py", "2"):
        (tmp_path / name).write_text(text)
        seen.append(score.sources(tmp_path))
    (tmp_path / "verify/b.py").rename(tmp_path / "verify/c.py")
    seen.append(score.sources(tmp_path))
    assert len(set(seen)) == len(seen)
    (tmp_path / "verify/__pycache__/a.pyc").write_text("3")
    (tmp_path / "notes.txt").write_text("4")
    assert score.sources(tmp_path) == seen[-1]


def test_only_a_run_over_all_mutants_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(score, "FILE", tmp_path / "mutants.json")
    monkeypatch.setattr(mutants, "CONTROL", ("verify/tests/test_fill.py",))
    monkeypatch.setattr(score, "PACKAGES", ())  # somebody may edit them meanwhile
    monkeypatch.setattr(score, "DATA", ())
    one = mutants.Mutant(
        "nobody sees a wrong word", "verify/fill.py", "POISON = 0xFF", "POISON = 0x01", ("verify/tests/test_fill.py",)
    )
    monkeypatch.setattr(mutants, "table", lambda: [one, replace(one, fault="the same again")])
    assert mutants.main(["--only", "again", "--jobs", "1"]) == 0
    assert not score.FILE.exists()
    assert mutants.main(["--jobs", "1"]) == 0
    assert score.kept(score.sources()) == {"killed": 2, "total": 2}


def test_the_suite_needs_numpy_alone(tmp_path: Path) -> None:
    """Whoever checks a library in C has no torch."""
    code = """
        import sys
        for name in ("torch", "numba", "tqdm", "psutil", "jsonschema"): sys.modules[name] = None
        from verify import cli
        assert cli.main(["adapter", "numpy", "--family", "custom", "--out", "."]) == 0
        sys.exit(cli.main(["check-report", "report.json"]))
    """
    done = command(tmp_path, "-c", textwrap.dedent(code))
    assert (done.returncode, done.stderr) == (2, "a report is checked with jsonschema, which is not installed\n")
