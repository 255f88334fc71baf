"""The tree of prefixes: what is found, what is saved when, what comes back, what goes first, and what failures leave.

Prefixes are written as words (`verify/words.py`). B numbers are those of `test_reported_faults.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from refimpl.emulated import QueueRuntime
from refimpl.invariants import require_invariants
from refimpl.pool_group import PoolTransfer
from refimpl.radix import Match, Node, PrefixCache, Ticket
from verify.serving import SIDES, Serving
from verify.words import P, pages, saved, word

pytestmark = pytest.mark.ordering

Make = Callable[..., Serving]


def tree(cache: PrefixCache, what: Callable[[Node], Any] = lambda node: None) -> Any:
    """Nodes as they lie below each other: {"ab": {"c": {}}}; or, for each in order, what is asked of it."""

    def below(node: Node) -> dict[str, Any]:
        return {word(child): below(child) for child in node.children.values()}

    told = {word(node): what(node) for node in cache.root.subtree() if node.parent}
    return told if any(value is not None for value in told.values()) else below(cache.root)


def sides(cache: PrefixCache, name: str = "kv") -> dict[str, str]:
    """For each node the sides that hold slots of a pool for it: d, h, dh or nothing."""
    return {
        word(node): "".join(side[0] for side in SIDES if name in getattr(node, side))
        for node in cache.root.subtree()
        if node.parent
    }


@pytest.fixture
def make() -> Iterator[Make]:
    """Servers that are proven right and whole in the end: bytes, slots, and what requests have read."""
    made: list[Serving] = []

    def make(*arguments: Any, **options: Any) -> Serving:
        made.append(Serving(*arguments, **options))
        return made[-1]

    yield make
    for server in made:
        server.settle()
        server.check_bytes()
        server.check_slots()
        server.check_readings()
        assert all(not allocator.locks.any() for allocator in server.allocators.values())
        server.close()


def sent_away(server: Serving, *words: str) -> None:
    """Prefixes that are on the host only."""
    saved(server, *words)
    for name in server.owners:
        server.evict("device", name, 99)


def on(server: Serving, side: str, name: str, free: bool = True) -> int:
    """Pages that are free."""
    allocator = server.allocators[side, name]
    return allocator.available_size() // allocator.page_size


# ---- inserting and matching


@pytest.mark.parametrize(
    ("inserted", "found", "length", "after"),
    [
        ([], "a", 0, {}),
        (["abc"], "abc", 12, {"abc": {}}),
        (["abc"], "ab", 8, {"ab": {"c": {}}}),
        (["abc"], "abx", 8, {"ab": {"c": {}}}),
        (["abc"], "x", 0, {"abc": {}}),
        (["abc"], "abcd", 12, {"abc": {}}),
        (["abc", "abd"], "abd", 12, {"ab": {"c": {}, "d": {}}}),
        (["ab", "abc", "abcd"], "abcd", 16, {"ab": {"c": {"d": {}}}}),
        (["abcd", "a", "abx"], "abcd", 16, {"a": {"b": {"cd": {}, "x": {}}}}),
        (["abc", ""], "", 0, {"abc": {}}),
    ],
)
def test_the_longest_prefix_is_found_and_nodes_are_cut_at_pages(
    inserted: list[str], found: str, length: int, after: dict[str, Any], make: Make
) -> None:
    server = make()
    for each in inserted:
        assert server.insert(pages(each))
    match = server.cache.match(pages(found))
    assert (match.length, match.on_device) == (length, length)
    assert tree(server.cache) == after


@pytest.mark.parametrize(("tokens", "length"), [(0, 0), (3, 0), (4, 4), (5, 4), (7, 4), (8, 8)])
def test_only_whole_pages_are_taken_and_found(tokens: int, length: int, make: Make) -> None:
    server = make()
    slots = server.stack.device_slots["kv"].alloc(8)
    assert slots is not None
    left = server.cache.insert(range(tokens), {"kv": slots[:tokens]})
    assert left.get("kv", slots[:0]).tolist() == slots[length:tokens].tolist()
    assert server.cache.match(range(tokens)).length == length
    server.stack.device_slots["kv"].free(slots[length:])
    server.cache.clear()


@pytest.mark.parametrize(
    ("tokens", "told"), [([1.5] * 4, r"float64 of shape \(4,\)"), ([[1, 2], [3, 4]], r"int64 of shape \(2, 2\)")]
)
def test_tokens_that_are_no_list_of_numbers_are_refused(tokens: Any, told: str, make: Make) -> None:
    server = make()
    with pytest.raises(ValueError, match=f"tokens must be a list of whole numbers, got {told}"):
        server.cache.match(tokens)


def test_slots_that_are_not_taken_come_back_in_order(make: Make) -> None:
    """Of what is there already, and of what is behind the last whole page."""
    server = make()
    assert server.insert(pages("ab"))
    slots = server.stack.device_slots["kv"].alloc(16)
    assert slots is not None
    left = server.cache.insert([*pages("axb"), 7], {"kv": slots[:13]})
    assert left["kv"].tolist() == [*slots[:4].tolist(), *slots[12:13].tolist()]
    assert server.cache.match(pages("axb")).slots("kv")[P:].tolist() == slots[4:12].tolist()
    server.cache.clear()
    server.stack.device_slots["kv"].free(torch.cat([slots[:4], slots[12:]]))


@pytest.mark.parametrize(
    ("slots", "told"),
    [
        ({"swa": 8}, "slots of 'kv', the anchor, are missing"),
        ({"kv": 7}, "'kv': 7 slots for 8 tokens"),
        ({"kv": 9}, "'kv': 9 slots for 8 tokens"),
        ({"kv": 8, "swa": 12}, "'swa': 12 slots for 8 tokens"),
        ({"kv": 8, "swa": 6}, "the last 6 of 8 tokens do not begin with a page"),
        ({"kv": 8, "mamba": 2}, "'mamba': 2 slots for 8 tokens"),
        ({"kv": 8, "draft": 8}, "'draft' owns no slots"),
    ],
)
def test_slots_that_cannot_be_of_a_prefix_are_refused(slots: dict[str, int], told: str, make: Make) -> None:
    server = make("swa-mamba")
    with pytest.raises(ValueError, match=told):
        server.cache.insert(range(8), {name: torch.arange(count) for name, count in slots.items()})
    assert tree(server.cache) == {}


# Of slots of three pages, and what is said when they are given so. Of the last page two slots are enough to be told.
SPOILT: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], str]] = {
    "free": (lambda slots: torch.cat([slots[:8], torch.arange(8 * P, 9 * P)]), f"slot {8 * P} is not allocated"),
    "outside": (lambda slots: torch.cat([slots[:8], slots[8:] + 4096]), "is outside the pool's 9 pages"),
    "misaligned": (lambda slots: slots.roll(-1), "begins a page but is no multiple of 4"),
    "misaligned at the end": (lambda slots: slots[[*range(8), 9, 10, 11, 8]], "begins a page but is no multiple of 4"),
    "out of order": (lambda slots: slots[[0, 2, 1, *range(3, 12)]], "breaks its page"),
    "out of order at the end": (lambda slots: slots[[*range(9), 10, 9, 11]], "breaks its page"),
    "in two dimensions": (lambda slots: slots[:, None], r"a 1-D int64 or int32 tensor, got .* of shape \(1[02], 1\)"),
    "too narrow": (lambda slots: slots.to(torch.int16), "a 1-D int64 or int32 tensor, got torch.int16"),
    "fractions": (lambda slots: slots.double(), "a 1-D int64 or int32 tensor, got torch.float64"),
    "repeated": (lambda slots: torch.cat([slots[:4], slots[:8]]), "is named twice"),
    "repeated at the end": (lambda slots: torch.cat([slots[:8], slots[:4]]), "is named twice"),
}


@pytest.mark.parametrize("tokens", [12, 10])
@pytest.mark.parametrize("name", ["kv", "swa"])
@pytest.mark.parametrize("how", SPOILT)
def test_slots_that_are_no_pages_are_refused_and_the_tree_is_as_it_was(
    how: str, name: str, tokens: int, make: Make
) -> None:
    server = make("swa", windows={"swa": 4})
    saved(server, "ab")
    before = sides(server.cache), tree(server.cache, lambda node: node.hits)
    slots = {owner: server.stack.device_slots[owner].alloc(12) for owner in server.owners}
    mine = {owner: some for owner, some in slots.items() if some is not None}
    spoil, told = SPOILT[how]
    given = {owner: (spoil(some) if owner == name else some)[:tokens] for owner, some in mine.items()}
    with pytest.raises(ValueError, match=told):
        server.cache.insert(pages("axy")[:tokens], given)
    assert (sides(server.cache), tree(server.cache, lambda node: node.hits)) == before
    for owner, some in mine.items():
        server.stack.device_slots[owner].free(some)


def test_nothing_is_kept_for_pools_that_are_closed(make: Make) -> None:
    server = make("swa", windows={"swa": 4})
    allocated = {owner: server.stack.device_slots[owner].alloc(8) for owner in server.owners}
    slots = {owner: some for owner, some in allocated.items() if some is not None}
    server.controller.close()
    server.stack.close()
    with pytest.raises(ValueError, match="is closed"):
        server.cache.insert(pages("ab"), slots)
    assert list(server.cache.root.subtree()) == [server.cache.root]
    for owner, some in slots.items():
        assert not server.stack.device_slots[owner].kept.any()
        server.stack.device_slots[owner].free(some)


# The tree has "ab" and "xy". A pool is given slots of "abc" and two tokens more, and some of them are the tree's.
Known = dict[str, torch.Tensor]  # the tree's slots, by letter, or word of a state; "own": new ones
KEPT: dict[str, tuple[str, str, Callable[[Known], list[torch.Tensor]]]] = {
    "of another prefix": ("kv", "x", lambda known: [known["a"], known["b"], known["x"], known["own"][:2]]),
    "of other tokens": ("kv", "b", lambda known: [known["b"], known["a"], known["own"][:6]]),
    "of tokens before": ("kv", "b", lambda known: [known["own"][:8], known["b"], known["own"][8:10]]),
    "behind the last whole page": ("kv", "y", lambda known: [known["own"][:12], known["y"][:2]]),
    "of another window": ("swa", "x", lambda known: [known["x"], known["own"][:2]]),
    "of a window before": ("swa", "b", lambda known: [known["b"], known["own"][:2]]),
    "of another state": ("mamba", "xy", lambda known: [known["xy"]]),
    "of the state before": ("mamba", "ab", lambda known: [known["ab"]]),
}


@pytest.mark.parametrize("how", KEPT)
def test_slots_that_the_tree_has_of_other_tokens_are_refused_and_nothing_is_done(how: str, make: Make) -> None:
    server = make("swa-mamba", windows={"swa": 4}, device_pages=12)
    saved(server, "ab", "xy")
    name, wrong, choose = KEPT[how]
    known: Known = {}
    for each in ("ab", "xy"):
        slots = server.cache.match(pages(each)).slots(name)
        known |= {each: slots} if name == "mamba" else dict(zip(each, slots.split(P), strict=True))
    own = {owner: server.stack.device_slots[owner].alloc(1 if owner == "mamba" else 4 * P) for owner in server.owners}
    mine = {owner: slots for owner, slots in own.items() if slots is not None}
    known["own"] = mine[name]
    given = {"kv": mine["kv"][:14], "swa": mine["swa"][:6], "mamba": mine["mamba"], name: torch.cat(choose(known))}
    before = sides(server.cache), tree(server.cache, lambda node: node.hits), server.cache.now
    slot = int(known[wrong][0])
    with pytest.raises(
        ValueError, match=f"pool '{name}': slot {slot} is kept already, of other tokens .* Name the slots"
    ):
        server.cache.insert([*pages("abc"), 7, 7], given)
    assert (sides(server.cache), tree(server.cache, lambda node: node.hits), server.cache.now) == before
    for owner, slots in mine.items():
        server.stack.device_slots[owner].free(slots)


def test_slots_of_a_longer_prefix_are_refused_where_it_parts(make: Make) -> None:
    """ "abcd" is one node; "abx" names all three pages of its begin, and of the third it has other tokens."""
    server = make()
    assert server.insert(pages("abcd"))
    slots = server.cache.match(pages("abcd")).slots("kv")
    with pytest.raises(ValueError, match=f"slot {int(slots[2 * P])} is kept already"):
        server.cache.insert(pages("abx"), {"kv": slots[: 3 * P]})
    assert tree(server.cache) == {"abcd": {}}
    assert server.cache.insert(pages("abc"), {"kv": slots[: 3 * P]}) == {}, "these are its own"


def test_slots_of_one_tree_are_refused_by_another(make: Make) -> None:
    server = make()
    assert server.insert(pages("ab"))
    slots = server.cache.match(pages("ab")).slots("kv")
    other = PrefixCache(server.controller)
    with pytest.raises(ValueError, match=f"slot {int(slots[0])} is kept already, of other tokens or by another tree"):
        other.insert(pages("ab"), {"kv": slots})
    assert tree(other) == {}


def test_tokens_and_lists_are_the_callers_again(make: Make) -> None:
    """A server writes its next request over them."""
    server = make("swa-mamba", windows={"swa": 4})
    tokens = np.array(pages("ab"))
    slots = server._compute(tokens, dict.fromkeys(server.owners, 2 * P))
    assert slots is not None
    right = {name: some.clone() for name, some in slots.items()}
    assert server.cache.insert(tokens, slots) == {}
    tokens[:] = 9
    for some in slots.values():
        some[:] = 0
    match = server.cache.match(pages("ab"))
    assert {name: match.slots(name).tolist() for name in right} == {n: some.tolist() for n, some in right.items()}


def test_a_node_keeps_no_more_memory_than_it_needs(make: Make) -> None:
    """Of lists of whole prefixes each node has its part, not all of them."""
    server = make()
    for each in ("a", "ab", "abc"):
        assert server.insert(pages(each))
    for node in server.cache.match(pages("abc")).nodes:
        held = node.device["kv"]
        assert held.untyped_storage().nbytes() == held.nbytes == 8 * P
        assert node.key.base is None


def test_whoever_goes_on_behind_a_match_gets_back_only_what_is_his_own(make: Make) -> None:
    """He passes the slots of the match, which the tree has, and his own, of which it takes what it lacks."""
    server = make()
    assert server.insert(pages("abx"))
    match = server.cache.match(pages("abc"))
    own = server.stack.device_slots["kv"].alloc(8)
    assert own is not None
    slots = torch.cat([match.slots("kv"), own])
    assert server.cache.insert([*pages("abc"), 7], {"kv": slots[:13]})["kv"].tolist() == own[4:5].tolist()
    server._write("kv", own[:4], server._ends("kv", pages("abc"), 4))
    again = server.stack.device_slots["kv"].alloc(4)
    assert again is not None
    left = server.cache.insert(pages("abc"), {"kv": torch.cat([match.slots("kv"), again])})
    assert left["kv"].tolist() == again.tolist(), "somebody else was there before"
    left = server.cache.insert(pages("abc"), {"kv": torch.cat([match.slots("kv"), own[:4]])})
    assert left == {}, "all of them are the tree's"
    server.stack.device_slots["kv"].free(torch.cat([own[4:], again]))


def test_a_window_and_a_state_may_be_named_by_who_goes_on_behind_them(make: Make) -> None:
    """Of "abcd", one node, the window's pool has two pages."""
    server = make("swa-mamba", windows={"swa": 8})
    assert server.insert(pages("abcd"), {"swa": 8})
    match = server.cache.match(pages("abcd"))
    assert server.cache.insert(pages("abcd"), {name: match.slots(name) for name in server.owners}) == {}
    own = server._compute(pages("abcde"), {"kv": 4, "swa": 4})
    assert own is not None
    behind = {name: torch.cat([match.slots(name), own[name]]) for name in ("kv", "swa")}
    assert server.cache.insert(pages("abcde"), behind | {"mamba": own["mamba"]}) == {}
    assert server.cache.match(pages("abcde")).slots("swa").tolist() == behind["swa"].tolist()


@pytest.mark.parametrize("kind", ["mha", "dsa", "swa", "swa-mamba", "v4"])
@pytest.mark.parametrize("away", [False, True], ids=["on the device", "on the host"])
def test_requests_go_on_behind_what_there_is(kind: str, away: bool, make: Make) -> None:
    """Also behind what is still being loaded, and with nothing behind it."""
    server = make(kind)
    (sent_away if away else saved)(server, "ab", "abc")
    for each in ("abd", "abcde", "abcde", "x"):
        assert server.extend(pages(each))
    assert server.extend([*pages("abd"), 7])
    server.settle()
    server.check_bytes()
    server.check_slots()
    assert set("abcdex") == set("".join(sides(server.cache)))
    assert server.counts["prefixes extended"] == 4


def test_a_prefix_comes_back_to_the_device_when_it_is_computed_again(make: Make) -> None:
    server = make()
    sent_away(server, "ab")
    assert sides(server.cache) == {"ab": "h"}
    saved(server, "abc")
    assert sides(server.cache) == {"ab": "dh", "c": "dh"}


def test_a_policy_that_there_is_not_is_refused(make: Make) -> None:
    with pytest.raises(ValueError, match=r"policy must be one of .*'write_back'.*, got 'write_soon'"):
        make(policy="write_soon")


# ---- write policies


@pytest.mark.parametrize(
    ("policy", "queued"),
    [("write_through", [1, 1, 1]), ("write_through_selective", [0, 1, 1]), ("write_back", [0, 0, 0])],
)
def test_when_a_prefix_is_saved(policy: str, queued: list[int], make: Make) -> None:
    """Backups that were queued after it was inserted once, twice, three times."""
    server, seen = make(policy=policy), []
    for _ in range(3):
        assert server.insert(pages("ab"))
        seen.append(len(server.controller.queued("backup")))
    assert seen == queued


def test_what_is_in_front_of_a_prefix_is_met_with_it(make: Make) -> None:
    """Selective: "a" was met by "ab" too, "b" was not met again."""
    server = make(policy="write_through_selective")
    saved(server, "a", "ab")
    assert sides(server.cache) == {"a": "dh", "b": "d"}
    saved(server, "ab")
    assert sides(server.cache) == {"a": "dh", "b": "dh"}


def test_both_parts_of_a_node_were_met_as_often_as_the_whole(make: Make) -> None:
    server = make(policy="write_through_selective")
    assert server.insert(pages("ab"))
    server.cache.match(pages("a"))
    saved(server, "ab")
    assert sides(server.cache) == {"a": "dh", "b": "dh"}


def test_write_back_saves_what_is_evicted_and_waits_for_it(make: Make) -> None:
    server = make(policy="write_back")
    assert server.insert(pages("ab"))
    assert server.insert(pages("ac"))
    assert server.cache.evict("kv", P) == P
    assert sides(server.cache) == {"a": "d", "b": "h", "c": "d"}
    assert server.cache.evict("kv", 99 * P) == 2 * P
    assert sides(server.cache) == {"a": "h", "b": "h", "c": "h"}
    match = server.read(pages("ac"))
    assert match is not None
    assert match.length == 2 * P


def test_write_back_evicts_nothing_whose_backup_is_held(make: Make) -> None:
    server = make(policy="write_back")
    assert server.insert(pages("ab"))
    hold = server.hooks.hold("backup acknowledge")
    assert server.cache.evict("kv", P) == 0
    assert sides(server.cache) == {"ab": "d"}
    hold.release()
    server.check(wait=True)
    assert server.cache.evict("kv", P) == 2 * P
    assert sides(server.cache) == {"ab": "h"}


def test_write_back_passes_over_what_waits_for_a_load(make: Make) -> None:
    """The least recently used was computed behind a state that is being loaded: its backup cannot count before that."""
    server = make("mamba", policy="write_back")
    for each in ("ab", "abc", "xy"):
        assert server.insert(pages(each))
    assert server.cache.evict("mamba", 1) == 1
    match = server.cache.match(pages("ab"))
    assert server.cache.load_back(match), "the state of ab is on its way"
    server.cache.match(pages("xy"))
    assert server.cache.evict("kv", P) == 2 * P
    assert sides(server.cache) == {"ab": "dh", "c": "d", "xy": "h"}
    server.start_loading()
    server.check(wait=True)
    assert server.cache.evict("kv", P) == P, "now it may go"
    assert sides(server.cache) == {"ab": "dh", "c": "h", "xy": "h"}


def test_nothing_is_saved_twice(make: Make) -> None:
    server = make()
    saved(server, "ab", "ab", "abc", "a")
    assert server.counts["backups that arrived"] == 2, "one of ab, one of c"
    assert on(server, "host", "kv") == 9 - 3


def test_what_comes_behind_an_unsaved_prefix_is_not_saved(make: Make) -> None:
    """Its copy could never be used."""
    server = make(host_ratio=0.25)
    assert on(server, "host", "kv") == 2
    saved(server, "abc", "abcd")
    assert sides(server.cache) == {"abc": "d", "d": "d"}
    assert on(server, "host", "kv") == 2


def test_a_full_host_gives_up_what_was_not_used_for_longest(make: Make) -> None:
    server = make(host_ratio=0.5)
    assert on(server, "host", "kv") == 4
    for each in ("ab", "c", "d", "abe"):
        saved(server, each)
    assert sides(server.cache) == {"ab": "dh", "e": "dh", "c": "d", "d": "dh"}


def test_a_full_host_does_not_give_up_what_leads_to_the_new(make: Make) -> None:
    server = make(host_ratio=0.25)
    for each in ("ab", "abe"):
        saved(server, each)
    assert sides(server.cache) == {"ab": "dh", "e": "d"}


def test_the_host_is_asked_for_no_more_than_is_lacking(make: Make) -> None:
    server = make(host_ratio=0.5)
    saved(server, "a", "b", "c")
    assert on(server, "host", "kv") == 1
    saved(server, "de")
    assert sides(server.cache) == {"a": "d", "b": "dh", "c": "dh", "de": "dh"}


def test_who_evicts_keeps_what_others_are_to_be_told(make: Make) -> None:
    """It waits for all that is under way, and somebody else's backup ends meanwhile."""
    server = make(policy="write_back")
    assert server.insert(pages("ab"))
    slots = server.stack.device_slots["kv"].alloc(P)
    operation = server.controller.write("somebody else", [PoolTransfer("kv", None, slots)])
    assert operation is not None
    server.controller.start_writing()
    assert server.cache.evict("kv", P) == 2 * P
    first, second = server.check()
    assert (first.tag, first.tokens, second.tokens) == ("somebody else", {"kv": P}, {"kv": 2 * P})
    assert server.check(wait=True) == []
    host = operation.host_indices("kv")
    assert slots is not None
    assert host is not None
    server.stack.device_slots["kv"].free(slots)
    server.stack.host.anchor.free(host)


# ---- windows and states


@pytest.mark.parametrize(
    ("window", "kept", "usable"),
    [
        (8, 8, "abcd"),
        (8, 12, "abcd"),
        (8, 4, ""),
        (5, 8, "abcd"),
        (5, 4, ""),
        (4, 4, "abcd"),
        (1, 4, "abcd"),
        (1, 0, ""),
    ],
)
def test_a_prefix_is_usable_with_its_window(window: int, kept: int, usable: str, make: Make) -> None:
    """Tokens at the end for which the window's pool was given slots, of 16."""
    server = make("swa", windows={"swa": window})
    assert server.insert(pages("abcd"), {"swa": kept})
    assert server.cache.match(pages("abcd")).length == len(pages(usable))


def test_a_prefix_whose_window_is_gone_ends_where_one_is_left(make: Make) -> None:
    server = make("swa", windows={"swa": 4})
    saved(server, "ab", "abcd")
    server.evict("host", "swa", 99)
    server.cache.match(pages("ab"))  # used later than what is behind it
    assert server.cache.evict("swa", P) == 2 * P
    assert sides(server.cache, "swa") == {"ab": "d", "cd": ""}
    assert server.cache.match(pages("abcd")).length == len(pages("ab"))
    assert server.cache.evict("swa", P) == 2 * P
    assert server.cache.match(pages("abcd")).length == 0


def test_a_window_with_a_gap_is_none(make: Make) -> None:
    """Nodes a, b and c; of the window's pool b has nothing."""
    server = make("swa", windows={"swa": 8})
    assert server.insert(pages("ab"), {"swa": 0})
    saved(server, "a")
    assert server.insert(pages("abc"), {"swa": 4})
    assert sides(server.cache, "swa") == {"a": "d", "b": "", "c": "d"}
    assert server.cache.match(pages("abc")).length == len(pages("a"))


def test_without_a_window_all_of_a_prefix_must_be_there(make: Make) -> None:
    server = make("swa", windows={})
    assert server.insert(pages("abcd"), {"swa": 12})
    assert server.cache.match(pages("abcd")).length == 0


def test_a_window_that_is_cut_stays_at_the_end(make: Make) -> None:
    server = make("swa", windows={"swa": 4})
    assert server.insert(pages("abcd"), {"swa": 8})
    (node,) = [n for n in server.cache.root.subtree() if n.parent]
    before = node.device["swa"].tolist()
    assert server.cache.match(pages("abc")).slots("swa").tolist() == before[:4]
    assert server.cache.match(pages("abcd")).slots("swa").tolist() == before
    assert server.cache.match(pages("ab")).length == 0


def test_a_shorter_window_on_the_device_does_not_hide_a_longer_one_on_the_host(make: Make) -> None:
    server = make("swa", windows={"swa": 8})
    sent_away(server, "abcd")
    assert server.insert(pages("abcd"), {"swa": 4})
    match = server.read(pages("abcd"))
    assert match is not None
    assert len(match.slots("swa")) >= 8


def test_a_prefix_ends_at_a_state(make: Make) -> None:
    """One is kept of the end of each insertion, if that is the end of a page."""
    server = make("mamba")
    assert server.insert(pages("abcd"))
    assert server.insert(pages("ab"))
    assert server.insert([*pages("abx"), 7])
    lengths = {each: server.cache.match(pages(each)).length // P for each in ("a", "ab", "abc", "abcd", "abx")}
    assert lengths == {"a": 0, "ab": 2, "abc": 2, "abcd": 4, "abx": 2}
    assert on(server, "device", "mamba") == 8 - 2


def test_a_second_state_of_the_same_prefix_comes_back(make: Make) -> None:
    server = make("mamba")
    assert server.insert(pages("ab"))
    assert server.insert(pages("ab"))
    assert on(server, "device", "mamba") == 8 - 1


def test_no_state_is_none(make: Make) -> None:
    server = make("mamba")
    slots = server.stack.device_slots["kv"].alloc(8)
    assert slots is not None
    server.cache.insert(pages("ab"), {"kv": slots, "mamba": torch.empty(0, dtype=torch.int64)})
    assert server.cache.match(pages("ab")).length == 0
    server.cache.clear()


def test_a_state_without_its_prefix_goes_with_it(make: Make) -> None:
    server = make("mamba", policy="write_back", host_ratio=0.25)
    assert server.insert(pages("abc"))
    assert server.cache.evict("kv", P) == 3 * P, "two pages of the host cannot take three"
    assert tree(server.cache) == {}
    assert on(server, "device", "mamba") == 8


# ---- loading back


def test_only_what_is_missing_is_loaded(make: Make) -> None:
    server = make("swa", windows={"swa": 4})
    saved(server, "ab", "abcd")
    server.cache.match(pages("ab"))
    server.evict("device", "kv", 1)
    server.evict("device", "swa", 9)
    assert sides(server.cache) == {"ab": "dh", "cd": "h"}
    match = server.cache.match(pages("abcd"))
    assert (match.length, match.on_device, match.arriving) == (16, 8, False)
    assert server.load_back(match)
    assert (server.cache.match(pages("abcd")).on_device, match.arriving) == (16, True)
    server.start_loading()
    (ack,) = server.check(wait=True)
    assert ack.tokens == {"kv": 8, "swa": 8}, "of swa only the node with the window"
    assert not match.arriving
    assert server.load_back(match)
    assert not server.controller.queued("load"), "there was nothing left to load"


@pytest.mark.parametrize("kind", ["dsa", "mha-draft", "v4", "sparse"])
def test_riders_come_along(kind: str, make: Make) -> None:
    server = make(kind)
    sent_away(server, "abc")
    match = server.read(pages("abcx"))
    assert match is not None
    acks = server.check(wait=True)
    assert [set(ack.tokens) for ack in acks] == [set(server.stack.specs)]


def test_a_state_is_loaded_of_the_end_only(make: Make) -> None:
    server = make("mamba")
    sent_away(server, "ab", "abcd")
    assert server.read(pages("abcd")) is not None
    (ack,) = server.check(wait=True)
    assert ack.tokens == {"kv": 16, "mamba": 1}


def test_without_room_nothing_is_loaded(make: Make) -> None:
    server = make(device_pages=5)
    sent_away(server, "ab")
    saved(server, "cde")
    match = server.cache.match(pages("cde"))
    server.cache.use(match)
    assert not server.load_back(server.cache.match(pages("ab")))
    assert not server.controller.queued("load")
    assert on(server, "device", "kv") == 1
    server.cache.release(match)
    assert server.load_back(server.cache.match(pages("ab")))


def test_room_is_made_for_what_is_lacking_and_no_more(make: Make) -> None:
    server = make(device_pages=5)
    sent_away(server, "ab")
    saved(server, "c", "d", "e")
    assert server.load_back(server.cache.match(pages("ab")))
    assert sides(server.cache) == {"ab": "dh", "c": "h", "d": "dh", "e": "dh"}


def test_one_pool_without_room_gives_back_what_the_others_had(make: Make) -> None:
    server = make("swa", windows={"swa": 99})
    sent_away(server, "ab")
    held = server.stack.device_slots["swa"].alloc(7 * P)
    assert held is not None
    assert not server.load_back(server.cache.match(pages("ab")))
    assert on(server, "device", "kv") == 8
    server.stack.device_slots["swa"].free(held)


def test_what_is_on_its_way_to_the_host_is_not_loaded_yet(make: Make) -> None:
    """A window that was added later is being saved; the state is on the host only."""
    server = make("swa-mamba", windows={"swa": 0})
    assert server.insert(pages("ab"), {"swa": 0})
    sent_away(server)
    slots = server._compute(pages("ab"), dict.fromkeys(server.owners, 8))
    assert slots is not None
    server._give_back({"mamba": slots.pop("mamba")})
    assert server.cache.insert(pages("ab"), slots) == {}
    assert not server.load_back(server.cache.match(pages("ab")))
    server.controller.start_writing()
    assert [ack.tokens for ack in server.check(wait=True)] == [{"swa": 8}]
    assert server.load_back(server.cache.match(pages("ab")))


def test_two_requests_share_a_load(make: Make) -> None:
    server = make()
    sent_away(server, "abc")
    for each in ("abc", "abx", "abc"):
        assert server.read(pages(each)) is not None
    assert [ack.tokens for ack in server.check(wait=True)] == [{"kv": 12}]
    server.settle()
    server.check_readings()
    assert server.counts["prefixes read while they arrived"] == 3


def test_a_prefix_that_was_evicted_since_is_not_loaded(make: Make) -> None:
    server = make()
    sent_away(server, "ab")
    match = server.cache.match(pages("ab"))
    server.evict("host", "kv", 9)
    assert not server.load_back(match)
    assert tree(server.cache) == {}


def test_a_prefix_that_was_cut_since_is_loaded_whole(make: Make) -> None:
    server = make()
    sent_away(server, "abcd")
    match = server.cache.match(pages("abcd"))
    server.cache.match(pages("ab"))
    assert server.load_back(match)
    assert match.slots("kv").numel() == 16
    assert [word(node) for node in match.nodes] == ["ab", "cd"]


def test_nothing_is_loaded_of_nothing(make: Make) -> None:
    server = make()
    assert server.load_back(server.cache.match(pages("ab")))
    server.cache.use(Match(None, 0, 0))
    assert not server.controller.queued("load")


# ---- what stays, and what goes first


def test_the_least_recently_used_goes_first_leaf_by_leaf(make: Make) -> None:
    server = make()
    saved(server, "ab", "abc", "abd", "e")
    for each in ("abd", "e", "abc"):
        server.cache.match(pages(each))
    order = []
    while server.cache.evict("kv", P):
        order.append([name for name, where in sides(server.cache).items() if where == "h"])
    assert order == [["d"], ["d", "e"], ["c", "d", "e"], ["ab", "c", "d", "e"]]
    while server.cache.evict_host("kv", P):
        order.append(list(sides(server.cache)))
    assert order[4:] == [["ab", "c", "e"], ["ab", "c"], ["ab"], []]


@pytest.mark.parametrize("policy", ["write_through", "write_back"])
def test_many_go_at_once_in_the_same_order(policy: str, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The least recently used first, leaves before what leads to them; and one call submits all their backups."""
    server = make(policy=policy)
    saved(server, "ab", "abc", "abd", "e")
    for each in ("abd", "e", "abc"):
        server.cache.match(pages(each))
    passes, order, submitted = [], [], []
    victims, drop, start = server.cache.victims, server.cache._drop, server.controller.start_writing
    monkeypatch.setattr(server.cache, "victims", lambda *asked: passes.append(asked) or victims(*asked))
    monkeypatch.setattr(server.cache, "_drop", lambda node, *where: order.append(word(node)) or drop(node, *where))
    monkeypatch.setattr(server.controller, "start_writing", lambda: submitted.append(start()))
    assert server.cache.evict("kv", 4 * P) == 5 * P
    assert order == ["d", "e", "c", "ab"]
    assert [need for _, _, need in passes if need > 1] == [4 * P], "one pass; rules look at what goes first"
    assert submitted == ([1] if policy == "write_back" else [])
    assert sides(server.cache) == {"ab": "h", "c": "h", "d": "h", "e": "h"}


def test_no_more_is_evicted_than_is_needed(make: Make) -> None:
    server = make()
    saved(server, "a", "b", "c")
    assert server.cache.evict("kv", P + 1) == 2 * P
    assert sides(server.cache) == {"a": "h", "b": "h", "c": "dh"}


def test_a_prefix_in_use_stays_on_both_sides(make: Make) -> None:
    server = make()
    saved(server, "ab", "abc", "d")
    match = server.cache.match(pages("ab"))
    server.cache.use(match)
    for side in SIDES:
        server.evict(side, "kv", 99)
    assert sides(server.cache) == {"ab": "dh"}
    server.cache.release(match)
    for side in SIDES:
        server.evict(side, "kv", 99)
    assert tree(server.cache) == {}


@pytest.mark.parametrize("cut", ["a", "ab", "abc"])
def test_use_and_release_follow_nodes_that_are_cut_meanwhile(cut: str, make: Make) -> None:
    server = make()
    saved(server, "abcd")
    first = server.cache.match(pages("abcd"))
    server.cache.use(first)
    second = server.cache.match(pages(cut))
    server.cache.use(second)
    assert tree(server.cache, lambda node: node.users) == {cut: 2, "abcd"[len(cut) :]: 1}
    server.cache.release(first)
    server.evict("device", "kv", 99)
    assert sides(server.cache) == {cut: "dh", "abcd"[len(cut) :]: "h"}
    server.cache.release(second)
    assert tree(server.cache, lambda node: node.users) == {cut: 0, "abcd"[len(cut) :]: 0}


@pytest.mark.parametrize("side", SIDES)
def test_what_is_being_saved_stays_with_all_that_leads_to_it(side: str, make: Make) -> None:
    server = make()
    saved(server, "ab")
    assert server.insert(pages("abc"))
    hold = server.hooks.hold("backup copy")
    server.controller.start_writing()
    server.evict(side, "kv", 99)
    assert sides(server.cache) == {"ab": "dh", "c": "d"}
    hold.release()
    server.check(wait=True)
    assert sides(server.cache) == {"ab": "dh", "c": "dh"}


@pytest.mark.parametrize("side", SIDES)
def test_what_is_being_loaded_stays(side: str, make: Make) -> None:
    server = make()
    sent_away(server, "ab", "abc")
    hold = server.hooks.hold("load copy")
    assert server.read(pages("abc")) is not None
    server.evict(side, "kv", 99)
    assert sides(server.cache) == {"ab": "dh", "c": "dh"}
    hold.release()


def test_what_somebody_else_was_told_the_tree_takes_note_of_all_the_same(make: Make) -> None:
    """Whoever asks the controller is told of the tree's operations too; nodes must not stay under way for that."""
    server = make()
    assert server.insert(pages("ab"))
    server.controller.start_writing()
    (told,) = server.controller.acknowledge(wait=True)
    assert sides(server.cache) == {"ab": "d"}
    assert server.check() == [told]
    assert server.check() == []
    assert sides(server.cache) == {"ab": "dh"}
    server.evict("device", "kv", 99)
    assert sides(server.cache) == {"ab": "h"}


def test_what_another_tree_has_taken_note_of_is_over_and_not_again(make: Make) -> None:
    """A failed load is told to both; one that is under way by then keeps its slots."""
    server = make()
    sent_away(server, "ab")
    other = PrefixCache(server.controller)
    server.hooks.fail("load copy", RuntimeError("the bus is down"))
    assert server.read(pages("ab")) is not None
    (failed,) = other.check(wait=True)
    assert "the bus is down" in str(failed.error)
    assert sides(server.cache) == {"ab": "h"}
    assert server.load_back(server.cache.match(pages("ab")))
    server.start_loading()
    server.cache.check()
    assert server.cache.match(pages("ab")).arriving
    server.check(wait=True)
    assert sides(server.cache) == {"ab": "dh"}


@pytest.mark.parametrize("call", ["check", "insert", "load_back", "match", "evict"])
def test_a_tree_that_was_interrupted_serves_nothing_any_more(call: str) -> None:
    """Half of a call is no tree: a load that failed might be taken for one that came."""
    server = Serving()
    sent_away(server, "ab")
    within = {
        "check": "_noted",
        "insert": "_require_slots",
        "load_back": "_queue_load",
        "match": "_touch",
        "evict": "victims",
    }
    calls: dict[str, Callable[[PrefixCache], object]] = {
        "check": lambda cache: cache.check(),
        "insert": lambda cache: cache.insert(pages("ab"), {}),
        "load_back": lambda cache: cache.load_back(match),
        "match": lambda cache: cache.match(pages("ab")),
        "evict": lambda cache: cache.evict("kv", 4),
    }
    cache = PrefixCache(server.controller)
    cache.root = server.cache.root
    match = cache.match(pages("ab"))

    def interrupt(*arguments: Any, **options: Any) -> Any:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache, within[call], interrupt)
        with pytest.raises(KeyboardInterrupt):
            calls[call](cache)
    for other in calls.values():
        with pytest.raises(RuntimeError, match=rf"an interrupt came into {call}\(\) of this tree"):
            other(cache)
    server.close()


# ---- failures


@pytest.mark.parametrize("step", ["submit", "copy", "acknowledge"])
def test_a_backup_that_fails_is_tried_again_when_the_prefix_is_met_again(step: str, make: Make) -> None:
    server = make("swa-mamba", windows={"swa": 4})
    server.hooks.fail(f"backup {step}", RuntimeError("the bus is down"))
    assert server.insert(pages("ab"))
    server.controller.start_writing()
    (ack,) = server.check(wait=True)
    assert "the bus is down" in str(ack.error)
    assert sides(server.cache) == {"ab": "d"}
    server.check_slots()
    assert on(server, "host", "kv") == 9
    saved(server, "ab")
    assert [sides(server.cache, name) for name in ("kv", "swa", "mamba")] == [{"ab": "dh"}] * 3


@pytest.mark.parametrize("step", ["load submit", "load copy", "load layer 0", "load layer 1", "load acknowledge"])
def test_a_load_that_fails_can_be_tried_again(step: str, make: Make) -> None:
    server = make()
    sent_away(server, "ab", "abc")
    server.hooks.fail(step, RuntimeError("the bus is down"))
    assert server.load_back(server.cache.match(pages("abc")))
    server.start_loading()
    (ack,) = server.check(wait=True)
    assert "the bus is down" in str(ack.error)
    assert sides(server.cache) == {"ab": "h", "c": "h"}
    server.check_slots()
    assert on(server, "device", "kv") == 8
    match = server.read(pages("abc"))
    assert match is not None
    assert match.length == 12


@pytest.mark.parametrize("saving", ["nothing", "queued", "submitted", "failing"])
def test_what_was_computed_behind_a_load_that_fails_is_gone(saving: str, make: Make) -> None:
    """Of bytes that never arrived something was made all the same. It goes with them, and is not saved either."""
    server = make(policy="write_back" if saving == "nothing" else "write_through")
    sent_away(server, "ab", "abx")
    assert server.load_back(server.cache.match(pages("ab")))
    server.hooks.fail("load acknowledge", RuntimeError("the bus is down"))
    assert server.insert(pages("abcd"))
    server.cache.match(pages("abc"))
    server.start_loading()
    if saving != "queued":
        server.controller.start_writing()
    if saving == "failing":
        server.hooks.fail("backup acknowledge", RuntimeError("the bus is down"))
    server.check(wait=True)
    assert sides(server.cache) == {"ab": "h", "x": "h"}, "what was on the host stays"
    server.settle()
    assert sides(server.cache) == {"ab": "h", "x": "h"}
    server.check_slots()


def saved_behind_a_load(server: Serving, failing: str = "") -> None:
    """ "c" was computed behind "ab", and its backup has ended; of the load of "ab" nobody knows yet how it ends."""
    sent_away(server, "ab")
    server.hold("load acknowledge")
    if failing:
        server.hooks.fail(f"{failing} acknowledge", RuntimeError("the bus is down"))
    assert server.load_back(server.cache.match(pages("ab")))
    server.start_loading()
    assert server.insert(pages("abc"))
    server.controller.start_writing()
    while isinstance(server.runtime, QueueRuntime) and server.runtime.advance():
        pass


@pytest.mark.parametrize("fails", [False, True])
def test_what_was_computed_behind_a_load_is_saved_once_the_load_has_ended(fails: bool, make: Make) -> None:
    server = make("swa-mamba", windows={"swa": 4})
    saved_behind_a_load(server, "load" if fails else "")
    assert server.check() == []
    for side in SIDES:
        server.evict(side, "kv", 99)
    assert sides(server.cache) == {"ab": "dh", "c": "d"}, "its backup goes on, as far as anybody is told"
    server.check_slots()
    server.let_go()
    assert [(ack.direction, ack.error is not None) for ack in server.check()] == [("load", fails), ("backup", False)]
    assert sides(server.cache) == ({"ab": "h"} if fails else {"ab": "dh", "c": "dh"})
    server.check_slots()


def test_a_backup_that_fails_before_a_load_has_ended_is_over(make: Make) -> None:
    """Its host slots are free, so it has none to wait with."""
    server = make()
    saved_behind_a_load(server, "backup")
    (ack,) = server.check()
    assert "the bus is down" in str(ack.error)
    assert tree(server.cache, lambda node: node.ticket is None) == {"ab": False, "c": True}
    server.check_slots()


def test_a_tree_is_cleared_while_a_backup_waits_for_a_load(make: Make) -> None:
    server = make()
    saved_behind_a_load(server)
    assert server.check() == []
    server.cache.clear()
    server.check_slots()
    server.let_go()
    assert [ack.direction for ack in server.check()] == ["load", "backup"]
    assert [on(server, side, "kv") for side in SIDES] == [8, 9]


def test_nothing_is_loaded_behind_what_fails_while_room_is_made(make: Make) -> None:
    """Room is made for "d" by waiting for a backup, and what comes before "d" fails to arrive."""
    server = make(policy="write_back")
    sent_away(server, "ab", "abd")
    assert server.load_back(server.cache.match(pages("ab")))
    server.start_loading()
    assert server.insert(pages("uvwxyz"))
    server.hooks.fail("load acknowledge", RuntimeError("the bus is down"))
    match = server.cache.match(pages("abd"))
    assert (match.length, match.on_device, on(server, "device", "kv")) == (12, 8, 0)
    assert not server.load_back(match)
    assert sides(server.cache) == {"ab": "h", "d": "h", "uvwxyz": "h"}
    assert not server.controller.queued("load")
    assert server.load_back(match), "another time"


def test_a_prefix_whose_backup_failed_is_lost_when_room_is_needed(make: Make) -> None:
    server = make(policy="write_back")
    assert server.insert(pages("ab"))
    server.hooks.fail("backup copy", RuntimeError("the bus is down"))
    assert server.cache.evict("kv", P) == 2 * P
    assert tree(server.cache) == {}


def test_a_backup_that_cannot_even_be_queued_leaves_nothing_behind(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    server = make()

    def refuse(*arguments: object) -> None:
        raise RuntimeError("no memory left")

    with monkeypatch.context() as patched:
        patched.setattr(server.controller, "write", refuse)
        with pytest.raises(RuntimeError, match="no memory left"):
            server.insert(pages("ab"))
    assert [node.ticket for node in server.cache.root.subtree()] == [None, None]
    server.check_slots()
    saved(server, "ab")


# ---- nodes that are cut while something is under way for them


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("kind", ["mha", "swa-mamba", "v4"])
def test_a_node_is_cut_while_it_is_saved(kind: str, fails: bool, make: Make) -> None:
    server = make(kind, windows={"swa": 4} if "swa" in kind else None)
    if fails:
        server.hooks.fail("backup acknowledge", RuntimeError("the bus is down"))
    hold = server.hooks.hold("backup copy")
    assert server.insert(pages("abcd"))
    server.controller.start_writing()
    server.cache.match(pages("ab"))
    server.cache.match(pages("abc"))
    server.check_slots()
    server.evict("device", "kv", 99)
    assert sides(server.cache) == dict.fromkeys(("ab", "c", "d"), "d"), "all of it is being saved"
    hold.release()
    assert len(server.check(wait=True)) == 1
    assert sides(server.cache) == dict.fromkeys(("ab", "c", "d"), "d" if fails else "dh")
    assert tree(server.cache, lambda node: node.ticket is None) == dict.fromkeys(("ab", "c", "d"), True)


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("kind", ["mha", "swa-mamba", "v4"])
def test_a_node_is_cut_while_it_is_loaded(kind: str, fails: bool, make: Make) -> None:
    server = make(kind, windows={"swa": 8} if "swa" in kind else None)
    sent_away(server, "abcd")
    if fails:
        server.hooks.fail("load acknowledge", RuntimeError("the bus is down"))
    hold = server.hooks.hold("load copy")
    assert server.read(pages("abcd")) is not None
    server.cache.match(pages("a"))
    server.cache.match(pages("abc"))
    server.check_slots()
    for side in SIDES:
        server.evict(side, "kv", 99)
    assert sides(server.cache) == dict.fromkeys(("a", "bc", "d"), "dh"), "all of it is being loaded"
    hold.release()
    assert len(server.check(wait=True)) == 1
    assert sides(server.cache) == dict.fromkeys(("a", "bc", "d"), "h" if fails else "dh")
    assert tree(server.cache, lambda node: node.ticket is None) == dict.fromkeys(("a", "bc", "d"), True)


def test_375_tokens_are_cut_at_374_while_they_are_saved(make: Make) -> None:
    """B23: both parts reach the host, in the order in which they were; locks are released once."""
    server, tokens = make(page_size=1, device_pages=400), np.arange(375) + 7
    hold = server.hooks.hold("backup copy")
    assert server.insert(tokens.tolist())
    (operation,) = server.controller.queued("backup")
    (slots,) = (t.host_indices for t in operation.transfers)
    assert slots is not None
    server.controller.start_writing()
    assert server.check() == []
    assert server.cache.match(tokens[:374]).length == 374
    upper, lower = [node for node in server.cache.root.subtree() if node.parent]
    assert (len(upper.key), len(lower.key)) == (374, 1)
    assert not upper.host
    assert not lower.host
    hold.release()
    (ack,) = server.check(wait=True)
    assert ack.tokens == {"kv": 375}
    assert upper.host["kv"].tolist() == slots[:374].tolist()
    assert lower.host["kv"].tolist() == slots[374:].tolist()
    assert upper.ticket is lower.ticket is None
    assert isinstance(ack.tag, Ticket)
    assert list(ack.tag.parts) == [lower, upper]
    assert not server.allocators["host", "kv"].locks.any()
    with pytest.raises(ValueError, match="is not locked so often"):
        server.allocators["host", "kv"].unlock(slots[:1])


def test_384_tokens_are_cut_at_320_and_63_are_less_than_a_page(make: Make) -> None:
    """B23"""
    server = make(page_size=64)
    assert server.cache.match(range(63)).length == 0
    hold = server.hooks.hold("backup copy")
    assert server.insert(range(384))
    server.controller.start_writing()
    assert server.cache.match(range(383)).length == 320
    assert [len(node.key) // 64 for node in server.cache.root.subtree()] == [0, 5, 1]
    assert server.cache.match(range(63)).length == 0
    hold.release()
    server.check(wait=True)
    assert all(node.host for node in server.cache.root.subtree() if node.parent)


# ---- starting again


@pytest.mark.parametrize("under_way", ["nothing", "queued", "submitted", "failing"])
@pytest.mark.parametrize("direction", ["backup", "load"])
def test_a_tree_is_cleared_and_all_slots_are_free_once_nothing_is_under_way(
    direction: str, under_way: str, make: Make
) -> None:
    server = make("swa-mamba")
    if direction == "load":
        sent_away(server, "abc")
    if under_way == "failing":
        server.hooks.fail(f"{direction} acknowledge", RuntimeError("the bus is down"))
    assert server.load_back(server.cache.match(pages("abc"))) if direction == "load" else server.insert(pages("abc"))
    if under_way != "queued":
        server.controller.start_writing()
        server.start_loading()
    if under_way == "nothing":
        server.check(wait=True)
    server.cache.clear()
    server.check_slots()
    assert server.cache.match(pages("abc")).length == 0
    server.settle()
    for side in SIDES:
        assert [on(server, side, name) for name in server.owners] == [8 if side == "device" else 9] * 3


def test_a_chain_of_nodes_may_be_longer_than_calls_can_be_nested(make: Make) -> None:
    """The rules are asked for once: after every call, they would walk over the chain a thousand times."""
    server = make(page_size=1, device_pages=1300)
    cache = PrefixCache(server.controller)
    slots = server.stack.device_slots["kv"].alloc(1200)
    assert slots is not None
    cache.insert(range(1200), {"kv": slots})
    for length in range(1199, 0, -1):
        cache.match(range(length))
    match = cache.match(range(1200))
    assert len(match.nodes) == sum(1 for node in cache.root.subtree() if node.parent) == 1200
    cache.use(match)
    assert repr(match)
    require_invariants(cache, {})
    cache.clear()
