"""New values for a caller's containers, worked out before any of them is changed."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torchrelay.errors import MismatchError, UnsupportedLeafError
from torchrelay.record import manifest as m
from torchrelay.state.objects import Objects
from torchrelay.state.paths import Path
from torchrelay.state.tree import has_records, show, slots, unflatten


class Renewal:
    """A caller's state with `new` leaves in it; `state` is what it will be after `apply`.

    `tree` and `leaves` are the state taken apart, `new` has other leaves by their index there, and
    `touched` the leaves of tensors that are written in place. Dicts and lists are changed in place
    by `apply`; immutable containers are rebuilt where a part of them changes, and registered types
    where a leaf of theirs is new or touched, which `UnsupportedLeafError` may end. Modules stay
    what they are: their state dicts change. Other objects are not looked into.
    """

    def __init__(
        self,
        state: object,
        tree: m.Node,
        leaves: Sequence[object],
        new: Mapping[int, object],
        touched: Collection[int] = (),
        objects: Objects | None = None,
    ) -> None:
        self._leaves, self._new, self._touched = leaves, new, touched
        self._objects = objects or {}
        self._changes: list[tuple[Any, Any, object]] = []
        self._inside: dict[Path, list[tuple[Any, Any, object]]] = {}  # of modules
        idle = not new and not (touched and has_records(tree))
        self.state = state if idle else self._renewed(state, tree, ())

    @property
    def modules(self) -> list[Path]:
        """Modules whose state dicts get other values than tensors."""
        return list(self._inside)

    def apply_inside(self) -> None:
        """Change the state dicts of modules, which are not the modules' own yet."""
        for changes in self._inside.values():
            _set(changes)

    def apply(self) -> None:
        """Change the caller's containers."""
        _set(self._changes)

    def _renewed(self, value: Any, node: m.Node, path: Path) -> Any:
        held = self._objects.get(path)
        if held is None:
            return self._visit(value, node, path)
        if held.in_module:
            return value  # put there when the module takes it
        if held.in_place:
            outside, self._changes = self._changes, []
            self._visit(held.state, node, path)
            if self._changes:
                self._inside[path] = self._changes
            self._changes = outside
        return held.object

    def _visit(self, value: Any, node: m.Node, path: Path) -> Any:
        if isinstance(node, int):
            return self._new.get(node, value)
        if isinstance(node, m.RecordNode):
            return self._rebuilt(value, node, path)
        keys: list[Any] = list(value) if isinstance(value, dict) else list(range(len(value)))
        if len(keys) != len(node.items):
            raise MismatchError("the destination changed during the call", path=show(path))
        olds = [value[key] for key in keys]
        steps = node.fields if isinstance(node, m.NamedTupleNode) else keys
        news = [
            self._renewed(old, child, (*path, step))
            if not isinstance(child, int) or child in self._new
            else old
            for step, old, child in zip(steps, olds, node.items, strict=True)
        ]
        changed = [n for n, new in enumerate(news) if new is not olds[n]]
        if isinstance(value, tuple):
            return tuple.__new__(type(value), news) if changed else value
        for n in changed:
            self._changes.append((value, keys[n], news[n]))
        return value

    def _rebuilt(self, value: object, node: m.RecordNode, path: Path) -> object:
        mine = [index for _, index in slots(node.body)]
        if not any(index in self._new or index in self._touched for index in mine):
            return value
        try:
            return unflatten(node, {n: self._new.get(n, self._leaves[n]) for n in mine})
        except UnsupportedLeafError as fault:
            fault.path = show(path)
            raise


def _set(changes: list[tuple[Any, Any, object]]) -> None:
    for container, key, value in changes:
        container[key] = value
