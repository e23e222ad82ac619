"""Sends and receivers that meet at a node, over real connections of one process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch.distributed as dist

from tests.support.strangers import admitted, descriptors, is_closed
from torchrelay.deadlines import Deadline
from torchrelay.transports.meeting import matching
from torchrelay.transports.meeting import node as module
from torchrelay.transports.meeting.connection import Connection, ConnectionLost, MessageReceived
from torchrelay.transports.meeting.directory import StoreDirectory
from torchrelay.transports.meeting.inbox import Inbox
from torchrelay.transports.meeting.matching import OpenSend, ReceiverJoined
from torchrelay.transports.meeting.node import DataTicket, Node
from torchrelay.transports.wire import handshake
from torchrelay.transports.wire.handshake import CONTROL, Hello
from torchrelay.transports.wire.messages import Abort, Done, Join, Message, Offer, encode

SOON = 10.0
SENDER, RECEIVER = 0, 1


class Two:
    """The nodes of two ranks, and receivers of the second that talk to the first."""

    def __init__(self) -> None:
        store = dist.HashStore()
        self.sender, self.receiver = Node(), Node()
        self._directory = StoreDirectory(store, RECEIVER)
        StoreDirectory(store, SENDER).publish(self.sender.identity)

    def connect(self, rank: int = RECEIVER) -> tuple[Connection, Inbox]:
        inbox = Inbox()
        found = self.receiver.connect(self._directory, SENDER, rank, inbox, Deadline(SOON))
        return found, inbox

    def join(self, step: int | None = None, rank: int = RECEIVER) -> tuple[Connection, Inbox]:
        connection, inbox = self.connect(rank)
        connection.send(Join(step))
        return connection, inbox

    @property
    def waiting(self) -> int:
        return len(self.sender._matcher._joins)

    def until(self, true: Callable[[], bool]) -> None:
        ends = time.monotonic() + SOON
        while not true():
            assert time.monotonic() < ends
            time.sleep(0.002)


@pytest.fixture
def two() -> Two:
    return Two()


def opened(step: int | None = None, *ranks: int, window: float = 5.0) -> tuple[OpenSend, Inbox]:
    inbox = Inbox()
    return OpenSend(step, frozenset(ranks or (RECEIVER,)), window, inbox), inbox


def nothing_comes(inbox: Inbox) -> bool:
    return inbox.get(0.2) is None


def test_whichever_comes_first_waits(two: Two) -> None:
    for join_first in (True, False):
        send, inbox = opened()
        if join_first:
            two.join()
            two.until(lambda: two.waiting == 1)
        with two.sender.open(send):
            if not join_first:
                two.join()
            event = inbox.get(SOON)
            assert isinstance(event, ReceiverJoined) and event.connection.rank == RECEIVER
            assert event.message == Join() and not event.several


def test_messages_go_to_the_send_that_was_joined(two: Two) -> None:
    send, inbox = opened()
    with two.sender.open(send):
        ours, answers = two.join()
        joined: Any = inbox.get(SOON)
        joined.connection.send(Offer(b"record", bytes(16)))
        heard: Any = answers.get(SOON)
        assert heard.message == Offer(b"record", bytes(16))
        ours.send(Done())
        event = inbox.get(SOON)
        assert isinstance(event, MessageReceived) and event.message == Done()
        ours.close()
        assert isinstance(inbox.get(SOON), ConnectionLost)


def test_a_receiver_that_left_while_it_waited_is_given_to_no_send(two: Two) -> None:
    ours, _ = two.join()
    two.until(lambda: two.waiting == 1)
    ours.close()
    two.until(lambda: two.waiting == 0)
    send, inbox = opened()
    with two.sender.open(send):
        assert nothing_comes(inbox)


def test_a_receiver_that_left_just_before_a_send_is_not_given_to_it(two: Two) -> None:
    """What it said last is here, and has yet to be read."""
    ours, _ = two.join()
    two.until(lambda: two.waiting == 1)
    busy = threading.Event()
    two.sender._listener.run(busy.wait, SOON)
    ours.send(Abort("timed out"))
    send, inbox = opened()
    with two.sender.open(send):
        busy.set()
        assert nothing_comes(inbox)
    assert not two.waiting


def late(two: Two) -> tuple[Connection, Inbox, Inbox]:
    """A receiver that is with a send which ends before it has looked at it."""
    send, inbox = opened()
    with two.sender.open(send):
        ours, answers = two.join()
        two.until(lambda: len(inbox._events) == 1)
    return ours, answers, inbox


def test_one_that_left_while_a_send_ended_is_given_to_no_other(two: Two) -> None:
    send, inbox = opened()
    with two.sender.open(send):
        ours, _ = two.join()
        two.until(lambda: len(inbox._events) == 1)
        ours.send(Abort("timed out"))
        two.until(lambda: len(inbox._events) == 2)
    send, inbox = opened()
    with two.sender.open(send):
        assert nothing_comes(inbox)
    assert not two.waiting


def test_a_receiver_that_came_too_late_waits_for_the_next_send(two: Two) -> None:
    late(two)
    send, inbox = opened()
    with two.sender.open(send):
        assert isinstance(inbox.get(SOON), ReceiverJoined)


def test_one_that_came_too_late_and_left_is_given_to_no_send(two: Two) -> None:
    """The next send would wait for the answer of somebody who is not there."""
    send, inbox = opened()
    with two.sender.open(send):
        ours, _ = two.join()
        two.until(lambda: len(inbox._events) == 1)
        ours.close()
        two.until(lambda: len(inbox._events) == 2)  # it joined, and it is lost
    send, inbox = opened()
    with two.sender.open(send):
        assert nothing_comes(inbox)
    assert two.waiting == 0


def test_one_that_came_too_late_spoke_and_left_does_not_keep_the_thread(two: Two) -> None:
    """Its last word must not come back to the inbox out of which it is taken."""
    send, inbox = opened()
    with two.sender.open(send):
        ours, _ = two.join()
        two.until(lambda: len(inbox._events) == 1)
        ours.send(Abort("timed out"))
        ours.close()
        two.until(lambda: len(inbox._events) == 3)  # it joined, it spoke, and it is lost
    two.join()
    send, inbox = opened()
    with two.sender.open(send):
        assert isinstance(inbox.get(SOON), ReceiverJoined)


def test_one_that_is_put_back_and_left_is_given_to_no_send(two: Two) -> None:
    send, inbox = opened()
    with two.sender.open(send):
        ours, _ = two.join()
        joined: Any = inbox.get(SOON)
        ours.close()
        assert isinstance(inbox.get(SOON), ConnectionLost)
        two.sender.put_back(joined)
    send, inbox = opened()
    with two.sender.open(send):
        assert nothing_comes(inbox)
    assert two.waiting == 0


def test_one_that_is_put_back_is_given_to_the_next_send(two: Two) -> None:
    send, inbox = opened()
    with two.sender.open(send):
        two.join()
        joined: Any = inbox.get(SOON)
        two.sender.put_back(joined)
        assert nothing_comes(inbox), "it was served already"
    send, inbox = opened()
    with two.sender.open(send):
        again: Any = inbox.get(SOON)
        assert again.connection is joined.connection


def test_a_wrong_step_comes_to_the_send_after_a_while(
    two: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That one refuses it: both sides learn of the mistake."""
    monkeypatch.setattr(matching, "UNDECIDED_SECONDS", 0.2)
    send, inbox = opened(5)
    with two.sender.open(send):
        begun = time.monotonic()
        two.join(9)
        wrong = inbox.get(SOON)
        assert isinstance(wrong, ReceiverJoined) and (wrong.rank, wrong.step) == (RECEIVER, 9)
        assert 0.1 < time.monotonic() - begun < SOON


def test_states_for_one_rank_are_told_apart_by_step(two: Two) -> None:
    (five, fifth), (six, sixth) = opened(5), opened(6)
    with two.sender.open(five), two.sender.open(six):
        two.join(6)
        joined: Any = sixth.get(SOON)
        assert joined.several and nothing_comes(fifth)


# Members that do not do what they should


def test_a_member_that_says_nothing_is_closed_in_time(
    two: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "JOIN_SECONDS", 0.1)
    _, answers = two.connect()
    assert isinstance(answers.get(SOON), ConnectionLost)


@pytest.mark.parametrize("first", [Done(), Offer(b"", bytes(16)), Abort("hello")])
def test_a_member_that_does_not_join_is_closed(two: Two, first: Message) -> None:
    ours, answers = two.connect()
    ours.send(first)
    assert isinstance(answers.get(SOON), ConnectionLost)


@pytest.mark.parametrize("second", [Join(), Done()])
def test_a_member_that_says_more_before_there_is_an_offer_is_closed(
    two: Two, second: Message
) -> None:
    ours, answers = two.join()
    two.until(lambda: two.waiting == 1)
    ours.send(second)
    assert isinstance(answers.get(SOON), ConnectionLost)
    send, inbox = opened()
    with two.sender.open(send):
        assert nothing_comes(inbox)


def test_a_member_that_says_all_at_once_is_closed(two: Two) -> None:
    """Two messages in one piece: the second comes before anybody could have answered the first."""
    identity = two.sender.identity
    sock = admitted(identity, Hello(CONTROL, identity.node, RECEIVER), identity.token)
    sock.sendall(encode(Join()) + encode(Join()) + encode(Done()))
    assert is_closed(sock)
    sock.close()
    assert two.waiting == 0


def test_members_that_come_and_go_leave_nothing(two: Two) -> None:
    two.join()[0].close()
    two.until(lambda: two.waiting == 0)
    before = descriptors()
    for _ in range(100):
        two.join()[0].close()
    two.until(lambda: two.waiting == 0 and descriptors() <= before)


# Data connections


@pytest.fixture
def expected(two: Two) -> Iterator[tuple[DataTicket, list[Any]]]:
    ticket, came = new_ticket(), []
    with two.sender.expect(ticket, came.append):
        yield ticket, came


def new_ticket() -> DataTicket:
    return DataTicket(handshake.new_id(), handshake.new_key())


def connect_data(two: Two, ticket: DataTicket) -> Any:
    tries = iter([False, False, True])
    return two.receiver.connect_data(
        two.sender.identity, ticket, Deadline(SOON), lambda: next(tries)
    )


def test_data_connections_of_a_transfer_are_admitted(two: Two, expected: Any) -> None:
    ticket, came = expected
    socks = [connect_data(two, ticket) for _ in range(2)]
    two.until(lambda: len(came) == 2)
    socks[1].sendall(b"a chunk")
    came[1].setblocking(True)
    assert came[1].recv(100) == b"a chunk"
    for sock in (*socks, *came):
        sock.close()


@pytest.mark.parametrize("wrong", ["key", "transfer", "token", "broken"])
def test_data_connections_with_another_key_are_not(two: Two, expected: Any, wrong: str) -> None:
    ticket, came = expected
    others = {
        "key": {"key": handshake.new_key()},
        "transfer": {"transfer": handshake.new_id()},
        "token": {"key": two.sender.identity.token},
        "broken": {"broken": 1},
    }
    with pytest.raises(ConnectionResetError):
        connect_data(two, ticket._replace(**others[wrong]))
    assert came == []


def test_data_connections_of_a_transfer_that_is_over_are_not(two: Two) -> None:
    ticket = new_ticket()
    with two.sender.expect(ticket, pytest.fail):
        pass
    with pytest.raises(ConnectionResetError):
        connect_data(two, ticket)


# What a sender did not hear the end of


def test_an_unknown_outcome_is_told_once(two: Two) -> None:
    node, transfer = two.sender, handshake.new_id()
    peer, other = handshake.new_id(), handshake.new_id()
    assert node.settle(peer, transfer) is None
    for committed, had_it in ((transfer, True), (handshake.new_id(), False), (b"", False)):
        node.unknown.note(peer, transfer)
        assert node.settle(other, committed) is None  # it may have the same rank by now
        assert node.settle(peer, committed) is had_it
        assert node.settle(peer, committed) is None
