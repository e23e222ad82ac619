"""A commit record as the `Metadata` that torch's planners work with."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from torchrelay.describing.outline import laid_over
from torchrelay.errors import MismatchError
from torchrelay.planning.stored import StoredTensor, stored_tensors
from torchrelay.record import manifest as m
from torchrelay.record.manifest import parts
from torchrelay.record.rows import LeafRows
from torchrelay.record.schema import Record
from torchrelay.state import tensors as t
from torchrelay.state.leaves import build
from torchrelay.state.paths import dotted, slots
from torchrelay.state.tree import unflatten


class AsPlanned(NamedTuple):
    """A saved state as torch's planners name its parts."""

    metadata: Metadata
    tensors: dict[str, StoredTensor]
    values: dict[str, object]  # everything else


class Unknown(NamedTuple):
    """Stands for a leaf that is neither a tensor to torch's planners nor a plain value."""

    path: str


def as_planned(record: Record) -> AsPlanned:
    """The plan that `DefaultSavePlanner` would have made of the state.

    Only the planner knows which containers it takes apart, so it plans a state of the same shape
    that has no bytes.
    """
    first: dict[int, int] = {}  # the first rank of each outline that a rank has
    for rank, outline in enumerate(record.ranks):
        first.setdefault(outline, rank)
    ranks = [LeafRows(record, first[outline], at_rest=True) for outline in sorted(first)]
    offered = [leaf for rows in ranks for leaf in rows]
    tree = laid_over([(rows.tree, len(rows)) for rows in ranks])
    stored = stored_tensors(record)
    stands: dict[int, StoredTensor] = {}
    leaves: dict[int, object] = {}
    for path, index in slots(tree):
        leaf = offered[index]
        if isinstance(leaf, (m.TensorLeaf, m.DTensorLeaf, m.ShardedLeaf)):
            part = next(parts(leaf))
            dtype = t.dtype_named(part.dtype)
            stand = leaves[index] = torch.empty(part.shape, dtype=dtype, device="meta")
            if part.storage >= 0:
                stands[id(stand)] = stored[part.storage]
        elif isinstance(leaf, (m.ValueLeaf, m.SizeLeaf)):
            leaves[index] = build(leaf, _no_part, 0)
        else:
            leaves[index] = Unknown(dotted(path))
    state = unflatten(tree, leaves)
    if not isinstance(state, dict):
        raise MismatchError("torch's planners take a dict, and the saved state is none")
    planner = DefaultSavePlanner()
    planner.set_up_planner(state)
    planned = AsPlanned(Metadata({}, planner_data=dict(planner.mappings)), {}, {})
    entries = planned.metadata.state_dict_metadata
    for name, found in planner.state_dict.items():
        if not isinstance(found, torch.Tensor):
            planned.values[name] = found
            entries[name] = BytesStorageMetadata()
        elif id(found) in stands:
            planned.tensors[name] = stands[id(found)]
            entries[name] = _tensor(stands[id(found)])
        else:
            entries[name] = TensorStorageMetadata(
                TensorProperties(dtype=found.dtype), found.size(), []
            )
    for one in record.objects:
        entries[one.name] = BytesStorageMetadata()
    return planned


def _no_part(part: m.TensorLeaf) -> torch.Tensor:
    raise MismatchError("a plain value has no tensors")


def _tensor(tensor: StoredTensor) -> TensorStorageMetadata:
    return TensorStorageMetadata(
        properties=TensorProperties(dtype=t.dtype_named(tensor.dtype)),
        size=torch.Size(tensor.shape),
        chunks=[
            ChunkStorageMetadata(torch.Size(shard.offsets), torch.Size(shard.sizes))
            for shard in tensor.shards
        ],
    )
