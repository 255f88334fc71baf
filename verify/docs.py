"""The computed parts of README.md: `python -m verify docs` writes them, a test holds them in step with the code."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from refimpl import LAYOUTS, PoolSpec, support
from refimpl.support import SGLANG_PAIRS
from verify.arguments import Parser
from verify.toys import TOYS

README = Path(__file__).resolve().parents[1] / "README.md"
MARKED = re.compile(r"(<!-- (\w+): computed -->\n).*?(<!-- end -->)", re.S)

# One toy stands for each kind of pool.
KINDS = {
    "MHA": "mha",
    "MHA, V narrower than K": "mha-uneven",
    "MHA, K only": "mha-k-only",
    "MHA, quantised, with scales": "mha-quantised",
    "MLA": "mla",
    "MLA, packed FP8 rows": "mla-packed",
    "DSA indexer": "dsa",
    "Mamba states": "mamba",
    "DeepSeek V4 pages": "v4-c4",
    "DeepSeek V4 state rings": "v4-state",
}


def support_table() -> str:
    """Pool kinds × layouts: what the reference allows, and the backends that SGLang's own pools accept."""
    lines = ["| pool | " + " | ".join(f"`{layout}`" for layout in LAYOUTS) + " |", "|---" * (len(LAYOUTS) + 1) + "|"]
    for kind, toy in KINDS.items():
        spec = TOYS[toy](4)
        lines.append(f"| {kind} | " + " | ".join(_cell(spec, layout) for layout in LAYOUTS) + " |")
    return "\n".join(lines) + "\n"


def _cell(spec: PoolSpec, layout: str) -> str:
    """● allowed, · refused; K and D where SGLang has a transfer for its backend `kernel` or `direct`."""
    if not support(spec, layout, "torch", "backup"):
        return "·"
    theirs = [b[0].upper() for b in ("kernel", "direct") if _sglang_has(spec, layout, b)]
    return " ".join(["●", *theirs])


def _sglang_has(spec: PoolSpec, layout: str, backend: str) -> bool:
    """The pair, whatever the row width: toy rows are odd on purpose, and alignment is another question."""
    return (layout, backend) in SGLANG_PAIRS.get(spec.family, set())


COMPUTED = {"support": support_table}


def rewritten(text: str) -> str:
    """README with every computed part made anew."""
    return MARKED.sub(lambda part: part[1] + COMPUTED[part[2]]() + part[3], text)


def main(argv: Sequence[str]) -> int:
    """Write the computed parts of README.md anew."""
    Parser(prog="python -m verify docs", description=main.__doc__).parse_args(argv)
    README.write_text(rewritten(README.read_text(encoding="utf-8")), encoding="utf-8")
    return 0
