"""Objects that torch's planners hand over as bytes, kept and given back without pickle.

`DefaultSavePlanner` makes a `torch.save` archive of everything but tensors, `DefaultLoadPlanner`
unpickles what it receives. So the planner is asked for the object itself, which is kept as a packed
state. Archives of other planners are opened by torch's restricted unpickler. On the way back the
archive that the planner unpickles is one that this process has just made.
"""

from __future__ import annotations

import io
from typing import Any
from zipfile import is_zipfile

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.planner import LoadPlanner, SavePlanner, WriteItem

from torchrelay.errors import UnsupportedLeafError
from torchrelay.landing.packed import pack, unpack

STATE, RAW = "state", "raw"
_ONLY_PICKLE = (
    "an object that only pickle can hold: put its state there as tensors and plain values"
)


def kept(item: WriteItem, planner: SavePlanner, name: str) -> tuple[str, bytes]:
    """How an object of a plan is kept: its kind and bytes. `UnsupportedLeafError` names one that
    only pickle could hold."""
    if not isinstance(planner, DefaultSavePlanner) or _makes_its_own(type(planner)):
        return keep(name, planner.resolve_data(item))
    try:
        return STATE, pack(planner.lookup_object(item.index))
    except UnsupportedLeafError as fault:
        raise UnsupportedLeafError(f"{_ONLY_PICKLE} ({fault.message})", path=name) from fault


def _makes_its_own(planner: type[DefaultSavePlanner]) -> bool:
    """Whether a planner has its own way to turn an object into bytes."""
    stock = DefaultSavePlanner
    return (planner.resolve_data, planner.transform_object) != (
        stock.resolve_data,
        stock.transform_object,
    )


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
