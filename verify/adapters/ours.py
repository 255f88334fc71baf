"""The pools of this project, a backend each: copied into, moved, copied out of. GPU backends run emulated."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch

from refimpl import Refusal, support
from refimpl.backends import registry
from refimpl.support import BACKENDS
from verify.adapters.protocol import Buffers, Json
from verify.adapters.wrong import GEOMETRIES
from verify.vectors.payload import SIDE
from verify.vectors.write import Pools


class Ours:
    """One backend on one platform."""

    def __init__(self, backend: str) -> None:
        self.backend, self.platform = backend, "cpu" if "cpu" in BACKENDS[backend] else "emulated"
        self.versions, self.device = {"torch": torch.__version__}, self.platform

    def capabilities(self, geometry: Json, layout: str, direction: str) -> str | None:
        spec, way = GEOMETRIES[_name(geometry)].spec, direction.removesuffix("_entries")
        answer = support(spec, layout, self.backend, way, self.platform)
        return answer.reason if isinstance(answer, Refusal) else registry.unavailable(self.backend, self.platform)

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
        pools = _pools(_name(geometry), layout, self.backend, self.platform)
        ends = [(host, pools.tensors("host")), (device, pools.tensors("device"))]
        for given, tensors in ends:
            for name, tensor in tensors.items():
                tensor.copy_(torch.from_numpy(given[name]).view(tensor.dtype).view(tensor.shape))
        _run(pools, direction, torch.from_numpy(host_indices), torch.from_numpy(device_indices), layers)
        for given, tensors in ends:
            for name, tensor in tensors.items():
                given[name][:] = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()


def _run(pools: Pools, direction: str, host: torch.Tensor, device: torch.Tensor, layers: Sequence[int] | None) -> None:
    if direction.endswith("entries"):
        move = pools.host.backup_entries if direction == "backup_entries" else pools.host.load_entries
        move(pools.device, host, device).wait()
        return
    transfer = pools.host.prepare(pools.device, host, device, direction)
    if layers is None:
        transfer.run().wait()
    else:
        transfer.run([layer for layer in layers if layer != SIDE], side_states=SIDE in layers).wait()


@lru_cache(maxsize=1)
def _pools(name: str, layout: str, backend: str, platform: str) -> Pools:
    """One group after the other: the last one is at hand."""
    return Pools(GEOMETRIES[name], layout, backend, platform)


def _name(geometry: Json) -> str:
    return geometry["id"].split("/")[0]


def __getattr__(name: str) -> Ours:
    """A backend by its name, capitalised."""
    backends = {backend.capitalize(): backend for backend in BACKENDS}
    if name not in backends:
        raise AttributeError(f"there is no backend {name!r}; there are {', '.join(backends)}")
    return Ours(backends[name])
