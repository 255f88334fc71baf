"""What the bytes of golden vectors say: every word of eight bytes is a number, mixed, that names its place.

The six numbers of a place are packed into 63 bits, mixed one to one, and written in base 251, each digit plus one. So
no two whole words of a case are alike, no byte is 0x00 or 0xFF (the poison), and a word tells where it came from.
A tail of fewer than eight bytes shows that many digits.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass

import numpy as np

WORD, BASE, POISON = 8, 251, 0xFF
SIDE = 255  # layer number of a side state, which has no layer

# What a place is made of and the bits that each part may take, most significant first.
BITS = {"component": 7, "layer": 8, "page": 14, "token": 10, "head": 8, "word": 16}
MASK = 2**63 - 1
ADD, FIRST, SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB

FORMULA = """\
n = component; for (bits, part) in (8, layer), (14, page), (10, token), (8, head), (16, byte / 8): n = n << bits | part
z = (n + 0x9E3779B97F4A7C15) & M                        # M = 2^63 - 1; wrap at 2^64 or not, the mask comes after
z = ((z ^ z >> 30) * 0xBF58476D1CE4E5B9) & M
z = ((z ^ z >> 27) * 0x94D049BB133111EB) & M
z = z ^ z >> 31
value of the byte = z / 251^(byte % 8) % 251 + 1        # whole divisions of unsigned numbers
"""


@dataclass(frozen=True)
class Place:
    """Where a word lies: `page` on the side that was filled, `word` within one head's lanes."""

    component: int
    layer: int
    page: int
    token: int
    head: int
    word: int


def rows(component: int, layer: int, pages: int, tokens: int, heads: int, head_bytes: int) -> np.ndarray:
    """All rows of one component and layer, uint8 `[page, token, head, byte]`.

    >>> rows(0, 0, 1, 1, 1, 10)[0, 0, 0].tolist()
    [17, 178, 185, 200, 24, 191, 43, 25, 132, 111]
    """
    words = -(-head_bytes // WORD)
    shape = (pages, tokens, heads, words)
    number = np.zeros(shape, np.uint64)
    page, token, head, word = np.ogrid[:pages, :tokens, :heads, :words]
    for part, bits in zip((component, layer, page, token, head, word), BITS.values(), strict=True):
        number = number << np.uint64(bits) | np.asarray(part, np.uint64)
    digits = mix(number)[..., None] // np.uint64(BASE) ** np.arange(WORD, dtype=np.uint64) % np.uint64(BASE)
    return (digits + np.uint64(1)).astype(np.uint8).reshape(*shape[:3], words * WORD)[..., :head_bytes]


def place(word: bytes) -> Place | None:
    """The place that eight bytes name, or None where they name none.

    >>> place(rows(3, 1, 9, 5, 2, 24)[8, 4, 1, 16:].tobytes())
    Place(component=3, layer=1, page=8, token=4, head=1, word=2)
    """
    if len(word) != WORD or min(word) == 0 or max(word) > BASE:
        return None
    number = _unmix(sum((byte - 1) * BASE**i for i, byte in enumerate(word)))
    parts = []
    for bits in reversed(BITS.values()):
        parts.append(number & ((1 << bits) - 1))
        number >>= bits
    return None if number else Place(*reversed(parts))


def probe(at: Place, byte: int) -> int:
    """One byte of the payload: byte `byte` of a word."""
    rows_of = rows(at.component, at.layer, at.page + 1, at.token + 1, at.head + 1, (at.word + 1) * WORD)
    return int(rows_of[at.page, at.token, at.head, at.word * WORD + byte])


PROBES = [
    (Place(0, 0, 0, 0, 0, 0), 0),
    (Place(0, 0, 0, 0, 0, 0), 7),
    (Place(1, 2, 3, 4, 5, 6), 1),
    (Place(2, 0, 5, 0, 0, 1055), 7),
    (Place(7, SIDE, 136, 63, 7, 15), 6),
]


def probes() -> list[dict[str, int]]:
    """Places and the bytes there, for a manifest."""
    named = [
        dict(zip((*BITS, "byte"), (*astuple(at), byte), strict=True)) | {"value": probe(at, byte)}
        for at, byte in PROBES
    ]
    return [{**p, "byte": p["word"] * WORD + p["byte"]} for p in named]


def mix(z: np.ndarray) -> np.ndarray:
    mask = np.uint64(MASK)
    z = (z + np.uint64(ADD)) & mask
    z = (z ^ z >> np.uint64(30)) * np.uint64(FIRST) & mask
    z = (z ^ z >> np.uint64(27)) * np.uint64(SECOND) & mask
    return z ^ z >> np.uint64(31)


def _unmix(z: int) -> int:
    z = _unshift(z, 31) * pow(SECOND, -1, MASK + 1) & MASK
    z = _unshift(z, 27) * pow(FIRST, -1, MASK + 1) & MASK
    return _unshift(z, 30) - ADD & MASK


def _unshift(z: int, by: int) -> int:
    """The number that `z` was before it was combined with itself, shifted right."""
    found = z
    while found ^ found >> by != z:
        found = z ^ found >> by
    return found
