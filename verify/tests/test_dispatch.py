"""Which way every pool of every stack goes: what the support table promises is what the receipts tell."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernels_cupy.runtimes import emulated
from refimpl import PoolTransfer, Refusal, build_stack, support
from refimpl.assembler import Stack
from refimpl.backends import registry
from refimpl.controller import Controller, loads_by_layer
from refimpl.operations import Ack
from verify.toys import STACKS

PAGE = 4
WAYS = [
    ("cpu", "torch", "page_first"),
    ("cpu", "numba", "layer_first"),
    *(
        pytest.param("emulated", backend, layout, marks=pytest.mark.emulated)
        for backend in ("direct", "kernel", "staged", "auto")
        for layout in ("page_first", "page_first_direct")
    ),
    *(
        pytest.param("cuda", backend, layout, marks=pytest.mark.gpu)
        for backend in ("direct", "kernel", "staged", "auto")
        for layout in ("page_first", "page_first_direct")
    ),
]

every_way = pytest.mark.parametrize(("platform", "backend", "layout"), WAYS)
every_stack = pytest.mark.parametrize("kind", STACKS)


def there_and_back(stack: Stack) -> tuple[Ack, Ack]:
    """One page of every pool: what a backup and a load of it tell."""
    controller = Controller(stack)
    device = {name: slots.alloc(stack.specs[name].page_size) for name, slots in stack.device_slots.items()}
    written = controller.write("page", [PoolTransfer(name, None, device.get(name)) for name in stack.specs])
    assert written is not None
    controller.start_writing()
    (backup,) = controller.acknowledge(wait=True)
    host = {name: written.host_indices(name) for name in stack.device_slots}
    assert controller.load("page", [PoolTransfer(name, host.get(name)) for name in stack.specs]) is not None
    controller.start_loading()
    (load,) = controller.acknowledge(wait=True)
    return backup, load


def built(kind: str, platform: str, backend: str, layout: str) -> Stack:
    return build_stack(STACKS[kind](PAGE), layout, backend, device_pages=3, host_ratio=1.0, platform=platform)


@every_way
@every_stack
def test_every_pool_takes_the_path_that_the_table_promises(kind: str, platform: str, backend: str, layout: str) -> None:
    with built(kind, platform, backend, layout) as stack:
        for ack in there_and_back(stack):
            assert ack.error is None
            for name, pool in stack.host.pools.items():
                answer = support(pool.spec, pool.layout, pool.backend, ack.direction, platform)
                assert not isinstance(answer, Refusal)
                taken = {receipt.path.split(":")[0] for receipt in ack.receipts[name]}
                assert taken == {answer.name}, f"{name}: {ack.direction} took {taken}, promised was {answer.name!r}"


@every_way
@every_stack
def test_a_backup_is_one_run_and_a_load_one_for_every_layer(
    kind: str, platform: str, backend: str, layout: str
) -> None:
    with built(kind, platform, backend, layout) as stack:
        backup, load = there_and_back(stack)
        for name, pool in stack.host.pools.items():
            assert len(backup.receipts[name]) == 1
            assert len(load.receipts[name]) == (stack.num_layers if loads_by_layer(pool) else 1)
            moving = [receipt for receipt in load.receipts[name] if receipt.bytes]
            layers = len(pool.spec.owned_layers)
            assert len(moving) <= max(layers, 1) + 1, f"{name}: {len(moving)} runs moved bytes of {layers} layers"
            assert sum(receipt.bytes for receipt in load.receipts[name]) == pool.spec.page_bytes


@pytest.mark.emulated
@every_stack
def test_what_can_be_used_is_probed_when_a_stack_is_built_and_never_again(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    probes: list[str] = []
    monkeypatch.setattr(emulated(), "compile", lambda: probes.append("compile"))
    asked = registry.unavailable

    def unavailable(*question: Any) -> str | None:
        probes.append("unavailable")
        return asked(*question)

    monkeypatch.setattr(registry, "unavailable", unavailable)
    with built(kind, "emulated", "kernel", "page_first") as stack:
        assert set(probes) == {"compile", "unavailable"}
        probes.clear()
        there_and_back(stack)
        assert not probes, "a transfer asked again what can be used"


@pytest.mark.emulated
def test_index_lists_go_where_each_pool_wants_them_whatever_the_group_says() -> None:
    """AND and ANY over a group are information: a pool that stages and one that does not live side by side."""
    pairs = {"swa": ("page_first", "staged"), "c4": ("layer_first", "direct"), "c128": ("page_first_direct", "auto")}
    specs = STACKS["v4"](PAGE)
    with build_stack(
        specs, "page_first", "kernel", pairs, device_pages=3, host_ratio=1.0, platform="emulated"
    ) as stack:
        assert not stack.host.can_use_write_back_jit
        assert stack.host.supports_per_pool_backup_indices
        for ack in there_and_back(stack):
            assert ack.error is None
            uploads = {name: sum(r.index_uploads for r in ack.receipts[name]) for name in ("swa", "c4")}
            assert uploads == {"swa": 1, "c4": 0}, "staged sends the device's list, direct none"


@pytest.mark.emulated
@pytest.mark.parametrize("backend", ["direct", "kernel", "staged", "auto"])
def test_a_list_on_the_device_is_read_where_the_stream_has_come_to(backend: str) -> None:
    """Not when the call returns: work that is queued writes it, and overwrites it right afterwards."""
    port = emulated()
    with built("mha", "emulated", backend, "page_first") as stack:
        rows = {i: stack.device["kv"].buffer("k", i).view(torch.uint8) for i in range(stack.num_layers)}
        for layer, row in rows.items():
            row.copy_(torch.arange(row.numel()).reshape(row.shape) + layer)
        mine = port.empty(8 * PAGE).view(torch.int64)
        port.submit(lambda: mine.copy_(torch.arange(2 * PAGE, 3 * PAGE)))
        controller = Controller(stack)
        operations = [controller.write(i, [PoolTransfer("kv", None, mine)]) for i in range(2)]
        port.submit(lambda: mine.fill_(-1))
        assert controller.start_writing() == 1, "both lists make one"
        for ack in controller.acknowledge(wait=True):
            assert ack.error is None
        for operation in operations:
            assert operation is not None
            slots = operation.host_indices("kv")
            assert slots is not None
            page = stack.host.pools["kv"].page(int(slots[0]) // PAGE)["k"].view(torch.uint8)
            for layer, row in rows.items():
                assert torch.equal(page[layer].flatten(), row[2 * PAGE : 3 * PAGE].flatten())
        port.synchronize()
