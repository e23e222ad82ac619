"""Fields of records in a pickle, each taken by its type and within its bounds, or refused."""

from __future__ import annotations

from typing import Any

import torch

from torchrelay.dropin._pickles.unpickler import Global, PickledCall, PickledDict, refuse

MAX_DEPTH = 200
MAX_DIMS = 64
MAX_NUMBER = 1 << 62
DTYPES = {f"torch.{n}": d for n, d in vars(torch).items() if isinstance(d, torch.dtype)}


def fields(value: object, name: str, *order: str) -> dict[str, Any]:
    """The fields set on a new `name`; a class with slots sets a list of them, in `order`."""
    if type(value) is not PickledCall or value.name != name or value.args:
        refuse(f"{name} was expected")
    state = value.state
    if type(state) is tuple and len(state) == 2 and state[0] is None:
        state = state[1]
    if type(state) is list:
        state = dict(zip(order, state, strict=False))
    return dict(state if type(state) is dict else typed(state, PickledDict))


def made(value: object, name: str) -> tuple[Any, ...]:
    """The arguments of a new `name` that has no state."""
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


def dtype(value: object) -> torch.dtype:
    return DTYPES[typed(value, Global).name]


def device(value: object) -> torch.device:
    args = made(value, "torch.device")
    if not 1 <= len(args) <= 2:
        refuse("a device is malformed")
    return torch.device(typed(args[0], str), *(count(n, 1 << 15) for n in args[1:]))


def properties(value: object, *names: str) -> tuple[torch.dtype, str]:
    """The dtype and the layout of a `TensorProperties`. Its other fields are left unread."""
    if type(value) is not PickledCall or value.name not in names or value.args:
        refuse("TensorProperties was expected")
    kind, layout, *_ = typed(value.state, tuple)
    (layout_name,) = made(layout, "torch.serialization._get_layout")
    return dtype(kind), typed(layout_name, str)
