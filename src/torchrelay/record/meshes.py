"""The meshes of a record: making one takes torch a millisecond, whatever it is good for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import prod
from operator import eq

import msgspec

from torchrelay.errors import ManifestError
from torchrelay.record import manifest as m

MAX_MESH_DIMS = 16
MAX_MESH_WORK = 1 << 12  # dimensions of different meshes, and one more for each

_encode = msgspec.msgpack.Encoder().encode


def check_mesh(mesh: m.Mesh) -> None:
    ranks = sorted(mesh.ranks)
    if len(ranks) != prod(mesh.shape) or any(map(eq, ranks, ranks[1:])):
        raise ManifestError("the ranks of a mesh do not fit its shape")
    if ranks and not 0 <= ranks[0] <= ranks[-1] < 1 << 31:
        raise ManifestError("rank out of range")
    dims = len(mesh.shape)
    if dims > MAX_MESH_DIMS:
        raise ManifestError(f"a mesh of {dims} dimensions, the cap is {MAX_MESH_DIMS}")


def check_meshes(leaves: Iterable[m.Leaf]) -> None:
    """Raise `ManifestError` if the leaves lie on too many different meshes."""
    known: set[bytes] = set()  # spelled as bytes: a peer's numbers may all have one hash
    work = 0
    for mesh in _meshes(leaves):
        spelled = _encode(mesh)
        if spelled not in known:
            known.add(spelled)
            work += 1 + len(mesh.shape)
            if work > MAX_MESH_WORK:
                raise ManifestError(f"tensors on over {len(known) - 1} different meshes")


def _meshes(leaves: Iterable[m.Leaf]) -> Iterator[m.Mesh]:
    for leaf in leaves:
        if isinstance(leaf, m.DTensorLeaf):
            yield leaf.mesh
        elif isinstance(leaf, m.SubclassLeaf):
            yield from _meshes(leaf.parts)
