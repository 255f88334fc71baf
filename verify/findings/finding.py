"""What a finding says, and how it is told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """`source` is the upstream file and its commit; `evidence` what was computed, a sentence each."""

    title: str
    engine: str
    source: str
    cell: str
    claim: str
    evidence: Sequence[str]
    confirmed: bool
    consequence: str
