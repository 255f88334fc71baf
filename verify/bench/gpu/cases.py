"""What is measured: cases (a pool under a name), movers (a way to move it), and portions, which combine them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from refimpl import LAYOUTS, PoolSpec, presets

KIB, MIB = 1 << 10, 1 << 20
PAYLOAD = 256 * MIB  # bytes that move, where nothing else is asked for
MODELS = ("llama-3.1-8b", "deepseek-v3", "deepseek-v4-flash", "qwen3-next")
FEW = ("llama-3.1-8b", "deepseek-v3")
PAGE_MAJOR = ("page_first", "page_first_direct")
PAGE_SIZES = (1, 16, 64)


@dataclass(frozen=True)
class Case:
    """A pool; `pages` of it move, or as many as the payload holds."""

    name: str
    spec: PoolSpec
    pages: int | None = None

    def pages_of(self, payload_bytes: int) -> int:
        return self.pages or max(1, payload_bytes // self.spec.page_bytes)


@dataclass(frozen=True)
class Mover:
    """A backend, or a variant of `variants.VARIANTS`, and how it is asked to move (see `record.Cell`)."""

    backend: str
    blocks: int | None = None
    staging_pages: int | None = None
    layerwise: bool = False

    @property
    def name(self) -> str:
        """
        >>> Mover("kernel", blocks=1).name, Mover("kernel", blocks=4).name, Mover("direct", layerwise=True).name
        ('kernel, 1 block', 'kernel, 4 blocks', 'direct, by layer')
        """
        more = [f"{self.blocks} block{'s' * (self.blocks > 1)}"] if self.blocks else []
        more += [f"staging of {self.staging_pages}"] if self.staging_pages else []
        more += ["by layer"] if self.layerwise else []
        return ", ".join([self.backend, *more])


@dataclass(frozen=True)
class Portion:
    """Cases × layouts × both directions, each with its movers.

    payloads      bytes that move, each a row of its own
    scattered     pages at random places, or one after another
    interference  also measure what transfers do to a matmul beside them
    """

    cases: tuple[Case, ...]
    layouts: tuple[str, ...]
    movers: Callable[[Case, int], tuple[Mover, ...]]
    payloads: tuple[int, ...]
    scattered: bool = True
    interference: bool = False


BACKENDS = tuple(map(Mover, ("direct", "kernel", "staged", "auto")))
BY_LAYER = tuple(Mover(backend, layerwise=True) for backend in ("direct", "kernel", "auto"))
BY_BLOCKS = tuple(Mover("kernel", blocks=blocks) for blocks in (1, 2, 4, 8, 16, 32))
VARIANTS = (
    *BACKENDS,
    Mover("2 blocks of 8-byte words"),
    Mover("one staging buffer"),
    Mover("memcpy one by one"),
)
BESIDE_A_MATMUL = (
    Mover("direct"),
    Mover("staged"),
    *(Mover("kernel", blocks=blocks) for blocks in (1, 2, 4)),
    Mover("auto"),
)

# The geometries of SGLang's measured table, under the names that `data/results/sglang-*.json` uses.
SGLANG_CASES = (
    *(Case(f"MHA Llama-8B, page {page}", presets.mha(32, 8, 128, page_size=page)) for page in (64, 16, 1)),
    *(Case(f"MLA DeepSeek-V3, page {page}", presets.mla(61, 576, page_size=page)) for page in (64, 16, 1)),
    Case("V4-like rows of 37,376 B", presets.v4_paged("v4", 30, 37376)),
    Case("V4-like rows of 8,448 B", presets.v4_paged("v4", 30, 8448, entries=64, entry_bytes=(128, 4))),
    Case("DSA index rows of 8,448 B", presets.dsa_indexer(61, indices_from=None)),
    Case("Mamba states of 128 KiB", presets.mamba(48, [], temporal_shape=(128 * KIB // 4,))),
    Case("Mamba states of 1 MiB", presets.mamba(48, [], temporal_shape=(MIB // 4,))),
)
SGLANG_LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")


def models(names: tuple[str, ...]) -> tuple[Case, ...]:
    """Every pool that has bytes of some models."""
    return tuple(Case(name, spec) for name in names for spec in presets.model(name).values() if spec.page_bytes)


def name_of(model: str, page_size: int | None) -> str:
    """What the cases of a model are called with pages of some tokens, None: as its preset has them.

    >>> name_of("llama-3.1-8b", 16), name_of("llama-3.1-8b", 64), name_of("llama-3.1-8b", None)
    ('llama-3.1-8b, page 16', 'llama-3.1-8b', 'llama-3.1-8b')
    """
    as_preset = page_size is None or presets.model(model) == _with_pages(model, page_size)
    return model if as_preset else f"{model}, page {page_size}"


def paged(names: tuple[str, ...], page_sizes: tuple[int, ...]) -> tuple[Case, ...]:
    """Pools of some models with other pages than their presets', as far as they are others then."""
    return tuple(
        Case(name_of(model, size), spec)
        for model in names
        for size in page_sizes
        for pool, spec in _with_pages(model, size).items()
        if spec.page_bytes and spec != presets.model(model)[pool]
    )


def _with_pages(model: str, page_size: int) -> dict[str, PoolSpec]:
    """Pools by name; none where the model has pages of one size only, and it is another."""
    try:
        return presets.model(model, page_size=page_size)
    except ValueError:
        return {}


def descriptor_cases(most_bytes: int) -> Iterator[Case]:
    """Pools whose every page is one run, so that descriptors and their length can be chosen."""
    for run in (512, 2 * KIB, 8 * KIB, 32 * KIB, 128 * KIB):
        for count in (64, 256, 1024, 4096, 16384, 60000):
            if run * count <= most_bytes:
                yield Case(f"{count} runs of {run} B", presets.mla(1, run, torch.uint8, page_size=1), count)


def portions(
    payload: int,
    names: tuple[str, ...] = MODELS,
    layouts: tuple[str, ...] = LAYOUTS,
    page_sizes: tuple[int, ...] = PAGE_SIZES,
) -> dict[str, Portion]:
    """All portions, in the order in which they are measured.

    layouts, page_sizes  of those portions that have every layout, and other pages than the presets'
    """
    few = tuple(name for name in names if name in FEW) or names[:1]
    other_pages = paged(names, page_sizes)
    return {
        "core": Portion(models(names), layouts, lambda case, pages: BACKENDS, (payload,)),
        "sglang": Portion(SGLANG_CASES, SGLANG_LAYOUTS, lambda case, pages: (*BACKENDS, *BY_LAYER), (payload,)),
        "sizes": Portion(
            models(names),
            ("layer_first", *PAGE_MAJOR),
            lambda case, pages: BACKENDS,
            (payload // 256, payload // 16),
            scattered=False,
        ),
        "blocks": Portion(models(names), ("layer_first", "page_first", "page_head"), lambda *_: BY_BLOCKS, (payload,)),
        "capacity": Portion(models(few), PAGE_MAJOR, _by_capacity, (payload,)),
        "descriptors": Portion(
            tuple(descriptor_cases(payload)),
            ("layer_first",),
            lambda *_: (Mover("direct"), Mover("kernel")),
            (payload,),
        ),
        "variants": Portion(models(few), ("layer_first", *PAGE_MAJOR), lambda *_: VARIANTS, (payload,)),
        "matmul": Portion(models(few), PAGE_MAJOR, lambda *_: BESIDE_A_MATMUL, (payload,), interference=True),
        "pages": Portion(other_pages, layouts, lambda *_: BACKENDS, (payload,)),
        "contiguous": Portion(
            (*models(names), *other_pages), layouts, lambda *_: BACKENDS, (payload,), scattered=False
        ),
    }


def _by_capacity(case: Case, pages: int) -> tuple[Mover, ...]:
    """Staging of 2, 4, 8, … pages, as many as move at most; two is the least, one for each half."""
    return tuple(Mover("staged", staging_pages=2 << i) for i in range(max(1, pages.bit_length() - 1)))
