"""What a puller serves of a step while the rest arrives, on threads of its own process.

A process with the server of an endpoint takes half a second of a processor to start. Where many
pull at once that is longer than their share of the bytes takes. Few requests are answered here, so
the standard library's server does. Each connection has a thread, which waits in `sendfile`.
"""

from __future__ import annotations

import os
import re
import socket
import socketserver
import ssl
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from http.server import BaseHTTPRequestHandler
from typing import Any, NamedTuple, Protocol
from urllib.parse import parse_qs, unquote, urlsplit

import msgspec

from torchrelay.endpoint.admission import Refusal, is_own_user, refusal
from torchrelay.endpoint.seed_word import read_seed_word
from torchrelay.record.checkpoint.schema import DataFile
from torchrelay.sources.connection import AGENT, SLOW_RATE, STALL_SECONDS, Cutoff

CONNECTIONS = 256
KEPT_SECONDS = 75.0  # that a connection may stay open between requests
PIECE_BYTES = 1 << 20  # sent at once; after it the rate is looked at
BODY_BYTES = 4096  # of a request
WAIT_SECONDS = 2.0  # at most, that a request waits for what is on its way
END_SECONDS = 5.0
_SECONDS = re.compile(r"\d(\.\d{1,3})?")
_RANGE = re.compile(r"bytes=(\d{1,19})-(\d{1,19})?")


class SeedMemory(Protocol):
    """Where a seed has its volumes."""

    @property
    def fd(self) -> int: ...
    def view(self, name: str, start: int, stop: int) -> memoryview: ...
    def start_of(self, name: str) -> int:
        """Where a volume lies in the file of `fd`."""

    def marks(self) -> bytes:
        """A byte for each chunk of all volumes: whether it is here."""

    def wait(self, name: str, start: int, stop: int, seconds: float) -> bool:
        """Whether every chunk of a range is here, after so long at most where it is on its way."""

    def meet(self, url: str) -> list[str]:
        """Another one fetches this step; who else is known to."""


class SeededStep(NamedTuple):
    """A step that a seed serves, as far as it has it."""

    step: int
    snapshot: str
    record: bytes
    files: Sequence[DataFile]

    @property
    def etag(self) -> str:
        return f'"{self.step}-{self.snapshot}"'


class SeedServer(socketserver.ThreadingMixIn, socketserver.TCPServer):
    """Serves one step from `memory` until `close`."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(
        self,
        host: str,
        token: str | None,
        memory: SeedMemory,
        shown: SeededStep,
        context: ssl.SSLContext | None = None,
    ) -> None:
        self.token, self.memory, self.shown, self.context = token, memory, shown, context
        self._lines: set[socket.socket] = set()
        self._idle = threading.Condition()
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, 0), _Requests)
        named = f"[{host}]" if ":" in host else host
        self.url = f"http{'s' if context else ''}://{named}:{self.server_address[1]}"
        threading.Thread(target=self.serve_forever, name="torchrelay-seed", daemon=True).start()

    def get_request(self) -> tuple[socket.socket, Any]:
        line, address = super().get_request()
        if self.context is not None:
            line = self.context.wrap_socket(line, server_side=True, do_handshake_on_connect=False)
        return line, address

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._idle:
            if len(self._lines) >= CONNECTIONS:
                request.close()
                return
            self._lines.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        super().shutdown_request(request)
        with self._idle:
            self._lines.discard(request)
            self._idle.notify_all()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A connection that broke off is the other end's affair."""

    def close(self) -> bool:
        """Stop serving; whether every thread is done with the memory."""
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)  # also for children of a fork, who have it too
        self.shutdown()
        self.server_close()
        with self._idle:
            for line in self._lines:
                with suppress(OSError):
                    line.shutdown(socket.SHUT_RDWR)
            return self._idle.wait_for(lambda: not self._lines, END_SECONDS)


class _Requests(BaseHTTPRequestHandler):
    """The requests of one connection. A thread cuts it where one of them takes too long."""

    server: SeedServer
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    _own: bool | None = None

    def setup(self) -> None:
        self._cut = Cutoff(self.request, STALL_SECONDS)
        if isinstance(self.request, ssl.SSLSocket):
            self.request.do_handshake()
        super().setup()

    def finish(self) -> None:
        with suppress(OSError):
            super().finish()
        self._cut.over()

    def handle_one_request(self) -> None:
        super().handle_one_request()
        self._cut.at(time.monotonic() + KEPT_SECONDS)

    def version_string(self) -> str:
        return AGENT

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._answer(self._get)

    def do_HEAD(self) -> None:
        self._answer(self._get)

    def do_POST(self) -> None:
        self._answer(self._post)

    def _answer(self, act: Any) -> None:
        try:
            self._let_in()
            act()
        except Refusal as fault:
            self.close_connection = self.command == "POST"  # its body was not read
            self._send(fault.status, f"{fault}\n".encode(), "text/plain")
        except OSError:
            self.close_connection = True  # it is gone, or was cut

    def _let_in(self) -> None:
        if self.path == "/healthz":
            return
        if why := refusal(self.headers, self.server.token, self._is_own):
            raise Refusal(401, why)

    def _is_own(self) -> bool:
        if self._own is None:
            self._own = is_own_user(self.connection)
        return self._own

    def _post(self) -> None:
        length = self.headers.get("Content-Length", "")
        path = urlsplit(self.path).path
        if not (path == "/seeds" or path.startswith("/readers/")) or not length.isdecimal():
            raise Refusal(404, "a seed takes no such request")
        if int(length) > BODY_BYTES:
            raise Refusal(400, f"at most {BODY_BYTES} bytes")
        body = self.rfile.read(int(length))
        if path == "/seeds":
            self._json(self._meet(body))
            return
        self.send_response(204)  # how a reader ended, which nobody here asks for
        self.end_headers()

    def _meet(self, body: bytes) -> list[str]:
        try:
            word = read_seed_word(body, self.client_address[0])
        except ValueError as fault:
            raise Refusal(400, str(fault)) from None
        self._check_snapshot(word.snapshot)
        return self.server.memory.meet(word.url)

    def _get(self) -> None:
        url = urlsplit(self.path)
        asked, shown = parse_qs(url.query), self.server.shown
        if url.path.startswith("/volumes/"):
            self._volume(url.path, asked.get("wait", ["0"])[0])
        elif url.path == "/healthz":
            self._send(200, b"ok\n", "text/plain")
        elif url.path == "/steps.json":
            nbytes = sum(file.nbytes for file in shown.files)
            facts = {"step": shown.step, "snapshot": shown.snapshot, "bytes": nbytes}
            self._json({"steps": [facts]})
        elif url.path == "/record":
            if asked.get("step", [str(shown.step)]) != [str(shown.step)]:
                raise Refusal(404, f"no step like that here; there: {shown.step}")
            told = {"ETag": shown.etag, "Torchrelay-Snapshot": shown.snapshot}
            self._send(200, shown.record, "application/json", told)
        elif url.path == "/places.json":
            self._check_snapshot(asked.get("snapshot", [""])[0])
            volumes = {file.name: [""] for file in shown.files}
            self._json({"step": shown.step, "snapshot": shown.snapshot, "volumes": volumes})
        elif url.path == "/marks":
            self._check_snapshot(asked.get("snapshot", [""])[0])
            self._send(200, self.server.memory.marks(), "application/octet-stream")
        else:
            raise Refusal(404, "a seed has the record, volumes and marks of one step, no more")

    def _check_snapshot(self, snapshot: str) -> None:
        if snapshot != self.server.shown.snapshot:
            raise Refusal(410, "that step is not here: ask for the newest")

    def _volume(self, path: str, wait: str) -> None:
        parts = path.split("/")
        if len(parts) != 4:
            raise Refusal(404, "volumes are asked for as /volumes/SNAPSHOT/NAME")
        self._check_snapshot(parts[2])
        shown, memory = self.server.shown, self.server.memory
        file = next((one for one in shown.files if one.name == unquote(parts[3])), None)
        if file is None:
            raise Refusal(404, "there is no such volume")
        wanted = self.headers.get("Range")
        start, stop = 0, file.nbytes
        if wanted is not None:
            found = _RANGE.fullmatch(wanted.strip())
            if found is None:
                raise Refusal(416, "one range of bytes, as in Range: bytes=0-99")
            start = int(found[1])
            stop = min(int(found[2]) + 1 if found[2] else file.nbytes, file.nbytes)
            if start >= stop:
                raise Refusal(416, f"the range is outside of {file.nbytes} bytes")
        seconds = float(wait) if _SECONDS.fullmatch(wait) else 0.0
        if not memory.wait(file.name, start, stop, min(seconds, WAIT_SECONDS)):
            raise Refusal(404, "these bytes have not arrived here yet: /marks says which have")
        self.send_response(200 if wanted is None else 206)
        self.send_header("Content-Type", "application/octet-stream")
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("ETag", shown.etag)
        self.send_header("Content-Length", str(stop - start))
        if wanted is not None:
            self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{file.nbytes}")
        self.end_headers()
        if self.command != "HEAD":
            self._send_range(file.name, start, stop)

    def _send_range(self, name: str, start: int, stop: int) -> None:
        memory, begin = self.server.memory, self.server.memory.start_of(name)
        at = start
        while at < stop:
            some = min(PIECE_BYTES, stop - at)
            self._cut.at(time.monotonic() + STALL_SECONDS + some / SLOW_RATE)
            if self.server.context is not None:
                self.connection.sendall(memory.view(name, at, at + some))
                at += some
                continue
            done = os.sendfile(self.connection.fileno(), memory.fd, begin + at, some)
            if not done:
                raise ConnectionResetError("the memory has ended")
            at += done

    def _json(self, facts: object) -> None:
        self._send(200, msgspec.json.encode(facts), "application/json")

    def _send(
        self, status: int, body: bytes, kind: str, headers: dict[str, str] | None = None
    ) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        if self.close_connection:
            self.send_header("Connection", "close")
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
