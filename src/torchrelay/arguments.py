"""Arguments with one meaning wherever a caller gives them: one or several of a kind, and patterns
of dotted paths."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import TypeVar

from torchrelay.errors import UsageError

Item = TypeVar("Item")


def items_of(name: str, value: Item | Iterable[Item], kind: type[Item], word: str) -> list[Item]:
    """Returns the items as a list; `UsageError` for anything else."""
    if isinstance(value, kind):
        return [value]
    try:
        items = list(value)  # type: ignore[arg-type]
    except TypeError:  # also of a tensor without dimensions, which looks like an Iterable
        items = None
    if items is None or not all(isinstance(item, kind) for item in items):
        raise UsageError(f"{name} is {word}, or several in a list, not {value!r}")
    return items


def matches(path: str, patterns: Iterable[str]) -> bool:
    """Whether a path matches one of the patterns: `*`, `?` and `[...]` as in file names. A pattern
    without any of them is a path, and includes everything below it."""
    return any(
        fnmatchcase(path, one) or (path.startswith(f"{one}.") and not set(one) & set("*?["))
        for one in patterns
    )


def check_place(name: str) -> None:
    """`UsageError` for the name of a directory or bucket that ranks cannot send each other: it
    appears in messages and records, which are UTF-8."""
    try:
        name.encode()
    except UnicodeEncodeError:
        why = "its name is not UTF-8: rename it, or name another directory"
    else:
        if "\0" not in name:
            return
        why = "no directory or bucket has a null byte in its name"
    raise UsageError(f"{name!r} cannot have steps: {why}")
