"""What of an item lies together in host memory: the pieces that backend `staged` copies at once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from kernels_cupy.jobs import End, Job, jobs, runs_and_bytes
from refimpl.plan import Loop, Plan


@dataclass(frozen=True)
class Piece:
    """Bytes of an item that lie together in host memory: where they begin in item 0, how many, and how to go on."""

    begin: int
    nbytes: int
    page: int
    entries: int
    entry_bytes: int

    @property
    def end(self) -> End:
        return End(np.array([self.begin], np.uint64), self.page, self.entries, self.entry_bytes)


@dataclass(frozen=True)
class Part:
    """Runs of one shape whose layers begin in pieces of one size: `offsets` bytes after the begin of `pieces`."""

    pieces: tuple[int, ...]
    offsets: np.ndarray
    item_bytes: int
    device: End
    loops: tuple[Loop, ...]
    run: int


def pieces(plan: Plan, layers: tuple[int | None, ...], exact: bool) -> list[Piece]:
    """Pieces of host memory that hold every run of an item; `exact`: nothing else, for they will be overwritten.

    Never more than an item has in all: between the heads of a rank lie those of others, and there is no room for them.
    """
    key = ("pieces", layers, exact)
    if key not in plan.derived:
        found = list(_pieces(plan, layers, exact))
        if sum(piece.nbytes for piece in found) > runs_and_bytes(plan, tuple(plan.layers), 1)[1]:
            found = list(_pieces(plan, layers, exact=True))
        plan.derived[key] = found
    return plan.derived[key]


def strides_of(plan: Plan, layers: tuple[int | None, ...], exact: bool) -> np.ndarray:
    """The pieces as numbers, a row each, as `descriptors.describe_chunks` takes them."""
    key = ("strides of pieces", layers, exact)
    if key not in plan.derived:
        rows = [(p.begin, p.nbytes, p.page, p.entries, p.entry_bytes) for p in pieces(plan, layers, exact)]
        plan.derived[key] = np.array(rows, np.int64)
    return plan.derived[key]


def _pieces(plan: Plan, layers: tuple[int | None, ...], exact: bool) -> Iterator[Piece]:
    """Runs of one home and stride together: those of another component may lie next to it, and are another piece."""
    groups: dict[tuple[int, int, int, tuple[int, int]], list[np.ndarray]] = {}
    for job in jobs(plan, layers):
        begins = (job.host.starts[:, None] + job.offsets[0]).astype(np.int64)
        for row, home in zip(begins, job.homes, strict=True):
            key = job.host.page, job.host.entries, job.host.entry_bytes, home
            groups.setdefault(key, []).append(np.stack([row, row + job.run], axis=1))
    for (page, entries, entry_bytes, _), spans in groups.items():
        longest = entry_bytes if entries > 1 else page
        for begin, end in joined(np.concatenate(spans), longest, exact):
            yield Piece(begin, end - begin, page, entries, entry_bytes)


def joined(spans: np.ndarray, longest: int, exact: bool) -> Iterator[tuple[int, int]]:
    """Spans `[begin, end)` joined up to a length: all that fit, or (`exact`) those that touch."""
    spans = spans[np.argsort(spans[:, 0], kind="stable")]
    first = np.flatnonzero(np.append(True, spans[1:, 0] != spans[:-1, 1]))
    last = np.append(first[1:], len(spans)) - 1
    begin, end = spans[first[0], 0], spans[last[0], 1]
    for low, high in zip(spans[first[1:], 0].tolist(), spans[last[1:], 1].tolist(), strict=True):
        if not exact and high - begin <= longest:
            end = high
            continue
        yield int(begin), int(end)
        begin, end = low, high
    yield int(begin), int(end)


def parts(plan: Plan, layers: tuple[int | None, ...], exact: bool) -> list[Part]:
    """The jobs of some layers, their host side within the pieces."""
    key = ("parts", layers, exact)
    if key not in plan.derived:
        found = pieces(plan, layers, exact)
        plan.derived[key] = [part for job in jobs(plan, layers) for part in _parts(job, found)]
    return plan.derived[key]


def _parts(job: Job, found: list[Piece]) -> Iterator[Part]:
    steps = job.host.page, job.host.entries, job.host.entry_bytes
    begins = np.array([p.begin if (p.page, p.entries, p.entry_bytes) == steps else -1 for p in found])
    ends = begins + np.array([p.nbytes for p in found])
    low = job.host.starts.astype(np.int64)[:, None]
    high = low + int(job.offsets[0].max()) + job.run
    inside = (begins >= 0) & (begins <= low) & (high <= ends)
    if job.loops and not inside.any(axis=1).all():  # heads of a rank, with those of others between them
        yield from _parts(job.unrolled, found)
        return
    if not inside.any(axis=1).all():
        raise RuntimeError("a run of the plan lies in no piece of host memory")
    at = inside.argmax(axis=1)
    sizes = np.array([p.nbytes for p in found])[at]
    for size in np.unique(sizes):
        mine = sizes == size
        device = replace(job.device, starts=job.device.starts[mine])
        offsets = low[mine, 0] - begins[at[mine]]
        yield Part(tuple(at[mine].tolist()), offsets, int(size), device, job.loops, job.run)
