"""Files that stay open between uses, up to a maximum number."""

from __future__ import annotations

import errno
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Generic, Protocol, TypeVar

from torchrelay.system import most_open_files

OPEN_FILES = 128
SHARE = 4  # we open at most a quarter of the files that this process may open

_FULL = (errno.EMFILE, errno.ENFILE)


class Closable(Protocol):
    def close(self) -> None: ...


File = TypeVar("File", bound=Closable)


class Handles(Generic[File]):
    """Open files by key. The one that was used least recently is closed for a new one, and opened
    again at its next use."""

    def __init__(self) -> None:
        self._files: OrderedDict[Hashable, File] = OrderedDict()
        self._users: dict[Hashable, int] = {}
        self._lock = threading.Lock()
        may_open = most_open_files()
        self._most = OPEN_FILES
        if may_open is not None:
            self._most = max(1, min(OPEN_FILES, may_open // SHARE))

    @contextmanager
    def lent(self, key: Hashable, open_: Callable[[], File]) -> Iterator[File]:
        """Within: the file of a key, which stays open."""
        file = self._take(key, open_)
        try:
            yield file
        finally:
            with self._lock:
                if key in self._users:  # it was not dropped meanwhile
                    self._users[key] -= 1

    def _take(self, key: Hashable, open_: Callable[[], File]) -> File:
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

    def _close_idle(self, most: int) -> None:
        """Close files that are not in use, until at most `most` are open."""
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
