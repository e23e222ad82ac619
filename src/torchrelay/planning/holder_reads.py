"""The reads of each rank that fill the images of a share, in columns. Pure.

Each box of a distributed tensor is taken from one of the ranks that have it, so that all of them
have about as much to send. Images whose boxes the same ranks have are decided about together.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from math import prod
from typing import NamedTuple

import msgspec
import numpy as np

from torchrelay.errors import MismatchError
from torchrelay.geometry.boxes import Box, Comparisons, Numbers
from torchrelay.planning.catalog import RankShare
from torchrelay.planning.reads import SCATTERED, BoxReads, Overlap, ReadTable, equal_rows
from torchrelay.planning.union import Union
from torchrelay.record.rank_reads import Reads
from torchrelay.record.schema import column_of

_encode = msgspec.msgpack.Encoder().encode


class RankReads(NamedTuple):
    """Reads of one rank: the image of its record that each is of, and what it is `filling`."""

    images: Numbers
    filling: BoxReads

    def read(self) -> Iterator[tuple[int, Box]]:
        """The image of the share that each read fills, and the part of it."""
        filling = self.filling
        parts = [filling.cuts[number].to for number in filling.cut.tolist()]
        return zip(filling.share.tolist(), parts, strict=True)

    def some(self, rows: Numbers) -> RankReads:
        return RankReads(self.images[rows], self.filling.some(rows))

    def request(self, chunk_bytes: int) -> Reads:
        """The request for them: images as they lie, or the elements of boxes of them."""
        filling = self.filling
        partial = np.array([one.part[1] != one.box[1] for one in filling.cuts], bool)
        scattered = (filling.start == SCATTERED) | (filling.at == SCATTERED)
        in_boxes = partial[filling.cut] | scattered
        used, inverse = np.unique(filling.cut[in_boxes], return_inverse=True)
        box_of = np.zeros(len(in_boxes), np.int64)
        box_of[in_boxes] = inverse + 1
        boxes = tuple([filling.cuts[number].part for number in used.tolist()])
        return Reads(self.images, chunk_bytes, column_of(box_of), boxes)


class _SharedBox(NamedTuple):
    """A box that has the same elements of several images of the share. `holders` has the rows of
    the union's boxes that have it: a row for each image, a column for each rank."""

    images: Numbers
    holders: Numbers
    overlap: Overlap


class GatherReads:
    """The reads that fill some images of a share, `only` these; `by_rank` has them by the index of
    the rank. `lost` has the ranks of ranks that are lost.

    `MismatchError` names a tensor that the ranks do not have all of.
    """

    def __init__(
        self, union: Union, share: RankShare, only: Numbers, lost: Collection[int] = ()
    ) -> None:
        self._share, self._union, self._lost = share, union, list(lost)
        self._comparisons = Comparisons()
        ranks, table = union.boxes.ranks, ReadTable()
        loads: Numbers = np.zeros(len(union.joined.ranks), np.int64)  # bytes of each rank

        def add(box: _SharedBox, holders: Numbers) -> None:
            np.add.at(loads, ranks[holders], box.overlap.nbytes)
            table.add(holders, box.images, box.overlap)

        several: list[_SharedBox] = []
        for images, holders in self._alike(only[share.record.box_bytes[only] > 0]):
            for box in self._shared(images, holders):
                if box.holders.shape[1] > 1:
                    several.append(box)
                else:
                    add(box, box.holders[:, 0])
        # Large boxes are given first, each to the rank that has least to send.
        for box in sorted(several, key=lambda found: -found.overlap.nbytes):
            theirs = loads[ranks[box.holders[0]]]
            counts = _shared_out(len(box.images), box.overlap.nbytes, theirs)
            column = np.repeat(np.arange(len(counts)), counts)
            add(box, box.holders[np.arange(len(column)), column])
        self.by_rank = self._by_rank(table.reads())

    def _by_rank(self, reads: BoxReads) -> dict[int, RankReads]:
        """The reads of each rank in the order in which the share has them, those of one device of
        the rank next to each other."""
        found: dict[int, RankReads] = {}
        boxes = self._union.boxes
        ranks, images = boxes.ranks[reads.boxes], boxes.sources[reads.boxes]
        for index in np.unique(ranks).tolist():
            mine = np.flatnonzero(ranks == index)
            devices = self._union.joined.rows[index].record.image_devices[images[mine]]
            mine = mine[np.lexsort((reads.at[mine], reads.share[mine], devices))]
            found[index] = RankReads(images[mine], reads.some(mine))
        return found

    def _alike(self, images: Numbers) -> Iterator[tuple[Numbers, Numbers]]:
        """Images that want one box of what the same ranks have in the same boxes, and the rows of
        the union's boxes that have it: a row for each image, a column for each rank.

        Images 0, 1 and 2 of the share are tensors `a`, `b` and `n` of the union. Places 0 and 1
        have half of `a` and of `b` each; index 0 alone has `n`. The union's boxes are in the order
        of its images:

            row     0         1         2         3         4
            image   a         a         b         b         n
            index   0         1         0         1         0
            kind    upper     lower     upper     lower     whole

        With two rows each, `a` and `b` have the same ranks and kinds: `[0, 1], [[0, 1], [2, 3]]`.
        `n` has one row: `[2], [[4]]`.
        """
        boxes, sources = self._union.boxes, self._share.sources[images]
        there = np.flatnonzero(~np.isin(boxes.ranks, self._lost))
        counts = np.bincount(boxes.images[there], minlength=self._union.record.images)
        first, counts = (np.cumsum(counts) - counts)[sources], counts[sources]
        for count in np.flatnonzero(np.bincount(counts)).tolist():
            some = np.flatnonzero(counts == count)
            holders = there[first[some, None] + np.arange(count)]
            kinds = self._share.record.image_kind[images[some], None]
            for rows in equal_rows(np.hstack([kinds, boxes.ranks[holders], boxes.kinds[holders]])):
                yield images[some[rows]], holders[rows]

    def _shared(self, images: Numbers, holders: Numbers) -> Iterator[_SharedBox]:
        """The boxes that fill images which are alike."""
        union, kind = self._union, self._share.record.kind_of_image(int(images[0]))
        for owned, columns in self._cover(int(self._share.sources[images[0]]), holders[0]):
            kinds = union.boxes.kinds[holders[0, columns]].tolist()
            # Ranks may have the box in memory of different orders: then its elements are asked for.
            orders = [union.box_kinds[one].strides for one in kinds]
            strides = next(filter(None, orders), None)
            overlap = Overlap.of(kind, owned, strides)
            if overlap is not None:
                yield _SharedBox(images, holders[:, columns], overlap)

    def _cover(self, source: int, holders: Numbers) -> list[tuple[Box, list[int]]]:
        """Boxes that cover an image of the union once, and which of its holders have each."""
        union, shape = self._union, self._union.record.kind_of_image(source).shape
        union.check_value(source)
        found: dict[bytes, tuple[Box, list[int]]] = {}
        for column, kind in enumerate(union.boxes.kinds[holders].tolist()):
            box = union.box_kinds[kind].boxes[0]
            if 0 not in box[1]:  # by encoding: numbers may hash alike
                found.setdefault(_encode(box), (box, []))[1].append(column)
        whole = found.get(_encode(((0,) * len(shape), shape)))
        if whole is not None:
            return [whole]
        boxes = list(found.values())
        elements = sum(prod(box[1]) for box, _ in boxes)
        if elements == prod(shape) and not self._comparisons.overlap([box for box, _ in boxes]):
            return boxes
        path = union.path(source)
        if elements >= prod(shape):
            raise MismatchError("ranks have overlapping parts of it", path=path)
        ranks = enumerate(union.joined.ranks)
        left = [str(rank) for index, rank in ranks if index not in self._lost]
        raise MismatchError(
            f"ranks {', '.join(left)} have {elements} of its {prod(shape)} elements: "
            "name every rank that has a part of it as a source",
            path=path,
        )


def _shared_out(count: int, nbytes: int, loads: Numbers) -> Numbers:
    """How many of `count` pieces each of several ranks gets, so that none has much more to send
    than the others."""
    low, high = int(loads.min()), int(loads.max()) + count * nbytes
    while low < high:  # the least load up to which all pieces find room
        middle = (low + high) // 2
        if int((np.maximum(middle - loads, 0) // nbytes).sum()) >= count:
            high = middle
        else:
            low = middle + 1
    found: Numbers = np.maximum(low - loads, 0) // nbytes
    for _ in range(int(found.sum()) - count):  # fewer than there are ranks
        found[int(np.argmax(np.where(found > 0, loads + found * nbytes, -1)))] -= 1
    return found
