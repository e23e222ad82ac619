"""A destination looked over before anything is offered for it.

A receiver waits for a record anyway. Meanwhile it inspects its own tensors, and `land` takes the
result instead of the destination itself.
"""

from __future__ import annotations

import time

from torchrelay.pause import gc_paused
from torchrelay.plan.description import PlainLayout
from torchrelay.state.objects import flatten_objects
from torchrelay.state.tree import inside_records

JUST_NOW = 0.1  # seconds: what was looked at so lately is not looked at again


class PreparedDestination:
    """What `land(record, into=PreparedDestination(into))` takes. Until the end of the landing the
    caller must not change containers: an object that is put in a slot meanwhile is not seen. A
    tensor with new memory is noticed.

    It keeps the destination alive. `UnsupportedLeafError` for a container that cannot be filled.
    """

    @gc_paused()
    def __init__(self, into: object) -> None:
        self.into = into
        self.flat, self.objects = flatten_objects(into)
        self.layout = PlainLayout(self.flat)
        self.inside_records = inside_records(self.flat.tree)  # the leaves that these are made of
        self._looked_at = time.monotonic()

    @property
    def moved(self) -> bool:
        """Whether a plain tensor no longer lies where it did, if there was time for that."""
        if time.monotonic() < self._looked_at + JUST_NOW:
            return False
        plain = self.layout.plain
        tensors = self.layout.sharded.local_leaves(self.flat.leaves, now=True)
        return not plain.lie_in_place(plain.of(tensors))
