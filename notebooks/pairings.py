"""Figures of notebook 04: heat maps of pairings, what other pages change, and what is expected of other models."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import matplotlib.pyplot as plt
import torch
from book import HEADINGS, WAYS, as_count, plan_of
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from kernels_cupy import auto
from kernels_cupy.jobs import runs_and_bytes
from kernels_cupy.pieces import pieces
from refimpl import PoolSpec, support
from refimpl.support import DIRECTIONS
from verify.audit import costs
from verify.bench.gpu import recommend

Fields = list[list[tuple[float, str] | None]]  # down and across: what shades a field, and what is written into it


def panels(
    measured: Mapping[tuple[str, str, str, str], recommend.Way],
    pools: Iterable[str],
    layouts: Sequence[str],
    backends: Sequence[str],
    field: Callable[[recommend.Way], tuple[float, str] | None],
) -> dict[tuple[str, str], Fields]:
    """(pool, direction) -> layouts × backends: what `field` makes of each cell that was measured."""
    made: dict[tuple[str, str], Fields] = {}
    for pool in pools:
        for direction in DIRECTIONS:
            cells = [[measured.get((pool, direction, layout, way)) for way in backends] for layout in layouts]
            if any(any(line) for line in cells):
                made[pool, direction] = [[cell and field(cell) for cell in line] for line in cells]
    return made


def refusals(rows: Sequence[recommend.Content], backends: Sequence[str]) -> list[str]:
    """Items of a list: what was not measured, and why; layouts and backends with the same reason together."""
    reasons: dict[tuple[str, str, str], tuple[str, dict[str, None]]] = {}  # the first pool's reason, pools
    for row in rows:
        for cell in row["cells"]:
            if cell["mover"] in backends and cell["status"] != "measured":
                key = cell["status"], row["layout"], cell["mover"]
                reasons.setdefault(key, (cell["reason"], {}))[1][row["pool"]] = None
    alike: dict[tuple[str, str, str, str], list[str]] = {}
    for (status, layout, way), (reason, names) in reasons.items():
        alike.setdefault((status, layout, ", ".join(names), reason), []).append(way)
    return [
        f"- {status}: {layout} with {', '.join(ways)} ({names}): {reason}"
        for (status, layout, names, reason), ways in alike.items()
    ]


def draw_fields(
    panels: dict[tuple[str, str], Fields],
    down: Sequence[str],
    across: Sequence[str],
    unit: str,
    limits: tuple[float, float] = (0, 100),
    log: bool = False,
) -> Figure:
    """A heat map for each (line, column) of panels; hatched where there is nothing."""
    lines, columns = (list(dict.fromkeys(key[i] for key in panels)) for i in (0, 1))
    tall, wide = 0.3 * len(down) + 0.45, 4.8
    figure, axes = plt.subplots(
        len(lines), len(columns), squeeze=False, sharex=True, figsize=(wide * len(columns), tall * len(lines) + 0.5)
    )
    norm = (LogNorm if log else Normalize)(*limits, clip=True)
    for (line, column), fields in panels.items():
        ax = axes[lines.index(line), columns.index(column)]
        for y, row in enumerate(fields):
            for x, field in enumerate(row):
                _draw_field(ax, x, y, field, norm)
        ax.set(xlim=(0, len(across)), ylim=(len(down), 0))
        ax.set_xticks([x + 0.5 for x in range(len(across))], across, fontsize=8.5)
        ax.set_yticks([y + 0.5 for y in range(len(down))], down if column == columns[0] else [""] * len(down))
        ax.tick_params(length=0)
        ax.grid(False)
        ax.spines[:].set_visible(False)
        ax.set_title(f"{line} {column}", fontsize=10)
    figure.supxlabel(unit, fontsize=8.5)
    return figure


def _draw_field(ax: Axes, x: int, y: int, field: tuple[float, str] | None, norm: Normalize) -> None:
    if field is None:
        ax.add_patch(Rectangle((x, y), 1, 1, facecolor="white", edgecolor="#AAAAAA", hatch="////", lw=0.5))
        return
    shade = float(norm(field[0]))
    ax.add_patch(Rectangle((x, y), 1, 1, facecolor=plt.get_cmap()(shade), edgecolor="white", lw=1))
    ink = "black" if shade > 0.5 else "white"
    ax.text(x + 0.5, y + 0.5, field[1], ha="center", va="center", fontsize=8.5, color=ink)


def draw_by_page(panels: dict[tuple[str, str], dict[str, list[tuple[int, float]]]]) -> Figure:
    """Percent of the ceiling over tokens a page, a line for each backend; a panel for each (layout, direction)."""
    across, down = (list(dict.fromkeys(key[i] for key in panels)) for i in (0, 1))
    figure, axes = plt.subplots(
        len(down), len(across), squeeze=False, sharex=True, sharey=True, figsize=(9.6, 1.9 * len(down) + 0.7)
    )
    for (layout, direction), by_backend in panels.items():
        ax = axes[down.index(direction), across.index(layout)]
        for backend, marks in by_backend.items():
            colour, marker, _ = WAYS[backend]
            ax.plot(*zip(*marks, strict=True), marker=marker, color=colour, mfc="none", mew=1.3, label=backend)
        ax.axhline(100, color="#555555", lw=1, ls="--", marker="")
        ax.set_xscale("log", base=2)
        ax.set_xticks(sorted({page for lines in panels.values() for line in lines.values() for page, _ in line}))
        ax.xaxis.set_major_formatter(as_count)
        ax.minorticks_off()
        ax.set_ylim(0, 108)
        ax.set_title(f"{HEADINGS[layout]}\n{direction}", fontsize=8.5)
    for ax in axes[-1]:
        ax.set_xlabel("tokens a page", fontsize=8.5)
    for ax in axes[:, 0]:
        ax.set_ylabel("% of the ceiling", fontsize=8.5)
    shown = {name: handle for ax in axes.flat for handle, name in zip(*ax.get_legend_handles_labels(), strict=True)}
    figure.legend(list(shown.values()), list(shown), loc="outside lower center", ncols=3)
    return figure


# ---- other pages


def by_page(
    bench: recommend.Content, rows: Sequence[recommend.Content], bytes_a_token: int
) -> dict[tuple[str, str], dict[str, list[tuple[int, float]]]]:
    """(layout, direction) -> backend -> (tokens a page, percent of the ceiling), from rows of one pool."""
    found: dict[tuple[str, str], dict[str, list[tuple[int, float]]]] = {}
    for row in rows:
        for way in recommend.ways(bench, [row]):
            mark = row["page_bytes"] // bytes_a_token, round(100 * way.fraction.value, 1)
            found.setdefault((way.layout, way.direction), {}).setdefault(way.backend, []).append(mark)
    return {key: {backend: sorted(marks) for backend, marks in lines.items()} for key, lines in found.items()}


def pages_of(lines: dict[tuple[str, str], dict[str, list[tuple[int, float]]]]) -> list[int]:
    """The tokens a page that `by_page` found."""
    return sorted({page for of_backend in lines.values() for marks in of_backend.values() for page, _ in marks})


def best_by_page(lines: dict[tuple[str, str], dict[str, list[tuple[int, float]]]]) -> list[list[str]]:
    """Layout and direction, then the fastest backend and its percentage for each number of tokens a page."""
    rows = []
    for (layout, direction), of_backend in sorted(lines.items()):
        found = [(page, percent, backend) for backend, marks in of_backend.items() for page, percent in marks]
        best = [max((rest for at, *rest in found if at == page), default=None) for page in pages_of(lines)]
        rows.append([layout, direction, *(f"{one[1]} {one[0]:.0f}" if one else "-" for one in best)])
    return rows


def against(way: recommend.Way, other: recommend.Way | None) -> tuple[float, str] | None:
    """What shades a field, and what is written into it: the rate of `other` over that of `way`, `~` within noise."""
    if other is None:
        return None
    if other.fraction.within_noise_of(way.fraction):
        return 1.0, "~"
    ratio = other.fraction.value / way.fraction.value
    return round(ratio, 3), f"×{ratio:.2f}"


# ---- the answer, and what engines do


def answer(model: str, choice: recommend.Choice[recommend.Pair], pools: int, absent: Sequence[str] = ()) -> list[str]:
    """The one pair for all pools of a model, what is as good, what is next, and what of the model was not measured.

    pools   how many were measured
    absent  of `recommend.lacking`
    """
    taken, (way, share) = choice.taken, choice.taken.least
    told = [
        f"**{model}: take `{taken.layout}` with `{taken.backend}`.** Over pools ({pools}) and directions that is "
        f"{taken.fraction.value:.1%} of the rate with the best pair for each, and at worst {share:.1%}, in "
        f"{way.pool} {way.direction}."
    ]
    if absent:
        lacking = f"not measured with such pages and layouts, so {'that' if len(absent) == 1 else 'those'} may differ"
        told.append(f"**Without {', '.join(absent)}: {lacking}.**")
    level = [f"`{option.layout}` with `{option.backend}`" for option in choice.level if option is not taken]
    if level:
        told.append(f"As fast, within noise: {', '.join(level)}.")
    if choice.behind:
        ratio = choice.behind.fraction.value / choice.fastest.fraction.value
        told.append(f"Next: `{choice.behind.layout}` with `{choice.behind.backend}`, {ratio:.0%} of the fastest.")
    return told


def engines(audit: Sequence[costs.Row]) -> tuple[list[list[str]], list[str]]:
    """A row for each engine, layout and setting, of its costliest measured choice; and those of which none was."""
    groups: dict[tuple[str, str, str], list[costs.Row]] = {}
    for row in audit:
        groups.setdefault((row.choice.engine, row.cell.layout, row.choice.setting), []).append(row)
    table, unmeasured = [], []
    for names, group in groups.items():
        found = [(row, row.stands_in, row.best) for row in group if row.stands_in and row.best]
        if not found:
            unmeasured.append(" ".join(names))
            continue
        row, theirs, best = max(found, key=lambda one: one[2].fraction / one[1].fraction)
        figures = (
            f"{theirs.fraction:.0%}",
            f"×{best.fraction / theirs.fraction:.1f}",
            f"{best.mover}, {best.fraction:.0%}",
        )
        table.append([*names, f"{row.cell.spec.name} {row.cell.direction}", row.choice.path, *figures])
    return table, unmeasured


# ---- a model that nobody measured


def predicted(spec: PoolSpec, layout: str, nbytes: int) -> dict[str, dict[str, float]]:
    """Direction -> backend -> GB/s that backend `auto` expects of so many bytes in scattered pages, all layers."""
    rates = auto.table("cuda" if torch.cuda.is_available() else "emulated")["backends"]
    plan = plan_of(spec, layout)
    layers = tuple(plan.layers)
    runs, page = runs_and_bytes(plan, layers, 1)
    found: dict[str, dict[str, float]] = {}
    for direction in DIRECTIONS:
        for backend in recommend.BACKENDS:
            if support(spec, layout, backend, direction, "cuda"):
                whole = pieces(plan, layers, exact=direction == "backup") if backend == "staged" else ()
                each = sum(piece.nbytes for piece in whole) / len(whole) if whole else page / runs
                seconds = auto.predicted(rates[backend][direction], auto.Demand(nbytes, each))
                found.setdefault(direction, {})[backend] = nbytes / seconds / 1e9
    return found
