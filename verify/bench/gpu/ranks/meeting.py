"""Processes that wait for each other by flags in shared memory, so that they begin within microseconds."""

from __future__ import annotations

import time

import numpy as np

COLUMNS = 4
COUNT, VOTES, ENDED = 0, (1, 2), 3  # votes of even and of odd meetings: the next one may have begun already


def nbytes(ranks: int) -> int:
    return 8 * COLUMNS * ranks


class Meeting:
    """
    memory   of `nbytes(ranks)`, zero at first, that all ranks share
    timeout  seconds after which a rank that has not come is taken for dead: `TimeoutError`
    """

    def __init__(self, memory: memoryview, rank: int, ranks: int, timeout: float = 120.0) -> None:
        self._all = np.frombuffer(memory, np.int64, COLUMNS * ranks).reshape(ranks, COLUMNS)
        self._mine, self._count, self._plays, self._timeout = self._all[rank], 0, 0, timeout

    def meet(self, vote: bool = True) -> bool:
        """Wait until everybody is here. Whether all have voted for it, which all are told alike."""
        self._count += 1
        votes = VOTES[self._count % 2]
        self._mine[votes] = vote
        self._mine[COUNT] = self._count
        self._wait(COUNT, self._count)
        return bool(self._all[:, votes].all())

    def begin(self) -> None:
        """A play: everybody goes on until all have ended."""
        self._plays += 1

    def end(self) -> None:
        """This rank has what it needs of the play."""
        self._mine[ENDED] = self._plays

    def all_ended(self) -> bool:
        return bool((self._all[:, ENDED] >= self._plays).all())

    def rest(self) -> None:
        """Take no part in the play, and wait for its end."""
        self.end()
        self._wait(ENDED, self._plays, pause=0.001)

    def _wait(self, column: int, number: int, pause: float = 0.0) -> None:
        late = time.monotonic() + self._timeout
        while (missing := np.flatnonzero(self._all[:, column] < number)).size:
            if time.monotonic() > late:
                raise TimeoutError(f"rank {missing[0]} has not come within {self._timeout:.0f} s")
            time.sleep(pause)
