"""Which layers of a load have arrived: events that the model's stream waits for, layer by layer.

The producer (a load) takes the next of a few sets of events and records one after each layer. The consumer (a forward
pass) says which load it depends on, and waits for a layer just before it reads it. Semantics of upstream's
`LayerDoneCounter` (`srt/managers/cache_controller.py`), but for what it leaves to luck: a layer whose event has not
been recorded, and a load that has failed, raise instead of letting the consumer pass.
"""

from __future__ import annotations

from refimpl.runtime import Event, Runtime, Stream

SETS = 3


class LayerDone:
    """
    layers  model layers of all pools, holes included
    """

    def __init__(self, runtime: Runtime, layers: int) -> None:
        self._runtime, self.layers = runtime, layers
        self._sets: list[list[Event]] = [[] for _ in range(SETS)]
        self._failed: list[BaseException | None] = [None] * SETS
        self._next = 0
        self._consumer: int | None = None

    def produce(self) -> int:
        """A new set of events; the load of `SETS` loads ago must have arrived."""
        producer = self._next
        events = self._sets[producer]
        if events and not events[-1].query():
            raise RuntimeError(f"{SETS} loads are under way: acknowledge the oldest before another one begins")
        self._sets[producer], self._failed[producer] = [], None
        self._next = (producer + 1) % SETS
        return producer

    def record(self, producer: int, stream: Stream) -> None:
        """The next layer has arrived where the stream has come to."""
        self._sets[producer].append(self._runtime.record(stream))

    def fail(self, producer: int, error: BaseException) -> None:
        self._failed[producer] = error

    def set_consumer(self, producer: int | None) -> None:
        """The load that the next forward pass depends on; None: it reads nothing that is being loaded."""
        self._consumer = producer

    def wait_until(self, layer: int) -> None:
        """What is submitted to the current stream from now on runs after `layer` has arrived. The host goes on.

        Raises `ValueError` for a layer that there is not, `RuntimeError` for a load that has failed.
        """
        if not 0 <= layer < self.layers:
            raise ValueError(f"there is no layer {layer}: the stack has layers 0..{self.layers - 1}")
        if self._consumer is None:
            return
        if failure := self._failed[self._consumer]:
            raise RuntimeError(f"layer {layer} will not arrive, its load has failed: {failure}") from failure
        events = self._sets[self._consumer]
        if layer >= len(events):
            raise RuntimeError(f"layer {layer} is not on its way: its load has not been submitted")
        self._runtime.wait(self._runtime.current(), events[layer])
