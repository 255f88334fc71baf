"""A tiny stack full of random bytes, a controller at work on it, and streams that can be held: on any platform."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch

from refimpl import PoolSpec, PoolTransfer, build_stack, presets
from refimpl.backends import registry
from refimpl.emulated import QueueRuntime
from refimpl.hooks import Hold, Hooks
from refimpl.operations import Ack, Operation
from refimpl.queueing import Reclaim
from refimpl.radix import PrefixCache
from refimpl.runtime import Event, Stream
from refimpl.support import DIRECTIONS
from verify import fill
from verify.toys import STACKS

PAGE = 4
PAGES = 16  # of every pool, on either side
MOST = 1 << 20  # steps of a queue: as many as there are
MOMENT, LONG = 0.02, 5.0  # seconds that a GPU is given to do what it may, and what it must

Slots = dict[str, torch.Tensor]  # by pool; riders have those of the pool that they ride on
Place = tuple[str, str, int | None]  # pool, component, layer
Bytes = dict[Place, torch.Tensor]  # `[page, byte]`
Result = TypeVar("Result")


def _six_states(page_size: int) -> dict[str, PoolSpec]:
    """Six layers of states around a layer of attention and one that nothing owns."""
    states = presets.mamba((0, 1, 3, 4, 6, 7), [(5, 3)], torch.bfloat16, (2, 3), torch.float32)
    return {"kv": presets.mha((2,), 2, 7, torch.uint8, page_size), "mamba": states}


KINDS: dict[str, Callable[[int], dict[str, PoolSpec]]] = {**STACKS, "six-states": _six_states}


def features(specs: Mapping[str, PoolSpec]) -> dict[str, list[str]]:
    """
    states     pools that a model overwrites in place
    recurrent  pools whose states are used as a whole
    windows    pools whose rows are named by a table
    """
    states = [name for name, spec in specs.items() if spec.family in ("mamba", "v4_state")]
    return {
        "states": states,
        "recurrent": [name for name in states if specs[name].family == "mamba"],
        "windows": [name for name, spec in specs.items() if name == "swa" and not spec.indices_from],
    }


def fits(check: Callable[[Rig], None], kind: str, platform: str) -> bool:
    """Whether a stack has what a check is about, and its platform."""
    specs, needs = KINDS[kind](PAGE), getattr(check, "needs", ())
    return all(platform != "cpu" if needed == "device" else features(specs)[needed] for needed in needs)


@dataclass(frozen=True)
class Content:
    """Bytes that have a name, to be told when they turn up in the wrong place."""

    name: str
    rows: Bytes


@dataclass
class Seen:
    """What work on a stream read when it ran; that may be still to come."""

    rows: Bytes = field(default_factory=dict)
    event: Event | None = None


class Rig:
    """
    make     a controller class, or whatever else makes one; its `tree`, if it has one, is the `PrefixCache` over it
    kind     of `KINDS`
    backend  of every pool that stores anything
    seed     of contents and of the order in which an emulated device works

    The caller's stream is `model` while the rig is entered; forward passes run on `write_fence` and `load_fence`.
    """

    def __init__(
        self,
        make: Callable[..., Any],
        kind: str = "mha",
        platform: str = "emulated",
        backend: str = "kernel",
        layout: str = "page_first",
        seed: int = 0,
    ) -> None:
        if kind not in KINDS:
            raise ValueError(f"no stack {kind!r}; there are {', '.join(KINDS)}")
        self.platform, self.backend = platform, backend
        self.stack = build_stack(
            KINDS[kind](PAGE), layout, backend, device_pages=PAGES, host_ratio=1.0, platform=platform, staging_pages=2
        )
        self.random, self.generator = random.Random(seed), torch.Generator().manual_seed(seed)
        self.hooks, self.runtime = Hooks(), registry.runtime(platform)
        self.model, self.write_fence, self.load_fence, self._aside = (self.runtime.stream() for _ in range(4))
        self._gates: list[Callable[[], object]] = []
        self._kept: list[Any] = []
        self._known: list[Content] = []
        if isinstance(self.runtime, QueueRuntime):
            self.runtime.reseed(seed)
        self._fill()
        if not isinstance(self.runtime, QueueRuntime):
            self._vary(seed)
        self.controller = make(self.stack, self.hooks, self.write_fence, self.load_fence, self.runtime)
        self.tree: type[PrefixCache] = getattr(make, "tree", PrefixCache)
        self.producer: int | None = None
        self._exits = ExitStack()

    def __enter__(self) -> Rig:
        self._exits.enter_context(self.runtime.on(self.model))
        return self

    def __exit__(self, *exception: object) -> None:
        while self._gates:
            self._gates.pop()()
        try:
            self.controller.close()
            self.rest()
        finally:
            self._exits.close()
            self.stack.close()

    # ---- what there is

    @property
    def owners(self) -> list[str]:
        """Pools that own indices."""
        return list(self.stack.device_slots)

    @property
    def states(self) -> list[str]:
        return features(self.stack.specs)["states"]

    @property
    def recurrent(self) -> list[str]:
        return features(self.stack.specs)["recurrent"]

    @property
    def windows(self) -> list[str]:
        return features(self.stack.specs)["windows"]

    def steps(self, direction: str) -> list[str]:
        """Where work in a direction is sure to pass with this backend, besides layers."""
        inside = {"kernel": ["relayout"], "staged": ["relayout", "copy"], "auto": []}.get(self.backend, ["copy"])
        return [f"{direction} {step}" for step in ("submit", *inside, "acknowledge")]

    def places(self, names: Iterable[str]) -> Iterator[Place]:
        for name in names:
            spec = self.stack.specs[name]
            for c in spec.components:
                for layer in spec.layers_of(c):
                    yield name, c.name, layer

    # ---- slots

    def take(self, side: str = "device", pages: int = 2) -> Slots:
        """Slots that nobody has, of every pool."""
        own: dict[str, torch.Tensor | None] = {}
        for name in self.owners:
            need = pages * self.stack.specs[name].page_size
            own[name] = (
                self.stack.device_slots[name].alloc(need) if side == "device" else self.stack.host.alloc(need, name)
            )
        return self._with_riders({name: slots for name, slots in own.items() if slots is not None})

    def all_that_is_left(self, side: str) -> Slots:
        """Take whatever anybody can get."""
        left: dict[str, torch.Tensor | None] = {}
        for name in self.owners:
            pool = self.stack.device_slots[name] if side == "device" else self.stack.host.pools[name]
            left[name] = pool.alloc(pool.available_size())
        return self._with_riders({name: slots for name, slots in left.items() if slots is not None})

    def free(self, side: str, slots: Slots) -> None:
        for name in slots.keys() & set(self.owners):
            (self.stack.device_slots[name] if side == "device" else self.stack.host.pools[name]).free(slots[name])

    def counts(self) -> dict[tuple[str, str], int]:
        """Slots that can be had, by side and pool."""
        found = {("device", name): slots.available_size() for name, slots in self.stack.device_slots.items()}
        return found | {("host", name): self.stack.host.pools[name].available_size() for name in self.owners}

    def slots_of(self, side: str, operation: Operation) -> Slots:
        """Of an operation whose lists are slots on both sides."""
        names = [t.name for t in operation.transfers]
        found = [operation.host_indices(n) if side == "host" else operation.device_indices(n) for n in names]
        return {name: slots for name, slots in zip(names, found, strict=True) if isinstance(slots, torch.Tensor)}

    def _with_riders(self, own: Slots) -> Slots:
        return {name: own[self.stack.owner(name)] for name in self.stack.specs}

    # ---- bytes

    def random_bytes(self, name: str, slots: Slots) -> Content:
        """New content for slots."""
        rows = {place: self._random(place, len(self._pages(place[0], slots))) for place in self.places(slots)}
        self._known.append(Content(name, rows))
        return self._known[-1]

    def on_device(self, name: str = "what was there before", pages: int = 2) -> tuple[Slots, Content]:
        """Device slots that hold something."""
        slots = self.take("device", pages)
        content = self.random_bytes(name, slots)
        self.put(slots, content)
        return slots, content

    def on_host(self, name: str = "what the host has", pages: int = 2) -> tuple[Slots, Content]:
        """Host slots that hold something."""
        slots = self.take("host", pages)
        content = self.random_bytes(name, slots)
        self.put_on_host(slots, content)
        return slots, content

    def put(self, slots: Slots, content: Content, stream: Stream | None = None) -> None:
        """Write device slots, as work on a stream or (None) now."""
        work = [
            (self._device(place), self._there(place, slots), self._sent(place, content.rows[place]))
            for place in self.places(slots)
        ]
        self._submit(stream, lambda: [to.index_copy_(0, pages, rows) for to, pages, rows in work])
        self._kept.append(work)

    def see(self, slots: Slots, stream: Stream | None = None, layers: Sequence[int] | None = None) -> Seen:
        """Read device slots (of some layers), as work on a stream or (None) now."""
        seen = Seen()
        places = [place for place in self.places(slots) if layers is None or place[2] in layers]
        work = [(place, self._device(place), self._there(place, slots)) for place in places]

        def read() -> None:
            seen.rows.update({place: rows.index_select(0, pages) for place, rows, pages in work})

        self._submit(stream, read)
        seen.event = None if stream is None else self.runtime.record(stream)
        self._kept += [work, seen]
        return seen

    def move(self, source: Slots, to: Slots, stream: Stream) -> None:
        """Copy device slots to others, as work on a stream."""
        work = [(self._device(p), self._there(p, source), self._there(p, to)) for p in self.places(source)]
        self._submit(stream, lambda: [rows.index_copy_(0, b, rows.index_select(0, a)) for rows, a, b in work])
        self._kept.append(work)

    def put_on_host(self, slots: Slots, content: Content) -> None:
        for place in self.places(slots):
            pool, c = self.stack.host.pools[place[0]], self.stack.specs[place[0]].component(place[1])
            pages, rows = self._pages(place[0], slots), content.rows[place]
            rows = rows.view(len(pages), pool.spec.tokens_per_page(c), c.head_count, -1).view(c.dtype)
            first = 0
            for view in pool.part_views(place[1], place[2]):
                view[pages] = rows[..., first : first + view.shape[-1]].unflatten(2, view.shape[2:4])
                first += view.shape[-1]

    def on_the_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy in device memory, now."""

        def copied() -> torch.Tensor:
            return self.runtime.empty(tensor.nbytes).view(tensor.dtype).copy_(tensor)

        self._kept.append(self._now(copied))
        return self._kept[-1]

    def rewrite(self, memory: torch.Tensor, tensor: torch.Tensor) -> None:
        """Overwrite a list or a table in device memory, as work on the caller's stream."""
        new = self.on_the_device(tensor)
        self._submit(self.runtime.current(), lambda: memory.copy_(new))

    def host_bytes(self, slots: Slots) -> Bytes:
        found: Bytes = {}
        for name, component, layer in self.places(slots):
            image = torch.from_numpy(fill.host_image(self.stack.host.pools[name], component, layer))
            found[name, component, layer] = image.flatten(1)[self._pages(name, slots)]
        return found

    def require(self, what: str, found: Bytes, right: Content) -> None:
        """`AssertionError` that says where something else is, and whose bytes those are."""
        for place, rows in found.items():
            here = self._now(rows.cpu)
            for page, (row, expected) in enumerate(zip(here, right.rows[place], strict=True)):
                if not torch.equal(row, expected):
                    name, component, layer = place
                    where = f"pool {name!r}, {component} of layer {layer}, page {page} of {len(rows)}"
                    raise AssertionError(f"{what}: {where} holds {self._whose(place, row)}, not {right.name}")

    def require_host(self, what: str, slots: Slots, right: Content) -> None:
        self.require(what, self.host_bytes(slots), right)

    def require_device(self, what: str, slots: Slots, right: Content) -> None:
        self.require(what, self.see(slots).rows, right)

    def _fill(self) -> None:
        """Every page of either side has bytes of its own."""
        every = {n: torch.arange(PAGES * spec.page_size) for n, spec in self.stack.specs.items()}
        self.put(every, self.random_bytes("what lay on the device", every))
        self.put_on_host(every, self.random_bytes("what lay on the host", every))
        self.see(every)  # a GPU that loads a kernel when it is first launched may wait for streams that are held

    def _vary(self, seed: int) -> None:
        """Orders of a GPU are those of time."""
        self.runtime.delay(self._aside, 1e-6)
        for direction in DIRECTIONS if seed else ():
            for step in ("copy", "relayout"):
                self.hooks.delay(f"{direction} {step}", self.random.choice((0, 1e-4, 2e-3)))

    def _whose(self, place: Place, row: torch.Tensor) -> str:
        known = [c.name for c in self._known if place in c.rows and (c.rows[place] == row).all(1).any()]
        return known[-1] if known else "a mixture"

    def _random(self, place: Place, pages: int) -> torch.Tensor:
        width = self._device(place).shape[1]
        return torch.randint(0, 256, (pages, width), dtype=torch.uint8, generator=self.generator)

    def _device(self, place: Place) -> torch.Tensor:
        """Device rows as bytes `[page, byte]`, sharing memory."""
        pool = self.stack.device[place[0]]
        return pool.buffer(place[1], place[2]).view(torch.uint8).view(pool.num_pages, -1)

    def _pages(self, name: str, slots: Slots) -> torch.Tensor:
        size = self.stack.specs[name].page_size
        return slots[name][::size] // size

    def _there(self, place: Place, slots: Slots) -> torch.Tensor:
        """Page numbers, where the rows are."""
        return self._sent(place, self._pages(place[0], slots))

    def _sent(self, place: Place, tensor: torch.Tensor) -> torch.Tensor:
        return self._now(lambda: tensor.to(self._device(place).device))

    # ---- work

    def backup(self, slots: Slots, host: Slots | None = None) -> Operation:
        """Queue and submit a backup."""
        operation = self.queue("backup", slots, host)
        self.start("backup")
        return operation

    def load(self, host: Slots, slots: Slots | None = None) -> Operation:
        """Queue and submit a load, which the next forward pass depends on."""
        operation = self.queue("load", slots, host)
        self.start("load")
        return operation

    def queue(
        self, direction: str, device: Mapping[str, Any] | None, host: Mapping[str, Any] | None, tag: object = None
    ) -> Operation:
        """Queue what is right, and finds room."""
        try:
            operation = self.ask(direction, device, host, tag)
        except ValueError as error:
            raise AssertionError(f"a {direction} is refused that is right: {error}") from error
        assert operation is not None, f"a {direction} finds no slots, there are enough"
        return operation

    def ask(
        self,
        direction: str,
        device: Mapping[str, Any] | None,
        host: Mapping[str, Any] | None,
        tag: object = None,
        reclaim: Reclaim | None = None,
    ) -> Operation | None:
        call = self.controller.write if direction == "backup" else self.controller.load
        return call(tag, self.transfers(device, host), reclaim)

    def transfers(self, device: Mapping[str, Any] | None, host: Mapping[str, Any] | None) -> list[PoolTransfer]:
        """One for each pool that is named; riders take over what the pool has that they ride on."""
        named = {self.stack.owner(name) for name in (device or host or {})}
        found = []
        for name in self.stack.specs:
            if name in self.owners and name in named:
                found.append(PoolTransfer(name, (host or {}).get(name), (device or {}).get(name)))
            elif self.stack.owner(name) in named:
                found.append(PoolTransfer(name))
        return found

    def start(self, direction: str) -> int:
        """Submit what is queued; the host must not wait meanwhile. Returns in how many batches, or the producer."""
        begin = self.controller.start_writing if direction == "backup" else self.controller.start_loading
        started = self.promptly(begin)
        if direction == "backup":
            assert started, "start_writing submits nothing of what is queued"
        else:
            assert started is not None, "start_loading submits nothing of what is queued"
            self.producer = started
            self.controller.set_consumer(started)
        return started

    def promptly(self, call: Callable[[], Result], seconds: float = LONG) -> Result:
        """Call what must not wait for the device."""
        begun = time.perf_counter()
        try:
            result = call()
        except RuntimeError as error:  # an emulated device raises where the host would wait for what is held
            raise AssertionError(f"the host is refused, or waits for what is held: {error}") from error
        took = time.perf_counter() - begun
        assert took < seconds, f"the host was away for {took * 1e3:.1f} ms"
        return result

    def gate(self, stream: Stream) -> Callable[[], object]:
        """Hold a stream until what is returned is called, or the check is over."""
        self._gates.append(self.runtime.gate(stream))
        return self._gates[-1]

    def hold(self, step: str) -> Hold:
        """Hold a step until the hold is released, or the check is over."""
        hold = self.hooks.hold(step)
        self._gates.append(hold.release)
        return hold

    @contextmanager
    def held(self, *steps: str) -> Iterator[None]:
        """Hold steps, or ("backup", "load") all work of a direction."""
        with ExitStack() as holds:
            for step in steps:
                each = [f"{step} copy", f"{step} relayout"] if step in DIRECTIONS else [step]
                for one in each:
                    holds.enter_context(self.hooks.hold(one))
            yield

    def let_run(self) -> None:
        """Some, all or nothing of what may run now."""
        share = self.random.choice((0.0, 0.1, 1.0, 1.0))
        if isinstance(self.runtime, QueueRuntime):
            self.runtime.advance(int(share * self.random.choice((8, 64, MOST))))
        else:
            time.sleep(share * MOMENT)

    def run_all(self) -> None:
        """All of what may run now."""
        if isinstance(self.runtime, QueueRuntime):
            self.runtime.advance(MOST)
        else:
            time.sleep(MOMENT)

    def arrives(self, seen: Seen) -> bool:
        """Whether work on a stream gets done as things are."""
        assert seen.event is not None
        end = time.perf_counter() + (0 if isinstance(self.runtime, QueueRuntime) else LONG)
        self.run_all()
        while not seen.event.query() and time.perf_counter() < end:
            time.sleep(MOMENT / 10)
        return seen.event.query()

    def rest(self) -> None:
        """Everything is done."""
        if isinstance(self.runtime, QueueRuntime):
            self.runtime.synchronize()
        else:
            torch.cuda.synchronize()

    def acknowledged(self) -> list[Ack]:
        """What is acknowledged as things are, without waiting."""
        self.run_all()
        return self.promptly(self.controller.acknowledge)

    def finish(self) -> list[Ack]:
        """Wait for every operation, none of which may have failed, and for all other work."""
        acks = self.controller.acknowledge(wait=True)
        for ack in acks:
            if ack.error:
                raise AssertionError(f"a {ack.direction} failed: {ack.error}") from ack.error
        self.rest()
        return acks

    def _submit(self, stream: Stream | None, call: Callable[[], object]) -> None:
        if stream is None:
            self._now(call)
        elif isinstance(self.runtime, QueueRuntime):
            self.runtime.submit(call, stream)
        else:
            with self.runtime.on(stream):
                call()

    def _now(self, call: Callable[[], Result]) -> Result:
        """Beside all streams that are held."""
        if isinstance(self.runtime, QueueRuntime):
            return call()
        self._pass(self._aside)  # what is called may wait for it, and without end
        with self.runtime.on(self._aside):
            result = call()
        self._pass(self._aside)
        return result

    def _pass(self, stream: Stream) -> None:
        """Wait for a stream that nobody holds; `AssertionError` if it is held all the same."""
        done, end = self.runtime.record(stream), time.perf_counter() + LONG
        while not done.query():
            if time.perf_counter() > end:
                raise AssertionError("a stream that waits for nothing is held: more streams than CUDA has queues?")
            time.sleep(0)


def joined(*parts: Slots) -> Slots:
    """Slots of several as one list for each pool."""
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def cut(slots: Slots, parts: int) -> list[Slots]:
    """As many equal parts, in order."""
    pieces = {name: some.chunk(parts) for name, some in slots.items()}
    return [{name: piece[at] for name, piece in pieces.items()} for at in range(parts)]


def overlap(mine: Slots, theirs: Slots) -> list[str]:
    """Pools in which both have some slot."""
    return [name for name in mine.keys() & theirs.keys() if np.isin(mine[name].numpy(), theirs[name].numpy()).any()]
