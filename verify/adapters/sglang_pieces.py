"""What of SGLang is installed here: each piece is imported on its own, and one that is absent says why."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from types import ModuleType

import torch

# What is looked for, by the names of SGLang 0.5.23. Other versions may lack some.
PIECES = {
    "ops": "sgl_kernel.kvcacheio",
    "hicache": "sglang.kernels.ops.kvcache.hicache",
    "mamba": "sglang.kernels.ops.mamba.transfer_mamba",
    "device infos": "sglang.srt.mem_cache.device_pool_info",
    "mha pools": "sglang.srt.mem_cache.pool_host.mha",
    "mla pools": "sglang.srt.mem_cache.pool_host.mla",
    "v4 pools": "sglang.srt.mem_cache.memory_pool_host",
}
EXPECTED = Path(__file__).with_name("sglang_expected")
DISTRIBUTIONS = ("sglang", "sglang-kernel", "sgl-kernel", "apache-tvm-ffi")


class Absent(ImportError):
    """A piece that is not here; the message says why."""


def piece(name: str) -> ModuleType:
    """The module of a piece; `Absent` where it cannot be had."""
    found = _found(name)
    if isinstance(found, Absent):
        raise found
    return found


@cache
def _found(name: str) -> ModuleType | Absent:
    """Imported once, or once in vain.

    SGLang's packages import whole servers when they start. Where that fails for want of a package that a piece itself
    does not need, the piece is imported under a package that was found but not run.
    """
    module = PIECES[name]
    try:
        found = importlib.import_module(module)
    except Exception:
        try:
            _without_start(module.partition(".")[0])
            found = importlib.import_module(module)
        except Exception as error:
            return Absent(f"{module}: {error}")
    if name == "ops" and not hasattr(torch.ops.sgl_kernel, "transfer_kv_direct"):
        return Absent(f"{module}: its library of operators does not load here")
    return found


def why_absent(name: str) -> str | None:
    try:
        piece(name)
    except Absent as error:
        return str(error)
    return None


def versions(names: Iterable[str] = PIECES) -> dict[str, str]:
    """Versions of what is installed, and for each piece `found`, or why not."""
    found = {"torch": str(torch.__version__)}
    for distribution in DISTRIBUTIONS:
        try:
            found[distribution] = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    absent = {name: why_absent(name) for name in names}
    return found | {name: f"absent ({why})" if why else "found" for name, why in absent.items()}


def expected_failures(name: str) -> str | None:
    """The file of an adapter that has some, relative to this folder."""
    file = EXPECTED / f"{name}.txt"
    return f"{EXPECTED.name}/{file.name}" if file.exists() else None


def _without_start(package: str) -> None:
    if getattr(sys.modules.get(package), "__file__", None) is None:
        spec = importlib.util.find_spec(package)
        if spec is None:
            raise ModuleNotFoundError(f"no package {package!r} is installed")
        sys.modules[package] = importlib.util.module_from_spec(spec)
