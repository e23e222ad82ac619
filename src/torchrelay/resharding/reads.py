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
from torchrelay.geometry.boxes import Box, Comparisons, Numbers, run_of, shared, within
from torchrelay.plan.share.leaves import WHOLE
from torchrelay.plan.share.rank_share import RankShare
from torchrelay.record.dtypes import itemsize
from torchrelay.record.reads import Reads
from torchrelay.record.rows import Marks
from torchrelay.record.schema import Record, column_of
from torchrelay.resharding.union import Union

_encode = msgspec.msgpack.Encoder().encode
SCATTERED = -1  # in place of a byte of an image


class RankReads(NamedTuple):
    """Reads of one rank, in columns: the image, the box of it (an index in `boxes`, or `WHOLE`),
    the bytes, and the image of the share that they go to.

    `at` says from which byte of that image on; or it is `SCATTERED`, and `targets` has the box of
    the image that they fill, by the same index as `boxes`.
    """

    images: Numbers
    box: Numbers
    nbytes: Numbers
    share: Numbers
    at: Numbers
    boxes: list[Box]
    targets: list[Box]

    def filled(self) -> Iterator[tuple[int, int, int, Box | None]]:
        """The target of each read: image, byte and bytes; the box of it where it is scattered."""
        columns = (self.share, self.at, self.nbytes, self.box)
        for image, at, nbytes, box in zip(*(column.tolist() for column in columns), strict=True):
            yield image, at, nbytes, self.targets[box] if at == SCATTERED else None

    @classmethod
    def none(cls) -> RankReads:
        no: Numbers = np.zeros(0, np.int64)
        return cls(no, no, no, no, no, [], [])

    def some(self, rows: Numbers | Marks) -> RankReads:
        columns = (self.images, self.box, self.nbytes, self.share, self.at)
        images, box, nbytes, share, at = (column[rows] for column in columns)
        return RankReads(images, box, nbytes, share, at, self.boxes, self.targets)

    def asked(self, chunk_bytes: int) -> Reads:
        """As the rank is asked for them."""
        cut = self.box != WHOLE
        used, inverse = np.unique(self.box[cut], return_inverse=True)
        numbers = np.zeros(len(cut), np.int64)
        numbers[cut] = inverse + 1
        boxes = tuple([self.boxes[number] for number in used.tolist()])
        return Reads(self.images, chunk_bytes, column_of(numbers), boxes)


class _SharedBox(NamedTuple):
    """The box `both` of several images of the share, which is wanted: a part of the box `owned` of
    ranks, and of the box `wanted` of this one. `nbytes` has its bytes, and `holders` the rows of
    the union's boxes that have it: a row for each image, a column for each rank."""

    images: Numbers
    holders: Numbers
    owned: Box
    wanted: Box
    both: Box
    nbytes: int


class GatherReads:
    """The reads that fill some images of a share, `only` these, whose record is `record`; `by_rank`
    has them by the place of the rank. `lost` has the places of ranks that are not asked.

    `MismatchError` names a tensor that the ranks do not have all of.
    """

    def __init__(
        self,
        union: Union,
        share: RankShare,
        record: Record,
        only: Numbers,
        lost: Collection[int] = (),
    ) -> None:
        self._share, self._union, self._record = share, union, record
        self._lost = list(lost)
        self._comparisons = Comparisons()
        # In columns: rank, image, box, bytes, image of the share, and where they go there.
        self._columns: list[tuple[Numbers, ...]] = []
        self._boxes: list[Box] = []
        self._targets: list[Box] = []
        self._loads: Numbers = np.zeros(len(union.joined.ranks), np.int64)  # bytes of each rank
        several: list[_SharedBox] = []
        for images, holders in self._alike(only[record.box_bytes[only] > 0]):
            for box in self._shared(images, holders):
                if box.holders.shape[1] > 1:
                    several.append(box)
                else:
                    self._add_box(box, box.holders[:, 0])
        # Large boxes are given first, each to the rank that has least to send.
        for box in sorted(several, key=lambda found: -found.nbytes):
            loads = self._loads[union.boxes.places[box.holders[0]]]
            counts = _shared_out(len(box.images), box.nbytes, loads)
            column = np.repeat(np.arange(len(counts)), counts)
            self._add_box(box, box.holders[np.arange(len(column)), column])
        self.by_rank = self._by_rank()

    def _by_rank(self) -> dict[int, RankReads]:
        """The reads of each rank in the order in which the share has them, those of one device of
        the rank next to each other."""
        found: dict[int, RankReads] = {}
        columns = [np.concatenate(some) for some in zip(*self._columns, strict=True)]
        for place in np.unique(columns[0]).tolist() if columns else ():
            mine = columns[0] == place
            images, box, nbytes, share, at = (column[mine] for column in columns[1:])
            devices = self._union.joined.rows[place].record.image_devices[images]
            reads = RankReads(images, box, nbytes, share, at, self._boxes, self._targets)
            found[place] = reads.some(np.lexsort((at, share, devices)))
        return found

    def _alike(self, images: Numbers) -> Iterator[tuple[Numbers, Numbers]]:
        """Images that want one box of what the same ranks have in the same boxes, and the rows of
        the union's boxes that have it: a row for each image, a column for each rank."""
        boxes, sources = self._union.boxes, self._share.sources[images]
        there = np.flatnonzero(~np.isin(boxes.places, self._lost))
        counts = np.bincount(boxes.images[there], minlength=self._union.record.images)
        first, counts = (np.cumsum(counts) - counts)[sources], counts[sources]
        for count in np.flatnonzero(np.bincount(counts)).tolist():
            some = np.flatnonzero(counts == count)
            holders = there[first[some, None] + np.arange(count)]
            numbers = self._share.source_boxes[images[some], None]
            keys = np.hstack([numbers, boxes.places[holders], boxes.kinds[holders]])
            keys = np.hstack([keys, self._record.image_kind[images[some], None]])
            for rows in _equal_rows(keys):
                yield images[some[rows]], holders[rows]

    def _shared(self, images: Numbers, holders: Numbers) -> Iterator[_SharedBox]:
        """The boxes that fill images which are alike."""
        union, image = self._union, int(images[0])
        source, number = int(self._share.sources[image]), int(self._share.source_boxes[image])
        kind = union.record.kind_of_image(source)
        wanted = (0,) * len(kind.shape), kind.shape
        if number != WHOLE:
            wanted = self._share.boxes[number]
        for owned, columns in self._cover(source, kind.shape, holders[0]):
            both = shared(owned, wanted)
            if both is not None:
                nbytes = prod(both[1]) * itemsize(kind.dtype)
                yield _SharedBox(images, holders[:, columns], owned, wanted, both, nbytes)

    def _cover(
        self, source: int, shape: tuple[int, ...], holders: Numbers
    ) -> list[tuple[Box, list[int]]]:
        """Boxes that cover an image of the union once, and which of its holders have each."""
        union = self._union
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
        left = [str(rank) for place, rank in ranks if place not in self._lost]
        raise MismatchError(
            f"ranks {', '.join(left)} have {elements} of its {prod(shape)} elements: "
            "name every rank that has a part of it as a source",
            path=path,
        )

    def _add_box(self, box: _SharedBox, holders: Numbers) -> None:
        """Read a box of several images, each from one of its holders."""
        places, sources, kinds = (column[holders] for column in self._union.boxes[1:])
        _, _, owned, wanted, both, nbytes = box
        target = within(both, wanted), both[1]
        run = run_of(target, wanted[1])
        at = SCATTERED if run is None else run * (nbytes // prod(both[1]))
        np.add.at(self._loads, places, nbytes)
        # Parts of a box, and bytes that lie in another order there, are asked for as elements.
        number = WHOLE
        strides = self._record.kind_of_image(int(box.images[0])).strides
        there = [self._union.box_kinds[kind].strides for kind in np.unique(kinds).tolist()]
        if both != owned or at == SCATTERED or any(one != strides for one in there):
            number = len(self._boxes)
            self._boxes.append((within(both, owned), both[1]))
            self._targets.append(target)
        columns = (places, sources, number, nbytes, box.images, at)
        self._columns.append(tuple(np.broadcast_arrays(*columns)))


def _equal_rows(keys: Numbers) -> list[Numbers]:
    """The rows of a table that are equal, together."""
    if not len(keys) or (keys == keys[0]).all():
        return [np.arange(len(keys))] if len(keys) else []
    _, inverse, counts = np.unique(keys, axis=0, return_inverse=True, return_counts=True)
    order = np.argsort(inverse.reshape(-1), kind="stable")
    return np.split(order, np.cumsum(counts)[:-1])


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
