"""The golden vectors as they are read from their files, and what is right in a case."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np

from verify.consumers import check_vectors as plain

FOLDER = Path(__file__).resolve().parents[2] / "data" / "vectors"

Json = dict[str, Any]
SIDES = ("host", "device")
STATUSES = ("passed", "failed", "expected", "unsupported")


@dataclass(frozen=True)
class Group:
    """A pool in a layout: `geometry` is the group without its tests."""

    family: str
    geometry: Json
    tests: tuple[Json, ...]

    @cached_property
    def filled(self) -> dict[str, list[np.ndarray]]:
        """Every buffer of a side as it is when full."""
        return {side: [self._full(side, buffer) for buffer in self.geometry[side]] for side in SIDES}

    def _full(self, side: str, buffer: Json) -> np.ndarray:
        g, pages = self.geometry, range(self.geometry[f"{side}_pages"])
        return plain.place(g, side, buffer, lambda c, layer: plain.rows_on(g, c, layer, pages), pages)


@dataclass(frozen=True)
class Outcome:
    """What became of a case.

    sha256   `combined` of all buffers as they were left; none where it was not run
    differs  how the first wrong word differs from the right one, in a few words that many cases share
    """

    id: str
    status: str
    refused: bool = False
    sha256: str | None = None
    message: str = ""
    differs: str = ""


@cache
def manifest() -> Json:
    return json.loads((FOLDER / "manifest.json").read_text("utf-8"))


def manifest_digest() -> str:
    """What a report names the vectors by."""
    return hashlib.sha256((FOLDER / "manifest.json").read_bytes()).hexdigest()


def families() -> list[str]:
    return [file["name"].removesuffix(".json") for file in manifest()["files"] if file["name"].endswith(".json")]


def groups(chosen: Iterable[str] | None = None) -> Iterator[Group]:
    for family in families() if chosen is None else chosen:
        yield from _of(family)


@cache
def _of(family: str) -> tuple[Group, ...]:
    read = json.loads((FOLDER / f"{family}.json").read_text("utf-8"))["groups"]
    return tuple(Group(family, {k: v for k, v in g.items() if k != "tests"}, tuple(g["tests"])) for g in read)


def flags(group: Group, test: Json) -> set[str]:
    """The faults that a case catches."""
    return {*test["flags"], *(group.geometry["flags"] if test["result"] == "ok" else ())}


def other(side: str) -> str:
    return "device" if side == "host" else "host"


def right(group: Group, test: Json) -> set[tuple[bool, str]]:
    """Whether it is refused, and the digest of all buffers afterwards: one way to be right, or two."""
    ways = {(True, unmoved(group, test))} if test["result"] != "ok" else set[tuple[bool, str]]()
    if test["result"] != "must-refuse":
        g, to = group.geometry, plain.destination(test)
        moved = [test["sha256"][b["name"]] for b in g[to]]
        ways.add((False, combined(to, moved, [b["filled"] for b in g[other(to)]])))
    return ways


def unmoved(group: Group, test: Json) -> str:
    """The digest of a case before it begins."""
    g, to = group.geometry, plain.destination(test)
    return combined(to, [b["poisoned"] for b in g[to]], [b["filled"] for b in g[other(to)]])


def combined(to: str, destination: list[str], source: list[str]) -> str:
    """One digest of a case: SHA-256 of the digests of the host's buffers and then the device's, one a line."""
    host, device = (destination, source) if to == "host" else (source, destination)
    return hashlib.sha256("\n".join([*host, *device]).encode()).hexdigest()
