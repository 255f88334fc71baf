"""What the copy engine is told: every run that it has to move, joined where that is allowed, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from kernels_cupy.descriptors import describe_chunks, describe_runs
from verify.bench.gpu.variants import merged

Copy = tuple[int, int, int]  # addresses and bytes
HOST, DEVICE = 1 << 46, 1 << 44

numbers = st.integers(0, 40)
lists = st.lists(st.tuples(numbers, numbers), min_size=1, max_size=30)


def copies_of(columns: np.ndarray) -> list[Copy]:
    return [(host, other, nbytes) for host, other, nbytes in columns.T.tolist()]


def joined(runs: Sequence[Copy], begins: Sequence[int]) -> list[Copy]:
    """The definition: a run behind the last one on both sides is part of its copy, unless a registration begins."""
    found: list[Copy] = []
    for host, other, nbytes in runs:
        if found and (found[-1][0] + found[-1][2], found[-1][1] + found[-1][2]) == (host, other) and host not in begins:
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


@example(items=[(0, 5), (1, 6), (2, 7)], layers=2, entries=1, loops=1, page_after_page=False, edges={0, 1})
@given(lists, st.integers(1, 3), st.sampled_from([1, 2, 4]), st.integers(1, 3), st.booleans(), st.sets(numbers))
def test_a_job_is_its_runs_in_order(
    items: list[tuple[int, int]], layers: int, entries: int, loops: int, page_after_page: bool, edges: set[int]
) -> None:
    run, page = 8, 8 * loops * entries * (layers if page_after_page else 1)
    begins = sorted({HOST + edge * page for edge in edges})
    host_starts = [HOST + layer * (run * loops if page_after_page else 100 * page) for layer in range(layers)]
    device_starts = [DEVICE + layer * 100 * page for layer in range(layers)]
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
    count = describe_runs(
        copies, 1, ends[0], host_items, ends[1], device_items, run, page_after_page, np.array(begins, np.int64)
    )
    found = copies_of(copies[:, :count])
    assert found[0][2] == run
    assert found[1:] == joined(runs, begins if len(begins) > 1 else [])


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
