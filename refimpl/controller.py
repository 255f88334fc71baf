"""Backups and loads of a stack: queued, merged, put in order with the model's work and each other, acknowledged.

A backup begins after what the caller's stream was given so far, after the write fence (the stream of a forward pass
that may still write the rows) and after loads that touch the same slots; a load likewise. What was submitted to
read the slots of a transfer under way fails with it. One stream carries all backups, one all loads. Loads are submitted
layer by layer over all pools, and `wait_until` lets the model's stream wait for one layer. States that a model
overwrites in place have a stream of their own, since the caller's goes on only when they were read. How operations are
queued, and what is locked meanwhile, is in `queueing.py`.

On a CPU the work is queued too, and runs when somebody waits for it: `acknowledge(wait=True)`. What a caller computes
there is in no queue, so where his stream would wait (`wait_until`; states that he overwrites), he does.

Several controllers may share a stack. Each puts its own operations in order, no others: slots that are under way in one
are for another when the first has acknowledged them. An interrupt leaves every operation queued, under way or told; but
slots that a call was about to return may be lost with it.

Steps and rules of upstream's `srt/managers/cache_controller.py` and `srt/mem_cache/l2_transfer.py`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch

from refimpl.hooks import Hooks
from refimpl.host_pool import HostPool
from refimpl.layer_done import LayerDone
from refimpl.operations import Ack, Batch, Dropped, Operation, count, opposite, overlap
from refimpl.pool_group import PoolTransfer
from refimpl.queueing import Queues, Stack
from refimpl.runtime import Event, Runtime, Stream, Stuck
from refimpl.support import BACKENDS, DIRECTIONS
from refimpl.teardown import call_all
from refimpl.transfer import Transfer
from refimpl.windows import Window, require_rows


class Controller(Queues):
    """
    hooks        steps to hold, delay or let fail
    write_fence  the stream of forward passes that may still write what is backed up, where it is not the caller's
    load_fence   the stream of forward passes that may still use device slots that are loaded into, likewise

    For one thread at a time: engines call it from their scheduler.
    """

    def __init__(
        self,
        stack: Stack,
        hooks: Hooks | None = None,
        write_fence: Stream | None = None,
        load_fence: Stream | None = None,
        runtime: Runtime | None = None,
    ) -> None:
        super().__init__(stack, hooks, runtime)
        self.layers = LayerDone(self.runtime, max(stack.num_layers, 1))  # side states come with the first, if need be
        self.fences = {"backup": write_fence, "load": load_fence}
        self._streams = {name: self.runtime.stream() for name in (*DIRECTIONS, "states")}
        self._in_flight: dict[str, deque[Batch]] = {direction: deque() for direction in DIRECTIONS}
        self._dropped: list[Batch] = []
        self._told: list[Ack] = []  # by the next acknowledgement

    # ---- submitting

    def start_writing(self) -> int:
        """Submit the backups that are queued. Returns in how many batches.

        A backup of device slots for which a load is queued that must come first stays in the queue.
        """
        with self._submitting("backup") as batches:
            states, others = list[tuple[Batch, str]](), list[tuple[Batch, str]]()
            for batch in batches:
                for name in batch.names():
                    (states if self._in_place(batch, name) else others).append((batch, name))
            for move in states:
                self._move(*move)
            copied = self.runtime.record(self._streams["states"]) if states else None
            try:
                if copied:  # slots of a window are looked up once for all pools of a batch
                    self.runtime.wait(self._streams["backup"], copied)
                for move in others:
                    self._move(*move)
            finally:
                if copied:
                    self._protect(copied)
        return len(batches)

    def start_loading(self) -> int | None:
        """Submit the loads that are queued, once for each step of the model. Returns the producer to wait for.

        Backups that a load must come after are submitted first. None if nothing is queued, or a hook holds it.
        `RuntimeError`, and nothing is submitted, while there are as many loads under way as sets of events
        (`layer_done.SETS`).
        """
        waits = self._ready("load") < len(self._queued["load"])
        if not self._queued["load"] or self.hooks.held("load submit") or (waits and self.hooks.held("backup submit")):
            return None
        producer = self.layers.produce()
        while self._ready("load") < len(self._queued["load"]):
            with self._submitting("load", producer) as batches:
                for batch in batches:
                    for name in batch.names():
                        self._move(batch, name)
            self.start_writing()
        with self._submitting("load", producer) as batches:
            for layer in range(self.layers.layers):
                self._load_layer(batches, layer, producer)
        return producer

    def _load_layer(self, batches: Sequence[Batch], layer: int, producer: int) -> None:
        """One layer of every pool, and the event of its arrival."""
        stream = self._streams["load"]
        try:
            self.hooks.reached(f"load layer {layer}", self.runtime, stream)
        except Exception as failure:
            for batch in batches:
                batch.error = batch.error or failure
        for batch in batches:
            for name in batch.names():
                by_layer = loads_by_layer(self.host.pools[name])
                if layer == 0 or by_layer:
                    self._move(batch, name, (layer,) if by_layer else None)
        self.layers.record(producer, stream)

    @contextmanager
    def _submitting(self, direction: str, producer: int | None = None) -> Iterator[list[Batch]]:
        """From now on they are under way, whatever happens, and at the end there is an event to wait for.

        Interrupts come where something is called or repeated; they find every operation in the queue or under way.
        """
        batches = self._batches(direction)
        for batch in batches:
            batch.producer = producer
        count = sum(len(batch.operations) for batch in batches)
        queued, flights = self._queued[direction], self._in_flight[direction]
        try:
            flights += batches
            del queued[:count]  # nothing is called between these two
            for batch in batches:
                batch.attempt(partial(self._begin, batch))
            yield batches
        finally:
            for batch in batches:
                batch.attempt(partial(self._end, batch), even_so=True)
                if batch.error and producer is not None:
                    self.layers.fail(producer, batch.error)

    def _begin(self, batch: Batch) -> None:
        """Put the batch in order with everything that it must come after."""
        others = self._in_flight[opposite(batch.direction)]
        batch.sources = [other for other in others if overlap(batch.touched, other.written)]
        streams = self._streams_of(batch)
        for event in self._events_before(batch):
            for stream in streams:
                self.runtime.wait(stream, event)
        batch.begun = self.runtime.record(streams[0], timed=True)
        self.hooks.reached(f"{batch.direction} submit")
        self._require_sources(batch)

    def _events_before(self, batch: Batch) -> list[Event]:
        """The caller's work so far, the forward passes', what made the lists, transfers the other way of its slots."""
        streams = [stream for stream in (self.runtime.current(), self.fences[batch.direction]) if stream is not None]
        others = [
            other for other in self._in_flight[opposite(batch.direction)] if overlap(batch.touched, other.touched)
        ]
        events = [operation.listed for operation in batch.operations] + [other.finished for other in others]
        return [self.runtime.record(stream) for stream in streams] + [event for event in events if event]

    def _end(self, batch: Batch) -> None:
        *beside, stream = self._streams_of(batch)
        for other in beside:
            self.runtime.wait(stream, self.runtime.record(other))
        batch.finished = self.runtime.record(stream, timed=True)

    def _protect(self, copied: Event) -> None:
        """The model's next step, which overwrites states in place, comes after the copies of states, and no others."""
        for stream in (self.fences["backup"], self.runtime.current()):
            if stream is not None:
                self.runtime.wait(stream, copied)

    def _streams_of(self, batch: Batch) -> list[Stream]:
        """The one of its direction comes last, and before it the one of states, if it backs some up."""
        states = any(self._in_place(batch, name) for name in batch.names())
        return [self._streams[name] for name in (("states",) if states else ()) + (batch.direction,)]

    def _in_place(self, batch: Batch, name: str) -> bool:
        """Whether it backs up a pool that the model is going to overwrite, and waits for."""
        overwritten = batch.direction == "backup" and self.host.pools[name].spec.overwritten_in_place
        return overwritten and any(map(count, batch.transfers_of(name)))

    def _move(self, batch: Batch, name: str, layers: tuple[int, ...] | None = None) -> None:
        """Some layers of a pool, or whatever is left of it."""
        stream = self._streams["states" if self._in_place(batch, name) else batch.direction]

        def move() -> None:
            if name not in batch.transfers:
                batch.transfers[name] = self._prepare(batch, name, stream)
            batch.receipts.setdefault(name, []).append(batch.transfers[name].run(layers))

        with self.hooks.watching(batch.direction):
            if "cpu" in BACKENDS[self.host.pools[name].backend]:  # others reach the step in the port
                batch.attempt(partial(self.hooks.reached, f"{batch.direction} copy", self.runtime, stream))
            batch.attempt(partial(self.runtime.issue, stream, partial(batch.attempt, move)))

    def _prepare(self, batch: Batch, name: str, stream: Stream) -> Transfer:
        parts = batch.transfers_of(name)
        host = self._joined([t.host_indices for t in parts])
        device = self._joined([self._slots(batch, t.device_indices, stream) for t in parts])
        batch.kept += [host, device]
        return self.host.pools[name].prepare(self.stack.device[name], host, device, batch.direction)

    def _joined(self, lists: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
        present = [indices for indices in lists if indices is not None]
        if any(self.runtime.holds(indices) for indices in present):
            return self.runtime.joined(present)
        return torch.cat([indices.to(torch.int64) for indices in present]) if present else None

    def _slots(self, batch: Batch, slots: torch.Tensor | Window | None, stream: Stream) -> torch.Tensor | None:
        """Device slots; those of a window are looked up now, once for all pools that share them."""
        if not isinstance(slots, Window):
            return slots
        if slots not in batch.looked_up:
            found = batch.looked_up[slots] = self._looked_up(slots)
            if self.runtime.holds(found):
                told = self.runtime.download(stream, found)
                batch.verdicts.append(partial(require_rows, slots, told))
            else:
                require_rows(slots, found)
        return batch.looked_up[slots]

    # ---- waiting

    def set_consumer(self, producer: int | None) -> None:
        """What `start_loading` returned, for the forward pass that is submitted next; None if it loads nothing."""
        self.layers.set_consumer(producer)

    def wait_until(self, layer: int, pool: str | None = None) -> None:
        """Let the current stream wait for a model layer, or not, if `pool` owns nothing of it. The host goes on."""
        self.layers.require(layer)
        if pool is None or layer in self._pool(pool).spec.owned_layers:
            self.layers.wait_until(layer)

    def wait_for_all_of(self, pool: str) -> None:
        """Let the current stream wait for every layer of a pool: for consumers of whole states (SGLang issue 36743)."""
        owned = self._pool(pool).spec.owned_layers
        self.layers.wait_until(max(owned, default=0))

    def _pool(self, name: str) -> HostPool:
        if name not in self.host.pools:
            raise ValueError(f"no pool {name!r} in this stack, it has {list(self.host.pools)}")
        return self.host.pools[name]

    def acknowledge(self, wait: bool = False) -> list[Ack]:
        """Operations that have ended since, each direction in order; `wait`: all that were submitted.

        Their slots are no longer locked. What a failed one had allocated is free again. To wait for what a hook holds
        is to wait for ever: an emulated device raises `Stuck`, and nothing has ended.
        """
        self._settle_all(wait)
        acks, self._told = self._told, []
        return acks

    def _settle_all(self, wait: bool) -> None:
        """An interrupt leaves the rest to the next time."""
        self._tell_dropped()
        while batch := self._next_to_settle(wait):
            self._settle(batch)
            self._in_flight[batch.direction].popleft()

    def _next_to_settle(self, wait: bool) -> Batch | None:
        """The oldest of a direction that has arrived, or is to be waited for; after what was to bring its source."""
        for direction, flights in self._in_flight.items():
            if not flights or self.hooks.held(f"{direction} acknowledge"):
                continue
            waits_for = [source for source in flights[0].sources if source in self._in_flight[opposite(direction)]]
            if not waits_for and (wait or self.arrived(flights[0])):
                return flights[0]
        return None

    def under_way(self, direction: str) -> tuple[Operation, ...]:
        """What was submitted and has not ended, in order. It has ended when its slots are no longer locked."""
        return tuple(operation for batch in self._in_flight[direction] for operation in batch.operations)

    @property
    def ended(self) -> tuple[Ack, ...]:
        """What has ended already and the next `acknowledge` will tell."""
        return tuple(self._told)

    def arrived(self, batch: Batch) -> bool:
        """Every byte is where it belongs, and visible; or not even an event could be recorded."""
        return batch.finished is None or batch.finished.query()

    def _settle(self, batch: Batch) -> None:
        if not batch.concluded:
            self._conclude(batch)
            batch.concluded = True
        self._tell(batch)

    def _conclude(self, batch: Batch) -> None:
        """How it has ended: that is the same for all of its operations, whenever they are told."""
        self._await(batch)
        for verdict in batch.verdicts:
            batch.judge(verdict)
        for receipt in (r for receipts in batch.receipts.values() for r in receipts):
            batch.attempt(receipt.wait)
        batch.attempt(partial(self._require_sources, batch))
        batch.sources.clear()
        batch.attempt(partial(self._require_complete, batch))
        batch.attempt(partial(self.hooks.reached, f"{batch.direction} acknowledge"))
        if batch.error and batch.producer is not None:
            self.layers.fail(batch.producer, batch.error)
        if batch.begun and batch.finished and not batch.error:
            batch.seconds = self.runtime.seconds(batch.begun, batch.finished)

    def _tell(self, batch: Batch) -> None:
        while batch.operations:
            operation = batch.operations[0]
            operation.ack = self._ended(operation, batch)
            self._told += [operation.ack]
            del batch.operations[0]  # nothing is called between these two: it is told once, wherever interrupts come

    def _await(self, batch: Batch) -> None:
        """Until nothing of it is under way, whatever fails meanwhile: its slots go to others next."""
        if batch.finished is None:  # it could not be recorded when its time came
            batch.attempt(partial(self._end, batch), even_so=True)
        while batch.finished and not _passed(batch.finished):
            try:
                batch.finished.synchronize()
            except Stuck:
                raise
            except Exception as failure:
                batch.error = batch.error or failure

    def _require_sources(self, batch: Batch) -> None:
        """Whatever was to bring what it reads has not failed, so far."""
        for source in batch.sources:
            if source.error:
                message = f"a {source.direction} failed that was to bring what it reads: {source.error}"
                raise RuntimeError(message) from source.error

    def _require_complete(self, batch: Batch) -> None:
        for name in batch.names():
            expected = sum(map(self._bytes, batch.transfers_of(name)))
            moved = sum(receipt.bytes for receipt in batch.receipts.get(name, []))
            if moved != expected:
                raise RuntimeError(f"pool {name!r}: {moved:,} of {expected:,} bytes were moved")

    def _bytes(self, t: PoolTransfer) -> int:
        spec = self.host.pools[t.name].spec
        return count(t) // spec.page_size * spec.page_bytes

    def _ended(self, operation: Operation, batch: Batch) -> Ack:
        """Give back what it has. After an interrupt: what is left of that."""
        if batch.error:
            self._give_back(operation.taken)
        call_all(lock.undo for lock in operation.locks)
        if batch.error:
            return Ack(operation.tag, batch.direction, {}, {}, batch.seconds, batch.error)
        tokens = {t.name: count(t) for t in operation.transfers}
        nbytes = {t.name: self._bytes(t) for t in operation.transfers}
        return Ack(operation.tag, batch.direction, tokens, nbytes, batch.seconds, receipts=batch.receipts)

    # ---- life

    def drop(self, operation: Operation) -> None:
        """Take back what is queued; slots that were allocated for it are free again, and it is acknowledged as such.

        `ValueError` for an operation that was submitted already: it ends with its acknowledgement.
        """
        if operation not in self._queued[operation.direction]:
            raise ValueError(f"{operation.tag!r} is not queued: it was submitted or dropped, and cannot be taken back")
        error = Dropped(f"{operation.direction} {operation.tag!r} was dropped before it was submitted")
        self._dropped += [Batch(operation.direction, [operation], error=error)]
        self._queued[operation.direction].remove(operation)  # nothing else is called between these two
        self._tell_dropped()

    def _tell_dropped(self) -> None:
        while self._dropped:
            self._tell(self._dropped[0])
            del self._dropped[0]

    def close(self) -> None:
        """Release what hooks hold, drop what is queued, wait for what is under way. Idempotent; the pools stay open.

        What has not been acknowledged is told by the next `acknowledge`.
        """
        self.hooks.release()
        for operation in [o for queued in self._queued.values() for o in queued]:
            self.drop(operation)
        self._settle_all(wait=True)

    def __enter__(self) -> Controller:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _passed(event: Event) -> bool:
    """Whether nothing before it is under way: it has passed, or the device has come to an end."""
    try:
        return event.query()
    except Exception:
        return True


def loads_by_layer(pool: HostPool) -> bool:
    """Not with `staged` where a page's layers are interleaved: every layer would take the bus for the whole page."""
    return pool.backend != "staged" or not any(buffer.interleaves_layers for buffer, _ in pool.storage)
