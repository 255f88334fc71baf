"""The files: what the oracle says is right, as JSON for readers and as lines of numbers for plain C."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from refimpl import LAYOUTS, Component, DevicePool, HostPool, oracle, slots_of
from refimpl.layout import Buffer, buffers
from verify.vectors import faults, payload
from verify.vectors.cases import DIRECTIONS, FAMILIES, REASONS, RESULTS, Case, Geometry, of
from verify.vectors.payload import POISON, SIDE
from verify.vectors.reported import REPORTED

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "data" / "vectors"
VERSION = 2
WITH_BYTES = 1024  # a destination of no more bytes is written out

UNITS = ("token", "page", "slot")
INDEX_UNITS = ("pages", "indices", "entries")

Json = dict[str, Any]


class Pools:
    """Both sides of a geometry in a layout, to be filled or poisoned."""

    def __init__(self, geometry: Geometry, layout: str, backend: str = "torch", platform: str | None = None) -> None:
        self.geometry, self.spec = geometry, geometry.spec
        self.host = HostPool(geometry.spec, layout, geometry.host_pages, backend, platform=platform)
        self.device = DevicePool(geometry.spec, geometry.device_pages)

    def prepare(self, direction: str) -> None:
        """The source says where its bytes are, the destination is poison."""
        self.fill("device" if direction.startswith("backup") else "host")
        self.poison("host" if direction.startswith("backup") else "device")

    def fill(self, side: str) -> None:
        pages = self.geometry.host_pages if side == "host" else self.geometry.device_pages
        for c in self.spec.components:
            for layer in self.spec.layers_of(c):
                rows = torch.from_numpy(self._rows(c, layer, pages)).view(c.dtype)
                views = self.host.part_views(c.name, layer) if side == "host" else [self.device.view(c.name, layer)]
                first = 0
                for view in views:
                    view.copy_(rows[..., first : first + view.shape[-1]].unflatten(2, view.shape[2:4]))
                    first += view.shape[-1]

    def _rows(self, c: Component, layer: int | None, pages: int) -> np.ndarray:
        place = self.geometry.numbers[c.name], SIDE if layer is None else layer
        return payload.rows(*place, pages, self.spec.tokens_per_page(c), c.head_count, c.row_bytes // c.head_count)

    def poison(self, side: str) -> None:
        for tensor in self.tensors(side).values():
            tensor.reshape(-1).view(torch.uint8).fill_(POISON)

    def tensors(self, side: str) -> dict[str, torch.Tensor]:
        """Every buffer by name, in memory order. K and V have a buffer each, unless a page holds both."""
        if side == "device":
            return {
                _name([c], layer=layer): self.device.buffer(c.name, layer)
                for c in self.spec.components
                for layer in self.spec.layers_of(c)
            }
        return {
            str(described["name"]): tensor.select(0, i) if buffer.axes[0] == "component" else tensor
            for buffer, tensors in self.host.storage
            for tensor, layers in zip(tensors, buffer.tensor_layers, strict=True)
            for i, described in enumerate(_described(buffer, layers))
        }

    def digests(self, side: str) -> dict[str, str]:
        return {name: sha256(tensor) for name, tensor in self.tensors(side).items()}

    def sizes(self, side: str) -> dict[str, int]:
        return {name: tensor.numel() * tensor.element_size() for name, tensor in self.tensors(side).items()}

    def described(self, side: str) -> list[Json]:
        """The buffers of a side: what they hold, their bytes, their digests when filled and when poisoned."""
        if side == "host":
            held = [d for b, _ in self.host.storage for layers in b.tensor_layers for d in _described(b, layers)]
        else:
            held = [_entry([c], (i,), 0, c.lanes, i) for c in self.spec.components for i in self.spec.layers_of(c)]
        self.poison(side)
        poisoned = self.digests(side)
        self.fill(side)
        found = zip(held, self.sizes(side).values(), self.digests(side).values(), poisoned.values(), strict=True)
        return [d | {"bytes": size, "filled": full, "poisoned": empty} for d, size, full, empty in found]


def _described(buffer: Buffer, layers: tuple[int | None, ...]) -> list[Json]:
    """One buffer for each component that lies apart, or one for those that a page holds together."""
    apart = [[c] for c in buffer.components] if buffer.axes[0] == "component" else [list(buffer.components)]
    lanes, layer = buffer.extents["lane"], layers[0] if buffer.per_layer else -1
    return [_entry(held, layers, buffer.first_lane, lanes, layer) for held in apart]


def _entry(
    held: list[Component], layers: tuple[int | None, ...], first: int, lanes: int, layer: int | None = -1
) -> Json:
    width = held[0].dtype.itemsize
    return {
        "name": _name(held, first if lanes < held[0].lanes else None, layer),
        "components": [c.name for c in held],
        "layers": [SIDE if i is None else i for i in layers],
        "first_byte": first * width,
        "head_bytes": lanes * width,
    }


def _name(held: list[Component], part: int | None = None, layer: int | None = -1) -> str:
    """`k`, `k+v` where a page holds both, `latent:512` for lanes from 512 on, `k@3` for one layer."""
    name = "+".join(c.name for c in held)
    return name + ("" if part is None else f":{part}") + ("" if layer in (-1, None) else f"@{layer}")


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def sha256(tensor: torch.Tensor) -> str:
    return hashlib.sha256(raw(tensor)).hexdigest()


# ---- what is right


def run_oracle(pools: Pools, case: Case) -> None:
    """Bring both sides to what they must be after a case."""
    pools.prepare(case.direction)
    if case.result == "must-refuse" or not case.host:
        return
    if case.unit == "entries":
        move = oracle.backup_entries if case.direction == "backup_entries" else oracle.load_entries
        move(pools.host, pools.device, list(case.host), list(case.device))
        return
    host, device = (slots_of(list(pages), pools.spec.page_size) for pages in (case.host, case.device))
    if case.direction == "backup":
        oracle.backup(pools.host, pools.device, host, device)
    else:
        oracle.load(pools.host, pools.device, host, device, case.layers)


def as_test(geometry: Geometry, layout: str, case: Case, pools: Pools | None) -> Json:
    side = "host" if case.direction.startswith("backup") else "device"
    test: Json = {
        "id": f"{geometry.name}/{layout}/{case.direction}/{case.name}",
        "direction": case.direction,
        f"host_{case.unit}": list(case.host),
        f"device_{case.unit}": list(case.device),
    }
    if case.layers is not None:
        test["layers"] = [SIDE if layer is None else layer for layer in case.layers]
    test |= {"result": case.result} | ({"reason": case.reason} if case.reason else {})
    test |= {"note": case.name, "flags": [*faults.flags(geometry, case)]} | (
        {"crc32": case.crc32} if case.crc32 else {}
    )
    if pools is None or case.result == "must-refuse":
        return test
    run_oracle(pools, case)
    test["sha256"] = pools.digests(side)
    once = side == "host" or layout == LAYOUTS[0]  # a load ends alike whatever it came from
    if case.result == "ok" and once and sum(pools.sizes(side).values()) <= WITH_BYTES:
        test["base64"] = {name: base64.b64encode(raw(t)).decode() for name, t in pools.tensors(side).items()}
    return test


def as_group(geometry: Geometry, layout: str, cases: list[Case]) -> Json:
    spec, allowed = geometry.spec, geometry.allowed(layout)
    pools = Pools(geometry, layout) if allowed else None
    tests = [as_test(geometry, layout, case, pools) for case in cases]
    right = [test for test in tests if test["result"] == "ok"]
    shared = [flag for flag in right[0]["flags"] if all(flag in test["flags"] for test in right)] if right else []
    for test in right:
        test["flags"] = [flag for flag in test["flags"] if flag not in shared]
    return {
        "id": f"{geometry.name}/{layout}",
        "since": geometry.since,
        "layout": layout,
        "layers": spec.layers,
        "page_size": spec.page_size,
        "host_pages": geometry.host_pages,
        "device_pages": geometry.device_pages,
        "head_groups": spec.head_groups,
        "components": [_component(geometry, c) for c in spec.components],
        "host": pools.described("host") if pools else [],
        "device": pools.described("device") if pools else [],
        "threads": list(geometry.threads),
        "flags": shared,
        "twins": _twins(geometry, layout) if pools else [],
        "tests": tests,
    }


def _component(geometry: Geometry, c: Component) -> Json:
    layers = geometry.spec.layers_of(c)
    return {
        "name": c.name,
        "id": geometry.numbers[c.name],
        "element_bytes": c.dtype.itemsize,
        "heads": c.heads,
        "lanes": c.lanes,
        "unit": c.unit,
        "side": c.side,
        "layers": [SIDE if layer is None else layer for layer in layers],
        "split": list(c.split),
        "segments": [{"entries": s.entries, "bytes": s.bytes} for s in c.segments],
    }


def _twins(geometry: Geometry, layout: str) -> list[str]:
    """Layouts in which this pool has the very same bytes: a case cannot tell one from the other."""

    def image(of: str) -> list[tuple[tuple[str, ...], tuple[int, ...]]]:
        found = []
        for b in buffers(geometry.spec, of, geometry.host_pages):
            axes = [(axis, b.extents[axis]) for axis in b.axes if b.extents[axis] > 1]
            found.append((tuple(axis for axis, _ in axes), tuple(extent for _, extent in axes)))
        return found

    others = [other for other in LAYOUTS if other != layout and geometry.allowed(other)]
    return [other for other in others if image(other) == image(layout)]


# ---- files


def groups() -> Iterator[tuple[str, Geometry, str, list[Case]]]:
    """Family, pool, layout, and the cases there."""
    for family, geometries in FAMILIES.items():
        for geometry in geometries:
            for layout in LAYOUTS:
                yield family, geometry, layout, [*of(geometry, layout)]
        for reported in REPORTED.get(family, ()):
            for layout in reported.geometry.layouts:
                yield family, reported.geometry, layout, reported.in_layout(layout)


def generate() -> dict[str, str]:
    """File name -> text, the manifest last."""
    families: dict[str, list[Json]] = {}
    notes: dict[str, Json] = {}
    for family, geometry, layout, cases in groups():
        families.setdefault(family, []).append(as_group(geometry, layout, cases))
        for case in cases:
            note = {"guards": case.note, "threads": list(case.threads)}
            if notes.setdefault(family, {}).setdefault(case.name, note) != note:
                raise ValueError(f"{geometry.name}: {case.name!r} has two notes")
    files: dict[str, str] = {}
    for family, found in families.items():
        files[f"{family}.json"] = as_json(family, notes[family], found)
        files[f"{family}.txt"] = "\n".join(as_lines(found)) + "\n"
    return files | {"manifest.json": json.dumps(manifest(files, families), indent=1, ensure_ascii=False) + "\n"}


def manifest(files: dict[str, str], families: dict[str, list[Json]]) -> Json:
    tests = {family: sum(len(group["tests"]) for group in found) for family, found in families.items()}
    return {
        "schema": "vectors_manifest.schema.json",
        "version": VERSION,
        "cases": sum(tests.values()),
        "payload": {
            "words": "Eight bytes are a word. A word's number packs its place into 63 bits: component id, model layer "
            "(255: a side state), page on the side that was filled, token in the page (0 for page rows and states), "
            "head (0 without heads), and the byte within the head's lanes divided by 8. The number is mixed one to one "
            "and written in base 251, least digit first, one added to each. A head's lanes begin a new word; a tail of "
            "fewer than eight bytes has the first digits of its word.",
            "formula": payload.FORMULA.splitlines(),
            "poison": POISON,
            "probes": payload.probes(),
        },
        "layouts": {
            "layer_first": "component layer page token head lane",
            "page_first": "component page token layer head lane",
            "page_first_direct": "component page layer token head lane",
            "page_head": "component page head token layer lane",
            "page_unified": "page group layer component token head lane",
            "page_first_kv_split": "component page layer token head lane",
        },
        "results": {
            "ok": "the destination has these bytes, the source keeps its own",
            "must-refuse": "an error, and no byte of either side changes",
            "unspecified": "either of the two: refused, or these bytes",
        },
        "flags": faults.described(),
        "files": [
            {"name": name, "sha256": hashlib.sha256(text.encode()).hexdigest(), "cases": tests[name.split(".")[0]]}
            for name, text in files.items()
        ],
    }


def as_json(family: str, notes: Json, found: list[Json]) -> str:
    """A line for each note, component, buffer and test, so that a change is a line."""
    head: Json = {"schema": "vectors.schema.json", "version": VERSION, "family": family}
    head["cases"] = sum(len(group["tests"]) for group in found)
    lines = ",\n".join(f"{_compact(name)}: {_compact(note)}" for name, note in notes.items())
    groups = ",\n".join(map(_group, found))
    return f'{_compact(head)[:-1]},\n"notes": {{\n{lines}\n}},\n"groups": [\n{groups}\n]}}\n'


def _group(group: Json) -> str:
    listed = ("components", "host", "device", "tests")
    plain = {key: value for key, value in group.items() if key not in listed}
    parts = [f'"{key}": [\n' + ",\n".join(map(_compact, group[key])) + "\n]" for key in listed]
    return _compact(plain)[:-1] + ",\n" + ",\n".join(parts) + "\n}"


def _compact(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def as_lines(found: list[Json]) -> Iterator[str]:
    """Lines of a word and numbers; lists come with their length first. Described in data/vectors/README.md."""
    yield f"vectors {VERSION} {len(found)} {sum(len(group['tests']) for group in found)}"
    for group in found:
        names = [c["name"] for c in group["components"]]
        sizes = (group[key] for key in ("page_size", "host_pages", "device_pages", "head_groups"))
        counts = (len(group[key]) for key in ("components", "host", "device", "tests"))
        yield _line("group", group["id"], LAYOUTS.index(group["layout"]), *sizes, *counts)
        for c in group["components"]:
            shape = c["element_bytes"], c["heads"] or 0, c["lanes"], UNITS.index(c["unit"])
            entries = c["segments"][0]["entries"] if c["segments"] else 0
            widths = _list([s["bytes"] for s in c["segments"]])
            kind = {"k": 1, "v": 2}.get(c["name"], 0)
            yield _line("component", c["id"], kind, *shape, len(c["split"]), entries, *widths, *_list(c["layers"]))
        for b in (*group["host"], *group["device"]):
            held = _list([names.index(name) for name in b["components"]])
            yield _line("buffer", b["first_byte"], b["head_bytes"], b["bytes"], *held, *_list(b["layers"]), b["filled"])
        for test in group["tests"]:
            yield from _test_lines(test)


def _test_lines(test: Json) -> Iterator[str]:
    unit = next(unit for unit in INDEX_UNITS if f"host_{unit}" in test)
    reason = REASONS.index(test["reason"]) + 1 if "reason" in test else 0
    kinds = DIRECTIONS.index(test["direction"]), RESULTS.index(test["result"]), reason, INDEX_UNITS.index(unit)
    yield _line("case", test["id"], *kinds)
    yield _line("layers", *(_list(test["layers"]) if "layers" in test else [-1]))
    yield _line("host", *_list(test[f"host_{unit}"]))
    yield _line("device", *_list(test[f"device_{unit}"]))
    yield _line("sha256", *_list([*test.get("sha256", {}).values()]))


def _list(values: list[Any]) -> list[Any]:
    return [len(values), *values]


def _line(*words: object) -> str:
    return " ".join(map(str, words))
