"""What SGLang did on a GPU is on record: whole, of these vectors, of a commit. How it is made."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from verify.adapters import protocol, report, runner, sglang_record, suite
from verify.adapters.plain import Null, Numpy
from verify.adapters.protocol import Buffers, Json
from verify.adapters.sglang_record import became
from verify.bench.provenance import git
from verify.findings.sglang_transfers import FILE

pytestmark = pytest.mark.vectors

RECORD: Json = json.loads(FILE.read_text("utf-8"))
SCHEMA: Json = json.loads(sglang_record.SCHEMA.read_text("utf-8"))
WIDE = "wide-rows"  # the note of cases whose rows are wider than a stage of bulk copies
AGAIN = "run SGLang's adapters on a GPU, and `python -m verify.adapters.sglang_record` with their reports"
TESTS = {test["id"]: (group, test) for group in suite.groups() for test in group.tests}
has_history = pytest.mark.skipif(
    git("rev-parse", "--is-shallow-repository") != "false", reason="this checkout does not have its history"
)
every_path = pytest.mark.parametrize("path", RECORD["paths"], ids=lambda path: path["name"])


# ---- the record


def test_the_record_follows_its_schema() -> None:
    jsonschema.validate(RECORD, SCHEMA)


def test_the_record_is_of_the_vectors_as_they_are() -> None:
    assert RECORD["vectors"]["sha256"] == suite.manifest_digest(), f"the vectors have changed since: {AGAIN}"


@has_history
def test_the_commit_has_the_sources_that_the_reports_name() -> None:
    assert sglang_record.sources(RECORD["commit"]) == RECORD["sources"]


def test_every_adapter_of_sglang_is_on_record() -> None:
    assert {path["name"] for path in RECORD["paths"]} == {n for n in protocol.SHIPPED if n.startswith("sglang")}


@every_path
def test_every_case_is_counted_once(path: Json) -> None:
    of = Counter((test["result"], test.get("reason")) for _, test in TESTS.values())
    assert sum(path["moved"].values()) == of["ok", None]
    assert sum(path["either"].values()) == of["unspecified", None]
    assert {("must-refuse", why): sum(counts.values()) for why, counts in path["refused"].items()} == {
        kind: number for kind, number in of.items() if kind[0] == "must-refuse"
    }
    assert sum(path["not_offered"].values()) == path["moved"]["not offered"]


@every_path
def test_cases_that_did_not_pass_stand_there_by_name(path: Json) -> None:
    for status in "failed", "expected":
        cases = [case for fate in path["not_passed"] if fate["status"] == status for case in fate["cases"]]
        assert len(set(cases)) == len(cases) == path["reported"][status]
        assert set(cases) <= TESTS.keys()


@every_path
def test_whatever_did_not_pass_is_expected_now_and_every_line_is_needed(path: Json) -> None:
    adapter = protocol.load(path["name"])
    cases = [case for fate in path["not_passed"] for case in fate["cases"]]
    assert [case for case in cases if not adapter.why_expected(case)] == []
    assert [line.pattern for line in adapter.expected if not any(map(line.matches, cases))] == []


@every_path
def test_of_cases_to_be_moved_those_are_expected_to_fail_that_did(path: Json) -> None:
    adapter = protocol.load(path["name"])
    failed = {case for fate in path["not_passed"] for case in fate["cases"]}
    to_be_moved = {case for case, (_, test) in TESTS.items() if test["result"] == "ok"}
    assert {case for case in to_be_moved if adapter.why_expected(case)} == failed & to_be_moved


@every_path
def test_wide_rows_raise_and_never_arrive_with_wrong_bytes(path: Json) -> None:
    became = [fate["became"] for fate in path["not_passed"] for case in fate["cases"] if TESTS[case][1]["note"] == WIDE]
    assert {*became} <= {"refused", "late"}


def test_no_folder_of_a_machine_is_on_record() -> None:
    texts = [fate["why"] for path in RECORD["paths"] for fate in path["not_passed"]]
    texts += [why for path in RECORD["paths"] for why in path["not_offered"]]
    assert [text for text in texts if "/tmp/" in text or "site/" in text] == []


# ---- what became of a case


class Ends:
    """Writes a byte, or does not, and then ends in some way."""

    def __init__(self, error: Exception | None, writes: bool) -> None:
        self.error, self.writes = error, writes

    def capabilities(self, *_: object) -> None:
        pass

    def transfer(self, _: Json, __: str, direction: str, host: Buffers, device: Buffers, *lists: object) -> None:
        if self.writes:
            next(iter((host if direction.startswith("backup") else device).values()))[0] ^= 1
        if self.error:
            raise self.error


def outcome(adapter: Any, case: str) -> str:
    group, test = TESTS[case]
    found = runner.check(protocol.Loaded("x", adapter, {}, "CPU", ()), group, test)
    return became(group, test, json.loads(json.dumps(vars(found))))


NO, BESIDE = ValueError("no"), MemoryError(sglang_record.BESIDE)


@pytest.mark.parametrize(
    ("adapter", "to_be_moved", "to_be_refused"),
    [
        (Numpy(), "moved", "refused"),
        (Null(), "nothing", "nothing"),
        (Ends(None, writes=True), "wrong", "moved"),
        (Ends(NO, writes=False), "refused", "refused"),
        (Ends(NO, writes=True), "late", "late"),
        (Ends(BESIDE, writes=True), "beside", "beside"),
    ],
)
def test_what_became_of_a_case_is_told_from_its_answer_and_its_bytes(
    adapter: Any, to_be_moved: str, to_be_refused: str
) -> None:
    moved = next(t["id"] for g in suite.groups(["mha"]) for t in g.tests if t["result"] == "ok")
    assert outcome(adapter, moved) == to_be_moved
    assert outcome(adapter, "mha-tiny/layer_first/backup/gap") == to_be_refused


def test_reasons_lose_their_path_and_the_bytes_of_one_pool() -> None:
    assert sglang_record.reason("ops: parts of 20 bytes; it takes multiples of 8") == (
        "parts whose bytes are no multiple of 8"
    )
    assert sglang_record.reason("bulk: it has no load in page_head") == "it has no load in page_head"
    assert sglang_record.reason("ops: it has no load in page_head; direct: it has no load") == "no path has it"
    assert sglang_record.reason("its pool cannot be built: E: two\nlines") == "its pool cannot be built: E: two"


def test_messages_lose_their_case_their_folders_and_what_follows() -> None:
    case = {"id": "a/b", "message": "a/b: was refused (f.pxi:9: E: at /opt/x-1/site/k.cuh:4: no room); host buffer k"}
    assert sglang_record.why(case) == "was refused (f.pxi:9: E: at k.cuh:4: no room)"


# ---- from reports


@cache
def reported(name: str) -> Json:
    """A report of this machine, which may have nothing of SGLang."""
    adapter = protocol.load(name)
    return report.as_json(adapter, [*runner.run(adapter, suite.groups(["mamba"]))], [])


def written(folder: Path, name: str, change: Callable[[Json], object] = lambda _: None) -> Path:
    content = json.loads(json.dumps(reported(name)))
    change(content)
    file = folder / f"{name}.json"
    file.write_text(report.as_text(content), encoding="utf-8")
    return file


def test_a_record_is_made_from_reports(tmp_path: Path) -> None:
    reports = [sglang_record.read(written(tmp_path, name)) for name in ("sglang-bulk", "sglang-ops")]
    found = sglang_record.checked(sglang_record.record(reports, "0" * 40))
    assert {path["name"]: path["reported"] for path in found["paths"]} == {
        name: reported(name)["counts"] for name in ("sglang-bulk", "sglang-ops")
    }


def test_a_report_that_was_edited_is_refused(tmp_path: Path) -> None:
    file = written(tmp_path, "sglang-ops", lambda content: content["counts"].update(passed=10**6))
    with pytest.raises(sglang_record.NoRecord, match=r"sglang-ops\.json was edited"):
        sglang_record.read(file)


@pytest.mark.parametrize(("text", "said"), [("{", "cannot be read"), ("[1]", r"has no names in it: \[1\]")])
def test_what_is_no_report_is_refused(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text(text, encoding="utf-8")
    with pytest.raises(sglang_record.NoRecord, match=rf"report\.json {said}"):
        sglang_record.read(tmp_path / "report.json")


def _of_other_vectors(content: Json) -> None:
    content["vectors"]["sha256"] = "0" * 64
    content.update(report.sealed(content))


def test_a_report_of_other_vectors_is_refused(tmp_path: Path) -> None:
    with pytest.raises(sglang_record.NoRecord, match="of other vectors: manifest 0000"):
        sglang_record.read(written(tmp_path, "sglang-ops", _of_other_vectors))


def test_reports_of_two_machines_are_refused() -> None:
    one, other = (json.loads(json.dumps(reported(name))) | {"problems": []} for name in ("sglang-bulk", "sglang-ops"))
    other["adapter"]["device"] = "another GPU"
    with pytest.raises(sglang_record.NoRecord, match=r"more than one device: .* and another GPU"):
        sglang_record.record([one, other], "0" * 40)


@pytest.mark.parametrize(
    ("commit", "said"),
    [
        ("HEAD", "the record would not follow sglang.schema.json: $.commit: 'HEAD' does not match"),
        ("0" * 40, "cannot be read"),
        pytest.param(RECORD["commit"], "has other sources", marks=has_history),
    ],
)
def test_a_commit_that_did_not_make_the_reports_is_refused(
    commit: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "record.json"
    asked = [str(written(tmp_path, "sglang-ops")), "--commit", commit, "--out", str(out)]
    assert sglang_record.main(asked) == 2
    assert said in capsys.readouterr().err
    assert not out.exists()
