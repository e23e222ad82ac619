"""Results of functions of numbers, kept. Numbers of a peer cannot make it slow."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import wraps
from typing import ParamSpec, TypeVar

import msgspec

P = ParamSpec("P")
Result = TypeVar("Result")
_encode = msgspec.msgpack.Encoder().encode


def remembered(limit: int) -> Callable[[Callable[P, Result]], Callable[P, Result]]:
    """A cache for a function of numbers and text. Arguments are looked up by their
    encoding, so numbers from outside cannot make it slow. A full cache is cleared."""

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
