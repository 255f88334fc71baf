"""A tree of prefixes over the controller: what it takes for saved is saved."""

from __future__ import annotations

import torch

from verify.conformance.checks.failures import Broken
from verify.conformance.checks.registry import check
from verify.conformance.rig import PAGE, PAGES, Content, Rig, Slots


@check()
def check_nothing_is_saved_that_was_made_of_what_never_came(rig: Rig) -> None:
    """A prefix is computed behind one that is being loaded, and its backup is over before the load is known to fail."""
    cache, tokens = rig.tree(rig.controller), range(4 * PAGE)
    cache.insert(tokens[: 2 * PAGE], _of_tokens(rig, rig.on_device()[0], 2 * PAGE))
    rig.start("backup")
    cache.check(wait=True)
    for name in rig.owners:
        cache.evict(name, PAGES * PAGE)
    match = cache.match(tokens)
    assert match.length == 2 * PAGE, f"of a prefix on the host {match.length} tokens are found"
    assert cache.load_back(match), "there is room, and a prefix on the host is not loaded"
    rig.hooks.fail("load acknowledge", Broken())
    with rig.held("load acknowledge"):
        rig.start("load")
        rig.controller.wait_until(rig.stack.num_layers - 1)
        own, _ = rig.on_device("what was computed")
        given = _of_tokens(rig, own, 2 * PAGE)
        cache.insert(tokens, given | {cache.anchor: torch.cat([match.slots(cache.anchor), given[cache.anchor]])})
        rig.start("backup")
        rig.run_all()
        cache.check()
    cache.check(wait=True)
    found = cache.match(tokens).length
    assert found <= 2 * PAGE, f"a load of {2 * PAGE} tokens fails, and {found} are found with what was made of them"


def _of_tokens(rig: Rig, slots: Slots, tokens: int) -> Slots:
    """What a tree takes: slots of so many tokens, one of a state."""
    return {name: slots[name] if slots[name].numel() == tokens else slots[name][-1:] for name in rig.owners}


@check()
def check_nodes_are_cut_while_they_are_saved(rig: Rig) -> None:
    """B23: either part of a node gets its part of the backup."""
    slots, content = rig.on_device("the prefix", 4)
    cache = rig.tree(rig.controller)
    tokens = range(4 * PAGE)
    with rig.held("backup"):
        cache.insert(tokens, _of_tokens(rig, slots, len(tokens)))
        rig.start("backup")
        cache.match(tokens[: 2 * PAGE])
        rig.let_run()
    cache.check(wait=True)
    rig.rest()
    nodes = [node for node in cache.root.subtree() if node.parent]
    assert [len(node.key) for node in nodes] == [2 * PAGE] * 2, f"four pages cut in the middle are {nodes}"
    for part, node in enumerate(nodes):
        held = len(node.host.get(cache.anchor, ()))
        assert held == 2 * PAGE, f"part {part} of a node that was cut has {held} host slots for {2 * PAGE} tokens"
        half = Content(content.name, {place: rows.chunk(2)[part] for place, rows in content.rows.items()})
        riders = [name for name in rig.stack.specs if rig.stack.owner(name) == cache.anchor]
        rig.require_host(f"part {part} of a node that was cut", dict.fromkeys(riders, node.host[cache.anchor]), half)
