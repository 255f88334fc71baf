"""Backends by name, imported when first asked for."""

from __future__ import annotations

import importlib
from functools import cache

from refimpl.backends.protocol import Backend

# name -> "module:class"
MODULES = {
    "torch": "refimpl.backends.torch_backend:TorchBackend",
    "numba": "refimpl.backends.numba_backend:NumbaBackend",
}


def unavailable(name: str) -> str | None:
    """Why a backend cannot be loaded here, or None if it can."""
    if name not in MODULES:
        return f"no implementation of backend {name!r} is installed (installed: {', '.join(MODULES)})"
    try:
        _load(name)
    except ImportError as error:
        return f"backend {name!r} cannot be imported: {error}"
    return None


def get(name: str) -> Backend:
    """The backend, or `ImportError` with the reason that `unavailable` gives."""
    reason = unavailable(name)
    if reason:
        raise ImportError(reason)
    return _load(name)


@cache
def _load(name: str) -> Backend:
    module, attribute = MODULES[name].split(":")
    return getattr(importlib.import_module(module), attribute)()
