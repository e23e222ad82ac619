"""When a receiver may begin: at once, if writes to the state are counted and the offer says all."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

import torchrelay as tr
from torchrelay.plan.snapshot import Snapshot
from torchrelay.transports.meeting.connection import Connection, Inbox
from torchrelay.transports.meeting.matching import ReceiverJoined
from torchrelay.transports.protocol import sender
from torchrelay.transports.routes.choice import BY_NAME
from torchrelay.transports.wire.messages import Go, Offer

WEIGHTS = {"w": torch.arange(5000.0)}


def met(rank: int, group: Any, late: bool, route: str | None) -> Any:
    """The messages of the sender, to a receiver that comes before or after (`late`) it counts."""
    store, said, told = group.get_group_store(), [], Connection.send
    watch, capture, put = Snapshot.watch, sender.capture, Inbox.put
    with tr.Relay(group, timeout=30, route=route) as relay:
        if rank:
            if late:
                store.get("counted")
            into = {"w": torch.zeros(5000)}
            relay.recv(0, into=into)
            return torch.equal(into["w"], WEIGHTS["w"])

        def counted(self: Snapshot) -> None:
            watch(self)
            store.set("counted", b"1")

        def joined(self: Inbox, event: object) -> None:
            put(self, event)
            if isinstance(event, ReceiverJoined):
                store.set("joined", b"1")

        def captured(*args: Any, **how: Any) -> Snapshot:
            if not late:
                store.get("joined")
            return capture(*args, **how)

        def heard(self: Connection, message: Any) -> None:
            said.append(message)
            told(self, message)

        with (
            mock.patch.object(Snapshot, "watch", counted),
            mock.patch.object(Inbox, "put", joined),
            mock.patch.object(sender, "capture", captured),
            mock.patch.object(Connection, "send", heard),
        ):
            relay.send(WEIGHTS, to=1)
    offer = next(one for one in said if isinstance(one, Offer))
    return offer.at_once, sum(isinstance(one, Go) for one in said)


@pytest.mark.parametrize("late", [False, True])
def test_a_receiver_of_all_waits_for_a_go_until_writes_are_counted(pool2: Any, late: bool) -> None:
    told, right = pool2.run(met, late, None, fresh_group=True)
    assert right and told == (late, 0 if late else 1)


def test_a_route_that_needs_more_than_the_offer_gets_a_go(pool2: Any) -> None:
    told, right = pool2.run(met, True, "tcp", fresh_group=True)
    assert right and told == (True, 1)


@pytest.mark.parametrize("name", BY_NAME)
def test_reads_of_parts_always_wait(name: str) -> None:
    route = BY_NAME[name]
    assert not route.begins(at_once=True, whole=False)
    assert not route.begins(at_once=False, whole=True)
    assert route.begins(at_once=True, whole=True) == (name in ("memory", "cuda_ipc"))
