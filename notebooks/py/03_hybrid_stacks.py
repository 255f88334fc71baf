# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Hybrid stacks: many pools, one prefix
#
# A model with one kind of attention has one pool. A **hybrid stack** has several: full attention beside a sliding window, compressed attention with index keys, recurrent states. They differ in rows, in layers, and in how much of a prefix they must keep. But one prefix lives in all of them, so it is backed up, loaded and reported as one. **What is hard about that is not the copying but the order**: which copy waits for which step of the model, and the other way round.
#
# In short:
#
# - One call builds every pool of a model on both sides, within one budget. Pools either own indices or ride on one that does.
# - One operation moves a prefix in all pools; its acknowledgement says how many bytes each of them moved.
# - A load goes layer by layer over all pools, so the model can begin with layer 0 while the rest is on its way.
# - A missing wait does not crash. It gives wrong bytes, now and then. The last parts leave two waits out, show what happens, and run the checks that find it.
#
# Bytes and orders are shown here; clocks count bytes, not seconds. Seconds are measured in [08_load_while_computing](08_load_while_computing.ipynb). Sizes are also shown for a model of your choice: set `MODEL`.
#
# ## Every pool of a model
#
# For each layer, DeepSeek V4 keeps the latents of a window (`swa`). For some layers it also keeps latents of every 4th token (`c4`) with index keys (`c4_indexer`), for others of every 128th (`c128`), and rings of states from which compression continues. Two pools own indices: `kv`, which stores nothing itself, and `swa`. The stack lies on an emulated device here, and each pool may have a layout and a backend of its own.

# %%
import inspect
import os
import sys
from collections import Counter
from functools import partial
from textwrap import fill

sys.path.append("notebooks")  # found there when the notebook runs in the repository's root

import book
import numpy as np
import stacks
import torch

from refimpl import DevicePool, HostPool, PoolTransfer, build_stack, oracle, presets, sizing
from refimpl.controller import Controller, loads_by_layer
from refimpl.radix import POLICIES, PrefixCache
from verify.conformance import CHECKS, Rig, faults
from verify.toys import STACKS

MODEL = os.environ.get("MODEL") or "llama-3.1-8b"  # compared with others below
FLASH, PAGE = "deepseek-v4-flash", stacks.PAGE
stack = build_stack(
    FLASH,
    layout="page_first",
    backend="kernel",
    pools={
        "swa": ("page_first_direct", "direct"),
        "c4": ("page_first", "staged"),
        "c4_indexer": ("page_first", "auto"),
    },
    device_pages={"kv": 20, "swa": 5},  # page 0 is padding, as engines keep it
    host_ratio=1.25,
    platform="emulated",
    staging_pages=2,
)
print(stack)

# %% [markdown]
# Which pool rides on which, and which model layers each pool stores, for this model and for others. A filled cell is a layer that the pool stores. **Two pools of a hybrid need not share any layer, and none needs to have all of them**: "layer 7" means something else, or nothing, in each.

# %%
models = {name: presets.model(name, page_size=PAGE) for name in (FLASH, "qwen3-next", "gpt-oss-20b", MODEL)}
stacks.draw_stacks(models)
layers_of = {name: {pool: spec.owned_layers for pool, spec in specs.items()} for name, specs in models.items()}
print("digest of what is drawn:", book.digest(layers_of))

# %% [markdown]
# ## What a prefix weighs
#
# A rider has exactly the pages of its owner, so bytes are counted by owner. Pages hold 256 tokens here, for all models. Full attention needs a page for every 256 tokens of a prefix, a window only the page with its last tokens, and a recurrent model **one state, however long the prefix is**.

# %%
LENGTHS = [PAGE << i for i in range(10)]
rows = []
for model, specs in models.items():
    each = stacks.page_bytes(specs)
    token = each["kv"] / PAGE
    fixed = sum(nbytes for name, nbytes in each.items() if name != "kv")
    total = [f"{stacks.prefix_bytes(specs, n) / 2**20:,.1f}" for n in (LENGTHS[0], LENGTHS[4], LENGTHS[-1])]
    same = f"{fixed / token:,.0f} tokens" if fixed else "-"
    rows.append([model, f"{token:,.0f}", book.size(fixed) if fixed else "-", same, *total])
mib = [f"MiB of\n{n:,}\ntokens" for n in (LENGTHS[0], LENGTHS[4], LENGTHS[-1])]
heads = ["full attention,\nbytes a token", "window or state,\nonce a prefix", "as much as full\nattention of"]
book.table(["", *heads, *mib], rows)

# %% [markdown]
# On the left is one page (or state) of every pool. On the right are whole prefixes: what is kept once dominates short ones, what is kept for each token dominates long ones. Where two lines cross, the cheaper model changes.


# %%
prefixes = [[stacks.prefix_bytes(specs, n) for n in LENGTHS] for specs in models.values()]
print("digest of what is drawn:", book.digest(stacks.draw_bytes(models, LENGTHS), prefixes))

# %% [markdown]
# ### How one budget is divided
#
# How many bytes should each pool get? An engine has decided that already, for its device. So `build_stack(host_bytes=…)` divides one budget in the proportions of the device's bytes, riders with their owners, rounds down to whole pages and checks the sum *before* any memory is taken. (SGLang 0.5.23 takes no bytes for DeepSeek V4, only a ratio.) The table divides 64 GiB on the host, with 1,024 pages of full attention on the device, a tenth as many pages of a window, and 128 states.

# %%
BUDGET = 64 << 30
rows, unused = [], {}
for model, specs in models.items():
    each = stacks.page_bytes(specs)
    on_device = {name: {"kv": 1024, "swa": 102, "mamba": 128}[name] for name in each}
    on_host = sizing.pages_for_shares(on_device, each, BUDGET)
    taken = {name: on_host[name] * each[name] for name in each}
    unused[model] = BUDGET - sum(taken.values()), sum(each.values())
    for name, nbytes in each.items():
        unit = "states" if name == "mamba" else "pages"
        share = f"{taken[name] / BUDGET:.1%}"
        rows.append(
            [model, name, f"{on_device[name]:,} {unit}", book.size(nbytes), share, f"{on_host[name]:,} {unit}"]
        )
book.table(["", "owner", "device", "each, with riders", "share of the host", "host"], rows)

with build_stack(FLASH, device_pages={"kv": 10, "swa": 1}, host_bytes=64 << 20) as small:
    each = stacks.page_bytes(models[FLASH])
    built = {name: small.host.pools[name].num_pages for name in each}
print("\na stack of 64 MiB, built:", built)
print(f"a page of the window weighs as much as {each['swa'] / each['kv']:.1f} pages of what rides on kv")

# %% [markdown]
# So for DeepSeek V4 the ratio of window tokens to all tokens (SGLang's `--swa-full-tokens-ratio`, here a tenth) decides what the host has room for.
#
# ## One prefix, written and loaded
#
# A request has computed 12 pages. Its prefix is 12 pages of `kv`, and the last page of the window. `write` allocates host slots, locks slots on both sides and queues; `start_writing` submits everything that is queued at once; `acknowledge` says what has ended. Riders are named, but need no slots: they take their owner's.

# %%
generator = torch.Generator().manual_seed(0)


def randomise(pool):
    for component, layer in book.layers(pool):
        pool.buffer(component, layer).view(torch.uint8).random_(0, 256, generator=generator)


def show(ack):
    print(f"acknowledged: the {ack.direction} of {ack.tag!r}, {sum(ack.bytes.values()):,} bytes, error: {ack.error}")


for pool in stack.device.values():
    randomise(pool)
controller = Controller(stack)
mine = {"kv": stack.device_slots["kv"].alloc(12 * PAGE), "swa": stack.device_slots["swa"].alloc(PAGE)}
written = controller.write("a prefix", [PoolTransfer(name, None, mine.get(name)) for name in stack.specs])
print("batches submitted:     ", controller.start_writing())
arrived = sum(np.count_nonzero(memory) for pool in stack.host.pools.values() for memory in book.raw(pool))
print("bytes on the host then:", arrived)
print("ended by then:         ", controller.acknowledge())
(backed_up,) = controller.acknowledge(wait=True)
print()

rows = []
for name in stack.specs:
    (receipt,) = backed_up.receipts[name]
    expected = HostPool(stack.specs[name], stack.host.pools[name].layout, stack.host.pools[name].num_pages)
    oracle.backup(expected, stack.device[name], written.host_indices(name), written.device_indices(name))
    wrong = book.differing(stack.host.pools[name], expected)
    numbers = [receipt.descriptors, receipt.kernels, backed_up.tokens[name] // PAGE, backed_up.bytes[name], wrong]
    rows.append([name, stack.owner(name), receipt.path, *numbers])
    assert wrong == 0
heads = ["pool", "indices of", "path", "descriptors", "launches", "pages"]
book.table([*heads, "bytes\nacknowledged", "bytes not\nas the oracle's"], rows)
print()
show(backed_up)
print("submitted in this order:", ", ".join(backed_up.receipts))

# %% [markdown]
# The order of submission is not that of the stack: **rings of states come first**, since the model overwrites them in place with its next step. Its stream waits until they are copied; rows of tokens are only ever appended to, so their copies may take their time.
#
# Now the request is over and its slots are free. Other requests fill the device; then the prefix is needed again. `load` allocates device slots, different ones; `start_loading` submits layer by layer over all pools, and returns what a forward pass has to wait for. The device is compared with the oracle's to the last byte, including what was *not* to be written.

# %%
for name, slots in mine.items():
    stack.device_slots[name].free(slots)
    stack.device_slots[name].alloc(2 * PAGE)  # somebody else's
for pool in stack.device.values():
    randomise(pool)
expected = {name: DevicePool(spec, stack.device[name].num_pages) for name, spec in stack.specs.items()}
for name, pool in expected.items():
    for component, layer in book.layers(pool):
        pool.buffer(component, layer).copy_(stack.device[name].buffer(component, layer))

stored = {name: written.host_indices(name) for name in mine}  # riders take over what their owner has
loading = controller.load("a prefix", [PoolTransfer(name, stored.get(name)) for name in stack.specs])
producer = controller.start_loading()
controller.set_consumer(producer)
controller.wait_until(0)  # the caller's stream waits, not the host
(loaded,) = controller.acknowledge(wait=True)

rows = []
for name, pool in stack.host.pools.items():
    oracle.load(pool, expected[name], loading.host_indices(name), loading.device_indices(name))
    pairs = [(expected[name].buffer(*at), stack.device[name].buffer(*at)) for at in book.layers(expected[name])]
    wrong = sum(int((a.view(torch.uint8) != b.view(torch.uint8)).sum()) for a, b in pairs)
    receipts = loaded.receipts[name]
    moved = sum(receipt.bytes > 0 for receipt in receipts)
    way = "by layer" if loads_by_layer(pool) else "whole, ahead of layer 0"
    path = max(receipts, key=lambda receipt: receipt.bytes).path
    rows.append([name, path, way, len(receipts), moved, loaded.bytes[name], wrong])
    assert wrong == 0
heads = ["pool", "path", "comes", "runs", "of which\nmove bytes"]
book.table([*heads, "bytes\nacknowledged", "bytes not\nas the oracle's"], rows)
pages = {name: (slots[::PAGE] // PAGE).tolist() for name, slots in mine.items()}
new_pages = {name: (loading.device_indices(name)[::PAGE] // PAGE).tolist() for name in mine}
print(f"\nsaved from device pages {pages}\nloaded to device pages  {new_pages}")
show(loaded)
assert loaded.bytes == backed_up.bytes
controller.close()
stack.close()

# %% [markdown]
# Every pool comes by layer here, `c4` with `staged` too: a page of it keeps the bytes of a layer together, in every layout. Where a layout puts other layers between them (`page_first` with K and V of several tokens, say), `staged` brings the pool as a whole before layer 0, because each layer would take the bus for the whole page.
#
# ## The timeline of a load
#
# When may the model begin? Here is the same load again, behind a queue whose streams run side by side, each with a clock (`notebooks/stacks.py`). **The clock counts bytes over the bus, not seconds**: copying a layer of a pool takes as long as it has bytes. Computing a layer is assumed to take as long as loading an average one (the real ratio depends on model, batch and GPU; the second picture varies it). At the moment it is computed, each layer of the model compares the rows that it reads with what the host has.


# %%
source = build_stack(FLASH, "page_first", device_pages={"kv": 13, "swa": 2}, host_ratio=1)
saved = {"kv": source.host.alloc(12 * PAGE), "swa": source.host.alloc(PAGE, "swa")}
whole = 12 * stacks.page_bytes(source.specs)["kv"] + stacks.page_bytes(source.specs)["swa"]
for pool in source.host.pools.values():
    for memory in book.raw(pool):
        torch.from_numpy(memory).random_(1, 256, generator=generator)


def absent(layer, operation):
    """Pools whose rows of a layer are not what the host has."""
    for name, spec in source.specs.items():
        if layer in spec.owned_layers:
            there = source.device[name].view(name, layer)[operation.device_indices(name)[::PAGE] // PAGE]
            right = source.host.pools[name].layer_view(name, layer)[operation.host_indices(name)[::PAGE] // PAGE]
            if not torch.equal(there, right):
                yield name


def timeline(waits, ratio=1.0):
    """Load the prefix, and submit a forward pass that `waits` for "layers", for "everything" or for "nothing".

    Arrivals: layer, pool, begin, end. Of each layer of the pass: begin, end, pools whose rows were not there by then.
    """
    for pool in source.device.values():
        for component, layer in book.layers(pool):
            pool.buffer(component, layer).zero_()
    queue, layers, steps = stacks.Clocked(), range(source.num_layers), []
    controller = stacks.ClockedController(source, runtime=queue)
    compute = ratio * whole / len(layers)
    operation = controller.load("a prefix", [PoolTransfer(name, saved.get(name)) for name in source.specs])
    controller.set_consumer(controller.start_loading())

    def forward(layer):
        steps.append((queue.now, queue.now + compute, list(absent(layer, operation))))
        queue.spend(compute)

    with queue.on("model"):
        for layer in layers:
            if waits != "nothing":
                controller.wait_until(layer if waits == "layers" else layers[-1])
            queue.submit(partial(forward, layer))
        queue.record("model").synchronize()
    controller.acknowledge(wait=True)
    for name, slots in source.device_slots.items():
        slots.free(operation.device_indices(name))
    return controller.arrivals, steps


# %%
WAITS = ("layers", "everything", "nothing")
arrivals, steps = {}, {}
rows = []
for waits in WAITS:
    arrivals[waits], steps[waits] = timeline(waits)
    early = [layer for layer, (_, _, absent) in enumerate(steps[waits]) if absent]
    numbers = [f"{at / whole:.3f}" for at in (steps[waits][0][0], steps[waits][-1][1])]
    rows.append([waits, *numbers, len(early), sum(len(absent) for _, _, absent in steps[waits])])
print(f"loaded: {whole:,} bytes in {len(arrivals['layers'])} copies; this is 1 on the clock\n")
heads = ["the forward pass\nwaits for", "layer 0\nstarts", "last layer\nends", "layers that read\nwrong rows"]
book.table([*heads, "rows of pools\nthat were wrong"], rows)
of_layer = {layer: round(sum(e - b for at, _, b, e in arrivals["layers"] if at == layer)) for layer in range(4)}
print("\nbytes of a layer:", ", ".join(f"layer {layer} {nbytes:,}" for layer, nbytes in of_layer.items()))
assert arrivals["layers"] == arrivals["everything"] == arrivals["nothing"]

# %% [markdown]
# There is one line for each layer. Coloured boxes are its rows arriving, pool by pool. White boxes are the layer being computed, by a pass that waits for each layer just before it reads it; dotted ones, by a pass that waits for the whole load. (The pass that waits for nothing is not drawn. It is the fastest, and wrong.)

# %%
stacks.draw_timeline(arrivals["layers"], steps, whole)
print("digest of what is drawn:", book.digest(arrivals["layers"], steps["layers"], steps["everything"]))

# %% [markdown]
# Layers are not alike: those with C4 pools bring several times the bytes of the others. The pass that waits by layer starts with the first rows and ends soon after the last ones. How much time that saves depends on the ratio of computing to loading. **On this clock equal times save almost half; where one of them dwarfs the other, there is little to win.** Nothing is lost here either, because nothing on this clock costs the host time. On a GPU the host submits every layer by itself, and that can cost more than waiting by layer wins: [08_load_while_computing](08_load_while_computing.ipynb) measured it.

# %%
RATIOS = [0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0]
ends = {waits: [timeline(waits, ratio)[1][-1][1] / whole for ratio in RATIOS] for waits in WAITS[:2]}
ends["layers"], ends["everything"] = np.array(ends["layers"]), np.array(ends["everything"])
won = 1 - ends["layers"] / ends["everything"]
stacks.draw_saved(RATIOS, won)
columns = zip(RATIOS, *ends.values(), won, strict=True)
rows = [
    [f"{ratio:g}", f"{by_layer:.3f}", f"{at_once:.3f}", f"{won:.1%}"] for ratio, by_layer, at_once, won in columns
]
book.table(["ratio", "waits for layers", "for everything", "saved"], rows)
print("digest of what is drawn:", book.digest(won))

# %% [markdown]
# On a GPU the calls are the same: streams, events, and waits that are made by the GPU, not by the host. The clock does not tell how many seconds a byte takes (that depends on run lengths and backend: [07_fast_paths](07_fast_paths.ipynb)), nor what copies and kernels take from each other.
#
# ## Two waits left out
#
# A recurrent state is used as a whole: a request that continues from a cached prefix copies all layers of the state to a slot of its own. That copy must wait for the *last* layer of the pool. SGLang's issue 36743 reports that it is made before that layer has arrived. Here is that fault, from `verify/conformance/faults.py`:

# %%
print(inspect.getsource(faults.WaitsForTheFirstLayerOfAState))


def copied_state(make, seed):
    """Layer by layer, what a copy of a state holds that was made while layer 4 was late."""
    with Rig(make, "six-states", "cpu", "torch", seed=seed) as rig:
        host, stored = rig.on_host()
        slots, copy = rig.take(), rig.take()
        before = rig.see({"mamba": slots["mamba"]}).rows
        with rig.held("load layer 4"):
            rig.load(host, slots)
            rig.controller.wait_for_all_of("mamba")
            rig.move({"mamba": slots["mamba"]}, {"mamba": copy["mamba"]}, rig.model)
            rig.run_all()
        rig.finish()
        told = {}
        for place, rows in rig.see({"mamba": copy["mamba"]}).rows.items():
            known = {"what was loaded": stored.rows[place], "what lay there before": before[place]}
            told.setdefault(place[2], set()).update(name for name in known if torch.equal(rows, known[name]))
        return {layer: " and ".join(sorted(names)) for layer, names in told.items()}


copies = {make.__name__: copied_state(make, seed=0) for make in (Controller, faults.WaitsForTheFirstLayerOfAState)}
rows = [[f"layer {layer}", *(copy[layer] for copy in copies.values())] for layer in copies["Controller"]]
book.table(["the copy holds in", *copies], rows)

# %% [markdown]
# There is no error and no crash, only a state of which some layers belong to this prefix and the others to whoever had the slot before. Here the load was held before layer 4. Where no layer is late the fault does no harm, so a test in which nothing happens to be late never sees it. The checks of `verify/conformance` therefore hold steps, and let streams run in orders that a seed chooses. **They take any controller class, an engine's too.** The second fault below forgets the write fence: the stream of a forward pass that may still be writing what is backed up.

# %%
SEEDS = 20


def verdicts(make, check, kind, seeds=SEEDS):
    """What a check says of a controller, in so many orders."""
    said = Counter()
    for seed in range(seeds):
        with Rig(make, kind, "cpu", "torch", seed=seed) as rig:
            try:
                check(rig)
            except AssertionError as wrong:
                said[str(wrong)] += 1
    return said


named = {check.__name__: check for check in CHECKS}
FAULTS = (
    (faults.WaitsForTheFirstLayerOfAState, named["check_whole_states"], "six-states"),
    (faults.ForgetsTheWriteFence, named["check_backup_reads_what_a_forward_pass_wrote"], "mha"),
)
caught, lines = {}, []  # (controller, check) -> in how many orders
for fault, check, kind in FAULTS:
    for make in (Controller, fault):
        said = verdicts(make, check, kind)
        caught[make.__name__, check.__name__] = said.total()
        lines.append(f"- `{make.__name__}`, `{check.__name__}`: caught in {said.total()} of {SEEDS} orders")
    lines.append(f"  > {said.most_common(1)[0][0]}")
book.say("\n".join(lines))

# %% [markdown]
# ## The rules of order
#
# Who waits for whom, and what happens otherwise; the numbers are SGLang issues. The last column is evidence: the checks of that rule, each run in several orders of the queue, on a stack with full attention, a window and states.

# %%
rows, failed, orders = [], 0, 5
for *texts, names in stacks.RULES:
    checks = [named[f"check_{name}"] for name in names]
    wrong = sum(verdicts(Controller, check, "swa-mamba", orders).total() for check in checks)
    failed += wrong
    rows.append([fill(text, 34) for text in texts] + [f"{orders * len(checks) - wrong} of {orders * len(checks)}"])
book.table(["who", "waits for", "otherwise", "held in"], rows)

# %% [markdown]
# ## When a prefix is written
#
# A tree of prefixes decides *what* is backed up and when. `write_through` backs up whatever is inserted, `write_through_selective` what is met again, `write_back` what is evicted from the device. Here are the same steps under each policy, on a toy of the V4 stack. Each entry gives two numbers: how many tokens of the prefix the host has, and how many can be used.


# %%
def after(cache):
    """Tokens that are on the host, tokens that can be used."""
    cache.controller.start_writing()
    cache.check(wait=True)
    kv = cache.controller.host.pools["kv"]
    return f"{kv.size - kv.available_size()}, {cache.match(TOKENS).length}"


TOKENS, rows = list(range(16)), []
for policy in POLICIES:
    with build_stack(STACKS["v4"](4), device_pages=9, host_ratio=2) as toy:
        cache = PrefixCache(Controller(toy), policy, windows={"swa": 4})
        row = [policy]
        for _ in ("inserted", "met again"):
            slots = {"kv": toy.device_slots["kv"].alloc(16), "swa": toy.device_slots["swa"].alloc(4)}
            for name, left in cache.insert(TOKENS, slots).items():  # what the tree has already
                toy.device_slots[name].free(left)
            row.append(after(cache))
        cache.evict("kv", 16)
        row.append(after(cache))
        match = cache.match(TOKENS)
        there = cache.load_back(match) and cache.controller.start_loading() is not None
        cache.check(wait=True)
        row.append(f"{cache.match(TOKENS).on_device} on the device" if there else "nothing to load")
        rows.append(row)
book.table(["policy", "inserted", "met again", "evicted", "loaded back"], rows)
policies = {row[0]: row[1:] for row in rows}

# %% [markdown]
# Whatever the policy, a node that is split while it is written is acknowledged in its parts, and a prefix that is loaded keeps its slots until nobody uses it: `refimpl/radix.py`.
#
# ## What was shown
#
# These lines fail if the claims of this article do not hold.

# %%
assert all(0 <= left < most for left, most in unused.values()), "only what is no whole page is left of a budget"
assert built == sizing.pages_for_shares({"kv": 10, "swa": 1}, stacks.page_bytes(models[FLASH]), 64 << 20)
assert arrived == 0, "what was submitted has not run"
assert backed_up.error is loaded.error is None
assert not any(absent for waits in WAITS[:2] for _, _, absent in steps[waits]), "who waits reads what was loaded"
assert any(absent for _, _, absent in steps["nothing"]), "who does not wait reads something else"
assert steps["layers"][0][0] < whole / 43 < whole == steps["everything"][0][0]
assert of_layer[2] > 3 * of_layer[3] > 3 * of_layer[0]
assert 0.45 < won[RATIOS.index(1.0)] < 0.5
assert max(won) == won[RATIOS.index(1.0)]
assert min(won) > 0, "without time of the host, nothing is lost"
assert set(copies["Controller"].values()) == {"what was loaded"}
assert set(copies["WaitsForTheFirstLayerOfAState"].values()) == {"what was loaded", "what lay there before"}
assert all((count == 0) == (make == "Controller") for (make, _), count in caught.items())
assert failed == 0
assert policies == {
    "write_through": ["16, 16", "16, 16", "16, 16", "16 on the device"],
    "write_through_selective": ["0, 16", "16, 16", "16, 16", "16 on the device"],
    "write_back": ["0, 16", "0, 16", "16, 16", "16 on the device"],
}
print("all claims hold")

# %% [markdown]
# ## Where to go next
#
# - [02_transfers](02_transfers.ipynb): what a pool of a stack moves, and in which runs.
# - [04_pairings](04_pairings.ipynb): which layout and backend for each of these pools, measured.
# - [05_kl_multiturn](05_kl_multiturn.ipynb): what a model says after its prefix was on the host, and what a fault does to that.
# - [07_fast_paths](07_fast_paths.ipynb): how a GPU moves it, and how fast.
# - `refimpl/controller.py`: the order. `verify/conformance/`: the checks, for a controller of your own, and more faults.
# - `refimpl/hooks.py`: every step that can be held, delayed or made to fail.
