"""Whoever waits for layers of a load: for no later ones, and for a whole state."""

from __future__ import annotations

from refimpl.layer_done import SETS
from verify.conformance.checks.registry import check
from verify.conformance.rig import Rig, Seen


@check()
def check_readers_of_layers(rig: Rig) -> None:
    """A reader waits for its layer and for no later one, and then the layer is there."""
    host, stored = rig.on_host()
    slots = rig.take()
    layers = range(rig.stack.num_layers)
    holds = [rig.hold(f"load layer {layer}") for layer in layers]
    rig.load(host, slots)
    seen = []
    for layer in layers:
        rig.promptly(lambda layer=layer: rig.controller.wait_until(layer))
        seen.append(rig.see(slots, rig.model, [layer]))
    for layer in layers:
        assert not _already(rig, seen[layer]), f"a reader of layer {layer} does not wait for it"
        holds[layer].release()
        assert rig.arrives(seen[layer]), f"a reader of layer {layer} waits for more than that layer"
        rig.require(f"a reader of layer {layer}", seen[layer].rows, stored)
    rig.finish()
    rig.require_device("a load layer by layer", slots, stored)


def _already(rig: Rig, seen: Seen) -> bool:
    assert seen.event is not None
    rig.run_all()
    return seen.event.query()


@check("recurrent")
def check_whole_states(rig: Rig) -> None:
    """B24: slot 3 is copied to slot 9 as soon as its load is queued, and half of its layers are late."""
    (pool, *_) = rig.recurrent
    layers = rig.stack.specs[pool].owned_layers
    middle = layers[len(layers) // 2]
    host, stored = rig.on_host()
    slots, copy = rig.take(), rig.take()
    with rig.held(f"load layer {middle}"):
        rig.load(host, slots)
        rig.promptly(lambda: rig.controller.wait_for_all_of(pool))
        rig.move({pool: slots[pool]}, {pool: copy[pool]}, rig.model)
        with rig.runtime.on(reader := rig.runtime.stream()):
            rig.promptly(lambda: rig.controller.wait_until(middle - 1))
            seen = rig.see(slots, reader, [middle - 1])
        assert rig.arrives(seen), f"a reader of layer {middle - 1} waits for layer {middle}"
        rig.let_run()
    rig.finish()
    rig.require("a reader of one layer", seen.rows, stored)
    rig.require_device("a whole state copied behind its load", {pool: copy[pool]}, stored)


@check(races=False)
def check_layers_of_nobody_never_block(rig: Rig) -> None:
    """A pool's reader does not wait for layers that the pool does not own, nor a pass that depends on no load."""
    host, _ = rig.on_host()
    layers = range(rig.stack.num_layers)
    with rig.held(*(f"load layer {layer}" for layer in layers)):
        rig.load(host)
        for pool, spec in rig.stack.specs.items():
            for layer in set(layers) - set(spec.owned_layers):
                rig.controller.wait_until(layer, pool)
        assert rig.arrives(rig.see(rig.take(), rig.model)), "a reader waits for layers that its pool does not own"
        rig.controller.set_consumer(None)
        rig.controller.wait_until(layers[-1])
        assert rig.arrives(rig.see(rig.take(), rig.model)), "a forward pass waits that depends on no load"
    rig.finish()


@check(races=False)
def check_layers_that_there_are_not(rig: Rig) -> None:
    for layer in (-1, rig.stack.num_layers):
        try:
            rig.controller.wait_until(layer)
        except ValueError:
            continue
        raise AssertionError(f"a wait for layer {layer} of {rig.stack.num_layers} passes")


def _begins(rig: Rig) -> bool:
    """Whether loads that are queued are submitted. To refuse is as good as to put them off."""
    try:
        return rig.controller.start_loading() is not None
    except RuntimeError:
        return False


@check()
def check_no_more_loads_than_sets_of_events(rig: Rig) -> None:
    """Every load's readers wait for that load, and one load too many waits for an acknowledgement."""
    loads = [(*rig.on_host(f"load {i}", 1), rig.take("device", 1)) for i in range(SETS + 1)]
    seen = []
    with rig.held("load"):
        for host, _, slots in loads[:-1]:
            rig.load(host, slots)
            with rig.runtime.on(reader := rig.runtime.stream()):
                rig.controller.wait_until(rig.stack.num_layers - 1)
                seen.append(rig.see(slots, reader))
        host, last, slots = loads[-1]
        rig.queue("load", slots, host)
        assert not _begins(rig), f"{SETS + 1} loads are under way at once"
        rig.let_run()
    rig.finish()
    for i, each in enumerate(seen):
        rig.require(f"a reader of load {i}", each.rows, loads[i][1])
    rig.start("load")
    rig.finish()
    rig.require_device("a load that was put off", slots, last)
