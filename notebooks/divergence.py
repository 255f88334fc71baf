"""Tables and drawings of notebook 05: thresholds, requests of scenarios, rates of pairs, what faults do."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from itertools import combinations

import book
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle

from refimpl import LAYOUTS, presets
from verify.bench import noise
from verify.bench.gpu import recommend, targets
from verify.logprobs import mamba_study, tampering
from verify.logprobs.multiturn import Answer, k3

# ---- thresholds

TESTED = {  # small model -> upstream's test of the nearest one
    "mha": "Qwen3-32B, full attention",
    "mla": "unless a test says otherwise",
    "swa": "gpt-oss-20b, windows",
    "mamba": "Qwen3-Next, states, host tier",
    "v4": "DeepSeek-V4-Flash, host tier",
}
BIT_EXACT = 1e-9  # of upstream's only test with deterministic kernels, a hybrid model


def allowed_by_thresholds() -> list[list[object]]:
    """By threshold: how far every probability may be off, and of how many tokens one may be, by a factor of e."""
    rows: list[list[object]] = []
    for model, threshold in [*tampering.THRESHOLDS.items(), ("", BIT_EXACT)]:
        test = TESTED.get(model, "a hybrid, deterministic kernels")
        every, one_in = math.expm1(_largest_difference(threshold)), math.ceil(k3([0.0], [1.0]) / threshold)
        rows.append([test, model, f"{threshold:g}", f"{every:.2g}", one_in])
    return rows


def _largest_difference(threshold: float) -> float:
    """Of log-probabilities, if every token has it: by bisection, since the estimate grows with it."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if k3([0.0], [middle]) < threshold else (low, middle)
    return low


# ---- requests

Cell = tuple[str, ...]


def covering(cells: Sequence[Cell]) -> list[Cell]:
    """Few cells with every pair of values that occurs in any."""

    def pairs(cell: Cell) -> set[tuple[int, int, str, str]]:
        return {(i, j, cell[i], cell[j]) for i, j in combinations(range(len(cell)), 2)}

    missing, chosen = set().union(*map(pairs, cells)), []
    while missing:
        chosen.append(max(cells, key=lambda cell: len(pairs(cell) & missing)))
        missing -= pairs(chosen[-1])
    return chosen


def draw_scenarios(diagram: Mapping[str, Sequence[Sequence[Answer]]], page_size: int) -> Figure:
    """Scenario -> rounds -> answers: a line for each request, by what became of its tokens."""
    lines = {name: sum(map(len, found)) + 0.6 * len(found) for name, found in diagram.items()}
    figure, axes = plt.subplots(
        len(diagram),
        1,
        figsize=(9.6, 0.21 * sum(lines.values()) + 1.4),
        sharex=True,
        height_ratios=list(lines.values()),
    )
    longest = 1 + max(len(a.request.tokens) for found in diagram.values() for answers in found for a in answers)
    looks = {
        "from the host": ("#0072B2", ""),
        "on the device by then": ("#BBBBBB", ""),
        "computed, in chunks": ("#FFF7D6", ""),
        "said, token by token": ("#DE9B72", "////"),
    }
    for ax, (name, found) in zip(axes, diagram.items(), strict=True):
        y, ticks = 0.0, []
        for number, answers in enumerate(found, 1):
            ticks.append((y + len(answers) / 2, f"round {number}"))
            for a in answers:
                ends = (a.from_host, a.cached, max(a.cached, a.request.prompt), len(a.request.tokens))
                for begin, end, (colour, hatch) in zip((0, *ends), ends, looks.values(), strict=False):
                    if end > begin:
                        box = Rectangle(
                            (begin, y + 0.1), end - begin, 0.8, facecolor=colour, edgecolor="#555555", lw=0.6
                        )
                        box.set_hatch(hatch)
                        ax.add_patch(box)
                y += 1
            y += 0.6
        ax.set(xlim=(0, longest), ylim=(y - 0.4, -0.3))
        ax.set_yticks([at for at, _ in ticks], [text for _, text in ticks], fontsize=8.5)
        ax.tick_params(axis="y", length=0)
        ax.spines[["left", "bottom"]].set_visible(ax is axes[-1])
        ax.spines["left"].set_visible(False)
        ax.tick_params(axis="x", length=3 if ax is axes[-1] else 0)
        ax.set_xticks(range(0, longest, page_size))
        ax.grid(axis="y", visible=False)
        ax.set_title(name, fontsize=10)
    axes[-1].set_xlabel("token of the request; lines are at edges of pages", fontsize=9)
    keys = [
        Patch(facecolor=colour, edgecolor="#555555", hatch=hatch, label=label)
        for label, (colour, hatch) in looks.items()
    ]
    figure.legend(handles=keys, loc="outside lower center", ncols=4, fontsize=9)
    return figure


# ---- rates of pairs

MOVERS = ("direct", "kernel", "staged")
CLAIMED, OTHER = ("page_first_direct", "direct"), ("page_first", "kernel")
EQUAL = 1 + noise.FLOOR

Pool = tuple[str, str]  # model, pool
Rates = dict[str, dict[tuple[str, str], float]]  # direction -> (layout, backend) -> GB/s


def rates(rows: Sequence[recommend.Content]) -> dict[Pool, Rates]:
    """GB/s of each pool in each direction by each pair."""
    found: dict[Pool, Rates] = {}
    for row in rows:
        of_pairs = found.setdefault((row["case"], row["pool"]), {}).setdefault(row["direction"], {})
        of_pairs |= {
            (row["layout"], c["mover"]): c["gb_per_s"] for c in targets.measured(row) if c["mover"] in MOVERS
        }
    return found


def show_rates(found: Mapping[Pool, Rates], largest: Mapping[tuple[str, str], float]) -> None:
    """A table for each model. `largest` is the largest KL of small models by family of pools and layout."""
    for model in dict.fromkeys(model for model, _ in found):
        rows, specs = [], presets.model(model)
        for who, by_direction in found.items():
            for layout in LAYOUTS if who[0] == model else ():
                figures = [by_direction[d].get((layout, way)) for d in by_direction for way in MOVERS]
                if any(figures):
                    kl = largest.get((specs[who[1]].family, layout))
                    rates_of = [f"{x:.1f}" if x else "-" for x in figures]
                    rows.append([who[1], layout, "." if kl is None else f"{kl:g}", *rates_of])
        heads = [f"{d}\n{way}" if way == "direct" else f"\n{way}" for d in ("backup", "load") for way in MOVERS]
        print(f"{model}, GB/s\n")
        book.table(["pool", "layout", "KL", *heads], rows)
        print()


def lengths(runs: Collection[int]) -> str:
    """Of runs, the shortest and the longest."""
    ends = sorted({min(runs), max(runs)}) if runs else []
    return " to ".join(map(book.size, ends)) or "none"


def verdict(rate: float, other: float) -> str:
    return "slower" if rate * EQUAL < other else "faster" if rate > EQUAL * other else "equal"


def verdicts(found: Mapping[Pool, Rates]) -> dict[tuple[Pool, str], dict[str, str]]:
    """Of each pool and direction, how the claimed pair compares with the other one, and with the fastest."""
    return {
        (who, direction): {
            "other": verdict(of_pairs[CLAIMED], of_pairs[OTHER]),
            "best": verdict(of_pairs[CLAIMED], max(of_pairs.values())),
        }
        for who, by_direction in found.items()
        for direction, of_pairs in by_direction.items()
    }


def show_verdicts(found: Mapping[Pool, Rates], runs: Mapping[Pool, int]) -> None:
    """A row for each pool, with a line for each direction."""
    told = verdicts(found)
    rows = []
    for who, by_direction in found.items():
        lines = []
        for direction, of_pairs in by_direction.items():
            best = max(of_pairs, key=of_pairs.__getitem__)
            figures = (
                f"{of_pairs[CLAIMED]:.1f}",
                f"{of_pairs[OTHER]:.1f}",
                f"{of_pairs[best]:.1f} ({', '.join(best)})",
            )
            mine, other, fastest = figures
            lines.append(
                [direction, mine, other, told[who, direction]["other"], fastest, told[who, direction]["best"]]
            )
        cells = ["\n".join(column) for column in zip(*lines, strict=True)]
        rows.append(["\n".join(who), book.size(runs[who]), *cells])
    heads = ["pool", "run", "", "it,\nGB/s", "kernel,\nGB/s", "so it\nis", "the fastest pair", "so it\nis"]
    book.table(heads, rows)


# ---- faults

FAULT_LOOKS = {
    "none": ("*", "#000000"),
    "a sign bit flipped": ("o", "#0072B2"),
    "a stale page": ("s", "#D55E00"),
    "a state one step late": ("D", "#009E73"),
    "two layers swapped": ("^", "#CC79A7"),
}
ZERO = 3e-7  # where a log scale has its zero


def sensitivity_rows(found: Sequence[tampering.Finding]) -> list[list[str]]:
    """A row for each fault, and for none; the model's name stands in the first of its rows."""
    rows = []
    for f in found:
        intact = f.fault == "none"
        kl, worst = ("0" if f.kl == 0 else f"{f.kl:.1e}"), ("0" if intact else f"{f.worst:.2g}")
        verdicts = f"{tampering.THRESHOLDS[f.model]:g}", "passes" if f.passes else "fails"
        bits = "exact" if f.exact else "differs"
        rows.append([f.model if intact else "", f.fault, "" if intact else f.where, kl, worst, *verdicts, bits])
    return rows


def _zero_and_powers(ax: Axes, last: int) -> None:
    """A log scale whose first tick is an exact zero."""
    powers = range(-6, last + 1)
    ax.set_xscale("log")
    ax.minorticks_off()
    ax.set_xticks(
        [ZERO, *(10.0**p for p in powers)], ["0", *(f"1e{p}" if p < -2 else f"{10.0**p:g}" for p in powers)]
    )
    ax.axvline(ZERO * 1.8, color="#999999", lw=0.8, ls=":", marker="")
    ax.grid(axis="y", color="#EEEEEE")
    ax.tick_params(axis="y", length=0)


def draw_sensitivity(found: Sequence[tampering.Finding]) -> Figure:
    """A mark for each fault, by model, beside the threshold of the nearest test upstream."""
    figure, ax = plt.subplots(figsize=(9.6, 7.6))
    y, ticks = 0.0, []
    for model in dict.fromkeys(f.model for f in found):
        mine = [f for f in found if f.model == model]
        for f in mine:
            marker, colour = FAULT_LOOKS[f.fault]
            ax.plot(max(f.kl, ZERO), y, marker=marker, color=colour, ls="", ms=8 if f.fault == "none" else 6)
            ticks.append((y, f"{model}: no fault" if f.fault == "none" else f.where))
            y += 1
        threshold = tampering.THRESHOLDS[model]
        ax.plot((threshold, threshold), (y - len(mine) - 0.5, y - 0.5), color="black", lw=2, ls="-", marker="")
        ax.text(threshold * 1.12, y - len(mine) - 0.05, f"{threshold:g}", fontsize=8, va="center")
        y += 0.8
    ax.set_yticks([at for at, _ in ticks], [text for _, text in ticks], fontsize=8)
    ax.set(ylim=(y - 0.8, -0.8), xlim=(ZERO * 0.6, 2), xlabel="KL in nats, mean over the requests")
    _zero_and_powers(ax, 0)
    keys = [
        Line2D([], [], marker=m, color=c, ls="", ms=6, label=fault)
        for fault, (m, c) in FAULT_LOOKS.items()
        if fault != "none"
    ]
    keys.append(Line2D([], [], color="black", lw=2, ls="-", marker="", label="upstream's threshold"))
    ax.legend(handles=keys, loc="upper center", bbox_to_anchor=(0.45, -0.08), ncols=3, fontsize=9)
    return figure


# ---- candidates for a deviation

CANDIDATE_LOOKS = {
    "staging reused": ("X", "#D55E00"),
    "overwritten before the copy": ("o", "#0072B2"),
    "strided slots read as packed": ("v", "#000000"),
    "parts of different steps": ("s", "#009E73"),
    "copied before the last layer": ("^", "#CC79A7"),
    "wrong width": ("D", "#E69F00"),
}

RISE = mamba_study.AFTER[0] - mamba_study.BEFORE[1], mamba_study.AFTER[1] - mamba_study.BEFORE[0]
RUNS, SAMPLES = 5, 18  # published: so many runs before and after, each of so many samples
LUCK = 0.05  # a chance below this is called unlikely
EVERY_COPY = ("strided slots read as packed", "parts of different steps", "wrong width")
# Of the samples must be hit, so that all runs are likely to have one that is.
LEAST_SHARE = 1 - (1 - LUCK ** (1 / RUNS)) ** (1 / SAMPLES)


def scale(s: mamba_study.Signature) -> float:
    """By what factor the real model would have to be more tolerant (> 1) or less (< 1) than the small one."""
    share = 1 if s.candidate in EVERY_COPY else LEAST_SHARE
    if s.kl_of_hit * share > RISE[1]:
        return s.kl_of_hit * share / RISE[1]
    return min(s.kl_of_hit / RISE[0], 1.0)


def told(s: mamba_study.Signature) -> list[str]:
    """What the table says of a variant."""
    if not s.hit:
        return [s.variant, "0%", "0", "-", "-", "-", "-"]
    share = mamba_study.part_hit(s, RISE)
    between = "more than all" if share is None else f"{share[0]:.1%} to {share[1]:.1%}"
    needed = "all" if s.candidate in EVERY_COPY else between
    return [
        s.variant,
        f"{s.hit:.0%}",
        f"{s.kl_of_hit:.2g}",
        f"{s.near:.2f}",
        f"{s.far:.2f}",
        needed,
        f"{scale(s):.1f}",
    ]


def draw_study(study: Sequence[mamba_study.Signature]) -> Figure:
    """Divergence of each candidate beside the published ranges; and how soon what it does fades."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(9.6, 5.4), width_ratios=(1.5, 1))
    for (low, high), colour, label in (
        (mamba_study.BEFORE, "#D9D9D9", "published,\nbefore"),
        (mamba_study.AFTER, "#F7D9A8", "published,\nafter"),
    ):
        left.axvspan(low, high, facecolor=colour, edgecolor="none", zorder=0)
        left.text(math.sqrt(low * high), -1.0, label, ha="center", va="bottom", fontsize=7.5)
    shown = [s for s in study if s.candidate != "none"]
    for y, s in enumerate(shown):
        marker, colour = CANDIDATE_LOOKS[s.candidate]
        if s.hit:
            left.plot((s.kl, s.kl_of_hit), (y, y), color=colour, lw=1, ls="-", marker="")
            left.plot(s.kl, y, marker=marker, color=colour, mfc="white", ls="", ms=6)
            right.plot(s.near, s.far, marker=marker, color=colour, ls="", ms=7)
        left.plot(max(s.kl_of_hit, 8e-4), y, marker=marker if s.hit else "*", color=colour, ls="", ms=6)
    left.set_xscale("log")
    left.minorticks_off()
    left.set_xticks(
        [8e-4, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5],
        ["0", *(f"{x:g}" for x in (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5))],
        fontsize=8,
    )
    left.axvline(1.15e-3, color="#999999", lw=0.8, ls=":", marker="")
    left.set_yticks(range(len(shown)), [s.variant or "slots as packed" for s in shown], fontsize=8)
    left.tick_params(axis="y", length=0)
    left.set(xlim=(6e-4, 0.8), ylim=(len(shown) - 0.4, -0.7), xlabel="KL, nats")
    right.plot((0, 3), (0, 3), color="#999999", lw=0.8, ls=":", marker="")
    tilted = {"rotation": 45, "rotation_mode": "anchor", "transform_rotates_text": True}
    right.text(0.98, 0.99, "does not fade", ha="right", va="bottom", fontsize=8, **tilted)
    right.set(xlim=(0, 1.1 * max(s.near for s in study)), ylim=(0, 1.05))
    right.set_xlabel(f"mean change of a log-probability, nats,\nfirst {mamba_study.NEAR} tokens behind the prefix")
    right.set_ylabel(f"the same after the {mamba_study.FAR}th token")
    keys = [Line2D([], [], marker=m, color=c, ls="", ms=6, label=name) for name, (m, c) in CANDIDATE_LOOKS.items()]
    figure.legend(handles=keys, loc="outside lower center", ncols=3, fontsize=9)
    return figure
