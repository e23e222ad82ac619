"""Values that are numbered. They are looked up by their encoding: numbers of a peer may hash alike,
and cannot make it slow."""

from __future__ import annotations

from typing import Generic, TypeVar

import msgspec

Value = TypeVar("Value")
_encode = msgspec.msgpack.Encoder().encode


class Numbered(Generic[Value]):
    """Values of numbers and text, each `found` once, with the number of its place there."""

    def __init__(self) -> None:
        self.found: list[Value] = []
        self._numbers: dict[bytes, int] = {}

    def number(self, value: Value, key: object = None) -> int:
        """The number of a value, which its `key` tells from others if there is one."""
        number = self._numbers.setdefault(_encode(key or value), len(self.found))
        if number == len(self.found):
            self.found.append(value)
        return number
