"""A real S3 server on loopback (moto's), behind a door that a test can watch, hold and break.

    s3.url("name")            s3://bucket/name, with the environment set to reach it
    s3.without = names        headers that the door drops, as a server would that ignores them
    s3.requests               what came in so far: (method, path with query, headers)
    s3.hook = fn              fn(method, path) is called before a request goes on to the server.
                              It may wait, return an HTTP status to refuse it with, LOSE or DROP.

The fixture needs moto's server, which checks no signatures: requests pass through the door as they
are.
"""

from __future__ import annotations

import re
import select
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple

import pytest

BUCKET = "bucket"
SIGNED = "AWS4-HMAC-SHA256 Credential=loopback/20260101/us-east-1/s3/aws4_request"
LOSE = -1  # carry the request out and drop the connection instead of answering
DROP = -2  # drop the connection, as a server does that is dead

Hook = Callable[[str, str], int | None]


class Request(NamedTuple):
    method: str
    path: str
    headers: Mapping[str, str]


class S3:
    def __init__(self, server: tuple[str, int]) -> None:
        self.server = server
        self.requests: list[Request] = []
        self.hook: Hook | None = None
        self.without: tuple[str, ...] = ()
        self.writing = threading.Lock()
        self._door = _Door(("127.0.0.1", 0), _Handler)
        self._door.s3 = self
        self._thread = threading.Thread(target=self._door.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()
        self.endpoint = f"http://127.0.0.1:{self._door.server_port}"

    def url(self, name: str) -> str:
        return f"s3://{BUCKET}/{name}"

    def seen(self, pattern: str) -> list[str]:
        """Requests, as "METHOD /path?query", that match a pattern somewhere; in order."""
        lines = [f"{one.method} {one.path}" for one in self.requests]
        return [line for line in lines if re.search(pattern, line)]

    def ask(
        self, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None
    ) -> tuple[int, bytes, dict[str, str]]:
        """A request straight to the server, past the door."""
        connection = HTTPConnection(*self.server, timeout=30)
        try:
            connection.request(method, path, body, {"authorization": SIGNED, **(headers or {})})
            answer = connection.getresponse()
            headers = {key.lower(): value for key, value in answer.getheaders()}
            return answer.status, answer.read(), headers
        finally:
            connection.close()

    def close(self) -> None:
        self._door.shutdown()
        self._thread.join()
        self._door.server_close()


class _Door(ThreadingHTTPServer):
    daemon_threads = True
    s3: S3


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1  # an answer in one segment
    server: _Door

    def log_message(self, format: str, *args: object) -> None:
        pass

    def _pass_on(self) -> None:
        s3 = self.server.s3
        headers = {key.lower(): value for key, value in self.headers.items()}
        s3.requests.append(Request(self.command, self.path, headers))
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        for name in s3.without:
            headers.pop(name, None)
        verdict = s3.hook(self.command, self.path) if s3.hook else None
        if verdict == DROP:
            self.close_connection = True
            return
        if verdict is None or verdict == LOSE:
            # moto looks whether an object is there and then writes it; S3 does both at once.
            with s3.writing if self.command in ("PUT", "POST") else nullcontext():
                status, content, headers = s3.ask(self.command, self.path, body, headers)
        else:
            status, content, headers = verdict, b"<Error><Code>Refused</Code></Error>", {}
        self.close_connection = verdict == LOSE
        if verdict != LOSE:
            self._answer(status, content, headers)

    def _answer(self, status: int, content: bytes, headers: Mapping[str, str]) -> None:
        length = str(len(content))
        self.send_response(status)
        for key, value in headers.items():
            if key == "content-length":
                length = value  # of a HEAD: the object's
            elif key not in ("connection", "transfer-encoding", "date", "server"):
                self.send_header(key, value)
        self.send_header("Content-Length", length)
        self.end_headers()
        try:
            self.wfile.write(content)
        except OSError:
            pass  # the client has given up

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _pass_on


# It has a process of its own: what a test does to the worker's (limits, another user, patches) does
# not reach it. It ends when its input does.
_SERVER = """
import logging, sys
from moto.server import ThreadedMotoServer
logging.getLogger("werkzeug").setLevel(logging.ERROR)
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="session")
def moto_server() -> Iterator[tuple[str, int]]:
    pytest.importorskip("moto.server")
    with subprocess.Popen(
        [sys.executable, "-c", _SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as server:
        assert server.stdin is not None and server.stdout is not None
        try:
            begun, _, _ = select.select([server.stdout], [], [], 60)
            assert begun, "moto's server did not begin within a minute"
            yield "127.0.0.1", int(server.stdout.readline())
        finally:
            server.kill()


@pytest.fixture
def s3(moto_server: tuple[str, int], monkeypatch: pytest.MonkeyPatch) -> Iterator[S3]:
    """A server with one empty bucket, and the environment of a user who works with it."""
    door = S3(moto_server)
    assert door.ask("POST", "/moto-api/reset")[0] == 200
    assert door.ask("PUT", f"/{BUCKET}")[0] == 200
    for name in ("AWS_ENDPOINT", "AWS_ENDPOINT_URL_S3", "AWS_ALLOW_HTTP", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_ENDPOINT_URL", door.endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "loopback")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    try:
        yield door
    finally:
        door.close()
