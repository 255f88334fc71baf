"""pyproject.toml, constraints.txt and environment.yml say the same."""

import re
import subprocess
import sys

import yaml

from verify.environment import ROOT, missing, requirements, split

# The extras for CUDA 12 have no counterpart: conda chooses builds by cuda-version.
EXTRAS = ("notebooks", "dev", "browser", "nvrtc", "gpu")
CONDA_NAMES = {
    "torch": "pytorch-gpu",
    "matplotlib": "matplotlib-base",
    "cupy-cuda13x": "cupy",
    "nvidia-cuda-nvrtc": "cuda-nvrtc",
}
CONDA_ONLY = {"cuda-version", "gxx", "make", "pip"}  # pip takes these from the system, or from torch


def conda() -> dict[str, str]:
    """What environment.yml asks for, its pip section included."""
    entries = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
    sections = [entry["pip"] if isinstance(entry, dict) else [entry] for entry in entries]
    return dict(split(line) for section in sections for line in section)


def test_conda_and_pip_name_the_same_packages():
    pip_names = {CONDA_NAMES.get(name, name) for name in requirements(*EXTRAS)}
    assert pip_names == set(conda()) - CONDA_ONLY - {"python"}


def test_conda_and_pip_ask_for_the_same_versions():
    there = conda()
    here = {CONDA_NAMES.get(name, name): spec for name, spec in requirements(*EXTRAS).items()}
    assert here == {name: there[name] for name in here}


def test_conda_and_pip_ask_for_the_same_python():
    text = (ROOT / "pyproject.toml").read_text()
    assert f'requires-python = "{conda()["python"]}"' in text


def test_every_direct_dependency_is_pinned():
    pinned = dict(map(split, re.findall(r"^[^#\n]+", (ROOT / "constraints.txt").read_text(), re.M)))
    torch_pins = {"cuda-bindings", "nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12"}
    wanted = set(requirements("notebooks", "dev", "browser", "gpu", "gpu12", "nvrtc", "nvrtc12")) - torch_pins
    assert {name for name in wanted if not pinned.get(name, "").startswith("==")} == set()
    assert pinned["torch"] == "==2.13.0"


def test_nothing_is_missing_here_and_a_bare_python_says_what_is():
    assert missing("notebooks", "dev") == []
    bare = [sys.executable, "-I", "-S", str(ROOT / "verify/environment.py"), "notebooks"]
    done = subprocess.run(bare, capture_output=True, text=True)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert " lacks torch, numpy, numba, psutil, jupyterlab" in line
