"""A state as it is kept: the record of its outline, and a tensor with a name for each image.

A tensor at rest has a name (its path, dotted), a dtype, a shape and its elements in row-major
order, whichever ranks held how much of it: so any program finds it, and any number of ranks can
load it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from torchrelay.errors import UnsupportedLeafError
from torchrelay.geometry.boxes import Numbers
from torchrelay.pause import gc_paused
from torchrelay.plan.casting import StandIns
from torchrelay.plan.description import TakenApart
from torchrelay.plan.images import View, stored_dtype
from torchrelay.plan.outline import TensorRows, outline
from torchrelay.plan.plain import PlainTensors, find_plain
from torchrelay.plan.sharded import ShardedLeaves, kind_of_dtensor, kind_of_sharded, local_of
from torchrelay.plan.state_plan import OddRows, kinds_of_plain
from torchrelay.record import manifest as m
from torchrelay.record.kinds import KindTable
from torchrelay.record.rows import distributed_leaf
from torchrelay.record.schema import ImageKind, Record
from torchrelay.state import tensors as t
from torchrelay.state.leaves import distributed_parts
from torchrelay.state.local_parts import tie_of
from torchrelay.state.objects import flatten_objects
from torchrelay.state.paths import Path, dotted, show, slots

Result = TypeVar("Result")


class Described(NamedTuple):
    """The outline of a state, as a record whose images have no boxes, and by image its name, the
    tensor (strided, DTensor or ShardedTensor), and the key of the root that it is under, if it is
    deeper.

    Nothing is copied but views that overlap in more than one way: those share a tensor of bytes.
    """

    record: Record
    names: list[str]
    tensors: list[torch.Tensor]
    tops: list[str | None]


def describe(state: object, stand_ins: StandIns | None = None) -> Described:
    """Take a state apart. `UnsupportedLeafError` names the leaf that cannot be kept exactly. With
    `stand_ins`, those are described in the places of tensors that are cast."""
    with gc_paused():
        return _Describer(state, stand_ins).described


class _Describer:
    """Images are first noted as entries: those of plain tensors, and then all others, each with
    the leaf that names it, a kind and a tensor. In the record they are in the state's order."""

    def __init__(self, state: object, stand_ins: StandIns | None) -> None:
        flat, _ = flatten_objects(state)
        self._paths: dict[int, Path] = {}
        for path, index in slots(flat.tree):
            self._paths.setdefault(index, path)
        if stand_ins is not None:
            leaves = stand_ins.replace(flat.leaves, lambda index: show(self._paths[index]))
            flat = flat._replace(leaves=leaves)
        self._leaves: Sequence[Any] = flat.leaves
        self._kinds = KindTable()
        # Leaf, kind, entry and offset of distributed tensors.
        self._rows: list[tuple[int, int, int, int]] = []
        self._others: dict[int, m.Leaf] = {}
        unlike = {kind for kind in set(map(type, flat.leaves)) if t.is_distributed_type(kind)}
        wholes = [n for n, leaf in enumerate(flat.leaves) if type(leaf) in unlike] if unlike else []
        apart = TakenApart(flat, ShardedLeaves(), wholes, at_rest=True)
        self._plain = apart.plain
        # Of each entry, the leaf that names it, and which tensor of that leaf it is.
        self._owners: list[int] = self._plain.leaves.tolist()
        self._tickets: list[int] = [0] * len(self._owners)
        self._tensors: list[torch.Tensor] = _bare_tensors(self._plain, self._leaves)
        self._image_kinds: list[int] = []  # of entries that are not plain tensors
        self._ties: dict[object, int] = {}  # entries of distributed tensors, by their memory
        self._known: dict[Hashable, tuple[int, int]] = {}  # kinds of DTensors and their images
        self._add_distributed(wholes)
        first = len(self._owners)
        for image in apart.resolved:
            view, place = apart.images.views[image.ticket], apart.images.places[image.ticket]
            tensor = _bare(view) if place.whole else image.region.keep
            kind = self._kinds.images.number(image.kind.without_boxes)
            self._entry(apart.owners[image.ticket], kind, tensor, image.ticket)
        self.described = self._described(apart, first)

    def _named(self, leaf: int, act: Callable[..., Result], *arguments: Any) -> Result:
        """Call a function; an error that names no leaf names this one."""
        try:
            return act(*arguments)
        except UnsupportedLeafError as fault:
            fault.path = fault.path or show(self._paths[leaf])
            raise

    # Images.

    def _entry(self, leaf: int, kind: int, tensor: torch.Tensor, ticket: int = 0) -> int:
        self._owners.append(leaf)
        self._tickets.append(ticket)
        self._image_kinds.append(kind)
        self._tensors.append(tensor)
        return len(self._owners) - 1

    # Distributed tensors, whole.

    def _add_distributed(self, wholes: Sequence[int]) -> None:
        locals_ = [self._named(index, local_of, self._leaves[index]) for index in wholes]
        plain = find_plain(locals_, offsets=False)
        addresses = dict(zip(plain.leaves.tolist(), plain.addresses.tolist(), strict=True))
        shared = Counter(addresses.values())
        for number, index in enumerate(wholes):
            address = addresses.get(number)  # of one that needs no other look
            leaf, local = self._leaves[index], locals_[number]
            kinds = self._named(index, self._kinds_of, leaf)
            if address is None and not self._named(index, self._has_bytes, index, local, kinds[0]):
                continue
            tie = tie_of(leaf) if address is None or shared[address] > 1 else None
            entry = self._ties.get(tie) if tie is not None else None
            if entry is None:
                entry = self._entry(index, kinds[1], leaf)
                if tie is not None:
                    self._ties[tie] = entry
            self._rows.append((index, kinds[0], entry, 0))

    def _kinds_of(self, leaf: Any) -> tuple[int, int]:
        """The kinds of a distributed tensor and of its image."""
        if isinstance(leaf, t.ShardedTensor):
            key: Hashable = None
            found = None
        else:
            key = (t.dtensor_parts(leaf)[1], leaf.requires_grad, t.is_parameter(leaf))
            found = self._known.get(key)
        if found is None:
            kind = kind_of_sharded(leaf) if key is None else kind_of_dtensor(leaf)
            if kind.is_partial:
                raise UnsupportedLeafError(
                    "a DTensor with a partial placement has no value yet: redistribute it first"
                )
            image = ImageKind(t.NAMES[leaf.dtype], kind.shape, None, 0)
            found = kind.number_in(self._kinds), self._kinds.images.number(image)
            if key is not None:
                self._known[key] = found
        return found

    def _has_bytes(self, index: int, local: torch.Tensor | None, kind: int) -> bool:
        """Whether a distributed tensor is an image; one without elements, or without memory, is
        only a leaf."""
        if local is not None and not t.is_plain(local):
            raise UnsupportedLeafError("the local part is not a plain strided tensor")
        if local is not None and t.flags_of(local) & (m.CONJ | m.NEG):
            raise UnsupportedLeafError("the local part is a conj or neg view")
        meta = local is not None and local.is_meta
        if not meta and 0 not in self._kinds.leaves.found[kind].shape:
            return True
        found = self._kinds.leaves.found[kind]
        how = self._kinds.shardings.found[found.sharding]
        part = m.TensorLeaf(found.dtype, found.shape, None, -1, 0, m.META if meta else 0)
        box = ((0,) * len(found.shape), found.shape)
        self._others[index] = distributed_leaf(part, box, found, how, self._kinds.meshes.found)
        return False

    # The record.

    def _described(self, apart: TakenApart, first: int) -> Described:
        """`first` is the entry of the first image that `apart` has resolved."""
        owners = np.array(self._owners, np.int64)
        place: Numbers = np.empty(len(owners), np.int64)  # of each entry, its image
        order = np.lexsort((np.array(self._tickets, np.int64), owners))
        place[order] = np.arange(len(order))
        plain, images = kinds_of_plain(self._plain, ShardedLeaves(), self._kinds, boxes=0)
        odd = OddRows(apart, self._kinds)
        self._rows += [(leaf, kind, first + image, at) for leaf, kind, image, at in odd.rows]
        for leaf, found in odd.finished(place[first:].tolist()).items():
            if isinstance(found, m.SubclassLeaf) and any(distributed_parts(found)):
                why = "a tensor subclass around a DTensor"
                raise UnsupportedLeafError(why, path=show(self._paths[leaf]))
            self._others[leaf] = found
        kind_of = np.concatenate([images, np.array(self._image_kinds, np.int64)])
        leaves, kinds, entries, offsets = np.array(self._rows, np.int64).reshape(-1, 4).T
        found_rows = outline(
            apart.flat.tree,
            len(self._leaves),
            self._others,
            TensorRows(self._plain.leaves, plain, place[: len(plain)], np.zeros_like(plain)),
            TensorRows(leaves, kinds, place[entries], offsets),
        )
        names, given = self._names(order.tolist())
        record = self._kinds.record((found_rows,), kind_of[order], names=given)
        paths = [self._paths[self._owners[entry]] for entry in order.tolist()]
        tops = [str(path[0]) if len(path) > 1 else None for path in paths]
        return Described(record, names, [self._tensors[n] for n in order.tolist()], tops)

    def _names(self, order: Sequence[int]) -> tuple[list[str], tuple[tuple[int, str], ...]]:
        """The names of the images, and those that are not the path of their first leaf."""
        found: dict[str, None] = {}
        given = []
        for image, entry in enumerate(order):
            base = name = dotted(self._paths[self._owners[entry]])
            count = 0
            while name in found:
                count += 1
                name = f"{base}.{count}"
            found[name] = None
            if count:
                given.append((image, name))
        return list(found), tuple(given)


def _bare_tensors(plain: PlainTensors, leaves: Sequence[Any]) -> list[torch.Tensor]:
    """Plain tensors without gradients, in dtypes that torch's planners know the size of."""
    tensors = [tensor.detach() for tensor in plain.of(leaves)]
    opaque = [stored_dtype(kind.dtype) != kind.dtype for kind in plain.kinds]
    if any(opaque):
        marks = np.array(opaque, bool)[plain.kind_of]
        for number in np.flatnonzero(marks).tolist():
            tensors[number] = t.raw_of(tensors[number])
    return tensors


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
