"""SGLang: what the fill of its tests can tell apart."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product

import torch

from refimpl import DevicePool, HostPool, PoolSpec, presets, slots_of
from verify import fill
from verify.findings.finding import Finding

TESTS = (
    "sgl-project/sglang, test/registered/kernels/ops/kvcache/test_hicache.py at 0c00434 and "
    "test_hicache_page_first_write_back.py at 029add4"
)
PAGE, LAYERS = 16, 2


@dataclass(frozen=True)
class WriteBack:
    """One case of these tests: row width in elements of bf16, and pages that are backed up."""

    family: str
    dim: int
    device_pages: list[int]
    host_pages: list[int]

    @property
    def pages(self) -> int:
        return max(*self.device_pages, *self.host_pages) + 1

    @property
    def spec(self) -> PoolSpec:
        if self.family == "mla":
            return presets.mla(layers=LAYERS, latent_dim=self.dim, dtype=torch.bfloat16, page_size=PAGE)
        heads = max(1, self.dim // 128)
        return presets.mha(
            layers=LAYERS,
            heads=heads,
            head_dim=self.dim // heads,
            dtype=torch.bfloat16,
            page_size=PAGE,
        )


def write_backs() -> Iterator[WriteBack]:
    """Round trips of three pages, then staged write-backs of 1 to 129."""
    for family, dims in ("mha", (128, 256, 512, 1024)), ("mla", (576,)):
        yield from (WriteBack(family, dim, [1, 2, 3], [0, 1, 2]) for dim in dims)
        for dim, count in product(dims, (1, 63, 64, 65, 67, 128, 129)):
            yield WriteBack(family, dim, [*range(2, 2 + count)], [*range(count, 0, -1)])
        yield WriteBack(family, 72, [*range(2, 67)], [*range(65, 0, -1)])


def fill_as_the_tests(device: DevicePool) -> None:
    """Elements counted from 0 in bf16, plus the layer's number; V another 100 more."""
    for component, layer in product(device.spec.components, range(LAYERS)):
        rows = device.buffer(component.name, layer)
        counted = torch.arange(rows.numel(), dtype=rows.dtype).view_as(rows)
        rows.copy_(counted + (layer + 100 * (component.name == "v")))


def layers_exchanged(device: DevicePool) -> DevicePool:
    """The same memory with its layers in the wrong order: what a kernel sees that takes the other pointer."""
    names = [c.name for c in device.spec.components]
    layers = range(LAYERS)
    return DevicePool.wrap(device.spec, {n: [device.buffer(n, i) for i in reversed(layers)] for n in names})


def passes(case: WriteBack, filled: Callable[[DevicePool], None]) -> tuple[bool, bool]:
    """Whether a backup leaves each page and layer equal to the device's, as the tests ask: a right one, and one that
    exchanges the layers.

    Bits are compared, since bytes that name places are NaN here and there; of whole numbers it is the same.
    """
    device = DevicePool(case.spec, num_pages=case.pages)
    filled(device)
    host_slots, device_slots = (slots_of(pages, PAGE) for pages in (case.host_pages, case.device_pages))

    def bits(rows: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        return rows.reshape(case.pages * PAGE, -1)[slots].view(torch.int16)

    def equal(seen: DevicePool) -> bool:
        with HostPool(case.spec, layout="page_first", num_pages=case.pages) as host:
            host.backup(seen, host_slots, device_slots)
            return all(
                torch.equal(
                    bits(host.layer_view(c.name, layer), host_slots), bits(device.buffer(c.name, layer), device_slots)
                )
                for c, layer in product(case.spec.components, range(LAYERS))
            )

    return equal(device), equal(layers_exchanged(device))


def last_count_that_one_changes() -> int:
    """Of the whole numbers that bf16 counts, which has 8 significant bits."""
    counted = torch.arange(1 << 14, dtype=torch.bfloat16)
    return int((counted != counted + 1).nonzero().max())


def layers_alike(filled: Callable[[DevicePool], None] = fill_as_the_tests) -> Finding:
    cases = [*write_backs()]
    right, exchanged = map(sum, zip(*(passes(case, filled) for case in cases), strict=True))
    caught = [passes(case, fill.fill_device) for case in cases].count((True, False))
    return Finding(
        title="A backup that exchanges the two layers passes",
        engine="SGLang",
        source=TESTS,
        cell="MHA and MLA, page_first, backup; pages of 16 tokens, two layers, bf16",
        claim="The tests' fill cannot tell layer 0 from layer 1 anywhere in the pages that are compared.",
        evidence=(
            f"{len(cases)} write-backs with the tests' fill and pages: {right} pass if right, {exchanged} with the two "
            "layers exchanged.",
            f"With a fill that names each place, {caught} of {len(cases)} exchanges are caught.",
            f"In bf16 the last count that adding 1 changes is {last_count_that_one_changes():,}; every page that is "
            f"compared lies behind {min(c.dim * min(c.device_pages) for c in cases) * PAGE:,} elements.",
        ),
        confirmed=exchanged == right == caught == len(cases),
        consequence="Random integers over the whole buffer, as in test_hicache_tma.py, tell every place apart.",
    )
