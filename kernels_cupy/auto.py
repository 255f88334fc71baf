"""Backend `auto`: for every transfer, the backend that a table measured on this device says is the fastest.

What counts is how long one transfer more takes where they follow each other, as layers do: the device's time or the
host's, whichever is longer. Both depend on how many bytes lie together (a run for `kernel` and `direct`, a page's piece
for `staged`) and on the direction. `calibrate.py` measures them; without a table of this device and driver the one of
an H200 serves.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Container
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kernels_cupy import CACHE
from kernels_cupy.copy_engine import CopyEngine, count_descriptors, joined_items
from kernels_cupy.jobs import out_of_reach, runs_and_bytes
from kernels_cupy.lists import tell_uploads
from kernels_cupy.pieces import pieces
from kernels_cupy.sm_copy import SmCopy
from kernels_cupy.staged import Staged
from refimpl.backends.protocol import Backend, Setup
from refimpl.devices import platform_of
from refimpl.geometry import NO_LAYER
from refimpl.indices import Items
from refimpl.plan import Plan
from refimpl.receipt import Receipt
from refimpl.support import Refusal, support
from refimpl.teardown import call_all
from refimpl.transfer import Transfer

BUILT_IN = Path(__file__).with_name("h200.json")
FORM = "call and piece"  # of a table; one of another form is not found, and has to be measured again
WHO = ("device", "host")
COARSE = 8  # shares of pages behind each other that are told apart
BACKENDS: dict[str, Callable[[Setup], Backend]] = {"kernel": SmCopy, "direct": CopyEngine, "staged": Staged}


@dataclass(frozen=True)
class Candidate:
    """What a backend would take for a transfer, in seconds; or why it is none."""

    backend: str
    seconds: float = float("inf")
    reason: str = ""


@dataclass(frozen=True)
class Demand:
    """What a transfer asks of a backend: bytes that cross the bus, in contiguous pieces of `each` bytes on average."""

    nbytes: int
    each: float


class Auto:
    def __init__(self, setup: Setup) -> None:
        self._table = table(setup.platform)
        self._backends: dict[str, Backend] = {}
        self._refused: dict[str, str] = {}
        for name, backend in BACKENDS.items():
            answer = support(setup.spec, setup.layout, name, "backup", setup.platform)
            if isinstance(answer, Refusal):
                self._refused[name] = answer.reason
                continue
            try:
                self._backends[name] = backend(setup)
            except (MemoryError, torch.OutOfMemoryError, ImportError) as failure:
                # A staging buffer that cannot be had, a kernel that does not compile.
                self._refused[name] = str(failure)
        if not self._backends:
            raise ImportError(f"none of {', '.join(BACKENDS)} can be used here: {self._refused}")

    def stays(self, side: str, indices: torch.Tensor) -> bool:
        return self._backends["kernel"].stays(side, indices) if "kernel" in self._backends else False

    def read(self, indices: torch.Tensor) -> torch.Tensor:
        return next(iter(self._backends.values())).read(indices)

    def place(self, plan: Callable[[], Plan], layers: tuple[int | None, ...], items: Items, direction: str) -> None:
        """For whoever will be chosen: for all layers, for the first one if they come one by one, for side states.

        Lists that are left on the device, for each that may be chosen: whoever gave them may change them next.
        """
        made = plan()
        owned = tuple(layer for layer in layers if layer in made.layers)
        first, side_states = owned[:1] if direction == "load" else (), NO_LAYER if None in made.layers else ()
        moved = filter(None, (owned, first, side_states))
        chosen = {self.chosen(made, portion, items, direction) for portion in moved}
        self._place(self._backends if items.unchecked else chosen, plan, layers, items, direction)

    def _place(
        self,
        names: Container[str],
        plan: Callable[[], Plan],
        layers: tuple[int | None, ...],
        items: Items,
        direction: str,
    ) -> None:
        for name, backend in self._backends.items():  # `kernel` comes first, and what it needs serves `staged`
            if name in names:
                backend.place(plan, layers, items, direction)

    def candidates(self, plan: Plan, layers: tuple[int | None, ...], items: Items, direction: str) -> list[Candidate]:
        """Every backend, fastest first, with the time that the table predicts or the reason why it is out."""
        found = [Candidate(name, reason=reason) for name, reason in self._refused.items()]
        for name in self._backends:
            unread = [
                pages.side for pages in items.unchecked if not self._backends[name].stays(pages.side, pages.indices)
            ]
            by_kernels = name == "kernel" or (name == "staged" and direction == "backup" and items.unchecked)
            if by_kernels and out_of_reach(plan):
                found.append(Candidate(name, reason=out_of_reach(plan)))
            elif unread:
                found.append(Candidate(name, reason=f"the {unread[0]} indices stay on the device"))
            else:
                demand = DEMANDS[name](plan, layers, items, direction)
                found.append(Candidate(name, predicted(self._table["backends"][name][direction], demand)))
        return sorted(found, key=lambda candidate: candidate.seconds)

    def execute(self, plan: Plan, layers: tuple[int | None, ...], items: Items, direction: str) -> Receipt:
        key = "auto", layers  # kept with the lists too: the host's time is short
        chosen = items.placed.get(key)
        if chosen is None:
            chosen = items.placed[key] = self.chosen(plan, layers, items, direction)
        if items.unchecked:  # read once on every stream: for the next layers somebody else may be chosen
            self._place(self._backends, lambda: plan, layers, items, direction)
        made = self._backends[chosen].execute(plan, layers, items, direction)
        uploads = made.index_uploads + tell_uploads(items)  # by `direct`, what was sent for others
        path, counts = f"auto: {made.path}", (made.bytes, made.descriptors, made.kernels, uploads, made.host_syncs)
        return Receipt(path, *counts, made.event)

    def chosen(self, plan: Plan, layers: tuple[int | None, ...], items: Items, direction: str) -> str:
        """Made once for transfers that are about as large and as scattered: it takes longer than submitting them."""
        joined = COARSE * joined_items(items) // max(len(items), 1)
        sides = tuple(pages.side for pages in items.unchecked)
        key = "auto", layers, direction, len(items).bit_length(), joined, sides
        if key not in plan.derived:
            plan.derived[key] = choice(self.candidates(plan, layers, items, direction))
        return plan.derived[key]

    def close(self) -> None:
        call_all(backend.close for backend in self._backends.values())


def choice(found: list[Candidate]) -> str:
    """The first candidate, or `ValueError` if all are out."""
    if found[0].reason:
        reasons = "; ".join(f"{candidate.backend}: {candidate.reason}" for candidate in found)
        raise ValueError(f"no backend can take this transfer ({reasons}); index lists on the host leave more choice")
    return found[0].backend


def predicted(times: dict[str, Any], demand: Demand) -> float:
    """Seconds of one transfer more, by the slower of the two that work at it."""
    return max(seconds_of(times[who], demand) for who in WHO)


def seconds_of(times: dict[str, Any], demand: Demand) -> float:
    """Seconds of the device or of the host: some for the call, and for every piece as long as pieces of its size take.

    Between sizes that were measured a piece's time is interpolated. A shorter one takes as long as the shortest (the
    cost of a descriptor, say), a longer one passes at the rate of the longest. No rate is believed that a longer piece
    does not reach as well: drivers treat some lengths now this way, now that.
    """
    sizes, seconds = (np.array(column, float) for column in zip(*times["piece_s"], strict=True))
    of_a_byte = np.maximum.accumulate((seconds / sizes)[::-1])[::-1]
    piece = np.interp(min(demand.each, sizes[-1]), sizes, of_a_byte * sizes) * max(demand.each / sizes[-1], 1)
    return times["call_s"] + demand.nbytes / demand.each * float(piece)


def _runs(plan: Plan, layers: tuple[int | None, ...], items: Items, direction: str) -> Demand:
    runs, nbytes = runs_and_bytes(plan, layers, len(items))
    return Demand(nbytes, nbytes / runs)


def _descriptors(plan: Plan, layers: tuple[int | None, ...], items: Items, direction: str) -> Demand:
    nbytes = _runs(plan, layers, items, direction).nbytes
    return Demand(nbytes, nbytes / count_descriptors(plan, layers, items))


def _pieces(plan: Plan, layers: tuple[int | None, ...], items: Items, direction: str) -> Demand:
    found = pieces(plan, layers, exact=direction == "backup")
    nbytes = sum(piece.nbytes for piece in found)
    return Demand(nbytes * len(items), nbytes / len(found))


DEMANDS = {"kernel": _runs, "direct": _descriptors, "staged": _pieces}


# ---------------------------------------------------------------------------------------------------------------------


def table(device: str) -> dict[str, Any]:
    """Times of a device, or of an H200 if it was not calibrated."""
    path = table_path(device) if platform_of(device) == "cuda" else BUILT_IN
    return _read(path if path.exists() else BUILT_IN)


@cache
def _read(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as damage:
        raise ValueError(
            f"{path} is damaged ({damage}): delete it, or run python -m kernels_cupy.calibrate"
        ) from damage


def table_path(device: str) -> Path:
    """Where the table of a GPU is kept: by its model, driver and kernels, and its form. GPUs of one model share it."""
    from kernels_cupy.specs import HASH
    from refimpl.cudart import cudart

    name = f"{torch.cuda.get_device_name(device)} driver {cudart().driver} kernels {HASH} {FORM}".replace("/", " ")
    return CACHE / f"{name}.json"


def explain(transfer: Transfer) -> str:
    """Candidates for a prepared transfer of all layers (or of side states alone), their predicted times, the choice."""
    backend = transfer.backend
    if not isinstance(backend, Auto):
        raise ValueError(f"only backend 'auto' chooses, this transfer goes by {transfer.path!r}")
    plan, layers = transfer.plan(), transfer.layers or NO_LAYER
    _, nbytes = runs_and_bytes(plan, layers, len(transfer.items))
    if not nbytes:
        return "nothing to move"
    found = backend.candidates(plan, layers, transfer.items, transfer.direction)
    lines = [
        f"{c.backend:7} out: {c.reason}"
        if c.reason
        else f"{c.backend:7} {nbytes / c.seconds / 1e9:5.1f} GB/s predicted, {c.seconds * 1e6:,.1f} µs"
        for c in found
    ]
    return "\n".join([*lines, f"choice: {backend.chosen(plan, layers, transfer.items, transfer.direction)}"])
