"""The meshes of a record: making one takes torch a millisecond, whatever it is good for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from math import prod
from operator import eq

import msgspec

from torchrelay.errors import ManifestError
from torchrelay.geometry.strides import contiguous_strides
from torchrelay.record import manifest as m

MAX_MESH_WORK = 1 << 12  # dimensions of different meshes, and one more for each
MAX_MESH_RANKS = 1 << 22  # of all different meshes
_FEW = 8  # ranks of a mesh that are all written down

_encode = msgspec.msgpack.Encoder().encode


def mesh_of(
    device_type: str, shape: tuple[int, ...], ranks: tuple[int, ...], names: tuple[str, ...] | None
) -> m.Mesh:
    """The record of a mesh of these ranks, in few words where they are many."""
    if len(ranks) > _FEW:
        first = ranks[0]
        steps = contiguous_strides(shape)
        strides = [ranks[s] - first if n > 1 else 0 for s, n in zip(steps, shape, strict=True)]
        short = m.Mesh(device_type, shape, (first,), names, tuple(strides))
        if _reach(short) is not None and ranks_of(short) == ranks:
            return short
    return m.Mesh(device_type, shape, ranks, names)


def ranks_of(mesh: m.Mesh) -> tuple[int, ...]:
    """All ranks of a mesh that is valid, row-major."""
    if not mesh.strides:
        return mesh.ranks
    found = mesh.ranks
    for size, stride in zip(mesh.shape, mesh.strides, strict=True):
        found = tuple([rank + stride * step for rank in found for step in range(size)])
    return found


def coordinate_of(mesh: m.Mesh, rank: int) -> tuple[int, ...] | None:
    """The coordinate of a rank in a mesh that is valid, if it is in it."""
    found = [0] * len(mesh.shape)
    if mesh.strides:
        left, strides = rank - mesh.ranks[0], mesh.strides
    elif rank in mesh.ranks:
        left, strides = mesh.ranks.index(rank), contiguous_strides(mesh.shape)
    else:
        return None
    for stride, dim in sorted(zip(strides, range(len(strides)), strict=True), reverse=True):
        if mesh.shape[dim] > 1:
            found[dim], left = divmod(left, stride)
    inside = all(0 <= at < size for at, size in zip(found, mesh.shape, strict=True))
    return tuple(found) if inside and not left else None


def _reach(mesh: m.Mesh) -> int | None:
    """By how much strides take the last rank above that of the first; None where two positions
    have one rank. Each stride is past all that lesser ones reach."""
    reach = 0
    for stride, size in sorted(zip(mesh.strides, mesh.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return None
            reach += stride * (size - 1)
    return reach


def check_mesh(mesh: m.Mesh) -> None:
    """Raise `ManifestError` unless each position in a mesh has a rank of its own."""
    if mesh.names is not None and len(mesh.names) != len(mesh.shape):
        raise ManifestError("the names of a mesh do not fit its shape")
    if mesh.strides:
        fits = len(mesh.ranks) == 1 and len(mesh.strides) == len(mesh.shape) and 0 not in mesh.shape
        reach = _reach(mesh) if fits else None
        if reach is None:
            raise ManifestError("the strides of a mesh do not fit its shape")
        if mesh.ranks[0] + reach >= m.MAX_RANK:
            raise ManifestError("rank out of range")
    else:
        ranks = sorted(mesh.ranks)
        if len(ranks) != prod(mesh.shape) or any(map(eq, ranks, ranks[1:])):
            raise ManifestError("the ranks of a mesh do not fit its shape")


def check_meshes(leaves: Iterable[m.Leaf], more: Iterable[m.Mesh] = ()) -> None:
    """Raise `ManifestError` unless the meshes of leaves, and `more`, are meshes, and not too
    many."""
    known: set[bytes] = set()  # spelled as bytes: a peer's numbers may all have one hash
    work = ranks = 0
    for mesh in chain(more, _meshes(leaves)):
        spelled = _encode(mesh)
        if spelled not in known:
            known.add(spelled)
            check_mesh(mesh)
            work += 1 + len(mesh.shape)
            ranks += prod(mesh.shape)
            if work > MAX_MESH_WORK:
                raise ManifestError(f"tensors on over {len(known) - 1} different meshes")
            if ranks > MAX_MESH_RANKS:
                raise ManifestError(f"meshes of {ranks} ranks, the cap is {MAX_MESH_RANKS}")


def _meshes(leaves: Iterable[m.Leaf]) -> Iterator[m.Mesh]:
    for leaf in leaves:
        if isinstance(leaf, m.DTensorLeaf):
            yield leaf.mesh
        elif isinstance(leaf, m.SubclassLeaf):
            yield from _meshes((*leaf.parts, *leaf.context_leaves))
