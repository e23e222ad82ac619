"""Patterns of dotted names: which names match, and the names that go with them. Pure."""

from __future__ import annotations

import re
from functools import cache

from torchrelay.errors import UsageError

# Wildcards of a pattern, and places where a name takes the text that one of them stood for.
_TOKENS = re.compile(r"\*\*|\*|\{(\d+)\}")


def matched(pattern: str, name: str) -> tuple[str, ...] | None:
    """The texts that the wildcards of a pattern stand for in a name; None if it does not match.

    `*` is a part of a name between two dots, or of such a part; `**` may contain dots. Both stand
    for at least one character.
    """
    found = _compiled(pattern).fullmatch(name)
    return None if found is None else found.groups()


def filled(pattern: str, texts: tuple[str, ...]) -> str:
    """The name that a pattern is with these texts: its first wildcard is the first of them and so
    on, and `{2}` is the second."""
    wildcards = iter(texts)

    def text(token: re.Match[str]) -> str:
        return next(wildcards) if token[1] is None else texts[int(token[1]) - 1]

    return _TOKENS.sub(text, pattern)


def check_pair(pattern: str, other: str) -> None:
    """Raise `UsageError` unless every name that matches `pattern` makes a name of `other`."""
    if any(token[1] for token in _TOKENS.finditer(pattern)):
        raise UsageError(f"{pattern!r} refers to a wildcard, and is where the wildcards stand")
    count = len(list(_TOKENS.finditer(pattern)))
    tokens = list(_TOKENS.finditer(other))
    references = [int(token[1]) for token in tokens if token[1]]
    if len(tokens) - len(references) > count or any(not 0 < n <= count for n in references):
        raise UsageError(f"{other!r} needs more wildcards than {pattern!r} has, which is {count}")


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    expression, at = "", 0
    for token in _TOKENS.finditer(pattern):
        expression += re.escape(pattern[at : token.start()])
        expression += "(.+)" if token[0] == "**" else r"([^.]+)"
        at = token.end()
    return re.compile(expression + re.escape(pattern[at:]), re.DOTALL)
