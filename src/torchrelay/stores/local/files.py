"""The system calls that change a directory. One object, so that a test can stop at each of them."""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from torchrelay.stores.draft import Buffer
from torchrelay.system import (
    AT_ONCE,
    BINARY,
    DIRECTORIES_OPEN,
    DIRECTORY,
    NO_FOLLOW,
    c_library,
    fcntl,
    sync,
    write_full,
)

_WRITE_OUT = 2  # SYNC_FILE_RANGE_WRITE
_EXCHANGE = 2  # RENAME_EXCHANGE
_AT_FDCWD = -100

_libc = c_library()


class Files:
    """Every call that creates, changes or removes something below a store's root."""

    def make_dir(self, path: str) -> None:
        Path(path).mkdir()

    def create(self, path: str) -> int:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | BINARY, 0o666)

    def reopen(self, path: str) -> int:
        """Open a file that was created here, to write more of it."""
        return os.open(path, os.O_RDWR | NO_FOLLOW | BINARY)

    def write(self, fd: int, data: Buffer, position: int) -> None:
        """All of the data, however many calls that takes."""
        if not write_full(fd, memoryview(data).cast("B"), position):
            raise OSError(errno.EIO, "nothing was written")

    def write_out(self, fd: int, position: int, nbytes: int) -> None:
        """Start writing a range to the medium, so that `sync` finds little left to do."""
        sync = getattr(_libc, "sync_file_range", None)
        if sync is not None:
            sync(fd, ctypes.c_int64(position), ctypes.c_int64(nbytes), ctypes.c_uint(_WRITE_OUT))

    def sync(self, fd: int) -> None:
        sync(fd)

    def rename(self, old: str, new: str) -> None:
        """A network file system sends the call again when an answer is late, and then reports that
        the old name does not exist, though the call was carried out: the new name tells."""
        before = os.lstat(old)
        try:
            Path(old).replace(new)
        except OSError:
            with suppress(OSError):
                refresh(str(Path(new).parent))
                after = os.lstat(new)
                if (after.st_dev, after.st_ino) == (before.st_dev, before.st_ino):
                    return
            raise

    def link(self, name: str, within: int | str, path: str) -> None:
        """Give a file in a directory, by its descriptor or its path, another name."""
        if isinstance(within, int):
            os.link(name, path, src_dir_fd=within)
        else:
            os.link(f"{within}/{name}", path)

    def exchange(self, one: str, other: str) -> bool:
        """Swap two directories in one step; False where the file system cannot."""
        rename = getattr(_libc, "renameat2", None)
        if rename is None:
            return False
        if rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _EXCHANGE) == 0:
            return True
        code = ctypes.get_errno()
        if code in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
            return False
        raise OSError(code, os.strerror(code), one)

    def unlink(self, path: str, within: int | None = None) -> None:
        """Remove a file, or a link; by its name alone in a directory that is open."""
        if within is None:
            Path(path).unlink()
        else:
            os.unlink(Path(path).name, dir_fd=within)

    def remove_dir(self, path: str) -> None:
        Path(path).rmdir()

    def sync_dir(self, path: str) -> None:
        """Make what was created, renamed or removed in a directory last."""
        if not DIRECTORIES_OPEN:
            return
        fd = os.open(path, os.O_RDONLY | DIRECTORY)
        try:
            self.sync(fd)
        except OSError as fault:
            if fault.errno not in (errno.EINVAL, errno.ENOTSUP):  # a file system without it
                raise
        finally:
            os.close(fd)

    def sync_name(self, path: str) -> None:
        """Make the name of what was created or renamed last. Where its directory may not be read,
        and so not be synced alone, the whole file system is."""
        try:
            self.sync_dir(str(Path(path).parent))
        except PermissionError:
            sync_all = getattr(_libc, "syncfs", None)
            if sync_all is None:
                os.sync()
                return
            fd = os.open(path, os.O_RDONLY)
            try:
                if sync_all(fd) != 0:
                    code = ctypes.get_errno()
                    raise OSError(code, os.strerror(code), path) from None
            finally:
                os.close(fd)


def refresh(path: str) -> None:
    """Have a network file system ask its server what is in a directory: a client may remember for a
    minute that a name does not exist."""
    os.scandir(path).close()


@contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """Within: a file to write to. It gets the name `path`, in place of an older file, when all of
    it is durable; nothing of it remains if the block fails."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        with temporary.open("xb") as file:
            yield file
            file.flush()
            sync(file.fileno())
        Files().rename(str(temporary), str(path))
        Files().sync_name(str(path))
    finally:
        temporary.unlink(missing_ok=True)


def open_plain(path: str, within: int | None) -> int:
    """Open a plain file to read, by its name in a directory that is open.

    Whatever else has its name is refused, without a wait for whoever may write to it.
    """
    flags = os.O_RDONLY | AT_ONCE | BINARY
    try:
        fd = os.open(path if within is None else Path(path).name, flags, dir_fd=within)
    except OSError as fault:
        fault.filename = path
        raise
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "not a regular file", path)
    return fd


@contextmanager
def named(path: str) -> Iterator[None]:
    """Errors of the block that name no file get this one."""
    try:
        yield
    except OSError as fault:
        if fault.filename is None:
            fault.filename = path
        raise


def lock(path: str) -> int | None:
    """Hold a directory until the descriptor is closed; None if another process holds it.

    `NotADirectoryError` for a link to one; `OSError` where the file system has no such locks.
    """
    if fcntl is None:
        raise OSError(errno.ENOTSUP, "this system has no such locks", path)
    fd = os.open(path, os.O_RDONLY | DIRECTORY | NO_FOLLOW)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    except OSError:
        os.close(fd)
        raise
    return fd


@contextmanager
def claimed(path: str) -> Iterator[None]:
    """Within: a directory is held, under whatever name it has meanwhile, if no one else holds it
    and the file system has locks."""
    lock_fd = None
    with suppress(OSError):
        lock_fd = lock(path)
    try:
        yield
    finally:
        if lock_fd is not None:
            os.close(lock_fd)
