# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Transfers: from a definition to runs of bytes
#
# A transfer copies pages between a device pool and a host pool. **What it must do is a loop nest that anybody can check by eye. What a machine does is a list of runs, each contiguous on both sides.** This notebook goes from one to the other.
#
# In short:
#
# - The *oracle* is the definition: it assigns elements through views of both pools. It is slow, and no backend uses it.
# - The *plan* is derived independently, from the strides of the actual tensors: a few nested loops around the longest run of bytes that is contiguous on both sides. Every backend executes a plan.
# - The run length follows from the layout and the width of a row. It decides how well a bus can be used, and it differs by orders of magnitude between the pools of today's models.
# - Index lists are checked before the first byte moves.
# - A test of all this is worth no more than the pattern that it copies. The last part shows why.
#
# Runs are counted here, nothing is timed; what a run length costs on a bus is in [04_pairings](04_pairings.ipynb). For the run lengths of your model, set `MODEL` (or environment variable `MODEL`) and go to [Every pairing of some models](#Every-pairing-of-some-models).

# %%
import inspect
import os
import sys
from unittest.mock import patch

sys.path.append("notebooks")  # found there when the notebook runs in the repository's root

import book
import numpy as np
import torch
import transfers

from refimpl import LAYOUTS, DevicePool, HostPool, Receipt, oracle, plan, presets, slots_of
from refimpl.backends.torch_backend import TorchBackend
from verify import fill

MODEL = os.environ.get("MODEL") or "llama-3.1-8b"  # compared with others below
tiny = presets.mha(layers=3, heads=2, head_dim=4, dtype=torch.uint8, page_size=4)
device = DevicePool(tiny, 3)
fill.fill_device(device)  # every word of four bytes names its place

# %% [markdown]
# ## The definition
#
# Both pools can be viewed layer by layer as `[page, token, group, head, lane]`, whatever order their bytes lie in. A backup then is this loop nest, once for each component and layer:

# %%
print(inspect.getsource(oracle.assign_by_loops))

# %% [markdown]
# These loops back up device pages 2 and 0 to host pages 1 and 3. Tensor indexing must give the same host memory, in every layout.

# %%
device_pages, host_pages = [2, 0], [1, 3]
for layout in book.allowed_layouts(tiny):
    by_loops, by_indexing = HostPool(tiny, layout, 4), HostPool(tiny, layout, 4)
    for c in tiny.components:
        for layer in tiny.layers_of(c):
            to, source = by_loops.layer_view(c.name, layer), device.view(c.name, layer)
            oracle.assign_by_loops(to, source, host_pages, device_pages)
    oracle.backup(by_indexing, device, slots_of(host_pages, 4), slots_of(device_pages, 4))
    (a,), (b,) = book.raw(by_loops), book.raw(by_indexing)
    print(f"{layout}: {len(a)} bytes, {int((a != b).sum())} differ, digest {book.digest(a)}")
    assert (a == b).all()

# %% [markdown]
# ## The plan
#
# A plan knows nothing about layouts. It is read from the tensors: where each layer begins, how far apart pages lie, and the strides inside a page, on both sides. A loop that merely continues the run becomes part of the run. What remains is a small loop nest around one copy, shown here for K.

# %%
for layout in book.allowed_layouts(tiny):
    move, *_ = plan(HostPool(tiny, layout, 4), device).moves
    print(f"{layout}\n")
    transfers.show_move(move)
    print()

# %% [markdown]
# The same as a picture: one layer of K of one page, from its buffer on the device (above) into host memory (below). On the device, the rows of a page are one piece in each layer. The host's layout decides how often that piece has to be cut.

# %%
grouped = presets.mha(layers=3, heads=2, head_dim=4, dtype=torch.uint8, page_size=4, head_groups=2)
drawn = ["layer_first", "page_first_direct", "page_first", "page_head", "page_unified"]
transfers.draw_runs(grouped, drawn, "k", layer=1, page=1)
arrays = [array for layout in drawn for array in transfers.runs_of(grouped, layout, "k", 1, 1)[:2]]
print("digest of what is drawn:", book.digest(*arrays))

# %% [markdown]
# (`page_unified` is drawn with two groups of heads. Its pieces touch on the host, but on the device they do not, and a run must be contiguous on both sides.)
#
# **Two independent derivations must agree.** The plan, executed, gives the bytes of the oracle:

# %%
for layout in book.allowed_layouts(tiny):
    by_plan, expected = HostPool(tiny, layout, 4, backend="torch"), HostPool(tiny, layout, 4)
    receipt = by_plan.backup(device, slots_of(host_pages, 4), slots_of(device_pages, 4))
    oracle.backup(expected, device, slots_of(host_pages, 4), slots_of(device_pages, 4))
    wrong = book.differing(by_plan, expected)
    run = receipt.bytes // receipt.descriptors
    print(f"{layout}: {receipt.descriptors} runs of {run} B, {wrong} bytes differ from the oracle")
    assert wrong == 0

# %% [markdown]
# ## Run length = layout × row width
#
# So the run length needs no measurement. With P tokens a page and a row of H heads of D bytes, one layer of a page crosses the bus in runs of
#
# | layout | run |
# |---|---|
# | `layer_first`, `page_first_direct` | P × H × D: all tokens of the page |
# | `page_first` | H × D: one row |
# | `page_head` | D: one head of one row |
# | `page_unified` | P × H × D with one head group, else one group's share of a row |
# | `page_first_kv_split` | the width of each part |
#
# Here the formulas are compared with the plans of real pools, with rows of very different widths:


# %%
def predicted(layout, page_size, heads, head_bytes, groups):
    row = heads * head_bytes
    page = page_size * row
    unified = page if groups == 1 else row // groups
    return {"page_first": row, "page_head": head_bytes, "page_unified": unified}.get(layout, page)


checked = 0
rows = []
for page_size, heads, head_bytes, groups in [
    (2, 2, 1, 1),
    (16, 1, 256, 1),
    (16, 8, 256, 1),
    (64, 8, 256, 4),
    (64, 16, 512, 2),
]:
    spec = presets.mha(2, heads, head_bytes, torch.uint8, page_size, head_groups=groups)
    found = {layout: book.plan_of(spec, layout).moves[0].run for layout in book.allowed_layouts(spec)}
    assert all(found[n] == predicted(n, page_size, heads, head_bytes, groups) for n in found)
    checked += len(found)
    rows.append([page_size, f"{heads} × {head_bytes} B", groups, *map(book.size, found.values())])
book.table(["P", "row", "groups", *found], rows)
print(f"{checked} run lengths, all as predicted")

# %% [markdown]
# ## Index rules
#
# A caller names token slots, and whole pages move. So a list must be a sequence of complete pages, with their tokens consecutive and in order, page starts aligned, everything in range, and no destination twice. SGLang reads only the first slot of each page and copies whatever lies there; here each rule is checked before the first byte moves. These are the messages:

# %%
host = HostPool(tiny, "page_first", 4)
good = slots_of([2, 0], 4)
cases = {
    "not whole pages": (good[:6], good[:6]),
    "unaligned": (torch.arange(2, 10), good),
    "not consecutive": (torch.tensor([0, 1, 3, 2, 4, 5, 6, 7]), good),
    "out of range": (slots_of([0, 4], 4), good),
    "negative": (slots_of([0, -1], 4), good),
    "destination twice": (slots_of([1, 1], 4), good),
    "unequal lists": (good[:4], good),
    "one list missing": (None, good),
    "wrong dtype": (good.to(torch.float32), good),
}
for name, (host_indices, device_indices) in cases.items():
    try:
        host.backup(device, host_indices, device_indices)
        raise AssertionError(f"{name} was accepted")
    except ValueError as refusal:
        print(f"{name}:\n    {refusal}")
assert not any(memory.any() for memory in book.raw(host)), "a refused transfer moved bytes"

# %% [markdown]
# Nothing was written. A *source* may be named twice, and an empty list is no mistake: the transfer completes and moves nothing.

# %%
print("a source twice:", host.backup(device, slots_of([0, 1], 4), slots_of([2, 2], 4)).bytes, "bytes")
print("empty lists:   ", host.backup(device, good[:0], good[:0]).bytes, "bytes")
print("no lists:      ", host.backup(device, None, None).bytes, "bytes")

# %% [markdown]
# ## Receipts
#
# A transfer returns a receipt: path, payload, descriptors (runs that were handed to the mover), and what it asked of a GPU. Tests assert on receipts, and receipts make the price of a layout visible.

# %%
rows = []
for layout in book.allowed_layouts(tiny):
    row = [layout]
    for backend in ("torch", "numba"):
        host = HostPool(tiny, layout, 4, backend)
        up = host.backup(device, slots_of(host_pages, 4), slots_of(device_pages, 4))
        down = host.load(device, slots_of(host_pages, 4), slots_of(device_pages, 4), layer=1)
        row += [up.bytes, up.descriptors, down.bytes, down.descriptors]
    rows.append(row)
heads = [
    f"{b}:\n{what}" for b in ("torch", "numba") for what in ("backup\nbytes", "\nruns", "load 1\nbytes", "\nruns")
]
book.table(["layout", *heads], rows)

# %% [markdown]
# ## Every pairing of some models
#
# Runs of one page, for each component of each pool, in each layout that the pool may have: `MODEL`, and three models with other kinds of pools. Plans are made from pools of a single page, so this takes hardly any memory. `a + b` are the two parts of a split row.

# %%
MODELS = dict.fromkeys((MODEL, "deepseek-v3", "deepseek-v4-flash", "qwen3-next"))
facts = {}  # (model, pool, components) -> layout -> (run bytes, runs a page)
for name in MODELS:
    for pool, spec in presets.model(name).items():
        for layout in book.allowed_layouts(spec) if spec.components else ():
            for component, fact in transfers.run_facts(spec, layout).items():
                facts.setdefault((name, pool, component), {})[layout] = fact
for key in [key for key in facts if key[2] == "k" and facts[key] == facts[*key[:2], "v"]]:  # V is as K
    facts = {(*key[:2], "k, v each") if k == key else k: v for k, v in facts.items() if k != (*key[:2], "v")}

names = [[name, pool if pool == component else f"{pool}: {component}"] for name, pool, component in facts]
rows = []
for who, by_layout in zip(names, facts.values(), strict=True):
    rows.append([*who, *(" +\n".join(map(book.size, by_layout[n][0])) if n in by_layout else "-" for n in LAYOUTS)])
book.table(["bytes a run", "", *book.HEADINGS.values()], rows)

# %% [markdown]
# The shorter the runs, the more of them a page takes. These are the runs of one page of each component, over all layers:

# %%
rows = []
for who, by_layout in zip(names, facts.values(), strict=True):
    rows.append([*who, *(f"{by_layout[n][1]:,}" if n in by_layout else "-" for n in LAYOUTS)])
book.table(["runs a page", "", *book.HEADINGS.values()], rows)

# %% [markdown]
# Both as a picture. In each band the layouts stand one below the other; where they form a column, the layout makes no difference to that pool. **Page rows and states (V4, Mamba) have the same runs in every layout; token rows do not**, by a factor of the page size and more.

# %%
labels = ["\n".join(who) for who in names]
bytes_a_run = [[(n, run) for n, (runs, _) in by_layout.items() for run in runs] for by_layout in facts.values()]
runs_a_page = [[(n, count) for n, (_, count) in by_layout.items()] for by_layout in facts.values()]
transfers.draw_dots(labels, {"bytes a run": bytes_a_run, "runs a page, all layers": runs_a_page})
print("digest of what is drawn:", book.digest(labels, bytes_a_run, runs_a_page))

# %%
every = [(run, key, n) for key, by_layout in facts.items() for n, (runs, _) in by_layout.items() for run in runs]
for word, (extreme, key, _) in (("shortest", min(every)), ("longest", max(every))):
    layouts = ", ".join(layout for run, k, layout in every if (run, k) == (extreme, key))
    print(f"{word} run: {extreme:,} B: {key[0]}, {key[1]}: {key[2]}, in {layouts}")

# %% [markdown]
# ## Loading layer by layer
#
# A backup moves all layers at once. A load may go layer by layer, so that the first layer can compute while the next one is on its way. `prepare` checks everything once; `run` then moves the layers that it is told to. After each step, exactly those layers have arrived:

# %%
host = HostPool(tiny, "page_first", 4)
slots = slots_of([0, 1, 2], 4)
oracle.backup(host, device, slots, slots)
target = DevicePool(tiny, 3)

transfer = host.prepare(target, slots, slots, "load")
for step in range(tiny.layers):
    receipt = transfer.run((step,))
    arrived = [
        i
        for i in range(tiny.layers)
        if all(torch.equal(target.buffer(c, i), device.buffer(c, i)) for c in ("k", "v"))
    ]
    empty = [i for i in range(tiny.layers) if not any(target.buffer(c, i).any() for c in ("k", "v"))]
    print(f"after layer {step}: {receipt.bytes} bytes moved, arrived {arrived}, still empty {empty}")
    assert arrived == list(range(step + 1))
    assert empty == list(range(step + 1, tiny.layers))

# %% [markdown]
# A pool need not own every layer of its model. Qwen3-Next has attention in every fourth layer only, and a recurrent state in the others. To load a layer that a pool does not own moves nothing, and is no mistake.

# %%
qwen = presets.model("qwen3-next", tp=8, page_size=1)
ends = {name: (HostPool(spec, "page_first", 1), DevicePool(spec, 1)) for name, spec in qwen.items()}
one = torch.tensor([0])
rows = []
for layer in range(5):
    moved = [ends[name][0].load(ends[name][1], one, one, layer).bytes for name in qwen]
    rows.append([f"layer {layer}", *moved])
book.table(["bytes moved by a load of", *qwen], rows)

# %% [markdown]
# ## Single entries of a page row
#
# A C4 page of DeepSeek V4 is one opaque row, but its compressed entries may be needed one at a time. In a row all values come first and all scales after them (drawn in [01_layouts](01_layouts.ipynb)), so an entry is **two runs**, whatever the layout.

# %%
c4 = presets.v4_paged("c4", layers=3, item_bytes=37440)
v4_device = DevicePool(c4, 2)
fill.fill_device(v4_device)
host_entries, device_entries = torch.tensor([70, 5]), torch.tensor([3, 127])  # 64 entries a page: 70 lies in page 1

for layout in book.allowed_layouts(c4):
    by_plan, expected = HostPool(c4, layout, 2), HostPool(c4, layout, 2)
    receipt = by_plan.backup_entries(v4_device, host_entries, device_entries)
    oracle.backup_entries(expected, v4_device, host_entries.tolist(), device_entries.tolist())
    wrong = book.differing(by_plan, expected)
    moves = book.plan_of(c4, layout, single_entries=True).moves
    runs = " + ".join(f"{move.run} B" for move in moves)
    print(
        f"{layout}: {receipt.descriptors} runs for 2 entries × {c4.layers} layers, {runs} each; {wrong} bytes wrong"
    )
    assert wrong == 0
    assert receipt.descriptors == 2 * c4.layers * len(moves) == 2 * c4.layers * 2

# %% [markdown]
# ## Side states: first in, last out
#
# Some recurrent models keep states that belong to no layer. Once layer 0 is there they must be in place, so a load brings them **before the first layer**. Once they are on the host, the backup must be complete, so a backup writes them **last**. A backend that only takes notes, put in place of `torch`, shows the order in which layers are handed to it; `None` stands for the side states.

# %%
asked = []


def take_notes(backend, plan, layers, items, direction):
    asked.extend(layers)
    return Receipt("notes")


states = presets.mamba(3, [(4, 3)], temporal_shape=(2, 4), side_states=[((8,), torch.uint8)])
host, states_device = HostPool(states, "page_first", 2), DevicePool(states, 2)
one = torch.tensor([1])

with patch.object(TorchBackend, "execute", take_notes):
    host.backup(states_device, one, one)
    backed_up, asked = asked, []
    for layer in range(3):
        host.load(states_device, one, one, layer)
print("backup:", backed_up)
print("load:  ", asked)

# %% [markdown]
# ## Why the fill must tell layers apart
#
# A test of transfers is only as good as the pattern that it copies. GPU tests of SGLang (`test/registered/jit/test_hicache.py`, mid-2026) filled each device buffer with a counter in bf16, plus the number of the layer, V with 100 on top:
#
#     arange(numel, dtype=bfloat16) + layer           # K
#     arange(numel, dtype=bfloat16) + layer + 100     # V
#
# bf16 keeps eight bits of a number. From some element on, neighbours are the same number, and the 1 that the next layer adds is lost in rounding. From which?


# %%
def counter(numel, offset):
    return (torch.arange(numel, dtype=torch.bfloat16) + offset).view(torch.uint8).view(-1, 2)


words = 2**17
zero, one_on, hundred_on = (counter(words, offset) for offset in (0, 1, 100))
for what, other in (("layer 0 and layer 1", one_on), ("K and V", hundred_on)):
    differ = (zero != other).any(-1).nonzero().reshape(-1)
    print(f"{what}: {len(differ):,} of {words:,} words differ, the last one is word {int(differ[-1]):,}")
last_word = int((zero != one_on).any(-1).nonzero()[-1])

# %% [markdown]
# Those tests compared pages 1 to 3 of 16 tokens, with rows of 128 to 1,024 elements. The share of words that tell layer 0 from layer 1, and K from V, on those pages:

# %%
rows = []
for elements in (128, 256, 512, 1024):
    compared = slice(16 * elements, 4 * 16 * elements)
    by_layer = int((zero[compared] != one_on[compared]).any(-1).sum())
    by_kind = int((zero[compared] != hundred_on[compared]).any(-1).sum())
    rows.append([elements, 16 * elements, 3 * 16 * elements, by_layer, by_kind])
book.table(["row", "first word compared", "words compared", "tell layer 0 from 1", "tell K from V"], rows)
blind = all(row[3] == 0 for row in rows)

# %% [markdown]
# Not one word tells the layers apart. The picture shows where the pattern stops telling them apart, and that the compared pages lie beyond that.

# %%
blocks = 2 ** np.arange(2, 18)
shares = {
    what: [float((zero[n // 2 : n] != other[n // 2 : n]).any(-1).float().mean()) * 100 for n in blocks.tolist()]
    for what, other in (("layer 0 from layer 1", one_on), ("K from V", hundred_on))
}
transfers.draw_shares(blocks, shares, compared=(16 * 128, 4 * 16 * 1024))
print("digest of what is drawn:", book.digest(blocks, *shares.values()))

# %% [markdown]
# What that means for a test: here is a backup that **swaps layers 0 and 1**. With the counter as fill, all rows compared seem right. With a fill in which every word names its place, all of them are found wrong.


# %%
def swapped_backup(host, device, slots):
    """A faulty implementation: layers 0 and 1 change places."""
    for c in ("k", "v"):
        for layer, wrong_layer in ((0, 1), (1, 0)):
            host.layer_view(c, layer)[:] = device.view(c, wrong_layer)


def rows_wrong(host, device):
    """Token rows of pages 1 to 3 that are not what the device has in the same layer."""
    ends = [(host.layer_view(c, i)[1:4], device.view(c, i)[1:4]) for c in ("k", "v") for i in range(2)]
    return sum(int((a != b).flatten(2).any(-1).sum()) for a, b in ends), sum(a[..., 0, 0, 0].numel() for a, _ in ends)


spec = presets.mha(2, 1, 128, page_size=16)  # as in those tests
found = {}
for pattern in ("counter", "every word names its place"):
    device, host = DevicePool(spec, 8), HostPool(spec, "page_first", 8)
    fill.fill_device(device)
    if pattern == "counter":
        for layer in range(2):
            for c, offset in (("k", layer), ("v", layer + 100)):
                buffer = device.buffer(c, layer)
                buffer.copy_((torch.arange(buffer.numel(), dtype=torch.bfloat16) + offset).view_as(buffer))
    swapped_backup(host, device, slots_of(list(range(8)), 16))
    found[pattern], total = rows_wrong(host, device)
    print(f"filled with {pattern}: {found[pattern]} of {total} rows compared are found wrong")

# %% [markdown]
# ## What was shown
#
# These lines fail if the claims of this article do not hold.

# %%
by_layout = facts["qwen3-next", "kv", "k, v each"]
assert by_layout["layer_first"][0] == by_layout["page_first_direct"][0] == [64 * 2 * 256 * 2], "P × H × D"
assert by_layout["page_first"][0] == [2 * 256 * 2], "H × D"
assert by_layout["page_head"][0] == [256 * 2], "D"
opaque = [facts[key] for key in facts if presets.model(key[0])[key[1]].components[0].unit != "token"]
assert all(len({str(fact) for fact in by_layout.values()}) == 1 for by_layout in opaque), (
    "page rows and states do not care"
)
assert backed_up == [0, 1, 2, None], "side states are written last"
assert asked == [None, 0, 1, 2], "side states are restored first"
assert blind
assert last_word < 16 * 128, "the counter cannot tell layers apart on the pages compared"
assert found == {"counter": 0, "every word names its place": total}
print("all claims hold")

# %% [markdown]
# ## Where to go next
#
# - [01_layouts](01_layouts.ipynb): the layouts themselves, drawn.
# - [03_hybrid_stacks](03_hybrid_stacks.ipynb): transfers of all pools of a model, layer by layer, and who waits for whom.
# - [04_pairings](04_pairings.ipynb): run length against rate, for every pairing of a model.
# - [06_your_implementation](06_your_implementation.ipynb): transfers of your own, held against the oracle's bytes.
# - [07_fast_paths](07_fast_paths.ipynb): how a GPU moves the runs of a plan, and how fast.
# - `refimpl/oracle.py` and `refimpl/plan.py`: both derivations.
# - `verify/fill.py`: the fill in which every word names its place, also for rows that are no multiple of a word.
