"""What a place that keeps checkpoints has to offer. Everything else is built on these four.

A store holds steps. A step is written as a draft, which nobody takes for a checkpoint, and becomes
one by `Draft.commit`: one atomic act that needs all its bytes to be durable before. Readers see a
step whole or not at all.

Nothing here imports torch: the same code runs in the trainer and in its writer process.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol, runtime_checkable

from torchrelay.record.manifest import MAX_RECORD_BYTES
from torchrelay.stores.retry import ONCE, Retry

Buffer = bytes | bytearray | memoryview

MANIFEST = "manifest.json"
MAX_MANIFEST_BYTES = MAX_RECORD_BYTES
DATA_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\.safetensors(\.index\.json)?")


class Sink(Protocol):
    """One data file being written. Calls come from one thread, or from several if not `ordered`."""

    ordered: bool  # positions must come in ascending order without gaps, from one thread

    def write(self, position: int, buffers: Sequence[Buffer]) -> None:
        """Put the buffers, one after the other, at a byte position of the file."""

    def finish(self) -> None:
        """All bytes were handed over: return when they are durable."""

    def abort(self) -> None:
        """Give the file up; never raises."""


class DataFiles(Protocol):
    """A place for data files."""

    def open(self, name: str, nbytes: int) -> Sink:
        """A new data file of a known size."""


class Draft(DataFiles, Protocol):
    """A step on its way. One process calls `begin` and then `commit` or `discard`; every process
    that writes a file of the step has a draft with the same step and token. No token is used for
    two drafts."""

    mark: str  # after `begin`: what `Store.mark` gives for the step that this draft has become

    def begin(self) -> None:
        """Make room. `FileExistsError` if the step is there and may not be replaced."""

    def sizes(self) -> dict[str, int]:
        """Bytes of each data file that was finished, by any process, by name."""

    def commit(self, manifest: bytes) -> None:
        """Make the draft the step, whole and durable, in place of an older one if need be.

        `CommitUnknownError` where it may have become the step; any other failure: it has not.
        """

    def revoke(self) -> bool:
        """Stop a commit that another thread is at, before the act that counts. Whether it is
        certain that the draft is not the step and will not be."""

    def discard(self) -> None:
        """Remove what was written, unless it is the step or may be; never raises."""


class DataReader(Protocol):
    """One data file of a committed step; safe to use from several threads.

    A step that is replaced or deleted meanwhile may become unreadable (`OSError`), but no byte of
    its successor is read in its place.
    """

    nbytes: int
    cold: bool  # whether most of it has to come from a slow medium
    batched: bool  # whether few large reads are better than many small ones

    def read_into(self, position: int, buffers: Sequence[memoryview]) -> None:
        """Fill the buffers one after the other from a byte position. `EOFError` if it is short."""

    def read_cached(self, position: int, buffers: Sequence[memoryview]) -> bool:
        """Fill the buffers from memory alone, or say that this cannot be done."""

    def unchanged(self) -> bool:
        """Whether the file has not been written to since it was first opened."""

    def close(self) -> None: ...


@runtime_checkable
class MappableReader(DataReader, Protocol):
    """A `DataReader` of memory that this process can map."""

    def memory(self, position: int, nbytes: int) -> memoryview | None:
        """Bytes as they lie, which do not change while the step is open: whoever has compared them
        with their digests may copy them from there. None where they have to be read. `OSError` and
        `EOFError` as for `read_into`."""


@runtime_checkable
class KeepableReader(DataReader, Protocol):
    """A `DataReader` whose small reads are cheaper while one knows that more will come."""

    def kept(self) -> AbstractContextManager[None]:
        """Within: what this thread reads through stays open."""


class OpenStep(Protocol):
    """A committed step as it was when it was opened, whatever takes its place meanwhile.

    Reads that fail in a way that may pass are tried again as long as it was opened for. A file that
    is missing or is no plain file, and a read that fails for good, is an `OSError`; see
    `patience.is_wrong` for which of the two it is.
    """

    url: str
    costly_reads: bool  # whether reading a file twice takes about twice as long as once
    trusted: bool  # whether what its readers give need not be compared with digests any more

    def manifest(self) -> bytes:
        """The commit record."""

    def sizes(self) -> dict[str, int]:
        """Bytes of each data file that is there, by name."""

    def reader(self, name: str, *, once: bool = True) -> DataReader:
        """A data file that is read once, or again soon (`once=False`)."""

    def close(self) -> None: ...


@runtime_checkable
class MendableStep(Protocol):
    """An `OpenStep` that can get chunks from elsewhere."""

    def mend(self, name: str, start: int, stop: int, why: str) -> bool:
        """A range of a file could not be read, or has other digests: have it right when it is read
        next. Whether that can be."""


@runtime_checkable
class LendingStep(OpenStep, Protocol):
    """A step in memory of this process, which new tensors can keep in place of a copy."""

    def lend(self, name: str, start: int, nbytes: int) -> memoryview:
        """Bytes of a data file. Writing to them changes nothing but this view of them."""


class Store(Protocol):
    """A place with checkpoints. Missing steps and files raise `FileNotFoundError`, other failures
    `OSError`, each with the name of the file or object in its message."""

    url: str

    def steps(self) -> list[int]:
        """Steps that have a commit record, in ascending order."""

    def open(self, step: int, patience: Retry = ONCE) -> OpenStep:
        """A step to be read; `FileNotFoundError` if there is none."""

    def mark(self, step: int) -> str:
        """Which draft a step was."""

    def draft(self, step: int, token: str, *, overwrite: bool = False) -> Draft:
        """A draft; nothing is written before its `begin`."""

    def delete(self, step: int) -> None:
        """Remove a step. It stops being one before its first byte goes. Files in its place that
        its record does not name stay."""

    def set_aside(self, step: int) -> str:
        """Make a step none, in one durable act that leaves its bytes; returns its name in
        `aside`."""

    def aside(self) -> list[str]:
        """Names of what was set aside."""

    def remove_aside(self, name: str) -> None:
        """Remove what was set aside under a name."""

    def clean(self) -> list[str]:
        """Remove what writers that are gone left behind; returns its names. Of a draft's place,
        files that are named like data files go, and no others."""

    def free_bytes(self) -> int | None:
        """Room for data, or None where there is no such limit."""
