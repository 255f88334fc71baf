"""A small engine around a tiny model: requests find prefixes in a tree, load them back, go on, and are compared.

What upstream's multi-turn tests do (log-probabilities over turns; branching prefixes on prefill hits; history reused on
decode hits; requests in batches with delays, spread over groups), with a model that is exact: the Kullback-Leibler
divergence from the same model without a cache is zero, and every probability has the same bits. Between rounds the
device is emptied and poisoned, so what is found there next has come from the host; that it has is asserted, too.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from statistics import fmean
from typing import Any

import torch

from refimpl import PoolSpec, Refusal, build_stack, support
from refimpl.controller import Ack, Controller
from refimpl.emulated import POISON, HostQueue, QueueRuntime
from refimpl.hooks import Hooks
from refimpl.indices import slots_of
from refimpl.invariants import require_invariants
from refimpl.radix import POLICIES, Match
from refimpl.support import DIRECTIONS
from verify.checked import CheckedCache
from verify.logprobs import tinymodels
from verify.logprobs.tinymodels import VOCABULARY, Piece, TinyModel, log_probabilities

CHUNK = 2  # pages of a prompt that are computed at a time; a state is kept after as many

Tamper = Callable[["Engine", Match, Sequence[int]], object]


@dataclass(frozen=True)
class Request:
    """
    tokens  of the prompt, and what is said behind it
    prompt  how many are computed in chunks; the rest are decoded one by one
    known   how many at the begin were computed in an earlier round
    """

    tokens: tuple[int, ...]
    prompt: int
    known: int = 0


@dataclass(frozen=True, eq=False)
class Answer:
    """
    distributions  behind each token that was computed, `[token, vocabulary]`
    cached         tokens at the begin that were not
    from_host      how many of those had to come from the host
    """

    request: Request
    distributions: torch.Tensor
    cached: int
    from_host: int


@dataclass(eq=False)
class Running:
    """
    slots   for each pool that owns indices, as `tinymodels.Piece` has them
    own     of those, what does not belong to the tree
    states  tokens -> slots of the states behind them
    """

    request: Request
    match: Match
    slots: dict[str, torch.Tensor] = field(default_factory=dict)
    own: dict[str, torch.Tensor] = field(default_factory=dict)
    states: dict[int, dict[str, torch.Tensor]] = field(default_factory=dict)
    begin: int = 0
    told: list[list[torch.Tensor]] = field(default_factory=list)

    @property
    def over(self) -> bool:
        return self.begin == len(self.request.tokens)


class Engine:
    """
    layout, backend  of every pool that may have them (see `pairs`)
    hits             whether prefixes are looked up at all
    tamper           called with the engine, a match and the tokens it was found for, before what it lacks is loaded
    wipe             with what byte the device is overwritten when it has been emptied; None: it keeps what it held
    seed             of pauses, and of the order in which a queue works
    options          go to `build_stack`
    """

    def __init__(
        self,
        tiny: TinyModel,
        layout: str = "page_first",
        backend: str = "torch",
        platform: str = "cpu",
        policy: str = "write_through",
        *,
        device_pages: int | Mapping[str, int] = 128,
        hits: bool = True,
        tamper: Tamper | None = None,
        wipe: int | None = POISON,
        seed: int = 0,
        make_controller: Callable[..., Controller] = Controller,
        **options: Any,
    ) -> None:
        self.tiny, self.hits, self.tamper, self.wipe, self.random = tiny, hits, tamper, wipe, random.Random(seed)
        chosen = pairs(tiny, layout, backend, platform)
        if not any(pair[0] == layout for pair in chosen.values()):
            raise ValueError(f"no pool of {tiny.name!r} can have layout {layout!r} with backend {backend!r}")
        sizes: dict[str, Any] = {"host_ratio": 4.0, "staging_pages": 4, "device_pages": device_pages}
        self.stack = build_stack(tiny.specs, pools=chosen, platform=platform, **sizes | options)
        self.hooks = Hooks()
        steps = HostQueue() if self.stack.platform == "cpu" else None  # what the model computes is queued too
        self.controller = make_controller(self.stack, self.hooks, runtime=steps)
        self.cache = CheckedCache(self.controller, policy, tiny.windows)
        self.runtime = self.controller.runtime
        if isinstance(self.runtime, QueueRuntime):
            self.runtime.synchronize()  # what engines before have left there would make other orders
            self.runtime.reseed(seed)
        self.pools, self.producer = self.stack.device, None
        self.acks: list[Ack] = []  # of all transfers that have arrived

    @property
    def loaded(self) -> Counter[str]:
        """Index units that have come back from the host, by pool."""
        found = Counter[str]()
        for ack in self.acks:
            found.update(ack.tokens if ack.direction == "load" else {})
        return found

    @property
    def unit(self) -> int:
        """Tokens after which a request can go on: pages, or, where there are states, those after which one is kept."""
        return self.tiny.page_size * (CHUNK if self.tiny.states else 1)

    # ---- serving

    def serve(self, requests: Iterable[Request]) -> list[Answer]:
        """A batch: all are looked up, then computed together."""
        self.check()
        running = [self._look_up(request) for request in requests]
        self.controller.start_writing()
        producer = self.controller.start_loading()
        self.producer = self.producer if producer is None else producer
        self.controller.set_consumer(self.producer if any(r.match.arriving for r in running) else None)
        for r in running:
            self._make_room(r)
            self._begin_states(r)
        while active := [r for r in running if not r.over]:
            self._step(active)
        for r in running:
            self._finish(r)
        self.controller.start_writing()  # also of what is still being computed
        self.runtime.record(self.runtime.current()).synchronize()
        self.check()
        require_invariants(self.cache, {})  # requests hold nothing any more
        return [self._answer(r) for r in running]

    def check(self, wait: bool = False) -> list[Ack]:
        acks = self.cache.check(wait)
        for ack in acks:
            if ack.error:
                raise ack.error
        self.acks += acks
        return acks

    def pause(self) -> None:
        """Some of what is under way gets done, in whatever order."""
        if isinstance(self.runtime, QueueRuntime):
            self.runtime.advance(self.random.randrange(200))
        self.check()

    def empty_device(self) -> None:
        """Everything is evicted, and overwritten."""
        self.controller.start_writing()
        self.check(wait=True)
        for name, slots in self.stack.device_slots.items():
            self.cache.evict(name, slots.size)
        self.check(wait=True)
        for name, slots in self.stack.device_slots.items():
            assert slots.available_size() == slots.size - slots.page_size * slots.reserved, f"{name} is in use"
        if self.wipe is not None:
            self.submit(partial(self._wipe, self.wipe))

    def close(self) -> None:
        try:
            self.check(wait=True)
        finally:
            self.controller.close()
            self.stack.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def submit(self, work: Callable[[], object]) -> None:
        """Device work on the caller's stream."""
        if isinstance(self.runtime, QueueRuntime):
            self.runtime.submit(work)
        else:
            work()

    # ---- a request

    def _look_up(self, request: Request) -> Running:
        """At least one token is left to compute."""
        match = self.cache.match(request.tokens[:-1] if self.hits else ())
        if self.tamper and match.on_device < match.length:
            self.tamper(self, match, request.tokens)
        if not self.cache.load_back(match):
            raise RuntimeError(f"{match.length} tokens cannot be loaded back: no room, or still on their way")
        self.cache.use(match)
        return Running(request, match, begin=match.length)

    def _make_room(self, r: Running) -> None:
        """Slots of all tokens: the tree's for the prefix, of windows at its end only, and new ones behind it."""
        unit, new = self.tiny.page_size, len(r.request.tokens) - r.match.length
        for name in self.tiny.owners:
            if name in self.tiny.states:
                r.slots[name] = r.own[name] = self._take(name, 1)
                continue
            r.own[name] = self._take(name, -(-new // unit) * unit)
            r.slots[name] = torch.cat([self._along(r.match, name), r.own[name]])

    def _along(self, match: Match, name: str) -> torch.Tensor:
        """A slot of each token of a prefix; 0: it has none."""
        table, end = torch.zeros(match.length, dtype=torch.int64), 0
        for node in match.nodes:
            end += len(node.key)
            slots = node.device.get(name, table[:0])
            table[end - len(slots) : end] = slots
        return table

    def _begin_states(self, r: Running) -> None:
        """Copy on write: the prefix keeps its state, the request overwrites one of its own."""
        for name in self.tiny.states:
            if r.match.last:
                self.controller.wait_for_all_of(name)
                self._copy_state(name, r.match.last.device[name], r.slots[name])
            else:
                self.submit(partial(self._zero_state, name, r.slots[name]))

    def _step(self, active: Sequence[Running]) -> None:
        """A chunk of a prompt or a token, of every request."""
        pieces = [Piece(r.request.tokens, r.begin, self._end_of_step(r), r.slots) for r in active]
        told = self.tiny.forward(self.pools, pieces, self.controller.wait_until, self.submit)
        for r, piece, filled_later in zip(active, pieces, told, strict=True):
            r.told.append(filled_later)
            r.begin = piece.end
            if self.tiny.states and r.begin % self.unit == 0:
                self._keep_states(r)

    def _end_of_step(self, r: Running) -> int:
        if r.begin >= r.request.prompt:
            return r.begin + 1
        chunk = CHUNK * self.tiny.page_size
        return min((r.begin // chunk + 1) * chunk, r.request.prompt)

    def _keep_states(self, r: Running) -> None:
        """As they are behind the tokens so far, for others to go on from."""
        kept = r.states[r.begin] = {name: self._take(name, 1) for name in self.tiny.states}
        for name, slot in kept.items():
            self._copy_state(name, r.slots[name], slot)

    def _finish(self, r: Running) -> None:
        """Into the tree with it; what the tree has already, or has no use for, is free again."""
        whole = len(r.request.tokens) // self.tiny.page_size * self.tiny.page_size
        ends = (r.states or {r.match.length: {}}) if self.tiny.states else {whole: {}}
        for end, states in ends.items():
            self._insert(r, end, states)
        self.cache.release(r.match)
        self._free(r.own)

    @staticmethod
    def _answer(r: Running) -> Answer:
        distributions = torch.cat([distribution for told in r.told for distribution in told]).cpu()
        return Answer(r.request, distributions, r.match.length, r.match.length - r.match.on_device)

    def _insert(self, r: Running, end: int, states: Mapping[str, torch.Tensor]) -> None:
        given = {name: self._tail(slots[:end]) for name, slots in r.slots.items() if name not in self.tiny.states}
        left = self.cache.insert(r.request.tokens[:end], {**given, **states})
        for name, slots in given.items():
            taken = without(slots, left.get(name, slots[:0]))
            r.own[name] = without(r.own[name], taken)
        self._free({name: slots for name, slots in left.items() if name in states})

    @staticmethod
    def _tail(slots: torch.Tensor) -> torch.Tensor:
        """Of a window those at the end; what was before has been evicted."""
        gone = (slots == 0).nonzero()
        return slots[int(gone[-1]) + 1 :] if len(gone) else slots

    # ---- slots and states

    def _take(self, name: str, need: int) -> torch.Tensor:
        allocator = self.stack.device_slots[name]
        slots = allocator.alloc(need)
        if slots is None:
            self.controller.start_writing()
            self.check(wait=True)  # what is on its way to the host can go then
            self.cache.evict(name, need - allocator.available_size())
            slots = allocator.alloc(need)
        if slots is None:
            raise RuntimeError(f"pool {name!r} has no room for {need} more slots")
        return slots

    def _free(self, slots: Mapping[str, torch.Tensor]) -> None:
        for name, some in slots.items():
            unit = self.stack.specs[name].page_size
            self.stack.device_slots[name].free(slots_of(torch.unique_consecutive(some // unit), unit))

    def _copy_state(self, name: str, source: torch.Tensor, to: torch.Tensor) -> None:
        def copy() -> None:
            for buffer in buffers(self.pools, name):
                buffer[int(to)] = buffer[int(source)]

        self.submit(copy)

    def _zero_state(self, name: str, slot: torch.Tensor) -> None:
        for buffer in buffers(self.pools, name):
            buffer[int(slot)] = 0

    def _wipe(self, byte: int) -> None:
        for name in self.pools:
            for buffer in buffers(self.pools, name):
                buffer.view(torch.uint8).fill_(byte)


def buffers(pools: tinymodels.Pools, name: str) -> Iterator[torch.Tensor]:
    for component, layer in rows_of(pools[name].spec):
        yield pools[name].buffer(component, layer)


def rows_of(spec: PoolSpec) -> Iterator[tuple[str, int | None]]:
    """Components, and their layers."""
    for c in spec.components:
        for layer in spec.layers_of(c):
            yield c.name, layer


def without(slots: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    return slots[~torch.isin(slots, others)]


def pairs(tiny: TinyModel, layout: str, backend: str, platform: str) -> dict[str, tuple[str, str]]:
    """Layout and backend of every pool; one that cannot have the layout has `page_first_direct`.

    The anchor of a V4 model stores nothing and would have any.
    """
    found = {}
    for name, spec in tiny.specs.items():
        refused = [support(spec, layout, backend, d, platform) for d in DIRECTIONS]
        fits = spec.components and not any(isinstance(answer, Refusal) for answer in refused)
        found[name] = (layout if fits else "page_first_direct", backend)
    return found


# ---- scenarios: rounds of requests; between rounds the device is emptied

Rounds = tuple[tuple[Request, ...], ...]


def turns(tiny: TinyModel, conversations: int = 2, count: int = 3) -> Rounds:
    """Conversations that grow by a question and an answer at a time, all of their turns compared."""
    histories = [()] * conversations
    rounds = []
    for turn in range(count):
        said = [_say(tiny, history, 13 + 5 * i, 5, turn * 10 + i) for i, history in enumerate(histories)]
        rounds.append(tuple(said))
        histories = [request.tokens for request in said]
    return tuple(rounds)


def branches(tiny: TinyModel, groups: int = 2, each: int = 2) -> Rounds:
    """Prefixes that requests share and part from: hits that were computed as prompts. Those of a group come apart."""
    first = [_say(tiny, (), 4 * tiny.page_size, 1, 456 + g) for g in range(groups)]
    spread = [(g, b) for b in range(each) for g in range(groups)]
    second = [_say(tiny, first[g].tokens[:-1], 13, 3, 789 + 10 * g + b) for g, b in spread]
    third = [_say(tiny, request.tokens, 7, 3, 890 + i) for i, request in enumerate(second)]
    return tuple(first), tuple(second), tuple(third)


def history(tiny: TinyModel, conversations: int = 2, answer: int = 12) -> Rounds:
    """Long answers, and what was said is the prompt of the next request: hits that were decoded."""
    first = [_say(tiny, (), 5, 2 * tiny.page_size + 17, 300 + i) for i in range(conversations)]
    second = [_say(tiny, request.tokens, 11, answer, 400 + i) for i, request in enumerate(first)]
    return tuple(first), tuple(second)


def long(tiny: TinyModel, count: int = 4, seed: int = 0) -> Rounds:
    """One conversation of many pages, evicted whenever it has grown."""
    rounds, tokens = [], ()
    for turn in range(count):
        rounds.append((_say(tiny, tokens, 9 * tiny.page_size + 5, 5, seed + turn),))
        tokens = rounds[-1][0].tokens
    return tuple(rounds)


SCENARIOS: dict[str, Callable[[TinyModel], Rounds]] = {
    "turns": turns,
    "branches": branches,
    "history": history,
    "long": long,
}


def _say(tiny: TinyModel, before: tuple[int, ...], question: int, answer: int, seed: int) -> Request:
    """The model answers for itself, so that log-probabilities are those of a likely text."""
    chosen = random.Random(seed)
    prompt = (*before, *(chosen.randrange(VOCABULARY) for _ in range(question)))
    said = tinymodels.speak(tiny, prompt, answer, seed)
    return Request((*prompt, *said), len(prompt), len(before))


@cache
def rounds_of(scenario: str, model: str, page_size: int | None = None) -> Rounds:
    """Spoken once, on a CPU, for all engines."""
    return SCENARIOS[scenario](tinymodels.model(model, page_size=page_size))


@cache
def reference(model: str, tokens: tuple[int, ...], page_size: int | None = None) -> torch.Tensor:
    """What the model says without a cache, on a CPU."""
    return tinymodels.alone(tinymodels.model(model, page_size=page_size), tokens)[0]


def play(
    engine: Engine, rounds: Rounds, batch: int = 2, settle: bool = False, empty: bool = True
) -> list[list[Answer]]:
    """Serve all rounds in batches, with pauses between them; `settle`: until backups have arrived.

    Prefixes are met as often as the policy wants before it saves them; only what was said the first time is returned.
    Between rounds the device is emptied, or not: then what is evicted is what has no room.
    """
    told: list[list[Answer]] = []
    for requests in rounds:
        passes = [_in_batches(engine, requests, batch, settle) for _ in range(POLICIES[engine.cache.policy] or 1)]
        told.append(passes[0])
        if empty:
            engine.empty_device()
    return told


def _in_batches(engine: Engine, requests: Sequence[Request], batch: int, settle: bool) -> list[Answer]:
    answers = []
    for first in range(0, len(requests), batch):
        answers += engine.serve(requests[first : first + batch])
        engine.check(wait=True) if settle else engine.pause()
    return answers


# ---- what is compared


def k3(expected: Sequence[float], got: Sequence[float]) -> float:
    """Upstream's estimate of the divergence of a sample: the mean of e^r - 1 - r, r the difference of logarithms.

    Upstream's samples are drawn with the cache and judged without, ours the other way round: so is the difference.
    """
    return fmean(math.expm1(g - e) - (g - e) for e, g in zip(expected, got, strict=True)) if expected else 0.0


@dataclass(frozen=True)
class Sample:
    """
    kl          by `k3`, of the tokens that the model said
    divergence  by definition, of whole distributions, the mean over all tokens that were computed
    exact       every probability has the bits of the reference
    changes     for each token that was computed, by how much its log-probability differs
    """

    answer: Answer
    kl: float
    divergence: float
    exact: bool
    changes: tuple[float, ...]

    @property
    def worst(self) -> float:
        return max(self.changes, default=0.0)


def compare(model: str, answer: Answer, page_size: int | None = None) -> Sample:
    """With the model without a cache."""
    tokens, cached, got = answer.request.tokens, answer.cached, answer.distributions
    right = reference(model, tokens, page_size)[cached:]
    expected, found = (log_probabilities(d, tokens[cached + 1 :]) for d in (right, got))
    said = slice(max(answer.request.prompt - cached - 1, 0), None)
    return Sample(
        answer,
        k3(expected[said], found[said]),
        float((right * (right / got).log()).sum(1).mean()),
        torch.equal(right.view(torch.int64), got.view(torch.int64)),
        tuple(abs(e - f) for e, f in zip(expected, found, strict=True)),
    )


def require_exact(engine: Engine, told: Sequence[Sequence[Answer]], page_size: int | None = None) -> None:
    """KL is zero, bits are equal, and prefixes did come from the host: as many tokens of them as there were."""
    for answers in told:
        for i, answer in enumerate(answers):
            cached, from_host = _expected(engine, answer, answers[:i])
            assert answer.cached == cached, f"{answer.cached} tokens were cached, expected {cached}"
            assert answer.from_host == from_host, f"{answer.from_host} tokens came from the host, not {from_host}"
    every = [answer for answers in told for answer in answers]
    assert any(answer.from_host for answer in every), "nothing came from the host: this proves nothing"
    assert engine.loaded[engine.cache.anchor] >= sum(answer.from_host for answer in every), "loads have not arrived"
    require_right(engine.tiny.name, every, page_size)


def require_right(model: str, answers: Sequence[Answer], page_size: int | None = None) -> None:
    """KL is zero, and bits are equal."""
    wrong = [s for s in (compare(model, a, page_size) for a in answers) if s.kl or s.divergence or not s.exact]
    assert not wrong, "; ".join(
        f"KL {s.kl:.3g}, log-probabilities differ by up to {s.worst:.3g} behind {s.answer.cached} tokens that were "
        f"cached"
        for s in wrong
    )


def _expected(engine: Engine, answer: Answer, before: Sequence[Answer]) -> tuple[int, int]:
    """Tokens cached, and from the host: all that were known, but for what requests of the round have brought back."""
    request = answer.request
    known = min(request.known, len(request.tokens) - 1) // engine.unit * engine.unit
    back = [_common(request.tokens, b.request.tokens[: b.request.known]) // engine.tiny.page_size for b in before]
    return known, known - min(known, max(back, default=0) * engine.tiny.page_size)


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
