"""Values that are numbered. They are looked up by their encoding: numbers of a peer may hash alike,
and cannot make it slow."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Generic, TypeVar

import msgspec
import numpy as np

from torchrelay.geometry.boxes import Numbers

Value = TypeVar("Value")
_encode = msgspec.msgpack.Encoder(enc_hook=np.ndarray.tobytes).encode


class Numbered(Generic[Value]):
    """Values of numbers, text and columns, each `found` once, with the number of its place."""

    def __init__(self) -> None:
        self.found: list[Value] = []
        self._numbers: dict[bytes, int] = {}

    def number(self, value: Value) -> int:
        """The number of a value."""
        number = self._numbers.setdefault(_encode(value), len(self.found))
        if number == len(self.found):
            self.found.append(value)
        return number

    def numbers(self, values: Iterable[Value]) -> Numbers:
        """The number of each value."""
        return np.array([*map(self.number, values)], np.int64)
