"""A control connection: frames of one transfer, both ways, over an authenticated socket.

Any thread may send. The I/O thread of the process reads and hands each message to the call that
owns the connection, so a `Ping` is answered even while that call is busy.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from torchrelay.errors import DigestError, RemoteProtocolError
from torchrelay.transports.meeting.directory import Identity
from torchrelay.transports.meeting.socket_setup import tune
from torchrelay.transports.wire import messages
from torchrelay.transports.wire.messages import Abort, Message, Ping, Pong

WAITING_BYTES = 64 << 20  # of messages that wait for a call; the peer keeps the others
WAITING = 64  # such messages at most
FULL_SECONDS = 0.002  # until it is looked at whether the call has taken them
UNSENT = 4096  # messages that a peer has not taken
PARTING_SECONDS = 2.0  # for the last message to leave
RECV_BYTES = 256 << 10


@dataclass(frozen=True)
class MessageReceived:
    """A message came on a connection."""

    connection: Connection
    message: Message
    nbytes: int  # that it counts for while it waits


@dataclass(frozen=True)
class ConnectionLost:
    """A connection is closed; nothing more comes on it."""

    connection: Connection
    reason: str
    damaged: bool = False  # a message came with other bytes than were sent


Event = MessageReceived | ConnectionLost


class Connection:
    """One end. `deliver` gets its events, in the I/O thread; whoever owns it may change that."""

    def __init__(
        self,
        sock: socket.socket,
        loop: asyncio.AbstractEventLoop,
        rank: int,
        deliver: Callable[[Event], None],
        identity: Identity | None = None,
    ) -> None:
        sock.setblocking(False)
        tune(sock)
        self.rank = rank
        self.identity = identity  # of the process that was called
        self.received_at = time.monotonic()  # anything, a `Pong` too
        self.deliver = deliver
        self._sock, self._loop = sock, loop
        self._lock = threading.Lock()
        self._reader = messages.FrameReader()
        self._backlog = bytearray()
        self._unsent = 0  # messages in it
        self._timer: asyncio.TimerHandle | None = None  # to look again
        self._came = self._taken = 0  # bytes of messages; each has one thread that adds to it
        self.closed = False  # by this side, or this side knows that the other has

    def start(self) -> None:
        """Read messages from now on. Any thread may ask for it."""
        self._in_loop(self.update)

    def update(self) -> None:
        """Wait from now on for what is of use: messages, if there is space for more, and the peer
        to take those that are in the way. In the I/O thread."""
        loop, fd = self._loop, self._sock.fileno()
        if fd < 0 or (self.closed and not self._backlog):
            self._end()
            return
        if self._backlog:
            loop.add_writer(fd, self._writable)
        else:
            loop.remove_writer(fd)
        if self.closed:
            loop.remove_reader(fd)
            self._later(PARTING_SECONDS, self._end)
        elif self._is_full:
            loop.remove_reader(fd)
            self._later(FULL_SECONDS, self.update)
        else:
            loop.add_reader(fd, self._readable)

    def _later(self, seconds: float, act: Callable[[], None]) -> None:
        """Do something in a while, unless something waits for its time already."""

        def now() -> None:
            self._timer = None
            act()

        if self._timer is None:
            self._timer = self._loop.call_later(seconds, now)

    def send(self, message: Message) -> None:
        """Send a message. Does not block; a lost connection is an event."""
        data = messages.encode(message)
        with self._lock:
            if self.closed:
                return
            self._backlog += data
            self._unsent += 1
            if self._unsent == 1:
                self._flush()
                if self._backlog:
                    self._in_loop(self.update)
            elif self._unsent > UNSENT:
                self._in_loop(self._lose, "it does not take its messages")

    def _flush(self) -> None:
        """Send what the socket takes. The caller has the lock."""
        try:
            while self._backlog:
                with memoryview(self._backlog) as data:
                    sent = self._sock.send(data)
                del self._backlog[:sent]
        except BlockingIOError:
            return
        except OSError:
            self._backlog.clear()  # the reader finds out why
        self._unsent = 0

    def close(self) -> None:
        """Close it, once what was sent has left. Any thread may."""
        with self._lock:
            self.closed = True
        self._in_loop(self.update)

    def taken(self, event: MessageReceived) -> None:
        """The call has got a message: more may come."""
        self._taken += event.nbytes

    @property
    def _is_full(self) -> bool:
        return self._came - self._taken > WAITING_BYTES

    def _in_loop(self, act: Callable[..., None], *args: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended with the process
            self._loop.call_soon_threadsafe(act, *args)

    # In the I/O thread

    def _readable(self) -> None:
        try:
            data = self._sock.recv(RECV_BYTES)
            if not data:
                raise ConnectionResetError("closed by the other side")
            self.received_at = time.monotonic()
            for message, nbytes in self._reader.feed(data):
                self._received(message, nbytes)
        except BlockingIOError:
            return
        except DigestError as fault:
            self.send(Abort(f"from this side came bytes that changed on the way: {fault}"))
            self._lose(str(fault), damaged=True)
        except (OSError, RemoteProtocolError) as fault:
            self._lose(str(fault))
        if self._is_full:
            self.update()

    def _received(self, message: Message, nbytes: int) -> None:
        if isinstance(message, Ping):
            self.send(Pong())
        elif not isinstance(message, Pong):
            counted = max(nbytes, WAITING_BYTES // WAITING)
            self._came += counted
            self.deliver(MessageReceived(self, message, counted))

    def _writable(self) -> None:
        with self._lock:
            self._flush()
        if not self._backlog:
            self.update()

    def _lose(self, reason: str, *, damaged: bool = False) -> None:
        if self._sock.fileno() >= 0:
            self._end()
            self.deliver(ConnectionLost(self, reason, damaged))

    def _end(self) -> None:
        if (fd := self._sock.fileno()) >= 0:
            self._loop.remove_reader(fd)
            self._loop.remove_writer(fd)
            with self._lock:
                self.closed = True
                self._backlog.clear()
            self._sock.close()
