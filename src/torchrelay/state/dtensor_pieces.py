"""Which boxes of a DTensor its mesh and its placements give to this process."""

from __future__ import annotations

from math import prod
from typing import Any

from torchrelay.errors import UnsupportedLeafError
from torchrelay.geometry.shards import (
    MeshCut,
    ShardPiece,
    in_order_of_splits,
    pieces_at,
    pieces_on_mesh,
    refuse_two_readings,
)
from torchrelay.record import manifest as m
from torchrelay.state import tensors as t


def pieces_of(shape: tuple[int, ...], spec: Any) -> list[ShardPiece]:
    """The boxes that this process has of a tensor of this shape, none if it is not in the mesh.
    torch's own list of chunks is wrong for strided shards of uneven rows."""
    if (cuts := _cuts_of(spec)) is None:
        return []
    if (order := _explicit_order(spec)) is not None:
        return pieces_at(shape, [cuts[dim] for dim in order])
    found = pieces_on_mesh(shape, list(cuts.values()))
    if (other := _order_by_fsdp(spec, cuts)) is not None and pieces_at(shape, other) != found:
        refuse_two_readings()
    return found


def _order_by_fsdp(spec: Any, cuts: dict[int, MeshCut]) -> list[MeshCut] | None:
    """The order of the cuts if FSDP2 made the first of them; None where its split tells the order.

    FSDP2 cuts last, and writes down as its split how many chunks it found. FSDP2 of torch 2.11 does
    not count those of strided shards, and neither does `num_shards_map` there.
    """
    if not cuts:
        return None
    first, *others = cuts.values()
    same = [one for one in others if one.dim == first.dim]
    counted = spec.num_shards_map[first.dim] == first.size * prod(one.size for one in same)
    plain = prod(one.size for one in same if one.split == 1)
    if counted or first.split != plain or all(one.split == 1 for one in same):
        return None
    return [*in_order_of_splits(others)[0], first._replace(split=1)]


def _cuts_of(spec: Any) -> dict[int, MeshCut] | None:
    """The mesh dimensions that cut a tensor; None if this process is not in the mesh."""
    coordinate = spec.mesh.get_coordinate()
    if coordinate is None:
        return None
    records = map(t.placement_record, spec.placements)
    columns = zip(records, spec.mesh.shape, coordinate, strict=True)
    return {
        dim: MeshCut(one.dim, size, at, one.split if one.kind == "strided" else 1)
        for dim, (one, size, at) in enumerate(columns)
        if one.kind in ("shard", "strided")
    }


def _explicit_order(spec: Any) -> list[int] | None:
    """The mesh dimensions in the order in which they cut the tensor, where the spec has one that is
    separate from the placements. With strided shards it is in these, unless the spec says not."""
    order = getattr(spec, "shard_order", None)
    strided = any(t.placement_record(one).kind == "strided" for one in spec.placements)
    if order is None or getattr(spec, "use_strided_shard_as_shard_order", strided):
        return None
    return [dim for entry in order for dim in entry.mesh_dims]


def placement_records(tensor: t.DTensor) -> tuple[m.Placement, ...]:
    """The placements of a DTensor, which say which boxes each rank has.

    `UnsupportedLeafError` for a tensor that was cut in another order than they say.
    """
    _, spec = t.dtensor_parts(tensor)
    found = tuple(map(t.placement_record, spec.placements))
    order = _explicit_order(spec)
    by_dim: dict[int, list[int]] = {}
    for number in order or ():
        by_dim.setdefault(found[number].dim, []).append(number)
    plain = all(one.kind != "strided" for one in found)
    if order is None or (plain and all(dims == sorted(dims) for dims in by_dim.values())):
        return found
    shape, cuts = tuple(tensor.shape), _cuts_of(spec) or {}
    if pieces_of(shape, spec) != pieces_on_mesh(shape, list(cuts.values())) and cuts:
        raise UnsupportedLeafError(
            f"the order in which the mesh dimensions cut it is not that of its placements "
            f"{spec.placements}: redistribute it first"
        )
    return found
