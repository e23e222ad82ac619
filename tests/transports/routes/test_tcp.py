"""Data connections of route `tcp` that break while the peer lives."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

import torchrelay as tr
from tests.support.ways import patched
from torchrelay.transports.streams.sockets import DataSocket

CHUNK = 64 << 10


def broken_connections(rank: int, group: Any, times: int) -> Any:
    """What a receiver gets whose data connections break at several chunks."""
    weights = torch.arange(4 << 18, dtype=torch.int32)
    relay = tr.Relay(group, route="tcp", chunk_bytes=CHUNK, timeout=30.0)
    if rank == 0:
        try:
            return not relay.send({"w": weights}, to=1).failed
        except tr.errors.RelayError as fault:
            return type(fault).__name__
    take, counted = DataSocket.take_chunk, itertools.count(1)
    at = {5 * number for number in range(1, times + 1)}

    def breaks(self: DataSocket, *args: Any, **options: Any) -> Any:
        if next(counted) in at:
            raise ConnectionResetError("broken by this test")
        return take(self, *args, **options)

    with patched(DataSocket, take_chunk=breaks):
        try:
            got = relay.recv(0)
        except tr.errors.RelayError as fault:
            return type(fault).__name__
    return bool(torch.equal(got.state["w"], weights))


@pytest.mark.parametrize(("times", "ended"), [(1, True), (2, True), (3, "PeerLostError")])
def test_connections_that_break_are_made_again_twice(pool2: Any, times: int, ended: Any) -> None:
    assert pool2.run(broken_connections, times) == [ended, ended]
