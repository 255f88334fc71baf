"""What the bytes of a test pool say: each word names the place it was written to.

A row is cut into words of four bytes; all words of a pool are numbered through (component, layer, page, token, head,
word), and a word holds its own number in base 251, digits 1 to 251. So no two words are alike, and no byte is 0x00 or
0xFF, which are left for poison: a byte that was not written, or one that was written by mistake, always shows.

A tail of k < 4 bytes cannot hold four digits. It shows k of them in each *round*; the rounds together show all four,
and a test that needs certainty runs every round (`rounds`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from refimpl.device_pool import DevicePool
from refimpl.geometry import Component, PoolSpec
from refimpl.host_buffers import HostBuffers

WORD = 4
BASE = 251
POISON = 0xFF


@dataclass(frozen=True)
class Place:
    """What a word names."""

    component: str
    layer: int | None
    page: int
    token: int
    head: int
    word: int

    def __str__(self) -> str:
        layer = "side state" if self.layer is None else f"layer {self.layer}"
        return f"{self.component} of {layer}, page {self.page}, token {self.token}, head {self.head}, word {self.word}"


def head_bytes(c: Component) -> int:
    """Bytes of one head's lanes: what a row means here."""
    return c.lanes * c.dtype.itemsize


def rounds(spec: PoolSpec) -> int:
    """Rounds after which every word of every row has shown all its digits."""
    tails = [head_bytes(c) % WORD for c in spec.components]
    return max((-(-WORD // tail) for tail in tails if tail), default=1)


def digits(numbers: np.ndarray) -> np.ndarray:
    """The four bytes `[..., 4]` of each word number.

    >>> digits(np.array([0, 252])).tolist()
    [[1, 1, 1, 1], [2, 2, 1, 1]]
    """
    places = BASE ** np.arange(WORD, dtype=np.int64)
    return (numbers[..., None] // places % BASE + 1).astype(np.uint8)


def number(word: np.ndarray) -> int | None:
    """The number that four bytes hold, or None if they hold none."""
    if len(word) < WORD or word.min() == 0 or word.max() > BASE:
        return None
    return int(((word.astype(np.int64) - 1) * BASE ** np.arange(WORD)).sum())


@lru_cache(maxsize=32)  # treat the result as read-only
def layer_bytes(spec: PoolSpec, num_pages: int, component: str, layer: int | None, turn: int = 0) -> np.ndarray:
    """All rows of one component and layer as uint8 `[page, token, head, byte]`, in round `turn`."""
    c = spec.component(component)
    shape = _shape(spec, c, num_pages)
    count = int(np.prod(shape))
    first = _first_word(spec, num_pages, component) + spec.layers_of(c).index(layer) * count
    words = digits(np.arange(first, first + count, dtype=np.int64).reshape(shape))
    tail = head_bytes(c) % WORD
    if tail:
        words[..., -1, :tail] = words[..., -1, (turn * tail + np.arange(tail)) % WORD]
    return words.reshape(*shape[:-1], shape[-1] * WORD)[..., : head_bytes(c)]


def place(spec: PoolSpec, num_pages: int, word: int) -> Place | None:
    """What a word number names."""
    for c in spec.components:
        shape = (len(spec.layers_of(c)), *_shape(spec, c, num_pages))
        at = word - _first_word(spec, num_pages, c.name)
        if 0 <= at < int(np.prod(shape)):
            layer, page, token, head, in_row = (int(i) for i in np.unravel_index(at, shape))
            return Place(c.name, spec.layers_of(c)[layer], page, token, head, in_row)
    return None


def fill_device(pool: DevicePool, turn: int = 0) -> None:
    """Every row of a device pool names itself."""
    for c in pool.spec.components:
        for layer in pool.spec.layers_of(c):
            rows = layer_bytes(pool.spec, pool.num_pages, c.name, layer, turn)
            buffer = pool.buffer(c.name, layer)
            buffer.copy_(torch.from_numpy(rows).reshape(-1).view(c.dtype).view(buffer.shape))


def fill_host(pool: HostBuffers, turn: int = 0) -> None:
    """Every row of a host pool names itself, whatever the layout."""
    for c in pool.spec.components:
        for layer in pool.spec.layers_of(c):
            rows = torch.from_numpy(layer_bytes(pool.spec, pool.num_pages, c.name, layer, turn)).view(c.dtype)
            first = 0
            for view in pool.part_views(c.name, layer):
                view.copy_(rows[..., first : first + view.shape[-1]].unflatten(2, view.shape[2:4]))
                first += view.shape[-1]


def host_image(pool: HostBuffers, component: str, layer: int | None) -> np.ndarray:
    """The bytes of a host pool as `[page, token, head, byte]`."""
    parts = [view.flatten(2, 3).contiguous().view(torch.uint8) for view in pool.part_views(component, layer)]
    return torch.cat(parts, dim=-1).numpy()


def device_image(pool: DevicePool, component: str, layer: int | None) -> np.ndarray:
    """The bytes of a device pool as `[page, token, head, byte]`."""
    return pool.view(component, layer).flatten(2, 3).contiguous().view(torch.uint8).cpu().numpy()


def _shape(spec: PoolSpec, c: Component, num_pages: int) -> tuple[int, int, int, int]:
    """Words of one layer: page, token, head, word."""
    return num_pages, spec.tokens_per_page(c), c.head_count, -(-head_bytes(c) // WORD)


def _first_word(spec: PoolSpec, num_pages: int, component: str) -> int:
    first = 0
    for c in spec.components:
        if c.name == component:
            return first
        first += len(spec.layers_of(c)) * int(np.prod(_shape(spec, c, num_pages)))
    raise KeyError(component)
