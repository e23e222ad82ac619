"""Patterns of dotted paths, with one meaning wherever a caller gives them."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase


def matches(path: str, patterns: Iterable[str]) -> bool:
    """Whether a path matches one of the patterns: `*`, `?` and `[...]` as in file names. A pattern
    without any of them is a path, and includes everything below it."""
    return any(fnmatchcase(path, one) or _is_below(path, one) for one in patterns)


def _is_below(path: str, pattern: str) -> bool:
    return path.startswith(f"{pattern}.") and not set(pattern) & set("*?[")
