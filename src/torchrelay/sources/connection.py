"""HTTP requests to one server: bounded answers, bytes straight into memory, an end to every wait.

The standard library's client bounds the length of headers but not the time: a server may trickle.
Here each read has the time that its request has left. So no thread cuts connections, and a child of
a fork has the same deadlines.
"""

from __future__ import annotations

import math
import select
import socket
import ssl
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple

import msgspec

from torchrelay.errors import EndpointError
from torchrelay.sources.http_head import (
    DIGEST,
    END,
    Head,
    ServerUrl,
    digest_header,
    is_changed,
    is_loopback,
    parse_head,
)
from torchrelay.version import __version__

STALL_SECONDS = 10.0  # without progress, after which a connection is given up
HEADER_SECONDS = 20.0  # in which the head of an answer with bytes of a volume has to be here
SLOW_RATE = 64 << 10  # bytes a second that a body has to come at
READ_BYTES = 1 << 20  # taken at once: fewer calls, and still in a cache when it is hashed
WAKE_BYTES = 1 << 18  # that have come before a reader who waits for more of them is woken
HEAD_BYTES = 1 << 16
ANSWER_BYTES = 1 << 20  # of an answer that is neither a record nor a volume
RECORD_BYTES = 256 << 20
AGENT = f"torchrelay/{__version__}"
_OTHER_NAMES = (62, 64)  # X509_V_ERR_HOSTNAME_MISMATCH, X509_V_ERR_IP_ADDRESS_MISMATCH


class Reply(NamedTuple):
    """A small answer, whole."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def text(self) -> str:
        """The first line of what went wrong, as far as it can be shown."""
        lines = self.body[:300].decode("ascii", "replace").splitlines()
        return lines[0] if lines and lines[0].isprintable() else ""


class Answered(Exception):
    """A server answered with something else than the bytes that were asked for."""

    def __init__(self, reply: Reply) -> None:
        super().__init__(f"{reply.status}: {reply.text}")
        self.reply = reply


class Host:
    """A server by its URL. Connections are reused, by one thread each at a time.

    Raises `OSError` where the server cannot be reached or breaks off, and `EndpointError` where it
    does not speak HTTP as a server of this library does.
    """

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        context: ssl.SSLContext | None = None,
        reader: str = "",
    ) -> None:
        self._where = ServerUrl.parse(url)
        self.url = self._where.url
        self.tls = self._where.scheme == "https"
        self._may_want_tls = not self.tls  # until it has answered
        self._context, self._reader = context, reader
        headers = {"Host": self._where.place, "User-Agent": AGENT, "Accept-Encoding": "identity"}
        if token is not None:
            headers["Authorization"] = f"Bearer {token}"
        if reader:
            headers["Torchrelay-Reader"] = reader
        self._headers = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        self._idle: list[HostConnection] = []
        self._lock = threading.Lock()
        self.address = ""  # of this end, once it was connected

    @property
    def is_here(self) -> bool:
        """Whether the URL is plainly one of this machine."""
        return is_loopback(self._where.host)

    def get(self, path: str, *, seconds: float, limit: int = ANSWER_BYTES) -> Reply:
        """A small answer. The server may be silent for all of the seconds, as in a long poll."""
        return self._small(f"GET {path}", b"", seconds, limit)

    def post(self, path: str, body: bytes, *, seconds: float) -> Reply:
        return self._small(f"POST {path}", body, seconds, ANSWER_BYTES)

    def report_end(self, reason: str, nbytes: int, *, seconds: float) -> None:
        """Tell the server that this reader has finished, or why it failed: the step need not be
        kept for it. `nbytes`: how much it took of mapped memory. Never raises."""
        outcome = "failed" if reason else "done"
        body = {"outcome": outcome, "reason": reason[:300], "bytes": nbytes}
        with suppress(OSError, EndpointError):
            self.post(f"/readers/{self._reader}", msgspec.json.encode(body), seconds=seconds)

    def _small(self, request: str, body: bytes, seconds: float, limit: int) -> Reply:
        more = _body_headers("application/json", body) if body else ""
        with self._connected(seconds) as connection:
            head = connection.ask(self._request(request, more) + body)
            length = 0 if head.status == 204 else head.length
            if length is None:
                raise ValueError("an answer of unknown length")
            if length > limit:
                raise ValueError(f"{length} bytes, where at most {limit} are expected")
            answer = connection.read(length)
            if is_changed(head.headers, answer):
                raise ConnectionResetError(f"the answer of {self.url} changed on its way")
            return Reply(head.status, head.headers, answer)

    def read(
        self, path: str, start: int, views: Sequence[memoryview], *, seconds: float
    ) -> Iterator[memoryview]:
        """Fill views from bytes of a volume; yields the parts that have come."""
        stop = start + sum(map(len, views))
        wanted = f"bytes {start}-{stop - 1}"
        with self._connected(seconds) as connection:
            request = self._request(f"GET {path}", f"Range: {wanted.replace(' ', '=')}\r\n")
            head = connection.ask(request, HEADER_SECONDS)
            if head.status == 200:
                raise ValueError("it ignores byte ranges")
            connection.expect(206, head)
            listed = head.headers.get("content-range", "").partition("/")[0]
            if listed != wanted or head.length != stop - start:
                raise ValueError(f"{wanted} were asked for, the answer has {listed[:80]!r}")
            for view in views:
                yield from connection.fill(view)

    @contextmanager
    def stream(self, path: str, body: bytes, *, seconds: float) -> Iterator[HostConnection]:
        """Within: an answer of unknown length to a POST of MessagePack. `Answered` for any other
        status than 200."""
        with self._connected(seconds) as connection:
            more = _body_headers("application/msgpack", body)
            head = connection.ask(self._request(f"POST {path}", more) + body, HEADER_SECONDS)
            connection.expect(200, head)
            connection.keeps = False
            yield connection

    def _request(self, first: str, more: str) -> bytes:
        return f"{first} HTTP/1.1\r\n{self._headers}{more}\r\n".encode("latin-1")

    @contextmanager
    def _connected(self, seconds: float) -> Iterator[HostConnection]:
        """Within: a connection for one request. It is reused where all of the answer was read."""
        end = time.monotonic() + seconds
        connection, reusable = self._take() or self._connect(end), False
        connection.end = end
        try:
            yield connection
            self._may_want_tls = False
            reusable = connection.keeps and not connection.left
        except TimeoutError as fault:
            raise TimeoutError(f"{self.url} took too long to answer") from fault
        except ValueError as fault:
            raise EndpointError(f"{self.url} does not answer as an endpoint: {fault}") from fault
        except _NoAnswer as fault:
            hint = ": is it https://?" if self._may_want_tls else ""
            raise ConnectionResetError(f"{self.url} closed the connection{hint}") from fault
        finally:
            if reusable:
                with self._lock:
                    self._idle.append(connection)
            else:
                connection.close()

    def _take(self) -> HostConnection | None:
        """An idle connection that the server has not closed meanwhile."""
        while True:
            with self._lock:
                connection = self._idle.pop() if self._idle else None
            if connection is None or not connection.is_closed:
                return connection
            connection.close()

    def _connect(self, end: float) -> HostConnection:
        seconds = max(min(end - time.monotonic(), STALL_SECONDS), 0.01)
        sock = socket.create_connection((self._where.host, self._where.port), timeout=seconds)
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self.tls:
                context = self._context or ssl.create_default_context()
                sock = context.wrap_socket(sock, server_hostname=self._where.host)
        except BaseException as fault:
            sock.close()
            if isinstance(fault, ssl.SSLError):
                raise self._tls_error(fault) from None
            raise
        self.address = sock.getsockname()[0]
        return HostConnection(sock)

    def _tls_error(self, fault: ssl.SSLError) -> Exception:
        if isinstance(fault, ssl.SSLCertVerificationError):
            advice = (
                "use an address that the certificate names, or serve with one that names this"
                if fault.verify_code in _OTHER_NAMES
                else "give Access(cafile=) the certificate of the authority that signed it"
            )
            why = fault.verify_message.rstrip(".")
            text = f"the certificate of {self.url} cannot be verified ({why}): {advice}"
            return EndpointError(text)
        if fault.reason == "WRONG_VERSION_NUMBER":
            return EndpointError(f"{self.url} does not speak TLS: is it http://?")
        return fault

    def close(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()


def _body_headers(kind: str, body: bytes) -> str:
    digest = f"{DIGEST}: {digest_header(body)}"
    return f"Content-Type: {kind}\r\nContent-Length: {len(body)}\r\n{digest}\r\n"


class _NoAnswer(ConnectionResetError):
    """The server closed the connection before the first byte of an answer."""


class HostConnection:
    """One connection: requests go out, and answers are read, each by its `end`. `OSError` where an
    answer breaks off or trickles."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._ahead = bytearray()  # bytes that came together with the head
        self._wakes = 1
        self.end = 0.0  # of the request under way
        self.left = 0  # bytes of the body that were not read yet
        self.nbytes = 0  # that were read as a whole
        self.keeps = True  # whether the server takes another request

    @property
    def is_closed(self) -> bool:
        """Of an idle connection: whether the server has closed it."""
        found = select.poll()
        found.register(self._sock, select.POLLIN)
        return bool(found.poll(0))

    def ask(self, request: bytes, seconds: float = math.inf) -> Head:
        """Send a request; the head of its answer, which has to be here within that long."""
        end = min(self.end, time.monotonic() + seconds)
        self._sock.settimeout(_left(end))
        self._sock.sendall(request)
        self._wake_at(1)
        head = self._head(end)
        while head.status < 200:
            head = self._head(end)
        self.left = 0 if head.status == 204 else head.length or 0
        self.keeps = "close" not in head.headers.get("connection", "").lower()
        return head

    def _head(self, end: float) -> Head:
        data = self._ahead
        while (at := data.find(END)) < 0:
            if len(data) > HEAD_BYTES:
                raise ValueError(f"its headers are longer than {HEAD_BYTES} bytes")
            self._sock.settimeout(_left(end))
            some = b""
            with suppress(ConnectionError):
                some = self._sock.recv(HEAD_BYTES)
            if not some:
                raise ConnectionResetError("the connection broke off") if data else _NoAnswer
            data += some
        self._ahead = data[at + len(END) :]
        return parse_head(bytes(data[:at]))

    def expect(self, status: int, head: Head) -> None:
        """`Answered` for an answer with another status."""
        if head.status != status:
            text = self.read(min(head.length or 0, 300))
            raise Answered(Reply(head.status, head.headers, text))

    def read(self, nbytes: int) -> bytes:
        data = bytearray(nbytes)
        self.read_into(memoryview(data))
        return bytes(data)

    def read_into(self, view: memoryview) -> None:
        """Fill a view from the body, also from one of unknown length."""
        self.left = max(self.left, len(view))
        for part in self.fill(view):
            self.nbytes += len(part)

    def fill(self, view: memoryview) -> Iterator[memoryview]:
        """Fill a view from the body; yields its parts as they have come. `TimeoutError` for a body
        that trickles."""
        while len(view):
            piece = view[:READ_BYTES]
            limit = min(self.end, time.monotonic() + STALL_SECONDS + len(piece) / SLOW_RATE)
            while len(piece):
                done = self._some(piece, limit)
                if not done:
                    raise ConnectionResetError("the connection broke off")
                self.left -= done
                part, piece, view = piece[:done], piece[done:], view[done:]
                yield part

    def _some(self, view: memoryview, end: float) -> int:
        """Bytes that have come to a view."""
        if self._ahead:
            done = min(len(self._ahead), len(view))
            view[:done] = self._ahead[:done]
            del self._ahead[:done]
            return done
        if not isinstance(self._sock, ssl.SSLSocket):
            self._wake_at(min(WAKE_BYTES, len(view)))
        self._sock.settimeout(_left(end))
        return self._sock.recv_into(view)

    def _wake_at(self, nbytes: int) -> None:
        """Have the kernel wake a reader when that many bytes have come: one that is woken for every
        packet takes twice as long."""
        if self._wakes != nbytes and sys.platform == "linux":
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, nbytes)
            self._wakes = nbytes

    def close(self) -> None:
        self._sock.close()


def _left(end: float) -> float:
    left = end - time.monotonic()
    if left <= 0:
        raise TimeoutError("the time is over")
    return max(left, 0.001)
