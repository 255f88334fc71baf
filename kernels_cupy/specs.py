"""One table: every kernel with its file, the struct of its arguments and its instances.

CuPy passes an argument as it is: wrong types and orders go unnoticed. Each kernel therefore takes a single struct,
which NumPy describes here and the `.cu` file pins with a `static_assert`.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

SOURCES = Path(__file__).with_name("src")

# Everything that goes into a kernel. Compilers' caches look at the text of one file, so its headers are named here.
HASH = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(SOURCES.iterdir()))).hexdigest()[:16]

# Of NVRTC, with a GPU or without.
OPTIONS = ("-std=c++17", "-lineinfo", f"-I{SOURCES}", f"-DKERNELS=0x{HASH}")

MAX_STARTS = 112
MAX_LOOPS = 3
WORDS = (16, 8, 4, 2, 1)  # bytes

SIDE = np.dtype(
    [
        ("starts", np.uint64, (MAX_STARTS,)),
        ("items", np.uint64),
        ("registrations", np.uint64),
        ("page", np.int64),
        ("entries", np.int64),
        ("entry_bytes", np.int64),
        ("steps", np.int64, (MAX_LOOPS,)),
        ("registration_count", np.int64),
    ],
    align=True,
)

COPY_RUNS = np.dtype(
    [
        ("to", SIDE),
        ("source", SIDE),
        ("fault", np.uint64),
        ("starts", np.int64),
        ("items", np.int64),
        ("counts", np.int64, (MAX_LOOPS,)),
        ("run", np.int64),
        ("piece", np.int64),
        ("lanes", np.int32),
        ("if_fault", np.int32),
        ("items_outermost", np.int32),
        ("together", np.int32),
    ],
    align=True,
)

CHECK_INDICES = np.dtype(
    [
        ("indices", np.uint64),
        ("pages", np.uint64),
        ("claimed", np.uint64),
        ("fault", np.uint64),
        ("count", np.int64),
        ("page_size", np.int64),
        ("num_pages", np.int64),
        ("index_bytes", np.int32),
        ("unused", np.int32),
    ],
    align=True,
)


@dataclass(frozen=True)
class Kernel:
    """A `.cu` file.

    struct     its only parameter, passed by value, and `arguments`, the same as NumPy sees it
    instances  the kernels in it, as C++ spells them
    """

    file: str
    struct: str
    arguments: np.dtype
    instances: tuple[str, ...]


KERNELS = (
    Kernel("copy_runs.cu", "CopyRuns", COPY_RUNS, tuple(f"copy_runs<{word}>" for word in WORDS)),
    Kernel("check_indices.cu", "CheckIndices", CHECK_INDICES, ("check_indices",)),
)


@cache
def kernel_of(instance: str) -> Kernel:
    return next(kernel for kernel in KERNELS if instance in kernel.instances)


def source(kernel: Kernel) -> str:
    """The text that is compiled, with a line that makes compilers name the file."""
    return f'#line 1 "{kernel.file}"\n' + (SOURCES / kernel.file).read_text(encoding="utf-8")
