"""What has steps to be read: a URL, a directory, a bucket.

A source says what it has, and opens a step: its record, and readers of its volumes. From there on
a step of any source is planned and landed by the same code.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple, Protocol

from torchrelay.deadlines import Deadline

if TYPE_CHECKING:
    from torchrelay.record.checkpoint.schema import Checkpoint
    from torchrelay.stores.seam import OpenStep


class Absent(NamedTuple):
    """Why a source has nothing to give."""

    reason: str


class Opened(Protocol):
    """A step that can be read. Steps that are open with the same `digest` are the same."""

    @property
    def record(self) -> Checkpoint: ...
    @property
    def files(self) -> OpenStep: ...
    @property
    def digest(self) -> bytes: ...
    def close(self) -> None: ...


class Source(Protocol):
    """What has steps. Every wait ends by the deadline; what fails for good raises a `RelayError`
    that names the source."""

    @property
    def name(self) -> str: ...
    @property
    def cost(self) -> int:
        """How far away its bytes are: 0 memory of this machine, 1 a network, 2 a file system, 3 a
        bucket."""

    def steps(self, deadline: Deadline) -> Iterable[int]: ...
    def open(self, step: int, deadline: Deadline) -> Opened:
        """A step; `StepNotFoundError` where it is not there."""
