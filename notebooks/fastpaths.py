"""Notebook 07: results against their highest ceilings, descriptors, blocks, staging, and how near `auto` comes."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass

import book
import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle

from kernels_cupy import auto, sm_copy
from kernels_cupy.launches import LINE
from refimpl.support import DIRECTIONS
from verify.bench.gpu import cases, targets
from verify.bench.gpu.recommend import Content

MANY = 1000  # with so many descriptors, what a call costs besides does not show


# ---- rows


def rows_of(bench: Content, *portions: str) -> list[Content]:
    """Rows of some portions in which something was measured."""
    some = [row for row in bench["rows"] if row["portion"] in portions]
    return [row for row in some if any(cell["status"] == "measured" for cell in row["cells"])]


def percents(row: Content) -> dict[str, float]:
    """Mover -> percent of the ceiling, for backends as they come, all layers at once."""
    return {cell["mover"]: cell["percent_of_ceiling"] for cell in targets.measured(row)}


def spread(values: Sequence[float], form: str = "{:.0f}") -> str:
    """Least and most, or the one that both look like."""
    low, high = (form.format(value) for value in (min(values, default=0), max(values, default=0)))
    return low if low == high else f"{low}–{high}"


# ---- sessions


def machines(bench: Content) -> list[str]:
    """What the GPUs of all sessions say of themselves, each description once."""
    found = set()
    for session in bench["sessions"]:
        gpu = session["provenance"]["gpu"]
        bus = f"PCIe {gpu['pcie_generation']} x{gpu['pcie_width']}"
        found.add(f"{gpu['name']}, {gpu['sms']} multiprocessors, driver {gpu['driver']}, CUDA {gpu['cuda']}, {bus}")
    return sorted(found)


def show_sessions(bench: Content) -> None:
    """A row for each session: what it measured, at which commit, its ceilings in GB/s, µs of a launch."""
    sizes = {(c["direction"], c["payload_bytes"]): None for session in bench["sessions"] for c in session["ceilings"]}
    rows = []
    for number, session in enumerate(bench["sessions"]):
        mine = [row["portion"] for row in bench["rows"] if row["session"] == number]
        limits = {(c["direction"], c["payload_bytes"]): f"{c['gb_per_s']:.1f}" for c in session["ceilings"]}
        origin = session["provenance"]
        commit = str(origin["commit"])[:7] + (" and changes" if origin["dirty"] else "")
        single = single_calls(session)
        figures = [*(limits.get(size, "-") for size in sizes), f"{single['launch'] * 1e6:.0f}" if single else "-"]
        rows.append(["\n".join(sorted(set(mine))), len(mine), commit, *figures])
    heads = [*(f"{way},\n{book.size(nbytes)}" for way, nbytes in sizes), "a launch,\nµs"]
    book.table(["portions", "rows", "commit", *heads], rows)


def single_calls(session: Content) -> dict[str, float]:
    """Name -> seconds of the host for a call of the device that does next to nothing, where that was measured."""
    return {call["name"]: call["submit"]["median_s"] for call in session.get("calls", []) if call["count"] == 1}


def highest_ceilings(bench: Content) -> dict[str, dict[int, float]]:
    """Direction -> bytes -> GB/s of the fastest plain memcpy of any session."""
    found: dict[str, dict[int, float]] = {}
    for session in bench["sessions"]:
        for c in session["ceilings"]:
            of_size = found.setdefault(c["direction"], {})
            of_size[c["payload_bytes"]] = max(of_size.get(c["payload_bytes"], 0), c["gb_per_s"])
    return found


def against_the_highest(bench: Content) -> Content:
    """The same with percentages of the highest ceilings."""
    bench, highest = deepcopy(bench), highest_ceilings(bench)
    for row in bench["rows"]:
        of_size = highest[row["direction"]]
        fitting = min((n for n in of_size if n >= row["payload_bytes"]), default=max(of_size))
        for cell in row["cells"]:
            if cell["status"] == "measured":
                cell["percent_of_ceiling"] = 100 * cell["gb_per_s"] / of_size[fitting]
    return bench


# ---- descriptors

Spread = tuple[int, float, float, float, bool]  # descriptors; slowest, median and fastest rate; held


def per_descriptor(cell: Content, what: str) -> float:
    """Nanoseconds of a descriptor: "timing" on the device, "submit" on the host."""
    return cell[what]["median_s"] / cell["descriptors"] * 1e9


def described_by(rows: Sequence[Content]) -> list[float]:
    """Nanoseconds that a descriptor of `direct` takes the host, of calls that waited for nothing."""
    cells = [cell for row in rows for cell in targets.measured(row) if cell["mover"] == "direct" and cell["held"]]
    return [per_descriptor(cell, "submit") for cell in cells if cell["descriptors"] >= MANY]


def own_times(rows: Sequence[Content]) -> dict[str, list[tuple[float, float]]]:
    """Backend -> seconds of each submit that waited for nothing, and what of them no call of the device took."""
    found: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        for cell in targets.measured(row):
            if cell["held"] and cell.get("own_s") is not None:
                found.setdefault(cell["mover"], []).append((cell["submit"]["median_s"], cell["own_s"]))
    return found


def series_of(rows: Sequence[Content]) -> dict[str, dict[int, list[Spread]]]:
    """Portion `descriptors`, backend `direct`: direction -> bytes a run -> spreads by number of descriptors."""
    found: dict[str, dict[int, list[Spread]]] = {}
    for row in rows:
        for cell in targets.measured(row):
            if cell["mover"] == "direct":
                rates = [row["payload_bytes"] / seconds / 1e9 for seconds in cell["timing"]["samples_s"]]
                low, median, high = (round(x, 3) for x in (min(rates), cell["gb_per_s"], max(rates)))
                of_run = found.setdefault(row["direction"], {}).setdefault(targets.shortest_run(row), [])
                of_run.append((cell["descriptors"], low, median, high, cell["held"]))
    return found


def room(rows: Sequence[Content]) -> list[tuple[int, int]]:
    """Of each series that filled the queue: descriptors that still fitted, and those that did not.

    The call that waited, the longest by far, was the first without room.
    """
    found = []
    for row in rows:
        for cell in targets.measured(row):
            submits = cell["submit"]["samples_s"]
            if cell["mover"] == "direct" and not cell["held"] and max(submits) > 3 * min(submits):
                fitted = submits.index(max(submits)) * cell["descriptors"]
                found.append((fitted, fitted + cell["descriptors"]))
    return found


def draw_descriptors(
    series: dict[str, dict[int, list[Spread]]], described: dict[int, float], bus: float, queue: tuple[int, int]
) -> Figure:
    """A panel for each direction: GB/s over descriptors, a line for each length of runs.

    Filled marks are of transfers that had all been submitted before the device began. Dashed is what a host
    describes, the band is what a queue holds.
    """
    figure, axes = plt.subplots(1, len(series), figsize=(9.6, 4.8), sharey=True, squeeze=False)
    looks = list(zip(("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#000000"), "os^Dv", strict=True))
    for ax, (direction, by_run) in zip(axes[0], series.items(), strict=True):
        ax.axhline(bus, color="#555555", lw=1, ls="-", marker="")
        ax.axvspan(*queue, color="#D0D0D0", lw=0)
        for number, ((run, spreads), (colour, marker)) in enumerate(zip(by_run.items(), looks, strict=False)):
            aside = 2 ** (0.22 * (number - 2))  # marks of one number of descriptors would hide each other
            xs = [s[0] * aside for s in spreads]
            ax.plot(xs, [s[2] for s in spreads], color=colour, lw=0.9, ls="-", marker="")
            for x, (_, slowest, median, fastest, held) in zip(xs, spreads, strict=True):
                ax.plot([x] * 2, [slowest, fastest], color=colour, lw=1, ls="-", marker="")
                fill = colour if held else "#FFFFFF"
                ax.plot(x, median, marker=marker, color=colour, mfc=fill, ms=6.5, mew=1.3, ls="")
            if described[run] < bus:
                ax.plot([2048, 90000], [described[run]] * 2, color=colour, lw=1.3, ls="--", marker="")
                ax.text(95000, described[run], book.size(run), fontsize=8, va="center")
        ax.set_xscale("log", base=2)
        ax.set_yscale("log")
        ax.set_xticks([64, 256, 1024, 4096, 16384, 60000])
        ax.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")
        ax.set_yticks([0.5, 1, 2, 5, 10, 20, 50])
        ax.yaxis.set_major_formatter(lambda y, _: f"{y:g}")
        ax.minorticks_off()
        ax.set(xlabel="descriptors of a transfer", ylim=(0.33, 80))
        ax.set_title(direction, fontsize=10)
    axes[0][0].set_ylabel("GB/s")
    keys = [
        Line2D([], [], color=colour, marker=marker, ls="", ms=6.5, label=f"runs of {book.size(run)}")
        for run, (colour, marker) in zip(described, looks, strict=False)
    ]
    keys += [
        Line2D([], [], color="#555555", marker="o", ls="", mfc="#FFFFFF", mew=1.3, label="open: the queue was full"),
        Line2D([], [], color="#555555", marker="", ls="--", lw=1.3, label="what the host can describe"),
        Line2D([], [], color="#555555", marker="", ls="-", lw=1, label="plain memcpy"),
        Rectangle((0, 0), 1, 1, facecolor="#D0D0D0", lw=0, label="what the queue holds"),
    ]
    figure.legend(handles=keys, loc="outside lower center", ncols=4, fontsize=9)
    return figure


# ---- blocks


def class_of(run: int) -> str:
    """Runs of about that length, as backend `kernel` tells them apart when it takes its own number of blocks."""
    bounds = [least for least, _ in sm_copy.BLOCKS]  # descending
    least = next(bound for bound in bounds if run >= bound)
    if least == bounds[0]:
        return f"runs of {book.size(least)} and more"
    below = book.size(bounds[bounds.index(least) - 1])
    return f"runs of {book.size(least)} and more, below {below}" if least else f"runs below {below}"


def by_blocks(rows: Sequence[Content]) -> dict[str, dict[str, dict[int, list[float]]]]:
    """Direction -> class of runs, the shortest first -> blocks -> percent of the ceiling of each row."""
    found: dict[str, dict[str, dict[int, list[float]]]] = {}
    for row in sorted(rows, key=targets.shortest_run):
        of_class = found.setdefault(row["direction"], {}).setdefault(class_of(targets.shortest_run(row)), {})
        for cell in row["cells"]:
            if cell["status"] == "measured" and cell["blocks"]:
                of_class.setdefault(cell["blocks"], []).append(round(cell["percent_of_ceiling"], 1))
    return {direction: found[direction] for direction in DIRECTIONS if direction in found}


def at_best(rows: Sequence[Content], direction: str) -> dict[bool, list[float]]:
    """Whether all runs of a row are whole lines of 128 B -> percents of the ceiling by whatever blocks are best."""
    found: dict[bool, list[float]] = {True: [], False: []}
    for row in rows:
        if row["direction"] == direction:
            best = max(cell["percent_of_ceiling"] for cell in row["cells"] if cell["status"] == "measured")
            found[whole_lines(row)].append(round(best, 1))
    return found


def whole_lines(row: Content) -> bool:
    return all(run["bytes"] % LINE == 0 for run in row["runs"])


def draw_blocks(found: Mapping[str, Mapping[str, Mapping[int, Sequence[float]]]]) -> Figure:
    """A panel for each direction: median percent of the ceiling over blocks; a thin line from least to most."""
    figure, axes = plt.subplots(1, len(found), figsize=(9.6, 4.0), sharey=True, squeeze=False)
    for ax, (direction, classes) in zip(axes[0], found.items(), strict=True):
        for number, (name, marks) in enumerate(classes.items()):
            xs = [blocks * 2 ** (0.1 * (number - 1)) for blocks in sorted(marks)]
            values = [marks[blocks] for blocks in sorted(marks)]
            (line,) = ax.plot(xs, list(map(statistics.median, values)), label=name)
            for x, of_rows in zip(xs, values, strict=True):
                ax.plot((x, x), (min(of_rows), max(of_rows)), color=line.get_color(), lw=1, ls="-", marker="")
        ax.axhline(100, color="#555555", lw=1, ls="--", marker="")
        ax.set_xscale("log", base=2)
        ax.set_xticks(sorted({blocks for marks in classes.values() for blocks in marks}))
        ax.xaxis.set_major_formatter(book.as_count)
        ax.minorticks_off()
        ax.set(xlabel="blocks of backend kernel", ylim=(0, 106))
        ax.set_title(direction, fontsize=10)
    axes[0][0].set_ylabel("% of the bus ceiling")
    handles, names = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=3, fontsize=9)
    return figure


# ---- staging


def dips(capacity: Mapping[str, Mapping[str, Sequence[tuple[float, float]]]], by: float) -> Iterator[str]:
    """Marks that are lower than both neighbours by so many points."""
    for direction, lines in capacity.items():
        for name, line in lines.items():
            for (_, before), (mib, percent), (_, after) in zip(line, line[1:], line[2:], strict=False):
                if percent < min(before, after) - by:
                    yield f"{direction}, {name}, {mib:.0f} MiB: {percent:.0f} %, not {before:.0f} % or {after:.0f} %"


def draw_capacity(lines: dict[str, dict[str, list[tuple[float, float]]]]) -> Figure:
    """A panel for each direction: percent of the ceiling over MiB of staging memory, a line for each series."""
    least = min(percent for by_name in lines.values() for marks in by_name.values() for _, percent in marks)
    figure, axes = plt.subplots(1, len(lines), figsize=(9.6, 4.2), sharey=True, squeeze=False)
    for ax, (direction, by_name) in zip(axes[0], lines.items(), strict=True):
        for name, marks in by_name.items():
            ax.plot([mib for mib, _ in marks], [percent for _, percent in marks], label=name)
        ax.axhline(100, color="#555555", lw=1, ls="--", marker="")
        ax.set_xscale("log", base=2)
        ax.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
        ax.yaxis.set_major_formatter(lambda y, _: f"{y:g}")
        ax.set(xlabel="MiB of staging, both halves", ylim=(10 * (least // 10), 101))
        ax.set_title(direction, fontsize=10)
    axes[0][0].set_ylabel("% of the bus ceiling")
    handles, names = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=2, fontsize=9)
    return figure


# ---- layer by layer

LAYERS = {case.name: len(case.spec.owned_layers) for case in cases.SGLANG_CASES}


@dataclass(frozen=True)
class ByLayer:
    """Loads of one case by one backend, layer by layer and all at once, a figure for each layout.

    lost_s  seconds that a layer takes longer by itself than as part of all
    """

    backend: str
    case: str
    layers: int
    layer_bytes: int
    at_once: list[float]
    by_layer: list[float]
    lost_s: list[float]


def by_layer(rows: Sequence[Content]) -> list[ByLayer]:
    """Of `kernel` and `direct`, where everything was submitted before the device began."""
    found: dict[tuple[str, str], ByLayer] = {}
    for row in rows:
        layers = LAYERS[row["case"]]
        at_once = {cell["backend"]: cell for cell in targets.measured(row) if cell["held"]}
        for cell in targets.by_layer(row):
            backend = cell["backend"]
            if backend in ("direct", "kernel") and cell["held"] and backend in at_once:
                empty = ByLayer(backend, row["case"], layers, row["payload_bytes"] // layers, [], [], [])
                of_case = found.setdefault((backend, row["case"]), empty)
                seconds = cell["timing"]["median_s"] - at_once[backend]["timing"]["median_s"]
                of_case.lost_s.append(seconds / (layers - 1))
                of_case.at_once.append(at_once[backend]["percent_of_ceiling"])
                of_case.by_layer.append(cell["percent_of_ceiling"])
    return sorted(found.values(), key=lambda one: (one.backend, one.layer_bytes))


# ---- auto


@dataclass(frozen=True)
class Judged:
    """A row with `auto`: rates that last, in GB/s, by its choice and by the best backend.

    ratio     of the rate of `auto` to the best
    replayed  the same for what the committed table would have chosen in this row
    decides_s the host's time for the call by `auto`, less that for the backend that it chose; None: not comparable
    """

    row: Content
    chosen: str
    best: str
    rate: float
    best_rate: float
    replayed: float
    decides_s: float | None

    @property
    def ratio(self) -> float:
        return self.rate / self.best_rate


def judged(rows: Sequence[Content]) -> Iterator[Judged]:
    """Every row in which `auto` and some backend were measured."""
    committed = auto.table("emulated")["backends"]
    for row in rows:
        ours = {cell["mover"]: cell for cell in targets.measured(row)}
        taken = ours.pop("auto", None)
        if not taken or not ours:
            continue
        lasting = {way: targets.sustained(row, cell) for way, cell in ours.items()}
        times = {}
        for way, cell in ours.items():
            demand = auto.Demand(row["payload_bytes"], row["payload_bytes"] / cell["descriptors"])
            times[way] = auto.predicted(committed[way][row["direction"]], demand)
        best, chosen = max(lasting, key=lambda way: lasting[way]), taken["path"].partition(": ")[2]
        replayed = lasting[min(times, key=lambda way: times[way])] / lasting[best]
        decides = taken["submit"]["median_s"] - ours[chosen]["submit"]["median_s"] if chosen in ours else None
        yield Judged(row, chosen, best, targets.sustained(row, taken), lasting[best], replayed, decides)
