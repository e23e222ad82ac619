"""A receiver passes on only what has the right digest, so digests are told before chunks come."""

from __future__ import annotations

import threading
from itertools import takewhile
from typing import Any

import torch

import torchrelay as tr
from tests.support.faults import CHUNK, received, sent, weights
from tests.support.ways import by, patched
from torchrelay.transports.group.lines import ControlLine
from torchrelay.transports.protocol import wire
from torchrelay.transports.protocol.machines.peers import Peer, Stage
from torchrelay.transports.protocol.machines.sender_machine import SenderMachine, SendTerms
from torchrelay.transports.transfer import outflow
from torchrelay.transports.transfer.buffers import IN_FLIGHT
from torchrelay.transports.transfer.intake import Intake
from torchrelay.transports.transfer.outflow import Outflow
from torchrelay.transports.transfer.worker import hashers

OLD, LONG = 100, 25.0


class Chain:
    """Two receivers in a chain, and what the first of them was told."""

    def __init__(self) -> None:
        self.known = [bytes([index]) * 16 for index in range(9)]
        self.said: list[wire.Hashes] = []
        terms = SendTerms(0, 9, True, False, None, frozenset(), 1.0, 1.0, 1.0)
        peers = {rank: Peer(rank, rank, Stage.ACCEPTED, untaken=1) for rank in (1, 2)}
        self.machine = SenderMachine(terms, peers, 0.0)
        self.machine.begin((), 3, 0.0)

    def tell(self, known: int) -> list[tuple[int, int]]:
        """Once so many digests are known: which were told until then, by message."""
        for chunk in range(self.machine.known, known):
            self.machine.hashed(chunk, 0.0)
        for rank in self.machine.tell_hashes():
            peer = self.machine.peers[rank]
            self.said.append(wire.Hashes(peer.hashes, tuple(self.known[peer.hashes : known])))
            peer.hashes = known
        return [(word.first, len(word.digests)) for word in self.said]


def test_the_first_digests_wait_for_no_other_message() -> None:
    chain = Chain()
    assert chain.tell(2) == []  # the first chunk waits for three: one message has them all
    assert chain.tell(4) == [(0, 4)]


def test_digests_are_told_in_one_message_at_a_time() -> None:
    chain = Chain()
    assert chain.tell(0) == []
    for known in (3, 4, 7):  # each message waits behind chunks: few are to be many digests'
        assert chain.tell(known) == [(0, 3)]
    chain.machine.peers[1].untaken = 0
    assert chain.tell(7) == chain.tell(7) == [(0, 3), (3, 4)]
    assert chain.tell(9)[-1] == (7, 2)


def told_first(rank: int, group: Any) -> Any:
    """What each receiver had been told, and had not taken, when the first chunk was posted."""
    relay, live = tr.Relay(group, chunk_bytes=CHUNK, timeout=LONG), weights(OLD)
    if rank:
        return received(relay, 0, live, OLD, 1, LONG).weights
    told: dict[int, int] = {}
    at_first: list[Any] = []
    send, post = ControlLine.send, Outflow._post

    def say(line: ControlLine, message: wire.Message) -> None:
        if isinstance(message, wire.Hashes):
            assert message.first == told.get(line.peer, 0)
            told[line.peer] = message.first + len(message.digests)
        send(line, message)

    def post_chunk(out: Outflow, stream: Any, index: int) -> None:
        at_first.append(dict(told))
        post(out, stream, index)

    small = patched(outflow, FIRST_BYTES=6 * CHUNK)
    with small, patched(ControlLine, send=say), patched(Outflow, _post=post_chunk):
        assert sent(relay, 1, [1, 2, 3], LONG).receivers == (1, 2, 3)
    return at_first[0]


def test_the_first_digests_are_told_before_the_first_chunk_leaves(pool4: Any) -> None:
    ours, *theirs = pool4.run(by, "group", told_first)
    assert set(ours) == {1, 2} and min(ours.values()) >= 6  # the last one passes nothing on
    assert theirs == [1, 1, 1]


def packed(rank: int, group: Any) -> Any:
    """How many chunks were hashed before the first left, where none lies in one piece."""
    relay = tr.Relay(group, chunk_bytes=CHUNK, timeout=LONG)
    state = {"w": torch.full((600, 600), float(rank)).t()}
    if rank:
        relay.recv(0, into=state)
        return bool((state["w"] == 0).all())
    hashed, post = threading.Semaphore(0), Outflow._post
    counts: list[int] = []

    def count(data: torch.Tensor, *, cells: bool) -> bytes:
        hashed.release()
        return digest(data, cells=cells)

    def post_chunk(out: Outflow, stream: Any, index: int) -> None:
        if not counts:
            counts.append(len(out._chunks))
            took = (hashed.acquire(timeout=5.0) for _ in range(counts[0]))
            counts.append(len(list(takewhile(bool, took))))
        post(out, stream, index)

    digest = outflow.digest_of
    small = patched(outflow, FIRST_BYTES=CHUNK, digest_of=count)
    with small, patched(Outflow, _post=post_chunk):
        relay.send(state, [1, 2, 3])
    return counts, len(relay._resources.buffers._kept)


def test_chunks_that_are_packed_are_hashed_ahead_too_in_few_buffers(pool4: Any) -> None:
    (counts, buffers), *right = pool4.run(by, "group", packed)
    assert counts[0] == counts[1] > 20
    assert buffers <= hashers() + IN_FLIGHT
    assert right == [True] * 3


def loses_the_first(rank: int, group: Any) -> Any:
    """The first of the chain gives up before there are digests to tell it."""
    relay, live = tr.Relay(group, chunk_bytes=CHUNK, timeout=LONG), weights(OLD)

    def give_up(intake: Intake) -> None:
        raise tr.TransferTimeoutError("no time left")

    if rank == 1:
        with patched(Intake, run=give_up):
            return received(relay, 0, live, OLD, 1, LONG).weights
    if rank:
        return received(relay, 0, live, OLD, 1, LONG).weights
    gone, fail, digest = threading.Event(), SenderMachine.fail, outflow.digest_of

    def noted(sending: SenderMachine, peer: Peer, reason: str, **how: Any) -> None:
        fail(sending, peer, reason, **how)
        gone.set()

    def late(data: torch.Tensor, *, cells: bool) -> bytes:
        assert gone.wait(LONG / 2)
        return digest(data, cells=cells)

    with patched(SenderMachine, fail=noted), patched(outflow, digest_of=late):
        return sent(relay, 1, [1, 2, 3], LONG)


def test_a_chain_that_loses_its_first_before_the_first_chunk_is_fed_all_the_same(
    pool4: Any,
) -> None:
    ours, *theirs = pool4.run(by, "group", loses_the_first, fresh_group=True)
    assert ours.error is None and ours.failed == (1,) and ours.receivers == (2, 3), ours
    assert theirs == [OLD, 1, 1]
