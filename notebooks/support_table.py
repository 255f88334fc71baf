"""Notebook 00: which backend moves which layout of a pool, on which platforms, and why not the others."""

from __future__ import annotations

from book import table

from refimpl import LAYOUTS, PoolSpec, support
from refimpl.support import BACKENDS, DIRECTIONS

PLATFORMS = {"cpu": "CPU", "cuda": "GPU", "emulated": "emulated GPU"}


def support_rows(spec: PoolSpec, profile: str = "reference") -> tuple[list[list[str]], dict[str, str]]:
    """Layout × backend: the platforms on which both directions work, or the letter of a reason; and the reasons."""
    letters: dict[str, str] = {}
    rows = []
    for layout in LAYOUTS:
        row = [layout]
        for backend, reach in BACKENDS.items():
            answers = {p: [support(spec, layout, backend, d, p, profile) for d in DIRECTIONS] for p in reach}
            allowed = [PLATFORMS[p] for p, both in answers.items() if all(both)]
            refused = [a.reason for both in answers.values() for a in both if not a]
            if not allowed:
                letters.setdefault(refused[0], f"({chr(ord('a') + len(letters))})")
            row.append(" ".join(allowed) or letters[refused[0]])
        rows.append(row)
    return rows, {letter: reason for reason, letter in letters.items()}


def show_support(specs: dict[str, PoolSpec]) -> None:
    """The table of every pool, pools with equal tables together; reasons in the words of the first of them."""
    alike: dict[str, list[str]] = {}
    for name, spec in specs.items():
        alike.setdefault(repr(support_rows(spec)[0]), []).append(name)
    for names in alike.values():
        rows, reasons = support_rows(specs[names[0]])
        print(f"pool {', '.join(names)}\n")
        table(["layout", *BACKENDS], rows)
        for letter, reason in reasons.items():
            print(f"{letter} {reason}")
        print()
