"""Wrong bytes on the host, put there before a prefix is loaded back, and what the model then says.

A check of log-probabilities is worth what it finds. Each fault changes as little as such a fault can: a bit, a page, a
step, a layer. Each is found, and the table says what divergence it causes, and what upstream's thresholds say of that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Any

import torch

from refimpl import PoolSpec
from refimpl.radix import Match
from refimpl.support import MEMORY
from verify.logprobs import tinymodels
from verify.logprobs.multiturn import Answer, Engine, Rounds, Sample, Tamper, compare, play, rounds_of, rows_of

# Below which upstream's test of the nearest model passes.
THRESHOLDS = {"mha": 0.0025, "mla": 0.003, "swa": 0.03, "mamba": 0.005, "v4": 0.005}

SIGNED = {1: torch.int8, 2: torch.int16, 4: torch.int32}


# ---- where things lie on the host


def pages_of(engine: Engine, match: Match, name: str) -> list[int]:
    """Host pages of a prefix, in order of its tokens; of a state pool the one at its end."""
    owner = engine.stack.owner(name)
    unit = engine.stack.specs[owner].page_size
    nodes = match.nodes[-1:] if owner in engine.tiny.states else match.nodes
    return [page for node in nodes if owner in node.host for page in (node.host[owner][::unit] // unit).tolist()]


def put(engine: Engine, name: str, component: str, layer: int | None, page: int, row: torch.Tensor) -> None:
    """A page of a layer, `[token, group, head, lane]`, whatever parts the host keeps its lanes in."""
    first = 0
    for part in engine.stack.host.pools[name].part_views(component, layer):
        part[page] = row[..., first : first + part.shape[-1]]
        first += part.shape[-1]


def get(engine: Engine, name: str, component: str, layer: int | None, page: int) -> torch.Tensor:
    parts = engine.stack.host.pools[name].part_views(component, layer)
    return torch.cat([part[page] for part in parts], -1)


# ---- faults, for a pool of a model


def flip_a_sign(name: str, component: str, engine: Engine, match: Match, tokens: Sequence[int]) -> None:
    """Of the first lane that the last token of the prefix has in the first layer."""
    spec, page = engine.stack.specs[name], pages_of(engine, match, name)[-1]
    c = spec.component(component)
    part = engine.stack.host.pools[name].part_views(component, spec.layers_of(c)[0])[0]
    lanes = part.view(SIGNED[c.dtype.itemsize])[page, -1, 0, 0]
    lanes[_last_value(spec)] ^= torch.iinfo(lanes.dtype).min


def _last_value(spec: PoolSpec) -> int:
    """Of an opaque page row the byte with the sign of the last token's first number; elsewhere the first lane."""
    if spec.family == "v4_state":
        return (tinymodels.RING - 1) * 2 * tinymodels.LATENT * 4 + 3
    return (spec.entries - 1) * tinymodels.ENTRY[0] if spec.entries else 0


def keep_a_stale_page(name: str, engine: Engine, match: Match, tokens: Sequence[int]) -> None:
    """The last page of the prefix has what its first page has."""
    *_, last = pages = pages_of(engine, match, name)
    for component, layer in rows_of(engine.stack.specs[name]):
        put(engine, name, component, layer, last, get(engine, name, component, layer, pages[0]))


def shift_states(
    name: str, steps: int, components: Sequence[str], engine: Engine, match: Match, tokens: Sequence[int]
) -> None:
    """States as they are so many tokens after the end of the prefix, or before it."""
    _, pools = tinymodels.alone(engine.tiny, tokens[: match.length + steps])
    there = 1 if name in engine.tiny.states else match.length // engine.tiny.page_size
    (page,) = pages_of(engine, match, name)[-1:]
    for component, layer in rows_of(engine.stack.specs[name]):
        if component in components:
            put(engine, name, component, layer, page, pools[name].view(component, layer)[there].cpu())


def swap_layers(name: str, engine: Engine, match: Match, tokens: Sequence[int]) -> None:
    """The first two layers of a pool change places."""
    spec = engine.stack.specs[name]
    for c in spec.components:
        a, b, *_ = spec.layers_of(c)
        for page in pages_of(engine, match, name):
            one, other = (get(engine, name, c.name, layer, page).clone() for layer in (a, b))
            put(engine, name, c.name, a, page, other)
            put(engine, name, c.name, b, page, one)


def faults_of(model: str) -> Iterator[tuple[str, str, Tamper]]:
    """Of every pool of a model: what is wrong, with which pool or component, and what makes it so."""
    for name, spec in tinymodels.model(model).specs.items():
        states = any(c.unit == "slot" for c in spec.components) or spec.family == "v4_state"
        for c in spec.components:
            where = f"{name}.{c.name}" if len(spec.components) > 1 else name
            yield "a sign bit flipped", where, partial(flip_a_sign, name, c.name)
        if states:
            every = [c.name for c in spec.components]
            yield "a state one step late", name, partial(shift_states, name, -1, every)
        elif spec.components:
            yield "a stale page", name, partial(keep_a_stale_page, name)
        if len(spec.owned_layers) > 1:
            yield "two layers swapped", name, partial(swap_layers, name)


# ---- what they cause


@dataclass(frozen=True)
class Finding:
    """
    kl          `Sample.kl`, mean over the samples that had a prefix; `highest` of them
    divergence  mean, likewise
    worst       largest difference of log-probabilities
    exact       samples whose every bit is right
    """

    model: str
    fault: str
    where: str
    kl: float
    highest: float
    divergence: float
    worst: float
    exact: int
    samples: tuple[Sample, ...]

    @property
    def passes(self) -> bool:
        """Whether upstream's test would let it."""
        return self.kl < THRESHOLDS[self.model]

    @classmethod
    def of(cls, model: str, fault: str, where: str, told: Sequence[Sequence[Answer]]) -> Finding:
        samples = [compare(model, answer) for answers in told for answer in answers if answer.cached]
        return cls(
            model,
            fault,
            where,
            fmean(s.kl for s in samples),
            max(s.kl for s in samples),
            fmean(s.divergence for s in samples),
            max(s.worst for s in samples),
            sum(s.exact for s in samples),
            tuple(samples),
        )


MakeEngine = Callable[..., Engine]


def find(
    model: str, fault: str, where: str, rounds: Rounds, make: MakeEngine = Engine, batch: int = 2, **options: Any
) -> Finding:
    """Play some rounds with an engine, and options, that have a fault."""
    device = MEMORY[options.get("platform", "cpu")]
    with make(tinymodels.model(model, device), **options) as engine:
        return Finding.of(model, fault, where, play(engine, rounds, batch))


def sensitivity(models: Sequence[str] = tuple(tinymodels.MODELS), **options: Any) -> list[Finding]:
    """What each fault causes, after a row without any for each model. `options` go to `Engine`."""
    found = []
    for model in models:
        for fault, where, tamper in [("none", "", None), *faults_of(model)]:
            found.append(find(model, fault, where, rounds_of("history", model), tamper=tamper, **options))
    return found
