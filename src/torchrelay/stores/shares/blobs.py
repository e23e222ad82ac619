"""Objects that torch's planners hand over as bytes, kept and given back without pickle.

`DefaultSavePlanner` makes a `torch.save` archive of everything that is no tensor, and
`DefaultLoadPlanner` unpickles what it is given. So an archive is opened here, by torch's
restricted unpickler, and its value kept as a packed state; on the way back the archive that the
planner unpickles is one that this process has just made of plain values.
"""

from __future__ import annotations

import io
from typing import Any
from zipfile import is_zipfile

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import LoadPlanner

from torchrelay.errors import UnsupportedLeafError
from torchrelay.landing.packed import pack, unpack

STATE, RAW = "state", "raw"


def keep(name: str, data: Any) -> tuple[str, bytes]:
    """How an object is kept: its kind and bytes. `UnsupportedLeafError` if that takes pickle."""
    data.seek(0)
    if not is_zipfile(data):
        return RAW, bytes(data.getbuffer())
    data.seek(0)
    try:
        value = torch.load(data, weights_only=True)
    except Exception as fault:  # its unpickler's error, or whatever a broken archive leads to
        raise UnsupportedLeafError(
            "an object that only pickle can hold: put its state there as tensors and plain values",
            path=name,
        ) from fault
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
