"""Files of a draft that have the bytes of a committed step's files: hard links of them.

Each step stays complete: a link is a file like any other, and removing one of its names leaves the
others. A committed file is never written to, so no step can change another.
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import closing
from pathlib import Path

from torchrelay.stores.draft import Buffer, CommittedFile, ReuseRefusedError
from torchrelay.stores.local.files import Files, named, open_plain
from torchrelay.stores.local.root import StepRoot, version_of
from torchrelay.system import DIRECTORIES_OPEN, DIRECTORY, read_full

# Another device, a file system without links, one that allows no more names of a file, or none to
# files of other users.
_REFUSALS = (
    errno.EXDEV,
    errno.EPERM,
    errno.EACCES,
    errno.EMLINK,
    errno.ENOSYS,
    errno.ENOTSUP,
    errno.EOPNOTSUPP,
    errno.EINVAL,
)
_WITHIN = os.link in os.supports_dir_fd


class CommittedFiles:
    """The files of committed steps of a root."""

    def __init__(self, root: StepRoot) -> None:
        self._root = root

    def place(self, source: CommittedFile) -> Path:
        """The directory of a step. `FileNotFoundError` if another one has taken its place."""
        directory = self._root.existing(source.step)
        if version_of(directory) != source.version:
            raise FileNotFoundError(errno.ENOENT, "another step took its place", str(directory))
        return directory

    def holds(self, source: CommittedFile, nbytes: int) -> bool:
        try:
            facts = (self.place(source) / source.name).stat()
        except OSError:
            return False
        return stat.S_ISREG(facts.st_mode) and facts.st_size == nbytes

    def read(self, source: CommittedFile, position: int, view: memoryview) -> None:
        path = str(self.place(source) / source.name)
        fd = open_plain(path, None)
        try:
            with named(path):
                if not read_full(fd, view, position):
                    raise OSError(errno.EIO, f"it ends before byte {position + len(view)}")
        finally:
            os.close(fd)

    def link(self, source: CommittedFile, path: str, files: Files) -> None:
        """`ReuseRefusedError` where there can be no link."""
        directory = self.place(source)
        try:
            if _WITHIN and DIRECTORIES_OPEN:
                fd = os.open(directory, os.O_RDONLY | DIRECTORY)
                with closing(_Descriptor(fd)):
                    self._check(source, directory, fd)
                    files.link(source.name, fd, path)
            else:
                files.link(source.name, str(directory), path)
        except OSError as fault:
            if fault.errno in _REFUSALS:
                raise ReuseRefusedError(fault.errno, fault.strerror, path) from fault
            raise

    def _check(self, source: CommittedFile, directory: Path, fd: int) -> None:
        """`FileNotFoundError` unless the directory that was opened is still the step."""
        opened, now = os.fstat(fd), self.place(source).stat()
        if (opened.st_dev, opened.st_ino) != (now.st_dev, now.st_ino):
            raise FileNotFoundError(errno.ENOENT, "another step took its place", str(directory))


class _Descriptor:
    def __init__(self, fd: int) -> None:
        self.close = lambda: os.close(fd)


class LinkedFile:
    """A `Sink` that nothing is written to: `finish` makes the link."""

    ordered = False

    def __init__(
        self, path: str, nbytes: int, source: CommittedFile, steps: CommittedFiles, files: Files
    ) -> None:
        self._path, self._nbytes, self._source = path, nbytes, source
        self._steps, self._files = steps, files

    def write(self, position: int, data: Buffer) -> None:
        raise AssertionError("a file that is reused is not written")

    def finish(self) -> None:
        self._steps.link(self._source, self._path, self._files)
        facts = os.lstat(self._path)
        if not stat.S_ISREG(facts.st_mode):  # the step has a link to its file
            self._files.unlink(self._path)
            raise ReuseRefusedError(errno.EINVAL, "not a regular file", self._path)
        if facts.st_size != self._nbytes:
            reason = f"{facts.st_size} bytes in step {self._source.step}, {self._nbytes} were saved"
            raise OSError(errno.EIO, reason, self._path)

    def abort(self) -> None:
        """Nothing: the link goes with the draft."""
