"""One process's end of a group: its identity, its open sends, and the receivers that wait for one.

Its tables belong to the I/O thread. Calls of other threads have things done there. The listener
refers to it weakly, so it ends with its group.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from torchrelay.deadlines import Deadline
from torchrelay.errors import UsageError
from torchrelay.transports.meeting.calling import call_rank, call_until
from torchrelay.transports.meeting.connection import (
    Connection,
    ConnectionLost,
    Event,
    Inbox,
    MessageHeard,
)
from torchrelay.transports.meeting.directory import Directory, Identity, directory_of
from torchrelay.transports.meeting.listener import Listener, listener_here
from torchrelay.transports.meeting.matching import Matcher, OpenSend, WaitingJoin
from torchrelay.transports.wire import handshake
from torchrelay.transports.wire.handshake import Hello
from torchrelay.transports.wire.messages import Abort, Join

JOIN_SECONDS = 10.0  # for an authenticated peer to say what it wants


@dataclass(frozen=True)
class ReceiverJoined:
    """A receiver has come to a send. `several`: there is more than one state for it here."""

    connection: Connection
    join: Join
    several: bool


@dataclass(frozen=True)
class WrongStep:
    """A receiver has asked for another step than any send has."""

    rank: int
    step: int | None


class DataTicket(NamedTuple):
    """What admits data connections to a transfer: new ones, after some have `broken`, are not taken
    for the old."""

    transfer: bytes
    key: bytes
    broken: int = 0


Put = Callable[[socket.socket], None]


class Node:
    """Sends and receives of a process in one group meet their peers here. Threads may share it."""

    def __init__(self, directory: Directory) -> None:
        try:
            self._listener: Listener = listener_here()
        except OSError as fault:
            raise UsageError(f"cannot listen for the other ranks: {fault}") from fault
        self.directory = directory
        here, self._loop = self._listener, self._listener.loop
        self.identity = Identity(
            handshake.VERSION, here.host, here.port, handshake.new_id(), handshake.new_key()
        )
        self._matcher = Matcher()
        self._expected: dict[tuple[bytes, int], tuple[bytes, Put]] = {}
        self._lock = threading.Lock()
        self._committed: dict[int, bytes] = {}  # by sender, the last transfer from it
        self._unknown: dict[int, bytes] = {}  # by receiver, the one that it may have committed
        here.add(self.identity.node, self)
        directory.publish(self.identity)

    @contextlib.contextmanager
    def open(self, send: OpenSend) -> Iterator[None]:
        """Within: receivers come to a send, as `ReceiverJoined` and `WrongStep` in its inbox."""
        for rank in send.ranks:
            self.directory.introduce(rank)
        self._listener.run(self._open, send)
        try:
            yield
        finally:
            self._listener.run(self._close, send)

    def put_back(self, joined: ReceiverJoined) -> None:
        """A receiver came too late for a send: it waits for the next one."""
        self._listener.run(self._wait, joined.connection, joined.join)

    def connect(self, rank: int, me: int, inbox: Inbox, deadline: Deadline) -> Connection:
        """A control connection to a sender, whose messages come to the inbox."""
        sock, identity = call_rank(self.directory, rank, me, deadline)
        connection = Connection(sock, self._loop, rank, identity)
        connection.deliver = inbox.put
        self._listener.run(connection.start)
        return connection

    @contextlib.contextmanager
    def expect(self, ticket: DataTicket, put: Put) -> Iterator[None]:
        """Within: data connections of a transfer are admitted, and go to `put`."""
        which = ticket.transfer, ticket.broken
        self._listener.run(self._expected.__setitem__, which, (ticket.key, put))
        try:
            yield
        finally:
            self._listener.run(self._expected.pop, which, None)

    def connect_data(
        self,
        identity: Identity,
        ticket: DataTicket,
        deadline: Deadline,
        over: Callable[[], bool],
    ) -> socket.socket:
        """A data connection to the process that feeds this one. `OSError` if that fails."""
        hello = Hello(handshake.DATA, identity.node, 0, ticket.transfer, ticket.broken)
        return call_until(identity, hello, ticket.key, deadline, over)

    # Transfers whose end the sender did not hear of. The next `Join` of the receiver tells.

    def committed(self, sender: int) -> bytes:
        return self._committed.get(sender, b"")

    def note_committed(self, sender: int, transfer: bytes) -> None:
        self._committed[sender] = transfer

    def note_unknown(self, receiver: int, transfer: bytes) -> None:
        self._unknown[receiver] = transfer

    def settle(self, receiver: int, committed: bytes) -> bool | None:
        """Whether a receiver committed the transfer that was unknown; None if none was."""
        with self._lock:
            transfer = self._unknown.pop(receiver, None)
        return None if transfer is None else transfer == committed

    # In the I/O thread: connections

    def key_for(self, hello: Hello) -> bytes | None:
        if hello.kind == handshake.CONTROL:
            return self.identity.token
        expected = self._expected.get((hello.transfer, hello.broken))
        return None if expected is None else expected[0]

    def admit(self, hello: Hello, sock: socket.socket) -> None:
        if hello.kind == handshake.DATA:
            self._expected[hello.transfer, hello.broken][1](sock)
            return
        connection = Connection(sock, self._loop, hello.rank)
        connection.deliver = first = self._first
        connection.start()

        def close_without_join() -> None:
            if connection.deliver is first:
                connection.close()

        self._loop.call_later(JOIN_SECONDS, close_without_join)

    def _first(self, event: Event) -> None:
        """The first message of a receiver."""
        if isinstance(event, ConnectionLost):
            return
        event.connection.taken(event)
        if isinstance(event.message, Join):
            self._wait(event.connection, event.message)
        else:
            event.connection.close()

    def _wait(self, connection: Connection, join: Join) -> None:
        """Have a receiver wait for a send, unless it has left: a send that it came too late for was
        told so in place of this."""
        if connection.closed:
            connection.deliver = _ignore
            return
        waiting = WaitingJoin(connection.rank, join.step, (connection, join))

        def deliver(event: Event) -> None:
            # It has nothing to say before there is an offer.
            self._matcher.leave(waiting)
            if isinstance(event, MessageHeard):
                connection.close()

        connection.deliver = deliver
        self._matcher.join(waiting)
        self._match_soon()

    # In the I/O thread: sends

    def _open(self, send: OpenSend) -> None:
        self._matcher.open(send)
        self._match_soon()

    def _close(self, send: OpenSend) -> None:
        self._matcher.close(send)
        # Receivers that came too late for this send wait for the next one.
        for event in send.inbox.drain():
            if isinstance(event, ReceiverJoined):
                self._wait(event.connection, event.join)
            elif isinstance(event, MessageHeard):
                event.connection.deliver(event)
        self._match_soon()

    def _match_soon(self) -> None:
        """Match when everything that is here by now has been read: a receiver may have left."""
        self._loop.call_soon(self._match)

    def _match(self) -> None:
        for waiting, send, several in self._matcher.matches():
            connection, join = waiting.caller
            connection.deliver = send.inbox.put
            send.inbox.put(ReceiverJoined(connection, join, several))
        wrong, again = self._matcher.mismatches(now := time.monotonic())
        for waiting, send in wrong:
            connection, join = waiting.caller
            reason = f"step {send.step} is offered, step {join.step} was asked for"
            connection.send(Abort(reason, kind="step"))
            connection.deliver = _ignore
            connection.close()
            send.inbox.put(WrongStep(waiting.rank, join.step))
        if again is not None:
            self._loop.call_later(max(0.0, again - now) + 0.001, self._match)


def _ignore(event: Event) -> None:
    """Nothing more is expected."""


_nodes: weakref.WeakKeyDictionary[Any, Node] = weakref.WeakKeyDictionary()
_nodes_lock = threading.Lock()


def node_of(group: Any) -> Node:
    """The one node of a group in this process: it ends with the group. A stand-in for a group may
    bring its own."""
    own = getattr(group, "relay_node", None)
    if isinstance(own, Node):
        return own
    with _nodes_lock:
        node = _nodes.get(group)
        if node is None:
            node = _nodes[group] = Node(directory_of(group))
        return node


def _forget_in_child() -> None:
    """A forked child has none of its parent's nodes."""
    global _nodes_lock
    _nodes_lock = threading.Lock()
    _nodes.clear()


os.register_at_fork(after_in_child=_forget_in_child)
