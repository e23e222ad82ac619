"""Control connections over real sockets: nothing is lost, nothing blocks, nothing piles up."""

from __future__ import annotations

import queue
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.support.messages import frame, frame_with
from tests.support.strangers import descriptors, is_closed
from torchrelay.transports.meeting import connection as module
from torchrelay.transports.meeting.connection import (
    UNSENT,
    WAITING,
    Connection,
    ConnectionLost,
    MessageReceived,
)
from torchrelay.transports.meeting.inbox import Inbox
from torchrelay.transports.meeting.listener import listener_here
from torchrelay.transports.wire import messages as m
from torchrelay.transports.wire.messages import FrameReader

SOON = 10.0


class End:
    """A connection whose other end is a plain socket."""

    def __init__(self) -> None:
        self.there, ours = socket.socketpair()
        self.there.settimeout(SOON)
        self.inbox = Inbox()
        self.connection = Connection(ours, listener_here().loop, 1, self.inbox.put)
        listener_here().run(self.connection.update)
        self._reader = FrameReader()
        self._heard: list[m.Message] = []

    def next(self) -> Any:
        event = self.inbox.get(SOON)
        assert event is not None, "nothing came"
        return event

    def hear(self) -> m.Message:
        """The next message that comes to the other end."""
        while not self._heard:
            self._heard += [message for message, _ in self._reader.feed(self.there.recv(1 << 16))]
        return self._heard.pop(0)

    def close(self) -> None:
        self.connection.close()
        self.there.close()


@pytest.fixture
def end() -> Iterator[End]:
    made = End()
    yield made
    made.close()


def until(true: Callable[[], bool]) -> None:
    ends = time.monotonic() + SOON
    while not true():
        assert time.monotonic() < ends
        time.sleep(0.002)


def settled() -> None:
    """The I/O thread has done what it was asked for."""
    done: queue.SimpleQueue[None] = queue.SimpleQueue()
    listener_here().run(done.put, None)
    done.get(timeout=SOON)


def test_messages_go_both_ways(end: End) -> None:
    end.connection.send(m.Go(b"x" * 100_000))
    assert end.hear() == m.Go(b"x" * 100_000)
    end.there.sendall(m.encode(m.Fetched()) + m.encode(m.Done()))
    assert [end.next().message for _ in range(2)] == [m.Fetched(), m.Done()]


def test_a_ping_is_answered_while_the_call_is_busy(end: End) -> None:
    before = end.connection.received_at
    for _ in range(3):
        end.there.sendall(m.encode(m.Ping()))
        assert end.hear() == m.Pong()
    end.there.sendall(m.encode(m.Pong()))
    until(lambda: end.connection.received_at > before)
    assert end.inbox.get(0.01) is None, "neither is an event"


def test_the_last_message_leaves_before_a_connection_is_closed(end: End) -> None:
    large = m.Go(bytes(4 << 20))
    end.connection.send(large)
    end.connection.send(m.Abort("no time left"))
    end.connection.close()
    end.connection.send(m.Ping())  # after the end
    assert end.hear() == large and end.hear() == m.Abort("no time left")
    assert is_closed(end.there)


def test_a_peer_that_takes_nothing_is_closed_all_the_same(
    end: End, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PARTING_SECONDS", 0.1)
    before = descriptors()
    end.connection.send(m.Go(bytes(16 << 20)))
    end.connection.close()
    until(lambda: descriptors() < before)


def test_sending_to_a_peer_that_takes_nothing_does_not_block(end: End) -> None:
    begun = time.monotonic()
    for _ in range(UNSENT // 2):
        end.connection.send(m.RouteNote(bytes(4096)))
    assert time.monotonic() - begun < SOON
    for _ in range(UNSENT):
        end.connection.send(m.RouteNote(bytes(4096)))
    lost = end.next()
    assert isinstance(lost, ConnectionLost) and "does not take its messages" in lost.reason


def test_a_peer_that_pings_and_takes_no_answer_is_closed(end: End) -> None:
    data = m.encode(m.Ping()) * 1000
    with pytest.raises(OSError):
        for _ in range(1000):
            end.there.sendall(data)
    assert isinstance(end.next(), ConnectionLost)


def test_a_call_that_takes_nothing_holds_few_messages_and_loses_none(end: End) -> None:
    count = 4 * WAITING

    def talk() -> None:
        for number in range(count):
            end.there.sendall(m.encode(m.Need((number,))))

    talking = threading.Thread(target=talk)
    talking.start()
    until(lambda: end.connection._is_full)
    held = len(end.inbox._events)
    # One read of the socket may have brought some more than that.
    assert WAITING < held <= WAITING + module.RECV_BYTES // len(m.encode(m.Need((0,))))
    heard = [end.next().message.chunks[0] for _ in range(count)]
    assert heard == list(range(count))
    talking.join(SOON)


def test_a_call_that_takes_nothing_holds_few_bytes(
    end: End, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "WAITING_BYTES", 1 << 20)
    note, count = m.encode(m.RouteNote(bytes(300_000))), 30

    def talk() -> None:
        for _ in range(count):
            end.there.sendall(note)

    talking = threading.Thread(target=talk)
    talking.start()
    until(lambda: end.connection._is_full)
    assert len(end.inbox._events) <= 5
    assert all(isinstance(end.next(), MessageReceived) for _ in range(count))
    talking.join(SOON)


def test_a_closed_connection_is_lost_once(end: End) -> None:
    end.there.sendall(m.encode(m.Done()))
    end.there.close()
    assert end.next().message == m.Done()
    lost = end.next()
    assert isinstance(lost, ConnectionLost) and lost.reason == "closed by the other side"
    end.connection.send(m.Done())
    settled()
    assert end.inbox.get(0.01) is None


WRONG = {
    "garbage": (b"\0" * 100, "not of this protocol"),
    "an oversized frame": (frame_with(m.MESSAGES.index(m.Done), 1 << 20), "the cap is"),
    "a body that is none": (frame(m.Need, b"\xc1"), "unreadable message"),
    "half a frame": (m.encode(m.Need((1, 2)))[:-1], "closed by the other side"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_message_ends_a_connection(end: End, name: str) -> None:
    data, words = WRONG[name]
    end.there.sendall(m.encode(m.Ping()) + data)
    end.there.shutdown(socket.SHUT_WR)
    lost = end.next()
    assert isinstance(lost, ConnectionLost) and words in lost.reason
    assert end.hear() == m.Pong() and is_closed(end.there)


def test_threads_may_send_at_once(end: End) -> None:
    def talk(first: int) -> None:
        for number in range(first, first + 200):
            end.connection.send(m.RouteNote(number.to_bytes(4, "big") * 500))

    talking = [threading.Thread(target=talk, args=(first,)) for first in (0, 200, 400)]
    for one in talking:
        one.start()
    found = [end.hear() for _ in range(600)]
    for one in talking:
        one.join(SOON)
    numbers = [int.from_bytes(note.data[:4], "big") for note in found]  # type: ignore[union-attr]
    assert all(note.data == note.data[:4] * 500 for note in found)  # type: ignore[union-attr]
    for first in (0, 200, 400):
        own = [number for number in numbers if first <= number < first + 200]
        assert own == list(range(first, first + 200)), "each in its order"


def test_an_inbox_gives_what_is_there_and_no_more() -> None:
    inbox = Inbox()
    assert inbox.get(0.0) is None
    for number in range(3):
        inbox.put(number)
    assert [inbox.get(0.0) for _ in range(2)] == [0, 1]
    inbox.put(9)
    assert list(inbox.drain()) == [2, 9] and inbox.get(0.0) is None


def test_short_waits_end() -> None:
    for _ in range(20_000):
        assert Inbox().get(1e-7) is None


def test_a_wait_that_a_signal_handler_outlasts_ends() -> None:
    def slow(number: int, frame: object) -> None:
        time.sleep(0.3)

    before = signal.signal(signal.SIGUSR1, slow)
    try:
        main = threading.get_ident()
        threading.Timer(0.1, lambda: signal.pthread_kill(main, signal.SIGUSR1)).start()
        begun = time.monotonic()
        assert Inbox().get(0.2) is None
        assert time.monotonic() - begun < SOON
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_an_event_wakes_who_waits() -> None:
    inbox = Inbox()
    for number in range(200):
        threading.Timer(0.0005, inbox.put, (number,)).start()
        assert inbox.get(SOON) == number


def test_no_event_of_many_threads_is_lost() -> None:
    inbox, count = Inbox(), 3_000

    def put(first: int) -> None:
        for number in range(first, first + count):
            inbox.put(number)

    threads = [threading.Thread(target=put, args=(first,)) for first in (0, count)]
    for thread in threads:
        thread.start()
    assert sorted(inbox.get(SOON) for _ in range(2 * count)) == list(range(2 * count))  # type: ignore[type-var]
    assert inbox.get(0.0) is None


def test_a_connection_that_is_full_has_one_timer(end: End, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each message that does not leave at once looks what is to be waited for."""
    here, calls = listener_here(), []
    for _ in range(WAITING + 8):
        end.there.sendall(m.encode(m.Fetched()))
    until(lambda: end.connection._is_full)
    later = here.loop.call_later
    done = threading.Event()

    def note(seconds: float, act: Callable[..., Any], *args: Any) -> Any:
        calls.append(act)
        return later(3600.0, act, *args)  # its time does not come while this looks

    def look() -> None:
        monkeypatch.setattr(here.loop, "call_later", note)
        for _ in range(100):
            end.connection.update()
        monkeypatch.undo()
        done.set()

    here.run(look)
    assert done.wait(SOON) and len(calls) <= 1
