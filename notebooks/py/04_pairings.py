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
# A host pool has one layout and one backend. There are six layouts and three backends (and `auto`, which takes one of the three each time), every pool of a model has its own rows, and a backup need not behave like a load. **This notebook measures every allowed pairing of one model's pools against the bus, and ends in advice, computed from the figures.**
#
# In short:
#
# - What counts is the rate that lasts: a device has to move the bytes and a host has to describe them, and the slower of the two decides.
# - A layout decides how long the runs are and how many. That in turn decides which backends can be fast.
# - A difference that is no larger than noise is called that, and no advice rests on it.
#
# With a GPU, running all cells measures *this* machine first, in less than five minutes. Without one, the committed results of an H200 are shown. Cells and pictures are the same. Everything hangs on the first cell: change it, or set environment variables of the same names (`make run NB=notebooks/04_pairings.ipynb MODEL=deepseek-v4-flash`).

# %%
import os
import sys

sys.path.append("notebooks")  # found there when the notebook runs in the repository's root

MODEL = os.environ.get("MODEL") or "llama-3.1-8b"
PAGE_SIZE = int(os.environ.get("PAGE_SIZE") or 0) or None  # tokens a page; None: as its preset has it
PAYLOAD = os.environ.get("PAYLOAD") or "256MiB"  # bytes that a transfer moves, where they are measured here
LAYOUTS = os.environ.get("LAYOUTS") or "all"  # or names, separated by commas
BUDGET = int(os.environ.get("BUDGET") or 240)  # seconds to measure, on a GPU
RESULTS = os.environ.get("RESULTS") or ""  # a result file; "committed"; "": measured now, if there is a GPU

# %%
import statistics

import book
import pairings

import refimpl
from refimpl import presets
from verify import arguments
from verify.bench import noise
from verify.bench.gpu import here, recommend
from verify.bench.gpu.cases import name_of

WAYS = recommend.BACKENDS
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
rows = recommend.rows_of(bench, MODEL, PAGE_SIZE, layouts)
found = recommend.ways(bench, rows, (*WAYS, "auto"))
pools = {name: spec for name, spec in presets.model(MODEL, page_size=PAGE_SIZE).items() if spec.page_bytes}
print(f"model {name_of(MODEL, PAGE_SIZE)}: {len(rows)} rows, {len(found)} measured cells\n")
held = []
for name, spec in pools.items():
    moved = sorted({f"{row['pages']:,} × {book.size(row['page_bytes'])}" for row in rows if row["pool"] == name})
    held.append([name, spec.page_size, len(spec.owned_layers), ", ".join(moved) or "not among these results"])
book.table(["pool", "page", "layers", "pages that move in a row"], held)


def lacks(what):
    """Said in place of a picture, where these results do not have what it shows."""
    book.say(f"Not among these results: {what}. On a GPU, `make run MODEL={MODEL}` measures it.")


# %% [markdown]
# How it was measured: every cell's bytes are verified against the oracle before and after timing. Pages lie at random places. The *ceiling* is a plain memcpy of as many bytes between the same pinned memory and the device, in the same session. The rate that lasts is the payload over the longer of two medians: the device's time for the transfer, and the host's time for the call.
#
# ## Every pairing
#
# Percent of the ceiling. A star says that describing takes the host longer than moving takes the device. Hatched pairings are refused before a byte moves, for the reasons below the picture.

# %%
ACROSS = (*WAYS, "auto")
measured = {(w.pool, w.direction, w.layout, w.backend): w for w in found}


def panels(field):
    """(pool, direction) -> layouts × backends: what `field` makes of each measured cell."""
    made = {}
    for pool in pools:
        for direction in book.DIRECTIONS:
            cells = [[measured.get((pool, direction, layout, way)) for way in ACROSS] for layout in layouts]
            if any(any(line) for line in cells):
                made[pool, direction] = [[cell and field(cell) for cell in line] for line in cells]
    return made


def show(made, down, across, what, unit, **look):
    """Draw them, with what identifies the fields drawn; or say that there are none."""
    if made:
        pairings.draw_fields(made, down, across, unit, **look)
        print("digest of what is drawn:", book.digest(made))
    else:
        lacks(what)


rates = panels(lambda w: (round(100 * w.fraction.value, 1), f"{100 * w.fraction.value:.0f}" + "*" * w.host_bound))
show(rates, layouts, ACROSS, "full payloads of this model", "% of the ceiling", limits=(0, 105))
refusals = {}  # status, layout, backend -> the first pool's reason, pools
for row in rows:
    for cell in row["cells"]:
        if cell["mover"] in ACROSS and cell["status"] != "measured":
            key = cell["status"], row["layout"], cell["mover"]
            refusals.setdefault(key, (cell["reason"], {}))[1][row["pool"]] = None
alike = {}
for (status, layout, way), (reason, names) in refusals.items():
    alike.setdefault((status, layout, ", ".join(names), reason), []).append(way)
if alike:
    told = (
        f"- {status}: {layout} with {', '.join(ways)} ({names}): {reason}"
        for (status, layout, names, reason), ways in alike.items()
    )
    book.say(*told)

# %% [markdown]
# The same in a line for each backend: its worst and its best pairing, over pools, layouts and directions, and in how many the host is the slower one.

# %%
lines = []
for way in ACROSS:
    mine = [w for w in found if w.backend == way]
    if mine:
        ends = (pick(mine, key=lambda w: w.fraction.value) for pick in (min, max))
        cells = [(f"{w.fraction.value:.1%}", f"{w.pool} {w.direction}, {w.layout}") for w in ends]
        lines.append([way, *cells[0], *cells[1], f"{sum(w.host_bound for w in mine)} of {len(mine)}"])
if lines:
    book.table(["backend", "least", "in", "most", "in", "host slower"], lines)

# %% [markdown]
# ## Run length against rate
#
# A run is a piece that is contiguous on both sides. Here is every row of this model that the results hold (other page sizes and pages behind each other included), by its shortest run. `direct` needs a descriptor for each run, so it follows the run length; for `kernel` a run is some addresses to compute; `staged` copies whole pages and does not care.

# %%
every = recommend.rows_of_model(bench, MODEL, layouts)
points = {direction: {way: [] for way in WAYS} for direction in book.DIRECTIONS}
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
# **From which run length on is a copy engine the better choice?** That depends on how many runs there are, so both are varied by themselves here, in pools made for it: every run is a descriptor. Each field is the rate of `direct` over that of `kernel`; the crossover is where the ratio passes 1. With few descriptors a call costs more than it moves. With very many the queue is full and the host describes run by run.

# %%
curves = recommend.curves(bench)
counts = sorted({count for by_count in curves.values() for count in by_count})
lengths = sorted({run for by_count in curves.values() for by_run in by_count.values() for run in by_run})
fields, crossings = {}, []
for direction in book.DIRECTIONS:
    direct, kernel = (curves.get((direction, way), {}) for way in ("direct", "kernel"))
    if not direct or not kernel:
        continue
    ratios = {(n, run): direct[n][run] / kernel[n][run] for n in direct for run in direct[n]}
    lines = [[ratios.get((n, run)) for run in lengths] for n in counts]
    fields["direct / kernel,", direction] = [[r and (round(r, 3), f"×{r:.2f}") for r in line] for line in lines]
    for n in counts:
        over = recommend.crossover(direct[n], kernel[n])
        text = {0.0: "every length measured", float("inf"): f"none up to {book.size(max(direct[n]))}"}
        crossings.append([direction, n, text.get(over, f"{over / 1024:.0f} KiB")])
numbers, sizes = [f"{n:,} runs" for n in counts], [book.size(run) for run in lengths]
unit = "bytes a run; GB/s of direct over GB/s of kernel"
show(fields, numbers, sizes, "run lengths and numbers", unit, limits=(0.01, 3), log=True)
if crossings:
    book.table(["direction", "runs", "direct is never behind from"], crossings)

# %% [markdown]
# ## What a call costs the host
#
# Microseconds of the submitting thread. The device is held meanwhile, so that a call waits for nothing but room in a queue, where a transfer has more descriptors than that holds. This is time that a scheduler does not have.

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
# Pages of other sizes, with as many bytes in all: where a layout keeps a layer of a page together, larger pages make longer runs; where tokens are outermost, they do not. And pages behind each other: allocators hand out pages in any order, but a fresh pool hands out neighbours, whose runs join where the layout lets them. Such fields are the rate over that of scattered pages in the same pairing, `~` where noise does not tell them apart.

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
# A loop of matrix products runs alone and beside a loop of transfers; the slowdown is the share of its rate that is lost. It depends on the mover and its rate, hardly on the model that the bytes belong to, so every row of the results is shown. ([07_fast_paths](07_fast_paths.ipynb) says more about it.)

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
# ## What to take
#
# The rules, so that anybody can argue with them:
#
# 1. Of each pool and direction, the fastest pairing by what lasts. Whatever noise does not tell from it is *level* with it, and of those the advice is the one that takes least of others: seconds of the host for the call, plus seconds that a model which computes meanwhile loses (its slowdown, for as long as the transfer takes).
# 2. A host pool has one layout and one backend for both directions, and a model is simpler to run with the same for all pools. So the same question again for each pool both ways, and for all pools: a pair is rated by the time that the best pairs would take over the time that it takes, if every pool and direction had the same share of the best time. How much of each pool moves is a matter of your workload; if one dominates, read its line.

# %%
book.say(f"Noise: {noise.RULE}.")
advice = [sentence.rstrip(".").split(". ") for sentence in recommend.advice(bench, rows)]
if advice:
    numbered = ((f"{number}. {first}.", others) for number, (first, *others) in enumerate(advice, 1))
    book.say(*("\n".join([first, *(f"    - {other}." for other in others)]) for first, others in numbered))
else:
    lacks("this model")

# %% [markdown]
# And for each model in these results, with the pages of its preset: the one pair for all of its pools.

# %%
table = []
for model in presets.MODELS:
    ways = recommend.ways(bench, recommend.rows_of(bench, model, None, layouts))
    able = recommend.pairs(ways)
    if able:
        choice = recommend.choose(able)
        way, share = choice.taken.least
        table.append(
            [model, len({w.pool for w in ways}), choice.taken.layout, choice.taken.backend,
             f"{choice.taken.fraction.value:.0%}", f"{share:.0%}", f"{way.pool} {way.direction}",
             len(choice.level) - 1]
        )  # fmt: skip
heads = ["model", "pools", "layout", "backend", "of the\nbest pairs", "least", "in", "others\nlevel"]
if table:
    book.table(heads, table)
else:
    lacks("any model as its preset has it")

# %% [markdown]
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
# - [03_hybrid_stacks](03_hybrid_stacks.ipynb): all pools of a model at once, and who waits for whom.
# - [05_kl_multiturn](05_kl_multiturn.ipynb): what a model says after its prefix was on the host.
# - [07_fast_paths](07_fast_paths.ipynb): how the three backends move bytes, and why their curves look as they do.
# - [08_load_while_computing](08_load_while_computing.ipynb): what of a load hides behind a model's computing.
# - [02_transfers](02_transfers.ipynb): where runs come from.
# - `python -m verify.bench.gpu --help`: measure more; `make compare A=… B=…`: set two files side by side.
