"""Objects with `state_dict` and `load_state_dict` in a state, at any depth.

A state is described with the state dicts of its objects in their places. As a destination, a module
is filled in place. Every other object receives a new state dict, and may hold more or less than
that, as an optimizer does before its first step. A module may have such state too, by
`get_extra_state`: that part of its state dict counts as an object of its own. An `InPlaceObject`
is filled in place as modules are.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import torch

from torchrelay.errors import UnsupportedLeafError
from torchrelay.state.optimizers import with_own_parameter_names
from torchrelay.state.paths import Path
from torchrelay.state.registry import codec_of
from torchrelay.state.tree import Flat, flatten, show, slots, subtree
from torchrelay.state.wrappers import WrappedState, parameter_names

_EXTRA_STATE = "_extra_state"  # the last part of a key, as torch has it


class ExtraState:
    """The extra state of a module, in the state dict that the module is going to load."""

    def __init__(self, states: dict[str, Any], key: str) -> None:
        self._states, self._key = states, key

    def state_dict(self) -> Any:
        return self._states[self._key]

    def load_state_dict(self, state: Any) -> None:
        self._states[self._key] = state


class OfferedTensor(NamedTuple):
    """A tensor that is offered, and whether any box of it can be read without the rest."""

    dtype: str
    shape: tuple[int, ...]
    in_boxes: bool


class OwnWrite(NamedTuple):
    """Memory that an object writes itself when its state has landed, such as values that it
    converts: the elements from `offsets` on of its tensor `name`, whose shape is `shape`. No name
    stands for zeros. `parameter` is for messages."""

    parameter: str
    memory: torch.Tensor
    name: str | None = None
    shape: tuple[int, ...] = ()
    offsets: tuple[int, ...] = ()


class InPlaceObject(ABC):
    """An object whose state dict has memory that is written in place, as that of a module is."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """The tensors to be written, by the names of the one who offers them."""

    @abstractmethod
    def check(
        self,
        offered: Mapping[str, OfferedTensor | None],
        wanted: Callable[[str], bool],
        *,
        strict: bool,
    ) -> Collection[str]:
        """Refuse an offered state by `MismatchError` before a byte moves; None stands for anything
        that is not a tensor. Returns the names that are left out without being missed."""

    @abstractmethod
    def own_writes(self) -> list[OwnWrite]:
        """What `load_state_dict` is going to write, for the state that was checked last. The
        landing refuses memory that would have to take two values."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Called with the object's own state dict, after all of it and everything else of the
        destination has been verified and written. There is no way back from here."""


class StatefulObject(NamedTuple):
    """An object, and its state dict when it was looked at, in names without wrappers of modules."""

    object: Any
    state: Any
    wrapped: WrappedState | None = None

    def load(self, state: Any) -> None:
        """Have the object take a state dict in such names. Raises what the object raises."""
        if self.wrapped is not None:
            state = self.wrapped.under_own_names(state)
        elif isinstance(self.object, torch.optim.Optimizer):
            state = with_own_parameter_names(self.object, state)
        self.object.load_state_dict(state)

    @property
    def in_place(self) -> bool:
        return isinstance(self.object, (torch.nn.Module, InPlaceObject))

    @property
    def in_module(self) -> bool:
        """Whether it is a part of a module's state dict: its path is the module's and a key."""
        return isinstance(self.object, ExtraState)

    @property
    def choosy(self) -> bool:
        """Whether it may refuse even a state dict of its own."""
        kind = type(self.object)
        if issubclass(kind, InPlaceObject):
            return False
        return not self.in_place or kind.load_state_dict is not torch.nn.Module.load_state_dict


Objects = dict[Path, StatefulObject]


def flatten_objects(state: object) -> tuple[Flat, Objects]:
    """Take a state apart, with state dicts in place of objects; and the objects, by their paths.

    `UnsupportedLeafError` names an object that fails to give its state.
    """
    objects: Objects = {}

    def opened(value: object, path: Path) -> object:
        try:
            if not _is_stateful(value):
                return value
            state = value.state_dict()  # type: ignore[attr-defined]
        except Exception as fault:
            raise UnsupportedLeafError(
                f"{type(value).__name__}.state_dict() failed: {fault!r}", path=show(path)
            ) from fault
        wrapped = WrappedState.of(value, state) if isinstance(value, torch.nn.Module) else None
        bare = state if wrapped is None else wrapped.bare
        found = objects[path] = StatefulObject(value, bare, wrapped)
        for key in bare if found.in_place and isinstance(bare, dict) else ():
            if isinstance(key, str) and key.rpartition(".")[2] == _EXTRA_STATE:
                inside = *path, key
                objects[inside] = StatefulObject(ExtraState(bare, key), bare[key])
        return bare

    flat = flatten(state, opened)
    _strip_parameter_names(flat, objects)
    return flat, objects


def _strip_parameter_names(flat: Flat, objects: Objects) -> None:
    """Optimizers name parameters of wrapped modules as the modules do without their wrappers."""
    names: dict[object, str] = {}
    for kept in objects.values():
        if kept.wrapped is not None:
            names.update(parameter_names(kept.object))
    optimizers = [
        path for path, kept in objects.items() if isinstance(kept.object, torch.optim.Optimizer)
    ]
    for path in optimizers if names else ():
        groups = subtree(flat.tree, (*path, "param_groups"))
        for below, leaf in () if groups is None else slots(groups):
            if below[1:2] == ("param_names",):
                flat.leaves[leaf] = names.get(flat.leaves[leaf], flat.leaves[leaf])


def _is_stateful(value: object) -> bool:
    return (
        not isinstance(value, (torch.Tensor, type))
        and callable(getattr(value, "state_dict", None))
        and callable(getattr(value, "load_state_dict", None))
        and codec_of(type(value)) is None
    )
