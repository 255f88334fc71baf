"""What an implementation offers so that it can be checked: two functions on bare buffers.

A group of a vector file is the geometry, as it stands there (`data/vectors/README.md` has its words). Buffers are NumPy
arrays of bytes by name, in the order of the group's lists: `torch.from_numpy` and `array.ctypes.data` lead on to
tensors and addresses. An implementation on a GPU copies the device's buffers there, and back before it returns.
`verify/consumers/pages.py` is an adapter to copy from.
"""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Protocol

import numpy as np

VARIABLE = "HOSTPOOL_ADAPTER"

# Short names; anything else is `module:object`.
SHIPPED = {
    **{
        f"ours-{b}": f"verify.adapters.ours:{b.capitalize()}"
        for b in ("torch", "numba", "direct", "kernel", "staged", "auto")
    },
    "numpy": "verify.adapters.plain:Numpy",
    "null": "verify.adapters.plain:Null",
    "sglang": "verify.adapters.sglang_functions:Sglang",
    **{
        f"sglang-{path}": f"verify.adapters.sglang_functions:{path.capitalize()}"
        for path in ("staged", "bulk", "register", "unified", "mamba", "ops", "direct")
    },
    "sglang-pools": "verify.adapters.sglang_pools:Kernel",
    "sglang-pools-direct": "verify.adapters.sglang_pools:Direct",
}

Json = dict[str, Any]
Buffers = Mapping[str, np.ndarray]


class Adapter(Protocol):
    """A module with these functions will do as well. Optional, beside them:

    versions           {name: version} of what is checked
    device             where it runs, in words; default: CPU
    expected_failures  a file; each line is a case or a pattern, and the reason. Relative to the adapter's own file
    """

    def capabilities(self, geometry: Json, layout: str, direction: str) -> str | None:
        """None, or why such transfers are not offered. For a layout that the pool cannot have, that is a refusal."""
        ...

    def transfer(
        self,
        geometry: Json,
        layout: str,
        direction: str,
        host: Buffers,
        device: Buffers,
        host_indices: np.ndarray,
        device_indices: np.ndarray,
        layers: Sequence[int] | None,
    ) -> None:
        """Move; every byte has arrived on return. Whatever it raises is a refusal, and nothing may have moved then.

        direction  backup, load, backup_entries, load_entries
        indices    int64: `page_size` for each page, or the numbers of entries
        layers     model layers that a load asks for (255: side states); None: everything
        """
        ...


@dataclass(frozen=True)
class Expected:
    """One line of the file of expected failures."""

    pattern: str
    reason: str

    def matches(self, case: str) -> bool:
        return fnmatchcase(case, self.pattern)


@dataclass(frozen=True)
class Loaded:
    """An adapter as it was asked for, with what it says of itself."""

    name: str
    run: Adapter
    versions: dict[str, str]
    device: str
    expected: tuple[Expected, ...]

    def why_expected(self, case: str) -> str:
        return next((e.reason for e in self.expected if e.matches(case)), "")


class NoAdapter(ValueError):
    """The adapter asked for cannot be had, or is none."""


def load(name: str | None = None) -> Loaded:
    """By a short name, `module:object` or `module`; without one, by the environment."""
    name = name or os.environ.get(VARIABLE)
    if not name:
        raise NoAdapter(f"name an adapter (module:object) or set {VARIABLE}; shipped are {', '.join(SHIPPED)}")
    module_name, _, path = SHIPPED.get(name, name).partition(":")
    try:
        module = found = importlib.import_module(module_name)
        for attribute in path.split(".") if path else ():
            found = getattr(found, attribute)
        adapter: Any = found() if isinstance(found, type) else found
    except Exception as error:  # somebody else's code: whatever it raises
        raise NoAdapter(_why_not(name, module_name, error)) from error
    missing = [f for f in ("capabilities", "transfer") if not callable(getattr(adapter, f, None))]
    if missing:
        raise NoAdapter(f"adapter {name!r} has no function {' and no function '.join(missing)}")
    lines = getattr(adapter, "expected_failures", None)
    beside = Path(module.__file__ or ".").parent
    versions = {str(key): str(version) for key, version in getattr(adapter, "versions", {}).items()}
    expected = tuple(expected_failures(beside / lines)) if lines else ()
    return Loaded(name, adapter, versions, str(getattr(adapter, "device", "CPU")), expected)


def _why_not(name: str, module: str, error: Exception) -> str:
    if not isinstance(error, ModuleNotFoundError):
        return f"adapter {name!r} cannot be loaded: {type(error).__name__}: {error}"
    if f"{module}.".startswith(f"{error.name}."):
        return f"there is no adapter {name!r}: {error}; is its folder on PYTHONPATH?"
    return f"adapter {name!r} cannot be loaded: it needs {error.name!r}, which is neither installed nor on PYTHONPATH"


def expected_failures(file: Path) -> list[Expected]:
    """Lines of a case or pattern, white space, and the reason; `#` begins a comment."""
    try:
        lines = file.read_text("utf-8").splitlines()
    except OSError as error:
        raise NoAdapter(f"the file of expected failures cannot be read: {error}") from error
    found = []
    for number, line in enumerate(lines, 1):
        if line.strip() and not line.lstrip().startswith("#"):
            parts = re.split(r"\s+", line.strip(), maxsplit=1)
            if len(parts) < 2:
                raise NoAdapter(f"{file.name}:{number}: {parts[0]} has no reason")
            found.append(Expected(*parts))
    return found
