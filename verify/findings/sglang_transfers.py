"""SGLang: what its transfer functions do with the golden vectors, by the record of one GPU."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator

from verify.adapters import suite
from verify.adapters.protocol import Json
from verify.adapters.sglang_functions import BULK_STAGE, PATHS
from verify.adapters.sglang_memory import bundles
from verify.bench.provenance import ROOT
from verify.bench.report import size
from verify.findings.finding import Finding

FILE = ROOT / "data" / "results" / "h200" / "sglang.json"
SOURCE = "SGLang 0.5.23, one H200; every case in data/results/h200/sglang.json"
MEASURE = (
    "`python -m verify adapter sglang-bulk --out FOLDER` and so on, summed up by "
    "`python -m verify.adapters.sglang_record`"
)
RAISED = "row bytes exceed the smem stage"
NEVER_REFUSED = ("out of range", "misaligned", "not consecutive", "written twice")

# Why cases to be moved were not asked for: words of a reason, and what that comes to.
KINDS = {
    "Unsupported layout": "layout or direction",
    " has no ": "layout or direction",
    "no multiple of": "row size",
    "single entries": "entries and side states",
    "side states": "entries and side states",
    "none of SGLang's pools": "other pools",
    "it moves states": "other pools",
    "no path has": "of no path",
    "cannot be built": "pools not built",
    "alike": "other pools",
    "does not build": "row size",
}


def recorded() -> Json:
    return json.loads(FILE.read_text(encoding="utf-8"))


# ---- what is to be moved


def moves_exactly(record: Json | None = None) -> Finding:
    record = recorded() if record is None else record
    paths = record["paths"]
    wrong = [path["name"] for path in paths if {"wrong", "beside", "nothing"} & path["moved"].keys()]
    raised = sum(path["moved"].get(what, 0) for path in paths for what in ("refused", "late"))
    late = sum(path["moved"].get("late", 0) for path in paths)
    unbuilt = sum(map(_unbuilt, paths), Counter[str]())
    errors = ", ".join(f"{error} {cases}" for error, cases in unbuilt.most_common())
    return Finding(
        title="What a transfer function takes, it moves to the last byte",
        engine="SGLang",
        source=SOURCE,
        cell=f"every function and pool, all layouts, both directions; {sum(paths[0]['moved'].values()):,} cases to be "
        "moved",
        claim="Of the cases to be moved none is done with a wrong byte; what is not done raises, for rows above the "
        "stage of bulk copies.",
        evidence=(
            *map(_moved, paths),
            f"Of those that raise, {late} had moved a part of the pool by then: each part is a call of its own.",
            f"{unbuilt.total()} cases stay open, since their pools raised when the adapter built them: {errors}.",
        ),
        confirmed=not wrong
        and raised == sum(len(ids) for path in paths for ids in _raised(path).values())
        and all(path["moved"].get("moved") for path in paths),
        consequence="What is not asked for is no fault: a layout, a direction or a row size that the path does not "
        "have, or a pool that SGLang puts together in another way. sglang takes the first path that has the cell.",
        measure=MEASURE,
    )


def _moved(path: Json) -> str:
    """
    >>> _moved({"name": "x", "moved": {"moved": 3, "late": 1, "not offered": 9}, "not_offered": {"it has no load": 9}})
    'x: 3 of 4 moved, 1 raises; 9 not asked for: layout or direction 9.'
    """
    counts = Counter(path["moved"])
    missing, right = counts.pop("not offered", 0), counts["moved"]
    raised = counts.total() - right
    more = f", {raised} raise{'s' * (raised == 1)}" if raised else ""
    left = ", ".join(f"{kind} {cases:,}" for kind, cases in _kinds(path).most_common())
    return f"{path['name']}: {right:,} of {counts.total():,} moved{more}; {missing:,} not asked for: {left}."


def _kinds(path: Json) -> Counter[str]:
    found = Counter[str]()
    for reason, cases in path["not_offered"].items():
        found[_kind(reason)] += cases
    return found


def _kind(reason: str) -> str:
    return next((kind for words, kind in KINDS.items() if words in reason), "others")


def _unbuilt(path: Json) -> Counter[str]:
    """Cases whose pools were not built, by the error.

    >>> _unbuilt({"not_offered": {"its pool cannot be built: TypeError: no": 3, "it has no load": 9}})
    Counter({'TypeError': 3})
    """
    found = Counter[str]()
    for reason, cases in path["not_offered"].items():
        if _kind(reason) == "pools not built":
            found[reason.split(": ")[1]] += cases
    return found


def _raised(path: Json) -> dict[str, list[str]]:
    """Cases that raised for want of room in the stage, by direction and layout."""
    found: dict[str, list[str]] = {}
    for fate in path["not_passed"]:
        for case in fate["cases"] if RAISED in fate["why"] else ():
            _, layout, direction, _ = case.split("/")
            found.setdefault(f"{direction} in {layout}", []).append(case)
    return found


# ---- rows that do not fit


def wide_rows(record: Json | None = None) -> Finding:
    record = recorded() if record is None else record
    paths = {path["name"]: path for path in record["paths"]}
    of_bulk = {case for ids in _raised(paths["sglang-bulk"]).values() for case in ids}
    due = {case: row for case, row in _taken("bulk") if row > BULK_STAGE}
    rows = " and ".join(f"{row:,}" for row in sorted({*due.values()}))
    pools = _raised(paths["sglang-pools"])
    of_pools = [case for ids in pools.values() for case in ids]
    staged, moved = {case for case, _ in _taken("staged")}, paths["sglang-staged"]["moved"]["moved"]
    undone = {case for fate in paths["sglang-pools"]["not_passed"] for case in fate["cases"]}
    heads, width, element = 96, 192, 2
    return Finding(
        title="Rows above 32 KiB are approved, and then raise",
        engine="SGLang",
        source="SGLang 0.5.23, kernels/ops/kvcache/hicache.py, use_hicache_tma_kernel; one H200; every case in "
        "data/results/h200/sglang.json",
        cell="kernels that are compiled when needed, from compute capability 9 on; layer_first and page_first",
        claim="The predicate accepts every row of a multiple of 16 bytes; above the stage of "
        f"{size(BULK_STAGE)} each launch raises.",
        evidence=(
            f"sglang-bulk: {len(of_bulk & due.keys())} of {len(due)} cases with such rows ({rows} B) raise: {RAISED}.",
            f"sglang-pools: so do {len(of_pools)} cases of {len({case.split('/')[0] for case in of_pools})} pools: "
            f"{', '.join(pools)}.",
            f"Backups in page_first are staged: sglang-staged moves {moved} of {len(staged)} that it takes, "
            f"{len(staged & due.keys())} of them with such rows, and none of these fails in sglang-pools; for "
            f"{len(pools.get('load in page_first', ()))} pools what they stored cannot be loaded.",
            "A row above the stage counts as a chunk of one row, which pages of any size tile.",
        ),
        confirmed=of_bulk == due.keys()
        and {"load in layer_first", "load in page_first"} <= pools.keys()
        and moved == len(staged)
        and bool(staged & due.keys())
        and not staged & undone & due.keys(),
        consequence="pool_host/mha.py and mla.py ask can_use_hicache_jit_kernel when they are built and go by its "
        f"answer from then on: {heads} heads of {width} in {element} bytes are rows of {heads * width * element:,} B. "
        "Comparing with TMA_STAGE_BYTES in the predicate would leave them to the register kernel where that builds, "
        "else to the operators. We know of no model with such rows, and the failure is loud.",
        measure=MEASURE,
    )


def _taken(name: str) -> Iterator[tuple[str, int]]:
    """Cases to be moved of which a path has the layout, the direction and the rows, and the longest row of each."""
    path = PATHS[name]
    for group in suite.groups():
        geometry, layout = group.geometry, group.geometry["layout"]
        parts = [*bundles(geometry, layout)]
        if any(part["side"] for part in geometry["components"]) or any(map(path.limit, parts)):
            continue
        for test in group.tests:
            direction = test["direction"]
            if test["result"] == "ok" and direction in path.moves and layout in path.moves[direction][1]:
                yield test["id"], max(bundle.row for bundle in parts)


# ---- lists that must be refused


def lists_trusted(record: Json | None = None) -> Finding:
    record = recorded() if record is None else record
    told = {path["name"]: _told(path) for path in record["paths"]}
    asked = {name: by for name, by in told.items() if any(by[reason] for reason in NEVER_REFUSED)}
    handed = [_handed_over(by[reason], reason) for by in asked.values() for reason in NEVER_REFUSED]
    moving = [sum(_rows_moved(by[reason]) for by in asked.values()) for reason in NEVER_REFUSED]
    spared = " or ".join(name for name, by in asked.items() if not _handed_over(by["out of range"], "out of range"))
    late = sum(counts["late"] for counts in handed)
    of_pages = {name: by["partial page"] for name, by in asked.items()}
    parts = (f"{name} moves {counts['moved']}, refuses {counts['refused']}" for name, counts in of_pages.items())
    rest = (name for name in told if name not in asked)
    return Finding(
        title="Index lists are trusted",
        engine="SGLang",
        source=SOURCE,
        cell=f"{', '.join(asked)}; lists that no transfer of whole pages can have, none out of range to {spared}",
        claim="Of what was handed over, lists of unequal lengths are always refused; indices out of range, misaligned "
        "pages, pages with gaps and destinations named twice never are: rows move before any error.",
        evidence=(
            *(_trusted(name, by) for name, by in asked.items()),
            f"{late} raise, all of them after rows had moved.",
            f"Parts of a page: {'; '.join(parts)}. Refused are those of the copy engine, and of page rows, whose lists "
            "become page numbers before the call.",
            f"Where {', '.join(rest)} have a transfer, the vectors have next to no such lists.",
        ),
        confirmed=all(moving)
        and all(_rows_moved(counts) == counts.total() for counts in handed)
        and all({*by["unequal lengths"]} == {"refused"} for by in asked.values()),
        consequence="By design: the controller hands over whole pages of its own allocator, and to a kernel a page is "
        "nothing but rows; the copy engine reads the first index of each page. Whoever else calls these functions "
        "checks range, alignment, runs and destinations first, or loses bytes without an error.",
        measure=MEASURE,
    )


def _told(path: Json) -> dict[str, Counter[str]]:
    """What became of each sort of list that a path was asked to move; a layout is no list."""
    asked = {why: Counter(counts) for why, counts in path["refused"].items() if why != "layout"}
    for counts in asked.values():
        del counts["not offered"]
    return asked


def _handed_over(counts: Counter[str], reason: str) -> Counter[str]:
    """The adapters keep back none but indices out of range."""
    return Counter({what: cases for what, cases in counts.items() if (reason, what) != ("out of range", "nothing")})


def _rows_moved(counts: Counter[str]) -> int:
    return counts["moved"] + counts["late"] + counts["beside"]


def _trusted(name: str, by: dict[str, Counter[str]]) -> str:
    """
    >>> _trusted("x", {"misaligned": Counter(moved=3, refused=1), "out of range": Counter(beside=2)})
    'x: of 6 such lists 5 move rows, 2 of these beside the pool; 1 refused.'
    """
    all_of = sum(by.values(), Counter[str]())
    more = [f"{all_of['beside']} of these beside the pool"] if all_of["beside"] else []
    more += [f"{all_of['late']} until an error comes"] if all_of["late"] else []
    ends = [f"{all_of['refused']} refused"]
    ends += [f"{all_of['nothing']} not handed over, as they might end the process"] if all_of["nothing"] else []
    moved = ", ".join([f"{_rows_moved(all_of)} move rows", *more])
    return f"{name}: of {all_of.total()} such lists {moved}; {', '.join(ends)}."
