"""One process's end of a group: its identity, its open sends, and the receivers that wait for one.

Its tables belong to the I/O thread. Calls of other threads have things done there. The listener
refers to it weakly, so it ends with its group.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

from torchrelay.deadlines import Deadline
from torchrelay.transports.meeting.calls import call_rank, call_until
from torchrelay.transports.meeting.connection import Connection, Event, MessageReceived
from torchrelay.transports.meeting.directory import Directory, Identity, directory_of
from torchrelay.transports.meeting.inbox import Inbox
from torchrelay.transports.meeting.last_transfers import LastTransfers
from torchrelay.transports.meeting.listener import listener_here
from torchrelay.transports.meeting.matching import Matcher, OpenSend, ReceiverJoined
from torchrelay.transports.wire import handshake
from torchrelay.transports.wire.handshake import Hello
from torchrelay.transports.wire.messages import Join, NodeAddress

JOIN_SECONDS = 10.0  # for an authenticated peer to say what it wants


class DataTicket(NamedTuple):
    """What admits data connections to a transfer.

    New ones, after some have `broken` or have brought all that was asked for, have another number:
    one of the old that arrives late is not taken for them, and no chunk goes where it is not read.
    """

    transfer: bytes
    key: bytes
    broken: int = 0


Put = Callable[[socket.socket], None]


class Node:
    """Sends and receives of a process in one group meet their peers here. Threads may share it."""

    def __init__(self) -> None:
        here = self._listener = listener_here()
        self._loop = here.loop
        self.identity = Identity(
            handshake.VERSION, here.host, here.port, handshake.new_id(), handshake.new_key()
        )
        self._matcher = Matcher()
        self._expected: dict[tuple[bytes, int], tuple[bytes, Put]] = {}
        # By process, as ranks may be other ones in the next call.
        self.committed = LastTransfers()  # by sender, the last transfer from it
        self.unknown = LastTransfers()  # by receiver, the one that it may have committed
        here.add(self.identity.node, self)

    @contextlib.contextmanager
    def open(self, send: OpenSend) -> Iterator[None]:
        """Within: receivers come to a send, as `ReceiverJoined` in its inbox."""
        self._listener.run(self._open, send)
        try:
            yield
        finally:
            self._listener.run(self._close, send)

    def put_back(self, joined: ReceiverJoined) -> None:
        """A receiver came too late for a send: it waits for the next one."""
        self._listener.run(self._wait, joined)

    def connect(
        self, directory: Directory, rank: int, me: int, inbox: Inbox, deadline: Deadline
    ) -> Connection:
        """A control connection to a sender, whose messages come to the inbox."""
        sock, identity = call_rank(directory, rank, me, deadline)
        connection = Connection(sock, self._loop, rank, inbox.put, identity)
        connection.start()
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
        address: NodeAddress,
        ticket: DataTicket,
        deadline: Deadline,
        over: Callable[[], bool],
    ) -> socket.socket:
        """A data connection to the process that feeds this one. `OSError` if that fails."""
        hello = Hello(handshake.DATA, address.node, 0, ticket.transfer, ticket.broken)
        return call_until(address, hello, ticket.key, deadline, over)

    def settle(self, receiver: bytes, committed: bytes) -> bool | None:
        """Whether a process, which says what it `committed` last, has committed the transfer whose
        end was unknown here; None if none was."""
        transfer = self.unknown.take(receiver)
        return None if transfer is None else transfer == committed

    # In the I/O thread: connections

    def admission(self, hello: Hello) -> tuple[bytes, Put] | None:
        """See `Admission`."""
        if hello.kind == handshake.DATA:
            return self._expected.get((hello.transfer, hello.broken))
        return self.identity.token, partial(self._called, hello.rank)

    def _called(self, rank: int, sock: socket.socket) -> None:
        first = self._first
        connection = Connection(sock, self._loop, rank, first)
        connection.update()

        def close_without_join() -> None:
            if connection.deliver is first:
                connection.close()

        self._loop.call_later(JOIN_SECONDS, close_without_join)

    def _first(self, event: Event) -> None:
        """The first message of a receiver."""
        if not isinstance(event, MessageReceived):
            return
        connection, join = event.connection, event.message
        connection.taken(event)
        if isinstance(join, Join):
            self._wait(ReceiverJoined(connection.rank, join.step, connection, join))
        else:
            connection.close()

    def _wait(self, joined: ReceiverJoined) -> None:
        """Have a receiver wait for a send, unless it has left."""
        connection: Connection = joined.connection

        def deliver(event: Event) -> None:
            # It has nothing to say before there is an offer.
            self._matcher.leave(joined)
            connection.close()

        connection.deliver = deliver
        if not connection.closed:
            self._matcher.join(joined)
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
                self._wait(event)
            elif isinstance(event, MessageReceived):
                event.connection.deliver(event)
        self._match_soon()

    def _match_soon(self) -> None:
        """Match when everything that is here by now has been read: a receiver may have left."""
        self._loop.call_soon(self._match)

    def _match(self) -> None:
        found = list(self._matcher.matches())
        wrong, again = self._matcher.wrong_steps(now := time.monotonic())
        for joined, send in [*found, *wrong]:
            joined.connection.deliver = send.inbox.put
            send.inbox.put(joined)
        if again is not None:
            self._loop.call_later(max(0.0, again - now) + 0.001, self._match)


class Meeting(NamedTuple):
    """Where a process meets the other ranks of a group."""

    node: Node
    directory: Directory


def meet(group: Any, store: Any = None) -> Meeting:
    """The one node of this process in a group, published in this store, or in the group's own. The
    node ends with the group. A stand-in for a group may bring its own `relay_meeting`."""
    own = getattr(group, "relay_meeting", None)
    if isinstance(own, Meeting):
        return own
    here = listener_here()
    with here.lock:
        known = here.meetings.setdefault(group, {})
        if store not in known:
            directory = directory_of(group, store)
            # Two stores of one caller may be the same one, which then has the same identity twice.
            node = next(iter(known.values())).node if known else Node()
            directory.publish(node.identity)
            known[store] = Meeting(node, directory)
        found: Meeting = known[store]
        return found
