"""What always holds of a tree of prefixes, of its slots, and of what is under way for it: a rule for each claim.

`require_invariants` is for tests, and for whoever changes the tree or drives it with a controller of their own. It
reads, and changes nothing. It costs a walk over the tree and some bytes for each page of the pools.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from refimpl.allocator import PageAllocator
from refimpl.indices import check
from refimpl.radix import Node, PrefixCache, Slots, Ticket
from refimpl.support import DIRECTIONS

SIDES = ("device", "host")
Place = tuple[str, str]  # a side, and a pool that owns indices
Others = Mapping[Place, Sequence[torch.Tensor]]
Complaint = tuple[Node | None, str]
OWNED = "each slot is owned once, or free"


def require_invariants(cache: PrefixCache, others: Others | None = None) -> None:
    """`AssertionError` with the first of `RULES` that is broken, how, and the node that shows it.

    Between two calls of the tree, not in the middle of one.

    others  slots that requests hold besides the tree; {}: there are none. With them every slot of every pool must be
            accounted for. None: who else holds slots is not known.
    """
    for rule, broken in RULES.items():
        for node, how in broken(cache):
            _complain(rule, node, how)
    for node, how in _unaccounted(cache, others):
        _complain(OWNED, node, how)


def _complain(rule: str, node: Node | None, how: str) -> None:
    where = "" if node is None else f"\n{node!r}, below {sum(len(n.key) for n in node.path()[:-1])} tokens"
    raise AssertionError(f"{rule}: {how}{where}")


# ---- the tree by itself


def _links(cache: PrefixCache) -> Iterator[Complaint]:
    """So every node is reached once: a second way to it would be another parent's, or have another first page."""
    root, waiting = cache.root, [cache.root]
    if root.parent or len(root.key) or root.device or root.host or root.ticket or root.users:
        yield None, "the root has a parent, tokens, slots or users"
    while waiting:
        node = waiting.pop()
        for edge, child in node.children.items():
            if child.parent is not node:
                yield None, f"a child of tokens {child.key.tolist()} does not know its parent"
            if not len(child.key) or len(child.key) % cache.page_size:
                yield child, f"{len(child.key)} tokens are no whole pages of {cache.page_size}"
            if edge != child.key[: cache.page_size].tobytes():
                yield child, "its parent knows it by another first page"
        waiting.extend(node.children.values())


def _along_the_path(cache: PrefixCache) -> Iterator[Complaint]:
    """A request locks every node from its last one up to the root, and meets them all."""
    for node in _nodes(cache):
        for what in ("users", "hits"):
            here, below = getattr(node, what), sum(getattr(child, what) for child in node.children.values())
            if here < below or here < 0:
                yield node, f"{here} {what} here, {below} below"


def _order_of_use(cache: PrefixCache) -> Iterator[Complaint]:
    nodes = _nodes(cache)
    for node in nodes:
        if not 0 < node.used_at <= cache.now:
            yield node, f"used at {node.used_at}, now is {cache.now}"
    for side, name in _places(cache):
        may_go = [node.used_at for node in nodes if _may_go(cache, node, side, name)]
        first = [node.used_at for node in cache.victims(side, name, 1)]
        if first != sorted(may_go)[:1]:
            yield None, f"of {name} on the {side} what was used at {first} would go first, of {sorted(may_go)}"


def _may_go(cache: PrefixCache, node: Node, side: str, name: str) -> bool:
    """Nobody uses it, nothing is under way, and what is behind it does not need it."""
    held = dict(_sides(node))[side]
    behind = [child for child in node.children.values() if name in dict(_sides(child))[side] or child.ticket]
    return name in held and not (node.ticket or node.users or (name == cache.anchor and behind))


def _nothing_for_nothing(cache: PrefixCache) -> Iterator[Complaint]:
    for node in _nodes(cache):
        if not (node.children or node.ticket or cache.anchor in node.device or cache.anchor in node.host):
            yield node, "a leaf whose tokens are nowhere"


# ---- slots of a node


def _components(cache: PrefixCache) -> Iterator[Complaint]:
    """Of the anchor for all tokens, of a window for whole pages at the end, one of a state."""
    known = {name for _, name in _places(cache)}
    for node in _nodes(cache):
        for side, slots in _sides(node):
            for name, some in slots.items():
                if name not in known:
                    yield node, f"{name} owns no slots"
                    continue
                allocator, most = _allocator(cache, side, name), 1 if name in cache.states else len(node.key)
                least = most if name in (cache.anchor, *cache.states) else allocator.page_size
                if not least <= len(some) <= most:
                    yield node, f"{len(some)} slots of {name} on the {side}"
                try:
                    check(some, allocator.page_size, allocator.num_pages, f"{name} on the {side}:", unique=False)
                except ValueError as wrong:
                    yield node, str(wrong)


def _device_before_host(cache: PrefixCache) -> Iterator[Complaint]:
    for node in _nodes(cache):
        parent = node.parent
        if parent and parent.parent and cache.anchor in node.device and cache.anchor not in parent.device:
            yield node, "it is on the device, what comes before it is not"


def _with_the_anchor(cache: PrefixCache) -> Iterator[Complaint]:
    for node in _nodes(cache):
        if node.host and cache.anchor not in node.host:
            yield node, f"the host has {sorted(node.host)} of it, and not {cache.anchor}"


# ---- what is under way


def _under_way(cache: PrefixCache) -> Iterator[Complaint]:
    """A node and its ticket know each other, the controller knows the ticket, and slots are locked on both sides.

    What has ended is not locked: it waits to be told, or for the load of what comes before it.
    """
    nodes, going_on = set(_nodes(cache)), _going_on(cache)
    known = going_on | {ack.tag for ack in cache.controller.ended}
    for node in nodes:
        if node.ticket and (node.ticket.done or node.ticket not in known or node not in node.ticket.parts):
            yield node, f"its {node.ticket.direction} is over, or not of this node"
    for ticket in going_on:
        for node, part in ticket.parts.items():
            if node not in nodes or node.ticket is not ticket:
                yield node, f"a {ticket.direction} goes on for it that it does not know"
            for name, slots in part.items():
                yield from _part_of_a_node(cache, ticket, node, name, slots)
    for ticket in _early(cache):
        before = {other for node in ticket.parts for other in node.path()}
        if ticket.parts and not any(other.ticket and other.ticket.direction == "load" for other in before):
            yield None, f"a {ticket.direction} of {len(ticket.parts)} nodes has ended, and there is no load to wait for"


def _part_of_a_node(
    cache: PrefixCache, ticket: Ticket, node: Node, name: str, slots: torch.Tensor
) -> Iterator[Complaint]:
    backup = ticket.direction == "backup"
    device, host = node.device.get(name, slots[:0]), slots if backup else node.host.get(name, slots[:0])
    if backup and name in node.host:
        yield node, f"{name} is saved, and is on the host"
    if not backup and not torch.equal(device, slots):
        yield node, f"{name} is loaded into other slots than its own"
    if not len(device) == len(host) == len(slots):
        yield node, f"{len(slots)} slots of {name} in a {ticket.direction}: {len(device)} and {len(host)} on its sides"
    for side, some in (("device", device), ("host", host)):
        allocator = _allocator(cache, side, name)
        if ticket not in _early(cache) and not allocator.locks[some.numpy() // allocator.page_size].all():
            yield node, f"{name} is under way, and its slots on the {side} are not locked"


# ---- slots of a pool


def _unaccounted(cache: PrefixCache, others: Others | None) -> Iterator[Complaint]:
    for side, name in _places(cache):
        allocator, owned = _allocator(cache, side, name), dict[int, Node]()
        for node, some in _owned(cache, side, name):
            for slot in some.tolist():
                if slot in owned:
                    yield node, f"slot {slot} of {name} on the {side} is also owned by {owned[slot]!r}"
                owned[slot] = node
            pages = some.numpy() // allocator.page_size
            if not allocator.used[pages].all():
                yield node, f"{name} on the {side}: slots are owned here, and free"
            if side == "device" and not allocator.kept[pages].all():
                yield node, f"{name} on the {side}: slots are owned here, and could be given to the tree again"
        for some in (others or {}).get((side, name), ()):
            for slot in some.tolist():
                if slot in owned:
                    yield owned[slot], f"slot {slot} of {name} on the {side} is also owned by a request"
        held = sum(map(len, (others or {}).get((side, name), ())))
        leaving = int(allocator.leaving.sum()) * allocator.page_size  # freed, and locked by what is under way still
        known = [len(owned), held, leaving, allocator.reserved * allocator.page_size, allocator.available_size()]
        if sum(known) > allocator.size or (others is not None and sum(known) < allocator.size):
            told = "{} of the tree + {} of requests + {} leaving + {} reserved + {} available".format(*known)
            yield None, f"{name} on the {side}: {told} slots, there are {allocator.size}"


def _owned(cache: PrefixCache, side: str, name: str) -> Iterator[tuple[Node, torch.Tensor]]:
    """By the nodes of a tree, and by its backups, which will be theirs."""
    saving = {t for t in _going_on(cache) if t.direction == "backup" and side == "host"}
    for node in _nodes(cache):
        slots, ticket = dict(_sides(node))[side], node.ticket
        if name in slots:
            yield node, slots[name]
        coming = ticket.parts[node] if ticket and ticket in saving else {}
        if name in coming:
            yield node, coming[name]


# ---- who is who


def _nodes(cache: PrefixCache) -> list[Node]:
    return [node for node in cache.root.subtree() if node is not cache.root]


def _sides(node: Node) -> tuple[tuple[str, Slots], tuple[str, Slots]]:
    return ("device", node.device), ("host", node.host)


def _places(cache: PrefixCache) -> list[Place]:
    return [(side, name) for side in SIDES for name in (cache.anchor, *cache.rows, *cache.states)]


def _allocator(cache: PrefixCache, side: str, name: str) -> PageAllocator:
    stack = cache.controller.stack
    return stack.device_slots[name] if side == "device" else stack.host.pools[name].allocator


def _going_on(cache: PrefixCache) -> set[Ticket]:
    """Tickets of what is queued, under way, or waits to be taken note of."""
    controller = cache.controller
    operations = [o for each in DIRECTIONS for o in (*controller.queued(each), *controller.under_way(each))]
    return {o.tag for o in operations if isinstance(o.tag, Ticket)} | _early(cache)


def _early(cache: PrefixCache) -> set[Ticket]:
    return {ack.tag for ack in cache.early if isinstance(ack.tag, Ticket)}


RULES: dict[str, Callable[[PrefixCache], Iterator[Complaint]]] = {
    "nodes are whole pages, and linked both ways": _links,
    "slots of a node are those of its tokens": _components,
    "users and hits add up along the path": _along_the_path,
    "the least recently used goes first": _order_of_use,
    "no node is kept for nothing": _nothing_for_nothing,
    "what is on the device comes before what is on the host": _device_before_host,
    "the host has nothing without the anchor": _with_the_anchor,
    "what is under way is known, and locked": _under_way,
}
