"""A state's way from capture to commit without a transport, for tests of `state/`."""

from __future__ import annotations

import random

import torch

from torchrelay.describing.snapshot import Snapshot, capture
from torchrelay.landing.commit.landing import Landed
from torchrelay.landing.land import land
from torchrelay.landing.options import LandingOptions
from torchrelay.record.encoding import decode, encode


def chunk_of(snapshot: Snapshot, index: int) -> torch.Tensor:
    """The bytes of a chunk in a buffer of their own."""
    there = snapshot.view(index)
    if there is not None:
        return there.clone()
    out = torch.full((snapshot.chunks.sizes[index],), 0xAB, dtype=torch.uint8)
    snapshot.read(index, out)
    return out


def trip(
    state: object,
    *,
    into: object = None,
    chunk_bytes: int | None = None,
    seed: int = 0,
    strict: bool = True,
    atomic: bool = True,
) -> Landed:
    """Send a state to this process itself, its chunks in an order drawn from `seed`."""
    snapshot = capture(state, step=7, chunk_bytes=chunk_bytes)
    data = snapshot.encoded()
    record = decode(data)
    assert encode(record) == data
    landing = land(record, into, LandingOptions(strict, atomic))
    order = list(range(len(snapshot.chunks)))
    random.Random(seed).shuffle(order)
    for index in order:
        landing.target().write(index, chunk_of(snapshot, index))
    landed = landing.commit()
    assert not landing.torn
    return landed
