"""`Draft`: the interface of a step that is being written, and of its data files. No torch."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple, Protocol

from torchrelay.stores.listing import Listing
from torchrelay.stores.step_files import DataReader

Buffer = bytes | bytearray | memoryview


class CommittedFile(NamedTuple):
    """A data file of a committed step: of this version of it, and no other (`Store.version`)."""

    step: int
    version: str
    name: str


class ReuseRefusedError(OSError):
    """The storage cannot give a file's bytes to another one: they have to be written."""


class Sink(Protocol):
    """A data file being written. Calls come from one thread, or from several if not `ordered`."""

    ordered: bool  # positions must come in ascending order without gaps, from one thread

    def write(self, position: int, data: Buffer) -> None:
        """Put bytes at a position of the file."""

    def finish(self) -> None:
        """All bytes were handed over: return when they are durable."""

    def abort(self) -> None:
        """Give the file up; never raises."""


class DataFiles(Protocol):
    """Where data files are created."""

    def open(self, name: str, nbytes: int) -> Sink:
        """A new data file of a known size."""

    def reuse(self, name: str, nbytes: int, source: CommittedFile) -> Sink:
        """A data file with the bytes of one of a committed step. Its `finish` has the storage make
        it, so nothing is written to it; `ReuseRefusedError` if the storage cannot."""

    def holds(self, source: CommittedFile, nbytes: int) -> bool:
        """Whether a committed step seems to have that file, with so many bytes."""

    def read(self, source: CommittedFile, position: int, view: memoryview) -> None:
        """Fill a view from a file of a committed step."""


class Draft(DataFiles, Protocol):
    """A step being written. One process calls `begin` and then `commit` or `discard`; every process
    that writes a file of the step has a draft with the same step and token. No token is used for
    two drafts, but for one that continues what another was left with (`leave`)."""

    place: str  # the path or URL under which its files are written
    id: str  # after `begin`: what `Store.draft_id` returns for the step that it becomes

    def begin(self, listing: Listing | None = None) -> None:
        """Create it. `FileExistsError` if the step exists and may not be replaced. `listing`: one
        that the caller has just made; otherwise the store is listed."""

    def check_visible(self) -> None:
        """`FileNotFoundError` unless this process sees a draft that another one began."""

    def has(self, name: str, nbytes: int, check: Callable[[DataReader], bool]) -> bool:
        """Whether a draft with the same token was left with this data file: it is whole and durable
        then, and is not opened again. Otherwise nothing of it is left. `check` compares the bytes,
        where the size of a file does not tell that it was finished."""

    def sizes(self) -> dict[str, int]:
        """Bytes of each data file that any process has finished, by name."""

    def commit(self, manifest: bytes) -> None:
        """Make the draft the step, whole and durable, in place of an older one if there is one.

        `CommitUnknownError` if it may have become the step; after any other failure it has not.
        """

    def revoke(self) -> bool:
        """Stop a commit that another thread carries out, before the operation that counts. Whether
        it is certain that the draft is not the step and will not be."""

    def leave(self) -> None:
        """Write no more, and leave what was written to a draft with the same token; never raises.
        `Store.clean` removes it when no one has continued it for a day."""

    def discard(self) -> None:
        """Remove what was written, unless it is the step or may be; never raises."""


class CommitPoint:
    """The one operation of a draft that makes it the step: it is passed once, or revoked. Safe to
    use from several threads.

        with self.passing():    from here on no one can say that it will not happen
            ...                 `OSError`: it did not happen; `CommitUnknownError`: it may have

    A save that stops waiting for its commit revokes it. Either that is in time, and the thread that
    was left behind does not commit any more, or the outcome is unknown.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._passing = False
        self._revoked = False

    @contextmanager
    def passing(self) -> Iterator[None]:
        """Within: the commit is carried out. `OSError` if it was revoked before."""
        with self._lock:
            if self._revoked:
                raise OSError(errno.ECANCELED, "the save was given up")
            self._passing = True
        try:
            yield
        except OSError:
            self._passing = False
            raise

    def revoke(self) -> bool:
        """Whether it is certain that the commit did not happen, and will not."""
        with self._lock:
            self._revoked = not self._passing
            return self._revoked
