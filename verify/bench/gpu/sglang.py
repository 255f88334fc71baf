"""python -m verify.bench.gpu.sglang: SGLang's own functions, timed where it has two for the same bytes.

Pages of one token are written back by staging and by the operator; page rows are loaded by the operator and, where they
fit its stage, by bulk copies. Names are those of SGLang 0.5.23. Nothing holds the stream here, unlike in the rest of
this benchmark: what the host takes to submit counts where the GPU waits for it, as it does in use.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from verify.adapters import sglang_pieces
from verify.adapters.sglang_functions import BULK_STAGE, STAGING_PAGES
from verify.adapters.sglang_memory import addresses
from verify.arguments import Parser
from verify.bench.provenance import command_line

PAYLOAD = 256 << 20
SAMPLES = 10
PIECES = ("ops", "hicache")
METHOD = (
    "CUDA events around one transfer of all layers; what a function of SGLang moves first is compared; random rows, "
    "256 MiB or a little less; the stream is not held, so what the host takes counts where the GPU waits for it"
)


@dataclass(frozen=True)
class Work:
    """One way of moving some bytes; `right` looks at the first and the last layer."""

    name: str
    nbytes: int
    run: Callable[[], object]
    right: Callable[[], bool]


def works(where: str = "cuda", payload: int = PAYLOAD) -> Iterator[Work]:
    """One after another, so that their memory is not taken all at once."""
    generator = torch.Generator().manual_seed(0)
    yield from plain_copies(where, payload)
    for model, layers, row, parts in ("MHA", 32, 2048, 2), ("MLA", 61, 1152, 1):
        yield from write_backs(model, layers, row, parts, where, payload, generator)
    for row in 8448, 37440:
        for layout in "layer_first", "page_first":
            yield from loads(layout, 30, row, where, payload, generator)


def plain_copies(where: str, payload: int) -> Iterator[Work]:
    """What a direction can give."""
    for name, ends in ("memcpy d2h", (where, "cpu")), ("memcpy h2d", ("cpu", where)):
        source, target = (_host(where, payload) if end == "cpu" else _device(where, payload) for end in ends)
        source.fill_(1)
        yield Work(
            name,
            payload,
            partial(target.copy_, source, non_blocking=True),
            lambda target=target: bool((target == 1).all()),
        )


def write_backs(
    model: str, layers: int, row: int, parts: int, where: str, payload: int, generator: torch.Generator
) -> Iterator[Work]:
    """Pages of one token, layer-first on the GPU and page-first on the host."""
    ops, kernels = map(sglang_pieces.piece, PIECES)
    count, mla = payload // (layers * row * parts), "" if parts == 2 else "_mla"
    device = [[_device(where, 2 * count, row).random_(0, 256) for _ in range(layers)] for _ in range(parts)]
    host = [_host(where, 2 * count, layers, row) for _ in range(parts)]
    staging = [_device(where, STAGING_PAGES, layers, row) for _ in range(parts)]
    tables = [addresses(rows, where) for rows in device]
    sources, targets = _places(count, generator), _places(count, generator)
    on_gpu = {"src_indices": sources.to(where), "dst_indices": targets.to(where)}

    def staged() -> None:
        getattr(kernels, f"transfer_hicache_all_layer{mla}_staged_lf_pf")(
            src_indices=on_gpu["src_indices"],
            dst_indices=targets,
            page_size=1,
            element_size=row,
            **_named("{}ptr_src", tables),
            **_named("staging_{}", staging),
            **_named("dst_{}", host),
        )

    def operator() -> None:
        getattr(ops, f"transfer_kv_all_layer{mla}_lf_pf")(
            item_size=row,
            dst_layout_dim=layers * row,
            num_layers=layers,
            **on_gpu,
            **_named("src_{}layers", tables),
            **_named("dst_{}", host),
        )

    def right() -> bool:
        return all(
            torch.equal(whole[targets][:, at].to(where), rows[at][on_gpu["src_indices"]])
            for whole, rows in zip(host, device, strict=True)
            for at in (0, layers - 1)
        )

    for name, run in ("staged", staged), ("operator", operator):
        for whole in host:
            whole.zero_()
        yield Work(f"{model} page 1 {name}", count * layers * row * parts, run, right)


def loads(layout: str, layers: int, row: int, where: str, payload: int, generator: torch.Generator) -> Iterator[Work]:
    """Rows that are whole pages, layer by layer."""
    ops, kernels = map(sglang_pieces.piece, PIECES)
    count, paged = payload // (layers * row), layout == "page_first"
    host = _host(where, *((2 * count, layers, row) if paged else (layers, 2 * count, row))).random_(0, 256)
    of_layers = [*host.unbind(1 if paged else 0)]
    device = [_device(where, 2 * count, row) for _ in range(layers)]
    sources, targets = (_places(count, generator).to(where) for _ in range(2))

    def operator() -> None:
        arguments = {"src_indices": sources, "dst_indices": targets, "item_size": row}
        for at in range(layers):
            if paged:
                dim = layers * row
                ops.transfer_kv_per_layer_mla_pf_lf(
                    src=host, dst=device[at], layer_id=at, src_layout_dim=dim, **arguments
                )
            else:
                ops.transfer_kv_per_layer_mla(src=of_layers[at], dst=device[at], **arguments)

    def bulk() -> None:
        for at in range(layers):
            kernels.transfer_hicache_one_layer_mla(
                cache_dst=device[at],
                indices_dst=targets,
                cache_src=of_layers[at],
                indices_src=sources,
                element_dim=row,
                page_size=None,
            )

    def right() -> bool:
        return all(torch.equal(device[at][targets].cpu(), of_layers[at][sources.cpu()]) for at in (0, layers - 1))

    quota = kernels.TMA_BLOCK_QUOTA
    fits = row <= BULK_STAGE and kernels.use_hicache_tma_kernel(element_size=row, block_quota=quota, page_size=None)
    for name, run in ("operator", operator), *([("bulk", bulk)] if fits else []):
        for rows in device:
            rows.zero_()
        yield Work(f"rows {row} {layout} {name}", count * layers * row, run, right)


def _host(where: str, *shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.uint8, pin_memory=where == "cuda")


def _device(where: str, *shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.uint8, device=where)


def _places(count: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randperm(2 * count, generator=generator)[:count]


def _named(pattern: str, values: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Arguments `src_k`, `src_v` of a pair or `src` of a single tensor, from `src_{}`."""
    letters = ("k_", "v_") if len(values) == 2 else ("",)
    return {pattern.format(letter).rstrip("_"): value for letter, value in zip(letters, values, strict=True)}


# ---- measured


def timed(work: Work) -> dict[str, Any]:
    """Samples, or why there are none."""
    try:
        work.run()
        torch.cuda.synchronize()
        if not work.right():
            return {"name": work.name, "error": "other bytes arrived"}
        samples = [_seconds(work.run) for _ in range(SAMPLES)]
    except Exception as error:  # somebody else's code: whatever it raises
        return {"name": work.name, "error": f"{type(error).__name__}: {error}"[:300]}
    rate = work.nbytes / statistics.median(samples) / 1e9
    return {"name": work.name, "bytes": work.nbytes, "samples_s": samples, "gb_per_s": rate}


def _seconds(run: Callable[[], object]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1e3


def measure() -> Iterator[dict[str, Any]]:
    """On a stream of its own, since batched copies refuse the default one."""
    with torch.cuda.stream(torch.cuda.Stream()):
        yield from map(timed, works())


def why_not_here() -> str | None:
    absent = [why for why in map(sglang_pieces.why_absent, PIECES) if why]
    if absent:
        return f"SGLang 0.5.23 is needed: {absent[0]}"
    return None if torch.cuda.is_available() else "a CUDA device is needed, and there is none"


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0, 1 where a function raised or moved other bytes, 2 where nothing can be measured."""
    parser = Parser(prog="python -m verify.bench.gpu.sglang", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.json", help="versions, and all samples")
    options = parser.parse_args(argv)
    if why := why_not_here():
        print(why, file=sys.stderr)
        return 2
    rows = []
    for row in measure():
        print(row["name"], f"{row['gb_per_s']:.2f} GB/s" if "gb_per_s" in row else row["error"], flush=True)
        rows.append(row)
    content = {
        "command": command_line("verify.bench.gpu.sglang"),
        "method": METHOD,
        "versions": sglang_pieces.versions(PIECES),
        "gpu": torch.cuda.get_device_name(),
        "cuda": torch.version.cuda,
        "rows": rows,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return int(any("error" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main())
