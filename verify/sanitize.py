"""A matrix small enough for `compute-sanitizer`: every pool in every layout, by every backend of its own, once.

`PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck python -m verify.sanitize > out/memcheck.log 2>&1`,
likewise with initcheck and synccheck; `verify.gpu_record` reads such logs. Torch's own allocator would hide from a
sanitizer where one buffer ends and the next begins. Give initcheck `--plain-copies`: it takes what a batched copy has
written for uninitialised.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kernels_cupy.copies import Copies
from verify import matrix
from verify.arguments import Parser
from verify.matrix import Cell

BACKENDS = ("direct", "kernel", "staged")
DIRECTIONS = ("round trip", "backup entries", "load entries")  # there and back; entries have no such thing


def cells(platform: str) -> list[Cell]:
    """Two pages each, one round of the fill."""
    chosen = [c for c in matrix.complete(platform) if c.backend in BACKENDS and c.direction in DIRECTIONS]
    return [replace(cell, pages=2, turn=0) for cell in chosen]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = Parser(prog="python -m verify.sanitize", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--platform", choices=("cuda", "emulated"), default="cuda")
    parser.add_argument("--plain-copies", action="store_true", help="one call a copy: initcheck does not see batches")
    options = parser.parse_args(arguments)
    if options.plain_copies:
        Copies.batches = False
    todo = cells(options.platform)
    for cell in todo:
        matrix.run(cell)
    print(f"sanitized cells: {len(todo)}", flush=True)


if __name__ == "__main__":
    main()
