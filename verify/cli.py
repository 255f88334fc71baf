"""The commands behind `make run`, `make report` and `make verify`. Each imports what it needs when it is called."""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from verify.bench.report import Content, Table
    from verify.notebooks import Result

OUT = Path("out")


def main(argv: list[str] | None = None) -> int:
    """Exit code: 0, 1 where something was wrong, 2 for a mistake in the arguments."""
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["mutants"]:
        from verify import mutants

        return mutants.main(argv[1:])
    if argv[:1] == ["findings"]:
        from verify import findings

        return findings.main(argv[1:])
    if argv[:1] in (["--adapter"], ["--report"]):
        argv = ["adapter", *argv]
    if argv[:1] in (["adapter"], ["check-report"]):
        from verify.adapters import command

        return {"adapter": command.adapter, "check-report": command.check_report}[argv[0]](argv[1:])
    args = _parser().parse_args(argv)
    return args.command(args)


def _parser() -> argparse.ArgumentParser:
    from refimpl import presets
    from verify.bench import compare, options

    parser = options.Parser(prog="python -m verify", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    commands.add_parser("mutants", help="how strong the suite is: every built-in fault must be caught")
    commands.add_parser("adapter", help="check an implementation against the golden vectors (also: --report FOLDER)")
    commands.add_parser("check-report", help="verify the report of an implementation")
    commands.add_parser("findings", help="what was found in other projects, worked out again")
    run_parser = commands.add_parser("run", help="execute the notebooks, measure and print the matrix")
    options.add(run_parser)
    run_parser.add_argument(
        "--budget", type=options.positive, default=240, metavar="S", help="seconds to measure a GPU (default: 240)"
    )
    run_parser.add_argument(
        "--notebooks", type=Path, nargs="*", metavar="FILE", help="default: all of notebooks/; none if no file follows"
    )
    run_parser.set_defaults(command=run, parser=run_parser)
    report_parser = commands.add_parser("report", help="write the support matrix as a page")
    report_parser.set_defaults(command=report)
    compare_parser = commands.add_parser("compare", help="two result files side by side: devices, or commits")
    compare.add(compare_parser)
    compare_parser.set_defaults(command=compare.command)
    dictionary_parser = commands.add_parser(
        "dictionary", help="what other engines call the same bytes, and false friends"
    )
    dictionary_parser.set_defaults(command=dictionary)
    audit_parser = commands.add_parser("audit", help="the paths that other engines' rules take, and what each costs")
    audit_parser.add_argument("--model", choices=presets.MODELS, metavar="M", help=options.listed(presets.MODELS))
    audit_parser.add_argument("--page-size", type=options.positive, metavar="P", help="tokens a page")
    audit_parser.set_defaults(command=audit, parser=audit_parser)
    docs_parser = commands.add_parser("docs", help="write the computed parts of README.md anew")
    docs_parser.set_defaults(command=docs)
    for command in (run_parser, report_parser):
        command.add_argument("--out", type=Path, default=OUT, metavar="FOLDER", help="default: %(default)s")
    return parser


def run(args: argparse.Namespace) -> int:
    """The GPU if there is one, notebooks, the matrix; index.html and result files in the output folder."""
    from tqdm import tqdm

    from verify import notebooks
    from verify.bench import measure, options, results
    from verify.bench import report as tables
    from verify.bench.provenance import command_line

    settings = options.settings(args, args.parser)
    args.out.mkdir(parents=True, exist_ok=True)
    books = notebooks.committed() if args.notebooks is None else args.notebooks
    device = _device(args)
    executed = notebooks.execute(books, args.out / "notebooks", env=_for_notebooks(args, device.path)) if books else []
    rows = list(tqdm(measure.rows(settings), desc="matrix", total=measure.count_rows(settings), unit="row"))
    content = results.as_json(settings, rows, command_line("verify"))
    results.write(args.out / "results.json", content)
    index = args.out / "index.html"
    index.write_text(_index(content, executed, device, args.out), encoding="utf-8")
    print(tables.as_text(tables.matrix(content)), *tables.verdicts(content), sep="\n", end="\n\n")
    for book in executed:
        print(f"{book.source.name}: {_outcome(book)}")
    print(", ".join(f"{number} cells {status}" for status, number in tables.counts(content).items()))
    print(device.label, *device.advice, sep="\n")
    print(f"{index}: all this, and the executed notebooks")
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


def dictionary(args: argparse.Namespace) -> int:
    """Names of other engines, ours for the same bytes, and pairs that look alike."""
    from verify.dictionary import tables

    print(*tables.text(), sep="\n\n")
    return 0


def audit(args: argparse.Namespace) -> int:
    """Every choice with its rule and cost; of what was measured, or of all pools of a model."""
    import json

    from verify.audit import costs
    from verify.bench.gpu import results

    content = json.loads(costs.RESULTS.read_text(encoding="utf-8"))
    try:
        found = costs.rows(content, results.sglang(), args.model, args.page_size)
    except ValueError as mistake:
        return args.parser.error(str(mistake))
    if not found:
        return args.parser.error(f"nothing was measured with pages of {args.page_size}; name a model")
    print(*costs.text(found), sep="\n\n")
    return 0


def docs(args: argparse.Namespace) -> int:
    """README.md in step with the code."""
    from verify import docs as computed

    computed.README.write_text(computed.rewritten(computed.README.read_text()))
    return 0


@dataclass(frozen=True)
class Device:
    """What a GPU was found to do, this machine's or the committed one, and what follows for the models asked for."""

    path: Path
    content: Content
    label: str
    advice: list[str]


def _device(args: argparse.Namespace) -> Device:
    """Measures this machine's GPU, if there is one, into bench.json of the output folder."""
    import torch

    from verify.bench import options
    from verify.bench.gpu import here, recommend

    path, models = here.COMMITTED, args.model or options.DEFAULT_MODELS[:1]
    if torch.cuda.is_available():
        path = args.out.absolute() / "bench.json"
        payload = args.payload or here.PAYLOAD
        print(f"measuring this GPU, about {args.budget} s", file=sys.stderr)
        here.measure(path, models, args.page_size, payload, args.layouts, args.budget)
    path, content = here.shown(str(path))
    advice = []
    for model in models:
        rows = recommend.rows_of(content, model, args.page_size, args.layouts)
        advice += [f"{model}, {sentence}" for sentence in recommend.advice(content, rows)] or [
            f"{model}: not among these results"
        ]
    return Device(path, content, here.label(path, content), advice)


def _for_notebooks(args: argparse.Namespace, results: Path) -> dict[str, str]:
    """The parameters that first cells of notebooks read (`notebooks.PARAMETERS`): what was asked for, one model."""
    from refimpl import LAYOUTS

    chosen = {
        "MODEL": args.model[0] if args.model else "",
        "PAGE_SIZE": args.page_size,
        "PAGES": args.pages,
        "PAYLOAD": args.payload,
        "LAYOUTS": ",".join(args.layouts) if args.layouts != LAYOUTS else "",
        "RESULTS": results,
    }
    return {name: str(value) for name, value in chosen.items() if value}


def _index(content: Content, books: list[Result], device: Device, out: Path) -> str:
    from verify import page
    from verify.bench import report as tables

    matrix = tables.matrix(content)
    links = [
        f"{page.link(book.html.relative_to(out).as_posix(), book.source.stem)} {page.text(_outcome(book))}"
        for book in books
    ]
    source = content["provenance"]
    state = {None: "", False: "", True: " with changes"}[source["dirty"]]
    return page.page(
        "Host pools on this machine",
        page.paragraph(f"{' '.join(source['command'])}, {source['time']}, commit {source['commit']}{state}", "soft"),
        page.heading("What to take"),
        *_device_sections(device, out),
        page.heading("Notebooks, as executed"),
        page.items(links) if links else page.paragraph("None were executed."),
        page.heading("Model pools × layouts × backends × directions, on this CPU"),
        *_table(matrix, matrix.head.index("layout") + 1),
        page.paragraph("Raw samples and provenance:"),
        page.link("results.json", "results.json"),
    )


def _device_sections(device: Device, out: Path) -> list[str]:
    """The advice, the tables that it rests on, and the file to send back."""
    from verify import page
    from verify.bench.gpu import report as gpu_tables
    from verify.bench.noise import RULE

    sections = [
        page.paragraph(device.label),
        page.items([page.text(sentence) for sentence in device.advice]),
        page.paragraph(f"Noise: {RULE}.", "soft"),
    ]
    for portion in dict.fromkeys(row["portion"] for row in device.content["rows"]):
        table = gpu_tables.table(device.content, portion)
        sections.append(page.details(page.text(portion), "\n".join(_table(table, len(gpu_tables.NAMES)))))
    if device.path.parent == out.absolute():
        name = device.path.name
        sections.append(
            f"<p>{page.link(name, name)}: raw samples and provenance of this GPU. Sent back, it has its place in "
            f"<code>data/results/</code>; <code>make compare A= B=</code> sets it beside another one.</p>"
        )
    return sections


def _table(table: Table, names: int) -> list[str]:
    """A table for a terminal as HTML; all but its first columns are figures."""
    from verify import page

    figures = range(names, len(table.head))
    texts = [*map(page.paragraph, table.title.splitlines()), page.table(table.head, table.body, figures)]
    return texts + [page.paragraph(note) for note in table.notes]


def _outcome(book: Result) -> str:
    if book.error:
        return f"failed: {book.error}"
    return f"skipped: {book.skipped}" if book.skipped else f"executed in {book.seconds:.1f} s"
