"""The HTTP server: connections within limits, requests in, answers out.

Each connection has a thread, and each of its waits has an end. Clients cannot keep others out: if
all connections are taken, a new one replaces one that was not admitted, is idle, or takes nothing.
One that waits for news is answered without them. Nothing that a client sends is ever printed.
"""

from __future__ import annotations

import hmac
import logging
import os
import select
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cached_property
from http import HTTPStatus
from typing import BinaryIO, NamedTuple

import msgspec

from torchrelay.endpoint.server.http.requests import BODY_BYTES, HEAD_BYTES, Refusal, Request
from torchrelay.endpoint.server.http.sockets import is_own_user, is_plain_host
from torchrelay.sources.http_head import DIGEST, END, digest_header, is_changed

logger = logging.getLogger("torchrelay")

IDLE_SECONDS = 75.0  # that a connection may stay open between requests
STUCK_SECONDS = 2.0  # without a piece, after which another client may take its place
WAIT_SECONDS = 2.0  # that a client waits for news before it may have to make room
PIECE_BYTES = 2 << 20  # for which a reader has a limited time
COPY_BYTES = 1 << 18  # copied and sent at once where the kernel cannot send from memory itself
FRESH = {"Cache-Control": "no-store"}
COUNTED = {401: "token", 416: "range", 429: "limit"}  # refusals in the metrics, by status
_WITHOUT_BODY = (204, 304)  # statuses whose answers have none, so that its length is not sent
_NOW = struct.pack("ii", 1, 0)  # SO_LINGER: what the kernel has not delivered is thrown away


class Response(NamedTuple):
    """A small answer."""

    status: int = 200
    body: bytes = b""
    kind: str = "text/plain; charset=utf-8"
    headers: Mapping[str, str] = {}

    @classmethod
    def json(cls, facts: object) -> Response:
        return cls(200, msgspec.json.encode(facts), "application/json", FRESH)


class Span(NamedTuple):
    """Bytes of a file of memory, to be sent from where they are."""

    file: BinaryIO
    view: memoryview
    start: int
    nbytes: int


class SlowReader(TimeoutError):
    """A client takes too long to take what it asked for."""


def _no_admission(why: str) -> Refusal:
    return Refusal(401, why, {"WWW-Authenticate": "Bearer"})


BodyLimit = Callable[[Request, "HttpConnection"], int]


class HttpConnection:
    """A connection, as those who answer its requests see it."""

    def __init__(self, sock: socket.socket, stall: float) -> None:
        self._sock, self._stall = sock, stall
        self._ahead = bytearray()  # bytes of the next request
        self.remote = str(sock.getpeername()[0])
        self.since = time.monotonic()  # that it waits, or has taken nothing
        self.admitted = False  # whether it has asked for something that it may have
        self.busy = False
        self.sending = False  # whether it is the client that is waited for
        self.gives_way = False  # whether its wait for news is to end, and the connection with it
        self._wake: Callable[[], None] | None = None  # of a client that waits for news
        self._cut = False
        self.ended = False  # whether an answer of unknown length was sent: no other can follow

    @cached_property
    def is_own(self) -> bool:
        """Whether the other end is this user's. The kernel is asked once: its table is long."""
        return is_own_user(self._sock)

    def admit(self, request: Request, token: str | None, open_to_all: Container[str]) -> None:
        """`Refusal` unless the client has the token or, without one, is this user here."""
        if request.path in open_to_all:
            return
        headers = request.headers
        if token is not None:
            kind, _, text = headers.get("authorization", "").partition(" ")
            received = text.strip().encode("utf-8", "surrogateescape")
            if not hmac.compare_digest(received, token.encode()) or kind.lower() != "bearer":
                raise _no_admission("this endpoint needs its token: Authorization: Bearer TOKEN")
        elif not is_plain_host(headers.get("host", "")):
            raise _no_admission("without a token, ask by an address or localhost, not by a name")
        elif not self.is_own:
            raise _no_admission("without a token, only the user who serves may read: give a token")
        self.admitted = True

    def start(self, context: ssl.SSLContext | None) -> None:
        self._sock.settimeout(self._stall)
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if context is None:
            return
        # From here on `cut` acts on the socket of TLS: the one before has no descriptor any more.
        self._sock = sock = context.wrap_socket(
            self._sock, server_side=True, do_handshake_on_connect=False
        )
        if self._cut:  # meanwhile
            raise ConnectionResetError("another client took its place")
        sock.do_handshake()  # within `stall` seconds altogether

    def cut(self) -> None:
        """End the connection at once, from any thread, whatever was sent and not taken."""
        self._cut = True
        with suppress(OSError):
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NOW)
            # The method of a TLS socket would first take its encryption away: a thread that is
            # sending would continue in clear text until the system call.
            socket.socket.shutdown(self._sock, socket.SHUT_RDWR)

    def close(self) -> None:
        self._sock.close()

    @contextmanager
    def waiting(self, wake: Callable[[], None]) -> Iterator[None]:
        """Within: the client waits for news. If another needs its place, `gives_way` is set and
        `wake` called, so that the wait ends."""
        self._wake = wake
        try:
            yield
        finally:
            self._wake = None

    @property
    def _is_served(self) -> bool:
        """Whether the client has asked for something, and takes what it is sent."""
        is_stuck = self.sending and time.monotonic() - self.since >= STUCK_SECONDS
        return self.admitted and self.busy and not is_stuck

    @property
    def may_go(self) -> bool:
        """Whether another may have its place. A client that waits for news has it for a while; one
        that waits for work to be done keeps it."""
        has_waited = time.monotonic() - self.since >= WAIT_SECONDS
        return not self._is_served or (self._wake is not None and has_waited)

    def make_room(self) -> None:
        """Lose the place: at once, or with an answer where the client waits for news."""
        self.gives_way = True
        wake = self._wake
        if not self._is_served:
            self.cut()
        elif wake is not None:
            wake()

    def request(self, idle: float, body_limit: BodyLimit) -> Request | None:
        """The next request, which begins within `idle` seconds; None where the client closes."""
        if not self._ahead and not self._receive(time.monotonic() + idle):
            return None
        end = time.monotonic() + self._stall
        if not self._ahead[:1].isupper():  # a client that begins with TLS gets an answer
            raise Refusal(400, "not a request of HTTP/1.1")
        while (at := self._ahead.find(END)) < 0 and len(self._ahead) <= HEAD_BYTES:
            if not self._receive(end):
                return None
        if not 0 <= at <= HEAD_BYTES:
            raise Refusal(431, f"a request has at most {HEAD_BYTES} bytes of headers")
        found = Request.parse(bytes(self._ahead[:at]))
        del self._ahead[: at + len(END)]
        if found.length > (most := body_limit(found, self)):
            raise Refusal(413, f"a body has at most {most} bytes")
        while len(self._ahead) < found.length:
            if not self._receive(end):
                return None
        body = bytes(self._ahead[: found.length])
        del self._ahead[: found.length]
        if is_changed(found.headers, body):
            raise Refusal(400, "the body changed on its way: it has another digest than was sent")
        return found._replace(body=body)

    def _receive(self, end: float) -> bool:
        self._sock.settimeout(max(end - time.monotonic(), 0.001))
        data = self._sock.recv(HEAD_BYTES)
        self._ahead += data
        return bool(data)

    def send_head(self, status: int, length: int | None, headers: Mapping[str, str]) -> None:
        """The head of an answer. One of unknown length (None) ends with the connection."""
        self.ended = length is None
        lines = [f"HTTP/1.1 {status} {HTTPStatus(status).phrase}"]
        if length is None:
            lines.append("Connection: close")
        elif status not in _WITHOUT_BODY:
            lines.append(f"Content-Length: {length}")
        lines += [f"{name}: {value}" for name, value in headers.items()]
        self.send("\r\n".join([*lines, "\r\n"]).encode("latin-1"))

    def send(self, data: bytes | memoryview) -> None:
        """Send bytes; `SlowReader` where the client does not take them in time."""
        self._sock.settimeout(self._stall)
        with self._to_client():
            try:
                self._sock.sendall(data)
            except TimeoutError:
                raise SlowReader("the client takes nothing") from None

    @contextmanager
    def _to_client(self) -> Iterator[None]:
        """Within: it is the client's turn to take bytes."""
        self.since, self.sending = time.monotonic(), True
        try:
            yield
        finally:
            self.sending = False

    def stream(
        self, pieces: Iterable[bytes | memoryview | Span], moved: Callable[[int], None]
    ) -> None:
        """Send pieces; `moved` is called with bytes as they go."""
        for piece in pieces:
            if not isinstance(piece, Span):
                self.send(piece)
                self.since = time.monotonic()
                moved(len(piece))
                continue
            direct = not isinstance(self._sock, ssl.SSLSocket)
            size = PIECE_BYTES if direct else COPY_BYTES
            stop = piece.start + piece.nbytes
            for at in range(piece.start, stop, size):
                part = piece._replace(start=at, nbytes=min(size, stop - at))
                if direct:
                    with self._to_client():
                        self._send_file(part)
                else:
                    self.send(bytes(part.view[at : at + part.nbytes]))
                self.since = time.monotonic()
                moved(part.nbytes)

    def _send_file(self, span: Span) -> None:
        """The kernel sends the pages of memory themselves."""
        ready = select.poll()
        ready.register(self._sock, select.POLLOUT)
        self._sock.settimeout(self._stall)
        end = time.monotonic() + self._stall
        at, stop = span.start, span.start + span.nbytes
        while at < stop:
            try:
                done = os.sendfile(self._sock.fileno(), span.file.fileno(), at, stop - at)
            except BlockingIOError:
                left = end - time.monotonic()
                if left <= 0 or not ready.poll(1000 * left):
                    raise SlowReader("the client takes nothing") from None
                continue
            if not done:
                raise ConnectionResetError("the memory has ended")
            at += done


Handler = Callable[[Request, HttpConnection], Response | None]


class HttpServer:
    """Serves at most `connections` at a time. Each has `stall` seconds for a request, and for each
    piece that it is sent. `body_limit`: the most bytes of the body that a request with this head
    may have; it may refuse the request, too. `refused`: how many were, by reason."""

    def __init__(
        self,
        answer: Handler,
        *,
        connections: int,
        stall: float,
        context: ssl.SSLContext | None,
        body_limit: BodyLimit = lambda request, connection: BODY_BYTES,
    ) -> None:
        self._answer, self._body_limit = answer, body_limit
        self._most, self._stall, self._context = connections, stall, context
        self._lock = threading.Lock()
        self._open: set[HttpConnection] = set()
        self.refused = {"token": 0, "limit": 0, "slow": 0, "range": 0}

    @property
    def count(self) -> int:
        return len(self._open)

    def serve(self, sock: socket.socket) -> None:
        """Answer the requests of one connection, until it is over."""
        connection = HttpConnection(sock, self._stall)
        other: HttpConnection | None = None
        with self._lock:
            if len(self._open) >= self._most:
                other = self._least_claim()
                if other is None:
                    self.refused["limit"] += 1
                    return
                self._open.discard(other)
            self._open.add(connection)
        if other is not None:
            other.make_room()
        try:
            connection.start(self._context)
            idle = self._stall
            while self._serve_one(connection, idle):
                idle = IDLE_SECONDS
                connection.busy, connection.since = False, time.monotonic()
        except TimeoutError:
            self._count("slow")
            connection.cut()
        except (OSError, EOFError):
            raise
        except Exception as fault:  # its text may be the client's
            logger.error("a request failed by %s", type(fault).__name__)
            connection.cut()
        finally:
            with self._lock:
                self._open.discard(connection)
            connection.close()

    def _count(self, why: str) -> None:
        with self._lock:  # each connection has a thread of its own
            self.refused[why] += 1

    def _serve_one(self, connection: HttpConnection, idle: float) -> bool:
        """Whether the connection continues after the next request."""
        request: Request | None = None
        try:
            request = connection.request(idle, self._body_limit)
            if request is None:
                return False
            connection.busy, connection.since = True, time.monotonic()
            answer = self._answer(request, connection)
            keeps = request.keeps and not connection.ended and not connection.gives_way
        except Refusal as refused:
            if refused.status in COUNTED:
                self._count(COUNTED[refused.status])
            text = f"{refused}\n".encode()
            answer = Response(refused.status, text, headers=refused.headers)
            # The connection of a client that was never admitted is closed.
            keeps = request is not None and request.keeps and connection.admitted
        if answer is not None:
            headers = {"Content-Type": answer.kind, **answer.headers}
            if answer.body:
                headers[DIGEST] = digest_header(answer.body)
            if not keeps:
                headers["Connection"] = "close"
            connection.send_head(answer.status, len(answer.body), headers)
            if request is None or request.method != "HEAD":
                connection.send(answer.body)
        return keeps

    def _least_claim(self) -> HttpConnection | None:
        """The connection that has the least claim to its place, if another may have it."""
        able = [one for one in self._open if one.may_go]
        return min(able, key=lambda one: (one.admitted, one.busy, one.since), default=None)

    def close(self) -> None:
        """Cut all connections."""
        with self._lock:
            for connection in self._open:
                connection.cut()
