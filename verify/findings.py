"""What was found in other projects' tests and dispatch, each reproduced here: `python -m verify findings`.

A finding is a claim that others can check: a function that works it out again, from the upstream file it names or from
committed measurements, and says whether the claim holds. FINDINGS.md is written from them. They are offered to these
projects, whose code taught this one most of what it knows.
"""

from __future__ import annotations

import argparse
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from pathlib import Path

import numpy as np
import torch

from refimpl import DevicePool, HostPool, PoolSpec, presets, slots_of
from verify import fill
from verify.bench.gpu import results

FILE = Path(__file__).resolve().parents[1] / "FINDINGS.md"


@dataclass(frozen=True)
class Finding:
    """`source` is the upstream file and its commit; `evidence` what was computed, a sentence each."""

    title: str
    engine: str
    source: str
    cell: str
    claim: str
    evidence: Sequence[str]
    confirmed: bool
    consequence: str


# ---- SGLang: what its fill can tell apart

SGLANG_TESTS = (
    "sgl-project/sglang, test/registered/kernels/ops/kvcache/test_hicache.py at 0c00434 and "
    "test_hicache_page_first_write_back.py at 029add4"
)
SGLANG_PAGE, SGLANG_LAYERS = 16, 2
Exchange = Callable[[DevicePool], DevicePool]


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
            return presets.mla(layers=SGLANG_LAYERS, latent_dim=self.dim, dtype=torch.bfloat16, page_size=SGLANG_PAGE)
        heads = max(1, self.dim // 128)
        return presets.mha(
            layers=SGLANG_LAYERS,
            heads=heads,
            head_dim=self.dim // heads,
            dtype=torch.bfloat16,
            page_size=SGLANG_PAGE,
        )


def sglang_write_backs() -> Iterator[WriteBack]:
    """Round trips of three pages, then staged write-backs of 1 to 129."""
    for family, dims in ("mha", (128, 256, 512, 1024)), ("mla", (576,)):
        yield from (WriteBack(family, dim, [1, 2, 3], [0, 1, 2]) for dim in dims)
        for dim, count in product(dims, (1, 63, 64, 65, 67, 128, 129)):
            yield WriteBack(family, dim, [*range(2, 2 + count)], [*range(count, 0, -1)])
        yield WriteBack(family, 72, [*range(2, 67)], [*range(65, 0, -1)])


def fill_as_sglang(device: DevicePool) -> None:
    """Elements counted from 0 in bf16, plus the layer's number; V another 100 more."""
    for component, layer in product(device.spec.components, range(SGLANG_LAYERS)):
        rows = device.buffer(component.name, layer)
        counted = torch.arange(rows.numel(), dtype=rows.dtype).view_as(rows)
        rows.copy_(counted + (layer + 100 * (component.name == "v")))


def layers_exchanged(device: DevicePool) -> DevicePool:
    """The same memory with its layers in the wrong order: what a kernel sees that takes the other pointer."""
    names = [c.name for c in device.spec.components]
    layers = range(SGLANG_LAYERS)
    return DevicePool.wrap(device.spec, {n: [device.buffer(n, i) for i in reversed(layers)] for n in names})


def as_it_is(device: DevicePool) -> DevicePool:
    return device


def passes(case: WriteBack, filled: Callable[[DevicePool], None], seen: Exchange) -> bool:
    """Whether a backup of the device as `seen` leaves each page and layer equal to the device's, as the tests ask.

    Bits are compared, since bytes that name places are NaN here and there; of whole numbers it is the same.
    """
    device = DevicePool(case.spec, num_pages=case.pages)
    filled(device)
    host_slots, device_slots = (slots_of(pages, SGLANG_PAGE) for pages in (case.host_pages, case.device_pages))

    def bits(rows: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        return rows.reshape(case.pages * SGLANG_PAGE, -1)[slots].view(torch.int16)

    with HostPool(case.spec, layout="page_first", num_pages=case.pages) as host:
        host.backup(seen(device), host_slots, device_slots)
        return all(
            torch.equal(bits(host.layer_view(c.name, at), host_slots), bits(device.buffer(c.name, at), device_slots))
            for c, at in product(case.spec.components, range(SGLANG_LAYERS))
        )


def last_count_that_one_changes(limit: int = 1 << 14) -> int:
    """Of the whole numbers that bf16 counts, which has 8 significant bits."""
    counted = torch.arange(limit, dtype=torch.bfloat16)
    return int((counted != counted + 1).nonzero().max())


def sglang_layers_alike(filled: Callable[[DevicePool], None] = fill_as_sglang) -> Finding:
    cases = [*sglang_write_backs()]
    right = sum(passes(case, filled, as_it_is) for case in cases)
    exchanged = sum(passes(case, filled, layers_exchanged) for case in cases)
    seen = [[passes(case, fill.fill_device, how) for how in (as_it_is, layers_exchanged)] for case in cases]
    caught = seen.count([True, False])
    return Finding(
        title="A backup that exchanges the two layers passes",
        engine="SGLang",
        source=SGLANG_TESTS,
        cell="MHA and MLA, page_first, backup; pages of 16 tokens, two layers, bf16",
        claim="The tests' fill cannot tell layer 0 from layer 1 anywhere in the pages that are compared.",
        evidence=(
            f"{len(cases)} write-backs with the tests' fill and pages: {right} pass if right, {exchanged} with the two "
            "layers exchanged.",
            f"With a fill that names each place, {caught} of {len(cases)} exchanges are caught.",
            f"In bf16 the last count that adding 1 changes is {last_count_that_one_changes():,}; every page that is "
            f"compared lies behind {min(c.dim * min(c.device_pages) for c in cases) * SGLANG_PAGE:,} elements.",
        ),
        confirmed=exchanged == right == caught == len(cases),
        consequence="Random integers over the whole buffer, as in test_hicache_tma.py, tell every place apart.",
    )


# ---- vLLM: which blocks its test compares

VLLM_TEST = "vllm-project/vllm, tests/v1/kv_offload/cpu/test_gpu_worker.py at 003ffff, test_transfer"
VLLM_GPU_BLOCKS, VLLM_CPU_BLOCKS, VLLM_MAPPINGS, VLLM_FACTORS = 64, 256, 3, (1, 3)


def vllm_mapping(seed: int, factor: int) -> tuple[list[int], list[int]]:
    """GPU blocks and the CPU sub-blocks that they are stored to, drawn as the test draws them."""
    drawn = random.Random(seed)
    gpu = drawn.sample(range(VLLM_GPU_BLOCKS), VLLM_MAPPINGS * factor)
    cpu = drawn.sample(range(VLLM_CPU_BLOCKS), VLLM_MAPPINGS)
    return gpu[factor - 1 :], [block * factor + i for block in cpu for i in range(factor)][factor - 1 :]


def vllm_store_unseen(compared: int = VLLM_GPU_BLOCKS, seed: int = 0) -> Finding:
    """`compared` sub-blocks are looked at: the number of blocks on the GPU, in both directions."""
    written = {factor: vllm_mapping(seed, factor)[1] for factor in VLLM_FACTORS}
    seen = {factor: [block for block in blocks if block < compared] for factor, blocks in written.items()}
    lines = [
        f"Sub-blocks of {factor} a block: written {', '.join(map(str, blocks))}; compared 0 to {compared - 1}: "
        f"{len(seen[factor])} of the {len(blocks)} that are written."
        for factor, blocks in written.items()
    ]
    noticed = sum(_vllm_notices_nothing_moved(seed, factor, compared) for factor in VLLM_FACTORS)
    return Finding(
        title="A store that moves nothing passes",
        engine="vLLM",
        source=VLLM_TEST,
        cell="one group of four tensors, GPU to CPU; the multi-group test beside it compares every block",
        claim="In the store direction none of the blocks that the transfer writes is compared.",
        evidence=(*lines, f"A store that moves no byte: noticed for {noticed} of {len(VLLM_FACTORS)} factors."),
        confirmed=not any(seen.values()) and not noticed,
        consequence="The number of sub-blocks to compare is the CPU's (blocks times factor) where the CPU is written.",
    )


def _vllm_notices_nothing_moved(seed: int, factor: int, compared: int) -> bool:
    """The test's own comparison, on random bytes, of a destination that nobody wrote."""
    source = np.random.default_rng(seed).integers(0, 256, (VLLM_GPU_BLOCKS, 512), np.uint8)
    before = np.random.default_rng(seed + 1).integers(0, 256, (VLLM_CPU_BLOCKS * factor, 512), np.uint8)
    gpu, cpu = vllm_mapping(seed, factor)
    origin = dict(zip(cpu, gpu, strict=True))
    expected = [source[origin[block]] if block in origin else before[block] for block in range(compared)]
    return not all(np.array_equal(before[block], due) for block, due in enumerate(expected))


# ---- KVBM and FlexKV: what their fills can tell apart

Place = tuple[int, ...]
KVBM_FILL = "ai-dynamo/dynamo, lib/kvbm-physical/src/transfer/fill.rs at 090512f, FillPattern::Sequential"
KVBM_GRID = {"block": 8, "layer": 4, "outer": 2}  # outer: K and V


def kvbm_fill(block: int, layer: int, outer: int, size: int = 512) -> bytes:
    """A region; which of K and V it is does not enter."""
    return bytes((block + layer + offset) % 256 for offset in range(size))


def kvbm_fill_aliases(region: Callable[..., bytes] = kvbm_fill) -> Finding:
    places = [*product(*map(range, KVBM_GRID.values()))]
    regions = {place: region(*place) for place in places}
    blocks, layers, _ = KVBM_GRID.values()
    swapped = [_block(regions, b, layers, (1, 0)) == _block(regions, b, layers, (0, 1)) for b in range(blocks)]
    pairs = [(a, b) for a, b in combinations(places, 2) if regions[a] == regions[b]]
    of_outer = sum(a[:2] == b[:2] for a, b in pairs)
    diagonal = sum(a[0] != b[0] and a[1] != b[1] for a, b in pairs)
    share = len(pairs) / (len(places) * (len(places) - 1) / 2)
    return Finding(
        title="K and V are filled alike, and one block further is one layer less",
        engine="Dynamo KVBM",
        source=KVBM_FILL,
        cell="any layout and direction that is tested with this fill",
        claim="The sequential fill gives different regions the same bytes.",
        evidence=(
            f"{len(places)} regions ({blocks} blocks, {layers} layers, K and V) hold "
            f"{len(set(regions.values()))} different contents; {share:.1%} of all pairs are alike.",
            f"{of_outer} of {len(places) // 2} blocks and layers have the same bytes for K and for V; with K and V "
            f"exchanged, {sum(swapped)} of {blocks} blocks keep every byte, and so any checksum.",
            f"{diagonal} of these pairs differ in block and in layer.",
        ),
        confirmed=all(swapped) and diagonal > 0,
        consequence="A byte that depends on K or V, on the block and on the layer, each by a factor of its own, would "
        "let the checksums that the tests take see these.",
    )


def _block(regions: Mapping[Place, bytes], block: int, layers: int, outers: Sequence[int]) -> bytes:
    return b"".join(regions[block, layer, outer] for layer in range(layers) for outer in outers)


FLEXKV_TEST = "taco-project/FlexKV, tests/test_kv_transfer_correctness.py at 016c290, fill_gpu and spot_check_gpu"
FLEXKV_SIZES = {"ds3-mini": (4, 8, 16, 512), "ds3": (61, 256, 16, 512)}  # layers, blocks, tokens, lanes
FLEXKV_TOLERANCE = 1e-3


def flexkv_number(layer: int, block: int, token: int, lane: int = 0) -> int:
    """Before it is divided by 997; K of GPU 0."""
    return (layer * 10000 + block * 1000 + token * 10 + lane) % 997


def flexkv_fill_aliases(number: Callable[[int, int, int], int] = flexkv_number) -> Finding:
    lines, alike = [], []
    for name, (layers, blocks, tokens, lanes) in FLEXKV_SIZES.items():
        rows = Counter(number(*place) for place in product(range(layers), range(blocks), range(tokens)))
        total, twins = rows.total(), sum(count for count in rows.values() if count > 1)
        compared = 2 * 2 * 2  # first and last layer, block and lane
        lines.append(
            f"{name}: {twins:,} of {total:,} rows have the very values of another row; "
            f"{compared} of {total * lanes:,} values are compared."
        )
        alike.append(twins)
    exact = np.arange(997) / 997.0
    near = int((np.abs(exact[1:].astype(np.float16).astype(np.float64) - exact[:-1]) < FLEXKV_TOLERANCE).sum())
    return Finding(
        title="Rows repeat, neighbours are within the tolerance, corners are compared",
        engine="FlexKV",
        source=FLEXKV_TEST,
        cell="GPU to CPU and back, as test_non_mla_roundtrip and test_mla_roundtrip_modes check it",
        claim="The fill repeats within a buffer, and its comparison accepts some wrong values.",
        evidence=(
            *lines,
            f"One layer further is ten blocks further: {number(1, 0, 0)} and {number(0, 10, 0)} before the division.",
            f"{near} of 996 values in fp16 pass for the next smaller one, which is {1 / 997:.2e} away; the tolerance "
            f"is {FLEXKV_TOLERANCE:.0e}.",
            "Block lists are the same on both sides, so a mapping that is wrong both ways leads back.",
        ),
        confirmed=all(alike) and near > 0,
        consequence="Integers that name the place, compared as bytes, over the whole buffer and on the host too.",
    )


# ---- SGLang: what its dispatch leaves on the table, by committed measurements

Figures = Sequence[Mapping[str, str | float | bool]]
SGLANG_FIGURES = "SGLang 0.5.23, one H200; figures in data/results/sglang-0.5.23-h200.json"


def sglang_figures() -> Figures:
    return results.sglang()["figures"]


def rate(figures: Figures, case: str, direction: str, layout: str, path: str) -> float:
    """As a fraction of the plain copy of the same run."""
    asked = {"case": case, "direction": direction, "layout": layout, "path": path}
    (found,) = (f for f in figures if all(f[name] == value for name, value in asked.items()))
    return float(found["fraction"])


def sglang_staged_at_page_one(figures: Figures | None = None) -> Finding:
    figures = sglang_figures() if figures is None else figures
    lines, gains = [], []
    for case in "MHA Llama-8B, page 1", "MLA DeepSeek-V3, page 1":
        where = case, "backup", "page_first"
        chosen = [f["path"] for f in figures if (f["case"], f["direction"], f["layout"]) == where and f["chosen"]]
        staged, ops = (rate(figures, *where, path) for path in ("staged", "AOT"))
        gains.append(ops / staged if chosen == ["staged"] else 0.0)
        lines.append(f"{case}: staged, which is taken, {staged:.3f} of a plain copy; the operator {ops:.3f}.")
    return Finding(
        title="Pages of one token are written back by the slower path",
        engine="SGLang",
        source=SGLANG_FIGURES,
        cell="MHA and MLA, page_first, backup, page size 1",
        claim="The staged path is taken although an operator that SGLang also has is up to three times as fast.",
        evidence=(*lines, f"The operator is {' and '.join(f'{gain:.1f}' for gain in gains)} times as fast."),
        confirmed=max(gains) > 2.9 and min(gains) > 1,
        consequence="Below 128 KiB a page, staging submits a copy for each; K of a page is 64 KiB here, the latent 69. "
        "A threshold on the bytes of a page would send these to transfer_kv_all_layer_lf_pf and its _mla form.",
    )


def sglang_loads_of_page_rows(figures: Figures | None = None) -> Finding:
    figures = sglang_figures() if figures is None else figures
    lines, taken, others = [], [], []
    for case in "V4-like rows of 37,376 B", "V4-like rows of 8,448 B", "DSA index rows of 8,448 B":
        for layout in "layer_first", "page_first":
            found = [f for f in figures if (f["case"], f["direction"], f["layout"]) == (case, "load", layout)]
            (ops,) = (f["fraction"] for f in found if f["path"] == "AOT" and f["chosen"])
            bulk = [f["fraction"] for f in found if f["path"] == "TMA"]
            taken.append(float(ops))
            others += map(float, bulk)
            beside = f"; its bulk-copy kernel, not taken, {float(bulk[0]):.2f}" if bulk else ""
            lines.append(f"{case}, {layout}: the operator, which is taken, {float(ops):.2f}{beside}.")
    return Finding(
        title="Page rows of DeepSeek V4 and of the DSA indexer are loaded at two thirds of the bus",
        engine="SGLang",
        source=SGLANG_FIGURES,
        cell="V4 pages and DSA indexer, layer_first and page_first, load with backend kernel",
        claim="These loads run at about 0.65 of a plain copy, and a kernel that SGLang also has runs at 0.9.",
        evidence=(*lines, f"Taken: {min(taken):.2f} to {max(taken):.2f}. Not taken: {min(others):.2f} and more."),
        confirmed=max(taken) < 0.7 and min(others) > 0.85,
        consequence="These pools leave the kernels that are compiled when needed aside (can_use_jit is False), though "
        "rows of 8,448 bytes fit them; rows of 37,376 bytes exceed their stage of 32 KiB.",
    )


FINDINGS: dict[str, Callable[[], Finding]] = {
    "sglang-layers-alike": sglang_layers_alike,
    "sglang-staged-at-page-one": sglang_staged_at_page_one,
    "sglang-loads-of-page-rows": sglang_loads_of_page_rows,
    "vllm-store-unseen": vllm_store_unseen,
    "kvbm-fill-aliases": kvbm_fill_aliases,
    "flexkv-fill-aliases": flexkv_fill_aliases,
}

INTRODUCTION = """\
# Findings

What this suite and its measurements showed in the tests, kernels and dispatch of other projects. Each is worked out
anew by the command under it; nothing is here that was not. They are meant as reports to these projects, whose sources
and threads this one is built on. Generated: `python -m verify findings --write`.
"""


def as_markdown(name: str, finding: Finding) -> str:
    lines = [
        f"## {finding.engine}: {finding.title}",
        "",
        f"{finding.claim} **{'Confirmed' if finding.confirmed else 'Refuted'}.**",
        "",
        f"- Where: {finding.source}",
        f"- Cell: {finding.cell}",
        *(f"- {line}" for line in finding.evidence),
        f"- {finding.consequence}",
        f"- Reproduce: `python -m verify findings {name}`",
    ]
    return "\n".join(lines) + "\n"


def as_file() -> str:
    return "\n".join([INTRODUCTION, *(as_markdown(name, find()) for name, find in FINDINGS.items())])


def main(argv: Sequence[str]) -> int:
    """Work out findings again. Exit code: 0, 1 where a claim does not hold."""
    parser = argparse.ArgumentParser(prog="python -m verify findings", description=main.__doc__)
    parser.add_argument("name", nargs="*", choices=[*FINDINGS, []], metavar="NAME", help=", ".join(FINDINGS))
    parser.add_argument("--write", action="store_true", help="write FINDINGS.md anew")
    options = parser.parse_args(argv)
    if options.write:
        FILE.write_text(as_file(), encoding="utf-8")
        return 0
    found = {name: FINDINGS[name]() for name in options.name or FINDINGS}
    print(*(as_markdown(name, finding) for name, finding in found.items()), sep="\n", end="")
    return int(not all(finding.confirmed for finding in found.values()))
