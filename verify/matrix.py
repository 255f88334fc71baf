"""The matrix: pool × layout × backend × direction, and how one cell of it is proven.

A cell is either refused, as the support table says, before memory is taken; or every byte of its destination is
compared: the rows that were asked for equal the oracle's, everything else, guard bands and gaps included, is still
poison, and the source is unchanged. Bytes are compared, never numbers.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import torch
from covertable import make as covering_array

from refimpl import LAYOUTS, DevicePool, HostPool, PoolSpec, Refusal, oracle, slots_of, support
from refimpl.devices import memory_of, platform_of
from refimpl.host_buffers import HostBuffers
from refimpl.support import BACKENDS
from verify import fill
from verify.fill import Place
from verify.guarded import GuardedDevice, GuardedMemory
from verify.toys import TOYS

# What a cell does. "layers" loads layer by layer, last layer first; "round trip" backs up, wipes, and loads elsewhere.
DIRECTIONS = ("backup", "load", "layers", "round trip")
ENTRY_DIRECTIONS = ("backup entries", "load entries")

STAGING_PAGES = 64

# Axes beyond pool, layout and backend. 63 to 129 pages are the edges of the staging buffer.
AXES: dict[str, tuple[Any, ...]] = {
    "direction": DIRECTIONS + ENTRY_DIRECTIONS,
    "pages": (1, 2, 63, 64, 65, 127, 128, 129),
    "page_size": (1, 16, 64, 256),
    "pattern": ("ascending", "descending", "shuffled", "repeated source"),
    "rows": ("packed", "strided"),
    "start": ("aligned", "shifted"),
    "index_dtype": ("int64", "int32"),
}


@dataclass(frozen=True)
class Cell:
    """One case. `pool` names a toy; the defaults are the geometry of the complete part of the matrix."""

    pool: str
    layout: str
    backend: str
    direction: str
    pages: int = 3
    page_size: int = 4
    pattern: str = "shuffled"
    rows: str = "packed"
    start: str = "aligned"
    index_dtype: str = "int64"
    turn: int | None = None  # round of the fill; None: every round
    platform: str = "cpu"

    @property
    def spec(self) -> PoolSpec:
        return toy(self.pool, self.page_size)

    def __str__(self) -> str:
        kind = f"{self.pool}-{self.layout}-{self.backend}-{self.direction}"
        rest = f"n{self.pages}-p{self.page_size}-{self.pattern}-{self.rows}-{self.start}-{self.index_dtype}"
        turn = "" if self.turn is None else f"-round{self.turn}"
        where = "" if self.platform == "cpu" else f"-{self.platform}"
        return f"{kind}-{rest}{turn}{where}".replace(" ", "_")


class Mismatch(AssertionError):
    """A cell whose bytes are wrong."""


@cache
def toy(pool: str, page_size: int) -> PoolSpec:
    """A toy, made once: the matrix asks for each thousands of times."""
    return TOYS[pool](page_size)


def directions_of(spec: PoolSpec) -> tuple[str, ...]:
    return DIRECTIONS + (ENTRY_DIRECTIONS if spec.entries else ())


def backends(platform: str) -> list[str]:
    return [backend for backend, platforms in BACKENDS.items() if platform in platforms]


def without_a_gpu(backend: str) -> str:
    """The platform on which a backend runs where there is no GPU."""
    return "cpu" if "cpu" in BACKENDS[backend] else "emulated"


def pairs(platform: str) -> Iterator[tuple[str, str, str, str]]:
    """Every pool × layout × backend × direction of a platform, refused ones included."""
    for pool, layout, backend in itertools.product(TOYS, LAYOUTS, backends(platform)):
        for direction in directions_of(toy(pool, 4)):
            yield pool, layout, backend, direction


def refusal(pool: str, layout: str, backend: str, direction: str, platform: str) -> Refusal | None:
    """The table's refusal of a pair, or None."""
    way = "backup" if direction.startswith("backup") else "load"
    answer = support(toy(pool, 4), layout, backend, way, platform)
    return answer if isinstance(answer, Refusal) else None


def complete(platform: str) -> list[Cell]:
    """Every allowed pair once, on the default geometry."""
    cells = [Cell(*pair, platform=platform) for pair in pairs(platform) if refusal(*pair, platform) is None]
    return [replace(cell, page_size=cell.spec.page_size) for cell in cells]  # state pools have their own


def refused(platform: str) -> list[tuple[str, str, str, str, str]]:
    """Every pair that is refused there, with the platform."""
    return [(*pair, platform) for pair in pairs(platform) if refusal(*pair, platform) is not None]


@cache
def covered(platform: str, strength: int = 3) -> list[Cell]:
    """For every layout and backend all combinations of `strength` other axes; pools and rounds take turns."""
    allowed: dict[tuple[str, str, str], list[str]] = {}  # layout, backend, direction -> pools
    for pool, layout, backend, direction in pairs(platform):
        if refusal(pool, layout, backend, direction, platform) is None and toy(pool, 4).components:
            allowed.setdefault((layout, backend, direction), []).append(pool)
    rows: list[dict[str, Any]] = [
        dict(row) for row in covering_array({axis: list(values) for axis, values in AXES.items()}, strength=strength)
    ]
    for row in rows:
        if (row["direction"], row["pattern"]) == ("round trip", "repeated source"):
            row["pattern"] = "shuffled"  # a page that was saved twice has no one way back
    cells: list[Cell] = []
    for at, (layout, backend) in enumerate(itertools.product(LAYOUTS, backends(platform))):
        for i, row in enumerate(rows, start=at):
            pools = allowed.get((layout, backend, row["direction"]), [])
            able = [pool for pool in pools if toy(pool, row["page_size"]).page_size == row["page_size"]]
            if able:
                cell = Cell(able[i % len(able)], layout, backend, platform=platform, **row)
                cells.append(replace(cell, turn=i % fill.rounds(cell.spec)))
    return list(dict.fromkeys(cells))


def run(cell: Cell, spec: PoolSpec | None = None) -> None:
    """Prove one cell. Raises `Mismatch` naming the first wrong word."""
    spec = spec or cell.spec
    for turn in range(fill.rounds(spec)) if cell.turn is None else (cell.turn,):
        Trial(cell, spec, turn).run()


class Trial:
    """Two host pools and two device pools: one pair for the backend, one for the oracle."""

    def __init__(self, cell: Cell, spec: PoolSpec, turn: int) -> None:
        self.cell, self.spec, self.turn = cell, spec, turn
        widest = max((c.dtype.itemsize for c in spec.components), default=1)
        shift = widest if cell.start == "shifted" else 0
        gap = 3 * widest if cell.rows == "strided" else 0
        pinned = platform_of(cell.platform) == "cuda" and cell.backend != "torch"
        self.host_memory, self.expected_memory = GuardedMemory(shift, pinned), GuardedMemory(shift)
        self.host = HostPool(
            spec,
            cell.layout,
            cell.pages + 2,
            cell.backend,
            memory=self.host_memory,
            platform=cell.platform,
            staging_pages=STAGING_PAGES,
        )
        self.expected_host = HostPool(spec, cell.layout, cell.pages + 2, memory=self.expected_memory)
        self.device = GuardedDevice(spec, cell.pages + 3, gap, shift, memory_of(cell.platform))
        self.expected_device = GuardedDevice(spec, cell.pages + 3, gap, shift)

    def run(self) -> None:
        name = self.cell.direction.replace(" ", "_")
        getattr(self, f"_{name}")()

    def _backup(self) -> None:
        self._fill_device()
        host, device = self._indices("backup")
        self.host.backup(self.device.pool, host, device).wait()
        oracle.backup(self.expected_host, self.expected_device.pool, host, device)
        self._compare()

    def _load(self) -> None:
        self._fill_host()
        host, device = self._indices("load")
        self.host.load_all(self.device.pool, host, device).wait()
        oracle.load(self.expected_host, self.expected_device.pool, host, device)
        self._compare()

    def _layers(self) -> None:
        """Layer by layer, in an order nobody expects; after each layer exactly that layer has arrived."""
        self._fill_host()
        host, device = self._indices("load")
        transfer = self.host.prepare(self.device.pool, host, device, "load")
        oracle.load(self.expected_host, self.expected_device.pool, host, device, (None,))
        for layer in reversed(range(self.spec.layers)):
            if layer in self.spec.owned_layers:
                oracle.load(self.expected_host, self.expected_device.pool, host, device, (layer,))
                transfer.run((layer,)).wait()
                self._compare()
        transfer.run(()).wait()
        if not self.spec.owned_layers:
            transfer.run().wait()
        self._compare()

    def _round_trip(self) -> None:
        """What comes back is what the fill says of the pages that were saved: no oracle involved."""
        self._fill_device()
        host, device = self._indices("backup")
        self.host.backup(self.device.pool, host, device).wait()
        self.device.poison()
        self.expected_device.poison()
        page_size, pages = self.spec.page_size, self.device.pool.num_pages
        elsewhere = (device + page_size) % (pages * page_size)
        self.host.load_all(self.device.pool, host, elsewhere).wait()
        saved, restored = (t.cpu().numpy()[::page_size] // page_size for t in (device, elsewhere))
        for c in self.spec.components:
            for layer in self.spec.layers_of(c):
                rows = torch.from_numpy(fill.layer_bytes(self.spec, pages, c.name, layer, self.turn)[saved])
                view = self.expected_device.pool.view(c.name, layer)
                view[restored] = rows.contiguous().view(c.dtype).unflatten(2, view.shape[2:4])
        self._compare(sides=("device",))

    def _backup_entries(self) -> None:
        self._fill_device()
        host, device = self._entries("backup")
        self.host.backup_entries(self.device.pool, host, device).wait()
        oracle.backup_entries(self.expected_host, self.expected_device.pool, host.tolist(), device.tolist())
        self._compare()

    def _load_entries(self) -> None:
        self._fill_host()
        host, device = self._entries("load")
        self.host.load_entries(self.device.pool, host, device).wait()
        oracle.load_entries(self.expected_host, self.expected_device.pool, host.tolist(), device.tolist())
        self._compare()

    def _fill_device(self) -> None:
        fill.fill_device(self.device.pool, self.turn)
        fill.fill_device(self.expected_device.pool, self.turn)

    def _fill_host(self) -> None:
        fill.fill_host(self.host, self.turn)
        fill.fill_host(self.expected_host, self.turn)

    def _indices(self, direction: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Token slots of the pages to move: destination pages distinct, by the cell's pattern on both sides."""
        host, device = self._numbers(direction, self.cell.pages, self.host.num_pages, self.device.pool.num_pages)
        slots = [slots_of(pages, self.spec.page_size).to(self._index_dtype) for pages in (host, device)]
        return slots[0], slots[1].to(memory_of(self.cell.platform))

    def _entries(self, direction: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Entries to move: about half of those of the cell's pages."""
        per_page = self.spec.entries
        wanted = max(self.cell.pages * per_page // 2, 1)
        limits = self.host.num_pages * per_page, self.device.pool.num_pages * per_page
        host, device = self._numbers(direction, min(wanted, 300), *limits)
        return tuple(torch.from_numpy(n).to(self._index_dtype) for n in (host, device))  # pyright: ignore[reportReturnType]

    def _numbers(self, direction: str, count: int, host_limit: int, device_limit: int) -> tuple[np.ndarray, np.ndarray]:
        seed = np.random.default_rng(count)
        host, device = seed.permutation(host_limit)[:count], seed.permutation(device_limit)[:count]
        if self.cell.pattern == "ascending":
            host, device = np.sort(host), np.sort(device)
        elif self.cell.pattern == "descending":
            host, device = np.sort(host)[::-1].copy(), np.sort(device)
        elif self.cell.pattern == "repeated source":
            source = device if direction == "backup" else host
            source[count // 2 :] = source[0]
        return host, device

    @property
    def _index_dtype(self) -> torch.dtype:
        return torch.int32 if self.cell.index_dtype == "int32" else torch.int64

    def _compare(self, sides: tuple[str, ...] = ("host", "device")) -> None:
        """Both pools against their twins, every byte of memory."""
        if "host" in sides and not _equal(self.host_memory.whole, self.expected_memory.whole):
            raise Mismatch(self._explain("host", self.host, self.expected_host))
        if "device" in sides and not _equal(self.device.whole, self.expected_device.whole):
            raise Mismatch(self._explain("device", self.device.pool, self.expected_device.pool))

    def _explain(self, side: str, got: HostBuffers | DevicePool, expected: HostBuffers | DevicePool) -> str:
        named = self.host if self.cell.direction.startswith(("load", "layers")) else self.device.pool
        wrong = first_wrong_word(got, expected, named)
        return f"{self.cell} (round {self.turn}), {side}: {wrong or 'bytes outside every row were written'}"


def first_wrong_word(
    got: HostBuffers | DevicePool, expected: HostBuffers | DevicePool, source: HostBuffers | DevicePool
) -> str | None:
    """The first word in which two pools differ, decoded: where it lies, what it should name, what it names."""
    spec = expected.spec
    for c in spec.components:
        for layer in spec.layers_of(c):
            right, wrong = _image(expected, c.name, layer), _image(got, c.name, layer)
            if not np.array_equal(right, wrong):
                page, token, head, byte = (int(i) for i in np.argwhere(right != wrong)[0])
                word = slice(byte // fill.WORD * fill.WORD, byte // fill.WORD * fill.WORD + fill.WORD)
                where = Place(c.name, layer, page, token, head, byte // fill.WORD)
                should, does = right[page, token, head, word], wrong[page, token, head, word]
                return (
                    f"{where}: expected {_named(should, spec, source.num_pages)}, "
                    f"found {_named(does, spec, source.num_pages)}"
                )
    return None


def _named(word: np.ndarray, spec: PoolSpec, num_pages: int) -> str:
    if (word == fill.POISON).all():
        return "poison (never written)"
    number = fill.number(word)
    named = None if number is None else fill.place(spec, num_pages, number)
    return f"[{named}]" if named else f"bytes {word.tolist()}"


def _image(pool: HostBuffers | DevicePool, component: str, layer: int | None) -> np.ndarray:
    image = fill.host_image if isinstance(pool, HostBuffers) else fill.device_image
    return image(pool, component, layer)  # pyright: ignore[reportArgumentType]


def _equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x.cpu(), y.cpu()) for x, y in zip(a, b, strict=True))
