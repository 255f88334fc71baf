# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Loading while computing
#
# A prompt that was seen before has its prefix in host memory. Bringing it back takes time on the bus, computing the new tokens takes time in the model, and each layer needs only its own rows. **So a step can compute one layer while the next is on the bus. At best it takes as long as the slower of the two, not as long as both.** This notebook shows when that works, and when it does not.
#
# In short:
#
# - How much of a load can hide behind the model is bounded by one ratio: the time to compute a layer for the new tokens over the time to load it for the prefix. How much of that does hide is up to the host, which submits the load first, and to what the two take from each other. Where that costs more than it saves, loading everything first is faster; the first table says by how much. A two-stage pipeline that is told the host's time predicts how long the step takes.
# - Layout and backend matter in three ways: how fast a layer loads, how long the host is busy before the model may begin, and how much the transfer slows the model down.
# - Where nothing can hide, loading a long prefix is still far cheaper than computing it again. For a short one it is not; the last part says from which length on.
#
# The answer for each model comes first. With a GPU, running all cells begins by measuring *this* machine, in about two minutes. Without one, the committed results of an H200 are shown. What is measured is fixed in `verify/bench/gpu/overlap/cases.py`: a model of your own is a `Shape` there.

# %%
import os
import sys

sys.path.append("notebooks")  # found there when the notebook runs in the repository's root

RESULTS = os.environ.get("RESULTS") or ""  # a result file; "committed"; "": measured now, if there is a GPU

# %%
import statistics
from collections import Counter
from textwrap import fill

import book
import loading

from verify.bench.gpu import here
from verify.bench.gpu.overlap import report

path, results = here.shown("overlap", RESULTS)
book.say(here.label(path, results))
ways = report.ways(results)
counts = Counter(way.row["model"] for way in ways)
models = [model for model, _ in counts.most_common()]  # the one with most cells first
served = list(report.served(results))
best = loading.fastest_of_rows(results["rows"], ways)

rows = []
for model in models:
    name, mean, worst = loading.ranking(ways, model)[0]
    gains = [gain for row, *_, gain in best if row["model"] == model]
    pays = [s for s in served if s.model == model]
    longest = [f"{s.recomputed[-1] / s.loaded[-1][1]:.1f} × at {s.loaded[-1][0]:,} + {s.new_tokens:,}" for s in pays]
    begins = [f"{loading.pays_from(s)} (+ {s.new_tokens:,})" for s in pays]
    figures = f"{mean:.2f}, {worst:.2f}", f"{max(gains):+.0%}, {min(gains):+.0%}"
    rows.append([model, name.replace(", ", "\n"), *figures, "\n".join(begins) or "-", "\n".join(longest) or "-"])
heads = ["model", "way", "over the\nfastest", "by layer saves\nmost, least", "loading pays from\n(+ new tokens)"]
heads += ["faster than to\ncompute again"]
book.table(heads, rows)
all_first = loading.all_first_is_faster(best)
print(f"\n{all_first}")

# %% [markdown]
# *Way* is the layout and backend that cost least when loaded layer by layer; *over the fastest* is how much longer their steps take than the fastest of each row, on average and at worst. *By layer saves* is what loading by layer saves, compared with loading everything first, in the row where it saves most and in the one where it saves least; below zero it is slower. [Every row](#By-layer,-or-all-first?) is further down. The last two columns compare with forgetting the prefix and computing it again. The models, and what was measured of each:

# %%
rows = []
for model in models:
    mine = [row for row in results["rows"] if row["model"] == model]
    shape, row = results["settings"]["shapes"][model], mine[0]
    a_token = row["layers"] * row["layer_bytes"] // row["prefix_tokens"]
    prefixes = ", ".join(f"{n:,}" for n in sorted({row["prefix_tokens"] for row in mine}))
    new = ", ".join(f"{n:,}" for n in sorted({row["new_tokens"] for row in mine}))
    sizes = shape["hidden"], shape["heads"], shape["intermediate"]
    rows.append([model, row["layers"], *sizes, row["page_size"], book.size(a_token), fill(prefixes, 20), new])
heads = ["model", "layers", "hidden", "query\nheads", "MLP", "tokens\na page", "a token's\nrows"]
heads += ["prefixes", "new tokens"]
book.table(heads, rows)
print()
statuses = Counter(cell["status"] for row in results["rows"] for cell in row["cells"])
print("cells:", ", ".join(f"{count} {status}" for status, count in statuses.items()))
largest = max((c for c in results["ceilings"] if c["direction"] == "load"), key=lambda c: c["payload_bytes"])
print(f"plain memcpy to the device, {book.size(largest['payload_bytes'])}: {largest['gb_per_s']:.1f} GB/s")
quartiles = [
    (high - low) / timeline["timing"]["median_s"]
    for way in ways
    for timeline in (way.cell["layerwise"], way.cell["all_first"], way.row["resident"])
    for low, high in [timeline["timing"]["quartiles_s"]]
]
print(f"between quartiles, half of all timed steps vary by no more than {statistics.median(quartiles):.1%}")

# %% [markdown]
# What is timed is a prefill in bfloat16 of some new tokens after a prefix, on one GPU, from the first call on the host until the last layer's output is there. The layers do real work: normalisation, projections, attention over prefix and new tokens by torch's `scaled_dot_product_attention`, a gated MLP. Weights are random. Left out are rotary embeddings, communication between ranks, embedding and sampling. `deepseek-v3` is one of eight ranks: heads and MLP are shared out, latent rows are not, and its MLP is as wide as the experts that one token meets. An engine's attention kernels may be faster than torch's; then there is less to hide behind.
#
# Loads go through `refimpl.controller.Controller`, as they would in a server. Before each step the prefix on the device is overwritten, and afterwards the output must equal that of a resident prefix, bit for bit. A step that did not wait for a layer would not be among these figures. There are three kinds of steps:
#
# - **resident**: the prefix is on the device already. This is what cannot be avoided.
# - **by layer**: `start_loading`, then `wait_until(layer)` before each layer.
# - **all first**: one transfer of all layers, then the model.
#
# ## One step in pictures
#
# One step, loaded in each way. The upper lane shows when layers arrive, the lower one when they are computed; a gap there is the model waiting. The bar before the first layer is not all bus: until the dotted line the host is still submitting the load.

# %%
def lanes(way, kind):
    timeline = way.cell["layerwise" if kind == "by layer" else "all_first"]
    milliseconds = {name: [1e3 * t for t in timeline[name]] for name in ("arrived_s", "begun_s", "finished_s")}
    arrived, computes = milliseconds["arrived_s"], list(zip(*list(milliseconds.values())[1:], strict=True))
    total = 1e3 * timeline["timing"]["median_s"]
    loads = list(zip([0, *arrived], arrived, strict=False))
    return loading.Lanes(f"{way.name}, {kind}: {total:.1f} ms", loads, computes, 1e3 * timeline["submitted_s"])


of_first = [row for row in results["rows"] if row["model"] == models[0]]
wanted = [row for row in of_first if (row["prefix_tokens"], row["new_tokens"]) == (8192, 512)]
step = (wanted or of_first)[0]
example = [way for way in ways if way.row is step and way.cell["backend"] != "auto"]  # it is one of the others
first = example[0]
drawn = [lanes(first, "all first"), *(lanes(way, "by layer") for way in example)]
loading.draw_steps(drawn)
print(f"{models[0]}, {step['new_tokens']:,} new tokens after {step['prefix_tokens']:,}")
print("digest of what is drawn:", book.digest([(d.title, d.loads, d.computes) for d in drawn]))

# %% [markdown]
# The host submits the whole load before the model's first layer. So `direct`, which needs a descriptor for each run, starts the model late, and so does `staged` by layer, which starts its pipeline anew for each layer. `kernel` is submitted quickly, but its threads slow the model's down: compare its lower boxes while layers are on the bus with those after. Where a page keeps its layers interleaved (`page_first`), `staged` has no choice: every layer would take the whole page across the bus, so all layers arrive together and nothing can hide.
#
# The same step in milliseconds. *load* is the load by layer alone; *host* is when the host had submitted it; *hidden* is the share of the load that the step did not wait for; *slowed* is how much longer the layers took to compute while others were loaded.

# %%
lines = []
of_step = [way for way in ways if way.row is step]
for way in of_step:
    seconds = way.loading_s, way.submitted_s, way.resident_s, way.by_layer_s, way.all_first_s
    lines.append([way.name, *(f"{1e3 * s:.1f}" for s in seconds), f"{way.hidden:.0%}", f"{way.slowdown:+.0%}"])
book.table(["layout, backend", "load", "host", "resident", "by layer", "all first", "hidden", "slowed"], lines)
print()
one_by_one = [way for way in of_step if way.cell["by_layer"]]
for what, those in {"all ways": of_step, "where layers arrive one by one": one_by_one or of_step}.items():
    ratios, shares = sorted(way.ratio for way in those), sorted(way.hidden for way in those)
    spans = f"{ratios[0]:.2f} … {ratios[-1]:.2f}; hidden {shares[0]:.0%} … {shares[-1]:.0%}"
    print(f"{what}: time to compute over time to load {spans}")

# %% [markdown]
# ## When the bus hides
#
# A layer can begin when the one before it is done *and* its own rows have arrived, whichever is later. That is the whole prediction (`pipeline.finishes`):
#
#     finished[layer] = max(finished[layer - 1], arrived[layer]) + compute[layer]
#
# If computing is the slower stage, only the load of the first layer shows. If loading is, the step runs at the pace of the bus, and only the computing of the last layer comes on top. So one number bounds what can hide: the time to compute a layer over the time to load it. For layers that are alike, from 1 on that is all but one layer of the load; below 1 it is about that share of it. How much of it does hide, the ratio does not say: the two lines under the last table set ratios of one step, loaded in several ways, beside what was hidden. The host's time to submit, and what loading and computing take from each other, decide that.

# %%
NOTHING_TO_HIDE = 2048  # tokens: shorter prefixes are on the bus for less time than the host needs to say so
long_enough = [way for way in ways if way.row["prefix_tokens"] >= NOTHING_TO_HIDE]
marks = [loading.Mark(way.cell["backend"], way.cell["by_layer"], way.ratio, 100 * way.hidden) for way in long_enough]
curve = report.predicted_curve(results["rows"][-1]["layers"])
loading.draw_hidden(marks, [(ratio, 100 * share) for ratio, share in curve])
print("digest of what is drawn:", book.digest([(m.backend, round(m.ratio, 4), round(m.hidden, 2)) for m in marks]))
print(f"prefixes of {NOTHING_TO_HIDE:,} tokens and more; of what could be hidden, half of the steps hide at least:")
for name, slow in (("bus is the slower one", True), ("model is the slower one", False)):
    side = [way for way in long_enough if way.cell["by_layer"] and (way.ratio < 1) == slow]
    if side:
        reached = [way.hidden / min(way.ratio, 1) for way in side]
        print(f"    where the {name} and layers arrive one by one: {statistics.median(reached):.0%}")

# %% [markdown]
# At 100 a step takes no longer than with a resident prefix; at 0, as long as loading first and computing then; below 0, even longer. Marks fall short of the line by what the host takes to submit the load, and by what the two stages take from each other.
#
# How far to trust single marks: a step that loads everything first should take no longer than a load and a resident step, one after the other. Where it does, something disturbed the machine, and the step by layer beside it says little.

# %%
DISTURBED = 1.1
disturbed = [way for way in ways if way.all_first_s > DISTURBED * (way.resident_s + way.loading_s)]
print(f"all first, more than {DISTURBED - 1:.0%} above load + resident: {len(disturbed)} of {len(ways)} steps")
for way in disturbed:
    print(f"    {way.row['model']}, {way.row['prefix_tokens']:,} + {way.row['new_tokens']:,}: {way.name}")
fewest = min(way.row["new_tokens"] for way in ways)
for model in models:
    mine = [way for way in ways if (way.row["model"], way.row["new_tokens"]) == (model, fewest)]
    steps = {way.row["prefix_tokens"]: way.resident_s for way in mine}
    if len(steps) > 1:
        grown = steps[max(steps)] / steps[min(steps)]
        span = f"{1e3 * steps[min(steps)]:.1f} ms after {min(steps):,} tokens, × {grown:.2f} after {max(steps):,}"
        print(f"{model}, {fewest} new tokens, prefix resident: {span}")

# %% [markdown]
# The last lines are a second caution. A step that hardly grows with its prefix is one in which the GPU waits for the host to submit kernel after kernel. Engines replay CUDA graphs to avoid that, and these steps do not: with few new tokens, a real engine has even less to hide behind.
#
# ## By layer, or all first?
#
# What loading by layer gains over one transfer of everything, each in the way that is fastest in that row:

# %%
lines = []
for row, by_layer, at_once, gain in best:
    tokens = f"{row['prefix_tokens']:,} + {row['new_tokens']:,}"
    sides = by_layer.name, f"{1e3 * by_layer.by_layer_s:.1f}", at_once.name, f"{1e3 * at_once.all_first_s:.1f}"
    lines.append([row["model"], tokens, *sides, f"{gain:+.0%}"])
book.table(["model", "tokens", "fastest by layer", "ms", "fastest all first", "ms", "gain"], lines)
most, *_, gain = max(best, key=lambda one: one[-1])
print(f"\nthe most: {gain:.0%}, {most['model']}, {most['new_tokens']:,} new tokens after {most['prefix_tokens']:,}")
print(all_first)

# %% [markdown]
# ## How good is the prediction?
#
# The prediction is given a load alone (when each layer arrived), a resident step alone (how long each layer computed) and the host's time, and asked for the step in which both happen. The second line knows less: four numbers, as if all layers were alike (`pipeline.Pace`), and nothing of the host.

# %%
errors = {
    "each layer's own times": [way.predicted_s / way.by_layer_s - 1 for way in ways],
    "four numbers": [way.pace.by_layer / way.by_layer_s - 1 for way in ways],
}
lines = []
for what, found in errors.items():
    sizes = sorted(map(abs, found))
    within = sum(size <= 0.05 for size in sizes) / len(sizes)
    lines.append(
        [what, f"{statistics.median(sizes):.1%}", f"{within:.0%}", f"{min(found):+.0%}", f"{max(found):+.0%}"]
    )
book.table(["prediction from", "median\nerror", "within\n5 %", "most too\nshort", "most too\nlong"], lines)
print("\nfarthest off, from each layer's own times:")
farthest = sorted(ways, key=lambda w: -abs(w.predicted_s / w.by_layer_s - 1))[:5]
lines = []
for way in farthest:
    tokens = f"{way.row['prefix_tokens']:,} + {way.row['new_tokens']:,}"
    both = (f"{1e3 * s:.2f}" for s in (way.predicted_s, way.by_layer_s))
    lines.append([way.row["model"], tokens, way.name, *both, f"{way.slowdown:+.0%}"])
book.table(["model", "tokens", "layout, backend", "predicted\nms", "measured\nms", "slowed"], lines)

# %% [markdown]
# What the prediction leaves out is that the two stages disturb each other. A kernel that reads host memory occupies a few multiprocessors; a copy engine takes only bandwidth of device memory. By backend, over steps that compute long enough for the host not to be the bottleneck:

# %%
lines = []
for backend in loading.BACKENDS:
    of = [way for way in long_enough if way.cell["backend"] == backend and way.row["new_tokens"] > fewest]
    of = [way for way in of if way.cell["by_layer"]]
    if of:
        slowed, host = sorted(way.slowdown for way in of), sorted(1e3 * way.submitted_s for way in of)
        spans = f"{slowed[0]:+.0%} … {slowed[-1]:+.0%}", f"{host[0]:.1f} … {host[-1]:.1f}"
        lines.append([backend, len(of), f"{statistics.median(slowed):+.0%}", *spans])
book.table(["backend", "steps", "model slowed\nmedian", "least … most", "host submits,\nms"], lines)

# %% [markdown]
# So there are two currencies: `kernel` is paid for in the model's time, `direct` and `staged` in the host's. Which is dearer depends on how many descriptors a prefix needs and on how long the model computes.
#
# ## Or compute it again?
#
# The alternative to any load is to forget the prefix and compute it again together with the new tokens. Time to the first token of both, with each prefix loaded in the way that was fastest for it. Between measured points, straight lines are assumed.

# %%
panels = [
    loading.Curves(
        f"{s.model}, {s.new_tokens} new",
        [(tokens, 1e3 * seconds) for tokens, seconds in s.loaded],
        [(tokens, 1e3 * seconds) for (tokens, _), seconds in zip(s.loaded, s.recomputed, strict=True)],
        s.break_even,
    )
    for s in served
]
if panels:
    loading.draw_first_token(panels)
else:
    book.say("Not among these results: a prefix that was both loaded and computed again.")
lines = []
for s in served:
    (tokens, seconds), again, (name, by_layer) = s.loaded[-1], s.recomputed[-1], s.best[-1]
    how = f"{name}, {'by layer' if by_layer else 'all first'}"
    figures = f"{1e3 * again:.0f}", f"{1e3 * seconds:.1f}", f"{again / seconds:.1f} ×"
    lines.append([s.model, s.new_tokens, loading.pays_from(s), f"{tokens:,}", *figures, how])
heads = ["model", "new\ntokens", "loading pays\nfrom", "longest\nprefix", "again\nms", "loaded\nms", "faster", "way"]
if lines:
    book.table(heads, lines)
print("digest of what is drawn:", book.digest([(p.title, p.loaded, p.recomputed, p.break_even) for p in panels]))

# %% [markdown]
# On these axes a constant gap is a constant factor. It grows with the prefix: loading takes time in proportion to it, computing more than that. `≤` marks a break-even at the shortest prefix that was measured; the true one may be shorter.
#
# ## What to take
#
# Over all rows of a model: how much longer a step by layer takes than the fastest of its row, for every way. A figure near 1 in the last column is a way that never costs much.

# %%
lines = []
for model in models:
    lines += [[model, name, f"{mean:.2f}", f"{worst:.2f}"] for name, mean, worst in loading.ranking(ways, model)]
book.table(["model", "layout, backend", "steps by layer over\nthe fastest: mean", "worst"], lines)

# %% [markdown]
# ## What this does not tell
#
# - What a batch does. One request is served at a time; other requests in the batch add computing to hide behind.
# - What CUDA graphs, an engine's own attention kernels, or ranks that wait for each other change.
# - What to do when many prefixes come back at once: then the bus is the slower one, and [04_pairings](04_pairings.ipynb) has the rates that can be kept up.
#
# ## What was checked
#
# Nothing here depends on what a machine reaches. These lines fail where figures are not what the text says they are.

# %%
assert set(statuses) <= {"measured", "left out"}, "every output was that of a resident prefix, bit for bit"
beaten = [way for way in ways if way.by_layer_s < 0.9 * max(way.resident_s, way.loading_s)]
# Each was measured by itself, and drivers describe copies now at one pace and now at another (07_fast_paths).
assert len(beaten) <= 0.1 * len(ways), f"steps hardly ever beat their slower stage; {len(beaten)} did"
assert all(s.break_even is None or s.loaded[0][0] <= s.break_even <= s.loaded[-1][0] for s in served)
assert all(min(mean, worst) >= 1 for model in models for _, mean, worst in loading.ranking(ways, model))
print("all of it holds")

# %% [markdown]
# ## Where to go next
#
# - [07_fast_paths](07_fast_paths.ipynb): how the backends work.
# - [04_pairings](04_pairings.ipynb): rates of the same layouts and backends without a model beside them.
# - [03_hybrid_stacks](03_hybrid_stacks.ipynb): which waits a controller needs for all of this to be correct.
# - [00_quickstart](00_quickstart.ipynb): from the beginning.
