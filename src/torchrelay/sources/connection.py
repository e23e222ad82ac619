"""HTTP requests to one endpoint: few headers, bounded answers, bytes straight into memory.

The standard library's client reads status and headers, and bounds their length. What it does not
bound is time: a server may trickle. So each request has an end, at which a thread cuts the
connection, whoever is reading from it.
"""

from __future__ import annotations

import http.client
import ipaddress
import socket
import ssl
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import ClassVar, NamedTuple
from urllib.parse import urlsplit

import msgspec

from torchrelay.errors import EndpointError, UsageError
from torchrelay.version import __version__

STALL_SECONDS = 10.0  # without a byte, after which a connection is given up
HEADER_SECONDS = 20.0  # in which status and headers have to be here
SLOW_RATE = 64 << 10  # bytes a second that a body has to come at
READ_BYTES = 1 << 20  # taken at once: fewer calls, and still in a cache when it is hashed
WAKE_BYTES = 1 << 18  # that have come before whoever waits for more of them is woken
TAIL_BYTES = 1 << 12  # of a body, read by the library, which then knows that it is over
ANSWER_BYTES = 1 << 20  # of an answer that is no record and no volume
RECORD_BYTES = 256 << 20
AGENT = f"torchrelay/{__version__}"
_OTHER_NAMES = (62, 64)  # X509_V_ERR_HOSTNAME_MISMATCH, X509_V_ERR_IP_ADDRESS_MISMATCH


def is_loopback(host: str) -> bool:
    """Whether a host, by its name or address, is plainly this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class Reply(NamedTuple):
    """A small answer, whole."""

    status: int
    headers: http.client.HTTPMessage
    body: bytes

    @property
    def text(self) -> str:
        """The first line of what went wrong, as far as it can be shown."""
        line = self.body[:300].decode("ascii", "replace").splitlines()
        return line[0] if line else ""


class Host:
    """An endpoint by its URL. Connections are kept and used again, by one thread each at a time.

    `OSError` where it cannot be reached or breaks off, `http.client.HTTPException` where it does
    not speak HTTP.
    """

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        context: ssl.SSLContext | None = None,
        reader: str = "",
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UsageError(f"an endpoint's URL is http://HOST:PORT, not {url!r}")
        if parts.username or parts.password or parts.query or parts.path not in ("", "/"):
            raise UsageError(
                "an endpoint's URL has a host and a port and nothing else; the token "
                "is given by token=, token_file= or TORCHRELAY_TOKEN"
            )
        self.url = f"{parts.scheme}://{parts.netloc}"
        self.host = parts.hostname
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._tls = parts.scheme == "https"
        self._may_want_tls = not self._tls  # until it has answered
        self._context = context
        self._headers = {"User-Agent": AGENT, "Accept-Encoding": "identity"}
        if token is not None:
            self._headers["Authorization"] = f"Bearer {token}"
        self._reader = reader
        if reader:
            self._headers["Torchrelay-Reader"] = reader
        self._kept: list[http.client.HTTPConnection] = []
        self._lock = threading.Lock()
        self.address = ""  # of this end, once it was connected

    @property
    def is_here(self) -> bool:
        """Whether the URL is plainly one of this machine."""
        return is_loopback(self.host)

    def get(self, path: str, *, seconds: float, limit: int = ANSWER_BYTES) -> Reply:
        return self._small("GET", path, None, seconds, limit)

    def post(self, path: str, body: bytes, *, seconds: float) -> Reply:
        return self._small("POST", path, body, seconds, ANSWER_BYTES)

    def tell_end(self, reason: str, *, seconds: float) -> None:
        """Tell the endpoint that this reader is done, or why it failed: what it read need not be
        kept for it any more. Never raises."""
        word = {"outcome": "failed" if reason else "done", "reason": reason[:300]}
        with suppress(OSError, http.client.HTTPException, EndpointError):
            self.post(f"/readers/{self._reader}", msgspec.json.encode(word), seconds=seconds)

    def _small(
        self, method: str, path: str, body: bytes | None, seconds: float, limit: int
    ) -> Reply:
        kind = {} if body is None else {"Content-Type": "application/json"}
        end = time.monotonic() + seconds
        with self._connected(seconds) as (line, cut):
            line.request(method, path, body, {**self._headers, **kind})
            answer = line.getresponse()
            length = answer.length
            if length is None and answer.status != 204:
                raise http.client.HTTPException("an answer of unknown length")
            if length is not None and length > limit:
                raise EndpointError(
                    f"{self.url}{path.partition('?')[0]} is {length} bytes, at most {limit} are "
                    "taken: it is no endpoint, or a hostile one"
                )
            data = bytearray(length or 0)
            for _ in _pieces(answer, memoryview(data), cut, end):
                pass
            return Reply(answer.status, answer.headers, bytes(data))

    def read(
        self, path: str, start: int, views: Sequence[memoryview], *, seconds: float
    ) -> Iterator[int]:
        """Fill views from bytes of a volume; yields how many have come, piece by piece."""
        stop = start + sum(map(len, views))
        wanted = {"Range": f"bytes={start}-{stop - 1}"}
        end = time.monotonic() + seconds
        with self._connected(min(seconds, HEADER_SECONDS)) as (line, cut):
            line.request("GET", path, None, {**self._headers, **wanted})
            answer = line.getresponse()
            if answer.status != 206:
                if answer.status == 200:
                    raise EndpointError(f"{self.url} does not know byte ranges")
                text = answer.read(300) if (answer.length or 0) <= ANSWER_BYTES else b""
                raise Answered(Reply(answer.status, answer.headers, text))
            told = answer.headers.get("Content-Range", "").partition("/")[0]
            if told != f"bytes {start}-{stop - 1}" or answer.length != stop - start:
                raise http.client.HTTPException(
                    f"bytes {start} to {stop} were asked for, the answer says {told[:80]!r} and "
                    f"{answer.length} bytes"
                )
            for view in views:
                yield from _pieces(answer, view, cut, end)

    @contextmanager
    def _connected(self, seconds: float) -> Iterator[tuple[http.client.HTTPConnection, Cutoff]]:
        """Within: a connection for one request, which is cut after so many seconds. It is kept
        where all of the answer was read."""
        with self._lock:
            line = self._kept.pop() if self._kept else None
        limit = min(seconds, STALL_SECONDS)
        if line is None:
            line = self._connect(limit)
        else:
            assert line.sock is not None
            line.sock.settimeout(limit)
        cut = Cutoff(line.sock, seconds)
        try:
            yield line, cut
        except BaseException as fault:
            cut.over()
            line.close()
            cut_off = (OSError, http.client.HTTPException, ValueError) if cut.done else TimeoutError
            if isinstance(fault, cut_off):  # by this end's timeout, or the socket's
                raise TimeoutError(f"{self.url} took too long to answer") from fault
            if isinstance(fault, http.client.RemoteDisconnected) and self._may_want_tls:
                text = f"{self.url} closed the connection without an answer: is it https://?"
                raise http.client.RemoteDisconnected(text) from fault
            raise
        cut.over()
        if cut.done:
            line.close()
            raise TimeoutError(f"{self.url} took too long to answer")
        self._may_want_tls = False
        if line.sock is not None:  # else the other end wanted it closed after its answer
            with self._lock:
                self._kept.append(line)

    def _connect(self, limit: float) -> http.client.HTTPConnection:
        if self._tls:
            line: http.client.HTTPConnection = http.client.HTTPSConnection(
                self.host, self._port, timeout=limit, context=self._context
            )
        else:
            line = http.client.HTTPConnection(self.host, self._port, timeout=limit)
        line.auto_open = 0  # a connection that the other end closed is noticed, not replaced
        try:
            line.connect()
        except ssl.SSLCertVerificationError as fault:
            line.close()
            advice = (
                "Use an address that the certificate names, or serve with one that names this"
                if fault.verify_code in _OTHER_NAMES
                else "Give cafile= with the certificate that signed it"
            )
            why = fault.verify_message.rstrip(".")
            raise EndpointError(
                f"the certificate of {self.url} does not hold: {why}. {advice}"
            ) from None
        except ssl.SSLError as fault:
            line.close()
            if fault.reason != "WRONG_VERSION_NUMBER":
                raise
            raise EndpointError(
                f"what is at {self.url} does not speak TLS: is it http://?"
            ) from None
        except BaseException:
            line.close()
            raise
        assert line.sock is not None
        self.address = line.sock.getsockname()[0]
        return line

    def close(self) -> None:
        with self._lock:
            kept, self._kept = self._kept, []
        for line in kept:
            line.close()


class Answered(Exception):
    """An endpoint answered with something else than the bytes that were asked for."""

    def __init__(self, reply: Reply) -> None:
        super().__init__(f"{reply.status}: {reply.text}")
        self.reply = reply


class Cutoff:
    """Ends a connection when its time is over: whoever reads from it then gets the end."""

    def __init__(self, sock: socket.socket | None, seconds: float) -> None:
        self._sock = sock
        self.done = False
        self._wakes = 1
        self._ahead = True  # whether the library may have read on, past the headers
        self._end = time.monotonic() + seconds
        _Cutter.add(self)

    def at(self, end: float) -> None:
        """Put it off until then."""
        self._end = end

    def fill(self, answer: http.client.HTTPResponse, view: memoryview) -> int:
        """Bytes of a body that have come to a view. A large one is filled by one call that waits in
        the kernel: the library would be woken for every packet."""
        sock, left = self._sock, answer.length or 0
        view = view[: max(left - TAIL_BYTES, 0)] or view  # the library reads the end by itself
        if sock is None or isinstance(sock, ssl.SSLSocket) or left <= TAIL_BYTES:
            self._wake_at(1)
            return answer.readinto(view)
        if self._ahead:
            some = view[: len(answer.fp.peek(1))]
            self._ahead = len(some) == len(view)
            return answer.readinto(some)
        sock.settimeout(None)  # it is cut when its time is over
        self._wake_at(min(WAKE_BYTES, left - len(view)))  # so many come behind the view
        done = sock.recv_into(view, 0, socket.MSG_WAITALL)
        answer.length = left - done
        return done

    def _wake_at(self, nbytes: int) -> None:
        """Have the kernel wake a reader when so many bytes have come, not for every packet."""
        if self._sock is not None and self._wakes != nbytes and sys.platform == "linux":
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, nbytes)
            self._wakes = nbytes

    def over(self) -> None:
        """The request is over: nothing is cut."""
        _Cutter.remove(self)

    def due(self, now: float) -> bool:
        if now < self._end:
            return False
        self.done = True
        if self._sock is not None:
            with suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)
        return True


class _Cutter:
    """One thread for all connections of the process, while there are any."""

    _lock = threading.Lock()
    _cuts: ClassVar[set[Cutoff]] = set()
    _running = False

    @classmethod
    def add(cls, cut: Cutoff) -> None:
        with cls._lock:
            cls._cuts.add(cut)
            if not cls._running:
                cls._running = True
                threading.Thread(target=cls._run, name="torchrelay-cut", daemon=True).start()

    @classmethod
    def remove(cls, cut: Cutoff) -> None:
        with cls._lock:
            cls._cuts.discard(cut)

    @classmethod
    def _run(cls) -> None:
        idle = 0
        while True:
            time.sleep(0.1)
            now = time.monotonic()
            with cls._lock:
                for cut in [cut for cut in cls._cuts if cut.due(now)]:
                    cls._cuts.discard(cut)
                idle = 0 if cls._cuts else idle + 1
                if idle > 100:
                    cls._running = False
                    return


def _pieces(
    answer: http.client.HTTPResponse, view: memoryview, cut: Cutoff, end: float
) -> Iterator[int]:
    """Fill a view; yields bytes as they have come. A body that trickles is cut."""
    at = 0
    while at < len(view):
        piece = view[at : at + READ_BYTES]
        cut.at(min(end, time.monotonic() + STALL_SECONDS + len(piece) / SLOW_RATE))
        done = cut.fill(answer, piece)
        if not done:
            raise ConnectionResetError("the connection broke off")
        at += done
        yield done
