"""The state that is offered to a receive or a load, whoever has it.

Each kind of source yields one `Catalog`: one live rank (`LiveCatalog`), several live ranks (the
`BoxCatalog` of their union), a step at rest (the `BoxCatalog` of its record). A catalog says what
its leaves are, and makes the `RankShare` of them that a destination takes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch

from torchrelay.geometry.boxes import Numbers
from torchrelay.planning.destination import Destination
from torchrelay.planning.selection import Selection
from torchrelay.record import manifest as m
from torchrelay.record.rows import LeafRows
from torchrelay.record.schema import Record
from torchrelay.state.matching import Matched
from torchrelay.state.objects import OfferedTensor

Likes = Mapping[int, torch.Tensor | None]


class EqualImages(NamedTuple):
    """Two images of a share that go to the same memory: their bytes must be the same."""

    first: int
    second: int
    path: str


@dataclass(frozen=True)
class RankShare:
    """The part of a catalog that one rank takes, as a record of its own.

    - `pairs`: its leaves, each with the leaf of the destination that takes it.
    - `sources`: of each of its images, the image of the catalog that it is all of, or a box of.
    - `deferred`: leaves that are copied to the destination from whole images, at the end.
    - `equal`: images that must have the same bytes, which is known when those are here.
    """

    record: Record
    sources: Numbers
    pairs: Matched
    deferred: Set[int] = frozenset()
    equal: Sequence[EqualImages] = ()


class Catalog(Protocol):
    """A state that is offered: `tree` has its leaves by path, `selection` says which are wanted."""

    @property
    def tree(self) -> m.Node: ...

    @property
    def selection(self) -> Selection: ...

    def tensor_of(self, leaf: int) -> OfferedTensor | None:
        """A leaf that is a tensor."""

    def whole_share(self) -> RankShare:
        """All that is wanted, for new tensors."""

    def share_for(self, destination: Destination, matched: Matched, likes: Likes) -> RankShare:
        """The share for the `matched` leaves of a destination. `likes` has the leaves that are made
        for objects, each with the tensor that it resembles."""


class LiveCatalog:
    """The state of one live rank. It is taken as it was sent: a distributed tensor is the rank's
    part of it, and the share is all of the rank's record."""

    def __init__(self, record: Record) -> None:
        self._rows = LeafRows(record)
        self.selection = Selection()

    @property
    def tree(self) -> m.Node:
        return self._rows.tree

    def tensor_of(self, leaf: int) -> OfferedTensor | None:
        found = m.tensor_of(self._rows[leaf])
        return None if found is None else OfferedTensor(*found, in_boxes=False)

    def whole_share(self) -> RankShare:
        return self._share(Matched([]))

    def share_for(self, destination: Destination, matched: Matched, likes: Likes) -> RankShare:
        return self._share(matched)

    def _share(self, matched: Matched) -> RankShare:
        record = self._rows.record
        return RankShare(record, np.arange(record.images), matched)
