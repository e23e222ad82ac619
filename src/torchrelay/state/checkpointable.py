"""Plain tensors that say which boxes of a larger one they have: torch's `CheckpointableTensor`.

From 2.14 on torch's planners take a tensor with these four attributes for shards of a tensor of
`global_shape`: shard i is the box of `local_sizes[i]` elements at `global_offsets[i]` there, and at
`local_offsets[i]` in the tensor itself, where other elements are padding. The attributes make it
one, whatever torch is installed: a state means the same on all ranks. DTensors and ShardedTensors
stay what they are, and a tensor with only some of the attributes is a plain one, as it is to torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import repeat
from operator import index
from typing import Any, NamedTuple

import torch

from torchrelay.errors import ManifestError, UnsupportedLeafError
from torchrelay.geometry.boxes import Box, Comparisons
from torchrelay.geometry.shards import ShardPiece
from torchrelay.record import manifest as m
from torchrelay.state import tensors as t
from torchrelay.state.boxed import BoxedTensor
from torchrelay.state.paths import LeafPaths, naming
from torchrelay.state.tree import Flat

ATTRIBUTES = ("global_shape", "global_offsets", "local_offsets", "local_sizes")
_Numbers = tuple[int, ...]


class _Geometry(NamedTuple):
    """The four attributes, as tuples of numbers."""

    global_shape: _Numbers
    global_offsets: tuple[_Numbers, ...]
    local_offsets: tuple[_Numbers, ...]
    local_sizes: tuple[_Numbers, ...]


def with_boxes(flat: Flat) -> Flat:
    """A state with a `BoxedTensor` in the place of each checkpointable tensor, which is its `own`.

    `UnsupportedLeafError` names the path of one whose attributes contradict each other.
    """
    some = [n for n, found in enumerate(_marks(flat.leaves)) if found]
    if not some:
        return flat
    leaves, paths = list(flat.leaves), LeafPaths(flat.tree)
    for number in some:
        leaf: Any = leaves[number]
        if is_checkpointable(leaf):
            with naming(partial(paths.__getitem__, number)):
                leaves[number] = boxed(leaf)
    return flat._replace(leaves=leaves)


def _marks(leaves: Sequence[object]) -> Sequence[bool]:
    """Whether each has the first of the attributes: of most states none has, so that is cheap."""
    kinds = set(map(type, leaves))
    tensors = {kind for kind in kinds if issubclass(kind, torch.Tensor)}
    if tensors == kinds:
        return [*map(hasattr, leaves, repeat(ATTRIBUTES[0]))]
    return [type(leaf) in tensors and hasattr(leaf, ATTRIBUTES[0]) for leaf in leaves]


def is_checkpointable(leaf: object) -> bool:
    """Whether torch 2.14 and later take it for shards of a tensor."""
    if not isinstance(leaf, torch.Tensor) or not hasattr(leaf, ATTRIBUTES[0]):
        return False
    return all(hasattr(leaf, name) for name in ATTRIBUTES) and not t.is_distributed(leaf)


def boxed(tensor: torch.Tensor) -> BoxedTensor:
    """The boxes of a checkpointable tensor; `UnsupportedLeafError` where its attributes contradict
    each other, or the tensor itself."""
    shape, *columns = _geometry(tensor)
    counts = {name: len(found) for name, found in zip(ATTRIBUTES[1:], columns, strict=True)}
    if len(set(counts.values())) > 1:
        raise _refused(f"they tell of different numbers of shards, {counts}")
    pieces = []
    for number, (offsets, at, sizes) in enumerate(zip(*columns, strict=True)):
        _check_inside(number, offsets, sizes, ATTRIBUTES[0], shape)
        _check_inside(number, at, sizes, "the shape of the tensor", tuple(tensor.shape))
        pieces.append(ShardPiece((offsets, sizes), at))
    if _overlap([piece.box for piece in pieces]):
        raise _refused("two of its shards have the same elements of the whole")
    if len(shape) > m.MAX_DIMS:
        raise UnsupportedLeafError(f"{len(shape)} dimensions, the cap is {m.MAX_DIMS}")
    return BoxedTensor.of_pieces(tensor, shape, pieces)


def _geometry(tensor: object) -> _Geometry:
    shape = _numbers(ATTRIBUTES[0], getattr(tensor, ATTRIBUTES[0]))
    columns = []
    for name in ATTRIBUTES[1:]:
        value = getattr(tensor, name)
        try:
            columns.append(tuple(map(partial(_numbers, name), value)))
        except TypeError:
            raise _refused(f"{name} is not a sequence") from None
    return _Geometry(shape, *columns)


def _numbers(name: str, value: Any) -> _Numbers:
    try:
        found = tuple(map(index, value))
    except TypeError:
        raise _refused(f"{name} has {value!r:.80} in the place of whole numbers") from None
    if any(not 0 <= number < m.MAX_SIZE for number in found):
        raise _refused(f"{name} has {value!r:.80} in it")
    return found


def _check_inside(
    number: int, offsets: _Numbers, sizes: _Numbers, what: str, shape: _Numbers
) -> None:
    if not len(offsets) == len(sizes) == len(shape):
        raise _refused(
            f"shard {number} has {len(offsets)} offsets and {len(sizes)} sizes, and {what} has "
            f"{len(shape)} dimensions"
        )
    if any(at + size > end for at, size, end in zip(offsets, sizes, shape, strict=True)):
        raise _refused(f"shard {number}, {sizes} at {offsets}, reaches out of {what}, {shape}")


def _overlap(boxes: Sequence[Box]) -> bool:
    try:
        return Comparisons().overlap(boxes)
    except ManifestError as fault:
        raise _refused(fault.message) from None


def _refused(why: str) -> UnsupportedLeafError:
    return UnsupportedLeafError(
        f"it has the attributes of torch's CheckpointableTensor, and {why}: correct them, or "
        "delete them where the tensor is whole"
    )


def keep_attributes(state: Any, copy: Any) -> None:
    """Give the tensors of a copied state the attributes that theirs have in the state itself:
    torch's stagers may copy the values alone."""
    if is_checkpointable(state):
        for name in ATTRIBUTES:
            setattr(copy, name, getattr(state, name))
    elif isinstance(state, dict):
        for key, value in state.items():
            keep_attributes(value, copy[key])
    elif isinstance(state, (list, tuple)):
        for value, copied in zip(state, copy, strict=True):
            keep_attributes(value, copied)


def checkpointable(
    locals_: Sequence[torch.Tensor], boxes: Sequence[m.Box], like: m.ShardedLeaf
) -> torch.Tensor:
    """A tensor with these boxes of a whole one and the attributes that say so. One box is the
    tensor itself; several lie one after the other along its first dimension."""
    offsets, sizes = [box.offsets for box in boxes], [box.sizes for box in boxes]
    starts = [(0,) * len(like.shape) for _ in boxes]
    if len(locals_) == 1:
        local = locals_[0]
    else:
        dims = len(like.shape)
        ends = [sum(one[0] for one in sizes[:n]) for n in range(len(sizes) + 1)] if dims else []
        widths = [max((one[dim] for one in sizes), default=0) for dim in range(1, dims)]
        starts = [(ends[n], *(0 for _ in widths)) for n in range(len(sizes))]
        dtype, device = t.dtype_named(like.dtype), locals_[0].device if locals_ else "cpu"
        local = torch.empty((*ends[-1:], *widths), dtype=dtype, device=device)
        t.raw_of(local).zero_()
        for at, part in zip(starts, locals_, strict=True):
            where = tuple([slice(low, low + n) for low, n in zip(at, part.shape, strict=True)])
            t.copy_values(local[where], part)
    made: Any = t.with_flags(local, like.flags)
    found = _Geometry(tuple(like.shape), tuple(offsets), tuple(starts), tuple(sizes))
    for name, value in found._asdict().items():
        setattr(made, name, value)
    whole: torch.Tensor = made
    return whole
