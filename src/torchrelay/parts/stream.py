"""A part stream: the packed bytes of runs as part chunks, each with its digest. Pure.

    magic                                   8 bytes, with the version
    kind, length, digest, payload           for each part chunk, in the order of the request

The request says which chunks come, so the stream has no end mark. `length` is that of the payload,
`digest` the XXH3-128 of the bytes that the payload decodes to.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
import xxhash

from torchrelay.errors import DigestError, RemoteProtocolError
from torchrelay.parts.runs import PART_BYTES, Bytes, PartRuns

MAGIC = b"TRPARTS1"
WHOLE = 0  # the kind of a chunk that is sent as it is
MAX_PAYLOAD = PART_BYTES + (PART_BYTES >> 3)  # no encoding is worth more than the bytes themselves
_HEAD = struct.Struct("<BI16s")
HEAD_BYTES = _HEAD.size


class ChunkHead(NamedTuple):
    """What stands before the payload of a part chunk."""

    kind: int
    nbytes: int
    digest: bytes

    def encoded(self) -> bytes:
        return _HEAD.pack(*self)

    @classmethod
    def decoded(cls, data: bytes) -> ChunkHead:
        """`RemoteProtocolError` for a payload that no chunk has."""
        found = cls(*_HEAD.unpack(data))
        if found.nbytes > MAX_PAYLOAD:
            raise RemoteProtocolError(f"a part chunk of {found.nbytes} bytes")
        return found


class WantedPart(NamedTuple):
    """A volume's bytes, and the runs of it that are wanted."""

    volume: Bytes
    runs: PartRuns


def part_stream(wanted: Iterable[WantedPart]) -> Iterator[bytes | memoryview]:
    """The stream, piece by piece. Send each piece before asking for the next one: all of
    them are in one buffer."""
    yield MAGIC
    buffer = np.empty(PART_BYTES, np.uint8)
    for volume, runs in wanted:
        for begin, end, _ in runs.parts:
            packed = buffer[: end - begin]
            runs.pack(volume, begin, end, packed)
            digest = xxhash.xxh3_128_digest(packed.data)
            yield ChunkHead(WHOLE, len(packed), digest).encoded()
            yield packed.data


def accept(head: ChunkHead, payload: memoryview, into: Bytes) -> None:
    """Make `into`, which holds the bytes of the base, those of a chunk. `DigestError` where it has
    other bytes afterwards, `RemoteProtocolError` for a payload that means nothing."""
    if head.kind != WHOLE or len(payload) != len(into):
        raise RemoteProtocolError(f"a part chunk of kind {head.kind} with {len(payload)} bytes")
    into[:] = np.frombuffer(payload, np.uint8)
    check_digest(head, into)


def check_digest(head: ChunkHead, chunk: Bytes) -> None:
    if xxhash.xxh3_128_digest(chunk.data) != head.digest:
        raise DigestError("a part chunk has other bytes than were sent")
