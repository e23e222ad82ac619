"""Kinds of leaves and images, meshes and shardings of a record that is being made, each once."""

from __future__ import annotations

from typing import Any

import msgspec

from torchrelay.plan.sharded import ShardedKind
from torchrelay.record import manifest as m
from torchrelay.record.schema import BoxSharding, ImageKind, LeafKind, MeshSharding, Sharding

_encode = msgspec.msgpack.Encoder().encode


class KindTable:
    """Gives each kind a number: its index in `leaves` or `images`."""

    def __init__(self) -> None:
        self.leaves: list[LeafKind] = []
        self.images: list[ImageKind] = []
        self.meshes: list[m.Mesh] = []
        self.shardings: list[Sharding] = []
        self._known: dict[bytes, int] = {}  # by encoding: a peer's numbers may hash alike

    def _number(self, found: list[Any], what: Any, key: object = None) -> int:
        spelled = _encode((type(what).__name__, what if key is None else key))
        number = self._known.setdefault(spelled, len(found))
        if number == len(found):
            found.append(what)
        return number

    def leaf(self, kind: LeafKind) -> int:
        return self._number(self.leaves, kind)

    def image(self, kind: ImageKind) -> int:
        boxes = () if kind.offsets is None else kind.boxes
        key = (kind.dtype, kind.shape, kind.strides, kind.count, boxes)
        return self._number(self.images, kind, key)

    def mesh(self, mesh: m.Mesh) -> int:
        return self._number(self.meshes, mesh)

    def sharding(self, how: Sharding) -> int:
        return self._number(self.shardings, how)

    def sharded_leaf(self, kind: ShardedKind) -> int:
        """The kind of a distributed leaf."""
        if kind.mesh is None:
            how: Sharding = BoxSharding(kind.boxes, kind.pinned)
        else:
            how = MeshSharding(self.mesh(kind.mesh), kind.placements, kind.coordinate)
        facts = (kind.dtype, kind.shape, kind.strides, kind.flags)
        return self.leaf(LeafKind(*facts, self.sharding(how)))
