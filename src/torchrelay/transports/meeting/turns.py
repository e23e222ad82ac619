"""Short turns of the interpreter, so that receivers are admitted while a large state is described.

A thread that computes keeps the interpreter for 5 ms before another has its turn. The I/O thread
needs several turns to admit a receiver: the receiver would wait for each of them.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

TURN_SECONDS = 0.0005

_lock = threading.Lock()
_users = 0
_usual = 0.0


@contextmanager
def short_turns() -> Iterator[None]:
    """Within: threads wait for their turn no longer than this. Several calls may overlap."""
    global _users, _usual
    with _lock:
        if not _users:
            _usual = sys.getswitchinterval()
            sys.setswitchinterval(min(_usual, TURN_SECONDS))
        _users += 1
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if not _users:
                sys.setswitchinterval(_usual)
