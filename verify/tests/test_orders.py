"""Small scenarios in every order that streams and events allow: none is wrong, and with a fault some is."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from refimpl import PoolTransfer, build_stack, presets
from refimpl.assembler import Stack
from refimpl.controller import Controller
from refimpl.emulated import HostQueue
from refimpl.hooks import Hooks
from refimpl.radix import PrefixCache
from verify.conformance import faults
from verify.orders import Orders, in_every_order

pytestmark = pytest.mark.ordering

PAGE = 1
Make = Callable[..., Controller]


class Server:
    """Pools of rows and states of one byte, and a controller whose caller is the stream `model`."""

    def __init__(self, make: Make, queue: HostQueue, layers: int, states: bool = False) -> None:
        self.queue, self.stack, self.hooks = queue, _stack(layers, states), Hooks()
        self.controller = make(self.stack, self.hooks, None, None, queue)

    def take(self, pool: str = "kv") -> torch.Tensor:
        slots = self.stack.device_slots[pool].alloc(PAGE)
        assert slots is not None
        return slots

    def rows(self, slots: torch.Tensor, layer: int) -> torch.Tensor:
        return self.stack.device["kv"].buffer("latent", layer)[int(slots[0])]

    def write(self, slots: torch.Tensor, value: int) -> None:
        """A kernel of the model's that writes rows."""
        self.queue.submit(lambda: [self.rows(slots, layer).fill_(value) for layer in range(self.stack.num_layers)])

    def read(self, slots: torch.Tensor, layer: int, seen: list[int]) -> None:
        self.queue.submit(lambda: seen.append(int(self.rows(slots, layer).item())))

    def step(self, state: torch.Tensor, value: int) -> None:
        """A kernel of the model's that overwrites a state in place."""
        self.queue.submit(lambda: self.stack.device["mamba"].buffer("conv_0", 0)[int(state[0])].fill_(value))

    def backup(self, slots: torch.Tensor) -> torch.Tensor:
        operation = self.controller.write("backup", [PoolTransfer("kv", None, slots)])
        assert operation is not None
        self.controller.start_writing()
        host = operation.host_indices("kv")
        assert host is not None
        return host

    def load(self, host: torch.Tensor, slots: torch.Tensor) -> None:
        self.controller.load("load", [PoolTransfer("kv", host, slots)])
        self.controller.set_consumer(self.controller.start_loading())

    def read_layer_by_layer(self, slots: torch.Tensor) -> list[int]:
        seen: list[int] = []
        for layer in range(self.stack.num_layers):
            self.controller.wait_until(layer)
            self.read(slots, layer, seen)
        return seen

    def finish(self, close: bool = True) -> None:
        """In any order: the queue runs until nothing is left, and only then is asked what has ended."""
        while self.queue.advance():
            pass
        for ack in self.controller.acknowledge(wait=True):
            assert ack.error is None
        if close:
            self.stack.close()


def _stack(layers: int, states: bool) -> Stack:
    specs = {"kv": presets.mla(layers, 1, torch.uint8, PAGE)}
    if states:
        specs["mamba"] = presets.mamba(layers, [(1,)], torch.uint8)
    return build_stack(specs, "layer_first", "torch", device_pages=5, host_ratio=1.0, platform="cpu")


def there_and_back(make: Make, queue: HostQueue) -> None:
    """Rows are written, saved, given up, loaded to where others were, and read layer by layer."""
    with queue.on("model"):
        server = Server(make, queue, layers=2)
        mine, others, old = server.take(), server.take(), list[int]()
        server.write(mine, 7)
        host = server.backup(mine)
        server.read(others, 0, old)
        server.load(host, others)
        seen = server.read_layer_by_layer(others)
        server.finish()
    assert (old, seen) == ([0], [7, 7]), f"rows of others were {old} before the load, readers saw {seen}"


def both_ways(make: Make, queue: HostQueue) -> None:
    """One prefix is saved while another one comes back."""
    with queue.on("model"):
        server = Server(make, queue, layers=1)
        mine, others, target = server.take(), server.take(), server.take()
        server.rows(mine, 0).fill_(5)
        host = server.backup(mine)
        server.controller.acknowledge(wait=True)
        server.write(others, 6)
        saved = server.backup(others)
        server.load(host, target)
        seen = server.read_layer_by_layer(target)
        pages = server.stack.host.pools["kv"].layer_view("latent", 0)
        server.queue.advance(1000)
        written = int(pages[int(saved[0])].item())
        server.finish()
    assert (seen, written) == ([5], 6), f"readers saw {seen}, {written} was saved"


def states_in_place(make: Make, queue: HostQueue) -> None:
    """Rows are saved, and with them a state that the model overwrites as soon as it may."""
    with queue.on("model"):
        server = Server(make, queue, layers=1, states=True)
        rows, state = server.take(), server.take("mamba")
        server.write(rows, 5)
        server.step(state, 6)
        transfers = [PoolTransfer("kv", None, rows), PoolTransfer("mamba", None, state)]
        operation = server.controller.write("backup", transfers)
        assert operation is not None
        server.controller.start_writing()
        server.step(state, 7)
        host = [operation.host_indices(name) for name in ("kv", "mamba")]
        server.finish(close=False)
        pools = server.stack.host.pools
        views = [pools["kv"].layer_view("latent", 0), pools["mamba"].layer_view("conv_0", 0)]
        saved = [int(view[int(slots[0])].item()) for view, slots in zip(views, host, strict=True) if slots is not None]
        server.stack.close()
    assert saved == [5, 6], f"rows 5 and the state 6 are saved as {saved}"


def behind_a_failure(make: Make, queue: HostQueue) -> None:
    """A prefix comes back, another is computed from it and saved, and then the first has not come after all."""
    with queue.on("model"):
        server = Server(make, queue, layers=1)
        cache = getattr(make, "tree", PrefixCache)(server.controller)
        cache.insert([1], {"kv": server.take()})
        server.controller.start_writing()
        cache.check(wait=True)
        cache.evict("kv", PAGE)
        match = cache.match([1])
        assert cache.load_back(match)
        server.hooks.fail("load acknowledge", RuntimeError("told to fail"))
        server.controller.set_consumer(server.controller.start_loading())
        server.controller.wait_until(0)
        own = server.take()
        server.write(own, 7)
        cache.insert([1, 2], {"kv": torch.cat([match.slots("kv"), own])})
        server.controller.start_writing()
        while queue.advance():
            cache.check()
        cache.check(wait=True)
        found = cache.match([1, 2]).length
        server.stack.close()
    assert found == 1, f"{found} tokens are found, of which one was computed from what never came"


SCENARIOS = {
    "there and back": there_and_back,
    "both ways": both_ways,
    "states in place": states_in_place,
    "behind a failure": behind_a_failure,
}


@pytest.mark.parametrize("name", SCENARIOS)
def test_no_order_is_wrong(name: str, record_property: Callable[[str, object], None]) -> None:
    count = in_every_order(partial(SCENARIOS[name], Controller))
    record_property(f"orders of {name}", count)
    assert count > 5, f"only {count} orders"


@pytest.mark.parametrize(
    ("make", "scenario", "told"),
    [
        (faults.ForgetsTheCaller, there_and_back, "readers saw"),
        (faults.ForgetsTheOtherDirection, there_and_back, "readers saw"),
        (faults.RecordsALayerBeforeIt, there_and_back, "readers saw"),
        (faults.ForgetsTheCaller, states_in_place, "are saved as"),
        (faults.LetsStatesBeOverwritten, states_in_place, r"are saved as \[5, 7\]"),
        (faults.BelowATreeThatTrustsLoads, behind_a_failure, "2 tokens are found"),
    ],
)
def test_with_a_fault_some_order_is_wrong(make: Any, scenario: Callable[..., None], told: str) -> None:
    with pytest.raises(AssertionError, match=told):
        in_every_order(partial(scenario, make))


def test_every_order_comes_once() -> None:
    """Two streams of two and three operations: ten ways to interleave them."""
    seen: list[str] = []

    def scenario(queue: HostQueue) -> None:
        told: list[str] = []
        for name in ("a1", "a2", "b1", "b2", "b3"):
            queue.submit(partial(told.append, name), name[0])
        while queue.advance():
            pass
        seen.append(" ".join(told))

    assert in_every_order(scenario) == len(set(seen)) == 10
    assert not Orders().next(), "nothing was chosen"
