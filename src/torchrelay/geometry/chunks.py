"""How a stream is cut into chunks. Pure: sizes in, sizes out.

A chunk is the unit of sending and of verification. Small storages are packed together; a large one
has chunks of its own, so that it can be sent from where it lies.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from torchrelay.geometry.runs import Column, Runs

Counts = np.ndarray[Any, np.dtype[np.int64]]
Sizes = Sequence[int] | Column | Counts
MIB = 1 << 20
ALIGN = 16  # bytes; every item size divides it, so no chunk boundary splits an element
MAX_CHUNK_BYTES = 1 << 28
SMALL_BYTES = 4 * MIB  # a copy this long costs less than a message of its own
MIN_CHUNK_BYTES = 1 * MIB


def aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGN) * ALIGN


def stream_order(
    nbytes: Sizes, small_bytes: int = SMALL_BYTES
) -> np.ndarray[Any, np.dtype[np.intp]]:
    """Indices of storages in stream order: small ones first, so that they share chunks."""
    return np.argsort(np.asarray(nbytes, np.int64) >= small_bytes, kind="stable")


def chunk_size(stream_bytes: int, receivers: int, *, on_device: bool = False) -> int:
    """Bytes a chunk should have.

    Large chunks cost fewer messages and keep a device's copies busy; in host memory small ones are
    still in a cache when they are hashed and copied. About sixteen keep both ends busy on smaller
    states. In a chain each hop is behind the one before it by a whole chunk: all of them together
    should be behind by no more than a sixty-fourth of the transfer.
    """
    hops = max(receivers - 1, 0)
    most = 16 * MIB if hops else 64 * MIB if on_device else 32 * MIB
    wanted = stream_bytes // (64 * hops or 16)
    return aligned(max(MIN_CHUNK_BYTES, min(most, wanted)))


def cut(nbytes: Sizes, chunk_bytes: int, small_bytes: int = SMALL_BYTES) -> tuple[int, ...]:
    """Sizes of the chunks of a stream of storages of `nbytes`, in order."""
    chunk_bytes = min(aligned(chunk_bytes), MAX_CHUNK_BYTES)
    chunks: list[int] = []
    exact, sizes = np.asarray(nbytes, np.int64), _aligned(nbytes)
    ends = np.cumsum(sizes)
    done, place = 0, 0  # bytes of the stream, storages
    for own in [*np.flatnonzero((exact >= small_bytes) | (sizes > chunk_bytes)).tolist(), None]:
        # Small ones up to here, as many as go into a chunk at a time.
        last = len(ends) if own is None else own
        while place < last:
            place = min(last, int(np.searchsorted(ends, done + chunk_bytes, side="right")))
            chunks.append(int(ends[place - 1]) - done)
            done = int(ends[place - 1])
        if own is not None:
            whole, rest = divmod(int(sizes[own]), chunk_bytes)
            chunks += [chunk_bytes] * whole + [rest] * (rest > 0)
            done, place = int(ends[own]), own + 1
    return tuple(chunks)


def _aligned(nbytes: Sizes) -> np.ndarray[Any, np.dtype[np.int64]]:
    return (np.asarray(nbytes, np.int64) + (ALIGN - 1)) & -ALIGN


def stream_bytes(nbytes: Sizes) -> int:
    """Bytes of a stream of storages of `nbytes`."""
    return int(_aligned(nbytes).sum())


class Extent(NamedTuple):
    """Bytes [start, stop) of one storage's image, and where they stand in a chunk."""

    storage: int
    start: int
    stop: int
    at: int


class Chunks:
    """Where the chunks of a stream are, and which parts of which storages they hold."""

    def __init__(self, nbytes: Sizes, chunks: Sequence[int]) -> None:
        self._nbytes = nbytes
        # Where each storage's image starts in the stream, and each chunk.
        sizes = _aligned(nbytes)
        self.places: Column = (np.cumsum(sizes) - sizes).astype(np.uint64)
        self.rooms: Column = sizes.astype(np.uint64)  # bytes that each image takes there
        self.sizes = tuple(chunks)
        self.offsets = list(accumulate(self.sizes, initial=0))
        self.stream_bytes = self.offsets.pop()

    def __len__(self) -> int:
        return len(self.sizes)

    @cached_property
    def starts(self) -> list[int]:
        """The places, as a list."""
        starts: list[int] = self.places.tolist()
        return starts

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the state itself, without alignment."""
        return int(np.sum(self._nbytes))

    def start_of(self, storage: int) -> int:
        return int(self.places[storage])

    def within_one(self, index: int) -> tuple[int, int, int] | None:
        """The storage whose bytes [start, stop) chunk `index` consists of, if it is one alone."""
        begin = self.offsets[index]
        storage = int(np.searchsorted(self.places, np.uint64(begin), side="right")) - 1
        start = begin - int(self.places[storage])
        stop = start + self.sizes[index]
        return (storage, start, stop) if stop <= int(self._nbytes[storage]) else None

    @cached_property
    def held(self) -> Counts:
        """How many bytes of storages each chunk has; the rest is padding."""
        return self.shares_of(self.places, np.asarray(self._nbytes, np.uint64))

    def without_padding(self, memory: Runs) -> Runs:
        """What memory has of storages."""
        return memory.only(self.places, np.asarray(self._nbytes, np.uint64))

    def shares_of(self, starts: Column, sizes: Column) -> Counts:
        """How many bytes of stretches of the stream, in its order, lie in each chunk."""
        edges = np.array([*self.offsets, self.stream_bytes], np.int64)
        if not len(starts):
            return np.zeros(len(self), np.int64)
        begin, nbytes = starts.astype(np.int64), sizes.astype(np.int64)
        before = np.concatenate([[0], np.cumsum(nbytes)])
        index = np.searchsorted(begin + nbytes, edges, side="right")
        inside = np.minimum(index, len(begin) - 1)
        part = np.where(index < len(begin), np.clip(edges - begin[inside], 0, nbytes[inside]), 0)
        counts: Counts = np.diff(before[index] + part)
        return counts

    def extents(self, index: int) -> Iterator[Extent]:
        """The parts of storages in chunk `index`, in order. Padding belongs to none."""
        begin = self.offsets[index]
        end = begin + self.sizes[index]
        storage = bisect_right(self.starts, begin) - 1
        while storage < len(self.starts) and (origin := self.starts[storage]) < end:
            start = max(begin - origin, 0)
            stop = min(end - origin, int(self._nbytes[storage]))
            if start < stop:
                yield Extent(storage, start, stop, origin + start - begin)
            storage += 1


assert SMALL_BYTES % ALIGN == MIN_CHUNK_BYTES % ALIGN == 0
