"""Meshes of distributed tensors, as records and back."""

from __future__ import annotations

from functools import lru_cache
from weakref import WeakKeyDictionary

import torch
from torch.distributed.device_mesh import DeviceMesh

from torchrelay.record import manifest as m
from torchrelay.record.meshes import mesh_of, ranks_of
from torchrelay.state.torch_private import mesh_without_groups

# The tensors of a job share a few meshes, and torch takes long to say which ranks one has.
_records: WeakKeyDictionary[DeviceMesh, m.Mesh] = WeakKeyDictionary()


def mesh_record(mesh: DeviceMesh) -> m.Mesh:
    found = _records.get(mesh)
    if found is None:
        ranks = mesh.mesh
        shape, flat = tuple(ranks.shape), tuple(ranks.flatten().tolist())
        found = _records[mesh] = mesh_of(mesh.device_type, shape, flat, mesh.mesh_dim_names)
    return found


@lru_cache(64)
def described_mesh(record: m.Mesh, rank: int) -> DeviceMesh:
    """A mesh as one rank sees it, with no process groups behind it."""
    ranks = torch.tensor(ranks_of(record), dtype=torch.int, device="cpu").reshape(record.shape)
    return mesh_without_groups(record.device_type, ranks, rank, record.names)
