"""Objects with `state_dict` and `load_state_dict` in a state, as torch's checkpoints take them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

Key = tuple[object, ...]


class Unwrapped(NamedTuple):
    """A state with plain containers in place of objects, and the objects by where they stood."""

    state: Any
    objects: dict[Key, Any]


def unwrap(state: object) -> Unwrapped:
    """Replace the state itself, or the values of a dict that is the state, by their state dicts."""
    if _is_stateful(state):
        return Unwrapped(state.state_dict(), {(): state})  # type: ignore[attr-defined]
    if not isinstance(state, dict):
        return Unwrapped(state, {})
    objects: dict[Key, Any] = {(key,): value for key, value in state.items() if _is_stateful(value)}
    if not objects:
        return Unwrapped(state, {})
    plain = {
        key: value.state_dict() if (key,) in objects else value for key, value in state.items()
    }
    return Unwrapped(plain, objects)


def rewrap(original: Any, unwrapped: Unwrapped, plain: Any) -> Any:
    """The caller's state with new plain values in it; its objects were told theirs already."""
    if not unwrapped.objects:
        return plain
    if () not in unwrapped.objects:
        for key, value in plain.items():
            if (key,) not in unwrapped.objects:
                original[key] = value
    return original


def can_grow(stateful: object) -> bool:
    """Whether an object takes what its present state lacks, as a new optimizer does.

    A module does not: what it has is what it is made of.
    """
    return not isinstance(stateful, torch.nn.Module)


def like(objects: dict[Key, Any], path: Key, shape: tuple[int, ...]) -> torch.Tensor | None:
    """The distributed parameter that a new part of an optimizer's state belongs to, if that part
    has the parameter's shape."""
    for key, stateful in objects.items():
        if isinstance(stateful, torch.optim.Optimizer) and path[: len(key)] == key:
            match path[len(key) :]:
                case ("state", int(number), _):
                    params = [p for group in stateful.param_groups for p in group["params"]]
                    param = params[number] if number < len(params) else None
                    if isinstance(param, DTensor) and tuple(param.shape) == shape:
                        return param
    return None


def _is_stateful(value: object) -> bool:
    return (
        not isinstance(value, (torch.Tensor, dict, list, tuple))
        and callable(getattr(value, "state_dict", None))
        and callable(getattr(value, "load_state_dict", None))
    )
