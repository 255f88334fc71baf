"""Index lists: what a caller may pass, and the page (or entry) numbers they stand for.

A caller names token slots. Whole pages move, so each list is a sequence of pages: every page complete, its tokens
consecutive and in order. Upstream's page-wise paths read only the first token of each page and copy whatever they find
there; here every rule is checked before the first byte moves.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from refimpl.geometry import require_whole

Indices = torch.Tensor | None


@dataclass(frozen=True, eq=False)
class Unchecked:
    """A list that stays on the device and is checked there: reading it back would make the host wait."""

    indices: torch.Tensor
    page_size: int
    num_pages: int
    side: str
    unique: bool

    def __len__(self) -> int:
        return self.indices.numel() // self.page_size

    def check(self) -> np.ndarray:
        """Read the list back and check it here: raises what the device could only hint at."""
        return check(self.indices, self.page_size, self.num_pages, self.side, self.unique)


Pages = np.ndarray | Unchecked


@dataclass(frozen=True, eq=False)
class Items:
    """Index lists of one transfer: `host[i]` and `device[i]` name the same page (or entry).

    host_syncs  index tensors that had to be read back from a device before they could be checked
    placed      what a backend keeps of them between the runs of a transfer, in device memory for the most part
    """

    host: Pages
    device: Pages
    host_syncs: int = 0
    placed: dict[Hashable, Any] = field(default_factory=dict, repr=False)

    def __len__(self) -> int:
        return len(self.host)

    def checked(self) -> tuple[np.ndarray, np.ndarray]:
        """Both lists, for backends that leave none unchecked."""
        assert isinstance(self.host, np.ndarray)
        assert isinstance(self.device, np.ndarray)
        return self.host, self.device

    @property
    def unchecked(self) -> list[Unchecked]:
        return [pages for pages in (self.host, self.device) if isinstance(pages, Unchecked)]


def check_pair(
    host_indices: Indices,
    device_indices: Indices,
    page_size: int,
    host_pages: int,
    device_pages: int,
    direction: str,
    stays: Callable[[str, torch.Tensor], bool] = lambda side, indices: False,
    read: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.cpu,
) -> Items:
    """Pages named by two index lists. Raises `ValueError` naming the first index that breaks a rule.

    The destination's pages must be unique (two writers of one page have no right answer); a source may be read twice.
    `TypeError` for a list that is no tensor.

    stays  whether the list of a side ("host", "device") is left where it is, for the device to check
    read   brings one that is not to the host
    """
    for side, given in (("host", host_indices), ("device", device_indices)):
        if given is not None:
            require_list(given, page_size, side)
    if host_indices is None or device_indices is None:
        if any(given is not None and given.numel() for given in (host_indices, device_indices)):
            raise ValueError("one index list is None while the other one is not empty")
        return Items(np.empty(0, np.int64), np.empty(0, np.int64))
    if host_indices.numel() != device_indices.numel():
        raise ValueError(
            f"host and device lists must be equally long, got {host_indices.numel()} and {device_indices.numel()}"
        )
    syncs = 0

    def pages_of(indices: torch.Tensor, num_pages: int, side: str, unique: bool) -> Pages:
        nonlocal syncs
        if not indices.numel():
            return np.empty(0, np.int64)
        if stays(side, indices):
            return Unchecked(indices, page_size, num_pages, side, unique)
        told = read(indices)
        syncs += told is not indices
        return check(told, page_size, num_pages, side, unique)

    writes_host = direction == "backup"
    host = pages_of(host_indices, host_pages, "host", writes_host)
    device = pages_of(device_indices, device_pages, "device", not writes_host)
    return Items(host, device, syncs)


def check(indices: torch.Tensor, page_size: int, num_pages: int, side: str, unique: bool) -> np.ndarray:
    """Page numbers (int64) of a list of token slots, or `ValueError` with the offending index.

    side    what the list is called in errors
    unique  whether a page may be named only once
    """
    require_list(indices, page_size, side)
    slots = indices.cpu().numpy().astype(np.int64).reshape(-1, page_size)
    starts: np.ndarray = slots[:, 0]
    _refuse(starts, starts % page_size != 0, f"{side} index {{}} begins a page but is no multiple of {page_size}")
    apart = np.diff(slots) != 1
    _refuse(slots[:, 1:], apart, f"{side} index {{}} breaks its page: the {page_size} tokens must be consecutive")
    pages = starts // page_size
    outside = (pages < 0) | (pages >= num_pages)
    _refuse(starts, outside, f"{side} index {{}} is outside the pool's 0..{num_pages * page_size - 1}")
    if unique:
        how = "written twice by one transfer" if side in ("host", "device") else "named twice"
        _refuse(starts, _repeated(pages), f"{side} index {{}} is {how}")
    return pages


def require_list(indices: torch.Tensor, page_size: int, side: str) -> None:
    """What can be said of a list without reading it: `TypeError`, or `ValueError` with what it should be."""
    if not isinstance(indices, torch.Tensor):
        raise TypeError(
            f"{side} indices must be a 1-D int64 or int32 tensor, got {indices!r:.80}; torch.as_tensor() makes one"
        )
    if indices.is_meta or indices.layout != torch.strided:
        kind = f"{indices.layout} on {indices.device}"
        raise ValueError(f"{side} indices must be a dense tensor in memory, got one that is {kind}")
    if indices.dim() != 1 or indices.dtype not in (torch.int64, torch.int32):
        raise ValueError(
            f"{side} indices must be a 1-D int64 or int32 tensor, got {indices.dtype} of shape {tuple(indices.shape)}"
        )
    if indices.numel() % page_size:
        raise ValueError(
            f"{side} indices must name whole pages of {page_size}, got {indices.numel()} indices "
            f"({indices.numel() % page_size} too many); pad or cut the list to a page edge"
        )


def slots_of(pages: np.ndarray | torch.Tensor | list[int], page_size: int) -> torch.Tensor:
    """Token slots (int64) of whole pages, in order: the inverse of `check`. `ValueError` for what names no pages.

    >>> slots_of([2, 0], page_size=3)
    tensor([6, 7, 8, 0, 1, 2])
    """
    require_whole("page_size", page_size, least=1)
    numbers = torch.as_tensor(pages)
    fractions = numbers.is_floating_point() and numbers.numel()  # torch takes an empty list for floats
    if numbers.dim() != 1 or fractions or numbers.dtype == torch.bool:
        raise ValueError(f"pages must be a 1-D list of numbers, got {numbers.dtype} of shape {tuple(numbers.shape)}")
    numbers, most = numbers.to(torch.int64), 2**62 // page_size
    if np.abs(numbers.numpy(), dtype=float).max(initial=0) > most:
        raise ValueError(f"pages of {page_size} slots have numbers up to {most:,}, got {pages!r:.80}")
    return (numbers[:, None] * page_size + torch.arange(page_size)).reshape(-1)


def _refuse(values: np.ndarray, broken: np.ndarray, rule: str) -> None:
    if broken.any():
        raise ValueError(rule.format(int(values[broken][0])))


def _repeated(pages: np.ndarray) -> np.ndarray:
    """True at every occurrence of a page after its first."""
    repeated = np.ones(len(pages), bool)
    repeated[np.unique(pages, return_index=True)[1]] = False
    return repeated
