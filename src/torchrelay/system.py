"""What differs between Linux, macOS and Windows, in one place.

All of torchrelay runs on Linux. macOS has what it takes to read, write and pull steps, and Windows
what it takes to read them. The rest asks `needs_linux` first, when it is called, so that importing
it never fails.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from torchrelay.errors import UnsupportedSystemError

LINUX = sys.platform == "linux"
WINDOWS = sys.platform == "win32"

# Modules and functions that a system may lack. `None`, or `False`, where it does.
fcntl: ModuleType | None
try:
    import fcntl
except ImportError:
    fcntl = None
DIRECTORIES_OPEN = (
    not WINDOWS
)  # whether a directory has a descriptor, by which files are found in it

BINARY: int = getattr(os, "O_BINARY", 0)  # without it, Windows changes the ends of lines
DIRECTORY: int = getattr(os, "O_DIRECTORY", 0)
NO_FOLLOW: int = getattr(os, "O_NOFOLLOW", 0)
# A pipe or a terminal under the name of a file is opened without a wait, and controls nothing.
AT_ONCE: int = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0)


def needs_linux(what: str) -> None:
    """`UnsupportedSystemError` anywhere else; nothing has been done then."""
    if not LINUX:
        name = {"darwin": "macOS", "win32": "Windows"}.get(sys.platform, sys.platform)
        raise UnsupportedSystemError(
            f"{what} needs Linux, and this is {name}, where steps can be read: docs/install.md"
        )


class _NoLibrary:
    """Stands for the C library where a program cannot look itself up: it has no function."""


def c_library() -> Any:
    """The functions that this process has loaded, with `errno`. Ask for each with `getattr` and a
    default: which of them there are depends on the system."""
    return _NoLibrary() if WINDOWS else ctypes.CDLL(None, use_errno=True)


def in_child(forget: Callable[[], object]) -> None:
    """Call this in every forked child, where the system has such."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=forget)


# A descriptor has one position, which several threads may move where they have to move it.
_position = threading.Lock()


def _read_after_seek(fd: int, views: Sequence[memoryview], position: int) -> int:
    with _position:
        os.lseek(fd, position, os.SEEK_SET)
        data = os.read(fd, len(views[0]))
    views[0][: len(data)] = data
    return len(data)


def _write_after_seek(fd: int, views: Sequence[memoryview], position: int) -> int:
    with _position:
        os.lseek(fd, position, os.SEEK_SET)
        return os.write(fd, views[0])


# `os.preadv` and `os.pwritev` of one view, also where there are no such calls.
_Transfer = Callable[[int, list[memoryview], int], int]
_read_at: _Transfer = getattr(os, "preadv", _read_after_seek)
_write_at: _Transfer = getattr(os, "pwritev", _write_after_seek)


def read_full(fd: int, view: memoryview, position: int) -> bool:
    """Fill a view from a position of a file, however many calls that takes; False where the file
    ends before."""
    return _transfer(_read_at, fd, view, position)


def write_full(fd: int, view: memoryview, position: int) -> bool:
    """Write all of a view to a position of a file, however many calls that takes; False where the
    system takes nothing more."""
    return _transfer(_write_at, fd, view, position)


def _transfer(call: _Transfer, fd: int, view: memoryview, position: int) -> bool:
    while len(view):
        done = call(fd, [view], position)
        if not done:
            return False
        position += done
        view = view[done:]
    return True


def most_open_files() -> int | None:
    """How many files this process may have open; None without a limit, or where none is known."""
    try:
        import resource
    except ImportError:
        return None
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if limit == resource.RLIM_INFINITY else limit


def sync(fd: int) -> None:
    """Have what was written to a file on the medium. macOS's `fsync` leaves it in the drive's own
    memory, which a power cut empties."""
    everything = getattr(fcntl, "F_FULLFSYNC", None)
    if fcntl is not None and everything is not None:
        try:
            fcntl.fcntl(fd, everything)
            return
        except OSError:  # a file system that has no such call
            pass
    os.fsync(fd)
