"""One or several of a kind, as a caller may give them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from torchrelay.errors import UsageError

Item = TypeVar("Item")


def items_of(name: str, given: Item | Iterable[Item], kind: type[Item], word: str) -> list[Item]:
    """They as a list; `UsageError` for anything else."""
    if isinstance(given, kind):
        return [given]
    try:
        items = list(given)  # type: ignore[arg-type]
    except TypeError:  # also of a tensor without dimensions, which looks like an Iterable
        items = None
    if items is None or not all(isinstance(item, kind) for item in items):
        raise UsageError(f"{name} is {word}, or several in a list, not {given!r}")
    return items
