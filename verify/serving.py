"""A small server without a model: prefixes with known bytes go into a tree, to the host, back, and are read.

Every page says which tokens it stands for: its bytes are a hash of the tokens up to its end, and of the pool, component
and layer they lie in. So whatever is read of a prefix is right or wrong for certain, wherever its slots came from.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch

from refimpl.assembler import build_stack
from refimpl.controller import Controller
from refimpl.emulated import HostQueue, QueueRuntime
from refimpl.hooks import Hooks
from refimpl.indices import slots_of
from refimpl.invariants import require_invariants
from refimpl.operations import Ack
from refimpl.radix import Match, Node, Ticket
from refimpl.support import DIRECTIONS
from verify.checked import CheckedCache
from verify.toys import STACKS

BYTE = torch.uint8
WINDOW = 6  # tokens; in pages of 4 it covers one page and part of another
SIDES = ("device", "host")
Page = tuple[int, bytes]  # its number, and the tokens up to its end


@dataclass(frozen=True)
class Rows:
    """One layer of a component, on both sides as bytes `[page, byte]`."""

    pool: str
    component: str
    layer: int | None
    device: torch.Tensor
    host_parts: list[torch.Tensor]

    def on(self, side: str, pages: Sequence[int]) -> torch.Tensor:
        if side == "device":
            return self.device[list(pages)]
        parts = [part[list(pages)].flatten(2, 3).contiguous().view(BYTE) for part in self.host_parts]
        return torch.cat(parts, -1).reshape(len(pages), -1)

    def right(self, pages: Sequence[Page]) -> torch.Tensor:
        """What pages of a prefix must hold."""
        nbytes = self.device.shape[1]
        return torch.stack([content(self.pool, self.component, self.layer, tokens, nbytes) for _, tokens in pages])


@lru_cache(maxsize=1 << 14)
def content(pool: str, component: str, layer: int | None, tokens: bytes, nbytes: int) -> torch.Tensor:
    name = f"{pool}/{component}/{layer}/".encode()
    return torch.frombuffer(bytearray(hashlib.shake_128(name + tokens).digest(nbytes)), dtype=BYTE)


@dataclass(eq=False)
class Reading:
    """What a request was given to read. Its bytes mean something if none of the loads it waited for has failed."""

    loads: list[Ticket]
    seen: list[tuple[Rows, list[Page], torch.Tensor]]
    missing: int

    @property
    def over(self) -> bool:
        return not self.missing and all(load.done for load in self.loads)


class _Counting(CheckedCache):
    """Who evicts may wait, and what ends then is counted too."""

    def __init__(self, counts: Counter[str], *arguments: Any) -> None:
        super().__init__(*arguments)
        self._counts = counts

    def check(self, wait: bool = False) -> list[Ack]:
        acks = super().check(wait)
        self._counts.update(f"{ack.direction}s that {'failed' if ack.error else 'arrived'}" for ack in acks)
        return acks


class Serving:
    """A stack of `STACKS`, a controller and a tree; `insert`, `read` and `check` are what a server does with them.

    windows  of pools that have one; states and riders are handled as the pools say
    """

    def __init__(
        self,
        kind: str = "mha",
        layout: str = "page_first",
        backend: str = "torch",
        platform: str = "cpu",
        policy: str = "write_through",
        page_size: int = 4,
        device_pages: int = 9,
        host_ratio: float = 1.0,
        windows: dict[str, int] | None = None,
        **options: Any,
    ) -> None:
        specs = STACKS[kind](page_size)
        self.stack = build_stack(
            specs, layout, backend, device_pages=device_pages, host_ratio=host_ratio, platform=platform, **options
        )
        self.page_size, self.policy = page_size, policy
        self.windows = windows if windows is not None else {name: WINDOW for name in specs if name == "swa"}
        self.rows = list(self._all_rows())
        self.owners = list(self.stack.device_slots)
        self.riders = {owner: [n for n in specs if self.stack.owner(n) == owner] for owner in self.owners}
        self.allocators = {("device", name): slots for name, slots in self.stack.device_slots.items()}
        self.allocators |= {("host", name): self.stack.host.pools[name].allocator for name in self.owners}
        self.readings: list[Reading] = []
        self.counts = Counter[str]()
        self._unwritten: dict[tuple[str, int], object] = {}
        self.open()

    def open(self) -> None:
        self.hooks, self.producer = Hooks(), None
        steps = HostQueue() if self.stack.platform == "cpu" else None  # what it computes is queued too
        self.controller = Controller(self.stack, self.hooks, runtime=steps)
        self.runtime = self.controller.runtime
        self.cache = _Counting(self.counts, self.controller, self.policy, self.windows)
        self.states = [n for n in self.owners if any(c.unit == "slot" for c in self.stack.specs[n].components)]

    def reopen(self) -> None:
        """A tree and a controller are given up in the middle of whatever they were doing; the pools stay."""
        self.let_go()
        self.cache.clear()
        self.controller.close()
        self.readings.clear()
        self.open()

    def close(self) -> None:
        self.reopen()
        self.check_slots()
        self.stack.close()

    def _all_rows(self) -> Iterator[Rows]:
        for name, spec in self.stack.specs.items():
            device, host = self.stack.device[name], self.stack.host.pools[name]
            for c in spec.components:
                for layer in spec.layers_of(c) if c.row_bytes else ():
                    held = device.buffer(c.name, layer).view(BYTE).reshape(device.num_pages, -1)
                    yield Rows(name, c.name, layer, held, list(host.part_views(c.name, layer)))

    # ---- what a server does

    def insert(self, tokens: Sequence[int], only: dict[str, int] | None = None) -> bool:
        """Compute a prefix and remember it; False when there is no room. `only`: for so many tokens at the end."""
        slots = self._compute(tokens, {name: (only or {}).get(name, len(tokens)) for name in self.owners})
        if slots is None:
            return False
        self._give_back(self.cache.insert(tokens, slots))
        return True

    def extend(self, tokens: Sequence[int]) -> bool:
        """Go on behind what there is of a prefix, and remember all of it, by the slots of its match and its own."""
        match = self.cache.match(tokens)
        if not self.load_back(match):
            return False
        self.start_loading()
        self.cache.use(match)
        own = self._compute(tokens, dict.fromkeys(self.owners, len(tokens) - match.length))
        before = {name: self._tail(match, name) for name in self.owners}
        gone = len(before[self.cache.anchor]) < match.length  # with a load that failed while room was made
        if own is not None and not gone:
            slots = {name: s if name in self.states else torch.cat([before[name], s]) for name, s in own.items()}
            own = self.cache.insert(tokens, slots)
            self.require_not_in_the_tree(own)
            self.counts["prefixes extended"] += bool(match.length)
        self.cache.release(match)
        self._give_back(own or {})
        return own is not None and not gone

    def _compute(self, tokens: Sequence[int] | np.ndarray, counts: dict[str, int]) -> dict[str, torch.Tensor] | None:
        """Slots of so many tokens at the end, and the state behind them; None, and nothing is taken: no room."""
        slots: dict[str, torch.Tensor] = {}
        for name in self.owners:
            count = 1 if name in self.states else counts[name]
            found = self._take(name, count if name in self.states else -(-count // self.page_size) * self.page_size)
            if found is None:
                self._give_back(slots)
                return None
            self._write(name, found, self._ends(name, tokens, count))
            slots[name] = found[:count]
        return slots

    @staticmethod
    def _tail(match: Match, name: str) -> torch.Tensor:
        """Device slots of a pool at the end of a match, without a gap."""
        parts = [torch.empty(0, dtype=torch.int64)]
        for node in reversed(match.nodes):
            parts.insert(0, node.device.get(name, parts[-1]))
            if len(parts[0]) < len(node.key):
                break
        return torch.cat(parts)

    def read(self, tokens: Sequence[int], keep: bool = False) -> Match | None:
        """Let a request read what there is of a prefix, layer by layer. The match, in use if `keep`; None: nothing."""
        match = self.cache.match(tokens)
        if not match.length or not self.load_back(match):
            return None
        self.start_loading()
        if self.controller.queued("load"):  # too many loads are under way, or they are held
            return None
        self._require_all_of(match)
        loads = [n.ticket for n in match.nodes if n.ticket and n.ticket.direction == "load"]
        reading, prefix = Reading(loads, [], 0), [page for node in match.nodes for page in self.pages(node, "device")]
        self.controller.set_consumer(self.producer if match.arriving else None)
        self.cache.use(match)
        try:
            for layer in range(self.stack.num_layers):
                self.controller.wait_until(layer)
                self._submit_reading(reading, prefix, (layer, None) if layer == 0 else (layer,))
            self.readings.append(reading)
        except RuntimeError as failure:
            if not (match.arriving and "has failed" in str(failure)):
                raise
        if not keep:
            self.cache.release(match)  # what comes next in its place comes after it in the stream
        return match

    def load_back(self, match: Match) -> bool:
        self._may_wait()
        return self.cache.load_back(match)

    def start_loading(self) -> None:
        try:
            producer = self.controller.start_loading()
        except RuntimeError:  # too many are under way
            return
        if producer is not None:
            self.producer = producer

    def evict(self, side: str, name: str, pages: int) -> None:
        self._may_wait()
        evict = self.cache.evict if side == "device" else self.cache.evict_host
        before, unit = self.allocators[side, name].available_size(), self.stack.specs[name].page_size
        freed = evict(name, pages * unit)
        now = self.allocators[side, name].available_size()
        waited = side == "device" and self.policy == "write_back"  # loads that have failed gave their slots back
        assert now == before + freed or (waited and now > before + freed), "evict tells how many slots are free now"

    def check(self, wait: bool = False) -> list[Ack]:
        if wait:
            self.let_go()
        return self.cache.check(wait)

    def hold(self, step: str) -> None:
        self.hooks.hold(step)

    def let_go(self) -> None:
        self.hooks.release()

    def settle(self) -> None:
        """Until nothing is queued or under way."""
        self.let_go()
        while any(self.controller.queued(each) or self.controller.under_way(each) for each in DIRECTIONS):
            self.controller.start_writing()
            self.start_loading()
            self.check(wait=True)
        self.synchronize()

    def synchronize(self) -> None:
        if isinstance(self.runtime, QueueRuntime):
            self.runtime.synchronize()
        else:
            torch.cuda.synchronize()

    # ---- what must hold

    def pages(self, node: Node, side: str) -> Iterator[tuple[str, list[Page]]]:
        """By pool, the pages of a node on a side, those first that stand for earlier tokens."""
        tokens = np.concatenate([n.key for n in node.path()]) if node.parent else np.empty(0, np.int64)
        for owner, slots in getattr(node, side).items():
            unit = self.stack.specs[owner].page_size
            pages = (slots[::unit] // unit).tolist()
            ends = self._ends(owner, tokens, len(slots))
            for name in self.riders[owner]:
                yield name, list(zip(pages, ends, strict=True))

    def check_bytes(self) -> None:
        """What the tree says is on a side is there, but for what is on its way."""
        for side in SIDES:
            held: dict[str, list[Page]] = {}
            for node in self.cache.root.subtree():
                arriving = node.ticket.parts[node] if node.ticket and node.ticket.direction == "load" else {}
                for name, pages in self.pages(node, side):
                    if side == "host" or self.stack.owner(name) not in arriving:
                        held.setdefault(name, []).extend(p for p in pages if side == "host" or self._written(name, p))
            for rows in self.rows:
                if held.get(rows.pool):
                    self._require(rows, held[rows.pool], rows.on(side, [page for page, _ in held[rows.pool]]), side)

    def check_readings(self) -> None:
        """What requests have read was right."""
        over, self.readings = [r for r in self.readings if r.over], [r for r in self.readings if not r.over]
        for reading in over:
            if not any(load.error for load in reading.loads):
                self.counts["prefixes read"] += 1
                self.counts["prefixes read while they arrived"] += bool(reading.loads)
                for rows, pages, seen in reading.seen:
                    self._require(rows, pages, seen, "a reader")

    def check_slots(self) -> None:
        """Every slot has exactly one owner: the free ones, the tree, or an operation under way. No request has any."""
        require_invariants(self.cache, {})

    def require_not_in_the_tree(self, slots: dict[str, torch.Tensor]) -> None:
        """Of slots that the tree did not take: whoever frees them must not free its."""
        for name, some in slots.items():
            unit = self.stack.specs[name].page_size
            held = [node.device[name] for node in self.cache.root.subtree() if name in node.device]
            both = torch.isin(some // unit, torch.cat([*held, some[:0]]) // unit)
            assert not both.any(), f"the tree gives slots of {name} back and keeps them: {some[both].tolist()}"

    # ---- details

    def _submit(self, work: Callable[[], object]) -> None:
        """Device work on the caller's stream."""
        if isinstance(self.runtime, QueueRuntime):
            self.runtime.submit(work)
        else:
            work()

    def _submit_reading(
        self, reading: Reading, prefix: list[tuple[str, list[Page]]], layers: tuple[int | None, ...]
    ) -> None:
        for rows in self.rows:
            if rows.layer not in layers:
                continue
            pages = [page for name, some in prefix if name == rows.pool for page in some]
            if pages:
                reading.missing += 1
                self._submit(partial(_read, reading, rows, pages))

    def _write(self, owner: str, slots: torch.Tensor, ends: Sequence[bytes]) -> None:
        unit = self.stack.specs[owner].page_size
        pages = list(zip((slots[::unit] // unit).tolist(), ends, strict=False))  # a part of a page has no bytes

        def write(mark: object) -> None:
            for rows in self.rows:
                if rows.pool in self.riders[owner] and pages:
                    rows.device[[page for page, _ in pages]] = rows.right(pages).to(rows.device.device)
            for page, _ in pages:
                if self._unwritten.get((owner, page)) is mark:
                    del self._unwritten[owner, page]

        mark = object()
        self._unwritten |= {(owner, page): mark for page, _ in pages}
        self._submit(partial(write, mark))

    def _written(self, name: str, page: Page) -> bool:
        return (self.stack.owner(name), page[0]) not in self._unwritten

    def _ends(self, owner: str, tokens: Sequence[int] | np.ndarray, count: int) -> list[bytes]:
        """For each whole page among the last `count` tokens the tokens up to its end; of a state: all of them."""
        array, unit = np.asarray(tokens, np.int64), self.page_size
        if owner in self.states:
            return [array.tobytes()]
        first = (len(array) - count) // unit
        return [array[: (page + 1) * unit].tobytes() for page in range(first, len(array) // unit)]

    def _take(self, name: str, need: int) -> torch.Tensor | None:
        slots = self.stack.device_slots[name].alloc(need)
        if slots is None:
            self._may_wait()
            self.cache.evict(name, need)
            slots = self.stack.device_slots[name].alloc(need)
        return slots

    def _give_back(self, slots: dict[str, torch.Tensor]) -> None:
        """Whole pages of which some slots are given."""
        for name, some in slots.items():
            unit = self.stack.specs[name].page_size
            self.stack.device_slots[name].free(slots_of(torch.unique_consecutive(some // unit), unit))

    def _may_wait(self) -> None:
        """What is held would never be over: who evicts may wait for it."""
        if self.policy == "write_back":
            self.let_go()

    def _require_all_of(self, match: Match) -> None:
        """`load_back` was true: the device has all that a request needs, or will have it."""
        for name in self.owners:
            covered = match.slots(name)
            if name in self.states:
                assert match.last is not None
                assert name in match.last.device, f"the state of {name}"
                continue
            need = min(self.windows.get(name, match.length), match.length)
            tail = 0
            for node in reversed(match.nodes):
                here = len(node.device.get(name, ()))
                tail += here
                if here < len(node.key):
                    break
            assert min(tail, len(covered)) >= need, f"{need} tokens of {name}, {tail} are there"

    @staticmethod
    def _require(rows: Rows, pages: list[Page], got: torch.Tensor, where: str) -> None:
        right, got = rows.right(pages), got.cpu()
        if not torch.equal(right, got):
            wrong = [pages[i][0] for i in (right != got).any(1).nonzero().flatten().tolist()]
            raise AssertionError(
                f"{where}: {rows.pool}, {rows.component} of layer {rows.layer}: pages {wrong} are wrong"
            )


def _read(reading: Reading, rows: Rows, pages: list[Page]) -> None:
    reading.seen.append((rows, pages, rows.on("device", [page for page, _ in pages])))
    reading.missing -= 1
