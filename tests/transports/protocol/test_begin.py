"""When a receiver begins: at once if the offer has all that it needs, else when it hears `Go`."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

import torchrelay as tr
from torchrelay.transports.meeting.connection import Connection
from torchrelay.transports.routes.choice import BY_NAME
from torchrelay.transports.wire.messages import Go

WEIGHTS = {"w": torch.arange(5000.0)}


def told(rank: int, group: Any, route: str) -> Any:
    """How often the sender says `Go`, or whether the receiver has the weights."""
    said, send = [], Connection.send

    def note(self: Connection, message: Any) -> None:
        said.append(message)
        send(self, message)

    with tr.Relay(group, timeout=30, route=route) as relay:
        if rank:
            into = {"w": torch.zeros(5000)}
            relay.recv(0, into=into)
            return torch.equal(into["w"], WEIGHTS["w"])
        with mock.patch.object(Connection, "send", note):
            relay.send(WEIGHTS, to=1)
    return sum(isinstance(one, Go) for one in said)


@pytest.mark.parametrize(("route", "count"), [("memory", 0), ("tcp", 1)])
def test_a_receiver_of_all_waits_for_a_go_if_its_route_needs_more(
    pool2: Any, route: str, count: int
) -> None:
    assert pool2.run(told, route) == [count, True]


def test_routes_that_read_by_the_offer_are_those_whose_table_it_has() -> None:
    assert [route.name for route in BY_NAME.values() if route.in_offer] == ["cuda_ipc", "memory"]


def writes(rank: int, group: Any, moved: bool) -> Any:
    """The sender's tensor is written to, or has other memory, once its address was taken."""
    from torchrelay.transports.protocol import sender

    made, keep = sender.Outgoing, []

    def late(*args: Any) -> Any:
        if moved:
            keep.append(torch.full((5000,), 9.0))
            state["w"].set_(keep[0])
        else:
            state["w"].fill_(2)
        return made(*args)

    state = {"w": torch.ones(5000), "version": 1}
    with tr.Relay(group, timeout=30) as relay:
        try:
            if rank:
                return relay.recv(0).state["version"]
            with mock.patch.object(sender, "Outgoing", late):
                relay.send(state, to=1)
        except tr.errors.RelayError as fault:
            return type(fault).__name__
    return "sent"


@pytest.mark.parametrize("moved", [False, True], ids=["written to", "moved"])
def test_a_write_right_after_the_state_was_described_is_noticed(pool2: Any, moved: bool) -> None:
    assert pool2.run(writes, moved) == ["StateError", "PeerAbortedError"]
