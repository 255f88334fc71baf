"""What the table of `refimpl.support` answers: a path, a refusal, a capability, or the pair of a server."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Path:
    """The pair is allowed; bytes go by `name`."""

    name: str

    def __bool__(self) -> bool:
        return True


@dataclass(frozen=True)
class Refusal:
    """The pair is refused for `reason`."""

    reason: str
    instead: str = ""

    def __bool__(self) -> bool:
        return False


@dataclass(frozen=True)
class Capability:
    """Whether a path can be used, and why (not)."""

    usable: bool
    reason: str

    def __bool__(self) -> bool:
        return self.usable


@dataclass(frozen=True)
class StartUp:
    """The pair that a server really uses, and what it changed on the way."""

    layout: str
    backend: str
    changes: tuple[str, ...]


class UnsupportedPairing(ValueError):
    """A pool was asked for with a layout and backend that do not go together."""
