"""From a plan to what is submitted: moves of one shape together, addresses as the device sees them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch

from refimpl.plan import Loop, Move, Plan, Registration, loop_offsets
from refimpl.runtime import Runtime

if TYPE_CHECKING:
    from kernels_cupy import descriptors


@dataclass(frozen=True)
class End:
    """One side of a job: where page 0 of each layer begins, and bytes to the next page and to the next entry."""

    starts: np.ndarray
    page: int
    entries: int = 1
    entry_bytes: int = 0


@dataclass(frozen=True)
class Job:
    """Moves of one shape, their layers in one list: K and V of all layers, say."""

    host: End
    device: End
    loops: tuple[Loop, ...]
    run: int
    homes: tuple[tuple[int, int], ...]  # of each layer: the host tensor it lies in, and in which stretch of a page

    @cached_property
    def offsets(self) -> tuple[np.ndarray, np.ndarray]:
        """Bytes from an item's start to each of its runs, host and device."""
        host, device = loop_offsets(self.loops)
        return host.view(np.uint64), device.view(np.uint64)

    @cached_property
    def ends(self) -> tuple[descriptors.Ends, descriptors.Ends]:
        """Host and device as `descriptors.describe_runs` takes them."""
        host, device = (
            (end.starts.view(np.int64), offsets.view(np.int64), end.page, end.entries, end.entry_bytes)
            for end, offsets in zip((self.host, self.device), self.offsets, strict=True)
        )
        return host, device

    @cached_property
    def runs_per_item(self) -> int:
        return len(self.host.starts) * len(self.offsets[0])

    @property
    def unrolled(self) -> Job:
        """The same without loops: every run begins as if it were a layer of its own."""
        host, device = (
            replace(end, starts=(end.starts[:, None] + offsets).reshape(-1))
            for end, offsets in zip((self.host, self.device), self.offsets, strict=True)
        )
        runs = len(self.offsets[0])
        return Job(host, device, (), self.run, tuple(home for home in self.homes for _ in range(runs)))

    @cached_property
    def keeps_page_together(self) -> bool:
        """Whether the host's layers lie inside a page."""
        first, second = (*self.host.starts.tolist(), 0, 0)[:2]
        return 0 < second - first < self.host.page


def jobs(plan: Plan, layers: tuple[int | None, ...]) -> list[Job]:
    """What there is to do for some layers; worked out once."""
    key = ("jobs", layers)
    if key not in plan.derived:
        plan.derived[key] = list(_jobs(plan, layers))
    return plan.derived[key]


def runs_and_bytes(plan: Plan, layers: tuple[int | None, ...], count: int) -> tuple[int, int]:
    """Runs of `count` items, and the bytes they come to. Those of one item are worked out once."""
    key = ("runs and bytes", layers)
    per_item = plan.derived.get(key)
    if per_item is None:
        found = [(job.runs_per_item, job.run) for job in jobs(plan, layers)]
        per_item = plan.derived[key] = sum(runs for runs, _ in found), sum(runs * run for runs, run in found)
    return count * per_item[0], count * per_item[1]


def _jobs(plan: Plan, layers: tuple[int | None, ...]) -> Iterator[Job]:
    alike: dict[tuple[object, ...], list[tuple[Move, int]]] = {}
    for move in plan.moves:
        shape = move.host.page, move.device.page, move.loops, move.run, move.entries, _entry_bytes(move)
        at = [move.layers.index(layer) for layer in layers if layer in move.layers]
        alike.setdefault(shape, []).extend((move, i) for i in at)
    for found in filter(None, alike.values()):
        move = found[0][0]
        host, device = (
            End(np.array(starts, np.uint64), side.page, move.entries, _entry_bytes(move))
            for side, starts in (
                (move.host, [m.host.starts[i] for m, i in found]),
                (move.device, [m.device.starts[i] for m, i in found]),
            )
        )
        yield Job(host, device, move.loops, move.run, tuple(_home(m, i) for m, i in found))


def _entry_bytes(move: Move) -> int:
    """Nothing where a page is one entry: there is no next one to go to."""
    return move.entry_bytes if move.entries > 1 else 0


def _home(move: Move, at: int) -> tuple[int, int]:
    begin = move.host.tensors[at].data_ptr()
    return begin, (move.host.starts[at] - begin) // max(move.host.page, 1)


# ---------------------------------------------------------------------------------------------------------------------
# Addresses of registered memory.


def offset(registration: Registration) -> int:
    """Bytes from a host address to the device's."""
    return 0 if registration.alias is None else registration.alias - registration.begin


def one_offset(registrations: tuple[Registration, ...]) -> bool:
    """Whether the way from a host address to the device's is the same everywhere."""
    return len(set(map(offset, registrations))) <= 1


def needs_table(plan: Plan) -> bool:
    """Whether kernels have to look up every address of the host's memory; found out once."""
    needed = plan.derived.get("needs table")
    if needed is None:
        needed = plan.derived["needs table"] = not one_offset(plan.registrations)
    return needed


def out_of_reach(plan: Plan) -> str:
    """Why kernels cannot reach the host's memory, or nothing; found out once."""
    reason = plan.derived.get("out of reach")
    if reason is None:
        unseen = any(r.alias is None for r in plan.registrations)
        reason = plan.derived["out of reach"] = "host memory has no address on the device" if unseen else ""
    return reason


def require_reach(plan: Plan) -> None:
    if out_of_reach(plan):
        raise ValueError(f"{out_of_reach(plan)}: use backend 'direct', or 'staged' with index lists on the host")


def mapped(plan: Plan, end: End) -> End:
    """An end in host memory as the device sees it, unless its kernel will look up every address."""
    if not plan.registrations or not one_offset(plan.registrations):
        return end
    return replace(end, starts=device_addresses(plan, end.starts))


def table_of(runtime: Runtime, registrations: tuple[Registration, ...]) -> torch.Tensor | None:
    """For a kernel that has to look up every address; None where it has not."""
    if one_offset(registrations):
        return None
    return runtime.upload(np.array([(r.begin, r.end, r.alias) for r in registrations], np.uint64))


def begins_and_offsets(plan: Plan) -> tuple[np.ndarray, np.ndarray]:
    """Where each registration begins, and how far from there the device sees it; found out once."""
    found = plan.derived.get("begins and offsets")
    if found is None:
        begins = np.array([r.begin for r in plan.registrations], np.uint64)
        offsets = np.array(list(map(offset, plan.registrations)), np.int64).view(np.uint64)
        found = plan.derived["begins and offsets"] = begins, offsets
    return found


def device_begins(plan: Plan) -> np.ndarray:
    """Where allocations of the device pool begin, ascending (int64); found out once."""
    found = plan.derived.get("device begins")
    if found is None:
        tensors = {id(tensor): tensor for move in plan.moves for tensor in move.device.tensors}
        begins = {tensor.untyped_storage().data_ptr() for tensor in tensors.values()}
        found = plan.derived["device begins"] = np.array(sorted(begins), np.int64)
    return found


def registration_of(begins: np.ndarray, addresses: np.ndarray) -> np.ndarray:
    """Number of the registration that holds each address, of those that begin at `begins`."""
    return np.maximum(np.searchsorted(begins, addresses, side="right") - 1, 0)


def device_addresses(plan: Plan, addresses: np.ndarray) -> np.ndarray:
    """Host addresses as the device sees them."""
    begins, offsets = begins_and_offsets(plan)
    if not offsets.any():
        return addresses
    return addresses + offsets[registration_of(begins, addresses)]
