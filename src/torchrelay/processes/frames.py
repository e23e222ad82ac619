"""Messages over a socket between processes of one host, a trainer and its own or a keeper.

Each is a length, the digest of the bytes, the digest of both, and the bytes. Memory may change a
bit as a wire does, and a message has values of a state.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Sequence

import xxhash

LENGTH = struct.Struct("<Q")
FACTS = struct.Struct("<Q16s")
CHECK_BYTES = 8
MAX_FRAME = 1 << 30


def send_frame(link: socket.socket, data: bytes) -> None:
    link.sendall(_head(FACTS.pack(len(data), xxhash.xxh3_128_digest(data))) + data)


def _head(facts: bytes) -> bytes:
    return facts + xxhash.xxh3_64_digest(facts)


def receive_frame(link: socket.socket, most: int = MAX_FRAME) -> bytes:
    """The next message. `EOFError` if the other end is gone or it has more than `most` bytes, or
    others than were sent; `TimeoutError` by the socket's timeout."""
    first = _exactly(link, LENGTH.size)
    (length,) = LENGTH.unpack(first)
    if length > most:  # also of a process that sends something else, and nothing after it
        raise EOFError(f"a message of {length} bytes")
    head = first + _exactly(link, FACTS.size + CHECK_BYTES - LENGTH.size)
    if head != _head(head[: FACTS.size]):
        raise EOFError("a message whose head has other bytes than were sent")
    _, digest = FACTS.unpack_from(head)
    data = _exactly(link, length)
    if xxhash.xxh3_128_digest(data) != digest:
        raise EOFError("a message has other bytes than were sent")
    return data


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
