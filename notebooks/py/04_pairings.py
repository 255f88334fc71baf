# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Pairings: which layout with which backend
#
# A host pool is made with one layout and one backend. There are six layouts, and three ways to move bytes (`auto` picks one of them for each transfer). Every pool of a model has rows of its own width, and a backup may behave differently from a load. **This notebook measures every allowed pairing for one model's pools, compares each with a plain memcpy over the same bus, and turns the figures into advice.**
#
# In short:
#
# - The rate that counts is the one that can be kept up. The device has to move the bytes, the host has to describe them to it, and the slower of the two sets the pace.
# - The layout decides how long the contiguous runs are, and so which backends can be fast.
# - Differences within measurement noise are called level, and no advice rests on them.
#
# The answer comes first, the evidence after it. With a GPU, running all cells begins by measuring *this* machine, in under five minutes. Without one, you see the committed results of an H200, in the same cells and pictures. To choose another model, change the next cell or set environment variables of the same names (`make run NB=notebooks/04_pairings.ipynb MODEL=deepseek-v4-flash`). A model that is not on the list is [further down](#A-model-that-nobody-measured), and so is [a second GPU](#A-second-GPU-of-the-same-host).

# %%
import os
import sys

sys.path.append("notebooks")  # found there when the notebook runs in the repository's root

MODEL = os.environ.get("MODEL") or "llama-3.1-8b"  # a name from refimpl/presets.py
PAGE_SIZE = int(os.environ.get("PAGE_SIZE") or 0) or None  # tokens a page; None: as its preset has it
PAYLOAD = os.environ.get("PAYLOAD") or "256MiB"  # bytes that a transfer moves, where they are measured here
LAYOUTS = os.environ.get("LAYOUTS") or "all"  # or names, separated by commas
BUDGET = int(os.environ.get("BUDGET") or 240)  # seconds to measure, on a GPU
RESULTS = os.environ.get("RESULTS") or ""  # a result file; "committed"; "": measured now, if there is a GPU

# %%
import json
import statistics

import book
import pairings
import ranks
import torch

import refimpl
from refimpl import presets
from refimpl.support import DIRECTIONS
from verify import arguments
from verify.audit import costs
from verify.bench import noise
from verify.bench.gpu import here, nearest, recommend, results
from verify.bench.gpu.cases import name_of
from verify.bench.gpu.ranks import report, sentences

WAYS = recommend.BACKENDS
ACROSS = (*WAYS, "auto")
layouts = refimpl.LAYOUTS if LAYOUTS == "all" else arguments.one_of("layout", refimpl.LAYOUTS)(LAYOUTS)
path, bench = here.shown(
    "bench",
    RESULTS,
    models=(MODEL,),
    page_size=PAGE_SIZE,
    payload=arguments.nbytes(PAYLOAD),
    layouts=layouts,
    budget_s=BUDGET,
)
book.say(here.label(path, bench))
# %%
rows = recommend.rows_of(bench, MODEL, PAGE_SIZE, layouts)
found = recommend.ways(bench, rows, ACROSS)
pools = {name: spec for name, spec in presets.model(MODEL, page_size=PAGE_SIZE).items() if spec.page_bytes}
print(f"model {name_of(MODEL, PAGE_SIZE)}: {len(rows)} rows, {len(found)} measured cells\n")
held = []
for name, spec in pools.items():
    moved = sorted({f"{row['pages']:,} × {book.size(row['page_bytes'])}" for row in rows if row["pool"] == name})
    held.append([name, spec.page_size, len(spec.owned_layers), ", ".join(moved) or "not among these results"])
book.table(["pool", "tokens\na page", "layers", "pages moved\nby a transfer"], held)


def lacks(what):
    """Said in place of a picture, where these results do not have what it shows."""
    pages = f" PAGE_SIZE={PAGE_SIZE}" if PAGE_SIZE else ""
    book.say(f"Not among these results: {what}. On a GPU, `make run MODEL={MODEL}{pages}` measures it.")


# %% [markdown]
# ## The answer
#
# One layout and one backend for all pools of the model, in both directions. Pairs that noise cannot tell apart are level; the one advised is, of those, the one that costs the host and a model beside it the least time. [How it is computed](#What-to-take) is below, with the advice for each pool and direction by itself.

# %%
fixed = [way for way in found if way.backend in WAYS]
able = recommend.pairs(fixed)
if able:
    absent = recommend.lacking(fixed, pools.values())
    choice, measured = recommend.choose(able), len({way.pool for way in fixed})
    book.say(*pairings.answer(name_of(MODEL, PAGE_SIZE), choice, measured, absent))
else:
    lacks(name_of(MODEL, PAGE_SIZE))
    book.say(f"{MODEL}: {nearest.sentence(bench, pools.values(), layouts, PAGE_SIZE)}.")

# %% [markdown]
# The same for every model in these results, with the pages of its preset. *Of the best pairs* is the rate compared with giving each pool and direction its own best pair; *least* is where this one pair costs most. A model whose *least* is low is better off with different pairs for different pools.

# %%
table = []
for model in presets.MODELS:
    ways = recommend.ways(bench, recommend.rows_of(bench, model, None, layouts))
    if able := recommend.pairs(ways):
        choice = recommend.choose(able)
        way, share = choice.taken.least
        names = len({w.pool for w in ways}), choice.taken.layout, choice.taken.backend
        figures = f"{choice.taken.fraction.value:.0%}", f"{share:.0%}", f"{way.pool} {way.direction}"
        table.append([model, *names, *figures, len(choice.level) - 1])
if table:
    heads = ["model", "pools", "layout", "backend", "of the\nbest pairs", "least", "in", "others\nlevel"]
    book.table(heads, table)
else:
    lacks("any model as its preset has it")

# %% [markdown]
# Backends are this project's. An engine has movers and rules of its own, so here is what those rules choose for this model and what the choice costs, **on the committed H200 results** whatever is shown elsewhere. *Of the bus* is the share of a plain memcpy; *time* is how many times longer the choice takes than the fastest mover that was measured for the same bytes. Each line is the worst pool and direction of that setting. `python -m verify audit --model …` prints every line, with the rule, its source, and what was measured in place of the engine's own path.

# %%
committed = json.loads(here.committed("bench").read_text(encoding="utf-8"))
table, unmeasured = pairings.engines(costs.rows(committed, results.sglang(), MODEL, PAGE_SIZE))
if table:
    heads = ["engine", "layout", "setting", "at worst in", "path", "of the\nbus", "time", "fastest measured"]
    book.table(heads, table)
if unmeasured:
    book.say(f"Not measured: {'; '.join(unmeasured)}.")

# %% [markdown]
# ## How it was measured
#
# The bytes of every cell are compared with the oracle's before and after timing. Pages lie at random places. The *ceiling* is a plain memcpy of as many bytes between the same pinned memory and the device, in the same session. The rate is the payload over the longer of two medians: the device's time for a transfer, and the host's time for the call that submits it.
#
# ## Every pairing
#
# Percent of the ceiling. A star marks pairings in which describing takes the host longer than moving takes the device. Hatched pairings are refused before a byte moves; the reasons are listed below.

# %%
measured = {(w.pool, w.direction, w.layout, w.backend): w for w in found}


def panels(field):
    """(pool, direction) -> layouts × backends: what `field` makes of each measured cell."""
    return pairings.panels(measured, pools, layouts, ACROSS, field)


def show(made, down, across, what, unit, **look):
    """Draw them, with a digest of what is drawn; or say that there are none."""
    if made:
        pairings.draw_fields(made, down, across, unit, **look)
        print("digest of what is drawn:", book.digest(made))
    else:
        lacks(what)


rates = panels(lambda w: (round(100 * w.fraction.value, 1), f"{100 * w.fraction.value:.0f}" + "*" * w.host_bound))
show(rates, layouts, ACROSS, "full payloads of this model", "% of the ceiling", limits=(0, 105))
if refused := pairings.refusals(rows, ACROSS):
    book.say(*refused)

# %% [markdown]
# The same in one line for each backend: its slowest and its fastest pairing over pools, layouts and directions, and in how many the host is what limits it.

# %%
lines = []
for way in ACROSS:
    mine = [w for w in found if w.backend == way]
    if mine:
        ends = (pick(mine, key=lambda w: w.fraction.value) for pick in (min, max))
        cells = [(f"{w.fraction.value:.1%}", f"{w.pool} {w.direction}, {w.layout}") for w in ends]
        lines.append([way, *cells[0], *cells[1], f"{sum(w.host_bound for w in mine)} of {len(mine)}"])
if lines:
    book.table(["backend", "slowest", "in", "fastest", "in", "host limits"], lines)

# %% [markdown]
# ## Run length against rate
#
# A run is a piece that is contiguous on both sides. The picture has every row of this model in the results (also those with other page sizes, or with consecutive pages), at its shortest run. `direct` needs one descriptor for each run, so its rate follows the run length; to `kernel` a run is a few addresses to compute; `staged` copies whole pages, so run length hardly matters to it.

# %%
every = recommend.rows_of_model(bench, MODEL, layouts)
points = {direction: {way: [] for way in WAYS} for direction in DIRECTIONS}
for row in every:
    for w in recommend.ways(bench, [row]):
        shortest = min(run["bytes"] for run in row["runs"])
        points[w.direction][w.backend].append((shortest, round(100 * w.fraction.value, 1)))
if every:
    book.draw_rates(points)
    print(f"{len(every)} rows; digest of what is drawn:", book.digest(points))
else:
    lacks("rows of this model")

# %% [markdown]
# **From which run length on is the copy engine (`direct`) the better choice?** That also depends on how many runs there are, so here both are varied independently, in pools made for the purpose. Each field is the rate of `direct` divided by that of `kernel`, so `direct` wins above ×1. With few runs the fixed cost of a call dominates. With very many, the device's queue is full and the rate is that at which the host describes runs.

# %%
curves = recommend.curves(bench)
counts = sorted({count for by_count in curves.values() for count in by_count})
lengths = sorted({run for by_count in curves.values() for by_run in by_count.values() for run in by_run})
fields, crossings = {}, []
for direction in DIRECTIONS:
    direct, kernel = (curves.get((direction, way), {}) for way in ("direct", "kernel"))
    if not direct or not kernel:
        continue
    both = [n for n in counts if n in direct and n in kernel]
    ratios = {(n, run): direct[n][run] / kernel[n][run] for n in both for run in direct[n] if run in kernel[n]}
    lines = [[ratios.get((n, run)) for run in lengths] for n in counts]
    fields["direct / kernel,", direction] = [[r and (round(r, 3), f"×{r:.2f}") for r in line] for line in lines]
    for n in both:
        over = recommend.crossover(direct[n], kernel[n])
        text = {0.0: "every length measured", float("inf"): f"none up to {book.size(max(direct[n]))}"}
        crossings.append([direction, n, text.get(over, f"{over / 1024:.0f} KiB")])
numbers, sizes = [f"{n:,} runs" for n in counts], [book.size(run) for run in lengths]
unit = "bytes a run; the field is GB/s of direct over GB/s of kernel"
show(fields, numbers, sizes, "run lengths and numbers", unit, limits=(0.01, 3), log=True)
if crossings:
    book.table(["direction", "runs", "direct is never behind from"], crossings)

# %% [markdown]
# ## What a call costs the host
#
# Microseconds of the thread that submits: time that a scheduler does not have. The device is held meanwhile, so a call waits for nothing except for room in the queue, if it has more descriptors than the queue holds.

# %%
calls = panels(lambda w: (w.submit_s * 1e6, f"{w.submit_s * 1e6:,.0f}"))
show(calls, layouts, ACROSS, "full payloads of this model", "µs of the host a call", limits=(20, 50000), log=True)
for way in ACROSS:
    mine = [w.submit_s * 1e6 for w in found if w.backend == way]
    if mine:
        print(f"{way}: {min(mine):,.0f} to {max(mine):,.0f} µs, median {statistics.median(mine):,.0f}")

# %% [markdown]
# ## Other pages
#
# First, pages of other sizes, with the same number of bytes in all. Where a layout keeps one layer of a page together, larger pages make longer runs; where tokens are outermost, they do not. Then consecutive pages: an allocator hands out pages in any order, but a fresh pool hands out neighbours, and their runs join where the layout lets them. Those fields are the rate with consecutive pages over the rate with scattered ones, `~` where noise cannot tell them apart.

# %%
absent = ["other page sizes of this model"]
for pool, spec in pools.items():  # those that depend on the page size
    mine = [row for row in every if row["pool"] == pool and row["scattered"]]
    lines = pairings.by_page(bench, mine, spec.page_bytes // spec.page_size)
    if len(pages := pairings.pages_of(lines)) > 1:
        absent = []
        pairings.draw_by_page(lines)
        print(f"{pool}: digest of what is drawn:", book.digest(lines))
        book.table([f"{pool}: best", "", *(f"page {page}" for page in pages)], pairings.best_by_page(lines))

together = recommend.ways(bench, recommend.rows_of(bench, MODEL, PAGE_SIZE, layouts, scattered=False), ACROSS)
consecutive = {(w.pool, w.direction, w.layout, w.backend): w for w in together}
if consecutive:
    beside = panels(lambda w: pairings.against(w, consecutive.get((w.pool, w.direction, w.layout, w.backend))))
    beside = {key: lines for key, lines in beside.items() if any(any(line) for line in lines)}
    unit = "rate with consecutive pages over rate with scattered ones"
    show(beside, layouts, ACROSS, "consecutive pages of this model", unit, limits=(0.3, 3), log=True)
else:
    absent.append("consecutive pages")
if absent:
    lacks(", ".join(absent))

# %% [markdown]
# ## What a model notices
#
# A loop of matrix products runs alone and then beside a loop of transfers; the slowdown is the share of its rate that it loses. That depends on the mover and its rate, hardly on which model the bytes belong to, so every row of the results is shown. ([07_fast_paths](07_fast_paths.ipynb) takes this further.)

# %%
marks, slower = [], {}
for row in bench["rows"]:
    for cell in row["cells"]:
        if cell["interference"] and cell["mover"] in book.BESIDE:
            one = cell["interference"]
            marks.append((cell["mover"], row["direction"], round(one["gb_per_s"], 2), round(one["slowdown"], 4)))
            slower.setdefault((cell["mover"], row["direction"]), []).append(one)
if marks:
    book.draw_slowdowns(marks)
    table = []
    for (mover, direction), ones in sorted(slower.items()):
        rate, loss = (sorted(one[name] for one in ones) for name in ("gb_per_s", "slowdown"))
        spread = f"{100 * loss[0]:.1f} to {100 * loss[-1]:.1f}"
        table.append([mover, direction, len(ones), f"{rate[0]:.1f} to {rate[-1]:.1f}", spread])
    book.table(["mover", "direction", "rows", "GB/s beside", "slowdown, %"], table)
    print("digest of what is drawn:", book.digest(marks))
else:
    lacks("transfers beside a matmul")

# %% [markdown]
# ## A second GPU of the same host
#
# So far one process moved bytes on one GPU. Under tensor parallelism each GPU has a rank, and all of them back up and load at the same time, into one host's memory. Here every rank is measured alone, and again while the others move bytes as well: all in one direction, or neighbours in opposite ones. **They were measured twice, and both times two ranks hardly slow each other down in the median, whichever backend moves the bytes: by nothing but noise the last time, and by about 5 % in a load beside a backup the time before. Single pools lose more by copy engine, but those were slow the time before as well, and most of them alone.**
#
# These results are the committed ones too, with all their models, unless the folder given as `RESULTS` has a `ranks.json`. `make bench-gpus` measures the GPUs of your host.

# %%
source, of_ranks = ranks.shown(RESULTS)
if of_ranks:
    book.say(ranks.label(source, of_ranks))
    marks = ranks.points(of_ranks)
    ranks.draw(marks)
    print("digest of what is drawn:", book.digest(marks))
    book.table(*ranks.kept(of_ranks))
    for other, of_others in ranks.others(source):
        print(f"\n{ranks.label(other, of_others)}\n")
        book.table(*ranks.kept(of_others))
else:
    book.say("Not among these results: several GPUs of one host. `make bench-gpus` measures them.")

# %% [markdown]
# A mark is one rank with one pool, layout and backend; rates do not begin at 0. The pools of a backend differ more than situations do, so the distance of two bars is not what a rank loses. The first table tells that: medians over all marks of what a rank keeps of its *own* rate alone, and then of what all ranks reach together, in percent of what plain copies of all reach together. A backend that is slow alone is so there as well. The other table is of the time before, on the same or another host, and of older code: what makes it different these results do not tell.

# %%
if of_ranks:
    told = [*sentences.of(of_ranks), ranks.tested(source)]
    book.say(*(f"- {sentence}." for sentence in told))
    if without := list(report.without_rates(of_ranks)):
        book.say(f"Cells without a rate: {len(without)}.", *(f"- {line}" for line in without))

# %% [markdown]
# Which rates are low, then, although nobody else moves bytes? *One GPU* is the committed results of a single GPU on another machine: the same pool with all its heads. Where ranks split the heads, its runs are longer than theirs; a pool that every rank holds whole (MLA, say) has the same runs. *Described* is how fast the host of that machine would have described the runs of the rank to its copy engine. The method is another one too: there each transfer is timed behind a held stream, and its rate is that of the longer of two medians ([above](#How-it-was-measured)), whereas ranks run free with two transfers in flight.

# %%
alone = ranks.slow(of_ranks, committed) if of_ranks else []
if alone:
    print(f"ranks that are alone, and below {report.LOW} % of a plain copy; GB/s\n")
    book.table(["pool", "layout", "path", "ranks", "one GPU", "described", "fastest of a rank"], alone)
elif of_ranks:
    book.say(f"No rank that is alone stays below {report.LOW} % of a plain copy.")

# %% [markdown]
# Where *described* is as low as the ranks' rates, their short runs are the reason: the host sets the pace, as [above](#Every-pairing). Where it is higher, run lengths do not explain the rates: machine and method differ, and these results do not tell which of them is the reason. The table inside `auto` is that of one machine and knows nothing of such a difference. `make calibrate` measures another table where you are.
#
# ## What to take
#
# The rules behind the advice, so that you can disagree with them:
#
# 1. For each pool and direction, find the fastest pairing. Whatever noise cannot tell from it is *level* with it. Of those, the advice is the one that takes least time from others: seconds of the host for the call, plus the seconds that a model computing meanwhile loses (its slowdown, for as long as the transfer takes).
# 2. A host pool has one pair for both directions, and one pair for all pools of a model is simpler to run. So the same question is asked again for each pool both ways, and for all pools together. A pair is rated by the time that the best pairs would take, divided by the time that it takes, with every pool and direction weighted alike. Your traffic will not weight them alike: if one pool dominates, read its line.

# %%
book.say(f"Noise: {noise.RULE}.")
advice = [sentence.rstrip(".").split(". ") for sentence in recommend.advice(bench, rows)]
if advice:
    numbered = ((f"{number}. {first}.", others) for number, (first, *others) in enumerate(advice, 1))
    book.say(*("\n".join([first, *(f"    - {other}." for other in others)]) for first, others in numbered))
else:
    lacks(name_of(MODEL, PAGE_SIZE))

# %% [markdown]
# ## A model that nobody measured
#
# Rates follow from run lengths, so they can be predicted for a model that exists only as a `config.json`. Replace the numbers below by yours (a `PoolSpec` from `refimpl/presets.py`: `mha`, `mla`, `mamba`, …; heads are those of one rank). The prediction is that of backend `auto`, from a table of times by contiguous bytes: this GPU's where `make calibrate` was run, else the committed H200's. The second table says how far to trust it: the same prediction for the pairings that were measured above. The rank of backends is what to take from it; `direct` with many short runs depends most on the host, and is the hardest to predict. The line below the first table names the measured model that comes nearest by what decides a rate: the family of a pool, then the bytes of its runs, then those of its pages, in the layout that is best for the measured one.

# %%
own = presets.mha(
    layers=36,  # num_hidden_layers
    heads=8,  # num_key_value_heads, divided by the tensor-parallel size
    head_dim=128,
    dtype=torch.bfloat16,
    page_size=64,
)
print(f"a token takes {book.size(own.page_bytes // own.page_size)} of the host, a page {book.size(own.page_bytes)}\n")
predicted = {
    layout: pairings.predicted(own, layout, arguments.nbytes(PAYLOAD)) for layout in book.allowed_layouts(own)
}
lines = []
for layout, by_direction in predicted.items():
    runs = sorted({move.run for move in book.plan_of(own, layout).moves})
    rates = [by_direction[d].get(way) for d in DIRECTIONS for way in WAYS]
    lines.append([layout, " + ".join(map(book.size, runs)), *(f"{rate:.1f}" if rate else "-" for rate in rates)])
heads = [f"{d}\n{way}" if way == "direct" else f"\n{way}" for d in DIRECTIONS for way in WAYS]
book.table(["predicted GB/s", "run", *heads], lines)
book.say(f"Such a model: {nearest.sentence(bench, [own], layouts, own.page_size)}.")

# %%
off = {way: [] for way in WAYS}
for w in found:
    if w.backend in WAYS:
        guess = pairings.predicted(pools[w.pool], w.layout, arguments.nbytes(PAYLOAD))[w.direction][w.backend]
        off[w.backend].append(guess / w.gb_per_s)
lines = [
    [way, len(ratios), f"{statistics.median(ratios):.2f}", f"{min(ratios):.2f}", f"{max(ratios):.2f}"]
    for way, ratios in off.items()
    if ratios
]
if lines:
    book.table(["predicted over measured", "pairings", "median", "least", "most"], lines)
else:
    lacks(name_of(MODEL, PAGE_SIZE))

# %% [markdown]
# ## What this does not tell
#
# - How much faster a server gets. A load competes with computing and may hide behind it: [08_load_while_computing](08_load_while_computing.ipynb).
# - How ranks slow each other down on a host whose GPUs share a switch, or where a rank's memory is on the other NUMA node. The [hosts above](#A-second-GPU-of-the-same-host) show no NUMA nodes of their GPUs.
# - What storage behind the host wants. A layout that keeps a page in one piece suits it better, whatever the bus says: [01_layouts](01_layouts.ipynb).
#
# ## What was checked
#
# Nothing here depends on what a machine reaches. These lines fail where figures are not what the text says they are.

# %%
assert all(cell["status"] in ("measured", "refused") for row in rows for cell in row["cells"]), "no cell is wrong"
for row in rows:
    for cell in row["cells"]:
        allowed = refimpl.support(pools[row["pool"]], row["layout"], cell["backend"], row["direction"], "cuda")
        assert allowed or cell["status"] == "refused", "nothing moves that the support table refuses"
for group in recommend.by_pool_and_direction(w for w in found if w.backend in WAYS).values():
    choice = recommend.choose(group)
    assert choice.taken.fraction.within_noise_of(choice.fastest.fraction), "no advice beyond noise"
    assert all(w in choice.level or w.fraction.value < choice.fastest.fraction.value for w in group)
print("all of it holds")

# %% [markdown]
# ## Where to go next
#
# - [07_fast_paths](07_fast_paths.ipynb): how the three backends move bytes, and why their curves look as they do.
# - [08_load_while_computing](08_load_while_computing.ipynb): how much of a load hides behind a model's computing.
# - [02_transfers](02_transfers.ipynb): where runs come from.
# - [03_hybrid_stacks](03_hybrid_stacks.ipynb): all pools of a model at once, and who waits for whom.
# - [05_kl_multiturn](05_kl_multiturn.ipynb): what a model says after its prefix was on the host.
# - `python -m verify.bench.gpu --help`: measure more; `make compare A=… B=…`: set two result files side by side.
