"""A tree of containers from paths alone: strings are keys of dicts, integers places in lists."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torchrelay.errors import ManifestError
from torchrelay.state import manifest as m
from torchrelay.state.containers import Path
from torchrelay.state.values import encode_key


class _Branch(dict[Any, Any]):
    pass


def tree_of_paths(placed: Iterable[tuple[Path, m.Node]]) -> m.Node:
    """The containers that have these nodes at these paths.

    A container whose keys are 0, 1, 2 ... is a list, any other a dict.
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
    return _node(root, root=True)


def _node(branch: Any, root: bool = False) -> m.Node:
    if not isinstance(branch, _Branch):
        node: m.Node = branch
        return node
    items = {key: _node(child) for key, child in branch.items()}
    if items and not root and set(items) == set(range(len(items))):
        return m.SequenceNode("list", tuple(items[index] for index in range(len(items))))
    return m.DictNode("dict", tuple(encode_key(key) for key in items), tuple(items.values()))
