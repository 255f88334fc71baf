"""What a choice costs: the path that a rule takes against the best that was measured for the same bytes.

Both are fractions of the plain memcpy of their own session. Where nothing that was measured stands for a path, its cost
is not known, and the table says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from refimpl import LAYOUTS, PoolSpec, presets
from refimpl.support import DIRECTIONS
from verify.arguments import Parser, listed, positive
from verify.audit.rules import H200, Choice, choices
from verify.bench.gpu import cases, here, results
from verify.bench.gpu.cases import PAYLOAD
from verify.bench.report import Table, as_text

Content = dict[str, Any]

# Path -> what was measured that stands for it, the first that there is. SGLang's are its own kernels, measured.
STANDS_FOR: dict[str, tuple[str, ...]] = {
    "TMA kernel": ("SGLang's TMA",),
    "register kernel": ("SGLang's JIT",),
    "AOT kernel": ("SGLang's AOT",),
    "Mamba kernel": ("SGLang's Mamba kernel",),
    "direct": ("SGLang's direct",),
    "staged, one batch": ("SGLang's staged",),
    "staged, a copy a page": ("SGLang's staged", "one staging buffer"),
    "batched copy": ("direct",),
    "Triton kernel": ("kernel",),
    "SM kernel": ("kernel, 4 blocks", "kernel"),
    "CONTIG_DIRECT": ("memcpy one by one",),
    "SEGMENT_DIRECT": ("memcpy one by one",),
    "GATHER_DIRECT": ("one staging buffer",),
    "GATHER_SCATTER": (),
    "SEGMENT_SCATTER": (),
}


@dataclass(frozen=True)
class Cell:
    """A pool in one layout and direction; pools of the same rows are one, whatever they are called."""

    spec: PoolSpec = field(compare=False)
    layout: str
    direction: str
    rows: tuple[object, ...] = ()

    @classmethod
    def of(cls, spec: PoolSpec, layout: str, direction: str) -> Cell:
        rows = tuple((c.dtype, c.row_shape, c.heads, c.unit, spec.layers_of(c)) for c in spec.components)
        return cls(spec, layout, direction, (spec.family, spec.page_size, spec.head_groups, rows))


@dataclass(frozen=True)
class Measured:
    """One figure of a cell: who moved the bytes, and which fraction of the memcpy of its session that was."""

    mover: str
    fraction: float


@dataclass
class Known:
    """What is known of a cell: what it is called, the pages that moved, all pools of that case, and every figure."""

    case: str
    pages: int
    beside: tuple[PoolSpec, ...] = ()
    figures: list[Measured] = field(default_factory=list)

    @property
    def best(self) -> Measured | None:
        return max(self.figures, key=lambda figure: figure.fraction, default=None)


@dataclass(frozen=True)
class Row:
    """A choice and its cost. `stands_in` None: not measured."""

    case: str
    cell: Cell
    choice: Choice
    stands_in: Measured | None
    best: Measured | None

    @property
    def regret(self) -> float | None:
        """How many times longer the choice takes than the best that was measured."""
        return self.best.fraction / self.stands_in.fraction if self.best and self.stands_in else None


# ---- what was measured


def known(content: Content, figures: Content) -> dict[Cell, Known]:
    """Every cell of a result file with pages at random places, the most pages that moved, and SGLang's own figures."""
    pools: dict[str, dict[str, PoolSpec]] = {}
    for name, portion in cases.portions(PAYLOAD).items():
        for case in portion.cases if name != "descriptors" else ():
            pools.setdefault(case.name, {})[case.spec.name] = case.spec
    found: dict[Cell, Known] = {}
    for row in content["rows"]:
        spec = pools.get(row["case"], {}).get(row["pool"])
        if spec is None or not row["scattered"]:
            continue
        cell = Cell.of(spec, row["layout"], row["direction"])
        if cell not in found or row["pages"] > found[cell].pages:
            found[cell] = Known(row["case"], row["pages"], tuple(pools[row["case"]].values()))
        if row["pages"] == found[cell].pages:
            measured = [c for c in row["cells"] if c["status"] == "measured"]
            found[cell].figures += [Measured(c["mover"], c["percent_of_ceiling"] / 100) for c in measured]
    for case in cases.SGLANG_CASES:
        for figure in (f for f in figures["figures"] if f["case"] == case.name):
            cell = Cell.of(case.spec, figure["layout"], figure["direction"])
            one = found.setdefault(cell, Known(case.name, case.pages_of(PAYLOAD)))
            one.figures.append(Measured(f"SGLang's {figure['path']}", figure["fraction"]))
    return found


def rows(content: Content, figures: Content, model: str | None = None, page_size: int | None = None) -> list[Row]:
    """The audit of every measured cell; with a model, of all its pools in all layouts, measured or not.

    `ValueError` for a model that is not known, or has no pages of such a size.
    """
    measured = known(content, figures)
    if model is None:
        asked = {cell: one for cell, one in measured.items() if page_size in (None, cell.spec.page_size)}
    else:
        pools = tuple(presets.model(model, page_size=page_size).values())
        asked = {
            cell: Known(model, found.pages, pools, found.figures)
            for spec in pools
            if spec.page_bytes
            for cell in (Cell.of(spec, *way) for way in product(LAYOUTS, DIRECTIONS))
            for found in (measured.get(cell, Known(model, max(1, PAYLOAD // spec.page_bytes))),)
        }
    return [
        Row(one.case, cell, choice, _stand_in(choice, one), one.best)
        for cell, one in asked.items()
        for choice in choices(cell.spec, cell.layout, cell.direction, one.pages, H200, one.beside)
    ]


def page_sizes(content: Content, figures: Content, model: str | None = None) -> list[int]:
    """Tokens a page with which something was measured, of a model or of any."""
    sizes = sorted({cell.spec.page_size for cell in known(content, figures)})
    return [size for size in sizes if model is None or _is_measured(content, figures, model, size)]


def _is_measured(content: Content, figures: Content, model: str, page_size: int) -> bool:
    try:
        return any(row.best for row in rows(content, figures, model, page_size))
    except ValueError:  # it cannot have such pages
        return False


def _stand_in(choice: Choice, one: Known) -> Measured | None:
    if choice.apart:
        return None
    by_mover = {figure.mover: figure for figure in sorted(one.figures, key=lambda figure: figure.fraction)}
    return next((by_mover[mover] for mover in STANDS_FOR[choice.path] if mover in by_mover), None)


# ---- tables

HEAD = ["model", "pool", "page", "layout", "direction", "engine", "with", "path", "stands for it", "of the bus"]
HEAD += ["best", "of the bus", "regret", "rule"]
CLEAR = 1.1  # a regret from which on a choice is clearly behind
NAMES = ("model", "pool", "layout", "direction", "engine", "with", "path", "stands for it", "best", "rule")


def table(found: Sequence[Row]) -> Table:
    """A line for each choice. Rules are footnotes, with their sources."""
    notes: dict[str, int] = {}
    body = [_line(row, notes) for row in found]
    title = (
        f"Which path an engine's rules take on one {H200.name}, and how many times longer it takes than the best "
        "that was measured\nfor the same bytes; of the bus: share of a plain memcpy in the session of that figure, "
        "which differs a little from session to session"
    )
    return Table(title, HEAD, body, [f"[{number}] {rule}" for rule, number in notes.items()])


def _line(row: Row, notes: dict[str, int]) -> list[str]:
    spec, choice, regret = row.cell.spec, row.choice, row.regret
    rule = notes.setdefault(f"{choice.engine}: {choice.why} ({choice.source})", len(notes) + 1)
    return [
        *(row.case, spec.name, str(spec.page_size), row.cell.layout, row.cell.direction),
        *(choice.engine, choice.setting, choice.path),
        *_figure(row.stands_in, f"nothing: {choice.apart}" if choice.apart else "nothing"),
        *_figure(row.best, "nothing"),
        f"{regret:.2f}" if regret else "not measured",
        f"[{rule}]",
    ]


def _figure(figure: Measured | None, otherwise: str) -> list[str]:
    return [figure.mover, f"{figure.fraction:.1%}"] if figure else [otherwise, "-"]


def summary(found: Iterable[Row]) -> Iterator[str]:
    """A line for each engine: how often its choice is clearly behind, and where most."""
    by_engine: dict[str, list[Row]] = {}
    for row in found:
        by_engine.setdefault(row.choice.engine, []).append(row)
    for engine, all_of_it in by_engine.items():
        costs = [(row.regret, row) for row in all_of_it if row.regret is not None]
        line = f"{engine}: {len(all_of_it)} choices, {len(costs)} of them measured"
        if costs:
            most, row = max(costs, key=lambda cost: cost[0])
            behind = sum(regret > CLEAR for regret, _ in costs)
            where = f"{row.case} {row.cell.spec.name}, {row.cell.layout}, {row.cell.direction}: {row.choice.path}"
            line += f"; {behind} take more than {CLEAR} times as long as the best; at most {most:.1f} times ({where})"
        yield line


def main(argv: Sequence[str]) -> int:
    """Every choice with its rule and cost: of what was measured on an H200, or of all pools of a model."""
    parser = Parser(prog="python -m verify audit", description=main.__doc__)
    parser.add_argument("--model", choices=presets.MODELS, metavar="M", help=listed(presets.MODELS))
    parser.add_argument("--page-size", type=positive, metavar="P", help="tokens a page")
    args = parser.parse_args(argv)
    measured = here.shown("bench", "committed")[1], results.sglang()
    try:
        found = rows(*measured, args.model, args.page_size)
    except ValueError as mistake:
        parser.error(str(mistake))
    if not found:
        sizes = listed(map(str, page_sizes(*measured)))
        parser.error(f"nothing was measured with pages of {args.page_size}, only of {sizes}; name a model")
    print(as_text(table(found), left=NAMES), "", *summary(found), sep="\n")
    if not any(row.best for row in found):
        sizes = listed(map(str, page_sizes(*measured, args.model)))
        print(f"{args.model} was measured with pages of {sizes}" if sizes else f"nothing of {args.model} was measured")
    return 0
