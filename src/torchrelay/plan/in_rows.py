"""The record of one outline, made from a list of its leaves. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from torchrelay.record import manifest as m
from torchrelay.record.kinds import KindTable
from torchrelay.record.schema import (
    ImageKind,
    LeafKind,
    Record,
    StateOutline,
    column_of,
)


def in_rows(tree: m.Node, leaves: Sequence[m.Leaf], images: Sequence[ImageKind]) -> Record:
    """A record without volumes. Tensors that are all of an image, as that is laid out, are rows.
    Images have at most one box."""
    rows: list[tuple[LeafKind, int]] = []
    others: list[tuple[int, m.Leaf]] = []
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, m.TensorLeaf) and _is_image(leaf, images):
            rows.append((LeafKind(leaf.dtype, leaf.shape, None, leaf.flags), leaf.storage))
        else:
            others.append((index, leaf))
    kinds = KindTable()
    kind_of_rows = np.array([kinds.leaf(kind) for kind, _ in rows], np.int64)
    kind_of = np.array([*map(kinds.image, images)], np.int64)
    outline = StateOutline(
        tree,
        len(leaves),
        tuple(leaf for _, leaf in others),
        column_of(np.array([index for index, _ in others], np.int64)),
        column_of(kind_of_rows),
        np.array([image for _, image in rows], np.int64),
    )
    return kinds.record((outline,), kind_of)


def _is_image(leaf: m.TensorLeaf, images: Sequence[ImageKind]) -> bool:
    if leaf.storage < 0 or leaf.offset or leaf.flags & m.META:
        return False
    image = images[leaf.storage]
    return image.shape == leaf.shape and image.strides == leaf.strides
