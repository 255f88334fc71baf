"""The fast paths: thin Python over readable CUDA. `refimpl.backends.registry` finds the backends by name.

Nothing here is imported before a GPU backend is asked for, and CuPy not before a kernel is launched on a GPU.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

# Of the user: tables of calibrated devices, and kernels compiled for the CPU.
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kv-host-pools"


def cache_folder(content: str = "") -> Path:
    """A folder in the cache, made if need be: one for each `content`. `ImportError` where it cannot be made."""
    folder = CACHE / hashlib.sha256(content.encode()).hexdigest()[:16] if content else CACHE
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as failure:
        raise ImportError(f"no cache can be kept in {CACHE} ({failure}): set XDG_CACHE_HOME") from failure
    return folder
