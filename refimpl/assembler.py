"""A whole model at once: every pool on host and device, in one group, checked before any memory is taken.

What a stack is made of follows `srt/mem_cache/hybrid_cache/hybrid_pool_assembler.py` of SGLang 0.5.23. What differs on
purpose: one budget covers all pools (upstream's DeepSeek V4 pools check it and book nothing), every stack can be sized
by bytes, a rider has exactly the pages of the pool it rides on, and what cannot be is refused before anything is built.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import torch

from refimpl import presets, sizing
from refimpl.allocator import Budget, PageAllocator, require_budget
from refimpl.backends import registry
from refimpl.backends.protocol import Setup
from refimpl.device_pool import UNLIMITED, DevicePool
from refimpl.devices import others_of_its_platform, platform_of, settled
from refimpl.geometry import PoolSpec, is_int
from refimpl.host_pool import HostPool
from refimpl.layout import Buffer, buffers, upstream_shape
from refimpl.pinned import HostMemory
from refimpl.pool_group import HostPoolGroup
from refimpl.support import BACKENDS, MEMORY, UnsupportedPairing, require

Specs = Mapping[str, PoolSpec]
Pairs = Mapping[str, tuple[str, str]]

# Layouts that a side pool replaces of itself: family, layout of the stack -> layout of the pool (upstream's only one).
REWRITES = {("mamba", "page_first_kv_split"): "page_first_direct"}


@dataclass(eq=False, repr=False)
class Stack:
    """The pools of one model.

    specs         pool -> what it stores; the anchor first, a rider after the pool whose indices it uses
    device        pool -> its device buffers, our own or an engine's
    host          the same pools in host memory, as a group
    device_slots  pool that owns indices -> who has which of its device slots; page 0 is padding, as engines keep it
    platform      the device that the device pools lie on, by name: "cpu", "cuda:0", "emulated:1"

    `close` (or the end of a `with`) gives back all that the host pools took. `print(stack)` shows what was built.
    """

    specs: dict[str, PoolSpec]
    device: dict[str, DevicePool]
    host: HostPoolGroup
    device_slots: dict[str, PageAllocator]
    platform: str

    def owner(self, name: str) -> str:
        """The pool whose indices a pool uses: its own name unless it rides on another, and that one's owner then."""
        return _owner(self.specs, name)

    def layer_map(self, name: str) -> dict[int, int]:
        """Model layer -> position among the layers that the pool stores. Layers it does not own are absent."""
        spec = self._spec(name)
        stored = dict.fromkeys(i for c in spec.components for i in spec.layers_of(c) if i is not None)
        return {layer: position for position, layer in enumerate(stored)}

    @property
    def num_layers(self) -> int:
        """Model layers that the stack spans, those that no pool owns included."""
        return max(spec.layers for spec in self.specs.values())

    def get_hybrid_pool_buffer(self, name: str) -> list[torch.Tensor]:
        """The host tensors of a pool that hold anything, as upstream lists them for registration.

        K and V apart (where a page does not keep them together), page rows of `layer_first` layer by layer, the parts
        of a split row one after another. Each is contiguous, and together they are the pool's bytes, each once.
        """
        pool = self.host.pools[self._spec(name).name]
        shaped = pool.kv_buffer if isinstance(pool.kv_buffer, list) else [pool.kv_buffer]
        kinds = [buffer for buffer, tensors in pool.storage for _ in tensors]
        return [
            part
            for buffer, tensor in zip(kinds, shaped, strict=True)
            for part in (tensor.unbind() if _halves(buffer) else [tensor])
            if part.numel()
        ]

    def describe(self) -> str:
        """Two tables: whose indices a pool uses, how it is laid out and moved, its tensors; then pages and bytes."""
        made, sizes = [], []
        for name, pool in self.host.pools.items():
            first, *others = _tensors(pool) or ["none"]
            paths = [pool.paths[direction].name for direction in ("backup", "load")]
            made.append([name, self.owner(name), pool.layout, pool.backend, *paths, first])
            made += [["", "", "", "", "", "", other] for other in others]
            sizes.append((name, self.device[name].num_pages, pool.num_pages, pool.nbytes, pool.staging_bytes))
        nbytes, staging = (sum(column) for column in list(zip(*sizes, strict=True))[-2:])
        figures = [[name, *(f"{n:,}" for n in numbers)] for name, *numbers in sizes]
        figures.append(["total", "", "", f"{nbytes:,}", f"{staging:,}"])
        return f"{_table(MADE, made, str.ljust)}\n\n{_table(SIZES, figures, str.rjust)}"

    __str__ = describe

    def close(self) -> None:
        """Close every host pool, riders first, whatever the others raise. Idempotent."""
        self.host.close()

    def __enter__(self) -> Stack:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _spec(self, name: str) -> PoolSpec:
        if name not in self.specs:
            raise KeyError(f"the stack has no pool {name!r}, it has {list(self.specs)}")
        return self.specs[name]


def build_stack(
    model: str | Specs,
    layout: str = "page_first",
    backend: str = "torch",
    pools: Pairs | None = None,
    *,
    device_pages: int | Mapping[str, int] | None = None,
    device: Mapping[str, DevicePool] | None = None,
    host_ratio: float | None = None,
    host_bytes: int | None = None,
    platform: str | None = None,
    tp: int = 1,
    page_size: int | None = None,
    profile: str = "reference",
    memory: HostMemory | None = None,
    registration_limit: int | None = None,
    budget: Budget | None = None,
    device_budget: Budget | None = None,
    staging_pages: int | None = None,
    blocks: int | None = None,
) -> Stack:
    """Every pool of a model, on host and device.

    model         a name of `presets.MODELS`, for a rank of `tp` and pages of `page_size`; or pools by name
    pools         layout and backend of single pools; every other one has `layout` and `backend` (see `REWRITES`)
    device_pages  pages of the device pools that own indices, page 0 included: one number for all, or one for each.
                  A Mamba page is one state. Riders have the pages of the pool they ride on.
    device        device pools that exist already (an engine's, wrapped), by name; the others are made
    host_ratio    host pages for each device page, rounded down pool by pool
    host_bytes    instead: what all host pools share, by the device bytes of those that own indices with their riders
    platform      where the device pools lie ("cuda:1", say); None: as `device` says, or else where the backends can
                  reach here
    budget        host memory of all pools together; `device_budget`: device memory for staging

    The rest goes to every `HostPool`. Raises, before any memory is taken: `UnsupportedPairing` naming the pool;
    `MemoryError` if the pools together exceed a budget; `ValueError` for pools in the wrong order, sizes that are
    missing, given twice or come to nothing, and device pools that do not fit. What fails later closes what was built.
    """
    _require_numbers(device_pages, host_ratio, host_bytes)
    specs = _specs(model, tp, page_size)
    wrapped = _wrapped(device)
    pairs = _pairs(specs, layout, backend, pools or {})
    platform = settled(platform or _platform(pairs, wrapped))
    _require_supported(specs, pairs, platform, profile)
    pages = _device_pages(specs, device_pages, wrapped)
    _require_fitting(specs, pages, wrapped, platform)
    host_pages = _host_pages(specs, pages, host_ratio, host_bytes)
    _require_room(budget, {name: host_pages[name] * spec.page_bytes for name, spec in specs.items()}, "host memory")
    staging = {
        name: registry.staging_bytes(
            pairs[name][1], Setup(spec, pairs[name][0], host_pages[name], platform, staging_pages, blocks)
        )
        for name, spec in specs.items()
    }
    _require_room(device_budget, staging, "device memory for staging")
    make = partial(
        HostPool,
        profile=profile,
        memory=memory,
        registration_limit=registration_limit,
        budget=budget,
        platform=platform,
        staging_pages=staging_pages,
        device_budget=device_budget,
        blocks=blocks,
    )
    with ExitStack() as built:
        group = HostPoolGroup(
            [
                built.enter_context(make(spec, pairs[name][0], host_pages[name], pairs[name][1]))
                for name, spec in specs.items()
            ]
        )
        own = {name: wrapped.get(name) or DevicePool(specs[name], pages[name], platform) for name in specs}
        slots = {name: PageAllocator(pages[name], specs[name].page_size, reserved=1) for name in _owners(specs)}
        stack = Stack(specs, own, group, slots, platform)
        built.pop_all()  # it closes them itself
        return stack


# ---- what is asked for


def _specs(model: str | Specs, tp: int, page_size: int | None) -> dict[str, PoolSpec]:
    """The pools in order: `ValueError` unless each rides on nothing, or on one before it with pages like its own."""
    if isinstance(model, str):
        return presets.model(model, tp, page_size)
    if tp != 1 or page_size is not None:
        raise ValueError(f"tp={tp} and page_size={page_size} are for models by name; pools have their own geometry")
    if not isinstance(model, Mapping) or not all(isinstance(spec, PoolSpec) for spec in model.values()):
        raise TypeError(f"a stack is a model's name or PoolSpecs by name, got {model!r}")
    if not model:
        raise ValueError("a stack needs at least its anchor, got no pools")
    before: dict[str, PoolSpec] = {}
    for name, spec in model.items():
        if spec.name != name:
            raise ValueError(f"pool {spec.name!r} stands under the name {name!r}; give both the same")
        source = spec.indices_from
        if not before and source:
            raise ValueError(f"the first pool is the anchor and owns its indices, {name!r} rides on {source!r}")
        if source and source not in before:
            raise ValueError(f"pool {name!r} rides on {source!r}, which must come before it (there are {list(before)})")
        if source and before[source].page_size != spec.page_size:
            raise ValueError(
                f"pool {name!r} has pages of {spec.page_size}, but {source!r}, whose indices it shares, has pages of "
                f"{before[source].page_size}"
            )
        before[name] = spec
    return before


def _owner(specs: Specs, name: str) -> str:
    if name not in specs:
        raise KeyError(f"the stack has no pool {name!r}, it has {list(specs)}")
    source = specs[name].indices_from
    return _owner(specs, source) if source else name


def _owners(specs: Specs) -> list[str]:
    return [name for name, spec in specs.items() if not spec.indices_from]


def _pairs(specs: Specs, layout: str, backend: str, chosen: Pairs) -> dict[str, tuple[str, str]]:
    """Layout and backend of each pool."""
    _require_known(specs, chosen, "pools")
    for name, pair in chosen.items():
        if not (isinstance(pair, tuple) and len(pair) == 2 and all(isinstance(part, str) for part in pair)):
            raise TypeError(f"pools={{{name!r}: (layout, backend)}} is two names, got {pair!r}")
    default = {name: (REWRITES.get((spec.family, layout), layout), backend) for name, spec in specs.items()}
    return default | dict(chosen)


def _wrapped(device: Mapping[str, DevicePool] | None) -> dict[str, DevicePool]:
    for name, pool in (device or {}).items():
        if not isinstance(pool, DevicePool):
            raise TypeError(f"device={{{name!r}: …}} must be a DevicePool (DevicePool.wrap makes one), got {pool!r}")
    return dict(device or {})


def _platform(pairs: Pairs, wrapped: Mapping[str, DevicePool]) -> str:
    named = [pool.platform for pool in wrapped.values() if platform_of(pool.platform) in ("cuda", "emulated")]
    only_cuda = any("cpu" not in BACKENDS.get(backend, ("cpu",)) for _, backend in pairs.values())
    here = "cuda" if only_cuda and not wrapped and torch.cuda.is_available() else "cpu"
    return next(iter(named), here)


def _require_supported(specs: Specs, pairs: Pairs, platform: str, profile: str) -> None:
    for name, spec in specs.items():
        layout, backend = pairs[name]
        try:
            require(spec, layout, backend, platform_of(platform), profile)
        except UnsupportedPairing as refused:
            alone = f"To change this pool alone: pools={{{name!r}: (layout, backend)}}"
            raise UnsupportedPairing(f"{refused}. {alone}") from refused
        missing = registry.unavailable(backend, platform)
        if missing:
            raise UnsupportedPairing(f"pool {name!r} with layout {layout!r} and backend {backend!r}: {missing}")


# ---- sizes


def _require_numbers(
    device_pages: int | Mapping[str, int] | None, host_ratio: float | None, host_bytes: int | None
) -> None:
    """Of the right kind, before they are counted with."""
    one = () if device_pages is None else (device_pages,)
    pages = device_pages.values() if isinstance(device_pages, Mapping) else one
    if not all(is_int(n) for n in pages):
        raise TypeError(f"device_pages must be a whole number, or one for each pool by name; got {device_pages!r}")
    if host_bytes is not None and type(host_bytes) is not int:
        raise TypeError(f"host_bytes must be a whole number of bytes, got {host_bytes!r}")
    if host_ratio is not None:
        sizing.require_ratio("host_ratio", host_ratio)


def _device_pages(
    specs: Specs, asked: int | Mapping[str, int] | None, wrapped: Mapping[str, DevicePool]
) -> dict[str, int]:
    """Pages of every device pool, as its owner has them."""
    _require_known(specs, wrapped, "device")
    open_ones = [name for name in _owners(specs) if name not in wrapped]
    given = dict.fromkeys(open_ones, asked) if isinstance(asked, int) else dict(asked or {})
    if given.keys() != set(open_ones) or (asked is not None and not open_ones):
        raise ValueError(
            f"device_pages must be one number, or one for each pool that owns indices and is not in `device`: "
            f"{open_ones}; got {asked}"
        )
    for name, pages in given.items():
        if pages < 0:
            raise ValueError(f"pool {name!r}: device_pages must not be negative, got {pages}")
    pages = {name: given[name] if name in given else wrapped[name].num_pages for name in _owners(specs)}
    return {name: pages[_owner(specs, name)] for name in specs}


def _require_fitting(specs: Specs, pages: Mapping[str, int], wrapped: Mapping[str, DevicePool], platform: str) -> None:
    """Of device pools that exist already: the right rows, enough of them, in the right memory."""
    for name, pool in wrapped.items():
        if pool.spec != specs[name]:
            raise ValueError(f"device pool {name!r} stores {pool.spec}, the stack's stores {specs[name]}")
        if name in _owners(specs) and pool.num_pages >= UNLIMITED // pool.spec.page_size:
            raise ValueError(
                f"device pool {name!r} wraps no buffer that its pages could be counted in; leave it out of `device`, "
                f"and give device_pages={{{name!r}: …}}"
            )
        if pool.num_pages < pages[name]:
            raise ValueError(
                f"device pool {name!r} has {pool.num_pages} pages, but {_owner(specs, name)!r}, whose indices it "
                f"shares, has {pages[name]}; give it as many"
            )
        elsewhere = others_of_its_platform(pool.platform, platform)
        if pool.spec.components and (elsewhere or pool.device.type != MEMORY[platform_of(platform)]):
            raise ValueError(
                f"device pool {name!r} lies on {pool.platform}, platform {platform!r} does not reach there"
            )


def _host_pages(specs: Specs, pages: Mapping[str, int], ratio: float | None, nbytes: int | None) -> dict[str, int]:
    """Host pages of every pool. `ValueError` where a device pool with pages would have none on the host."""
    owners = _owners(specs)
    page_bytes = dict.fromkeys(owners, 0)
    for name, spec in specs.items():
        page_bytes[_owner(specs, name)] += spec.page_bytes
    if ratio is not None and nbytes is None:
        asked = f"host_ratio={ratio}"
        found = {o: sizing.pages_for_ratio(specs[o], pages[o] * specs[o].page_size, ratio) for o in owners}
    elif nbytes is not None and ratio is None:
        asked = f"host_bytes={nbytes:,}"
        found = sizing.pages_for_shares({o: pages[o] for o in owners}, page_bytes, nbytes)
    else:
        raise ValueError(f"give host_ratio or host_bytes, one of them; got {ratio} and {nbytes}")
    for owner in owners:
        if pages[owner] and found[owner] < 1:
            raise ValueError(
                f"{asked} leaves pool {owner!r} no page on the host for {pages[owner]} on the device; "
                f"a page, riders included, takes {page_bytes[owner]:,} bytes"
            )
    return {name: found[_owner(specs, name)] for name in specs}


def _require_room(budget: Budget | None, needs: Mapping[str, int], what: str) -> None:
    """All pools at once, so that the first are not built before the last is found not to fit."""
    if budget is None:
        return
    require_budget(budget, what)
    needed = sum(needs.values())
    if needed > budget.available:
        each = ", ".join(f"{name} {nbytes:,}" for name, nbytes in needs.items() if nbytes)
        raise MemoryError(
            f"the stack needs {needed:,} bytes of {what} ({each}), {budget.available:,} of the budget of "
            f"{budget.total:,} are left; build it with fewer pages"
        )


def _require_known(specs: Specs, named: Mapping[str, object], argument: str) -> None:
    unknown = [name for name in named if name not in specs]
    if unknown:
        raise ValueError(f"{argument} names {unknown}, which the stack lacks; it has {list(specs)}")


# ---- the tables

MADE = ["pool", "indices of", "layout", "backend", "backup", "load", "host tensors"]
SIZES = ["pool", "device pages", "host pages", "host bytes", "staging bytes"]


def _halves(buffer: Buffer) -> bool:
    """Whether K and V are two ranges of bytes, one after the other."""
    return len(buffer.components) > 1 and buffer.axes[0] == "component"


def _tensors(pool: HostPool) -> list[str]:
    """Dtype and shape of the tensors of each buffer."""
    found = []
    for buffer in buffers(pool.spec, pool.layout, pool.num_pages):
        times = f"{len(buffer.tensor_layers)} × " if buffer.per_layer else ""
        shape = upstream_shape(buffer, pool.spec.family, pool.layout)
        found.append(f"{times}{str(buffer.dtype).removeprefix('torch.')} {shape}")
    return found


def _table(head: list[str], rows: list[list[str]], justified: Callable[[str, int], str]) -> str:
    """Names to the left, all other columns as `justified` puts them, under their heads."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = []
    for name, *texts in (head, ["-" * width for width in widths], *rows):
        cells = [justified(text, width) for text, width in zip(texts, widths[1:], strict=True)]
        lines.append("  ".join([name.ljust(widths[0]), *cells]).rstrip())
    return "\n".join(lines)
