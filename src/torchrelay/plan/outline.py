"""A state as an outline and named tensors: the shape in which it is kept.

A tensor at rest has a name (its path, dotted), a dtype, a shape and its elements in row-major
order, whichever ranks held how much of it: so any program finds it, and any number of ranks can
load it. The outline is the rest: the tree, and how each leaf comes out of the named tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from math import prod
from typing import NamedTuple

import msgspec
import torch

from torchrelay.errors import UnsupportedLeafError
from torchrelay.geometry.strides import contiguous_strides, extent, overlapping, packed
from torchrelay.plan.images import touched
from torchrelay.plan.plain import survey
from torchrelay.record import manifest as m
from torchrelay.record.checkpoint.schema import Outline
from torchrelay.record.pause import gc_paused
from torchrelay.state import tensors as t
from torchrelay.state.leaves import Finish, describe
from torchrelay.state.meshes import mesh_record
from torchrelay.state.objects import flatten_objects
from torchrelay.state.paths import Path
from torchrelay.state.tree import show, slots, text_of


class Named(NamedTuple):
    """An outline, and a tensor for each of its names: strided, DTensor or ShardedTensor.

    Nothing is copied but views that overlap in more than one way: those share a tensor of bytes.
    """

    outline: Outline
    tensors: dict[str, torch.Tensor]
    tops: dict[str, str | None]  # by name, the key of the root that it is under, if it is deeper


class _Held(NamedTuple):
    """A strided tensor, the leaf it belongs to, and the bytes [low, high) of memory it spans.
    `plain`: dtype and shape of one that is contiguous in host memory, and nothing else."""

    tensor: torch.Tensor
    leaf: int
    flags: int
    low: int
    high: int
    plain: tuple[str, tuple[int, ...]] | None = None

    @property
    def geometry(self) -> tuple[int, int, torch.Size, tuple[int, ...]]:
        return self.low, self.tensor.element_size(), self.tensor.shape, self.tensor.stride()


def outline(state: object) -> Named:
    """Take a state apart. `UnsupportedLeafError` names the leaf that cannot be kept exactly."""
    with gc_paused():
        return _Outliner(state).named


def dotted(path: Path) -> str:
    """The name of a leaf: what torch's planners would call it, in text that can be written."""
    name = ".".join(map(text_of, path)) or "state"
    return name if name.isascii() else name.encode(errors="backslashreplace").decode()


class _Outliner:
    def __init__(self, state: object) -> None:
        flat, _ = flatten_objects(state)
        self._paths: dict[int, Path] = {}
        for path, index in slots(flat.tree):
            self._paths.setdefault(index, path)
        self._held: list[_Held] = []
        self._alone: set[int] = set()  # tickets of arrays, which have a tensor of their own
        self._tensors: dict[str, torch.Tensor] = {}
        self._tops: dict[str, str | None] = {}
        self._strides: dict[int, tuple[int, ...]] = {}
        self._parts: dict[int, m.TensorLeaf] = {}
        described: list[int | m.Leaf | Finish] = []
        for index, (leaf, known) in enumerate(zip(flat.leaves, survey(flat.leaves), strict=True)):
            if known is not None:
                assert isinstance(leaf, torch.Tensor)
                (dtype, shape, _, _, nbytes), address, flags = known
                described.append(len(self._held))
                plain = dtype, shape
                self._held.append(_Held(leaf, index, flags, address, address + nbytes, plain))
            elif t.is_distributed(leaf):
                described.append(self._distributed(leaf, index))
            else:
                described.append(
                    describe(leaf, self._paths[index], partial(self._hold, leaf=index))
                )
        for group in self._groups():
            held = self._held[group[0]]
            if len(group) == 1 and held.plain is not None:
                index = self._name(held.tensor.detach(), held.leaf)
                self._parts[group[0]] = m.TensorLeaf(*held.plain, None, index, 0, held.flags)
            else:
                self._name_group(group)
        leaves = [
            self._parts[item]
            if isinstance(item, int)
            else item
            if isinstance(item, msgspec.Struct)
            else item(self._parts.__getitem__)
            for item in described
        ]
        for index, leaf_record in enumerate(leaves):
            if isinstance(leaf_record, m.SubclassLeaf):
                _refuse_distributed_parts(leaf_record, self._paths[index])
        names = tuple(self._tensors)
        self.named = Named(
            Outline(flat.tree, tuple(leaves), names, tuple(sorted(self._strides.items()))),
            self._tensors,
            self._tops,
        )

    def _hold(self, tensor: torch.Tensor, *, leaf: int, apart: bool = False) -> int:
        flags = t.flags_of(tensor) | (m.META if tensor.is_meta else 0)
        nbytes = extent(tuple(tensor.shape), tensor.stride()) * tensor.element_size()
        low = 0 if tensor.is_meta or not nbytes else tensor.data_ptr()
        if apart:
            self._alone.add(len(self._held))
        self._held.append(_Held(tensor, leaf, flags, low, low + nbytes))
        return len(self._held) - 1

    def _groups(self) -> Iterator[list[int]]:
        """Tickets of tensors that share memory, in the order of the state."""
        devices: dict[torch.device, list[int]] = {}
        groups: list[list[int]] = []
        for ticket, held in enumerate(self._held):
            if held.low and ticket in self._alone:
                groups.append([ticket])
            elif held.low:
                devices.setdefault(held.tensor.device, []).append(ticket)
            else:
                strides = held.tensor.stride()
                shape = tuple(held.tensor.shape)
                kept = None if strides == contiguous_strides(shape) else strides
                dtype = t.NAMES[held.tensor.dtype]
                self._parts[ticket] = m.TensorLeaf(dtype, shape, kept, -1, 0, held.flags)
        for tickets in devices.values():
            spans = [(self._held[ticket].low, self._held[ticket].high) for ticket in tickets]
            groups += [
                sorted(tickets[i] for i in group) if len(group) > 1 else [tickets[group[0]]]
                for group in overlapping(spans)
            ]
        yield from sorted(groups)

    def _name_group(self, tickets: list[int]) -> None:
        views = [self._held[ticket] for ticket in tickets]
        first = views[0].tensor
        shape, strides = tuple(first.shape), first.stride()
        layout = packed(shape, strides)
        if (
            layout is not None
            and layout.numel == prod(shape)
            and (len(views) == 1 or all(view.geometry == views[0].geometry for view in views))
        ):
            index = self._name(_bare(views[0]), views[0].leaf)
            if not first.is_contiguous():
                self._strides[index] = layout.strides
            for ticket, view in zip(tickets, views, strict=True):
                dtype = t.NAMES[view.tensor.dtype]
                self._parts[ticket] = m.TensorLeaf(dtype, shape, None, index, 0, view.flags)
            return
        last = max(views, key=lambda view: view.high)
        low = min(view.low for view in views)
        origin = last.tensor.untyped_storage().data_ptr()
        low -= (low - origin) % max(view.tensor.element_size() for view in views)
        if low < origin:
            path = show(self._paths[views[0].leaf])
            raise UnsupportedLeafError("storages that overlap without being one", path=path)
        nbytes = last.high - low
        memory = t.flat_bytes(last.tensor.untyped_storage(), low - origin, nbytes)
        spans = [
            (
                view.low - low,
                view.tensor.element_size(),
                tuple(view.tensor.shape),
                view.tensor.stride(),
            )
            for view in views
        ]
        mask = touched(spans, nbytes)
        if mask is not None:
            memory = memory * mask.to(memory.device)  # bytes that no view reaches stay here
        index = self._name(memory, views[0].leaf)
        for ticket, view in zip(tickets, views, strict=True):
            shape, strides = tuple(view.tensor.shape), view.tensor.stride()
            kept = None if strides == contiguous_strides(shape) else strides
            dtype = t.NAMES[view.tensor.dtype]
            self._parts[ticket] = m.TensorLeaf(
                dtype, shape, kept, index, view.low - low, view.flags
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

    def _distributed(self, leaf: torch.Tensor, index: int) -> m.Leaf:
        """The record of a whole DTensor or ShardedTensor."""
        try:
            if t.is_dtensor(leaf):
                return self._dtensor(leaf, index)
            return self._sharded(leaf, index)  # type: ignore[arg-type]
        except UnsupportedLeafError as fault:
            fault.path = fault.path or show(self._paths[index])
            raise

    def _whole(self, leaf: torch.Tensor, local: torch.Tensor | None, index: int) -> m.TensorLeaf:
        if local is not None and not t.is_plain(local):
            raise UnsupportedLeafError("the local part is no plain strided tensor")
        if local is not None and t.flags_of(local) & (m.CONJ | m.NEG):
            raise UnsupportedLeafError("the local part is a conj or neg view")
        shape = tuple(leaf.size())
        meta = local is not None and local.is_meta
        name = -1 if meta or 0 in shape else self._name(leaf, index)
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


def _bare(held: _Held) -> torch.Tensor:
    """The tensor's memory as a plain tensor: no conj or neg bit, no quantizer, no gradient, and a
    dtype that torch's planners know the size of."""
    tensor = held.tensor
    if tensor.is_quantized or tensor.dtype in t.OPAQUE:
        return t.raw_of(tensor)
    if held.flags & (m.CONJ | m.NEG):
        shape = tuple(tensor.shape)
        record = m.TensorLeaf(t.NAMES[tensor.dtype], shape, None, 0)
        return t.over_storage(
            tensor.untyped_storage(), t.byte_offset(tensor), record, tensor.stride()
        )
    return tensor.detach()


def _refuse_distributed_parts(leaf: m.SubclassLeaf, path: Path) -> None:
    for part in (*leaf.parts, *leaf.context_leaves):
        if isinstance(part, (m.DTensorLeaf, m.ShardedLeaf)):
            raise UnsupportedLeafError("a tensor subclass around a DTensor", path=show(path))
        if isinstance(part, m.SubclassLeaf):
            _refuse_distributed_parts(part, path)
