"""Targets, and whether the figures of a result file meet them. Rates are fractions of the session's memcpy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from verify.bench.gpu.cases import KIB, MIB, Mover
from verify.bench.gpu.recommend import lasting

Content = dict[str, Any]

GIB = 1 << 30
BACKENDS = ("direct", "kernel", "staged", "auto")
FULL = ("core", "sglang")  # portions of full payloads, all backends side by side

# Shortest run of at least so many bytes -> fraction that the best backend reaches.
RATES = (
    (2 * KIB, {"backup": 0.94, "load": 0.91}),
    (KIB, {"backup": 0.94, "load": 0.88}),
    (256, {"backup": 0.90, "load": 0.88}),
)
# Host page in one piece of at least so many bytes -> the same, both ways, all layers at once.
PIECES = ((4 * MIB, 0.97), (512 * KIB, 0.95))
# Shortest run of at least so many bytes -> blocks that suffice for the rate.
BLOCKS = ((2 * KIB, 4), (512, 8), (0, 16))
AUTO_NEAR, AUTO_SHARE, AUTO_LEAST = 0.97, 0.95, 0.90
SGLANG_GOOD, SGLANG_BEHIND = 0.95, 0.01
# What a transfer may take of a matmul beside it; each number of blocks that the portion measures is judged.
SLOWDOWN = {"direct": 0.03, "staged": 0.04} | {Mover("kernel", blocks=blocks).name: 0.06 for blocks in (1, 2, 4)}


@dataclass(frozen=True)
class Check:
    """One figure against its bound. `strictly`: equal is not enough."""

    target: str
    subject: str
    value: float
    bound: float
    at_least: bool = True
    strictly: bool = False
    unit: str = ""

    @property
    def margin(self) -> float:
        """How far on the right side; negative where the target is missed."""
        return self.value - self.bound if self.at_least else self.bound - self.value

    @property
    def met(self) -> bool:
        return self.margin > 0 if self.strictly else self.margin >= 0


def verdicts(content: Content, sglang: Content) -> list[str]:
    """One line for each target: how often it is met, and the figure that is farthest on the wrong side of its bound."""
    found: dict[str, list[Check]] = {}
    for check in checks(content, sglang):
        found.setdefault(check.target, []).append(check)
    return [_line(target, group) for target, group in found.items()]


def _line(target: str, group: list[Check]) -> str:
    met, worst = sum(check.met for check in group), min(group, key=lambda check: check.margin / (check.bound or 1))
    verdict = "met" if met == len(group) else "MISSED"
    figures = f"{worst.value:.4g}{worst.unit} against {worst.bound:.4g}{worst.unit}"
    return f"{verdict}: {target}: {met} of {len(group)}; worst {figures} ({worst.subject})"


def checks(content: Content, sglang: Content) -> Iterator[Check]:
    """Every figure that has a target."""
    for row in content["rows"]:
        if row["portion"] in FULL:
            yield from _rates(row)
        if row["portion"] in (*FULL, "descriptors"):
            yield from _submits(row)
            yield from _submits_beside_calls(row)
        if row["portion"] == "sglang":
            yield from _against(row, sglang["figures"], "against SGLang's choice")
            yield from _against(row, sglang.get("here", ()), "against SGLang's choice, measured here")
        if row["portion"] == "blocks":
            yield from _blocks(row)
        yield from _slowdowns(row)
    yield from _auto([row for row in content["rows"] if row["portion"] in FULL])


def required(row: Content) -> float | None:
    """The fraction that the row's best backend must reach; None where there is no target."""
    fit = [piece for least, piece in PIECES if row["piece_bytes"] >= least][:1]
    fit += [rates[row["direction"]] for least, rates in RATES if shortest_run(row) >= least][:1]
    return max(fit, default=None)


def best(row: Content) -> Content | None:
    """The fastest of our backends, all layers at once."""
    return max(measured(row), key=lambda cell: cell["gb_per_s"], default=None)


def measured(row: Content) -> list[Content]:
    """Cells of our backends as they come: all layers at once, every choice their own."""
    return [cell for cell in row["cells"] if cell["mover"] in BACKENDS and cell["status"] == "measured"]


def by_layer(row: Content) -> list[Content]:
    """Cells of our backends that move a layer at a time."""
    cells = [cell for cell in row["cells"] if cell["layerwise"] and cell["status"] == "measured"]
    return [cell for cell in cells if cell["backend"] in BACKENDS]


def shortest_run(row: Content) -> int:
    return min((run["bytes"] for run in row["runs"]), default=0)


def name(row: Content) -> str:
    return f"{row['case']} {row['pool']}, {row['layout']}, {row['direction']}"


def _fraction(cell: Content) -> float:
    return cell["percent_of_ceiling"] / 100


def _rates(row: Content) -> Iterator[Check]:
    fastest, bound = best(row), required(row)
    if fastest and bound:
        yield Check(f"rate of the best backend, {row['direction']}", name(row), _fraction(fastest), bound)


def _against(row: Content, figures: Sequence[Content], target: str) -> Iterator[Check]:
    """Ahead of SGLang's own choice where that is poor, hardly behind where it is good; each of its own ceiling.

    Figures of theirs that were not held count: where the queue is full, ours are not held either.
    """
    ours = {
        "all layers": [cell for cell in measured(row) if cell["mover"] == "auto"],
        "by layer": by_layer(row),
    }
    for figure in figures:
        same = all(figure[k] == row[k] for k in ("case", "layout", "direction"))
        if not (same and figure["chosen"] and figure["fraction"] is not None):  # None: it could not be measured
            continue
        poor, theirs = figure["fraction"] < SGLANG_GOOD, figure["fraction"]
        bound = theirs if poor else theirs - SGLANG_BEHIND
        for how, cells in ours.items():
            if cells:
                value = max(map(_fraction, cells))
                subject = f"{name(row)}, SGLang's {figure['path']}"
                yield Check(f"{target}, {how}", subject, value, bound, strictly=poor)


def _blocks(row: Content) -> Iterator[Check]:
    """Few blocks are enough."""
    few = next(blocks for least, blocks in BLOCKS if shortest_run(row) >= least)
    rates = next((rates for least, rates in RATES if shortest_run(row) >= least), None)
    cells = [cell for cell in row["cells"] if cell["status"] == "measured" and cell["blocks"] <= few]
    if rates and cells:
        fastest = max(map(_fraction, cells))
        yield Check(f"rate of kernel with {few} blocks at most", name(row), fastest, rates[row["direction"]])


def _auto(rows: list[Content]) -> Iterator[Check]:
    """auto is hardly ever behind the best backend, and never far: by rates that last, and by the device alone."""
    rates = {"": sustained, ", the device's time alone": lambda row, cell: cell["gb_per_s"]}
    cells_of = {"": measured, ", by layer": by_layer}
    for (when, cells_in), (how, rate) in product(cells_of.items(), rates.items()):
        ratios = []
        for row in rows:
            found = {cell["backend"]: rate(row, cell) for cell in cells_in(row)}
            if "auto" in found:
                ratios.append(found["auto"] / max(found.values()))
                yield Check(f"auto against the best backend{when}{how}", name(row), ratios[-1], AUTO_LEAST)
        if ratios:
            near = sum(ratio >= AUTO_NEAR for ratio in ratios) / len(ratios)
            subject = f"{len(ratios)} rows"
            yield Check(f"share of rows with auto within 3 %{when}{how}", subject, near, AUTO_SHARE)


def sustained(row: Content, cell: Content) -> float:
    """GB/s of transfers that go on and on: the device must do them, and the host must describe them."""
    return row["payload_bytes"] / lasting(cell)["median_s"] / 1e9


def _submits(row: Content) -> Iterator[Check]:
    """Host time of a call, in seconds."""
    for cell in measured(row):
        bounds = {
            "kernel": 60e-6,
            "direct": 100e-6 + 0.6e-6 * cell["descriptors"],
            "staged": 2e-3 * row["payload_bytes"] / GIB,
        }
        bound = bounds.get(cell["mover"])
        if bound:
            subject = f"{name(row)}, {cell['descriptors']} descriptors"
            yield Check(f"submit of {cell['mover']}", subject, cell["submit"]["median_s"], bound, False, unit=" s")


def _submits_beside_calls(row: Content) -> Iterator[Check]:
    """The same without what calls of the device take, where that was measured and the queue had room for all."""
    bounds = {"kernel": 60e-6, "direct": 100e-6, "staged": 2e-3 * row["payload_bytes"] / GIB}
    for cell in measured(row):
        bound, own = bounds.get(cell["mover"]), cell.get("own_s")
        if bound and own and cell["held"]:
            yield Check(f"submit of {cell['mover']}, the calls taken away", name(row), own, bound, False, unit=" s")


def _slowdowns(row: Content) -> Iterator[Check]:
    for cell in row["cells"]:
        bound = SLOWDOWN.get(cell["mover"])
        if cell["interference"] and bound:
            slowdown = cell["interference"]["slowdown"]
            yield Check(f"slowdown of a matmul by {cell['mover']}", name(row), slowdown, bound, at_least=False)
