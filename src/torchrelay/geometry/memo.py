"""Results of functions of numbers, kept, and values that are numbered. Both are looked up by their
encoding: numbers of a peer may hash alike, and cannot make it slow."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import wraps
from typing import Generic, ParamSpec, TypeVar

import msgspec

P = ParamSpec("P")
Result = TypeVar("Result")
_encode = msgspec.msgpack.Encoder().encode


def remembered(limit: int) -> Callable[[Callable[P, Result]], Callable[P, Result]]:
    """A cache for a function of numbers and text. A full cache is cleared."""

    def decorate(function: Callable[P, Result]) -> Callable[P, Result]:
        known: dict[Hashable, Result] = {}

        @wraps(function)
        def wrapper(*args: P.args, **kwargs: P.kwargs) -> Result:
            key = _encode((args, kwargs))
            found = known.get(key)
            if found is None:
                if len(known) >= limit:
                    known.clear()
                found = known[key] = function(*args, **kwargs)
            return found

        return wrapper

    return decorate


class Numbered(Generic[Result]):
    """Values of numbers and text, each `found` once, with the number of its place there."""

    def __init__(self) -> None:
        self.found: list[Result] = []
        self._numbers: dict[bytes, int] = {}

    def number(self, value: Result, key: object = None) -> int:
        """The number of a value, which its `key` tells from others if there is one."""
        number = self._numbers.setdefault(_encode(key or value), len(self.found))
        if number == len(self.found):
            self.found.append(value)
        return number
