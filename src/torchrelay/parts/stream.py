"""A part stream: the packed bytes of runs as part chunks, each with its digest. Pure.

    magic                                   8 bytes, with the version
    kind, length, digest, payload           for each part chunk, in the order of the request

The request says which chunks come, so the stream has no end mark. `kind` and payload are those of
`parts.encoding`, `length` is that of the payload, and `digest` the XXH3-128 of the bytes that the
payload decodes to.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
import xxhash

from torchrelay.errors import DigestError, RemoteProtocolError
from torchrelay.parts.bitmaps import ChangedElements, VolumeBitmap
from torchrelay.parts.encoding import encode
from torchrelay.parts.runs import PART_BYTES, Bytes, PartRuns

MAGIC = b"TRPARTS1"
_HEAD = struct.Struct("<BI16s")
HEAD_BYTES = _HEAD.size


class ChunkHead(NamedTuple):
    """The header of a part chunk."""

    kind: int
    nbytes: int
    digest: bytes

    def encoded(self) -> bytes:
        return _HEAD.pack(*self)

    @classmethod
    def decoded(cls, data: bytes) -> ChunkHead:
        """`RemoteProtocolError` for a payload that no chunk has."""
        found = cls(*_HEAD.unpack(data))
        if found.nbytes > PART_BYTES:  # a chunk is sent whole where that is shorter
            raise RemoteProtocolError(f"a part chunk of {found.nbytes} bytes")
        return found

    def check(self, chunk: Bytes) -> None:
        """`DigestError` unless a chunk has the bytes that were sent."""
        if xxhash.xxh3_128_digest(chunk.data) != self.digest:
            raise DigestError("a part chunk has other bytes than were sent")


class WantedPart(NamedTuple):
    """A volume's bytes, the runs of it that are wanted, and the elements of the volume that changed
    since the base of the reader; None where it has none, or that is not known."""

    volume: Bytes
    runs: PartRuns
    changes: VolumeBitmap | None = None

    def changed(self, begin: int, end: int, itemsize: int) -> ChangedElements | None:
        """Which elements of the packed bytes [begin, end) changed; None where nothing is known."""
        if self.changes is None:
            return None
        found = []
        for run in self.runs.packed_between(begin, end):
            one = self.changes.gather(
                run.start, run.nbytes, itemsize, stride=run.stride, count=run.rows
            )
            if one is None:
                return None
            found.append(one)
        return ChangedElements.joined(found)


def part_stream(wanted: Iterable[WantedPart]) -> Iterator[bytes | memoryview]:
    """The stream, piece by piece. Send each piece before asking for the next one: all of
    them are in one buffer."""
    yield MAGIC
    buffer = np.empty(PART_BYTES, np.uint8)
    for part in wanted:
        for begin, end, itemsize in part.runs.parts:
            packed = buffer[: end - begin]
            part.runs.pack(part.volume, begin, end, packed)
            digest = xxhash.xxh3_128_digest(packed.data)
            kind, payload = encode(packed, part.changed(begin, end, itemsize), itemsize)
            yield ChunkHead(kind, sum(map(len, payload)), digest).encoded()
            yield from filter(len, payload)
