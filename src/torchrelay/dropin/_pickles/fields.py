"""What a pickle tells of its records, looked at by type and bound before anything is made of it."""

from __future__ import annotations

from typing import Any

import torch

from torchrelay.dropin._pickles.machine import PickledCall, refuse

MAX_DIMS = 64
MAX_NUMBER = 1 << 62


def fields(value: object, name: str, *order: str) -> dict[str, Any]:
    """The fields set on a new `name`; a class with slots sets a list of them, in `order`."""
    if type(value) is not PickledCall or value.name != name or value.args:
        refuse(f"{name} was expected")
    state = value.state
    if type(state) is tuple and len(state) == 2 and state[0] is None:
        state = state[1]
    if type(state) is list:
        state = dict(zip(order, state, strict=False))
    return dict(typed(state, dict))


def made(value: object, name: str) -> tuple[Any, ...]:
    """The arguments with which a `name` is to be made, when nothing else is set on it."""
    if type(value) is not PickledCall or value.name != name or value.state is not None:
        refuse(f"{name} was expected")
    return value.args


def typed(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        refuse(f"{kind.__name__} was expected, not {type(value).__name__}")
    return value


def count(value: object, cap: int = MAX_NUMBER) -> int:
    if type(value) is not int or not 0 <= value < cap:
        refuse("a number is out of bounds")
    return value


def counts(value: object, most: int | None = None) -> tuple[int, ...]:
    if most is not None and len(typed(value, tuple)) > most:
        refuse(f"a shape has more than {most} dimensions")
    return tuple([count(n) for n in typed(value, tuple)])


def size(value: object) -> torch.Size:
    (numbers,) = made(value, "torch.Size")
    return torch.Size(counts(numbers, MAX_DIMS))
