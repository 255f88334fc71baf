"""Wrong on purpose: for each fault of the manifest an adapter that has it, `verify.adapters.wrong:LayersSwapped`.

They are the NumPy adapter with the one difference that `verify.vectors.faults` describes. Their reports never verify.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from refimpl import Component
from verify.adapters.plain import Numpy, Task, flat
from verify.adapters.protocol import Json
from verify.vectors import faults
from verify.vectors.cases import FAMILIES, Case, Geometry
from verify.vectors.payload import SIDE
from verify.vectors.reported import REPORTED

GEOMETRIES: dict[str, Geometry] = {
    **{g.name: g for family in FAMILIES.values() for g in family},
    **{r.geometry.name: r.geometry for family in REPORTED.values() for r in family},
}


class Wrong(Numpy):
    """NumPy with a fault."""

    def __init__(self, flag: str) -> None:
        self.flag, self.fault = flag, faults.FLAGS.get(flag, faults.Fault(""))
        self.unchecked = {reason for reason, (name, _) in faults.REFUSALS.items() if name == flag}

    def capabilities(self, geometry: Json, layout: str, direction: str) -> str | None:
        return None if "layout" in self.unchecked else super().capabilities(geometry, layout, direction)

    def refuse(self, reason: str) -> None:
        if reason not in self.unchecked:
            super().refuse(reason)

    def pairs(self, task: Task) -> list[tuple[int, int]]:
        return self.fault.pairs(_task(task)) if task.pairs else []

    def moves(self, task: Task, component: Json, layer: int) -> bool:
        return self.fault.moves(_task(task), _component(task, component), _layer(layer))

    def source(self, task: Task, component: Json, layer: int) -> tuple[Json, int]:
        found, at = self.fault.source(_task(task), _component(task, component), _layer(layer))
        named = {c["name"]: c for c in task.geometry["components"]}
        return named[found.name], SIDE if at is None else at

    def turned(self, task: Task, rows: np.ndarray) -> np.ndarray:
        tokens, heads = self.fault.turned
        return flat(np.roll(rows, (-tokens, -heads), axis=(1, 2)))

    def kept(self, task: Task, component: Json) -> int:
        return self.fault.kept(_task(task), _component(task, component))

    def ranges(self, task: Task, component: Json, entry: int) -> Sequence[tuple[int, int]]:
        return self.fault.ranges(_component(task, component), entry)


def _geometry(task: Task) -> Geometry:
    return GEOMETRIES[task.geometry["id"].split("/")[0]]


def _component(task: Task, component: Json) -> Component:
    return _geometry(task).spec.component(component["name"])


def _layer(number: int) -> int | None:
    return None if number == SIDE else number


def _task(task: Task) -> faults.Task:
    """What was asked, in the words of the simulated faults."""
    geometry = _geometry(task)
    each = geometry.spec.entries if task.entries else 1
    host, device = geometry.host_pages * each, geometry.device_pages * each
    counts = (host, device) if task.direction.startswith("backup") else (device, host)
    layers = None if task.layers is None else tuple(map(_layer, task.layers))
    case = Case("", task.direction, (), (), "", "entries" if task.entries else "pages", layers)
    return faults.Task(geometry, case, task.pairs, counts)


FLAGS = (*faults.FLAGS, *dict.fromkeys(name for name, _ in faults.REFUSALS.values()))


def __getattr__(name: str) -> Wrong:
    if name not in FLAGS:
        raise AttributeError(f"there is no fault {name!r}; there are {', '.join(FLAGS)}")
    return Wrong(name)
