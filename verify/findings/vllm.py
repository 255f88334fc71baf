"""vLLM: which blocks its test compares."""

from __future__ import annotations

import random

import numpy as np

from verify.findings.finding import Finding

TEST = "vllm-project/vllm, tests/v1/kv_offload/cpu/test_gpu_worker.py at 003ffff, test_transfer"
GPU_BLOCKS, CPU_BLOCKS, MAPPINGS, FACTORS = 64, 256, 3, (1, 3)


def mapping(seed: int, factor: int) -> tuple[list[int], list[int]]:
    """GPU blocks and the CPU sub-blocks that they are stored to, drawn as the test draws them."""
    drawn = random.Random(seed)
    gpu = drawn.sample(range(GPU_BLOCKS), MAPPINGS * factor)
    cpu = drawn.sample(range(CPU_BLOCKS), MAPPINGS)
    return gpu[factor - 1 :], [block * factor + i for block in cpu for i in range(factor)][factor - 1 :]


def store_unseen(compared: int = GPU_BLOCKS, seed: int = 0) -> Finding:
    """`compared` sub-blocks are looked at: the number of blocks on the GPU, in both directions."""
    written = {factor: mapping(seed, factor)[1] for factor in FACTORS}
    seen = {factor: [block for block in blocks if block < compared] for factor, blocks in written.items()}
    lines = [
        f"Sub-blocks of {factor} a block: written {', '.join(map(str, blocks))}; compared 0 to {compared - 1}: "
        f"{len(seen[factor])} of the {len(blocks)} that are written."
        for factor, blocks in written.items()
    ]
    noticed = sum(_notices_nothing_moved(seed, factor, compared) for factor in FACTORS)
    return Finding(
        title="A store that moves nothing passes",
        engine="vLLM",
        source=TEST,
        cell="one group of four tensors, GPU to CPU, blocks drawn by seed 0, the test's only one; the multi-group test "
        "beside it compares every block",
        claim="In the store direction none of the blocks that the transfer writes is compared.",
        evidence=(*lines, f"A store that moves no byte: noticed for {noticed} of {len(FACTORS)} factors."),
        confirmed=not any(seen.values()) and not noticed,
        consequence="The number of sub-blocks to compare is the CPU's (blocks times factor) where the CPU is written.",
    )


def _notices_nothing_moved(seed: int, factor: int, compared: int) -> bool:
    """The test's own comparison, on random bytes, of a destination that nobody wrote."""
    source = np.random.default_rng(seed).integers(0, 256, (GPU_BLOCKS, 512), np.uint8)
    before = np.random.default_rng(seed + 1).integers(0, 256, (CPU_BLOCKS * factor, 512), np.uint8)
    gpu, cpu = mapping(seed, factor)
    origin = dict(zip(cpu, gpu, strict=True))
    expected = [source[origin[block]] if block in origin else before[block] for block in range(compared)]
    return not all(np.array_equal(before[block], due) for block, due in enumerate(expected))
