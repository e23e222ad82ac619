"""The setup of every socket of a transfer: small messages leave at once, the kernel probes the
peer, and a forked child has no socket of its parent."""

from __future__ import annotations

import contextlib
import socket
import weakref

# Seconds until an idle connection is probed, between probes, and their number; milliseconds that
# sent bytes may stay unacknowledged.
_KEEPALIVE = {
    "TCP_KEEPIDLE": 10,
    "TCP_KEEPINTVL": 5,
    "TCP_KEEPCNT": 4,
    "TCP_USER_TIMEOUT": 30_000,
}

_open: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def note_open(sock: socket.socket) -> None:
    """Have a socket closed in forked children, where it is not of use."""
    _open.add(sock)


def close_in_child() -> None:
    """In a forked child: let go of the parent's sockets, which stay open there. A peer of the
    parent must notice when that one ends."""
    for sock in list(_open):
        sock.close()


def tune(sock: socket.socket) -> None:
    """Send small messages at once, and have the kernel notice a peer that is gone."""
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        with contextlib.suppress(OSError, AttributeError):  # another system
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
