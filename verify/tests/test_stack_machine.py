"""Stacks in use: prefixes come, go to the host, come back and are read, while steps are held, fail or are late.

One table of steps, driven twice: by Hypothesis, which cuts a failure down to a few steps, and by long runs of random
ones. After every step all bytes and all slots are compared with what `serving.py` says they must be.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from refimpl.emulated import QueueRuntime
from refimpl.radix import POLICIES, Match
from verify import properties  # noqa: F401 - chooses how hard to try
from verify.guarded import shared_arena
from verify.serving import SIDES, Serving
from verify.toys import STACKS

pytestmark = pytest.mark.ordering

Choose = Callable[[Sequence[Any]], Any]

WAYS = [
    ("cpu", "torch", "page_first"),
    ("cpu", "torch", "layer_first"),
    ("emulated", "kernel", "page_first"),
    ("emulated", "direct", "page_first_direct"),
    ("emulated", "staged", "page_first"),
    ("emulated", "auto", "page_first_direct"),
]
GPU_WAYS = [("cuda", backend, layout) for platform, backend, layout in WAYS if platform == "emulated"]
STEPS_IN_ALL = 10_000
HAPPENED = ("backups that arrived", "loads that arrived", "prefixes read", "prefixes read while they arrived")
HAPPENED += ("prefixes extended",)

# Pages that differ in their middle: nodes are cut before such a page, not inside it.
PAGES = ([0, 0, 0, 0], [0, 0, 1, 1])
PREFIXES = [[t for page in pages for t in page] for n in range(5) for pages in itertools.product(PAGES, repeat=n)]
HELD = [f"{direction} {step}" for direction in ("backup", "load") for step in ("submit", "copy", "acknowledge")]
HELD += ["load layer 1"]
FAILING = [*HELD, "load layer 0", "backup relayout", "load relayout"]


class Run:
    """A server, what its requests hold, and how many steps it has taken."""

    def __init__(self, serving: Serving) -> None:
        self.serving, self.in_use, self.steps = serving, list[Match](), 0

    def step(self, name: str, choose: Choose) -> None:
        STEPS[name](self, choose)
        self.steps += 1

    def check(self) -> None:
        self.serving.check_slots()
        self.serving.check_bytes()
        self.serving.check_readings()

    def end(self) -> None:
        """Everything ends, and nothing is lost."""
        for match in self.in_use:
            self.serving.cache.release(match)
        self.serving.settle()
        self.check()
        assert not self.serving.readings
        self.serving.close()


def insert(run: Run, choose: Choose) -> None:
    tokens = choose(PREFIXES) + [7] * choose(range(3))
    whole = len(tokens) // 4 * 4
    tail: int = choose([whole, min(whole, 8)]) + len(tokens) % 4  # 8: the pages that have some of the window
    run.serving.insert(tokens, dict.fromkeys(run.serving.windows, tail))


def extend(run: Run, choose: Choose) -> None:
    run.serving.extend(choose(PREFIXES) + [7] * choose(range(3)))


def match(run: Run, choose: Choose) -> None:
    found = run.serving.cache.match(choose(PREFIXES))
    assert found.on_device <= found.length


def load(run: Run, choose: Choose) -> None:
    run.serving.load_back(run.serving.cache.match(choose(PREFIXES)))


def read(run: Run, choose: Choose) -> None:
    keep = choose([False, False, True])
    found = run.serving.read(choose(PREFIXES), keep)
    if found and keep:
        run.in_use.append(found)


def release(run: Run, choose: Choose) -> None:
    if run.in_use:
        run.serving.cache.release(run.in_use.pop(choose(range(len(run.in_use)))))


def evict(run: Run, choose: Choose) -> None:
    run.serving.evict(choose(SIDES), choose(run.serving.owners), choose(range(1, 4)))


def send_away(run: Run, choose: Choose) -> None:
    """All that nobody uses leaves the device, most of it for the host."""
    run.serving.controller.start_writing()
    run.serving.check(wait=True)
    run.serving.evict("device", run.serving.owners[0], run.serving.stack.device[run.serving.owners[0]].num_pages)


def start_writing(run: Run, choose: Choose) -> None:
    run.serving.controller.start_writing()


def start_loading(run: Run, choose: Choose) -> None:
    run.serving.start_loading()


def check(run: Run, choose: Choose) -> None:
    run.serving.check(wait=choose([False, False, True]))


def advance(run: Run, choose: Choose) -> None:
    if isinstance(run.serving.runtime, QueueRuntime):
        run.serving.runtime.advance(choose(range(1, 20)))


def hold(run: Run, choose: Choose) -> None:
    """On a GPU a step is late instead: a host that waits there for what it holds itself waits for ever."""
    if isinstance(run.serving.runtime, QueueRuntime):
        run.serving.hold(choose(HELD))
    else:
        run.serving.hooks.delay(choose([step for step in FAILING if "submit" not in step]), choose([0, 1e-4, 2e-3]))


def let_go(run: Run, choose: Choose) -> None:
    run.serving.let_go()


def fail(run: Run, choose: Choose) -> None:
    run.serving.hooks.fail(choose(FAILING), RuntimeError("told to fail"))


def reopen(run: Run, choose: Choose) -> None:
    run.in_use.clear()
    run.serving.reopen()


STEPS: dict[str, Callable[[Run, Choose], None]] = {
    step.__name__: step
    for step in (
        insert,
        extend,
        match,
        load,
        read,
        release,
        evict,
        send_away,
        start_writing,
        start_loading,
        check,
        advance,
        hold,
    )
}
STEPS |= {step.__name__: step for step in (let_go, fail, reopen)}
OFTEN = {
    "insert": 6,
    "extend": 6,
    "read": 6,
    "advance": 4,
    "check": 4,
    "start_writing": 4,
    "evict": 6,
    "send_away": 2,
    "release": 3,
    "let_go": 3,
}
SELDOM = {"fail": 0.4, "hold": 0.6, "reopen": 0.1}


def serving(
    kind: str, way: tuple[str, str, str], policy: str, seed: int, host_ratio: float = 1.0, **options: Any
) -> Serving:
    platform, backend, layout = way
    made = Serving(kind, layout, backend, platform, policy, device_pages=9, host_ratio=host_ratio, **options)
    if isinstance(made.runtime, QueueRuntime):
        made.runtime.reseed(seed)
    return made


def run_for(run: Run, steps: int, seed: int, every: int = 1) -> Counter[str]:
    """So many random steps, everything checked after each, or after `every` so many. Returns what has happened."""
    rng, names = random.Random(seed), list(STEPS)
    weights = [(OFTEN | SELDOM).get(name, 1) for name in names]
    for number in range(steps):
        name = rng.choices(names, weights)[0]
        try:
            run.step(name, rng.choice)
            if number % every == 0:
                if every > 1:  # a device that works by itself
                    run.serving.synchronize()
                run.check()
        except BaseException as failure:
            failure.add_note(f"seed {seed}, step {number}: {name}")
            raise
    run.end()
    return run.serving.counts + Counter(steps=run.steps)


class Machine(RuleBasedStateMachine):
    @initialize(
        kind=st.sampled_from(list(STACKS)),
        way=st.sampled_from(WAYS),
        policy=st.sampled_from(list(POLICIES)),
        seed=st.integers(0, 99),
        host_ratio=st.sampled_from([1.0, 0.5]),
    )
    def start(self, kind: str, way: tuple[str, str, str], policy: str, seed: int, host_ratio: float) -> None:
        self.run = Run(serving(kind, way, policy, seed, host_ratio))

    @rule(name=st.sampled_from(list(STEPS)), data=st.data())
    def step(self, name: str, data: st.DataObject) -> None:
        self.run.step(name, lambda among: data.draw(st.sampled_from(among)))
        self.run.check()

    def teardown(self) -> None:
        if hasattr(self, "run"):
            self.run.end()


TestStacksInUse = Machine.TestCase


@pytest.mark.parametrize("kind", STACKS)
def test_thousands_of_steps_leave_every_byte_and_every_slot_where_it_belongs(
    kind: str, record_property: Callable[[str, object], None]
) -> None:
    """Of each kind of stack so many that all of them together take 10,000."""
    counts, each = Counter[str](), -(-STEPS_IN_ALL // len(STACKS) // len(WAYS))
    first = list(STACKS).index(kind) * len(WAYS)
    for seed, (way, policy) in enumerate(zip(WAYS, itertools.cycle(POLICIES), strict=False), first):
        counts += run_for(Run(serving(kind, way, policy, seed, 1.0 if seed % 2 else 0.5)), each, seed)
    record(counts, kind, record_property)
    assert counts["steps"] * len(STACKS) >= STEPS_IN_ALL
    assert counts["backups that failed"] + counts["loads that failed"]


@pytest.mark.gpu
@pytest.mark.parametrize("kind", STACKS)
def test_the_same_with_real_streams_that_are_late_at_random(
    kind: str, record_property: Callable[[str, object], None]
) -> None:
    counts, each = Counter[str](), -(-STEPS_IN_ALL // len(STACKS) // len(GPU_WAYS))
    for seed, (way, policy) in enumerate(zip(GPU_WAYS, itertools.cycle(POLICIES), strict=False)):
        shared_arena().reset()
        run = Run(serving(kind, way, policy, seed, memory=shared_arena()))
        counts += run_for(run, each, seed, every=10)
    record(counts, kind, record_property)


def record(counts: Counter[str], kind: str, record_property: Callable[[str, object], None]) -> None:
    for what in ("steps", *HAPPENED):
        record_property(f"{kind}: {what}", counts[what])
    print(f"{kind}: " + ", ".join(f"{count:,} {what}" for what, count in counts.items()))
    assert all(counts[what] for what in HAPPENED), f"some of it never happened: {dict(counts)}"
