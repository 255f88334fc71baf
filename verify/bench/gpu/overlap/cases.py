"""What is measured: models, the steps that are asked of them, and the ways to load their prefixes."""

from __future__ import annotations

from dataclasses import dataclass, replace

from refimpl import PoolSpec, presets
from verify.arena import ALIGNMENT
from verify.bench.gpu.overlap.layers import Shape

Way = tuple[str, str]  # layout, backend


@dataclass(frozen=True)
class Workload:
    """A model, and what is asked of it.

    steps      prefix tokens -> new tokens of each step
    recompute  tokens that are computed after none
    """

    model: str
    spec: PoolSpec
    shape: Shape
    steps: dict[int, tuple[int, ...]]
    ways: tuple[Way, ...]
    recompute: tuple[int, ...]

    def pages(self, prefix: int) -> int:
        """Of a device pool for the steps with a prefix: padding, the prefix, new tokens."""
        return 1 + -(-(prefix + max(self.steps[prefix])) // self.spec.page_size)

    @property
    def from_nothing(self) -> Workload:
        """The same with room for the longest recomputation, after a prefix of one page."""
        return replace(self, steps={self.spec.page_size: (max(self.recompute, default=0),)})

    def memory_needed(self) -> int:
        """Bytes of host memory, with what alignment loses."""
        pages = max(workload.pages(prefix) for workload in (self, self.from_nothing) for prefix in workload.steps)
        return pages * self.spec.page_bytes + ALIGNMENT * (1 + 4 * self.spec.layers)


FEW, SOME, MANY = 64, 512, 2048  # new tokens
PAGE, SHORT, LONG, LONGEST = 64, 2048, 8192, 32768  # tokens of a prefix
LENGTHS = (FEW, 2 * FEW, 4 * FEW, SOME, 2 * SOME, SHORT, LONG, LONGEST)  # of recomputations
WORKLOADS = (  # the one with most to do is the last: if time is short, some of that is left out
    Workload(
        "qwen3-32b",
        presets.model("qwen3-32b")["kv"],
        Shape(hidden=5120, heads=64, intermediate=25600),
        {LONG: (FEW, SOME)},
        (("page_first", "kernel"), ("page_first", "staged"), ("page_first_direct", "direct")),
        (),
    ),
    # One of eight ranks, which share heads and MLP but not latent rows. Its MLP computes what a token meets: a shared
    # expert and eight routed ones of 2048 lanes, as wide together as the MLP of the model's first layers.
    Workload(
        "deepseek-v3",
        presets.model("deepseek-v3", tp=8)["kv"],
        Shape(hidden=7168, heads=16, intermediate=18432 // 8, query_rank=1536, latent=512, head_dim=128),
        dict.fromkeys((PAGE, SHORT, LONG, LONGEST), (FEW, SOME)),
        (
            ("page_first", "kernel"),
            ("page_first_direct", "direct"),
            ("page_first_direct", "staged"),
            ("page_first_kv_split", "kernel"),
        ),
        LENGTHS,
    ),
    Workload(
        "llama-3.1-8b",
        presets.model("llama-3.1-8b")["kv"],
        Shape(hidden=4096, heads=32, intermediate=14336),
        {
            PAGE: (FEW, SOME),
            SHORT: (FEW, SOME),
            LONG: (FEW, SOME),
            LONGEST: (FEW, SOME, MANY),
        },
        (
            ("layer_first", "kernel"),
            ("page_first", "kernel"),
            ("page_first", "staged"),
            ("page_first_direct", "direct"),
            ("page_first_direct", "staged"),
            ("page_first_direct", "auto"),
            ("page_head", "kernel"),
        ),
        LENGTHS,
    ),
)


def toys(ways: tuple[Way, ...]) -> tuple[Workload, ...]:
    """The same two kinds of attention at a size for one core."""
    shapes = {
        "toy GQA": (presets.mha(3, 2, 8, page_size=4), Shape(hidden=32, heads=4, intermediate=48)),
        "toy MLA": (
            presets.mla(3, 24, page_size=4, split=(16, 8)),
            Shape(hidden=32, heads=2, intermediate=48, query_rank=16, latent=16, head_dim=8),
        ),
    }
    steps = {16: (4, 8), 64: (4,)}
    return tuple(Workload(name, spec, shape, steps, ways, (4, 64)) for name, (spec, shape) in shapes.items())


TOYS = {
    "cpu": toys((("layer_first", "torch"), ("page_first", "torch"), ("page_head", "torch"))),
    "emulated": toys((("page_first", "kernel"), ("page_first", "staged"), ("page_first_direct", "direct"))),
}
