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
# A plan says which runs of bytes move. A GPU has two kinds of hardware that can move them: a copy engine, which wants few and long pieces, and threads of a kernel, which do not mind short ones. **Three backends follow from that, and no single one is best everywhere.**
#
# In short:
#
# - `direct` gives the copy engine one descriptor a run. `kernel` has a few blocks of threads read one memory and write the other. `staged` lets the copy engine move whole pages, and a kernel brings them into shape in device memory.
# - The kernels that run in this notebook, on a CPU, are the files that a GPU compiles. They run behind a queue that is as late and as disorderly as a device may be.
# - `staged` is a pipeline of two halves of a buffer. A missing wait in it is no crash, but wrong bytes, now and then.
# - The last parts read a file of measurements from an H200. Every figure is computed from that file.

# %%
import json
import statistics
import sys

sys.path.append("notebooks")  # found there when the notebook runs in the repository's root

import book
import torch

from kernels_cupy import emu, specs
from refimpl import LAYOUTS, DevicePool, HostPool, oracle, presets, slots_of
from verify import fill
from verify.bench.gpu import targets

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
# The device is an emulated one. It notes what it is told to do, and from where to where bytes then go. The receipts:

# %%
page_device = filled(tiny, 2)
shown = {}
rows = []
for way in WAYS:
    noting = book.NotingDevice()
    host = noting.pool(tiny, "page_first", 2, way, staging_pages=2)
    receipt = host.backup(page_device, slots_of([1], 2), slots_of([0], 2))
    receipt.wait()
    staging = host._mover._buffer if way == "staged" else None
    strips = book.strips(host, page_device, staging)
    shown[way] = strips, book.pieces(strips, noting.moved)
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
    book.draw_way(f"{way}: page 0 of the device to page 1 of the host", page_device, 0, strips, pieces)
    print("digest of what is drawn:", book.digest(*(strip.memory for strip in strips), pieces))

# %% [markdown]
# **`direct`** turns every run into a descriptor: two addresses and a length. No thread touches a byte, and no memory is needed in between. But a descriptor takes its time however few bytes it moves; how long, is in the table of measurements below.

# %%
draw("direct")

# %% [markdown]
# **`kernel`** launches once, whatever the number of runs. Host memory is mapped into the device, so threads read a row here and store it there. What counted as descriptors in the receipt are the runs of the plan; each thread works out its own addresses. The price is that some multiprocessors are busy with it.

# %%
draw("kernel")

# %% [markdown]
# **`staged`** moves every byte twice, but only once over the bus. A kernel gathers the page in a buffer on the device, in the very order that the host keeps; then the copy engine takes each piece of the page in one descriptor. The first step is within device memory, where bandwidth is plentiful. The price is the buffer.

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
# Hardware is mentioned in one header only (`primitives.cuh`: streaming loads and stores, an atomic). On a CPU a stand-in takes its place, and threads are fibres, and g++ is the compiler.
#
# **A transfer only submits.** When the call returns, nothing has moved, and the source must stay as it is until the stream has passed. Here the host memory of each backend is compared with the oracle's before the call, after it, and after `receipt.wait()`; then what the device had been told.

# %%
spec = presets.mha(layers=3, heads=2, head_dim=8, dtype=torch.bfloat16, page_size=4)
device = filled(spec, 6)
at = slots_of([4, 1, 5], 4), slots_of([0, 3, 2], 4)
expected = HostPool(spec, "page_first", 6)
oracle.backup(expected, device, *at)

rows, orders = [], {}
for way in WAYS:
    noting = book.NotingDevice(seed=1)
    host = noting.pool(spec, "page_first", 6, way, staging_pages=4)
    noting.told.clear()
    before = book.differing(host, expected)
    receipt = host.backup(device, *at)
    returned, passed = book.differing(host, expected), receipt.event.query()
    receipt.wait()
    rows.append([way, before, returned, book.differing(host, expected), "yes" if passed else "no"])
    orders[way] = ", ".join(f"{one.what} ({one.detail})" for one in noting.told if one.detail)
heads = ["bytes that differ:\nbefore", "\nwhen the call returns", "\nafter wait()", "event passed\non return"]
book.table(["backend", *heads], rows)
lateness = {row[0]: row[1:] for row in rows}
print()
for way, told in orders.items():
    print(f"{way}: {told}")

# %% [markdown]
# ## The pipeline of `staged`
#
# The buffer has two halves. While the copy engine works on one, the kernel fills (or empties) the other. Below are a backup and a load of six pages with halves of two pages, so three chunks: boxes are what was submitted, arrows are events that one stream recorded and the other waits for. (The length of a box means nothing; each begins as soon as its stream and its events allow.)

# %%
device = filled(tiny, 6)
order = slots_of([5, 0, 3, 1, 4, 2], 2), slots_of([2, 4, 1, 5, 0, 3], 2)
lanes = {}
for direction in ("backup", "load"):
    noting = book.NotingDevice()
    host = noting.pool(tiny, "page_first", 6, "staged", staging_pages=4)
    noting.told.clear()
    receipt = host.prepare(device, *order, direction).run()
    lanes[f"{direction}: {receipt.descriptors} descriptors, {receipt.kernels} launches"] = list(noting.told)
    receipt.wait()
book.draw_timelines(lanes)
for title, submitted in lanes.items():
    boxes, arrows = book.timeline(submitted)
    joins = [f"{a.source.what} {a.source.number} → {a.to.what} {a.to.number}" for a in arrows]
    print(f"{title}\n    {', '.join(joins)}")

# %% [markdown]
# The thin arrows say that bytes have arrived where the next step reads them. The thick ones look the other way: **a half may be used again only after the event of its last use.** Chunk 2 goes into the half of chunk 0. Without the thick arrow nothing keeps its gather from overwriting what the copy of chunk 0 has yet to read; in a load, the copy of chunk 2 would overwrite what the kernel has yet to scatter.
#
# Such a fault is quiet: most of the time the device happens to run things in a harmless order. So the wait is removed here, by a list that forgets when a half was last used, and the same transfer runs in many orders of the queue, each of which streams and events allow.

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
        noting = book.NotingDevice(seed)
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
# From here on, figures come from `data/results/h200/bench.json`, which `python -m verify.bench.gpu` writes. Bytes are verified before and after timing. Rates are device times of transfers queued behind a held stream, payload counted once; the *ceiling* is a plain memcpy in the same session, the smallest one measured that has as many bytes (else the largest).

# %%
bench = json.loads((book.HERE.parent / "data/results/h200/bench.json").read_text(encoding="utf-8"))
for session in bench["sessions"]:
    origin = session["provenance"]
    gpu, changes = origin["gpu"], " with local changes" if origin["dirty"] else ""
    bus = f"PCIe {gpu['pcie_generation']} x{gpu['pcie_width']}"
    print(f"{gpu['name']}, driver {gpu['driver']}, CUDA {gpu['cuda']}, {bus}")
    print(f"commit {str(origin['commit'])[:12]}{changes}, {origin['time'][:10]}")
    limits = [[c["direction"], book.size(c["payload_bytes"]), f"{c['gb_per_s']:.1f}"] for c in session["ceilings"]]
    book.table(["ceiling", "payload", "GB/s"], limits)
    print()

cells = [(row, cell) for row in bench["rows"] for cell in row["cells"]]
statuses = [cell["status"] for _, cell in cells]
portions = list(dict.fromkeys(row["portion"] for row in bench["rows"]))
print("portions:", ", ".join(f"{name} ({sum(r['portion'] == name for r in bench['rows'])} rows)" for name in portions))
print("cells:", ", ".join(f"{statuses.count(s)} {s}" for s in sorted(set(statuses))))


def rows_of(*names):
    """Rows of some portions in which something was measured."""
    return [row for row in bench["rows"] if row["portion"] in names and targets.measured(row)]


def percents(row):
    """Mover -> percent of the ceiling, for backends as they come, all layers at once."""
    return {cell["mover"]: cell["percent_of_ceiling"] for cell in targets.measured(row)}


def least_and_most(values):
    low, high = (f"{value:.0f}" for value in (min(values, default=0), max(values, default=0)))
    return low if low == high else f"{low}–{high}"

# %% [markdown]
# Every pool of four models, in every layout that it may have, full payload. Where a row has runs of several lengths, it stands at the shortest. **`direct` falls with the run, `kernel` and `staged` do not**: threads do not care, and `staged` gives the engine whole pieces of a page. The last column says why: for short runs, the time of a descriptor hardly depends on its bytes. Where a mark of `staged` is missing, the layout keeps the layers of a page apart, so there is no piece to copy.

# %%
core = rows_of("core") or rows_of(*targets.FULL)
points = {
    direction: {
        way: [
            (targets.shortest_run(row), round(percents(row)[way], 1))
            for row in core
            if row["direction"] == direction and way in percents(row)
        ]
        for way in WAYS
    }
    for direction in ("backup", "load")
}
book.draw_rates(points)
each = {}  # bytes a run -> nanoseconds that the copy engine took for a descriptor
for row in core:
    for cell in targets.measured(row):
        if cell["mover"] == "direct" and len(row["runs"]) == 1:
            took = cell["timing"]["median_s"] / cell["descriptors"] * 1e9
            each.setdefault(targets.shortest_run(row), []).append(took)
rows = []
for run in sorted({targets.shortest_run(row) for row in core}):
    of_run = {(d, w): [p for r, p in points[d][w] if r == run] for d in points for w in WAYS}
    texts = [least_and_most(values) if values else "-" for values in of_run.values()]
    rows.append([book.size(run), *texts, f"{statistics.median(each[run]):.0f}" if run in each else "-"])
heads = [f"{d}\n{way}" if way == "direct" else f"\n{way}" for d in points for way in WAYS]
book.table(["run", *heads, "direct: ns a\ndescriptor, median"], rows)
print("digest of what is drawn:", book.digest(points))

# %% [markdown]
# The same by model: the best backend for each pool and layout, and the percentage of the ceiling that it reaches. **With the right backend, no layout is slow.** What a layout decides is which backend that is, and so whether it takes a buffer or multiprocessors.

# %%
for direction in points:
    body = {}
    for row in core:
        if row["direction"] == direction:
            percent, best = max((p, way) for way, p in percents(row).items() if way in WAYS)
            body.setdefault((row["case"], row["pool"]), {})[row["layout"]] = f"{best} {percent:.0f}"
    rows = [[*who, *(by_layout.get(n, "-") for n in LAYOUTS)] for who, by_layout in body.items()]
    book.table([direction, "", *book.HEADINGS.values()], rows)
    print()

# %% [markdown]
# ## What `auto` makes of it
#
# `auto` predicts a time for each backend from a table of rates by contiguous bytes, and takes the fastest. The table was measured on other pools than these, so predictions can be off where two backends are close. Its rate is divided by that of the best backend of the same row:

# %%
ratios = []
for row in rows_of(*targets.FULL):
    rates = {cell["mover"]: cell["gb_per_s"] for cell in targets.measured(row)}
    chosen = [cell["path"].partition(": ")[2] for cell in targets.measured(row) if cell["mover"] == "auto"]
    if chosen and rates.keys() & set(WAYS):
        best = max((way for way in WAYS if way in rates), key=rates.get)
        ratios.append((rates["auto"] / rates[best], best, chosen[0] or "?", targets.name(row)))
rows = []
for best in WAYS:
    mine = [ratio for ratio in ratios if ratio[1] == best]
    if mine:
        took = {way: sum(chosen.startswith(way) for _, _, chosen, _ in mine) for way in (*WAYS, "?")}
        text = ", ".join(f"{count} {way}" for way, count in took.items() if count)
        near = sum(r >= targets.AUTO_NEAR for r, *_ in mine)
        least, median = min(mine)[0], statistics.median(r for r, *_ in mine)
        rows.append([best, len(mine), text, near, f"{median:.3f}", f"{least:.3f}"])
near = f"within {1 - targets.AUTO_NEAR:.0%}"
book.table(["best backend", "rows", "auto took", near, "median ratio", "least ratio"], rows)
ratio, best, chosen, name = min(ratios)
told = f"auto took {chosen}" if chosen != "?" else "what auto took (?) is not in the file"
print(f"\nleast: {ratio:.3f} in {name}; the best is {best}, {told}")
near_share = sum(r >= targets.AUTO_NEAR for r, *_ in ratios) / len(ratios)

# %% [markdown]
# ## What a model notices, and what memory buys
#
# `kernel` takes multiprocessors and `staged` takes memory; all of them share the device with a model. A loop of matrix products runs alone and beside a loop of transfers; the slowdown is the share of its rate that is lost. And `staged` is measured with buffers of many sizes, both halves counted.

# %%
beside, capacity = {}, {}
for row, cell in cells:
    if cell["status"] == "measured" and cell["interference"]:
        rate = cell["interference"]["gb_per_s"] / cell["gb_per_s"]
        beside.setdefault(cell["mover"], []).append((cell["interference"]["slowdown"], rate))
    if cell["status"] == "measured" and cell["staging_pages"]:
        of_direction = capacity.setdefault(row["direction"], {})
        series = of_direction.setdefault(f"{row['case']} {row['pool']}, {row['layout']}", [])
        series.append((cell["staging_pages"] * row["page_bytes"] / 2**20, round(cell["percent_of_ceiling"], 1)))

rows = []
for mover, figures in beside.items():
    slowdowns, rates = zip(*figures, strict=True)
    shares = [f"{x:.1%}" for x in (statistics.median(slowdowns), max(slowdowns))]
    rows.append([mover, len(figures), *shares, f"{statistics.median(rates):.0%}"])
if rows:
    book.table(["mover", "rows", "slowdown,\nmedian", "\nlargest", "transfer's rate,\nof that alone"], rows)
else:
    print("no matmul beside transfers in this file")

rows = []
for direction, lines in capacity.items():
    for name, series in lines.items():
        most = max(percent for _, percent in series)
        enough = min(mib for mib, percent in series if percent >= most - 1)
        texts = [f"{x:.1f}" for x in (min(series)[0], min(series)[1], most, enough)]
        rows.append([direction, name, *texts])
print()
if rows:
    book.table(["staging", "", "smallest\nbuffer, MiB", "its %", "best %", "MiB within\na point of it"], rows)
    print("digest of what is drawn:", book.digest(capacity))
    book.draw_capacity(capacity)
else:
    print("no sizes of staging in this file")

# %% [markdown]
# ## What to choose
#
# Advice, and under each sentence what it rests on, computed from the full payloads of the file (portions core and sglang).

# %%
full = rows_of(*targets.FULL)
LONG, SHORT, PIECE = 64 << 10, 4 << 10, 512 << 10


def span(way, wanted):
    """Percents of a backend over the rows that are wanted."""
    return [percents(row)[way] for row in full if way in percents(row) and wanted(row)]


evidence = {
    "long": span("direct", lambda row: targets.shortest_run(row) >= LONG),
    "short": span("direct", lambda row: targets.shortest_run(row) <= SHORT),
    "pieces": span("staged", lambda row: row["piece_bytes"] >= PIECE),
    "kernel": span("kernel", lambda row: targets.shortest_run(row) >= 256),
}
said = {key: f"{least_and_most(values)} % of the ceiling in {len(values)} rows" for key, values in evidence.items()}

advice = {
    "Where all runs are long, take direct: it needs neither memory nor multiprocessors.": (
        f"runs of {book.size(LONG)} and more: {said['long']}"
    ),
    "Never give direct short runs.": f"runs of {book.size(SHORT)} and less: {said['short']}",
    "Where the layout keeps a page together and there is memory for a buffer, take staged: runs do not matter then.": (
        f"pieces of {book.size(PIECE)} and more: {said['pieces']}"
    ),
    "Where neither holds, take kernel: it moves any run at nearly the same rate.": (
        f"runs of 256 B and more: {said['kernel']}"
    ),
    "If you do not want to decide, take auto.": (
        f"{near} of the best backend in {near_share:.0%} of {len(ratios)} rows, {min(ratios)[0]:.2f} of it at least"
    ),
}
for number, (sentence, proof) in enumerate(advice.items(), 1):
    print(f"{number}. {sentence}\n   {proof}")

# %% [markdown]
# ## What was shown
#
# These lines fail if the claims of this article do not hold.

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
assert not {"wrong", "failed"} & set(statuses)
rates = [cell["percent_of_ceiling"] for row, cell in cells if cell["status"] == "measured" and row in full]
assert max(rates) <= 103, "no rate above its ceiling, but for noise"
assert all(max(percents(row).values()) >= 90 for row in full if targets.shortest_run(row) >= 256)
bounds = {"long": 90, "pieces": 90, "kernel": 85}
assert all(min(evidence[key], default=100) >= bound for key, bound in bounds.items())
assert max(evidence["short"], default=0) < 50, "short runs are not for the copy engine"
assert sum(ratio[0] >= 0.97 for ratio in ratios) >= 0.95 * len(ratios), "auto is hardly ever behind"
print("all claims hold")

# %% [markdown]
# ## Where to go next
#
# - [02_transfers](02_transfers.ipynb): where runs come from.
# - [03_hybrid_stacks](03_hybrid_stacks.ipynb): transfers of all pools of a model, in order with its steps.
# - `kernels_cupy/staged.py`: the pipeline. `verify/test_staged.py` and `verify/test_ordering.py` look at every edge of it in many orders.
# - `verify/bench/gpu/`: how the figures were measured; `targets.py` has the bounds that they are held to.
