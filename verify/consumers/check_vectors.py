"""Check golden vectors with NumPy alone: python check_vectors.py [data/vectors]

Works out every destination from the geometry by its own arithmetic and compares SHA-256. It imports nothing of the
project that made the vectors; replace `transfer` by calls of your implementation to check that one instead.
"""

# pyright: basic

import base64
import hashlib
import json
import sys
from pathlib import Path

import numpy as np

POISON = 0xFF
GUARD, GUARD_BYTE = 256, 0xFE  # a byte that is neither payload nor poison


def payload(component, layer, pages, tokens, heads, head_bytes):
    """Bytes [page, token, head, byte] of the rows on `pages`: eight bytes are a word, a word is its place, mixed."""
    page, token, head, byte = np.ix_(
        *(np.asarray(a, np.uint64) for a in (pages, range(tokens), range(heads), np.arange(head_bytes)))
    )
    u, m = np.uint64, np.uint64(2**63 - 1)
    n = ((((u(component << 8 | layer) << u(14) | page) << u(10) | token) << u(8) | head) << u(16)) | byte // u(8)
    z = n + u(0x9E3779B97F4A7C15) & m
    z = (z ^ z >> u(30)) * u(0xBF58476D1CE4E5B9) & m
    z = (z ^ z >> u(27)) * u(0x94D049BB133111EB) & m
    z = z ^ z >> u(31)
    return (z // u(251) ** (byte % u(8)) % u(251) + u(1)).astype(np.uint8)


def strides(layout, layers, components, pages, tokens, groups, heads, lanes):
    """Bytes from one page, token, layer, group of heads, head (in its group) and component to the next."""
    part = heads * lanes  # the heads of one group
    row = groups * part
    column = tokens * layers * lanes  # one head of a page that keeps heads outermost
    one = layers * components * tokens * part  # one group of heads of a page that holds everything
    return {
        "layer_first": (tokens * row, row, pages * tokens * row, part, lanes, 0),
        "page_first": (tokens * layers * row, layers * row, row, part, lanes, 0),
        "page_first_direct": (layers * tokens * row, row, tokens * row, part, lanes, 0),
        "page_first_kv_split": (layers * tokens * row, row, tokens * row, part, lanes, 0),
        "page_head": (groups * heads * column, layers * lanes, lanes, heads * column, column, 0),
        "page_unified": (groups * one, part, components * tokens * part, one, lanes, tokens * part),
    }[layout]


def refusal(group, test):
    """Why a transfer must be refused, or None."""
    parts, size = group["components"], group["page_size"]
    alike = [{**c, "name": 0, "id": 0} for c in parts]
    pair = [c["name"] for c in parts] == ["k", "v"] and alike[0] == alike[1]
    lacks_heads = group["layout"] == "page_head" and any(c["heads"] is None for c in parts)
    not_one = group["layout"] == "page_unified" and len(parts) > 1 and not pair
    unsplit = group["layout"] == "page_first_kv_split" and not any(c["split"] for c in parts)
    if lacks_heads or not_one or unsplit:
        return "layout"
    lists = {}
    for side in ("host", "device"):
        if f"{side}_entries" in test:
            lists[side], size, each = test[f"{side}_entries"], 1, parts[0]["segments"][0]["entries"]
        else:
            lists[side], each = test.get(f"{side}_indices"), size
        if lists[side] is None:
            lists[side] = [page * size + i for page in test[f"{side}_pages"] for i in range(size)]
    if len(lists["host"]) != len(lists["device"]):
        return "unequal lengths"
    for side, indices in lists.items():
        if len(indices) % size:
            return "partial page"
        starts = indices[::size]
        if any(start % size for start in starts):
            return "misaligned"
        if indices != [start + i for start in starts for i in range(size)]:
            return "not consecutive"
        if any(not 0 <= start < group[f"{side}_pages"] * each for start in starts):
            return "out of range"
        if side == destination(test) and len(set(starts)) < len(starts):
            return "written twice"
    return None


def destination(test):
    return "host" if test["direction"].startswith("backup") else "device"


def place(group, side, buffer, rows_of, pages):
    """The bytes of a buffer: poison, but for `rows_of(component, layer)` [page, token, head, byte] on `pages`."""
    out = np.full(buffer["bytes"], POISON, np.uint8)
    held = [c for name in buffer["components"] for c in group["components"] if c["name"] == name]
    tokens = group["page_size"] if held[0]["unit"] == "token" else 1
    groups = group["head_groups"] if held[0]["heads"] else 1
    heads, lanes, first = (held[0]["heads"] or 1) // groups, buffer["head_bytes"], buffer["first_byte"]
    layout = group["layout"] if side == "host" else "layer_first"
    step = strides(layout, len(buffer["layers"]), len(held), group[f"{side}_pages"], tokens, groups, heads, lanes)
    page, token, g, head, lane = np.ix_(pages, range(tokens), range(groups), range(heads), np.arange(lanes))
    inside = page * step[0] + token * step[1] + g * step[3] + head * step[4] + lane
    for at, component in enumerate(held):
        for position, layer in enumerate(buffer["layers"]):
            rows = rows_of(component, layer)
            if rows is not None:
                offsets = inside + position * step[2] + at * step[5]
                out[offsets] = rows[..., first : first + lanes].reshape(offsets.shape)
    return out


def rows_on(group, component, layer, pages):
    tokens = group["page_size"] if component["unit"] == "token" else 1
    width = component["lanes"] * component["element_bytes"]
    return payload(component["id"], layer, pages, tokens, component["heads"] or 1, width)


def move(group, test):
    """Destination buffers, in order, after the transfer."""
    to, source = ("host", "device") if destination(test) == "host" else ("device", "host")
    if f"{to}_entries" in test:
        targets, origins = test[f"{to}_entries"], test[f"{source}_entries"]
        every = group["components"][0]["segments"][0]["entries"]
        pages = sorted({entry // every for entry in targets})
    else:
        pages, origins = test[f"{to}_pages"], test[f"{source}_pages"]

    def rows_of(component, layer):
        if layer not in test.get("layers", [layer]):
            return None
        if f"{to}_entries" not in test:
            return rows_on(group, component, layer, origins)
        rows = np.full((len(pages), 1, 1, component["lanes"] * component["element_bytes"]), POISON, np.uint8)
        for target, origin in zip(targets, origins, strict=True):
            filled, begin = rows_on(group, component, layer, [origin // every])[0, 0, 0], 0
            for segment in component["segments"]:
                width = segment["bytes"]
                a, b = (begin + entry % every * width for entry in (target, origin))
                rows[pages.index(target // every), 0, 0, a : a + width] = filled[b : b + width]
                begin += segment["entries"] * width
        return rows

    return [place(group, to, buffer, rows_of, pages) for buffer in group[to]]


def transfer(group, test, memory):
    """What you replace. `memory` has the buffers of "host" and "device", in order. Raise to refuse, and write none."""
    if reason := refusal(group, test):
        raise ValueError(reason)
    for out, right in zip(memory[destination(test)], move(group, test), strict=True):
        out[:] = right


def wrong(group, test, full):
    """What is wrong with a test, or an empty text. `full` is what `filled` makes of its group."""
    reason = refusal(group, test)
    if reason != test.get("reason"):
        return f"refused: {reason}, expected: {test.get('reason')}"
    to, refused, found = destination(test), None, []
    whole = {side: [guarded(b, poisoned=side == to) for b in buffers] for side, buffers in full.items()}
    memory = {side: [b[GUARD:-GUARD] for b in buffers] for side, buffers in whole.items()}
    try:
        transfer(group, test, memory)
    except Exception as error:
        refused = f"{type(error).__name__}: {error}"
    if refused and test["result"] == "ok":
        found.append(f"was refused: {refused}")
    if not refused and test["result"] == "must-refuse":
        found.append(f"was not refused, though it must be: {reason}")
    moved = not refused and test["result"] != "must-refuse"
    found += [*wrong_bytes(group, test, memory, full, moved), *damaged(group, whole)]
    return "; ".join(found)


def guarded(buffer, poisoned):
    """A copy of a buffer, or poison in its place, between guards."""
    whole = np.full(GUARD + buffer.size + GUARD, GUARD_BYTE, np.uint8)
    whole[GUARD:-GUARD] = POISON if poisoned else buffer
    return whole


def wrong_bytes(group, test, memory, full, moved):
    for side in memory:
        for buffer, data, before in zip(group[side], memory[side], full[side], strict=True):
            name, written = buffer["name"], side == destination(test) and moved
            if written:
                right = sha256(data) == test["sha256"][name]
            else:
                right = np.all(data == (POISON if side == destination(test) else before))
            if not right:
                yield f"{side} buffer {name} has other bytes"
            elif written and "base64" in test and data.tobytes() != base64.b64decode(test["base64"][name]):
                yield f"{side} buffer {name} is not the one written out"


def damaged(group, whole):
    """Guards that were written to. Of each, the byte nearest to the buffer is told."""
    for side, buffers in whole.items():
        for buffer, data in zip(group[side], buffers, strict=True):
            for where, guard in (("before", data[:GUARD][::-1]), ("behind", data[-GUARD:])):
                touched = np.flatnonzero(guard != GUARD_BYTE)
                if touched.size:
                    yield f"{side} buffer {buffer['name']}: a write {touched[0] + 1} bytes {where} the buffer"


def sha256(data):
    return hashlib.sha256(data.tobytes()).hexdigest()


def filled(group):
    """The buffers of both sides, in order, full."""

    def buffers(side):
        pages = range(group[f"{side}_pages"])
        return [place(group, side, b, lambda c, layer: rows_on(group, c, layer, pages), pages) for b in group[side]]

    return {side: buffers(side) for side in ("host", "device")}


def wrong_buffers(group, full):
    """Buffers whose filled or poisoned bytes have another digest."""
    for side, buffers in full.items():
        for buffer, data in zip(group[side], buffers, strict=True):
            if (sha256(data), sha256(np.full_like(data, POISON))) != (buffer["filled"], buffer["poisoned"]):
                yield f"{group['id']}: {side} buffer {buffer['name']}"


def main(folder):
    manifest, count, failed = json.loads((folder / "manifest.json").read_text("utf-8")), 0, []
    for p in manifest["payload"]["probes"]:
        at = payload(p["component"], p["layer"], [p["page"]], p["token"] + 1, p["head"] + 1, p["byte"] + 1)
        if at[0, -1, -1, -1] != p["value"]:
            failed.append(f"probe {p}")
    for file in manifest["files"]:
        if not file["name"].endswith(".json"):
            continue
        for group in json.loads((folder / file["name"]).read_text("utf-8"))["groups"]:
            full = filled(group)
            failed += wrong_buffers(group, full)
            for test in group["tests"]:
                count += 1
                reason = wrong(group, test, full)
                failed += [f"{test['id']}: {reason}"] if reason else []
    failed += [f"{count} cases, the manifest names {manifest['cases']}"] if count != manifest["cases"] else []
    print(*failed[:20], f"{count} cases checked, {len(failed)} wrong", sep="\n")
    return int(bool(failed))


if __name__ == "__main__":
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "data/vectors").resolve()
    try:
        sys.exit(main(folder))
    except OSError as error:
        say = "name the folder of the vectors: python check_vectors.py PATH/TO/data/vectors"
        print(f"{error.strerror}: {error.filename}; {say}", file=sys.stderr)
        sys.exit(2)
