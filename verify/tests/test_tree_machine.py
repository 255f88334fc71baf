"""The tree of prefixes beside a plain model of it: after every step both say the same, and no rule is broken.

What is told and what is left: prefixes found, room made, nodes, their slots on both sides, who uses them, what is under
way, free pages. Hypothesis cuts a failure down to a few steps; long random runs go where it does not.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from refimpl.assembler import build_stack
from refimpl.controller import Controller
from refimpl.emulated import QueueRuntime
from refimpl.hooks import Hooks
from refimpl.invariants import require_invariants
from refimpl.operations import Ack, Operation
from refimpl.radix import POLICIES, Match, Node, Ticket
from refimpl.support import DIRECTIONS
from verify import properties  # noqa: F401 - chooses how hard to try
from verify.checked import CheckedCache
from verify.plain_tree import PlainTree
from verify.serving import SIDES
from verify.toys import STACKS
from verify.words import P, pages, word

pytestmark = pytest.mark.ordering

Choose = Callable[[Sequence[Any]], Any]

KINDS = ("mha", "swa", "mamba", "swa-mamba")
WINDOWS = {"swa": 6}  # tokens: a page and a part of another
RATIOS = (1.0, 0.5, 0.25)  # of the host's pages to the device's
WORDS = ["".join(letters) for n in range(5) for letters in itertools.product("ab", repeat=n)]
FAILING = [f"{direction} {step}" for direction in ("backup", "load") for step in ("submit", "copy", "acknowledge")]
FAILING += ["load layer 1"]
STEPS_IN_ALL = 6_000
HAPPENED = ("backups arrived", "backups failed", "loads arrived", "loads failed", "nodes cut")
HAPPENED += ("times without room on the device", "times without room on the host")


class _Numbering(Controller):
    """Numbers tickets in the order in which they were queued."""

    def _queue(self, operation: Operation) -> Operation:
        self.tickets = [*getattr(self, "tickets", []), operation.tag]
        return super()._queue(operation)


class _Telling(CheckedCache):
    """Tells what it is told to have ended: that is not for a model to know."""

    def __init__(self, controller: _Numbering, *arguments: Any) -> None:
        super().__init__(controller, *arguments)
        self.tickets, self.ended = controller, list[list[tuple[int, bool]]]()

    def _noted(self, wait: bool) -> list[Ack]:
        self.ended.append([])
        return super()._noted(wait)

    def _ended(self, ticket: Ticket, ack: Ack) -> None:
        self.ended[-1].append((self.tickets.tickets.index(ticket), ack.error is not None))
        super()._ended(ticket, ack)


class Both:
    """A tree and its model. Steps go to both; what they answer is compared, and all that they hold."""

    def __init__(self, kind: str, policy: str, host_ratio: float) -> None:
        self.stack = build_stack(STACKS[kind](P), "page_first", "torch", device_pages=9, host_ratio=host_ratio)
        self.hooks = Hooks()
        self.controller = _Numbering(self.stack, self.hooks)
        self.windows = {name: WINDOWS[name] for name in self.stack.specs if name in WINDOWS}
        self.cache = _Telling(self.controller, policy, self.windows)
        self.allocators = {("device", name): slots for name, slots in self.stack.device_slots.items()}
        self.allocators |= {("host", name): self.stack.host.pools[name].allocator for name in self.stack.device_slots}
        rows, states = [self.cache.anchor, *self.cache.rows], self.cache.states
        free = {place: slots.available_size() // slots.page_size for place, slots in self.allocators.items()}
        self.model = PlainTree(policy, P, rows, states, self.windows, free, self.cache.ended)
        self.in_use: list[Match] = []
        self.counts = Counter[str]()

    def step(self, name: str, choose: Choose) -> None:
        STEPS[name](self, choose)
        assert not self.cache.ended, "the model was not told what had ended, or told too early"
        self.counts.update(steps=1)
        self.compare()

    def compare(self) -> None:
        require_invariants(self.cache, {})
        here, model = self.nodes(), self.model
        places = {end: {place: n for place in model.has if (n := len(model.of(end, place)))} for end in model.ends}
        assert here == {
            end: (model.users(end), model.hits[end], model.moving[end].direction if end in model.moving else "", held)
            for end, held in places.items()
        }
        free = {place: slots.available_size() // slots.page_size for place, slots in self.allocators.items()}
        assert free == {place: model.free(place) for place in free}

    def nodes(self) -> dict[str, tuple[int, int, str, dict[tuple[str, str], int]]]:
        """Users, hits, what is under way, and pages on both sides, by prefix."""
        return {
            prefix(node): (
                node.users,
                node.hits,
                node.ticket.direction if node.ticket else "",
                {
                    (side, name): len(slots) // self.stack.specs[name].page_size
                    for side in SIDES
                    for name, slots in getattr(node, side).items()
                },
            )
            for node in self.cache.root.subtree()
            if node.parent
        }

    def take(self, needs: dict[str, int]) -> dict[str, torch.Tensor] | None:
        """Device slots for so many pages of each pool, or nothing."""
        found: dict[str, torch.Tensor] = {}
        for name in sorted(needs):
            slots, need = self.stack.device_slots[name], needs[name] * self.stack.specs[name].page_size
            if slots.available_size() < need:
                self.cache.evict(name, need - slots.available_size())
            some = slots.alloc(need)
            if some is None:
                self.give_back(found)
                return None
            found[name] = some
        return found

    def give_back(self, slots: dict[str, torch.Tensor]) -> None:
        for name, some in slots.items():
            self.stack.device_slots[name].free(some)

    def end(self) -> None:
        for match in self.in_use:
            self.cache.release(match)
        self.model.using.clear()
        while any(self.controller.queued(each) or self.controller.under_way(each) for each in DIRECTIONS):
            self.controller.start_writing()
            start_loading(self, lambda among: among[0])
            check(self, lambda among: True)
        self.compare()
        self.counts.update({f"times without room on the {side}": self.model.refused[side] for side in SIDES})
        self.cache.clear()
        self.controller.close()
        self.stack.close()


def prefix(node: Node) -> str:
    return "".join(map(word, node.path()))


def insert(both: Both, choose: Choose) -> None:
    """A prefix, of windows as much as a server keeps of them or less."""
    text, model = choose(WORDS), both.model
    needs: dict[str, int] = dict.fromkeys(model.rows, len(text)) | dict.fromkeys(model.states, int(choose([1, 1, 0])))
    needs |= {name: min(len(text), choose([4, 2, 1, 0])) for name in model.rows[1:]}
    slots, room = both.take(needs), model.take("device", needs)
    assert (slots is not None) == room
    if slots is not None:
        both.give_back(both.cache.insert(pages(text), slots))
        model.insert(text, needs)


def match(both: Both, choose: Choose) -> None:
    _match(both, choose)


def _match(both: Both, choose: Choose) -> Match:
    text, nodes = choose(WORDS), len(both.model.ends)
    found = both.cache.match(pages(text))
    last, on_device = both.model.match(text)
    assert (prefix(found.last) if found.last else "", found.length, found.on_device) == (
        last,
        P * len(last),
        P * on_device,
    )
    both.counts["nodes cut"] += len(both.model.ends) - nodes
    return found


def lock(both: Both, choose: Choose) -> None:
    """A request that reads: what it finds must be there, or on its way."""
    found = _match(both, choose)
    if _load(both, found):
        both.cache.use(found)
        both.model.use(prefix(found.last) if found.last else "")
        both.in_use.append(found)


def unlock(both: Both, choose: Choose) -> None:
    if both.in_use:
        number = choose(range(len(both.in_use)))
        both.cache.release(both.in_use.pop(number))
        both.model.using.pop(number)


def load(both: Both, choose: Choose) -> None:
    _load(both, _match(both, choose))


def _load(both: Both, found: Match) -> bool:
    last = prefix(found.last) if found.last else ""
    there = both.cache.load_back(found)
    assert there == both.model.load_back(last)
    return there


def evict(both: Both, choose: Choose) -> None:
    side, name = choose(SIDES), choose([*both.model.rows, *both.model.states])
    count, unit = choose([1, 2, 3, 9]), both.stack.specs[name].page_size
    freed = (both.cache.evict if side == "device" else both.cache.evict_host)(name, count * unit)
    assert freed == both.model.evict(side, name, count) * unit


def start_writing(both: Both, choose: Choose) -> None:
    both.controller.start_writing()


def start_loading(both: Both, choose: Choose) -> None:
    with suppress(RuntimeError):  # too many are under way
        both.controller.start_loading()


def check(both: Both, choose: Choose) -> None:
    for ack in both.cache.check(wait=choose([False, True])):
        both.counts[f"{ack.direction}s {'failed' if ack.error else 'arrived'}"] += 1
    both.model.note()


def send_away(both: Both, choose: Choose) -> None:
    """Backups arrive, and all that nobody uses leaves the device."""
    both.controller.start_writing()
    check(both, lambda among: True)
    anchor, every = both.model.anchor, both.stack.device[both.model.anchor].num_pages
    assert both.cache.evict(anchor, every * P) == both.model.evict("device", anchor, every) * P


def advance(both: Both, choose: Choose) -> None:
    if isinstance(both.controller.runtime, QueueRuntime):
        both.controller.runtime.advance(choose(range(1, 9)))


def fail(both: Both, choose: Choose) -> None:
    both.hooks.fail(choose(FAILING), RuntimeError("told to fail"))


def clear(both: Both, choose: Choose) -> None:
    both.cache.clear()
    both.model.clear()


STEPS: dict[str, Callable[[Both, Choose], None]] = {
    step.__name__: step for step in (insert, match, lock, unlock, load, evict, send_away)
}
STEPS |= {step.__name__: step for step in (start_writing, start_loading, check, advance, fail, clear)}
OFTEN = {
    "insert": 6,
    "lock": 3,
    "unlock": 2.5,
    "load": 3,
    "evict": 5,
    "check": 3,
    "start_writing": 3,
    "start_loading": 3,
}
SELDOM = {"fail": 0.4, "clear": 0.1}


class Machine(RuleBasedStateMachine):
    @initialize(kind=st.sampled_from(KINDS), policy=st.sampled_from(list(POLICIES)), host_ratio=st.sampled_from(RATIOS))
    def start(self, kind: str, policy: str, host_ratio: float) -> None:
        self.both = Both(kind, policy, host_ratio)

    @rule(name=st.sampled_from(list(STEPS)), data=st.data())
    def step(self, name: str, data: st.DataObject) -> None:
        self.both.step(name, lambda among: data.draw(st.sampled_from(among)))

    def teardown(self) -> None:
        if hasattr(self, "both"):
            self.both.end()


TestTreeBesideItsModel = Machine.TestCase


@pytest.mark.parametrize("policy", POLICIES)
def test_thousands_of_steps_go_as_the_model_says(policy: str) -> None:
    """Every kind of stack, with hosts as large as the device and smaller."""
    counts = Counter[str]()
    ways = list(itertools.product(KINDS, RATIOS))
    for seed, (kind, host_ratio) in enumerate(ways):
        both = Both(kind, policy, host_ratio)
        counts += run_for(both, -(-STEPS_IN_ALL // len(ways) // len(POLICIES)), seed)
    print(f"{policy}, seeds 0 to {len(ways) - 1}: " + ", ".join(f"{count:,} {what}" for what, count in counts.items()))
    assert all(counts[what] for what in HAPPENED), "some of it never happened"


def run_for(both: Both, steps: int, seed: int) -> Counter[str]:
    """So many random steps; the seed and the step are told with what fails."""
    rng, names = random.Random(seed), list(STEPS)
    weights = [(OFTEN | SELDOM).get(name, 1) for name in names]
    for number in range(steps):
        name = rng.choices(names, weights)[0]
        try:
            both.step(name, rng.choice)
        except BaseException as failure:
            failure.add_note(f"seed {seed}, step {number}: {name}")
            raise
    both.end()
    return both.counts
