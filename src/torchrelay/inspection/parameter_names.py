"""Names of the parameters that optimizers know by number.

A state dict of torch's has its state under 0, 1, 2, ... and, since torch 2.6, may have the names of
those in `param_groups`: for an optimizer that was made of `model.named_parameters()`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from contextlib import suppress

from torchrelay.inspection.opened_state import PlainValue

_ITEM = re.compile(r"((?:.*\.)?)param_groups\.(\d+)\.(params|param_names)\.(\d+)\Z", re.DOTALL)


def parameter_names(values: Iterable[PlainValue]) -> dict[str, str]:
    """The name of a parameter by the path of its state in an optimizer, where both are known."""
    numbers: dict[tuple[str, str, str], str] = {}
    names: dict[tuple[str, str, str], str] = {}
    for value in values:
        if (item := _ITEM.match(value.path)) is None or value.ranks > 1:
            continue
        root, group, kind, place = item.groups()
        (names if kind == "param_names" else numbers)[root, group, place] = value.text
    found = {}
    for at, number in numbers.items():
        name = _unquoted(names.get(at, ""))
        if name:
            found[f"{at[0]}state.{_unquoted(number)}"] = name
    return found


def _unquoted(text: str) -> str:
    """The text of a shown value. A long one is cut, and has no closing quote."""
    with suppress(ValueError, SyntaxError):
        return str(ast.literal_eval(text))
    return text.lstrip("'\"")
