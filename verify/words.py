"""Prefixes written as words, a letter for each page of four tokens: "abc" is three pages."""

from __future__ import annotations

from refimpl.radix import Node
from verify.serving import Serving

P = 4


def pages(word: str) -> list[int]:
    """Four tokens a letter. Letters agree in the first two, so prefixes part in the middle of a page."""
    return [token for letter in word for token in (0, 0, ord(letter), ord(letter))]


def word(node: Node) -> str:
    return "".join(map(chr, node.key[3::P]))


def saved(server: Serving, *words: str) -> None:
    """Insert prefixes; their backups have arrived."""
    for each in words:
        assert server.insert(pages(each))
    server.controller.start_writing()
    assert not any(ack.error for ack in server.check(wait=True))
