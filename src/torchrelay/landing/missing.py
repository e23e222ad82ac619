"""Leaves that are made anew for a destination: what it lacks, and what its objects are told.

Memory of theirs alone is the caller's to keep, so bytes that arrive go straight to it.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import NamedTuple

import torch

from torchrelay.geometry.chunks import Chunks
from torchrelay.geometry.runs import Runs
from torchrelay.landing.checks.fit import fit, mesh_of
from torchrelay.landing.checks.shards import Shards, check_shards
from torchrelay.landing.fresh import place_for
from torchrelay.landing.leaves import check_leaf, make_leaf
from torchrelay.landing.workspace import Workspace, allocate, large_rooms
from torchrelay.record import manifest as m
from torchrelay.record.manifest import parts
from torchrelay.state import tensors as t
from torchrelay.state.leaves import Part
from torchrelay.state.paths import Path


class ToldLeaf(NamedTuple):
    """A leaf that an object is told, and what it is to be like: the object's own tensor in its
    place, or its parameter. `fits`: a tensor has to be of the same kind."""

    leaf: int
    path: Path
    like: torch.Tensor | None
    fits: bool


class Anew:
    def __init__(
        self, manifest: m.Manifest, rank: int, device: torch.device | None, shards: Shards
    ) -> None:
        self._manifest = manifest
        self._shards = shards
        self._rank = rank
        self._device = device
        self._meshes: dict[int, t.DeviceMesh] = {}
        self._devices: dict[int, torch.device] = {}  # of storages
        self.paths: dict[int, Iterable[object]] = {}  # by leaf
        self.homes: dict[int, torch.Tensor] = {}  # by storage
        self.host = Runs([], [], [])

    def add(self, index: int, path: Iterable[object], like: torch.Tensor | None = None) -> None:
        """Have a leaf made, on the device of `like`, and on its mesh if it is distributed."""
        leaf = self._manifest.leaves[index]
        check_leaf(leaf, path)
        self.paths[index] = path
        mesh = None if like is None else mesh_of(leaf, like, path)
        if mesh is not None:
            self._meshes[index] = mesh
        else:
            check_shards(leaf, path, self._shards)
        for part in parts(leaf):
            if isinstance(leaf, m.ArrayLeaf):
                self._devices[part.storage] = torch.device("cpu")
            elif like is not None and part.shape:  # scalars are where they were at the sender
                self._devices.setdefault(part.storage, like.device)

    def add_told(self, told: ToldLeaf) -> None:
        """Have a leaf made that an object is told. A value in the place of a tensor is the object's
        to judge: an optimizer has None where it has not come to yet."""
        self.add(told.leaf, told.path, told.like)
        leaf = self._manifest.leaves[told.leaf]
        if told.fits and not isinstance(leaf, (m.ValueLeaf, m.SizeLeaf)):
            list(fit(leaf, told.like, told.path))

    @property
    def storages(self) -> set[int]:
        leaves = map(self._manifest.leaves.__getitem__, self.paths)
        return {part.storage for leaf in leaves for part in parts(leaf)} - {-1}

    def settle(self, chunks: Chunks, others: Container[int], means: Workspace) -> None:
        """Make room for the storages that no leaf but those made anew has."""
        if not self.paths:
            return
        alone = sorted(storage for storage in self.storages if storage not in others)
        records = self._manifest.storages
        where = {
            storage: self._devices.get(storage) or place_for(records[storage], self._device)
            for storage in alone
        }
        hosted = [storage for storage in alone if where[storage].type == "cpu"]
        self.homes = large_rooms({storage: records[storage].nbytes for storage in hosted}, means)
        for storage in alone:
            if storage not in self.homes:
                self.homes[storage] = allocate(records[storage].nbytes, where[storage])
        self.host = Runs(
            [chunks.starts[storage] for storage in hosted],
            [self.homes[storage].data_ptr() for storage in hosted],
            [records[storage].nbytes for storage in hosted],
        )

    @property
    def far(self) -> dict[int, torch.Tensor]:
        """Bytes of the storages that are on devices."""
        return {
            storage: t.flat_bytes(home.untyped_storage(), 0, home.nbytes)
            for storage, home in self.homes.items()
            if not home.is_cpu
        }

    def make(self, part: Part) -> dict[int, object]:
        leaves = self._manifest.leaves
        return {
            index: make_leaf(leaves[index], path, part, self._rank, self._meshes.get(index))
            for index, path in self.paths.items()
        }
