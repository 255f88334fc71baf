"""python -m verify.bench.gpu.ranks: ranks of one host alone and together, in the same and in opposite directions."""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from multiprocessing.connection import Connection
from multiprocessing.shared_memory import SharedMemory
from typing import Any

import torch

from refimpl import presets
from refimpl.backends import registry
from refimpl.devices import platform_of, settled
from verify import arguments
from verify.bench import files
from verify.bench.gpu.ranks import cases, meeting, rank, report, sentences
from verify.bench.gpu.ranks.cases import Task, plays
from verify.bench.gpu.ranks.rank import Orders
from verify.bench.gpu.ranks.record import Cell, Played, Row, compare
from verify.bench.gpu.results import as_text, plain
from verify.bench.provenance import ROOT, command_line, provenance
from verify.bench.report import as_text as table_text

SCHEMA = ROOT / "data" / "schemas" / "ranks.schema.json"
SECONDS = 170.0
SAMPLES = 8
SLOW_S = 0.06
WORST_FIRST = ("wrong", "failed", "left out")
LONGEST_S = 180.0  # that an answer takes; a process that is silent for longer is taken for dead

Answer = dict[str, Any]


def run(
    devices: Sequence[str],
    tasks: Sequence[Task],
    payload_bytes: int,
    samples: int = SAMPLES,
    slow_s: float = SLOW_S,
    seed: int = 0,
    seconds: float = SECONDS,
    commit: str | None = None,
) -> Iterator[dict[str, Any]]:
    """The content of a result file (see `data/schemas/ranks.schema.json`) after each task, so far."""
    until = time.monotonic() + seconds
    orders = Orders(tuple(map(settled, devices)), tuple(tasks), payload_bytes, samples, slow_s, seed, until)
    settings = {
        "payload_bytes": payload_bytes,
        "samples": samples,
        "slow_s": slow_s,
        "seed": seed,
        "seconds": seconds,
    }
    content: dict[str, Any] = {
        "provenance": provenance(command_line("verify.bench.gpu.ranks"), seed, commit),
        "settings": settings,
    }
    with processes(orders) as ranks:
        content["devices"] = [answer(one) for one in ranks]
        copies = [answer(one) for one in ranks]
        if reasons := [a["reason"] for a in copies if "reason" in a]:
            raise RuntimeError(f"plain copies failed: {'; '.join(reasons)}")
        ceilings = _played(copies, payload_bytes)
        compare(ceilings, [])
        content |= {"ceilings": [asdict(played) for played in ceilings], "rows": []}
        rows: list[Row] = []
        for task in tasks:
            answers = [answer(one) for one in ranks]
            _add(rows, task, answers, payload_bytes, ceilings)
            content["rows"] = [asdict(row) for row in rows]
            yield plain(content)


@contextmanager
def processes(orders: Orders) -> Iterator[list[Connection]]:
    """A process for each rank, and the ends of the pipes on which they tell what they found."""
    context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
    shared = SharedMemory(create=True, size=meeting.nbytes(len(orders.devices)))
    started, ends = [], []
    try:
        for number in range(len(orders.devices)):
            here, there = context.Pipe(duplex=False)
            process = context.Process(target=rank.main, args=(orders, number, shared.name, there), daemon=True)
            process.start()
            there.close()
            started.append(process)
            ends.append(here)
        yield ends
        for process in started:
            process.join(LONGEST_S)
    finally:
        for process in started:
            process.kill()
            process.join()
        shared.close()
        shared.unlink()


def answer(end: Connection) -> Answer:
    """The next one of a rank. `RuntimeError` where it has ended, or says nothing any more."""
    try:
        if end.poll(LONGEST_S):
            return end.recv()
    except EOFError:
        raise RuntimeError("a rank has ended before its time, its error is above") from None
    raise RuntimeError(f"a rank has said nothing for {LONGEST_S:.0f} s")


def _add(rows: list[Row], task: Task, answers: list[Answer], asked: int, ceilings: Sequence[Played]) -> None:
    """Append what the ranks say of a task, to the row of its pool and layout."""
    spec, pages = task.case.spec, task.case.pages_of(asked)
    row = Row(task.case.name, spec.name, task.layout, pages, spec.page_bytes, pages * spec.page_bytes)
    if not rows or (rows[-1].case, rows[-1].pool, rows[-1].layout) != (row.case, row.pool, row.layout):
        rows.append(row)
    cell = Cell(task.backend)
    rows[-1].cells.append(cell)
    unfit = [f"rank {at}: {a['reason']}" for at, a in enumerate(answers) if a["status"] != "measured"]
    if unfit:
        cell.status = min((a["status"] for a in answers if a["status"] != "measured"), key=WORST_FIRST.index)
        cell.reason = "; ".join(unfit)
        return
    cell.path, cell.descriptors = answers[0]["path"], answers[0]["descriptors"]
    cell.plays = _played(answers, row.payload_bytes)
    compare(cell.plays, ceilings)


def _played(answers: list[Answer], payload_bytes: int) -> list[Played]:
    samples = zip(*(answer["samples"] for answer in answers), strict=True)
    return [Played.of(play, taken, payload_bytes) for play, taken in zip(plays(len(answers)), samples, strict=True)]


def summary(content: dict[str, Any]) -> Iterator[str]:
    """Tables, cells without a rate, and what all that says."""
    if any(True for _ in report.measured(content)):
        yield table_text(report.by_cell(content), left=("model", "pool", "layout", "backend"))
        yield ""
        yield table_text(report.kept(content), left=("backend",))
    yield from report.without_rates(content)
    yield ""
    yield from (f"{sentence}." for sentence in sentences.of(content))


def main(argv: list[str] | None = None) -> int:
    """Exit code 1 where a cell is wrong or failed."""
    parser = _parser()
    args = parser.parse_args(argv)
    devices = args.devices or tuple(f"cuda:{i}" for i in range(torch.cuda.device_count()))
    if len(devices) < 2:
        parser.error(f"two devices are needed at least, here are {arguments.listed(devices) or 'none'}")
    if args.samples < 2:
        parser.error("two samples are needed at least: what they vary by is told too")
    content: dict[str, Any] = {"rows": []}
    chosen = list(cases.tasks(args.models, cases.LAYOUTS, args.backends, len(devices)))
    if not chosen:
        parser.error(f"no pool of {arguments.listed(args.models)} is moved by {arguments.listed(args.backends)}")
    for content in run(devices, chosen, args.payload, args.samples, args.slow, args.seed, args.seconds, args.commit):
        if args.out:
            files.write(args.out, as_text(content))
        print(report.line(content["rows"][-1]), file=sys.stderr, flush=True)
    print(*summary(content), sep="\n")
    return int(any(cell["status"] in ("wrong", "failed") for row in content["rows"] for cell in row["cells"]))


def _devices(text: str) -> tuple[str, ...]:
    """Each that is named must be there, and be another one than the rest."""
    try:
        names = tuple(settled(name.strip()) for name in text.split(","))
    except ValueError as wrong:
        raise argparse.ArgumentTypeError(str(wrong)) from wrong
    for name in names:
        if platform_of(name) not in ("cuda", "emulated"):
            raise argparse.ArgumentTypeError(f"ranks have GPUs, or emulated devices, got {name!r}")
        if why := registry.unavailable("direct", name):
            raise argparse.ArgumentTypeError(f"{name}: {why}")
    if len(set(names)) < len(names):
        raise argparse.ArgumentTypeError(f"a rank has a device of its own, got {text!r}")
    return names


def _parser() -> arguments.Parser:
    parser = arguments.Parser(prog="python -m verify.bench.gpu.ranks", description=__doc__)
    parser.add_argument("--out", type=arguments.new_file, metavar="FILE.json", help="write all samples to this file")
    parser.add_argument("--devices", type=_devices, metavar="D,D", help="cuda:0,cuda:1, say; default: every GPU")
    models = arguments.one_of("model", presets.MODELS)
    parser.add_argument("--models", type=models, default=cases.MODELS, metavar="M,M", help=", ".join(cases.MODELS))
    backends = arguments.one_of("backend", cases.BACKENDS)
    parser.add_argument("--backends", type=backends, default=cases.BACKENDS, metavar="B,B")
    parser.add_argument(
        "--payload",
        type=arguments.nbytes,
        default=256 << 20,
        metavar="SIZE",
        help="bytes that each rank moves, 256MiB if not given",
    )
    parser.add_argument("--samples", type=arguments.positive, default=SAMPLES, metavar="N", help="default: %(default)s")
    parser.add_argument(
        "--slow",
        type=arguments.seconds,
        default=SLOW_S,
        metavar="S",
        help="slower transfers are left out",
    )
    parser.add_argument(
        "--seconds",
        type=arguments.seconds,
        default=SECONDS,
        help="left out if not begun by then (default: %(default)s)",
    )
    parser.add_argument("--seed", type=arguments.seed, default=0, help="of page choice and fill (default: %(default)s)")
    parser.add_argument("--commit", metavar="SHA", help="of a clean tree, where there is no git to ask")
    return parser


if __name__ == "__main__":
    sys.exit(main())
