"""The boxes that a save planner of torch wants written, with their memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem, WriteItemType

from torchrelay.errors import CheckpointError
from torchrelay.state import tensors as t
from torchrelay.stores.shares.layout import Entry
from torchrelay.stores.shares.share import ShareContents
from torchrelay.stores.torch_plans import objects


def resolve_items(
    items: Sequence[WriteItem], planner: SavePlanner, tops: Mapping[str, str | None]
) -> ShareContents:
    contents = ShareContents([], [], {})
    for item in items:
        name = item.index.fqn
        if item.type == WriteItemType.BYTE_IO:
            contents.objects[name] = objects.kept(item, planner, name)
            continue
        data = planner.resolve_data(item)
        assert isinstance(data, torch.Tensor) and item.tensor_data is not None
        chunk = item.tensor_data.chunk
        local = data.detach()
        if tuple(local.shape) != tuple(chunk.sizes):
            raise CheckpointError(
                f"the planner gave a tensor of shape {tuple(local.shape)} for a box of "
                f"{tuple(chunk.sizes)}: its resolve_data must return what its plan describes",
                phase="plan",
                path=name,
            )
        shape = tuple(item.tensor_data.size)
        if not local.numel() and 0 not in shape:
            continue  # a part without elements of a tensor that has some
        box = tuple(chunk.offsets), tuple(chunk.sizes)
        contents.entries.append(Entry(name, t.NAMES[local.dtype], shape, *box, tops.get(name)))
        contents.tensors.append(local)
    return contents
