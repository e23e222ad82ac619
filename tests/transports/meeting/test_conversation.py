"""The receiver's end of a transfer: every wait ends, with a typed error that says why."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

import torchrelay as tr
from torchrelay.deadlines import Deadline, Stopwatch
from torchrelay.errors import PeerAbortedError, PeerLostError, RemoteProtocolError
from torchrelay.transports.meeting import conversation
from torchrelay.transports.meeting.connection import ConnectionLost, MessageReceived
from torchrelay.transports.meeting.conversation import Conversation
from torchrelay.transports.meeting.directory import Directory, Identity
from torchrelay.transports.meeting.inbox import Inbox
from torchrelay.transports.meeting.node import Meeting
from torchrelay.transports.wire.messages import Abort, Confirmed, Digests, Done, Go, Message

SENDER = 3


class Connected:
    """A connection, and the node that makes it."""

    identity = Identity(1, "10.0.0.1", 7, bytes(16), bytes(32))

    def __init__(self) -> None:
        self.sent: list[Message] = []
        self.taken_bytes = 0
        self.closed = False

    def connect(self, directory: Any, rank: int, me: int, inbox: Inbox, deadline: Deadline) -> Any:
        return self

    def send(self, message: Message) -> None:
        self.sent.append(message)

    def taken(self, event: MessageReceived) -> None:
        self.taken_bytes += event.nbytes

    def close(self) -> None:
        self.closed = True


def talking(seconds: float = 30.0) -> tuple[Conversation, Any]:
    node: Any = Connected()
    watch = Stopwatch()
    watch.phase = "data"
    meeting = Meeting(node, Directory())
    return Conversation(meeting, SENDER, 0, Deadline(seconds), watch), node


def hear(talk: Conversation, node: Any, *said: Message) -> None:
    for message in said:
        talk.inbox.put(MessageReceived(node, message, 10))


def test_messages_come_in_order_and_make_room_for_more() -> None:
    talk, node = talking()
    hear(talk, node, Go(b"x"), Confirmed())
    assert talk.expect(Go) == Go(b"x") and talk.expect(Confirmed) == Confirmed()
    assert node.taken_bytes == 20


def test_reports_of_workers_come_the_same_way() -> None:
    talk, node = talking()
    talk.inbox.put("a chunk came")
    hear(talk, node, Confirmed())
    assert [talk.next("data"), talk.next("data")] == ["a chunk came", Confirmed()]
    talk.inbox.put("a chunk that is late")
    hear(talk, node, Confirmed())
    assert talk.expect(Confirmed) == Confirmed()


@pytest.mark.parametrize(
    ("event", "error", "words"),
    [
        (Abort("disk on fire"), PeerAbortedError, "disk on fire"),
        (Abort("step 5 is offered", "step"), tr.errors.StepMismatchError, "step 5 is offered"),
        (Done(), RemoteProtocolError, "Done out of turn"),
        ("lost", PeerLostError, "connection lost to rank 3 at 10.0.0.1 port 7: cut; 5 of 9 done"),
    ],
)
def test_what_ends_a_wait(event: Any, error: type[tr.errors.RelayError], words: str) -> None:
    talk, node = talking()
    talk.step, talk.done = 7, "5 of 9 done"
    if event == "lost":
        talk.inbox.put(ConnectionLost(node, "cut"))
    else:
        hear(talk, node, event)
    with pytest.raises(error, match=words) as caught:
        talk.expect(Confirmed)
    assert (caught.value.rank, caught.value.step, caught.value.phase) == (SENDER, 7, "data")


def test_a_wait_ends_with_the_deadline() -> None:
    talk, _ = talking(0.2)
    talk.done = "5 of 9 done"
    begun = time.monotonic()
    with pytest.raises(
        tr.errors.TransferTimeoutError, match=r"did not send its confirmed; 5 of 9 done"
    ):
        talk.expect(Confirmed)
    assert 0.15 < time.monotonic() - begun < 5


def test_a_connection_that_ends_after_the_deadline_is_a_timeout() -> None:
    """Both sides close their connections then: which of them looks first does not matter."""
    talk, node = talking(0.05)
    talk.inbox.put(ConnectionLost(node, "cut"))
    time.sleep(0.1)
    with pytest.raises(tr.errors.TransferTimeoutError, match=r"after 0.05 s: connection lost"):
        talk.expect(Confirmed)


def test_a_wait_for_a_while_ends_then() -> None:
    talk, _ = talking()
    begun = time.monotonic()
    assert talk.next("data", 0.1) is None
    assert time.monotonic() - begun < 5


def test_what_came_while_this_process_stood_still_counts() -> None:
    talk, node = talking(0.05)
    hear(talk, node, Go(), Confirmed())
    time.sleep(0.2)
    assert talk.expect(Go) and talk.expect(Confirmed)
    with pytest.raises(tr.errors.TransferTimeoutError):
        talk.expect(Confirmed)


def test_a_sender_that_says_more_and_more_does_not_keep_a_receiver(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(conversation, "LAST_SECONDS", 0.1)
    talk, node = talking(0.1)
    over = threading.Event()

    def flood() -> None:
        while not over.is_set():
            for _ in range(100):
                hear(talk, node, Digests((), b""))
            time.sleep(0.001)

    flooding = threading.Thread(target=flood)
    flooding.start()
    ends = time.monotonic() + 20
    try:
        with pytest.raises(tr.errors.TransferTimeoutError):
            while time.monotonic() < ends:
                talk.next("data")
    finally:
        over.set()
        flooding.join()


def test_an_end_leaves_nothing_behind() -> None:
    talk, node = talking()
    talk.inbox.put("a chunk that leads to the state")
    talk.close()
    assert node.closed and list(talk.inbox.drain()) == []
