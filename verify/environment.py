"""Names the modules that this Python lacks; `make ENV=current` asks before it starts.

Run as a file, on a Python that may have nothing yet: standard library only.
"""

import re
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# Distributions whose module is not spelled like them.
MODULES = {
    "cuda-bindings": "cuda",
    "nvidia-cuda-nvrtc": "nvidia",
    "cupy-cuda12x": "cupy",
    "cupy-cuda13x": "cupy",
    "nvidia-ml-py": "pynvml",
    "pytest-xdist": "xdist",
    "pyyaml": "yaml",
}


def requirements(*extras: str) -> dict[str, str]:
    """What pyproject.toml asks for: {distribution: version specifier, "" if any will do}."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    optional = project["optional-dependencies"]
    lines = project["dependencies"] + [line for extra in extras for line in optional[extra]]
    return dict(map(split, lines))


def split(requirement: str) -> tuple[str, str]:
    """Name and version specifier, extras dropped: "pyright[nodejs]>=1" -> ("pyright", ">=1")."""
    name, spec = re.fullmatch(r"([\w.-]+)(?:\[.*\])?\s*(.*)", requirement).groups()  # pyright: ignore
    return name.lower(), spec.replace(" ", "")


def missing(*extras: str) -> list[str]:
    """Modules of the requirements that cannot be found, under the names they are imported by."""
    modules = (MODULES.get(name, name.replace("-", "_")) for name in requirements(*extras))
    return [module for module in modules if find_spec(module) is None]


if __name__ == "__main__" and (names := missing(*sys.argv[1:])):
    sys.exit(f"{sys.executable} lacks {', '.join(names)}; install them, or run make without ENV")
