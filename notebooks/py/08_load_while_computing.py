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
# A prompt that was seen before has its prefix in host memory. Bringing it back takes the bus some time, computing the new tokens takes the model some time, and a layer needs only its own rows. **So a step can compute one layer while the next is on the bus; at best it takes as long as the slower of the two, not as long as both.** This notebook shows when that comes true, and when it does not.
#
# In short:
#
# - Whether the bus hides behind the model is a race in every layer: bytes of the prefix against work for new tokens. A pipeline of two stages predicts who wins, and how long the step takes.
# - A layout and a backend matter in three ways: how fast a layer loads, how long the host describes before the model may begin, and how much the model is held up meanwhile.
# - Where nothing can hide, loading is still far cheaper than computing a long prefix again. For a short one it is not; the last part says from which length on.
#
# With a GPU, running all cells measures *this* machine first, in about two minutes. Without one, the committed results of an H200 are shown.

# %%
import os
import sys

sys.path.append("notebooks")  # found there when the notebook runs in the repository's root

RESULTS = os.environ.get("RESULTS") or ""  # a result file; "committed"; "": measured now, if there is a GPU

# %%
import statistics
from collections import Counter

import book
import loading

from verify.bench.gpu import here
from verify.bench.gpu.overlap import report

path, results = here.shown("overlap", RESULTS)
book.say(here.label(path, results))
ways = report.ways(results)
counts = Counter(way.row["model"] for way in ways)
models = [model for model, _ in counts.most_common()]  # the one with most cells first

rows = []
for model in models:
    mine = [row for row in results["rows"] if row["model"] == model]
    shape, row = results["settings"]["shapes"][model], mine[0]
    a_token = row["layers"] * row["layer_bytes"] // row["prefix_tokens"]
    prefixes = ", ".join(f"{n:,}" for n in sorted({row["prefix_tokens"] for row in mine}))
    new = ", ".join(f"{n:,}" for n in sorted({row["new_tokens"] for row in mine}))
    sizes = shape["hidden"], shape["heads"], shape["intermediate"]
    rows.append([model, row["layers"], *sizes, row["page_size"], book.size(a_token), prefixes, new])
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
print(f"from quartile to quartile, half of all timed steps spread no more than {statistics.median(quartiles):.1%}")

# %% [markdown]
# What is timed is a prefill in bfloat16 of some new tokens after a prefix, on one GPU, from the first call on the host until the last layer's output is there. Layers are real ones: normalisation, projections, attention over prefix and new tokens by torch's `scaled_dot_product_attention`, a gated MLP. Weights are random. Left out are rotary embeddings, what ranks send each other, embedding and sampling. `deepseek-v3` is one of eight ranks: heads and MLP are shared out, latent rows are not, and its MLP is as wide as the experts that a token meets. An engine's attention kernels may be faster than torch's; then there is less to hide behind.
#
# Loads go through `refimpl.controller.Controller` in earnest. Before each step the prefix on the device is overwritten, and afterwards the output must equal that with a resident prefix, bit for bit; so a step that did not wait for a layer is not in these figures. Three kinds of steps:
#
# - **resident**: the prefix is on the device already. What cannot be avoided.
# - **by layer**: `start_loading`, then `wait_until(layer)` before each layer.
# - **all first**: one transfer of all layers, then the model.
#
# ## One step in pictures
#
# Below is one step, loaded in each way. Upper lane: when layers arrive. Lower lane: when they are computed; a gap there is the model waiting.


# %%
def lanes(way, kind):
    timeline = way.cell["layerwise" if kind == "by layer" else "all_first"]
    milliseconds = {name: [1e3 * t for t in timeline[name]] for name in ("arrived_s", "begun_s", "finished_s")}
    arrived, computes = milliseconds["arrived_s"], list(zip(*list(milliseconds.values())[1:], strict=True))
    total = 1e3 * timeline["timing"]["median_s"]
    loads = list(zip([0, *arrived], arrived, strict=False))
    return loading.Lanes(f"{way.name}, {kind}: {total:.1f} ms", loads, computes, 1e3 * timeline["submitted_s"])


def chosen(model, prefix, new):
    wanted = model, prefix, new
    return [w for w in ways if (w.row["model"], w.row["prefix_tokens"], w.row["new_tokens"]) == wanted]


EXAMPLE = (models[0], 8192, 512)
example = [way for way in chosen(*EXAMPLE) if way.cell["backend"] != "auto"]  # it is one of the others
first = example[0]
drawn = [lanes(first, "all first"), *(lanes(way, "by layer") for way in example)]
loading.draw_steps(drawn)
print(f"{EXAMPLE[0]}, {EXAMPLE[2]} new tokens after {EXAMPLE[1]:,}: resident {1e3 * first.resident_s:.1f} ms")
print("digest of what is drawn:", book.digest([(d.title, d.loads, d.computes) for d in drawn]))

# %% [markdown]
# The dotted line is the host: it submits the whole load before the model's first layer. So `direct`, which needs a descriptor for each run, starts the model late, and so does `staged` by layer, which starts its pipeline anew for each. `kernel` is described quickly, but its threads hold up the model's: the boxes below it are longer while layers are on the bus, and shorter again afterwards.
#
# ## When the bus hides
#
# A layer is done when the one before it is done *and* it has arrived, whichever is later, and its own computing has passed. That is the whole prediction (`pipeline.finishes`):
#
#     finished[layer] = max(finished[layer - 1], arrived[layer]) + compute[layer]
#
# If computing is the slower stage, only the load of the first layer shows. If loading is, the step runs at the pace of the bus, and only the computing of the last layer comes on top. So one number decides: the time to compute a layer over the time to load it.

# %%
NOTHING_TO_HIDE = 2048  # tokens: shorter prefixes are on the bus for less time than the host needs to say so
long_enough = [way for way in ways if way.row["prefix_tokens"] >= NOTHING_TO_HIDE]
marks = [loading.Mark(way.cell["backend"], way.cell["by_layer"], way.ratio, 100 * way.hidden) for way in long_enough]
curve = report.predicted_curve(results["rows"][-1]["layers"])
loading.draw_hidden(marks, [(ratio, 100 * share) for ratio, share in curve])
print("digest of what is drawn:", book.digest([(m.backend, round(m.ratio, 4), round(m.hidden, 2)) for m in marks]))
for name, slow in (("the bus is the slower one", True), ("the model is the slower one", False)):
    side = [way for way in long_enough if way.cell["by_layer"] and (way.ratio < 1) == slow]
    if side:
        reached = [way.hidden / min(way.ratio, 1) for way in side]
        print(
            f"{name}, layers arrive one by one: {statistics.median(reached):.0%} of what could be hidden is (median)"
        )

# %% [markdown]
# At the top, a step takes no longer than with a resident prefix; at zero, as long as if it had loaded first and computed then; below, even longer. The line is the prediction. Marks lie on it where loading is the slower stage by far; elsewhere they fall short by what the host takes to submit the load, and by what the two stages take from each other.
#
# The same as a table, in milliseconds. `load` is the load by layer alone; `host` is when the host had submitted it; `hidden` is the share of it that the step did not wait for; `held up` is how much longer the layers took to compute while others were loaded.

# %%
for model in models:
    lines = []
    for way in ways:
        if way.row["model"] != model:
            continue
        tokens = f"{way.row['prefix_tokens']:,} + {way.row['new_tokens']:,}"
        seconds = way.loading_s, way.submitted_s, way.resident_s, way.by_layer_s, way.all_first_s
        shares = f"{way.hidden:.0%}", f"{way.slowdown:+.0%}"
        lines.append([tokens, way.name, *(f"{1e3 * s:.1f}" for s in seconds), *shares])
    print(f"{model}:")
    heads = ["tokens", "layout, backend", "load", "host", "resident", "by layer", "all first", "hidden", "held up"]
    book.table(heads, lines)
    print()

# %% [markdown]
# A load by layer moves pieces of one layer; a load of all layers may move whole pages. Where a page keeps its layers interleaved (`page_first`), `staged` has no choice: every layer would take the whole page across the bus, so all layers arrive together and nothing can hide.

# %%
fewest = min(way.row["new_tokens"] for way in ways)
for model in models:
    mine = [way for way in ways if (way.row["model"], way.row["new_tokens"]) == (model, fewest)]
    steps = {way.row["prefix_tokens"]: way.resident_s for way in mine}
    if len(steps) > 1:
        grown = steps[max(steps)] / steps[min(steps)]
        span = f"{1e3 * steps[min(steps)]:.1f} ms after {min(steps):,} tokens, × {grown:.2f} after {max(steps):,}"
        print(f"{model}, {fewest} new tokens, prefix resident: {span}")

# %% [markdown]
# A step that hardly grows with its prefix is one in which the GPU waits for the host to submit kernel after kernel. Engines replay CUDA graphs for that, which these steps do not: with few new tokens there is then even less to hide behind.
#
# ## By layer, or all first?
#
# What layer-wise loading gains over one transfer of everything, for the way that is fastest in each row:

# %%
lines, gains = [], {}
for row in results["rows"]:
    mine = [way for way in ways if way.row is row]
    if not mine:
        continue
    by_layer, at_once = min(mine, key=lambda w: w.by_layer_s), min(mine, key=lambda w: w.all_first_s)
    gain = gains[row["model"], row["prefix_tokens"], row["new_tokens"]] = (
        1 - by_layer.by_layer_s / at_once.all_first_s
    )
    tokens = f"{row['prefix_tokens']:,} + {row['new_tokens']:,}"
    sides = by_layer.name, f"{1e3 * by_layer.by_layer_s:.1f}", at_once.name, f"{1e3 * at_once.all_first_s:.1f}"
    lines.append([row["model"], tokens, *sides, f"{gain:+.0%}"])
book.table(["model", "tokens", "fastest by layer", "ms", "fastest all first", "ms", "gain"], lines)
most = max(gains, key=gains.__getitem__)
behind = [key for key, gain in gains.items() if gain < 0]
print(f"\nthe most: {gains[most]:.0%} of {most[0]}, {most[2]} new tokens after {most[1]:,}")
print(f"rows in which all first is faster: {len(behind)} of {len(gains)}", end="")
print(f", with prefixes of {max(key[1] for key in behind):,} tokens at most" if behind else "")

# %% [markdown]
# ## How good is the prediction?
#
# It is given a load alone (when each layer arrived), a resident step alone (how long each layer computed) and the host's time, and asked for the step in which both happen. The second line knows less: four numbers, as if all layers were alike (`pipeline.Pace`), and nothing of the host.

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
book.table(["model", "tokens", "layout, backend", "predicted\nms", "measured\nms", "held up"], lines)

# %% [markdown]
# What the prediction leaves out is that the two stages disturb each other. A kernel that reads host memory takes a few multiprocessors from the model, a copy engine takes only bandwidth of device memory. By backend, of steps that compute long enough to tell (the host is no bottleneck there):

# %%
lines = []
for backend in loading.BACKENDS:
    of = [way for way in long_enough if way.cell["backend"] == backend and way.row["new_tokens"] > fewest]
    of = [way for way in of if way.cell["by_layer"]]
    if of:
        held, host = sorted(way.slowdown for way in of), sorted(1e3 * way.submitted_s for way in of)
        spans = f"{held[0]:+.0%} … {held[-1]:+.0%}", f"{host[0]:.1f} … {host[-1]:.1f}"
        lines.append([backend, len(of), f"{statistics.median(held):+.0%}", *spans])
book.table(["backend", "steps", "model held up\nmedian", "least … most", "host submits,\nms"], lines)

# %% [markdown]
# So there are two currencies: `kernel` pays in the model's time, `direct` and `staged` pay in the host's. Which is dearer depends on how many descriptors a prefix needs and on how long the model computes.
#
# ## Or compute it again?
#
# The alternative to any load is to forget the prefix and to compute it again together with the new tokens. Time to the first token of both, each prefix loaded in the way that was fastest for it; points between those measured lie on straight lines.

# %%
found = list(report.served(results))
panels = [
    loading.Curves(
        f"{s.model}, {s.new_tokens} new",
        [(tokens, 1e3 * seconds) for tokens, seconds in s.loaded],
        [(tokens, 1e3 * seconds) for (tokens, _), seconds in zip(s.loaded, s.recomputed, strict=True)],
        s.break_even,
    )
    for s in found
]
loading.draw_first_token(panels)
lines = []
for s in found:
    (tokens, seconds), again, (name, by_layer) = s.loaded[-1], s.recomputed[-1], s.best[-1]
    how = f"{name}, {'by layer' if by_layer else 'all first'}"
    shortest = s.break_even == s.loaded[0][0]
    pays = f"{'≤ ' * shortest}{s.break_even:,}" if s.break_even else "never"
    figures = f"{1e3 * again:.0f}", f"{1e3 * seconds:.1f}", f"{again / seconds:.1f} ×"
    lines.append([s.model, s.new_tokens, pays, f"{tokens:,}", *figures, how])
heads = ["model", "new\ntokens", "loading pays\nfrom", "longest\nprefix", "again\nms", "loaded\nms", "faster", "way"]
book.table(heads, lines)
print("digest of what is drawn:", book.digest([(p.title, p.loaded, p.recomputed, p.break_even) for p in panels]))

# %% [markdown]
# The gap is a factor on these axes, and it grows with the prefix: loading takes time in proportion to it, computing more than that. A break-even of the shortest prefix that was measured is marked with ≤.
#
# ## What to take
#
# Over all rows of a model: how much longer a step by layer takes than the fastest of its row, for every way. A figure near 1 in the last column is a way that never costs much.

# %%
lines = []
for model in models:
    behind_by_name = {}
    for way in (w for w in ways if w.row["model"] == model):
        best = min(w.by_layer_s for w in ways if w.row is way.row)
        behind_by_name.setdefault(way.name, []).append(way.by_layer_s / best)
    for name, behind_s in sorted(behind_by_name.items(), key=lambda item: statistics.geometric_mean(item[1])):
        lines.append([model, name, f"{statistics.geometric_mean(behind_s):.2f}", f"{max(behind_s):.2f}"])
book.table(["model", "layout, backend", "mean of steps by layer\nover the fastest", "worst"], lines)

# %% [markdown]
# ## Where to go next
#
# - [07_fast_paths](07_fast_paths.ipynb): how the backends work.
# - [04_pairings](04_pairings.ipynb): rates of the same layouts and backends without a model beside them.
# - [03_hybrid_stacks](03_hybrid_stacks.ipynb): which waits a controller needs so that all of this is correct.
# - [00_quickstart](00_quickstart.ipynb): from the beginning.
