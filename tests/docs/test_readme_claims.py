"""Claims of the README that no other test shows side by side with torch's own class."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint._pg_transport import PGTransport as Stock

import torchrelay as tr
from tests.support.ranks import Killed, Ranks, reached
from torchrelay.transports.protocol import wire

CPU = torch.device("cpu")
COUNT = 4  # tensors of a state, each a chunk
ITEMS = 1 << 20


def new_state(value: float) -> dict[str, torch.Tensor]:
    return {str(i): torch.full((ITEMS,), value) for i in range(COUNT)}


class Meddling:
    """A group that does something to a message before it is sent."""

    def __init__(self, group: Any, meddle: Callable[[int, torch.Tensor], torch.Tensor]) -> None:
        self.group, self.meddle = group, meddle

    def rank(self) -> int:
        return int(self.group.rank())

    def size(self) -> int:
        return int(self.group.size())

    def recv(self, tensors: list[torch.Tensor], src: int, tag: int) -> Any:
        return self.group.recv(tensors, src, tag)

    def send(self, tensors: list[torch.Tensor], dst: int, tag: int) -> Any:
        return self.group.send([self.meddle(tag, tensors[0])], dst, tag)


def dying_sender(rank: int, group: Any, ours: bool) -> list[float]:
    """The receiver's weights after the sender was killed before its last tensor."""
    sent = 0

    def meddle(tag: int, tensor: torch.Tensor) -> torch.Tensor:
        nonlocal sent
        sent += tensor.nbytes == ITEMS * 4
        if sent == COUNT:
            reached("last tensor", hold=True)
        return tensor

    mine = new_state(float(rank))
    if rank == 0:
        held = Meddling(group, meddle)
        if ours:
            tr.Relay(held, timeout=30, chunk_bytes=ITEMS * 4, route="group").send(mine, 1)
        else:
            Stock(held, timedelta(seconds=30), CPU).send_checkpoint([1], mine)  # type: ignore[arg-type]
        return []
    if ours:
        with pytest.raises(tr.PeerLostError):
            tr.Relay(group, timeout=30).recv(0, into=mine)
    else:
        with pytest.raises(RuntimeError):
            Stock(group, timedelta(seconds=30), CPU, lambda: mine).recv_checkpoint(0)
    return [tensor[0].item() for tensor in mine.values()]


@pytest.mark.parametrize("ours", [False, True], ids=["torch", "relay"])
def test_sender_killed_midway(ours: bool) -> None:
    with Ranks(dying_sender, 2, ours, expect_killed=[0]) as ranks:
        ranks.wait_reached(0, "last tensor", timeout=60)
        ranks.kill(0)
        gone, weights = ranks.results()
    assert gone is Killed
    old = [1.0] * COUNT
    assert (weights == old) if ours else (weights != old)


def flipped(rank: int, group: Any) -> Any:
    flips = []

    def meddle(tag: int, tensor: torch.Tensor) -> torch.Tensor:
        data = tag & 0xF == 1 if tag >= 1 << 30 else tag == 3
        if not data or tensor.nbytes < ITEMS or tag in flips:
            return tensor
        flips.append(tag)
        other = tensor.clone()
        other[100] ^= 1
        return other

    state = new_state(2.0)
    changed = Meddling(group, meddle)
    if rank == 0:
        Stock(changed, timedelta(seconds=30), CPU).send_checkpoint([1], state)  # type: ignore[arg-type]
        tr.Relay(changed, timeout=30, route="group").send(state, 1)
        return len(flips)
    theirs: Any = Stock(group, timedelta(seconds=30), CPU).recv_checkpoint(0)
    ours = tr.Relay(group, timeout=30).recv(0).state
    return [all((t == 2).all().item() for t in got.values()) for got in (theirs, ours)]


def test_flipped_byte(pool2: Any) -> None:
    assert wire.tag(0, 1) & 0xF == 1
    assert pool2.run(flipped) == [2, [False, True]]
