"""`python -m verify.adapters.sglang_record`: reports of SGLang's adapters as one record, small enough to be committed.

Statuses are those of the reports. What became of a case is told from its answer and its bytes alone, so no list of
expected failures, of that day or of a later one, changes a count. Reports name the commit of whatever checkout lies
around them; the one given is taken if it has the very sources that they name.
"""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
import tarfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

from verify import score
from verify.adapters import report, suite
from verify.adapters.protocol import Json
from verify.adapters.sglang_functions import PATHS
from verify.adapters.sglang_pieces import DISTRIBUTIONS
from verify.adapters.suite import Group
from verify.arguments import Parser, file, new_file
from verify.bench import files
from verify.bench.provenance import ROOT

SCHEMA = ROOT / "data" / "schemas" / "sglang.schema.json"
RESULTS = {"moved": "ok", "refused": "must-refuse", "either": "unspecified"}  # by what is to become of a case
BESIDE = "memory beside a buffer was written"  # as the adapters say it, which look for it themselves

MEANING = {
    "moved": "as it must be, to the last byte; if it had to be refused: rows moved all the same",
    "wrong": "done, with other bytes",
    "refused": "before a byte was written",
    "late": "refused when something had been written",
    "beside": "memory beside the pool was written; the adapter says so, not SGLang",
    "nothing": "neither moved nor refused; indices that might end the process are not handed over",
    "not offered": "not asked for; the reasons stand there",
}

T = TypeVar("T")
Row = tuple[Group, Json, Json]  # the case as the vectors have it, and as the report does


class NoRecord(ValueError):
    """These reports cannot be summed up; the message says why."""


def record(reports: Iterable[Json], commit: str) -> Json:
    """Reports of one machine, one suite and one SGLang, in the order in which they were made."""
    ordered = sorted(reports, key=lambda content: content["environment"]["time"])
    where = [content["environment"] for content in ordered]
    versions = [_installed(content["adapter"]["versions"]) for content in ordered]
    return {
        "commit": commit,
        "sources": _same("suite", [content["suite"]["sources"] for content in ordered]),
        "time": [where[0]["time"], where[-1]["time"]],
        "gpu": _same("device", [content["adapter"]["device"] for content in ordered]),
        "cpu": _same("CPU", [environment["cpu"] for environment in where]),
        "system": _same("system", [environment["system"] for environment in where]),
        "versions": _same("Python", [environment["versions"] for environment in where]) | _same("SGLang", versions),
        "vectors": _same("set of vectors", [content["vectors"] for content in ordered]),
        "meaning": MEANING,
        "paths": [path(content) for content in ordered],
    }


def _same(what: str, found: Sequence[T]) -> T:
    others = [other for other in found if other != found[0]]
    if others:
        raise NoRecord(f"the reports are of more than one {what}: {found[0]} and {others[0]}; take those of one run")
    return found[0]


def _installed(versions: Json) -> Json:
    """Packages, without the pieces of them that an adapter looked for."""
    return {name: version for name, version in versions.items() if name in ("torch", *DISTRIBUTIONS)}


def checked(found: Json) -> Json:
    """The record itself, if it follows its schema."""
    import jsonschema

    try:
        jsonschema.validate(found, json.loads(SCHEMA.read_text("utf-8")))
    except jsonschema.ValidationError as error:
        raise NoRecord(
            f"the record would not follow {SCHEMA.name}: {error.json_path}: {error.message[:160]}"
        ) from error
    return found


# ---- one path


def path(content: Json) -> Json:
    known = {test["id"]: (group, test) for group in suite.groups() for test in group.tests}
    rows = [(*known[case["id"]], case) for case in content["cases"]]
    cells = {what: [row for row in rows if row[1]["result"] == result] for what, result in RESULTS.items()}
    reasons = dict.fromkeys(test["reason"] for _, test, _ in cells["refused"])
    return {
        "name": content["adapter"]["name"],
        "reported": content["counts"],
        "problems": content["problems"],
        "moved": _counted(cells["moved"]),
        "refused": {why: _counted([row for row in cells["refused"] if row[1]["reason"] == why]) for why in reasons},
        "either": _counted(cells["either"]),
        "not_offered": _not_offered([case for _, _, case in cells["moved"]]),
        "not_passed": [*_not_passed(rows)],
    }


def _counted(rows: Sequence[Row]) -> dict[str, int]:
    found = Counter(became(*row) for row in rows)
    return {what: found[what] for what in MEANING if found[what]}


def became(group: Group, test: Json, case: Json) -> str:
    """One of `MEANING`, whatever the report calls it."""
    if case["status"] == "unsupported":
        return "not offered"
    if case["status"] == "passed":
        return "refused" if case["refused"] else "moved"
    if BESIDE in case["message"]:
        return "beside"
    untouched = case["sha256"] == suite.unmoved(group, test)
    if case["refused"]:
        return "refused" if untouched else "late"
    if untouched:
        return "nothing"
    return "moved" if test["result"] == "must-refuse" else "wrong"


def _not_offered(cases: Sequence[Json]) -> dict[str, int]:
    """Why, and in how many cases, most frequent first."""
    found = Counter(reason(case["message"]) for case in cases if case["status"] == "unsupported")
    return dict(found.most_common())


def reason(message: str) -> str:
    """Without the path that says it, and without the number of bytes of one pool.

    >>> reason("bulk: rows of 24 bytes; it takes multiples of 16")
    'rows whose bytes are no multiple of 16'
    """
    named = re.findall(rf"\b({'|'.join(PATHS)}): ", message)
    if len(named) > 1:
        return "no path has it"
    first = message.splitlines()[0].removeprefix(f"{named[0]}: " if named else "")
    return re.sub(r"of \d+ bytes; it takes multiples of", "whose bytes are no multiple of", first)


def _not_passed(rows: Sequence[Row]) -> Iterator[Json]:
    """Cases that share their fate stand together."""
    found: dict[tuple[str, ...], list[str]] = {}
    for group, test, case in rows:
        if case["status"] in ("failed", "expected"):
            fate = case["status"], became(group, test, case), why(case), case["differs"]
            found.setdefault(fate, []).append(case["id"])
    for fate, ids in found.items():
        yield dict(zip(("status", "became", "why", "differs"), fate, strict=True)) | {"cases": ids}


def why(case: Json) -> str:
    """The first sentence of a message, without the case that it begins with and the folders of a machine.

    >>> why({"id": "a/b", "message": "a/b: was refused (x.py:1: Error: at /opt/sglang/csrc/copy.cuh:4); host buffer k"})
    'was refused (x.py:1: Error: at copy.cuh:4)'
    """
    first = case["message"].removeprefix(f"{case['id']}: ").splitlines()[0].split("; ")[0]
    return re.sub(r"(?<![\w/.])/(?:[\w.+-]+/)+", "", first)


# ---- what is read


def read(source: Path) -> Json:
    """A report of these vectors as it was written, and what `verify check-report` says of it."""
    content = _json(source)
    if content.get("sha256") != report.sealed(content)["sha256"]:
        raise NoRecord(f"{source.name} was edited: its sha256 is not that of its content; take it as it was written")
    if content["vectors"]["sha256"] != suite.manifest_digest():
        raise NoRecord(f"{source.name} is of other vectors: manifest {content['vectors']['sha256']}; run it again")
    return content | {"problems": [*report.problems(source)]}


def _json(source: Path) -> Json:
    try:
        content = json.loads(source.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise NoRecord(f"{source.name} cannot be read: {error}; give the file that was written") from error
    if not isinstance(content, dict):
        raise NoRecord(f"{source.name} has no names in it: {str(content)[:60]}; give the file that was written")
    return content


def sources(commit: str) -> str:
    """`score.sources` of a commit of this repository."""
    try:
        done = subprocess.run(["git", "-C", str(ROOT), "archive", commit], capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise NoRecord(f"commit {commit!r} cannot be read: {error}; name one of this checkout") from error
    with TemporaryDirectory() as folder, tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
        archive.extractall(folder, filter="data")
        return score.sources(Path(folder))


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 2 where the reports do not belong together, or not to the commit."""
    parser = Parser(prog="python -m verify.adapters.sglang_record", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("reports", nargs="+", type=file, metavar="REPORT", help="report.json of an adapter of SGLang")
    parser.add_argument("--commit", required=True, metavar="SHA", help="whose clean copy made the reports")
    parser.add_argument("--out", type=new_file, required=True, help="data/results/<device>/sglang.json, say")
    options = parser.parse_args(argv)
    try:
        found = checked(record(map(read, options.reports), options.commit))
        if sources(options.commit) != found["sources"]:
            raise NoRecord(f"commit {options.commit} has other sources than the suite that made the reports")
    except NoRecord as error:
        print(error, file=sys.stderr)
        return 2
    files.write(options.out, json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    for one in found["paths"]:
        told = ", ".join(f"{number} {what}" for what, number in one["moved"].items())
        print(f"{one['name']}: of what is to be moved {told}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
