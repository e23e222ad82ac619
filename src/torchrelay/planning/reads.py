"""The reads that fill the images of a share from boxes that exist, in columns. Pure.

A box that exists lies in a volume of a step, or in the memory of one or several live ranks. Images
that want one box of what is cut alike are planned together: most states have few kinds of tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np

from torchrelay.geometry.boxes import Box, Numbers, run_of, shared, within
from torchrelay.planning.catalog import RankShare
from torchrelay.record.dtypes import itemsize
from torchrelay.record.schema import ImageKind, Record, runs

SCATTERED = -1  # in place of a byte of an array: the elements are not one run of it


class Cut(NamedTuple):
    """A part of `box`, which exists, and the part `to` of an image that it fills; both are counted
    from the corner of what they are parts of."""

    box: Box
    part: Box
    to: Box


class Overlap(NamedTuple):
    """The elements that a box that exists and an image have in common: the bytes in all, and from
    which byte of the box and of the image on they lie there, or `SCATTERED`."""

    nbytes: int
    start: int
    at: int
    cut: Cut

    @classmethod
    def of(cls, kind: ImageKind, box: Box, strides: tuple[int, ...] | None) -> Overlap | None:
        """None where the box has no element of an image of this kind. `strides` are those of the
        elements of the box, where they do not lie row-major."""
        wanted = kind.boxes[0]
        both = shared(box, wanted)
        if both is None:
            return None
        cut = Cut(box, (within(both, box), both[1]), (within(both, wanted), both[1]))
        nbytes, size = prod(both[1]) * itemsize(kind.dtype), itemsize(kind.dtype)
        if box == wanted and strides == kind.strides:
            return cls(nbytes, 0, 0, cut)
        start, at = run_of(cut.part, box[1]), run_of(cut.to, wanted[1])
        return cls(
            nbytes,
            SCATTERED if start is None or strides is not None else start * size,
            SCATTERED if at is None or kind.strides is not None else at * size,
            cut,
        )


class BoxReads(NamedTuple):
    """Reads in columns: the box that is read (a row of those that exist) and the image of the share
    that takes it; see `Overlap` for the others. `cut` is a number in `cuts`."""

    boxes: Numbers
    share: Numbers
    nbytes: Numbers
    start: Numbers
    at: Numbers
    cut: Numbers
    cuts: Sequence[Cut]

    def some(self, rows: Any) -> BoxReads:
        return BoxReads(
            boxes=self.boxes[rows],
            share=self.share[rows],
            nbytes=self.nbytes[rows],
            start=self.start[rows],
            at=self.at[rows],
            cut=self.cut[rows],
            cuts=self.cuts,
        )


class ReadTable:
    """Reads that are being planned."""

    def __init__(self) -> None:
        no: Numbers = np.zeros(0, np.int64)
        self._columns: list[Sequence[Numbers]] = [[no] * 6]
        self._cuts: list[Cut] = []

    def add(self, boxes: Numbers, share: Numbers, overlap: Overlap) -> None:
        """Read what boxes have of images, one of each."""
        found = overlap.nbytes, overlap.start, overlap.at, len(self._cuts)
        self._columns.append(np.broadcast_arrays(boxes, share, *found))
        self._cuts.append(overlap.cut)

    def reads(self) -> BoxReads:
        """All of them."""
        columns = (np.concatenate(some) for some in zip(*self._columns, strict=True))
        boxes, share, nbytes, start, at, cut = columns
        return BoxReads(boxes, share, nbytes, start, at, cut, self._cuts)


def stored_reads(record: Record, share: RankShare) -> BoxReads:
    """The reads of a step at rest that fill all images of a share of it, in their order."""
    table, wanted = ReadTable(), share.record
    kinds = record.image_kind[share.sources], wanted.image_kind
    for images in equal_rows(np.stack(kinds, axis=1)):
        there, here = (int(kind[images[0]]) for kind in kinds)
        first = record.first_boxes[share.sources[images]]
        for number in record.image_kinds[there].candidates(wanted.image_kinds[here].boxes[0]):
            box = record.image_kinds[there].boxes[number]
            overlap = Overlap.of(wanted.image_kinds[here], box, None)
            if overlap is not None:
                table.add(first + number, images, overlap)
    found = table.reads()
    return found.some(np.argsort(found.share, kind="stable"))


def equal_rows(keys: Numbers) -> list[Numbers]:
    """The rows of a table that are equal, together."""
    if not len(keys) or (keys == keys[0]).all():
        return [np.arange(len(keys))] if len(keys) else []
    _, inverse, counts = np.unique(keys, axis=0, return_inverse=True, return_counts=True)
    order = np.argsort(inverse.reshape(-1), kind="stable")
    return np.split(order, np.cumsum(counts)[:-1])


def rows_of(reads: BoxReads, images: Numbers) -> Numbers:
    """The reads that fill some images, of reads in the order of their images."""
    first = np.searchsorted(reads.share, images)
    return runs(first, np.searchsorted(reads.share, images, side="right") - first)
