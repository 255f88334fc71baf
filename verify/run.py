"""`make run`: the GPU if there is one, the notebooks, and the matrix on this CPU; a page with all of it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import torch
from tqdm import tqdm

from refimpl import LAYOUTS, PoolSpec, Refusal, presets, support
from verify import notebooks, page
from verify.arguments import Parser, folder, listed, positive
from verify.bench import measure, options, results
from verify.bench import report as tables
from verify.bench.files import NoResults
from verify.bench.gpu import here, nearest, recommend
from verify.bench.gpu import report as gpu_tables
from verify.bench.gpu.cases import PAYLOAD
from verify.bench.noise import RULE
from verify.bench.provenance import command_line
from verify.bench.report import Content, Table
from verify.notebooks import Result


def main(argv: Sequence[str]) -> int:
    """Measure, execute, print; index.html and result files in the output folder. Exit code 1 if something is wrong."""
    asking = parser()
    args = asking.parse_args(argv)
    settings = options.settings(args, asking)
    books = notebooks.committed() if args.notebooks is None else args.notebooks
    try:
        device = _device(args)
    except NoResults as none:
        asking.error(str(none))
    parameters = for_notebooks(args, device.path.parent)
    executed = notebooks.execute(books, args.out / "notebooks", env=parameters) if books else []
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


def parser() -> Parser:
    found = Parser(prog="python -m verify run", description=__doc__)
    options.add(found)
    found.add_argument(
        "--budget", type=positive, default=here.BUDGET_S, metavar="S", help="to measure a GPU (default: %(default)s s)"
    )
    found.add_argument(
        "--notebooks",
        type=notebooks.notebook,
        nargs="*",
        metavar="FILE",
        help="default: all of notebooks/; none if no file follows",
    )
    found.add_argument("--out", type=folder, default="out", metavar="FOLDER", help="default: %(default)s")
    return found


@dataclass(frozen=True)
class Device:
    """What a GPU was found to do, this machine's or the committed one, and what follows for the models asked for."""

    path: Path
    content: Content
    label: str
    advice: list[str]


def _device(args: argparse.Namespace) -> Device:
    """Measures this machine's GPU, if there is one, into bench.json of the output folder."""
    path, models = here.committed("bench"), args.model or options.DEFAULT_MODELS[:1]
    if torch.cuda.is_available():
        path = args.out.absolute() / "bench.json"
        payload = args.payload or PAYLOAD
        print(f"measuring this GPU, about {args.budget} s", file=sys.stderr)
        here.measure_bench(path, models, args.page_size, payload, args.layouts, args.budget)
    path, content = here.shown("bench", str(path))
    advice = [sentence for model in models for sentence in _advice(content, model, args)]
    return Device(path, content, here.label(path, content), advice)


def _advice(content: Content, model: str, args: argparse.Namespace) -> list[str]:
    """In words: what to take for a model, or for the measured one that is most like it."""
    layouts, page_size = args.layouts, args.page_size
    rows = recommend.rows_of(content, model, page_size, layouts)
    if advice := recommend.advice(content, rows):
        return [f"{model}, {sentence}" for sentence in advice]
    specs = presets.model(model, page_size=page_size).values()
    if refused := _refused(specs, layouts):
        return [f"{model}: no pool of it can have such a layout: {'; '.join(refused)}"]
    lack, near = _lack(content, model, layouts), nearest.sentence(content, specs, layouts, page_size)
    return [f"{model}: not among these results{lack}; {near}; on a GPU it is measured"]


def _refused(specs: Iterable[PoolSpec], layouts: Sequence[str]) -> Iterable[str]:
    """Why no pool can have any of the layouts, a reason for each; nothing if one can."""
    reasons: dict[str, str] = {}
    for spec, layout in product((spec for spec in specs if spec.page_bytes), layouts):
        answer = support(spec, layout, "direct", "backup", "cuda")
        if not isinstance(answer, Refusal):
            return []
        reasons.setdefault(layout, answer.reason)
    return reasons.values()


def _lack(content: Content, model: str, layouts: Sequence[str]) -> str:
    """What the results lack: pages, layouts, or the model."""

    def measured(name: str, layouts: Sequence[str] = LAYOUTS) -> bool:
        return bool(recommend.ways(content, recommend.rows_of_model(content, name, layouts)))

    if measured(model):
        return " with such pages" if measured(model, layouts) else f" in {' or '.join(layouts)}"
    return f", which have {listed(filter(measured, presets.MODELS)) or 'no model'}"


def for_notebooks(args: argparse.Namespace, results: Path) -> dict[str, str]:
    """The parameters that first cells of notebooks read (`notebooks.PARAMETERS`): what was asked for, one model."""
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
    figures = range(names, len(table.head))
    texts = [*map(page.paragraph, table.title.splitlines()), page.table(table.head, table.body, figures)]
    return texts + [page.paragraph(note) for note in table.notes]


def _outcome(book: Result) -> str:
    if book.error:
        return f"failed: {book.error}"
    return f"skipped: {book.skipped}" if book.skipped else f"executed in {book.seconds:.1f} s"
