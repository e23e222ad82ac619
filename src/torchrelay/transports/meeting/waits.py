"""Waits on a socket of a call to another process. They follow a deadline that changes meanwhile.

A timeout of a socket is computed once: a call that is over, or whose deadline was hastened, would
stay in it. So a wait is made of short ones, and asks before each how long it may last.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import time
from collections.abc import Callable

from torchrelay.deadlines import TICK, Deadline


class Patience:
    """How long a call may wait: until its deadline, whenever that is by then, and for no longer
    than `seconds` or until the call is given up."""

    def __init__(self, deadline: Deadline, seconds: float, abandoned: Callable[[], bool]) -> None:
        self._deadline, self._abandoned = deadline, abandoned
        self._ends = time.monotonic() + seconds

    def left(self) -> float:
        return max(0.0, min(self._deadline.left(), self._ends - time.monotonic()))

    @property
    def is_over(self) -> bool:
        return not self.left() or self._abandoned()


def connect(host: str, port: int, patience: Patience) -> socket.socket:
    """A connected socket that does not block. `OSError` if that fails, `TimeoutError` in time."""
    fault = OSError(f"no address of {host}")
    for family, kind, protocol, _, address in socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM
    ):
        sock = socket.socket(family, kind, protocol)
        try:
            _connect(sock, address, patience)
            return sock
        except OSError as found:
            sock.close()
            fault = found
        except BaseException:
            sock.close()
            raise
    raise fault


def _connect(sock: socket.socket, address: object, patience: Patience) -> None:
    sock.setblocking(False)
    code = sock.connect_ex(address)  # type: ignore[arg-type]
    if code in (errno.EINPROGRESS, errno.EAGAIN):
        _wait(sock, select.POLLOUT, patience)
        code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if code:
        raise OSError(code, os.strerror(code))


def receive_exactly(sock: socket.socket, count: int, patience: Patience) -> bytes:
    """So many bytes of a socket that does not block."""
    data = b""
    while len(data) < count:
        _wait(sock, select.POLLIN, patience)
        more = sock.recv(count - len(data))
        if not more:
            raise ConnectionResetError("the process there closed the connection")
        data += more
    return data


def _wait(sock: socket.socket, event: int, patience: Patience) -> None:
    poll = select.poll()
    poll.register(sock, event)
    while not poll.poll(1000 * min(patience.left(), TICK)):
        if patience.is_over:
            raise TimeoutError("timed out")
