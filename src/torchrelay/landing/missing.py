"""Leaves that are made for a destination: what it lacks, and what its objects are given.

Memory of theirs alone is the caller's to keep, so bytes that arrive go straight to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from torchrelay.geometry.chunks import Chunks
from torchrelay.landing.checks.fit import fit, mesh_of
from torchrelay.landing.checks.shards import check_shards
from torchrelay.landing.fresh import place_for
from torchrelay.landing.held import HeldImages
from torchrelay.landing.leaves import make_leaf
from torchrelay.landing.options import LandingOptions
from torchrelay.landing.workspace import Workspace, allocate
from torchrelay.record import manifest as m
from torchrelay.record.manifest import parts
from torchrelay.record.rows import LeafRows
from torchrelay.state import tensors as t
from torchrelay.state.leaves import Part, check_buildable
from torchrelay.state.paths import Path, naming


class GivenLeaf(NamedTuple):
    """A leaf for `load_state_dict` of an object, and a tensor that it resembles: the object's own
    in its place, or its parameter. `fits`: a tensor has to be of the same kind."""

    leaf: int
    path: Path
    like: torch.Tensor | None
    fits: bool


class MadeLeaves:
    def __init__(self, rows: LeafRows, options: LandingOptions) -> None:
        self._rows = rows
        self._options = options
        self._meshes: dict[int, t.DeviceMesh] = {}
        self._devices: dict[int, torch.device] = {}  # of images
        self.paths: dict[int, Path] = {}  # by leaf

    def add(self, index: int, path: Path, like: torch.Tensor | None = None) -> None:
        """Have a leaf made, on the device of `like`, and on its mesh if it is distributed."""
        leaf = self._rows[index]
        self.paths[index] = path
        with naming(path):
            check_buildable(leaf)
            mesh = None if like is None else mesh_of(leaf, like)
            if mesh is not None:
                self._meshes[index] = mesh
            else:
                check_shards(leaf, self._options.shards)
        for part in parts(leaf):
            if isinstance(leaf, m.ArrayLeaf):
                self._devices[part.storage] = torch.device("cpu")
            elif like is not None and part.shape:  # scalars are where they were at the sender
                self._devices.setdefault(part.storage, like.device)

    def add_given(self, given: GivenLeaf) -> None:
        """Have a leaf made for an object. A value in the place of a tensor is the object's to
        judge: an optimizer has None where it has not come to yet."""
        self.add(given.leaf, given.path, given.like)
        leaf = self._rows[given.leaf]
        if given.fits and not isinstance(leaf, (m.ValueLeaf, m.SizeLeaf)):
            list(fit(leaf, given.like, given.path))

    @property
    def images(self) -> set[int]:
        leaves = map(self._rows.__getitem__, self.paths)
        return {part.storage for leaf in leaves for part in parts(leaf)} - {-1}

    def take_memory(
        self, alone: Sequence[int], held: HeldImages, chunks: Chunks, workspace: Workspace
    ) -> None:
        """Hold images that no leaf but those made here has, each in memory of its own."""
        record = self._rows.record
        where = {}
        for image in alone:
            kind = record.devices[int(record.image_devices[image])]
            where[image] = self._devices.get(image) or place_for(kind, self._options.device)
        near = [image for image in alone if where[image].type == "cpu"]
        buffers = workspace.buffers([chunks.size_of(image) for image in near])
        for image, buffer in zip(near, buffers, strict=True):
            held.add(buffer, image, far=False)
        for image in set(alone).difference(near):
            held.add(allocate(chunks.size_of(image), where[image]), image, far=True)

    def make(self, part: Part) -> dict[int, object]:
        rank = self._options.rank
        return {
            index: make_leaf(self._rows[index], path, part, rank, self._meshes.get(index))
            for index, path in self.paths.items()
        }
