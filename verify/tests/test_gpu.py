"""A real GPU: order of streams, lifetimes, what a driver refuses, and pools past 4 GiB.

A stream is held by a kernel that merely spins, so whatever is submitted behind it must wait, and whoever does not wait
is seen. B numbers are those of `test_reported_faults.py`.
"""

from __future__ import annotations

import gc
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kernels_cupy import cuda_runtime, runtimes
from kernels_cupy.copies import Copies
from kernels_cupy.staged import Staged
from refimpl import LAYOUTS, DevicePool, HostPool, PoolSpec, Receipt, Refusal, oracle, presets, slots_of, support
from refimpl.cudart import cudart
from refimpl.runtime import STREAMS as OURS
from refimpl.runtime import Completion
from verify import fill, reported
from verify.arena import Arena
from verify.guarded import shared_arena
from verify.reported import B13_SPEC, fill_many
from verify.toys import TOYS

pytestmark = pytest.mark.gpu

BYTE, BF16 = torch.uint8, torch.bfloat16
ROOT = Path(__file__).resolve().parents[2]

SPEC = presets.mha(4, 2, 128, BYTE, 16)
WAYS = [
    ("direct", "page_first_direct"),
    ("kernel", "page_first"),
    ("staged", "page_first"),
    ("staged", "page_first_direct"),
    ("auto", "page_first"),
]
STREAMS: dict[str, Callable[[], torch.cuda.Stream]] = {
    "user": lambda: torch.cuda.Stream(),
    "legacy default": lambda: torch.cuda.default_stream(),
    "per-thread default": lambda: torch.cuda.ExternalStream(2),
}

every_way = pytest.mark.parametrize(("backend", "layout"), WAYS)
every_stream = pytest.mark.parametrize("stream_kind", STREAMS)
Hold = Callable[[float], torch.cuda.Event]
Lists = dict[str, torch.Tensor]  # by side: "host", "device"


@pytest.fixture(autouse=True)
def _arena_to_ourselves() -> None:
    """Pools of the test before are done with it."""
    torch.cuda.synchronize()
    shared_arena().reset()


@pytest.fixture(scope="session")
def cycles_per_ms() -> float:
    """Of the spinning kernel, once the clock is up: the most of several tries, for others may be on this GPU too."""
    cycles, begin, end = 20_000_000, torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    speeds = []
    for _ in range(10):
        begin.record()
        torch.cuda._sleep(cycles)
        end.record()
        end.synchronize()
        speeds.append(cycles / begin.elapsed_time(end))
    return max(speeds)


@pytest.fixture
def hold(cycles_per_ms: float) -> Hold:
    """Occupy the caller's stream for some milliseconds; the event passes when it is free."""

    def occupy(milliseconds: float) -> torch.cuda.Event:
        torch.cuda._sleep(int(milliseconds * cycles_per_ms))
        event = torch.cuda.Event()
        event.record()
        return event

    return occupy


class Twins:
    """One device pool and a host pool for each way, everything twice: for backends, and for the oracle."""

    def __init__(
        self,
        spec: PoolSpec = SPEC,
        ways: Sequence[tuple[str, str]] = WAYS[:1],
        pages: int = 24,
        turn: int = 0,
        **options: Any,
    ) -> None:
        self.spec = spec
        self.device, self.right_device = DevicePool(spec, pages, "cuda"), DevicePool(spec, pages)
        self.hosts = [host_pool(spec, layout, pages, backend, **options) for backend, layout in ways]
        self.right_hosts = [HostPool(spec, layout, pages) for _, layout in ways]
        for device in (self.device, self.right_device):
            fill.fill_device(device, turn)
        for host in (*self.hosts, *self.right_hosts):
            reported.poison(host)
        torch.cuda.synchronize()

    def move(
        self, direction: str, host: torch.Tensor, device: torch.Tensor, at: int = 0, there: Lists | None = None
    ) -> Receipt:
        """By oracle and backend; the backend takes its lists from `there` where that has them (on the GPU, say)."""
        self.expect(direction, host, device, at)
        lists = {"host": host, "device": device} | (there or {})
        return submit(self.hosts[at], self.device, direction, **lists)

    def expect(self, direction: str, host: torch.Tensor, device: torch.Tensor, at: int = 0) -> None:
        """By oracle only."""
        move = oracle.backup if direction == "backup" else oracle.load
        move(self.right_hosts[at], self.right_device, host, device)

    def compare(self) -> None:
        torch.cuda.synchronize()
        for c in self.spec.components:
            for layer in self.spec.layers_of(c):
                where = f"{c.name} of layer {layer}"
                right = fill.device_image(self.right_device, c.name, layer)
                assert np.array_equal(fill.device_image(self.device, c.name, layer), right), f"device, {where}"
                for got, expected in zip(self.hosts, self.right_hosts, strict=True):
                    image, right = (fill.host_image(pool, c.name, layer) for pool in (got, expected))
                    assert np.array_equal(image, right), f"host of {got.backend} in {got.layout}, {where}"


def host_pool(spec: PoolSpec, layout: str, pages: int, backend: str, **options: Any) -> HostPool:
    return HostPool(spec, layout, pages, backend, memory=shared_arena(), platform="cuda", **options)


def submit(
    pool: HostPool, device_pool: DevicePool, direction: str, host: torch.Tensor, device: torch.Tensor
) -> Receipt:
    return pool.prepare(device_pool, host, device, direction).run()


def passed(receipt: Receipt) -> torch.cuda.Event:
    """The event of CUDA in a receipt."""
    assert isinstance(receipt.event, Completion)
    assert isinstance(receipt.event.event, torch.cuda.Event)
    return receipt.event.event


def tensors_of(host: HostPool) -> list[torch.Tensor]:
    return [tensor for _, held in host.storage for tensor in held]


def is_poison(host: HostPool) -> bool:
    return all(bool((tensor.view(BYTE) == fill.POISON).all()) for tensor in tensors_of(host))


def random_pages(spec: PoolSpec, pages: int, device: str = "cuda") -> list[torch.Tensor]:
    """Content for `pages` pages of every layer of a pool of token rows, as `rows_of` gives them."""
    return [
        torch.randint(0, 256, (pages, spec.page_size, 1, c.head_count, c.lanes), dtype=BYTE, device=device)
        for c in spec.components
        for _ in spec.layers_of(c)
    ]


def rows_of(device: DevicePool, first: int, end: int) -> list[torch.Tensor]:
    """Views of neighbouring pages in every layer: plain copies of them need no index list, and no waiting host."""
    spec = device.spec
    return [device.view(c.name, layer)[first:end] for c in spec.components for layer in spec.layers_of(c)]


def write(to: list[torch.Tensor], source: list[torch.Tensor]) -> None:
    for t, s in zip(to, source, strict=True):
        t.copy_(s)


def equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x.cpu(), y.cpu()) for x, y in zip(a, b, strict=True))


def no_error_left() -> bool:
    torch.cuda.synchronize()
    return cudart().handle.cudaPeekAtLastError() == 0


# ---- Order


@pytest.mark.ordering
@pytest.mark.parametrize("direction", ["backup", "load"])
@every_stream
@every_way
def test_the_call_returns_at_once_and_nothing_moves_before_its_turn(
    backend: str, layout: str, stream_kind: str, direction: str, hold: Hold
) -> None:
    """What a load reads is written after the call: had it been read at once, something else would arrive."""
    twins, stream = Twins(ways=[(backend, layout)]), STREAMS[stream_kind]()
    host, content = twins.hosts[0], []
    lists = slots_of([5, 0, 3, 9, 10, 11], 16), slots_of([1, 4, 2, 20, 21, 22], 16)
    with torch.cuda.stream(stream):
        for _ in range(2):  # kernels are compiled then, and memory is at hand
            submit(host, twins.device, direction, *lists).wait()
        if direction == "load":
            for pool in (host, twins.right_hosts[0]):
                fill.fill_host(pool)
            content = [tensor.clone() for tensor in tensors_of(host)]
        reported.poison(host)
        torch.cuda.synchronize()

        held = hold(200)
        began = time.perf_counter()
        receipt = submit(host, twins.device, direction, *lists)
        took = time.perf_counter() - began
        assert not passed(receipt).query()
        assert is_poison(host)
        for tensor, ready in zip(tensors_of(host), content, strict=direction == "load"):
            tensor.copy_(ready)
        assert not held.query(), "the stream was not held long enough to tell anything"
    receipt.wait()
    twins.expect(direction, *lists)
    twins.compare()
    assert took < 0.02
    assert receipt.host_syncs == 0


@pytest.mark.ordering
@every_stream
@every_way
def test_work_on_one_stream_runs_in_order_without_any_waiting(
    backend: str, layout: str, stream_kind: str, hold: Hold
) -> None:
    """Written late, saved, overwritten, restored elsewhere, read there and on a stream that waits, overwritten."""
    twins, stream, other = Twins(ways=[(backend, layout)]), STREAMS[stream_kind](), torch.cuda.Stream()
    host, device = twins.hosts[0], twins.device
    content, later = random_pages(SPEC, 3), random_pages(SPEC, 3)
    host_list, saved, restored = slots_of([5, 0, 3], 16), slots_of([2, 3, 4], 16), slots_of([7, 8, 9], 16)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        hold(50)
        write(rows_of(device, 2, 5), content)
        host.backup(device, host_list, saved)
        write(rows_of(device, 2, 5), later)
        receipt = host.load_all(device, host_list, restored)
        seen = [rows.clone() for rows in rows_of(device, 7, 10)]
        other.wait_event(passed(receipt))
        with torch.cuda.stream(other):
            seen_elsewhere = [rows.clone() for rows in rows_of(device, 7, 10)]
        stream.wait_stream(other)
        write(rows_of(device, 7, 10), later)
    for tensor in (host_list, saved, restored):
        tensor.zero_()
    torch.cuda.synchronize()
    assert equal(seen, content)
    assert equal(seen_elsewhere, content)
    assert equal(rows_of(device, 2, 5), later)
    assert equal(rows_of(device, 7, 10), later)
    assert equal([host.layer_view(c.name, i)[[5, 0, 3]] for c in SPEC.components for i in range(4)], content)


@pytest.mark.ordering
@every_way
def test_the_kernel_runs_on_the_callers_stream_and_sees_what_was_written_there(
    backend: str, layout: str, hold: Hold, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B34: CuPy's current stream is not torch's."""
    streams: list[int] = []
    function = cuda_runtime._function

    def watched(kernel: str) -> Callable[..., None]:
        def launch(*arguments: Any, stream: Any) -> None:
            streams.append(stream.ptr)
            function(kernel)(*arguments, stream=stream)

        return launch

    monkeypatch.setattr(cuda_runtime, "_function", watched)
    twins, stream, content = Twins(ways=[(backend, layout)]), torch.cuda.Stream(), random_pages(SPEC, 1)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        hold(50)
        write(rows_of(twins.device, 3, 4), content)
        receipt = twins.hosts[0].backup(twins.device, slots_of([6], 16), slots_of([3], 16))
    receipt.wait()
    assert equal([twins.hosts[0].layer_view(c.name, i)[6:7] for c in SPEC.components for i in range(4)], content)
    assert len(streams) == receipt.kernels
    assert set(streams) <= {stream.cuda_stream}
    assert bool(streams) == (backend in ("kernel", "staged")) or backend == "auto"


@pytest.mark.ordering
@every_way
def test_an_array_of_cupy_is_handed_over_from_the_default_stream(backend: str, layout: str, hold: Hold) -> None:
    """B34: written late on the legacy default stream, saved on another one."""
    import cupy

    spec = presets.mha_k_only(1, 2, 64, BYTE, 16, indices_from=None)
    host, stream = host_pool(spec, layout, 8, backend), torch.cuda.Stream()
    rows = np.repeat(np.arange(8 * 16, dtype=np.uint8), 128).reshape(8 * 16, 2, 64)  # each is full of its number
    array, content = cupy.zeros(rows.shape, cupy.uint8), cupy.asarray(rows)
    torch.cuda.synchronize()
    hold(50)
    with cupy.cuda.Stream.null:
        array.data.copy_from_device_async(content.data, rows.nbytes)
        with torch.cuda.stream(stream):
            device = DevicePool.wrap(spec, {"k": [torch.from_dlpack(array)]})
            host.backup(device, slots_of([6, 1], 16), slots_of([3, 7], 16)).wait()
    for page, source in ((6, 3), (1, 7)):
        assert fill.host_image(host, "k", 0)[page].tobytes() == rows[source * 16 :][:16].tobytes()


@pytest.mark.ordering
@pytest.mark.parametrize("backend", ["kernel", "staged"])
def test_index_lists_are_dropped_and_their_memory_used_again(backend: str, hold: Hold) -> None:
    """The lists lie in memory of another stream, where nothing waits for ours: it is full of other numbers at once."""
    twins, stream = Twins(ways=[(backend, "page_first")]), torch.cuda.Stream()
    host, device = slots_of(list(range(24)), 16), slots_of(list(range(24))[::-1], 16)

    def others() -> list[torch.Tensor]:
        return [torch.full((24 * 16,), 16, dtype=torch.int64, device="cuda") for _ in range(64)]

    there = {"device": device.cuda()} | ({"host": host.cuda()} if backend == "kernel" else {})
    others()
    with torch.cuda.stream(stream):  # kernels are compiled, and memory is at hand
        submit(twins.hosts[0], twins.device, "backup", **({"host": host, "device": device} | there))
    torch.cuda.synchronize()
    reported.poison(twins.hosts[0])
    with torch.cuda.stream(stream):
        held = hold(400)
        twins.move("backup", host, device, there=there)
    host.zero_()
    device.zero_()
    there.clear()
    gc.collect()
    written = others()
    torch.cuda.current_stream().synchronize()
    assert not held.query(), "the stream was not held long enough to tell anything"
    twins.compare()
    assert all(bool((other == 16).all()) for other in written)


@pytest.mark.ordering
def test_a_staging_buffer_leaves_whoever_had_its_memory_before_in_peace(hold: Hold) -> None:
    """An allocator hands memory on in order of its stream: its last reader may still be waiting there."""
    twins, stream = Twins(ways=[("kernel", "page_first")]), torch.cuda.Stream()
    nbytes, lists = 384 * SPEC.page_bytes, (slots_of(list(range(24)), 16), slots_of(list(range(24)), 16))
    torch.cuda.empty_cache()
    with host_pool(SPEC, "page_first", 24, "staged", staging_pages=384) as warm, torch.cuda.stream(stream):
        submit(warm, twins.device, "backup", *lists)  # kernels are compiled, and memory is at hand
    before = torch.randint(0, 256, (nbytes,), dtype=BYTE, device="cuda")
    expected, copy, address = before.cpu(), torch.empty_like(before), before.data_ptr()
    torch.cuda.synchronize()
    held = hold(400)
    copy.copy_(before)
    del before
    host = host_pool(SPEC, "page_first", 24, "staged", staging_pages=384)
    assert isinstance(host._mover, Staged)
    assert host._mover._buffer is not None
    assert host._mover._buffer.data_ptr() == address, "the allocator did not hand the memory on"
    with torch.cuda.stream(stream):
        submit(host, twins.device, "backup", *lists)
    assert not held.query(), "the stream was not held long enough to tell anything"
    torch.cuda.synchronize()
    assert torch.equal(copy.cpu(), expected)


@pytest.mark.ordering
def test_our_streams_are_few_and_nobody_elses() -> None:
    """Whoever shares a stream with us is held up with us."""
    port = runtimes.runtime("cuda")
    dealt = [port.stream().cuda_stream for _ in range(2 * OURS)]
    ours, again = dealt[:OURS], dealt[OURS:]
    assert len(set(ours)) == OURS
    assert again == ours
    torches = {torch.cuda.Stream().cuda_stream for _ in range(64)}
    beside = port.beside(port.stream())
    assert not torches & {*ours, beside.cuda_stream}
    assert beside.cuda_stream not in ours
    assert beside is port.beside(torch.cuda.ExternalStream(ours[0]))

    def of_this_thread() -> torch.cuda.Stream:
        return port.beside(STREAMS["per-thread default"]())

    with ThreadPoolExecutor(1) as another:
        assert another.submit(of_this_thread).result() is not of_this_thread()


@pytest.mark.ordering
@pytest.mark.parametrize("pools", [1, 2])
@every_way
def test_two_streams_at_once_never_get_into_each_others_way(backend: str, layout: str, pools: int) -> None:
    """Each moves its own pages to and fro, so a wrong one stays wrong to the end. `staged` shares its buffer."""
    twins = Twins(ways=[(backend, layout)] * pools, pages=32, staging_pages=4)
    streams, order = [torch.cuda.Stream(), torch.cuda.Stream()], np.random.default_rng(pools)
    for turn in range(60):
        for i, stream in enumerate(streams):
            lists = [slots_of(16 * i + order.permutation(16), 16) for _ in range(2)]
            with torch.cuda.stream(stream):
                twins.move(("backup", "load")[turn % 2], *lists, at=i % pools)
    twins.compare()


@pytest.mark.ordering
@every_way
def test_a_copied_slot_is_whole_and_a_reader_waits_for_its_layer_only(backend: str, layout: str, hold: Hold) -> None:
    """B24: the load is held before layer 3; slot 3 is copied to slot 9 as soon as the load is queued."""
    spec = presets.mamba(6, [(5, 3)], BF16, (2, 3, 4))
    host, device, stream = host_pool(spec, layout, 8, backend), DevicePool(spec, 12, "cuda"), torch.cuda.Stream()
    fill.fill_host(host)
    buffers = [device.buffer(c.name, layer) for c in spec.components for layer in range(6)]
    with torch.cuda.stream(stream):
        host.load_all(device, slots_of([1], 1), slots_of([3], 1)).wait()
        transfer = host.prepare(device, slots_of([7], 1), slots_of([3], 1), "load")
        torch.cuda.synchronize()
        early = [transfer.run((layer,)) for layer in range(3)]
        held = hold(400)
        late = [transfer.run((layer,)) for layer in range(3, 6)]
        for buffer in buffers:
            buffer[9].copy_(buffer[3])
        early[2].wait()
        transfer.run((6,)).wait()  # owned by nobody here
        assert not held.query(), "a reader of layer 2 waited for layer 3"
        assert not passed(late[0]).query()
    torch.cuda.synchronize()
    for c in spec.components:
        for layer in range(6):
            image, right = fill.device_image(device, c.name, layer), fill.host_image(host, c.name, layer)[7]
            assert (image[3] == right).all()
            assert (image[9] == right).all()


@pytest.mark.ordering
@every_way
def test_closing_a_pool_waits_for_its_copies_on_every_stream(backend: str, layout: str, hold: Hold) -> None:
    """Those of the held stream were submitted first, so the pool has heard of others since."""
    twins, lists = Twins(ways=[(backend, layout)]), (slots_of([5, 0, 3], 16), slots_of([1, 4, 2], 16))
    host, kept = twins.hosts[0], tensors_of(twins.hosts[0])
    for stream in (one := torch.cuda.Stream(), other := torch.cuda.Stream()):
        with torch.cuda.stream(stream):
            submit(host, twins.device, "backup", *lists).wait()  # kernels are compiled, and memory is at hand
    reported.poison(host)
    torch.cuda.synchronize()
    with torch.cuda.stream(one):
        held = hold(400)
        receipt = twins.move("backup", *lists)
    with torch.cuda.stream(other):
        twins.move("backup", slots_of([8], 16), slots_of([9], 16))
    assert not held.query(), "the stream was not held long enough to tell anything"
    host.close()
    assert passed(receipt).query()
    assert all(map(torch.equal, kept, tensors_of(twins.right_hosts[0])))


# ---- Index lists on the device


def bad_list(fault: str, side_pages: int) -> torch.Tensor:
    lists = {
        "outside": slots_of([3, side_pages, 7], 16),
        "negative": slots_of([3, -1, 7], 16),
        "unaligned": slots_of([3, 0, 7], 16) + 1,
        "torn": slots_of([3, 0, 7], 16) + (torch.arange(48) == 20),
        "repeated": slots_of([3, 0, 3], 16),
    }
    return lists[fault]


BAD = [
    (backend, direction, side, fault, dtype)
    for backend, sides in {"kernel": ("host", "device"), "staged": ("device",), "direct": ("host", "device")}.items()
    for direction in ("backup", "load")
    for side in sides
    for fault in ("outside", "negative", "unaligned", "torn", "repeated")
    for dtype in ("int32", "int64")
    if fault != "repeated" or (direction == "backup") == (side == "host")  # a source may be read twice
]


@pytest.mark.parametrize(("backend", "direction", "side", "fault", "dtype"), BAD)
def test_a_wrong_list_on_the_gpu_moves_nothing_and_is_told(
    backend: str, direction: str, side: str, fault: str, dtype: str
) -> None:
    """By `wait` where the device checks the list, else by the call; the next transfer is right."""
    twins = Twins(ways=[(backend, "page_first")])
    if direction == "load":
        for pool in (*twins.hosts, *twins.right_hosts):
            fill.fill_host(pool)
    good = {"host": slots_of([5, 0, 3], 16), "device": slots_of([1, 4, 2], 16)}
    there = good | {side: bad_list(fault, 24).to(getattr(torch, dtype)).cuda()}
    if backend == "direct":
        with pytest.raises(ValueError, match=f"{side} index"):
            submit(twins.hosts[0], twins.device, direction, **there)
    else:
        receipt = submit(twins.hosts[0], twins.device, direction, **there)
        assert receipt.host_syncs == 0
        with pytest.raises(ValueError, match=f"{side} index"):
            receipt.wait()
    twins.compare()
    twins.move(direction, good["host"], good["device"]).wait()
    twins.compare()


@pytest.mark.parametrize("device_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("host_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("host_on", ["cpu", "cuda"])
@pytest.mark.parametrize("backend", ["direct", "kernel", "staged", "auto"])
def test_the_first_write_back_takes_indices_of_either_device_and_type(
    backend: str, host_on: str, host_dtype: torch.dtype, device_dtype: torch.dtype
) -> None:
    """B01"""
    host_slots = reported.slots([5, 0, 3], 16, host_dtype).to(host_on)
    device_slots = reported.slots([1, 4, 2], 16, device_dtype).cuda()
    found: list[str] = []
    for spec, kinds in (
        (presets.mha(4, 2, 64, BF16, 16), {"k": reported.K, "v": reported.V}),
        (presets.dsa_indexer(4, 128, 128, 16), {"index_k": reported.INDEX}),
    ):
        host, device = host_pool(spec, "page_first", 6, backend), DevicePool(spec, 6, "cuda")
        reported.poison(host)
        reported.fill(device, kinds)
        host.backup(device, host_slots, device_slots).wait()
        found += [reported.crc(host.buffer(component)) for component in kinds]
    assert found == ["7c9e7a16", "e61773fc", "bf797e33"]


# ---- The driver


class Without:
    """A CUDA runtime that lacks a function."""

    def __init__(self, handle: Any, name: str) -> None:
        self._handle, self._name = handle, name

    def __getattr__(self, name: str) -> Any:
        if name == self._name:
            raise AttributeError(name)
        return getattr(self._handle, name)


LIBRARIES: dict[str, Callable[[], Any]] = {
    "as it is": lambda: cudart(),
    "driver 12070": lambda: replace(cudart(), driver=12070),
    "driver 12080": lambda: replace(cudart(), driver=12080),
    "symbol missing": lambda: replace(cudart(), handle=Without(cudart().handle, "cudaMemcpyBatchAsync")),
}


@every_stream
@pytest.mark.parametrize("library", LIBRARIES)
def test_batched_copies_are_chosen_by_driver_and_leave_no_error(
    library: str, stream_kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B08"""
    monkeypatch.setattr(runtimes.cuda(), "_copies", Copies(LIBRARIES[library]()))
    host, device = host_pool(B13_SPEC, "page_first_direct", 8, "direct"), DevicePool(B13_SPEC, 10, "cuda")
    reported.poison(host)
    reported.fill(device, {"k": reported.K, "v": reported.V})
    torch.cuda.synchronize()
    with torch.cuda.stream(STREAMS[stream_kind]()):
        receipt = host.backup(device, reported.slots([7, 2, 5], 4), reported.slots([1, 6, 3], 4))
    receipt.wait()
    assert (reported.crc(host.buffer("k")), reported.crc(host.buffer("v"))) == ("dada6bbb", "972c3f8d")
    assert ("one by one" in receipt.path) == (library in ("driver 12070", "symbol missing"))
    assert no_error_left()


@pytest.mark.parametrize(
    ("layout", "keys", "values"),
    [
        ("layer_first", "1f3b3f6c", "d5b1a5c2"),
        ("page_first_direct", "78da3635", "ab747a79"),
        ("page_first", "78da3635", "ab747a79"),
    ],
)
def test_sixty_thousand_descriptors(layout: str, keys: str, values: str) -> None:
    """B31"""
    spec = presets.mha(30, 2, 16, BF16, 1)
    host, device = host_pool(spec, layout, 1009, "direct"), DevicePool(spec, 1000, "cuda")
    reported.poison(host)
    fill_many(device)
    receipt = host.backup(device, torch.arange(1000) * 7 % 1009, torch.arange(999, -1, -1))
    receipt.wait()
    assert (receipt.bytes, receipt.descriptors) == (60_000 * 64, 60_000)
    assert (reported.crc(host.buffer("k")), reported.crc(host.buffer("v"))) == (keys, values)


@pytest.mark.parametrize("count", [8_192, 8_193])
def test_descriptor_counts_on_either_side_of_a_driver_limit(count: int) -> None:
    """B31"""
    spec = presets.mha_k_only(1, 1, 4, BYTE, 1, indices_from=None)
    host, device = host_pool(spec, "layer_first", count, "direct"), DevicePool(spec, count, "cuda")
    device.buffer("k", 0).copy_(torch.arange(count, dtype=torch.int32).view(BYTE).view(count, 1, 4))
    receipt = host.backup(device, torch.arange(count), torch.arange(count).flip(0))
    receipt.wait()
    assert receipt.descriptors == count
    found = reported.whole(host, "k").view(torch.int32).flatten()
    assert torch.equal(found, torch.arange(count, dtype=torch.int32).flip(0))


@pytest.mark.parametrize("direction", ["backup", "load"])
def test_buffers_that_happen_to_be_neighbours_are_copied_one_by_one(direction: str) -> None:
    """Of 16 MiB each torch makes allocations of their own, and a driver often puts them side by side."""
    spec, pages = presets.mha(4, 8, 128, BF16, 16), 512
    host, device = host_pool(spec, "layer_first", pages, "direct"), DevicePool(spec, pages, "cuda")
    for buffer in device.buffers():
        buffer.view(BYTE).random_()
    every = slots_of(list(range(pages)), 16)
    receipts = [host.backup(device, every, every)]
    receipts[0].wait()
    if direction == "load":
        right = [buffer.clone().view(BYTE) for buffer in device.buffers()]
        for buffer in device.buffers():
            buffer.zero_()
        receipts.append(host.load_all(device, every, every))
        receipts[-1].wait()
        assert equal([buffer.view(BYTE) for buffer in device.buffers()], right)
    for name, layer in product(("k", "v"), range(4)):
        assert equal([host.layer_view(name, layer).view(BYTE)], [device.view(name, layer).view(BYTE)])
    assert [receipt.descriptors for receipt in receipts] == [8] * len(receipts)


ECHO = """
struct Three { long long a; int b; float c; };
extern "C" __global__ void echo(long long a, int b, float c, Three three, Three* to) {
  to[0].a = a, to[0].b = b, to[0].c = c;
  to[1] = three;
}
"""


def test_scalars_arrive_in_kernels_as_they_were() -> None:
    """B33: one by one, and as the members of a struct, which is how our kernels take theirs."""
    import cupy

    three = np.dtype([("a", np.int64), ("b", np.int32), ("c", np.float32)], align=True)
    sent = np.array((2**31 + 64, -1, 2.0), three)
    found = cupy.zeros(2 * three.itemsize, cupy.uint8)
    arguments = (np.int64(sent["a"]), np.int32(sent["b"]), np.float32(sent["c"]), sent, found)
    cupy.RawKernel(ECHO, "echo")((1,), (1,), arguments)
    assert cupy.asnumpy(found).view(three).tolist() == [(2147483712, -1, 2.0)] * 2


def test_waiting_for_a_receipt_is_waiting_for_nothing_else(hold: Hold) -> None:
    """Whatever the caller's stream is given after the transfer: the device's verdict on a list does not wait for it."""
    twins = Twins(ways=[("kernel", "page_first")])
    lists = slots_of(list(range(24)), 16), slots_of(list(range(24)), 16).cuda()
    submit(twins.hosts[0], twins.device, "backup", *lists).wait()  # kernels are compiled, and memory is at hand
    with torch.cuda.stream(torch.cuda.Stream()):
        receipt = submit(twins.hosts[0], twins.device, "backup", *lists)
        later = hold(400)
        receipt.wait()
        assert not later.query()
    torch.cuda.synchronize()


def test_a_launch_that_fails_is_told_and_leaves_the_context_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    """More blocks than a grid may have."""
    twins, lists = Twins(ways=[("kernel", "page_first")]), (slots_of([5, 0, 3], 16), slots_of([1, 4, 2], 16))
    with monkeypatch.context() as patched:
        patched.setattr("kernels_cupy.sm_copy.BLOCKS", ((0, 2**31),))
        with pytest.raises(RuntimeError, match="CUDA_ERROR_INVALID_VALUE"):
            twins.hosts[0].backup(twins.device, *lists)
    assert no_error_left()
    twins.hosts[0]._plans.clear()  # launches are worked out once
    twins.move("backup", *lists).wait()
    twins.compare()


def test_a_copy_that_fails_is_told_and_leaves_the_context_usable() -> None:
    """The batched call refuses the legacy default stream."""
    twins, lists = Twins(), (slots_of([5, 0, 3], 16), slots_of([1, 4, 2], 16))
    ends = tensors_of(twins.hosts[0])[0], twins.device.buffer("k", 0)
    to, source = (np.array([tensor.data_ptr()], np.uint64) for tensor in ends)
    with pytest.raises(RuntimeError, match=r"a batch of 1 copies failed: CUDA error \d+ \(.+\)"):
        Copies().submit(0, to, source, np.array([16], np.uint64))
    assert no_error_left()
    twins.move("backup", *lists).wait()
    twins.compare()


FIRST_TRANSFER = """
import time
import cupy, torch
from refimpl import DevicePool, HostPool, presets, slots_of
spec = presets.mha(2, 2, 16, torch.uint8, 4)
device, slots = DevicePool(spec, 4, "cuda"), slots_of([1, 2], 4).cuda()
torch.cuda.synchronize()
began = time.perf_counter()
host = HostPool(spec, "page_first", 4, "kernel")
host.backup(device, slots, slots).wait()
print(time.perf_counter() - began)
"""


def test_kernels_compile_without_a_toolkit_and_once(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """B32: the first pool and transfer of a process, with an empty cache and with the one that this leaves."""
    environment = {k: v for k, v in os.environ.items() if k not in ("CUDA_PATH", "CUDA_HOME")}
    environment |= {"CUPY_CACHE_DIR": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}

    def first_transfer() -> tuple[float, list[Path]]:
        done = subprocess.run(
            [sys.executable, "-c", FIRST_TRANSFER], env=environment, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stderr
        return float(done.stdout), sorted(path for path in tmp_path.rglob("*") if path.is_file())

    cold, left = first_transfer()
    warm, found = first_transfer()
    record_property("compile_cold_s", cold)
    record_property("compile_warm_s", warm)
    print(f"first transfer: {cold:.2f} s with an empty cache, {warm:.3f} s with a warm one")
    assert left
    assert found == left
    assert warm < cold


# ---- Past 4 GiB

FAR = presets.mla(2, 4096, BYTE, 64)  # 256 KiB a page and layer
HOST_PAGES, DEVICE_PAGES = 8_200, 16_400
# First at, and just before, 4 GiB; then what an address cut to 32 bits would hit instead of the far ones.
HOST_FAR, HOST_NEAR = [8_199, 8_192, 8_191, 5], [7, 0]
DEVICE_FAR, DEVICE_NEAR = [16_399, 16_384, 16_383, 5], [15, 0]


@pytest.fixture(scope="module")
def far() -> Iterator[tuple[Arena, DevicePool]]:
    arena = Arena(HOST_PAGES * FAR.page_bytes)
    yield arena, DevicePool(FAR, DEVICE_PAGES, "cuda")
    arena.close()


@pytest.mark.parametrize("direction", ["backup", "load"])
@every_way
def test_pages_past_four_gigabytes(far: tuple[Arena, DevicePool], backend: str, layout: str, direction: str) -> None:
    arena, device = far
    arena.reset()
    lists = slots_of(HOST_FAR, 64), slots_of(DEVICE_FAR, 64)
    with HostPool(FAR, layout, HOST_PAGES, backend, memory=arena, platform="cuda") as host:
        host_rows = [host.layer_view("latent", layer) for layer in range(2)]
        device_rows = [device.view("latent", layer) for layer in range(2)]
        for rows, pages in ((host_rows, HOST_FAR + HOST_NEAR), (device_rows, DEVICE_FAR + DEVICE_NEAR)):
            for layer in rows:
                layer[pages] = 0
        content = random_pages(FAR, 4)
        source, at = (device_rows, DEVICE_FAR) if direction == "backup" else (host_rows, HOST_FAR)
        for layer, rows in zip(source, content, strict=True):
            layer[at] = rows.to(layer.device)
        submit(host, device, direction, *lists).wait()
        torch.cuda.synchronize()
        assert equal([layer[HOST_FAR] for layer in host_rows], content)
        assert equal([layer[DEVICE_FAR] for layer in device_rows], content)
        assert not any(bool(layer[HOST_NEAR].any()) for layer in host_rows)
        assert not any(bool(layer[DEVICE_NEAR].any()) for layer in device_rows)


# ---- Everything together


@pytest.mark.parametrize("seed", range(20))
def test_a_mixed_workload_agrees_with_the_oracle(seed: int) -> None:
    """Backends, directions, pages and kinds of index lists at random, on one stream, nobody waiting in between."""
    choose = random.Random(seed)
    spec = TOYS[choose.choice([name for name, toy in TOYS.items() if toy(4).components])](4)
    ways = [
        (backend, choose.choice(layouts))
        for backend in ("direct", "kernel", "staged", "auto")
        if (layouts := [layout for layout in LAYOUTS if allowed(spec, layout, backend)])
    ]
    twins = Twins(spec, ways, pages=9, turn=choose.randrange(fill.rounds(spec)), staging_pages=2)
    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(60):
            count = choose.randint(1, 9)
            host, device = (
                slots_of(choose.sample(range(9), count), spec.page_size).to(choose.choice([torch.int32, torch.int64]))
                for _ in range(2)
            )
            there = {
                side: indices.cuda() for side, indices in (("host", host), ("device", device)) if choose.random() < 0.5
            }
            twins.move(choose.choice(["backup", "load"]), host, device, choose.randrange(len(ways)), there)
    twins.compare()


def allowed(spec: PoolSpec, layout: str, backend: str) -> bool:
    return not isinstance(support(spec, layout, backend, "backup", "cuda"), Refusal)


@pytest.mark.ordering
def test_two_threads_on_one_pool_never_get_into_each_others_way() -> None:
    """As two streams do, but submitting at once."""
    twins = Twins(ways=[("staged", "page_first")], pages=32, staging_pages=4)
    order, failures = np.random.default_rng(0), []
    turns = [[[slots_of(16 * i + order.permutation(16), 16) for _ in range(2)] for _ in range(40)] for i in range(2)]
    for i in range(2):
        for turn, lists in enumerate(turns[i]):
            twins.expect(("backup", "load")[turn % 2], lists[0], lists[1])

    def work(i: int) -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                for turn, lists in enumerate(turns[i]):
                    submit(twins.hosts[0], twins.device, ("backup", "load")[turn % 2], *lists)
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    twins.compare()
