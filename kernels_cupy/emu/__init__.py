"""The kernels on a CPU: the `.cu` files that a GPU runs, compiled as C++ and run with fibers for threads.

Slow (some hundred MB/s) and exact: it lets the suite run every kernel where there is no GPU.
"""

from __future__ import annotations

import ctypes
import platform
import re
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import numpy as np

from kernels_cupy import cache_folder
from kernels_cupy.specs import KERNELS, SOURCES, Kernel, kernel_of, source

HERE = Path(__file__).parent
COMPILE = ("g++", "-std=c++17", "-O2", "-shared", "-fPIC", "-Wall", "-Wno-unknown-pragmas", "-DKV_EMULATED")


class NoCompiler(ImportError):
    """There is no C++ compiler, so kernels cannot run on this CPU."""


def launch(instance: str, blocks: int, threads: int, arguments: np.ndarray, order: int = 0) -> None:
    """Run a kernel to its end. `order` of the threads: 0 forward, 1 backward, else a seed."""
    kernel = kernel_of(instance)
    if arguments.dtype != kernel.arguments:
        raise TypeError(f"{instance} takes {kernel.arguments}, got {arguments.dtype}")
    getattr(_library(kernel), _symbol(instance))(blocks, threads, order, ctypes.c_void_p(arguments.ctypes.data))


def prepare() -> None:
    """Compile every kernel now, or raise `ImportError` with the compiler's message (`NoCompiler`: there is none)."""
    for kernel in KERNELS:
        _library(kernel)


@cache
def _library(kernel: Kernel) -> ctypes.CDLL:
    text = f'#include "primitives.cuh"\n{source(kernel)}\n' + "\n".join(
        _wrapper(kernel, instance) for instance in kernel.instances
    )
    headers = "".join(path.read_text() for path in (SOURCES / "primitives.cuh", HERE / "device.hpp"))
    # With the machine's name: a home folder may be shared by machines of several kinds.
    path = cache_folder(f"{text}{headers}{COMPILE}{platform.machine()}") / f"{Path(kernel.file).stem}.so"
    if not path.exists():
        _compile(text, path)
    return ctypes.CDLL(str(path))


def _compile(text: str, path: Path) -> None:
    """Into a folder of its own first: another process may be compiling the same file."""
    if shutil.which(COMPILE[0]) is None:
        raise NoCompiler("no C++ compiler: install g++ to run CUDA kernels on the CPU (Debian: apt install g++)")
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        code, built = Path(folder) / "kernel.cpp", Path(folder) / path.name
        code.write_text(text)
        includes = [f"-I{SOURCES}", f"-I{HERE}"]
        done = subprocess.run([*COMPILE, *includes, str(code), "-o", str(built)], capture_output=True, text=True)
        if done.returncode:
            raise ImportError(f"{path.stem} does not compile for the CPU:\n{done.stderr}")
        built.replace(path)


def _symbol(instance: str) -> str:
    return "launch_" + re.sub(r"\W", "_", instance)


def _wrapper(kernel: Kernel, instance: str) -> str:
    """A C function that launches one instance."""
    parameters = f"unsigned blocks, unsigned threads, unsigned order, const {kernel.struct}* a"
    return (
        f'extern "C" void {_symbol(instance)}({parameters}) {{\n'
        f"  device::launch(blocks, threads, order, [=] {{ {instance}(*a); }});\n}}"
    )
