"""What could have made a staged copy of Mamba states go wrong by a little: candidates as faults, and their signatures.

SGLang's test of a Mamba hybrid with HiCache gave a divergence of 0.0030 to 0.0045 before a change of the copy path and
0.0071 to 0.0147 after; the cause was never published (SGLang pull request 28434). A copy cannot be wrong by rounding:
bytes are wrong, or come from another time. Each candidate here is one such wrong, in an engine that is exact without.

A signature is more than a mean: which part of the samples is hit, how much a sample that is hit deviates, and how soon
the deviation fades behind the prefix. The mean of a mixture is the mean of the hit ones times their part.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from statistics import fmean
from typing import Any, Literal

import torch

from refimpl.emulated import QueueRuntime
from refimpl.radix import Match
from verify.logprobs import tinymodels
from verify.logprobs.multiturn import Answer, Engine, Request, Rounds, Running, Tamper, history, rows_of
from verify.logprobs.tampering import Finding, find, get, put, shift_states

MODEL, POOL = "mamba", "mamba"
BEFORE, AFTER = (0.0030, 0.0045), (0.0071, 0.0147)  # published, mean divergence of a run
DEVICE_PAGES = {"kv": 128, "mamba": 20}  # so few states that each slot soon has its second
NEAR, FAR = 4, 16  # tokens behind a prefix

States = Literal["temporal", "conv_0"]
BOTH: tuple[States, ...] = ("temporal", "conv_0")


@dataclass(frozen=True)
class Signature:
    """
    hit          part of the samples that are not exact
    kl           by upstream's estimate, mean over all samples; `kl_of_hit` over those that are hit
    divergence   by definition, mean over all samples
    near, far    mean change of a log-probability over the first tokens behind the prefix, and over the late ones
    """

    candidate: str
    variant: str
    hit: float
    kl: float
    kl_of_hit: float
    divergence: float
    near: float
    far: float

    @classmethod
    def of(cls, found: Finding) -> Signature:
        hit = [s for s in found.samples if not s.exact]
        near, far = ([c for s in hit for c in s.changes[part]] for part in (slice(0, NEAR), slice(FAR, None)))
        mean = fmean if hit else lambda _: 0.0
        return cls(
            found.fault,
            found.where,
            len(hit) / len(found.samples),
            found.kl,
            mean(s.kl for s in hit),
            found.divergence,
            mean(near),
            mean(far),
        )


# ---- faults of an engine


class SharedStaging(Engine):
    """A staging buffer whose halves are used again without asking whether the last use is over."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        staged: Any = self.stack.host.pools[POOL]._mover
        staged._free = _AlwaysFree(staged._free)


class _AlwaysFree(list[Any]):
    def __setitem__(self, half: Any, event: Any) -> None:
        pass


class CopiesLate(Engine):
    """The state is copied for the tree some steps after its own: it has been overwritten in place."""

    def __init__(self, *arguments: Any, steps: int = 1, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.steps = steps
        self._due: list[tuple[int, Running, Callable[[], None]]] = []

    def _keep_states(self, r: Running) -> None:
        kept = r.states[r.begin] = {name: self._take(name, 1) for name in self.tiny.states}
        copies = [partial(self._copy_state, name, r.slots[name], slot) for name, slot in kept.items()]
        self._due += [(len(r.told) + self.steps, r, copy) for copy in copies]

    def _step(self, active: Sequence[Running]) -> None:
        super()._step(active)
        self._copy_due(lambda steps, r: len(r.told) >= steps)

    def _finish(self, r: Running) -> None:
        self._copy_due(lambda steps, other: other is r)
        super()._finish(r)

    def _copy_due(self, due: Callable[[int, Running], bool]) -> None:
        for steps, r, copy in self._due:
            if due(steps, r):
                copy()
        self._due = [(steps, r, copy) for steps, r, copy in self._due if not due(steps, r)]


class CopiesEarly(Engine):
    """Copy on write as soon as some layers have arrived: the request goes on from what the others held before."""

    def __init__(self, *arguments: Any, arrived: int = 1, **options: Any) -> None:
        super().__init__(*arguments, **options)
        owned = self.stack.specs[POOL].owned_layers
        self._arrived, self._next = owned[arrived - 1], f"load layer {owned[arrived]}"

    def serve(self, requests: Iterable[Request]) -> list[Answer]:
        with self.hooks.hold(self._next) as self._hold:
            return super().serve(requests)

    def _begin_states(self, r: Running) -> None:
        if r.match.last:
            self.controller.wait_until(self._arrived)
            self._copy_state(POOL, r.match.last.device[POOL], r.slots[POOL])
        else:
            super()._begin_states(r)

    def _step(self, active: Sequence[Running]) -> None:
        if not self._hold.released:
            self._go_on_while_held()
            self._hold.release()
        super()._step(active)

    def _go_on_while_held(self) -> None:
        if isinstance(self.runtime, QueueRuntime):
            self.runtime.advance(1 << 20)
        else:
            time.sleep(0.02)


# ---- faults of the bytes


def read_as_packed(engine: Engine, match: Match, tokens: Sequence[int]) -> None:
    """Slots that hold all layers of a state, read as if each layer's slots lay next to each other."""
    page = int(match.nodes[-1].host[POOL])
    for c in engine.stack.specs[POOL].components:
        layers = engine.stack.specs[POOL].layers_of(c)
        there = [divmod(page + i, len(layers)) for i in range(len(layers))]
        found = [get(engine, POOL, c.name, layers[layer], slot).clone() for slot, layer in there]
        for layer, row in zip(layers, found, strict=True):
            put(engine, POOL, c.name, layer, page, row)


def copy_a_part(components: Sequence[States], part: float, engine: Engine, match: Match, tokens: Sequence[int]) -> None:
    """Elements taken for narrower ones than they are: the rest of every row is what a new page holds, zeros."""
    page = int(match.nodes[-1].host[POOL])
    for name, layer in rows_of(engine.stack.specs[POOL]):
        if name in components:
            row = get(engine, POOL, name, layer, page).clone()
            row.view(torch.uint8)[..., int(part * row.shape[-1] * row.dtype.itemsize) :] = 0
            put(engine, POOL, name, layer, page, row)


# ---- the study


@cache
def conversation(samples: int, answer: int) -> Rounds:
    return history(tinymodels.model(MODEL), samples, answer)


def candidates(orders: int = 6) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Candidate, variant, and what `find` needs for it.

    orders  in which an emulated device works, for what depends on them
    """

    def bytes_of(tamper: Tamper) -> dict[str, Any]:
        return {"tamper": tamper}

    yield "none", "", {}
    for seed in range(orders):
        staged = {"backend": "staged", "platform": "emulated", "staging_pages": 2, "seed": seed}
        yield "staging reused", f"order {seed}", {"make": SharedStaging, **staged}
    for steps in (1, 2, 4):
        yield "overwritten before the copy", f"{steps} step{'s' * (steps > 1)}", {"make": CopiesLate, "steps": steps}
    yield "strided slots read as packed", "", bytes_of(read_as_packed)
    for component, steps in ((c, s) for c in BOTH for s in (-1, 1)):
        yield (
            "parts of different steps",
            f"{component} {steps:+}",
            bytes_of(partial(shift_states, POOL, steps, [component])),
        )
    for arrived, (wipe, left) in itertools.product((1, 2), ((None, "what was there"), (0, "zeros"))):
        early = {"make": CopiesEarly, "arrived": arrived, "wipe": wipe}
        yield "copied before the last layer", f"{arrived} of 3 layers, {left}", early
    wholes: list[tuple[States, ...]] = [("temporal",), ("conv_0",), BOTH]
    for components in wholes:
        yield "wrong width", f"half of {' and '.join(components)}", bytes_of(partial(copy_a_part, components, 0.5))


def study(samples: int = 6, answer: int = 24, orders: int = 6, **options: Any) -> list[Signature]:
    """The signature of every candidate; `options` go to `Engine`, where a candidate does not say otherwise."""
    rounds = conversation(samples, answer)
    options = {"device_pages": DEVICE_PAGES} | options
    return [
        Signature.of(find(MODEL, candidate, variant, rounds, **options | chosen))
        for candidate, variant, chosen in candidates(orders)
    ]


def part_hit(signature: Signature, published: tuple[float, float] = AFTER) -> tuple[float, float] | None:
    """Which part of the samples would have to be hit for a published mean; None: more than there are."""
    if not signature.kl_of_hit or published[0] > signature.kl_of_hit:
        return None
    low, high = (mean / signature.kl_of_hit for mean in published)
    return low, min(high, 1.0)
