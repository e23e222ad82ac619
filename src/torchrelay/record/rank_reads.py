"""A receiver's reads of one live rank: images of its record, or boxes of them, in columns.

The bytes of the reads are a stream of their own, one read after the other, each at a multiple of
`ALIGN`. A read of all of an image has its bytes as they lie; one of a box has the elements of the
box in row-major order. Both sides work out the same chunks from the same reads.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

import msgspec
import numpy as np

from torchrelay.errors import ManifestError
from torchrelay.geometry.boxes import Box, Numbers
from torchrelay.geometry.chunks import MAX_CHUNK_BYTES, Chunks, cut
from torchrelay.record.checks.images import check_column
from torchrelay.record.dtypes import itemsize
from torchrelay.record.encoding import FAULTS, read_column
from torchrelay.record.manifest import MAX_LEAVES, MAX_STREAM_BYTES, Shape
from torchrelay.record.schema import Column, Record, pack_column, zeros_or

MAX_CHUNKS = 1 << 20  # of one peer's reads: a number is kept for each


class Reads(msgspec.Struct, frozen=True, omit_defaults=True):
    """`images` has the image of each read, `box_of` the box of it that is wanted: 0 is all of the
    image, n the `boxes[n - 1]`, whose offsets count from the box that the rank has."""

    images: Numbers
    chunk_bytes: int
    box_of: Column = None  # None: 0
    boxes: tuple[tuple[Shape, Shape], ...] = ()

    @property
    def numbers(self) -> Numbers:
        """The box of each read, by number."""
        return zeros_or(self.box_of, len(self.images))

    def cut(self) -> Iterator[tuple[int, Box]]:
        """The reads that want a box of their image, each with that box."""
        numbers = self.numbers
        for read in np.flatnonzero(numbers).tolist():
            yield read, self.boxes[int(numbers[read]) - 1]

    def layout(self, record: Record) -> Chunks:
        """The chunks of the stream of the reads, which are its images."""
        nbytes, numbers = record.box_bytes[self.images], self.numbers
        if self.boxes:
            cuts = np.flatnonzero(numbers)
            elements = np.array([prod(sizes) for _, sizes in self.boxes], np.int64)
            items = np.array([itemsize(kind.dtype) for kind in record.image_kinds], np.int64)
            kinds = record.image_kind[self.images[cuts]]
            nbytes[cuts] = elements[numbers[cuts] - 1] * items[kinds]
        devices = None if record.device_of is None else record.device_of[self.images][nbytes > 0]
        return Chunks(nbytes, cut(nbytes[nbytes > 0], self.chunk_bytes, devices))


_encoder = msgspec.msgpack.Encoder(enc_hook=pack_column)
_decoder = msgspec.msgpack.Decoder(Reads, dec_hook=read_column)


def encode_reads(reads: Reads) -> bytes:
    return _encoder.encode(reads)


def decode_reads(data: bytes, record: Record) -> Reads:
    """The reads that a peer asks for, checked against this rank's record, or `ManifestError`."""
    try:
        reads = _decoder.decode(data)
        _check(reads, record)
    except FAULTS as fault:
        raise ManifestError(f"not reads of a state: {fault}") from None
    return reads


def _check(reads: Reads, record: Record) -> None:
    count, boxes = len(reads.images), len(reads.boxes)
    if count > MAX_LEAVES:
        raise ManifestError(f"{count} reads, the cap is {MAX_LEAVES}")
    if not 0 < reads.chunk_bytes <= MAX_CHUNK_BYTES:
        raise ManifestError(f"chunks of {reads.chunk_bytes} bytes")
    check_column(reads.images, count, record.images, "images that are read")
    check_column(reads.box_of, count, boxes + 1, "boxes of reads")
    numbers = reads.numbers
    if np.count_nonzero(np.bincount(numbers, minlength=1)[1:]) != boxes:
        raise ManifestError("a box that no read wants")
    # Each box once for each kind of image that it is read of.
    pairs = np.unique(record.image_kind[reads.images] * (boxes + 1) + numbers)
    for kind, number in zip(*(part.tolist() for part in np.divmod(pairs, boxes + 1)), strict=True):
        if number:
            offsets, sizes = reads.boxes[number - 1]
            room = record.image_kinds[kind].boxes[0][1]  # of the box that is there
            if not 0 < len(room) == len(offsets) == len(sizes):
                raise ManifestError("a read of a box of other dimensions than its image")
            if any(at + size > most for at, size, most in zip(offsets, sizes, room, strict=True)):
                raise ManifestError("a read of a box that reaches out of its image")
    total = record.box_bytes[reads.images].sum(dtype=np.float64)
    if total > MAX_STREAM_BYTES:
        raise ManifestError(f"reads of more than the cap of {MAX_STREAM_BYTES} bytes")
    if total / reads.chunk_bytes + count > MAX_CHUNKS:
        raise ManifestError(f"reads in chunks of {reads.chunk_bytes} bytes, more than {MAX_CHUNKS}")
