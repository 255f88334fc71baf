"""What a model says after its prefix was on the host is what it says without a cache, to the last bit.

And whoever asserts that would notice: of wrong bits, pages, steps and layers every one makes the check fail.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch

from refimpl import LAYOUTS
from refimpl.controller import Controller
from refimpl.radix import POLICIES
from refimpl.support import BACKENDS, MEMORY
from verify.conformance import faults
from verify.logprobs import mamba_study, multiturn, tampering, tinymodels
from verify.logprobs.mamba_study import Signature, candidates, conversation
from verify.logprobs.multiturn import (
    SCENARIOS,
    Engine,
    Tamper,
    compare,
    k3,
    play,
    require_exact,
    require_right,
    rounds_of,
)
from verify.logprobs.tampering import faults_of, find
from verify.logprobs.tinymodels import MODELS, VOCABULARY, Piece, TinyModel, alone

pytestmark = pytest.mark.kl

WAYS = [
    *(("cpu", backend) for backend in ("torch", "numba")),
    *(("emulated", backend) for backend in ("direct", "kernel", "staged", "auto")),
    *(("cuda", backend) for backend, platforms in BACKENDS.items() if "cuda" in platforms),
]
MARKS = {"emulated": [pytest.mark.emulated], "cuda": [pytest.mark.gpu]}


def a_model(name: str, platform: str = "cpu", page_size: int | None = None) -> TinyModel:
    return tinymodels.model(name, MEMORY[platform], page_size)


# ---- models


@pytest.mark.parametrize(
    ("name", "page_size", "reason"),
    [
        ("gpt", None, "no model 'gpt'; there are mha, mla, swa, mamba, v4"),
        ("v4", 1, "a page of `v4` holds whole rings of 8 tokens, got page_size 1"),
        ("v4", 12, "a page of `v4` holds whole rings of 8 tokens, got page_size 12"),
        ("mla", 0, "page_size must be at least 1, got 0"),
    ],
)
def test_a_model_that_there_cannot_be_is_refused(name: str, page_size: int | None, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        a_model(name, page_size=page_size)


TEXT = tuple((7 * i * i + 3 * i) % VOCABULARY for i in range(75))
CHUNKS: dict[str, Sequence[int]] = {"decode": [1] * 75, "pages": [16] * 5, "uneven": [3, 17, 1, 30, 2], "one": [74]}


@pytest.mark.parametrize("chunks", CHUNKS.values(), ids=CHUNKS)
@pytest.mark.parametrize("name", MODELS)
def test_chunks_change_no_bit(name: str, chunks: Sequence[int]) -> None:
    right, pools = alone(a_model(name), TEXT)
    told, others = alone(a_model(name), TEXT, chunks)
    assert torch.equal(right, told)
    for pool in pools:
        for mine, theirs in zip(multiturn.buffers(pools, pool), multiturn.buffers(others, pool), strict=True):
            assert torch.equal(mine, theirs), f"what {pool} holds"


@pytest.mark.parametrize("name", MODELS)
def test_a_batch_changes_no_bit(name: str) -> None:
    tiny, texts = a_model(name), [TEXT, TEXT[:40], (*TEXT[30:], 5)]
    pools, slots = tinymodels.private_pools(tiny, 80 * len(texts))
    pieces = [
        Piece(text, 0, len(text), {n: s + i if n in tiny.states else s[80 * i :] for n, s in slots.items()})
        for i, text in enumerate(texts)
    ]
    for told, text in zip(tiny.forward(pools, pieces), texts, strict=True):
        assert torch.equal(told[0], alone(tiny, text)[0])


DEVICES = [pytest.param("cpu"), pytest.param("cuda", marks=pytest.mark.gpu)]
EXACTLY = {"+": operator.add, "-": operator.sub, "×": operator.mul, "÷": operator.truediv}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("operation", EXACTLY)
def test_arithmetic_is_rounded_as_ieee_says(operation: str, device: str) -> None:
    """As NumPy does it, by the processor. A square root would fail here: torch's on a CPU comes from MKL."""
    a, b = np.random.default_rng(0).normal(size=(2, 1 << 18))
    got = EXACTLY[operation](torch.from_numpy(a).to(device), torch.from_numpy(b).to(device)).cpu()
    assert np.array_equal(got.numpy(), EXACTLY[operation](a, b))


@pytest.mark.gpu
@pytest.mark.parametrize("name", MODELS)
def test_a_gpu_says_what_a_cpu_says(name: str) -> None:
    assert torch.equal(alone(a_model(name, "cuda"), TEXT, [16, 16, 1])[0], alone(a_model(name), TEXT)[0])


@pytest.mark.parametrize("name", MODELS)
def test_every_token_of_the_past_matters(name: str) -> None:
    """Or what is restored of it could be anything."""
    right = alone(a_model(name), TEXT)[0][-1]
    for i in range(0, len(TEXT), 4):
        other = (*TEXT[:i], (TEXT[i] + 1) % VOCABULARY, *TEXT[i + 1 :])
        assert not torch.equal(alone(a_model(name), other)[0][-1], right), f"token {i}"


# ---- no difference


@cache
def ways(name: str) -> list[tuple[str, str, str]]:
    """Layout, platform, backend: all that some pool of a model may have."""
    chosen = itertools.product(LAYOUTS, WAYS)
    return [
        (layout, *way)
        for layout, way in chosen
        if layout in {pair[0] for pair in multiturn.pairs(a_model(name), layout, way[1], way[0]).values()}
    ]


PLAYS = list(itertools.product(POLICIES, SCENARIOS))
WHERE = [(name, *way) for name in MODELS for way in ways(name)]


def param(name: str, layout: str, platform: str, backend: str, *play: str) -> Any:
    names = (name, layout, f"cuda {backend}" if platform == "cuda" else backend, *play)
    return pytest.param(name, layout, platform, backend, *play, id="-".join(names), marks=MARKS.get(platform, []))


# Every model × layout × backend, with policies and scenarios taken in turn.
CELLS = [param(*where, *PLAYS[5 * i % len(PLAYS)]) for i, where in enumerate(WHERE)]


@pytest.mark.parametrize(("name", "layout", "platform", "backend", "policy", "scenario"), CELLS)
def test_the_host_changes_no_bit(
    name: str, layout: str, platform: str, backend: str, policy: str, scenario: str
) -> None:
    rounds = rounds_of(scenario, name)
    with Engine(a_model(name, platform), layout, backend, platform, policy, seed=len(layout + backend)) as engine:
        require_exact(engine, play(engine, rounds))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "layout", "platform", "backend"), [param(*where) for where in WHERE])
def test_with_every_policy_and_scenario(name: str, layout: str, platform: str, backend: str) -> None:
    for policy, scenario in PLAYS:
        test_the_host_changes_no_bit(name, layout, platform, backend, policy, scenario)


def test_nothing_is_left_out() -> None:
    """How many layouts and backends a model can be played with, on each platform: all, and with every play of each."""
    found = {name: dict(Counter(platform for model, _, platform, _ in WHERE if model == name)) for name in MODELS}
    usual = {"cpu": 10, "emulated": 19, "cuda": 24}
    assert found == dict.fromkeys(MODELS, usual) | {"v4": {"cpu": 8, "emulated": 15, "cuda": 19}}
    assert len(PLAYS) == len(POLICIES) * len(SCENARIOS) == 12


def test_every_pair_is_covered() -> None:
    """Of any two of model, layout, platform and backend, policy, scenario: where each has one policy and scenario."""

    def pairs_of(some: Iterable[Sequence[Any]]) -> set[Any]:
        named = [(v[0], v[1], v[2:4], v[4], v[5]) for v in some]
        return {(i, j, v[i], v[j]) for v in named for i, j in itertools.combinations(range(5), 2)}

    complete = [(*where, *play) for where in WHERE for play in PLAYS]
    assert pairs_of(cell.values for cell in CELLS) == pairs_of(complete)


@pytest.mark.parametrize(("batch", "settle"), [(1, False), (3, True), (9, False)])
@pytest.mark.parametrize("name", MODELS)
def test_batches_and_delays_change_no_bit(name: str, batch: int, settle: bool) -> None:
    rounds = multiturn.branches(a_model(name), groups=3, each=3) if batch == 9 else rounds_of("branches", name)
    with Engine(a_model(name), seed=batch) as engine:
        require_exact(engine, play(engine, rounds, batch, settle))


@pytest.mark.parametrize(("name", "policy"), list(zip(MODELS, itertools.cycle(("write_through", "write_back")))))
def test_conversations_that_push_each_other_out(name: str, policy: str) -> None:
    """A device with room for one, and long conversations that take turns: the same prefixes go and come again."""
    tiny = a_model(name)
    a, b = rounds_of("long", name), multiturn.long(tiny, seed=50)
    taking_turns = tuple(round_ for both in zip(a, b, strict=True) for round_ in both)
    most = max(len(request.tokens) for (request,) in taking_turns) // tiny.page_size + 4
    with Engine(tiny, policy=policy, device_pages=most) as engine:
        told = play(engine, taking_turns, settle=True, empty=False)
        require_right(name, [answer for (answer,) in told])
        returned = Counter(answer.request.tokens[: tiny.page_size] for (answer,) in told if answer.from_host)
        assert max(returned.values()) >= 2
        assert all(answer.cached == answer.request.known // engine.unit * engine.unit for (answer,) in told)


# ---- what a check must find (B26)


@pytest.mark.parametrize("policy", POLICIES)
def test_nothing_is_proven_without_hits(policy: str) -> None:
    with Engine(a_model("mha"), policy=policy, hits=False) as engine:
        told = play(engine, rounds_of("turns", "mha"))
        require_right("mha", [answer for answers in told for answer in answers])
        with pytest.raises(AssertionError, match="0 tokens were cached, expected 16"):
            require_exact(engine, told)
        with pytest.raises(AssertionError, match="nothing came from the host"):
            require_exact(engine, told[:1])


def test_b26_one_sign_bit_with_pages_of_64() -> None:
    rounds = rounds_of("branches", "mha", 64)
    for tamper in (None, partial(tampering.flip_a_sign, "kv", "k")):
        with Engine(a_model("mha", page_size=64), tamper=tamper) as engine:
            told = play(engine, rounds)
            assert engine.loaded["kv"] >= 2 * 256
            if tamper is None:
                require_exact(engine, told, page_size=64)
            else:
                with pytest.raises(AssertionError, match="log-probabilities differ"):
                    require_exact(engine, told, page_size=64)


FAULTS = [
    pytest.param(name, tamper, id=f"{name}-{fault}-{where}")
    for name in MODELS
    for fault, where, tamper in faults_of(name)
]


@pytest.mark.parametrize(("name", "tamper"), FAULTS)
def test_what_is_restored_wrong_is_found(name: str, tamper: Tamper) -> None:
    with (
        Engine(a_model(name), tamper=tamper) as engine,
        pytest.raises(AssertionError, match="log-probabilities differ"),
    ):
        require_exact(engine, play(engine, tuple(requests[:1] for requests in rounds_of("history", name))))


def test_upstreams_thresholds_would_let_a_flipped_sign_pass() -> None:
    """The table: exact where nothing is wrong; a wrong value is far below 0.003, and bits tell it apart."""
    for finding in tampering.sensitivity(["mha"]):
        right = finding.fault == "none"
        assert (finding.exact == len(finding.samples)) == right
        assert (finding.kl == 0) == (finding.divergence == 0) == right
        assert finding.passes == (finding.fault in ("none", "a sign bit flipped"))


class NeverWaits(Controller):
    """For a layer, before it is read."""

    def wait_until(self, layer: int, pool: str | None = None) -> None:
        pass


EARLY = [
    ("mha", NeverWaits),
    ("v4", NeverWaits),
    ("swa", faults.ForgetsTheCaller),
    ("mla", faults.RecordsALayerBeforeIt),
    ("mamba", faults.WaitsForTheFirstLayerOfAState),
]


@pytest.mark.parametrize(("name", "make"), EARLY)
def test_what_comes_too_early_is_found(name: str, make: Any) -> None:
    def found(seed: int) -> bool:
        with Engine(a_model(name), make_controller=make, seed=seed) as engine:
            told = play(engine, rounds_of("turns", name))
            return any(not compare(name, answer).exact for answers in told for answer in answers)

    assert any(map(found, range(6)))


def test_k3_estimates_what_it_should() -> None:
    assert k3([], []) == k3([-1.5, -2], [-1.5, -2]) == 0
    assert k3([-1.0], [-1.0 - 1e-7]) > 0  # e^r - 1 - r as written would be rounding
    assert math.isclose(k3([-1.0, -1.0], [-1.5, -1.0]), (math.e**-0.5 - 0.5) / 2)


# ---- the study of Mamba

CANDIDATES = [pytest.param(*found, id=" ".join(found[:2])) for found in candidates() if found[0] != "staging reused"]


@pytest.mark.parametrize(("candidate", "variant", "chosen"), CANDIDATES)
def test_a_candidate_leaves_a_signature(candidate: str, variant: str, chosen: dict[str, Any]) -> None:
    signature = Signature.of(find("mamba", candidate, variant, conversation(2, 8), **chosen))
    assert (signature.hit > 0) == (signature.divergence > 0) == (candidate != "none")


@pytest.mark.emulated
def test_staging_that_is_reused_shows_in_some_order() -> None:
    orders = [found for found in candidates() if found[0] == "staging reused"]
    assert any(Signature.of(find("mamba", a, b, conversation(4, 8), **chosen)).hit for a, b, chosen in orders)


def test_a_part_that_is_hit_explains_a_mean() -> None:
    signature = Signature("", "", hit=1.0, kl=0.0142, kl_of_hit=0.0142, divergence=0.0, near=0.0, far=0.0)
    assert mamba_study.part_hit(signature, (0.0071, 0.0142)) == (0.5, 1.0)
    assert mamba_study.part_hit(signature, (0.02, 0.03)) is None
