"""The set at hand: whether it is what the generator writes, and whether our own backends agree with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch

from refimpl import UnsupportedPairing, slots_of
from verify.arguments import Parser
from verify.vectors.cases import Case, Geometry
from verify.vectors.write import FOLDER, Pools, generate, run_oracle


def main(argv: list[str] | None = None) -> int:
    """Write the vectors, or tell which files differ from what would be written."""
    parser = Parser(prog="python -m verify.vectors", description=main.__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=FOLDER, help="default: data/vectors")
    parser.add_argument("--check", action="store_true", help="write nothing")
    options = parser.parse_args(argv)
    files = generate()
    changed = [name for name, text in files.items() if read(options.folder / name) != text]
    if not options.check:
        options.folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (options.folder / name).write_text(text, encoding="utf-8", newline="\n")
    for name in changed:
        print(f"{name} {'differs' if options.check else 'written'}")
    print(f"{len(files)} files, {sum(len(text.encode()) for text in files.values()):,} bytes")
    return int(bool(changed) and options.check)


def read(file: Path) -> str:
    return file.read_bytes().decode() if file.exists() else ""


def against(backend: str, geometry: Geometry, layout: str, cases: list[Case]) -> Iterator[str]:
    """Names of the cases in which a backend of ours does something else."""
    if not geometry.allowed(layout):
        yield from (case.name for case in cases if not _refused(lambda: Pools(geometry, layout, backend)))
        return
    right, ours = Pools(geometry, layout), Pools(geometry, layout, backend)
    for case in cases:
        run_oracle(right, case)
        ours.prepare(case.direction)
        refused = _refused(partial(_run, ours, case))
        same = all(right.digests(side) == ours.digests(side) for side in ("host", "device"))
        if refused != (case.result == "must-refuse") or not same:
            yield case.name


def _run(pools: Pools, case: Case) -> None:
    host, device = (
        slots_of(list(items), pools.spec.page_size) if case.unit == "pages" else torch.tensor(items, dtype=torch.int64)
        for items in (case.host, case.device)
    )
    if case.unit == "entries":
        move = pools.host.backup_entries if case.direction == "backup_entries" else pools.host.load_entries
        move(pools.device, host, device).wait()
        return
    transfer = pools.host.prepare(pools.device, host, device, case.direction)
    if case.layers is None:
        transfer.run().wait()
    else:
        layers = [layer for layer in case.layers if layer is not None]
        transfer.run(layers, side_states=None in case.layers).wait()


def _refused(call: Callable[[], object]) -> bool:
    try:
        call()
    except (ValueError, UnsupportedPairing):
        return True
    return False
