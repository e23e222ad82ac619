"""`StepFiles`: the interface of a committed step's data files, as they are read. No torch.

Steps of stores implement it, and so do steps of endpoints and keepers.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol


class DataReader(Protocol):
    """One data file of a committed step, until that is closed; safe to use from several threads.

    A step that is replaced or deleted meanwhile may become unreadable (`OSError`), but no byte of
    its successor is read in its place.
    """

    nbytes: int
    cold: bool = False  # whether most of it has to come from a slow medium
    batched: bool = False  # whether few large reads are better than many small ones
    identity: object = None  # the same for readers of the same file, where that can be told

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


class StepFiles(Protocol):
    """The data files of a committed step as it was when it was opened, whatever replaces it
    meanwhile.

    Reads that fail in a way that may pass are repeated for as long as it was opened with. A file
    that is missing or not a plain file, and a read that fails for good, is an `OSError`;
    `retry.is_wrong` tells the two apart.

    Some steps can do more than be read. An attribute says so, and the defaults here are those of a
    step that cannot.
    """

    url: str
    costly_reads: bool  # whether reading a file twice takes about twice as long as once
    trusted: bool  # whether those who read it need not compare digests
    compared: bool = True  # whether digests are compared at all: by its readers, or by their caller
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
