# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Fast paths: three ways over the bus
#
# A plan says which runs of bytes move. A GPU has two kinds of hardware that can move them: a copy engine, to which the host describes every piece, and the threads of a kernel, which find their pieces themselves. **Three backends follow from that, and none of them is best everywhere.**
#
# In short:
#
# - `direct` gives the copy engine one descriptor for each run. `kernel` lets a few blocks of threads read one memory and write the other. `staged` lets the copy engine move whole pages, and a kernel brings them into shape in device memory.
# - The kernels that run in this notebook, on a CPU, are the very files that a GPU compiles. They run behind a queue that is as late and as disorderly as a device may be.
# - `staged` is a pipeline over two halves of a buffer. A missing wait in it does not crash. It gives wrong bytes, now and then.
# - The second half reads measurements of an H200, and computes every figure from that file. Three things in it surprised us: a copy engine is fast even with small pieces, a kernel that writes to the host slows a model down far more than one that reads from it, and a staging buffer of two pages is nearly enough.
# - Most targets are missed in some rows, several of them because of what a driver or a bus takes by itself. [All of them](#Targets,-and-what-misses-them) are listed, with the row that is farthest off.
#
# If you only want to know which one to use, go to [What to choose](#What-to-choose).

# %%
import json
import statistics
import sys

sys.path.append("notebooks")  # found there when the notebook runs in the repository's root

import book
import fastpaths
import timelines
import torch
import tracing
from fastpaths import percents, rows_of, spread

from kernels_cupy import auto, calibrate, emu, sm_copy, specs
from refimpl import LAYOUTS, DevicePool, HostPool, oracle, presets, slots_of
from refimpl.support import DIRECTIONS
from verify import fill
from verify.bench.gpu import here, results, targets

tiny = presets.mha(layers=2, heads=2, head_dim=4, dtype=torch.uint8, page_size=2)
WAYS = ("direct", "kernel", "staged")


def filled(spec, num_pages):
    """A device pool in which every word of four bytes names its place."""
    pool = DevicePool(spec, num_pages)
    fill.fill_device(pool)
    return pool


# %% [markdown]
# ## One page, three ways
#
# The pool is a toy: two layers, two tokens a page, K and V, rows of 8 bytes, host memory in `page_first`. Device page 0 is backed up to host page 1. On the device the page is four pieces, one for each buffer; on the host it is two, one of K and one of V, in which the layers take turns. So the longest run, contiguous on both sides, is one row.
#
# The device is an emulated one. It records what it is told to do, and from where to where bytes then go. The receipts:

# %%
page_device = filled(tiny, 2)
shown = {}
rows = []
for way in WAYS:
    noting = tracing.NotingDevice()
    host = noting.pool(tiny, "page_first", 2, way, staging_pages=2)
    receipt = host.backup(page_device, slots_of([1], 2), slots_of([0], 2))
    receipt.wait()
    staging = host._mover._buffer if way == "staged" else None
    strips = tracing.strips(host, page_device, staging)
    shown[way] = strips, tracing.pieces(strips, noting.moved)
    across = sum(m.nbytes for m in noting.moved if m.by == "copy engine" or way == "kernel")
    through = sum(m.nbytes for m in noting.moved if m.by == "kernel")
    rows.append([receipt.path, receipt.bytes, receipt.descriptors, receipt.kernels, across, through])
    digest = book.page_digest(host, [1])
    print(f"{way}: page 1 is {digest}")
print()
book.table(["path", "bytes", "descriptors", "launches", "bytes over\nthe bus", "bytes through\nthreads"], rows)
receipts = {row[0]: row[1:] for row in rows}


def draw(way):
    strips, pieces = shown[way]
    tracing.draw_way(f"{way}: page 0 of the device to page 1 of the host", page_device, 0, strips, pieces)
    print("digest of what is drawn:", book.digest(*(strip.memory for strip in strips), pieces))


# %% [markdown]
# **`direct`** turns every run into a descriptor: two addresses and a length. No thread touches a byte, and no memory is needed in between. But the host has to write every descriptor, however few bytes it moves; what that costs is measured below.

# %%
draw("direct")

# %% [markdown]
# **`kernel`** launches once, whatever the number of runs. Host memory is mapped into the device, so threads read a row on one side and store it on the other. The receipt counts the runs of the plan as descriptors, but nobody writes them down: each thread works out its own addresses. The price is that some multiprocessors are busy.

# %%
draw("kernel")

# %% [markdown]
# **`staged`** moves every byte twice, but only once over the bus. A kernel gathers the page in a buffer on the device, in exactly the order that the host keeps; then the copy engine takes each piece of the page in one descriptor. The first step stays within device memory, where bandwidth is plentiful. The price is the buffer.

# %%
draw("staged")

# %% [markdown]
# ## The same kernels as on a GPU
#
# `copy_runs.cu` is the only kernel that moves bytes. `kernel` launches it across the bus, `staged` within the device. These are the lines that do the work, read from the file: a unit is a piece of one run, and its number is all that a group of threads needs to find both addresses.

# %%
text = (specs.SOURCES / "copy_runs.cu").read_text(encoding="utf-8")
begin = "template <int BYTES> __global__"
print(begin + text.partition(begin)[2].rstrip())
print("\nthe file that NVRTC compiles for a GPU:", book.digest(specs.source(specs.KERNELS[0])))
print("compiled here by:", " ".join(emu.COMPILE))

# %% [markdown]
# Only one header mentions hardware (`primitives.cuh`: streaming loads and stores, an atomic). On a CPU a stand-in takes its place, threads are fibres, and g++ is the compiler.
#
# **A transfer only submits.** When the call returns, nothing has moved, and the source must stay as it is until the stream has passed. Here the host memory of each backend is compared with the oracle's before the call, after it, and after `receipt.wait()`. The second table is what the device was told.

# %%
spec = presets.mha(layers=3, heads=2, head_dim=8, dtype=torch.bfloat16, page_size=4)
device = filled(spec, 6)
at = slots_of([4, 1, 5], 4), slots_of([0, 3, 2], 4)
expected = HostPool(spec, "page_first", 6)
oracle.backup(expected, device, *at)

rows, orders = [], {}
for way in WAYS:
    noting = tracing.NotingDevice(seed=1)
    host = noting.pool(spec, "page_first", 6, way, staging_pages=4)
    noting.told.clear()
    before = book.differing(host, expected)
    receipt = host.backup(device, *at)
    returned, passed = book.differing(host, expected), receipt.event.query()
    receipt.wait()
    rows.append([way, before, returned, book.differing(host, expected), "yes" if passed else "no"])
    orders[way] = "\n".join(f"{one.what} ({one.detail})" for one in noting.told if one.detail)
heads = ["bytes that differ:\nbefore", "\nwhen the call returns", "\nafter wait()", "event passed\non return"]
book.table(["backend", *heads], rows)
lateness = {row[0]: row[1:] for row in rows}
print()
book.table(["backend", "told to the device, in this order"], list(orders.items()))

# %% [markdown]
# ## The pipeline of `staged`
#
# The buffer has two halves. While the copy engine works on one, the kernel fills (or empties) the other. Below are a backup and a load of six pages with halves of two pages, so three chunks: boxes are what was submitted, arrows are events that one stream recorded and the other waits for. (The length of a box means nothing; each begins as soon as its stream and its events allow.)

# %%
device = filled(tiny, 6)
order = slots_of([5, 0, 3, 1, 4, 2], 2), slots_of([2, 4, 1, 5, 0, 3], 2)
lanes = {}
for direction in ("backup", "load"):
    noting = tracing.NotingDevice()
    host = noting.pool(tiny, "page_first", 6, "staged", staging_pages=4)
    noting.told.clear()
    receipt = host.prepare(device, *order, direction).run()
    lanes[f"{direction}: {receipt.descriptors} descriptors, {receipt.kernels} launches"] = list(noting.told)
    receipt.wait()
timelines.draw_timelines(lanes)
for title, submitted in lanes.items():
    boxes, arrows = timelines.timeline(submitted)
    joins = [f"{a.source.what} {a.source.number} → {a.to.what} {a.to.number}" for a in arrows]
    print(f"{title}\n    {', '.join(joins)}")

# %% [markdown]
# The thin arrows say that bytes have arrived where the next step reads them. The thick ones work in the other direction: **a half may be used again only after the event of its last use.** Chunk 2 goes into the half of chunk 0. Without the thick arrow, nothing keeps its gather from overwriting what the copy of chunk 0 has yet to read; in a load, the copy of chunk 2 would overwrite what the kernel has yet to scatter.
#
# Such a fault is quiet, because most of the time the device happens to run things in a harmless order. So the wait is removed here, by a list that forgets when a half was last used, and the same transfer runs in many orders, each of them one that streams and events allow.


# %%
class Forgetful(list):
    """Events of the halves that stay what they were at first: passed long ago."""

    def __setitem__(self, half, event):
        pass


def wrong_orders(direction, forget, seeds):
    """In how many orders the bytes differ from the oracle's."""
    wrong = 0
    for seed in range(seeds):
        source, target = HostPool(tiny, "page_first", 6), filled(tiny, 6)
        noting = tracing.NotingDevice(seed)
        host = noting.pool(tiny, "page_first", 6, "staged", staging_pages=4)
        fill.fill_host(source, 0)
        fill.fill_host(host, 0)
        if direction == "load":
            for name, layer in book.layers(target):
                target.buffer(name, layer).zero_()
        if forget:
            host._mover._free = Forgetful(host._mover._free)
        host.prepare(target, *order, direction).run().wait()
        if direction == "backup":
            oracle.backup(source, target, *order)
            wrong += book.differing(host, source) > 0
        else:
            proper = DevicePool(tiny, 6)
            oracle.load(source, proper, *order)
            pairs = [(proper.buffer(*which), target.buffer(*which)) for which in book.layers(target)]
            wrong += not all(torch.equal(a, b) for a, b in pairs)
    return wrong


SEEDS = 200
found = {}
for direction in ("backup", "load"):
    for forget in (False, True):
        found[direction, forget] = wrong_orders(direction, forget, SEEDS)
        how = "without the wait" if forget else "as it is"
        print(f"{direction}, {how}: wrong in {found[direction, forget]} of {SEEDS} orders")

# %% [markdown]
# ## What an H200 makes of it
#
# From here on, figures come from `data/results/h200/bench.json`, written by `python -m verify.bench.gpu`. Bytes are verified before and after timing. Rates are device times of transfers queued behind a held stream, with the payload counted once. The *ceiling* is a plain memcpy: the smallest one measured that has as many bytes, or else the largest. A portion is a set of rows measured in one session, or a few. Ceilings differ a little between sessions (GB/s in the table), even on machines with the same description, so **a percentage here is of the highest ceiling of them all**: a slow memcpy flatters nobody. The file itself has percentages of the same session.

# %%
committed = here.committed("bench")
as_written = json.loads(committed.read_text(encoding="utf-8"))
bench, highest = fastpaths.against_the_highest(as_written), fastpaths.highest_ceilings(as_written)
statuses = [cell["status"] for row in bench["rows"] for cell in row["cells"]]
print(*fastpaths.machines(bench), "", sep="\n")
fastpaths.show_sessions(bench)
print("\ncells:", ", ".join(f"{statuses.count(s):,} {s}" for s in sorted(set(statuses))))

# %% [markdown]
# Every pool of the models below, in every layout that it may have, with full payloads. A row with runs of several lengths stands at its shortest. **`direct` falls with the run; `kernel` and `staged` do not.** The last column of the table is the time from one descriptor of `direct` to the next: for short runs it has little to do with their bytes. The next part tells whose time that is. Where a mark of `staged` is missing, the layout keeps the layers of a page apart, so there is no piece to copy.

# %%
core = rows_of(bench, "core")
points = {
    direction: {
        way: [
            (targets.shortest_run(row), round(percents(row)[way], 1))
            for row in core
            if row["direction"] == direction and way in percents(row)
        ]
        for way in WAYS
    }
    for direction in DIRECTIONS
}
book.draw_rates(points)
each = {}  # bytes a run -> nanoseconds from descriptor to descriptor
for row in core:
    for cell in targets.measured(row):
        if cell["mover"] == "direct" and len(row["runs"]) == 1:
            each.setdefault(targets.shortest_run(row), []).append(fastpaths.per_descriptor(cell, "timing"))
rows = []
for run in sorted({targets.shortest_run(row) for row in core}):
    of_run = {(d, w): [p for r, p in points[d][w] if r == run] for d in points for w in WAYS}
    texts = [spread(values) if values else "-" for values in of_run.values()]
    rows.append([book.size(run), *texts, f"{statistics.median(each[run]):,.0f}" if run in each else "-"])
heads = [f"{d}\n{way}" if way == "direct" else f"\n{way}" for d in points for way in WAYS]
book.table(["run", *heads, "direct: ns a\ndescriptor, median"], rows)
print("digest of what is drawn:", book.digest(points))

# %% [markdown]
# The same by model: the best backend for each pool and layout, and the percentage of the ceiling that it reaches. **With the right backend, no layout is slow.** What a layout decides is which backend that is, and so whether the price is a buffer, multiprocessors, or time of the host.

# %%
for direction in points:
    body = {}
    for row in core:
        found_percents = {way: percent for way, percent in percents(row).items() if way in WAYS}
        if row["direction"] == direction and found_percents:
            percent, best = max((p, way) for way, p in found_percents.items())
            body.setdefault((row["case"], row["pool"]), {})[row["layout"]] = f"{best} {percent:.0f}"
    rows = [[*who, *(by_layout.get(n, "-") for n in LAYOUTS)] for who, by_layout in body.items()]
    book.table([direction, "", *book.HEADINGS.values()], rows)
    print()

# %% [markdown]
# ## The engine is fast, describing is slow
#
# **A copy engine is not slow with small pieces. The host that describes them is.** In portion `descriptors`, every run is a descriptor of its own, and a series of up to ten transfers is submitted while the device is held.
#
# - A filled mark says that all of it was submitted before the device began, so the rate is the engine's own.
# - An open mark says that the queue was full before the whole series was in it: from there on, a descriptor is taken only when another one is done. The thin line at a mark reaches from the slowest transfer of the series to the fastest, since the first ones still find room.
# - A dashed line is how fast a host can describe runs of this length, whatever the engine does.

# %%
descriptor_rows = rows_of(bench, "descriptors")
series, filled = fastpaths.series_of(descriptor_rows), fastpaths.room(descriptor_rows)
describe = fastpaths.described_by(descriptor_rows)
describe_ns = statistics.median(describe)
bus = max(rate for direction in series for rate in highest[direction].values())
described = {run: run / describe_ns for run in series["backup"]}
fits = max(low for low, _ in filled), min(high for _, high in filled)
fastpaths.draw_descriptors(series, described, bus, fits)

rows, engine = [], {}
for run in described:
    for direction, by_run in series.items():
        own, most = [s for s in by_run[run] if s[-1]][-1], by_run[run][-1]
        engine[direction, run] = own[2], most[2], most[-1]
        texts = [f"{own[2]:.1f}", f"{run / own[2]:,.0f}", f"{described[run]:.1f}"]
        last = [most[0], f"{most[2]:.1f}", "yes" if most[-1] else "no"]
        rows.append([book.size(run), direction, own[0], *texts, *last])
heads = ["all submitted:\ndescriptors", "\nGB/s", "\nns each", "host describes,\nGB/s"]
book.table(["run", "direction", *heads, "the most:\ndescriptors", "\nGB/s", "\nall submitted"], rows)
print(f"\na descriptor takes the host {describe_ns:.0f} ns (median; {spread(describe)} by cell)")
print(f"the queue had room for {fits[0]:,} descriptors and not for {fits[1]:,}; series that filled it: {len(filled)}")
print(f"runs of which a host describes {bus:.1f} GB/s: {bus * describe_ns / 2**10:.0f} KiB and more")
print("digest of what is drawn:", book.digest(series))

# %% [markdown]
# So the engine takes runs of 2 KiB at nearly the rate of the bus, and the host needs many times as long to write a descriptor as the engine needs to carry it out (compare *ns each* with the line below the table). As long as the queue has room, nobody notices: what was described ahead of time runs at the engine's pace. A transfer with more descriptors than the queue holds, or transfers that go on and on, run at the host's. Often they are slower still, since a call that waits for room in the queue is not free either.
#
# **Of what `direct` needs, nearly all is the driver's.** In other transfers of 256 MiB every call that a backend makes of CUDA, CuPy or torch was timed by itself; *ours* is what is left of the same submit, so what Python takes to work out descriptors, launches and events. `kernel` and `staged` make few calls, and Python is about half of them. It is taken away transfer by transfer, since one and the same call takes twice as long at some times as at others. So does what is ours: the host, which others use as well, is then half as fast.

# %%
own_times = fastpaths.own_times(core)
rows = []
for way in WAYS:
    submits, ours = ([1e6 * seconds for seconds in side] for side in zip(*own_times[way], strict=True))
    shares = [100 * mine / whole for whole, mine in zip(submits, ours, strict=True)]
    figures = [statistics.median(submits), min(ours), statistics.median(ours), max(ours), statistics.median(shares)]
    rows.append([way, len(ours), *(f"{figure:,.0f}" for figure in figures)])
book.table(
    ["backend", "cells", "submit, µs:\nmedian", "ours, µs:\nleast", "\nmedian", "\nmost", "ours, %:\nmedian"], rows
)

# %% [markdown]
# For a server this means three things. The time of `direct` is that of the thread which submits it, and that thread has better things to do. A layout that puts more bytes in a run, or `staged`, which needs a descriptor for each piece of a page, saves host time in proportion. And whoever benchmarks a copy engine with a handful of descriptors learns nothing about a hundred thousand.
#
# ## How many blocks
#
# `kernel` may use any number of blocks, and every block costs a model beside it something. A bus is slow compared with device memory, so a few blocks with enough loads in flight fill it. How few depends on the run: the shorter, the more addresses to compute for the same bytes. Marks are medians over rows, thin lines reach from the least to the most. If nothing else is asked for, the backend takes as many blocks as the last column says (`kernels_cupy/sm_copy.py`).

# %%
blocks = fastpaths.by_blocks(rows_of(bench, "blocks"))
fastpaths.draw_blocks(blocks)
by_itself = {fastpaths.class_of(least): count for least, count in sm_copy.BLOCKS}
rows = []
for direction, classes in blocks.items():
    for name, marks in classes.items():
        medians = {count: statistics.median(values) for count, values in sorted(marks.items())}
        most = max(medians.values())
        near = next(count for count, median in medians.items() if median >= most - 1)
        rows.append([direction, name, len(marks[near]), f"{most:.0f}", near, by_itself[name]])
heads = ["rows", "most, % of\nthe ceiling", "blocks within\na point of it", "blocks that it\ntakes by itself"]
book.table(["", "", *heads], rows)
print("digest of what is drawn:", book.digest(blocks))
at_best = {direction: fastpaths.at_best(rows_of(bench, "blocks"), direction) for direction in DIRECTIONS}
print()
rows = [[way, *(f"{spread(at_best[way][whole], '{:.1f}')}" for whole in (True, False))] for way in DIRECTIONS]
book.table(["most of any number of blocks, %", "runs are whole\nlines of 128 B", "they are not"], rows)

# %% [markdown]
# The second table is about what no number of blocks can change: threads that store to the host end below the plain memcpy, and where the ends of runs do not fill a line of 128 B, another percent is lost.

# %% [markdown]
# ## What a model notices
#
# A loop of matrix products runs alone and then beside a loop of transfers; the slowdown is the share of its rate that it loses. **Stores that saturate the bus slow the matmul down far more than the multiprocessors that they occupy would explain. Loads at the same rate slow it down much less, and a copy engine hardly at all.** A backup by `kernel` is stores to host memory; a load is reads of it.

# %%
marks, figures = [], {}
for row in rows_of(bench, "matmul"):
    sms = bench["sessions"][row["session"]]["provenance"]["gpu"]["sms"]
    for cell in row["cells"]:
        if cell["status"] == "measured" and cell["mover"] in book.BESIDE:
            rate, slowdown = (cell["interference"][name] for name in ("gb_per_s", "slowdown"))
            marks.append((cell["mover"], row["direction"], round(rate, 2), round(slowdown, 4)))
            figure = cell["percent_of_ceiling"], rate, slowdown, (cell["blocks"] or 0) / sms
            figures.setdefault((cell["mover"], row["direction"]), []).append(figure)
book.draw_slowdowns(marks)
rows = []
for (mover, direction), group in figures.items():
    alone, rates, slowdowns, (share, *_) = zip(*group, strict=True)
    texts = [spread(alone), spread(rates), spread([100 * s for s in slowdowns], "{:.1f}")]
    rows.append([mover, direction, *texts, f"{share:.1%}" if share else "-"])
    rows[-1].append(spread([s / share for s in slowdowns]) if share else "-")
heads = ["alone, %\nof ceiling", "beside,\nGB/s", "slowdown, %", "blocks, of all\nmultiprocessors", "times\nthat"]
book.table(["mover", "direction", *heads], sorted(rows))
print("digest of what is drawn:", book.digest(marks))

# %%
SATURATED = 90  # percent of the ceiling
stores, calm, reads, engines = [], [], [], []
for (_, direction), group in figures.items():
    for alone, _, slowdown, share in group:
        kind = engines if not share else reads if direction == "load" else stores if alone >= SATURATED else calm
        kind.append(100 * slowdown)
for text, kind in {
    f"kernel, backups that reach {SATURATED} % of the ceiling alone": stores,
    "kernel, backups that do not": calm,
    "kernel, loads": reads,
    "direct and staged": engines,
}.items():
    print(f"{text}: {spread(kind, '{:.1f}')} % slower, median {statistics.median(kind):.1f}")

# %% [markdown]
# Any kernel costs a few percent, even a single block: more than its share of multiprocessors, and about the same at every rate below the limit. The rest comes with stores at the limit. So beside a model, a kernel should be kept below what the bus can take, above all in backups: fewer blocks cost some rate and save most of the slowdown. Why stores do this, the file does not say. They occupy no more multiprocessors than reads do, so something on the way to memory has to be shared.
#
# ## What memory buys
#
# `staged` with buffers of many sizes, both halves counted. **Two pages, one for each half, are nearly enough**, and beyond a few dozen MiB more memory brings nothing. (The axis of rates does not begin at 0.) Where a mark lies far below both of its neighbours, more and less memory both do better, so memory is not the cause; such marks are listed.

# %%
capacity = {}
for row in rows_of(bench, "capacity"):
    line = capacity.setdefault(row["direction"], {}).setdefault(f"{row['case']} {row['pool']}, {row['layout']}", [])
    for cell in row["cells"]:
        if cell["status"] == "measured":
            line.append((cell["staging_pages"] * row["page_bytes"] / 2**20, round(cell["percent_of_ceiling"], 1)))
fastpaths.draw_capacity(capacity)
rows = []
for direction, lines in capacity.items():
    for name, line in lines.items():
        most = max(percent for _, percent in line)
        needed = min(mib for mib, percent in line if percent >= most - 1)
        rows.append([direction, name, *(f"{x:.1f}" for x in (*min(line), most, needed))])
book.table(["staging", "", "two pages,\nMiB", "their %", "best %", "MiB within\na point of it"], rows)
print("far below both neighbours:", "; ".join(fastpaths.dips(capacity, by=3)) or "none")
print("digest of what is drawn:", book.digest(capacity))

# %% [markdown]
# ## Layer by layer
#
# A model computes its first layer while the next ones are on their way, so a load is often a transfer for each layer (portion `sglang`). **That costs a few microseconds a layer, whatever the layer is**: from the last bytes of one transfer to the first bytes of the next the bus is idle. So it is short layers that lose by it. The time lost is that of all layers one by one less that of all at once, for each layer but the first.

# %%
loads = fastpaths.by_layer(rows_of(bench, "sglang"))
rows = []
for one in loads:
    lost = spread([seconds * 1e6 for seconds in one.lost_s], "{:.1f}")
    places = one.case, len(one.lost_s), one.layers, f"{one.layer_bytes / 2**20:.1f}"
    rows.append([one.backend, *places, spread(one.at_once), spread(one.by_layer), lost])
heads = ["rows", "layers", "MiB a\nlayer", "at once, %\nof ceiling", "by layer,\n%", "lost, µs\na layer"]
book.table(["backend", "", *heads], rows)
one_page = auto.table("emulated")["backends"]["kernel"]["load"]["device"]["call_s"]
print()
lost = [seconds for one in loads if one.backend == "kernel" for seconds in one.lost_s]
book.say(
    f"A load of a single page of {calibrate.PROBES['kernel'].sizes[0]} B by `kernel` behind another one takes the "
    f"device {one_page * 1e6:.1f} µs (`kernels_cupy/h200.json`): a launch, and the way over the bus and back. "
    f"That is {one_page / max(lost):.0%} to {one_page / min(lost):.0%} of what a layer loses by `kernel`."
)

# %% [markdown]
# The rest must lie in the end of a transfer, which that load does not have: the last threads are still reading, and the others have nothing left to ask for.
#
# ## What `auto` makes of it
#
# `auto` predicts a time for each backend and takes the fastest. Its table has what a call and what every piece take, by the bytes of a piece, of the device and of the host. **Whichever of the two is longer counts**: that is what one transfer more takes in a row of them. `make calibrate` measures such a table, and the table below judges by the same rule: the rate of `auto` over that of the best backend in the same row, as it was measured, and as the committed table (`kernels_cupy/h200.json`) would have chosen.

# %%
SETS = {"core, sglang": targets.FULL, "sizes": ("sizes",), "variants": ("variants",)}
near = f"within {1 - targets.AUTO_NEAR:.0%}"
judged = {label: list(fastpaths.judged(rows_of(bench, *names))) for label, names in SETS.items()}
rows = []
for label, ones in judged.items():
    texts = []
    for ratios in ([one.ratio for one in ones], [one.replayed for one in ones]):
        share = sum(ratio >= targets.AUTO_NEAR for ratio in ratios) / len(ratios)
        texts += [f"{share:.1%}", f"{statistics.median(ratios):.3f}", f"{min(ratios):.3f}"]
    rows.append([label, len(ones), *texts])
heads = [f"as measured:\n{near}", "\nmedian", "\nleast", f"committed table:\n{near}", "\nmedian", "\nleast"]
book.table(["portion", "rows", *heads], rows)

least = min((one for ones in judged.values() for one in ones), key=lambda one: one.ratio)
choosing = statistics.median(one.decides_s for one in judged["sizes"] if one.decides_s is not None)
hosts = {name: fastpaths.described_by(rows_of(bench, name)) for name in {row["portion"] for row in bench["rows"]}}
medians = [f"{name} {statistics.median(taken):.0f}" for name, taken in sorted(hosts.items()) if taken]
book.say(
    f"- farthest behind: {targets.name(least.row)}, {book.size(least.row['payload_bytes'])}: "
    f"auto took {least.chosen}, which lasted at {least.rate:.1f} GB/s; "
    f"{least.best} {'by itself ' * (least.best == least.chosen)}lasted at {least.best_rate:.1f}",
    f"- choosing adds {choosing * 1e6:.0f} µs to the call of a prepared transfer (median over rows of sizes)",
    f"- ns of the host for a descriptor, median by portion: {', '.join(medians)}",
)

# %% [markdown]
# The left half is all that a call by `auto` takes, with a table of the same machine. A payload of a MB moves in the time of a call, so what choosing adds to that shows in portion `sizes`. The right half is the choice alone, with one table for all rows. Such a table knows the host that it was made on, while hosts differ, as the last line says: where `direct` needs thousands of descriptors, a slower host tips the scale. That is why `make calibrate` on your own machine should come before `auto`.
#
# ## The same bytes by other strategies
#
# `verify/bench/gpu/variants.py` moves the same bytes as other engines do: two blocks with words of 8 bytes (upstream's older kernel), one staging buffer without overlap of relayout and copy, and one call to the driver for every run. Each figure is the ratio to our best backend in the same row, so **what a strategy leaves out can be read off**: wide words and enough blocks, overlap, submission in batches. A `!` says that the device had to wait for the host, whose calls come from Python here.

# %%
rows, versus = [], {}
for row in rows_of(bench, "variants"):
    best, ratios = targets.best(row), {}
    for cell in row["cells"]:
        if cell["mover"] not in targets.BACKENDS:
            ratio = cell["gb_per_s"] / best["gb_per_s"] if cell["status"] == "measured" else None
            ratios[cell["mover"]] = "-" if ratio is None else f"{ratio:.2f}" + "!" * (cell["held"] is False)
            if ratio is not None:
                versus.setdefault(cell["mover"], []).append(ratio)
    which = row["case"], row["layout"], row["direction"], book.size(targets.shortest_run(row))
    rows.append([*which, f"{best['mover']} {best['gb_per_s']:.1f}", *ratios.values()])
heads = {"2 blocks of ": "2 blocks of\n", "one staging ": "one staging\n", "memcpy ": "memcpy\n"}
heads = [next(name.replace(*pair) for pair in heads.items() if pair[0] in name) for name in ratios]
book.table(["model", "layout", "direction", "run", "best, GB/s", *heads], rows)
print()
for name, values in versus.items():
    print(f"{name}: {spread(values, '{:.2f}')} of our best, median {statistics.median(values):.2f}")

# %% [markdown]
# ## Targets, and what misses them
#
# What we set out to reach is in `verify/bench/gpu/targets.py`. Missed targets come first, each with the number of rows that meet it and the row that is farthest off, against the ceilings of that row's own session.

# %%
verdicts = targets.verdicts(as_written, results.sglang(committed))
for line in sorted(verdicts):
    text, _, where = line.removesuffix(")").partition(" (")
    print(f"{text}\n        {where}")
met = sum(line.startswith("met") for line in verdicts)
print(f"\n{met} of {len(verdicts)} targets are met in every row")

checks = list(targets.checks(as_written, results.sglang(committed)))
rated = [check for check in checks if check.target.startswith("rate of")]
uneven = {targets.name(row) for row in as_written["rows"] if not fastpaths.whole_lines(row)}
slow = [check for check in rated if not check.met]
launched = [
    cell
    for row in rows_of(bench, *targets.FULL)
    for cell in targets.measured(row)
    if cell["mover"] == "kernel" and cell["kernels"] == 1
]
idle = [single["launch"] for single in map(fastpaths.single_calls, bench["sessions"]) if single]
whole, own = [1e6 * c["submit"]["median_s"] for c in launched], [1e6 * c["own_s"] for c in launched]
versus_sglang = {how: [c for c in checks if "SGLang" in c.target and how in c.target] for how in ("all", "by layer")}
behind = {how: [check for check in found if not check.met] for how, found in versus_sglang.items()}
points = {
    name: spread([-100 * check.margin for check in found], "{:.1f}")
    for name, found in ({"slow": slow} | behind).items()
}
counts = {how: f"{len(behind[how])} of {len(versus_sglang[how])} figures are behind" for how in behind}

# %% [markdown]
# Where they are missed, this is why, as far as the file tells:

# %%
book.say(
    f"- **rates**: {len(slow)} of {len(rated)} figures are too low, all of them in pools whose runs are not whole "
    f"lines of 128 B ([above](#How-many-blocks)); they lack {points['slow']} points",
    f"- **submits**: a launch that does nothing takes the host {spread([1e6 * s for s in idle], '{:.0f}')} µs, by "
    "session, so hosts differ, or what else they are busy with. A prepared `kernel` with one launch is the same work "
    f"in every row; it takes {spread(whole)} µs (median {statistics.median(whole):.0f}), of which {spread(own)} µs "
    f"(median {statistics.median(own):.0f}) are ours. Of `direct` and `staged` the driver takes most "
    "([above](#The-engine-is-fast,-describing-is-slow))",
    f"- **against SGLang, all layers**: {counts['all']}, by {points['all']} points, all of them backups to "
    "`layer_first`, which both make by threads that store to the host",
    f"- **against SGLang, by layer**: {counts['by layer']}, by {points['by layer']} points: every launch leaves the "
    "bus idle for a while ([above](#Layer-by-layer))",
    "- **slowdown of a matmul by kernel**: stores to the host, not the blocks that make them "
    "([above](#What-a-model-notices))",
)

# %% [markdown]
# ## What to choose
#
# Advice, and under each sentence what it rests on, computed from the file. For one model, with its own pools and page size, [04_pairings](04_pairings.ipynb) goes into detail.

# %%
rows = rows_of(bench, *targets.FULL)
LONG, SHORT, PIECE = 64 << 10, 4 << 10, 512 << 10


def span(way, wanted):
    """Percents of a backend over the rows that are wanted."""
    return [percents(row)[way] for row in rows if way in percents(row) and wanted(row)]


evidence = {
    "long": span("direct", lambda row: targets.shortest_run(row) >= LONG),
    "short": span("direct", lambda row: targets.shortest_run(row) <= SHORT),
    "pieces": span("staged", lambda row: row["piece_bytes"] >= PIECE),
    "kernel": span("kernel", lambda row: targets.shortest_run(row) >= 256),
}
said = {key: f"{spread(values)} % of the ceiling in {len(values)} rows" for key, values in evidence.items()}
of_auto = {}
for label in ("core, sglang", "sizes"):
    ratios = [one.ratio for one in judged[label]]
    megabytes = sorted(one.row["payload_bytes"] / 1e6 for one in judged[label])
    near_share = sum(ratio >= targets.AUTO_NEAR for ratio in ratios) / len(ratios)
    of_auto[label] = (
        f"payloads of {megabytes[0]:.1f} to {megabytes[-1]:.1f} MB ({label}): {near} of the best backend in "
        f"{near_share:.1%} of {len(ratios)} rows, {min(ratios):.2f} of it at the least"
    )

advice = {
    "Where all runs are long, take `direct`. It needs neither memory nor multiprocessors.": (
        f"runs of {book.size(LONG)} and more: {said['long']}"
    ),
    "Never give `direct` many short runs. The host cannot describe them as fast as they move.": (
        f"runs of {book.size(SHORT)} and less: {said['short']}; {describe_ns:.0f} ns of the host for each"
    ),
    "Where the layout keeps pages together and a buffer fits, take `staged`. Run lengths hardly matter then.": (
        f"pieces of {book.size(PIECE)} and more: {said['pieces']}"
    ),
    "Where neither holds, take `kernel`. It moves runs of any length at nearly the same rate.": (
        f"runs of 256 B and more: {said['kernel']}"
    ),
    "Beside a model, do not let `kernel` saturate the bus with a backup.": (
        f"a matmul is then {spread(stores)} % slower, with `direct` or `staged` {spread(engines, '{:.1f}')} %"
    ),
    "If you do not want to decide, calibrate, and take `auto`.": (
        f"{'; '.join(of_auto.values())}; choosing adds {choosing * 1e6:.0f} µs to a call, "
        f"in which a plain memcpy moves {choosing * bus * 1e3:.1f} MB"
    ),
}
book.say(*(f"{n}. {sentence}\n    - {proof}" for n, (sentence, proof) in enumerate(advice.items(), 1)))

# %% [markdown]
# ## What was shown
#
# These lines fail if the claims of this article do not hold. First what the emulated device did, then what the H200 reached.

# %%
assert receipts["direct"][1:3] == [8, 0], "a descriptor a run, no launch"
assert receipts["kernel"][1:3] == [8, 1], "one launch for all runs"
assert receipts["staged"][1:3] == [2, 1], "a descriptor for each piece of the page"
assert {numbers[3] for numbers in receipts.values()} == {tiny.page_bytes}, "every byte crosses the bus once"
for before, returned, waited, passed in lateness.values():
    assert before == returned > 0 == waited, "nothing has moved when the call returns, everything after the wait"
    assert passed == "no"
assert found["backup", False] == found["load", False] == 0
for direction in ("backup", "load"):
    assert 0 < found[direction, True] < SEEDS / 2, "without the wait bytes go wrong, but not often"

# %%
assert not {"wrong", "failed"} & set(statuses)
assert max(cell["percent_of_ceiling"] for row in rows for cell in targets.measured(row)) <= 103, "but for noise"
assert all(max(percents(row).values()) >= 85 for row in rows if targets.shortest_run(row) >= 256), "no layout is slow"
bounds = {"long": 80, "pieces": 80, "kernel": 75}
assert all(min(evidence[key], default=100) >= bound for key, bound in bounds.items())
assert max(evidence["short"], default=0) < 50, "many short runs are not for the copy engine"
for direction in DIRECTIONS:
    own, most, all_submitted = engine[direction, 2048]
    assert own > 0.8 * bus, "2 KiB: fast while there is room in the queue"
    assert most < own / 5, "slow once it is full"
    assert not all_submitted
    assert most < 2 * described[2048], "and no faster than a host can describe"
assert fits[0] < fits[1], "one size of the queue explains every series"
shares = [ours / whole for whole, ours in own_times["direct"] if whole > 5e-4]
assert statistics.median(shares) < 0.2, "the driver takes most"
long_runs = fastpaths.class_of(sm_copy.BLOCKS[0][0])
for classes in blocks.values():
    assert statistics.median(classes[long_runs][by_itself[long_runs]]) > 85, "a few blocks fill the bus"
assert min(at_best["backup"][True]) > max(at_best["backup"][False]), "half-filled lines cost stores a percent"
assert {check.subject for check in slow} <= uneven, "and nothing else makes a rate miss its target"
assert all("layer_first, backup" in check.subject for check in behind["all"]), "SGLang is ahead nowhere else"
assert statistics.median(stores) > 2 * statistics.median(calm + reads), "stores that saturate the bus"
assert statistics.median(engines) < min(calm + reads), "a copy engine takes least"
for label, ones in judged.items():
    assert statistics.median(one.ratio for one in ones) >= targets.AUTO_NEAR, f"{label}: auto mostly takes the best"
    near_share = sum(one.replayed >= targets.AUTO_NEAR for one in ones) / len(ones)
    assert near_share >= targets.AUTO_SHARE, f"{label}: so it does with the table of one machine"
assert all(line[0][1] >= 90 for by_name in capacity.values() for line in by_name.values()), "two pages of staging"
assert max(statistics.median(values) for values in versus.values()) < 1, "ours are ahead of every variant"
print("all claims hold")

# %% [markdown]
# ## Where to go next
#
# - [04_pairings](04_pairings.ipynb): every pairing of one model, on your GPU or the committed one, with advice.
# - [08_load_while_computing](08_load_while_computing.ipynb): how much of a load hides behind a model's computing.
# - [06_your_implementation](06_your_implementation.ipynb): the bytes of your own transfers, checked.
# - [02_transfers](02_transfers.ipynb): where runs come from.
# - [03_hybrid_stacks](03_hybrid_stacks.ipynb): transfers of all pools of a model, in order with its steps.
# - `kernels_cupy/staged.py`: the pipeline. `verify/tests/test_staged.py` and `verify/tests/test_ordering.py` look at every edge of it in many orders.
# - `verify/bench/gpu/`: how the figures were measured; `targets.py` has the bounds that they are held to.
