"""Objects with `state_dict` and `load_state_dict` that stand in a state, at any depth.

A state is taken with the state dicts of its objects in their places. As a destination, a module is
filled in place: what it has is what it is made of. Every other object is told its state anew, and
may hold more or less than it is told, as an optimizer does before its first step. So may a module
beside its tensors, by `get_extra_state`: that part of its state dict counts as an object in it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from torchrelay.errors import UnsupportedLeafError
from torchrelay.state.paths import Path
from torchrelay.state.registry import codec_of
from torchrelay.state.tree import Flat, flatten, show

_EXTRA_STATE = "_extra_state"  # the last part of a key, as torch has it


class ExtraState:
    """What a module has beside its tensors, in a state dict that the module is going to be told."""

    def __init__(self, states: dict[str, Any], key: str) -> None:
        self._states, self._key = states, key

    def state_dict(self) -> Any:
        return self._states[self._key]

    def load_state_dict(self, state: Any) -> None:
        self._states[self._key] = state


class Held(NamedTuple):
    """An object, and its state dict when it was looked at."""

    object: Any
    state: Any

    @property
    def in_place(self) -> bool:
        return isinstance(self.object, torch.nn.Module)

    @property
    def in_module(self) -> bool:
        """Whether it is a part of a module's state dict: its path is the module's and a key."""
        return isinstance(self.object, ExtraState)

    @property
    def choosy(self) -> bool:
        """Whether it may refuse even a state dict of its own."""
        kind = type(self.object)
        return not self.in_place or kind.load_state_dict is not torch.nn.Module.load_state_dict


Objects = dict[Path, Held]


def flatten_objects(state: object) -> tuple[Flat, Objects]:
    """Take a state apart, with state dicts in place of objects; and the objects, by their paths.

    `UnsupportedLeafError` names an object that fails to give its state.
    """
    objects: Objects = {}

    def opened(value: object, path: Path) -> object:
        if not _is_stateful(value):
            return value
        found = objects[path] = Held(value, _state_of(value, path))
        if found.in_place:
            objects.update(((*path, key), held) for key, held in _extra_states(found.state))
        return found.state

    return flatten(state, opened), objects


def _extra_states(states: Any) -> Iterator[tuple[str, Held]]:
    """By their keys in a module's state dict."""
    for key in states if isinstance(states, dict) else ():
        if isinstance(key, str) and key.rpartition(".")[2] == _EXTRA_STATE:
            extra = ExtraState(states, key)
            yield key, Held(extra, extra.state_dict())


def _is_stateful(value: object) -> bool:
    return (
        not isinstance(value, (torch.Tensor, type))
        and callable(getattr(value, "state_dict", None))
        and callable(getattr(value, "load_state_dict", None))
        and codec_of(type(value)) is None
    )


def _state_of(stateful: Any, path: Path) -> object:
    try:
        return stateful.state_dict()
    except Exception as fault:
        raise UnsupportedLeafError(
            f"{type(stateful).__name__}.state_dict() failed: {fault!r}", path=show(path)
        ) from fault


def parameters_of(stateful: object) -> list[torch.Tensor]:
    """The parameters that an optimizer's state is of, by their numbers in it; none of any other."""
    if not isinstance(stateful, torch.optim.Optimizer):
        return []
    return [parameter for group in stateful.param_groups for parameter in group["params"]]


def parameter_of(parameters: list[torch.Tensor], below: Path) -> torch.Tensor | None:
    """Which of them a part of the state belongs to, at any depth of it, by its path."""
    match below:
        case ("state", int(number), _, *_) if 0 <= number < len(parameters):
            return parameters[number]
    return None
