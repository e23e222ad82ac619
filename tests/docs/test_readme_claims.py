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
from tests.support.ways import patched
from torchrelay.transports.streams.sockets import DataSocket

CPU = torch.device("cpu")
COUNT = 4  # tensors of a state, each a chunk
ITEMS = 1 << 20


def new_state(value: float) -> dict[str, torch.Tensor]:
    return {str(i): torch.full((ITEMS,), value) for i in range(COUNT)}


class Meddling:
    """A group that does something to a message of torch's class before it is sent."""

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

    def count() -> None:
        nonlocal sent
        sent += 1
        if sent == COUNT:
            reached("last tensor", hold=True)

    def meddle(tag: int, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.nbytes == ITEMS * 4:
            count()
        return tensor

    original = DataSocket.send_chunk

    def send_chunk(self: DataSocket, *args: Any, **how: Any) -> bytes:
        count()
        return original(self, *args, **how)

    mine = new_state(float(rank))
    if rank == 0:
        if ours:
            relay = tr.Relay(group, timeout=30, chunk_bytes=ITEMS * 4, route="tcp", connections=1)
            with patched(DataSocket, send_chunk=send_chunk):
                relay.send(mine, 1)
        else:
            held = Meddling(group, meddle)
            Stock(held, timedelta(seconds=30), CPU).send_checkpoint([1], mine)  # type: ignore[arg-type]
        return []
    if ours:
        with pytest.raises(tr.errors.PeerLostError):
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
    """One bit of what each class sends flips on its way."""
    flips = []

    def meddle(tag: int, tensor: torch.Tensor) -> torch.Tensor:
        if tag != 3 or flips:
            return tensor
        flips.append("torch")
        other = tensor.clone()
        other[100] ^= 1
        return other

    original = DataSocket._send

    def send(self: DataSocket, data: memoryview) -> None:
        if data.nbytes > 1000 and "relay" not in flips:
            flips.append("relay")
            other = bytearray(data)
            other[100] ^= 1
            data = memoryview(other)
        original(self, data)

    state = new_state(2.0)
    if rank == 0:
        changed = Meddling(group, meddle)
        Stock(changed, timedelta(seconds=30), CPU).send_checkpoint([1], state)  # type: ignore[arg-type]
        with patched(DataSocket, _send=send):
            tr.Relay(group, timeout=30, route="tcp").send(state, 1)
        return flips
    theirs: Any = Stock(group, timedelta(seconds=30), CPU).recv_checkpoint(0)
    ours = tr.Relay(group, timeout=30).recv(0).state
    return [all((t == 2).all().item() for t in got.values()) for got in (theirs, ours)]


def test_flipped_byte(pool2: Any) -> None:
    assert pool2.run(flipped) == [["torch", "relay"], [False, True]]
