"""The outlines of all ranks in one record, with what they have in common held once. Pure.

Ranks of one job have most leaves in common, and some of their own under the same path: a random
state, a position in the data. Plain values and plain tensors that differ are kept for each rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from math import prod

import msgspec
import numpy as np
import xxhash

from torchrelay.errors import CheckpointError
from torchrelay.geometry.boxes import Numbers
from torchrelay.planning.stored import Names
from torchrelay.record.dtypes import itemsize
from torchrelay.record.kinds import KindTable
from torchrelay.record.manifest import Leaf, TensorLeaf, parts, with_parts
from torchrelay.record.rows import LeafRows
from torchrelay.record.schema import (
    ImageKind,
    LeafKind,
    MeshSharding,
    RankDifference,
    Record,
    column_of,
    pack_column,
)
from torchrelay.shares.comparison import Assignment, Details

_encode = msgspec.msgpack.Encoder(enc_hook=pack_column).encode
_replace = msgspec.structs.replace


def shape_of(record: Record) -> bytes:
    """A digest of an outline but for the kinds of its rows and its other leaves."""
    (outline,) = record.outlines
    strides = [kind.strides for kind in record.image_kinds]
    layouts = [
        (image, strides[kind])
        for image, kind in enumerate(record.image_kind.tolist())
        if strides[kind] is not None
    ]
    columns = (outline.others_at, outline.images, record.images, layouts)
    return xxhash.xxh3_128_digest(_encode((outline.tree, outline.leaves, columns, record.names)))


def image_bytes(record: Record) -> int:
    """Bytes of all images of an outline, whichever ranks write them."""
    sizes = [prod(kind.shape) * itemsize(kind.dtype) for kind in record.image_kinds]
    counts = np.bincount(record.image_kind, minlength=len(sizes)).tolist()
    return sum(size * count for size, count in zip(sizes, counts, strict=True))


class _Base:
    """The first outline of a shape. `numbers` has the image of the joined record that each of its
    own is."""

    def __init__(
        self, record: Record, names: Sequence[str], joined: _Joined, renamed: Mapping[str, str]
    ) -> None:
        self._record, self._joined = record, joined
        self._names = names
        self.rows = LeafRows(record, at_rest=True)
        self.renamed = frozenset(renamed)
        # Leaves outside of the rows that have images.
        self.others = {at: leaf for at, leaf in self.rows.others.items() if any(parts(leaf))}
        of_images = joined.kinds.images.numbers(record.image_kinds)[record.image_kind].tolist()
        self.numbers: Numbers = np.array(
            [
                joined.image(renamed.get(name, name), of_images[image])
                for image, name in enumerate(names)
            ],
            np.int64,
        )
        (outline,) = record.outlines
        leaf_kinds = np.array([joined.leaf_kind(record, kind) for kind in record.kinds], np.int64)
        rows = outline.rows
        self.outline = _replace(
            outline,
            others=tuple([_renumbered(leaf, self.numbers) for leaf in outline.others]),
            kinds=column_of(leaf_kinds[outline.row_kinds]) if rows else None,
            images=self.numbers[outline.row_images] if rows else None,
        )

    @cached_property
    def images(self) -> dict[str, int]:
        """The images of this outline, by name."""
        return {known: image for image, known in enumerate(self._names)}

    def kind_like(self, image: int, dtype: str, shape: tuple[int, ...]) -> int:
        """The kind of an image that another rank has in the place of one of this outline."""
        mine = self._record.image_kinds[int(self._record.image_kind[image])]
        return self._joined.kinds.images.number(ImageKind(dtype, shape, mine.strides, 0))


class _Joined:
    """Kinds and images of all outlines, by number."""

    def __init__(self) -> None:
        self.kinds = KindTable()
        self.names: dict[str, int] = {}
        self.kind_of: list[int] = []

    def leaf_kind(self, record: Record, kind: LeafKind) -> int:
        if kind.sharding < 0:
            return self.kinds.leaves.number(kind)
        how = record.shardings[kind.sharding]
        mesh = record.meshes[how.mesh] if isinstance(how, MeshSharding) else None
        return self.kinds.distributed(kind, how, mesh)

    def image(self, name: str, kind: int) -> int:
        """The image with a name; a new one has that kind."""
        found = self.names.setdefault(name, len(self.kind_of))
        if found == len(self.kind_of):
            self.kind_of.append(kind)
        return found


def merge(
    shapes: Sequence[bytes],
    outlines: Sequence[tuple[Record, Sequence[str]] | None],
    details: Sequence[Details],
    assigned: Sequence[Assignment],
) -> Record:
    """Hold each distinct outline once, and separately what single ranks have of their own.

    All by rank: `shapes` are as `shape_of` has them. The first rank with a shape has its outline, a
    record and the names of its images; leaves of `details` may differ from it, and so do tensors
    that are renamed. Two ranks have the same `w`, and their own `rng` and `at`:

        rank 0   {"w": A, "rng": B, "at": 0}      rank 1   {"w": A, "rng": C, "at": 1}

        outline        of both ranks: leaf 0 is w, leaf 1 is rng, leaf 2 is the value 0
        images         0 is w, 1 is rng, 2 is rng@rank-1
        difference     of rank 1: leaf 2 is the value 1; the row of rng is of image 2
    """
    joined = _Joined()
    bases: list[_Base] = []
    first: dict[bytes, int] = {}
    ranks: list[int] = []
    differences: list[RankDifference] = []
    for rank, (shape, mine) in enumerate(zip(shapes, outlines, strict=True)):
        renamed = assigned[rank].renamed
        if shape not in first:
            if mine is None:
                raise CheckpointError("a rank sent no outline", rank=rank, phase="plan")
            first[shape] = len(bases)
            bases.append(_Base(*mine, joined, renamed))
        base = bases[first[shape]]
        ranks.append(first[shape])
        found = _difference(rank, details[rank], renamed, base, joined)
        if found.leaves or found.images:
            differences.append(found)
    record = joined.kinds.record(
        tuple([base.outline for base in bases]),
        np.array(joined.kind_of, np.int64),
        ranks=tuple(ranks),
        differences=tuple(differences),
    )
    derived = Names(record)
    names = [(image, name) for name, image in joined.names.items() if derived[image] != name]
    return _replace(record, names=tuple(names))


def _difference(
    rank: int, one: Details, renamed: Mapping[str, str], base: _Base, joined: _Joined
) -> RankDifference:
    """The leaves and images that a rank has in place of those of its outline."""
    own = {}
    for index, leaf in one.leaves:
        if not 0 <= index < len(base.rows):
            text = f"leaf {index} of {len(base.rows)} was sent"
            raise CheckpointError(text, rank=rank, phase="plan")
        if _differ(leaf, base.rows[index]):
            own[index] = leaf
    numbers, images = base.numbers.copy(), {}
    kinds = {row.name: (row.dtype, row.shape) for row in one.tensors if row.name in renamed}
    for old in base.renamed | renamed.keys():
        if (image := base.images.get(old)) is None:
            continue
        if old in renamed:
            numbers[image] = joined.image(renamed[old], base.kind_like(image, *kinds[old]))
        else:
            numbers[image] = joined.names.get(old, numbers[image])
    changed = numbers != base.numbers
    if changed.any():
        for row in np.flatnonzero(changed[base.rows.images]).tolist():
            if int(base.rows.leaves[row]) not in own:
                images[row] = int(numbers[base.rows.images[row]])
        for index, leaf in base.others.items():
            if any(part.storage >= 0 and changed[part.storage] for part in parts(leaf)):
                own.setdefault(index, leaf)
    leaves = [(index, _renumbered(own[index], numbers, rank)) for index in sorted(own)]
    return RankDifference(rank, tuple(leaves), tuple(sorted(images.items())))


def _differ(leaf: Leaf, other: Leaf) -> bool:
    """Whether two leaves are different values: to Python True and 1 are equal."""
    return leaf != other or (not isinstance(leaf, TensorLeaf) and _encode(leaf) != _encode(other))


def _renumbered(leaf: Leaf, numbers: Numbers, rank: int | None = None) -> Leaf:
    """A leaf over images of the joined record; `numbers` has those of a rank's own."""

    def change(part: TensorLeaf) -> TensorLeaf:
        if part.storage >= len(numbers):
            text = f"image {part.storage} of {len(numbers)} was sent"
            raise CheckpointError(text, rank=rank, phase="plan")
        return _replace(part, storage=int(numbers[part.storage]))

    return with_parts(leaf, change)
