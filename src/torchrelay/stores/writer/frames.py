"""Messages over a socket between a trainer and a process of its own: a length, then the bytes."""

from __future__ import annotations

import socket
import struct
from collections.abc import Sequence

LENGTH = struct.Struct("<Q")
MAX_FRAME = 1 << 30


def send_frame(link: socket.socket, data: bytes) -> None:
    link.sendall(LENGTH.pack(len(data)) + data)


def receive_frame(link: socket.socket, most: int = MAX_FRAME) -> bytes:
    """The next message. `EOFError` if the other end is gone or it has more than `most` bytes,
    `TimeoutError` by the socket's timeout."""
    (length,) = LENGTH.unpack(_exactly(link, LENGTH.size))
    if length > most:
        raise EOFError(f"a message of {length} bytes")
    return _exactly(link, length)


def exchange(
    link: socket.socket | None, request: bytes, timeout: float, fds: Sequence[int] = ()
) -> bytes:
    """The answer to a request, with which descriptors may go. `TimeoutError`, or `EOFError` or
    another `OSError` where the other end is gone; the caller drops the link then, or its answer
    would be taken for that to the next request."""
    if link is None:
        raise EOFError("it is gone")
    link.settimeout(max(timeout, 0.001))
    send_frame(link, request)
    if fds:
        socket.send_fds(link, [b"a"], list(fds))
    return receive_frame(link)


def has_hung_up(link: socket.socket) -> bool:
    """Whether the other end is gone, with nothing of it left to read."""
    timeout = link.gettimeout()
    link.settimeout(0)
    try:
        return not link.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except ConnectionError:
        return True
    finally:
        link.settimeout(timeout)


def _exactly(link: socket.socket, nbytes: int) -> bytes:
    data = bytearray()
    while len(data) < nbytes:
        part = link.recv(min(nbytes - len(data), 1 << 20))
        if not part:
            raise EOFError("the other end is gone")
        data += part
    return bytes(data)
