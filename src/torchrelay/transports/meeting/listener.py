"""The I/O thread of a process: it accepts connections, authenticates them, and runs those that are
for control messages.

A stranger gets a fixed buffer and two seconds. If strangers are many, the one that has been there
longest is turned away first: a peer is authenticated within milliseconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import weakref
from collections.abc import Callable
from typing import Any, Protocol

from torchrelay.errors import UsageError
from torchrelay.memory import threads
from torchrelay.shortage import raise_shortage
from torchrelay.system import in_child
from torchrelay.transports.meeting.addresses import listen_here
from torchrelay.transports.meeting.socket_setup import close_in_child, note_open
from torchrelay.transports.wire import handshake
from torchrelay.transports.wire.handshake import Hello

STRANGERS = 64  # connections at a time that have not shown who they are
HELLO_SECONDS = 2.0  # on a busy machine
PAUSE_SECONDS = 0.1  # when no descriptor is free


class Admission(Protocol):
    """Decides which callers may connect to one node of this process. Runs in the I/O thread."""

    def admission(self, hello: Hello) -> tuple[bytes, Callable[[socket.socket], None]] | None:
        """The key that the caller must know, and the function that takes its socket then; None if
        there is nothing for it here."""


class Listener:
    """Made when a process first needs it, and kept until its end."""

    def __init__(self) -> None:
        self._socket = listen_here()
        self._socket.setblocking(False)
        note_open(self._socket)
        self.host, self.port = self._socket.getsockname()[:2]
        self.loop = asyncio.new_event_loop()
        self._nodes: weakref.WeakValueDictionary[bytes, Admission] = weakref.WeakValueDictionary()
        # By group, and by the store that a caller named: see `meet`.
        self.meetings: weakref.WeakKeyDictionary[Any, dict[Any, Any]] = weakref.WeakKeyDictionary()
        self.lock = threading.Lock()  # of `meetings`
        self._strangers: dict[asyncio.Task[None], None] = {}  # the oldest first
        self.loop.call_soon(self._accept_from_now_on)
        try:
            threads.start(self.loop.run_forever, "listener")
        except BaseException:
            self._socket.close()
            self.loop.close()
            raise

    def add(self, node: bytes, admission: Admission) -> None:
        self._nodes[node] = admission

    def run(self, act: Callable[..., object], *args: object) -> None:
        """Have something done in the I/O thread, in the order of the calls."""
        with contextlib.suppress(RuntimeError):  # the loop has ended with the process
            self.loop.call_soon_threadsafe(act, *args)

    # In the I/O thread

    def _accept_from_now_on(self) -> None:
        self.loop.add_reader(self._socket.fileno(), self._accept)

    def _accept(self) -> None:
        try:
            sock, _ = self._socket.accept()
        except BlockingIOError:
            return
        except OSError:  # no descriptor or memory for it: those who wait come later
            self.loop.remove_reader(self._socket.fileno())
            self.loop.call_later(PAUSE_SECONDS, self._accept_from_now_on)
            return
        sock.setblocking(False)
        note_open(sock)
        while len(self._strangers) >= STRANGERS:
            oldest = next(iter(self._strangers))
            del self._strangers[oldest]
            oldest.cancel()
        task = self.loop.create_task(self._authenticate(sock))
        self._strangers[task] = None
        task.add_done_callback(lambda task: self._strangers.pop(task, None))

    async def _authenticate(self, sock: socket.socket) -> None:
        challenge = handshake.challenge()
        try:
            data = await asyncio.wait_for(self._hello(sock, challenge), HELLO_SECONDS)
            hello = handshake.read_hello(data)
            node = None if hello is None else self._nodes.get(hello.node)
            found = None if node is None or hello is None else node.admission(hello)
            # A caller that names no node is refused no sooner than one without the key.
            key = bytes(handshake.KEY_BYTES) if found is None else found[0]
            if not handshake.proves(data, challenge, key) or found is None:
                raise ConnectionError("a stranger")
            # So few bytes always fit into the empty buffer of a new connection.
            sock.send(handshake.welcome(data, challenge, key))
            found[1](sock)
        except (Exception, asyncio.CancelledError):
            sock.close()

    async def _hello(self, sock: socket.socket, challenge: bytes) -> bytes:
        await self.loop.sock_sendall(sock, challenge)
        data = b""
        while len(data) < handshake.HELLO_BYTES:
            more = await self.loop.sock_recv(sock, handshake.HELLO_BYTES - len(data))
            if not more:
                raise ConnectionError("closed")
            data += more
        return data


_here: Listener | None = None
_lock = threading.Lock()


def listener_here() -> Listener:
    """The listener of this process. Raises `UsageError` if no address can be listened at."""
    global _here
    with _lock:
        if _here is None:
            try:
                _here = Listener()
            except OSError as fault:
                raise_shortage(fault, "listen for the other ranks")
                raise UsageError(f"cannot listen for the other ranks: {fault}") from fault
        return _here


def _forget_in_child() -> None:
    """A forked child has no I/O thread."""
    global _here, _lock
    _here, _lock = None, threading.Lock()
    close_in_child()


in_child(_forget_in_child)
