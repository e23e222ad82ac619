"""The boxes and objects of torch's planners. Objects, which they hand over as bytes, are kept and
given back without pickle.

`DefaultSavePlanner` makes a `torch.save` archive of everything but tensors, `DefaultLoadPlanner`
unpickles what it receives. So the planner is asked for the object itself, which is kept as a packed
state. Archives of other planners are opened by torch's restricted unpickler. On the way back the
archive that the planner unpickles is one that this process has just made.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple
from zipfile import is_zipfile

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.planner import (
    LoadPlanner,
    ReadItem,
    SavePlanner,
    WriteItem,
    WriteItemType,
)

from torchrelay.dcp.flattened import ValueTree
from torchrelay.describing.at_rest import describe
from torchrelay.errors import CheckpointError, MismatchError, UnsupportedLeafError
from torchrelay.landing.packed import pack, unpack
from torchrelay.planning.stored import StoredTensor
from torchrelay.shares.layout import Entry
from torchrelay.state import tensors as t
from torchrelay.state.backing import missing_memory, with_memory
from torchrelay.stores.reading.box_reads import BoxRead

STATE, RAW = "state", "raw"
_ONLY_PICKLE = (
    "an object that only pickle can hold: put its state there as tensors and plain values"
)


class ResolvedItems(NamedTuple):
    """The boxes and objects that a plan wants written, with their memory. Objects that are plain
    values go into the commit record, and not into a file."""

    entries: list[Entry]
    tensors: list[torch.Tensor]
    values: dict[str, ValueTree]


def resolve_items(
    items: Sequence[WriteItem], planner: SavePlanner, tops: Mapping[str, str | None]
) -> ResolvedItems:
    objects: dict[str, tuple[str, bytes]] = {}
    found = ResolvedItems([], [], {})
    for item in items:
        name = item.index.fqn
        if item.type == WriteItemType.BYTE_IO:
            kind, packed = kept(item, planner, name)
            record = describe(unpack(packed)).record if kind == STATE else None
            if record is None or record.images:
                objects[name] = kind, packed
            else:
                (outline,) = record.outlines
                found.values[name] = ValueTree(outline.tree, outline.others)
            continue
        data = planner.resolve_data(item)
        assert isinstance(data, torch.Tensor) and item.tensor_data is not None
        chunk = item.tensor_data.chunk
        try:
            local = with_memory(data.detach())
        except UnsupportedLeafError as fault:
            fault.path = name
            raise
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
        found.entries.append(Entry(name, t.NAMES[local.dtype], shape, *box, tops.get(name)))
        found.tensors.append(local)
    for name, (kind, packed) in objects.items():
        size = (max(1, len(packed)),)
        facts = (kind, len(packed))
        found.entries.append(Entry(name, "uint8", size, (0,), size, "objects", facts))
        found.tensors.append(torch.frombuffer(bytearray(packed or b"\0"), dtype=torch.uint8))
    return found


def requested(item: ReadItem, stored: StoredTensor, place: torch.Tensor) -> BoxRead:
    """The read that a planner asks for."""
    index = item.storage_index
    wanted = tuple(index.offset or ())
    hinted = () if index.index is None else stored.shards[index.index : index.index + 1]
    if (why := missing_memory(place)) is not None:
        raise MismatchError(f"the destination cannot be written: {why}", path=stored.name)
    for shard in (*hinted, *stored.shards):  # the hint says where it probably stands
        if shard.offsets == wanted:
            part = tuple(item.storage_offsets), tuple(item.lengths)
            return BoxRead(stored.dtype, shard, *part, place)
    raise MismatchError(f"{stored.name} has no shard at {wanted}")


def kept(item: WriteItem, planner: SavePlanner, name: str) -> tuple[str, bytes]:
    """How an object of a plan is kept: its kind and bytes. `UnsupportedLeafError` names one that
    only pickle could hold."""
    stock, kind = DefaultSavePlanner, type(planner)
    if (
        not isinstance(planner, stock)
        or kind.resolve_data is not stock.resolve_data
        or kind.transform_object is not stock.transform_object  # type: ignore[attr-defined]
    ):
        return keep(name, planner.resolve_data(item))  # its own way to turn objects into bytes
    try:
        return STATE, pack(planner.lookup_object(item.index))
    except UnsupportedLeafError as fault:
        raise UnsupportedLeafError(f"{_ONLY_PICKLE} ({fault.message})", path=name) from fault


def keep(name: str, data: Any) -> tuple[str, bytes]:
    """How the bytes that a planner made of an object are kept."""
    data.seek(0)
    if not is_zipfile(data):
        return RAW, bytes(data.getbuffer())
    data.seek(0)
    try:
        value = torch.load(data, weights_only=True)
    except Exception as fault:  # its unpickler's error, or whatever a broken archive leads to
        raise UnsupportedLeafError(_ONLY_PICKLE, path=name) from fault
    return STATE, pack(value)


def give(kind: str, data: bytes, planner: LoadPlanner, name: str) -> io.BytesIO:
    """The bytes for a planner's `load_bytes`."""
    if kind == STATE:
        return archive(unpack(data))
    if type(planner).load_bytes is DefaultLoadPlanner.load_bytes:
        raise UnsupportedLeafError(
            "bytes of a planner's own making, which torch's planner would unpickle: load them "
            "with a planner that reads them",
            path=name,
        )
    return io.BytesIO(data)


def archive(value: object) -> io.BytesIO:
    """A value as `torch.save` writes it."""
    out = io.BytesIO()
    torch.save(value, out)
    out.seek(0)
    return out
