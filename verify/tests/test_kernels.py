"""The kernels as compilers see them: for every GPU generation without a GPU, and by g++ for the emulated device."""

from __future__ import annotations

import re
import sys
import time
from functools import cache
from pathlib import Path

import numpy as np
import pytest

import kernels_cupy
from kernels_cupy import emu
from kernels_cupy.compile import Compiled, CompileError, compile_for
from kernels_cupy.specs import CHECK_INDICES, KERNELS, OPTIONS, SOURCES, Kernel, kernel_of
from refimpl import HostPool, UnsupportedPairing, presets

ARCHITECTURES = ("sm_80", "sm_90", "sm_100")
REGISTERS = 65536 // 1024  # of a thread, in blocks of 1024

in_every_instance = pytest.mark.parametrize("instance", [name for kernel in KERNELS for name in kernel.instances])
on_every_architecture = pytest.mark.parametrize("architecture", ARCHITECTURES)
by_every_compiler = pytest.mark.parametrize("compiler", ["NVRTC", "g++"])


def compiled_for(instance: str, architecture: str) -> Compiled:
    return _compiled(kernel_of(instance), architecture)


@cache
def _compiled(kernel: Kernel, architecture: str) -> Compiled:
    start = time.perf_counter()
    compiled = compile_for(kernel, architecture)
    print(f"{kernel.file} for {architecture}: {time.perf_counter() - start:.2f} s")
    return compiled


def resources(compiled: Compiled, instance: str) -> dict[str, int]:
    """What the assembler says of one instance."""
    entry = re.escape(f"'{compiled.lowered[instance]}'")
    said = re.search(rf"Compiling entry function {entry}.*?Compile time", compiled.log, re.DOTALL)
    assert said, compiled.log
    found = re.findall(r"(\d+) bytes (stack frame|spill stores|spill loads)|Used (\d+) (registers)", said[0])
    return {name or registers: int(number or used) for number, name, used, registers in found}


def entry_of(compiled: Compiled, instance: str) -> str:
    """The PTX of one instance."""
    found = re.search(
        rf"\.entry {re.escape(compiled.lowered[instance])}\(.*?^}}", compiled.ptx, re.DOTALL | re.MULTILINE
    )
    assert found, compiled.ptx
    return found[0]


@on_every_architecture
@in_every_instance
def test_a_kernel_fits_a_block_of_1024_threads_without_local_memory(instance: str, architecture: str) -> None:
    found = resources(compiled_for(instance, architecture), instance)
    assert found.pop("registers") <= REGISTERS
    assert found == {"stack frame": 0, "spill stores": 0, "spill loads": 0}


@on_every_architecture
@in_every_instance
def test_a_kernel_takes_the_struct_that_numpy_describes(instance: str, architecture: str) -> None:
    kernel = kernel_of(instance)
    ptx = entry_of(compiled_for(instance, architecture), instance)
    (parameter,) = re.findall(r"\.param \.align (\d+) \.b8 \w+\[(\d+)\]", ptx)
    assert tuple(map(int, parameter)) == (kernel.arguments.alignment, kernel.arguments.itemsize)


@on_every_architecture
@pytest.mark.parametrize(("word", "vector"), [(16, r"\.v4\.\w32"), (8, r"\.v2\.\w32"), (4, r"\.\w32")])
def test_words_move_whole_and_four_loads_come_before_the_first_store(word: int, vector: str, architecture: str) -> None:
    instance = f"copy_runs<{word}>"
    ptx = entry_of(compiled_for(instance, architecture), instance)
    moves = re.findall(rf"\b(ld|st)\.global\.cs{vector}", ptx)
    assert "".join(moves).startswith("ld" * 4 + "st")


@on_every_architecture
def test_machine_code_comes_for_the_architecture_that_was_asked_for(architecture: str) -> None:
    compiled = compiled_for("check_indices", architecture)
    assert f".target {architecture}\n" in compiled.ptx
    assert compiled.cubin.startswith(b"\x7fELF")


def test_machine_code_is_tied_to_lines_of_the_file_that_was_written() -> None:
    """-lineinfo: profilers show lines of the `.cu` file, not of the text that was put together."""
    assert re.search(r'\.file\s+\d+ "[^"]*\bcopy_runs\.cu"', compiled_for("copy_runs<16>", "sm_90").ptx)


def test_sources_include_nothing_but_the_primitives() -> None:
    """System headers are not there where NVRTC compiles, and differ where they are."""
    includes = {
        path.name: re.findall(r"^\s*#\s*include\s*(\S+)", path.read_text(), re.MULTILINE) for path in SOURCES.iterdir()
    }
    assert includes.pop("primitives.cuh") == ['"device.hpp"']
    assert set(includes) == {kernel.file for kernel in KERNELS}
    assert all(found == ['"primitives.cuh"'] for found in includes.values())


def test_the_emulated_device_is_included_for_a_cpu_only() -> None:
    text = (SOURCES / "primitives.cuh").read_text()
    assert '#ifdef KV_EMULATED\n#include "device.hpp"\n#endif\n' in text
    assert not any("KV_EMULATED" in option for option in OPTIONS)


# ---- what does not compile


def written(folder: Path, text: str, struct: str = "CheckIndices", instance: str = "test_kernel") -> Kernel:
    path = folder / "broken.cu"
    path.write_text(f'#include "primitives.cuh"\nstruct {struct} {{ long long words[8]; }};\n{text}')
    return Kernel(str(path), struct, CHECK_INDICES, (instance,))


def compiled_by(compiler: str, kernel: Kernel, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    if compiler == "NVRTC":
        compile_for(kernel, "sm_90")
    else:
        monkeypatch.setattr(kernels_cupy, "CACHE", cache)
        monkeypatch.setattr(emu, "kernel_of", lambda instance: kernel)
        emu.launch(kernel.instances[0], 1, 1, np.zeros((), CHECK_INDICES))


@by_every_compiler
def test_the_compiler_is_quoted_with_file_and_line(
    compiler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = written(tmp_path, "__global__ void test_kernel(const CheckIndices a) {\n  no_such_function();\n}\n")
    with pytest.raises((CompileError, ImportError), match=r"broken.* does not compile") as refused:
        compiled_by(compiler, kernel, monkeypatch, tmp_path)
    assert re.search(r"broken\.cu[:(]4\b", str(refused.value))
    assert "no_such_function" in str(refused.value)


def test_a_backend_whose_kernel_does_not_compile_is_refused_in_the_words_of_the_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = written(tmp_path, "__global__ void test_kernel(const CheckIndices a) { no_such_function(); }\n")
    monkeypatch.setattr(kernels_cupy, "CACHE", tmp_path)
    monkeypatch.setattr(emu, "KERNELS", (kernel,))
    with pytest.raises(UnsupportedPairing, match=r"(?s)backend 'kernel'.* does not compile .*no_such_function"):
        HostPool(presets.mla(1, 8), "page_first", 1, "kernel", platform="emulated")


def test_a_helper_that_is_no_device_function_is_refused(tmp_path: Path) -> None:
    """NVRTC would let it pass with -default-device, other compilers never."""
    text = (
        "{} inline long long two() {{ return 2; }}\n"
        "__global__ void test_kernel(CheckIndices a) {{ *(long long*)a.words[two()] = 0; }}\n"
    )
    assert compile_for(written(tmp_path, text.format("__device__")), "sm_90").lowered
    with pytest.raises(CompileError, match="without execution space annotations"):
        compile_for(written(tmp_path, text.format("")), "sm_90")


def test_an_instance_that_is_not_there_is_refused_by_name(tmp_path: Path) -> None:
    kernel = written(tmp_path, "__global__ void test_kernel(CheckIndices a) {}\n", instance="another_kernel")
    with pytest.raises(CompileError, match="another_kernel"):
        compile_for(kernel, "sm_90")


def test_without_nvrtc_the_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings.nvrtc", None)
    with pytest.raises(ImportError, match="pip install cuda-bindings nvidia-cuda-nvrtc"):
        compile_for(kernel_of("check_indices"), "sm_90")
