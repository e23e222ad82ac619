"""Resources that a relay keeps between its calls, and frees when it is closed."""

from __future__ import annotations

import threading
from typing import Any, Protocol, TypeVar

from torchrelay.transports.streams.buffers import BufferPool


class Kept(Protocol):
    """Something that outlives a transfer, because making it takes longer than most transfers."""

    def close(self) -> None:
        """Free it."""


T = TypeVar("T", bound=Kept)


class Resources:
    """Owns one of each kind of kept thing. Threads may share it."""

    def __init__(self) -> None:
        self.buffers = BufferPool()
        self._kept: dict[type[Any], Any] = {}
        self._lock = threading.Lock()

    def of(self, kind: type[T]) -> T:
        """The one of this kind, made when it is first asked for."""
        with self._lock:
            if kind not in self._kept:
                self._kept[kind] = kind()
            found: T = self._kept[kind]
            return found

    def close(self) -> None:
        self.buffers.clear()
        with self._lock:
            kept, self._kept = list(self._kept.values()), {}
        for one in kept:
            one.close()
