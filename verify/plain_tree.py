"""What a tree of prefixes should do, said again without a tree: sets of prefixes, looked through from end to end.

A prefix is a string, a letter for each page, and stands for its last page; for the state behind that page, too. All
that is known is known of single pages. Nodes are where some prefixes end, so to cut one is to add an end, and neither
slots nor what is under way need to be cut. It knows how many pages there are, and not which.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

from refimpl.radix import POLICIES

Place = tuple[str, str]  # a side and a pool
Gets = dict[str, set[str]]  # by pool, pages


@dataclass(eq=False)
class Moving:
    """A transfer, queued or submitted. `gets`: what there will be; `leaving`: pages that were freed under it."""

    direction: str
    gets: Gets
    leaving: Counter[Place] = field(default_factory=Counter)


@dataclass(eq=False)
class PlainTree:
    """
    page_size  tokens
    rows       pools with slots for tokens, the anchor first; `states`: pools with one slot for a state
    windows    of rows other than the anchor, tokens
    capacity   pages that can be handed out
    ended      for each time that the tree asks what has ended: transfers by number of their making, and whether failed
    """

    policy: str
    page_size: int
    rows: list[str]
    states: list[str]
    windows: Mapping[str, int]
    capacity: Mapping[Place, int]
    ended: list[list[tuple[int, bool]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.anchor = self.rows[0]
        self.now = 0
        self.made: list[Moving] = []
        self.refused = Counter[str]()  # by side, how often there was no room
        self.held = Counter[Place]()  # pages of what is being put together
        self.ends = set[str]()
        self.has = {place: set[str]() for place in self.capacity}
        self.using: list[set[str]] = []  # pages of each request that reads
        self.hits, self.used = Counter[str](), dict[str, int]()
        self.moving: dict[str, Moving] = {}  # by page

    # ---- nodes

    def parent(self, end: str) -> str:
        return max((other for other in self.ends if end.startswith(other) and other != end), key=len, default="")

    def children(self, end: str) -> list[str]:
        return [other for other in self.ends if other and self.parent(other) == end]

    def span(self, end: str) -> list[str]:
        """Its pages."""
        return [end[:i] for i in range(len(self.parent(end)) + 1, len(end) + 1)]

    def path(self, end: str) -> list[str]:
        return sorted((other for other in self.ends if end.startswith(other)), key=len)

    def walk(self, word: str, grow: bool = False) -> Iterator[str]:
        at = ""
        while at != word:
            known = [word[:i] for i in range(len(at) + 1, len(word) + 1) if self._is_known(word[:i])]
            inner = [page for page in known if page in self.ends]
            if not known and not grow:
                return
            at = inner[0] if inner else known[-1] if known else word
            self.ends.add(at)
            yield at

    def _is_known(self, page: str) -> bool:
        return any(end.startswith(page) for end in self.ends)

    def of(self, end: str, place: Place) -> set[str]:
        """What a place has of a node."""
        own = [end] if place[1] in self.states else self.span(end)
        return self.has[place].intersection(own)

    def anywhere(self, end: str) -> bool:
        return any(self.of(end, (side, self.anchor)) for side in ("device", "host"))

    def touch(self, end: str) -> None:
        self.now += 1
        self.used |= dict.fromkeys(self.span(end), self.now)

    # ---- what a request does

    def match(self, word: str) -> tuple[str, int]:
        """Where the longest usable prefix ends, and how many of its pages the device has."""
        found: list[str] = []
        for end in self.walk(word):
            if not self.anywhere(end):
                break
            found.append(end)
        while found and not self.complete(found[-1]):
            found.pop()
        for end in found:
            self.touch(end)
        last = found[-1] if found else ""
        pages = [last[: i + 1] in self.has["device", self.anchor] for i in range(len(last))]
        return last, [*pages, False].index(False)

    def complete(self, end: str) -> bool:
        if not all(self.of(end, ("device", name)) or self.of(end, ("host", name)) for name in self.states):
            return False
        return all(self._tail(end, name) >= self._window(end, name) for name in self.rows[1:])

    def _tail(self, end: str, name: str) -> int:
        there = self.has["device", name] | self.has["host", name]
        pages = [end[:i] in there for i in range(len(end), 0, -1)]
        return [*pages, False].index(False) * self.page_size

    def _window(self, end: str, name: str) -> int:
        return min(self.windows.get(name, len(end) * self.page_size), len(end) * self.page_size)

    def insert(self, word: str, given: Mapping[str, int]) -> None:
        """`given`: pages at the end; of a state 1, or 0. They were handed out; what is not taken is free again."""
        end = ""
        for end in self.walk(word, grow=True):
            for name in self.rows:
                new = {page for page in self.span(end) if len(page) > len(word) - given[name]}
                if not self.of(end, ("device", name)) and len(new) >= len(self.of(end, ("host", name))):
                    self.has["device", name] |= new
            self.hits.update(self.span(end))
            self.touch(end)
        if end:
            for name in self.states:
                if given[name]:
                    self.has["device", name].add(end)
        for met in self.path(end):
            threshold = POLICIES[self.policy]
            if threshold is not None and self.hits[met] >= threshold:
                self.back_up(met)

    def load_back(self, last: str) -> bool:
        wanted = self.missing(last)
        if not self.usable(last) or any(end in self.moving for end in wanted):
            return False
        if not wanted:
            return True
        gets: Gets = {}
        for parts in wanted.values():
            for name, pages in parts.items():
                gets.setdefault(name, set()).update(pages)
        self.use(last)
        there = self.take("device", {name: len(pages) for name, pages in gets.items()})
        self.using.pop()
        if not there:
            return False
        if not self.usable(last) or self.missing(last) != wanted:  # something has failed meanwhile
            self.start("load", {}, ())  # it was queued, and dropped
            return False
        self.start("load", gets, wanted)
        for name, pages in gets.items():
            self.has["device", name] |= pages
        return True

    def use(self, last: str) -> None:
        self.using.append({last[: i + 1] for i in range(len(last))})

    def users(self, page: str) -> int:
        return sum(page in pages for pages in self.using)

    def clear(self) -> None:
        for end in self.ends:
            moving = self.moving.get(end)
            if moving and moving.direction == "load":  # what it comes from is free once it has ended, too
                for name, pages in moving.gets.items():
                    moving.leaving["host", name] += len(pages & ({end} if name in self.states else set(self.span(end))))
            self.leave(end)
        self.ends.clear()
        for known in (*self.has.values(), *self.using, self.hits, self.used):
            known.clear()

    def usable(self, last: str) -> bool:
        return not last or (all(map(self.anywhere, self.path(last))) and self.complete(last))

    def missing(self, last: str) -> dict[str, Gets]:
        found: dict[str, Gets] = {}
        for end in self.path(last):
            behind = (len(last) - len(end)) * self.page_size
            needed = [n for n in self.rows if n == self.anchor or behind < self._window(last, n)]
            needed += self.states if end == last else []
            parts = {n: self.of(end, ("host", n)) for n in needed if not self.of(end, ("device", n))}
            if any(parts.values()):
                found[end] = {name: pages for name, pages in parts.items() if pages}
        return found

    # ---- what is under way

    def start(self, direction: str, gets: Gets, nodes: Collection[str]) -> None:
        self.made.append(Moving(direction, gets))
        self.moving |= {page: self.made[-1] for end in nodes for page in self.span(end)}

    def back_up(self, end: str) -> bool:
        if end in self.moving:
            return self.moving[end].direction == "backup"
        parent = self.parent(end)
        if self.policy != "write_back" and parent and parent not in self.has["host", self.anchor]:
            before = self.moving.get(parent)
            if before is None or before.direction != "backup":
                return False
        names = [n for n in (*self.rows, *self.states) if not self.of(end, ("host", n))]
        gets = {name: set(pages) for name in names if (pages := self.of(end, ("device", name)))}
        if not gets:
            return True
        self.moving |= dict.fromkeys(self.span(end), Moving("backup", {}))  # so that nothing before it goes
        there = self.take("host", {name: len(pages) for name, pages in gets.items()})
        for page in self.span(end):
            del self.moving[page]
        if there:
            self.start("backup", gets, [end])
        return there

    def note(self) -> None:
        """What has ended, as the tree was told."""
        for number, failed in sorted(self.ended.pop(0), key=lambda one: self.made[one[0]].direction == "backup"):
            self._end(self.made[number], failed)

    def _end(self, moving: Moving, failed: bool) -> None:
        nodes = [end for end in self.ends if self.moving.get(end) is moving]
        if moving.direction == "backup" and not failed:
            before = [end[:i] for end in nodes for i in range(1, len(end)) if end[:i] in self.moving]
            loads = [page for page in before if self.moving[page].direction == "load"]
            assert not loads, f"{nodes} are saved, and {loads} before them may fail to arrive"
        self.moving = {page: other for page, other in self.moving.items() if other is not moving}
        for name, pages in moving.gets.items():
            if moving.direction == "backup" and not failed:
                self.has["host", name] |= pages
            if moving.direction == "load" and failed:
                self.has["device", name] -= pages
        moving.gets, moving.leaving = {}, Counter()
        if moving.direction == "load" and failed:
            tops = [child for end in nodes for child in self.children(end) if child not in nodes]
            behind = [end for end in self.ends if any(map(end.startswith, tops))]
            for end in sorted(behind, key=len, reverse=True):
                self.leave(end)
                self.let_go(end, "device")
                self.forget_if_empty(end)
        for end in sorted(nodes, key=len, reverse=True):
            self.forget_if_empty(end)

    def leave(self, end: str) -> None:
        """What is under way for a node goes on for nobody."""
        moving = self.moving.get(end)
        for page in self.span(end):
            self.moving.pop(page, None)
            for name, pages in moving.gets.items() if moving else ():
                if page in pages and (name not in self.states or page == end):
                    pages.remove(page)
                    assert moving
                    # Both ends of a backup are free, once it has ended; of a load only where it goes to.
                    moving.leaving["device", name] += 1
                    moving.leaving["host", name] += moving.direction == "backup"

    # ---- room

    def free(self, place: Place) -> int:
        side, name = place
        coming = sum(len(m.gets.get(name, ())) for m in self.made if (m.direction, side) == ("backup", "host"))
        leaving = sum(m.leaving[place] for m in self.made)
        return self.capacity[place] - len(self.has[place]) - self.held[place] - coming - leaving

    def take(self, side: str, needs: Mapping[str, int]) -> bool:
        """Room for all of that, or none; it is `held` only as long as this goes on."""
        taken = Counter[Place]()
        for name in sorted(needs):
            place = side, name
            if self.free(place) < needs[name]:
                self.evict(side, name, needs[name] - self.free(place))
            if self.free(place) < needs[name]:
                break
            self.held[place] += needs[name]
            taken[place] = needs[name]
        self.held -= taken
        self.refused[side] += len(taken) < len(needs)
        return len(taken) == len(needs)

    def evict(self, side: str, name: str, need: int) -> int:
        """Pages."""
        freed = 0
        while freed < need and (victims := self.victims(side, name, need - freed)):
            if side == "device" and self.policy == "write_back":
                saving = [end for end in victims if self.back_up(end) and end in self.moving]
                if saving:
                    self.note()
            for end in victims:
                if self.may_go(end, side, name):
                    freed += self.drop(end, side, name)
        return freed

    def victims(self, side: str, name: str, need: int) -> list[str]:
        found: list[str] = []
        while sum(len(self.of(end, (side, name))) for end in found) < need:
            others = [end for end in self.ends if end not in found and self.may_go(end, side, name, found)]
            if not others:
                break
            found.append(min(others, key=lambda end: (self.used[end], len(end))))
        return found

    def may_go(self, end: str, side: str, name: str, gone: Collection[str] = ()) -> bool:
        if not self.of(end, (side, name)) or end in self.moving or self.users(end):
            return False
        below = [child for child in self.children(end) if child not in gone]
        return name != self.anchor or not any(self.of(c, (side, name)) or c in self.moving for c in below)

    def drop(self, end: str, side: str, name: str) -> int:
        freed = len(self.of(end, (side, name)))
        self.let_go(end, side, None if name == self.anchor else name)
        self.forget_if_empty(end)
        return freed

    def let_go(self, end: str, side: str, only: str | None = None) -> None:
        for place in self.has:
            if place[0] == side and only in (None, place[1]):
                self.has[place] -= self.of(end, place)

    def forget_if_empty(self, end: str) -> None:
        while end in self.ends and not (self.children(end) or end in self.moving or self.anywhere(end)):
            parent = self.parent(end)
            for side in ("device", "host"):
                self.let_go(end, side)
            for page in self.span(end):
                del self.hits[page], self.used[page]
                for pages in self.using:
                    pages.discard(page)
            self.ends.remove(end)
            end = parent
