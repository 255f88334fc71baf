"""Backend `numba`: the plan as parallel loops over runs, for pools in CPU memory.

A process that has used it must not copy in a forked child: the OpenMP runtime ends the child with a message. Use the
start methods "spawn" or "forkserver" of `multiprocessing`, or backend `torch`.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
from llvmlite import ir
from numba import prange
from numba.core import cgutils, types
from numba.extending import intrinsic

from refimpl.backends.protocol import OnTheHost
from refimpl.compiled import compiled
from refimpl.indices import Items
from refimpl.plan import Loop, Move, Plan, Side
from refimpl.receipt import Receipt

MAX_LOOPS = 3  # token, head group, head: a plan nests no more
PARTS = 64  # of a copy, divided between the threads

# Runs from this length on bypass the caches, line by line: an ordinary store first reads the line that it is about to
# overwrite, half as much traffic again. Part of a line would cost more than that, so memcpy takes what is outside.
STREAM_FROM = 256
LINE = 64

# The processor cannot guess where the next item lies, so the first bytes of it are asked for one item ahead.
PREFETCHED = 512

# numba's own thread pool ("workqueue") runs one parallel region at a time; the other pools need no lock.
_one_at_a_time = threading.Lock()


class NumbaBackend(OnTheHost):
    def execute(self, plan: Plan, layers: tuple[int | None, ...], items: Items, direction: str) -> Receipt:
        receipt = Receipt("numba")
        host_items, device_items = items.checked()
        for move, positions in _by_move(plan, layers):
            order = "F" if _keeps_page_together(move) else "C"
            host = _starts(move, move.host, positions, host_items).ravel(order)
            device = _starts(move, move.device, positions, device_items).ravel(order)
            counts, host_steps, device_steps = _loops(move.loops)
            with _one_at_a_time:
                if direction == "backup":
                    copy_runs(host, device, counts, host_steps, device_steps, move.run)
                else:
                    copy_runs(device, host, counts, device_steps, host_steps, move.run)
            runs = len(positions) * len(items) * move.runs_per_item
            receipt += Receipt("numba", runs * move.run, runs)
        return receipt


@intrinsic
def copy_bytes(typingctx: Any, to: Any, source: Any, nbytes: Any) -> Any:
    """memcpy between two addresses."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        to, source, nbytes = args
        pointer = cgutils.voidptr_t
        cgutils.raw_memcpy(
            builder, builder.inttoptr(to, pointer), builder.inttoptr(source, pointer), nbytes, itemsize=1
        )
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate  # what numba wants of an intrinsic


@intrinsic
def stream_line(typingctx: Any, to: Any, source: Any) -> Any:
    """Copy one line with stores that bypass the caches; `to` is its address. Visible to others after `fence`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        line = ir.VectorType(ir.IntType(64), LINE // 8).as_pointer()
        to, source = (builder.inttoptr(address, line) for address in args)
        store = builder.store(builder.load(source, align=1), to, align=LINE)
        store.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)]))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic
def prefetch(typingctx: Any, source: Any) -> Any:
    """Have a line brought into the caches, soon to be read."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer, number = cgutils.voidptr_t, ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [pointer, number, number, number])
        function = builder.module.declare_intrinsic("llvm.prefetch", [pointer], kind)
        for_reading, keep, data = number(0), number(3), number(1)
        builder.call(function, [builder.inttoptr(args[0], pointer), for_reading, keep, data])
        return context.get_dummy_value()

    return types.void(types.int64), generate


@intrinsic
def fence(typingctx: Any) -> Any:
    """Streaming stores before it come before whatever follows."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


@compiled()
def stream_bytes(to: int, source: int, nbytes: int) -> None:
    """memcpy by streaming stores, but for what lies outside whole lines of the destination."""
    at = -to % LINE
    copy_bytes(to, source, at)  # pyright: ignore[reportCallIssue] - numba supplies the typing context
    while at + LINE <= nbytes:
        stream_line(to + at, source + at)  # pyright: ignore[reportCallIssue]
        at += LINE
    copy_bytes(to + at, source + at, nbytes - at)  # pyright: ignore[reportCallIssue]


@compiled(parallel=True)
def copy_runs(
    to: np.ndarray, source: np.ndarray, counts: np.ndarray, to_steps: np.ndarray, source_steps: np.ndarray, run: int
) -> None:
    """Copy `run` bytes from every start and step of three nested loops. All arrays int64, addresses in bytes."""
    for part in prange(PARTS):
        for i in range(len(to) * part // PARTS, len(to) * (part + 1) // PARTS):
            ahead = source[min(i + 1, len(to) - 1)]
            for at in range(0, min(run, PREFETCHED), LINE):
                prefetch(ahead + at)  # pyright: ignore[reportCallIssue]
            for a in range(counts[0]):
                for b in range(counts[1]):
                    for c in range(counts[2]):
                        t = to[i] + a * to_steps[0] + b * to_steps[1] + c * to_steps[2]
                        s = source[i] + a * source_steps[0] + b * source_steps[1] + c * source_steps[2]
                        if run < STREAM_FROM:
                            copy_bytes(t, s, run)  # pyright: ignore[reportCallIssue]
                        else:
                            stream_bytes(t, s, run)
        fence()  # pyright: ignore[reportCallIssue]


def _by_move(plan: Plan, layers: tuple[int | None, ...]) -> list[tuple[Move, list[int]]]:
    """Each move with all its layers at once: the loops run over layers and items together."""
    positions = [(move, [move.layers.index(layer) for layer in layers if layer in move.layers]) for move in plan.moves]
    return [(move, at) for move, at in positions if at]


def _starts(move: Move, side: Side, positions: list[int], items: np.ndarray) -> np.ndarray:
    """Address of every item in every layer, `[layer, item]`."""
    return np.array(side.starts)[positions, None] + move.offsets(side, items)


def _keeps_page_together(move: Move) -> bool:
    """Whether the host's layers lie inside a page: then page after page is the order that walks through its memory."""
    first, second = (*move.host.starts, 0, 0)[:2]
    return len(move.layers) > 1 and 0 < second - first < move.host.page


def _loops(loops: Sequence[Loop]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Counts, host steps and device steps, padded to three loops from the outside."""
    padded = [Loop(1, 0, 0)] * (MAX_LOOPS - len(loops)) + list(loops)
    return (
        np.array([loop.count for loop in padded]),
        np.array([loop.host for loop in padded]),
        np.array([loop.device for loop in padded]),
    )
