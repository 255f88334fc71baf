"""Pinned host memory on a real driver: exact, chunked, and undone before it is unmapped."""

from __future__ import annotations

import gc

import pytest
import torch

from refimpl import HostMemory, HostPool, presets, slots_of
from refimpl.pinned import CudaRegistrar
from verify import fill
from verify.guarded import GuardedDevice

SPEC = presets.mha_k_only(7, 3, 80, torch.bfloat16, 64, indices_from=None)
MIB = 2**20

pytestmark = pytest.mark.gpu


def memory_of(host: HostPool) -> torch.Tensor:
    """The one tensor of the pool."""
    ((_, (tensor,)),) = host.storage
    return tensor


def pool(limit: int | None = MIB) -> HostPool:
    return HostPool(SPEC, "page_first", 21, memory=HostMemory(CudaRegistrar()), registration_limit=limit)


def test_memory_is_pinned_while_the_pool_is_open_and_not_after() -> None:
    host = pool()
    tensor = memory_of(host)
    assert tensor.is_pinned()
    host.close()
    assert not tensor.is_pinned()
    assert tensor.sum() == 0  # a view that is still held stays readable


@pytest.mark.parametrize("closed_by", ["close", "garbage collection"])
def test_a_pool_made_where_a_freed_one_lay_works(closed_by: str) -> None:
    """Registrations left behind would send copies to pages that are no longer there, without an error."""
    device = GuardedDevice(SPEC, 4, device="cuda")
    fill.fill_device(device.pool)
    addresses = set()
    for turn in range(200):
        host = pool()
        addresses.add(memory_of(host).data_ptr())
        host.backup(device.pool, slots_of([turn % 21], 64), slots_of([turn % 4], 64))
        expected = fill.layer_bytes(SPEC, 4, "k", 6)[turn % 4]
        assert (fill.host_image(host, "k", 6)[turn % 21] == expected).all()
        if closed_by == "close":
            host.close()
        del host
        gc.collect()
    assert len(addresses) < 200  # some address was used again


def test_a_limit_smaller_than_a_page_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot hold one page"):
        pool(limit=4096)
