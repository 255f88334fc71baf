"""python -m verify.bench.gpu.sglang: what SGLang's own choice reaches here, in every row of its published table.

Names are those of SGLang 0.5.23. Streams are held, as in the rest of this benchmark.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from refimpl.devices import absent
from verify.adapters import sglang_pieces
from verify.adapters.protocol import Json
from verify.arena import Arena
from verify.arguments import Parser, new_file
from verify.bench import files
from verify.bench.gpu import ceilings, results
from verify.bench.gpu.cases import PAYLOAD, Portion, portions
from verify.bench.gpu.clock import Clock, clock
from verify.bench.gpu.measure import Bench, Effort, memory_needed
from verify.bench.gpu.sglang.calls import PIECES
from verify.bench.gpu.sglang.measure import Row, rows, wanted
from verify.bench.provenance import command_line, provenance

SEED = 0


def run(
    out: Path,
    ticking: Clock,
    portion: Portion,
    figures: Sequence[Json],
    effort: Effort,
    sizes: tuple[int, ...] = ceilings.SIZES,
    commit: str | None = None,
) -> Json:
    """Measure every figure; the file (see `data/schemas/sglang_rates.schema.json`) is written anew after each."""
    arena = Arena(max(ceilings.memory_needed(sizes), memory_needed([portion])))
    try:
        with ticking.session():
            limits = [results.plain(asdict(limit)) for limit in ceilings.measure(ticking, arena, sizes)]
            content: Json = {
                "provenance": provenance(command_line("verify.bench.gpu.sglang"), SEED, commit)
                | {"gpu": results.gpu()},
                "versions": sglang_pieces.versions(PIECES),
                "ceilings": limits,
                "rows": [],
            }
            bench = Bench(ticking, arena, effort, SEED, 0, limits)
            for row in rows(bench, portion, figures):
                print(line(row), flush=True)
                content["rows"].append(results.plain(asdict(row)))
                files.write(out, results.as_text(content))
    finally:
        arena.close()
    return content


def line(row: Row) -> str:
    if row.timing is None:
        said = f"{row.status}: {row.reason}"
    else:
        held = "" if row.held in (True, None) else ", not held"
        said = f"{row.gb_per_s:.2f} GB/s, {row.fraction:.4f}, {len(row.timing.samples_s)} samples{held}"
    return f"{row.case}, {row.layout}, {row.direction}, {row.path}{'' if row.chosen else ' (not chosen)'}: {said}"


def why_not_here() -> str | None:
    if why := next(filter(None, map(sglang_pieces.why_absent, PIECES)), None):
        return f"SGLang 0.5.23 is needed: {why}"
    return absent("cuda")


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0, 1 where a function raised or moved other bytes, 2 where nothing can be measured."""
    parser = Parser(prog="python -m verify.bench.gpu.sglang", description=(__doc__ or "").splitlines()[0])
    picked_up = f"beside a bench.json, verdicts on that pick it up by the name {results.SGLANG_HERE}"
    parser.add_argument(
        "--out", type=new_file, required=True, metavar="FILE.json", help=f"versions, and all samples; {picked_up}"
    )
    parser.add_argument("--commit", metavar="SHA", help="of a clean tree, where there is no git to ask")
    options = parser.parse_args(argv)
    if why := why_not_here():
        print(why, file=sys.stderr)
        return 2
    figures = wanted(results.sglang()["figures"])
    content = run(options.out, clock("cuda"), portions(PAYLOAD)["sglang"], figures, Effort(), commit=options.commit)
    return int(any(row["status"] != "measured" for row in content["rows"]))


if __name__ == "__main__":
    sys.exit(main())
