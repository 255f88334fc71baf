"""The emulated device is honest: threads, barriers, structs and addresses are what a GPU would make of them."""

from __future__ import annotations

import ctypes
import itertools
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kernels_cupy
from kernels_cupy import emu
from kernels_cupy.descriptors import distance
from kernels_cupy.jobs import End, begins_and_offsets, device_addresses, registration_of
from kernels_cupy.launches import Shape, launches, widest_word
from kernels_cupy.lists import completion, place
from kernels_cupy.runtimes import emulated
from kernels_cupy.specs import CHECK_INDICES, KERNELS, MAX_STARTS, SIDE, SOURCES, Kernel
from refimpl import DevicePool, HostPool, oracle, presets, slots_of
from refimpl.emulated import POISON, QueuedEvent, QueueRuntime
from refimpl.indices import Items, Unchecked, check, check_pair
from refimpl.plan import Loop, Plan, Registration
from verify import fill, sparse
from verify.bench.gpu.variants import merged
from verify.guarded import GuardedDevice, GuardedMemory, on_the_device
from verify.sparse import GIB, PAGES, SPEC, Sparse, SparseMemory, device_pieces, far_pages, host_pieces, require_exactly

pytestmark = pytest.mark.emulated

ORDERS = range(5)


class Runner(Protocol):
    def __call__(self, text: str, struct: str, arguments: np.ndarray, threads: int = 1, order: int = 0) -> None: ...


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Runner:
    """Runs a kernel written in a test by the way that every kernel goes."""

    def launch(text: str, struct: str, arguments: np.ndarray, threads: int = 1, order: int = 0) -> None:
        path = tmp_path / f"{abs(hash(text))}.cu"
        path.write_text(text)
        kernel = Kernel(str(path), struct, arguments.dtype, ("test_kernel",))
        monkeypatch.setattr(kernels_cupy, "CACHE", tmp_path)
        monkeypatch.setattr(emu, "kernel_of", lambda instance: kernel)
        emu.launch("test_kernel", 1, threads, arguments, order)

    return launch


# ---- threads and barriers

PASS_ON = """
struct PassOn { int* to; const int* source; };
static int held[64];
__global__ void test_kernel(const PassOn a) {
  int self = threadIdx.x, last = blockDim.x - 1;
  held[self] = a.source[self];
  BARRIER
  a.to[self] = held[FROM];
}
"""
POINTERS = np.dtype([("to", np.uint64), ("source", np.uint64)], align=True)
THREADS = 37
SELF = np.arange(THREADS)

# Whose value a thread takes: in C++, and of all threads.
PARTNERS = {
    "mirrored": ("last - self", SELF[::-1]),
    "left": ("self ? self - 1 : 0", np.maximum(SELF - 1, 0)),
    "right": ("self < last ? self + 1 : last", np.minimum(SELF + 1, THREADS - 1)),
}


def passed_on(run: Runner, barrier: str, partner: str) -> list[bool]:
    """Whether every thread had what another one had stored, in each order of the threads."""
    expression, of = PARTNERS[partner]
    text, right = PASS_ON.replace("BARRIER", barrier).replace("FROM", expression), []
    for order in ORDERS:
        source, to = SELF.astype(np.int32) + 100 * (order + 1), np.zeros(THREADS, np.int32)
        run(text, "PassOn", np.array((to.ctypes.data, source.ctypes.data), POINTERS), THREADS, order)
        right.append(np.array_equal(to, source[of]))
    return right


@pytest.mark.parametrize("partner", PARTNERS)
def test_what_was_stored_before_a_barrier_is_seen_behind_it(run: Runner, partner: str) -> None:
    assert all(passed_on(run, "__syncthreads();", partner))


@pytest.mark.parametrize("partner", PARTNERS)
def test_a_missing_barrier_shows_in_some_order(run: Runner, partner: str) -> None:
    assert not all(passed_on(run, "", partner))


IN_A_PROCESS = """
import numpy as np
from kernels_cupy import emu
from kernels_cupy.specs import Kernel
arguments = np.zeros((), np.dtype([("unused", np.int64)], align=True))
kernel = Kernel({path!r}, "Nothing", arguments.dtype, ("test_kernel",))
emu.kernel_of = lambda instance: kernel
emu.launch("test_kernel", 3, {threads}, arguments)
print("went through")
"""
NOT_REACHED = "a barrier was not reached by all threads"


@pytest.mark.parametrize(
    ("body", "threads", "message"),
    [
        ("if (threadIdx.x) __syncthreads();", 8, f"block 0: {NOT_REACHED}"),
        ("if (threadIdx.x > 6) return; __syncthreads();", 8, f"block 0: {NOT_REACHED}"),
        ("for (unsigned i = 0; i < 1 + threadIdx.x % 2; i++) __syncthreads();", 8, f"block 0: {NOT_REACHED}"),
        ("if (blockIdx.x == 1 && threadIdx.x == 0) __syncthreads();", 8, f"block 1: {NOT_REACHED}"),
        ("if (threadIdx.x % 2) __syncthreads();\nelse __syncthreads();", 8, "threads wait at different barriers"),
        ("", 1025, "a block has 1 to 1024 threads"),
        ("", 0, "a block has 1 to 1024 threads"),
        ("__syncthreads(); __syncthreads();", 1024, ""),
    ],
    ids=[
        "skipped",
        "left early",
        "of unequal number",
        "in a later block",
        "at two places",
        "1025 threads",
        "no threads",
        "in order",
    ],
)
def test_barriers_that_would_hang_a_gpu_end_the_process(body: str, threads: int, message: str, tmp_path: Path) -> None:
    path = tmp_path / "test.cu"
    path.write_text(f"struct Nothing {{ long long unused; }};\n__global__ void test_kernel(const Nothing) {{ {body} }}")
    done = subprocess.run(
        [sys.executable, "-c", IN_A_PROCESS.format(path=str(path), threads=threads)],
        env={"XDG_CACHE_HOME": str(tmp_path), "PATH": "/usr/local/bin:/usr/bin:/bin"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )
    assert message in done.stderr
    assert ("went through" in done.stdout, done.returncode == 0) == (not message, not message)


def test_without_a_compiler_its_name_and_package_are_told(run: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(emu.NoCompiler, match=r"no C\+\+ compiler: install g\+\+"):
        run("", "Nothing", np.zeros((), np.int64))


def test_machines_of_several_kinds_may_share_a_cache(
    run: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "struct Nothing { long long unused; };\n__global__ void test_kernel(const Nothing) {}"
    for machine in ("this one", "another one", "this one"):
        emu._library.cache_clear()
        monkeypatch.setattr(platform, "machine", lambda machine=machine: machine)
        run(text, "Nothing", np.zeros((), np.dtype([("unused", np.int64)], align=True)))
    assert len(list(tmp_path.glob("*/*.so"))) == 2


def test_a_struct_of_another_kernel_is_refused() -> None:
    with pytest.raises(TypeError, match=r"copy_runs<16> takes"):
        emu.launch("copy_runs<16>", 1, 1, np.zeros((), CHECK_INDICES))


# ---- arguments


def leaves(dtype: np.dtype, name: str = "", first: int = 0) -> Iterator[tuple[str, int, int]]:
    """`(name, offset, bytes)` of every field, nested ones by their path."""
    for field, (kind, offset, *_) in (dtype.fields or {}).items():
        path = f"{name}.{field}".lstrip(".")
        if kind.fields:
            yield from leaves(kind, path, first + offset)
        else:
            yield path, first + offset, kind.itemsize


@pytest.mark.parametrize(
    ("file", "struct", "dtype"),
    [("copy_runs.cu", "Side", SIDE), *((k.file, k.struct, k.arguments) for k in KERNELS)],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_structs_are_the_same_in_numpy_and_in_c(file: str, struct: str, dtype: np.dtype, tmp_path: Path) -> None:
    rows = "".join(
        f'  printf("%s %zu %zu\\n", "{name}", offsetof({struct}, {name}), sizeof((({struct}*)0)->{name}));\n'
        for name, _, _ in leaves(dtype)
    )
    code, program = tmp_path / "layout.cpp", tmp_path / "layout"
    code.write_text(
        f'#include "primitives.cuh"\n#include "{file}"\n#include <cstddef>\nint main() {{\n{rows}'
        f'  printf("whole %zu %zu\\n", sizeof({struct}), alignof({struct}));\n}}\n'
    )
    options = [option for option in emu.COMPILE if option not in ("-shared", "-O2")]
    includes = [f"-I{SOURCES}", f"-I{Path(emu.__file__).parent}"]
    subprocess.run([*options, *includes, str(code), "-o", str(program)], check=True)
    said = subprocess.run([str(program)], capture_output=True, text=True, check=True).stdout.splitlines()
    expected = [f"{name} {offset} {nbytes}" for name, offset, nbytes in leaves(dtype)]
    assert said == [*expected, f"whole {dtype.itemsize} {dtype.alignment}"]


@pytest.mark.parametrize("order", [("wide", "narrow", "real"), ("narrow", "wide", "real"), ("real", "narrow", "wide")])
def test_numbers_of_every_width_arrive_as_they_were(run: Runner, order: tuple[str, ...]) -> None:
    """Integers and floats mixed in one struct: a wrong width or a gap forgotten would shift them."""
    kinds = {"wide": ("long long", np.int64), "narrow": ("int", np.int32), "real": ("float", np.float32)}
    members = " ".join(f"{kinds[name][0]} {name};" for name in order)
    text = f"""
struct Told {{ long long wide; int narrow; float real; }};
struct Echo {{ Told* to; {members} }};
__global__ void test_kernel(const Echo a) {{ *a.to = {{a.wide, a.narrow, a.real}}; }}
"""
    told = np.zeros((), np.dtype([("wide", np.int64), ("narrow", np.int32), ("real", np.float32)], align=True))
    arguments = np.zeros((), np.dtype([("to", np.uint64), *((n, kinds[n][1]) for n in order)], align=True))
    arguments["to"], arguments["wide"], arguments["narrow"], arguments["real"] = told.ctypes.data, 2**31 + 64, -1, 2.0
    run(text, "Echo", arguments)
    assert told.tolist() == (2147483712, -1, 2.0)


# ---- addresses: never a float, never 32 bits, never rounded

HIGH = 0x7F1234567001


def begins(registrations: Sequence[Registration]) -> np.ndarray:
    return begins_and_offsets(Plan((), tuple(registrations)))[0]


def test_addresses_of_registered_memory_stay_whole_numbers() -> None:
    registrations = (
        Registration(HIGH, HIGH + 4096, HIGH + 4096),
        Registration(HIGH + 4096, HIGH + 8192, 0x10000),  # below: the way there is a negative number
    )
    addresses = np.array([HIGH, HIGH + 4095, HIGH + 4096, HIGH + 8191], np.uint64)
    assert registration_of(begins(registrations), addresses).tolist() == [0, 0, 1, 1]
    mapped = device_addresses(Plan((), registrations), addresses)
    assert mapped.dtype == np.uint64
    assert mapped.tolist() == [HIGH + 4096, HIGH + 8191, 0x10000, 0x10000 + 4095]
    assert device_addresses(Plan(()), addresses).tolist() == addresses.tolist()


def test_addresses_past_the_precision_of_a_double_stay_exact() -> None:
    top = 2**63 + 2**40 + 1
    registrations = (Registration(top, top + 4096, top + 8192),)
    assert device_addresses(Plan((), registrations), np.array([top + 1], np.uint64)).tolist() == [top + 8193]
    runs = np.array([top, top + 7, top + 15], np.uint64)
    assert merged(runs, runs, 7, begins(registrations).tolist()).tolist() == [[top, top + 15], [top, top + 15], [14, 7]]
    assert distance(2**31, 4096, 1, 0) == 2**43
    end = End(np.array([top], np.uint64), 1)
    (launch,) = launches(end, end, (), 1, "backup", Shape(1, 1, 16))
    assert int(launch.arguments["to"]["starts"][0]) == top


@pytest.mark.parametrize("backend", ["kernel", "direct", "staged"])
@pytest.mark.parametrize("direction", ["backup", "load"])
def test_pages_past_4_gib_move_and_nothing_else_is_touched(backend: str, direction: str) -> None:
    memory = SparseMemory()
    host = HostPool(SPEC, "page_first", PAGES, backend, memory=memory, platform="emulated", staging_pages=4)
    files = {
        (c.name, layer): Sparse(PAGES * SPEC.page_size * c.row_bytes) for c in SPEC.components for layer in range(2)
    }
    device = DevicePool.wrap(
        SPEC,
        {
            c.name: [files[c.name, i].tensor.view(c.dtype).view(-1, c.head_count, *c.row_shape) for i in range(2)]
            for c in SPEC.components
        },
    )
    host_pages = far_pages("page_first")[:3]
    device_pages = [*host_pages[1:], host_pages[0]]
    pairs = list(zip(host_pages, device_pages, strict=True))
    at = slots_of(host_pages, 64), slots_of(device_pages, 64)
    assert memory.maps[0].tensor.numel() > 16 * GIB
    if direction == "backup":
        for key, file in files.items():
            sparse.fill(file, device_pieces(*key, [(page, page) for page in device_pages]))
        host.backup(device, *at).wait()
        require_exactly(memory.maps[0], host_pieces("page_first", pairs), "host")
    else:
        sparse.fill(memory.maps[0], host_pieces("page_first", [(page, page) for page in host_pages]))
        host.load_all(device, *at).wait()
        for key, file in files.items():
            require_exactly(file, device_pieces(*key, [(d, h) for h, d in pairs]), f"device {key}")
    host.close()


# ---- what a launch copies


def test_loops_are_nested_as_the_plan_says() -> None:
    """Three loops of different lengths, strides in an order that fits no memory layout, lists on both sides."""
    loops = (Loop(2, 7, 100), Loop(3, 14, 1), Loop(5, 42, 10))
    source, to = np.arange(1000, dtype=np.uint16).view(np.uint8), np.zeros(2000, np.uint8)
    host, device = (End(np.array([a.ctypes.data], np.uint64), page) for a, page in ((to, 210), (source, 1000)))
    items = np.array([1, 0], np.int64), np.array([0, 1], np.int64)
    for launch in launches(host, device, loops, 1, "backup", Shape(2, 4, 16)):
        launch.submit(emulated(), emulated().current(), items[0].ctypes.data, items[1].ctypes.data, 2)
    emulated().synchronize()
    expected = np.zeros(2000, np.uint8)
    for h, d in zip(*items, strict=True):
        for i, j, k in np.ndindex(2, 3, 5):
            expected[h * 210 + 7 * i + 14 * j + 42 * k] = source[d * 1000 + 100 * i + j + 10 * k]
    assert to.tolist() == expected.tolist()


@pytest.mark.parametrize("run_bytes", [1, 15, 16, 17, 64, 100, 513, 8192 + 16])
@pytest.mark.parametrize("piece", [16, 20, 8192])
@pytest.mark.parametrize("lanes", [1, 8, 32])
def test_every_byte_of_a_run_is_copied_and_none_behind_it(run_bytes: int, piece: int, lanes: int) -> None:
    """Whatever the piece, whatever the threads that share it: four rows of six, three pieces at a time."""
    source = np.random.default_rng(run_bytes).integers(1, 256, 6 * 10000, np.uint8)
    to = np.zeros_like(source)
    # NumPy's arrays are 16-byte aligned; 10000 is a multiple of 16, so the run alone decides on the word.
    host, device = (End(np.array([a.ctypes.data], np.uint64), 10000) for a in (to, source))
    for launch in launches(host, device, (), run_bytes, "backup", Shape(1, lanes, piece, 3)):
        launch.submit(emulated(), emulated().current(), 0, 0, 4)
    emulated().synchronize()
    expected = np.zeros_like(source).reshape(6, 10000)
    expected[:4, :run_bytes] = source.reshape(6, 10000)[:4, :run_bytes]
    assert np.array_equal(to, expected.reshape(-1))


@pytest.mark.parametrize("count", [MAX_STARTS, MAX_STARTS + 1, 2 * MAX_STARTS + 18])
def test_layers_that_fill_more_than_one_launch(count: int) -> None:
    source, to = np.random.default_rng(count).integers(1, 256, 32 * count, np.uint8), np.zeros(32 * count, np.uint8)
    host, device = (End(a.ctypes.data + 16 * np.arange(count, dtype=np.uint64), 16 * count) for a in (to, source))
    found = launches(host, device, (), 8, "backup", Shape(1, 1, 16))
    assert len(found) == -(-count // MAX_STARTS)
    for launch in found:
        launch.submit(emulated(), emulated().current(), 0, 0, 2)
    emulated().synchronize()
    expected = source.reshape(-1, 16).copy()
    expected[:, 8:] = 0
    assert np.array_equal(to, expected.reshape(-1))


ALIGNED = {"start": 32, "page": 64, "entry": 16, "loop": 48, "run": 16}


@pytest.mark.parametrize("side", ["host", "device"])
@pytest.mark.parametrize("odd", [*ALIGNED, "nothing"])
@pytest.mark.parametrize("word", [1, 2, 4, 8])
def test_words_are_as_wide_as_everything_allows(word: int, odd: str, side: str) -> None:
    """One number that is a multiple of no more than `word` narrows them, on whichever side it is."""
    strange = ALIGNED | ({} if odd == "nothing" else {odd: ALIGNED[odd] + word})
    plain = ALIGNED | {"run": strange["run"]}
    host, device = (strange, plain) if side == "host" else (plain, strange)
    ends = [End(np.array([64, n["start"]], np.uint64), n["page"], 4, n["entry"]) for n in (host, device)]
    found = widest_word(ends[0], ends[1], (Loop(2, host["loop"], device["loop"]),), strange["run"])
    assert found == (16 if odd == "nothing" else word)


def test_a_launch_has_arguments_of_its_own() -> None:
    to, source = np.zeros(16, np.uint8), np.arange(16, dtype=np.uint8)
    host, device = (End(np.array([a.ctypes.data], np.uint64), 16) for a in (to, source))
    (launch,) = launches(host, device, (), 16, "backup", Shape(1, 1, 16))
    launch.submit(emulated(), emulated().current(), 0, 0, 1)
    launch.submit(emulated(), emulated().current(), 0, 0, 0)
    emulated().synchronize()
    assert to.tolist() == source.tolist()


# ---- index lists that lie on the device


def by_the_device(items: Items) -> tuple[str, dict[str, list[int]]]:
    """What the device says of lists: what is wrong, or the pages that they name."""
    stream = emulated().current()
    placed = place(emulated(), stream, items, ("host", "device"))
    done = completion(emulated(), stream, placed, emulated().record(stream))
    try:
        done.synchronize()
    except ValueError as wrong:
        return str(wrong), {}
    count = ctypes.c_int64 * len(items)
    return "", {side: list(count.from_address(getattr(placed, side))) for side in ("host", "device")}


@st.composite
def lists(draw: st.DrawFn, page_size: int) -> tuple[list[int], int]:
    """Slots of pages, all good or with something wrong about one of them; and the pages of the pool."""
    num_pages = draw(st.integers(2, 70))
    pages = draw(st.lists(st.integers(0, num_pages - 1), min_size=1, max_size=40, unique=True))
    slots = slots_of(pages, page_size).reshape(-1, page_size)
    at = draw(st.integers(0, len(pages) - 1))
    kind = draw(st.sampled_from(["good", "shifted", "below", "above", "repeated", "broken"]))
    if kind == "shifted":
        slots[at] += draw(st.integers(-page_size, page_size))
    elif kind == "below":
        slots[at] -= (pages[at] + draw(st.integers(1, 3))) * page_size
    elif kind == "above":
        slots[at] += (num_pages - pages[at] + draw(st.integers(0, 40))) * page_size
    elif kind == "repeated":
        slots[at] = slots[draw(st.integers(0, len(pages) - 1))]
    elif kind == "broken":
        token = draw(st.integers(0, page_size - 1))
        slots[at, token] = draw(st.integers(-2, num_pages * page_size + 2))
    return slots.reshape(-1).tolist(), num_pages


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=["int64", "int32"])
@pytest.mark.parametrize("page_size", [1, 4, 16])
@settings(max_examples=60)
@given(data=st.data())
def test_the_device_says_of_a_list_what_the_host_says(page_size: int, dtype: torch.dtype, data: st.DataObject) -> None:
    slots, num_pages = data.draw(lists(page_size))
    unique = data.draw(st.booleans())
    indices = torch.tensor(slots, dtype=dtype)
    try:
        expected = "", check(indices, page_size, num_pages, "device", unique).tolist()
    except ValueError as wrong:
        expected = str(wrong), None
    other = np.arange(len(slots) // page_size)
    there = Unchecked(on_the_device(indices), page_size, num_pages, "device", unique)
    found = by_the_device(Items(other, there))
    assert (found[0], found[1].get("device")) == expected
    assert found[1].get("host", other.tolist()) == other.tolist()


WRONG = {
    "unaligned": lambda slots: slots + 1,
    "broken page": lambda slots: torch.cat([slots[:-1], slots[-2:-1]]),
    "out of range": lambda slots: torch.cat([slots[4:], torch.arange(4) + 4000]),
    "negative": lambda slots: torch.cat([slots[:-4], torch.arange(-4, 0)]),
    "repeated": lambda slots: torch.cat([slots[:-4], slots[:4]]),
}


@pytest.mark.parametrize("side", ["host", "device"])
@pytest.mark.parametrize("broken", WRONG)
def test_either_list_may_be_the_wrong_one(broken: str, side: str) -> None:
    good = slots_of([7, 33, 0, 5], 4)
    both = {"host": good, "device": good, side: WRONG[broken](good)}
    direction = "backup" if side == "host" else "load"
    with pytest.raises(ValueError, match=side) as refused:
        check_pair(both["host"], both["device"], 4, 40, 40, direction)
    host, device = (on_the_device(indices) for indices in both.values())
    found = by_the_device(check_pair(host, device, 4, 40, 40, direction, lambda _, list_: emulated().holds(list_)))
    assert found == (str(refused.value), {})


@pytest.mark.parametrize("at", [0, 8192, -1])
def test_a_list_for_many_blocks_is_checked_to_its_end(at: int) -> None:
    pages = np.random.default_rng(0).permutation(1200)
    slots = slots_of(pages, 16)
    _, found = by_the_device(Items(pages, Unchecked(on_the_device(slots), 16, 1200, "device", True)))
    assert found["device"] == pages.tolist()
    slots[at] += 16
    wrong, _ = by_the_device(Items(pages, Unchecked(on_the_device(slots), 16, 1200, "device", True)))
    assert "device index" in wrong


# ---- lists of a transfer

TOY = presets.mha(layers=3, heads=2, head_dim=8, dtype=torch.bfloat16, page_size=4)
PAGES_OF_TOY = 9


class Scene:
    """Guarded pools with the oracle's twins, and lists of five pages: three chunks of a staging buffer."""

    def __init__(self, backend: str, direction: str, layout: str = "page_first") -> None:
        self.direction = direction
        self.memory, self.expected_memory = GuardedMemory(), GuardedMemory()
        self.host = HostPool(
            TOY, layout, PAGES_OF_TOY, backend, memory=self.memory, platform="emulated", staging_pages=4
        )
        self.expected_host = HostPool(TOY, layout, PAGES_OF_TOY, memory=self.expected_memory)
        self.device, self.expected_device = (GuardedDevice(TOY, PAGES_OF_TOY) for _ in range(2))
        for device, host, memory in (
            (self.device, self.host, self.memory),
            (self.expected_device, self.expected_host, self.expected_memory),
        ):
            fill.fill_device(device.pool, 0)
            fill.fill_host(host, 0)
            for whole in memory.whole if direction == "backup" else device.whole:
                whole.bitwise_not_()  # the destination holds something else
        self.at = slots_of([3, 8, 1, 0, 5], 4), slots_of([6, 2, 7, 4, 1], 4)

    def move(self, host: torch.Tensor, device: torch.Tensor) -> None:
        self.host.prepare(self.device.pool, host, device, self.direction).run().wait()

    def expect(self) -> None:
        move = oracle.backup if self.direction == "backup" else oracle.load
        move(self.expected_host, self.expected_device.pool, *self.at)

    def compare(self) -> None:
        pairs = ((self.memory, self.expected_memory), (self.device, self.expected_device))
        assert all(torch.equal(a, b) for m, e in pairs for a, b in zip(m.whole, e.whole, strict=True))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=["int64", "int32"])
@pytest.mark.parametrize("where", ["host there", "device there", "both there", "both here"])
@pytest.mark.parametrize("direction", ["backup", "load"])
@pytest.mark.parametrize("backend", ["kernel", "direct", "staged", "auto"])
def test_lists_may_lie_anywhere(backend: str, direction: str, where: str, dtype: torch.dtype) -> None:
    scene = Scene(backend, direction)
    host, device = (indices.to(dtype) for indices in scene.at)
    if where in ("host there", "both there"):
        host = on_the_device(host, complete=True)
    if where in ("device there", "both there"):
        device = on_the_device(device, complete=True)
    scene.move(host, device)
    scene.expect()
    scene.compare()


@pytest.mark.parametrize(
    ("broken", "direction"),
    [(kind, way) for kind in WRONG for way in ("backup", "load") if (kind, way) != ("repeated", "backup")],
)
@pytest.mark.parametrize("backend", ["kernel", "staged", "auto"])
def test_a_wrong_list_that_the_device_finds_moves_nothing(broken: str, backend: str, direction: str) -> None:
    scene = Scene(backend, direction)
    wrong = WRONG[broken](scene.at[1])
    with pytest.raises(ValueError, match="device index") as refused:
        check_pair(scene.at[0], wrong, 4, PAGES_OF_TOY, PAGES_OF_TOY, direction)
    with pytest.raises(ValueError, match="device index") as found:
        scene.move(scene.at[0], on_the_device(wrong))
    assert str(found.value) == str(refused.value)
    emulated().synchronize()
    scene.compare()
    scene.move(scene.at[0], on_the_device(scene.at[1]))  # and the pool goes on
    scene.expect()
    scene.compare()


@pytest.mark.parametrize("backend", ["kernel", "staged"])
def test_a_wrong_list_is_told_with_every_layer(backend: str) -> None:
    scene = Scene(backend, "load")
    transfer = scene.host.prepare(scene.device.pool, scene.at[0], on_the_device(scene.at[1] + 1), "load")
    for layer in (2, 0, 1):
        receipt = transfer.run((layer,))
        with pytest.raises(ValueError, match="no multiple of 4"):
            receipt.wait()
    scene.compare()


@pytest.mark.parametrize("backend", ["kernel", "staged"])
@pytest.mark.parametrize("direction", ["backup", "load"])
def test_a_list_that_is_written_just_before_the_transfer_is_read_then(backend: str, direction: str) -> None:
    """In order of the caller's stream, by whoever makes lists on a GPU."""
    for seed in range(5):
        emulated().reseed(seed)
        scene = Scene(backend, direction)
        scene.move(scene.at[0], on_the_device(scene.at[1]))
        scene.expect()
        scene.compare()


@pytest.mark.parametrize("backend", ["kernel", "staged"])
def test_a_list_may_be_forgotten_once_the_transfer_is_submitted(backend: str) -> None:
    """Its memory belongs to another stream, which hands it out again as soon as nobody holds it."""
    for seed in range(5):
        emulated().reseed(seed)
        scene = Scene(backend, "backup")
        with emulated().on("of lists"):
            indices = on_the_device(scene.at[1], complete=True)
        scene.host.backup(scene.device.pool, scene.at[0], indices)
        del indices
        emulated().record(emulated().current()).synchronize()
        scene.expect()
        scene.compare()


# ---- the queue


def test_an_upload_is_a_copy() -> None:
    array = np.arange(5)
    memory = emulated().upload(array)
    array[:] = 9
    emulated().synchronize()
    assert memory.view(torch.int64).tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("advance", [False, True], ids=["waiting", "advancing"])
def test_an_interrupted_operation_is_run_again(advance: bool) -> None:
    """On a CPU this is the device: what it forgets is waited for in vain."""
    queue, ran = QueueRuntime(lambda *_: None), list[str]()

    def copy() -> None:
        ran.append("begun")
        if len(ran) == 1:
            raise KeyboardInterrupt

    queue.submit(copy, "a")
    event = queue.record("a")
    with pytest.raises(KeyboardInterrupt):
        queue.advance() if advance else event.synchronize()
    event.synchronize()
    assert ran == ["begun", "begun"]


def test_an_operation_that_fails_is_not_run_again() -> None:
    queue, ran = QueueRuntime(lambda *_: None), list[str]()

    def copy() -> None:
        ran.append("begun")
        raise OSError("the bus is down")

    queue.submit(copy, "a")
    event = queue.record("a")
    with pytest.raises(OSError, match="the bus is down"):
        event.synchronize()
    event.synchronize()
    assert ran == ["begun"]


def test_nothing_runs_before_somebody_waits_and_no_more_than_is_needed() -> None:
    queue, ran = QueueRuntime(lambda *_: None), []
    queue.submit(lambda: ran.append("first"), "a")
    event = queue.record("a")
    queue.submit(lambda: ran.append("later"), "a")
    assert ran == []
    assert not event.query()
    event.synchronize()
    assert (ran, event.query()) == (["first"], True)
    queue.synchronize()
    assert ran == ["first", "later"]


def test_streams_take_turns_in_every_order_but_those_that_events_forbid() -> None:
    seen: set[str] = set()
    for seed in range(200):
        queue, ran = QueueRuntime(lambda *_: None, seed=seed), []
        queue.submit(lambda ran=ran: ran.append("a"), "one")
        event = queue.record("one")
        queue.submit(lambda ran=ran: ran.append("b"), "one")
        queue.submit(lambda ran=ran: ran.append("x"), "two")
        queue.wait("two", event)
        queue.submit(lambda ran=ran: ran.append("y"), "two")
        queue.synchronize()
        seen.add("".join(ran))
    orders = {"".join(order) for order in itertools.permutations("abxy")}
    forbidden = [("b", "a"), ("y", "x"), ("y", "a")]
    assert seen == {o for o in orders if not any(o.index(first) < o.index(then) for first, then in forbidden)}


def test_copies_of_a_batch_are_done_in_any_order() -> None:
    seen: set[int] = set()
    for seed in range(50):
        queue, to, source = (
            QueueRuntime(lambda *_: None, seed=seed),
            np.zeros(1, np.uint8),
            np.arange(3, dtype=np.uint8),
        )
        same, ones = np.full(3, to.ctypes.data, np.uint64), np.ones(3, np.uint64)
        queue.copy("a", same, source.ctypes.data + np.arange(3, dtype=np.uint64), ones)
        queue.synchronize()
        seen.add(int(to[0]))
    assert seen == {0, 1, 2}


def test_an_event_that_nothing_reaches_is_reported() -> None:
    queue = QueueRuntime(lambda *_: None)
    queue.wait("a", QueuedEvent(queue))
    with pytest.raises(RuntimeError, match="nothing will reach"):
        queue.record("a").synchronize()


def test_forgotten_memory_is_poison_in_order_of_its_stream() -> None:
    queue = QueueRuntime(lambda *_: None)
    memory = queue.empty(300)
    assert (memory.data_ptr() % 256, len(memory), set(memory.tolist())) == (0, 300, {POISON})
    memory.zero_()
    seen = np.ctypeslib.as_array((ctypes.c_uint8 * 300).from_address(memory.data_ptr()))
    queue.keep(memory)
    del memory
    assert not seen.any()
    queue.synchronize()  # lets go of what was kept
    queue.synchronize()
    assert (seen == POISON).all()
