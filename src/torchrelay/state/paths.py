"""Keys of containers, and paths of leaves in a tree, as tuples and as text."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

from torchrelay.errors import RelayError
from torchrelay.record import manifest as m
from torchrelay.record.keys import identities, identity
from torchrelay.record.values import decode_key

Path = tuple[object, ...]
Name = str | bytes | int
"""Of an item in its container: the identity of a key, a field, or an index."""

_LONG = 200  # characters of a key that an error shows
_SHORT = range(-(1 << 63), 1 << 63)
_WRITTEN_BITS = 10_000  # of a number in decimal: Python refuses more than 4,300 digits


def show(path: Iterable[object]) -> str:
    """A path as people write it: ['model']['layers'][0]. Long keys are cut short."""
    texts = [str(key) if type(key) is int and key in _SHORT else _brief(key) for key in path]
    return f"[{']['.join(texts)}]" if texts else "the state itself"


@contextmanager
def naming(path: Path | str | Callable[[], Path]) -> Iterator[None]:
    """Have an error of the library name this path, unless it names one. Text is as people write
    it; a function is called only then."""
    try:
        yield
    except RelayError as fault:
        found = path() if callable(path) else path
        fault.path = fault.path or (found if isinstance(found, str) else show(found))
        raise


def _brief(key: object) -> str:
    if isinstance(key, str):
        return repr(key) if len(key) <= _LONG else f"{key[:_LONG]!r}..."
    if isinstance(key, tuple):
        few = ", ".join(map(_brief, key[:8]))
        return f"({few}{', ...' if len(key) > 8 else ',' if len(key) == 1 else ''})"
    return text_of(key)[:_LONG]


def text_of(key: object) -> str:
    """A key as text: `str`, also of numbers that Python has too many digits to write."""
    if type(key) is str:
        return key
    if isinstance(key, int) and key.bit_length() > _WRITTEN_BITS:
        return hex(key)
    if isinstance(key, tuple) and any(isinstance(item, (int, tuple)) for item in key):
        texts = [text_of(one) if isinstance(one, (int, tuple)) else repr(one) for one in key]
        return f"({', '.join(texts)}{',' if len(key) == 1 else ''})"
    return str(key)


def dotted(path: Path) -> str:
    """The name of a leaf: what torch's planners would call it, in text that can be written."""
    name = ".".join(map(text_of, path)) or "state"
    return name if name.isascii() else name.encode(errors="backslashreplace").decode()


def items_of(node: m.Node) -> tuple[m.Node, ...]:
    """The items of a container."""
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
    """A function from the name of an item to its position in the container."""
    if isinstance(node, m.SequenceNode):
        return partial(_index, len(node.items))
    places = {name: place for place, name in enumerate(names_of(node))}
    return lambda name: places.get(identity(name) if isinstance(name, int) else name)


def _index(length: int, name: Name) -> int | None:
    if isinstance(name, bytes) and name.startswith(b"i"):
        name = int(name[1:-1], 16)
    return name if isinstance(name, int) and 0 <= name < length else None


def slots(
    tree: m.Node, leaves: Container[int] | None = None, path: Path = ()
) -> Iterator[tuple[Path, int]]:
    """Path and leaf index of each slot of a tree, in order; those of these leaves if given.

    A peer's tree may have millions of slots at the end of a long path: keep only what you need.
    """
    if isinstance(tree, int):
        if leaves is None or tree in leaves:
            yield path, tree
        return
    for key, child in children_of(tree):
        if not isinstance(child, int):
            yield from slots(child, leaves, (*path, key))
        elif leaves is None or child in leaves:
            yield (*path, key), child


def subtree(tree: m.Node, path: Path) -> m.Node | None:
    """The node at a path, if there is one."""
    for step in path:
        if isinstance(tree, int):
            return None
        found = next((child for key, child in children_of(tree) if key == step), None)
        if found is None:
            return None
        tree = found
    return tree


def children_of(node: m.Node) -> Iterator[tuple[object, m.Node]]:
    """The items of a container with their keys."""
    if isinstance(node, m.DictNode):
        keys = (key if type(key) is str else decode_key(key) for key in node.keys)
        return zip(keys, node.items, strict=True)
    return zip(names_of(node), items_of(node), strict=True)


class EmptyTensor(NamedTuple):
    """A tensor without elements: it has no bytes, and a name all the same."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    path: Path


def empty_tensors(tree: m.Node, others: Mapping[int, m.Leaf]) -> list[EmptyTensor]:
    """The tensors without elements among the leaves of a state that are not rows of its record,
    distributed ones too."""
    found = {}
    for index, leaf in others.items():
        if isinstance(leaf, m.DTensorLeaf):
            leaf = leaf.local
        if isinstance(leaf, m.TensorLeaf) and 0 in leaf.shape and not leaf.flags & m.META:
            found[index] = leaf
    return [
        EmptyTensor(dotted(path), found[index].dtype, found[index].shape, path)
        for path, index in (slots(tree, found) if found else ())
    ]


class LeafPaths:
    """The paths of the leaves of a tree, the first one where a leaf has several.

    It holds where each leaf stands; a path is made when it is asked for.
    """

    def __init__(self, tree: m.Node) -> None:
        self._above: list[tuple[int, int]] = []  # of each container, what holds it and where
        self._nodes: list[m.Node] = []
        self._owners: dict[int, tuple[int, int]] = {}
        if isinstance(tree, int):
            self._owners[tree] = (-1, 0)
        else:
            self._enter(tree, -1, 0)

    def _enter(self, node: m.Node, above: int, place: int) -> None:
        here = len(self._nodes)
        self._nodes.append(node)
        self._above.append((above, place))
        for place, child in enumerate(items_of(node)):
            if not isinstance(child, int):
                self._enter(child, here, place)
            elif child not in self._owners:
                self._owners[child] = (here, place)

    def __contains__(self, leaf: int) -> bool:
        return leaf in self._owners

    def __iter__(self) -> Iterator[int]:
        return iter(self._owners)

    def __getitem__(self, leaf: int) -> Path:
        found: list[object] = []
        node, place = self._owners[leaf]
        while node >= 0:
            found.append(key_of(self._nodes[node], place))
            node, place = self._above[node]
        return tuple(reversed(found))
