"""The record of a state: what it consists of, and where its bytes are.

It describes a step at rest, a step that an endpoint serves or a keeper holds, and a live rank. The
encoded record is a contract: docs/checkpoint-format.md describes it, and tests/golden holds steps
that every version must read.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from functools import cached_property
from typing import TypeVar

import msgspec

from torchrelay.record.checkpoint.stored import Tensors
from torchrelay.record.manifest import Leaf, Node

FORMAT = (2, 0)

What = TypeVar("What")
# By index, ascending. No dict: others' numbers may hash alike.
Pairs = tuple[tuple[int, What], ...]


def epoch_seconds(time: str) -> float | None:
    """The time of a record as seconds since 1970; None for text that is no time."""
    try:
        found = datetime.fromisoformat(time.replace("Z", "+00:00"))
    except ValueError:
        return None
    return found.timestamp() if found.tzinfo is not None else None


def pairs(table: Mapping[int, What]) -> Pairs[What]:
    return tuple(sorted(table.items(), key=lambda item: item[0]))


class _Part(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Small records stand as arrays: field order is part of the format."""


class Outline(msgspec.Struct, array_like=True, frozen=True, dict=True):
    """A state but for its bytes. In its leaves, `storage` counts in `names`.

    The leaf of a DTensor or ShardedTensor describes the whole tensor, not one rank's part of it.
    `strides` has the layout in memory of named tensors that were not row-major.
    """

    tree: Node
    leaves: tuple[Leaf, ...]
    names: tuple[str, ...]
    strides: Pairs[tuple[int, ...]] = ()

    @cached_property
    def layouts(self) -> dict[int, tuple[int, ...]]:
        """The strides by index; for an outline that is valid."""
        return dict(self.strides)


class Own(_Part, frozen=True):
    """Where the outline of a rank differs from the one it shares: leaves and names, by index."""

    rank: int
    leaves: Pairs[Leaf]
    names: Pairs[str]


class DataFile(_Part, frozen=True):
    """`digests`: xxh3-128 of each `chunk_bytes` of the file, from its first byte to its last."""

    name: str
    nbytes: int
    chunk_bytes: int
    digests: bytes

    @property
    def chunks(self) -> int:
        return -(-self.nbytes // self.chunk_bytes)


class Blob(_Part, frozen=True):
    """Bytes that a planner of torch made of an object; `kind` says how to read them back.

    "state": a packed state of plain values and tensors; "raw": as the planner wrote them.
    """

    name: str
    kind: str
    file: int
    start: int
    nbytes: int


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """A recorded state. `ranks` says for each rank that has a part of it which outline it has,
    `own` how its outline differs from that, `save_id` what a writer of torch's DCP called the
    save."""

    format: tuple[int, int] = FORMAT
    step: int
    time: str
    torch: str
    torchrelay: str
    outlines: tuple[Outline, ...]
    ranks: tuple[int, ...]
    own: tuple[Own, ...] = ()
    tensors: Tensors
    files: tuple[DataFile, ...]
    blobs: tuple[Blob, ...] = ()
    save_id: str | None = None

    @property
    def planned(self) -> bool:
        """Whether a planner of torch's told the containers, as it does to the DCP writer: it takes
        tuples of tensors for lists, and drops empty containers."""
        return self.save_id is not None

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(file.nbytes for file in self.files)

    @property
    def world(self) -> int:
        """Ranks that saved it."""
        return len(self.ranks)

    @cached_property
    def _own(self) -> dict[int, Own]:
        return {own.rank: own for own in self.own}

    def outline(self, rank: int) -> Outline:
        """The outline of a rank that saved it."""
        shared = self.outlines[self.ranks[rank]]
        own = self._own.get(rank)
        if own is None:
            return shared
        leaves, names = list(shared.leaves), list(shared.names)
        for index, leaf in own.leaves:
            leaves[index] = leaf
        for index, name in own.names:
            names[index] = name
        return Outline(shared.tree, tuple(leaves), tuple(names), shared.strides)

    def outlines_for(self, rank: int, world: int) -> list[Outline]:
        """The outlines that a rank of a group of `world` loads from, the first of them first.

        Its own where the group is as large as the one that saved. Else that of the same rank, and
        those of the others, laid over each other.
        """
        if world == self.world or (len(self.outlines) == 1 and not self.own):
            return [self.outline(min(rank, self.world - 1))]
        first = rank if rank < self.world else 0
        # Ranks of one outline have the same paths, and what the first of them has counts.
        ranks = {self.ranks[first]: first}
        for other, number in enumerate(self.ranks):
            ranks.setdefault(number, other)
        return [self.outline(other) for other in ranks.values()]
