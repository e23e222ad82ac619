"""JSON to and from a server of another project, by the standard library's HTTP client.

It takes what such servers and the proxies in front of them send: chunked bodies, headers that are
given twice, URLs with a path. Each request has a connection of its own and a deadline.
"""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import msgspec

from torchrelay.errors import EndpointError, UsageError
from torchrelay.version import __version__

ANSWER_BYTES = 1 << 20
_AGENT = f"torchrelay/{__version__}"


class JsonReply(NamedTuple):
    """A status, and the JSON object of the body; empty where that is something else."""

    status: int
    answer: dict[str, Any]
    text: str  # the first line of the body, as far as it can be shown


class JsonServer:
    """A server by its URL, which may have a path. `key` is sent as a bearer token; `context`: whose
    certificates are trusted, by default those that the system trusts."""

    def __init__(
        self, url: str, *, key: str | None = None, context: ssl.SSLContext | None = None
    ) -> None:
        try:
            parts = urlsplit(url)
            port = parts.port
            path = parts.path.rstrip("/")
        except (ValueError, TypeError, AttributeError):
            raise UsageError(f"a server's URL is http://HOST:PORT/PATH, not {url!r}") from None
        if parts.username is not None or parts.query or parts.fragment:
            # A text that may hold a key is not repeated.
            raise UsageError("a server's URL has a host, a port and a path: give keys by api_key=")
        plain = url.isascii() and url.isprintable() and " " not in url
        if parts.scheme not in ("http", "https") or not parts.hostname or not plain:
            raise UsageError(f"a server's URL is http://HOST:PORT/PATH, not {url!r}")
        if key is not None and not (key and key.isascii() and key.isprintable()):
            raise UsageError("a server's key has printable ASCII characters")
        self._host, self._port, self._path = parts.hostname, port, path
        self.url = f"{parts.scheme}://{parts.netloc}{path}"
        self._tls = parts.scheme == "https"
        self._context = context
        self._headers = {"User-Agent": _AGENT, "Accept": "application/json", "Connection": "close"}
        if key is not None:
            self._headers["Authorization"] = f"Bearer {key}"

    def post(self, path: str, body: dict[str, Any], *, seconds: float) -> JsonReply:
        """The answer to a request. `TimeoutError` where it is not here in time, `OSError` where the
        server cannot be reached, `EndpointError` where it does not speak HTTP."""
        headers = {**self._headers, "Content-Type": "application/json"}
        try:
            with self._connected(seconds) as line:
                line.request("POST", self._path + path, msgspec.json.encode(body), headers)
                answer = line.getresponse()
                data = answer.read(ANSWER_BYTES + 1)
                status, lacking = answer.status, answer.length or 0
        except (HTTPException, ValueError) as fault:
            if isinstance(fault, OSError):  # it closed the connection
                raise
            why = str(fault) or type(fault).__name__
            raise EndpointError(
                f"{self.url} does not answer by HTTP: {ascii(why)[:300]}"
            ) from fault
        if len(data) > ANSWER_BYTES:
            raise EndpointError(f"{self.url} answers with more than {ANSWER_BYTES} bytes")
        if lacking:
            raise EndpointError(f"{self.url} does not answer by HTTP: {lacking} bytes are missing")
        found: Any = None
        with suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            found = msgspec.json.decode(data)
        first = data[:300].decode("ascii", "replace").splitlines()[:1]
        text = first[0] if first and first[0].isprintable() else ""
        return JsonReply(status, found if isinstance(found, dict) else {}, text)

    @contextmanager
    def _connected(self, seconds: float) -> Iterator[HTTPConnection]:
        """Within: a connection for one request, which is cut at its deadline."""
        line: HTTPConnection
        if self._tls:
            context = self._context or ssl.create_default_context()
            line = HTTPSConnection(self._host, self._port, timeout=seconds, context=context)
        else:
            line = HTTPConnection(self._host, self._port, timeout=seconds)
        end = time.monotonic() + seconds
        with closing(line):
            line.connect()
            sock, overdue = line.sock, threading.Event()

            def cut() -> None:
                overdue.set()
                with suppress(OSError):
                    socket.socket.shutdown(sock, socket.SHUT_RDWR)

            # The client's own timeout is of a single read: a server may send a byte at a time.
            timer = threading.Timer(max(end - time.monotonic(), 0.0), cut)
            timer.daemon = True
            timer.start()
            try:
                yield line
            except (OSError, HTTPException):
                if not overdue.is_set():
                    raise
            finally:
                timer.cancel()
            if overdue.is_set():  # also where an answer of unknown length ends by that
                raise TimeoutError(f"no answer in {seconds:g} s")
