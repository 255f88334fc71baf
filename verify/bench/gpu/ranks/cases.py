"""What is measured: pools in some layouts by some backends, and plays: who moves which way at the same time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from refimpl import Refusal, presets, support
from refimpl.support import DIRECTIONS
from verify.bench.gpu.cases import Case

MODELS = ("llama-3.1-8b", "deepseek-v3", "qwen3-next")
LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head", "page_unified")
BACKENDS = ("direct", "kernel", "staged", "auto")


@dataclass(frozen=True)
class Play:
    """Which way each rank moves its bytes; None: it rests."""

    name: str
    directions: tuple[str | None, ...]


@dataclass(frozen=True)
class Task:
    """A pool of a rank in a layout, moved by a backend."""

    case: Case
    layout: str
    backend: str


def plays(ranks: int) -> list[Play]:
    """Each rank alone, all in one direction, and neighbours in opposite ones; each in both directions.

    >>> [play.directions for play in plays(2) if play.name != "alone"]
    [('backup', 'backup'), ('load', 'load'), ('backup', 'load'), ('load', 'backup')]
    """
    alone = [
        Play("alone", tuple(direction if rank == at else None for at in range(ranks)))
        for direction in DIRECTIONS
        for rank in range(ranks)
    ]
    same = [Play("same", (direction,) * ranks) for direction in DIRECTIONS]
    turns = [Play("opposite", tuple(DIRECTIONS[(rank + first) % 2] for rank in range(ranks))) for first in range(2)]
    return [*alone, *same, *(turns if ranks > 1 else [])]


def tasks(models: Sequence[str], layouts: Sequence[str], backends: Sequence[str], ranks: int) -> Iterator[Task]:
    """Pools of a tensor-parallel rank, as far as the support table allows layout and backend."""
    for model in models:
        for spec in presets.model(model, tp=ranks).values():
            yield from tasks_of(Case(model, spec), layouts, backends)


def tasks_of(case: Case, layouts: Sequence[str], backends: Sequence[str]) -> Iterator[Task]:
    """None of a pool without bytes."""
    for layout in layouts if case.spec.page_bytes else ():
        for backend in backends:
            if not isinstance(support(case.spec, layout, backend, "load", "cuda"), Refusal):
                yield Task(case, layout, backend)
