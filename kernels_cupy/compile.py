"""Compiles kernels for GPUs that need not be there: NVRTC takes no device and no driver."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

from kernels_cupy.specs import OPTIONS, Kernel, source

PACKAGES = "pip install cuda-bindings nvidia-cuda-nvrtc"


class CompileError(RuntimeError):
    """A kernel that does not compile, in the words of the compiler."""


@dataclass(frozen=True)
class Compiled:
    """A kernel file as a GPU gets it.

    log      what the compiler said, registers and stack of each instance among it
    lowered  the name that each instance has in `ptx` and `cubin`
    """

    ptx: str
    cubin: bytes
    log: str
    lowered: dict[str, str]


def compile_for(kernel: Kernel, architecture: str) -> Compiled:
    """Every instance of a kernel for an architecture such as "sm_90".

    Raises `ImportError` where there is no NVRTC, `CompileError` with the compiler's log.
    """
    nvrtc = _nvrtc()
    program = _call(nvrtc.nvrtcCreateProgram, source(kernel).encode(), kernel.file.encode(), 0, [], [])
    try:
        for instance in kernel.instances:
            _call(nvrtc.nvrtcAddNameExpression, program, instance.encode())
        options = [*OPTIONS, f"--gpu-architecture={architecture}", "--ptxas-options=-v"]
        (error,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
        log = _read(nvrtc, program, "ProgramLog").rstrip(b" \n\0").decode()
        if error != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise CompileError(f"{kernel.file} does not compile for {architecture}:\n{log or error.name}")
        return Compiled(
            _read(nvrtc, program, "PTX").rstrip(b"\0").decode(),
            _read(nvrtc, program, "CUBIN"),
            log,
            {name: _call(nvrtc.nvrtcGetLoweredName, program, name.encode()).decode() for name in kernel.instances},
        )
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _nvrtc() -> Any:
    """The bindings, with a library behind them: without one even asking its version fails."""
    try:
        nvrtc: Any = importlib.import_module("cuda.bindings.nvrtc")
        nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError) as missing:
        raise ImportError(f"NVRTC cannot be used ({missing}): {PACKAGES}") from missing
    return nvrtc


def _call(function: Any, *arguments: Any) -> Any:
    """What a call returns after its error code; raises for the latter."""
    error, *rest = function(*arguments)
    if error.value:
        raise RuntimeError(f"{function.__name__} failed: {error.name}")
    return rest[0] if rest else None


def _read(nvrtc: Any, program: Any, what: str) -> bytes:
    room = bytearray(_call(getattr(nvrtc, f"nvrtcGet{what}Size"), program))
    _call(getattr(nvrtc, f"nvrtcGet{what}"), program, room)  # the bindings write into it
    return bytes(room)
