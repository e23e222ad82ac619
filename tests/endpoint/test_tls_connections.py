"""Connections of the server that use TLS: counted from the first byte, and never in clear text."""

from __future__ import annotations

import socket
import ssl
import threading
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from tests.support.certificates import certificate
from torchrelay.endpoint.server.http.connections import HttpConnection, HttpServer, Response
from torchrelay.endpoint.server.http.sockets import Acceptor, listen_at

LIMIT = 30.0  # seconds in which anything here has happened
MARK = b"clear text " * 6_000
CONNECTIONS = 8


def context_of(folder: Path) -> ssl.SSLContext:
    key, cert = certificate(folder)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    return context


def wait_until(holds: object, what: str) -> None:
    end = time.monotonic() + LIMIT
    while not holds():  # type: ignore[operator]
        assert time.monotonic() < end, what
        time.sleep(0.01)


def test_silent_connections_are_counted_while_they_shake_hands(tmp_path: Path) -> None:
    served = threading.Semaphore(0)
    inside: set[int] = set()

    def serve(sock: socket.socket) -> None:
        served.release()
        inside.add(threading.get_ident())
        try:
            server.serve(sock)
        finally:
            inside.discard(threading.get_ident())

    server = HttpServer(
        lambda request, connection: Response(),
        connections=CONNECTIONS,
        stall=10 * LIMIT,
        context=context_of(tmp_path),
    )
    acceptor = Acceptor(listener := listen_at("127.0.0.1", 0), serve)
    try:
        with ExitStack() as lines:
            for _ in range(200):
                lines.enter_context(socket.create_connection(listener.getsockname(), timeout=LIMIT))
                assert served.acquire(timeout=LIMIT)
            wait_until(lambda: len(inside) <= CONNECTIONS, "connections that were cut stay open")
            assert server.count == CONNECTIONS
            # One of them that speaks TLS is served.
            client = ssl.create_default_context()
            client.check_hostname, client.verify_mode = False, ssl.CERT_NONE
            plain = socket.create_connection(listener.getsockname(), timeout=LIMIT)
            with client.wrap_socket(plain) as line:
                line.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
                assert line.recv(100).startswith(b"HTTP/1.1 200 ")
    finally:
        acceptor.close()
        server.close()


def test_a_handshake_has_a_deadline(tmp_path: Path) -> None:
    server = HttpServer(
        lambda request, connection: Response(),
        connections=CONNECTIONS,
        stall=0.3,
        context=context_of(tmp_path),
    )
    with socket.create_server(("127.0.0.1", 0)) as listener:
        with socket.create_connection(listener.getsockname(), timeout=LIMIT) as line:
            serving = threading.Thread(target=server.serve, args=(listener.accept()[0],))
            serving.start()
            end = time.monotonic() + LIMIT
            # A hello that trickles does not prolong it.
            with suppress(OSError):
                line.sendall(b"\x16\x03\x01\x02\x00")
                while serving.is_alive() and time.monotonic() < end:
                    line.sendall(b"\x01")
                    serving.join(0.05)
            serving.join(LIMIT)
            assert not serving.is_alive() and server.refused["slow"] == 1


class _Guarded(ssl.SSLSocket):
    """A TLS socket that says if its encryption was taken away while it is in use."""

    bared = False

    def shutdown(self, how: int) -> None:
        type(self).bared = True
        super().shutdown(how)


@pytest.mark.parametrize("times", [20])
def test_a_cut_sends_nothing_in_clear_text(tmp_path: Path, times: int) -> None:
    context = context_of(tmp_path)
    context.sslsocket_class = _Guarded
    for _ in range(times):
        with (
            socket.create_server(("127.0.0.1", 0)) as listener,
            socket.create_connection(listener.getsockname(), timeout=LIMIT) as wire,
        ):
            connection = HttpConnection(listener.accept()[0], LIMIT)
            started = threading.Event()

            def send(connection: HttpConnection = connection, done: object = started) -> None:
                with suppress(OSError):
                    connection.start(context)
                    done.set()  # type: ignore[attr-defined]
                    while True:
                        connection.send(MARK)

            sending = threading.Thread(target=send)
            sending.start()
            received = shake_hands(wire)
            assert started.wait(LIMIT)
            received += wire.recv(1 << 16)
            connection.cut()
            sending.join(LIMIT)
            assert not sending.is_alive()
            with suppress(OSError):
                while some := wire.recv(1 << 16):
                    received += some
            connection.close()
            assert MARK[:22] not in received
    assert not _Guarded.bared


def shake_hands(wire: socket.socket) -> bytes:
    """The client's part of a handshake, by hand, so that all bytes on the wire are seen; those
    that came."""
    client = ssl.create_default_context()
    client.check_hostname, client.verify_mode = False, ssl.CERT_NONE
    coming, going = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls, received = client.wrap_bio(coming, going), b""
    while True:
        try:
            tls.do_handshake()
            wire.sendall(going.read())
            return received
        except ssl.SSLWantReadError:
            wire.sendall(going.read())
            some = wire.recv(1 << 16)
            received += some
            coming.write(some)
