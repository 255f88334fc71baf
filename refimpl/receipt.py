"""What a transfer did, for tests to assert on and for users to read."""

from __future__ import annotations

from dataclasses import dataclass

from refimpl.runtime import Event


@dataclass(frozen=True)
class Receipt:
    """The record of one run of a transfer.

    path           the way that most bytes took: as `support` promised it, and which one where there are several
    bytes          payload, counted once
    descriptors    runs handed to the mover (copies, loop iterations)
    kernels        launches on a GPU
    index_uploads  index tensors sent to a GPU
    host_syncs     times the host waited for a GPU
    event          passes when the bytes are visible; None: they were when the call returned
    """

    path: str
    bytes: int = 0
    descriptors: int = 0
    kernels: int = 0
    index_uploads: int = 0
    host_syncs: int = 0
    event: Event | None = None

    def wait(self) -> None:
        """Block until the bytes are visible. Raises what went wrong on the device after the call had returned."""
        if self.event:
            self.event.synchronize()

    def __add__(self, other: Receipt) -> Receipt:
        return Receipt(
            other.path if other.bytes > self.bytes else self.path,
            self.bytes + other.bytes,
            self.descriptors + other.descriptors,
            self.kernels + other.kernels,
            self.index_uploads + other.index_uploads,
            self.host_syncs + other.host_syncs,
            other.event or self.event,
        )
