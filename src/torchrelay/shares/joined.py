"""Boxes that several ranks have written, joined into the record of one state. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from torchrelay.errors import ManifestError
from torchrelay.geometry.boxes import Numbers
from torchrelay.geometry.numbered import Numbered
from torchrelay.record.schema import ImageKind, ObjectBytes, Record, column_of, runs

_none: Numbers = np.zeros(0, np.int64)


class _Pieces(NamedTuple):
    """What all ranks have written, in order of arrival: a *piece* is what one rank has of one
    image, which is a row of `images` and `kinds`; its boxes are some rows of `volumes` and
    `starts`."""

    images: Numbers  # of each piece
    kinds: Numbers  # of each piece: its number in `distinct`
    distinct: list[ImageKind]  # how ranks cut their boxes of an image
    volumes: Numbers  # of each box
    starts: Numbers  # of each box


def with_boxes(outlined: Record, names: Sequence[str], parts: Sequence[Record]) -> Record:
    """A record of outlines, whose images have these names, with the boxes, volumes and objects of
    all parts.

    The parts are valid, and name each of their images. `ManifestError` where they contradict the
    outlines about a tensor. Whether the boxes have every element once is the caller's to check.

    Two ranks have rows 0-1 and 2-3 of a matrix `w`, and rank 1 has written a bias `b`. The
    outlines have `b` as image 0 and `w` as image 1. Each rank has one volume:

        arrived        image   volume   start         joined        image   volume   start
        rank 0: w 2-3  1       0        64            b             0       1        96
        rank 1: b      0       1        96            w rows 0-1    1       1        64
        rank 1: w 0-1  1       1        64            w rows 2-3    1       0        64

    Pieces are ordered by image, and the boxes of each image by their offsets.
    """
    written = _gathered(parts, {name: image for image, name in enumerate(names)})
    counts = np.array([kind.count for kind in written.distinct], np.int64)[written.kinds]
    first_boxes = np.cumsum(counts) - counts
    by_image = np.argsort(written.images, kind="stable")
    boxes = runs(first_boxes[by_image], counts[by_image])  # of each image in order of arrival
    kinds_by_image = written.kinds[by_image].tolist()
    ends = np.cumsum(np.bincount(written.images, minlength=len(names))).tolist()

    joined: Numbered[ImageKind] = Numbered()
    # Most images are alike: by the kind in the outlines, and those of the pieces in order.
    known: dict[tuple[int, tuple[int, ...]], tuple[int, Numbers]] = {}
    kind_of, piece, box = [], 0, 0
    for image, (outlined_kind, end) in enumerate(
        zip(outlined.image_kind.tolist(), ends, strict=True)
    ):
        key = outlined_kind, tuple(kinds_by_image[piece:end])
        if key not in known:
            several = [written.distinct[number] for number in key[1]]
            kind, order = _together(outlined.image_kinds[outlined_kind], several, names[image])
            known[key] = joined.number(kind), order
        number, order = known[key]
        kind_of.append(number)
        if len(order) > 1:
            mine = boxes[box : box + len(order)]
            boxes[box : box + len(order)] = mine[order]
        piece, box = end, box + len(order)
    return msgspec.structs.replace(
        outlined,
        image_kinds=tuple(joined.found),
        kind_of=column_of(np.array(kind_of, np.int64)),
        volumes=tuple([volume for part in parts for volume in part.volumes]),
        volume_of=column_of(written.volumes[boxes]),
        starts=written.starts[boxes] if len(boxes) else None,
        objects=_objects(parts),
    )


def _gathered(parts: Sequence[Record], image_of: Mapping[str, int]) -> _Pieces:
    distinct: Numbered[ImageKind] = Numbered()
    columns: list[tuple[Numbers, Numbers, Numbers, Numbers]] = [(_none, _none, _none, _none)]
    first_volume = 0
    for part in parts:
        kinds = distinct.numbers(part.image_kinds)[part.image_kind]
        volumes = part.box_volumes + first_volume
        columns.append((_images(part, image_of), kinds, volumes, part.box_starts))
        first_volume += len(part.volumes)
    images, of_pieces, of_boxes, starts = map(np.concatenate, zip(*columns, strict=True))
    return _Pieces(images, of_pieces, distinct.found, of_boxes, starts)


def _objects(parts: Sequence[Record]) -> tuple[ObjectBytes, ...]:
    found, first_volume = [], 0
    for part in parts:
        for one in part.objects:
            found.append(msgspec.structs.replace(one, volume=first_volume + one.volume))
        first_volume += len(part.volumes)
    return tuple(found)


def _images(part: Record, image_of: Mapping[str, int]) -> Numbers:
    """The image of the whole that each image of a part is."""
    if len(part.names) != part.images:
        raise ManifestError(f"{part.images} images, {len(part.names)} of them with a name")
    try:
        return np.array([image_of[name] for _, name in part.names], np.int64)
    except KeyError as fault:
        raise ManifestError(
            "a tensor that was written is in no rank's state", path=fault.args[0]
        ) from None


def _together(
    outlined: ImageKind, pieces: Sequence[ImageKind], name: str
) -> tuple[ImageKind, Numbers]:
    """The boxes of all pieces in the order of their offsets, and where each was before."""
    if not pieces:
        return outlined.without_boxes, _none
    for piece in pieces:
        if (piece.dtype, piece.shape) != (outlined.dtype, outlined.shape):
            raise ManifestError(
                f"one rank has it as {outlined.dtype} of shape {outlined.shape}, another as "
                f"{piece.dtype} of shape {piece.shape}",
                path=name,
            )
    shape, strides = outlined.shape, outlined.strides
    offsets, sizes = (np.concatenate(one) for one in zip(*(p.columns for p in pieces), strict=True))
    order: Numbers = np.arange(len(offsets))
    if len(order) == 1 and tuple(sizes[0].tolist()) == shape:
        return ImageKind(outlined.dtype, shape, strides), order
    if shape:
        order = np.lexsort(offsets.T[::-1])
    columns = (column[order].reshape(-1) for column in (offsets, sizes))
    return ImageKind(outlined.dtype, shape, strides, len(order), *columns), order
