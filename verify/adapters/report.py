"""What an adapter came to: as JSON that can be verified, as a page, as a badge."""

from __future__ import annotations

import hashlib
import json
import platform
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from string import Template

import numpy as np

from verify import page, score
from verify.adapters import diagnosis, suite
from verify.adapters.protocol import Json, Loaded
from verify.adapters.suite import STATUSES, Group, Outcome
from verify.bench.provenance import cpu_model, git

SCHEMA = Path(__file__).resolve().parents[2] / "data" / "schemas" / "report.schema.json"
MEANING = {
    "passed": "moved or refused as it must be, to the last byte",
    "failed": "wrong",
    "expected": "wrong, as the adapter's list of expected failures says",
    "unsupported": "not offered by the adapter",
}

Results = Sequence[tuple[Group, Json, Outcome]]


def as_json(adapter: Loaded, results: Results, stale: Sequence[str]) -> Json:
    return sealed(
        {
            "schema": SCHEMA.name,
            "suite": suite_itself(),
            "vectors": {
                "version": suite.manifest()["version"],
                "sha256": suite.manifest_digest(),
                "cases": suite.manifest()["cases"],
            },
            "adapter": {"name": adapter.name, "versions": adapter.versions, "device": adapter.device},
            "environment": environment(),
            "counts": tally(outcome.status for _, _, outcome in results),
            "diagnosis": [*diagnosis.summary(results)],
            "stale": list(stale),
            "cases": [asdict(outcome) for _, _, outcome in results],
        }
    )


def sealed(content: Json) -> Json:
    """With the digest of all the rest, which shows a slip. It is no signature: whoever edits can seal anew."""
    return content | {"sha256": _digest(content)}


def _digest(content: Json) -> str:
    rest = {key: value for key, value in content.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def suite_itself() -> Json:
    """Which suite it was, and how many of the faults built into it the suite catches, if that was measured for it."""
    sources = score.sources()
    version = tomllib.loads((score.ROOT / "pyproject.toml").read_text("utf-8"))["project"]["version"]
    return {"version": version, "sources": sources, "mutants": score.kept(sources)}


def environment() -> Json:
    """Where it ran. `commit` is the suite's; None outside a checkout."""
    status = git("status", "--porcelain")
    return {
        "commit": git("rev-parse", "HEAD"),
        "dirty": None if status is None else bool(status),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": cpu_model(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "versions": {"python": platform.python_version(), "numpy": np.__version__},
    }


def tally(statuses: Iterable[str]) -> dict[str, int]:
    counts = Counter(statuses)
    return {status: counts[status] for status in STATUSES}


def moved(content: Json) -> bool:
    """Whether anything was moved and right. Whoever offers nothing has shown nothing."""
    return any(case["status"] == "passed" and not case["refused"] for case in content["cases"])


def conforms(content: Json) -> bool:
    """Nothing failed, expected or not, and something was moved."""
    counts = content["counts"]
    return moved(content) and counts["failed"] + counts["expected"] == 0


def write(folder: Path, content: Json) -> None:
    """report.json, conformance.html and badge.svg: names that the pages of `make run` do not have."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.json").write_text(as_text(content), encoding="utf-8")
    (folder / "conformance.html").write_text(as_page(content), encoding="utf-8")
    (folder / "badge.svg").write_text(as_badge(content), encoding="utf-8")


def as_text(content: Json) -> str:
    """A line for each case."""
    head = json.dumps({k: v for k, v in content.items() if k != "cases"}, indent=1, ensure_ascii=False)
    lines = ",\n".join(json.dumps(case, ensure_ascii=False) for case in content["cases"])
    return f'{head[:-2]},\n "cases": [\n{lines}\n]}}\n'


# ---- verified


def problems(file: Path) -> Iterator[str]:
    """Why a report proves nothing, or not what it claims; none where it verifies."""
    import jsonschema

    try:
        content = json.loads(file.read_text("utf-8"))
        jsonschema.validate(content, json.loads(SCHEMA.read_text("utf-8")))
    except (OSError, ValueError, RecursionError) as error:
        yield f"it cannot be read: {error}"
        return
    except jsonschema.ValidationError as error:
        yield f"it does not follow {SCHEMA.name}: {error.json_path}: {error.message[:200]}"
        return
    if content["sha256"] != _digest(content):
        yield "it was edited: its sha256 is not that of its content"
    named = content["vectors"]
    if (named["sha256"], named["version"]) != (suite.manifest_digest(), suite.manifest()["version"]):
        yield f"it is of other vectors: manifest {named['sha256']}, here {suite.manifest_digest()}"
        return
    yield from _miscounted(content)
    if content["diagnosis"] != _diagnosis(content["cases"]):
        yield "its diagnosis is not that of its cases"
    if content["stale"]:
        yield f"{len(content['stale'])} expected failures are none, {content['stale'][0]}"
    measured = content["suite"]["mutants"]
    if measured and measured["killed"] > measured["total"]:
        yield f"of {measured['total']} mutants {measured['killed']} were killed"
    yield from _untrue({case["id"]: case for case in content["cases"]})
    if not conforms(content):
        counts = content["counts"]
        yield f"it does not conform: {', '.join(f'{number} {status}' for status, number in counts.items())}"


def coverage(file: Path) -> str:
    """What a report that verifies has shown."""
    counts = json.loads(file.read_text("utf-8"))["counts"]
    return f"{counts['passed']} passed, {counts['unsupported']} unsupported"


def partly_declined(file: Path) -> Iterator[str]:
    """Cells of family, layout and direction that are declined for some pools only, which may hide failures.

    No problem, as the width of rows is an honest reason. Pools that cannot have the layout are not counted.
    """
    cases = {case["id"]: case for case in json.loads(file.read_text("utf-8"))["cases"]}
    cells: dict[tuple[str, str, str], dict[str, bool]] = {}
    for group in suite.groups():
        for test in group.tests:
            if test.get("reason") != "layout":
                pools = cells.setdefault((group.family, group.geometry["layout"], test["direction"]), {})
                pools[group.geometry["id"]] = cases[test["id"]]["status"] == "unsupported"
    for cell, pools in cells.items():
        if 0 < sum(pools.values()) < len(pools):
            yield f"{'/'.join(cell)} ({sum(pools.values())} of {len(pools)})"


def _miscounted(content: Json) -> Iterator[str]:
    ids = [case["id"] for case in content["cases"]]
    all_ids = {test["id"] for group in suite.groups() for test in group.tests}
    if missing := all_ids - set(ids):
        yield f"{len(missing)} cases are missing, {min(missing)} among them"
    if strange := set(ids) - all_ids:
        yield f"{len(strange)} cases are none of the vectors', {min(strange)} among them"
    if len(set(ids)) < len(ids):
        yield "cases stand there twice"
    if content["vectors"]["cases"] != len(all_ids) or content["counts"] != tally(c["status"] for c in content["cases"]):
        yield "its counts are not those of its cases"


def _diagnosis(cases: Sequence[Json]) -> list[str]:
    """What a diagnosis says of these lines; those of no case of the vectors say nothing."""
    known = {test["id"]: (group, test) for group in suite.groups() for test in group.tests}
    lines = (Outcome(**case) for case in cases if case["id"] in known)
    return [*diagnosis.summary((*known[outcome.id], outcome) for outcome in lines)]


def _untrue(cases: dict[str, Json]) -> Iterator[str]:
    """Cases that are said to have passed with other bytes, and transfers that are offered for some lists only."""
    moved = 0
    for group in suite.groups():
        offered: dict[str, set[bool]] = {}
        for test in group.tests:
            case = cases.get(test["id"])
            if case is None:
                continue
            offered.setdefault(test["direction"], set()).add(case["status"] != "unsupported")
            if case["status"] == "passed":
                if (case["refused"], case["sha256"]) not in suite.right(group, test):
                    yield f"{test['id']}: these are not the bytes of a case that passed"
                moved += test["result"] == "ok"
        for direction, answers in offered.items():
            if len(answers) > 1:
                yield f"{group.geometry['id']}: {direction} is unsupported in some cases only"
    if not moved:
        yield "nothing was moved"


# ---- shown


def as_page(content: Json) -> str:
    adapter, counts, where = content["adapter"], content["counts"], content["environment"]
    versions = ", ".join(f"{name} {version}" for name, version in adapter["versions"].items())
    wrong = [case["message"] for case in content["cases"] if case["status"] == "failed"]
    expected = [case["message"] for case in content["cases"] if case["status"] == "expected"]
    about = f"{versions or 'no versions given'}; {adapter['device']}; {where['system']}; {where['time']}"
    vectors = f"Golden vectors version {content['vectors']['version']}, manifest {content['vectors']['sha256']}."
    by = f"Suite {content['suite']['version']}, sources {content['suite']['sources']}; {mutation_score(content)}."
    meanings = [f"<b>{status}</b>: {MEANING[status]} ({number:,})" for status, number in counts.items()]
    return page.page(
        f"{adapter['name']}: {_verdict(content)}",
        page.paragraph(about, "soft"),
        page.paragraph(vectors, "soft"),
        page.paragraph(by, "soft"),
        page.items(meanings),
        *map(page.paragraph, content["diagnosis"]),
        *(page.paragraph(f"Stale: {line}") for line in content["stale"]),
        page.heading("Pools × layouts"),
        page.table(["pool", "layout", *STATUSES, "not offered because"], [*_rows(content)], range(2, 6)),
        *(_listed(title, lines) for title, lines in (("Failed", wrong), ("Expected to fail", expected)) if lines),
        page.link("report.json", "report.json"),
    )


def mutation_score(content: Json) -> str:
    """How strong the suite is that says so, in words."""
    measured = content["suite"]["mutants"]
    if not measured:
        return "mutation score not measured for these sources"
    return f"mutation score {measured['killed']} of {measured['total']}"


def _rows(content: Json) -> Iterator[list[str]]:
    found: dict[tuple[str, str], list[Json]] = {}
    for case in content["cases"]:
        pool, layout, *_ = case["id"].split("/")
        found.setdefault((pool, layout), []).append(case)
    for (pool, layout), cases in found.items():
        counts = tally(case["status"] for case in cases)
        reasons = dict.fromkeys(case["message"] for case in cases if case["status"] == "unsupported")
        yield [pool, layout, *(str(number or "") for number in counts.values()), "; ".join(reasons)]


def _listed(title: str, lines: Sequence[str], most: int = 200) -> str:
    more = [f"and {len(lines) - most} more"] if len(lines) > most else []
    return page.details(f"<b>{title}</b> {len(lines)}", page.items([*map(page.text, lines[:most]), *more]))


def _verdict(content: Json) -> str:
    counts = content["counts"]
    return f"{counts['passed']} of {sum(counts.values())} passed"


_BADGE = Template("""\
<svg xmlns="http://www.w3.org/2000/svg" width="$width" height="20" role="img" aria-label="$label: $said">
<title>$label: $said</title>
<rect width="$left" height="20" fill="#444"/><rect x="$left" width="$right" height="20" fill="$colour"/>
<g fill="#fff" font-family="Verdana,sans-serif" font-size="11" text-anchor="middle">
<text x="$middle" y="14">$label</text><text x="$middle_right" y="14">$said</text></g>
</svg>
""")


def as_badge(content: Json) -> str:
    label, said = "KV host pools", _verdict(content)
    left, right = (7 * len(text) + 12 for text in (label, said))
    return _BADGE.substitute(
        label=escape(label),
        said=escape(said),
        left=left,
        right=right,
        width=left + right,
        middle=left // 2,
        middle_right=left + right // 2,
        colour="#2a7a3b" if conforms(content) else "#a33",
    )
