"""The tree of a state: flattening containers into nodes and leaves, and building them again.

A path is the tuple of keys and indices that leads to a leaf. Two slots that hold the same object
share one leaf.
"""

from __future__ import annotations

import builtins
from collections import OrderedDict, defaultdict, namedtuple
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from msgspec.structs import replace

from torchrelay.errors import ManifestError, UnsupportedLeafError
from torchrelay.record import manifest as m
from torchrelay.record.keys import check_keys
from torchrelay.record.values import Key, decode_key, encode_key
from torchrelay.state.paths import Path, children_of, show, slots, subtree, text_of
from torchrelay.state.registry import codec_named, codec_of

__all__ = ["children_of", "show", "slots", "subtree", "text_of"]  # of `paths`, used with trees

_FACTORIES: dict[str, type] = {name: getattr(builtins, name) for name in m.FACTORIES}
_PLAIN = (torch.Tensor, str, int, float, type(None))


# Returns the replacement for an object at a path, or the object itself if it is a leaf.
OpenObject = Callable[[object, Path], object]


class Flat(NamedTuple):
    """A state taken apart."""

    tree: m.Node
    leaves: list[object]


def flatten(state: object, opened: OpenObject | None = None) -> Flat:
    """Take a state apart. `UnsupportedLeafError` for a container that cannot be rebuilt exactly.

    Objects other than containers become leaves, whatever they are. `opened` is called with each of
    them; if it returns another object, that one is flattened in its place.
    """
    walk = _Walk(opened)
    return Flat(walk.visit(state, ()), walk.leaves)


class _Walk:
    """Through a state, once: containers become nodes, and what is in them leaves."""

    def __init__(self, opened: OpenObject | None) -> None:
        self.leaves: list[object] = []
        self._opened = opened
        self._known: dict[int, int] = {}  # by id of a tensor, its leaf
        # The loop in `_children` is for tensors that are not registered as anything else.
        kinds = (torch.Tensor, torch.nn.Parameter)
        self._tensors = {kind for kind in kinds if codec_of(kind) is None}

    def visit(self, value: object, path: Path) -> m.Node:
        if isinstance(value, _PLAIN) and codec_of(type(value)) is None:
            return self._leaf(value)
        if len(path) >= m.MAX_DEPTH:
            raise UnsupportedLeafError(
                f"nested deeper than {m.MAX_DEPTH}, or in itself", path=show(path[:8]) + "..."
            )
        return self._node(value, path)

    def _node(self, value: object, path: Path) -> m.Node:
        kind = type(value)
        name: Any = kind.__name__
        codec = codec_of(kind)
        if codec is not None:
            try:
                body = codec.encode(value)
            except Exception as fault:
                raise UnsupportedLeafError(
                    f"registered type {codec.name!r} cannot be encoded: {fault!r}", path=show(path)
                ) from fault
            return m.RecordNode(codec.name, self._inside(body, (*path, codec.name)))
        if isinstance(value, dict) and kind in (dict, OrderedDict, defaultdict):
            keys = self._keys(value, path)
            items = self._children(list(value.values()), path, value)
            return m.DictNode(name, keys, items, _factory(value, path))
        if isinstance(value, (list, tuple)) and kind in (list, tuple):
            return m.SequenceNode(name, self._children(list(value), path))
        if is_namedtuple(kind) and isinstance(value, tuple):
            fields: tuple[str, ...] = kind._fields  # type: ignore[attr-defined]
            items = self._children(list(value), path, fields)
            return m.NamedTupleNode(kind.__name__, fields, items, kind.__module__)
        found = value if self._opened is None else self._opened(value, path)
        return self._leaf(value) if found is value else self._inside(found, path)

    def _keys(self, mapping: dict[Any, Any], path: Path) -> tuple[Key, ...]:
        # The condition is that of `encode_key`, for all at once: nearly all keys are such.
        if [*map(type, mapping)].count(str) == len(mapping) and "".join(mapping).isascii():
            return tuple(mapping)
        try:
            keys = tuple([encode_key(k) for k in mapping])
            check_keys(keys)
        except TypeError as fault:
            raise UnsupportedLeafError(
                f"a dict key of type {fault}: keys are str, int, float, bool, None or tuples of "
                "those",
                path=show(path),
            ) from None
        except ValueError as fault:
            raise UnsupportedLeafError(f"a dict key: {fault}", path=show(path)) from None
        except ManifestError as fault:
            raise UnsupportedLeafError(fault.message, path=show(path)) from None
        return keys

    def _inside(self, body: object, path: Path) -> m.Node:
        """The node for an opened object. Objects inside of it are not opened in turn."""
        before, self._opened = self._opened, None
        try:
            return self.visit(body, path)
        finally:
            self._opened = before

    def _children(
        self, values: list[object], path: Path, keys: Iterable[object] | None = None
    ) -> tuple[m.Node, ...]:
        leaves, known, tensors = self.leaves, self._known, self._tensors
        nodes: list[m.Node] = []
        for key, item in enumerate(values) if keys is None else zip(keys, values, strict=True):
            if type(item) not in tensors:
                nodes.append(self.visit(item, (*path, key)))
                continue
            # The work of `visit` and `_leaf` for a tensor, inlined: most items are tensors.
            index = known.get(id(item))
            if index is None:
                index = known[id(item)] = len(leaves)
                leaves.append(item)
            nodes.append(index)
        return tuple(nodes)

    def _leaf(self, value: object) -> int:
        # Shared identity matters for what can be written to; equal plain values may well be shared
        # by the interpreter alone.
        index = len(self.leaves)
        if isinstance(value, torch.Tensor):
            index = self._known.setdefault(id(value), index)
        if index == len(self.leaves):
            self.leaves.append(value)
        return index


def is_namedtuple(kind: type) -> bool:
    return (
        kind.__bases__ == (tuple,)
        and isinstance(getattr(kind, "_fields", None), tuple)
        and all(type(name) is str for name in kind._fields)  # type: ignore[attr-defined]
    )


def _factory(value: dict[Any, Any], path: Path) -> Any:
    factory = value.default_factory if isinstance(value, defaultdict) else None
    if factory is None:
        return None
    name = getattr(factory, "__name__", "")
    if _FACTORIES.get(name) is not factory:
        raise UnsupportedLeafError(
            f"a defaultdict of {factory!r}: the factory is one of {', '.join(_FACTORIES)}",
            path=show(path),
        )
    return name


def check_types(tree: m.Node) -> None:
    """Raise unless every registered type in the tree is known here."""
    for path, node in records_of(tree, nested=True):
        if codec_named(node.name) is None:
            raise UnsupportedLeafError(
                f"the sender's type {node.name!r} is not registered here: call "
                "torchrelay.register()",
                path=show(path),
            )


_Leaves = Sequence[object] | Mapping[int, object]


def unflatten(tree: m.Node, leaves: _Leaves, path: Path = ()) -> object:
    """Build the state of `tree`, which is at `path`, with `leaves` in its slots.

    `UnsupportedLeafError` names the path of a registered type that cannot be made of them.
    """
    return _Unflatten(tree, leaves, path).build(tree)


class _Unflatten:
    def __init__(self, tree: m.Node, leaves: _Leaves, path: Path) -> None:
        self._tree, self._leaves, self._path = tree, leaves, path
        self._types: dict[tuple[str, ...], type[tuple[object, ...]]] = {}

    def build(self, node: m.Node) -> object:
        leaves = self._leaves
        if isinstance(node, int):
            return leaves[node]
        if isinstance(node, m.RecordNode):
            return self._decoded(node, self.build(node.body))
        items = node.items
        values = [leaves[n] if type(n) is int else self.build(n) for n in items]
        if isinstance(node, m.SequenceNode):
            return values if node.kind == "list" else tuple(values)
        if isinstance(node, m.NamedTupleNode):
            key = (node.module, node.name, *node.fields)
            if key not in self._types:
                self._types[key] = _namedtuple_type(node)
            return tuple.__new__(self._types[key], values)
        keys: Iterable[Any] = node.keys
        if not {str}.issuperset(map(type, node.keys)):
            keys = [key if type(key) is str else decode_key(key) for key in node.keys]
        pairs = zip(keys, values, strict=True)
        if node.kind == "OrderedDict":
            return OrderedDict(pairs)
        if node.kind == "defaultdict":
            return defaultdict(_FACTORIES[node.factory] if node.factory else None, pairs)
        return dict(pairs)

    def _decoded(self, node: m.RecordNode, body: object) -> object:
        codec = codec_named(node.name)
        if codec is None:
            check_types(self._tree)
        assert codec is not None
        try:
            return codec.decode(body)
        except Exception as fault:
            records = records_of(self._tree, self._path, nested=True)
            raise UnsupportedLeafError(
                f"registered type {node.name!r} cannot be rebuilt here: {fault!r}; do both sides "
                "run the same version of it?",
                path=show(next(path for path, one in records if one is node)),
            ) from fault


def _namedtuple_type(node: m.NamedTupleNode) -> type[tuple[object, ...]]:
    """The loaded namedtuple class with this name and these fields, or a new one like it.

    Only classes that already exist are considered, nothing is imported, and instances are made by
    `tuple.__new__`, so no code of the class runs.
    """
    same = [
        kind
        for kind in tuple.__subclasses__()
        if kind.__name__ == node.name and is_namedtuple(kind) and kind._fields == node.fields  # type: ignore[attr-defined]
    ]
    same.sort(key=lambda kind: kind.__module__ != node.module)
    return same[0] if same else namedtuple(node.name, node.fields, rename=True)


def has_records(tree: m.Node) -> bool:
    """Whether a registered type is among the containers: what it decodes to is its own affair."""
    if isinstance(tree, int):
        return False
    if isinstance(tree, m.RecordNode):
        return True
    if {int}.issuperset(map(type, tree.items)):
        return False  # leaves alone, as most containers
    return any(has_records(child) for child in tree.items)


def records_of(
    tree: m.Node, path: Path = (), *, nested: bool = False
) -> Iterator[tuple[Path, m.RecordNode]]:
    """The registered types in a tree, with their paths; those inside of others too if `nested`."""
    if isinstance(tree, m.RecordNode):
        yield path, tree
        if not nested:
            return
    elif not has_records(tree):
        return
    for key, child in children_of(tree):
        yield from records_of(child, (*path, key), nested=nested)


def inside_records(tree: m.Node) -> set[int]:
    """The leaves that registered types are made of."""
    return {index for _, node in records_of(tree) for _, index in slots(node)}


def grafted(tree: m.Node, grafts: Mapping[Path, m.Node], path: Path = ()) -> m.Node:
    """The tree with other nodes at these paths, none of them inside of a registered type."""
    if path in grafts:
        return grafts[path]
    if isinstance(tree, (int, m.RecordNode)):
        return tree
    if not any(graft[: len(path)] == path for graft in grafts):
        return tree
    items = tuple([grafted(child, grafts, (*path, key)) for key, child in children_of(tree)])
    return replace(tree, items=items)
