"""Every rule of a tree is broken by hand once, and told by its name with the node that shows it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from inspect import isfunction

import pytest
import torch

from refimpl.invariants import OWNED, RULES, Others, require_invariants
from refimpl.operations import Ack
from refimpl.radix import Node, PrefixCache, Ticket
from verify.checked import CALLS
from verify.serving import Serving
from verify.words import P, pages, saved, word

pytestmark = pytest.mark.ordering


@dataclass(eq=False)
class Scene:
    """
    "ab" is in use, its child "c" on its way to the device, its child "x" on its way to the host. "y" and "z" are on
    both sides; "y" was used before "z".
    """

    server: Serving
    others: Others | None = field(default_factory=dict)

    def __getitem__(self, name: str) -> Node:
        (node,) = [node for node in self.server.cache.root.subtree() if word(node) == name]
        return node

    def ticket(self, name: str) -> Ticket:
        ticket = self[name].ticket
        assert ticket
        return ticket

    def require(self) -> None:
        require_invariants(self.server.cache, self.others)


@pytest.fixture
def scene() -> Iterator[Scene]:
    server = Serving("swa-mamba", windows={"swa": 4})
    saved(server, "ab", "abc", "y", "z")
    server.cache.match(pages("ab"))
    server.cache.match(pages("y"))
    server.cache.match(pages("z"))
    for name in server.owners:
        server.cache.evict(name, 1)
    server.cache.use(server.cache.match(pages("ab")))
    assert server.insert(pages("abx"))
    assert server.load_back(server.cache.match(pages("abc")))
    locks = [(allocator, allocator.locks.copy()) for allocator in server.allocators.values()]
    yield Scene(server)
    for allocator, locked in locks:
        allocator._locks = locked
    server.controller.close()
    server.stack.close()


def test_nothing_is_wrong_before(scene: Scene) -> None:
    scene.require()
    assert (scene.ticket("c").direction, scene.ticket("x").direction, scene["ab"].users) == ("load", "backup", 1)
    assert set(scene["y"].host) == set(scene["y"].device) == {"kv", "swa", "mamba"}


def test_slots_of_requests_are_asked_for_where_they_are_known(scene: Scene) -> None:
    """Not knowing them, nobody can say that a slot is lost."""
    slots = scene.server.stack.device_slots["kv"].alloc(P)
    assert slots is not None
    require_invariants(scene.server.cache)
    require_invariants(scene.server.cache, {("device", "kv"): [slots]})
    with pytest.raises(AssertionError, match=OWNED):
        require_invariants(scene.server.cache, {})


LINKS, COMPONENTS, PATH, USE, NOTHING, DEVICE, ANCHOR, UNDER_WAY = RULES
Break = Callable[[Scene], object]
BREAKS: dict[str, tuple[str, str, Break]] = {}  # what is done -> the rule that it breaks, what is told, how it is done


def breaks(rule: str, told: str) -> Callable[[Break], Break]:
    def note(what: Break) -> Break:
        BREAKS[what.__name__] = rule, told, what
        return what

    return note


@breaks(LINKS, "the root has a parent, tokens, slots or users")
def the_root_is_in_use(scene: Scene) -> None:
    scene.server.cache.root.users = 1


@breaks(LINKS, "does not know its parent")
def a_child_has_another_parent(scene: Scene) -> None:
    scene["c"].parent = scene["y"]


@breaks(LINKS, "its parent knows it by another first page")
def a_child_is_reached_twice(scene: Scene) -> None:
    scene["ab"].children[b"again"] = scene["c"]


@breaks(LINKS, "3 tokens are no whole pages of 4")
def a_node_ends_inside_a_page(scene: Scene) -> None:
    scene["c"].key = scene["c"].key[:3]


@breaks(LINKS, "0 tokens are no whole pages")
def a_node_has_no_tokens(scene: Scene) -> None:
    scene["c"].key = scene["c"].key[:0]


@breaks(COMPONENTS, "4 slots of kv on the device")
def the_anchor_lacks_a_page(scene: Scene) -> None:
    scene["ab"].device["kv"] = scene["ab"].device["kv"][:P]


@breaks(COMPONENTS, "12 slots of swa on the host")
def a_window_is_longer_than_its_node(scene: Scene) -> None:
    scene["ab"].host["swa"] = torch.cat([scene["ab"].host["swa"], scene["y"].host["swa"]])


@breaks(COMPONENTS, "0 slots of swa on the host")
def a_window_is_empty(scene: Scene) -> None:
    scene["ab"].host["swa"] = scene["ab"].host["swa"][:0]


@breaks(COMPONENTS, "2 slots of mamba on the device")
def a_node_has_two_states(scene: Scene) -> None:
    scene["y"].device["mamba"] = torch.cat([scene[name].device["mamba"] for name in ("y", "z")])


@breaks(COMPONENTS, "draft owns no slots")
def a_pool_is_unknown(scene: Scene) -> None:
    scene["y"].device["draft"] = scene["y"].device["kv"]


@breaks(COMPONENTS, "begins a page but is no multiple of 4")
def slots_begin_inside_a_page(scene: Scene) -> None:
    scene["ab"].device["kv"] = scene["ab"].device["kv"].roll(1)


@breaks(PATH, "1 users here, 2 below")
def a_path_is_locked_at_its_end_only(scene: Scene) -> None:
    scene["x"].users = 2


@breaks(PATH, "-1 users here")
def a_lock_is_undone_twice(scene: Scene) -> None:
    scene["z"].users = -1


@breaks(PATH, "3 hits here, 100 below")
def a_path_is_met_at_its_end_only(scene: Scene) -> None:
    scene["x"].hits = 99


@breaks(USE, "used at 99, now is ")
def a_node_was_used_in_the_future(scene: Scene) -> None:
    scene["z"].used_at = 99


@breaks(USE, "used at 0, now is ")
def a_node_was_never_used(scene: Scene) -> None:
    scene["z"].used_at = 0


@breaks(USE, "of kv on the device what was used at")
def what_was_used_last_goes_first(scene: Scene) -> None:
    cache, first = scene.server.cache, type(scene.server.cache).victims
    cache.victims = lambda side, name, need: first(cache, side, name, 999)[::-1][:1]


@breaks(NOTHING, "a leaf whose tokens are nowhere")
def an_empty_leaf_stays(scene: Scene) -> None:
    scene["y"].device, scene["y"].host = {}, {}


@breaks(DEVICE, "it is on the device, what comes before it is not")
def the_device_lacks_what_comes_before(scene: Scene) -> None:
    scene["ab"].device = {}


@breaks(ANCHOR, r"the host has \['mamba', 'swa'\] of it, and not kv")
def the_host_lacks_the_anchor(scene: Scene) -> None:
    del scene["y"].host["kv"]


@breaks(UNDER_WAY, "its backup is over")
def a_ticket_is_over(scene: Scene) -> None:
    scene.ticket("x").done = True


@breaks(UNDER_WAY, "its backup is over, or not of this node")
def a_ticket_is_of_nothing(scene: Scene) -> None:
    scene["y"].ticket = scene["x"].ticket


@breaks(UNDER_WAY, "its load is over, or not of this node")
def the_controller_forgets_what_is_under_way(scene: Scene) -> None:
    scene.server.controller._queued["load"].clear()


@breaks(UNDER_WAY, "a backup goes on for it that it does not know")
def a_node_forgets_what_is_under_way(scene: Scene) -> None:
    scene["x"].ticket = None


@breaks(UNDER_WAY, "kv is saved, and is on the host")
def a_backup_is_there_before_it_has_ended(scene: Scene) -> None:
    scene["x"].host = dict(scene.ticket("x").parts[scene["x"]])


@breaks(UNDER_WAY, "0 slots of swa in a backup: 4 and 0 on its sides")
def a_backup_has_less_than_its_node(scene: Scene) -> None:
    part = scene.ticket("x").parts[scene["x"]]
    part["swa"] = part["swa"][:0]


@breaks(UNDER_WAY, "kv is loaded into other slots than its own")
def a_load_goes_elsewhere(scene: Scene) -> None:
    scene.ticket("c").parts[scene["c"]]["kv"] = scene["y"].device["kv"]


@breaks(UNDER_WAY, "kv is under way, and its slots on the device are not locked")
def the_source_of_a_backup_is_not_locked(scene: Scene) -> None:
    scene.server.stack.device_slots["kv"].unlock(scene["x"].device["kv"])


@breaks(UNDER_WAY, "kv is under way, and its slots on the host are not locked")
def the_source_of_a_load_is_not_locked(scene: Scene) -> None:
    scene.server.stack.host.pools["kv"].unlock(scene["c"].host["kv"])


@breaks(UNDER_WAY, "a backup of 1 nodes has ended, and there is no load to wait for")
def what_has_ended_is_forgotten(scene: Scene) -> None:
    scene.server.cache.early.append(Ack(scene.ticket("x"), "backup", {}, {}, 0.0))


@breaks(OWNED, "of kv on the device is also owned by Node")
def two_nodes_have_the_same_slots(scene: Scene) -> None:
    scene["y"].device["kv"] = scene["z"].device["kv"]


@breaks(OWNED, "of kv on the host is also owned by Node")
def a_backup_overwrites_what_a_node_has(scene: Scene) -> None:
    scene["y"].host["kv"] = scene.ticket("x").parts[scene["x"]]["kv"]


@breaks(OWNED, "of mamba on the device is also owned by a request")
def a_request_has_a_slot_of_the_tree(scene: Scene) -> None:
    scene.others = {("device", "mamba"): [scene["y"].device["mamba"]]}


@breaks(OWNED, "swa on the host: slots are owned here, and free")
def slots_are_free_and_in_the_tree(scene: Scene) -> None:
    scene.server.stack.host.pools["swa"].free(scene["y"].host["swa"])


@breaks(OWNED, "mamba on the device: slots are owned here, and could be given to the tree again")
def slots_of_the_tree_can_be_given_to_it_again(scene: Scene) -> None:
    slots = scene.server.stack.device_slots["mamba"]
    state = scene["y"].device["mamba"]
    slots._kept[state] = False


@breaks(OWNED, "kv on the host: .* there are 36")
def slots_are_lost(scene: Scene) -> None:
    del scene["y"].host["swa"], scene["y"].host["mamba"]
    scene["y"].host.clear()


@breaks(OWNED, "kv on the device: .* there are 36")
def there_are_more_slots_than_there_are(scene: Scene) -> None:
    scene.others = None
    scene.server.stack.device_slots["kv"]._count += 1


@pytest.mark.parametrize("name", BREAKS)
def test_what_is_broken_is_named(name: str, scene: Scene) -> None:
    rule, told, what = BREAKS[name]
    what(scene)
    with pytest.raises(AssertionError, match=told) as complaint:
        scene.require()
    assert str(complaint.value).startswith(f"{rule}: ")


def test_every_rule_is_broken_by_something() -> None:
    assert {rule for rule, _, _ in BREAKS.values()} == {*RULES, OWNED}


def test_a_checked_tree_tells_what_is_broken_with_the_next_call(scene: Scene) -> None:
    the_root_is_in_use(scene)
    with pytest.raises(AssertionError, match=LINKS):
        scene.server.cache.match([])


def test_every_call_that_may_change_a_tree_is_checked() -> None:
    calls = {name for name, member in vars(PrefixCache).items() if isfunction(member) and name[0] != "_"}
    assert calls - {"victims"} == {*CALLS}


def test_the_node_is_shown(scene: Scene) -> None:
    scene["x"].hits = 99
    with pytest.raises(AssertionError, match=r"Node\(key=array\(\[.*98\]\).* hits=3, .*, below 0 tokens"):
        scene.require()
