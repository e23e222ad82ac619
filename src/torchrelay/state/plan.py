"""How a stream is cut into chunks. Pure: sizes in, sizes out.

A chunk is the unit of sending and of verification. Small storages are packed together; a large one
has chunks of its own, so that it can be sent from where it lies.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from torchrelay.state.manifest import ALIGN, MAX_CHUNK_BYTES, aligned

MIB = 1 << 20
SMALL_BYTES = 4 * MIB  # a copy this long costs less than a message of its own
MIN_CHUNK_BYTES = 1 * MIB


def stream_order(nbytes: Sequence[int], small_bytes: int = SMALL_BYTES) -> list[int]:
    """Indices of storages in stream order: small ones first, so that they share chunks."""
    small = [index for index, size in enumerate(nbytes) if size < small_bytes]
    return small + [index for index, size in enumerate(nbytes) if size >= small_bytes]


def chunk_size(stream_bytes: int, receivers: int) -> int:
    """Bytes a chunk should have.

    Large chunks cost fewer messages; in a chain of receivers each hop waits for a whole chunk, so
    the chunks are smaller there. About sixteen chunks keep both ends busy on smaller states.
    """
    most = 64 * MIB if receivers == 1 else 16 * MIB
    wanted = stream_bytes // 16
    return aligned(max(MIN_CHUNK_BYTES, min(most, wanted)))


def cut(nbytes: Sequence[int], chunk_bytes: int, small_bytes: int = SMALL_BYTES) -> tuple[int, ...]:
    """Sizes of the chunks of a stream of storages of `nbytes`, in order."""
    chunk_bytes = min(aligned(chunk_bytes), MAX_CHUNK_BYTES)
    chunks: list[int] = []
    bucket = 0
    for exact, size in zip(nbytes, aligned_sizes(nbytes), strict=True):
        if exact >= small_bytes or size > chunk_bytes:
            if bucket:
                chunks.append(bucket)
                bucket = 0
            whole, rest = divmod(size, chunk_bytes)
            chunks.extend([chunk_bytes] * whole)
            if rest:
                chunks.append(rest)
            continue
        if bucket + size > chunk_bytes:
            chunks.append(bucket)
            bucket = 0
        bucket += size
    if bucket:
        chunks.append(bucket)
    return tuple(chunks)


class Extent(NamedTuple):
    """Bytes [start, stop) of one storage's image, and where they stand in a chunk."""

    storage: int
    start: int
    stop: int
    at: int


def aligned_sizes(nbytes: Sequence[int]) -> list[int]:
    return [-(-size // ALIGN) * ALIGN for size in nbytes]  # `aligned`, without its calls


class Chunks:
    """Where the chunks of a stream are, and which parts of which storages they hold."""

    def __init__(self, nbytes: Sequence[int], chunks: Sequence[int]) -> None:
        self._nbytes = nbytes
        # Where each storage's image starts in the stream, and each chunk.
        self.starts = list(accumulate(aligned_sizes(nbytes), initial=0))[:-1]
        self.sizes = tuple(chunks)
        self.offsets = list(accumulate(self.sizes, initial=0))
        self.stream_bytes = self.offsets.pop()

    def __len__(self) -> int:
        return len(self.sizes)

    def start_of(self, storage: int) -> int:
        return self.starts[storage]

    def extents(self, index: int) -> Iterator[Extent]:
        """The parts of storages in chunk `index`, in order. Padding belongs to none."""
        begin = self.offsets[index]
        end = begin + self.sizes[index]
        storage = bisect_right(self.starts, begin) - 1
        while storage < len(self.starts) and (origin := self.starts[storage]) < end:
            start = max(begin - origin, 0)
            stop = min(end - origin, self._nbytes[storage])
            if start < stop:
                yield Extent(storage, start, stop, origin + start - begin)
            storage += 1


assert SMALL_BYTES % ALIGN == MIN_CHUNK_BYTES % ALIGN == 0
