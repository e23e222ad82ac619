"""The outlines of all ranks, with what they have in common held once. Pure.

Ranks of one job have most leaves in common, and some of their own under the same path: a random
state, a position in the data. Plain values and plain tensors that differ are kept for each rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec
import xxhash

from torchrelay.errors import CheckpointError
from torchrelay.record.checkpoint.schema import Outline, Own, pairs
from torchrelay.record.manifest import Leaf


class Outlines(NamedTuple):
    """See `Checkpoint`, which has the same fields."""

    outlines: tuple[Outline, ...]
    ranks: tuple[int, ...]
    own: tuple[Own, ...]


class RankOutline(NamedTuple):
    """A rank's report of its outline: `shape` is a digest of all but the leaves, and `leaves`
    are those that may differ from the first rank with that shape, which reports its `outline`.
    `renamed` has new names of tensors that are not those of an earlier rank."""

    shape: bytes
    outline: Outline | None
    leaves: Iterable[tuple[int, Leaf]]
    renamed: Mapping[str, str]

    @classmethod
    def whole(cls, outline: Outline, renamed: Mapping[str, str]) -> RankOutline:
        """Of a rank that reports all of its outline."""
        return cls(shape_of(outline), outline, enumerate(outline.leaves), renamed)


def shape_of(outline: Outline) -> bytes:
    return xxhash.xxh3_128_digest(
        msgspec.msgpack.encode((outline.tree, outline.names, outline.strides))
    )


def renames(
    outlines: Sequence[Outline], replicas: Sequence[Mapping[str, bytes]]
) -> list[dict[str, str]]:
    """For each rank, new names of tensors that differ from those of an earlier rank: `replicas` has
    a fingerprint for each plain tensor, by name."""
    taken = {name for outline in outlines for name in outline.names}
    first: dict[str, bytes] = {}
    found: list[dict[str, str]] = []
    for rank, known in enumerate(replicas):
        renamed = {}
        for name, fact in known.items():
            if first.setdefault(name, fact) != fact:
                renamed[name] = f"{name}@rank-{rank}"
                while renamed[name] in taken:
                    renamed[name] += "~"
        found.append(renamed)
    return found


def merge(all_ranks: Iterable[RankOutline]) -> Outlines:
    """Hold each distinct outline once, and separately what single ranks have of their own."""
    bases: list[Outline] = []
    first: dict[bytes, int] = {}  # the outline by its shape
    ranks: list[int] = []
    own: list[Own] = []
    places: list[dict[str, int]] = []
    renamed: list[frozenset[str]] = []  # by outline, names that its first rank has changed
    for rank, one in enumerate(all_ranks):
        if one.shape not in first:
            if one.outline is None:
                raise CheckpointError("a rank sent no outline", rank=rank, phase="plan")
            first[one.shape] = len(bases)
            places.append({name: index for index, name in enumerate(one.outline.names)})
            # Its leaves fit the tensors of this rank, not those of another under the same name.
            names = tuple(one.renamed.get(name, name) for name in one.outline.names)
            bases.append(msgspec.structs.replace(one.outline, names=names))
            renamed.append(frozenset(one.renamed))
        base = first[one.shape]
        ranks.append(base)
        leaves = _own_leaves(one.leaves, bases[base].leaves, rank)
        own_names = {}
        for old in renamed[base] | one.renamed.keys():
            index, name = places[base].get(old), one.renamed.get(old, old)
            if index is not None and bases[base].names[index] != name:
                own_names[index] = name
        if leaves or own_names:
            own.append(Own(rank, pairs(leaves), pairs(own_names)))
    return Outlines(tuple(bases), tuple(ranks), tuple(own))


def _own_leaves(
    rows: Iterable[tuple[int, Leaf]], base: Sequence[Leaf], rank: int
) -> dict[int, Leaf]:
    found = {}
    for index, leaf in rows:
        if not 0 <= index < len(base):
            raise CheckpointError(f"leaf {index} of {len(base)} was sent", rank=rank, phase="plan")
        if leaf != base[index]:
            found[index] = leaf
    return found
