"""States of optimizers: parameters by number and name, and the kind of optimizer.

torch's `load_state_dict` takes whatever it is given, also the state of another kind of optimizer.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch

from torchrelay.errors import MismatchError
from torchrelay.record import manifest as m
from torchrelay.state.paths import Path
from torchrelay.state.tree import children_of, show, subtree
from torchrelay.state.wrappers import bare_name

_SHOWN = 8  # entries that an error names


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


def with_own_parameter_names(optimizer: torch.optim.Optimizer, state: Any) -> Any:
    """The state dict for an optimizer. It keeps its own names of parameters where those of the
    state differ by wrappers alone."""
    groups = state.get("param_groups") if isinstance(state, dict) else None
    if not isinstance(groups, list) or len(groups) != len(optimizer.param_groups):
        return state
    named = []
    for new, mine in zip(groups, optimizer.param_groups, strict=True):
        names: list[Any] = [
            one.get("param_names") if isinstance(one, dict) else None for one in (new, mine)
        ]
        if all(isinstance(some, list) for some in names):
            theirs, ours = ([bare_name(str(name)) for name in some] for some in names)
            if theirs == ours:
                new = {**new, "param_names": list(names[1])}
        named.append(new)
    return {**state, "param_groups": named}


def check_kind(optimizer: torch.optim.Optimizer, offered: m.Node, path: Path) -> None:
    """`MismatchError` names the entries of an offered state that are of another kind of optimizer.

    Those are options that other optimizers of torch have and this one has not; and what is kept for
    a parameter in place of what this one keeps. Other entries of a group are a scheduler's or the
    user's, and options that are lacking were not there in an earlier version.
    """
    options = list(_foreign_options(optimizer, offered))
    found = [*_foreign_state(optimizer, offered, every=bool(options)), *options]
    if found:
        more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
        kind = type(optimizer).__name__
        raise MismatchError(
            f"the state of another kind of optimizer than {kind}, which has no use for "
            f"{', '.join(show((*path, *below)) for below in found[:_SHOWN])}{more}: load it into "
            f"the kind that it was saved from, or pass strict=False to have {kind} take it",
            path=show(path),
        )


def _foreign_options(optimizer: torch.optim.Optimizer, offered: m.Node) -> Iterator[Path]:
    groups = subtree(offered, ("param_groups",))
    for number, mine in enumerate(optimizer.param_groups):
        known = {*optimizer.defaults, *mine}
        for name in _keys(None if groups is None else subtree(groups, (number,))):
            if name in _options() and name not in known:
                yield "param_groups", number, name


def _foreign_state(
    optimizer: torch.optim.Optimizer, offered: m.Node, *, every: bool
) -> Iterator[Path]:
    """With `every`, entries are foreign also where this optimizer has none to compare with."""
    for number, parameter in enumerate(parameters_of(optimizer)):
        mine = set(optimizer.state.get(parameter, ()))
        theirs = _keys(subtree(offered, ("state", number)))
        if (mine - set(theirs) or every) and set(theirs) - mine:
            yield from (("state", number, name) for name in theirs if name not in mine)


def _keys(node: m.Node | None) -> list[object]:
    return [key for key, _ in children_of(node)] if isinstance(node, m.DictNode) else []


@cache
def _options() -> frozenset[object]:
    """The options of all optimizers that torch has."""
    kinds = [
        kind
        for kind in vars(torch.optim).values()
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)
    ]
    return frozenset(name for kind in kinds for name in inspect.signature(kind).parameters)
