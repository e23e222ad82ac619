"""Names of modules that torch.compile or DistributedDataParallel has wrapped, without the wrappers.

A wrapper adds a part to every name in a state dict: `_orig_mod.` or `module.`. A state is described
without these parts, so that it fits the same module in any wrapper or none.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from msgspec.structs import replace
from torch.nn.parallel import DataParallel, DistributedDataParallel

from torchrelay.record import manifest as m
from torchrelay.state.paths import Path
from torchrelay.state.torch_private import compiled_modules
from torchrelay.state.tree import grafted, subtree

WRAPPERS = {"module": "DistributedDataParallel", "_orig_mod": "torch.compile"}  # by part of a name


class WrappedState:
    """The state dict of a module that has wrappers in it: `bare` has the names without them."""

    def __init__(self, state: dict[str, Any], names: Mapping[str, str]) -> None:
        self._state = state
        self._own = {bare: name for name, bare in names.items()}
        self.bare: dict[str, Any] = OrderedDict((names[name], state[name]) for name in state)

    @classmethod
    def of(cls, module: torch.nn.Module, state: object) -> WrappedState | None:
        """None without a wrapper, or if two names would be the same without it."""
        parts = set(_wrapper_parts(module))
        if not parts or not isinstance(state, dict) or not {str}.issuperset(map(type, state)):
            return None
        names = {name: _without(name, parts) for name in state}
        return cls(state, names) if len(set(names.values())) == len(names) else None

    def under_own_names(self, bare: Mapping[str, Any]) -> dict[str, Any]:
        """The module's own state dict with the values of `bare`."""
        self._state.update((self._own[name], value) for name, value in bare.items())
        return self._state


def _wrapper_parts(module: torch.nn.Module) -> Iterator[str]:
    """The names of the wrapped modules in a module."""
    compiled = compiled_modules()
    for name, inner in module.named_modules(remove_duplicate=False):
        if isinstance(inner, compiled):
            yield f"{name}._orig_mod".lstrip(".")
        elif isinstance(inner, (DistributedDataParallel, DataParallel)):
            yield f"{name}.module".lstrip(".")


def _without(name: str, wrapped: set[str]) -> str:
    kept, path = [], ""
    for part in name.split("."):
        path = f"{path}.{part}" if path else part
        if path not in wrapped:
            kept.append(part)
    return ".".join(kept)


def bare_name(name: str) -> str:
    """A name without the parts that may be a wrapper's."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def parameter_names(module: torch.nn.Module) -> dict[str, str]:
    """The names of a module's parameters that have parts of wrappers, and those without them."""
    parts = set(_wrapper_parts(module))
    named = module.named_parameters(remove_duplicate=False) if parts else ()
    return {name: _without(name, parts) for name, _ in named}


def without_wrappers(offered: m.Node, here: m.Node, modules: Iterable[Path]) -> m.Node:
    """An offered tree in which the state dicts for these modules have the names that they have
    `here`, where the two differ by parts of wrappers."""
    for path in modules:
        theirs, ours = subtree(offered, path), subtree(here, path)
        if isinstance(theirs, m.DictNode) and isinstance(ours, m.DictNode):
            keys = _renamed(theirs.keys, ours.keys)
            if keys != theirs.keys:
                offered = grafted(offered, {path: replace(theirs, keys=keys)})
    return offered


def _renamed(offered: tuple[Any, ...], here: tuple[Any, ...]) -> tuple[Any, ...]:
    known = set(map(str, here))
    if known.issuperset(map(str, offered)):
        return offered
    bare: dict[str, str] = {}
    for name in known - set(map(str, offered)):
        bare[bare_name(name)] = "" if bare_name(name) in bare else name
    found = tuple(
        [
            key if not isinstance(key, str) or key in known else bare.get(bare_name(key)) or key
            for key in offered
        ]
    )
    return found if len(set(map(str, found))) == len(found) else offered
