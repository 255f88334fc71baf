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
# Nobody reads the bytes of a cache. Users see what the model says after a prefix came back from the host, so engines are tested by that: the log-probability of each token with the cache and without it, and the distance (KL divergence) between the two. **A copy either restores every byte or it does not. So the distance does not have to be small. It can be exactly zero, and anything else is a finding.**
#
# In short:
#
# - Upstream's tests (SGLang's) accept a small distance, because its kernels round differently from batch to batch. The distance that they accept leaves room for real damage.
# - Small models whose arithmetic does not depend on the batch take the rounding away. With them, every log-probability has the same bits over all of our layouts and backends.
# - Once the rounding is gone, a single wrong sign bit in a whole prefix is noticed. Most flipped bits, and some whole pages and layers, would pass upstream's thresholds.
# - A published deviation of Mamba states, never explained, is compared with what several candidate causes do: which of them can look like that, and which cannot.
#
# Divergences are computed here, on a CPU. Rates are not: they are the committed results of an H200. To test an engine of your own in this way, see [the last section](#For-your-own-controller).
#
# ## What a threshold allows
#
# For a sample, upstream's estimate is the mean of `e^r - 1 - r` over its tokens, where `r` is the difference of two log-probabilities; a test passes when the mean over all samples is below a threshold. The table translates thresholds, each beside our small model that is nearest to the tested one: how far off *every* probability may be, or among how many tokens *one* may be off by a factor of e while all others are right.

# %%
import json
import math
import sys
from itertools import cycle, product
from textwrap import fill

sys.path.append("notebooks")  # found there when the notebook runs in the repository's root

import book
import divergence
import torch
from divergence import scale

from refimpl import LAYOUTS
from refimpl.controller import Controller
from refimpl.radix import POLICIES
from verify.bench import noise
from verify.bench.gpu import here, targets
from verify.conformance import faults
from verify.logprobs import mamba_study, multiturn, tampering, tinymodels
from verify.logprobs.multiturn import Engine, compare, play, require_exact, rounds_of

torch.set_num_threads(1)  # tensors are tiny

heads = ["upstream's test of", "nearest here", "threshold"]
heads += ["every probability\noff by a factor 1 +", "or one token by e,\nof so many"]
book.table(heads, divergence.allowed_by_thresholds())

# %% [markdown]
# As the last line shows, upstream itself does without tolerance where kernels are deterministic. Everywhere else the question is what else fits below the threshold.
#
# ## The scenario
#
# The models (`verify/logprobs/tinymodels.py`) read and write the real paged pools of a stack, each kind with the pools of its family: `mha`, `mla`, `swa` (windows with slots of their own), `mamba` (states overwritten in place), `v4` (compressed entries and rings of states). They use only operations that IEEE 754 defines to the last bit, and they sum in an order that depends on positions alone. So neither batch, nor chunk, nor device changes a bit, and nothing passes from step to step except what is in the pools.
#
# A small server (`verify/logprobs/multiturn.py`) plays upstream's three scenarios on them: conversations that grow (`turns`), prefixes that are shared and then part (`branches`), long answers that become the next prompt (`history`). Between rounds **the device is emptied and overwritten with poison**, so what is a hit afterwards was on the host. Every answer says how much of it was cached and how much of that came from the host, and both must be what the scenario makes them. After every call, the tree that finds prefixes is checked against its rules (`refimpl/invariants.py`): no slot has two owners, none is lost, and along a prefix, what is on the device comes before what is only on the host.
#
# The next cell plays a selection of cells in which any two of model, layout, backend and scenario occur together, with write policies in turn (the test suite plays all). The picture shows the scenarios, one request of model `mha` a line: a prefix is cached up to its last whole page. Dark came back from the host; grey had already come back for another request of the same round.

# %%
SCENARIOS = ("turns", "branches", "history")
WAYS = {"torch": "cpu", "numba": "cpu"} | dict.fromkeys(("direct", "kernel", "staged", "auto"), "emulated")

tiny = {name: tinymodels.model(name) for name in tinymodels.MODELS}
possible = [
    (name, layout, backend)
    for name, layout, backend in product(tiny, LAYOUTS, WAYS)
    if layout in {pair[0] for pair in multiturn.pairs(tiny[name], layout, backend, WAYS[backend]).values()}
]
spread = [(i, SCENARIOS[(i + first) % 3]) for first in range(3) for i in range(len(possible))]
cells = divergence.covering([(*possible[i], scenario) for i, scenario in spread])
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

# %%
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
# The same cells by model, layout and backend. A mark is a divergence: `0` means that it was zero *and* that every probability of every token had the bits that the model computes without a cache. The letter is the scenario. A dot was not played here, a dash cannot be built. (A pool that cannot have the layout has `page_first_direct`; `torch` and `numba` run on a CPU, the others are the kernels and streams of a GPU on an emulated device.)
#
# A check that always says zero is no check, and the most common way to get there is that nothing was ever a hit, so nothing was restored. The last lines are from an engine whose lookups are switched off. What it says is right, and the check must fail all the same.


# %%
def mark(name, layout, backend):
    if (name, layout, backend) not in possible:
        return "-"
    letters = {cell[3][0] for cell in played if cell[:3] == (name, layout, backend)}
    here = [s for cell, rounds in played.items() if cell[:3] == (name, layout, backend) for r in rounds for s in r]
    worst = max((max(s.kl, abs(s.divergence)) for s in here), default=0)
    assert (worst == 0) == all(s.exact for s in here)
    return f"{worst:.2g} {''.join(sorted(letters))}" if here else "."


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
# Upstream reported divergence together with rates, since a layout is chosen for speed: `page_first_direct` with the copy engine (`direct`) is said to be the faster choice. Divergence does not decide between pairs, because all of them are exact. Rates do, and they need a GPU, so these are **the committed H200 results** (`data/results/h200/bench.json`), with the backends of this project: GB/s by the device's time for pools of real models in full size, beside the largest divergence of the small models here that have a pool of the same kind (a dot: none has).

# %%
bench = json.loads(here.committed("bench").read_text(encoding="utf-8"))
core = [row for row in bench["rows"] if row["portion"] == "core" and targets.measured(row)]
book.say(here.label(here.committed("bench"), bench))

of_family = {}  # family of pools, layout -> largest KL of the requests above
for (name, layout, *_), rounds in played.items():
    worst = max(s.kl for found in rounds for s in found)
    for family in {spec.family for spec in tiny[name].specs.values()}:
        of_family[family, layout] = max(worst, of_family.get((family, layout), 0.0))
rates = divergence.rates(core)
divergence.show_rates(rates, of_family)

# %% [markdown]
# The claim, for each pool and direction: `page_first_direct` with `direct` (*it*) against `page_first` with `kernel`, the pair that upstream chose for its staged kernel, and against the fastest pair of all. Rates are called equal when they differ by no more than the same pair does when it is measured again (`verify/bench/noise.py`). A run is a piece that is contiguous on both sides in `page_first_direct`. The upper line of a pool is a backup, the lower one a load.

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
print(f"    runs where it is: {divergence.lengths(holds)}; runs where it is not: {divergence.lengths(fails)}")
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
# **So on this device the claim is true of pools, not of models.** Where runs are long in `page_first_direct`, the copy engine is as fast as the bus, and equal to a kernel or a little ahead. For the small rows of a compressed model it is far behind. One pair for a whole stack is the wrong question; each pool may have its own.
#
# ## What would pass
#
# Now something on the host is damaged, in every prefix just before it is loaded back, and only as much as such a fault has to damage: one sign bit; one page that holds what another holds; a state that is one step late; two layers that change places. For each pool of each model you see the divergence that this causes, over requests of `history`, and upstream's verdict at the threshold of the nearest test. In the picture a mark is a fault; marks to the left of the black lines would pass.
#
# **The size of a fault says little about its effect.** One bit of a recurrent state, which every later token builds on, does more than a whole stale page of another pool. Only the rows without a fault are at zero.

# %%
found = tampering.sensitivity()
heads = ["model", "fault", "in", "KL", "largest change of a\nlog-probability", "upstream's\nthreshold"]
book.table([*heads, "upstream's\ntest", "bits"], divergence.sensitivity_rows(found))

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
# In June 2026 a change to SGLang (pull request 28434) moved its test of a Mamba hybrid to a staged kernel. The test had passed in every run; now it failed in every run. It was moved back to the copy engine, and the cause was never published. A copy cannot be wrong "by a little": either bytes are wrong, or they are right but of another time. So candidate causes can be built, one at a time, into the small Mamba hybrid that is exact without them. Each leaves a **signature**: what share of the requests is hit, how far those deviate, and how soon that fades behind the prefix.
#
# A mean can be read in two ways. Some faults are in every copy, so the mean is simply what they do. Others are races: timing decides how many requests they hit, so any mean up to that of a request that is hit can come out, but whether *every* run fails then depends on how many are hit. To be explained is the rise: the published figures after the change, less those before.
#
# The left picture has the divergence of requests that are hit (filled) and the mean over all (hollow), beside the published figures. The small model's scale need not be the real one's, so compare positions rather than values. The right picture shows how far log-probabilities are off near the prefix and further behind it. **A state that is nearly right, a step off or partly old, is forgotten soon; somebody else's state is not.**
#
# In the table, `log-prob.` is the mean change of a log-probability in the first tokens behind the prefix, and further behind it. A fault that *all* copies have needs no luck; for the others, the races, the table says how many of the samples they must hit to make the published rise.
#
# (Upstream draws its samples with the cache and judges them without it. Here it is the other way round, so `r` has the opposite sign: small deviations give the same figure, large ones a different one.)

# %%
LATER = {34184: "0.0024 to 0.0027", 29792: "0.00009"}  # another conv window in the checkpoint; another slot
study = mamba_study.study(orders=5)
variants = {}
for s in study:
    variants.setdefault(s.candidate, []).append(s)
(nothing,) = variants["none"]
published = mamba_study.BEFORE, mamba_study.AFTER, divergence.RISE
before, after, rise = (" to ".join(f"{x:.4f}" for x in pair) for pair in published)
later = "; ".join(f"issue {number} alone, {figures}" for number, figures in LATER.items())
book.say(
    f"- published: {before} before, {after} after; rise {rise}",
    f"- found later in states of another hybrid, one with bit-exact kernels: {later}",
    f"- a race must hit {divergence.LEAST_SHARE:.1%} of the samples, or it is unlikely (below {divergence.LUCK:.0%}) "
    f"that all {divergence.RUNS} runs of {divergence.SAMPLES} samples have one",
)
heads = ["candidate", "variant", "hit\nhere", "KL of\nthose", f"log-prob.,\nfirst {mamba_study.NEAR}"]
heads += [f"after\n{mamba_study.FAR}", "to be hit\nfor the rise", "scale to\nbe off by"]
rows = [
    [fill(name, 18), *("\n".join(column) for column in zip(*map(divergence.told, mine), strict=True))]
    for name, mine in variants.items()
]
book.table(heads, rows)
hit = [s for s in study if s.hit]
drawn = [(s.candidate, s.variant, *(f"{x:.2g}" for x in (s.hit, s.kl, s.kl_of_hit, s.near, s.far))) for s in study]
divergence.draw_study(study)
print("digest of what is drawn:", book.digest(drawn))

# %% [markdown]
# What follows, computed from the rows above. A *scale* of 1 means that the published figures come out as they are in the small model; otherwise the real model would have to be that many times as tolerant. It has other weights and many more layers, so a factor of a few says little. A factor of ten or more counts against a candidate.

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
most = max(mamba_study.part_hit(s, divergence.RISE)[1] for s in orders if s.hit)
chance = (1 - (1 - most) ** divergence.SAMPLES) ** divergence.RUNS
clean = sum(not s.hit for s in orders)
book.say(
    f"*Staging reused*: no request is hit in {clean} of {len(orders)} orders; where some are, they are hit hard. "
    f"At most {most:.1%} of the samples make the published mean; that all runs have one is a chance of {chance:.1%}."
)
print(f"without a fault: {nothing.hit:.0%} of the requests differ, KL {nothing.kl:g}")

# %% [markdown]
# **So the published means do not point at one cause.** They rule out little more than a wrong slot in every copy.
#
# - What can look like them are states that are nearly right: of another step, partly old, or copied before they had arrived or after they were overwritten. Races between a copy and a model that overwrites its states in place are among these, and a copy path with different timing could uncover one that was there before.
# - A staging buffer that is reused too early would more likely have shown as a test that sometimes passes and sometimes fails badly.
# - Not all of what was measured before the change must have been rounding: a fault that was found later gives nearly as much where there is no rounding.
# - A staged copy as such need not deviate at all: `mamba` with `staged` is among the exact cells above.
#
# None of this says what happened. What would have told is what a mean hides: the divergence by sample, and by distance from the prefix.
#
# ## For your own controller
#
# The engine takes any class with the interface of `refimpl.controller.Controller`, and any stack. Below are the right one and one that treats a state as loaded when its first layer is (SGLang's issue 36743; [03_hybrid_stacks](03_hybrid_stacks.ipynb) looks at its bytes), each in a few orders of the streams. A missing wait does no harm as long as nothing happens to be late, so play more than one order.

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
# For an engine of your own, three things matter more than the choice of models. Make the model deterministic, so that the threshold can be zero. Assert that tokens were cached *and* that they came from the host. And break something on purpose: a check that has never failed has shown nothing yet.
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
assert min(f.kl for f in damaged) > 100 * divergence.BIT_EXACT
assert max(holds) > max(fails, default=0) > min(fails, default=0), "it is the longest runs for which the claim holds"
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
assert chance < divergence.LUCK
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
