"""Kinds of leaves and images, meshes and shardings of a record that is being made, each once."""

from __future__ import annotations

from typing import Any

import msgspec

from torchrelay.geometry.boxes import Numbers
from torchrelay.record import manifest as m
from torchrelay.record.schema import (
    VERSION,
    ImageKind,
    LeafKind,
    MeshSharding,
    Record,
    Sharding,
    StateOutline,
    column_of,
    pack_column,
)

_encode = msgspec.msgpack.Encoder(enc_hook=pack_column).encode


class KindTable:
    """Gives each kind a number: its index in `leaves` or `images`."""

    def __init__(self) -> None:
        self.leaves: list[LeafKind] = []
        self.images: list[ImageKind] = []
        self.meshes: list[m.Mesh] = []
        self.shardings: list[Sharding] = []
        self._known: dict[bytes, int] = {}  # by encoding: a peer's numbers may hash alike

    def _number(self, found: list[Any], what: Any) -> int:
        spelled = _encode((type(what).__name__, what))
        number = self._known.setdefault(spelled, len(found))
        if number == len(found):
            found.append(what)
        return number

    def leaf(self, kind: LeafKind) -> int:
        """The number of a kind that is not distributed, or has its sharding from this table."""
        return self._number(self.leaves, kind)

    def image(self, kind: ImageKind) -> int:
        return self._number(self.images, kind)

    def distributed(self, kind: LeafKind, how: Sharding, mesh: m.Mesh | None) -> int:
        """The number of a kind of leaf with this sharding, which is on a mesh if it has one."""
        if isinstance(how, MeshSharding):
            assert mesh is not None
            how = msgspec.structs.replace(how, mesh=self._number(self.meshes, mesh))
        number = self._number(self.shardings, how)
        return self.leaf(msgspec.structs.replace(kind, sharding=number))

    def record(self, outlines: tuple[StateOutline, ...], kind_of: Numbers, **fields: Any) -> Record:
        """A record of outlines in these kinds, and of images of the kinds in `kind_of`."""
        return Record(
            version=VERSION,
            outlines=outlines,
            kinds=tuple(self.leaves),
            images=len(kind_of),
            image_kinds=tuple(self.images),
            kind_of=column_of(kind_of),
            meshes=tuple(self.meshes),
            shardings=tuple(self.shardings),
            **fields,
        )
