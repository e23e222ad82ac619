"""A committed step in a directory, as it was when it was opened, and reads of its data files.

The directory stays open, and files are opened by their names in it: a step that is replaced or
removed meanwhile is never mixed with its successor. A bounded number of files is open at a time; a
file that was closed to make room is opened again only if it is still the same one.

Bytes that are on the medium alone and are read once are read past the page cache, which would have
to find room for them page by page.
"""

from __future__ import annotations

import ctypes
import errno
import os
from contextlib import AbstractContextManager, closing, suppress
from random import random

from torchrelay.memory.pages import address_of
from torchrelay.stores.listing import MANIFEST, MAX_MANIFEST_BYTES
from torchrelay.stores.local.files import named, open_plain
from torchrelay.stores.local.handles import Handles
from torchrelay.stores.retry import ONCE, Retry
from torchrelay.stores.step_files import DataReader
from torchrelay.stores.store import StoredStep
from torchrelay.system import DIRECTORIES_OPEN, DIRECTORY, LINUX, c_library, read_full

PAGE = 4096  # alignment of reads past the page cache
PROBES = 16  # positions of a file that are looked for in the page cache
_LARGE = 8 << 20
_NO_WAIT: int = getattr(os, "RWF_NOWAIT", 0)
_TMPFS = 0x01021994

_Stamp = tuple[int, int, int, int]
_libc = c_library()


class LocalStep(StoredStep):
    """A step in a directory."""

    costly_reads = False  # the second time comes from the page cache
    trusted = False

    def __init__(self, path: str, patience: Retry = ONCE) -> None:
        self.url = path
        self._directory = patience(lambda: _Directory(path, patience))
        self._readers: dict[tuple[str, bool], LocalReader] = {}

    def manifest(self) -> bytes:
        return self._directory.patience(lambda: read_manifest(self._directory.fd, self.url))

    def sizes(self) -> dict[str, int]:
        return self._directory.patience(lambda: data_sizes(self._directory.place))

    def reader(self, name: str, *, once: bool = True) -> LocalReader:
        key = (name, once)
        if key not in self._readers:
            self._readers[key] = LocalReader(self._directory, f"{self.url}/{name}", once)
        return self._readers[key]

    def close(self) -> None:
        self._directory.close()


class LocalReader(DataReader):
    """A data file of a step that is open. It is as long as it was when it was first opened."""

    def __init__(self, directory: _Directory, path: str, once: bool) -> None:
        self._directory, self._path, self._once = directory, path, once
        self._stamp: _Stamp | None = None

        def look() -> None:
            with self._lent() as file:
                self.batched = file.direct is not None

        directory.patience(look)

    def _lent(self) -> AbstractContextManager[_File]:
        return self._directory.files.lent((self._path, self._once), self._open)

    def _open(self) -> _File:
        file = _File(open_plain(self._path, self._directory.fd))
        try:
            stamp = _stamp(file.fd)
            if self._stamp is None:
                self.nbytes, self.identity = stamp[2], stamp
                self._in_memory = _is_tmpfs(file.fd)
                self.cold = self.nbytes >= _LARGE and self._is_out_of_cache(file.fd)
                self._stamp = stamp
            elif stamp != self._stamp:
                raise OSError(errno.EINVAL, "another file took its place", self._path)
            if self.cold and self._once:
                file.open_direct()
        except BaseException:
            file.close()
            raise
        return file

    def _is_out_of_cache(self, fd: int) -> bool:
        """Whether most of the file is not in the page cache. A probe has the kernel read ahead
        there, so the next look probes at other positions."""
        if not _NO_WAIT:  # nor a way to read past it
            return False
        misses = 0
        for probe in range(PROBES):
            position = int(self.nbytes * (probe + random()) / PROBES)
            try:
                os.preadv(fd, [bytearray(1)], position, _NO_WAIT)
            except BlockingIOError:
                misses += 1
            except OSError:  # a file system that does not tell
                return False
        return misses > PROBES // 2

    def unchanged(self) -> bool:
        with self._lent() as file:
            return _stamp(file.fd) == self._stamp

    def read_cached(self, position: int, view: memoryview) -> bool:
        flags = 0 if self._in_memory else _NO_WAIT
        if not flags and not self._in_memory:
            return False
        try:
            with self._lent() as file:
                return os.preadv(file.fd, [view], position, flags) == len(view)
        except OSError:
            return False

    def read_into(self, position: int, view: memoryview) -> None:
        def read() -> None:
            with named(self._path), self._lent() as file:
                done = 0 if file.direct is None else _read_direct(file.direct, position, view)
                _read_whole(file.fd, self._path, position + done, view[done:])

        self._directory.patience(read)


class _File:
    """The descriptors of an open file."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.direct: int | None = None

    def open_direct(self) -> None:
        """Open it past the page cache too, where the file system can."""
        with suppress(OSError):
            same = f"/proc/self/fd/{self.fd}"  # whatever has its name by now
            self.direct = os.open(same, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)

    def close(self) -> None:
        fds, self.fd, self.direct = (self.fd, self.direct), -1, None
        for fd in fds:
            if fd is not None and fd >= 0:
                os.close(fd)


class _Directory:
    """An open directory, and the files in it that are open."""

    def __init__(self, path: str, patience: Retry) -> None:
        self.patience = patience
        self._path = path
        self.files: Handles[_File] = Handles()
        self.fd: int | None = None
        if DIRECTORIES_OPEN:
            self.fd = os.open(path, os.O_RDONLY | DIRECTORY)

    @property
    def place(self) -> int | str:
        """The directory, whatever its name is by now; its path where a system opens none."""
        return self._path if self.fd is None else self.fd

    def close(self) -> None:
        self.files.close()
        fd, self.fd = self.fd, None  # forgotten first: no descriptor is closed twice
        if fd is not None:
            os.close(fd)

    def __del__(self) -> None:
        self.close()


def read_manifest(directory: int | None, url: str) -> bytes:
    """The commit record in a directory that is open, or by its path alone."""
    path = f"{url}/{MANIFEST}"
    with named(path), closing(_File(open_plain(path, directory))) as file:
        nbytes = os.fstat(file.fd).st_size
        if nbytes > MAX_MANIFEST_BYTES:
            raise OSError(errno.EFBIG, f"{nbytes} bytes are too many for a manifest", path)
        data = bytearray(nbytes)
        _read_whole(file.fd, path, 0, memoryview(data))
        return bytes(data)


def data_sizes(directory: int | str) -> dict[str, int]:
    """Bytes of the data files of a step or a draft, by name."""
    sizes = {}
    with os.scandir(directory) as entries:
        for entry in entries:
            with suppress(FileNotFoundError):  # a link to nothing, or removed meanwhile
                if entry.name != MANIFEST and entry.is_file():
                    sizes[entry.name] = entry.stat().st_size
    return sizes


def _stamp(fd: int) -> _Stamp:
    """Facts of a file that change when it is written to."""
    facts = os.fstat(fd)
    return facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns


def _is_tmpfs(fd: int) -> bool:
    """Whether a file is in memory: on /dev/shm, for example."""
    if not LINUX:  # which have a larger record
        return False
    facts = (ctypes.c_long * 64)()
    return _libc.fstatfs(fd, facts) == 0 and facts[0] == _TMPFS


def _read_whole(fd: int, path: str, position: int, view: memoryview) -> None:
    if not read_full(fd, view, position):
        raise EOFError(f"{path} ends before byte {position + len(view)}")


def _read_direct(fd: int, position: int, view: memoryview) -> int:
    """Read the aligned part of a range; returns how many bytes were read."""
    whole = len(view) // PAGE * PAGE
    if not whole or position % PAGE or address_of(view) % PAGE:
        return 0
    done = 0
    while done < whole:
        try:
            count = os.preadv(fd, [view[done:whole]], position + done)
        except OSError:
            break  # the usual path may work, or says what is wrong
        if count % PAGE or not count:
            break
        done += count
    return done
