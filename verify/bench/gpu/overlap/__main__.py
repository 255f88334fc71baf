"""python -m verify.bench.gpu.overlap: prefills whose prefix is loaded meanwhile, before, or computed again."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import torch

from verify.arena import Arena
from verify.arguments import Parser, new_file, seconds, seed
from verify.bench import files, options
from verify.bench.gpu import ceilings
from verify.bench.gpu.clock import clock
from verify.bench.gpu.overlap.cases import TOYS, WORKLOADS, Workload
from verify.bench.gpu.overlap.measure import SAMPLES, TRIES, Bench, measure
from verify.bench.gpu.results import as_text, gpu, plain
from verify.bench.provenance import command_line, provenance

SCHEMA = files.SCHEMAS / "overlap.schema.json"
SECONDS = 125.0


def run(
    platform: str,
    workloads: Sequence[Workload],
    seed: int = 0,
    seconds: float = SECONDS,
    commit: str | None = None,
    sizes: Sequence[int] = ceilings.SIZES,
) -> Iterator[dict[str, Any]]:
    """The content of a result file (see `data/schemas/overlap.schema.json`) after each workload, so far."""
    until = time.monotonic() + seconds
    ticking = clock(platform)
    arena = Arena(memory_needed(workloads, sizes))
    settings = {"platform": platform, "seed": seed, "seconds": seconds, "samples": SAMPLES}
    shapes = {workload.model: asdict(workload.shape) for workload in workloads}
    content: dict[str, Any] = {
        "provenance": provenance(command_line("verify.bench.gpu.overlap"), seed, commit) | {"gpu": gpu()},
        "settings": settings | {"shapes": shapes},
        "recompute": [],
        "rows": [],
    }
    try:
        with ticking.session(), torch.no_grad():
            content["ceilings"] = [asdict(limit) for limit in ceilings.measure(ticking, arena, sizes)]
            bench = Bench(ticking, arena, seed, until, TRIES if platform == "cuda" else 1)
            for workload in workloads:
                rows, recomputed = measure(bench, workload)
                content["rows"] += map(asdict, rows)
                content["recompute"] += map(asdict, recomputed)
                yield plain(content)
    finally:
        arena.close()


def memory_needed(workloads: Sequence[Workload], sizes: Sequence[int] = ceilings.SIZES) -> int:
    """Bytes of host memory: one stretch serves copies and pools in turn."""
    return max(ceilings.memory_needed(sizes), *(workload.memory_needed() for workload in workloads))


def summary(content: dict[str, Any]) -> Iterator[str]:
    """A line for each cell: milliseconds of the step by layer, all layers first, and with a resident prefix."""
    for row in content["rows"]:
        resident = _milliseconds(row["resident"])
        name = f"{row['model']}, {row['prefix_tokens']} + {row['new_tokens']} tokens"
        for cell in row["cells"]:
            how = f"{name}, {cell['layout']}, {cell['backend']}"
            figures = (_milliseconds(cell[key]) for key in ("loading", "layerwise", "all_first"))
            parts = zip(("loading", "by layer", "all first", "resident"), (*figures, resident), strict=True)
            told = cell["reason"] or ", ".join(f"{what} {figure}" for what, figure in parts)
            yield f"{how}: {told}"
    for done in content["recompute"]:
        yield f"{done['model']}, {done['tokens']} tokens from nothing: {done['reason'] or _milliseconds(done)}"


def _milliseconds(timeline: dict[str, Any] | None) -> str:
    return f"{1e3 * timeline['timing']['median_s']:.2f} ms" if timeline else "-"


def main(argv: list[str] | None = None) -> int:
    """Exit code 1 where a cell is wrong or failed, 2 where nothing can be measured."""
    parser = _parser()
    args = parser.parse_args(argv)
    workloads = WORKLOADS if args.platform == "cuda" else TOYS[args.platform]
    options.require_platform(parser, args.platform)
    options.require_memory(parser, memory_needed(workloads), "end what else takes some")
    content: dict[str, Any] = {}
    for content in run(args.platform, workloads, args.seed, args.seconds, args.commit):
        if args.out:
            files.write(args.out, as_text(content))
    print(*summary(content), sep="\n")
    found = [cell["status"] for row in content["rows"] for cell in row["cells"]]
    found += [done["status"] for done in content["recompute"]]
    return int(any(status in ("wrong", "failed") for status in found))


def _parser() -> Parser:
    parser = Parser(prog="python -m verify.bench.gpu.overlap", description=__doc__)
    parser.add_argument("--out", type=new_file, metavar="FILE.json", help="write all samples to this file")
    parser.add_argument(
        "--seconds", type=seconds, default=SECONDS, help="what is not begun by then is left out (default: %(default)s)"
    )
    parser.add_argument("--platform", choices=("cuda", *TOYS), default="cuda", help="default: %(default)s")
    parser.add_argument("--seed", type=seed, default=0, help="of weights, rows and page choice (default: %(default)s)")
    parser.add_argument("--commit", metavar="SHA", help="of a clean tree, where there is no git to ask")
    return parser


if __name__ == "__main__":
    sys.exit(main())
