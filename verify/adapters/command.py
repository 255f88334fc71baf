"""`python -m verify adapter` and `python -m verify check-report`."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence

from verify.adapters import isolated, report, runner, suite
from verify.adapters.protocol import SHIPPED, VARIABLE, Loaded, NoAdapter, load
from verify.arguments import Parser, file, folder, positive

SECONDS = 60  # a case takes milliseconds, unless something is compiled first
SHOWN = 10  # failures that are printed: the first of each pool, layout and direction
REFERENCE = "ours-torch"  # whose report `--report` writes where no adapter is named


def adapter(argv: Sequence[str]) -> int:
    """Run the golden vectors against an implementation.

    Exit code: 0, 1 where it is wrong, 2 without an adapter, 130 where it was interrupted.
    """
    parser = Parser(prog="python -m verify adapter", description=adapter.__doc__)
    what = f"module:object, or {', '.join(SHIPPED)}; default: the environment's {VARIABLE}"
    parser.add_argument("name", nargs="?", metavar="ADAPTER", help=what)
    parser.add_argument("--adapter", metavar="ADAPTER", help="the same")
    parser.add_argument("--family", nargs="+", choices=suite.families(), metavar="FAMILY", help="default: all of them")
    parser.add_argument(
        "--out", type=folder, metavar="FOLDER", help="write report.json, conformance.html and badge.svg"
    )
    parser.add_argument("--report", type=folder, metavar="FOLDER", help=f"likewise; without any ADAPTER of {REFERENCE}")
    limit = f"a case that takes longer has failed; default: {SECONDS}"
    parser.add_argument("--seconds-a-case", type=positive, default=SECONDS, metavar="N", help=limit)
    parser.add_argument("--same-process", action="store_true", help="for debuggers; a crash ends it, and no time does")
    options = parser.parse_args(argv)
    groups, out = [*suite.groups(options.family)], options.out or options.report
    name = options.name or options.adapter or os.environ.get(VARIABLE) or (REFERENCE if options.report else None)
    try:
        loaded, results = _results(name, groups, None if options.same_process else options.seconds_a_case)
    except NoAdapter as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt as error:
        print(f"interrupted {error}" if str(error) else "interrupted where no case was running", file=sys.stderr)
        return 130
    stale = runner.stale(loaded, [outcome for _, _, outcome in results])
    content = report.as_json(loaded, results, stale)
    failures = {outcome.id: outcome.message for _, _, outcome in results if outcome.status == "failed"}
    not_run = sum(len(group.tests) for group in groups) - len(results)
    versions = (f"{name} {version}" for name, version in loaded.versions.items())
    print(f"{loaded.name} on {loaded.device}: {', '.join(versions) or 'no versions given'}")
    for line in (*_shown(failures, out is not None), *content["diagnosis"], *(f"stale: {line}" for line in stale)):
        print(line)
    counts = ", ".join(f"{number} {status}" for status, number in content["counts"].items())
    print(f"{loaded.name}: {counts}" + (f"; {not_run} not run, the process ended too often" if not_run else ""))
    if out:
        report.write(out, content)
        print(f"suite {content['suite']['version']}, {report.mutation_score(content)}")
        print(f"{out / 'conformance.html'}: the same as a page; report.json can be submitted")
    if not failures and not report.moved(content):
        print("nothing was moved, so nothing is shown")
        return 1
    return int(bool(failures or stale or not_run))


def _results(name: str | None, groups: Sequence[suite.Group], seconds: int | None) -> tuple[Loaded, report.Results]:
    """Without a limit in this very process."""
    if seconds is None or not isolated.can_isolate():
        loaded = load(name)
        return loaded, [*runner.run(loaded, groups)]
    child = isolated.Isolated(name, seconds)
    return child.adapter, [*child.run(groups)]


def _shown(failures: dict[str, str], all_are_written: bool) -> Iterator[str]:
    """The first failures, and how many more there are."""
    first = {case.rsplit("/", 1)[0]: message for case, message in reversed(failures.items())}
    shown = [*reversed(first.values())][:SHOWN]
    yield from shown
    if len(failures) > len(shown):
        where = "" if all_are_written else "; --out FOLDER writes down all of them"
        yield f"… and {len(failures) - len(shown)} more{where}"


def check_report(argv: Sequence[str]) -> int:
    """Verify a submitted report: whole, of these vectors, every byte right as it claims. A digest is no signature.

    Exit code: 0, 1 where something is wrong with it, 2 where that cannot be told.
    """
    parser = Parser(prog="python -m verify check-report", description=check_report.__doc__)
    parser.add_argument("file", type=file, metavar="FILE")
    options = parser.parse_args(argv)
    try:
        found = [*report.problems(options.file)]
    except ModuleNotFoundError as error:
        print(f"a report is checked with {error.name}, which is not installed", file=sys.stderr)
        return 2
    print(*found[:SHOWN], sep="\n", end="\n" if found else "")
    print(f"{options.file}: " + (f"{len(found)} problems" if found else f"verified, {report.coverage(options.file)}"))
    if partly := [] if found else [*report.partly_declined(options.file)]:
        more = [f"and {len(partly) - SHOWN} more"] if len(partly) > SHOWN else []
        print("declined for some pools of a family only:", *partly[:SHOWN], *more, sep="\n  ")
    return int(bool(found))
