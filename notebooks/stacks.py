"""Notebook 03: who rides on whom, what a prefix weighs, a clock that counts bytes, and the rules of order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import book
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from refimpl import PoolSpec
from refimpl.controller import Controller
from refimpl.emulated import HostQueue, QueuedEvent
from refimpl.layer_done import SETS
from refimpl.runtime import Stream

PAGE = 256  # tokens, for all models
OWNER_COLOURS = {"kv": book.LAYER_COLOURS[1], "swa": book.LAYER_COLOURS[2], "mamba": "#BFE3C0"}

Specs = Mapping[str, PoolSpec]


# ---- owners and bytes


def owner(specs: Specs, name: str) -> str:
    """The pool whose indices a pool takes, in the end: itself if it owns them."""
    rides_on = specs[name].indices_from
    return name if rides_on is None else owner(specs, rides_on)


def by_owner(specs: Specs) -> list[str]:
    """Pools, each owner of indices followed by those that ride on it."""
    owners = [name for name in specs if owner(specs, name) == name]
    return [name for own in owners for name in specs if owner(specs, name) == own]


def page_bytes(specs: Specs) -> dict[str, int]:
    """Bytes of a page by owner, riders included."""
    found: dict[str, int] = {}
    for name, spec in specs.items():
        own = owner(specs, name)
        found[own] = found.get(own, 0) + spec.page_bytes
    return found


def prefix_bytes(specs: Specs, tokens: int) -> int:
    """All that one prefix keeps: full attention of every token, a page of a window, one state."""
    pages = {"kv": tokens // PAGE, "swa": 1, "mamba": 1}
    return sum(pages[name] * nbytes for name, nbytes in page_bytes(specs).items())


def draw_stacks(models: Mapping[str, Specs]) -> Figure:
    """A panel for each model, a line for each pool: layers that it has are filled, a bracket leads to its owner."""
    heights = [len(specs) + 1.2 for specs in models.values()]
    widest = max(spec.layers for specs in models.values() for spec in specs.values())
    figure, axes = plt.subplots(
        len(models), 1, squeeze=False, figsize=(9.6, 0.3 * sum(heights)), height_ratios=heights
    )
    for ax, (model, specs) in zip(axes[:, 0], models.items(), strict=True):
        names = by_owner(specs)
        count = max(spec.layers for spec in specs.values())
        for y, name in enumerate(names):
            spec, own = specs[name], owner(specs, name)
            for layer in range(count):
                colour = OWNER_COLOURS[own] if layer in spec.owned_layers else book.OTHER
                ax.add_patch(Rectangle((layer, y + 0.08), 1, 0.84, edgecolor="white", lw=0.8, facecolor=colour))
            if not spec.components:
                ax.text(count / 2, y + 0.5, "stores nothing, owns indices", ha="center", va="center", fontsize=8)
            if own != name:
                x, top = -0.6, names.index(own) + 0.75
                line = {"color": "#555555", "lw": 1, "ls": "-", "marker": "", "clip_on": False}
                ax.plot((x, x, x + 0.45), (top, y + 0.5, y + 0.5), **line)
        ax.set(xlim=(-1, widest + 1), ylim=(len(names), 0))
        labels = [name if owner(specs, name) == name else f"rides: {name}" for name in names]
        ax.set_yticks([y + 0.5 for y in range(len(names))], labels, fontsize=8.5)
        ax.set_xticks([x + 0.5 for x in range(0, count, 6)], [str(x) for x in range(0, count, 6)], fontsize=7.5)
        ax.tick_params(length=0)
        ax.spines[:].set_visible(False)
        ax.grid(False)
        ax.set_title(model, fontsize=10)
    axes[-1, 0].set_xlabel("model layer", fontsize=9, loc="left")
    return figure


def draw_bytes(models: Mapping[str, Specs], lengths: Sequence[int]) -> list[tuple[str, str, int]]:
    """A page of every pool as a bar, and whole prefixes of so many tokens as lines. Returns what the bars show."""
    _, (left, right) = plt.subplots(1, 2, figsize=(9.6, 4.2), width_ratios=(1, 1.05))
    bars = [(model, name, spec.page_bytes) for model, specs in models.items() for name, spec in specs.items()]
    bars = [bar for bar in bars if bar[2]]
    for y, (model, name, nbytes) in enumerate(bars):
        left.barh(y, nbytes, 0.72, color=OWNER_COLOURS[owner(models[model], name)], edgecolor="#555555", lw=0.6)
        left.text(nbytes * 1.15, y, f"{nbytes / 2**20:.2f}", va="center", fontsize=8)
    left.set_yticks(range(len(bars)), [f"{model}: {name}" for model, name, _ in bars], fontsize=8)
    left.set_xscale("log", base=2)
    left.set(ylim=(len(bars) - 0.4, -0.6), xlim=(1 << 14, 1 << 30), xlabel="MiB")
    ticks = range(16, 30, 4)
    left.set_xticks([1 << i for i in ticks], [f"{2.0 ** (i - 20):g}" for i in ticks], fontsize=8)
    left.grid(axis="y", visible=False)
    left.set_title(f"a page of {PAGE} tokens, or one state", fontsize=10)
    for model, specs in models.items():
        right.plot(lengths, [prefix_bytes(specs, n) / 2**20 for n in lengths], label=model)
    right.set_xscale("log", base=2)
    right.set_yscale("log", base=2)
    right.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")
    right.yaxis.set_major_formatter(lambda y, _: f"{y:,g}")
    right.tick_params(axis="both", labelsize=7.5)
    right.set(xlabel="tokens of the prefix", ylabel="MiB")
    right.set_title("a whole prefix", fontsize=10)
    right.legend(fontsize=8, loc="upper left")
    return bars


# ---- a clock that counts bytes


class Clocked(HostQueue):
    """Streams run side by side, operations as soon as they may; each takes what `spend` was told meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.clocks: dict[Any, float] = {}

    def spend(self, time: float) -> None:
        self.clocks[self.running] += time

    def record(self, stream: Stream, timed: bool = False) -> QueuedEvent:
        event = QueuedEvent(self)

        def passed() -> None:
            event.passed, event.at = True, self.now

        self.submit(passed, stream)
        return event

    def run_until(self, event: QueuedEvent) -> None:
        def may_start(stream: Any) -> float:
            after = self._queues[stream][0].after
            return max(self.clocks.get(stream, 0.0), after.at if after else 0.0)

        while not event.passed:
            self.running = min(self._ready(), key=may_start)
            self.clocks[self.running] = self.now = may_start(self.running)
            self._queues[self.running].popleft().what()


Arrival = tuple[int, str, float, float]  # layer, pool, begin, end
Step = tuple[float, float, list[str]]  # of a layer of the forward pass: begin, end, pools whose rows were not there


class ClockedController(Controller):
    """Lets its queue's clock run with the bytes that arrive, and notes which came when."""

    runtime: Clocked

    def __init__(self, *parts: Any, **more: Any) -> None:
        super().__init__(*parts, **more)
        self.arrivals: list[Arrival] = []

    def _move(self, batch: Any, name: str, layers: Any = None) -> Any:
        (layer,), owned = layers, self.host.pools[name].spec.owned_layers
        nbytes = sum(map(self._bytes, batch.transfers_of(name))) // len(owned) if layer in owned else 0

        def tick() -> None:
            if nbytes:
                self.arrivals.append((layer, name, self.runtime.now, self.runtime.now + nbytes))
            self.runtime.spend(nbytes)

        self.runtime.submit(tick, self._streams["load"])
        return super()._move(batch, name, layers)


POOL_LOOKS = {
    "swa": ("#D55E00", ""),
    "c4": ("#0072B2", ""),
    "c4_indexer": ("#56B4E9", "////"),
    "c128": ("#009E73", ""),
    "c4_state": ("#E69F00", ""),
    "c4_indexer_state": ("#F0E442", "...."),
}
PASSES = {"layers": {"facecolor": "white"}, "everything": {"facecolor": "#DDDDDD", "hatch": "...."}}


def draw_timeline(arrivals: Sequence[Arrival], steps: Mapping[str, Sequence[Step]], whole: int) -> Figure:
    """A line for each layer: its rows arrive, then it is computed, by each pass. All layers; the first enlarged."""
    figure, (ax, zoom) = plt.subplots(1, 2, figsize=(9.6, 5.2), width_ratios=(1, 1.25))
    shapes, layers, first = {}, len(steps["layers"]), 8
    edge = steps["layers"][first - 1][1] / whole

    def box(ax: Axes, layer: int, begin: float, end: float, **look: Any) -> Rectangle:
        look.setdefault("lw", 0.5)
        shape = Rectangle((begin / whole, layer + 0.08), (end - begin) / whole, 0.84, edgecolor="black", **look)
        ax.add_patch(shape)
        return shape

    for layer, name, begin, end in arrivals:
        colour, hatch = POOL_LOOKS[name]
        box(ax, layer, begin, end, facecolor=colour, lw=0)
        if layer < first:
            shapes[name] = box(zoom, layer, begin, end, facecolor=colour, hatch=hatch)
    for waits, look in PASSES.items():
        for layer, (begin, end, _) in enumerate(steps[waits]):
            shapes[f"computed by a pass that\nwaits for {waits}"] = box(ax, layer, begin, end, **look)
            if layer < first and waits == "layers":
                box(zoom, layer, begin, end, **look, lw=1)
    ax.set(xlim=(0, steps["everything"][-1][1] / whole), ylim=(layers, 0), ylabel="model layer")
    ax.set_yticks([x + 0.5 for x in range(0, layers, 6)], [str(x) for x in range(0, layers, 6)])
    ax.add_patch(Rectangle((0, 0), edge, first, fill=False, ls=":", lw=1.2))
    ax.set_title("all layers", fontsize=10)
    zoom.set(xlim=(0, edge * 1.01), ylim=(first, 0))
    zoom.set_yticks([x + 0.5 for x in range(first)], [str(x) for x in range(first)])
    zoom.set_title("the first layers", fontsize=10)
    for each in (ax, zoom):
        each.grid(axis="y", visible=False)
        each.set_xlabel("clock: bytes over the bus, 1 is the whole load", fontsize=9)
    figure.legend(list(shapes.values()), list(shapes), loc="outside lower center", ncols=4, fontsize=8.5)
    return figure


def draw_saved(ratios: Sequence[float], saved: Sequence[float]) -> Figure:
    """The share of time saved, over the ratio of computing to loading."""
    figure, ax = plt.subplots(figsize=(7.2, 3.2))
    ax.plot(ratios, [100 * share for share in saved], marker="o")
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
    ax.set(xlabel="computing a layer, in loads of an average layer", ylabel="time saved by\nwaiting by layer, %")
    ax.set_ylim(0, 50)
    return figure


# ---- rules of order: who, waits for what, what happens otherwise, and the checks of `verify.conformance.checks`

RULES = [
    (
        "a backup",
        "the caller's work, and the forward pass that may still write (write fence)",
        "the last token, or a half-done state, is stored as it was before",
        ("backup_reads_what_the_caller_wrote", "backup_reads_what_a_forward_pass_wrote"),
    ),
    (
        "a load",
        "the forward pass that still uses those slots (load fence)",
        "36738: that pass writes over what was loaded",
        ("load_leaves_what_the_caller_reads", "load_leaves_what_a_forward_pass_reads"),
    ),
    ("a reader of a layer", "that layer, in all pools", "it reads another prefix", ("readers_of_layers",)),
    (
        "a reader of a whole state",
        "the last layer of its pool",
        "36743: a state of two prefixes",
        ("whole_states",),
    ),
    (
        "the model's next step",
        "backups of states that it overwrites in place",
        "the host keeps a later state",
        (
            "states_overwritten_by_the_caller",
            "states_overwritten_by_a_forward_pass",
            "states_do_not_wait_for_other_backups",
        ),
    ),
    (
        "a load or a backup",
        "one the other way of the same slots",
        "half of the one, half of the other",
        (
            *("load_of_what_is_being_backed_up", "load_over_what_is_being_backed_up"),
            *("backup_of_what_is_being_loaded", "backup_over_what_is_being_loaded"),
        ),
    ),
    (
        "the next owner of slots",
        "the acknowledgement of whatever reads them",
        "its bytes are taken for the prefix",
        ("device_slots_freed_under_a_backup", "host_slots_freed_under_a_load"),
    ),
    (
        "word that slots were read",
        "word that their bytes had come",
        "what never came is told as saved",
        ("what_was_to_come_from_a_failure_fails_with_it", "nothing_is_saved_that_was_made_of_what_never_came"),
    ),
    (
        "a backup of a window",
        "nobody, but says when its slots are looked up: when it is queued, or when it runs",
        "25889, 27294: rows that have moved, or padding",
        ("windows_as_they_were_queued", "windows_as_they_run"),
    ),
    (
        f"load number {SETS + 1}",
        "the acknowledgement of the first one",
        "its readers wait for events of another load",
        ("no_more_loads_than_sets_of_events",),
    ),
]
