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
from torchrelay.state.containers import Path, slots
from torchrelay.state.leaves import parts
from torchrelay.state.outline import dotted
from torchrelay.stores.records import Checkpoint, StoredTensor


def metadata_of(checkpoint: Checkpoint) -> Metadata:
    """Every stored tensor with its shards, under its name."""
    return Metadata({tensor.name: _tensor(tensor) for tensor in checkpoint.tensors})


def state_metadata_of(checkpoint: Checkpoint) -> Metadata:
    """The saved state as torch's planners would have described it: its tensors, and everything
    else as an object, with the path of each."""
    stored = metadata_of(checkpoint).state_dict_metadata
    entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    paths: dict[str, Path] = {}
    for outline in checkpoint.outlines:
        for path, index in slots(outline.tree):
            name = dotted(path)
            if name in entries:
                continue
            leaf = outline.leaves[index]
            paths[name] = path
            entries[name] = BytesStorageMetadata()
            if isinstance(leaf, (m.TensorLeaf, m.DTensorLeaf, m.ShardedLeaf)):
                part = next(parts(leaf))
                if part.storage >= 0:
                    entries[name] = stored[outline.names[part.storage]]
    for blob in checkpoint.blobs:
        entries[blob.name] = BytesStorageMetadata()
        paths.setdefault(blob.name, (blob.name,))
    return Metadata(entries, planner_data=paths)


def _tensor(tensor: StoredTensor) -> TensorStorageMetadata:
    return TensorStorageMetadata(
        properties=TensorProperties(dtype=t.dtype_named(tensor.dtype)),
        size=torch.Size(tensor.shape),
        chunks=[
            ChunkStorageMetadata(torch.Size(shard.offsets), torch.Size(shard.sizes))
            for shard in tensor.shards
        ],
    )
