"""python -m verify.bench.gpu: measure the GPU backends portion by portion, print tables and verdicts."""

from __future__ import annotations

import argparse
import math
import sys
import time
from dataclasses import asdict
from pathlib import Path

from refimpl import LAYOUTS, presets
from verify import arguments
from verify.arena import Arena
from verify.bench import files, options
from verify.bench.gpu import calls, cases, ceilings, measure, report, targets
from verify.bench.gpu.clock import clock
from verify.bench.gpu.measure import Bench, Effort
from verify.bench.gpu.results import FORM, Content, Results, plain, sglang
from verify.bench.provenance import command_line
from verify.bench.report import as_text

NAMES = tuple(cases.portions(cases.MIB))
WRITE_EVERY_S = 15


def main(argv: list[str] | None = None) -> int:
    """Exit code 1 where a cell is wrong or failed, 2 where nothing can be measured or read."""
    parser = _parser()
    args = parser.parse_args(argv)
    if (args.resume or args.report_only) and not args.out:
        parser.error(f"{'--report-only' if args.report_only else '--resume'} needs a file: --out FILE.json")
    try:
        figures = sglang(args.out)
        content = files.read(args.out, FORM)[1] if args.report_only else _measured(args, parser)
    except files.NoResults as error:
        parser.error(str(error))
    for name in dict.fromkeys(row["portion"] for row in content["rows"]):
        print(as_text(report.table(content, name)), end="\n\n")
    if all(session["settings"]["platform"] == "cuda" for session in content["sessions"]):
        print("Targets, and how many figures reach them:", *targets.verdicts(content, figures), sep="\n")
    else:
        print("Targets are those of a GPU: nothing of this is judged.")
    return int(any(cell["status"] in ("wrong", "failed") for row in content["rows"] for cell in row["cells"]))


def _measured(args: argparse.Namespace, parser: arguments.Parser) -> Content:
    """What was asked for; before it begins, the program ends where that cannot be had."""
    known = cases.portions(args.payload, args.models, args.layouts, args.page_sizes)
    portions = {name: portion for name, portion in known.items() if name in args.portion}
    if args.out and (why := arguments.why_not_written(args.out)):
        parser.error(f"argument --out: nothing can be written to '{args.out}': {why}")
    options.require_platform(parser, args.platform)
    of_a_page = max(case.spec.page_bytes for portion in portions.values() for case in portion.cases)
    way_out = "ask for a smaller --payload"
    options.require_memory(parser, memory_needed(portions), way_out, of_a_page, "page in --page-sizes")
    results, effort = Results(args.out, args.resume), Effort(seconds=args.seconds)
    run(results, portions, args.platform, args.seed, effort, commit=args.commit, budget_s=args.budget)
    return results.content


def memory_needed(
    portions: dict[str, cases.Portion],
    sizes: tuple[int, ...] = ceilings.SIZES,
    counts: tuple[int, ...] = calls.COUNTS,
) -> int:
    """Bytes of host memory for a session: one stretch serves copies, single calls and pools in turn."""
    return max(ceilings.memory_needed(sizes), calls.memory_needed(counts), measure.memory_needed([*portions.values()]))


def run(
    results: Results,
    portions: dict[str, cases.Portion],
    platform: str,
    seed: int,
    effort: Effort,
    sizes: tuple[int, ...] = ceilings.SIZES,
    counts: tuple[int, ...] = calls.COUNTS,
    commit: str | None = None,
    budget_s: float = math.inf,
) -> None:
    """Measure a session of portions into `results`, which are written now and then, and however it ends.

    budget_s  seconds after which no row is begun; each portion has an equal share of what those before it have left
    """
    results.require(platform)
    deadline = time.monotonic() + budget_s
    ticking = clock(platform)
    arena = Arena(memory_needed(portions, sizes, counts))
    try:
        with ticking.session():
            limits = ceilings.measure(ticking, arena, sizes)
            settings = {"platform": platform, "seed": seed, "portions": list(portions), "effort": asdict(effort)}
            single = calls.measure(ticking, arena, counts)
            session = results.begin(command_line("verify.bench.gpu"), settings, limits, single, commit)
            bench = Bench(ticking, arena, effort, seed, session, [plain(asdict(limit)) for limit in limits])
            for left, (name, portion) in zip(range(len(portions), 0, -1), portions.items(), strict=True):
                now = time.monotonic()
                _measure(results, bench, name, portion, now + (deadline - now) / left)
    finally:
        results.write()
        arena.close()


def _measure(results: Results, bench: Bench, name: str, portion: cases.Portion, deadline: float) -> None:
    begin = written = time.monotonic()
    if begin > deadline:
        print(f"{name}: not begun, the budget is spent", file=sys.stderr)
        return
    for row in measure.rows(bench, name, portion, results.done()):
        results.add(row)
        print(f"{time.monotonic() - begin:6.1f} s  {name}: {report.line(row)}", file=sys.stderr, flush=True)
        if time.monotonic() - written > WRITE_EVERY_S:
            results.write()
            written = time.monotonic()
        if time.monotonic() > deadline:
            print(f"{name}: not finished, the budget is spent", file=sys.stderr)
            break
    results.write()


def _parser() -> arguments.Parser:
    parser = arguments.Parser(prog="python -m verify.bench.gpu", description=__doc__)
    parser.add_argument(
        "--portion",
        type=arguments.one_of("portion", NAMES),
        default=("core",),
        metavar="P,P",
        help=f"of {arguments.listed(NAMES)}; default: core",
    )
    parser.add_argument(
        "--models",
        type=arguments.one_of("model", presets.MODELS),
        default=cases.MODELS,
        metavar="M,M",
        help=f"default: {arguments.listed(cases.MODELS)}",
    )
    parser.add_argument(
        "--layouts", type=arguments.one_of("layout", LAYOUTS), default=LAYOUTS, metavar="L,L", help="default: all"
    )
    parser.add_argument(
        "--page-sizes",
        type=lambda text: tuple(map(arguments.positive, text.split(","))),
        default=cases.PAGE_SIZES,
        metavar="N,N",
        help=f"tokens a page, beside those of the presets; default: {arguments.listed(map(str, cases.PAGE_SIZES))}",
    )
    parser.add_argument(
        "--payload",
        type=arguments.nbytes,
        default=cases.PAYLOAD,
        metavar="SIZE",
        help="bytes that move, in whole pages; 256MiB if not given",
    )
    parser.add_argument(
        "--seconds",
        type=arguments.seconds,
        default=Effort().seconds,
        help="device time of a cell (default: %(default)s)",
    )
    parser.add_argument(
        "--budget",
        type=arguments.seconds,
        default=math.inf,
        metavar="S",
        help="seconds after which no row is begun, shared out between portions",
    )
    parser.add_argument("--platform", choices=("cuda", "emulated"), default="cuda", help="default: %(default)s")
    parser.add_argument("--seed", type=arguments.seed, default=0, help="of page choice and fill (default: %(default)s)")
    parser.add_argument("--commit", metavar="SHA", help="of a clean tree, where there is no git to ask")
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="write all samples to this file")
    parser.add_argument(
        "--resume", action="store_true", help="keep what the file holds, if it is there; measure the rest"
    )
    parser.add_argument("--report-only", action="store_true", help="measure nothing, report what the file holds")
    return parser


if __name__ == "__main__":
    sys.exit(main())
