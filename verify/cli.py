"""The commands behind `make run`, `make report` and `make verify`. Each imports what it needs when it is called."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from verify.bench.report import Content
    from verify.notebooks import Result

OUT = Path("out")


def main(argv: list[str] | None = None) -> int:
    """Exit code: 0, 1 where something was wrong, 2 for a mistake in the arguments."""
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["mutants"]:
        from verify import mutants

        return mutants.main(argv[1:])
    if argv[:1] in (["adapter"], ["check-report"]):
        from verify.adapters import command

        return {"adapter": command.adapter, "check-report": command.check_report}[argv[0]](argv[1:])
    args = _parser().parse_args(argv)
    return args.command(args)


def _parser() -> argparse.ArgumentParser:
    from verify.bench import options

    parser = options.Parser(prog="python -m verify", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    commands.add_parser("mutants", help="how strong the suite is: every built-in fault must be caught")
    commands.add_parser("adapter", help="check an implementation against the golden vectors")
    commands.add_parser("check-report", help="verify the report of an implementation")
    run_parser = commands.add_parser("run", help="execute the notebooks, measure and print the matrix")
    options.add(run_parser)
    run_parser.add_argument(
        "--notebooks", type=Path, nargs="*", metavar="FILE", help="default: all of notebooks/; none if no file follows"
    )
    run_parser.set_defaults(command=run, parser=run_parser)
    report_parser = commands.add_parser("report", help="write the support matrix as a page")
    report_parser.set_defaults(command=report)
    docs_parser = commands.add_parser("docs", help="write the computed parts of README.md anew")
    docs_parser.set_defaults(command=docs)
    for command in (run_parser, report_parser):
        command.add_argument("--out", type=Path, default=OUT, metavar="FOLDER", help="default: %(default)s")
    return parser


def run(args: argparse.Namespace) -> int:
    """Notebooks, then the matrix; results.json and index.html in the output folder."""
    from tqdm import tqdm

    from verify import notebooks
    from verify.bench import measure, options, results
    from verify.bench import report as tables
    from verify.bench.provenance import command_line

    settings = options.settings(args, args.parser)
    args.out.mkdir(parents=True, exist_ok=True)
    books = notebooks.committed() if args.notebooks is None else args.notebooks
    executed = notebooks.execute(books, args.out / "notebooks", env=_for_notebooks(args)) if books else []
    rows = list(tqdm(measure.rows(settings), desc="matrix", total=measure.count_rows(settings), unit="row"))
    content = results.as_json(settings, rows, command_line("verify"))
    results.write(args.out / "results.json", content)
    index = args.out / "index.html"
    index.write_text(_index(content, executed, args.out), encoding="utf-8")
    print(tables.as_text(tables.matrix(content)), *tables.verdicts(content), sep="\n", end="\n\n")
    for book in executed:
        print(f"{book.source.name}: {_outcome(book)}")
    print(", ".join(f"{number} cells {status}" for status, number in tables.counts(content).items()))
    print(f"{index}: this table, and the executed notebooks")
    failed = any(book.error for book in executed) or tables.counts(content)["wrong"]
    return int(bool(failed))


def report(args: argparse.Namespace) -> int:
    """report.html in the output folder, and its counts."""
    from tqdm import tqdm

    from verify import report as support_report

    found = list(tqdm(support_report.entries(), desc="support", total=support_report.count(), unit="cell"))
    args.out.mkdir(parents=True, exist_ok=True)
    target = args.out / "report.html"
    target.write_text(support_report.as_page(found), encoding="utf-8")
    counts = support_report.tally(found)
    for status, number in counts.items():
        print(f"{number:6,} {status}: {support_report.MEANING[status]}")
    print(f"{target}: every cell with its reason")
    return int(counts["fail"] > 0)


def docs(args: argparse.Namespace) -> int:
    """README.md in step with the code."""
    from verify import docs as computed

    computed.README.write_text(computed.rewritten(computed.README.read_text()))
    return 0


def _for_notebooks(args: argparse.Namespace) -> dict[str, str]:
    """What notebooks read from their environment: one model, a number of pages; only what was asked for."""
    chosen = {"MODEL": args.model[0] if args.model else "", "PAGES": str(args.pages or "")}
    return {name: value for name, value in chosen.items() if value}


def _index(content: Content, books: list[Result], out: Path) -> str:
    from verify import page
    from verify.bench import report as tables

    matrix = tables.matrix(content)
    links = [
        f"{page.link(book.html.relative_to(out).as_posix(), book.source.stem)} {page.text(_outcome(book))}"
        for book in books
    ]
    figures = range(matrix.head.index("layout") + 1, len(matrix.head))
    source = content["provenance"]
    state = {None: "", False: "", True: " with changes"}[source["dirty"]]
    return page.page(
        "Host pools on this machine",
        page.paragraph(f"{' '.join(source['command'])}, {source['time']}, commit {source['commit']}{state}", "soft"),
        page.heading("Notebooks, as executed"),
        page.items(links) if links else page.paragraph("None were executed."),
        page.heading("Model pools × layouts × backends × directions"),
        *map(page.paragraph, matrix.title.splitlines()),
        page.table(matrix.head, matrix.body, figures),
        *map(page.paragraph, matrix.notes),
        page.paragraph("Raw samples and provenance:"),
        page.link("results.json", "results.json"),
    )


def _outcome(book: Result) -> str:
    if book.error:
        return f"failed: {book.error}"
    return f"skipped: {book.skipped}" if book.skipped else f"executed in {book.seconds:.1f} s"
