"""The host side of a pool: buffers in some layout, slots, and transfers to and from a device pool."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from functools import partial

import torch

from refimpl.allocator import Booking, Budget, PageAllocator, require_budget
from refimpl.backends import registry
from refimpl.backends.protocol import Setup
from refimpl.device_pool import DevicePool, byte_range
from refimpl.devices import others_of_its_platform, platform_of, settled
from refimpl.geometry import PoolSpec, is_int, require_spec
from refimpl.host_buffers import HostBuffers
from refimpl.indices import Indices, check_pair
from refimpl.pinned import CudaRegistrar, HostMemory
from refimpl.plan import Plan
from refimpl.plan import plan as make_plan
from refimpl.receipt import Receipt
from refimpl.support import BACKENDS, MEMORY, UnsupportedPairing, capabilities, require
from refimpl.teardown import call_all
from refimpl.transfer import Transfer

LOOKS_AGAIN_S = 0.001  # whoever closes a pool, for others that submit something: interrupts keep them from telling

ENDLESS = 1 << 100  # bytes, for who has no budget

# Of options that are numbers: the least and the most.
BOUNDS = {"staging_pages": (2, 1 << 32), "blocks": (1, 1024), "registration_limit": (1, 1 << 62)}


class HostPool(HostBuffers):
    """A pool in host memory.

    num_pages           every page, page 0 included (an ordinary page here)
    backend             what moves the bytes; the pair is refused with `UnsupportedPairing` before memory is taken
    profile             whose rules decide that: "reference", or an engine's
    memory              where memory comes from; None: of exact size, pinned for a backend that copies on a GPU
    registration_limit  the most bytes of one registration, for pinned memory
    budget              booked before memory is taken; `MemoryError` if it does not suffice
    platform            where device pools lie: "cpu", or "cuda" or "emulated", with a number where there are several
                        ("cuda:1"; without one: the GPU that is current now); None: wherever the backend can reach here
    staging_pages       pages of device memory that a backend which stages takes (None: some 128 MiB, or two pages);
                        `device_budget` books them
    blocks              blocks of a copy kernel; None: what was measured to be best
    """

    def __init__(
        self,
        spec: PoolSpec,
        layout: str,
        num_pages: int,
        backend: str = "torch",
        profile: str = "reference",
        memory: HostMemory | None = None,
        registration_limit: int | None = None,
        budget: Budget | None = None,
        platform: str | None = None,
        staging_pages: int | None = None,
        device_budget: Budget | None = None,
        blocks: int | None = None,
    ) -> None:
        require_spec(spec)
        if not isinstance(memory, HostMemory | None):
            raise TypeError(f"pool {spec.name!r}: memory must be a HostMemory, or None; got {memory!r:.80}")
        only_cuda = "cpu" not in BACKENDS.get(backend, ("cpu",))
        platform = platform or ("cuda" if only_cuda and torch.cuda.is_available() else "cpu")
        self.paths = require(spec, layout, backend, platform_of(platform), profile)
        spec.require_pages(num_pages)
        asked = {"staging_pages": staging_pages, "blocks": blocks, "registration_limit": registration_limit}
        for option, value in asked.items():
            least, most = BOUNDS[option]
            if value is not None and not (is_int(value) and least <= value <= most):
                raise ValueError(
                    f"pool {spec.name!r}: {option} must be from {least} to {most:,}, or None; got {value!r}"
                )
        platform = settled(platform)
        self.backend, self.profile, self.platform = backend, profile, platform
        # Who submits something now, once for each time: threads, with the pool (this one, or a rank of it).
        self.users: list[tuple[int, HostPool, object]] = []
        self._closing, self._closes, self._one_closes = False, False, threading.RLock()
        # For each device pool, plans by kind of item and the addresses that they were made for.
        self._plans: weakref.WeakKeyDictionary[DevicePool, dict[bool, tuple[tuple[int, ...], Plan]]]
        self._plans = weakref.WeakKeyDictionary()
        budget, device_budget = (Budget(ENDLESS) if b is None else b for b in (budget, device_budget))
        for given in (budget, device_budget):
            require_budget(given, f"pool {spec.name!r}")
        self._staging: list[Booking] = []
        self._bookings = [budget.book(spec.name, num_pages * spec.page_bytes)]
        forgotten = weakref.finalize(self, _give_back, self._bookings, self._staging)
        try:
            book_staging = partial(_booked, self._staging, device_budget, spec.name)
            setup = Setup(spec, layout, num_pages, platform, staging_pages, blocks, book_staging)
            self._acquire(setup, memory, registration_limit)
        except BaseException:
            forgotten()
            raise
        self.can_use_jit, self.can_use_write_back_jit = capabilities(spec, layout, platform, profile).values()
        self._slots = PageAllocator(num_pages, spec.page_size)

    def _acquire(self, setup: Setup, memory: HostMemory | None, registration_limit: int | None) -> None:
        """The backend, with what it needs on a device, and then the host's memory."""
        spec, layout = setup.spec, setup.layout
        try:
            self._mover = registry.make(self.backend, setup)
        except ImportError as missing:
            raise UnsupportedPairing(
                f"pool {spec.name!r} with layout {layout!r} and backend {self.backend!r}: {missing}"
            ) from missing
        weakref.finalize(self, self._mover.close)
        pinned = platform_of(self.platform) == "cuda" and "cpu" not in BACKENDS[self.backend]
        if memory is None:
            memory = HostMemory(CudaRegistrar(self.platform) if pinned else None)
        super().__init__(spec, layout, setup.num_pages, memory, registration_limit)
        for block in self._blocks:
            block.close_after(self._mover.close)
        if pinned:
            self._require_pinned()

    @property
    def staging_bytes(self) -> int:
        """Bytes of device memory that the backend holds for staging."""
        return sum(booking.nbytes for booking in self._staging if not booking.given_back)

    # ---- slots

    @property
    def allocator(self) -> PageAllocator:
        """Who has which of its slots. Of a sidecar it says nothing: look at the pool that it rides on."""
        return self._slots

    @property
    def size(self) -> int:
        """Index units in the pool (token slots, or state slots)."""
        return self._slots.size

    def available_size(self) -> int:
        return self._slots.available_size()

    def alloc(self, need: int) -> torch.Tensor | None:
        """`need` slots (whole pages) as an int64 CPU tensor, or None when the pool is too full."""
        self.require_open()
        if self.spec.indices_from:
            raise ValueError(f"pool {self.spec.name!r} owns no indices, allocate them in {self.spec.indices_from!r}")
        return self._slots.alloc(need)

    def free(self, indices: torch.Tensor) -> int:
        """Take slots back; returns how many. A sidecar owns none and frees none."""
        return 0 if self.spec.indices_from else self._slots.free(indices)

    def free_rest(self, indices: torch.Tensor) -> int:
        """Take back those slots of a list that are still allocated."""
        return 0 if self.spec.indices_from else self._slots.free_rest(indices)

    def clear(self) -> None:
        """Take every slot back; the bytes stay."""
        self._slots.clear()

    def lock(self, indices: torch.Tensor) -> None:
        """Slots that a transfer reads or writes: whoever frees them, nobody gets them before `unlock`."""
        self._slots.lock(indices)

    def unlock(self, indices: torch.Tensor) -> None:
        self._slots.unlock(indices)

    # ---- transfers

    def backup(self, device: DevicePool, host_indices: Indices, device_indices: Indices) -> Receipt:
        """Device to host, all layers and side states."""
        return self.prepare(device, host_indices, device_indices, "backup").run()

    def load(self, device: DevicePool, host_indices: Indices, device_indices: Indices, layer: int) -> Receipt:
        """Host to device, one model layer; nothing if the pool does not own it.

        Side states come with the first layer that the pool owns, ahead of it (with layer 0 if it owns none).
        """
        first = layer == min(self.spec.owned_layers, default=0)
        return self.prepare(device, host_indices, device_indices, "load").run((layer,), side_states=first)

    def load_all(self, device: DevicePool, host_indices: Indices, device_indices: Indices) -> Receipt:
        """Host to device, side states and all layers."""
        return self.prepare(device, host_indices, device_indices, "load").run()

    def backup_entries(self, device: DevicePool, host_entries: Indices, device_entries: Indices) -> Receipt:
        """Single entries of page rows, device to host. Indices count entries: entry i lies in page i // entries."""
        return self.prepare(device, host_entries, device_entries, "backup", single_entries=True).run()

    def load_entries(self, device: DevicePool, host_entries: Indices, device_entries: Indices) -> Receipt:
        """Single entries of page rows, host to device, all layers."""
        return self.prepare(device, host_entries, device_entries, "load", single_entries=True).run()

    def prepare(
        self,
        device: DevicePool,
        host_indices: Indices,
        device_indices: Indices,
        direction: str,
        single_entries: bool = False,
    ) -> Transfer:
        """Check everything about a transfer now; `run` then moves bytes, layer by layer if need be.

        Index lists on the device are read in order of the stream that is current now, and once more for every other
        stream on which it is run, with the first layers that move there: let them be until then.

        direction       "backup" or "load"
        single_entries  indices count the entries inside page rows, not tokens
        """
        self.require_open()
        try:
            spec, where = device.spec, device.device.type
        except AttributeError:
            told = f"pool {self.spec.name!r}: a device pool must be a DevicePool (DevicePool.wrap makes one)"
            raise TypeError(f"{told}, got {device!r:.80}") from None
        if spec != self.spec:
            raise ValueError(f"host pool {self.spec} and device pool {device.spec} are not of one spec")
        if direction not in self.paths:
            raise ValueError(f"direction must be one of {tuple(self.paths)}, got {direction!r}")
        if where != MEMORY[platform_of(self.platform)]:
            require(self.spec, self.layout, self.backend, where, self.profile)
        if others_of_its_platform(device.platform, self.platform):
            raise ValueError(
                f"pool {self.spec.name!r}: the device pool lies on {device.platform}, the host pool was made for "
                f"{self.platform}; make one for it with platform={device.platform!r}"
            )
        unit = self.page_size
        host_items, device_items = self.num_pages, device.num_pages
        if single_entries:
            entries = self.spec.entries
            if not entries:
                raise ValueError(f"rows of pool {self.spec.name!r} are not made of entries, only whole pages move")
            unit, host_items, device_items = 1, host_items * entries, device_items * entries
        items = check_pair(
            host_indices,
            device_indices,
            unit,
            host_items,
            device_items,
            direction,
            self._mover.stays,
            self._mover.read,
        )
        path, owned = self.paths[direction].name, self.spec.owned_layers
        plan = partial(self._plan, device, single_entries)
        transfer = Transfer(self, self._mover, path, plan, items, direction, owned)
        if len(items) and self.spec.components:
            transfer.place()
        return transfer

    def backup_from_device_all_layer(
        self, device_pool: DevicePool, host_indices: Indices, device_indices: Indices, io_backend: str
    ) -> Receipt:
        """Upstream's name for `backup`; `io_backend` must be the pool's."""
        self._require_backend(io_backend)
        return self.backup(device_pool, host_indices, device_indices)

    def load_to_device_per_layer(
        self, device_pool: DevicePool, host_indices: Indices, device_indices: Indices, layer_id: int, io_backend: str
    ) -> Receipt:
        """Upstream's name for `load`; `io_backend` must be the pool's."""
        self._require_backend(io_backend)
        return self.load(device_pool, host_indices, device_indices, layer_id)

    def _plan(self, device: DevicePool, single_entries: bool) -> Plan:
        """Made anew when the device's buffers do not lie where they lay: an engine may move them between transfers.

        Not while one is under way: what it reads or writes would be somebody else's memory by then.
        """
        self.require_open()
        plans, addresses = self._plans.setdefault(device, {}), device.addresses()
        if single_entries not in plans or plans[single_entries][0] != addresses:
            self._require_apart(device)
            plans[single_entries] = addresses, make_plan(self, device, single_entries)
        return plans[single_entries][1]

    def _require_apart(self, device: DevicePool) -> None:
        """A transfer within the same bytes would read what it has just written."""
        host = [byte_range(block.tensor) for block in self._memory()]
        for buffer in device.buffers():
            begin, end = byte_range(buffer)
            if any(low < end and begin < high for low, high in host):
                raise ValueError(
                    f"pool {self.spec.name!r}: the device pool lies in memory of this host pool: copy to another one"
                )

    # ---- life

    def close(self) -> None:
        """Wait for copies under way, undo registrations, let go of the memory, give the budget back. Idempotent.

        Whoever closes it returns when it is closed; but within a closing of the same thread (in a signal handler, say)
        at once, and that one goes on. An interrupt leaves it closed to transfers: close it again.

        `RuntimeError` inside a transfer of this thread (in a signal handler, say), which it would wait for.
        """
        me = threading.get_ident()
        if any(thread == me for thread, _, _ in self._uses()):
            raise RuntimeError(
                f"pool {self.spec.name!r} is closed inside a transfer that this thread submits, and would wait for "
                "itself: close it afterwards (a signal handler sets a flag), or in another thread"
            )
        self._closing = True
        while self._uses():
            time.sleep(LOOKS_AGAIN_S)
        with self._one_closes:
            if self._closes:
                return
            self._closes = True
            try:
                call_all(self._ends())
            finally:
                self._closes = False

    def require_open(self) -> None:
        """`ValueError` if it was closed, or somebody is about to."""
        if self._closing:
            raise ValueError(f"pool {self.spec.name!r} is closed")

    def _uses(self) -> list[tuple[int, HostPool, object]]:
        """Transfers that are being submitted."""
        return list(self.users)

    def _ends(self) -> tuple[Callable[[], object], ...]:
        """What closing is, in order. Each part can be called again, for an interrupt ends a closing anywhere."""
        return self._mover.close, super().close, self._plans.clear, partial(_give_back, self._bookings, self._staging)

    destroy = close

    def __enter__(self) -> HostPool:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _require_pinned(self) -> None:
        """Of memory that somebody else supplied: a kernel would fault on it, a copy would wait for the host."""
        pageable = [t for _, tensors in self.storage for t in tensors if t.numel() and not t.is_pinned()]
        if pageable:
            self.close()
            raise ValueError(f"pool {self.spec.name!r}: backend {self.backend!r} needs pinned memory on a GPU")

    def _require_backend(self, io_backend: str) -> None:
        if io_backend != self.backend:
            raise ValueError(f"pool {self.spec.name!r} was built for backend {self.backend!r}, got {io_backend!r}")


def _booked(bookings: list[Booking], budget: Budget, owner: str, nbytes: int) -> Callable[[], None]:
    """Book bytes, one booking more; returns what gives them back."""
    bookings.append(budget.book(owner, nbytes))
    return bookings[-1].give_back


def _give_back(*bookings: list[Booking]) -> None:
    call_all(booking.give_back for some in bookings for booking in some)
