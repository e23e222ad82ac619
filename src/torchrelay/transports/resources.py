"""What a relay keeps between its calls, and frees when it is closed."""

from __future__ import annotations

import threading
from typing import Any, TypeVar

from torchrelay.record.codec import Recall
from torchrelay.transports.transfer.buffers import BufferPool

T = TypeVar("T", bound="Kept")


class Kept:
    """Something that outlives a transfer, to make the next one faster."""

    def forget(self) -> None:
        """Drop what was learned of states; memory stays."""

    def close(self) -> None:
        """Free it."""


class Resources:
    """Owns one of each kind of kept thing. Threads may share it."""

    def __init__(self) -> None:
        self.buffers = BufferPool()
        self.recall = Recall()
        self._kept: dict[type[Any], Any] = {}
        self._lock = threading.Lock()

    def of(self, kind: type[T]) -> T:
        """The one of this kind, made when it is first asked for."""
        with self._lock:
            if kind not in self._kept:
                self._kept[kind] = kind()
            found: T = self._kept[kind]
            return found

    def forget(self) -> None:
        self.recall.clear()
        for kept in list(self._kept.values()):
            kept.forget()

    def close(self) -> None:
        self.forget()
        self.buffers.clear()
        for kept in list(self._kept.values()):
            kept.close()
