"""From leaves that have landed to the containers and objects of a caller.

`make` works everything out and may fail; nothing of the caller's has changed by then. `give` lets
objects take their new state, or refuse it, with a way back. Then the caller's tensors are
written, by whoever lands them, and `finish` puts the rest in its place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torchrelay.landing.commit.containers import Renewal
from torchrelay.landing.commit.objects import ObjectStates, give_written
from torchrelay.record import manifest as m
from torchrelay.state.objects import Objects
from torchrelay.state.paths import Path
from torchrelay.state.tree import Flat, subtree, unflatten

Pair = tuple[int, Path, int]


class Handover:
    """Of an offered `tree` to the destination `into`, whose plain state is taken apart in `flat`.

    `branches` has the offered state of each object that takes a new one: `before` the caller's
    tensors are written, or after, where some of them are filled in place. `inside` has the pairs
    (leaf offered, path, leaf here) that registered types are made of: these are decoded twice, of
    the new bytes to see that it works, and around the caller's own tensors when they are written.
    """

    def __init__(
        self,
        into: object,
        flat: Flat,
        objects: Objects,
        tree: m.Node,
        branches: Mapping[Path, m.Node],
        inside: Sequence[Pair],
        *,
        before: bool,
    ) -> None:
        self._into, self._flat, self._objects = into, flat, objects
        self._branches, self._before = branches, before
        self._inside = inside
        self._states = ObjectStates(objects)
        self._modules = [
            path
            for path, held in objects.items()
            if held.in_place and subtree(tree, path) is not None
        ]

    def make(
        self,
        values: Mapping[int, object],
        leaves: Mapping[int, object],
        inside: Mapping[int, object],
    ) -> None:
        """`values` are new plain ones by leaf here, `leaves` those of objects by leaf offered.
        `inside` takes the place of the caller's tensors in registered types, by leaf offered."""
        self._values, self._leaves = values, leaves
        trial = {here: inside[index] for index, _, here in self._inside}
        self._renewal = self._renewed({**trial, **values})
        self._news = self._new_states({**leaves, **inside})

    def give(self, *, written: bool = False) -> None:
        """`MismatchError` where an object refuses; then all of them have their old state.

        `written`: some of the caller's tensors are new already, so that no module can be asked.
        """
        if self._before:
            self._states.give(self._news)
        changed = {*self._renewal.modules, *(path[:-1] for path in self._news_in_modules)}
        asked = [
            path
            for path in self._modules
            if not written and (path in changed or self._objects[path].choosy)
        ]
        self._states.ask(asked, self._renewal.apply_inside)

    def take_back(self) -> list[Path]:
        """Undo `give`; returns the objects for which that failed."""
        return self._states.take_back()

    def finish(self) -> object:
        """The caller's tensors are new: so becomes the rest. Returns the state."""
        if self._inside:
            self._renewal = self._renewed(self._values)
            self._renewal.apply_inside()
            self._news = self._new_states(self._leaves)
        self._renewal.apply()
        inside = self._news_in_modules  # these first: modules take them along
        if not self._before:
            give_written(self._objects, {path: self._news[path] for path in inside})
        give_written(self._objects, {path: self._objects[path].state for path in self._modules})
        if not self._before:
            rest = {path: new for path, new in self._news.items() if path not in inside}
            give_written(self._objects, rest)
        return self._renewal.state

    @property
    def _news_in_modules(self) -> list[Path]:
        return [path for path in self._news if self._objects[path].in_module]

    def _renewed(self, new: Mapping[int, object]) -> Renewal:
        touched = {here for _, _, here in self._inside}
        return Renewal(self._into, *self._flat, new, touched, self._objects)

    def _new_states(self, leaves: Mapping[int, object]) -> dict[Path, object]:
        return {path: unflatten(branch, leaves) for path, branch in self._branches.items()}
