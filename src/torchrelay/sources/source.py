"""`Source`: anything that has steps to be read. A directory, a bucket, endpoints, keepers, a rank.

A source lists its steps and opens one: its record, and readers of its volumes. From there on the
same code plans and lands a step of any source.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from torchrelay.deadlines import Deadline

if TYPE_CHECKING:
    from torchrelay.record.schema import Record
    from torchrelay.stores.step_files import StepFiles


class Opened(Protocol):
    """A step that can be read. Steps that are open with the same `digest` are the same."""

    @property
    def record(self) -> Record: ...
    @property
    def files(self) -> StepFiles: ...
    @property
    def digest(self) -> bytes: ...
    def close(self) -> None: ...


@runtime_checkable
class Source(Protocol):
    """Steps to be read. Every wait ends by the deadline; a failure is a `RelayError` that names the
    source."""

    @property
    def name(self) -> str: ...
    @property
    def cost(self) -> int:
        """How far away its bytes are: 0 memory of this machine, 1 a network, 2 a file system, 3 a
        bucket."""

    def steps(self, deadline: Deadline) -> Iterable[int]:
        """The steps that it has, none where it is empty. Raises where it cannot tell."""

    def open(self, step: int, deadline: Deadline) -> Opened:
        """A step; `StepNotFoundError` where it does not exist."""

    def end(self, reason: str = "", nbytes: int = 0) -> None:
        """Called when a load is over: `reason` says why it failed, `nbytes` how much it landed.
        Never raises."""
