"""Options and header of the suite."""

from __future__ import annotations

import gc
import os
import platform

import numba
import pytest
import torch

from verify import properties

# A GPU has 8 queues for all streams unless it is told so in time: behind a stream that a test holds others would wait.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")

# The suite runs one process a core; threads of its own would only get in each other's way.
torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="the whole matrix, and tests marked slow")


def pytest_configure(config: pytest.Config) -> None:
    properties.try_hard(full=bool(config.getoption("--full")))


def pytest_report_header() -> str:
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return f"host pools: torch {torch.__version__}, numba {numba.__version__}, {platform.machine()}, {gpu}"


def pytest_collection_finish() -> None:
    """Tests that collect garbage need not go through twenty thousand tests that are none."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Slow tests run under --full, GPU tests where there is a GPU; the rest always."""
    unfit = {} if config.getoption("--full") else {"slow": "slow: runs under --full"}
    unfit |= {} if torch.cuda.is_available() else {"gpu": "needs an NVIDIA GPU"}
    count = torch.cuda.device_count()
    unfit |= (
        {}
        if count > 1
        else {"several_gpus": f"needs two NVIDIA GPUs in one machine, here {'is one' if count else 'is none'}"}
    )
    for item in items:
        for marker, reason in unfit.items():
            if item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))
