"""A pause for the garbage collector.

Describing a state makes tens of thousands of small objects at once, none of them in a cycle. Each
few hundred of them would start a collection, and collections that walk the whole heap of a training
job cost more than all the rest.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def gc_paused() -> Iterator[None]:
    """No automatic collections inside; what was set before holds again after. May be nested."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
