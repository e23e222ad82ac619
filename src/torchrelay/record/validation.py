"""Whether the outline of a checkpoint's record agrees with its tensors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from torchrelay.errors import ManifestError
from torchrelay.record import manifest as m
from torchrelay.record.checks.leaves import check_flags, check_leaf, geometry
from torchrelay.record.checks.tree import TreeLimits, check_tree
from torchrelay.record.meshes import check_meshes
from torchrelay.steps import MAX_STEP

MAX_MORE_DIMS = 1 << 19  # of all tensors, beyond `_DIMS` of each: each costs time and memory
_DIMS = 8
_TOO_MUCH = m.MAX_STREAM_BYTES + 1  # so that sums of larger numbers stay in 64 bits
_Marks = np.ndarray[Any, np.dtype[np.bool_]]
Reach = list[int] | defaultdict[int, int]  # by storage, the last byte that leaves reach


def check_step(step: int | None) -> None:
    if step is not None and not 0 <= step <= MAX_STEP:
        raise ManifestError(f"step {step} is out of range")


def check_outline(tree: m.Node, leaves: tuple[m.Leaf, ...], sizes: Sequence[int]) -> None:
    """Raise `ManifestError` unless the leaves stand in the tree and fill tensors of these sizes."""
    try:
        if len(leaves) > m.MAX_LEAVES:
            raise ManifestError(f"{len(leaves)} leaves, the cap is {m.MAX_LEAVES}")
        check_tree(tree, len(leaves))
    except (ValueError, TypeError, OverflowError, RecursionError) as fault:
        raise ManifestError(f"invalid outline: {fault}") from None
    check_leaves(leaves, sizes)


def check_leaves(leaves: Collection[m.Leaf], sizes: Sequence[int]) -> None:
    """Raise `ManifestError` unless the leaves lie in tensors of these sizes, and fill those that
    they lie in."""
    for index, end in reach_of(leaves, sizes).items():
        check_filled(index, end, sizes[index])


def reach_of(leaves: Collection[m.Leaf], sizes: Sequence[int]) -> Mapping[int, int]:
    """By storage, where the last of the leaves in it ends; `ManifestError` if that is beyond the
    size of the storage."""
    storages = _Sized(sizes)
    reach: defaultdict[int, int] = defaultdict(int)
    limits = TreeLimits()

    def check_part(part: m.TensorLeaf) -> None:
        _check_tensor(part, storages, reach)

    try:
        for leaf in leaves:
            check_leaf(leaf, check_part, limits)
        check_meshes(leaves)
    except (ValueError, TypeError, OverflowError, RecursionError) as fault:
        raise ManifestError(f"invalid outline: {fault}") from None
    return reach


def check_filled(index: int, end: int, nbytes: int) -> None:
    """Raise `ManifestError` unless the leaves of a storage end where the storage does.

    Memory is made for leaves and filled with storages: the two must have one size.
    """
    if end != nbytes:
        raise ManifestError(f"storage {index} has {nbytes} bytes, its leaves reach {end}")


class _Room(NamedTuple):
    nbytes: int


class _Sized(Sequence[_Room]):
    """Storages of these sizes, each made when it is looked at."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = sizes

    def __len__(self) -> int:
        return len(self._sizes)

    def __getitem__(self, index: Any) -> Any:
        return _Room(self._sizes[index])


def last_byte(leaf: m.TensorLeaf) -> int:
    """Up to where in its storage a strided tensor reaches."""
    return leaf.offset + geometry(leaf.dtype, leaf.shape, leaf.strides)[2]


def _check_tensor(leaf: m.TensorLeaf, storages: Sequence[_Room], reach: Reach) -> None:
    numel, size, nbytes = geometry(leaf.dtype, leaf.shape, leaf.strides)
    check_flags(leaf.dtype, leaf.flags)
    if leaf.storage == -1:
        if leaf.offset or (numel and not leaf.flags & m.META):
            raise ManifestError("a tensor without its storage")
        return
    if numel == 0 or leaf.flags & m.META:
        raise ManifestError("an empty or meta tensor has no storage")
    if leaf.offset % size:
        raise ManifestError(f"offset {leaf.offset} is not a multiple of the item size {size}")
    _reach(leaf.storage, leaf.offset, leaf.offset + nbytes, storages, reach)


def _reach(index: int, first: int, last: int, storages: Sequence[_Room], reach: Reach) -> None:
    if not 0 <= index < len(storages):
        raise ManifestError(f"storage {index} of {len(storages)}")
    if first < 0 or last > storages[index].nbytes:
        raise ManifestError(
            f"a leaf needs bytes {first} to {last} of a storage of {storages[index].nbytes}"
        )
    reach[index] = max(reach[index], last)
