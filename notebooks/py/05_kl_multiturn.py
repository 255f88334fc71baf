# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Log-probabilities over turns: zero, or a finding
#
# Nobody reads the bytes of a cache. What users see is what the model says after a prefix came back from the host, so engines are tested by that: the log-probability of each token, with the cache and without, and the distance between the two. **A copy either restores every byte or it does not. So the distance need not be small, it can be exactly zero, and whatever is not zero is a finding.**
#
# In short:
#
# - Upstream's tests accept a small distance, since its kernels round differently from batch to batch. What they accept has room for real damage.
# - Small models whose arithmetic does not depend on the batch take the rounding away. Over all of our layouts and backends every log-probability then has the same bits.
# - With the rounding gone, one wrong sign bit in a whole prefix is seen. Most flipped bits, and some whole pages and layers, would pass upstream's thresholds.
# - A deviation of Mamba states that was published and never explained is compared with what candidate causes do: which of them can look like that, and which cannot.
#
# Divergences are computed in this notebook, on a CPU. Rates are not: they are the committed results of an H200.
#
# ## What a threshold allows
#
# Upstream's estimate for a sample is the mean of `e^r - 1 - r` over its tokens, where `r` is the difference of two log-probabilities; a test passes when the mean over all samples is below a threshold. Here are the thresholds, each beside the small model of ours that is nearest to the tested one, and what they mean: how far off *every* probability may be, or of how many tokens *one* may be off by a factor of e while all others are right.

# %%
import json
import math
import sys
from itertools import combinations, cycle, product
from textwrap import fill

sys.path.append("notebooks")  # found there when the notebook runs in the repository's root

import book
import divergence
import torch

from refimpl import LAYOUTS
from refimpl.controller import Controller
from refimpl.radix import POLICIES
from verify.bench import noise
from verify.bench.gpu import targets
from verify.conformance import faults
from verify.logprobs import mamba_study, multiturn, tampering, tinymodels
from verify.logprobs.multiturn import Engine, compare, k3, play, require_exact, rounds_of

torch.set_num_threads(1)  # tensors are tiny

TESTED = {
    "mha": "Qwen3-32B, full attention",
    "mla": "unless a test says otherwise",
    "swa": "gpt-oss-20b, windows",
    "mamba": "Qwen3-Next, states, host tier",
    "v4": "DeepSeek-V4-Flash, host tier",
}
BIT_EXACT = 1e-9  # of upstream's only test with deterministic kernels, a hybrid model


def allowed(threshold):
    """The largest difference that every token may have."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if k3([0.0], [middle]) < threshold else (low, middle)
    return low


rows = []
for model, threshold in [*tampering.THRESHOLDS.items(), ("", BIT_EXACT)]:
    every, one_in = math.expm1(allowed(threshold)), math.ceil(k3([0.0], [1.0]) / threshold)
    rows.append(
        [TESTED.get(model, "a hybrid, deterministic kernels"), model, f"{threshold:g}", f"{every:.2g}", one_in]
    )
heads = [
    "upstream's test of",
    "nearest here",
    "threshold",
    "every probability\noff by a factor 1 +",
    "or one token by e,\nof so many",
]
book.table(heads, rows)

# %% [markdown]
# The last line shows that upstream itself can do without tolerance where kernels are deterministic. Whoever cannot must ask what else fits below the line.
#
# ## The scenario
#
# The models (`verify/logprobs/tinymodels.py`) read and write the real paged pools of a stack, each kind with the pools of its family: `mha`, `mla`, `swa` (windows with slots of their own), `mamba` (states overwritten in place), `v4` (compressed entries and rings of states). They use only operations that IEEE 754 defines to the last bit, and sum in an order that depends on positions alone. So neither batch, nor chunk, nor device changes a bit; only what is in the pools passes from step to step.
#
# A small server (`verify/logprobs/multiturn.py`) plays upstream's three scenarios on them: conversations that grow (`turns`), prefixes that are shared and part (`branches`), long answers that are the next prompt (`history`). Between rounds **the device is emptied and overwritten with poison**: what is a hit afterwards was on the host. Every answer says how much of it was cached and how much of that came from the host, and both must be what the scenario makes them. After every call, the tree that finds prefixes is held against its rules (`refimpl/invariants.py`): no slot has two owners, none is lost, and along a prefix what is on the device comes before what is only on the host.
#
# The next cell plays a set of cells in which any two of model, layout, backend and scenario occur together, write policies in turn (the test suite plays all). Then a picture of the scenarios, with one request of model `mha` a line: a prefix is cached up to its last whole page. Blue came back from the host; grey had come back by then, for another request of the same round.

# %%
SCENARIOS = ("turns", "branches", "history")
WAYS = {"torch": "cpu", "numba": "cpu"} | dict.fromkeys(("direct", "kernel", "staged", "auto"), "emulated")


def covering(cells):
    """Few cells with every pair of values that occurs in any."""

    def pairs(cell):
        return {(i, j, cell[i], cell[j]) for i, j in combinations(range(len(cell)), 2)}

    missing, chosen = set().union(*map(pairs, cells)), []
    while missing:
        chosen.append(max(cells, key=lambda cell: len(pairs(cell) & missing)))
        missing -= pairs(chosen[-1])
    return chosen


tiny = {name: tinymodels.model(name) for name in tinymodels.MODELS}
possible = [
    (name, layout, backend)
    for name, layout, backend in product(tiny, LAYOUTS, WAYS)
    if layout in {pair[0] for pair in multiturn.pairs(tiny[name], layout, backend, WAYS[backend]).values()}
]
spread = [(i, SCENARIOS[(i + first) % 3]) for first in range(3) for i in range(len(possible))]
cells = covering([(*possible[i], scenario) for i, scenario in spread])
played = {}
for cell, policy in zip(cells, cycle(POLICIES)):
    name, layout, backend, scenario = cell
    with Engine(tiny[name], layout, backend, WAYS[backend], policy, seed=len(played)) as engine:
        told = play(engine, rounds_of(scenario, name))
        require_exact(engine, told)  # also that prefixes were hits, and came from the host
    played[cell] = [[compare(name, answer) for answer in answers] for answers in told]


def samples(scenario=None):
    return [s for cell, rounds in played.items() if scenario in (None, cell[3]) for found in rounds for s in found]


rows = []
for scenario in SCENARIOS:
    mine = [s.answer for s in samples(scenario)]
    counts = [sum(len(a.request.tokens) for a in mine), sum(a.cached for a in mine), sum(a.from_host for a in mine)]
    rows.append([scenario, sum(cell[3] == scenario for cell in cells), len(mine), *counts])
heads = ["scenario", "cells", "requests", "tokens of them", "cached", "of which from\nthe host"]
book.table(heads, rows)

diagram = {
    scenario: [[s.answer for s in found] for found in next(played[c] for c in cells if c[0::3] == ("mha", scenario))]
    for scenario in SCENARIOS
}
parts = [
    [(a.from_host, a.cached, a.request.prompt, len(a.request.tokens)) for a in found]
    for d in diagram.values()
    for found in d
]
divergence.draw_scenarios(diagram, tiny["mha"].page_size)
print("digest of what is drawn:", book.digest(parts))

# %% [markdown]
# ## Exactly zero
#
# The same cells by model, layout and backend. A mark is a divergence: `0` means that it was zero *and* that every probability of every token had the bits that the model computes without a cache. Its letter is the scenario. A dot was not played here, a dash cannot be built. (A pool that cannot have the layout has `page_first_direct`; `torch` and `numba` run on a CPU, the others are the kernels and streams of a GPU on an emulated device.)
#
# A check that always says zero is no check. The most common way to get there: nothing was ever a hit, so nothing was restored. The last lines are from an engine whose lookups are switched off. What it says is right, and the check must fail all the same.


# %%
def mark(name, layout, backend):
    if (name, layout, backend) not in possible:
        return "-"
    here = [
        (cell[3], s)
        for cell, rounds in played.items()
        if cell[:3] == (name, layout, backend)
        for found in rounds
        for s in found
    ]
    if not here:
        return "."
    worst = max(max(s.kl, abs(s.divergence)) for _, s in here)
    assert (worst == 0) == all(s.exact for _, s in here)
    return f"{worst:.2g} " + "".join(sorted({scenario[0] for scenario, _ in here}))


layouts = {name: [n for n in LAYOUTS if any((name, n, backend) in possible for backend in WAYS)] for name in tiny}
book.table(
    ["", "layout", *WAYS], [[name, n, *(mark(name, n, way) for way in WAYS)] for name in tiny for n in layouts[name]]
)
every = samples()
probabilities = sum(s.answer.distributions.numel() for s in every)
print(f"\ncells: {len(cells)} of {len(possible)}; requests: {len(every)}; probabilities compared: {probabilities:,}")
print(f"with other bits: {sum(not s.exact for s in every)} requests; largest KL: {max(s.kl for s in every):g}\n")

with Engine(tiny["mha"], hits=False) as engine:
    told = play(engine, rounds_of("turns", "mha"))
    print(
        "without lookups, log-probabilities right:",
        all(compare("mha", answer).exact for answers in told for answer in answers),
    )
    try:
        require_exact(engine, told)
        refused = ""
    except AssertionError as error:
        refused = str(error)
print("the check fails:", refused)

# %% [markdown]
# ## And the rate?
#
# Upstream reported divergence and layouts together, since a layout is chosen for speed: `page_first_direct` with the copy engine (`direct`) is said to be the faster choice. Divergence does not decide between pairs, all of them are exact. Rates do, and they need a GPU, so these are **the committed H200 results** (`data/results/h200/bench.json`), with the backends of this project: pools of real models in full size, GB/s, beside the divergence of the small model here that has the same kind of pools.
#
# The last table is about the claim. For each pool and direction, `page_first_direct` with `direct` is compared with a pair that upstream chose for its staged kernel, `page_first` with `kernel`, and with the fastest pair of all. Rates are called equal when they differ by no more than the same pair does when it is measured again (`verify/bench/noise.py`).

# %%
bench = json.loads((book.HERE.parent / "data/results/h200/bench.json").read_text(encoding="utf-8"))
core = [row for row in bench["rows"] if row["portion"] == "core" and targets.measured(row)]
(session,) = {row["session"] for row in core}
origin = bench["sessions"][session]["provenance"]
gpu, commit = origin["gpu"], str(origin["commit"])[:12]
print(f"{gpu['name']}, driver {gpu['driver']}, commit {commit}, {origin['time'][:10]}")
ceilings = {}
for c in bench["sessions"][session]["ceilings"]:
    if c["payload_bytes"] >= max(ceilings.get(c["direction"], (0, 0))):
        ceilings[c["direction"]] = c["payload_bytes"], c["gb_per_s"]
for direction in ("backup", "load"):
    print(
        f"ceiling of a {direction}: {ceilings[direction][1]:.1f} GB/s, "
        f"a memcpy of {book.size(ceilings[direction][0])}"
    )
print()

KINDS = {"llama-3.1-8b": "mha", "deepseek-v3": "mla", "deepseek-v4-flash": "v4", "qwen3-next": "mamba"}
rates = divergence.rates(core)
of_layout = {}  # small model, layout -> KL of its requests above
for cell, found in played.items():
    of_layout.setdefault(cell[0], {}).setdefault(cell[1], []).extend(s.kl for answers in found for s in answers)
largest = {who: {name: max(kls) for name, kls in of_layout[KINDS[who[0]]].items()} for who in rates}
divergence.show_rates(rates, largest)

# %% [markdown]
# A run is a piece that is contiguous on both sides in `page_first_direct`. *It* is that layout with `direct`; *kernel* is `page_first` with `kernel`. The upper line of a pool is a backup, the lower one a load.

# %%
runs = {(row["case"], row["pool"]): targets.shortest_run(row) for row in core if row["layout"] == "page_first_direct"}
verdicts = divergence.verdicts(rates)
divergence.show_verdicts(rates, runs)

holds = {runs[who] for (who, _), verdict in verdicts.items() if verdict["best"] != "slower"}
fails = {runs[who] for (who, _), verdict in verdicts.items() if verdict["best"] == "slower"}
counts = {kind: sum(v["other"] == kind for v in verdicts.values()) for kind in ("faster", "equal", "slower")}
print(f"\nequal is within {noise.FLOOR:.0%}")
print(f"against page_first with kernel, {len(verdicts)} pools and directions:")
print("   ", ", ".join(f"{kind} in {count}" for kind, count in counts.items()))
print("as fast as the fastest pair:", sum(v["best"] != "slower" for v in verdicts.values()))
print(f"    runs of {book.size(min(holds))} and more: yes; of {book.size(max(fails))} and less: no")
ratios = [
    found[divergence.CLAIMED] / found[divergence.OTHER]
    for by_direction in rates.values()
    for found in by_direction.values()
]
print(
    f"    at best it is {max(ratios) - 1:.0%} ahead of page_first with kernel, "
    f"at worst that is {1 / min(ratios):.0f} times as fast"
)

# %% [markdown]
# **So on this device the claim is true of pools, not of models.** Where runs are long in `page_first_direct`, the copy engine is as fast as the bus, and equal to a kernel or a little ahead. For the small rows of a compressed model it is far behind, in both directions. One pair for a whole stack is the wrong question; each pool may have its own.
#
# ## What would pass
#
# Now something is damaged on the host, in every prefix just before it is loaded back, and as little as such a fault can damage: one sign bit; one page that holds what another holds; a state that is a step late; two layers that change places. For each pool of each model, the divergence that it causes, over requests of `history`; and upstream's verdict at the threshold of the nearest test. In the picture a mark is a fault; what is to the left of the black lines would pass.
#
# **How large a fault is says little of what it does.** A bit of a recurrent state, which every later token builds on, does more than a whole stale page of another pool. Only the rows without a fault are at zero.

# %%
found = tampering.sensitivity()
rows = []
for f in found:
    verdict = "passes" if f.passes else "fails"
    if f.fault == "none":
        rows.append(
            [
                f.model,
                "none",
                "",
                "0" if f.kl == 0 else f"{f.kl:.1e}",
                "0",
                f"{tampering.THRESHOLDS[f.model]:g}",
                verdict,
                "exact",
            ]
        )
        continue
    texts = [f"{f.kl:.1e}", f"{f.worst:.2g}", f"{tampering.THRESHOLDS[f.model]:g}", verdict]
    rows.append(["", f.fault, f.where, *texts, "exact" if f.exact else "differs"])
heads = [
    "model",
    "fault",
    "in",
    "KL",
    "largest change of a\nlog-probability",
    "upstream's\nthreshold",
    "upstream's\ntest",
    "bits",
]
book.table(heads, rows)

damaged = [f for f in found if f.fault != "none"]
print()
for fault in dict.fromkeys(f.fault for f in damaged):
    mine = [f for f in damaged if f.fault == fault]
    passing, here = sum(f.passes for f in mine), sum(f.exact > 0 for f in mine)
    print(f"{fault}: {passing} of {len(mine)} would pass upstream, {here} pass here")
divergence.draw_sensitivity(found)
print(
    "digest of what is drawn:",
    book.digest([(f.model, f.fault, f.where, f"{f.kl:.2g}", f"{f.highest:.2g}") for f in found]),
)

# %% [markdown]
# ## A deviation nobody explained
#
# In June 2026 a change of SGLang (pull request 28434) moved its test of a Mamba hybrid to a staged kernel. The test had passed in every run; now it failed in every run. It was moved back to the copy engine, and the cause was never published. A copy cannot be wrong "by a little": either bytes are wrong or they are of another time. So candidates can be built in, one at a time, in the small Mamba hybrid that is exact without them, and each leaves a **signature**: which part of the requests is hit, how far those that are hit deviate, and how soon that fades behind the prefix.
#
# Two readings of a mean follow. Some faults sit in every copy, so the mean is what they do. Others are races: timing decides how many requests they hit, so any mean up to that of a request that is hit can come out, but whether *every* run fails then depends on how many are hit. What was to be explained is the rise, the published figures after the change less those before.
#
# In the picture, on the left, are the divergence of requests that are hit (filled) and the mean over all (hollow), beside the published figures. The small model's scale need not be the real one's, so look at who is where relative to whom. On the right: how far log-probabilities are off near the prefix and further behind. **A state that is nearly right, a step off or in part, is forgotten soon; somebody else's state is not.**
#
# In the table, `log-prob.` is the mean change of a log-probability in the first tokens behind the prefix, and further behind it. A fault that *all* copies have needs no luck; of the others, the races, it says how many of the samples they must hit to make the published rise.
#
# (Upstream draws its samples with the cache and judges them without; here it is the other way round, so `r` has the other sign: small deviations give the same figure, large ones another.)

# %%
BEFORE, AFTER = mamba_study.BEFORE, mamba_study.AFTER
RISE = AFTER[0] - BEFORE[1], AFTER[1] - BEFORE[0]
RUNS, SAMPLES = 5, 18  # published: so many runs before and after, each of so many samples
LATER = {34184: "0.0024 to 0.0027", 29792: "0.00009"}  # another conv window in the checkpoint; another slot
LUCK = 0.05  # a chance below this is called unlikely
EVERY_COPY = ("strided slots read as packed", "parts of different steps", "wrong width")

study = mamba_study.study(orders=5)
least_share = 1 - (1 - LUCK ** (1 / RUNS)) ** (
    1 / SAMPLES
)  # hit so that all runs are likely to have a sample that is


def scale(s):
    """By what factor the real model would have to be more tolerant (> 1) or less (< 1) than the small one."""
    share = 1 if s.candidate in EVERY_COPY else least_share
    if s.kl_of_hit * share > RISE[1]:
        return s.kl_of_hit * share / RISE[1]
    return min(s.kl_of_hit / RISE[0], 1.0)


def told(s):
    """What is shown of a variant."""
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


variants = {}
for s in study:
    variants.setdefault(s.candidate, []).append(s)
(nothing,) = variants["none"]
before, after, rise = (" to ".join(f"{x:.4f}" for x in pair) for pair in (BEFORE, AFTER, RISE))
later = "; ".join(f"issue {number} alone, {figures}" for number, figures in LATER.items())
book.say(
    f"- published: {before} before, {after} after; rise {rise}",
    f"- found later in states of another hybrid, one with bit-exact kernels: {later}",
    f"- a race must hit {least_share:.1%} of the samples, "
    f"or it is unlikely that all {RUNS} runs of {SAMPLES} have one",
)
heads = [
    "candidate",
    "variant",
    "hit\nhere",
    "KL of\nthose",
    f"log-prob.,\nfirst {mamba_study.NEAR}",
    f"after\n{mamba_study.FAR}",
    "to be hit\nfor the rise",
    "scale to\nbe off by",
]
rows = [
    [fill(name, 18), *("\n".join(column) for column in zip(*map(told, mine), strict=True))]
    for name, mine in variants.items()
]
book.table(heads, rows)
hit = [s for s in study if s.hit]
drawn = [(s.candidate, s.variant, *(f"{x:.2g}" for x in (s.hit, s.kl, s.kl_of_hit, s.near, s.far))) for s in study]
divergence.draw_study(study, BEFORE, AFTER)
print("digest of what is drawn:", book.digest(drawn))

# %% [markdown]
# What follows from that, computed from the rows above. A *scale* of 1 means that the figures come out as they are in the small model; otherwise the real model would have to be so many times as tolerant. It has other weights and many more layers, so a factor of a few says little. A factor of ten or more is held against a candidate.

# %%
FEW, MANY = 4.0, 10.0
of = {}
for s in hit:
    of.setdefault(s.candidate, []).append(s)
closest = {name: min((scale(s) for s in mine), key=lambda x: abs(math.log(x))) for name, mine in of.items()}
groups = {
    "can produce the published rise": [name for name, x in closest.items() if x == 1],
    "can, if the scale is off by no more than a toy's may be": [
        n for n, x in closest.items() if x != 1 and 1 / FEW <= x <= FEW
    ],
    "open": [n for n, x in closest.items() if FEW < x < MANY or 1 / MANY < x < 1 / FEW],
    "cannot, unless the real model is far more tolerant": [n for n, x in closest.items() if x >= MANY],
    "cannot, unless the real model is far less tolerant": [n for n, x in closest.items() if x <= 1 / MANY],
}
for heading, names in groups.items():
    scales = {name: ", ".join(dict.fromkeys(f"{scale(s):.1f}" for s in of[name])) for name in names}
    if names:
        book.say(f"**{heading}**: " + "; ".join(f"{name}, scale {text}" for name, text in scales.items()))
fades = {name: min(s.near / s.far for s in mine) for name, mine in of.items()}
halved = {name: x >= 2 for name, x in fades.items()}
book.say(
    f"At least halved behind the prefix, in every variant: {', '.join(name for name in halved if halved[name])}; "
    f"not always: {', '.join(name for name in halved if not halved[name])}."
)

orders = [s for s in study if s.candidate == "staging reused"]
most = max(mamba_study.part_hit(s, RISE)[1] for s in orders if s.hit)
chance = (1 - (1 - most) ** SAMPLES) ** RUNS
clean = sum(not s.hit for s in orders)
book.say(
    f"*Staging reused*: no request is hit in {clean} of {len(orders)} orders; where some are, they are hit hard. "
    f"At most {most:.1%} of the samples make the published mean; that all runs have one is a chance of {chance:.1%}."
)
print(f"without a fault: {nothing.hit:.0%} of the requests differ, KL {nothing.kl:g}")

# %% [markdown]
# **So the published means do not point at one cause.** They rule out little more than a wrong slot in every copy. What can look like them are states that are nearly right: of another step, in part, or copied before they had arrived or after they were overwritten; races between a copy and a model that overwrites its states in place are among them, and a copy path with other timing could uncover one that was there before. A staging buffer that is used too early would more likely have shown as a run that now passes and now fails badly. None of this says what happened. What would have told is what a mean hides: the divergence by sample, and by distance from the prefix. Nor must all of what was measured before the change have been rounding: a fault that was found later gives nearly as much where there is no rounding. And a staged copy as such need not deviate at all: `mamba` with `staged` is among the exact cells above.
#
# ## For your own controller
#
# The engine takes any class with the interface of `refimpl.controller.Controller`, and any stack. Below, the right one, and one that takes a state for loaded when its first layer is (SGLang's issue 36743; [03_hybrid_stacks](03_hybrid_stacks.ipynb) looks at its bytes), each in a few orders of the streams. A wait that is missing does no harm as long as nothing happens to be late, so play more than one order.

# %%
ORDERS = 4
wrong = {}
for make in (Controller, faults.WaitsForTheFirstLayerOfAState):
    kls = []
    for seed in range(ORDERS):
        with Engine(tiny["mamba"], make_controller=make, seed=seed) as engine:
            told = play(engine, rounds_of("turns", "mamba"))
        kls.append(max(compare("mamba", answer).kl for answers in told for answer in answers))
    wrong[make] = sum(map(bool, kls))
    shown = ", ".join("0" if kl == 0 else f"{kl:.1e}" for kl in kls)
    print(f"{make.__name__}: wrong in {wrong[make]} of {ORDERS} orders; largest KL of a request: {shown}")

# %% [markdown]
# For an engine of your own, three things matter more than the models. Make the model deterministic, so that zero is the threshold. Assert that tokens were cached *and* that they came from the host. And break something on purpose: a check that never failed has shown nothing yet.
#
# ## What was shown
#
# These lines fail if the claims of this article do not hold.

# %%
for a, b in ((0, 1), (0, 2), (1, 2)):
    assert {(cell[a], cell[b]) for cell in possible} == {(cell[a], cell[b]) for cell in cells}, "nothing is left out"
assert all(s.exact and s.kl == s.divergence == 0 for s in every)
assert sum(s.answer.from_host for s in every) > 0
assert any(cell[0] == "mamba" and cell[2] == "staged" for cell in cells), "states staged, and exact"
assert "tokens were cached, expected" in refused
assert all((f.fault == "none") == (f.kl == 0) == (f.exact > 0) for f in found), "every fault shows in every request"
bits, swaps = ([f for f in damaged if f.fault == fault] for fault in ("a sign bit flipped", "two layers swapped"))
assert sum(f.passes for f in bits) > len(bits) / 2, "most flipped bits would pass"
assert any(f.passes for f in damaged if f.fault == "a stale page")
assert any(f.passes for f in swaps)
assert max(f.kl for f in bits) > min(f.kl for f in damaged if f.fault == "a stale page")
assert min(f.kl for f in damaged) > 100 * BIT_EXACT
assert min(holds) > max(fails), "long runs and short ones"
assert counts["slower"] > 0 < counts["faster"], "the claim depends on the pool"
assert nothing.hit == nothing.kl == 0
assert "strided slots read as packed" in groups["cannot, unless the real model is far more tolerant"]
nearly = {"overwritten before the copy", "parts of different steps", "copied before the last layer"}
assert nearly <= set(groups["can produce the published rise"])
assert (
    min(fades[name] for name in nearly)
    > 2
    > max(fades[n] for n in ("staging reused", "strided slots read as packed"))
)
assert chance < LUCK
assert wrong[Controller] == 0 < wrong[faults.WaitsForTheFirstLayerOfAState]
print("all claims hold")

# %% [markdown]
# ## Where to go next
#
# - [04_pairings](04_pairings.ipynb): every pairing of a model of your choice, and advice.
# - [06_your_implementation](06_your_implementation.ipynb): transfers of your own, held against every byte.
# - [03_hybrid_stacks](03_hybrid_stacks.ipynb): what waits for what, so that none of these races can happen.
# - [07_fast_paths](07_fast_paths.ipynb): where the rates come from.
# - `verify/tests/test_kl.py`: all models, layouts, backends, policies and scenarios, on a CPU and on a GPU; every fault above must fail there.
# - `refimpl/radix.py`, `verify/tests/test_tree_machine.py`: the tree that finds prefixes, beside a plain model of it, step by step.
# - `verify/logprobs/tampering.py`, `verify/logprobs/mamba_study.py`: the faults. A candidate of your own is an engine, or a function that spoils bytes.
