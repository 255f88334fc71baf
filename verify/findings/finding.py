"""What a finding says, and how it is told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """
    source    the upstream file and its commit, or the record of a GPU
    evidence  what was computed, a sentence each
    measure   by which commands such a record is made, where there is one
    """

    title: str
    engine: str
    source: str
    cell: str
    claim: str
    evidence: Sequence[str]
    confirmed: bool
    consequence: str
    measure: str = ""
