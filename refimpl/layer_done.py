"""Which layers of a load have arrived: events that the model's stream waits for, layer by layer.

The producer (a load) takes the next of a few sets of events and records one after each layer. The consumer (a forward
pass) says which load it depends on, and waits for a layer just before it reads it. Semantics of upstream's
`LayerDoneCounter` (`srt/managers/cache_controller.py`), but for what it leaves to luck: a layer whose event has not
been recorded, and a load that is known to have failed, raise instead of letting the consumer pass. What goes wrong on
the device is known when the load is acknowledged, not before.
"""

from __future__ import annotations

from refimpl.geometry import is_int
from refimpl.runtime import Event, Runtime, Stream

SETS = 3


class LayerDone:
    """
    layers  model layers of all pools, holes included
    """

    def __init__(self, runtime: Runtime, layers: int) -> None:
        self._runtime, self.layers = runtime, layers
        self._sets: list[list[Event]] = [[] for _ in range(SETS)]
        self._failed: dict[int, str] = {}  # for good, since nobody says who is still to wait: a line for each failure
        self._produced = 0
        self._consumer: int | None = None

    def produce(self) -> int:
        """The number of a new load, which takes over the events of the one `SETS` loads ago: that must have arrived."""
        producer = self._produced
        events = self._sets[producer % SETS]
        if events and not events[-1].query():
            raise RuntimeError(f"{SETS} loads are under way: wait until the oldest has arrived (acknowledge)")
        self._sets[producer % SETS] = []
        self._produced += 1
        return producer

    def record(self, producer: int, stream: Stream) -> None:
        """The next layer has arrived where the stream has come to."""
        self._sets[producer % SETS].append(self._runtime.record(stream))

    def fail(self, producer: int, error: BaseException) -> None:
        """Only its text is kept: an exception keeps whatever was at work when it was raised."""
        self._failed[producer] = str(error) or type(error).__name__

    def set_consumer(self, producer: int | None) -> None:
        """The load that the next forward pass depends on; None: it reads nothing that is being loaded."""
        if producer is not None and not (is_int(producer) and 0 <= producer < self._produced):
            raise ValueError(f"there is no load {producer!r}: {self._produced} have begun")
        self._consumer = producer

    def wait_until(self, layer: int) -> None:
        """What is submitted to the current stream from now on runs after `layer` has arrived. The host goes on.

        Raises `ValueError` for a layer that there is not, `RuntimeError` for a load that has failed.
        """
        self.require(layer)
        if self._consumer is None:
            return
        if failure := self._failed.get(self._consumer):
            raise RuntimeError(f"layer {layer} will not arrive, its load has failed: {failure}")
        if self._over(self._consumer):
            return
        events = self._sets[self._consumer % SETS]
        if layer >= len(events):
            raise RuntimeError(f"layer {layer} is not on its way: its load has not been submitted")
        self._runtime.wait(self._runtime.current(), events[layer])

    def require(self, layer: int) -> None:
        """`ValueError` for a layer that there is not."""
        if not is_int(layer) or not 0 <= layer < self.layers:
            raise ValueError(f"there is no layer {layer!r}: the stack has layers 0..{self.layers - 1}")

    def _over(self, producer: int) -> bool:
        """Whether a load has arrived so long ago that its events are another's."""
        return producer < self._produced - SETS
