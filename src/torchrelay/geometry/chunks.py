"""How a stream is cut into chunks. Pure: sizes in, sizes out.

A chunk is the unit of sending and of verification. Small images are packed together; a large one
has chunks of its own, so that it can be sent from where it lies.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate
from typing import Any

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


def cut(
    nbytes: Sizes,
    chunk_bytes: int,
    devices: Counts | None = None,
    small_bytes: int = SMALL_BYTES,
) -> tuple[int, ...]:
    """Sizes of the chunks of a stream of images of `nbytes`, each over 0, in order. No chunk has
    bytes of two devices, so that one device can hash it."""
    chunk_bytes = min(aligned(chunk_bytes), MAX_CHUNK_BYTES)
    chunks: list[int] = []
    exact, sizes = np.asarray(nbytes, np.int64), _aligned(nbytes)
    ends = np.cumsum(sizes)
    done, place = 0, 0  # bytes of the stream, images
    turns = np.zeros(0, np.int64) if devices is None else np.flatnonzero(np.diff(devices)) + 1
    large = np.flatnonzero((exact >= small_bytes) | (sizes > chunk_bytes))
    columns = (large.tolist(), sizes[large].tolist(), ends[large].tolist())
    for own, size, end in (*zip(*columns, strict=True), (len(ends), 0, 0)):
        # Small ones up to here, as many as go into a chunk at a time.
        while place < own:
            turn = turns[np.searchsorted(turns, place, side="right") :][:1].tolist()
            most = int(np.searchsorted(ends, done + chunk_bytes, side="right"))
            place = min([own, most, *turn])
            chunks.append(int(ends[place - 1]) - done)
            done = int(ends[place - 1])
        whole, rest = divmod(size, chunk_bytes)
        chunks += [chunk_bytes] * whole + [rest] * (rest > 0)
        done, place = end, own + 1
    return tuple(chunks)


def _aligned(nbytes: Sizes) -> np.ndarray[Any, np.dtype[np.int64]]:
    return (np.asarray(nbytes, np.int64) + (ALIGN - 1)) & -ALIGN


def stream_bytes(nbytes: Sizes) -> int:
    """Bytes of a stream of images of `nbytes`."""
    return int(_aligned(nbytes).sum())


class Chunks:
    """The chunks of a stream: their offsets, and the parts of images that each one holds."""

    def __init__(self, nbytes: Sizes, chunks: Sequence[int]) -> None:
        self.image_bytes: Counts = np.asarray(nbytes, np.int64)
        # Where each image starts in the stream, and each chunk.
        sizes = _aligned(nbytes)
        self.places: Column = (np.cumsum(sizes) - sizes).astype(np.uint64)
        self.padded: Column = sizes.astype(np.uint64)  # bytes that each image takes there
        self.sizes = tuple(chunks)
        self.offsets = list(accumulate(self.sizes, initial=0))
        self.stream_bytes = self.offsets.pop()

    def __len__(self) -> int:
        return len(self.sizes)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the state itself, without alignment."""
        return int(self.image_bytes.sum())

    def start_of(self, image: int) -> int:
        return int(self.places[image])

    def size_of(self, image: int) -> int:
        return int(self.image_bytes[image])

    @cached_property
    def inside(self) -> Counts:
        """How many bytes of images each chunk has; the rest is padding."""
        return self.shares_of(self.places, self.image_bytes.astype(np.uint64))

    @cached_property
    def _edges(self) -> Counts:
        """Where chunks begin, and where the last one ends."""
        return np.array([*self.offsets, self.stream_bytes], np.int64)

    def without_padding(self, memory: Runs) -> Runs:
        """The runs of memory, without the padding between images."""
        return memory.only(self.places, self.image_bytes.astype(np.uint64))

    def shares_of(self, starts: Column, sizes: Column) -> Counts:
        """How many bytes of stretches of the stream, in its order, lie in each chunk."""
        if not len(starts):
            return np.zeros(len(self), np.int64)
        edges = self._edges
        begin, nbytes = starts.astype(np.int64), sizes.astype(np.int64)
        before = np.concatenate([[0], np.cumsum(nbytes)])
        index = np.searchsorted(begin + nbytes, edges, side="right")
        inside = np.minimum(index, len(begin) - 1)
        part = np.where(index < len(begin), np.clip(edges - begin[inside], 0, nbytes[inside]), 0)
        counts: Counts = np.diff(before[index] + part)
        return counts


assert SMALL_BYTES % ALIGN == MIN_CHUNK_BYTES % ALIGN == 0
