"""NumPy alone, every pool and layout, by the arithmetic of the plain consumer; and one that does nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from verify.adapters.protocol import Buffers, Json
from verify.consumers import check_vectors as plain


@dataclass(frozen=True)
class Task:
    """What is asked for: pairs of destination and source, pages or entries."""

    geometry: Json
    direction: str
    pairs: list[tuple[int, int]]
    layers: Sequence[int] | None

    @property
    def entries(self) -> bool:
        return self.direction.endswith("entries")


class Numpy:
    """Right as it stands. The small methods are there to be wrong (`verify.adapters.wrong`)."""

    versions = {"numpy": np.__version__}  # noqa: RUF012

    def capabilities(self, geometry: Json, layout: str, direction: str) -> str | None:
        reason = plain.refusal(geometry, {f"{side}_pages": [] for side in ("host", "device")} | {"direction": ""})
        return f"{layout} is no layout of this pool" if reason else None

    def transfer(
        self,
        geometry: Json,
        layout: str,
        direction: str,
        host: Buffers,
        device: Buffers,
        host_indices: np.ndarray,
        device_indices: np.ndarray,
        layers: Sequence[int] | None,
    ) -> None:
        unit = "entries" if direction.endswith("entries") else "indices"
        asked = {"direction": direction, f"host_{unit}": host_indices.tolist()}
        asked[f"device_{unit}"] = device_indices.tolist()
        if reason := plain.refusal(geometry, asked):
            return self.refuse(reason)
        each = 1 if unit == "entries" else geometry["page_size"]
        lists = {"host": host_indices[::each] // each, "device": device_indices[::each] // each}
        to, source = ("host", "device") if direction.startswith("backup") else ("device", "host")
        pairs = list(zip(lists[to].tolist(), lists[source].tolist(), strict=True))
        task = Task(geometry, direction, pairs, layers)
        self._move(task, (to, host if to == "host" else device), (source, device if to == "host" else host))

    def _move(self, task: Task, to: tuple[str, Buffers], source: tuple[str, Buffers]) -> None:
        pairs = self.pairs(task)
        for component in task.geometry["components"]:
            for layer in component["layers"]:
                if not pairs or not self.moves(task, component, layer):
                    continue
                found = gather(task.geometry, *source, *self.source(task, component, layer))
                origin, rows = self.turned(task, found), flat(gather(task.geometry, *to, component, layer))
                if task.entries:
                    self._move_entries(task, rows[:, 0], origin[:, 0], component)
                else:
                    kept, (pages, origins) = self.kept(task, component), map(list, zip(*pairs, strict=True))
                    rows[pages, :, :kept] = origin[origins][..., :kept]
                scatter(rows, task.geometry, *to, component, layer)

    def _move_entries(self, task: Task, rows: np.ndarray, origin: np.ndarray, component: Json) -> None:
        every = component["segments"][0]["entries"]
        for (page, entry), (other, begin) in ((divmod(a, every), divmod(b, every)) for a, b in self.pairs(task)):
            ranges = self.ranges(task, component, entry), self.ranges(task, component, begin)
            for (at, width), (first, _) in zip(*ranges, strict=True):
                rows[page, at : at + width] = origin[other, first : first + width]

    def refuse(self, reason: str) -> None:
        raise ValueError(reason)

    def pairs(self, task: Task) -> list[tuple[int, int]]:
        return task.pairs

    def moves(self, task: Task, component: Json, layer: int) -> bool:
        return task.layers is None or layer in task.layers

    def source(self, task: Task, component: Json, layer: int) -> tuple[Json, int]:
        return component, layer

    def turned(self, task: Task, rows: np.ndarray) -> np.ndarray:
        return flat(rows)

    def kept(self, task: Task, component: Json) -> int:
        return (component["heads"] or 1) * component["lanes"] * component["element_bytes"]

    def ranges(self, task: Task, component: Json, entry: int) -> Sequence[tuple[int, int]]:
        """First byte and bytes of each part of an entry, within its row."""
        begins = np.cumsum([0, *(s["entries"] * s["bytes"] for s in component["segments"])]).tolist()
        segments = zip(begins, component["segments"], strict=False)
        return [(begin + entry * s["bytes"], s["bytes"]) for begin, s in segments]


class Null:
    """Offers everything and does nothing: what a suite must never let pass."""

    def capabilities(self, geometry: Json, layout: str, direction: str) -> None:
        pass

    def transfer(self, *_: object) -> None:
        pass


# ---- rows of a component in the buffers of a side


def gather(geometry: Json, side: str, buffers: Buffers, component: Json, layer: int) -> np.ndarray:
    """All rows of one component and layer, `[page, token, head, byte]`, from wherever their lanes lie."""
    lanes = [data[offsets] for data, offsets, _ in _parts(geometry, side, buffers, component, layer)]
    return np.concatenate(lanes, axis=3)


def scatter(rows: np.ndarray, geometry: Json, side: str, buffers: Buffers, component: Json, layer: int) -> None:
    for data, offsets, lanes in _parts(geometry, side, buffers, component, layer):
        data[offsets] = rows.reshape(*offsets.shape[:3], -1)[..., lanes]


def flat(rows: np.ndarray) -> np.ndarray:
    return rows.reshape(*rows.shape[:2], -1)


def _parts(
    geometry: Json, side: str, buffers: Buffers, component: Json, layer: int
) -> Iterator[tuple[np.ndarray, np.ndarray, slice]]:
    """Each buffer that holds some of the lanes: its bytes, where in it the rows lie, and which lanes these are."""
    for buffer in geometry[side]:
        if component["name"] in buffer["components"] and layer in buffer["layers"]:
            first, last = buffer["first_byte"], buffer["first_byte"] + buffer["head_bytes"]
            yield buffers[buffer["name"]], _offsets(geometry, side, buffer, component, layer), slice(first, last)


def _offsets(g: Json, side: str, buffer: Json, component: Json, layer: int) -> np.ndarray:
    """Of every byte of one component and layer, `[page, token, head, byte]`."""
    tokens = g["page_size"] if component["unit"] == "token" else 1
    groups = g["head_groups"] if component["heads"] else 1
    heads, lanes, held = (component["heads"] or 1) // groups, buffer["head_bytes"], buffer["components"]
    layout, pages = g["layout"] if side == "host" else "layer_first", g[f"{side}_pages"]
    step = plain.strides(layout, len(buffer["layers"]), len(held), pages, tokens, groups, heads, lanes)
    page, token, group, head, lane = np.ix_(*map(np.arange, (pages, tokens, groups, heads, lanes)))
    begin = buffer["layers"].index(layer) * step[2] + held.index(component["name"]) * step[5]
    inside = page * step[0] + token * step[1] + group * step[3] + head * step[4] + lane
    return (begin + inside).reshape(pages, tokens, groups * heads, lanes)
