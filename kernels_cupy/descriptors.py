"""Descriptors of the copy engine: runs that continue each other on both sides become one, within one allocation.

In loops that numba compiles when this is imported: NumPy takes its time over every step, however few runs there are.
Addresses are int64 here, which wrap around as uint64 do; numba would make a float of the two together.
"""

from __future__ import annotations

import numpy as np
from numba import types

from refimpl.compiled import compiled

ADDRESSES, COPIES, NUMBER = types.int64[::1], types.int64[:, ::1], types.int64
END = types.Tuple((ADDRESSES, ADDRESSES, NUMBER, NUMBER, NUMBER))

# Where page 0 of each layer begins, how far from an item's start its runs do, and bytes of a page, entries of a page,
# bytes of an entry.
Ends = tuple[np.ndarray, np.ndarray, int, int, int]


@compiled(NUMBER(NUMBER, NUMBER, NUMBER, NUMBER))
def distance(item: int, page: int, entries: int, entry_bytes: int) -> int:
    """Bytes from item 0 to another one."""
    return item * page if entries == 1 else item // entries * page + item % entries * entry_bytes


@compiled(types.boolean(ADDRESSES, NUMBER))
def begins_one(begins: np.ndarray, address: int) -> bool:
    """Whether one of the registrations that begin there, in ascending order, begins at an address."""
    at = np.searchsorted(begins, address)
    return bool(at < len(begins) and begins[at] == address)


@compiled(NUMBER(COPIES, NUMBER, NUMBER, NUMBER, NUMBER, types.boolean))
def added(copies: np.ndarray, count: int, host: int, other: int, nbytes: int, goes_on: bool) -> int:
    """One run more, as part of the last copy or as a copy of its own; returns how many there are."""
    if goes_on:
        copies[2, count - 1] += nbytes
        return count
    copies[0, count], copies[1, count], copies[2, count] = host, other, nbytes
    return count + 1


@compiled(NUMBER(COPIES, NUMBER, END, ADDRESSES, END, ADDRESSES, NUMBER, types.boolean, ADDRESSES, ADDRESSES))
def describe_runs(
    copies: np.ndarray,
    count: int,
    host: Ends,
    host_items: np.ndarray,
    device: Ends,
    device_items: np.ndarray,
    run: int,
    page_after_page: bool,
    begins: np.ndarray,
    device_begins: np.ndarray,
) -> int:
    """Every run of a job, behind `count` copies that are there already; returns how many there are then.

    copies           host addresses, device addresses, bytes: a row each, with room for all
    page_after_page  or layer after layer
    begins           of registrations, ascending
    device_begins    of the device's allocations, ascending: two that happen to be neighbours may hold two layers
    """
    starts, offsets, page, entries, entry_bytes = host
    device_starts, device_offsets, device_page, device_entries, device_entry_bytes = device
    layers, items, several = len(starts), len(host_items), len(begins) > 1
    next_at = next_there = last = -1  # behind the last copy; what is there already is not continued
    for outer in range(items if page_after_page else layers):
        for inner in range(layers if page_after_page else items):
            layer, i = (inner, outer) if page_after_page else (outer, inner)
            at = starts[layer] + distance(host_items[i], page, entries, entry_bytes)
            there = device_starts[layer] + distance(device_items[i], device_page, device_entries, device_entry_bytes)
            for k in range(len(offsets)):
                run_at, run_there = at + offsets[k], there + device_offsets[k]
                goes_on = run_at == next_at and run_there == next_there
                goes_on = goes_on and not (several and begins_one(begins, run_at))
                goes_on = goes_on and not (layer != last and begins_one(device_begins, run_there))
                count = added(copies, count, run_at, run_there, run, goes_on)
                next_at, next_there, last = run_at + run, run_there + run, layer
    return count


@compiled(types.void(COPIES, ADDRESSES, COPIES, ADDRESSES, NUMBER, ADDRESSES, ADDRESSES, ADDRESSES))
def describe_chunks(
    copies: np.ndarray,
    edges: np.ndarray,
    pieces: np.ndarray,
    items: np.ndarray,
    most: int,
    staging: np.ndarray,
    halves: np.ndarray,
    begins: np.ndarray,
) -> None:
    """Between host memory and a staging buffer, chunk after chunk: those of a chunk end at its edge in `edges`.

    pieces   of an item, a row each: begin in item 0, bytes, and the strides that `distance` takes
    most     items of a chunk
    staging  where each piece of the first item goes in the first half
    halves   how far from there the half of each chunk is
    """
    count, several = 0, len(begins) > 1
    for chunk in range(len(halves)):
        next_at = next_there = -1
        for p in range(len(pieces)):
            begin, nbytes, page, entries, entry_bytes = pieces[p]
            there = halves[chunk] + staging[p]
            for i in range(chunk * most, min((chunk + 1) * most, len(items))):
                at = begin + distance(items[i], page, entries, entry_bytes)
                goes_on = at == next_at and there == next_there
                goes_on = goes_on and not (several and begins_one(begins, at))
                count = added(copies, count, at, there, nbytes, goes_on)
                there += nbytes
                next_at, next_there = at + nbytes, there
        edges[chunk + 1] = count
