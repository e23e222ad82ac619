"""The tensors of this rank, as a plan compares them with those of other ranks.

Ranks find out that they have the same plain tensor by digests of all its bytes (`facts_of`).
Replicas of a distributed tensor are those that its placements say there are, and their bytes are
hashed, too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import torch
import xxhash
from msgspec.structs import replace

from torchrelay.errors import CheckpointError
from torchrelay.record.manifest import Shape
from torchrelay.shares.comparison import RankTensor, Row
from torchrelay.shares.values import value_digests
from torchrelay.state import tensors as t
from torchrelay.state.boxed import BoxedTensor
from torchrelay.state.dtensor_pieces import placement_records
from torchrelay.state.local_parts import LocalBoxes, local_parts
from torchrelay.state.meshes import mesh_record
from torchrelay.state.paths import naming
from torchrelay.state.replicas import Replicas, ranks_with_copies

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Source = Callable[[torch.Tensor], torch.Tensor]

_encode = msgspec.msgpack.Encoder().encode


class RankTensors:
    """One rank. `members`: the ranks that take part as meshes count them, where that is known.
    `source`: the tensor that has the elements of one."""

    def __init__(
        self, rank: int, world: int, members: Collection[int] | None, source: Source
    ) -> None:
        self._rank, self._world, self._members, self._source = rank, world, members, source
        self._dtensors: dict[object, RankTensor] = {}  # one of each spec
        self._boxes = LocalBoxes()

    def of(self, named: Sequence[tuple[str, torch.Tensor]]) -> list[RankTensor]:
        """Each tensor, by its name. The bytes of plain ones are hashed, and of distributed ones
        that several ranks have."""
        plain = [self._source(tensor) for _, tensor in named if type(tensor) is torch.Tensor]
        others = {
            at: self._distributed(name, tensor)
            for at, (name, tensor) in enumerate(named)
            if type(tensor) is not torch.Tensor
        }
        copies = [at for at, one in others.items() if one.holders]
        whole: list[Any] = [named[at][1] for at in copies]
        locals_ = [self._source(t.dtensor_parts(one)[0]) for one in whole]
        digests = value_digests([*plain, *locals_])
        for at, digest in zip(copies, digests[len(plain) :], strict=True):
            others[at] = others[at]._replace(value=digest)
        facts = map(bytes.__add__, map(_layout, plain), digests)
        return [
            RankTensor(name, next(facts), tensor.nbytes, self._rank, self._world, b"")
            if type(tensor) is torch.Tensor
            else others[at]
            for at, (name, tensor) in enumerate(named)
        ]

    def _distributed(self, name: str, tensor: torch.Tensor) -> RankTensor:
        if t.is_dtensor(tensor):
            local, spec = t.dtensor_parts(tensor)
            with naming(name):
                self._boxes.of(tensor)  # refuses a local tensor of another shape
            if (found := self._dtensors.get(spec)) is None:
                found = self._dtensors[spec] = self._dtensor(name, tensor, local, spec)
            return found._replace(name=name)
        if isinstance(tensor, BoxedTensor):
            # All ranks may have these boxes, as they may have a plain tensor.
            fact = _digest([_layout_of_whole(tensor), *boxes_of(tensor, self._source)])
            return RankTensor(name, fact, tensor.nbytes, self._rank, self._world, b"")
        locals_, _, all_boxes, _ = t.sharded_parts(tensor)  # type: ignore[arg-type]
        boxes = [(box.offsets, box.sizes) for box in all_boxes]
        fact = _digest((t.NAMES[tensor.dtype], tuple(tensor.size()), boxes))
        where = _digest([box.placement for box in all_boxes])
        return RankTensor(name, fact, sum(one.nbytes for one in locals_), 0, 1, b"", where)

    def _dtensor(self, name: str, tensor: t.DTensor, local: torch.Tensor, spec: Any) -> RankTensor:
        mesh = mesh_record(spec.mesh)
        with naming(name):
            placements = placement_records(tensor)
        copies = tuple([dim for dim, one in enumerate(placements) if one.kind == "replicate"])
        self._check_all_there(name, spec.mesh, copies)
        nbytes, replica, team = 0, 0, [0]
        if spec.mesh.get_coordinate() is not None:
            nbytes = local.nbytes
            team = ranks_with_copies(spec.mesh, copies, self._members)
            replica = team.index(int(spec.mesh.mesh[tuple(spec.mesh.get_coordinate())]))
        where = _digest(mesh)
        fact = _digest((t.NAMES[tensor.dtype], tuple(tensor.shape), placements, mesh.shape))
        holders = _digest(team) if len(team) > 1 and local.numel() else b""
        together = _digest((where, copies))
        return RankTensor(name, fact, nbytes, replica, len(team), together, where, holders)

    def _check_all_there(self, name: str, mesh: DeviceMesh, copies: tuple[int, ...]) -> None:
        """`CheckpointError` if a shard is only on ranks that do not take part."""
        if self._members is None:
            return
        there = np.isin(mesh.mesh.numpy(), list(self._members)).any(copies)
        if not there.all():
            raise CheckpointError(
                f"the step would not be whole, the group has {there.sum()} of its {there.size} "
                "shards: all ranks that have a part of a tensor are in the group that saves it",
                phase="plan",
                path=name,
            )


def facts_of(tensors: Sequence[torch.Tensor]) -> list[bytes]:
    """Dtype, shape and layout of each tensor, and the digest of its bytes."""
    digests = value_digests(tensors)
    return [_layout(one) + digest for one, digest in zip(tensors, digests, strict=True)]


def _layout(tensor: torch.Tensor) -> bytes:
    strides = [] if tensor.is_contiguous() else list(tensor.stride())
    return f"{t.NAMES[tensor.dtype]} {list(tensor.shape)} {strides} ".encode()


def row_of(
    one: RankTensor, tensor: torch.Tensor, source: Source, replicas: Replicas | None = None
) -> Row:
    """The report to the coordinator of a tensor that ranks have differently."""
    if not one.mesh:
        dtype, shape = _layout_of_whole(tensor)
        boxes = tuple(boxes_of(tensor, source)) if isinstance(tensor, BoxedTensor) else None
        row = Row(one.name, one.fact, dtype=dtype, shape=shape, boxes=boxes)
        if replicas is None:
            return row
        return replace(row, kind=replicas.kind, team=_digest((dtype, shape, replicas.ranks)))
    parts = [part for part in local_parts(tensor, source=source) if part.tensor.numel()]
    where = _digest([part.box for part in parts])
    values = _digest(facts_of([part.tensor for part in parts]))
    return Row(one.name, one.fact, one.mesh, (where, values) if parts else (b"", b""))


def _layout_of_whole(tensor: torch.Tensor) -> tuple[str, tuple[int, ...]]:
    return t.NAMES[tensor.dtype], tuple(tensor.shape)


def boxes_of(tensor: BoxedTensor, source: Source) -> list[tuple[Shape, Shape, bytes]]:
    """The boxes that this rank has of a tensor, each with a digest of its values."""
    parts = local_parts(tensor, source=source)
    facts = facts_of([part.tensor.contiguous() for part in parts])
    return [(*part.box, _digest(fact)) for part, fact in zip(parts, facts, strict=True)]


def _digest(value: object) -> bytes:
    return xxhash.xxh3_128_digest(_encode(value))
