"""What a pool stores: components (the rows of each layer) and the pool that groups them.

A pool is data. Every layout, backend and test in this repository is driven by a `PoolSpec`, so a model family that is
described here needs no code of its own.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, replace
from typing import Literal, get_args

import torch

Unit = Literal["token", "page", "slot"]
UNITS: tuple[Unit, ...] = get_args(Unit)

# Model layers of a side state: it has no layer axis.
NO_LAYER = (None,)

# Types that torch copies as numbers (a bool becomes 0 or 1), or cannot copy at all.
NOT_ALL_BITS = re.compile(r"torch\.(bool|float4_e2m1fn_x2|q.+|bits.+|u?int[1-7])")


def is_int(number: object) -> bool:
    """A plain one: NumPy's have a width, which a product of two may not fit, and True is no length."""
    return type(number) is int


def require_whole(what: str, number: int, least: int = 0) -> None:
    """`ValueError` unless it is a plain whole number, and no less than `least`."""
    if not is_int(number) or number < least:
        raise ValueError(f"{what} must be a whole number (int) from {least} on, got {number!r}")


@dataclass(frozen=True)
class Segment:
    """`entries` records of `bytes` bytes, one after another, inside an opaque row."""

    entries: int
    bytes: int


@dataclass(frozen=True)
class Component:
    """One kind of row that a layer keeps: K, V, a latent, an index page, a recurrent state.

    dtype     element type in storage (FP8 may be kept as `torch.uint8`; bytes are moved, never numbers)
    heads     length of the head axis, or None where the row has none (MLA latents, page rows, states)
    dim       lanes of one head: a number, or the shape of a state
    unit      what one row belongs to: a "token", a whole "page" of tokens, or a state "slot"
    layers    ids of the model layers that own a row; None: all layers of the pool
    side      a state without a layer axis: restored before any layer counts as done, written last
    split     lanes that `page_first_kv_split` puts into separate buffers, e.g. (512, 64)
    segments  what an opaque page row is made of, in order; what they leave of the row is padding
    """

    name: str
    dtype: torch.dtype
    _: KW_ONLY
    dim: int | tuple[int, ...]
    heads: int | None = None
    unit: Unit = "token"
    layers: tuple[int, ...] | None = None
    side: bool = False
    split: tuple[int, ...] = ()
    segments: tuple[Segment, ...] = ()

    def __post_init__(self) -> None:
        def require(holds: bool, rule: str) -> None:
            if not holds:
                raise ValueError(f"component {self.name!r}: {rule}")

        require(isinstance(self.dtype, torch.dtype), f"dtype must be a torch.dtype, got {self.dtype!r}")
        require(
            not NOT_ALL_BITS.fullmatch(str(self.dtype)),
            f"torch does not keep every bit of {self.dtype} in a copy; store the bytes as torch.uint8",
        )
        require(self.unit in UNITS, f"unit must be one of {UNITS}, got {self.unit!r}")
        require(self.row_shape != (), "dim needs an axis; a single number per row has dim=1")
        self._require_types(require)
        require(min(self.row_shape) >= 0, f"dim must not be negative, got {self.dim}")
        require(self.heads is None or self.heads >= 1, f"heads must be at least 1 or None, got {self.heads}")
        require(self.heads is None or self.unit == "token", f"only token rows have heads, this is a {self.unit} row")
        require(not self.split or sum(self.split) == self.lanes, f"split {self.split} must sum to {self.lanes} lanes")
        require(not self.split or min(self.split) >= 1, f"split {self.split} has an empty part")
        require(not self.segments or self.unit == "page", "only page rows are made of segments")
        require(not self.segments or not self.split, "a row is cut into parts or made of segments, not both")
        require(
            all(s.entries >= 1 and s.bytes >= 1 for s in self.segments), f"segments must not be empty: {self.segments}"
        )
        used = sum(s.entries * s.bytes for s in self.segments)
        require(used <= self.row_bytes, f"segments take {used} of {self.row_bytes} bytes of the row")
        require(len({s.entries for s in self.segments}) <= 1, "segments must hold the same number of entries")
        require(self.layers is None or not self.side, "a side state has no layers")
        owned = self.layers or ()
        require(len(set(owned)) == len(owned) and min(owned, default=0) >= 0, f"layers {owned} must be distinct ids")

    def _require_types(self, require: Callable[[bool, str], None]) -> None:
        owned = () if self.layers is None else self.layers
        for field, value in (("layers", owned), ("split", self.split), ("segments", self.segments)):
            require(isinstance(value, tuple), f"{field} must be a tuple, got {value!r}")
        require(all(isinstance(s, Segment) for s in self.segments), f"segments are `Segment`s, got {self.segments!r}")
        numbers = {
            "dim": self.row_shape,
            "heads": (self.heads or 1,),
            "layers": owned,
            "split": self.split,
            "segments": tuple(n for s in self.segments for n in (s.entries, s.bytes)),
        }
        for field, values in numbers.items():
            require(all(map(is_int, values)), f"{field} must be whole numbers (int), got {getattr(self, field)!r}")

    @property
    def row_shape(self) -> tuple[int, ...]:
        """Shape of one lane axis as its owner sees it: `(dim,)` or the shape of a state."""
        return self.dim if isinstance(self.dim, tuple) else (self.dim,)

    @property
    def lanes(self) -> int:
        """Elements of one head's row."""
        return math.prod(self.row_shape)

    @property
    def head_count(self) -> int:
        return self.heads or 1

    @property
    def row_bytes(self) -> int:
        """Bytes of one row: one layer, one token (or page, or slot), all heads."""
        return self.head_count * self.lanes * self.dtype.itemsize

    @property
    def entries(self) -> int:
        """Single entries that a page row holds; 0 where rows move only as a whole."""
        return self.segments[0].entries if self.segments else 0


@dataclass(frozen=True)
class PoolSpec:
    """A host pool and its device twin: components that share one list of indices.

    layers        model layers that the pool spans (appended draft layers included)
    page_size     indices a page holds: tokens, or 1 for state slots
    family        which of SGLang's pools this is, for its dispatch rules and exact shapes; "custom" follows ours
    indices_from  name of the pool whose indices this one rides on (a sidecar owns none)
    head_groups   groups that `page_unified` puts outermost in a page, for readers with another TP size
    """

    name: str
    layers: int
    page_size: int
    components: tuple[Component, ...]
    family: str = "custom"
    indices_from: str | None = None
    head_groups: int = 1

    def __post_init__(self) -> None:
        def require(holds: bool, rule: str) -> None:
            if not holds:
                raise ValueError(f"pool {self.name!r}: {rule}")

        require(isinstance(self.components, tuple), f"components must be a tuple, got {self.components!r}")
        names = [c.name for c in self.components]
        for field in ("layers", "page_size", "head_groups"):
            require(is_int(getattr(self, field)), f"{field} must be a whole number (int), got {getattr(self, field)!r}")
        require(self.layers >= 0, f"layers must not be negative, got {self.layers}")
        require(self.page_size >= 1, f"page_size must be at least 1, got {self.page_size}")
        require(self.head_groups >= 1, f"head_groups must be at least 1, got {self.head_groups}")
        require(len(set(names)) == len(names), f"component names must differ, got {names}")
        for c in self.components:
            outside = [i for i in c.layers or () if i >= self.layers]
            require(not outside, f"component {c.name!r} owns layers {outside}, the pool has {self.layers}")
            require(c.unit != "slot" or self.page_size == 1, f"state slots need page_size 1, got {self.page_size}")
            require(
                c.heads is None or c.heads % self.head_groups == 0,
                f"{c.heads} heads of {c.name!r} do not split into {self.head_groups} groups",
            )

    def component(self, name: str) -> Component:
        for c in self.components:
            if c.name == name:
                return c
        raise KeyError(f"pool {self.name!r} has no component {name!r}, it has {[c.name for c in self.components]}")

    def layers_of(self, component: Component) -> tuple[int | None, ...]:
        """Model layers of a component in storage order; `(None,)` for a side state."""
        if component.side:
            return NO_LAYER
        return tuple(range(self.layers)) if component.layers is None else component.layers

    @property
    def owned_layers(self) -> tuple[int, ...]:
        """Model layers for which this pool stores anything, ascending."""
        return tuple(sorted({i for c in self.components for i in self.layers_of(c) if i is not None}))

    @property
    def keeps_states(self) -> bool:
        """Whether an index names the state after a token, not a token's rows."""
        return any(c.unit == "slot" for c in self.components)

    @property
    def overwritten_in_place(self) -> bool:
        """Whether a model writes the same rows at every step: recurrent states, and the state rings of DeepSeek V4."""
        return self.family == "v4_state" or self.keeps_states

    def tokens_per_page(self, component: Component) -> int:
        """Length of the token axis inside a page: page rows and state slots have one row a page."""
        return self.page_size if component.unit == "token" else 1

    def component_page_bytes(self, component: Component) -> int:
        return len(self.layers_of(component)) * self.tokens_per_page(component) * component.row_bytes

    def require_pages(self, num_pages: int) -> None:
        """`ValueError` for a number of pages that no pool can have."""
        require_whole(f"pool {self.name!r}: num_pages", num_pages)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page: all components, all layers."""
        return sum(map(self.component_page_bytes, self.components))

    @property
    def entries(self) -> int:
        """Entries a page holds where every component moves single entries, else 0."""
        counts = {c.entries for c in self.components}
        return counts.pop() if len(counts) == 1 else 0

    def with_pages_of(self, page_size: int) -> PoolSpec:
        """The same rows with another number of tokens a page (token rows only)."""
        if any(c.unit != "token" for c in self.components):
            raise ValueError(f"pool {self.name!r}: page and slot rows fix their page size at {self.page_size}")
        return replace(self, page_size=page_size)


def require_spec(spec: PoolSpec) -> None:
    """`TypeError` for what is no description of one pool: the pools of a model, or a name."""
    if not isinstance(spec, PoolSpec):
        raise TypeError(f"a pool is made of one PoolSpec (`presets.model` has several, by name), got {spec!r:.80}")
