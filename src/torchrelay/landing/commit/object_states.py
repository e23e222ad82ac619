"""From leaves that have landed to the containers and objects of a caller.

`make` works everything out and may fail; nothing of the caller's has changed by then. `give` lets
objects take their new state, or refuse it, with a way back. Then the caller's tensors are
written, by whoever lands them, and `finish` puts the rest in its place.

`load_state_dict` is other people's code and may refuse anything. So it is called while nothing else
has been written: if one object refuses, it and those before it get their old state back. Modules,
whose tensors are written in place, are tried before that too, with the new plain values and their
old tensors, where there is anything they could refuse.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from torchrelay.errors import MismatchError, TornStateError
from torchrelay.landing.pairing import Pairing
from torchrelay.planning.destination import Destination
from torchrelay.record import manifest as m
from torchrelay.state import tensors as t
from torchrelay.state.matching import Pair
from torchrelay.state.objects import StatefulObject
from torchrelay.state.paths import Path
from torchrelay.state.tree import flatten, has_records, show, slots, subtree, unflatten


class ObjectStates:
    """Of an offered `tree` to a destination.

    Objects take their states, whose `leaves` are by leaf offered, `before` the caller's tensors are
    written; or after, where some of them are filled in place. `values` are new plain ones by leaf
    here. `inside` has the pairs that registered types are made of: these are decoded twice, of the
    `trial` leaves to see that it works, and around the caller's own tensors when they are written.
    """

    def __init__(
        self,
        pairing: Pairing,
        tree: m.Node,
        values: Mapping[int, object],
        leaves: Sequence[object],
        inside: Sequence[Pair],
        trial: Mapping[int, object],
        *,
        before: bool,
    ) -> None:
        self._before = before
        self._pairing, self._inside, self._values, self._leaves = pairing, inside, values, leaves
        self._objects = pairing.into.objects
        self._old: dict[Path, _Old] = {}  # of objects that have been given another state
        self._modules = [
            path
            for path, stateful in self._objects.items()
            if stateful.in_place and subtree(tree, path) is not None
        ]
        tried = {here: trial[index] for index, _, here in inside}
        self._renewal = self._renewed({**tried, **values})
        new = [*leaves]
        for index, leaf in trial.items():
            new[index] = leaf
        self._news = self._new_states(new)

    def give(self, *, written: bool = False) -> None:
        """`MismatchError` where an object refuses; then all of them have their old state.

        `written`: some of the caller's tensors are new already, so that no module can be tried.
        """
        for path, state in self._news.items() if self._before else ():
            for one in (path[:-1], path) if self._objects[path].in_module else (path,):
                self._remember(one)
            self._give(path, state)
        changed = {*self._renewal.modules, *(path[:-1] for path in self._news_in_modules)}
        tried = [
            path
            for path in self._modules
            if not written and (path in changed or self._objects[path].choosy)
        ]
        for path in tried:
            self._remember(path)
        self._renewal.apply_inside()
        for path in tried:
            self._give(path, self._objects[path].state)

    def _remember(self, path: Path) -> None:
        if path not in self._old:
            self._old[path] = _Old(self._objects[path])

    def _give(self, path: Path, state: object) -> None:
        """Have an object take a state. After a refusal all objects have their old state:
        `MismatchError`, or `TornStateError` where one of them did not take it back."""
        stateful = self._objects[path]
        try:
            stateful.load(state)
        except BaseException as fault:
            torn = self.take_back()
            if not isinstance(fault, Exception):
                raise
            text = (
                f"{type(stateful.object).__name__}.load_state_dict refused its new state: {fault!r}"
            )
            if not torn:
                raise MismatchError(f"{text}; everything is as it was", path=show(path)) from fault
            raise TornStateError(
                f"{text}; not everything could be put back: {', '.join(map(show, torn))} may be "
                "part new, the rest is old; load a state into it, or make a new one",
                path=show(path),
            ) from fault

    def take_back(self) -> list[Path]:
        """Undo `give`; returns the objects for which that failed."""
        old, self._old = self._old, {}
        return [path for path, before in reversed(old.items()) if not before.restore()]

    def finish(self) -> object:
        """The caller's tensors are new: so becomes the rest. Returns the state."""
        if self._inside:
            self._renewal = self._renewed(self._values)
            self._renewal.apply_inside()
            self._news = self._new_states(self._leaves)
        self._renewal.apply()
        self._give_written()
        return self._renewal.state

    def _give_written(self) -> None:
        """Give objects their states after the caller's tensors: there is no way back."""
        states = {path: self._objects[path].state for path in self._modules}
        if not self._before:  # parts of modules come first: modules take them along
            inside = {path: self._news[path] for path in self._news_in_modules}
            states = {**inside, **states, **self._news}
        left = list(states)
        for number, path in enumerate(left):
            stateful = self._objects[path]
            try:
                stateful.load(states[path])
            except Exception as fault:
                names, kind = ", ".join(map(show, left[number:])), type(stateful.object).__name__
                raise TornStateError(
                    f"{kind}.load_state_dict refused its new state: {fault!r}; "
                    f"{names} may be part old, the rest is new; load a state into it, or make "
                    "another",
                    path=show(path),
                ) from fault

    @property
    def _news_in_modules(self) -> list[Path]:
        return [path for path in self._news if self._objects[path].in_module]

    def _renewed(self, new: Mapping[int, object]) -> _Renewal:
        return _Renewal(self._pairing.into, new, {here for _, _, here in self._inside})

    def _new_states(self, leaves: Sequence[object]) -> dict[Path, object]:
        branches = self._pairing.branches
        return {path: unflatten(branch, leaves) for path, branch in branches.items()}


class _Old:
    """The state of an object as it was, in containers of its own; tensors are not copied."""

    def __init__(self, stateful: StatefulObject) -> None:
        self._stateful = stateful
        flat = flatten(stateful.state)
        self._tree = flat.tree
        self._leaves = [x.copy() if isinstance(x, np.ndarray) else x for x in flat.leaves]
        # A module that is tried copies its tensors to themselves, which counts as a write.
        tensors = [] if stateful.in_place else flat.leaves
        self._tensors = [x for x in tensors if isinstance(x, torch.Tensor)]
        self._versions = t.versions_of(self._tensors)

    def restore(self) -> bool:
        """Give the object its old state; whether it has it again, as far as one can know."""
        if t.versions_of(self._tensors) != self._versions:
            return False
        try:
            self._stateful.load(unflatten(self._tree, self._leaves))
        except Exception:
            return False
        return True


class _Renewal:
    """A caller's state with `new` leaves in it; `state` is what it will be after `apply`.

    `new` has other leaves by their index in the destination, and `touched` the leaves of tensors
    that are written in place. Dicts and lists are changed in place
    by `apply`; immutable containers are rebuilt where a part of them changes, and registered types
    where a leaf of theirs is new or touched, which `UnsupportedLeafError` may end. Modules stay
    what they are: their state dicts change. Other objects are not looked into.
    """

    def __init__(
        self, into: Destination, new: Mapping[int, object], touched: Collection[int]
    ) -> None:
        self._leaves, self._new, self._touched = into.own, new, touched
        self._objects, tree = into.objects, into.flat.tree
        self._changes: list[tuple[Any, Any, object]] = []
        self._inside: dict[Path, list[tuple[Any, Any, object]]] = {}  # of modules
        idle = not new and not (touched and has_records(tree))
        self.state = into.into if idle else self._renewed(into.into, tree, ())

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
        stateful = self._objects.get(path)
        if stateful is None:
            return self._visit(value, node, path)
        if stateful.in_module:
            return value  # put there when the module takes it
        if stateful.in_place:
            outside, self._changes = self._changes, []
            self._visit(stateful.state, node, path)
            if self._changes:
                self._inside[path] = self._changes
            self._changes = outside
        return stateful.object

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
        return unflatten(node, {n: self._new.get(n, self._leaves[n]) for n in mine}, path)


def _set(changes: list[tuple[Any, Any, object]]) -> None:
    for container, key, value in changes:
        container[key] = value
