"""A step that is being written to a directory, and its data files."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, closing, suppress
from pathlib import Path

from torchrelay.files import exists, is_dir
from torchrelay.shortage import raise_shortage
from torchrelay.stores.draft import Buffer, CommitPoint, CommittedFile
from torchrelay.stores.listing import MANIFEST, Listing
from torchrelay.stores.local.files import Files, claimed, lock, named, refresh
from torchrelay.stores.local.handles import Handles
from torchrelay.stores.local.removal import remove_directory
from torchrelay.stores.local.reuse import CommittedFiles, LinkedFile
from torchrelay.stores.local.root import StepRoot, directory_id, is_committed
from torchrelay.stores.local.step import LocalStep, data_sizes
from torchrelay.stores.retry import commit_unknown
from torchrelay.stores.step_files import DataReader

WRITE_OUT_BYTES = 8 << 20
VISIBLE_SECONDS = 10.0  # that a network file system may take to show another host's directory
_TRIES = 100


class LocalDraft(CommitPoint):
    """A `Draft` in a directory. The process that calls `begin` holds its lock until it ends."""

    def __init__(self, root: StepRoot, step: int, token: str, overwrite: bool) -> None:
        super().__init__()
        self._root, self._step, self._token = root, step, token
        self._overwrite, self._files = overwrite, root.files
        self._lock_fd: int | None = None
        self._continues = False  # whether a draft with this token was left
        self.id = ""
        self._handles: Handles[_WrittenFile] = Handles()
        self._committed = CommittedFiles(root)
        self.place = f"{root.of(step)}.tmp-{token}"

    def begin(self, listing: Listing | None = None) -> None:
        listing = self._root.folders() if listing is None else listing
        existing = self._root.listed(self._step, listing)
        if exists(existing) and not self._overwrite:
            if not is_committed(existing):
                reason = f"it exists and is not a step, for it has no {MANIFEST}: move it away"
                raise OSError(errno.ENOTEMPTY, reason, str(existing))
            raise FileExistsError(errno.EEXIST, "the step is committed", str(existing))
        self._root.make()
        for _ in range(_TRIES):
            try:
                self._files.make_dir(self.place)
                self._continues = False
            except FileExistsError:
                self._continues = True
            if self._locked():
                if self._continues:
                    self._renew()
                self.id = directory_id(Path(self.place))
                return
            time.sleep(0.001)
        raise OSError(errno.EBUSY, "another process has locked the draft", self.place)

    def _renew(self) -> None:
        """Make a draft that was left one that is being written: it is as young as its last change,
        for hosts that do not see its lock, and has no commit record yet."""
        with suppress(OSError):
            os.utime(self.place)
        if exists(f"{self.place}/{MANIFEST}"):
            self._files.unlink(f"{self.place}/{MANIFEST}")

    def _locked(self) -> bool:
        """Hold the draft. False if a process that just started found it unheld and removes it."""
        try:
            lock_fd = lock(self.place)
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError as fault:
            raise_shortage(fault, f"lock {self.place}")
            return True  # a file system without locks
        if lock_fd is None:
            return False
        with suppress(FileNotFoundError):
            if Path(self.place).stat().st_ino == os.fstat(lock_fd).st_ino:
                self._lock_fd = lock_fd
                return True
        os.close(lock_fd)
        return False

    def check_visible(self) -> None:
        end = time.monotonic() + VISIBLE_SECONDS
        while not is_dir(self.place):
            if time.monotonic() > end:
                raise FileNotFoundError(errno.ENOENT, "no such directory", self.place)
            time.sleep(0.02)
            with suppress(OSError):
                refresh(str(self._root.path))

    def open(self, name: str, nbytes: int) -> LocalSink:
        return LocalSink(f"{self.place}/{name}", self._files, nbytes, self._handles)

    def has(self, name: str, nbytes: int, check: Callable[[DataReader], bool]) -> bool:
        if not self._continues:
            return False
        path = f"{self.place}/{name}"
        try:
            with closing(LocalStep(self.place)) as left:
                reader = left.reader(name)
                whole = reader.nbytes == nbytes and check(reader)
        except FileNotFoundError:
            return False
        except (OSError, EOFError):
            whole = False
        with named(path):
            if not whole:
                self._files.unlink(path)
                return False
            fd = self._files.reopen(path)
            try:
                self._files.sync(fd)  # it may have been written and not be durable
            finally:
                os.close(fd)
            return True

    def reuse(self, name: str, nbytes: int, source: CommittedFile) -> LinkedFile:
        return LinkedFile(f"{self.place}/{name}", nbytes, source, self._committed, self._files)

    def holds(self, source: CommittedFile, nbytes: int) -> bool:
        return self._committed.holds(source, nbytes)

    def read(self, source: CommittedFile, position: int, view: memoryview) -> None:
        self._committed.read(source, position, view)

    def sizes(self) -> dict[str, int]:
        return data_sizes(self.place)

    def commit(self, manifest: bytes) -> None:
        path = f"{self.place}/{MANIFEST}"
        with named(path):
            fd = self._files.create(path)
            try:
                self._files.write(fd, manifest, 0)
                self._files.sync(fd)
            finally:
                os.close(fd)
            self._files.sync_dir(self.place)
        with self.passing():
            replaced = self._put_in_place()
            try:
                self._files.sync_dir(str(self._root.path))
            except OSError as fault:
                # The lock stays: the step that was replaced must not be removed, it may come back.
                why = f"it is in place, but may not outlast a power cut ({fault.strerror or fault})"
                raise commit_unknown(self._step, why, str(self._root.of(self._step))) from fault
        if replaced is not None:
            with suppress(OSError):  # the rest of the old one is cleaned up by the next start
                remove_directory(replaced, self._files)
        self._release()

    def _put_in_place(self) -> str | None:
        """Give the draft the step's name; returns where the directory is that had it."""
        target = str(self._root.of(self._step))
        if not exists(target):
            self._files.rename(self.place, target)
            return None
        if not self._overwrite:
            raise FileExistsError(errno.EEXIST, "the step was committed meanwhile", target)
        if self._files.exchange(self.place, target):
            return self.place
        replaced = f"{target}.old-{self._token}"
        with claimed(target):  # so that no one moves it back meanwhile
            self._files.rename(target, replaced)
            try:
                self._files.rename(self.place, target)
            except OSError:
                with suppress(OSError):  # it counts as the step where it is, too
                    self._files.rename(replaced, target)
                raise
        return replaced

    def leave(self) -> None:
        self._release()

    def discard(self) -> None:
        if not self.revoke():
            return
        with suppress(OSError):
            remove_directory(self.place, self._files)
        self._release()

    def _release(self) -> None:
        lock_fd, self._lock_fd = self._lock_fd, None  # first: no descriptor is closed twice
        if lock_fd is not None:
            os.close(lock_fd)


class _WrittenFile:
    """The descriptor of a data file. Its bytes are durable when it is closed."""

    def __init__(self, fd: int, path: str, files: Files) -> None:
        self.fd, self._path, self._files = fd, path, files

    def close(self) -> None:
        try:
            with named(self._path):
                self._files.sync(self.fd)
        finally:
            self.abort()

    def abort(self) -> None:
        fd, self.fd = self.fd, -1  # forgotten first: no descriptor is closed twice
        if fd >= 0:
            os.close(fd)


class LocalSink:
    """A data file being written, by any number of threads. If a draft has many of them it is closed
    meanwhile, and opened again by its name."""

    ordered = False

    def __init__(
        self, path: str, files: Files, nbytes: int, handles: Handles[_WrittenFile]
    ) -> None:
        self._path, self._files, self._nbytes = path, files, nbytes
        self._handles = handles
        self._ended = False
        with named(path), self._lent(files.create):
            pass

    def _lent(self, open_: Callable[[str], int]) -> AbstractContextManager[_WrittenFile]:
        assert not self._ended
        path, files = self._path, self._files
        return self._handles.lent(path, lambda: _WrittenFile(open_(path), path, files))

    def write(self, position: int, data: Buffer) -> None:
        with named(self._path), self._lent(self._files.reopen) as file:
            self._files.write(file.fd, data, position)
            end = position + len(data)
            if end // WRITE_OUT_BYTES > position // WRITE_OUT_BYTES:
                begin = position // WRITE_OUT_BYTES * WRITE_OUT_BYTES
                self._files.write_out(file.fd, begin, WRITE_OUT_BYTES)

    def finish(self) -> None:
        with named(self._path), self._lent(self._files.reopen) as file:
            self._files.sync(file.fd)
            size = os.fstat(file.fd).st_size
            if size != self._nbytes:
                raise OSError(errno.EIO, f"{size} bytes on the medium, {self._nbytes} were written")
        self.abort()

    def abort(self) -> None:
        self._ended = True
        if (file := self._handles.drop(self._path)) is not None:
            file.abort()
