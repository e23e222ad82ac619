"""A state as an outline and named tensors: the shape in which it is kept.

A tensor at rest has a name (its path, dotted), a dtype, a shape and its elements in row-major
order, whichever ranks held how much of it: so any program finds it, and any number of ranks can
load it. The outline is the rest: the tree, and how each leaf comes out of the named tensors.
"""

from __future__ import annotations

from math import prod
from operator import itemgetter
from typing import NamedTuple

import torch

from torchrelay.errors import UnsupportedLeafError
from torchrelay.plan.description import taken_apart
from torchrelay.plan.images import Group, Images, View
from torchrelay.plan.plain import TensorKind
from torchrelay.record import manifest as m
from torchrelay.record.checkpoint.schema import Outline
from torchrelay.record.pause import gc_paused
from torchrelay.state import tensors as t
from torchrelay.state.leaves import finished
from torchrelay.state.local_parts import tie_of
from torchrelay.state.meshes import mesh_record
from torchrelay.state.objects import flatten_objects
from torchrelay.state.paths import Path, dotted, show, slots


class Named(NamedTuple):
    """An outline, and a tensor for each of its names: strided, DTensor or ShardedTensor.

    Nothing is copied but views that overlap in more than one way: those share a tensor of bytes.
    """

    outline: Outline
    tensors: dict[str, torch.Tensor]
    tops: dict[str, str | None]  # by name, the key of the root that it is under, if it is deeper


def outline(state: object) -> Named:
    """Take a state apart. `UnsupportedLeafError` names the leaf that cannot be kept exactly."""
    with gc_paused():
        return _Outliner(state).named


class _Outliner:
    def __init__(self, state: object) -> None:
        flat, _ = flatten_objects(state)
        self._leaves = flat.leaves
        self._paths: dict[int, Path] = {}
        for path, index in slots(flat.tree):
            self._paths.setdefault(index, path)
        self._tensors: dict[str, torch.Tensor] = {}
        self._tops: dict[str, str | None] = {}
        self._strides: dict[int, tuple[int, ...]] = {}
        self._records: dict[int, m.Leaf] = {}  # by leaf
        self._ties: dict[object, int] = {}  # names of distributed tensors, by their memory
        wholes = [index for index, leaf in enumerate(flat.leaves) if t.is_distributed(leaf)]
        pieces, some = taken_apart(flat, without=wholes)
        self._images, self._parts = some.images, _Parts(some.images)
        plain = pieces.plain
        kinds = map(plain.kinds.__getitem__, plain.kind_of.tolist())
        # Names are given in the order of the state.
        found: list[tuple[int, int, TensorKind | Group | None]] = [
            (leaf, -1, None) for leaf in wholes
        ]
        found += [(leaf, -1, kind) for leaf, kind in zip(plain.leaves, kinds, strict=True)]
        for group in some.images.groups():
            first = group.tickets[0]
            found.append((some.owners[first], first, group))
        for leaf, _, what in sorted(found, key=itemgetter(0, 1)):
            if isinstance(what, TensorKind):
                self._name_piece(leaf, what)
                continue
            try:
                if what is not None:
                    self._name_group(leaf, what)
                else:
                    self._records[leaf] = self._distributed(leaf)
            except UnsupportedLeafError as fault:
                fault.path = fault.path or show(self._paths[leaf])
                raise
        for leaf, item in zip(some.leaves, some.described, strict=True):
            self._records[leaf] = record = finished(item, self._parts.__getitem__)
            if isinstance(record, m.SubclassLeaf):
                _refuse_distributed_parts(record, self._paths[leaf])
        leaves = tuple(map(self._records.__getitem__, range(len(flat.leaves))))
        strides = tuple(sorted(self._strides.items()))
        self.named = Named(
            Outline(flat.tree, leaves, tuple(self._tensors), strides), self._tensors, self._tops
        )

    def _name_piece(self, leaf: int, kind: TensorKind) -> None:
        tensor = self._leaves[leaf]
        assert isinstance(tensor, torch.Tensor)
        index = self._name(tensor.detach(), leaf)
        self._records[leaf] = m.TensorLeaf(kind.dtype, kind.shape, None, index, 0, kind.flags)

    def _name_group(self, leaf: int, group: Group) -> None:
        first, layout = self._images.view(group.tickets[0]), group.layout
        if layout is not None and layout.numel == prod(first.shape):
            index = self._name(_bare(first), leaf)
            if not first.tensor.is_contiguous():
                self._strides[index] = layout.strides
            low, row_major = first.low, True
        else:
            low, memory = self._images.memory(group.tickets)
            index, row_major = self._name(memory, leaf), False
        for ticket in group.tickets:
            view = self._images.view(ticket)
            strides = None if row_major else view.kept_strides
            self._parts[ticket] = m.TensorLeaf(
                view.dtype, view.shape, strides, index, view.low - low, view.flags
            )

    def _name(self, tensor: torch.Tensor, leaf: int) -> int:
        path = self._paths[leaf]
        base = name = dotted(path)
        count = 0
        while name in self._tensors:
            count += 1
            name = f"{base}.{count}"
        self._tensors[name] = tensor
        self._tops[name] = str(path[0]) if len(path) > 1 else None
        return len(self._tensors) - 1

    def _distributed(self, index: int) -> m.Leaf:
        """The record of a whole DTensor or ShardedTensor."""
        leaf = self._leaves[index]
        if t.is_dtensor(leaf):
            return self._dtensor(leaf, index)
        return self._sharded(leaf, index)  # type: ignore[arg-type]

    def _whole(self, leaf: torch.Tensor, local: torch.Tensor | None, index: int) -> m.TensorLeaf:
        if local is not None and not t.is_plain(local):
            raise UnsupportedLeafError("the local part is no plain strided tensor")
        if local is not None and t.flags_of(local) & (m.CONJ | m.NEG):
            raise UnsupportedLeafError("the local part is a conj or neg view")
        shape = tuple(leaf.size())
        meta = local is not None and local.is_meta
        name = -1
        if not meta and 0 not in shape:
            tie = tie_of(leaf)
            name = self._ties.get(tie, -1)
            if name < 0:
                name = self._name(leaf, index)
            if tie is not None:
                self._ties[tie] = name
        return m.TensorLeaf(t.NAMES[leaf.dtype], shape, None, name, 0, m.META if meta else 0)

    def _dtensor(self, leaf: t.DTensor, index: int) -> m.DTensorLeaf:
        local, spec = t.dtensor_parts(leaf)
        placements = tuple(t.placement_record(placement) for placement in spec.placements)
        if any(placement.kind == "partial" for placement in placements):
            raise UnsupportedLeafError(
                "a DTensor with a partial placement has no value yet: redistribute it first"
            )
        return m.DTensorLeaf(
            self._whole(leaf, local, index),
            mesh_record(spec.mesh),
            placements,
            tuple(leaf.shape),
            tuple(leaf.stride()),
            None,
            t.flags_of(leaf) & (m.REQUIRES_GRAD | m.PARAMETER),
        )

    def _sharded(self, leaf: t.ShardedTensor, index: int) -> m.ShardedLeaf:
        locals_, _, all_boxes, properties = t.sharded_parts(leaf)
        whole = self._whole(leaf, locals_[0] if locals_ else None, index)
        zeros = (0,) * len(whole.shape)
        return m.ShardedLeaf(
            (whole,),
            (m.Box(zeros, whole.shape, None),),
            all_boxes,
            whole.shape,
            t.NAMES[properties.dtype],
            m.REQUIRES_GRAD if properties.requires_grad else 0,
            properties.pin_memory,
        )


class _Parts(dict[int, m.TensorLeaf]):
    """The records of tensors, by ticket; those without bytes have no name, and are made here."""

    def __init__(self, images: Images) -> None:
        super().__init__()
        self._images = images

    def __missing__(self, ticket: int) -> m.TensorLeaf:
        view = self._images.view(ticket)
        flags = view.flags & ~m.ON_DEVICE  # a tensor at rest is on none
        return m.TensorLeaf(view.dtype, view.shape, view.kept_strides, -1, 0, flags)


def _bare(view: View) -> torch.Tensor:
    """The tensor's memory as a plain tensor: no conj or neg bit, no quantizer, no gradient, and a
    dtype that torch's planners know the size of."""
    tensor = view.tensor
    if tensor.is_quantized or tensor.dtype in t.OPAQUE:
        return t.raw_of(tensor)
    if view.flags & (m.CONJ | m.NEG):
        record = m.TensorLeaf(view.dtype, view.shape, None, 0)
        storage, at = tensor.untyped_storage(), t.byte_offset(tensor)
        return t.over_storage(storage, at, record, tensor.stride())
    return tensor.detach()


def _refuse_distributed_parts(leaf: m.SubclassLeaf, path: Path) -> None:
    for part in (*leaf.parts, *leaf.context_leaves):
        if isinstance(part, (m.DTensorLeaf, m.ShardedLeaf)):
            raise UnsupportedLeafError("a tensor subclass around a DTensor", path=show(path))
        if isinstance(part, m.SubclassLeaf):
            _refuse_distributed_parts(part, path)
