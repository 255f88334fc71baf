"""The fast paths: thin Python over readable CUDA. `refimpl.backends.registry` finds the backends by name.

Nothing here is imported before a GPU backend is asked for, and CuPy not before a kernel is launched on a GPU.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path


def cache_folder(content: str = "") -> Path:
    """A folder in the user's cache, made if need be: one for each `content`."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kv-host-pools"
    folder = base / hashlib.sha256(content.encode()).hexdigest()[:16] if content else base
    folder.mkdir(parents=True, exist_ok=True)
    return folder
