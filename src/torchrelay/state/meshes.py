"""Meshes of distributed tensors, as records and back."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch
from torch.distributed.device_mesh import DeviceMesh

from torchrelay.geometry.memo import remembered
from torchrelay.record import manifest as m
from torchrelay.record.meshes import mesh_of, ranks_of

# The tensors of a job share a few meshes, and torch takes long to say which ranks one has.
_records: WeakKeyDictionary[DeviceMesh, m.Mesh] = WeakKeyDictionary()


def mesh_record(mesh: DeviceMesh) -> m.Mesh:
    found = _records.get(mesh)
    if found is None:
        ranks = mesh.mesh
        shape, flat = tuple(ranks.shape), tuple(ranks.flatten().tolist())
        found = _records[mesh] = mesh_of(mesh.device_type, shape, flat, mesh.mesh_dim_names)
    return found


@remembered(64)
def described_mesh(record: m.Mesh, rank: int) -> DeviceMesh:
    """A mesh as one rank sees it, with no process groups behind it."""
    return DeviceMesh(
        record.device_type,
        torch.tensor(ranks_of(record), dtype=torch.int, device="cpu").reshape(record.shape),
        mesh_dim_names=record.names,
        _init_backend=False,
        _rank=rank,
    )
