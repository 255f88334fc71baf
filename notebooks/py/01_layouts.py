# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Layouts: where the bytes of one page lie
#
# Host memory can hold the same page in several orders of bytes. **A layout is nothing but an order of axes** (and, in one case, a cut of the row into parts). It decides which pieces of a page are contiguous, and for whom: for the device, which keeps one layer together; for a storage tier, which wants a whole page in one piece; for a rank with another tensor-parallel size, which wants only its own heads.
#
# In short:
#
# - `layer_first` mirrors the device. A page is scattered over all layers.
# - `page_first` has the token outermost: all layers of a token lie together, and so do all layers of a page, but one layer of a page is as many pieces as the page has tokens.
# - `page_first_direct` keeps a page together *and*, inside it, each layer of the page. That suits copy engines.
# - `page_head` has the heads outermost within a page: a rank's share of the heads is one piece of K and one of V.
# - `page_unified` makes a page one object, K and V included.
# - `page_first_kv_split` is `page_first_direct` with the latent and the rope lanes of an MLA row in two buffers.
#
# Everything below is read from the memory of real pools. This notebook shows places; what they mean for rates is measured in [04_pairings](04_pairings.ipynb). If you only want to know what a reader finds in one piece, go to [What is contiguous for whom](#What-is-contiguous-for-whom).

# %%
import sys
from collections import Counter

sys.path.append("notebooks")  # found there when the notebook runs in the repository's root

import book
import memory
import torch

from refimpl import LAYOUTS, DevicePool, HostPool, byte_offset, oracle, presets, slots_of, support
from refimpl.layout import AXES
from verify import fill
from verify.dictionary import tables
from verify.dictionary.twins import twins

book.table(["layout", "axes of a buffer, outermost first"], [[name, ", ".join(axes)] for name, axes in AXES.items()])

# %% [markdown]
# `component` stacks K and V where their rows are alike, `group` is a group of heads, and `lane` counts the elements of a row. An axis of length 1 drops out: with one group there is no `group`, and a latent has no `head`.
#
# ## A pool small enough to see every word
#
# The pool has three layers, pages of four tokens, two heads (each a group of its own), K and V, and one word of four bytes a head. The device pool is filled so that **every word names its own place**, and the oracle backs it up. Then raw host memory is read from the first byte to the last, and each word says which component, layer, page, token and head it is.

# %%
tiny = presets.mha(layers=3, heads=2, head_dim=4, dtype=torch.uint8, page_size=4, head_groups=2)
NUM_PAGES, PAGE = 2, 1  # the pool holds two pages, and the second one is drawn

pools = {layout: memory.labelled(tiny, layout, NUM_PAGES) for layout in book.allowed_layouts(tiny)}
for layout, pool in pools.items():
    print(layout, *(f"    byte {at * fill.WORD}: {memory.places(pool)[0][at]}" for at in range(8, 11)), sep="\n")

# %% [markdown]
# The word says where it should be; `byte_offset` says where the table of axes puts it. They agree for every word of every layout.

# %%
for layout, pool in pools.items():
    wrong = 0
    for at, place in enumerate(memory.places(pool)[0]):
        where = byte_offset(
            tiny, layout, NUM_PAGES, place.component, place.page, place.layer, place.token, place.head
        )
        wrong += where != at * fill.WORD
    print(f"{layout}: {len(memory.places(pool)[0])} words read, {wrong} elsewhere than byte_offset says")
    assert wrong == 0

# %% [markdown]
# ## The pictures
#
# Memory runs from left to right and from top to bottom, like text. A thick frame is a contiguous range of the page; everything outside belongs to the other page. The label in a word names its layer, and so does the colour; a hatched foot marks V.

# %%
key = memory.draw_key()

# %% [markdown]
# ### `layer_first`: the page is everywhere
#
# This is the device's own order. Each layer of K and of V has its own range, so a page consists of twice as many pieces as there are layers. One layer of the page is contiguous here *and* on the device, so loading layer by layer moves long runs.

# %%
memory.draw_page(pools["layer_first"], PAGE, line=16)
print("digest of what is drawn:", book.digest([str(place) for place in memory.places(pools["layer_first"])[0]]))

# %% [markdown]
# ### `page_first`: the page is together, its layers are not
#
# The *token* is outermost, and a page is just a number of consecutive tokens. K of the page is one piece, V another. But one layer of the page is scattered, one row for each token.

# %%
memory.draw_page(pools["page_first"], PAGE, line=24)
print("digest of what is drawn:", book.digest([str(place) for place in memory.places(pools["page_first"])[0]]))

# %% [markdown]
# ### `page_first_direct`: the page is together, and so are its layers
#
# The page is an axis of its own, and inside it the layer comes before the token. A copy engine moves all tokens of one layer in one piece, and storage still finds K of the page in one piece.

# %%
memory.draw_page(pools["page_first_direct"], PAGE, line=24)
print("digest of what is drawn:", book.digest([str(place) for place in memory.places(pools["page_first_direct"])[0]]))

# %% [markdown]
# ### `page_head`: each head of the page is together
#
# Half of the page's K is head 0, the other half head 1. A rank that owns half of the heads reads one piece of K and one of V, which makes this the order for storage that is shared by ranks with different TP sizes. The price is that the layer is innermost, so the pieces for the device are as short as one head of one token.

# %%
memory.draw_page(pools["page_head"], PAGE, line=24)
print("digest of what is drawn:", book.digest([str(place) for place in memory.places(pools["page_head"])[0]]))

# %% [markdown]
# ### `page_unified`: one object a page
#
# K and V are inside the page, so the page is a single piece, and a group of heads is one piece of it, V included. With one group (the default), the order is page, layer, K/V, token, head.

# %%
memory.draw_page(pools["page_unified"], PAGE, line=24)
print("digest of what is drawn:", book.digest([str(place) for place in memory.places(pools["page_unified"])[0]]))

# %% [markdown]
# ### `page_first_kv_split`: a row in two buffers
#
# This one is for MLA only, where a row is a latent with rope lanes behind it. Here a row has four words, three of latent (`w0` to `w2`) and one of rope (`w3`). Each part has a buffer of its own, in the order of `page_first_direct`.

# %%
tiny_mla = presets.mla(layers=3, latent_dim=16, dtype=torch.uint8, page_size=4, split=(12, 4))
split = memory.labelled(tiny_mla, "page_first_kv_split", NUM_PAGES)
memory.draw_page(split, PAGE, line=12)
print("digest of what is drawn:", book.digest(*[[str(place) for place in words] for words in memory.places(split)]))

# %% [markdown]
# ## What is contiguous for whom
#
# A reader wants a certain part of a page. How many pieces is that, and how long are they? The part is *marked* on the device and backed up by the oracle, and the marks are looked for in raw host memory. First, the tiny pool of the pictures:

# %%
K, KV = ["k"], ["k", "v"]
READERS = {
    "a token's row, K": {"components": K, "layers": slice(1, 2), "tokens": slice(1, 2)},
    "a layer of the page, K": {"components": K, "layers": slice(1, 2)},
    "the page, K": {"components": K},
    "the page, K and V": {"components": KV},
    "first half of the heads, K and V": {"components": KV, "heads": slice(0, 1)},
}


def contiguity(spec, readers, scale=1):
    """Reader × layout: the pieces of a part of one page."""
    layouts = book.allowed_layouts(spec)
    rows = []
    for name, part in readers.items():
        found = [memory.marked_ranges(spec, layout, scale=scale, **part) for layout in layouts]
        rows.append([name, *(memory.counted(lengths).replace(" + ", " +\n") for lengths in found)])
    book.table(["contiguous pieces of …", *(book.HEADINGS[n] for n in layouts)], rows)
    return rows


tiny_rows = contiguity(tiny, READERS)

# %% [markdown]
# The same at the size of Llama-3.1-8B, with pages of 64 tokens and two groups of heads. (One byte of the pool stands for the 256 bytes of a head here, since only lengths matter.) The second line, one layer of K of one page, is what the device keeps together. Where the host has it in one piece as well, one copy moves it.

# %%
llama = presets.mha(layers=32, heads=8, head_dim=1, dtype=torch.uint8, page_size=64, head_groups=2)
READERS["first half of the heads, K and V"] = {"components": KV, "heads": slice(0, 4)}
llama_rows = contiguity(llama, READERS, scale=256)

# %% [markdown]
# And for the latent rows of DeepSeek-V3: no heads, one component, and the split layout beside the others.

# %%
LATENT = ["latent"]
deepseek = presets.mla(layers=61, latent_dim=9, dtype=torch.uint8, page_size=64, split=(8, 1))  # a byte for 64 lanes
deepseek_rows = contiguity(
    deepseek,
    {
        "a token's row": {"components": LATENT, "layers": slice(1, 2), "tokens": slice(1, 2)},
        "a layer of the page": {"components": LATENT, "layers": slice(1, 2)},
        "the page": {"components": LATENT},
        "the page without rope lanes": {"components": LATENT, "lanes": slice(0, 8)},
    },
    scale=128,
)

# %% [markdown]
# ## The shapes that SGLang gives these buffers
#
# SGLang merges page and token into slots where the two are neighbours, and keeps some axes of length 1. `HostPool.kv_buffer` has exactly those shapes. Below are pools of 5 pages and 3 layers, with 4 tokens a page where there are token rows. A star marks a layout that SGLang's pool cannot transfer on a GPU (some of these buffers exist there all the same). Layouts that the reference refuses for a pool are left out.

# %%
N = 5
kinds = {
    "MHA": presets.mha(3, 2, 8, page_size=4),
    "K wider than V": presets.mha(3, 2, 12, v_head_dim=8, page_size=4),
    "K only": presets.mha_k_only(3, 2, 8, page_size=4),
    "MLA": presets.mla(3, 576, page_size=4, split=(512, 64)),
    "DSA index keys": presets.dsa_indexer(3, page_size=4),
    "Mamba states": presets.mamba(3, [(8, 3)], temporal_shape=(2, 4, 4)),
    "V4 pages (C4)": presets.v4_paged("c4", 3, 37440),
    "V4 state ring": presets.v4_state("c4_state", 3, ring=8, slot_bytes=8192),
}


def shapes(spec, layout):
    """Shapes of all host tensors; a list of equal ones as `n × shape`."""
    if layout not in book.allowed_layouts(spec):
        return "-"
    found = [str(tuple(t.shape)) for t in book.tensors(HostPool(spec, layout, N))]
    text = f"{len(found)} × {found[0]}" if len(set(found)) == 1 < len(found) else ", ".join(found)
    return (
        text if any(support(spec, layout, b, "load", "cuda", "sglang") for b in ("kernel", "direct")) else text + " *"
    )


shape_rows = [[kind, layout, shapes(spec, layout)] for kind, spec in kinds.items() for layout in LAYOUTS]
book.table(["pool", "layout", "kv_buffer"], [row for row in shape_rows if row[2] != "-"])

# %% [markdown]
# ## Where two layouts are one
#
# Where a page has a single row (index keys, V4 pages, state rings, recurrent states), there is no token axis to move: `page_first` and `page_first_direct` hold the same bytes, and only their shapes differ. With token rows they hold different bytes. And where there is only one component and no heads, `page_unified` is `page_first_direct`.

# %%
rows = []
for kind, spec in kinds.items():
    pair = [layout for layout in ("page_first", "page_first_direct") if layout in book.allowed_layouts(spec)]
    bytes_of = [book.digest(*book.raw(memory.labelled(spec, layout, N))) for layout in pair]
    rows.append(
        [kind, spec.components[0].unit, *bytes_of, "the same bytes" if len(set(bytes_of)) == 1 else "different bytes"]
    )
book.table(["pool", "a row per", "page_first", "page_first_direct", ""], rows)
same_bytes = {row[0] for row in rows if row[-1] == "the same bytes"}

mla_bytes = [
    book.digest(*book.raw(memory.labelled(kinds["MLA"], n, N))) for n in ("page_first_direct", "page_unified")
]
print("\nMLA, page_first_direct and page_unified:", *mla_bytes)
assert len(set(mla_bytes)) == 1

# %% [markdown]
# ## Inside a page row: the C4 pages of DeepSeek V4
#
# A page row is opaque to a layout: it moves as a whole. Inside, it has *segments*. The C4 row holds the values of all its compressed entries, then all their scales, then padding up to a multiple of 576 bytes. One entry is therefore two pieces, far apart. To see which, the oracle moves entry 5 of a marked row alone, and memory is searched again:

# %%
flash = presets.model("deepseek-v4-flash")
c4 = flash["c4"]
device, host = DevicePool(c4, 1), HostPool(c4, "page_first", 1)
layer = c4.owned_layers[0]
device.buffer("c4", layer).fill_(1)
oracle.backup_entries(host, device, [5], [5])
entry = memory.ranges(host.layer_view("c4", layer).reshape(-1).numpy() == 1)

memory.draw_row(c4, entry, zoom=1200)
for first, length in entry:
    print(f"entry 5: {length} bytes from byte {first:,}")

# %% [markdown]
# All page rows of the model, and their padding:

# %%
rows = []
for name, spec in flash.items():
    for c in spec.components:
        segments = " + ".join(f"{s.entries} × {s.bytes}" for s in c.segments) or "moves only as a whole"
        used = sum(s.entries * s.bytes for s in c.segments) or c.row_bytes
        rows.append([name, len(spec.layers_of(c)), c.row_bytes, segments, c.row_bytes - used])
book.table(["pool", "layers", "row bytes", "segments (entries × bytes)", "padding bytes"], rows)

# %% [markdown]
# ## What other engines call it
#
# The same bytes have other names elsewhere, and which ones depends on what a pool holds. With MLA most engines agree; with K and V few do, because they put K and V in other places. An engine that is not named has no layout with these bytes.

# %%
names = tables.by_layout()
alike = {}  # what it holds, engine, its names -> our layouts
for layout, *named in names.body:
    alike.setdefault(tuple(named), []).append(layout)
rows = [["\n".join(ours), holds, who, called.replace("; ", "\n")] for (holds, who, called), ours in alike.items()]
book.table(names.head, rows)

# %% [markdown]
# `python -m verify dictionary` prints every name with its order of axes and its source. It also lists **false friends: names whose tensors have the same shape and hold different bytes**, so that code which detects a layout by its shape gets it wrong. Some always look alike; most need a coincidence, such as a pool with as many pages as layers. Here are some that need one at the most.

# %%
false_friends = twins()
fewest = [pair for pair in false_friends if pair.when.count("=") <= 1]
rows = [
    [*(f"{group[0].engine} {group[0].name}" for group in pair.names), pair.rows, pair.when or "always"]
    for pair in fewest[:10]
]
book.table(["one name", "another", "holds", "same shape when"], rows)
needed = Counter(pair.when.count("=") for pair in false_friends)
coincidences = (f"{pairs} with {number}" for number, pairs in sorted(needed.items()))
print(f"\npairs by coincidences that they need: {', '.join(coincidences)}")

# %% [markdown]
# ## A flat page depends on the layout, `page(i)` does not
#
# Storage tiers write a page as one flat string of bytes. `get_data_page` gives it in storage order, as SGLang does, so **its meaning depends on the layout**: one page in two layouts makes two strings. `host.page(i)` is one canonical form for all of them.

# %%
slot = PAGE * tiny.page_size
flat = {layout: pool.get_data_page(slot) for layout, pool in pools.items()}
rows = [
    [layout, len(flat[layout]), book.digest(flat[layout]), book.page_digest(pool, [PAGE])]
    for layout, pool in pools.items()
]
book.table(["layout", "bytes", "flat page", "canonical page"], rows)

# %% [markdown]
# `layer_first` and `page_first_direct` agree, because both put layer before token *within* a page. The others do not, and nothing in the bytes says so: a page that was stored from one layout fits into another, and is silently wrong. (A store whose keys name neither layout nor dtype keeps serving such pages after the layout was changed.)

# %%
rows = []
for layout in pools:
    reader = HostPool(tiny, layout, NUM_PAGES)
    reader.set_from_flat_data_page(slot, flat["page_first"])
    right = pools["page_first"].page(PAGE)
    wrong = sum(int((rows_ != right[name]).any(-1).sum()) for name, rows_ in reader.page(PAGE).items())
    rows.append([layout, wrong, sum(r[..., 0].numel() for r in right.values())])
book.table(["written by page_first, read by", "wrong head rows", "of"], rows)
misread = {row[0]: row[1] for row in rows}

# %% [markdown]
# ## Pointers
#
# What moves pages without copying them (RDMA, storage) asks for addresses. `get_contiguous_buf_infos` gives the fewest ranges in which page *i* begins at `address + i × item`; `get_page_buffer_meta` gives the pieces of given pages. Both are right in every layout. Addresses change from run to run, so they are shown relative to the first one.


# %%
def both(numbers):
    return " or ".join(map(str, sorted(set(numbers))))


rows = []
for kind, spec in {"MHA": tiny, "MLA": tiny_mla}.items():
    for layout in book.allowed_layouts(spec):
        pool = HostPool(spec, layout, NUM_PAGES)
        addresses, sizes, items = pool.get_contiguous_buf_infos()
        pieces, lengths = pool.get_page_buffer_meta(slots_of([PAGE], spec.page_size))
        begin = [p - a for p, a in zip(sorted(pieces), sorted(addresses), strict=True)]
        views = sum(len(v) for v in pool.data_refs.values())
        rows.append([kind, layout, f"{len(addresses)} × {sizes[0]} B", both(items), both(begin), views])
        assert (set(lengths), sum(lengths)) == (set(items), spec.page_bytes)
book.table(["pool", "layout", "ranges", "item bytes", "page 1 begins at byte", "per-layer views"], rows)

# %% [markdown]
# The order of the pieces matters to whoever reads them back. A scattered page comes layer by layer, K before V; a page that is together comes as K, then V.

# %%
for layout in ("layer_first", "page_first", "page_unified"):
    pool = pools[layout]
    base = pool.data_refs["k"][0].data_ptr()
    pieces, lengths = pool.get_page_buffer_meta(slots_of([PAGE], tiny.page_size))
    words = [memory.places(pool)[0][(p - base) // fill.WORD] for p in pieces]
    print(layout)
    for p, n, place in zip(pieces, lengths, words, strict=True):
        print(f"    {n} B from byte {p - base}: begins with {place}")

# %% [markdown]
# Only layouts with heads outermost in a page can name the pieces of *one of several ranks*. The others refuse.

# %%
for layout, pool in pools.items():
    try:
        pieces, lengths = pool.get_split_heads_page_buffer_meta(slots_of([PAGE], tiny.page_size), split=2)
        print(f"{layout}: {len(pieces)} pieces of {lengths[0]} B for two ranks")
    except ValueError as refusal:
        print(refusal)

# %% [markdown]
# ## What was shown
#
# These lines fail if the claims of this article do not hold.

# %%
pieces_of = {row[0]: dict(zip(book.allowed_layouts(tiny), row[1:], strict=True)) for row in tiny_rows}
layer_of_page, page_kv = pieces_of["a layer of the page, K"], pieces_of["the page, K and V"]
half = pieces_of["first half of the heads, K and V"]

assert layer_of_page["layer_first"] == layer_of_page["page_first_direct"] == "1 × 32 B", (
    "one layer of a page in one piece"
)
assert layer_of_page["page_first"] == f"{tiny.page_size} × 8 B", "one piece a token"
assert page_kv["page_unified"] == f"1 × {tiny.page_bytes} B", "one object a page"
assert half["page_unified"].startswith("1 ×"), "a rank's heads, K and V, in one piece"
assert half["page_head"].startswith("2 ×"), "a rank's heads in one piece of K and one of V"
assert len({book.page_digest(pool, [PAGE]) for pool in pools.values()}) == 1, "page(i) does not depend on the layout"
assert torch.equal(flat["layer_first"], flat["page_first_direct"])
assert {layout for layout, wrong in misread.items() if not wrong} == {"page_first"}, (
    "a flat page belongs to its layout"
)
assert same_bytes == {kind for kind, spec in kinds.items() if spec.components[0].unit != "token"}
assert [length for _, length in entry] == [s.bytes for s in c4.components[0].segments]
print("all claims hold")

# %% [markdown]
# ## Where to go next
#
# - [00_quickstart](00_quickstart.ipynb): a model's pools backed up and loaded.
# - [02_transfers](02_transfers.ipynb): how a layout and the device's rows decide the runs in which bytes move.
# - [06_your_implementation](06_your_implementation.ipynb): transfers of your own, held against the bytes of every layout.
# - `refimpl/layout.py`: the table of axes and all that follows from it. `verify/tests/test_hand_bytes.py` pins it by bytes written out by hand.
