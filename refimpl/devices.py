"""Devices by name: "cpu", "cuda:1", "emulated:0": a platform, and a number where it has several devices.

A pool belongs to one device. A name without a number is settled once, when the pool is made; from then on it does not
matter which GPU is the current one.
"""

from __future__ import annotations

import re
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

NAME = re.compile(r"([a-z]+)(?::(0|[1-9]\d{0,2}))?")


def platform_of(device: str) -> str:
    """
    >>> platform_of("cuda:1"), platform_of("cpu")
    ('cuda', 'cpu')
    """
    if not isinstance(device, str):
        raise ValueError(f"{device!r} names no device: write 'cuda:1' for the second GPU, 'cpu', 'emulated'")
    return device.partition(":")[0]


def number_of(device: str) -> int:
    """Of a name that is settled; a platform with one device has number 0.

    >>> number_of("emulated:1"), number_of("cpu")
    (1, 0)
    """
    return int(device.partition(":")[2] or 0)


def settled(device: str) -> str:
    """The name with its number: "cuda" is the GPU that is current now. `ValueError` where the number is none.

    >>> settled("cuda:1"), settled("emulated"), settled("cpu:0")
    ('cuda:1', 'emulated:0', 'cpu')
    """
    name = NAME.fullmatch(device)
    if not name:
        raise ValueError(f"{device!r} names no device: write 'cuda:1' for the second GPU, 'cuda' for the current one")
    platform, number = name.groups()
    if platform == "cpu":
        return platform
    if platform == "cuda" and number is None and torch.cuda.is_available():
        number = torch.cuda.current_device()
    return f"{platform}:{number or 0}" if platform in ("cuda", "emulated") else device


def absent(device: str) -> str | None:
    """Why a GPU of that name is not here, or None if it is; other devices always are."""
    if platform_of(device) != "cuda":
        return None
    if not torch.cuda.is_available():
        return "a CUDA device is needed, and there is none"
    last = torch.cuda.device_count() - 1
    return f"there is no {device}: the last GPU here is cuda:{last}" if number_of(device) > last else None


def memory_of(device: str) -> str:
    """Where its memory is, as torch says it.

    >>> memory_of("cuda:1"), memory_of("emulated:1")
    ('cuda:1', 'cpu')
    """
    return "cpu" if platform_of(device) == "emulated" else device


def others_of_its_platform(device: str, other: str) -> bool:
    """Whether two names are of one platform and yet of two devices."""
    return device != other and platform_of(device) == platform_of(other)


def current(device: str) -> AbstractContextManager[Any]:
    """Inside, a GPU is the current one; other devices have no such state."""
    return torch.cuda.device(number_of(device)) if platform_of(device) == "cuda" else nullcontext()
