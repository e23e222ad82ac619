"""Offers that are told once, and by a digest after that."""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import pytest
import torch

import torchrelay as tr
from tests.support.faults import verdict, weights
from tests.support.ways import by, every_way, patched
from torchrelay.errors import RemoteProtocolError
from torchrelay.plan.snapshot import capture
from torchrelay.transports.group.lines import ControlLine
from torchrelay.transports.protocol import known_offers as offers
from torchrelay.transports.protocol import sender, wire
from torchrelay.transports.protocol.known_offers import Known, Offers, shortened

OLD, LONG = 100, 25.0


def offer(state: Any, step: int | None, host: bytes = b"table") -> wire.Offer:
    routes = {"host": wire.RouteOffer(b"who I am", host), "far": wire.RouteOffer(b"where I am")}
    return wire.Offer(capture(state, step).encoded(), routes=routes, route="host", threads=2)


@pytest.mark.parametrize("step", [None, 0, 7, 127, 128, 1 << 20, (1 << 63) - 1])
def test_what_is_left_out_is_put_back(step: int | None) -> None:
    state = weights(1)
    here = Offers()
    assert here.full(0, offer(state, 3), Known()) == offer(state, 3)
    known = here.of(0)
    whole = offer(state, step)
    short = shortened(whole, known.digest)
    assert (
        short.again and not short.manifest and short.routes["host"] == wire.RouteOffer(b"who I am")
    )
    assert here.full(0, short, known) == msgspec.structs.replace(whole, again=True, step=step)


def test_what_differs_is_told() -> None:
    state = weights(1)
    here = Offers()
    here.full(0, offer(state, 3), Known())
    digest = here.of(0).digest
    other = {**state, "w": torch.zeros(3)}
    for whole in (offer(other, 3), offer(state, 3, b"tablf"), offer(state, 3, b"")):
        assert shortened(whole, digest) is whole
    assert shortened(offer(state, 3), b"") == offer(state, 3)
    elsewhere = msgspec.structs.replace(offer(state, 3), routes={})
    assert shortened(elsewhere, digest) is elsewhere
    # Bytes that move from one part to another are other parts.
    told = capture(state, 1).encoded()

    def parts(**fixed: bytes) -> Known | None:
        routes = {name: wire.RouteOffer(b"", part) for name, part in fixed.items()}
        return offers._long_parts(wire.Offer(told, routes=routes))

    digests = [
        part.digest
        for part in (parts(), parts(a=b"bc"), parts(ab=b"c"), parts(b=b"bc"), parts(a=b"b", c=b"c"))
        if part is not None
    ]
    assert len(set(digests)) == 5


def test_as_before_where_nothing_was_is_an_error() -> None:
    short = wire.Offer(b"", again=True)
    with pytest.raises(RemoteProtocolError, match="as before"):
        Offers().full(3, short, Known())


def test_few_are_kept_and_none_that_is_long(monkeypatch: pytest.MonkeyPatch) -> None:
    here = Offers()
    for rank in range(offers._MOST_SENDERS + 3):
        here.full(rank, offer(weights(1), 1), Known())
    assert len(here._known) == offers._MOST_SENDERS and here.of(0) == Known()
    assert here.of(offers._MOST_SENDERS + 2).digest
    monkeypatch.setattr(offers, "_MOST_BYTES", 100)
    here.full(5, offer(weights(1), 1), Known())
    assert here.of(5) == Known()
    unreadable = wire.Offer(b"\xff no manifest")
    monkeypatch.setattr(offers, "_MOST_BYTES", 1 << 20)
    assert here.full(6, unreadable, Known()) is unreadable and here.of(6) == Known()
    here.forget()
    assert not here._known


def told(rank: int, group: Any) -> Any:
    """How offers go out over several transfers, and what arrives."""
    relay, live, sent = tr.Relay(group, timeout=LONG), weights(OLD), []
    post = ControlLine.send

    def noted(self: ControlLine, message: wire.Message) -> None:
        if isinstance(message, wire.Offer):
            sent.append(message.again)
        post(self, message)

    state = weights(1)
    with patched(ControlLine, send=noted):
        for step in range(6):
            if rank == 0:
                with torch.no_grad():
                    state["w"].fill_(step)
                if step == 3:
                    state["small"].append(torch.ones(2))
                relay.send(state, 1, step=step)
                continue
            if step == 3:
                live["small"].append(torch.zeros(2))
            if step == 5:
                relay.forget()
            got = relay.recv(0, into=live, step=step)
            assert got.step == step and (live["w"] == step).all()
            assert torch.equal(live["h"], weights(1)["h"])
    return sent


@every_way
def test_a_state_that_stays_is_described_once(pool2: Any, way: str) -> None:
    assert pool2.run(by, way, told, fresh_group=True)[0] == [False, True, True, False, True, False]


def older(rank: int, group: Any, who: int) -> Any:
    """One side does not know of it."""
    relay, live = tr.Relay(group, timeout=LONG), weights(OLD)
    ignoring: Any = contextlib.nullcontext()
    if rank == who == 0:
        ignoring = patched(sender, shortened=lambda offer, digest: offer)
    if rank == who == 1:
        ignoring = patched(Offers, of=lambda self, sender: Known())
    with ignoring:
        for seed in (1, 2, 3):
            if rank == 0:
                relay.send(weights(seed), 1, step=seed)
            else:
                before = live["seed"]
                relay.recv(0, into=live, step=seed)
                assert verdict(live, before, seed) == seed
    return True


@pytest.mark.parametrize("who", [0, 1])
def test_peers_that_know_nothing_of_it(pool2: Any, who: int) -> None:
    assert pool2.run(older, who, fresh_group=True) == [True, True]


def traded(rank: int, group: Any) -> Any:
    """Receives at the same time, each for its step, over and over: offers are mixed up on purpose,
    and what each leaves out must be its own."""
    relay = tr.Relay(group, timeout=LONG)
    steps = (10, 20, 30)
    lives = {step: weights(OLD) for step in steps}
    ready = threading.Barrier(len(steps))

    def one(step: int) -> int | str:
        ready.wait(LONG)
        if rank == 0:
            state = weights(step)
            if step == 20:
                state["small"] = state["small"][:2]
            relay.send(state, 1, step=step)
            return step
        live = lives[step]
        if step == 20:
            live["small"] = live["small"][:2]
        relay.recv(0, into=live, step=step)
        expected = weights(step)
        return step if torch.equal(live["w"], expected["w"]) else "wrong"

    with ThreadPoolExecutor(len(steps)) as pool:
        return [sorted(pool.map(one, steps), key=str) for _ in range(8)]


def test_offers_of_several_calls_are_not_mixed_up(pool2: Any) -> None:
    assert pool2.run(traded, fresh_group=True, timeout=100) == [[[10, 20, 30]] * 8] * 2
