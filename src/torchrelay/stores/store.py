"""`Store`: the interface of a directory or bucket that holds checkpoints.

A store holds steps. A step is written as a draft, which no reader takes for a checkpoint, and
becomes a step by `Draft.commit`: one atomic operation, after all bytes are durable. Readers see a
step whole or not at all.

Nothing here imports torch: the same code runs in the trainer and in its writer process.
"""

from __future__ import annotations

from typing import Protocol

from torchrelay.stores.draft import Draft
from torchrelay.stores.listing import Listing
from torchrelay.stores.retry import ONCE, Retry
from torchrelay.stores.step_files import StepFiles


class StoredStep(StepFiles, Protocol):
    """A step of a store."""

    def manifest(self) -> bytes:
        """The commit record."""

    def sizes(self) -> dict[str, int]:
        """Bytes of each existing data file, by name."""


class Store(Protocol):
    """A directory or bucket with checkpoints. Missing steps and files raise `FileNotFoundError`,
    other failures `OSError`, each with the name of the file or object in its message."""

    url: str

    def steps(self) -> list[int]:
        """Steps that have a commit record, in ascending order."""

    def listing(self) -> Listing:
        """The result of one listing."""

    def lookalike(self) -> str:
        """Of a store without steps: what looks like one, and the path that was probably meant; ""
        where nothing does."""

    def open(self, step: int, patience: Retry = ONCE) -> StoredStep:
        """A step to be read; `FileNotFoundError` if it does not exist."""

    def draft_id(self, step: int) -> str:
        """The id of the draft that became this step."""

    def version(self, step: int) -> str:
        """Another one whenever the step was saved again. It costs far less than its record."""

    def draft(self, step: int, token: str, *, overwrite: bool = False) -> Draft:
        """A draft; nothing is written before its `begin`."""

    def delete(self, step: int, listing: Listing | None = None) -> None:
        """Remove a step. It stops being one before its first byte goes. Files next to its own,
        which its record does not name, stay. `listing` as for `Draft.begin`."""

    def clean(self) -> list[str]:
        """Remove what writers that are gone left behind; returns its names. Only files that are
        named like data files go."""

    def free_bytes(self) -> int | None:
        """Free space for data, or None where there is no such limit."""
