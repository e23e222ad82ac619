"""A receiver's reads of one live rank: images of its record, or boxes of them, in columns.

The bytes of the reads are a stream of their own, one read after the other, each at a multiple of
`ALIGN`. A read of all of an image has its bytes as they lie; one of a box has the elements of the
box in row-major order. Both sides work out the same chunks from the same reads.
"""

from __future__ import annotations

from functools import cached_property

import msgspec
import numpy as np

from torchrelay.errors import ManifestError
from torchrelay.geometry.boxes import Box, Numbers
from torchrelay.geometry.chunks import MAX_CHUNK_BYTES, Chunks, cut
from torchrelay.record.checks.images import check_column
from torchrelay.record.dtypes import itemsize
from torchrelay.record.encoding import FAULTS, read_column
from torchrelay.record.manifest import MAX_LEAVES, MAX_STREAM_BYTES
from torchrelay.record.schema import Column, Record, pack_column


class Reads(msgspec.Struct, frozen=True, omit_defaults=True, dict=True):
    """`images` has the image of each read. `cut` has the reads that want a box of their image;
    `offsets` and `sizes` have a number for each dimension of each of those, counted from the box
    that the rank has."""

    images: Numbers
    chunk_bytes: int
    cut: Column = None  # ascending; None: every read wants all of its image
    offsets: Column = None
    sizes: Column = None

    @cached_property
    def cut_reads(self) -> Numbers:
        return np.zeros(0, np.int64) if self.cut is None else self.cut

    def boxes(self, record: Record) -> list[Box]:
        """The box that each of the cut reads wants. The reads are valid for the record."""
        if self.offsets is None or self.sizes is None:
            return []
        found, at = [], 0
        offsets, sizes = self.offsets.tolist(), self.sizes.tolist()
        for dims in _dims(record)[record.image_kind[self.images[self.cut_reads]]].tolist():
            found.append((tuple(offsets[at : at + dims]), tuple(sizes[at : at + dims])))
            at += dims
        return found

    def layout(self, record: Record) -> Chunks:
        """The chunks of the stream of the reads, which are its images."""
        nbytes = record.box_bytes[self.images]
        if self.sizes is not None:
            kinds = record.image_kind[self.images[self.cut_reads]]
            counts = _dims(record)[kinds]
            items = np.array([itemsize(kind.dtype) for kind in record.image_kinds], np.int64)
            starts = np.cumsum(counts) - counts
            nbytes[self.cut_reads] = np.multiply.reduceat(self.sizes, starts) * items[kinds]
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


def _dims(record: Record) -> Numbers:
    """The dimensions of each kind of image."""
    return np.array([len(kind.shape) for kind in record.image_kinds], np.int64)


def _check(reads: Reads, record: Record) -> None:
    count = len(reads.images)
    if count > MAX_LEAVES:
        raise ManifestError(f"{count} reads, the cap is {MAX_LEAVES}")
    if not 0 < reads.chunk_bytes <= MAX_CHUNK_BYTES:
        raise ManifestError(f"chunks of {reads.chunk_bytes} bytes")
    check_column(reads.images, count, record.images, "images that are read")
    some = reads.cut_reads
    check_column(some, len(some), count, "reads of boxes")
    if (some[1:] <= some[:-1]).any():
        raise ManifestError("reads of boxes are out of order")
    kinds = record.image_kind[reads.images[some]]
    counts = _dims(record)[kinds]
    for column in (reads.offsets, reads.sizes):
        if (0 if column is None else len(column)) != int(counts.sum()):
            raise ManifestError("a read of a box of other dimensions than its image")
    if not counts.all():
        raise ManifestError("a read of a box of an image without dimensions")
    if len(some):
        assert reads.offsets is not None and reads.sizes is not None
        lengths = [kind.columns[1][0] for kind in record.image_kinds]  # of the box that is there
        room = np.concatenate([lengths[kind] for kind in kinds.tolist()])
        if ((reads.sizes > room) | (reads.offsets > room - reads.sizes)).any():
            raise ManifestError("a read of a box that reaches out of its image")
    total = record.box_bytes[reads.images].sum(dtype=np.float64)
    if total > MAX_STREAM_BYTES:
        raise ManifestError(f"reads of more than the cap of {MAX_STREAM_BYTES} bytes")
