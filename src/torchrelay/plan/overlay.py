"""The trees of several ranks as one: a load or a receive chooses from it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec.structs import replace

from torchrelay.record import manifest as m
from torchrelay.record.keys import identities
from torchrelay.record.values import Key


def laid_over(trees: Sequence[tuple[m.Node, int]]) -> m.Node:
    """Trees, each with its number of leaves, laid over each other: where two have a path, the first
    counts. The leaves of each are counted on from those of the ones before it."""
    if len(trees) == 1:
        return trees[0][0]
    layers, shift = _Layers(), 0
    for tree, leaves in trees:
        layers.add(shifted(tree, shift) if shift else tree)
        shift += leaves
    return layers.node()


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


class _Layers:
    """Nodes laid over each other: the first one counts, but a dict takes what a later one adds."""

    def __init__(self) -> None:
        self._top: m.Node | None = None
        self._items: dict[str | bytes, tuple[Key, _Layers]] | None = None

    def add(self, node: m.Node) -> None:
        """Lay a node under those that are there. Takes as long as the node is large."""
        if self._top is None:
            self._top = node
            return
        if not isinstance(self._top, m.DictNode) or not isinstance(node, m.DictNode):
            return
        if self._items is None:
            self._items = {}
            self._take_in(self._top)
        self._take_in(node)

    def _take_in(self, node: m.DictNode) -> None:
        assert self._items is not None
        for name, key, item in zip(identities(node.keys), node.keys, node.items, strict=True):
            self._items.setdefault(name, (key, _Layers()))[1].add(item)

    def node(self) -> m.Node:
        top = self._top
        assert top is not None
        if self._items is None or not isinstance(top, m.DictNode):
            return top
        keys = tuple([key for key, _ in self._items.values()])
        items = tuple([layers.node() for _, layers in self._items.values()])
        return replace(top, keys=keys, items=items)


def pruned(tree: m.Node, made: dict[int, object]) -> tuple[m.Node, dict[int, object]]:
    """The part of a tree that was asked for: dicts lose the other keys, sequences hold None."""
    nothing = max(made, default=0) + 1
    leaves = {**made, nothing: None}

    def visit(node: m.Node) -> m.Node | None:
        if isinstance(node, int):
            return node if node in made else None
        if isinstance(node, m.RecordNode):
            body = visit(node.body)
            return None if body is None else node
        items = [visit(item) for item in node.items]
        if all(item is None for item in items):
            return None
        if isinstance(node, m.DictNode):
            kept = [(k, i) for k, i in zip(node.keys, items, strict=True) if i is not None]
            keys, values = zip(*kept, strict=True)
            return replace(node, keys=keys, items=values)
        return replace(node, items=tuple(nothing if item is None else item for item in items))

    pruned = visit(tree)
    return (m.DictNode("dict", (), ()), leaves) if pruned is None else (pruned, leaves)
