"""The shards of a ShardedTensor as torch pickles them, made of checked fields."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed.remote_device import _remote_device

from torchrelay.dropin._pickles.fields import MAX_DIMS, count, counts, device, fields, typed
from torchrelay.dropin._pickles.unpickler import refuse

METADATA = "torch.distributed._shard.sharded_tensor.metadata."
_SHARD = "torch.distributed._shard.metadata.ShardMetadata"
_REMOTE = "torch.distributed.remote_device._remote_device"

NAMES = (
    *(METADATA + n for n in ("ShardedTensorMetadata", "TensorProperties", "MEM_FORMAT_ENCODING")),
    _SHARD,
    _REMOTE,
)


def shard(value: object, whole: torch.Size) -> ShardMetadata:
    """A shard that lies inside of its tensor."""
    f = fields(value, _SHARD)
    offsets, sizes = (_numbers(f[name]) for name in ("shard_offsets", "shard_sizes"))
    if not len(offsets) == len(sizes) == len(whole) or any(
        start + n > end for start, n, end in zip(offsets, sizes, whole, strict=True)
    ):
        refuse("a shard reaches past its ShardedTensor")
    placement = None if f["placement"] is None else _remote(f["placement"])
    return ShardMetadata(offsets, sizes, placement)


def _numbers(value: Any) -> list[int]:
    return list(counts(tuple(typed(value, list)[: MAX_DIMS + 1]), MAX_DIMS))


def _remote(value: object) -> _remote_device:
    f = fields(value, _REMOTE)
    where, worker, rank = device(f["_device"]), f["_worker_name"], f["_rank"]
    if rank is not None:
        return _remote_device(f"rank:{count(rank)}/{where}")
    return _remote_device(where if worker is None else f"{typed(worker, str)}/{where}")
