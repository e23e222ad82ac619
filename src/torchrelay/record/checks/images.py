"""Whether images are cut into boxes that lie inside of them, and boxes lie inside of volumes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import prod
from operator import lt
from typing import Literal

import numpy as np

from torchrelay.errors import ManifestError
from torchrelay.geometry import DIGEST_BYTES
from torchrelay.geometry.boxes import Comparisons, Numbers, is_grid
from torchrelay.geometry.chunks import ALIGN, MAX_CHUNK_BYTES
from torchrelay.geometry.strides import extent, packed
from torchrelay.record import manifest as m
from torchrelay.record.dtypes import itemsize
from torchrelay.record.schema import Column, ImageKind, Record, VolumeRecord

Mode = Literal["stream", "part", "whole"]
FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
FILE_ALIGN = 8  # of a box's first byte in a file, or its item size if that is less


def check_column(column: Column, count: int, stop: int, what: str) -> None:
    """Raise `ManifestError` unless a column has `count` numbers below `stop`; None has zeros."""
    if column is None:
        if count and stop < 1:
            raise ManifestError(f"{what}: there is none")
    elif len(column) != count:
        raise ManifestError(f"{what}: {len(column)} numbers for {count}")
    elif count and int(column.max()) >= stop:
        raise ManifestError(f"{what}: {int(column.max())} of {stop}")


def check_ascending(numbers: Sequence[int], stop: int, what: str) -> None:
    if numbers and not (numbers[-1] < stop and all(map(lt, numbers, numbers[1:]))):
        raise ManifestError(f"{what}: out of order, or not from 0 to {stop - 1}")


def check_images(record: Record, mode: Mode) -> Numbers:
    """Raise `ManifestError` unless images, boxes and volumes agree. `images` is a number that may
    be allocated for. The bytes of an image of each kind, all of it."""
    sizes = _kind_bytes(record.image_kinds)
    if mode != "stream" and not sizes.all():
        raise ManifestError("an image at rest without elements")
    comparisons = Comparisons() if mode == "whole" else None
    for kind in record.image_kinds:
        if not kind.is_whole or kind.strides is not None:
            check_kind(kind, mode, comparisons)
    check_column(record.kind_of, record.images, len(sizes), "kinds of images")
    check_column(record.device_of, record.images, len(record.devices), "devices of images")
    if mode == "stream":
        _check_stream(record)
    else:
        check_files(record.volumes, hashed=mode == "whole")
        _check_places(record)
    return sizes


def _kind_bytes(kinds: Sequence[ImageKind]) -> Numbers:
    """The bytes of an image of each kind, all of it; `ManifestError` for one of too many."""
    # Without zeros: strides of an image that has no elements are in range too.
    most = [prod(filter(None, kind.shape)) * itemsize(kind.dtype) for kind in kinds]
    if max(most, default=0) > m.MAX_SIZE // 2:
        raise ManifestError("an image with too many elements")
    found = [0 if 0 in kind.shape else size for kind, size in zip(kinds, most, strict=True)]
    return np.array(found, np.int64)


def check_kind(kind: ImageKind, mode: Mode, comparisons: Comparisons | None) -> None:
    """Raise `ManifestError` unless boxes, and strides, are those of an image whose shape is in
    range. With `comparisons`, they have each element once."""
    shape, count = kind.shape, kind.count
    if kind.offsets is None or kind.sizes is None:
        fits = count == 1 or (count == 0 and mode == "part")
        if not fits or kind.offsets is not kind.sizes:
            raise ManifestError(f"an image of shape {shape[:8]} in {count} boxes")
    else:
        if count < 1 or not shape or (mode == "stream" and count > 1):
            raise ManifestError(f"an image of shape {shape[:8]} in {count} boxes")
        if not len(kind.offsets) == len(kind.sizes) == count * len(shape):
            raise ManifestError("a box has other dimensions than its image")
        offsets, sizes = kind.columns
        # Numbers larger than the shape cannot be added without a thought.
        lengths = np.array(shape, np.int64)
        if not ((sizes <= lengths) & (offsets <= lengths - sizes)).all():
            raise ManifestError(f"a box reaches out of its image of shape {shape[:8]}")
        if comparisons is not None and not (sizes.all() and is_grid(offsets, sizes, shape)):
            covered = sum(prod(sizes) for _, sizes in kind.boxes)
            if covered != prod(shape) or comparisons.overlap(kind.boxes):
                raise ManifestError(f"boxes do not cover an image of shape {shape[:8]} once")
    if kind.strides is not None:
        _check_layout(kind.boxes[0][1] if count == 1 else shape, kind.strides)


def _check_layout(shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
    """Strides are those of a tensor without holes: they take no more memory than its elements."""
    if len(strides) == len(shape):
        layout = packed(shape, strides)
        if layout is not None and (
            0 in shape or layout.numel == extent(shape, strides) == prod(shape)
        ):
            return
    raise ManifestError(f"strides {strides[:8]} of an image of shape {shape[:8]}")


def _check_stream(record: Record) -> None:
    """Boxes stand one after the other in the one volume, and fill it."""
    (volume,) = record.volumes
    # As a float, which does not overflow: what is far too much, and then exactly.
    if float(record.box_bytes.sum(dtype=np.float64)) > m.MAX_STREAM_BYTES:
        raise ManifestError(f"a stream of more than the cap of {m.MAX_STREAM_BYTES} bytes")
    total = int(((record.box_bytes + (ALIGN - 1)) & -ALIGN).sum())
    if volume.name or volume.chunk_bytes or volume.digests or volume.nbytes != total:
        raise ManifestError(f"a volume of {volume.nbytes} bytes for a stream of {total}")
    cuts = volume.cuts if volume.cuts is not None else np.zeros(0, np.int64)
    if len(cuts) and not 0 < int(cuts.min()) <= int(cuts.max()) <= MAX_CHUNK_BYTES:
        raise ManifestError("a chunk of a size out of range")
    if (cuts % ALIGN).any() or int(cuts.sum()) != total:
        raise ManifestError(f"chunks of {int(cuts.sum())} bytes for a stream of {total}")
    if record.storage_of is not None:
        check_column(record.storage_of, record.images, record.images, "storages of images")
        steps = np.diff(record.storage_of, prepend=0)
        if steps[:1].any() or not ((steps == 0) | (steps == 1)).all():
            raise ManifestError("storages of images are out of order")


def check_files(volumes: Sequence[VolumeRecord], *, hashed: bool) -> None:
    """Raise `ManifestError` unless these can be files of one step, each with its digests; or
    without, where they need not be `hashed`."""
    names = set()
    for volume in volumes:
        if not FILE_NAME.fullmatch(volume.name) or volume.name in names:
            raise ManifestError(f"file name {volume.name[:80]!r}")
        names.add(volume.name)
        if volume.nbytes < 1 or volume.chunk_bytes < 1 or volume.cuts is not None:
            raise ManifestError(
                f"{volume.name}: {volume.nbytes} bytes in chunks of {volume.chunk_bytes}"
            )
        if volume.chunk_bytes % FILE_ALIGN and volume.chunks > 1:
            raise ManifestError(f"{volume.name}: chunks of {volume.chunk_bytes} bytes cut elements")
        if len(volume.digests) != DIGEST_BYTES * volume.chunks and (hashed or volume.digests):
            raise ManifestError(f"{volume.name}: {len(volume.digests)} bytes of digests")


def _check_places(record: Record) -> None:
    """Every box lies in its file. All boxes of all images at once."""
    boxes = record.boxes
    if boxes != (0 if record.starts is None else len(record.starts)):
        raise ManifestError(f"{boxes} boxes, and not as many places of them")
    check_column(record.volume_of, boxes, len(record.volumes), "volumes of boxes")
    if record.storage_of is not None:
        raise ManifestError("storages of images at rest")
    if not boxes:
        return
    nbytes, starts = record.box_bytes, record.box_starts
    room = np.array([volume.nbytes for volume in record.volumes], np.int64)[record.box_volumes]
    step = [min(itemsize(kind.dtype), FILE_ALIGN) for kind in record.image_kinds]
    steps = np.repeat(np.array(step, np.int64)[record.image_kind], np.diff(record.first_boxes))
    wrong = (starts > room - nbytes) | (starts % steps != 0)
    if wrong.any():
        box = int(np.flatnonzero(wrong)[0])
        image = int(np.searchsorted(record.first_boxes, box, "right")) - 1
        raise ManifestError(
            f"image {image}: {nbytes[box]} bytes from byte {starts[box]} on are not in volume "
            f"{record.box_volumes[box]}, or are elements at odd bytes of it"
        )
