"""Boxes that several ranks have written, joined into the record of one state. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from torchrelay.errors import ManifestError
from torchrelay.geometry.boxes import Numbers
from torchrelay.geometry.numbered import Numbered
from torchrelay.record.schema import ImageKind, Record, column_of, runs

_none: Numbers = np.zeros(0, np.int64)


def with_boxes(outlined: Record, names: Sequence[str], parts: Sequence[Record]) -> Record:
    """A record of outlines, whose images have these names, with the boxes, volumes and objects of
    all parts.

    The parts are valid, and name each of their images. `ManifestError` where they contradict the
    outlines about a tensor. Whether the boxes have every element once is the caller's to check.
    """
    known = {name: image for image, name in enumerate(names)}
    pieces: Numbered[ImageKind] = Numbered()  # how a part cuts its boxes of an image
    of_images, of_pieces, volumes, starts = [_none], [_none], [_none], [_none]
    objects, first = [], 0
    for part in parts:
        of_images.append(_images(part, known))
        numbers = pieces.numbers(part.image_kinds)
        of_pieces.append(numbers[part.image_kind])
        volumes.append(part.box_volumes + first)
        starts.append(part.box_starts)
        objects += [msgspec.structs.replace(o, volume=first + o.volume) for o in part.objects]
        first += len(part.volumes)
    images, which = np.concatenate(of_images), np.concatenate(of_pieces)
    counts = np.array([kind.count for kind in pieces.found], np.int64)[which]
    begins = np.cumsum(counts) - counts
    order = np.argsort(images, kind="stable")
    ends = np.cumsum(np.bincount(images, minlength=len(names))).tolist()

    wholes: Numbered[ImageKind] = Numbered()
    # By outlined kind, and pieces in order.
    made: dict[tuple[int, tuple[int, ...]], tuple[int, Numbers]] = {}
    of_order = which[order].tolist()
    boxes = runs(begins[order], counts[order])  # those of each image as they came
    kinds, at, done = [], 0, 0
    for image, (number, end) in enumerate(zip(outlined.image_kind.tolist(), ends, strict=True)):
        key = number, tuple(of_order[at:end])
        at = end
        if key not in made:
            several = [pieces.found[piece] for piece in key[1]]
            kind, places = _together(outlined.image_kinds[number], several, names[image])
            made[key] = wholes.number(kind), places
        whole, places = made[key]
        kinds.append(whole)
        if len(places) > 1:
            boxes[done : done + len(places)] = boxes[done : done + len(places)][places]
        done += len(places)
    return msgspec.structs.replace(
        outlined,
        image_kinds=tuple(wholes.found),
        kind_of=column_of(np.array(kinds, np.int64)),
        volumes=tuple([volume for part in parts for volume in part.volumes]),
        volume_of=column_of(np.concatenate(volumes)[boxes]),
        starts=np.concatenate(starts)[boxes] if len(boxes) else None,
        objects=tuple(objects),
    )


def _images(part: Record, known: dict[str, int]) -> Numbers:
    """The image of the whole that each image of a part is."""
    if len(part.names) != part.images:
        raise ManifestError(f"{part.images} images, {len(part.names)} of them with a name")
    try:
        return np.array([known[name] for _, name in part.names], np.int64)
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
