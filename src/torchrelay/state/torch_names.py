"""Lookup of torch's private names, which any release of torch may move.

A name is looked up when it is first used: what does not use it works without it, and what does says
which name is gone from which torch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from operator import attrgetter
from types import ModuleType
from typing import Any

import torch

from torchrelay.errors import UnsupportedTorchError


def look_up(dotted: str) -> Any:
    """What torch has under this name; `UnsupportedTorchError` if it has nothing there."""
    found: Any = torch
    steps = dotted.split(".")
    for n, step in enumerate(steps[1:], 2):
        try:
            if isinstance(found, ModuleType) and not hasattr(found, step):
                found = import_module(".".join(steps[:n]))
            else:
                found = getattr(found, step)
        except (AttributeError, ImportError) as fault:
            raise _missing(dotted) from fault
    return found


def if_imported(dotted: str) -> Any:
    """A name of a module that this process may not have imported; None if it has not: then it
    has no object of that kind."""
    module, _, name = dotted.rpartition(".")
    return getattr(sys.modules.get(module), name, None)


def lazily(
    namespace: dict[str, Any], names: Mapping[str, str], fields: Mapping[str, str]
) -> Callable[[str], Any]:
    """A module's `__getattr__` that finds its names in torch.

    Each of `names` gives what torch has there. Each of `fields`, by a class and an attribute, gives
    a function that reads this attribute of an object.
    """

    def found(name: str) -> Any:
        if name in names:
            value = look_up(names[name])
        elif name in fields:
            value = _reader(fields[name])
        else:
            raise AttributeError(f"module {namespace['__name__']} has no attribute {name!r}")
        namespace[name] = value
        return value

    return found


def _reader(dotted: str) -> Callable[[Any], Any]:
    owner, _, field = dotted.rpartition(".")
    try:
        kind = look_up(owner)
    except UnsupportedTorchError as fault:
        raise _missing(dotted) from fault
    if hasattr(kind, field):
        return attrgetter(field)  # properties and slots, as fast as without this module

    def read(owned: Any) -> Any:
        try:
            return getattr(owned, field)
        except AttributeError as fault:
            raise _missing(dotted) from fault

    return read


def _missing(dotted: str) -> UnsupportedTorchError:
    return UnsupportedTorchError(
        f"torch {torch.__version__} has no {dotted}, which this call needs: use a newer release of "
        "torchrelay, or an older one of torch"
    )
