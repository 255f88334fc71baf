"""Measure a device for backend `auto`: how fast each backend moves pieces of each size, in either direction.

`python -m kernels_cupy.calibrate` takes less than half a minute and leaves a table in the user's cache folder, which
`auto` finds by the GPU's model, driver and kernels. Transfers are submitted one after the other while their stream is
held, and what each one more takes is what counts, on the device and on the host that submits it: a copy engine moves a
KiB at a time as fast as the bus allows, but no host describes so many pieces to it as quickly. Transfers of one page
tell what a call takes, those of many what each piece adds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import numpy as np
import torch

from kernels_cupy import cache_folder
from kernels_cupy.auto import WHO, table_path
from kernels_cupy.runtimes import runtime
from kernels_cupy.specs import HASH
from kernels_cupy.staged import HALVES
from refimpl.device_pool import DevicePool
from refimpl.devices import absent, platform_of, settled
from refimpl.geometry import Component, PoolSpec
from refimpl.host_pool import HostPool
from refimpl.indices import slots_of
from refimpl.pinned import Block, CudaRegistrar, HostMemory
from refimpl.runtime import Runtime
from refimpl.support import DIRECTIONS
from refimpl.transfer import Transfer

KIB, MIB = 1 << 10, 1 << 20
IN_A_ROW = 4
SAMPLES = 3
SUBMITS = 8  # the fastest counts: whatever else the host has to do only adds to it
SLACK_S = 0.001
CHUNKS = 4  # of a transfer by `staged`: the relayout of all but one goes on beside copies, as in a long transfer


@dataclass(frozen=True)
class Probe:
    """Pools whose pieces are of a chosen size: `rows` layers of a page lie together in the layout.

    payload  bytes to move: a rate shows in little, but for `staged`, whose chunks are large
    most     pages at most: soon done where the rate is low, as with short descriptors
    """

    layout: str
    rows: int
    sizes: tuple[int, ...]
    payload: int
    most: int

    def spec(self, piece: int) -> PoolSpec:
        row = Component("row", torch.uint8, dim=piece // self.rows)
        return PoolSpec("probe", self.rows, 1, (row,))


SIZES = tuple(k * KIB for k in (1, 4, 8, 16, 24, 32, 48, 64, 96, 128, 512, 4096))

# For `kernel` and `direct` a piece is a run, for `staged` what a page has in one place.
PROBES = {
    "kernel": Probe("layer_first", 1, (128, 256, 512, KIB, 2 * KIB, 8 * KIB, 64 * KIB, 512 * KIB), 64 * MIB, 1 << 17),
    "direct": Probe("layer_first", 1, SIZES, 64 * MIB, 1 << 12),
    "staged": Probe("page_first", 4, SIZES, 256 * MIB, 1 << 13),
}


class Reused(HostMemory):
    """One registered stretch for all probes, one after the other."""

    def __init__(self, nbytes: int, registrar: CudaRegistrar | None) -> None:
        super().__init__()
        self._block: Block = HostMemory(registrar).allocate(nbytes, nbytes)

    def map(self, nbytes: int) -> torch.Tensor:
        return self._block.tensor[:nbytes]

    def close(self) -> None:
        self._block.close()


def measure(device: str = "cuda") -> dict[str, Any]:
    """The table: {"backends": {backend: {direction: {"device": times, "host": times}}}}.

    Times are {"call_s": of a transfer of one page, the shortest, "piece_s": [[bytes of a piece, what it adds], …]}, in
    seconds. Taken on a stream of our own: the batched copy refuses the default one.
    """
    device = settled(device)
    port = runtime(device)
    with port.on(port.stream()):
        return _measure(device)


def _measure(device: str) -> dict[str, Any]:
    most = max(probe.payload + max(probe.sizes) for probe in PROBES.values())
    on_gpu = platform_of(device) == "cuda"
    memory = Reused(most, CudaRegistrar(device) if on_gpu else None)
    backends: dict[str, Any] = {}
    try:
        for name, probe in PROBES.items():
            found: dict[str, Any] = {way: {who: {"piece_s": []} for who in WHO} for way in DIRECTIONS}
            for piece in probe.sizes:
                for direction, who, of_call, of_piece in _times(name, probe, piece, device, memory):
                    times = found[direction][who]
                    times.setdefault("call_s", of_call)
                    times["piece_s"].append([piece, float(f"{of_piece:.5g}")])
            backends[name] = found
    finally:
        memory.close()
    model = torch.cuda.get_device_name(device) if on_gpu else platform_of(device)
    return {"device": model, "kernels": HASH, "backends": backends}


def _times(
    name: str, probe: Probe, piece: int, device: str, memory: HostMemory
) -> Iterator[tuple[str, str, float, float]]:
    """Direction, "device" or "host", its seconds for a transfer of one page, and those that each page more adds."""
    port, spec = runtime(device), probe.spec(piece)
    pages = min(max(probe.payload // piece, 1), probe.most)
    random = np.random.default_rng(piece)
    there, here = (slots_of(random.permutation(pages), 1) for _ in range(2))
    staging = max(HALVES * pages // CHUNKS, HALVES)
    with HostPool(spec, probe.layout, pages, name, memory=memory, platform=device, staging_pages=staging) as host:
        pool = DevicePool(spec, pages, device)
        for direction in DIRECTIONS:
            all_pages = host.prepare(pool, there, here, direction)
            one_page = host.prepare(pool, there[:1], here[:1], direction)
            one, many = _one_more(port, one_page), _one_more(port, all_pages)
            for who in WHO:
                yield direction, who, one[who], max(many[who] - one[who], 0.0) / max(pages - 1, 1)


def _one_more(port: Runtime, transfer: Transfer) -> dict[str, float]:
    """Seconds of "device" and "host" for one transfer more of several in a row."""
    submits = [_submitted(transfer) for _ in range(SUBMITS)]
    hold = 1.5 * IN_A_ROW * max(submits) + SLACK_S
    more = [_held(port, transfer, IN_A_ROW, hold) - _held(port, transfer, 1, hold) for _ in range(SAMPLES)]
    return {"device": max(statistics.median(more), 0.0) / (IN_A_ROW - 1), "host": min(submits)}


def _submitted(transfer: Transfer) -> float:
    """Seconds of the host that submitting takes."""
    begin = time.perf_counter()
    receipt = transfer.run()
    seconds = time.perf_counter() - begin
    receipt.wait()
    return seconds


def _held(port: Runtime, transfer: Transfer, count: int, hold: float) -> float:
    """Device seconds of `count` transfers, none of which begins before the last is submitted."""
    stream = port.current()
    port.delay(stream, hold)
    begin = port.record(stream, timed=True)
    for _ in range(count):
        transfer.run()
    end = port.record(stream, timed=True)
    end.synchronize()
    return port.seconds(begin, end)


def why_not(device: str) -> str | None:
    """Why there is nothing to calibrate by that name, or None. Emulated devices have no speed worth a table."""
    try:
        name = settled(device)
    except ValueError as error:
        return str(error)
    if platform_of(name) != "cuda":
        return f"GPUs are calibrated, and {device!r} is none: write 'cuda:1' for the second, 'cuda' for the current one"
    return absent(name)


def place(path: Path) -> Path:
    """A file to write to. `OSError` where that cannot be done: its folder is made and tried before measuring."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with NamedTemporaryFile(prefix=path.name, dir=path.parent):
        if path.exists() and not path.is_file():
            raise OSError(f"nothing can be written to {str(path)!r}: it is no file")
    return path


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 2 where nothing can be measured or written."""
    parser = argparse.ArgumentParser(prog="python -m kernels_cupy.calibrate", description=__doc__)
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="write there, and not into the cache folder")
    parser.add_argument("--device", default="cuda", metavar="cuda:N", help="default: the current one")
    options = parser.parse_args(argv)
    if why := why_not(options.device):
        print(why, file=sys.stderr)
        return 2
    try:
        path = place(options.out or cache_folder() / table_path(options.device).name)
        runtime(options.device)
    except (OSError, ImportError) as error:
        print(error, file=sys.stderr)
        return 2
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(measure(options.device), indent=1) + "\n", encoding="utf-8")
    unfinished.replace(path)
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
