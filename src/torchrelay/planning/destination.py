"""The state that a caller wants to have filled: a tree, and the memory of each leaf."""

from __future__ import annotations

import time

from torchrelay.describing.sharded import PlainLayout
from torchrelay.pause import gc_paused
from torchrelay.state.checkpointable import with_boxes
from torchrelay.state.objects import flatten_objects
from torchrelay.state.tree import inside_records

JUST_NOW = 0.1  # seconds: what was looked at so lately is not looked at again


class Destination:
    """A caller's state, inspected. A receiver makes one while it waits for the offer.

    Until the end of the landing the caller must not change containers: an object that is put in a
    slot meanwhile is not seen. A tensor with new memory is noticed.

    It keeps the caller's state alive. `UnsupportedLeafError` for a container that cannot be filled.
    """

    @gc_paused()
    def __init__(self, into: object) -> None:
        self.into = into
        found, self.objects = flatten_objects(into)
        self.own = found.leaves  # the caller's, where `flat` has stand-ins for some
        self.flat = with_boxes(found)
        self.layout = PlainLayout(self.flat)
        self.inside_records = inside_records(self.flat.tree)  # the leaves that these are made of
        self._inspected_at = time.monotonic()

    @classmethod
    def of(cls, into: object) -> Destination:
        """A destination as it is now; inspected again if tensors have moved since."""
        if not isinstance(into, Destination):
            return cls(into)
        return cls(into.into) if into.moved else into

    @property
    def moved(self) -> bool:
        """Whether a plain tensor no longer lies where it did, if there was time for that."""
        if time.monotonic() < self._inspected_at + JUST_NOW:
            return False
        plain = self.layout.plain
        tensors = self.layout.sharded.local_leaves(self.flat.leaves, now=True)
        return not plain.lie_in_place(plain.of(tensors))
