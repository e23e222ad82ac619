"""Outlines of a record, made from the columns of their tensor leaves and from all other leaves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from torchrelay.geometry.boxes import Numbers
from torchrelay.record import manifest as m
from torchrelay.record.kinds import KindTable
from torchrelay.record.schema import (
    ImageKind,
    LeafKind,
    Record,
    StateOutline,
    column_of,
)


class TensorRows(NamedTuple):
    """Tensor leaves in columns: number, kind and image of each, and the byte where it begins."""

    leaves: Numbers
    kinds: Numbers
    images: Numbers
    offsets: Numbers


def outline(
    tree: m.Node, leaves: int, others: Mapping[int, m.Leaf], *rows: TensorRows
) -> StateOutline:
    """The outline of a state with this number of leaves: tensors in `rows`, in any order, and
    `others`."""
    columns = rows[0] if len(rows) == 1 else map(np.concatenate, zip(*rows, strict=True))
    found: list[Numbers] = list(columns)
    if (found[0][1:] < found[0][:-1]).any():
        order = np.argsort(found[0], kind="stable")
        found = [column[order] for column in found]
    _, kinds, images, offsets = found
    at = sorted(others)
    return StateOutline(
        tree,
        leaves,
        tuple([others[leaf] for leaf in at]),
        column_of(np.array(at, np.int64)),
        column_of(kinds),
        None if (images == np.arange(len(images))).all() else images,
        column_of(offsets),
    )


def in_rows(tree: m.Node, leaves: Sequence[m.Leaf], images: Sequence[ImageKind]) -> Record:
    """A record without volumes. Tensors that are all of an image, as that is laid out, are rows.
    Images have at most one box."""
    kinds = KindTable()
    rows: list[tuple[int, int, int, int]] = []
    others: dict[int, m.Leaf] = {}
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, m.TensorLeaf) and _is_image(leaf, images):
            kind = kinds.leaf(LeafKind(leaf.dtype, leaf.shape, None, leaf.flags))
            rows.append((index, kind, leaf.storage, 0))
        else:
            others[index] = leaf
    kind_of = np.array([*map(kinds.image, images)], np.int64)
    columns = TensorRows(*np.array(rows, np.int64).reshape(-1, 4).T)
    return kinds.record((outline(tree, len(leaves), others, columns),), kind_of)


def _is_image(leaf: m.TensorLeaf, images: Sequence[ImageKind]) -> bool:
    if leaf.storage < 0 or leaf.offset or leaf.flags & m.META:
        return False
    image = images[leaf.storage]
    return image.shape == leaf.shape and image.strides == leaf.strides
