"""The reads of each rank that fill the images of a share, in columns. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from math import prod
from typing import NamedTuple

import numpy as np

from torchrelay.geometry.boxes import Box, Numbers, run_of, shared, within
from torchrelay.plan.gather.owners import OwnedBox, Owners
from torchrelay.plan.gather.union import Union
from torchrelay.plan.share.leaves import WHOLE
from torchrelay.plan.share.rank_share import RankShare
from torchrelay.record.dtypes import itemsize
from torchrelay.record.reads import Reads
from torchrelay.record.schema import Record

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


class _Collected:
    """The reads of one rank, some at a time."""

    def __init__(self) -> None:
        self._columns: list[tuple[Numbers, ...]] = []
        self._boxes: list[Box] = []
        self._targets: list[Box] = []

    def box(self, box: Box, target: Box) -> int:
        self._boxes.append(box)
        self._targets.append(target)
        return len(self._boxes) - 1

    def add(self, images: Numbers, box: int, nbytes: Numbers, share: Numbers, at: int) -> None:
        boxes, places = (np.full(len(images), number, np.int64) for number in (box, at))
        self._columns.append((images, boxes, nbytes, share, places))

    def reads(self, record: Record) -> RankReads:
        """All of them, in the order in which the share has them, those of one device of the rank
        next to each other."""
        columns = [np.concatenate(some) for some in zip(*self._columns, strict=True)]
        order = np.lexsort((columns[4], columns[3], record.image_devices[columns[0]]))
        images, box, nbytes, share, at = (column[order] for column in columns)
        return RankReads(images, box, nbytes, share, at, self._boxes, self._targets)


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
        self._found: dict[int, _Collected] = {}
        images = only[self._nbytes[only] > 0]
        places, _ = self._union.rank_images(share.sources[images])
        plain, tensors = images[places >= 0], images[places < 0]
        self._add_plain(plain)
        loads = np.zeros(len(self._union.joined.ranks), np.int64)
        np.add.at(loads, places[places >= 0], self._nbytes[plain])
        numbers = share.sources[tensors] - self._union.joined.images
        self._union.check_values(numbers)
        owners = Owners(self._union, np.unique(numbers), loads, lost)
        group: Numbers = np.zeros(len(self._union.holders.tensors), np.int64)
        for place, tiled in enumerate(owners.tiled):
            group[tiled.tensors] = place
        order = np.argsort(group[numbers], kind="stable")
        ends = np.searchsorted(group[numbers][order], np.arange(1, len(owners.tiled)))
        for tiled, mine in zip(owners.tiled, np.split(order, ends), strict=False):
            self._add_tiled(tensors[mine], numbers[mine], tiled.tensors, tiled.boxes)
        rows = self._union.joined.rows
        self.by_rank = {
            place: found.reads(rows[place].record) for place, found in sorted(self._found.items())
        }

    def _of(self, place: int) -> _Collected:
        return self._found.setdefault(place, _Collected())

    def _add_plain(self, images: Numbers) -> None:
        """Images that one rank has: all of them, or boxes."""
        places, sources = self._union.rank_images(self._share.sources[images])
        boxes = self._share.source_boxes[images]
        for place in np.unique(places).tolist():
            found = self._of(place)
            for number in np.unique(boxes[places == place]).tolist():
                mine = (places == place) & (boxes == number)
                some, index = images[mine], WHOLE
                if number != WHOLE:
                    box = self._share.boxes[number]
                    index = found.box(box, ((0,) * len(box[1]), box[1]))
                found.add(sources[mine], index, self._nbytes[some], some, 0)

    def _add_tiled(
        self, images: Numbers, numbers: Numbers, tensors: Numbers, owned: list[OwnedBox]
    ) -> None:
        """Images of distributed tensors, `numbers`, which are put together of the same boxes."""
        places = np.searchsorted(tensors, numbers)
        boxes = self._share.source_boxes[images]
        facts = self._union.holders.tensors[int(tensors[0])]
        size = itemsize(facts.dtype)
        for number in np.unique(boxes).tolist():
            wanted = ((0,) * len(facts.shape), facts.shape)
            if number != WHOLE:
                wanted = self._share.boxes[number]
            some = boxes == number
            for one in owned:
                both = shared(one.box, wanted)
                if both is not None:
                    columns = one.columns[places[some]]
                    self._add_box(images[some], numbers[some], columns, one.box, both, wanted, size)

    def _add_box(
        self,
        images: Numbers,
        numbers: Numbers,
        columns: Numbers,
        owned: Box,
        both: Box,
        wanted: Box,
        size: int,
    ) -> None:
        """Read the part that an owned box and a wanted one share, of several tensors."""
        holders = self._union.holders
        target = within(both, wanted), both[1]
        run = run_of(target, wanted[1])
        at = SCATTERED if run is None else run * size
        nbytes = np.full(len(images), prod(both[1]) * size, np.int64)
        # Bytes that lie in another order there are asked for as elements.
        kinds = holders.kinds[numbers, columns]
        plain = np.array([kind.strides is None for kind in holders.box_kinds], bool)[kinds]
        ranks = holders.rank_of[columns]
        for place in np.unique(ranks).tolist():
            found = self._of(place)
            for whole in (True, False):
                mine = (ranks == place) & (plain == whole)
                if not mine.any():
                    continue
                all_of_it = whole and both == owned and at != SCATTERED
                index = WHOLE
                if not all_of_it:
                    index = found.box((within(both, owned), both[1]), target)
                sources = holders.images[numbers[mine], columns[mine]]
                found.add(sources, index, nbytes[mine], images[mine], at)
