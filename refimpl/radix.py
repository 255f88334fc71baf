"""A tree of prefixes over a stack: which tokens have their states on the device, on the host, on the way between them.

A node is a stretch of whole pages. Pools with a row for every token hold slots for all of a node (the anchor) or for
its end (a window); a state belongs to the last token of a node. What is under way belongs to a ticket, which follows
its nodes when they are split: slots are told apart by position, so each part is acknowledged with its own.

Write policies as upstream's `UnifiedRadixCache`: `write_through` backs a node up when it is first inserted,
`write_through_selective` when it is met again, `write_back` when it is evicted from the device.

A request goes through it like this:

    match = cache.match(tokens)                    # what there is of its prefix
    cache.use(match)                               # nothing of it is evicted before `release`
    there = cache.load_back(match)                 # False: no room now
    controller.set_consumer(controller.start_loading())
    …                                              # the model: controller.wait_until(layer), then it reads a layer
    left = cache.insert(tokens, slots)             # match.slots(pool), then its own: one slot for each token
    cache.release(match)                           # and free what is left
    controller.start_writing()
    cache.check()                                  # now and then: what has ended

An interrupt (Ctrl-C, say) in the middle of a call leaves a tree that refuses every other one.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch.nn.functional import pad

from refimpl.allocator import PageAllocator
from refimpl.controller import Controller
from refimpl.geometry import is_int
from refimpl.host_pool import HostPool
from refimpl.indices import check, require_list
from refimpl.operations import DESTINATION, Ack, Operation
from refimpl.pool_group import PoolTransfer

# Policy -> times that a node is met before it is backed up; None: not before it is evicted.
POLICIES: dict[str, int | None] = {"write_through": 1, "write_through_selective": 2, "write_back": None}

Slots = dict[str, torch.Tensor]  # by pool that owns indices


@dataclass(eq=False)
class Node:
    """
    key           tokens, whole pages; empty at the root
    device, host  slots on either side; a pool that is absent holds nothing of the node there
    users         requests that read the node's device slots: it stays
    """

    key: np.ndarray
    parent: Node | None = field(default=None, repr=False)
    children: dict[bytes, Node] = field(default_factory=dict, repr=False)
    device: Slots = field(default_factory=dict)
    host: Slots = field(default_factory=dict)
    hits: int = 0
    users: int = 0
    used_at: int = 0
    ticket: Ticket | None = field(default=None, repr=False)

    def path(self) -> list[Node]:
        """From below the root to this node."""
        upwards: list[Node] = []
        node: Node = self
        while node.parent:
            upwards.append(node)
            node = node.parent
        return upwards[::-1]

    def subtree(self) -> Iterator[Node]:
        """This node and all below it, each before its children."""
        waiting: list[Node] = [self]
        while waiting:
            node = waiting.pop()
            yield node
            waiting.extend(reversed(node.children.values()))


@dataclass(eq=False)
class Ticket:
    """An operation under way, and what each node gets from it."""

    direction: str
    parts: dict[Node, Slots]
    error: BaseException | None = None
    done: bool = False


@dataclass(frozen=True)
class Match:
    """The longest prefix that can be used, as it was found. It stays usable from `use` to `release`.

    last       the node where it ends; None: nothing was found
    length     tokens
    on_device  tokens at the begin whose rows of the anchor are on the device, or on their way there
    """

    last: Node | None
    length: int
    on_device: int

    @property
    def nodes(self) -> tuple[Node, ...]:
        """From below the root downwards, those among them that were split off since."""
        return tuple(self.last.path()) if self.last else ()

    @property
    def arriving(self) -> bool:
        """Whether some of it is being loaded: a reader waits for the layers of the latest load."""
        return any(node.ticket and node.ticket.direction == "load" for node in self.nodes)

    def slots(self, name: str) -> torch.Tensor:
        """Device slots of a pool along the prefix, those that there are."""
        found = [node.device[name] for node in self.nodes if name in node.device]
        return torch.cat(found) if found else torch.empty(0, dtype=torch.int64)


Call = TypeVar("Call", bound=Callable[..., Any])


def _whole(call: Call) -> Call:
    """What an interrupt leaves half done in a tree is not served: slots and acknowledgements may be lost with it."""

    @wraps(call)
    def whole(self: PrefixCache, *arguments: Any, **options: Any) -> Any:
        if self.interrupted:
            raise RuntimeError(
                f"an interrupt came into {self.interrupted}() of this tree, which no longer knows what is where: "
                "close its stack and make new ones"
            )
        try:
            return call(self, *arguments, **options)
        except Exception:
            raise
        except BaseException:
            self.interrupted = call.__name__
            raise

    return cast(Call, whole)


class PrefixCache:
    """
    policy   one of `POLICIES`
    windows  pool -> tokens at the end of a prefix for which it must have slots; all of them where it is not named

    Pools by what a node has of them: `anchor`, a slot for each token; `rows`, slots for tokens at the end; `states`,
    one slot. Others ride on these.
    """

    def __init__(
        self, controller: Controller, policy: str = "write_through", windows: Mapping[str, int] | None = None
    ) -> None:
        if policy not in POLICIES:
            raise ValueError(f"policy must be one of {tuple(POLICIES)}, got {policy!r}")
        self.controller, self.policy, self.windows = controller, policy, dict(windows or {})
        group = controller.host
        self.anchor, self.page_size = group.anchor.spec.name, group.page_size
        self._riders = {name: [n for n in group.pools if group.owner(n) == name] for name in group.pools}
        self.states = [name for name, pool in group.pools.items() if pool.spec.keeps_states]
        self.rows = [n for n in group.pools if group.owner(n) == n and n not in (self.anchor, *self.states)]
        wrong = {
            name: window
            for name, window in self.windows.items()
            if name not in self.rows or not is_int(window) or window < 0
        }
        if wrong:
            raise ValueError(f"windows {wrong}: there are windows of {self.rows}, of 0 tokens and more")
        self.early: list[Ack] = []  # backups that ended before a load of what they are of: nothing until that has ended
        self.interrupted = ""  # the call in which an interrupt came
        self._under_way: list[Operation] = []
        self._acks: list[Ack] = []  # for the next check
        self.root = Node(np.empty(0, np.int64))
        self.now = 0  # counts uses

    # ---- looking up

    @_whole
    def match(self, tokens: Sequence[int] | np.ndarray) -> Match:
        """The longest usable prefix. A node that is matched in part is split there, at a page's edge."""
        nodes: list[Node] = []
        for node in self._walk(self._whole_pages(tokens)):
            if not self._anywhere(node):
                break
            nodes.append(node)
        while nodes and not self._complete(nodes):
            nodes.pop()
        for node in nodes:
            self._touch(node)
        on_device = sum(len(n.key) for n in itertools.takewhile(lambda n: self.anchor in n.device, nodes))
        return Match(nodes[-1] if nodes else None, sum(len(node.key) for node in nodes), on_device)

    def _touch(self, node: Node) -> None:
        self.now += 1
        node.used_at = self.now

    def _anywhere(self, node: Node) -> bool:
        """Whether its tokens are on the device or on the host."""
        return self.anchor in node.device or self.anchor in node.host

    def _complete(self, nodes: Sequence[Node]) -> bool:
        """Whether a request can go on behind the last node: its state is there, and the window before it."""
        last = nodes[-1]
        if not all(name in last.device or name in last.host for name in self.states):
            return False
        return all(self._covered(nodes, name) >= window for name, window in self._windows(nodes).items())

    def _windows(self, nodes: Sequence[Node]) -> dict[str, int]:
        length = sum(len(node.key) for node in nodes)
        return {name: min(self.windows.get(name, length), length) for name in self.rows}

    @staticmethod
    def _covered(nodes: Sequence[Node], name: str) -> int:
        """Tokens at the end of the nodes for which a pool has slots without a gap."""
        covered = 0
        for node in reversed(nodes):
            here = max(len(side.get(name, ())) for side in (node.device, node.host))
            covered += here
            if here < len(node.key):
                break
        return covered

    # ---- inserting

    @_whole
    def insert(self, tokens: Sequence[int] | np.ndarray, slots: Mapping[str, torch.Tensor]) -> Slots:
        """Remember a prefix and take its device slots over. Returns those that were not taken: they stay the caller's.

        slots  for the anchor, of every token; for other pools with token rows, of as many tokens at the end, from a
               page's edge on; for a state pool, the one slot that holds the state after the last token. Tokens behind
               the last whole page are not taken. Lists and tokens are copied.

        `ValueError`, and nothing is done, for slots that are not whole pages in order, are not allocated, or are kept
        by a tree already: but for those of a match, named for the tokens that they are of. Nor once a pool is closed.
        """
        self.controller.host.require_open()
        key = self._whole_pages(tokens)
        self._require_slots(len(tokens), slots)
        self._require_nobody_elses(key, len(tokens), slots)
        begin, node = 0, self.root
        for node in self._walk(key, grow=True):
            self._adopt(node, begin, len(tokens), slots)
            begin += len(node.key)
            node.hits += 1
            self._touch(node)
        for name in self.states:
            if len(slots.get(name, ())) and node.parent and len(key) == len(tokens) and name not in node.device:
                self._keep(node, name, slots[name])
        for met in node.path():
            self._back_up_if_due(met)
        left = {name: given[~self._kept(name, given)] for name, given in slots.items()}
        return {name: some for name, some in left.items() if len(some)}

    def _require_slots(self, tokens: int, slots: Mapping[str, torch.Tensor]) -> None:
        if self.anchor not in slots:
            raise ValueError(f"slots of {self.anchor!r}, the anchor, are missing: a prefix is what has them")
        for name, given in slots.items():
            if name not in (self.anchor, *self.rows, *self.states):
                raise ValueError(f"pool {name!r} owns no slots that a prefix could have")
            most = 1 if name in self.states else tokens
            require_list(given, 1, f"pool {name!r}:")
            if given.device.type != "cpu":
                raise ValueError(f"pool {name!r}: slots must lie on the CPU, got a list on {given.device}")
            if len(given) > most or (name == self.anchor and len(given) != tokens):
                raise ValueError(f"pool {name!r}: {len(given)} slots for {tokens} tokens")
            if name in self.rows and len(given) and (tokens - len(given)) % self.page_size:
                raise ValueError(f"pool {name!r}: the last {len(given)} of {tokens} tokens do not begin with a page")
        for name, given in slots.items():
            allocator = self.controller.stack.device_slots[name]
            allocator.require_allocated(given)
            rest = given[-1:] + torch.arange(1, -len(given) % allocator.page_size + 1)  # of the last page
            whole = torch.cat([given, rest])
            check(whole, allocator.page_size, allocator.num_pages, f"pool {name!r}:", unique=True)

    def _require_nobody_elses(self, key: np.ndarray, tokens: int, slots: Mapping[str, torch.Tensor]) -> None:
        for name, given in slots.items():
            kept = self._kept(name, given)
            if not kept.any():
                continue
            wrong = given[kept & (given != self._slots_along(key, name, tokens)[tokens - len(given) :])]
            if len(wrong):
                raise ValueError(
                    f"pool {name!r}: slot {wrong[0].item()} is kept already, of other tokens or by another tree. Name "
                    f"the slots of a match for its tokens, and behind them slots that were allocated for this prefix"
                )

    def _slots_along(self, key: np.ndarray, name: str, tokens: int) -> torch.Tensor:
        """For each of so many tokens, of which a key is the begin, its device slot; -1 where there is none."""
        found = [torch.empty(0, dtype=torch.int64)]
        for node, common in self._along(key):
            held = node.device.get(name, found[0])
            found.append(pad(held, (len(node.key) - len(held), 0), value=-1)[:common])
        there = torch.cat(found)
        return pad(there, (0, tokens - len(there)), value=-1)

    def _keep(self, node: Node, name: str, slots: torch.Tensor) -> None:
        """Device slots are a node's from now on."""
        self.controller.stack.device_slots[name].keep(slots)
        node.device[name] = slots.to(torch.int64, copy=True)

    def _kept(self, name: str, slots: torch.Tensor) -> torch.Tensor:
        """Of each device slot whether a tree has it."""
        allocator = self.controller.stack.device_slots[name]
        return torch.from_numpy(allocator.kept[slots.numpy() // allocator.page_size])

    def _adopt(self, node: Node, begin: int, tokens: int, slots: Mapping[str, torch.Tensor]) -> None:
        """Give a node, whose first token is `begin`, the rows that it lacks."""
        for name, given in slots.items():
            if name in self.states or name in node.device:
                continue
            first = tokens - len(given)  # the token of the first slot
            part = given[max(begin - first, 0) : max(begin + len(node.key) - first, 0)]
            if len(part) and len(part) >= len(node.host.get(name, ())):  # else the host's copy covers more
                self._keep(node, name, part)

    def _walk(self, key: np.ndarray, grow: bool = False) -> Iterator[Node]:
        """Nodes along a key, split where it ends or leaves them; `grow`: with a new one for what is not there."""
        node, done = self.root, 0
        for node, common in self._along(key):
            if common < len(node.key):
                node = self._split(node, common)
            yield node
            done += common
        if grow and done < len(key):
            child = node.children[self._edge(key[done:])] = Node(key[done:].copy(), node)
            yield child

    def _along(self, key: np.ndarray) -> Iterator[tuple[Node, int]]:
        """Nodes along a key, and how many of their tokens are on it: of all but the last one all."""
        node, whole = self.root, True
        while whole and (child := node.children.get(self._edge(key))):
            common = self._common(child.key, key)
            node, key, whole = child, key[common:], common == len(child.key)
            yield child, common

    def _whole_pages(self, tokens: Sequence[int] | np.ndarray) -> np.ndarray:
        array = np.asarray(tokens)
        if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
            raise ValueError(f"tokens must be a list of whole numbers, got {array.dtype} of shape {array.shape}")
        return array[: len(array) // self.page_size * self.page_size].astype(np.int64, copy=False)

    def _edge(self, key: np.ndarray) -> bytes:
        return key[: self.page_size].tobytes()

    def _common(self, a: np.ndarray, b: np.ndarray) -> int:
        """Tokens in common, whole pages."""
        length = min(len(a), len(b))
        different = np.flatnonzero(a[:length] != b[:length])
        return int(different[0] if len(different) else length) // self.page_size * self.page_size

    def _split(self, lower: Node, at: int) -> Node:
        """Cut a node in two; returns the new upper one. What is under way for it is under way for both."""
        upper = Node(lower.key[:at], lower.parent, hits=lower.hits, users=lower.users, used_at=lower.used_at)
        assert lower.parent is not None
        lower.parent.children[self._edge(lower.key)] = upper
        lower.key, lower.parent = lower.key[at:], upper
        upper.children[self._edge(lower.key)] = lower
        upper.device, lower.device = self._cut(lower.device, len(lower.key))
        upper.host, lower.host = self._cut(lower.host, len(lower.key))
        if lower.ticket:
            ticket = upper.ticket = lower.ticket
            ticket.parts[upper], ticket.parts[lower] = self._cut(ticket.parts[lower], len(lower.key))
        return upper

    @staticmethod
    def _cut(slots: Slots, length: int) -> tuple[Slots, Slots]:
        """Slots of all but the last `length` tokens, and of those. A state, one slot, stays at the end."""
        at = {name: max(len(some) - length, 0) for name, some in slots.items()}
        upper = {name: some[: at[name]] for name, some in slots.items() if at[name]}
        return upper, {name: some[at[name] :] for name, some in slots.items()}

    # ---- between device and host

    def _back_up_if_due(self, node: Node) -> None:
        threshold = POLICIES[self.policy]
        if threshold is not None and node.hits >= threshold:
            self._back_up(node)

    def _back_up(self, node: Node) -> bool:
        """Queue a backup of what the host lacks; whether there is one, now or from before."""
        if node.ticket:
            return node.ticket.direction == "backup"
        if not self._reachable(node):
            return False
        missing = {name: slots for name, slots in node.device.items() if name not in node.host}
        if not missing:
            return True
        ticket, operation = Ticket("backup", {}), None
        node.ticket = ticket  # already now: what comes before it must stay
        try:
            operation = self.controller.write(ticket, self._transfers(missing, "device"), self.evict_host)
        finally:
            node.ticket = ticket if operation else None
        if operation is None:
            return False
        self._under_way.append(operation)
        found = {name: operation.host_indices(name) for name in missing}
        ticket.parts[node] = {name: slots for name, slots in found.items() if slots is not None}
        return True

    def _reachable(self, node: Node) -> bool:
        """Whether what comes before a node is on the host or on its way there: if not, its copy is of no use.

        Nodes that are evicted leaf by leaf come before what is in front of them.
        """
        parent = node.parent
        if self.policy == "write_back" or parent is None or parent.parent is None or self.anchor in parent.host:
            return True
        return parent.ticket is not None and parent.ticket.direction == "backup"

    @_whole
    def load_back(self, match: Match) -> bool:
        """Queue a load of what a prefix lacks on the device. Whether all of it is there or on its way.

        False when no room can be made, while a part is still on its way to the host, and when the prefix has been
        evicted since it was matched.
        """
        wanted = self._missing(match)
        if not self._usable(match) or any(node.ticket for node in wanted):
            return False
        return not wanted or self._queue_load(match, wanted)

    def _usable(self, match: Match) -> bool:
        return not match.last or (all(map(self._anywhere, match.nodes)) and self._complete(match.nodes))

    def _queue_load(self, match: Match, wanted: Mapping[Node, Slots]) -> bool:
        names = list(dict.fromkeys(name for slots in wanted.values() for name in slots))
        host = {n: torch.cat([slots[n] for slots in wanted.values() if n in slots]) for n in names}
        ticket = Ticket("load", {})
        self.use(match)  # not to be evicted to make room for the rest
        try:
            operation = self.controller.load(ticket, self._transfers(host, "host"), self.evict)
        finally:
            self.release(match)
        if operation is None:
            return False
        if not self._usable(match) or _names(self._missing(match)) != _names(wanted):
            self.controller.drop(operation)  # to make room was to wait, and what comes before has failed meanwhile
            return False
        self._under_way.append(operation)
        at = dict.fromkeys(names, 0)
        for node, slots in wanted.items():
            ticket.parts[node] = {}
            for name, there in slots.items():
                device = operation.device_indices(name)
                assert isinstance(device, torch.Tensor)
                ticket.parts[node][name] = device[at[name] : at[name] + len(there)]
                self._keep(node, name, ticket.parts[node][name])  # in order of the stream they are there
                at[name] += len(there)
            node.ticket = ticket
        return True

    @_whole
    def use(self, match: Match) -> None:
        """A request reads the prefix: nothing of it is evicted before `release`.

        A failing load takes it away, with what others have put behind it. What the request computed from it is worth
        nothing either, and must not be inserted.
        """
        for node in match.nodes:
            node.users += 1

    @_whole
    def release(self, match: Match) -> None:
        """Undo one `use`, also of nodes that were split meanwhile."""
        if any(node.users < 1 for node in match.nodes):
            raise ValueError(f"a prefix of {match.length} tokens is not in use, or not so often")
        for node in match.nodes:
            node.users -= 1

    def _missing(self, match: Match) -> dict[Node, Slots]:
        """By node, host slots of what a request behind the match needs on the device and does not find there."""
        missing: dict[Node, Slots] = {}
        behind = match.length
        for node in match.nodes:
            behind -= len(node.key)
            wanted = [self.anchor, *(n for n in self.rows if behind < self.windows.get(n, match.length))]
            if node is match.last:
                wanted += self.states
            found = {name: node.host[name] for name in wanted if name in node.host and name not in node.device}
            if found:
                missing[node] = found
        return missing

    def _transfers(self, slots: Slots, side: str) -> list[PoolTransfer]:
        """Of the pools that own indices and of those that ride on them."""
        found = []
        for name, indices in slots.items():
            for rider in self._riders[name]:
                given = {f"{side}_indices": indices} if rider == name else {}
                found.append(PoolTransfer(rider, **given))
        order = list(self.controller.host.pools)
        return sorted(found, key=lambda t: order.index(t.name))

    @_whole
    def check(self, wait: bool = False) -> list[Ack]:
        """Take note of what has ended; `wait`: of everything that was submitted.

        In order for each direction, but for backups of what was computed behind a load: they are told after it. Also
        of its own operations whose acknowledgement somebody else was given, who asked the controller.
        """
        acks, self._acks = self._acks + self._noted(wait), []
        return acks

    def _noted(self, wait: bool) -> list[Ack]:
        """What has ended: loads first, since what failed to come is not saved, nor what was computed from it."""
        acks = self.controller.acknowledge(wait)
        ended = [operation.ack for operation in self._under_way if operation.ack]
        self._under_way = [operation for operation in self._under_way if not operation.ack]
        asked_for = set(map(id, acks))
        acks, self.early = [*self.early, *(ack for ack in ended if id(ack) not in asked_for), *acks], []
        told: list[Ack] = []
        for ack in sorted(acks, key=lambda ack: ack.direction == "backup"):
            if isinstance(ack.tag, Ticket) and not ack.tag.done:  # by another tree of the controller, say
                if not ack.error and self._is_early(ack.tag):
                    self.early.append(ack)
                    continue
                self._ended(ack.tag, ack)
            told.append(ack)
        return told

    @staticmethod
    def _is_early(ticket: Ticket) -> bool:
        """Whether it has to do with what was computed behind a load that may fail still."""
        before = (node for part in ticket.parts for node in part.path() if node not in ticket.parts)
        return any(node.ticket and node.ticket.direction == "load" for node in before)

    def _ended(self, ticket: Ticket, ack: Ack) -> None:
        ticket.done, ticket.error = True, ack.error
        failed_load = ticket.direction == "load" and ack.error is not None
        for node, slots in ticket.parts.items():
            node.ticket = None
            if ticket.direction == "backup" and not ack.error:
                node.host |= slots
            if failed_load:
                node.device = {n: s for n, s in node.device.items() if n not in slots}
        if failed_load:
            self._take_away_behind(ticket.parts)
        for node in list(ticket.parts):
            self._forget_if_empty(node)

    def _take_away_behind(self, failed: Collection[Node]) -> None:
        """What is on the device behind a load that failed may have been computed from what never arrived.

        So may what is on its way from there to the host. What the host has by now is older: a backup that ends before
        such a load is not taken note of.
        """
        behind = [child for node in failed for child in node.children.values() if child not in failed]
        for node in [below for child in behind for below in child.subtree()][::-1]:
            self._free_arriving(node)
            self._free_all("device", node.device)
            self._forget_if_empty(node)

    def _free_arriving(self, node: Node) -> None:
        """What is under way for a node goes on for nobody. The slots it goes to are free, or once it has ended."""
        ticket, node.ticket = node.ticket, None
        if ticket is None:
            return
        for name, slots in ticket.parts.pop(node).items():
            if ticket.direction == "load":
                del node.device[name]
            self._slots_of(DESTINATION[ticket.direction], name).free_rest(slots)  # some are free if it has failed

    @_whole
    def clear(self) -> None:
        """Forget every prefix, whoever uses it. Slots are free again, those of transfers under way once they end."""
        for node in self.root.subtree():
            self._free_arriving(node)
            self._free_all("device", node.device)
            self._free_all("host", node.host)
        self.root = Node(np.empty(0, np.int64))

    # ---- making room

    @_whole
    def evict(self, name: str, need: int) -> int:
        """Free device slots of a pool, the least recently used first; returns how many. Backs up first if need be."""
        return self._evict("device", name, need)

    @_whole
    def evict_host(self, name: str, need: int) -> int:
        """Free host slots of a pool, the least recently used first; returns how many."""
        return self._evict("host", name, need)

    def _evict(self, side: str, name: str, need: int) -> int:
        if name not in (self.anchor, *self.rows, *self.states):
            raise ValueError(f"no pool {name!r} owns slots that could be evicted")
        freed = 0
        while freed < need and (victims := self.victims(side, name, need - freed)):
            if side == "device" and self.policy == "write_back":
                self._save(victims)
            for node in victims:
                if self._may_go(node, side, name):  # a backup that has not ended keeps it, and it is no victim again
                    freed += self._drop(node, side, name)
        return freed

    def _save(self, nodes: Sequence[Node]) -> None:
        """Back up nodes and wait for it; what is acknowledged by the way is told by the next `check`."""
        queued = [node for node in nodes if self._back_up(node) and node.ticket]
        if queued:
            self.controller.start_writing()
            self._acks += self._noted(wait=True)

    @_whole
    def victims(self, side: str, name: str, need: int) -> list[Node]:
        """What `evict` would free: nodes that may go one after another, the least recently used first.

        They have `need` slots of a pool on a side, "device" or "host", if there are that many.
        """
        found: dict[Node, None] = {}
        order = itertools.count()  # of nodes used at the same time
        heap = [(n.used_at, next(order), n) for n in self.root.subtree() if self._may_go(n, side, name)]
        heapq.heapify(heap)
        size = 0
        while heap and size < need:
            node = heapq.heappop(heap)[2]
            found[node] = None
            size += len(getattr(node, side)[name])
            parent = node.parent
            if name == self.anchor and parent and self._may_go(parent, side, name, found):
                heapq.heappush(heap, (parent.used_at, next(order), parent))
        return list(found)

    def _may_go(self, node: Node, side: str, name: str, gone: Collection[Node] = ()) -> bool:
        """Whether nobody uses it, nothing is under way, and it is a leaf if the anchor's slots are to go."""
        if name not in getattr(node, side) or node.ticket or node.users:
            return False
        below = (child for child in node.children.values() if child not in gone)
        return name != self.anchor or not any(name in getattr(child, side) or child.ticket for child in below)

    def _drop(self, node: Node, side: str, name: str) -> int:
        """Slots freed of the pool; with the anchor's go all others of the node."""
        held: Slots = getattr(node, side)
        names = list(held) if name == self.anchor else [name]
        count = len(held[name])
        for gone in names:
            self._free(side, gone, held.pop(gone))
        self._forget_if_empty(node)
        return count

    def _forget_if_empty(self, node: Node) -> None:
        """A leaf whose tokens are nowhere."""
        while node.parent and not (node.children or node.ticket or self._anywhere(node)):
            self._free_all("device", node.device)
            self._free_all("host", node.host)
            node.parent.children.pop(self._edge(node.key), None)  # None: it went with a node below it
            node = node.parent

    def _free_all(self, side: str, slots: Slots) -> None:
        while slots:
            self._free(side, *slots.popitem())

    def _free(self, side: str, name: str, slots: torch.Tensor) -> None:
        self._slots_of(side, name).free(slots)

    def _slots_of(self, side: str, name: str) -> PageAllocator | HostPool:
        return (self.controller.stack.device_slots if side == "device" else self.controller.host.pools)[name]


def _names(parts: Mapping[Node, Slots]) -> dict[Node, set[str]]:
    return {node: set(slots) for node, slots in parts.items()}
