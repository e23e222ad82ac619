"""A part stream: the packed bytes of runs as part chunks, each with its digest. Pure.

    magic                                   8 bytes, with the version
    kind, length, digest, payload           for each part chunk, in the order of the request

The request says which chunks come, so the stream has no end mark. `length` is that of the payload,
and `digest` that of a chunk (`memory.digest`) of the bytes that the payload decodes to.

A chunk holds elements of one size. It is encoded as the smallest of four kinds:

- `WHOLE`: the bytes of the chunk.
- `SAME`: nothing; no element has changed.
- `GAPS`: three uint32: the number of changed elements, the number of wide gaps, and the bytes of a
  narrow gap (1 or 2). Then a narrow gap for each changed element: how many elements before it are
  unchanged. The largest narrow number stands for a wide gap; those follow as uint32. Then the
  values of the changed elements.
- `BITMAP`: a bit for each element, the lowest bit of a byte first. Then the values.

All numbers are little-endian. Values have the bytes that they have in the chunk.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from torchrelay.errors import DigestError, RemoteProtocolError, UsageError
from torchrelay.memory.digest import digest
from torchrelay.parts.bitmaps import ChangedElements, Positions, VolumeBitmap, element_dtype
from torchrelay.parts.runs import PART_BYTES, Bytes, PartRuns

WHOLE, SAME, GAPS, BITMAP = range(4)

_GAPS = struct.Struct("<III")
_NARROW: dict[int, np.dtype[Any]] = {1: np.dtype(np.uint8), 2: np.dtype("<u2")}
_WIDE = np.dtype("<u4")
MAX_ELEMENTS = 1 << 32  # a wide gap has four bytes

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
        if digest(chunk.data) != self.digest:
            raise DigestError("a part chunk has other bytes than were sent")


class WantedPart(NamedTuple):
    """A volume's bytes, the runs of it that are wanted, and the elements of the volume that changed
    since the base of the reader; None where it has none, or that is not known. `same`: the base is
    the same snapshot, so that digests alone are sent."""

    volume: Bytes
    runs: PartRuns
    changes: VolumeBitmap | None = None
    same: bool = False

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
            made = digest(packed.data)
            kind, payload = SAME, list[memoryview]()
            if not part.same:
                kind, payload = encode(packed, part.changed(begin, end, itemsize), itemsize)
            yield ChunkHead(kind, sum(map(len, payload)), made).encoded()
            yield from filter(len, payload)


# A chunk.


def encode(
    new: Bytes, changes: ChangedElements | None, itemsize: int
) -> tuple[int, list[memoryview]]:
    """The kind of a chunk and its payload, in pieces of bytes. `changes` says which elements are
    other ones than in the base; without them the chunk is sent whole. The payload of a whole chunk
    is the memory of `new`."""
    if changes is None:
        return WHOLE, [new.data]
    elements = new.view(element_dtype(itemsize))
    if changes.elements != len(elements) or len(elements) >= MAX_ELEMENTS:
        raise UsageError(f"changes of {changes.elements} elements for a chunk of {len(elements)}")
    count, bitmap = changes.count, changes.bits.nbytes
    if count == 0:
        return SAME, []
    if min(count, bitmap) + count * itemsize >= new.nbytes:  # gaps take a byte each, or more
        return WHOLE, [new.data]
    at = changes.positions()
    kind, places = BITMAP, [changes.bits.data]
    if count < bitmap:
        gaps = _gaps(at)
        if sum(piece.nbytes for piece in gaps) < bitmap:
            kind, places = GAPS, gaps
    if sum(piece.nbytes for piece in places) + count * itemsize >= new.nbytes:
        return WHOLE, [new.data]
    return kind, [*places, elements[at].view(np.uint8).data]


def _gaps(at: Positions) -> list[memoryview]:
    """Positions as gaps, with the narrow number that makes them smallest."""
    gaps = np.empty_like(at)
    gaps[0] = at[0]
    np.subtract(at[1:], at[:-1], out=gaps[1:])
    gaps[1:] -= 1
    size, wide = 1, np.flatnonzero(gaps >= 0xFF)
    if _WIDE.itemsize * len(wide) > len(at):  # then two bytes for each take less
        size, wide = 2, np.flatnonzero(gaps >= 0xFFFF)
    escaped = gaps[wide].astype(_WIDE)
    gaps[wide] = np.iinfo(_NARROW[size]).max
    head = _GAPS.pack(len(at), len(escaped), size)
    narrow = gaps.astype(_NARROW[size])
    return [memoryview(head), narrow.view(np.uint8).data, escaped.view(np.uint8).data]


def decode(kind: int, payload: memoryview, into: Bytes, itemsize: int) -> None:
    """Change a chunk, which holds the bytes of the base, to the new ones. `RemoteProtocolError` if
    the payload is not one for such a chunk: then `into` is as it was."""
    data = np.frombuffer(payload, np.uint8)
    if itemsize < 1 or len(into) % itemsize:
        raise RemoteProtocolError(f"a chunk of {len(into)} bytes has elements of {itemsize}")
    if kind == WHOLE:
        _check(len(data) == len(into), "its bytes are not as many as the chunk has")
        into[:] = data
    elif kind == SAME:
        _check(not len(data), "an unchanged chunk has bytes")
    elif kind in (GAPS, BITMAP):
        elements = into.view(element_dtype(itemsize))
        read = _read_gaps if kind == GAPS else _read_bitmap
        at, rest = read(data, len(elements))
        _check(len(rest) == len(at) * itemsize, "its values are not as many as its positions")
        elements[at] = rest.view(elements.dtype)
    else:
        raise RemoteProtocolError(f"a part chunk of the unknown kind {kind}")


def _read_gaps(data: Bytes, elements: int) -> tuple[Positions, Bytes]:
    """The positions at the beginning of a payload, ascending and inside the chunk; and the rest."""
    _check(len(data) >= _GAPS.size, "it ends in its head")
    count, wide, size = _GAPS.unpack_from(data.data)
    _check(size in _NARROW, "its gaps have an unknown size")
    _check(wide <= count <= elements, "it has more changes than elements")
    narrow_end = _GAPS.size + count * size
    wide_end = narrow_end + wide * _WIDE.itemsize
    _check(wide_end <= len(data), "it ends in its gaps")
    narrow = data[_GAPS.size : narrow_end].view(_NARROW[size])
    escaped = np.flatnonzero(narrow == np.iinfo(narrow.dtype).max)
    _check(len(escaped) == wide, "its wide gaps are not as many as it says")
    # Sums of 2^32 numbers below 2^32 are positive in 64 bits, so positions ascend.
    at = narrow.astype(np.int64)
    at[escaped] = data[narrow_end:wide_end].view(_WIDE)
    at += 1
    np.cumsum(at, out=at)
    at -= 1
    _check(not count or int(at[-1]) < elements, "a change lies outside the chunk")
    return at, data[wide_end:]


def _read_bitmap(data: Bytes, elements: int) -> tuple[Positions, Bytes]:
    nbytes = -(-elements // 8)
    _check(nbytes <= len(data), "it ends in its bitmap")
    set_bits = np.unpackbits(data[:nbytes], bitorder="little").view(np.bool_)
    at = np.flatnonzero(set_bits)
    _check(not len(at) or int(at[-1]) < elements, "a change lies outside the chunk")
    return at, data[nbytes:]


def _check(holds: bool, why: str) -> None:
    if not holds:
        raise RemoteProtocolError(f"a part chunk is malformed: {why}")
