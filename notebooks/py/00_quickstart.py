# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Quickstart: back up, wipe, load, prove
#
# An LLM server keeps attention state in device memory and mirrors it in host memory, so that a prompt that was seen before needs no new prefill. **This notebook moves the pools of one model to the host and back, and proves that no byte was lost or misplaced.** It needs no GPU: the "device" is ordinary memory here, and the rules are the same.
#
# In short:
#
# - A model is a handful of pools, and a pool is described by data: what a row is, and which layers have one.
# - A backup, a wipe, and a load to *other* pages bring every byte back. All of the destination is compared with the oracle, and checksums are compared before and after.
# - What cannot work is refused before memory is taken or a byte moves, with the reason and with what would work instead.
# - One table says which layouts and backends a model may use at all.
# - A model that is not on the list is a few numbers of its `config.json`; the last section runs one.
#
# Bytes are compared here, nothing is timed. The words of this project, as used below: a *slot* holds one token, a *page* a fixed number of them; a *row* is what one slot or page stores in one layer; a *layout* is the order of a page's bytes on the host; a *backend* is what moves them. To run another model, change the next cell or set environment variables of the same names (`make run MODEL=deepseek-v4-flash PAGES=4`).

# %%
import os
import sys

sys.path.append("notebooks")  # found there when the notebook runs in the repository's root

MODEL = os.environ.get("MODEL") or "llama-3.1-8b"  # a name from refimpl/presets.py
PAGE_SIZE = int(os.environ.get("PAGE_SIZE") or 0) or None  # tokens a page; None: as its preset has it
PAGES = int(os.environ.get("PAGES") or 4)  # pages of each pool, on either side
LAYOUT = os.environ.get("LAYOUT") or "page_first"
BACKEND = os.environ.get("BACKEND") or "torch"

# %% [markdown]
# ## A model is a handful of pools, and a pool is data
#
# A pool groups *components* that share one list of indices: K and V, a latent, a recurrent state. Each component says how wide a row is, what a row belongs to (a token, a page, a state slot) and which layers own one. Every layout, backend and test follows from these few facts, so a new model family needs no code of its own.

# %%
import book
import support_table
import torch

from refimpl import (
    LAYOUTS,
    Component,
    DevicePool,
    HostPool,
    HostPoolGroup,
    PoolSpec,
    PoolTransfer,
    UnsupportedPairing,
    oracle,
    presets,
    slots_of,
    support,
)

specs = presets.model(MODEL, page_size=PAGE_SIZE)

header = ["pool", "component", "a row per", "row shape", "dtype", "layers", "row", "one page"]
rows = []
for name, spec in specs.items():
    for c in spec.components:
        shape = " × ".join(map(str, (*([c.heads] if c.heads else []), *c.row_shape)))
        dtype = str(c.dtype).removeprefix("torch.")
        page = book.size(spec.component_page_bytes(c))
        rows.append([name, c.name, c.unit, shape, dtype, len(spec.layers_of(c)), book.size(c.row_bytes), page])
    if not spec.components:
        rows.append([name, "none: it only owns indices", "", "", "", 0, "", book.size(0)])
book.table(header, rows)

# %% [markdown]
# What one page weighs decides how many of them the host can hold and, together with the layout, how long the pieces are in which it crosses the bus. Pools that *ride* on another one own no indices; they use its.

# %%
for name, spec in specs.items():
    indices = f"rides on {spec.indices_from}" if spec.indices_from else "owns its indices"
    total = book.size(PAGES * spec.page_bytes)
    print(f"{name}: a page of {spec.page_size} is {spec.page_bytes:,} B, {PAGES} pages are {total}; {indices}")

# %% [markdown]
# ## Build both sides
#
# The device side is one buffer for each component and layer. The host side is laid out as `LAYOUT` says, and its pairing with `BACKEND` is checked *before* memory is taken. The group knows which pool rides on which.

# %%
device = {name: DevicePool(spec, PAGES) for name, spec in specs.items()}
group = HostPoolGroup([HostPool(spec, LAYOUT, PAGES, BACKEND) for spec in specs.values()])

rows = []
for name, pool in group.pools.items():
    shapes = ", ".join(str(tuple(t.shape)) for t in book.tensors(pool)[:2]) or "none"
    rows.append([name, f"{pool.size} slots", len(book.tensors(pool)), shapes])
book.table(["host pool", "room for", "tensors", "shapes (the first two)"], rows)

# %% [markdown]
# The device gets random bytes from a fixed seed. They are treated as bytes, never as numbers: some of them are NaN in bf16, and NaN is not equal to itself.

# %%
generator = torch.Generator().manual_seed(0)
for pool in device.values():
    for component, layer in book.layers(pool):
        pool.buffer(component, layer).view(torch.uint8).random_(0, 256, generator=generator)


def checksum(pools, pages):
    """Per pool, over the given pages of every component and layer, whatever the layout."""
    return {
        name: book.digest(*(pool.view(component, layer)[pages] for component, layer in book.layers(pool)))
        for name, pool in pools.items()
    }


count = max(PAGES // 2, 1)
pages = list(range(PAGES - 1, PAGES - 1 - count, -1))  # the last ones, in descending order
before = checksum(device, pages)
print(f"device pages {pages}:", before)

# %% [markdown]
# ## Back up: device to host
#
# A transfer names slots on both sides. Host slots come from the pool's allocator; pools that ride on another one take its slots, which is what `resolve` fills in. The receipt says what was done: the path, the payload, and the number of descriptors, that is, contiguous runs that were handed to the mover.

# %%
wanted = [PoolTransfer(name, device_indices=slots_of(pages, spec.page_size)) for name, spec in specs.items()]
transfers = group.resolve(wanted)

rows = []
for t in transfers:
    receipt = group.pools[t.name].backup(device[t.name], t.host_indices, t.device_indices)
    run = receipt.bytes // receipt.descriptors if receipt.descriptors else 0
    rows.append([t.name, receipt.path, receipt.bytes, receipt.descriptors, run])
book.table(["pool", "path", "bytes", "descriptors", "bytes each, on average"], rows)

# %% [markdown]
# **The oracle** makes the same backup into a second pool through plain tensor views, and shares no code with the backend. All host memory is compared, including the pages that nobody asked for: those must still be zero.

# %%
for t in transfers:
    pool = group.pools[t.name]
    expected = HostPool(pool.spec, LAYOUT, PAGES)
    oracle.backup(expected, device[t.name], t.host_indices, t.device_indices)
    wrong = book.differing(pool, expected)
    print(f"{t.name}: {pool.nbytes:,} bytes of host memory compared, {wrong} differ from the oracle")
    assert wrong == 0

# %% [markdown]
# ## Wipe, and load to other pages
#
# The device is zeroed and the pages come back at different page numbers, in another order. A transfer that confuses source and destination indices cannot pass this.

# %%
for pool in device.values():
    for component, layer in book.layers(pool):
        pool.buffer(component, layer).view(torch.uint8).zero_()

new_pages = list(range(count))
for t in transfers:
    pool, new_slots = group.pools[t.name], slots_of(new_pages, specs[t.name].page_size)
    receipt = pool.load_all(device[t.name], t.host_indices, new_slots)
    print(f"{t.name}: {receipt.bytes:,} bytes by path {receipt.path}")

# %% [markdown]
# The loaded pages have the checksums of the pages that were backed up, and every other page is still zero.

# %%
after = checksum(device, new_pages)
rows = [[name, before[name], after[name], "yes" if before[name] == after[name] else "NO"] for name in specs]
book.table(["pool", "before", "after", "equal"], rows)

others = [page for page in range(PAGES) if page not in new_pages]
touched = sum(
    int(pool.view(component, layer)[others].contiguous().view(torch.uint8).count_nonzero())
    for pool in device.values()
    for component, layer in book.layers(pool)
)
print(f"bytes written outside the {count} destination pages: {touched}")

# %% [markdown]
# ## What is not allowed is refused, early and in words
#
# Not every layout goes with every backend. The refusal comes from the constructor, before any memory is taken, and says what would work. Here is one pairing that this model's main pool refuses on a GPU.

# %%
main = next(spec for spec in specs.values() if spec.components)
refused = next(
    (layout, backend)
    for backend in ("staged", "direct", "kernel")
    for layout in ("layer_first", "page_head")
    if not support(main, layout, backend, "backup", platform="cuda")
)
try:
    HostPool(main, refused[0], PAGES, refused[1], platform="cuda")
except UnsupportedPairing as refusal:
    message = str(refusal)
print(message.replace("): ", "):\n  ").replace(". What", ".\nWhat").replace(", or ", ",\n  or "))

# %% [markdown]
# Indices are checked just as strictly, before the first byte moves. [02_transfers](02_transfers.ipynb) shows every rule.

# %%
owner = next((name, spec) for name, spec in specs.items() if spec.components and not spec.indices_from)[0]
slots = slots_of([0, 0], specs[owner].page_size)
try:
    group.pools[owner].load_all(device[owner], slots, slots)
except ValueError as refusal:
    print(refusal)

# %% [markdown]
# ## What this model may use
#
# One table answers for every pool, layout, backend, direction and platform, and the same table decides when a pool is built. An entry says where the pairing works in both directions: on a CPU, on a GPU, or on an emulated GPU, which runs the same kernels without one. A letter stands for a refusal. (A backend that is allowed must also be installed; the constructor says so where it is not.)

# %%
support_table.show_support(specs)

# %% [markdown]
# That is what this reference allows: everything that *can* be done bit for bit, even where it is slow. An engine accepts less. Here is the same question with the rules of SGLang, for the main pool. An entry is the path that its backend `kernel` or `direct` takes:

# %%
rows = []
for layout in LAYOUTS:
    answers = [
        support(main, layout, b, d, "cuda", "sglang") for b in ("kernel", "direct") for d in ("backup", "load")
    ]
    rows.append([layout, *(answer.name if answer else "refused" for answer in answers)])
book.table([f"SGLang, {main.name}", "kernel: backup", "kernel: load", "direct: backup", "direct: load"], rows)

# %% [markdown]
# Which of these pairings to choose is a question of speed: [04_pairings](04_pairings.ipynb) answers it with measurements.
#
# ## A model that is not on the list
#
# Take the numbers from its `config.json`. `presets` has a function for each kind of pool (`mha`, `mla`, `dsa_indexer`, `mamba`, `v4_paged`, …), and anything else is a `PoolSpec` of components written out, like this one with packed rows of an odd number of bytes. Each is backed up in every layout that it may have and compared with the oracle.

# %%
gqa = presets.mha(layers=36, heads=8, head_dim=128, dtype=torch.bfloat16, page_size=16, name="gqa")
packed = (Component("k", torch.uint8, heads=1, dim=132), Component("v", torch.uint8, heads=1, dim=132))
own = [gqa, PoolSpec("packed", layers=3, page_size=4, components=packed)]
rows = []
for spec in own:
    source = DevicePool(spec, 3)
    for component, layer in book.layers(source):
        source.buffer(component, layer).view(torch.uint8).random_(0, 256, generator=generator)
    for layout in book.allowed_layouts(spec):
        pool, expected = HostPool(spec, layout, 3, BACKEND), HostPool(spec, layout, 3)
        slots = slots_of([2, 0], spec.page_size)
        receipt = pool.backup(source, slots, slots)
        oracle.backup(expected, source, slots, slots)
        a_token = book.size(spec.page_bytes // spec.page_size)
        rows.append([spec.name, a_token, layout, receipt.descriptors, book.differing(pool, expected)])
book.table(["pool", "a token takes", "layout", "runs of two pages", "bytes that differ"], rows)
assert not any(row[-1] for row in rows)

# %% [markdown]
# ## What was proven
#
# These lines fail if anything above did not hold.

# %%
assert before == after, "the loaded pages are not those that were backed up"
assert touched == 0, "a load wrote outside its pages"
assert all(t.host_indices.numel() == count * specs[t.name].page_size for t in transfers)
assert refused[0] in message
assert refused[1] in message
assert "What would work" in message
assert group.release(transfers) > 0
assert all(pool.available_size() == pool.size for pool in group.pools.values()), "slots were lost"
group.close()
print(f"{MODEL}, {LAYOUT}, {BACKEND}: {count} pages of {len(specs)} pool(s) backed up, wiped, loaded elsewhere")

# %% [markdown]
# ## Where to go next
#
# - [01_layouts](01_layouts.ipynb): the six layouts drawn, byte by byte, and what is contiguous for whom.
# - [02_transfers](02_transfers.ipynb): from the definition of a transfer to the runs that a backend executes, with the run lengths of every pairing.
# - [03_hybrid_stacks](03_hybrid_stacks.ipynb): all pools of a model at once, and who waits for whom.
# - [04_pairings](04_pairings.ipynb): which layout with which backend for your model, measured, with advice.
# - [06_your_implementation](06_your_implementation.ipynb): transfers of your own engine, checked byte by byte.
# - `refimpl/presets.py`: the models, each number with its source.
# - `make verify` checks all of this for every kind of pool; `make run MODEL=qwen3-next` runs the notebooks on another model.
