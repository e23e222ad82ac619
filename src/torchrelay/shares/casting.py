"""A state whose floating tensors are published in another dtype.

The state is described with stand-ins: tensors of that dtype with the shapes, strides and ties of
its own. Nobody touches their memory, so it takes none. The elements are cast when they are copied.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch

from torchrelay.describing.region import Region
from torchrelay.errors import UnsupportedLeafError
from torchrelay.geometry.strides import (
    contiguous_strides,
    extent,
    linear_boxes,
    overlapping,
    packed,
)
from torchrelay.state import tensors as t
from torchrelay.state.backing import with_memory
from torchrelay.state.boxed import BoxedTensor

Geometry = tuple[object, ...]


class CastRegion(Region):
    """The elements of a tensor in row-major order, as bytes of another dtype: those that
    `tensor.to(dtype)` has."""

    __slots__ = ("_dtype",)

    def __init__(self, tensor: torch.Tensor, dtype: torch.dtype) -> None:
        flat = tensor.view(-1) if tensor.is_contiguous() else tensor
        super().__init__(tensor, tensor.numel() * dtype.itemsize, 0, flat)
        self._dtype, self._itemsize = dtype, dtype.itemsize

    def run(self, start: int, stop: int) -> None:
        """The bytes do not lie anywhere."""

    def read(self, start: int, stop: int, out: torch.Tensor, *, wait: bool = True) -> None:
        """Cast bytes [start, stop), which are whole elements, to the host buffer `out`."""
        view, size = self._view, self._itemsize
        assert view is not None
        items = out[: stop - start].view(self._dtype)
        if view.is_cpu and view.dim() == 1:  # most tensors: nothing but the cast
            items.copy_(view if stop - start == self.nbytes else view[start // size : stop // size])
            return
        first = start // size
        for at, index in linear_boxes(view.shape, first, stop // size):
            box = view[index]
            # A GPU casts its elements itself, and fewer bytes leave it.
            cast = box if box.is_cpu else box.to(self._dtype)
            flat = items[at - first : at - first + box.numel()].view(box.shape)
            flat.copy_(cast, non_blocking=not wait)


@cache
def can_cast(dtype: torch.dtype, to: torch.dtype) -> bool:
    """Whether torch converts values of one dtype to another: those of packed dtypes it does not."""
    try:
        torch.empty(1, dtype=to, device="cpu").copy_(torch.empty(1, dtype=dtype, device="cpu"))
    except (NotImplementedError, RuntimeError):
        return False
    return True


class StandIns:
    """Stand-ins for the floating tensors of one state, and the way back to those."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._sources: dict[Geometry, torch.Tensor] = {}  # by the geometry of the stand-in
        self._memory: dict[Geometry, torch.Tensor] = {}  # by storage and bytes of an element

    def replace(self, leaves: Sequence[Any], path_of: Callable[[int], str]) -> list[Any]:
        """The leaves of a state with stand-ins in the places of tensors that are cast.
        `UnsupportedLeafError` for those that cannot be cast as `tensor.to(dtype)` does it."""
        placed: dict[int, list[_ViewPlace]] = {}  # by storage
        found = list(leaves)
        for number, leaf in enumerate(leaves):
            if not isinstance(leaf, torch.Tensor):
                continue
            locals_ = _locals_of(leaf)
            is_cast = leaf.is_floating_point() and leaf.dtype is not self.dtype
            if all(map(t.is_plain, locals_)):
                if is_cast:
                    try:
                        locals_ = [*map(with_memory, locals_)]
                    except UnsupportedLeafError as fault:
                        fault.path = path_of(number)
                        raise
                for local in locals_:
                    if not local.numel() or local.is_meta:
                        continue
                    shape, strides = tuple(local.shape), local.stride()
                    low = t.byte_offset(local)
                    high = low + extent(shape, strides) * local.element_size()
                    place = _ViewPlace(low, high, (local.dtype, shape, strides), number, is_cast)
                    placed.setdefault(t.storage_id(local), []).append(place)
                here = any(not local.is_meta for local in locals_)
                if is_cast and here and not can_cast(leaf.dtype, self.dtype):
                    why = f"torch cannot convert {leaf.dtype} to {self.dtype}"
                    raise UnsupportedLeafError(why, path=path_of(number))
                if is_cast:
                    found[number] = self._stand_in(leaf, locals_)
            elif is_cast:
                kind = type(leaf).__name__
                why = f"a {kind} (layout {leaf.layout}) cannot be cast when it is published"
                raise UnsupportedLeafError(why, path=path_of(number))
        for views in placed.values():
            if len(views) > 1 and any(one.is_cast for one in views):
                _check_separate(views, path_of)
        return found

    def _stand_in(self, leaf: torch.Tensor, locals_: Sequence[torch.Tensor]) -> torch.Tensor:
        made = [*map(self._memory_for, locals_)]
        if isinstance(leaf, BoxedTensor):
            return leaf.with_memory(made, self.dtype)
        if t.is_dtensor(leaf):
            return t.dtensor_like(leaf, made[0])
        return t.with_flags(made[0], t.flags_of(leaf))

    def _memory_for(self, local: torch.Tensor) -> torch.Tensor:
        """A tensor that stands for one that is here."""
        shape, strides, size = tuple(local.shape), local.stride(), local.element_size()
        layout = packed(shape, strides)
        if local.is_meta:
            made = torch.empty_strided(shape, strides, dtype=self.dtype, device="meta")
        else:
            offset, count = local.storage_offset(), local.untyped_storage().nbytes() // size
            key: Geometry = (t.storage_id(local), size)
            if layout is None or layout.numel != local.numel():
                # Elements that share memory, as in an expanded tensor: each is cast on its own.
                key = (*key, offset, shape, strides)
                offset, count, strides = 0, local.numel(), contiguous_strides(shape)
            if key not in self._memory:
                self._memory[key] = torch.empty(count, dtype=self.dtype, device="cpu")
            memory = self._memory[key].untyped_storage()
            made = torch.empty(0, dtype=self.dtype, device="cpu")
            made.set_(memory, offset, shape, strides)
            self._sources[_geometry(made)] = local.detach()
        return made

    def source(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor that a stand-in stands for; any other is itself."""
        return self._sources.get(_geometry(tensor), tensor)

    def region(self, tensor: torch.Tensor, dtype: str) -> Region:
        """The elements of a `source`, in the dtype that they are described with."""
        if t.NAMES[tensor.dtype] == dtype:
            return Region.row_major(tensor)
        return CastRegion(tensor, self.dtype)


def _locals_of(leaf: torch.Tensor) -> list[torch.Tensor]:
    """The tensors that have the elements of a leaf here."""
    if isinstance(leaf, BoxedTensor):
        return leaf.locals_
    return [t.dtensor_parts(leaf)[0] if t.is_dtensor(leaf) else leaf]


class _ViewPlace(NamedTuple):
    """Bytes [low, high) of a storage, which a leaf has."""

    low: int
    high: int
    geometry: Geometry
    number: int
    is_cast: bool


def _check_separate(views: list[_ViewPlace], path_of: Callable[[int], str]) -> None:
    """Tensors of one storage are the same one, or lie apart: others could not be cast and still
    share what they share."""
    for group in overlapping([view[:2] for view in views]):
        first, *others = (views[index] for index in group)
        for view in others:
            if view[:3] != first[:3]:
                why = f"it overlaps {path_of(first.number)} in memory, so it cannot be cast"
                path = path_of(view.number)
                raise UnsupportedLeafError(f"{why}: publish a clone of one of them", path=path)


def _geometry(tensor: torch.Tensor) -> Geometry:
    return t.storage_id(tensor), tensor.storage_offset(), tensor.shape, tensor.stride()
