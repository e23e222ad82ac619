"""Which transfer was the last with each process: after an unknown outcome, whether it was
committed."""

from __future__ import annotations

import threading


class LastTransfers:
    """The last transfer with each process, by its id. Most of those that were met long ago have
    ended: they are forgotten."""

    MOST = 1024

    def __init__(self) -> None:
        self._known: dict[bytes, bytes] = {}
        self._lock = threading.Lock()

    def note(self, process: bytes, transfer: bytes) -> None:
        with self._lock:
            self._known.pop(process, None)
            self._known[process] = transfer
            if len(self._known) > self.MOST:
                del self._known[next(iter(self._known))]

    def find(self, process: bytes) -> bytes | None:
        return self._known.get(process)

    def take(self, process: bytes) -> bytes | None:
        """The transfer, which is forgotten."""
        with self._lock:
            return self._known.pop(process, None)
