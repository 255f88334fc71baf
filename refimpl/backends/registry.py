"""Backends by name, imported when first asked for."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache

from refimpl.backends.protocol import Backend, Setup
from refimpl.devices import absent
from refimpl.emulated import WaitingHost
from refimpl.runtime import Runtime

# name -> "module:class"
MODULES = {
    "torch": "refimpl.backends.torch_backend:TorchBackend",
    "numba": "refimpl.backends.numba_backend:NumbaBackend",
    "direct": "kernels_cupy.copy_engine:CopyEngine",
    "kernel": "kernels_cupy.sm_copy:SmCopy",
    "staged": "kernels_cupy.staged:Staged",
    "auto": "kernels_cupy.auto:Auto",
}

# Backends that reach a device ask their runtime whether it is there.
RUNTIMES = "kernels_cupy.runtimes"


def unavailable(name: str, platform: str = "cpu") -> str | None:
    """Why a backend cannot be used here, or None if it can."""
    if name not in MODULES:
        return f"no implementation of backend {name!r} is installed (installed: {', '.join(MODULES)})"
    if why := absent(platform):
        return why
    try:
        backend = _load(name)
        if MODULES[name].startswith(RUNTIMES.split(".")[0]):
            device = runtime(platform)
            if getattr(backend, "launches_kernels", False):
                device.compile()
    except ImportError as error:
        return f"backend {name!r} cannot be used: {error}"
    return None


def runtime(platform: str) -> Runtime:
    """Streams and events of a device; on a CPU a queue of its own. `ImportError` where it cannot be had."""
    return WaitingHost() if platform == "cpu" else importlib.import_module(RUNTIMES).runtime(platform)


def make(name: str, setup: Setup) -> Backend:
    """A backend for a pool, or `ImportError` with the reason that `unavailable` gives."""
    reason = unavailable(name, setup.platform)
    if reason:
        raise ImportError(reason)
    return _load(name)(setup)


def staging_bytes(name: str, setup: Setup) -> int:
    """Bytes of device memory without which a backend refuses to be made for a pool."""
    needed = getattr(_load(name), "staging_bytes", None)
    return needed(setup) if needed else 0


@cache
def _load(name: str) -> Callable[[Setup], Backend]:
    module, attribute = MODULES[name].split(":")
    return getattr(importlib.import_module(module), attribute)
