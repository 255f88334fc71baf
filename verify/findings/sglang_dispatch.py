"""SGLang: what its dispatch leaves on the table, by committed measurements."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence

from verify.audit.rules import STAGED_BATCH
from verify.bench.gpu import cases, results
from verify.bench.provenance import ROOT
from verify.bench.report import size
from verify.findings.finding import Finding

Figures = Sequence[Mapping[str, str | float | bool]]
AGAIN = f"data/results/h200/{results.SGLANG_HERE}"
SLOW, FAST = 0.7, 0.85  # fractions of a plain copy
SOURCE = "SGLang 0.5.23, one H200; figures in data/results/sglang-0.5.23-h200.json: {payload_bytes}, {method}"
MEASURE = "`python -m verify.bench.gpu.sglang --out FILE.json`"


def measured() -> Figures:
    return results.sglang()["figures"]


def rate(figures: Figures, case: str, direction: str, layout: str, path: str) -> float:
    """As a fraction of the plain copy of the same run."""
    asked = {"case": case, "direction": direction, "layout": layout, "path": path}
    (found,) = (f for f in figures if all(f[name] == value for name, value in asked.items()))
    return float(found["fraction"])


def again(judge: Callable[[Figures], tuple[list[str], bool]]) -> tuple[list[str], bool]:
    """The last sentence of what was measured on another H200, and whether it holds there."""
    lines, holds = judge(json.loads((ROOT / AGAIN).read_text(encoding="utf-8"))["rows"])
    return [f"Measured again, {AGAIN}: {lines[-1]}"], holds


def staged_at_page_one(figures: Figures | None = None) -> Finding:
    lines, holds = _staged_at_page_one(measured() if figures is None else figures)
    more, holds_again = again(_staged_at_page_one)
    pages = [size(case.spec.component_page_bytes(case.spec.components[0])) for case in _of_one_token()]
    return Finding(
        title="Pages of one token are written back by the slower path",
        engine="SGLang",
        source=SOURCE.format(**results.sglang()),
        cell="MHA and MLA, page_first, backup, page size 1",
        claim="The staged path is taken although an operator that SGLang also has is up to three times as fast.",
        evidence=(*lines, *more),
        confirmed=holds and holds_again,
        consequence=f"Below {size(STAGED_BATCH)} a page, staging submits a copy for each; K of a page is {pages[0]} "
        f"here, the latent {pages[1]}. A threshold on the bytes of a page would send these to "
        "transfer_kv_all_layer_lf_pf and its _mla form.",
        measure=MEASURE,
    )


def _of_one_token() -> list[cases.Case]:
    return [case for case in cases.SGLANG_CASES if case.spec.family in ("mha", "mla") and case.spec.page_size == 1]


def _staged_at_page_one(figures: Figures) -> tuple[list[str], bool]:
    lines, gains = [], []
    for case in _of_one_token():
        where = case.name, "backup", "page_first"
        chosen = [f["path"] for f in figures if (f["case"], f["direction"], f["layout"]) == where and f["chosen"]]
        staged, ops = (rate(figures, *where, path) for path in ("staged", "AOT"))
        gains.append(ops / staged if chosen == ["staged"] else 0.0)
        lines.append(f"{case.name}: staged, which is taken, {staged:.3f} of a plain copy; the operator {ops:.3f}.")
    lines.append(f"The operator is {' and '.join(f'{gain:.1f}' for gain in gains)} times as fast.")
    return lines, max(gains) > 2.8 and min(gains) > 1


def loads_of_page_rows(figures: Figures | None = None) -> Finding:
    lines, holds = _loads_of_page_rows(measured() if figures is None else figures)
    more, holds_again = again(_loads_of_page_rows)
    return Finding(
        title="Page rows of DeepSeek V4 and of the DSA indexer leave a third of the bus unused when loaded",
        engine="SGLang",
        source=SOURCE.format(**results.sglang()),
        cell="V4 pages and DSA indexer, layer_first and page_first, load with backend kernel",
        claim=f"These loads run at less than {SLOW} of a plain copy, and where rows fit another kernel that SGLang "
        f"has, that one runs at more than {FAST}.",
        evidence=(*lines, *more),
        confirmed=holds and holds_again,
        consequence="These pools leave the kernels that are compiled when needed aside (can_use_jit is False), though "
        "rows of 8,448 bytes fit them; rows of 37,376 bytes exceed their stage of 32 KiB.",
        measure=MEASURE,
    )


def _loads_of_page_rows(figures: Figures) -> tuple[list[str], bool]:
    lines, taken, others = [], [], []
    for case in "V4-like rows of 37,376 B", "V4-like rows of 8,448 B", "DSA index rows of 8,448 B":
        for layout in "layer_first", "page_first":
            found = [f for f in figures if (f["case"], f["direction"], f["layout"]) == (case, "load", layout)]
            (ops,) = (f["fraction"] for f in found if f["path"] == "AOT" and f["chosen"])
            bulk = [f["fraction"] for f in found if f["path"] == "TMA"]
            taken.append(float(ops))
            others += map(float, bulk)
            beside = f"; its bulk-copy kernel, not taken, {float(bulk[0]):.2f}" if bulk else ""
            lines.append(f"{case}, {layout}: the operator, which is taken, {float(ops):.2f}{beside}.")
    lines.append(f"Taken: {min(taken):.2f} to {max(taken):.2f}. Not taken: {min(others):.2f} and more.")
    return lines, max(taken) < SLOW and min(others) > FAST
