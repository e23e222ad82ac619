"""Whose shard it is: a part of a distributed tensor that is made as it was sent."""

from __future__ import annotations

from math import prod
from typing import Literal, cast, get_args

from torchrelay.errors import MismatchError, UsageError
from torchrelay.record import manifest as m
from torchrelay.record.meshes import coordinate_of
from torchrelay.state import tensors as t
from torchrelay.state.leaves import distributed_parts

# "own": this rank's own part by the sender's mesh. "replica": also where this rank is not in that
# mesh, so that the sender may be its counterpart in another replica. "as_sent": any.
Shards = Literal["own", "replica", "as_sent"]
SHARDS = get_args(Shards)


def check_choice(shards: str) -> Shards:
    if shards not in SHARDS:
        raise UsageError(f"shards is one of {', '.join(map(repr, SHARDS))}, not {shards!r}")
    return cast(Shards, shards)


def check_shards(leaf: m.Leaf, shards: Shards) -> None:
    """`MismatchError` for a distributed leaf whose part at the sender is not this rank's own."""
    rank = t.global_rank()
    for part in () if shards == "as_sent" else distributed_parts(leaf):
        if isinstance(part, m.DTensorLeaf):
            problem = _of_mesh(part, rank, shards)
        else:
            problem = _of_boxes(part, rank, shards)
        if problem:
            raise MismatchError(
                f"the sender's shard of a {_name(part)}, {problem}: receive `into=` a model "
                "or a state of this rank, from the rank that has its place in the mesh; "
                'shards="as_sent" takes the part of the sender as it is'
            )


def _name(leaf: m.DTensorLeaf | m.ShardedLeaf) -> str:
    if isinstance(leaf, m.DTensorLeaf):
        return "DTensor"
    return "CheckpointableTensor" if leaf.checkpointable else "ShardedTensor"


def _of_mesh(leaf: m.DTensorLeaf, rank: int | None, shards: Shards) -> str:
    """Why the part is not this rank's own; empty if it is, or if all ranks have the same."""
    placements = zip(leaf.placements, leaf.mesh.shape, strict=True)
    cut = [d for d, (one, size) in enumerate(placements) if one.kind != "replicate" and size > 1]
    if not cut:
        return ""
    here = None if rank is None else coordinate_of(leaf.mesh, rank)
    if here is None:
        return "" if shards == "replica" else "and this rank is not in its mesh"
    if leaf.coordinate is not None and all(here[d] == leaf.coordinate[d] for d in cut):
        return ""
    return f"cut for place {leaf.coordinate} of its mesh, and this rank is at {here}"


def _of_boxes(leaf: m.ShardedLeaf, rank: int | None, shards: Shards) -> str:
    if sum(prod(box.sizes) for box in leaf.boxes) == prod(leaf.shape):
        return ""
    if shards == "replica":
        return ""  # it says itself which rows it has, as torch passes it from rank to rank
    if leaf.checkpointable:
        return "which does not say whose it is"
    owners = {_rank_of(box) for box in leaf.all_boxes}
    if rank not in owners:
        return "and this rank has none of it"
    if {_rank_of(box) for box in leaf.boxes} == {rank}:
        return ""
    return f"and not that of rank {rank}"


def _rank_of(box: m.Box) -> int | None:
    """The rank in a placement such as "rank:1/cpu"."""
    name = (box.placement or "").partition("/")[0].removeprefix("rank:")
    return int(name) if name.isascii() and name.isdigit() and len(name) < 10 else None
