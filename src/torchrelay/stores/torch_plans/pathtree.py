"""A tree of containers from paths alone: text is a key of a dict, an integer a place in a list."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from torchrelay.errors import ManifestError
from torchrelay.plan.outline import renumbered
from torchrelay.record import manifest as m
from torchrelay.record.values import encode_key
from torchrelay.state.paths import Path


class Key(NamedTuple):
    """A step of a path that is a key of a dict and no text: a bare 0 is a place in a list."""

    value: object


class _Branch(dict[Any, Any]):
    pass


def tree_of_paths(placed: Iterable[tuple[Path, m.Node]]) -> tuple[m.Node, list[int]]:
    """The containers that have these nodes at these paths, their leaves counted in tree order;
    and for each leaf, in that order, the index it had in the nodes.

    Paths may come in any order. A container whose keys are 0, 1, 2 ... is a list, any other a dict.
    """
    root = _Branch()
    for path, node in placed:
        branch = root
        for step in path[:-1]:
            branch = branch.setdefault(step, _Branch())
            if not isinstance(branch, _Branch):
                raise ManifestError(f"{path} leads through a leaf")
        if not path or path[-1] in branch:
            raise ManifestError(f"two leaves at {path}")
        branch[path[-1]] = node
    order: dict[int, int] = {}
    tree = renumbered(_node(root, root=True), lambda index: order.setdefault(index, len(order)))
    return tree, list(order)


def _node(branch: Any, root: bool = False) -> m.Node:
    if not isinstance(branch, _Branch):
        node: m.Node = branch
        return node
    items = {key: _node(child) for key, child in branch.items()}
    if items and not root and set(items) == set(range(len(items))):
        return m.SequenceNode("list", tuple(items[index] for index in range(len(items))))
    keys = tuple(encode_key(key.value if isinstance(key, Key) else key) for key in items)
    return m.DictNode("dict", keys, tuple(items.values()))
