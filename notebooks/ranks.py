"""Figures of notebook 04 too: what the GPUs of one host leave each other, and what a rank is slow at by itself."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from refimpl.support import BACKENDS, DIRECTIONS
from verify.bench import files
from verify.bench.gpu import recommend
from verify.bench.gpu.ranks import report
from verify.bench.provenance import ROOT, origin

Content = dict[str, Any]

RANKS = files.Form(files.SCHEMAS / "ranks.schema.json")
COMMITTED = ROOT / "data" / "results" / "h200-x2" / "ranks.json"
PLAIN = "plain copy"
PLAYS = {  # of a rank, as marks that differ in shape
    "alone": ("#0072B2", "o"),
    "all in one direction": ("#E69F00", "s"),
    "in opposite directions": ("#009E73", "^"),
}
NAMES = dict(zip(("alone", "same", "opposite"), PLAYS, strict=True))


def shown(source: str) -> tuple[Path, Content | None]:
    """The file of ranks in the folder `source`, or else the committed one, and what it holds if it is there.

    `NoResults` where it is another one's, or damaged.
    """
    own = ROOT / source / COMMITTED.name
    path = own if own.exists() else COMMITTED
    if not path.exists():
        return path, None
    try:
        return path, files.read(path, RANKS)[1]
    except files.NoResults as fault:
        raise files.NoResults(f"{fault}; delete it, or run make bench-gpus") from fault


def others(path: Path) -> list[tuple[Path, Content]]:
    """Other committed files of ranks than this one."""
    found = sorted(set(COMMITTED.parents[1].glob(f"*/{COMMITTED.name}")) - {path})
    return [(other, files.read(other, RANKS)[1]) for other in found]


def label(path: Path, content: Content) -> str:
    """Whose figures these are, as `here.label` tells it."""
    committed = path.is_relative_to(COMMITTED.parents[1])
    whose = f"committed results, {path.relative_to(ROOT).as_posix()}" if committed else "this machine"
    sources = [{"provenance": content["provenance"] | {"gpu": device["gpu"]}} for device in content["devices"]]
    return f"{whose}: {origin({'sessions': sources})}"


def tested(path: Path) -> str:
    """What the record of tests says that lies beside the results, if one does."""
    record = path.with_name("devices.json")
    if not record.exists():
        return "No record of tests on several GPUs lies beside these results"
    content = json.loads(record.read_text(encoding="utf-8"))
    told = ", ".join(f"{count} {name}" for name, count in content["outcomes"].items())
    return (
        f"That bytes are right on {len(content['devices'])} GPUs is on record beside it, in `{record.name}`: {told}"
    )


def points(content: Content) -> dict[str, dict[str, dict[str, list[float]]]]:
    """Direction -> backend, plain copies first -> play -> GB/s of each rank in each cell."""
    cells = report.by_backend(content)
    ordered = {name: cells[name] for name in BACKENDS if name in cells}
    every = {PLAIN: [{"plays": content["ceilings"]}]} | ordered
    return {way: {name: _by_play(mine, way) for name, mine in every.items()} for way in DIRECTIONS}


def _by_play(cells: Sequence[Content], direction: str) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {play: [] for play in PLAYS}
    for played in (played for cell in cells for played in cell["plays"]):
        moving = zip(played["directions"], played["gb_per_s"], strict=True)
        found[NAMES[played["play"]]] += [round(rate, 1) for way, rate in moving if way == direction]
    return found


def draw(found: Mapping[str, Mapping[str, Mapping[str, Sequence[float]]]]) -> Figure:
    """A panel for each direction, three columns for each backend: a mark for each rank of each cell, and a median."""
    least = min(rate for of in found.values() for plays in of.values() for rates in plays.values() for rate in rates)
    figure, axes = plt.subplots(1, len(found), figsize=(9.6, 4.2), sharey=True, squeeze=False)
    for ax, (direction, of_backend) in zip(axes[0], found.items(), strict=True):
        ax.axhline(statistics.median(of_backend[PLAIN]["alone"]), color="#555555", lw=1, ls="--", marker="")
        for at, of_play in enumerate(of_backend.values()):
            for column, (play, (colour, marker)) in enumerate(PLAYS.items()):
                rates, x = of_play[play], at + 0.27 * (column - 1)
                # Equal rates would hide each other.
                xs = [x + 0.035 * (number % 3 - 1) for number in range(len(rates))]
                ax.plot(xs, rates, marker=marker, color=colour, ls="", mfc="none", mew=1, ms=4.5)
                ax.plot([x - 0.11, x + 0.11], [statistics.median(rates)] * 2, color="black", ls="-", marker="")
        ax.set_xticks(range(len(of_backend)), of_backend)
        ax.grid(axis="x", visible=False)
        ax.set_ylim(bottom=10 * (least // 10))
        ax.set_title(direction, fontsize=10)
    axes[0][0].set_ylabel("GB/s of a rank")
    keys = [Line2D([], [], color=c, marker=m, ls="", mfc="none", label=play) for play, (c, m) in PLAYS.items()]
    keys.append(Line2D([], [], color="black", marker="", ls="-", label="median"))
    keys.append(Line2D([], [], color="#555555", marker="", ls="--", lw=1, label="plain copy alone"))
    figure.legend(handles=keys, loc="outside lower center", ncols=3, fontsize=9)
    return figure


def kept(content: Content) -> tuple[list[str], list[list[object]]]:
    """Heads and rows of `report.kept`, for `book.table`."""
    told = report.kept(content)
    body: list[list[object]] = [[int(text) if text.isdigit() else text for text in line] for line in told.body]
    return [re.sub(r" (?=beside)|(?<=beside) |: ", "\n", name) for name in told.head], body


def slow(content: Content, bench: Content) -> list[list[str]]:
    """What ranks move slowly even alone: GB/s of each; of one GPU that moves all heads; what that host describes.

    Where ranks split the heads their runs are shorter than those of all heads, so a host has more of them to
    describe. The last column is the fastest backend of a rank.
    """
    return [
        [
            f"{first.pool} {first.direction}",
            first.row["layout"],
            first.path,
            ", ".join(f"{rate.gb_per_s:.1f}" for rate in (first, *others)),
            *_of_one_gpu(bench, first),
            _fastest(content, first),
        ]
        for first, *others in report.slow_alone(content)
    ]


def _of_one_gpu(bench: Content, rate: report.Rate) -> tuple[str, str]:
    """GB/s of the same pool with all heads; GB/s at which that host describes the descriptors of the rank."""
    mine = rate.row["pool"], rate.direction, rate.cell["backend"]
    for row in recommend.rows_of(bench, rate.row["case"], layouts=(rate.row["layout"],)):
        for cell in row["cells"]:
            if cell["status"] == "measured" and (row["pool"], row["direction"], cell["mover"]) == mine:
                whole = row["payload_bytes"] / recommend.lasting(cell)["median_s"]
                describes_s = rate.descriptors * cell["submit"]["median_s"] / cell["descriptors"]
                return f"{whole / 1e9:.1f}", f"{rate.row['payload_bytes'] / describes_s / 1e9:.1f}"
    return "-", "-"


def _fastest(content: Content, slow: report.Rate) -> str:
    """The backend with the highest median over layouts, of ranks that are alone."""
    found: dict[str, list[float]] = {}
    for rate in report.each(content):
        alike = (rate.pool, rate.direction, rate.beside) == (slow.pool, slow.direction, ())
        if alike and rate.cell["backend"] != "auto":  # which is one of the others
            found.setdefault(rate.path, []).append(rate.gb_per_s)
    medians = {path: statistics.median(rates) for path, rates in found.items()}
    best = max(medians, key=lambda path: medians[path])
    return f"{best}, {medians[best]:.1f}"
