"""The inbox of a call: all that it waits for comes here, from connections and from workers."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque

from torchrelay.transports.meeting.connection import MessageReceived


class Inbox:
    """The events of one call: messages of its connections and results of its workers.

    Any thread may put events in, one thread takes them out. An exception out of a signal handler
    leaves it as it was. It is no `queue.SimpleQueue`: a wait there never ends if a signal handler
    outlasts it.
    """

    def __init__(self) -> None:
        self._events: deque[object] = deque()
        self._news = threading.Lock()  # held while there is none

    def put(self, event: object) -> None:
        self._events.append(event)
        with contextlib.suppress(RuntimeError):  # released already
            self._news.release()

    def get(self, seconds: float) -> object | None:
        """The next event, or None if none comes in time."""
        ends = time.monotonic() + seconds
        while not self._events:
            left = ends - time.monotonic()
            if left <= 0 or not self._news.acquire(timeout=left):
                return None
        event = self._events.popleft()
        if isinstance(event, MessageReceived):
            event.connection.taken(event)
        return event

    def drain(self) -> list[object]:
        """The events that are here now, without those that handling them may add."""
        return [self._events.popleft() for _ in range(len(self._events))]
