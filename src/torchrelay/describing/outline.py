"""Outlines of a record, made from the columns of their tensor leaves and from all other leaves;
and the trees of several outlines as one, from which a load or a receive chooses."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

from torchrelay.geometry.boxes import Numbers
from torchrelay.record import manifest as m
from torchrelay.record.keys import check_keys, identities
from torchrelay.record.kinds import KindTable
from torchrelay.record.schema import ImageKind, LeafKind, Record, StateOutline, column_of
from torchrelay.record.values import Key


class TensorRows(NamedTuple):
    """Tensor leaves in columns: number, kind and image of each, and the byte where it begins."""

    leaves: Numbers
    kinds: Numbers
    images: Numbers
    offsets: Numbers


class OutlineBuilder:
    """The leaves of a state as they are found, in any order; `build` makes the outline of them."""

    def __init__(self) -> None:
        none: Numbers = np.zeros(0, np.int64)
        self._rows = [TensorRows(none, none, none, none)]
        self._others: dict[int, m.Leaf] = {}

    def add_rows(self, rows: TensorRows) -> None:
        """Add tensors that are rows."""
        self._rows.append(rows)

    def add(self, leaf: int, found: m.Leaf) -> None:
        """Add a leaf that is not a row."""
        self._others[leaf] = found

    def build(self, tree: m.Node, leaves: int) -> StateOutline:
        """The outline of a state with this number of leaves, all of them added once."""
        columns = [np.concatenate(some) for some in zip(*self._rows, strict=True)]
        if (columns[0][1:] < columns[0][:-1]).any():
            order = np.argsort(columns[0], kind="stable")
            columns = [column[order] for column in columns]
        rows, at = TensorRows(*columns), sorted(self._others)
        return StateOutline(
            tree,
            leaves,
            tuple([self._others[leaf] for leaf in at]),
            column_of(np.array(at, np.int64)),
            column_of(rows.kinds),
            None if (rows.images == np.arange(len(rows.images))).all() else rows.images,
            column_of(rows.offsets),
        )


def in_rows(tree: m.Node, leaves: Sequence[m.Leaf], images: Sequence[ImageKind]) -> Record:
    """A record without volumes. Tensors that are all of an image, as that is laid out, are rows.
    Images have at most one box."""
    kinds, found = KindTable(), OutlineBuilder()
    rows: list[tuple[int, int, int, int]] = []
    for index, leaf in enumerate(leaves):
        if (
            isinstance(leaf, m.TensorLeaf)
            and leaf.storage >= 0
            and not leaf.offset
            and not leaf.flags & m.META
            and (images[leaf.storage].shape, images[leaf.storage].strides)
            == (leaf.shape, leaf.strides)
        ):
            kind = kinds.leaves.number(LeafKind(leaf.dtype, leaf.shape, None, leaf.flags))
            rows.append((index, kind, leaf.storage, 0))
        else:
            found.add(index, leaf)
    found.add_rows(TensorRows(*np.array(rows, np.int64).reshape(-1, 4).T))
    kind_of = kinds.images.numbers(images)
    return kinds.record((found.build(tree, len(leaves)),), kind_of)


def laid_over(trees: Sequence[tuple[m.Node, int]]) -> m.Node:
    """Trees, each with its number of leaves, laid over each other: where two have a path, the first
    counts, and dicts take the keys that later ones add. The leaves of each are counted on from
    those of the ones before it."""
    nodes, shift = [], 0
    for tree, leaves in trees:
        nodes.append(shifted(tree, shift) if shift else tree)
        shift += leaves
    return _merged(nodes)


def _merged(nodes: Sequence[m.Node]) -> m.Node:
    top, dicts = nodes[0], [node for node in nodes if isinstance(node, m.DictNode)]
    if not isinstance(top, m.DictNode) or len(dicts) == 1:
        return top
    found: dict[str | bytes, tuple[Key, list[m.Node]]] = {}
    for node in dicts:
        for name, key, item in zip(identities(node.keys), node.keys, node.items, strict=True):
            found.setdefault(name, (key, []))[1].append(item)
    keys, items = zip(*found.values(), strict=True) if found else ((), ())
    check_keys(keys)  # each of the dicts alone was checked before
    return replace(top, keys=keys, items=tuple(map(_merged, items)))


def shifted(node: m.Node, by: int) -> m.Node:
    """A tree whose leaves have indices that are higher `by` so much."""
    return renumbered(node, by.__add__)


def renumbered(node: m.Node, number: Callable[[int], int]) -> m.Node:
    """A tree whose leaves have other indices, asked for in the order of the tree."""
    if isinstance(node, int):
        return number(node)
    if isinstance(node, m.RecordNode):
        return m.RecordNode(node.name, renumbered(node.body, number))
    return replace(node, items=tuple([renumbered(item, number) for item in node.items]))


def pruned(tree: m.Node, wanted: Collection[int], nothing: int) -> m.Node:
    """The part of a tree that has these leaves: dicts lose the other keys, and the leaf `nothing`
    takes the places of other items in sequences."""

    def visit(node: m.Node) -> m.Node | None:
        if isinstance(node, int):
            return node if node in wanted else None
        if isinstance(node, m.RecordNode):
            return None if visit(node.body) is None else node
        items = [visit(item) for item in node.items]
        if all(item is None for item in items):
            return None
        if isinstance(node, m.DictNode):
            kept = [(k, i) for k, i in zip(node.keys, items, strict=True) if i is not None]
            keys, values = zip(*kept, strict=True)
            return replace(node, keys=keys, items=values)
        return replace(node, items=tuple([nothing if item is None else item for item in items]))

    found = visit(tree)
    return m.DictNode("dict", (), ()) if found is None else found
