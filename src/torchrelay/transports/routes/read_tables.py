"""How a sender's memory was read the last time; the same at both ends is cut the same way."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from torchrelay.geometry.runs import Runs, moves
from torchrelay.memory.vectors import Batch, batches
from torchrelay.transports.resources import Kept

_MOST_ROWS = 1 << 18  # of a table that is remembered: about 150 bytes each


class _Known(NamedTuple):
    theirs: Runs
    ours: Runs
    found: list[Batch]


class Readings(Kept):
    """Remembers one table of memory and how it was read, of the last state that had one.

    Threads may share it: what is remembered is never changed, only replaced.
    """

    def __init__(self) -> None:
        self._table: tuple[bytes, int, Runs] | None = None
        self._known: tuple[_Known, ...] = ()

    def unpack(self, table: bytes, stream_bytes: int) -> Runs:
        """As `Runs.unpack`."""
        known = self._table
        if known is not None and known[:2] == (table, stream_bytes):
            return known[2]
        runs = Runs.unpack(table, stream_bytes)
        self.forget()
        if len(runs.starts) <= _MOST_ROWS:
            self._table = table, stream_bytes, runs
        return runs

    def batches(self, theirs: Runs, ours: Runs) -> list[Batch]:
        """The calls that read what both have of the stream."""
        for known in self._known:
            if _same(known.theirs, theirs) and _same(known.ours, ours):
                return known.found
        found = batches(moves(theirs, ours), bridge=True)
        if self._table is not None and theirs is self._table[2]:
            self._known = (_Known(theirs, ours, found),)
        return found

    def forget(self) -> None:
        self._table, self._known = None, ()


def _same(one: Runs, other: Runs) -> bool:
    if one is other:
        return True
    names = ("starts", "stops", "addresses")
    return all(np.array_equal(getattr(one, name), getattr(other, name)) for name in names)
