"""Plans of a save as messages between ranks, and what comes out of them.

Plans travel as records of a closed list of types; what a planner of the user's own attaches to a
plan (`planner_data`) may be anything that a state may hold.

Ranks of one job hold most leaves in common, and some of their own under the same path: a random
state, a position in the data. Plain values and plain tensors that differ are kept for each rank.
Large plain tensors are compared by samples: those that agree in them are taken for replicas.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Annotated, Literal, NamedTuple

import msgspec
import torch
import xxhash

from torchrelay.errors import CheckpointError
from torchrelay.record.checkpoint.schema import Outline, Own, pairs
from torchrelay.record.manifest import MAX_DIMS, MAX_STREAM_BYTES, Leaf
from torchrelay.state import tensors as t
from torchrelay.stores.shares.layout import Entry

Kind = Literal["TENSOR", "SHARD", "BYTE_IO"]  # names of `WriteItemType`
_Length = Annotated[int, msgspec.Meta(ge=0, le=MAX_STREAM_BYTES)]
Lengths = Annotated[tuple[_Length, ...], msgspec.Meta(max_length=MAX_DIMS)]


class Item(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A `WriteItem`: what of which tensor is to be written, or an object (`box` None)."""

    name: str
    kind: Kind
    offset: Lengths | None
    index: int | None
    box: tuple[Lengths, Lengths] | None = None
    dtype: str = ""
    shape: Lengths = ()


class LocalPlan(msgspec.Struct, array_like=True, frozen=True):
    """What a rank tells the coordinator before a save."""

    outline: Outline | None
    items: list[Item]
    data: bytes  # the plan's `planner_data`, packed
    usable: bool = True
    replicas: dict[str, bytes] = {}  # what is compared of plain tensors, by name


class FinalPlan(msgspec.Struct, array_like=True, frozen=True):
    """What a rank is to write. `renamed`: names of its own tensors to those in its state."""

    items: list[Item]
    data: bytes
    usable: bool = True
    renamed: dict[str, str] = {}


class Outlines(NamedTuple):
    """The outlines of all ranks with what they share held once; see `Checkpoint`."""

    outlines: tuple[Outline, ...]
    ranks: tuple[int, ...]
    own: tuple[Own, ...]


def renames(locals_: list[LocalPlan]) -> list[dict[str, str]]:
    """For each rank, new names of tensors that are not what they are on a rank before."""
    taken = {name for local in locals_ if local.outline for name in local.outline.names}
    first: dict[str, bytes] = {}
    found: list[dict[str, str]] = []
    for rank, local in enumerate(locals_):
        renamed = {}
        for name, known in local.replicas.items():
            if first.setdefault(name, known) != known:
                renamed[name] = f"{name}@rank-{rank}"
                while renamed[name] in taken:
                    renamed[name] += "~"
        found.append(renamed)
    return found


def shape_of(outline: Outline) -> bytes:
    return xxhash.xxh3_128_digest(
        msgspec.msgpack.encode((outline.tree, outline.names, outline.strides))
    )


class RankOutline(NamedTuple):
    """What a rank has of the outlines: `shape` is that of its own but for the leaves, and `leaves`
    are those that may be others than on the first rank with that shape, which tells its outline."""

    shape: bytes
    outline: Outline | None
    leaves: Iterable[tuple[int, Leaf]]
    renamed: Mapping[str, str]


def merge(all_ranks: Iterable[RankOutline]) -> Outlines:
    """Hold each distinct outline once, and what single ranks have of their own apart."""
    bases: list[Outline] = []
    first: dict[bytes, int] = {}  # the outline by its shape
    ranks: list[int] = []
    own: list[Own] = []
    places: list[dict[str, int]] = []
    renamed: list[frozenset[str]] = []  # by outline, what its first rank has under new names
    for rank, one in enumerate(all_ranks):
        if one.shape not in first:
            if one.outline is None:
                raise CheckpointError("a rank sent no outline", rank=rank, phase="plan")
            first[one.shape] = len(bases)
            places.append({name: index for index, name in enumerate(one.outline.names)})
            # Its leaves fit the tensors that this rank has, not those of another under the name.
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
            raise CheckpointError(
                f"leaf {index} of {len(base)} was told of", rank=rank, phase="plan"
            )
        if leaf != base[index]:
            found[index] = leaf
    return found


def merge_outlines(locals_: list[LocalPlan], renamed: list[dict[str, str]]) -> Outlines:
    """The same of ranks that have told all of their outlines."""
    found = []
    for local, names in zip(locals_, renamed, strict=True):
        outline = local.outline
        told = (b"", ()) if outline is None else (shape_of(outline), enumerate(outline.leaves))
        found.append(RankOutline(told[0], outline, told[1], names))
    return merge(found)


class Drafted(NamedTuple):
    """Boxes to be written with the memory they are in, and objects as bytes."""

    entries: list[Entry]
    tensors: list[torch.Tensor]
    objects: dict[str, tuple[str, bytes]]  # by name; see `blobs.keep`
    # What a planner of the user's own made of the state's tensors:
    origins: tuple[tuple[str, str], ...] = ()  # the name it gave, and the state's
    dtypes: tuple[tuple[str, str], ...] = ()  # by name, of those that it converted


def with_objects(drafted: Drafted) -> list[Entry]:
    """The boxes of tensors, and behind them the objects as boxes of bytes."""
    objects = []
    for name, (_, data) in drafted.objects.items():
        size = (max(1, len(data)),)
        objects.append(Entry(name, "uint8", size, (0,), size, "objects"))
    return [*drafted.entries, *objects]


def item_bytes(final: FinalPlan) -> int:
    """Bytes of the tensors that a rank is to write."""
    return sum(
        prod(item.box[1]) * t.dtype_named(item.dtype).itemsize
        for item in final.items
        if item.box is not None
    )
