"""Whether a leaf agrees with itself."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from math import prod
from typing import Any

from torchrelay.errors import ManifestError
from torchrelay.record import manifest as m
from torchrelay.record.checks.tree import TreeLimits, check_tree
from torchrelay.record.dtypes import dtype_from_text, itemsize
from torchrelay.record.typed import MissingZoneError, decode_typed
from torchrelay.record.values import Typed, decode_value

MAX_NESTED = 16  # tensor subclasses in tensor subclasses
SPARSE_PARTS = {"coo": 2, "csr": 3, "csc": 3, "bsr": 3, "bsc": 3}


def check_leaf(leaf: m.Leaf, limits: TreeLimits, depth: int = 0) -> None:
    """Raise `ManifestError` for a leaf that cannot be. Its strided tensors, and its mesh, are the
    caller's to check."""
    if isinstance(leaf, (m.DTensorLeaf, m.SubclassLeaf)):
        check_shape(leaf.shape, leaf.strides)
    elif not isinstance(leaf, (m.ValueLeaf, m.SizeLeaf)):
        check_shape(leaf.shape)
    check = _CHECKS.get(type(leaf))
    if check is not None:
        check(leaf)
    if isinstance(leaf, m.SubclassLeaf):
        if depth > MAX_NESTED:
            raise ManifestError(f"tensor subclasses nested deeper than {MAX_NESTED}")
        check_tree(leaf.context, len(leaf.context_leaves), limits)
        for inner in (*leaf.parts, *leaf.context_leaves):
            check_leaf(inner, limits, depth + 1)


def check_shape(shape: tuple[int, ...], strides: tuple[int, ...] | None = None) -> int:
    """The number of elements."""
    numel = prod(shape)
    if numel >= m.MAX_SIZE:
        raise ManifestError(f"{numel} elements")
    if strides is not None and len(strides) != len(shape):
        raise ManifestError(f"{len(strides)} strides for {len(shape)} dimensions")
    return numel


def _check_value(leaf: m.ValueLeaf) -> None:
    if leaf.kind == "object":
        if not isinstance(leaf.value, Typed):
            raise ManifestError("an object of no type")
        with suppress(MissingZoneError):
            decode_typed(leaf.value, zones=False)
    elif not isinstance(decode_value(leaf.value), str) and leaf.kind != "plain":
        raise ManifestError(f"a {leaf.kind} is named by a string")


def _check_array(leaf: m.ArrayLeaf) -> None:
    numel, dtype = prod(leaf.shape), dtype_from_text(leaf.descr)
    if leaf.scalar and leaf.shape:
        raise ManifestError("a numpy scalar has no dimensions")
    if leaf.nbytes != numel * dtype.itemsize:
        raise ManifestError(f"{leaf.nbytes} bytes for {numel} items of {dtype.itemsize}")
    if (leaf.storage == -1) != (leaf.nbytes == 0):
        raise ManifestError("an array has a storage, an empty one has none")


def _check_sparse(leaf: m.SparseLeaf) -> None:
    if SPARSE_PARTS.get(leaf.layout) != len(leaf.parts):
        raise ManifestError(f"{len(leaf.parts)} parts for layout {leaf.layout[:40]!r}")


def _check_dtensor(leaf: m.DTensorLeaf) -> None:
    check_placements(leaf.placements, leaf.coordinate, leaf.mesh, len(leaf.shape))


def check_placements(
    placements: tuple[m.Placement, ...],
    coordinate: tuple[int, ...] | None,
    mesh: m.Mesh,
    dims: int,
) -> None:
    """Raise `ManifestError` unless a tensor with that many dimensions can lie on a mesh so."""
    if len(placements) != len(mesh.shape):
        raise ManifestError(
            f"{len(placements)} placements on a mesh of {len(mesh.shape)} dimensions"
        )
    if coordinate is not None and len(coordinate) != len(mesh.shape):
        raise ManifestError("a coordinate does not fit its mesh")
    for placement in placements:
        if placement.kind in ("shard", "strided") and not 0 <= placement.dim < dims:
            raise ManifestError(f"sharded on dimension {placement.dim} of {dims}")
        if placement.kind == "strided" and not 0 < placement.split < m.MAX_SIZE:
            raise ManifestError(f"split factor {placement.split}")


def _check_sharded(leaf: m.ShardedLeaf) -> None:
    itemsize(leaf.dtype)
    if len(leaf.shards) != len(leaf.boxes) or not leaf.all_boxes:
        raise ManifestError("shards and boxes do not fit")
    for shard, box in zip(leaf.shards, leaf.boxes, strict=True):
        if shard.shape != box.sizes or shard.dtype != leaf.dtype:
            raise ManifestError("a shard does not fill its box")
    check_boxes((*leaf.boxes, *leaf.all_boxes), leaf.shape)


def check_boxes(boxes: tuple[m.Box, ...], shape: tuple[int, ...]) -> None:
    """Raise `ManifestError` unless boxes lie in a tensor of this shape."""
    for box in boxes:
        if not len(box.offsets) == len(box.sizes) == len(shape):
            raise ManifestError("a box has other dimensions than its tensor")
        for offset, size, whole in zip(box.offsets, box.sizes, shape, strict=True):
            if offset + size > whole:
                raise ManifestError("a box reaches out of its tensor")


def _check_subclass(leaf: m.SubclassLeaf) -> None:
    if len(leaf.attributes) != len(leaf.parts):
        raise ManifestError(f"subclass {leaf.name[:40]!r} with other parts than attributes")
    if not all(name.isidentifier() for name in leaf.attributes):
        raise ManifestError("attributes are identifiers")


_CHECKS: dict[type, Callable[[Any], None]] = {
    m.ValueLeaf: _check_value,
    m.ArrayLeaf: _check_array,
    m.SparseLeaf: _check_sparse,
    m.DTensorLeaf: _check_dtensor,
    m.ShardedLeaf: _check_sharded,
    m.SubclassLeaf: _check_subclass,
}
