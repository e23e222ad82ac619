"""A pause for the garbage collector.

Describing a state makes tens of thousands of small objects at once, none of them in a cycle. Each
few hundred of them would start a collection, and collections that walk the whole heap of a training
job cost more than all the rest.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from torchrelay.system import in_child

_lock = threading.RLock()
_inside = 0  # pauses that have begun and not ended, of all threads
_was = True  # before the first of them


@contextmanager
def gc_paused() -> Iterator[None]:
    """No automatic collections inside; what was set before holds again after. May be nested, and
    threads may be in it at once: the last one out has them begin again."""
    global _inside, _was
    begun = False
    try:
        with _lock:
            if not _inside:
                _was = gc.isenabled()
                gc.disable()
            _inside, begun = _inside + 1, True
        yield
    finally:
        if begun:
            with _lock:
                _inside = max(0, _inside - 1)
                if not _inside and _was:
                    gc.enable()


def _forget_in_child() -> None:
    """A forked child has none of the other threads, which would end their pauses."""
    global _lock, _inside
    _lock = threading.RLock()
    if _inside and _was:
        gc.enable()
    _inside = 0


in_child(_forget_in_child)
