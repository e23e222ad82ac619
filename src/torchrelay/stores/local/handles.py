"""Files that stay open between uses, at most so many at a time."""

from __future__ import annotations

import errno
import resource
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, Protocol, TypeVar

OPEN_FILES = 128
SHARE = 4  # of the files that this process may open, one in so many is ours: others need some too

_FULL = (errno.EMFILE, errno.ENFILE)


class Closable(Protocol):
    def close(self) -> None: ...


File = TypeVar("File", bound=Closable)


class Handles(Generic[File]):
    """Open files by key. Whichever was used least recently is closed to make room; who uses it
    next opens it again."""

    def __init__(self) -> None:
        self._files: OrderedDict[Hashable, File] = OrderedDict()
        self._users: dict[Hashable, int] = {}
        self._lock = threading.Lock()
        may_open, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._most = OPEN_FILES
        if may_open != resource.RLIM_INFINITY:
            self._most = max(1, min(OPEN_FILES, may_open // SHARE))

    def lent(self, key: Hashable, open_: Callable[[], File]) -> _Lent[File]:
        """Within: the file of a key, which stays open."""
        return _Lent(self, key, open_)

    def take(self, key: Hashable, open_: Callable[[], File]) -> File:
        with self._lock:
            file = self._files.get(key)
            if file is None:
                self._close_idle(self._most - 1)
                try:
                    file = open_()
                except OSError as fault:
                    if fault.errno not in _FULL:
                        raise
                    self._close_idle(0)
                    self._most = max(1, self._most // 2)
                    file = open_()
                self._files[key] = file
            self._files.move_to_end(key)
            self._users[key] = self._users.get(key, 0) + 1
            return file

    def give(self, key: Hashable) -> None:
        with self._lock:
            if key in self._users:  # it was not dropped meanwhile
                self._users[key] -= 1

    def _close_idle(self, most: int) -> None:
        """Close files that nobody uses, until so many are left."""
        for key in [key for key in self._files if not self._users[key]]:
            if len(self._files) <= most:
                return
            del self._users[key]
            self._files.pop(key).close()

    def drop(self, key: Hashable) -> File | None:
        """Forget a file, which is the caller's to close."""
        with self._lock:
            self._users.pop(key, None)
            return self._files.pop(key, None)

    def close(self) -> None:
        with self._lock:
            self._close_idle(0)


class _Lent(Generic[File]):
    def __init__(self, handles: Handles[File], key: Hashable, open_: Callable[[], File]) -> None:
        self._handles = handles
        self._key = key
        self._open = open_

    def __enter__(self) -> File:
        return self._handles.take(self._key, self._open)

    def __exit__(self, *_: object) -> None:
        self._handles.give(self._key)
