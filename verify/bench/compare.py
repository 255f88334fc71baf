"""Two result files side by side: devices, or commits. `python -m verify compare A.json B.json`, `make compare A= B=`.

Ratios are of fractions, each of a plain copy in its own session or row, so that a slower bus is no slower code; what
differs by no more than noise is named so (`verify.bench.noise`).
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from pathlib import Path
from typing import Any

from verify.arguments import Parser
from verify.bench import files, results
from verify.bench.files import Form, NoResults
from verify.bench.gpu import ceilings
from verify.bench.gpu import measure as gpu_measure
from verify.bench.gpu import results as gpu_results
from verify.bench.noise import RULE, Fraction, fraction
from verify.bench.provenance import origin
from verify.bench.report import Table, as_text

Content = dict[str, Any]

VERDICTS = ("faster", "slower", "within noise")


@dataclass(frozen=True)
class Cell:
    """`fraction` is None where nothing was measured; `status` then says why."""

    status: str
    fraction: Fraction | None


Key = tuple[Any, ...]  # the names of the row, and last the mover or backend
Cells = dict[Key, Cell]


@dataclass(frozen=True)
class Kind:
    """A form, what its rows are called, and how its cells are read."""

    form: Form
    names: tuple[str, ...]
    cells: Callable[[Content], Iterator[tuple[Key, Cell]]]


def _gpu_cells(content: Content) -> Iterator[tuple[Key, Cell]]:
    for row in content["rows"]:
        limits = content["sessions"][row["session"]]["ceilings"]
        plain = ceilings.fitting(limits, row["direction"], row["payload_bytes"])
        yield from _cells(row, gpu_measure.NAMES, "mover", plain["timing"], plain["payload_bytes"])


def _cpu_cells(content: Content) -> Iterator[tuple[Key, Cell]]:
    for row in content["rows"]:
        plain = {copy["name"]: copy["timing"] for copy in row["copies"]}.get(row["ceiling"])
        yield from _cells(row, results.NAMES, "backend", plain, row["payload_bytes"])


def _cells(
    row: Content, names: tuple[str, ...], mover: str, plain: Content | None, plain_bytes: int
) -> Iterator[tuple[Key, Cell]]:
    """`plain` is None in rows in which nothing was measured."""
    for cell in row["cells"]:
        found = fraction(cell["timing"], row["payload_bytes"], plain, plain_bytes) if cell["timing"] and plain else None
        yield (*(row[name] for name in names), cell[mover]), Cell(cell["status"], found)


KINDS = (
    Kind(gpu_results.FORM, gpu_measure.NAMES, _gpu_cells),
    Kind(results.FORM, results.NAMES, _cpu_cells),
)


def read(path: Path) -> tuple[Kind, Content]:
    """A result file and its kind. `NoResults` if it cannot be read or is of neither kind."""
    form, content = files.read(path, *(kind.form for kind in KINDS))
    return next(kind for kind in KINDS if kind.form is form), content


@dataclass(frozen=True)
class Comparison:
    """Cells of two files of one kind."""

    kind: Kind
    a: Cells
    b: Cells

    @cached_property
    def both(self) -> dict[Key, tuple[Fraction, Fraction]]:
        """Cells that both files have measured."""
        pairs = {key: (self.a[key].fraction, self.b[key].fraction) for key in self.a if key in self.b}
        return {key: (a, b) for key, (a, b) in pairs.items() if a and b}

    @property
    def changed(self) -> list[Key]:
        """Cells that both files have, and that fared otherwise."""
        return [key for key in self.a if key in self.b and self.a[key].status != self.b[key].status]

    def verdict(self, key: Key) -> str:
        """What B is, against A."""
        a, b = self.both[key]
        return "within noise" if a.within_noise_of(b) else "faster" if b.value > a.value else "slower"

    def ratio(self, key: Key) -> float:
        a, b = self.both[key]
        return b.value / a.value


def compare(kind: Kind, a: Content, b: Content) -> Comparison:
    return Comparison(kind, dict(kind.cells(a)), dict(kind.cells(b)))


def repeats(cells: Cells) -> list[float]:
    """How far apart (ratio - 1) the same cell is, wherever one file holds it more than once: in several portions."""
    alike: dict[Key, list[float]] = {}
    for key, cell in cells.items():
        if cell.fraction:
            alike.setdefault(key[1:], []).append(cell.fraction.value)
    found = [sorted(pair) for values in alike.values() for pair in combinations(values, 2)]
    return sorted(high / low - 1 for low, high in found)


def summary(found: Comparison) -> list[str]:
    """What matters, in a few lines."""
    counts = Counter(map(found.verdict, found.both))
    told = ", ".join(f"{counts[verdict]:,} {verdict}" for verdict in VERDICTS)
    lines = [f"B against A: {told}, of {len(found.both):,} cells that both have measured"]
    by_mover: dict[str, list[float]] = {}
    for key in found.both:
        by_mover.setdefault(key[-1], []).append(found.ratio(key))
    for mover, ratios in by_mover.items():
        middle, low, high = statistics.median(ratios), min(ratios), max(ratios)
        lines.append(f"  {mover}: ×{middle:.3f} (median of {len(ratios)}; ×{low:.2f} to ×{high:.2f})")
    lines += [f"  {_name(key)}: {found.a[key].status} in A, {found.b[key].status} in B" for key in found.changed]
    lines += _only("A", found.a, found.b) + _only("B", found.b, found.a)
    lines.append(f"noise: {RULE}")
    for name, cells in (("A", found.a), ("B", found.b)):
        apart = repeats(cells) if found.kind.names[0] == "portion" else []
        if len(apart) >= 4:
            lower, middle, upper = statistics.quantiles(apart, n=4)
            lines.append(
                f"  {name} holds {len(apart)} pairs of the same cell from different portions: a quarter of them differ "
                f"by {lower:.1%} at most, half by {middle:.1%}, three quarters by {upper:.1%}"
            )
    return lines


def _only(name: str, cells: Cells, others: Cells) -> list[str]:
    missing = Counter(key[0] for key in cells if key not in others)
    return [f"  only in {name}: {', '.join(f'{n} cells of {first}' for first, n in missing.items())}"] * bool(missing)


def _name(key: Key) -> str:
    return ", ".join(map(str, key))


def table(found: Comparison) -> Table:
    """Rows of both files down, movers across: percent of the ceiling in A and in B, and the ratio if it is no noise."""
    rows: dict[Key, dict[str, str]] = {}
    for key in found.both:
        a, b = found.both[key]
        mark = "~" if found.verdict(key) == "within noise" else f"×{found.ratio(key):.2f}"
        rows.setdefault(key[:-1], {})[key[-1]] = f"{100 * a.value:.1f} {100 * b.value:.1f} {mark}"
    movers = list(dict.fromkeys(mover for cells in rows.values() for mover in cells))
    body = [[*map(str, names), *(cells.get(mover, "-") for mover in movers)] for names, cells in rows.items()]
    title = "percent of the ceiling in A, in B, and the ratio B/A; ~ a difference within noise"
    return Table(title, [*found.kind.names, *movers], body, [])


def main(argv: Sequence[str]) -> int:
    """Two result files side by side: a summary, then every cell. Exit code 2 where there is nothing to compare."""
    parser = Parser(prog="python -m verify compare", description=main.__doc__)
    for name in ("a", "b"):
        parser.add_argument(name, type=Path, metavar=f"{name.upper()}.json")
    args = parser.parse_args(argv)
    try:
        (kind, a), (other, b) = read(args.a), read(args.b)
        if kind is not other:
            raise NoResults(f"{args.a} follows {kind.form.schema.name}, {args.b} follows {other.form.schema.name}")
        found = compare(kind, a, b)
        if not found.both and not found.changed:
            raise NoResults(f"{args.a} and {args.b} have no measured cell in common")
    except NoResults as error:
        return parser.error(str(error))
    for name, path, content in (("A", args.a, a), ("B", args.b, b)):
        print(f"{name}: {path}: {origin(content)}")
    print(*summary(found), "", as_text(table(found), found.kind.names), sep="\n")
    return 0
