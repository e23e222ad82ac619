"""Objects with `state_dict` and `load_state_dict` that stand in a state, at any depth.

A state is taken with the state dicts of its objects in their places. As a destination, a module is
filled in place: what it has is what it is made of. Every other object is told its state anew, and
may hold more or less than it is told, as an optimizer does before its first step.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from torchrelay.errors import UnsupportedLeafError
from torchrelay.state.paths import Path
from torchrelay.state.registry import codec_of
from torchrelay.state.tree import Flat, flatten, show


class Held(NamedTuple):
    """An object, and its state dict when it was looked at."""

    object: Any
    state: Any

    @property
    def in_place(self) -> bool:
        return isinstance(self.object, torch.nn.Module)

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
        return found.state

    return flatten(state, opened), objects


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
