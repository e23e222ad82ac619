"""Stretches of a stream that lie in host memory, copied by address.

Stretches that follow each other in the stream and in memory are one run, so a state of many small
tensors that were allocated one after the other is copied by a few calls.
"""

from __future__ import annotations

import ctypes
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence

import numpy as np

_LARGE_BYTES = 1 << 18

# `ctypes.memmove` lets other threads run during the copy. For a short one that costs more than the
# copy itself: with a busy thread around, each call may wait for a whole switch interval.
_move_short = ctypes.PyDLL(None).memmove
_move_short.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_move_short.restype = None


class Runs:
    """Where stretches of a stream lie. They are given in stream order and do not overlap there."""

    __slots__ = ("_addresses", "_starts", "_stops")

    def __init__(
        self, starts: Sequence[int], addresses: Sequence[int], sizes: Sequence[int]
    ) -> None:
        # Unsigned: an address may use all 64 bits, and numpy has no common integer for both kinds.
        begin, address, nbytes = (np.array(x, dtype=np.uint64) for x in (starts, addresses, sizes))
        end = begin + nbytes
        apart = (begin[1:] != end[:-1]) | (address[1:] != (address + nbytes)[:-1])
        first = np.ones(len(begin), dtype=bool)
        first[1:] = apart
        last = np.ones(len(begin), dtype=bool)
        last[:-1] = apart
        self._starts: list[int] = begin[first].tolist()
        self._addresses: list[int] = address[first].tolist()
        self._stops: list[int] = end[last].tolist()

    def within(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Position, address and bytes of each run, cut to the stream's bytes [start, stop)."""
        first = bisect_right(self._stops, start)
        some = slice(first, max(first, bisect_left(self._starts, stop)))
        for low, high, address in zip(
            self._starts[some], self._stops[some], self._addresses[some], strict=True
        ):
            if low < start:
                address += start - low
                low = start
            yield low, address, min(high, stop) - low

    def reaches(self, start: int, stop: int) -> bool:
        """Whether any run has some of the stream's bytes [start, stop)."""
        return bisect_right(self._stops, start) < bisect_left(self._starts, stop)

    def gather(self, start: int, stop: int, buffer: int) -> None:
        """Copy what the runs have of [start, stop) to the address `buffer` of byte `start`."""
        shift = buffer - start
        for position, address, nbytes in self.within(start, stop):
            _move(shift + position, address, nbytes)

    def scatter(self, start: int, stop: int, buffer: int) -> None:
        """The other way: from the address `buffer` of byte `start` to where the runs lie."""
        shift = buffer - start
        for position, address, nbytes in self.within(start, stop):
            _move(address, shift + position, nbytes)


def _move(destination: int, source: int, nbytes: int) -> None:
    if nbytes < _LARGE_BYTES:
        _move_short(destination, source, nbytes)
    else:
        ctypes.memmove(destination, source, nbytes)
