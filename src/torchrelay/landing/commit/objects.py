"""Objects of a destination take their new state: all of them, or none.

`load_state_dict` is other people's code and may refuse anything. So it is called while nothing else
has been written: if one object refuses, it and those before it get their old state back. Modules,
whose tensors are written in place, are asked before that too, with the new plain values and their
old tensors, where there is anything they could refuse.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import numpy as np
import torch

from torchrelay.errors import MismatchError, TornStateError
from torchrelay.state import tensors as t
from torchrelay.state.objects import Objects, StatefulObject
from torchrelay.state.paths import Path
from torchrelay.state.tree import Flat, flatten, show, unflatten


class _Old:
    """The state of an object as it was, in containers of its own; tensors are not copied."""

    def __init__(self, held: StatefulObject) -> None:
        self._held = held
        flat: Flat = flatten(held.state)
        self._tree = flat.tree
        self._leaves = [x.copy() if isinstance(x, np.ndarray) else x for x in flat.leaves]
        # A module that is asked copies its tensors to themselves, which counts as a write.
        tensors = [] if held.in_place else flat.leaves
        self._tensors = [x for x in tensors if isinstance(x, torch.Tensor)]
        self._versions = t.versions_of(self._tensors)

    def restore(self) -> bool:
        """Give the object its old state; whether it has it again, as far as one can know."""
        if t.versions_of(self._tensors) != self._versions:
            return False
        try:
            self._held.load(unflatten(self._tree, self._leaves))
        except Exception:
            return False
        return True


class ObjectStates:
    """New states for the objects of one destination, and the way back."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self._old: dict[Path, _Old] = {}

    def give(self, states: Mapping[Path, object]) -> None:
        """Give new states to objects that are not filled in place. After a refusal all have their
        old state: `MismatchError`, or `TornStateError` where one of them did not take it back."""
        for path, state in states.items():
            for one in (path[:-1], path) if self._objects[path].in_module else (path,):
                self._remember(one)
            self._load(path, state)

    def ask(self, paths: Iterable[Path], renew: Callable[[], None]) -> None:
        """Ask modules whether they take what `renew` puts into their state dicts."""
        asked = list(paths)
        for path in asked:
            self._remember(path)
        renew()
        for path in asked:
            self._load(path, self._objects[path].state)

    def _remember(self, path: Path) -> None:
        if path not in self._old:
            self._old[path] = _Old(self._objects[path])

    def _load(self, path: Path, state: object) -> None:
        held = self._objects[path]
        try:
            held.load(state)
        except BaseException as fault:
            torn = self.take_back()
            if not isinstance(fault, Exception):
                raise
            raise _refusal(path, held.object, fault, torn) from fault

    def take_back(self) -> list[Path]:
        """Give every object its old state back; returns those that are torn."""
        old, self._old = self._old, {}
        return [path for path, before in reversed(old.items()) if not before.restore()]


def _refusal(
    path: Path, refused: object, fault: Exception, torn: list[Path]
) -> MismatchError | TornStateError:
    said = f"{type(refused).__name__}.load_state_dict refused its new state: {fault!r}"
    if not torn:
        return MismatchError(f"{said}; everything is as it was", path=show(path))
    names = ", ".join(map(show, torn))
    return TornStateError(
        f"{said}; not everything could be put back: {names} may be part new, the rest is old; "
        "load a state into it, or make a new one",
        path=show(path),
    )


def give_written(objects: Objects, states: Mapping[Path, object]) -> None:
    """Give states to objects whose tensors have been written already; there is no way back."""
    left = list(states)
    for number, path in enumerate(left):
        held = objects[path]
        try:
            held.load(states[path])
        except Exception as fault:
            names, kind = ", ".join(map(show, left[number:])), type(held.object).__name__
            raise TornStateError(
                f"{kind}.load_state_dict refused its new state: {fault!r}; "
                f"{names} may be part old, the rest is new; load a state into it, or make another",
                path=show(path),
            ) from fault
