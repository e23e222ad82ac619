"""The interface of a state that is inspected: contents, and ranges of bytes.

A checkpoint step, a `.safetensors` file, a DCP directory and an endpoint each have one
implementation of `OpenedState`. Statistics, differences and commands use nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from torchrelay.planning.stored import StoredTensor
from torchrelay.progress import ProgressCallback
from torchrelay.record.schema import VolumeRecord
from torchrelay.stores.reading.chunks import VerifiedFiles


class PlainValue(NamedTuple):
    """A leaf other than a tensor, or a meta tensor. `ranks`: how many differ in it. `digest`, if it
    is known, is that of all of a value, which `text` may have a part of."""

    path: str
    text: str
    ranks: int = 1
    digest: str = ""


class Alias(NamedTuple):
    """A second path of a tensor."""

    path: str
    tensor: str


class Contents(NamedTuple):
    """A state but for its bytes. In `tensors`, `file` counts in `volumes`."""

    step: int | None
    ranks: int
    tensors: Sequence[StoredTensor]
    volumes: Sequence[VolumeRecord]
    values: tuple[PlainValue, ...] = ()
    aliases: tuple[Alias, ...] = ()
    time: str | None = None
    torch: str | None = None


class StateReader(Protocol):
    """One state, as it was when it was opened. Missing or damaged bytes raise a `RelayError`."""

    @property
    def contents(self) -> Contents: ...

    def read_into(self, volume: int, start: int, view: memoryview) -> None:
        """Fill the view from a byte of a volume on."""


class OpenedState(StateReader, Protocol):
    """A state that a user named."""

    name: str

    def verify(self, progress: ProgressCallback, known: VerifiedFiles | None = None) -> str:
        """Check all that can be checked of the bytes; returns in words what cannot be, if
        anything. `known`: as for `check_chunks`."""

    def close(self) -> None: ...
