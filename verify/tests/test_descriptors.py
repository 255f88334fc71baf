"""What the copy engine is told: every run that it has to move, joined where that is allowed, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from kernels_cupy.descriptors import describe_chunks, describe_runs
from refimpl import DevicePool, HostPool, presets, slots_of
from verify.bench.gpu.variants import merged

Copy = tuple[int, int, int]  # addresses and bytes
HOST, DEVICE = 1 << 46, 1 << 44

numbers = st.integers(0, 40)
lists = st.lists(st.tuples(numbers, numbers), min_size=1, max_size=30)


def copies_of(columns: np.ndarray) -> list[Copy]:
    return [(host, other, nbytes) for host, other, nbytes in columns.T.tolist()]


def joined(runs: Sequence[Copy], begins: Sequence[int], device_begins: Sequence[int] = ()) -> list[Copy]:
    """The definition: a run behind the last one on both sides is part of its copy, unless memory begins there."""
    found: list[Copy] = []
    for host, other, nbytes in runs:
        goes_on = found and (found[-1][0] + found[-1][2], found[-1][1] + found[-1][2]) == (host, other)
        if goes_on and host not in begins and other not in device_begins:
            found[-1] = (*found[-1][:2], found[-1][2] + nbytes)
        else:
            found.append((host, other, nbytes))
    return found


def strides(start: int, page: int, entries: int, item: int) -> int:
    return start + item // entries * page + item % entries * (page // entries)


def test_runs_are_joined_where_both_sides_go_on_and_nowhere_else() -> None:
    host = np.array([100, 108, 116, 200, 208, 300], np.uint64)
    device = np.array([500, 508, 600, 700, 708, 716], np.uint64)
    assert copies_of(merged(host, device, 8)) == [(100, 500, 16), (116, 600, 8), (200, 700, 16), (300, 716, 8)]
    apart = merged(host, device, 8, [0, 208])
    assert copies_of(apart) == [(100, 500, 16), (116, 600, 8), (200, 700, 8), (208, 708, 8), (300, 716, 8)]
    apart = merged(host, device, 8, device_begins=[508, 700])
    assert copies_of(apart) == [(100, 500, 8), (108, 508, 8), (116, 600, 8), (200, 700, 16), (300, 716, 8)]


def test_a_copy_ends_with_the_devices_allocation() -> None:
    """Buffers of an engine may be neighbours by chance, and a copy lies in one allocation."""
    spec, pages = presets.mha(4, 1, 16, torch.uint8, page_size=2), 6
    nbytes, layers = pages * spec.page_size * 16, 2 * len(spec.owned_layers)
    memory = np.zeros(layers * nbytes, np.uint8)
    together = torch.from_numpy(memory).split(nbytes)
    apart = [torch.frombuffer(memory, dtype=torch.uint8, count=nbytes, offset=i * nbytes) for i in range(layers)]
    every = slots_of(list(range(pages)), 2)
    for buffers, descriptors in ((together, 1), (apart, layers)):
        rows = [buffer.view(-1, 1, 16) for buffer in buffers]
        device = DevicePool.wrap(spec, {"k": rows[:4], "v": rows[4:]})
        with HostPool(spec, "layer_first", pages, "direct", platform="emulated") as host:
            assert host.backup(device, every, every).descriptors == descriptors


@example([(0, 5), (1, 6), (2, 7)], 2, 1, 1, False, {0, 1}, False)
@example([(0, 0), (1, 1)], 2, 1, 1, False, set(), True)
@given(
    lists,
    st.integers(1, 3),
    st.sampled_from([1, 2, 4]),
    st.integers(1, 3),
    st.booleans(),
    st.sets(numbers),
    st.booleans(),
)
def test_a_job_is_its_runs_in_order(
    items: list[tuple[int, int]],
    layers: int,
    entries: int,
    loops: int,
    page_after_page: bool,
    edges: set[int],
    neighbours: bool,
) -> None:
    """A layer's allocation on the device is as large as it must be, and the next one's may begin at its end."""
    run, page = 8, 8 * loops * entries * (layers if page_after_page else 1)
    begins = sorted({HOST + edge * page for edge in edges})
    apart = (max(map(max, items)) // entries + 1 if neighbours else 100) * page
    host_starts = [HOST + layer * (run * loops if page_after_page else apart) for layer in range(layers)]
    device_starts = [DEVICE + layer * apart for layer in range(layers)]
    offsets = [run * k for k in range(loops)]
    places = [(layer, pair) for layer in range(layers) for pair in items]
    if page_after_page:
        places = [(layer, pair) for pair in items for layer in range(layers)]
    runs = [
        (strides(host_starts[layer], page, entries, i) + k, strides(device_starts[layer], page, entries, j) + k, run)
        for layer, (i, j) in places
        for k in offsets
    ]
    copies = np.zeros((3, len(runs) + 1), np.int64)
    copies[:, 0] = runs[0][0] - run, runs[0][1] - run, run  # of a job before this one: not to be continued
    host_items, device_items = (np.array(side) for side in zip(*items, strict=True))
    ends = [
        (np.array(starts), np.array(offsets), page, entries, page // entries) for starts in (host_starts, device_starts)
    ]
    edges_of = [np.array(each, np.int64) for each in (begins, device_starts)]
    count = describe_runs(copies, 1, ends[0], host_items, ends[1], device_items, run, page_after_page, *edges_of)
    found = copies_of(copies[:, :count])
    assert found[0][2] == run
    assert found[1:] == joined(runs, begins if len(begins) > 1 else [], device_starts)


@example(items=[0, 1, 2, 3], most=2, count=1, turned=False, edges={0, 1})
@given(
    st.lists(numbers, min_size=1, max_size=30), st.integers(1, 7), st.integers(1, 3), st.booleans(), st.sets(numbers)
)
def test_a_chunk_is_its_pieces_and_ends_at_its_edge(
    items: list[int], most: int, count: int, turned: bool, edges: set[int]
) -> None:
    nbytes = [16 * (p + 1) for p in range(count)]
    pieces = [(HOST + p * (1 << 20), nbytes[p], nbytes[p], 1, 0) for p in range(count)]
    begins = sorted({HOST + edge * nbytes[0] for edge in edges})
    staging = [DEVICE + most * sum(nbytes[:p]) for p in range(count)]
    firsts = range(0, len(items), most)
    halves = [(number + turned) % 2 * most * sum(nbytes) for number in range(len(firsts))]

    def runs_of(first: int, half: int) -> Iterator[Copy]:
        for (begin, size, page, _, _), there in zip(pieces, staging, strict=True):
            for place, item in enumerate(items[first : first + most]):
                yield begin + item * page, there + half + place * size, size

    wanted = [
        joined(list(runs_of(first, half)), begins if len(begins) > 1 else [])
        for first, half in zip(firsts, halves, strict=True)
    ]
    copies, ends = np.zeros((3, len(items) * count), np.int64), np.zeros(len(firsts) + 1, np.int64)
    places = np.array(staging), np.array(halves)
    describe_chunks(copies, ends, np.array(pieces), np.array(items), most, *places, np.array(begins, np.int64))
    found = copies_of(copies[:, : ends[-1]])
    assert [found[a:b] for a, b in pairwise(ends)] == wanted
