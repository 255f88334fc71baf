"""The support matrix: what the table says of every pool kind, and what running it showed here and now.

Every entry is computed from `refimpl.support`; what is allowed on a CPU is also run and compared with the oracle.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from tqdm import tqdm

from refimpl import LAYOUTS, Refusal, support
from refimpl.backends import registry
from refimpl.support import BACKENDS, DIRECTIONS, PLATFORMS
from verify import matrix, page
from verify.arguments import Parser, folder
from verify.toys import TOYS

Status = Literal["pass", "fail", "not here", "refused"]
STATUSES: tuple[Status, ...] = get_args(Status)

MEANING: dict[Status, str] = {
    "pass": "allowed, run just now, and every byte equals the oracle's",
    "fail": "allowed, run just now, and wrong",
    "not here": "allowed, but this run could not try it",
    "refused": "refused when the pool is built, before memory is taken",
}

# What a row shows: one status for each.
WAYS = tuple(itertools.product(PLATFORMS, DIRECTIONS))


@dataclass(frozen=True)
class Entry:
    """One cell of the support matrix. `reason` is empty where it passed."""

    pool: str
    layout: str
    backend: str
    platform: str
    direction: str
    status: Status
    reason: str = ""


def count(pools: Collection[str] = TOYS) -> int:
    return len(pools) * len(LAYOUTS) * len(BACKENDS) * len(WAYS)


def entries(pools: Collection[str] = TOYS) -> Iterator[Entry]:
    """Every pool kind × layout × backend × platform × direction, in that order."""
    for pool, layout, backend, (platform, direction) in itertools.product(pools, LAYOUTS, BACKENDS, WAYS):
        yield Entry(pool, layout, backend, platform, direction, *verdict(pool, layout, backend, platform, direction))


def verdict(
    pool: str, layout: str, backend: str, platform: str, direction: str, run: Callable[..., None] = matrix.run
) -> tuple[Status, str]:
    """Status and reason of one entry; `run` proves a cell of the matrix or raises `Mismatch`."""
    cell = matrix.Cell(pool, layout, backend, direction, platform=platform)
    answer = support(cell.spec, layout, backend, direction, platform)
    if isinstance(answer, Refusal):
        return "refused", answer.reason
    missing = registry.unavailable(backend, platform)
    if missing:
        return "not here", missing
    try:
        run(cell)
    except matrix.Mismatch as wrong:
        return "fail", str(wrong)
    return "pass", ""


def tally(found: list[Entry]) -> dict[Status, int]:
    counts = Counter(entry.status for entry in found)
    return {status: counts[status] for status in STATUSES}


def as_page(found: list[Entry]) -> str:
    """One section a pool kind, one row a layout and backend."""
    meanings = [f"<b>{status}</b>: {MEANING[status]} ({number:,})" for status, number in tally(found).items()]
    sections = [
        page.details(f"<b>{pool}</b> {_counts(list(group))}", _pool_table([e for e in found if e.pool == pool]))
        for pool, group in itertools.groupby(found, key=lambda entry: entry.pool)
    ]
    return page.page(
        "Support matrix",
        page.paragraph("Every kind of pool × host layout × backend, by platform and direction.", "soft"),
        page.items(meanings),
        *sections,
    )


def _counts(found: list[Entry]) -> str:
    return ", ".join(f"{number} {status}" for status, number in tally(found).items() if number)


def _pool_table(found: list[Entry]) -> str:
    head = ["layout", "backend", *(f"{platform} {direction}" for platform, direction in WAYS), "reason"]
    body = []
    for (layout, backend), group in itertools.groupby(found, key=lambda entry: (entry.layout, entry.backend)):
        row = list(group)
        body.append([layout, backend, *(entry.status for entry in row), _reasons(row)])
    return page.table(head, body, styles=STATUSES)


def _reasons(row: list[Entry]) -> str:
    """Each reason once, with the platforms it holds for unless it holds for all."""
    platforms: dict[str, list[str]] = {}
    for entry in row:
        if entry.reason and entry.platform not in platforms.setdefault(entry.reason, []):
            platforms[entry.reason].append(entry.platform)
    everywhere = list(PLATFORMS)
    return "; ".join(
        reason if where == everywhere else f"{' and '.join(where)}: {reason}" for reason, where in platforms.items()
    )


def main(argv: Sequence[str]) -> int:
    """Write report.html into a folder, and print what it counts. Exit code 1 where a cell is wrong."""
    parser = Parser(prog="python -m verify report", description=main.__doc__)
    parser.add_argument("--out", type=folder, default="out", metavar="FOLDER", help="default: %(default)s")
    out: Path = parser.parse_args(argv).out
    found = list(tqdm(entries(), desc="support", total=count(), unit="cell"))
    target, counts = out / "report.html", tally(found)
    target.write_text(as_page(found), encoding="utf-8")
    for status, number in counts.items():
        print(f"{number:6,} {status}: {MEANING[status]}")
    print(f"{target}: every cell with its reason")
    return int(counts["fail"] > 0)
