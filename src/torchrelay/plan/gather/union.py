"""The states of several live ranks as one: an outlined record, and who has the bytes of its images.

A plain tensor, and every other leaf that is not distributed, is that of the first rank that has its
path. A distributed tensor is one image, whatever boxes of it the ranks have.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from msgspec.structs import replace

from torchrelay.errors import MismatchError
from torchrelay.geometry.boxes import Numbers
from torchrelay.plan.gather.holders import NONE, Holders, Home, JoinedTrees
from torchrelay.plan.outline import TensorRows, outline
from torchrelay.plan.share.leaves import whole_kinds
from torchrelay.record import manifest as m
from torchrelay.record.kinds import KindTable
from torchrelay.record.rows import LeafRows
from torchrelay.record.schema import ImageKind, Record, StateOutline


class Union:
    """The records of several ranks, which are valid streams; the first rank's values count.

    `record` is outlined like that of a step, with an outline for each tree, whose leaves are
    `rows`. Its images are those of the first rank of each tree, then the distributed tensors.
    """

    def __init__(self, records: Mapping[int, Record]) -> None:
        self.joined = JoinedTrees(records)
        self.holders = Holders(self.joined)
        kinds = KindTable()
        outlines = tuple([self._outline(home, kinds) for home in self.joined.homes])
        self.record = kinds.record(
            outlines,
            self._image_kinds(kinds),
            step=self.joined.records[0].step,
            ranks=tuple(range(len(outlines))),
        )
        self.rows = [LeafRows(self.record, number) for number in range(len(outlines))]

    def _image_kinds(self, kinds: KindTable) -> Numbers:
        found = []
        for home in self.joined.homes:
            record = self.joined.first(home).record
            numbers = [kinds.image(kind.without_boxes) for kind in record.image_kinds]
            found.append(np.array(numbers, np.int64)[record.image_kind])
        tensors = [ImageKind(one.dtype, one.shape, None, 0) for one in self.holders.tensors]
        found.append(np.array([*map(kinds.image, tensors)], np.int64))
        return np.concatenate(found)

    def _outline(self, home: Home, kinds: KindTable) -> StateOutline:
        """The outline of the first rank of a home; distributed tensors are whole."""
        rows = self.joined.first(home)
        tensors = self.holders.tensor_of[home.shift + rows.leaves]
        images = np.where(tensors >= 0, self.joined.images + tensors, home.image + rows.images)
        kind_of = whole_kinds(rows.record, kinds)[rows.kinds]
        others = {leaf: self._moved(home, leaf, found) for leaf, found in rows.others.items()}
        columns = TensorRows(rows.leaves, kind_of, images, rows.offsets)
        return outline(rows.tree, len(rows), others, columns)

    def _moved(self, home: Home, leaf: int, found: m.Leaf) -> m.Leaf:
        """A leaf that is not a row, over the images of the union."""
        tensor = int(self.holders.tensor_of[home.shift + leaf])
        if tensor >= 0:
            assert isinstance(found, (m.DTensorLeaf, m.ShardedLeaf))
            facts, flags = self.holders.tensors[tensor], found.flags
            image = self.joined.images + tensor
            if isinstance(found, m.DTensorLeaf) and found.local.flags & m.META:
                image, flags = NONE, flags | m.META
            return m.TensorLeaf(facts.dtype, facts.shape, None, image, 0, flags)

        def moved(part: m.TensorLeaf) -> m.TensorLeaf:
            return part if part.storage < 0 else replace(part, storage=home.image + part.storage)

        return m.with_parts(found, moved)

    def rank_images(self, images: Numbers) -> tuple[Numbers, Numbers]:
        """The place of the rank, and the image there, of each image; -1 for tensors."""
        homes = self.joined.homes
        begins = np.array([home.image for home in homes], np.int64)
        places = np.array([home.members[0] for home in homes], np.int64)
        number = np.searchsorted(begins, images, "right") - 1
        tensors = images >= self.joined.images
        return np.where(tensors, NONE, places[number]), np.where(
            tensors, NONE, images - begins[number]
        )

    def check_values(self, tensors: Numbers) -> None:
        """`MismatchError` for a tensor whose values are yet to be reduced over ranks."""
        for tensor in tensors[self.holders.partial[tensors]][:1].tolist():
            raise MismatchError(
                "a DTensor with a partial placement has no value yet: redistribute it before it "
                "is sent",
                path=self.joined.path(self.holders.tensors[tensor].leaf),
            )
