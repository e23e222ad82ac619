"""Results of functions of numbers, kept, and values that are numbered. Both are looked up by their
encoding: numbers of a peer may hash alike, and cannot make it slow."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from functools import wraps
from typing import Generic, ParamSpec, TypeVar

import msgspec
import numpy as np

from torchrelay.geometry.boxes import Numbers

P = ParamSpec("P")
Result = TypeVar("Result")
_encode = msgspec.msgpack.Encoder(enc_hook=np.ndarray.tobytes).encode


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
    """Values of numbers, text and columns, each `found` once, with the number of its place."""

    def __init__(self) -> None:
        self.found: list[Result] = []
        self._numbers: dict[bytes, int] = {}

    def number(self, value: Result) -> int:
        """The number of a value."""
        number = self._numbers.setdefault(_encode(value), len(self.found))
        if number == len(self.found):
            self.found.append(value)
        return number

    def numbers(self, values: Iterable[Result]) -> Numbers:
        """The number of each value."""
        return np.array([*map(self.number, values)], np.int64)
