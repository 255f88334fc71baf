# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Your implementation: from a wrong kernel to a report
#
# You have written transfers between device pages and host pages, in C, CUDA, Triton, Rust or Python, and your own test passes. **This notebook takes such a kernel, one that is wrong, and follows it: the first message, the diagnosis, a picture of the wrong bytes, the fix, the report.** Then the same in C, inside a test suite of your own, and against an installed SGLang.
#
# What you need of this project is a folder of vectors: small pools, lists of pages, and the SHA-256 of every buffer afterwards. Nothing of it has to be read first, and NumPy is all that is imported.
#
# In short:
#
# - An adapter is two functions on plain arrays of bytes. It says what it offers, and is asked for just that.
# - A command asks it for every transfer of the vectors. A message names the first wrong byte: what belongs there, and whose bytes lie there instead.
# - All failures together are compared with known faults, or with one another; so a fault is found by what its cases have in common.
# - The report can be checked without believing it.
#
# Bytes are compared here, nothing is timed. Everything below is done as you would do it: in an empty folder elsewhere, by commands.

# %%
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from textwrap import fill

sys.path.append("notebooks")  # found there when the notebook runs in the repository's root

import book
import numpy as np
import wrong_bytes
from IPython.display import SVG

from verify.adapters import plain, protocol, runner, suite
from verify.consumers import check_vectors

PROJECT = Path(suite.__file__).resolve().parents[2]
folder = Path(tempfile.mkdtemp())  # the empty folder elsewhere


def run(*command):
    """What a command says, run there with the project on the path."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(PROJECT), "."]), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, cwd=folder, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    return re.sub("(?m)^suite ", "this machine: suite ", done.stdout).strip()  # its score may be measured, or not


def verify(*arguments):
    return run(sys.executable, "-m", "verify", *arguments)


def show(*lines):
    """What a command said, long lines broken as on a page."""
    print(*(fill(line, 100, subsequent_indent="    ", break_on_hyphens=False) for line in lines), sep="\n")


manifest = suite.manifest()
print(f"{manifest['cases']:,} transfers, version {manifest['version']}, in {len(suite.families())} families:")
print(*suite.families(), sep=", ")

# %% [markdown]
# ## A kernel, and the two functions around it
#
# The kernel moves rows of tokens between the device and host memory in the layout `page_first`: a block of threads takes a pack of four tokens. `capabilities` says what is offered, `transfer` calls the kernel for each layer of each component. These two functions are the whole protocol. Buffers come as arrays of bytes by name, and `geometry` says what lies in them.

# %%
KERNEL = """\
PACK = 4  # tokens that a block of threads moves at a time
versions = {"mine": "1.0"}


def move_rows(to, to_slots, source, source_slots):
    for pack in range(len(to_slots) // PACK):
        these = slice(pack * PACK, (pack + 1) * PACK)
        to[to_slots[these]] = source[source_slots[these]]


def capabilities(geometry, layout, direction):
    if layout != "page_first" or direction.endswith("entries"):
        return "only whole pages in page_first"
    if any(component["unit"] != "token" for component in geometry["components"]):
        return "only rows of tokens"


def transfer(geometry, layout, direction, host, device, host_slots, device_slots, layers):
    check(geometry, direction, host_slots, device_slots)
    for buffer in geometry["host"]:
        (component,) = buffer["components"]
        slots, of_layer = geometry["host_pages"] * geometry["page_size"], len(buffer["layers"])
        rows = host[buffer["name"]].reshape(slots, of_layer, -1)
        for position, layer in enumerate(buffer["layers"]):
            if layers is None or layer in layers:
                there, here = rows[:, position], device[f"{component}@{layer}"].reshape(-1, rows.shape[2])
                if direction == "backup":
                    move_rows(there, host_slots, here, device_slots)
                else:
                    move_rows(here, device_slots, there, host_slots)
"""

# %% [markdown]
# What must be refused is refused before a byte moves: a list that does not consist of whole pages, a page outside the pool, a destination named twice. Whatever `transfer` raises counts as a refusal.

# %%
CHECKS = """

def check(geometry, direction, host_slots, device_slots):
    size = geometry["page_size"]
    if len(host_slots) != len(device_slots):
        raise ValueError("lists of unequal length")
    for side, slots in ("host", host_slots.tolist()), ("device", device_slots.tolist()):
        pages = [first // size for first in slots[::size]]
        if slots != [page * size + token for page in pages for token in range(size)]:
            raise ValueError(f"no whole pages on the {side}")
        if any(not 0 <= page < geometry[f"{side}_pages"] for page in pages):
            raise ValueError(f"beyond the {side} pool")
        if (side == "host") == (direction == "backup") and len(set(pages)) < len(pages):
            raise ValueError("a page would be written twice")
"""

length = (folder / "mine.py").write_text(KERNEL + CHECKS)

# %% [markdown]
# ## Its own test passes
#
# The usual test: random bytes, a backup to scattered pages, a wipe, a load to other pages, and everything is compared. With pages of 64 tokens it passes.

# %%
sys.path.insert(0, str(folder))
mine = importlib.import_module("mine")

PAGE, ROW, LAYERS = 64, 32, [0, 1]
geometry = {
    "page_size": PAGE,
    "host_pages": 4,
    "device_pages": 5,
    "components": [{"name": "latent", "unit": "token"}],
    "host": [{"name": "latent", "components": ["latent"], "layers": LAYERS}],
}
random = np.random.default_rng(0)
device = {f"latent@{layer}": random.integers(1, 256, 5 * PAGE * ROW, np.uint8) for layer in LAYERS}
before = {name: data.copy() for name, data in device.items()}
host = {"latent": np.zeros(4 * PAGE * len(LAYERS) * ROW, np.uint8)}


def slots(*pages):
    return np.concatenate([np.arange(page * PAGE, (page + 1) * PAGE) for page in pages])


mine.transfer(geometry, "page_first", "backup", host, device, slots(3, 0), slots(1, 4), None)
for data in device.values():
    data[:] = 0
mine.transfer(geometry, "page_first", "load", host, device, slots(3, 0), slots(2, 0), None)
round_trip = all(
    np.array_equal(data.reshape(5, -1)[[2, 0]], before[name].reshape(5, -1)[[1, 4]]) for name, data in device.items()
)
print("round trip:", "passed" if round_trip else "FAILED")

# %% [markdown]
# ## Asked of the vectors
#
# One command. Every destination was filled with a byte that no source has (the *poison*), and every source with words that name their own place.

# %%
said = verify("adapter", "mine")
told = said.splitlines()
show(*told[:5], "…", told[-1])

# %% [markdown]
# A message, part by part:
#
# - `mha-tiny/page_first/backup/scattered` is the cell: a pool, a layout, a direction, a list of pages. `data/vectors/` has it with everything that belongs to it, and a note on what it guards.
# - *host buffer k, byte …* is where the first wrong byte lies in memory; *(of k layer 0 page …)* is what that place is for.
# - *expected k layer 0 page …* is the place on the device whose bytes belong there. *Found* is what lies there instead, decoded from the very bytes: another place's word would say which place it came from. Here it is poison: **nobody wrote.**
#
# The last lines look at all cases at once. Faults that are known from public reports are simulated on every vector, so a fault of that kind is called by its name. This one is none of those, so the suite says what the failing cases have in common and the others have not.

# %%
sentence = re.search(r"All of them, .*?\.", said)[0]
show(sentence)

# %% [markdown]
# That nearly is the line number. The test above could not see it: its lists are as long as they are round.
#
# ## Where it lies
#
# The first failing case, drawn: each box is a row in host memory, a column for each token. A number is the device page whose row belongs there.

# %%
CASE = "mha-tiny/page_first/backup/scattered"
(group,) = [g for g in suite.groups(["mha"]) if CASE.startswith(g.geometry["id"] + "/")]
(test,) = [t for t in group.tests if t["id"] == CASE]


def host_after(adapter):
    """Rows of every component and layer in host memory: as the adapter left them, and as they must be."""
    memory = {side: runner.Memory(group, side, poisoned=side == "host").views for side in suite.SIDES}
    lists = [runner.indices(group.geometry, test, side) for side in suite.SIDES]
    adapter.transfer(group.geometry, "page_first", "backup", memory["host"], memory["device"], *lists, None)
    right = dict(zip(memory["host"], check_vectors.move(group.geometry, test), strict=True))
    return [
        (
            f"{c['name']} layer {layer}",
            *(plain.gather(group.geometry, "host", m, c, layer) for m in (memory["host"], right)),
        )
        for c in group.geometry["components"]
        for layer in c["layers"]
    ]


def states(adapter):
    """By row: a state for each token of each page, and the device page that belongs there."""
    origin = dict(zip(test["host_pages"], test["device_pages"], strict=True))
    found = {}
    for name, ours, right in host_after(adapter):
        found[name] = []
        for page, token in np.ndindex(ours.shape[:2]):
            wrong = (ours[page, token] != right[page, token]).any()
            state = "wrong" if wrong else "right" if page in origin else "not asked for"
            found[name].append((state, str(origin.get(page, ""))))
    return found


tokens = [f"page {page}\ntoken {token}" for page in range(6) for token in range(2)]
drawn = states(mine)
wrong_bytes.draw_states(drawn, tokens, f"host memory after {CASE}")
print("digest of what is drawn:", book.digest(drawn))

# %%
lost = [
    (name, tokens[at].replace("\n", " "))
    for name, row in drawn.items()
    for at, (state, _) in enumerate(row)
    if state == "wrong"
]
count = group.geometry["page_size"] * len(test["host_pages"])
whole, behind = divmod(count, mine.PACK)
print(
    f"host pages {test['host_pages']}: {count} tokens, {whole} whole pack of {mine.PACK}, {behind} tokens behind it"
)
print("never written:", *(f"{name}, {where}" for name, where in lost), sep="\n    ")

# %% [markdown]
# The page that is named last stays behind, in every layer of K and V: `len(to_slots) // PACK` forgets the pack that is not full. A kernel that starts `n / 4` blocks makes this very mistake.
#
# ## Fixed, and reported

# %%
FIX = "range(len(to_slots) // PACK)", "range(-(-len(to_slots) // PACK))"
assert KERNEL.count(FIX[0]) == 1
length = (folder / "mine.py").write_text((KERNEL + CHECKS).replace(*FIX))
fixed = importlib.reload(mine)

passed = verify("adapter", "mine", "--out", "report")
checked = verify("check-report", "report/report.json")
print(passed, checked, sep="\n\n", end="\n\n")
print(*sorted(file.name for file in (folder / "report").iterdir()), sep=", ")

# %% [markdown]
# `report.json` has a line for each case, with the SHA-256 of all its buffers; the versions, the machine and the commit; the digest of the vectors; and the mutation score of the suite, if it was measured for these very sources. `conformance.html` is the same as a page, and `badge.svg` is for a README:

# %%
SVG(filename=folder / "report" / "badge.svg")

# %% [markdown]
# *Unsupported* is no blemish: an adapter says what it offers. But it must offer a direction in all cases of a pool and layout, or in none.
#
# `check-report` believes nothing that it can work out. Here is the report of the wrong kernel with every failure turned into a pass, by hand:

# %%
(folder / "mine.py").write_text(KERNEL + CHECKS)
verify("adapter", "mine", "--out", "wrong")
report = json.loads((folder / "wrong" / "report.json").read_text())
for case in report["cases"]:
    if case["status"] == "failed":
        case["status"], case["message"] = "passed", ""
report["counts"]["passed"] += report["counts"]["failed"]
report["counts"]["failed"] = 0
(folder / "wrong" / "report.json").write_text(json.dumps(report))
forged = verify("check-report", "wrong/report.json")
print(*forged.splitlines()[:3], "…", forged.splitlines()[-1], sep="\n")

# %% [markdown]
# The digests of right answers are public, as vectors have to be. So a report is evidence of what an honest tool found, not a signature: whoever doubts one runs the adapter again.
#
# ## The same in C
#
# `ctypes` (or anything that takes an address) leads to C, C++, CUDA or Rust. `verify/consumers/mover.c` with `pages_in_c.py` is a pair to copy; the two lines that compile and check it:

# %%
CONSUMERS = PROJECT / "verify" / "consumers"
for name in ("mover.c", "pages_in_c.py", "my_move.c", "check_vectors.c"):
    shutil.copy(CONSUMERS / name, folder)
BUILD = "cc -O2 -shared -fPIC mover.c -o mover.so"
print(BUILD, run(*BUILD.split()), sep="\n")
in_c = verify("adapter", "pages_in_c")
print(in_c)

# %% [markdown]
# The cases run in a process of their own. A kernel that runs beyond its memory, as C can, is a failed case and not the end; buffers lie between guards, so that a write beside them is seen even if nothing crashes. Without its check of the range:

# %%
text = (CONSUMERS / "mover.c").read_text()
RANGE = "if (list[i] < 0 || list[i] / page_size >= pages) return 3;"
assert text.count(RANGE) == 1
(folder / "mover.c").write_text(text.replace(RANGE, ""))
run(*BUILD.split())
crashed = verify("adapter", "pages_in_c", "--family", "k_only", "--out", "crashed")
cases = json.loads((folder / "crashed" / "report.json").read_text())["cases"]
deaths = [case["message"] for case in cases if "the process died" in case["message"]]
show(crashed.splitlines()[-4], *deaths)

# %% [markdown]
# ### Without Python
#
# `data/vectors/*.txt` says the same in lines of numbers. `check_vectors.c` (C99, the C library only) reads them, fills the buffers, calls a function `move` of yours and decodes the first wrong word too. First right, then with the fault of above:

# %%
FILES = [str(file.relative_to(PROJECT / "data")) for file in sorted(suite.FOLDER.glob("*.txt"))]
(folder / "vectors").symlink_to(suite.FOLDER)
CC = ["cc", "-std=c99", "-O2", '-DMOVER="my_move.c"', "check_vectors.c", "-o", "check_mine"]
run(*CC)
without_python = run("./check_mine", *FILES)
print(without_python)

# %%
text = (CONSUMERS / "my_move.c").read_text()
LOOP = "k < t->items[HOST].n; k++"
assert text.count(LOOP) == 1
(folder / "my_move.c").write_text(text.replace(LOOP, "k < t->items[HOST].n / 2 * 2; k++"))
run(*CC)
wrong_in_c = run("./check_mine", *FILES).splitlines()
show(*wrong_in_c[:3], "…", wrong_in_c[-1])

# %% [markdown]
# ## Inside a test suite of your own
#
# Every vector is a test, with a marker for its family and one for its layout. Faults that you know of go into a file beside the adapter (`expected_failures`), a pattern and a reason a line; a line that no longer fails is reported, so it does not stay.

# %%
length = (folder / "mine.py").write_text((KERNEL + CHECKS).replace(*FIX))
CHOSEN = ["--hostpool-adapter", "mine", "-m", "hostpool_mla and hostpool_page_first"]
told = run(sys.executable, "-m", "pytest", "-p", "verify.plugin", "-p", "no:cacheprovider", "--color=no", *CHOSEN)
in_pytest = re.search(r"(\d+ failed, )?\d+ passed[^=]*(?= in )", told)[0]
print(re.search("(?m)^host pools: .*", told)[0], in_pytest, sep="\n")

# %% [markdown]
# ## Against SGLang
#
# Adapters for an installed SGLang come with the project. `python -m verify --adapter sglang` takes each path that the installation has (its own functions on bare buffers: staged, bulk and register kernels, and the ops of `sglang-kernel`); `sglang-pools` builds SGLang's host pools themselves. A piece that is missing is *unsupported*; the report has the reason.

# %%
show("adapters: " + ", ".join(name for name in protocol.SHIPPED if name.startswith("sglang")))
for line in verify("--adapter", "sglang").splitlines():
    print("this machine:", re.sub(r" \([^)]*\)", "", line))  # what lacks; the reasons are in the report

# %% [markdown]
# They need a GPU. What a run on an H200 found, with versions and the command that repeats each finding, is in `FINDINGS.md`.
#
# ## What a pass means, and what it does not
#
# Every byte of every buffer of these transfers was right, nothing beside them was touched, and what must be refused was refused. It says nothing about speed, about streams (`transfer` returns when all has arrived), or about who may overwrite what meanwhile: `verify/conformance/` checks the order and lifetimes of a controller, [07_fast_paths](07_fast_paths.ipynb) shows rates.

# %%
assert round_trip, "its own test passes"
assert f"a number of indices in the list that is no multiple of {mine.PACK}" in sentence
assert {where for _, where in lost} == {"page 2 token 0", "page 2 token 1"}, "the page that is named last"
assert test["host_pages"][-1] == 2
assert not any(state == "wrong" for row in states(fixed).values() for state, _ in row), "a fixed kernel is right"
assert all("0 failed, 0 expected" in said for said in (passed, in_c)), f"{passed} {in_c}"
assert checked.startswith("report/report.json: verified"), checked
assert "it was edited" in forged
assert "these are not the bytes of a case that passed" in forged
assert deaths, "whoever reads beyond memory is caught by the system"
assert " 0 wrong" in without_python, without_python
assert " 0 wrong" not in wrong_in_c[-1], wrong_in_c
assert "failed" not in in_pytest, told
shutil.rmtree(folder)
print("all claims hold")

# %% [markdown]
# ## Where to go next
#
# - [05_kl_multiturn](05_kl_multiturn.ipynb): what wrong bytes do to what a model says.
# - [07_fast_paths](07_fast_paths.ipynb): how a GPU moves the bytes, and how fast.
# - [01_layouts](01_layouts.ipynb): where the bytes of a page lie in each layout.
# - [02_transfers](02_transfers.ipynb): how a plan of contiguous runs is found, and checked.
# - `data/vectors/README.md`: the format, for readers in any language.
# - `verify/adapters/protocol.py`: what an adapter may offer, and must refuse.
