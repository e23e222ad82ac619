"""The interfaces of a place that holds checkpoints. Everything else is built on these.

A store holds steps. A step is written as a draft, which no reader takes for a checkpoint, and
becomes a step by `Draft.commit`: one atomic operation, after all bytes are durable. Readers see a
step whole or not at all.

Nothing here imports torch: the same code runs in the trainer and in its writer process.
"""

from __future__ import annotations

import errno
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Protocol

from torchrelay.record.manifest import MAX_RECORD_BYTES
from torchrelay.stores.retry import ONCE, Retry

Buffer = bytes | bytearray | memoryview
# The directories of each step, in ascending order: names, and numbers that are others if the step
# was replaced. Steps that are still being written may be among them.
Listing = dict[int, list[tuple[str, int]]]

MANIFEST = "manifest.json"
MAX_MANIFEST_BYTES = MAX_RECORD_BYTES
DATA_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\.safetensors(\.index\.json)?")


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


class Draft(DataFiles, Protocol):
    """A step being written. One process calls `begin` and then `commit` or `discard`; every process
    that writes a file of the step has a draft with the same step and token. No token is used for
    two drafts."""

    place: str  # the path or URL under which its files are written
    id: str  # after `begin`: what `Store.draft_id` returns for the step that it becomes

    def begin(self, listing: Listing | None = None) -> None:
        """Create it. `FileExistsError` if the step exists and may not be replaced. `listing`: one
        that the caller has just made; otherwise the store is listed."""

    def check_visible(self) -> None:
        """`FileNotFoundError` unless this process sees a draft that another one began."""

    def sizes(self) -> dict[str, int]:
        """Bytes of each data file that any process has finished, by name."""

    def commit(self, manifest: bytes) -> None:
        """Make the draft the step, whole and durable, in place of an older one if there is one.

        `CommitUnknownError` if it may have become the step; after any other failure it has not.
        """

    def revoke(self) -> bool:
        """Stop a commit that another thread carries out, before the operation that counts. Whether
        it is certain that the draft is not the step and will not be."""

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


class DataReader(Protocol):
    """One data file of a committed step, until that is closed; safe to use from several threads.

    A step that is replaced or deleted meanwhile may become unreadable (`OSError`), but no byte of
    its successor is read in its place.
    """

    nbytes: int
    cold: bool = False  # whether most of it has to come from a slow medium
    batched: bool = False  # whether few large reads are better than many small ones

    def read_into(self, position: int, view: memoryview) -> None:
        """Fill a view from a byte position on. `EOFError` if the file is too short."""

    def read_cached(self, position: int, view: memoryview) -> bool:
        """Fill a view from memory alone, or return False."""
        return False

    def memory(self, position: int, nbytes: int) -> memoryview | None:
        """The bytes in place, which do not change while the step is open: whoever has compared them
        with their digests may copy them from there. None if they have to be read. `OSError` and
        `EOFError` as for `read_into`."""
        return None

    def unchanged(self) -> bool:
        """Whether the file has not been written to since it was first opened."""
        return True


class WantedBox(NamedTuple):
    """A box of a row-major array of `shape`, which begins at byte `start` of a data file."""

    name: str
    start: int
    itemsize: int
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


class DeviceRun(NamedTuple):
    """Bytes of a data file, from `start` on, that are copied to an address of the same GPU."""

    file: str
    start: int
    address: int
    nbytes: int


class OpenStep(Protocol):
    """A committed step as it was when it was opened, whatever replaces it meanwhile.

    Reads that fail in a way that may pass are repeated for as long as it was opened with. A file
    that is missing or not a plain file, and a read that fails for good, is an `OSError`;
    `retry.is_wrong` tells the two apart.

    Some steps can do more than be read. An attribute says so, and the defaults here are those of a
    step that cannot.
    """

    url: str
    costly_reads: bool  # whether reading a file twice takes about twice as long as once
    trusted: bool  # whether its readers have compared the digests already
    mapped: bool = False  # whether its files are mapped memory of this host: reads do not hang
    fetches_ahead: bool = False  # whether it has no bytes before `prepare`
    lends: bool = False  # whether `lend` gives out its memory
    on_gpus: bool = False  # whether its files are in memory of GPUs that this process can read

    def reader(self, name: str, *, once: bool = True) -> DataReader:
        """A data file that is read once, or again soon (`once=False`)."""

    def close(self) -> None: ...

    def mend(self, name: str, start: int, stop: int, why: str) -> bool:
        """A range of a file could not be read, or has other digests: replace it for the next read
        by what another source has. Whether that succeeded."""
        return False

    def prepare(self, wanted: Iterable[WantedBox]) -> None:
        """Called before the first read with all that will be read. Other bytes of a range that is
        read afterwards are left as they are."""
        return

    def lend(self, name: str, start: int, nbytes: int) -> memoryview:
        """Bytes of a data file in memory of this process, which new tensors can keep in place of a
        copy. Writing to them changes nothing but this view of them."""
        raise OSError(errno.ENOTSUP, "the step lends no memory", self.url)

    def device_memory(self, name: str) -> tuple[int, int]:
        """The GPU that a data file is on, by its index here, and the address of its first byte."""
        raise OSError(errno.ENOTSUP, "the step is not in memory of a GPU", self.url)

    def check_lent(self) -> None:
        """`PeerLostError` if the memory of GPUs may no longer be read."""
        return

    def note_copies(self, runs: Sequence[DeviceRun], others: bool) -> None:
        """Record the copies from GPUs: runs of bytes, and whether anything else is read."""
        return


class StoredStep(OpenStep, Protocol):
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


def settled(look: Callable[[], Listing], committed: Callable[[Listing], list[int]]) -> list[int]:
    """The steps of a listing that are committed. One that was removed since it was listed has a
    successor, which may not be listed: then the listing is made again."""
    listing = look()
    while True:
        steps = committed(listing)
        if len(steps) == len(listing) or (again := look()) == listing:
            return steps
        listing = again
