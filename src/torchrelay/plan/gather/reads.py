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
from torchrelay.plan.gather.union import Union
from torchrelay.plan.share.leaves import NONE, WHOLE
from torchrelay.plan.share.rank_share import RankShare
from torchrelay.record.dtypes import itemsize
from torchrelay.record.reads import Reads
from torchrelay.record.schema import Record

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

    def some(self, rows: Numbers) -> RankReads:
        columns = (self.images, self.box, self.nbytes, self.share, self.at)
        images, box, nbytes, share, at = (column[rows] for column in columns)
        return RankReads(images, box, nbytes, share, at, self.boxes, self.targets)

    def asked(self, chunk_bytes: int) -> Reads:
        """As the rank is asked for them."""
        cut = np.flatnonzero(self.box != WHOLE)
        if not len(cut):
            return Reads(self.images, chunk_bytes)
        boxes = [self.boxes[number] for number in self.box[cut].tolist()]
        offsets, sizes = (
            np.array([number for box in boxes for number in box[side]], np.int64) for side in (0, 1)
        )
        return Reads(self.images, chunk_bytes, cut, offsets, sizes)


class _SharedBox(NamedTuple):
    """The box `both` of several tensors, which is wanted: a part of the box `owned` of ranks, and
    of the box `wanted` of this one. `nbytes` has the bytes of `both`."""

    images: Numbers
    tensors: Numbers
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
        self._share, self._union, self._nbytes = share, union, record.box_bytes
        self._there = ~np.isin(union.holders.rank_of, list(lost))
        self._comparisons = Comparisons()
        # In columns: rank, image, box, bytes, image of the share, and where they go there.
        self._columns: list[tuple[Numbers, ...]] = []
        self._boxes: list[Box] = []
        self._targets: list[Box] = []
        self._loads: Numbers = np.zeros(len(union.joined.ranks), np.int64)  # bytes of each rank
        images = only[self._nbytes[only] > 0]
        places, sources = union.rank_images(share.sources[images])
        plain = places >= 0
        self._add_plain(images[plain], places[plain], sources[plain])
        self._add_tensors(images[~plain])
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

    def _add(self, *columns: Numbers | int) -> None:
        self._columns.append(tuple(np.broadcast_arrays(*columns)))

    def _box(self, box: Box, target: Box) -> int:
        self._boxes.append(box)
        self._targets.append(target)
        return len(self._boxes) - 1

    def _add_plain(self, images: Numbers, places: Numbers, sources: Numbers) -> None:
        """Images that one rank has: all of them, or boxes."""
        boxes, nbytes = self._share.source_boxes[images], self._nbytes[images]
        np.add.at(self._loads, places, nbytes)
        for number in np.unique(boxes).tolist():
            some, index = boxes == number, WHOLE
            if number != WHOLE:
                box = self._share.boxes[number]
                index = self._box(box, ((0,) * len(box[1]), box[1]))
            self._add(places[some], sources[some], index, nbytes[some], images[some], 0)

    def _add_tensors(self, images: Numbers) -> None:
        """Images of distributed tensors, each put together of boxes that ranks have."""
        holders, tensors = self._union.holders, self._share.sources[images]
        tensors = tensors - self._union.joined.images
        self._union.check_values(tensors)
        several: list[tuple[_SharedBox, list[int]]] = []  # with the columns that have each
        for rows in self._alike(tensors, self._share.source_boxes[images]):
            number = int(self._share.source_boxes[images[rows[0]]])
            facts = holders.tensors[int(tensors[rows[0]])]
            wanted = ((0,) * len(facts.shape), facts.shape)
            if number != WHOLE:
                wanted = self._share.boxes[number]
            for owned, columns in self._cover(int(tensors[rows[0]])):
                both = shared(owned, wanted)
                if both is None:
                    continue
                nbytes = prod(both[1]) * itemsize(facts.dtype)
                box = _SharedBox(images[rows], tensors[rows], owned, wanted, both, nbytes)
                if len(columns) > 1:
                    several.append((box, columns))
                else:
                    self._add_box(box, np.repeat(columns, len(rows)))
        # Large boxes are given first, each to the rank that has least to send.
        for box, columns in sorted(several, key=lambda found: -found[0].nbytes):
            loads = self._loads[holders.rank_of[columns]]
            counts = _shared_out(len(box.images), box.nbytes, loads)
            self._add_box(box, np.repeat(columns, counts))

    def _alike(self, tensors: Numbers, boxes: Numbers) -> list[Numbers]:
        """The rows of images, those together that want one box of tensors that the same ranks have
        in the same boxes."""
        if not len(tensors):
            return []
        kinds = np.where(self._there, self._union.holders.kinds[tensors], NONE)
        keys = np.column_stack([boxes, kinds])
        if (keys == keys[0]).all():
            return [np.arange(len(keys))]
        _, inverse, counts = np.unique(keys, axis=0, return_inverse=True, return_counts=True)
        order = np.argsort(inverse.reshape(-1), kind="stable")
        return np.split(order, np.cumsum(counts)[:-1])

    def _cover(self, tensor: int) -> list[tuple[Box, list[int]]]:
        """Boxes that cover a tensor once, and the columns of `Holders` that have each."""
        holders = self._union.holders
        shape = holders.tensors[tensor].shape
        found: dict[bytes, tuple[Box, list[int]]] = {}  # by encoding: numbers may hash alike
        for column in np.flatnonzero(self._there & (holders.kinds[tensor] != NONE)).tolist():
            box = holders.box_kinds[int(holders.kinds[tensor, column])].boxes[0]
            if 0 not in box[1]:
                found.setdefault(_encode(box), (box, []))[1].append(column)
        whole = found.get(_encode(((0,) * len(shape), shape)))
        if whole is not None:
            return [whole]
        boxes = list(found.values())
        elements = sum(prod(box[1]) for box, _ in boxes)
        if elements == prod(shape) and not self._comparisons.overlap([box for box, _ in boxes]):
            return boxes
        path = self._union.joined.path(holders.tensors[tensor].leaf)
        if elements >= prod(shape):
            raise MismatchError("ranks have overlapping parts of it", path=path)
        places = np.unique(holders.rank_of[self._there]).tolist()
        left = [str(self._union.joined.ranks[place]) for place in places]
        raise MismatchError(
            f"ranks {', '.join(left)} have {elements} of its {prod(shape)} elements: "
            "name every rank that has a part of it as a source",
            path=path,
        )

    def _add_box(self, box: _SharedBox, columns: Numbers) -> None:
        """Read a box of several tensors, each from the rank of its column."""
        holders = self._union.holders
        _, _, owned, wanted, both, nbytes = box
        target = within(both, wanted), both[1]
        run = run_of(target, wanted[1])
        at = SCATTERED if run is None else run * (nbytes // prod(both[1]))
        ranks = holders.rank_of[columns]
        np.add.at(self._loads, ranks, nbytes)
        # Parts of a box, and bytes that lie in another order there, are asked for as elements.
        row_major = np.array([kind.strides is None for kind in holders.box_kinds], bool)
        as_it_lies = row_major[holders.kinds[box.tensors, columns]]
        index = self._box((within(both, owned), both[1]), target)
        boxes = np.where(as_it_lies & (both == owned and at != SCATTERED), WHOLE, index)
        sources = holders.images[box.tensors, columns]
        self._add(ranks, sources, boxes, nbytes, box.images, at)


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
