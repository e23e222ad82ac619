"""The tensors of a step at rest: their names, and the boxes that they are cut into. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from torchrelay.errors import ManifestError
from torchrelay.geometry.boxes import Numbers
from torchrelay.record.manifest import parts
from torchrelay.record.schema import ImageKind, Record
from torchrelay.state.paths import LeafPaths, dotted

# A short record may have paths of gigabytes: a limited number of characters is written out.
_MAX_NAMED, _MAX_NAMED_EACH = 1 << 24, 1 << 8


class Shard(NamedTuple):
    """A box of a tensor: its elements, row-major, from byte `start` of a volume on."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: int
    start: int


@dataclass(slots=True, eq=False)
class StoredTensor:
    """A tensor and the boxes that it is cut into."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    shards: Sequence[Shard]


@dataclass(slots=True, eq=False)
class Shards(Sequence[Shard]):
    """The boxes of one image of a record."""

    kind: ImageKind
    volumes: list[int]
    starts: list[int]

    def __len__(self) -> int:
        return self.kind.count

    def __iter__(self) -> Iterator[Shard]:
        places = zip(self.kind.boxes, self.volumes, self.starts, strict=True)
        return (Shard(box[0], box[1], volume, start) for box, volume, start in places)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return list(self)[index]
        box = self.kind.boxes[index]
        return Shard(box[0], box[1], self.volumes[index], self.starts[index])


class Names(Sequence[str]):
    """The name of each image of a valid record: one that it has there, else the path of the first
    leaf of the first outline that it is in. An image that no outline has is known by its number."""

    def __init__(self, record: Record) -> None:
        self._record = record
        self._named = dict(record.names)
        self._paths: dict[int, LeafPaths] = {}  # by outline

    def __len__(self) -> int:
        return self._record.images

    @cached_property
    def _firsts(self) -> tuple[Numbers, Numbers]:
        """Of each image, the outline and the leaf that name it; -1 where there is none."""
        record = self._record
        outlines: Numbers = np.full(record.images, -1, np.int64)
        leaves: Numbers = np.full(record.images, -1, np.int64)
        for number in reversed(range(len(record.outlines))):
            outline = record.outlines[number]
            images, of_leaves = outline.row_images, outline.row_leaves
            pairs = [
                (part.storage, leaf)
                for leaf, other in zip(outline.other_leaves.tolist(), outline.others, strict=True)
                for part in parts(other)
                if part.storage >= 0
            ]
            if pairs:
                more = np.array(pairs, np.int64)
                images = np.concatenate([images, more[:, 0]])
                of_leaves = np.concatenate([of_leaves, more[:, 1]])
            order = np.argsort(-of_leaves, kind="stable")  # what is put last stays
            outlines[images], leaves[images[order]] = number, of_leaves[order]
        return outlines, leaves

    def __getitem__(self, image: Any) -> Any:
        if isinstance(image, slice):
            return [self[n] for n in range(*image.indices(len(self)))]
        if image in self._named:
            return self._named[image]
        outline, leaf = (int(column[image]) for column in self._firsts)
        if outline < 0:
            return f"image {image}"
        if outline not in self._paths:
            self._paths[outline] = LeafPaths(self._record.outlines[outline].tree)
        return dotted(self._paths[outline][leaf])

    def all(self) -> list[str]:
        """All names; `ManifestError` where one stands twice, or they are too long to be listed."""
        left = _MAX_NAMED + _MAX_NAMED_EACH * len(self)
        found = []
        for image in range(len(self)):
            found.append(self[image])
            left -= len(found[-1])
            if left < 0:
                raise ManifestError("the paths of the step are too long to be listed")
        if len(set(found)) < len(found):
            raise ManifestError("two tensors of the step have one name")
        return found


def stored_tensors(record: Record) -> list[StoredTensor]:
    """The tensors of a valid step at rest, by image; see `Names.all`."""
    columns = (record.image_kind, record.first_boxes, record.box_volumes, record.box_starts)
    kinds, firsts, volumes, starts = (column.tolist() for column in columns)
    found = []
    for image, name in enumerate(Names(record).all()):
        kind, first = record.image_kinds[kinds[image]], firsts[image]
        shards: Sequence[Shard]
        if kind.count == 1:  # mostly
            (box,) = kind.boxes
            shards = (Shard(box[0], box[1], volumes[first], starts[first]),)
        else:
            some = slice(first, firsts[image + 1])
            shards = Shards(kind, volumes[some], starts[some])
        found.append(StoredTensor(name, kind.dtype, kind.shape, shards))
    return found


def images_in(record: Record, volume: int, start: int, stop: int) -> list[int]:
    """The images that have bytes in a range of a volume, by their places there; of an empty range,
    the one before it."""
    boxes = np.flatnonzero(record.box_volumes == volume)
    boxes = boxes[np.argsort(record.box_starts[boxes], kind="stable")]
    starts = record.box_starts[boxes]
    first = max(0, int(np.searchsorted(starts, start, "right")) - 1)
    last = int(np.searchsorted(starts, max(stop, start + 1), "left"))
    images = np.searchsorted(record.first_boxes, boxes[first:last], "right") - 1
    return list(dict.fromkeys(images.tolist()))
