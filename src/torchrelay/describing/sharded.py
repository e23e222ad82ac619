"""The distributed tensors of a state, each as the one tensor that it has in this process.

The tensors of a job are distributed in few ways, so each way is worked out once. A tensor that has
several local shards, or whose elements here are not a box of it, is left to the general path.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from msgspec.structs import replace

from torchrelay.describing.plain import PlainTensors, find_plain
from torchrelay.errors import UnsupportedLeafError
from torchrelay.geometry.boxes import Box, Numbers
from torchrelay.geometry.runs import reaching
from torchrelay.geometry.strides import contiguous_strides
from torchrelay.record import manifest as m
from torchrelay.record.kinds import KindTable
from torchrelay.record.schema import BoxSharding, ImageKind, LeafKind, MeshSharding
from torchrelay.state import tensors as t
from torchrelay.state.backing import check_memory
from torchrelay.state.boxed import BoxedTensor
from torchrelay.state.dtensor_pieces import pieces_of, placement_records
from torchrelay.state.leaves import flags_of_sharded
from torchrelay.state.meshes import mesh_record
from torchrelay.state.paths import Path, show
from torchrelay.state.tree import Flat

_encode = msgspec.msgpack.Encoder().encode
PathOf = Callable[[int], Path]


class ShardedKind(NamedTuple):
    """The common properties of distributed tensors: dtype, shape, strides and flags of the whole,
    its distribution, and the box of it that is here. A DTensor has a mesh, a ShardedTensor `boxes`
    on all ranks. `as_plain`: nothing of its distribution is recorded."""

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    flags: int
    box: Box
    mesh: m.Mesh | None
    placements: tuple[m.Placement, ...] = ()
    coordinate: tuple[int, ...] | None = None
    boxes: tuple[m.Box, ...] = ()
    pinned: bool = False
    checkpointable: bool = False
    as_plain: bool = False

    @property
    def image(self) -> ImageKind:
        """The kind of image that its part here is."""
        return ImageKind.of_boxes(self.dtype, self.shape, [self.box])

    def number_in(self, kinds: KindTable) -> int:
        """The number of the kind of its leaves."""
        leaf = LeafKind(self.dtype, self.shape, self.strides, self.flags)
        if self.as_plain:
            return kinds.leaves.number(leaf)
        if self.mesh is None:
            cut = BoxSharding(self.boxes, self.pinned, self.checkpointable)
            return kinds.distributed(leaf, cut, None)
        how = MeshSharding(-1, self.placements, self.coordinate)
        return kinds.distributed(leaf, how, self.mesh)

    def without_bytes(self, flags: int) -> m.Leaf:
        """The record of a whole tensor that has no elements, or no memory."""
        part = m.TensorLeaf(self.dtype, self.shape, None, -1, 0, flags)
        if self.as_plain:
            return replace(part, flags=flags | self.flags)
        if self.mesh is None:
            facts = (self.boxes, self.shape, self.dtype, self.flags, self.pinned)
            return m.ShardedLeaf((part,), (m.Box(*self.box, None),), *facts)
        strides = contiguous_strides(self.shape) if self.strides is None else self.strides
        how = (self.mesh, self.placements, self.shape, strides, self.coordinate, self.flags)
        return m.DTensorLeaf(part, *how)

    @property
    def is_partial(self) -> bool:
        """Whether it has values that are yet to be reduced."""
        return any(placement.kind == "partial" for placement in self.placements)


class ShardedLeaves:
    """The distributed tensors among some leaves: by leaf, the local tensor and its kind, which is
    that of the box that is here, or of the whole (`wholes`)."""

    def __init__(self, *, wholes: bool = False) -> None:
        self.locals: dict[int, torch.Tensor] = {}
        self.numbers: dict[int, int] = {}
        self.kinds: list[ShardedKind] = []
        self._wholes = wholes
        self._known: dict[Hashable, int] = {}  # -1: not of one box

    def local_leaves(self, leaves: Sequence[Any], *, now: bool = False) -> Sequence[Any]:
        """The leaves, with the local tensors of distributed ones in their places: those that they
        had, or have `now`."""
        if not self.locals:
            return leaves
        found = list(leaves)
        for leaf, local in self.locals.items():
            found[leaf] = local_of(found[leaf]) if now else local
        return found

    def kinds_of(self, plain: PlainTensors) -> Numbers:
        """The kind of each plain tensor that was found among the local ones: that in `plain`, or of
        a distributed tensor that in `kinds`, counted from there on."""
        if not self.numbers:
            return plain.kind_of
        leaves = np.array([*self.numbers], np.int64)
        rows = np.searchsorted(plain.leaves, leaves)
        there = rows < len(plain)
        there[there] = plain.leaves[rows[there]] == leaves[there]
        found: Numbers = plain.kind_of.copy()
        found[rows[there]] = len(plain.kinds) + np.array([*self.numbers.values()], np.int64)[there]
        return found

    def kind_of(self, leaf: int) -> ShardedKind | None:
        number = self.numbers.get(leaf)
        return None if number is None else self.kinds[number]

    def add(self, leaf: int, tensor: Any) -> None:
        """Take a tensor in, unless its box is wanted and what it has here is not one."""
        local: torch.Tensor | None
        key: Hashable
        kind: ShardedKind | None
        if t.is_sharded(tensor):
            locals_, boxes, all_boxes, _ = t.sharded_parts(tensor)
            kind, local = kind_of_sharded(tensor), local_of(tensor)
            if self._wholes:
                for one in locals_:
                    _check_local(one)
                # What other ranks have of it is for the plan of a save to find out.
                kind = kind._replace(as_plain=True, boxes=()) if kind.checkpointable else kind
            else:
                if len(locals_) != 1 or boxes[0] not in all_boxes:
                    return
                kind = kind._replace(box=(boxes[0].offsets, boxes[0].sizes))
            key = _encode(kind)
        else:
            local, spec = t.dtensor_parts(tensor)
            if self._wholes:
                _check_local(local)
            key = (spec, tensor.requires_grad, t.is_parameter(tensor))
            kind = None if key in self._known else self._kind_of_dtensor(tensor, spec)
        number = self._known.get(key)
        if number is None:
            number = self._known[key] = -1 if kind is None else len(self.kinds)
            self.kinds += [] if kind is None else [kind]
        if number < 0:
            return
        kind = self.kinds[number]
        if not self._wholes:
            assert local is not None
            if local.size() != kind.box[1] or local.dtype is not t.DTYPES[kind.dtype]:
                return
        self.numbers[leaf] = number
        if local is not None:
            self.locals[leaf] = local

    def _kind_of_dtensor(self, tensor: Any, spec: Any) -> ShardedKind | None:
        """The kind of a DTensor, or of its part here; None where that is not a box of it."""
        if self._wholes:
            kind = kind_of_dtensor(tensor)
            if kind.is_partial:
                raise UnsupportedLeafError(
                    "a DTensor with a partial placement has no value yet: redistribute it first"
                )
            return kind
        coordinate = spec.mesh.get_coordinate()
        if coordinate is None or tensor.dim() > m.MAX_DIMS:
            return None
        kind = kind_of_dtensor(tensor)
        pieces = pieces_of(kind.shape, spec)
        if len(pieces) != 1:
            return None
        return kind._replace(box=pieces[0].box, coordinate=tuple(coordinate))


def _check_local(local: torch.Tensor) -> None:
    """Raise `UnsupportedLeafError` for a part here that has no memory, which is found by its whole
    when it is read."""
    if t.is_plain(local):
        check_memory(local)


def local_of(leaf: Any) -> torch.Tensor | None:
    """A tensor that this process has of a distributed one."""
    if not t.is_sharded(leaf):
        return t.dtensor_parts(leaf)[0]
    locals_ = t.sharded_parts(leaf)[0]
    return locals_[0].detach() if locals_ else None


def find_sharded(leaves: Sequence[object], whole_of: PathOf | None = None) -> ShardedLeaves:
    """Find the distributed tensors among leaves. One that cannot be described is left to the
    general path, which refuses it by its name.

    With `whole_of`, which has the path of a leaf, their kinds are those of whole tensors, and all
    are found: `UnsupportedLeafError` for one that cannot be.
    """
    found = ShardedLeaves(wholes=whole_of is not None)
    types = {kind for kind in set(map(type, leaves)) if t.is_distributed_type(kind)}
    for index, leaf in enumerate(leaves if types else ()):
        if type(leaf) in types:
            try:
                found.add(index, leaf)
            except UnsupportedLeafError as fault:
                if whole_of is not None:
                    fault.path = fault.path or show(whole_of(index))
                    raise
    return found


class PlainLayout:
    """The plain tensors of a destination, and the local parts of its distributed ones that are
    plain: kinds and addresses. Holds none of the tensors but local parts."""

    def __init__(self, flat: Flat) -> None:
        self.sharded = find_sharded(flat.leaves)
        self.locals = self.sharded.local_leaves(flat.leaves)
        plain = find_plain(self.locals, sent=False)
        shared = reaching(plain.addresses, plain.addresses + plain.nbytes)
        # Tensors that share no memory with each other.
        self.plain: PlainTensors = plain.some(~shared) if shared.any() else plain

    @cached_property
    def kinds(self) -> Numbers:
        """The kind of each: of a plain tensor that in `plain`, of a distributed one that in
        `sharded`, counted from there on."""
        return self.sharded.kinds_of(self.plain)


def kind_of_dtensor(tensor: Any) -> ShardedKind:
    """The kind of a whole DTensor."""
    _, spec = t.dtensor_parts(tensor)
    shape, strides = tuple(tensor.shape), tuple(tensor.stride())
    return ShardedKind(
        t.NAMES[tensor.dtype],
        shape,
        None if strides == contiguous_strides(shape) else strides,
        (m.REQUIRES_GRAD if tensor.requires_grad else 0)
        | (m.PARAMETER if t.is_parameter(tensor) else 0),
        ((0,) * len(shape), shape),
        mesh_record(spec.mesh),
        placement_records(tensor),
    )


def kind_of_sharded(tensor: t.ShardedTensor | BoxedTensor) -> ShardedKind:
    """The kind of a whole tensor that ranks have shards of."""
    _, _, all_boxes, properties = t.sharded_parts(tensor)
    shape = tuple(tensor.size())
    return ShardedKind(
        t.NAMES[properties.dtype],
        shape,
        None,
        flags_of_sharded(tensor),
        ((0,) * len(shape), shape),
        None,
        boxes=all_boxes,
        pinned=properties.pin_memory,
        checkpointable=isinstance(tensor, BoxedTensor),
    )
