"""Where things stand in a tree: the keys of containers, and the paths of leaves."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

from torchrelay.record import manifest as m
from torchrelay.record.keys import identities, identity
from torchrelay.record.values import decode_key

Path = tuple[object, ...]
Name = str | bytes | int
"""Of an item in its container: the identity of a key, a field, or an index."""


def items_of(node: m.Node) -> tuple[m.Node, ...]:
    """What a container holds."""
    if isinstance(node, m.RecordNode):
        return (node.body,)
    return () if isinstance(node, int) else node.items


def key_of(node: m.Node, place: int) -> object:
    """The key or index of an item of a container."""
    if isinstance(node, m.DictNode):
        key = node.keys[place]
        return key if type(key) is str else decode_key(key)
    if isinstance(node, m.NamedTupleNode):
        return node.fields[place]
    return node.name if isinstance(node, m.RecordNode) else place


def names_of(node: m.Node) -> Sequence[Name]:
    """The names of a container's items."""
    if isinstance(node, m.DictNode):
        return identities(node.keys)
    if isinstance(node, m.NamedTupleNode):
        return node.fields
    return (node.name,) if isinstance(node, m.RecordNode) else range(len(items_of(node)))


def finder(node: m.Node) -> Callable[[Name], int | None]:
    """What tells the place in a container of an item by its name."""
    if isinstance(node, m.SequenceNode):
        return partial(_index, len(node.items))
    places = {name: place for place, name in enumerate(names_of(node))}
    return lambda name: places.get(identity(name) if isinstance(name, int) else name)


def _index(length: int, name: Name) -> int | None:
    if isinstance(name, bytes) and name.startswith(b"i"):
        name = int(name[1:-1], 16)
    return name if isinstance(name, int) and 0 <= name < length else None


class LeafPaths:
    """The paths of the leaves of a tree, the first one where a leaf has several.

    It holds where each leaf stands; a path is made when somebody looks at it.
    """

    def __init__(self, tree: m.Node) -> None:
        self._above: list[tuple[int, int]] = []  # of each container, what holds it and where
        self._nodes: list[m.Node] = []
        self._homes: dict[int, tuple[int, int]] = {}
        if isinstance(tree, int):
            self._homes[tree] = (-1, 0)
            return
        stack: list[Iterator[tuple[int, m.Node]]] = []

        def enter(node: m.Node, above: int, place: int) -> None:
            self._nodes.append(node)
            self._above.append((above, place))
            stack.append(enumerate(items_of(node)))
            inside.append(len(self._nodes) - 1)

        inside: list[int] = []
        enter(tree, -1, 0)
        homes = self._homes
        while stack:
            here = inside[-1]
            for place, child in stack[-1]:
                if not isinstance(child, int):
                    enter(child, here, place)
                    break
                if child not in homes:
                    homes[child] = (here, place)
            else:
                stack.pop()
                inside.pop()

    def __contains__(self, leaf: int) -> bool:
        return leaf in self._homes

    def __iter__(self) -> Iterator[int]:
        return iter(self._homes)

    def __getitem__(self, leaf: int) -> Iterable[object]:
        return _LeafPath(self, leaf)

    def steps(self, leaf: int) -> Path:
        found: list[object] = []
        node, place = self._homes[leaf]
        while node >= 0:
            found.append(key_of(self._nodes[node], place))
            node, place = self._above[node]
        return tuple(reversed(found))


class _LeafPath:
    __slots__ = ("_leaf", "_paths")

    def __init__(self, paths: LeafPaths, leaf: int) -> None:
        self._paths, self._leaf = paths, leaf

    def __iter__(self) -> Iterator[object]:
        return iter(self._paths.steps(self._leaf))
