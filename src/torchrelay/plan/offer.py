"""The share that this rank takes of a recorded state, as a landing needs it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import NamedTuple, Protocol

import torch

from torchrelay.plan.plain import PlainTensors
from torchrelay.plan.selection import Selection
from torchrelay.plan.sharded import ShardedLeaves
from torchrelay.record import manifest as m
from torchrelay.record.schema import Record
from torchrelay.state.matching import Matched


class FittedShare(NamedTuple):
    """A share as one destination takes it.

    The leaves of `matched` are those of `record`. The leaves in `late` get their bytes by way of
    whole images, which are not written to the destination as they are.
    """

    record: Record
    matched: Matched
    late: Set[int] = frozenset()


class DestinationLayout(Protocol):
    """The plain tensors of a destination, and the distributed ones with a plain part here. One
    `in` it is a leaf that is a plain tensor and shares no memory with another."""

    plain: PlainTensors
    sharded: ShardedLeaves

    def __contains__(self, leaf: object, /) -> bool: ...


class OfferedShare(Protocol):
    tree: m.Node
    choice: Selection

    def new(self) -> Record:
        """The share where all of it is made as new tensors."""

    def filled(self, image: int) -> torch.Tensor | None:
        """Memory that has the bytes of an image of `new` already, to be kept; mostly none has."""

    def fitted(
        self,
        leaves: Sequence[object],
        layout: DestinationLayout,
        matched: Matched,
        given: Mapping[int, torch.Tensor | None],
    ) -> FittedShare:
        """The share for the `leaves` of a destination. `given` has the leaves that are made for
        objects, each with the tensor that it resembles."""
