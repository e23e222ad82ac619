"""A share that is being put together: its leaves, and the images that those are made of. Pure."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from msgspec.structs import replace

from torchrelay.describing.outline import OutlineBuilder, TensorRows
from torchrelay.geometry.boxes import Box, Numbers
from torchrelay.geometry.numbered import Numbered
from torchrelay.planning.offered_leaves import NONE, OfferedLeaves, undistributed, whole_kinds
from torchrelay.record import manifest as m
from torchrelay.record.kinds import KindTable
from torchrelay.record.schema import ImageKind, Record

WHOLE = 0  # in place of the number of a box
NOTHING = m.ValueLeaf("plain", None)  # in the place of leaves that are not wanted


# An image of the share: a recorded image, and the number of the box of it, or WHOLE. There are tens
# of thousands of these, so they are plain pairs.
_ImageBox = tuple[int, int]


class ShareImages:
    """The images of a share, each once: all of a recorded image, or one box of it.

    A state at rest has images 0 (`w`, 8 x 4) and 1 (`b`, 8). This rank has the upper half of `w`
    as a DTensor, all of `w` as a plain tensor, and `b` twice:

        upper = images.number_of(((0, 0), (4, 4)), (8, 4))      box 1
        images.take([0], [upper])                               -> [0]
        images.take([0, 1, 1], [WHOLE, WHOLE, WHOLE])           -> [1, 2, 2]

        image of the share   source   box
        0                    0        1: ((0, 0), (4, 4))
        1                    0        WHOLE
        2                    1        WHOLE
    """

    def __init__(self, record: Record) -> None:
        self._record = record
        self._numbers: dict[_ImageBox, int] = {}
        self._boxes: Numbered[Box] = Numbered()

    def __len__(self) -> int:
        return len(self._numbers)

    def number_of(self, box: Box, shape: tuple[int, ...]) -> int:
        """The number of a box of an image of this shape."""
        return WHOLE if box == ((0,) * len(shape), shape) else self._boxes.number(box) + 1

    def take(self, sources: Numbers, boxes: Numbers | int = WHOLE) -> Numbers:
        """The images of the share that are these boxes of these recorded images. New ones are
        numbered in the order of the record, as they lie at the source."""
        boxes, numbers = np.broadcast_to(boxes, sources.shape), self._numbers
        wanted: list[_ImageBox] = [*zip(sources.tolist(), boxes.tolist(), strict=True)]
        for n in np.lexsort((boxes, sources)).tolist():
            numbers.setdefault(wanted[n], len(numbers))
        return np.array([numbers[one] for one in wanted], np.int64)

    def take_one(self, source: int, box: int = WHOLE) -> int:
        """`take` of one image."""
        return self._numbers.setdefault((source, box), len(self._numbers))

    @property
    def sources(self) -> Numbers:
        """The recorded image of each."""
        return np.array([source for source, _ in self._numbers], np.int64)

    def kinds(self, table: KindTable) -> Numbers:
        """The kind of each, by number in a table."""
        kinds = self._record.image_kind[self.sources].tolist()
        both = [*zip(kinds, (box for _, box in self._numbers), strict=True)]
        made = {one: table.images.number(self._kind(*one)) for one in dict.fromkeys(both)}
        return np.array([made[one] for one in both], np.int64)

    def _kind(self, number: int, box: int) -> ImageKind:
        kind = self._record.image_kinds[number]
        if box == WHOLE:
            return ImageKind(kind.dtype, kind.shape, kind.strides)
        return ImageKind.of_boxes(kind.dtype, kind.shape, [self._boxes.found[box - 1]])


class ShareBuilder:
    """The record of a share that is being made. A leaf of it has the number that it has among those
    offered; where one is taken in several forms, the others have numbers beyond those."""

    def __init__(self, offered: OfferedLeaves) -> None:
        self._offered = offered
        self.kinds = KindTable()
        self.images = ShareImages(offered.record)
        self._outline = OutlineBuilder()
        self._leaves = offered.count
        self._taken = np.zeros(offered.count, bool)
        self._others: dict[int, m.Leaf] = {}

    def numbers_for(self, leaves: Numbers) -> Numbers:
        """Numbers for forms of offered leaves: the leaf's own, unless that is taken."""
        found: Numbers = leaves.copy()
        _, first = np.unique(leaves, return_index=True)
        again = np.ones(len(leaves), bool)
        again[first] = self._taken[leaves[first]]
        self._taken[leaves] = True
        more = int(again.sum())
        found[again] = np.arange(self._leaves, self._leaves + more)
        self._leaves += more
        return found

    def add_nothing(self) -> int:
        """Add a leaf that takes the places of items that are not wanted."""
        self._leaves += 1
        self.add(self._leaves - 1, NOTHING)
        return self._leaves - 1

    def add_offered(self, leaves: Numbers) -> Numbers:
        """Add offered leaves, each once and as it is, but that distributed tensors are whole.
        Returns their numbers."""
        numbers, wholes = self.numbers_for(leaves), whole_kinds(self._offered.record, self.kinds)
        for rows, some, at in self._offered.by_rank(leaves):
            row = np.searchsorted(rows.leaves, some)
            is_row = row < len(rows.leaves)
            is_row[is_row] = rows.leaves[row[is_row]] == some[is_row]
            row = row[is_row]
            images, kinds = self.images.take(rows.images[row]), wholes[rows.kinds[row]]
            self.add_rows(TensorRows(numbers[at[is_row]], kinds, images, rows.offsets[row]))
            for leaf, number in zip(some[~is_row].tolist(), numbers[at[~is_row]], strict=True):
                self.add(int(number), self._over_share(rows.others[leaf]))
        return numbers

    def _over_share(self, found: m.Leaf) -> m.Leaf:
        """A leaf of the record over images of the share, its parts in the layouts that these have
        in memory."""

        def moved(part: m.TensorLeaf) -> m.TensorLeaf:
            kind, strides = self._offered.record.kind_of_image(part.storage), part.strides
            if strides is None and not part.offset and part.shape == kind.shape:
                strides = kind.strides
            return replace(part, storage=self.images.take_one(part.storage), strides=strides)

        return m.with_parts(undistributed(found), moved)

    def add_rows(self, rows: TensorRows) -> None:
        """Add tensors over images of the share."""
        self._outline.add_rows(rows)

    def add(self, leaf: int, found: m.Leaf) -> None:
        """Add a leaf over images of the share."""
        self._others[leaf] = found

    @property
    def others(self) -> Mapping[int, m.Leaf]:
        """The leaves that are records of their own."""
        return self._others

    def record(self, tree: m.Node) -> Record:
        """The record of the share."""
        free: list[int] = np.flatnonzero(~self._taken).tolist()
        for leaf, found in {**self._others, **dict.fromkeys(free, NOTHING)}.items():
            self._outline.add(leaf, found)
        outline = self._outline.build(tree, self._leaves)
        kind_of = self.images.kinds(self.kinds)
        return self.kinds.record((outline,), kind_of, step=self._offered.record.step)


assert NONE < WHOLE
