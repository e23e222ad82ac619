"""Kinds of leaves and images, meshes and shardings of a record that is being made, each once."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from torchrelay.geometry.boxes import Numbers
from torchrelay.geometry.numbered import Numbered
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
)


class KindTable:
    """The kinds of `leaves` and `images`, by number. Leaves that are distributed have their
    sharding from this table."""

    def __init__(self) -> None:
        self.leaves: Numbered[LeafKind] = Numbered()
        self.images: Numbered[ImageKind] = Numbered()
        self.meshes: Numbered[m.Mesh] = Numbered()
        self.shardings: Numbered[Sharding] = Numbered()

    def distributed(self, kind: LeafKind, how: Sharding, mesh: m.Mesh | None) -> int:
        """The number of a kind of leaf with this sharding, which is on a mesh if it has one."""
        if isinstance(how, MeshSharding):
            assert mesh is not None
            how = replace(how, mesh=self.meshes.number(mesh))
        return self.leaves.number(replace(kind, sharding=self.shardings.number(how)))

    def record(self, outlines: tuple[StateOutline, ...], kind_of: Numbers, **fields: Any) -> Record:
        """A record of outlines in these kinds, and of images of the kinds in `kind_of`."""
        return Record(
            version=VERSION,
            outlines=outlines,
            kinds=tuple(self.leaves.found),
            images=len(kind_of),
            image_kinds=tuple(self.images.found),
            kind_of=column_of(kind_of),
            meshes=tuple(self.meshes.found),
            shardings=tuple(self.shardings.found),
            **fields,
        )
