"""What torch's planners plan, to the messages of `plans` and back, and resolved to tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from torchrelay.errors import CheckpointError
from torchrelay.landing.packed import unpack
from torchrelay.state import tensors as t
from torchrelay.stores.shares import blobs
from torchrelay.stores.shares.layout import Entry
from torchrelay.stores.shares.plans import Drafted, Item


def resolve_items(
    items: Sequence[WriteItem],
    planner: SavePlanner,
    tops: Mapping[str, str | None],
    renamed: Mapping[str, str] = MappingProxyType({}),
) -> Drafted:
    drafted = Drafted([], [], {})
    for item in items:
        name = item.index.fqn
        mine = renamed.get(name, name)
        asked = dataclasses.replace(item, index=dataclasses.replace(item.index, fqn=mine))
        data = planner.resolve_data(asked)
        if item.type == WriteItemType.BYTE_IO:
            drafted.objects[name] = blobs.keep(name, data)
            continue
        assert isinstance(data, torch.Tensor) and item.tensor_data is not None
        chunk = item.tensor_data.chunk
        local = data.detach()
        if tuple(local.shape) != tuple(chunk.sizes):
            raise CheckpointError(
                f"the planner gave a tensor of shape {tuple(local.shape)} for a box of "
                f"{tuple(chunk.sizes)}",
                phase="plan",
                path=name,
            )
        if not local.numel():
            continue
        drafted.entries.append(
            Entry(
                name,
                t.NAMES[local.dtype],
                tuple(item.tensor_data.size),
                tuple(chunk.offsets),
                tuple(chunk.sizes),
                tops.get(mine),
            )
        )
        drafted.tensors.append(local)
    return drafted


def items_of(plan: SavePlan) -> list[Item]:
    items = []
    for item in plan.items:
        index, data = item.index, item.tensor_data
        offset = None if index.offset is None else tuple(index.offset)
        kind: Any = item.type.name
        if data is None:
            items.append(Item(index.fqn, kind, offset, index.index))
            continue
        box = (tuple(data.chunk.offsets), tuple(data.chunk.sizes))
        dtype = t.NAMES[data.properties.dtype]
        shape = tuple(data.size)
        items.append(Item(index.fqn, kind, offset, index.index, box, dtype, shape))
    return items


def plan_of(items: list[Item], data: bytes, usable: bool) -> SavePlan:
    planner_data: Any = unpack(data)
    return SavePlan([_write_item(item) for item in items], None, planner_data, usable)


def _write_item(item: Item) -> WriteItem:
    index = MetadataIndex(item.name, item.offset, item.index)
    kind = WriteItemType[item.kind]
    if item.box is None:
        return WriteItem(index, kind)
    offsets, sizes = item.box
    return WriteItem(
        index,
        kind,
        tensor_data=TensorWriteData(
            ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)),
            TensorProperties(dtype=t.dtype_named(item.dtype)),
            torch.Size(item.shape),
        ),
    )
