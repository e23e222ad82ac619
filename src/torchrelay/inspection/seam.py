"""What a state to be looked at has to give: contents, and ranges of bytes.

A checkpoint step, a `.safetensors` file, a DCP directory and an endpoint each have one
implementation of `StateSource`. Whatever looks at a state uses this and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from torchrelay.stores.records import StoredTensor

Moved = Callable[[int, int], None]
"""Told of bytes done, and of all."""


class Volume(NamedTuple):
    """A run of bytes that holds boxes of tensors, and the rank it comes from, where it is known."""

    name: str
    nbytes: int
    rank: int | None = None


class PlainValue(NamedTuple):
    """A leaf without bytes: a number, a text, an empty tensor. `ranks`: how many differ in it."""

    path: str
    text: str
    ranks: int = 1


class Alias(NamedTuple):
    """A second path of a tensor."""

    path: str
    tensor: str


class Contents(NamedTuple):
    """A state but for its bytes. In `tensors`, `file` counts in `volumes`."""

    step: int | None
    ranks: int
    tensors: tuple[StoredTensor, ...]
    volumes: tuple[Volume, ...]
    values: tuple[PlainValue, ...] = ()
    aliases: tuple[Alias, ...] = ()
    time: str | None = None
    torch: str | None = None


class StateSource(Protocol):
    """One state, as it was when it was opened. Missing or damaged bytes raise a `RelayError`."""

    name: str
    contents: Contents

    def read_into(self, volume: int, start: int, view: memoryview) -> None:
        """Fill the view from a byte of a volume on."""

    def verify(self, moved: Moved) -> str:
        """Check all that can be checked of the bytes; returns in words what cannot be, if
        anything."""

    def close(self) -> None: ...
