"""A commit record as the `Metadata` that torch's planners work with."""

from __future__ import annotations

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from torchrelay.state import manifest as m
from torchrelay.state import tensors as t
from torchrelay.state.containers import slots
from torchrelay.state.outline import dotted
from torchrelay.stores.records import Checkpoint


def metadata_of(checkpoint: Checkpoint) -> Metadata:
    """Every tensor with its shards, and every plain value, under their names."""
    entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    for tensor in checkpoint.tensors:
        entries[tensor.name] = TensorStorageMetadata(
            properties=TensorProperties(dtype=t.dtype_named(tensor.dtype)),
            size=torch.Size(tensor.shape),
            chunks=[
                ChunkStorageMetadata(torch.Size(shard.offsets), torch.Size(shard.sizes))
                for shard in tensor.shards
            ],
        )
    paths = {}
    for outline in reversed(checkpoint.outlines):
        for path, leaf in slots(outline.tree):
            name = dotted(path)
            paths[name] = path
            if not isinstance(outline.leaves[leaf], (m.TensorLeaf, m.DTensorLeaf, m.ShardedLeaf)):
                entries.setdefault(name, BytesStorageMetadata())
    for blob in checkpoint.blobs:
        entries[blob.name] = BytesStorageMetadata()
    return Metadata(entries, planner_data={name: paths.get(name, (name,)) for name in entries})
