"""The digest of a chunk, on the wire and at rest, on the host and on GPUs. It guards against
corruption, not forgery. No torch.

A chunk is hashed in cells of 1 MiB; the last one may be shorter. The digest of a chunk of one
cell is the XXH3-128 of its bytes; that of a longer one is the XXH3-128 of the digests of its cells,
one after the other. A GPU hashes cells in parallel, and one long run of bytes slowly.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import xxhash

from torchrelay.geometry import DIGEST_BYTES

CELL_BYTES = 1 << 20


def digest(data: Any) -> bytes:
    """The digest of a chunk in a contiguous buffer of host memory."""
    view = memoryview(data).cast("B")
    if len(view) <= CELL_BYTES:
        return xxhash.xxh3_128_digest(view)
    cells = [view[at : at + CELL_BYTES] for at in range(0, len(view), CELL_BYTES)]
    return joined(b"".join(map(xxhash.xxh3_128_digest, cells)))


def joined(cells: bytes) -> bytes:
    """The digest of a chunk whose cells have these, one after the other."""
    return cells if len(cells) == DIGEST_BYTES else xxhash.xxh3_128_digest(cells)


def joined_each(cells: bytes, edges: Sequence[int]) -> list[bytes]:
    """The digests of chunks whose cells have these, one chunk after the other. `edges`: the number
    of the first cell of each chunk, and of all cells."""
    return [joined(cells[DIGEST_BYTES * a : DIGEST_BYTES * b]) for a, b in pairwise(edges)]


class RunningDigest:
    """The digest of a chunk whose bytes are given to `update` one after the other."""

    def __init__(self) -> None:
        self._hash = xxhash.xxh3_128()  # of the cell that has begun
        self._left = CELL_BYTES  # of it
        self._cells = b""  # the digests of those before it

    def update(self, data: Any) -> None:
        rest = memoryview(data).cast("B")
        while len(rest):
            if not self._left:  # only now is it known that the chunk has another cell
                self._cells += self._hash.digest()
                self._hash.reset()
                self._left = CELL_BYTES
            some, rest = rest[: self._left], rest[self._left :]
            self._hash.update(some)
            self._left -= len(some)

    def digest(self) -> bytes:
        return joined(self._cells + self._hash.digest())

    def reset(self) -> None:
        """Begin the next chunk."""
        self._hash.reset()
        self._left, self._cells = CELL_BYTES, b""


class ChunkDigests:
    """The digests of a file's chunks, of bytes that come in order, from the begin of a chunk on.

    They are put into `found`, where they belong among those of all chunks. Chunks whose digests are
    in `known`, which has zeros for the others, are not hashed.
    """

    def __init__(
        self, nbytes: int, chunk_bytes: int, found: bytearray, known: bytes | bytearray = b""
    ) -> None:
        self._nbytes, self._chunk_bytes = nbytes, chunk_bytes
        self._found, self._known = found, known
        self._running = RunningDigest()  # of a chunk that comes in several pieces

    def add(self, position: int, data: Any) -> None:
        """The bytes at a position of the file."""
        view = memoryview(data).cast("B")
        at, stop = position, position + len(view)
        while at < stop:
            chunk = at // self._chunk_bytes
            begin = chunk * self._chunk_bytes
            end = min(begin + self._chunk_bytes, self._nbytes)
            place = slice(chunk * DIGEST_BYTES, (chunk + 1) * DIGEST_BYTES)
            some = view[at - position : min(end, stop) - position]
            if not any(self._known[place]):
                if len(some) == end - begin:  # as nearly all are
                    self._found[place] = digest(some)
                else:
                    self._running.update(some)
                    if stop >= end:
                        self._found[place] = self._running.digest()
                        self._running.reset()
            at = min(end, stop)


class RollingDigest:
    """The digest of a stretch of the stream, of bytes that lie here and there in host memory.

    Bytes between them in the stream are zeros.
    """

    def __init__(self, begin: int) -> None:
        self._at = begin
        self._hash = RunningDigest()

    def add(self, positions: list[int], places: list[list[int]]) -> None:
        """Bytes at each (address, size) of `places`, at these positions; in the stream's order."""
        update = self._hash.update
        for position, (address, nbytes) in zip(positions, places, strict=True):
            if position > self._at:
                update(bytes(position - self._at))
            update((ctypes.c_ubyte * nbytes).from_address(address))
            self._at = position + nbytes

    def end(self, stop: int) -> bytes:
        if stop > self._at:
            self._hash.update(bytes(stop - self._at))
        return self._hash.digest()
