"""Stretches of a stream that lie in host memory, copied by address.

Stretches that follow each other in the stream and in memory are one run, so a state of many small
tensors that were allocated one after the other is copied by a few calls.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

Column = np.ndarray[Any, np.dtype[np.uint64]]
Numbers = Sequence[int] | Column
Copy = Callable[["Moves"], None]  # copies by address

_LARGE_BYTES = 1 << 18

# `ctypes.memmove` lets other threads run during the copy. For a short one that costs more than the
# copy itself: with a busy thread around, each call may wait for a whole switch interval.
_inside = ctypes.PYFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_move_short = ctypes.cast(ctypes.memmove, _inside)


class Runs:
    """Where stretches of a stream lie, which do not overlap there. Kept in stream order."""

    def __init__(self, starts: Numbers, addresses: Numbers, sizes: Numbers) -> None:
        # Unsigned: an address may use all 64 bits, and numpy has no common integer for both kinds.
        begin, address, nbytes = (np.asarray(x, np.uint64) for x in (starts, addresses, sizes))
        if (begin[1:] < begin[:-1]).any():
            order = np.argsort(begin, kind="stable")
            begin, address, nbytes = begin[order], address[order], nbytes[order]
        end = begin + nbytes
        separate = (begin[1:] != end[:-1]) | (address[1:] != (address + nbytes)[:-1])
        first = np.ones(len(begin), dtype=bool)
        first[1:] = separate
        last = np.ones(len(begin), dtype=bool)
        last[:-1] = separate
        self.starts: Column = begin[first]
        self.stops: Column = end[last]
        self.addresses: Column = address[first]

    @classmethod
    def merged(cls, *several: Runs) -> Runs:
        """One `Runs` of several that do not overlap in the stream."""
        several = tuple([runs for runs in several if len(runs.starts)])
        if len(several) < 2:
            return several[0] if several else cls([], [], [])
        starts, stops, addresses = (
            np.concatenate([getattr(runs, name) for runs in several])
            for name in ("starts", "stops", "addresses")
        )
        return cls(starts, addresses, stops - starts)

    @classmethod
    def of(cls, rows: Sequence[tuple[int, int, int]]) -> Runs:
        """Stretches, each with its position, address and bytes."""
        return cls(*np.array(rows, np.uint64).reshape(-1, 3).T)

    @property
    def stretches(self) -> Runs:
        """Which bytes of the stream they have, wherever those lie."""
        return Runs(self.starts, self.starts, self.stops - self.starts)

    def only(self, starts: Numbers, sizes: Numbers) -> Runs:
        """The parts of the runs in these sections of the stream."""
        found = moves(self, Runs(starts, starts, sizes))
        return Runs(found.positions, found.sources, found.nbytes)

    def without(self, other: Runs) -> Runs:
        """The parts of the runs that the other does not cover."""
        return self.unfilled(moves(other, self))

    def unfilled(self, both: Moves) -> Runs:
        """The parts of the runs that these copies do not fill."""
        if both.nbytes.sum() == (self.stops - self.starts).sum():
            return Runs([], [], [])
        # Gaps begin where a run does or the other's ends, and end the other way round.
        begin = np.sort(np.concatenate((self.starts, both.positions + both.nbytes)))
        end = np.sort(np.concatenate((both.positions, self.stops)))
        begin, end = begin[begin < end], end[begin < end]
        run = holding(self, begin)
        return Runs(begin, self.addresses[run] + (begin - self.starts[run]), end - begin)

    def pack(self) -> bytes:
        """As bytes, for another process on this machine."""
        columns = (self.starts, self.addresses, self.stops - self.starts)
        return b"".join(np.ascontiguousarray(column, "<u8").data for column in columns)

    @classmethod
    def unpack(cls, data: bytes, stream_bytes: int) -> Runs:
        """The inverse of `pack`. Raises `ValueError` for runs that are not in stream order."""
        if len(data) % 24:
            raise ValueError("a torn table of memory")
        starts, addresses, sizes = np.frombuffer(data, "<u8").reshape(3, -1)
        limit = np.uint64(stream_bytes)
        if np.any(starts > limit) or np.any(sizes > limit) or np.any(starts + sizes > limit):
            raise ValueError("memory outside the stream")
        if np.any((starts + sizes)[:-1] > starts[1:]):
            raise ValueError("memory that overlaps in the stream")
        return cls(starts, addresses, sizes)

    def within(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Position, address and bytes of each run, cut to the stream's bytes [start, stop)."""
        return zip(*(column.tolist() for column in self.between(start, stop)), strict=True)

    def reaches(self, start: int, stop: int) -> bool:
        """Whether any run has some of the stream's bytes [start, stop)."""
        first = np.searchsorted(self.stops, np.uint64(start), side="right")
        return bool(first < np.searchsorted(self.starts, np.uint64(stop)))

    def whole(self, start: int, stop: int) -> int | None:
        """The address of the stream's bytes [start, stop), if they lie there in one piece."""
        run = int(np.searchsorted(self.starts, np.uint64(start), side="right")) - 1
        if run < 0 or stop > int(self.stops[run]):
            return None
        return int(self.addresses[run]) + start - int(self.starts[run])

    def between(self, start: int, stop: int) -> tuple[Column, Column, Column]:
        """`within`, in columns."""
        low, high = np.uint64(start), np.uint64(stop)
        first = int(np.searchsorted(self.stops, low, side="right"))
        some = slice(first, max(first, int(np.searchsorted(self.starts, high))))
        positions = np.maximum(self.starts[some], low)
        addresses = self.addresses[some] + (positions - self.starts[some])
        return positions, addresses, np.minimum(self.stops[some], high) - positions

    def _facing(self, other: Runs) -> Runs:
        """The parts of the runs between the first and the last byte of another."""
        start, stop = int(other.starts[0]), int(other.stops[-1])
        if len(self.starts) and start <= self.starts[0] and self.stops[-1] <= stop:
            return self
        return Runs(*self.between(start, stop))

    def gather(self, start: int, stop: int, buffer: int, copy: Copy | None = None) -> None:
        """Copy what the runs have of [start, stop) to the address `buffer` of byte `start`."""
        positions, addresses, nbytes = self.between(start, stop)
        there = positions - np.uint64(start) + np.uint64(buffer)
        (copy or copy_one_by_one)(Moves(positions, addresses, there, nbytes))

    def scatter(self, start: int, stop: int, buffer: int, copy: Copy | None = None) -> None:
        """The other way: from the address `buffer` of byte `start` to where the runs lie."""
        positions, addresses, nbytes = self.between(start, stop)
        there = positions - np.uint64(start) + np.uint64(buffer)
        (copy or copy_one_by_one)(Moves(positions, there, addresses, nbytes))


class Moves(NamedTuple):
    """Copies by address: `nbytes` at `source` go to `destination`, in the order of the stream."""

    positions: Column
    sources: Column
    destinations: Column
    nbytes: Column

    def joined(self) -> Moves:
        """The same copies, those that continue where the one before ends in one with it."""
        ends = (column + self.nbytes for column in self[:3])
        first = np.ones(len(self.nbytes), bool)
        pairs = zip(self[:3], ends, strict=True)
        first[1:] = np.any([column[1:] != end[:-1] for column, end in pairs], axis=0)
        if first.all():
            return self
        positions, sources, destinations = (column[first] for column in self[:3])
        nbytes = np.add.reduceat(self.nbytes, np.flatnonzero(first))
        return Moves(positions, sources, destinations, nbytes)

    def cut(self, most: int) -> Moves:
        """The same copies, none of them longer than `most`."""
        if not len(self.nbytes) or int(self.nbytes.max()) <= most:
            return self
        size = np.uint64(most)
        pieces = (self.nbytes + size - np.uint64(1)) // size
        row = np.repeat(np.arange(len(pieces)), pieces.astype(np.int64))
        first = np.repeat(np.cumsum(pieces) - pieces, pieces.astype(np.int64))
        skip = (np.arange(len(row), dtype=np.uint64) - first) * size
        return Moves(
            self.positions[row] + skip,
            self.sources[row] + skip,
            self.destinations[row] + skip,
            np.minimum(self.nbytes[row] - skip, size),
        )


def moves(sources: Runs, destinations: Runs) -> Moves:
    """The copies from one to the other, of the bytes that both have."""
    if not len(sources.starts) or not len(destinations.starts):
        return Moves(*(np.zeros(0, np.uint64) for _ in Moves._fields))
    theirs, ours = sources._facing(destinations), destinations._facing(sources)
    if np.array_equal(theirs.starts, ours.starts) and np.array_equal(theirs.stops, ours.stops):
        # Cut alike on both sides: the common case where there are many.
        return Moves(theirs.starts, theirs.addresses, ours.addresses, ours.stops - ours.starts)
    # Four ascending columns: a sort that finds that out is done with them at once.
    edges = np.concatenate((theirs.starts, theirs.stops, ours.starts, ours.stops))
    edges.sort(kind="stable")
    low, high = edges[:-1], edges[1:]
    there, here = holding(theirs, low), holding(ours, low)
    both = (there >= 0) & (here >= 0) & (low < high)
    low, high, there, here = low[both], high[both], there[both], here[both]
    return Moves(
        low,
        theirs.addresses[there] + (low - theirs.starts[there]),
        ours.addresses[here] + (low - ours.starts[here]),
        high - low,
    )


def reached(first: Any, last: Any, count: int) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Marks the numbers below `count` that lie in a range from `first` to `last`, inclusive."""
    change = np.zeros(count + 1, np.int64)
    np.add.at(change, first.astype(np.int64), 1)
    np.add.at(change, last.astype(np.int64) + 1, -1)
    marks: np.ndarray[Any, np.dtype[np.bool_]] = np.cumsum(change[:-1]) > 0
    return marks


def reaching(lows: Column, highs: Column) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Which runs of memory reach into another one."""
    found = np.zeros(len(lows), bool)
    order = np.argsort(lows, kind="stable")  # mostly they are in order
    meet = lows[order][1:] < np.maximum.accumulate(highs[order])[:-1]
    found[order[1:]] = meet
    found[order[:-1]] |= meet
    return found


def holding(runs: Runs, positions: Column) -> np.ndarray[Any, np.dtype[np.int64]]:
    """For each position, which ascend, the run that has the byte there, or -1."""
    index: np.ndarray[Any, np.dtype[np.int64]]
    if len(positions) > 8 * len(runs.starts):  # it is cheaper to look up the runs
        firsts = np.searchsorted(positions, runs.starts, side="left")
        index = np.cumsum(np.bincount(firsts, minlength=len(positions) + 1)[:-1]) - 1
    else:
        index = np.searchsorted(runs.starts, positions, side="right").astype(np.int64) - 1
    if len(runs.stops):
        index[(index >= 0) & (runs.stops[index] <= positions)] = -1
    return index


def _move(destination: int, source: int, nbytes: int) -> None:
    if nbytes < _LARGE_BYTES:
        _move_short(destination, source, nbytes)
    else:
        ctypes.memmove(destination, source, nbytes)


def copy_one_by_one(moves: Moves) -> None:
    columns = (moves.destinations, moves.sources, moves.nbytes)
    for destination, source, nbytes in zip(*(c.tolist() for c in columns), strict=True):
        _move(destination, source, nbytes)
