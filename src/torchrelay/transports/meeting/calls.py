"""Calling another process: a connection, authenticated both ways. It blocks, within a deadline."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable

from torchrelay.deadlines import Deadline
from torchrelay.errors import PeerLostError, RelayError, TransferTimeoutError
from torchrelay.shortage import raise_shortage
from torchrelay.transports.meeting.addresses import SETTING
from torchrelay.transports.meeting.directory import Directory, Identity
from torchrelay.transports.meeting.socket_setup import note_open, tune
from torchrelay.transports.meeting.waits import Patience, connect, receive_exactly
from torchrelay.transports.wire import handshake
from torchrelay.transports.wire.handshake import Hello
from torchrelay.transports.wire.messages import NodeAddress

CONNECT_SECONDS = 30.0
AGAIN_SECONDS = (0.01, 0.1)  # between two tries: first, and last


def call(
    address: NodeAddress,
    hello: Hello,
    key: bytes,
    deadline: Deadline,
    over: Callable[[], bool] = lambda: False,
) -> socket.socket:
    """A connection to a process, authenticated both ways. `OSError` if that fails, also when the
    deadline is hastened or the transfer is `over` meanwhile."""
    patience = Patience(deadline, CONNECT_SECONDS, over)
    try:
        sock = connect(address.host, address.port, patience)
    except ValueError as fault:  # a host name that cannot be one
        raise OSError(str(fault)) from fault
    try:
        tune(sock)
        note_open(sock)
        challenge = receive_exactly(sock, handshake.CHALLENGE_BYTES, patience)
        handshake.check_challenge(challenge)
        greeting = handshake.hello(hello, challenge, key)
        sock.sendall(greeting)  # so few bytes always fit into the empty buffer of a new connection
        answer = receive_exactly(sock, handshake.WELCOME_BYTES, patience)
        handshake.check_welcome(answer, greeting, challenge, key)
        sock.settimeout(None)
        return sock
    except BaseException:
        sock.close()
        raise


def call_until(
    address: NodeAddress,
    hello: Hello,
    key: bytes,
    deadline: Deadline,
    over: Callable[[], bool] = lambda: False,
) -> socket.socket:
    """`call`, tried for a while: the process may not expect the call yet, or be too busy to answer
    it in time."""
    ends = time.monotonic() + CONNECT_SECONDS
    pause, longest = AGAIN_SECONDS
    while True:
        try:
            return call(address, hello, key, deadline, over)
        except ConnectionResetError:
            if time.monotonic() > ends or deadline.passed or over():
                raise
        time.sleep(min(pause, deadline.left()))
        pause = min(2 * pause, longest)


def call_rank(
    directory: Directory, rank: int, me: int, deadline: Deadline
) -> tuple[socket.socket, Identity]:
    """A control connection to a rank. `PeerLostError` if it cannot be reached."""
    called: Identity | None = None
    fault = OSError()
    try:
        while (identity := directory.find(rank, deadline)) != called:
            called = identity
            try:
                hello = Hello(handshake.CONTROL, identity.node, me)
                sock = call_until(identity.address, hello, identity.token, deadline)
                return sock, identity
            except OSError as found:
                raise_shortage(found, f"connect to rank {rank}")
                fault = found
            if deadline.passed and not isinstance(fault, ConnectionRefusedError):
                break
            # A rank that was started again has published another identity.
            directory.forget(rank)
        at = f"rank {rank} at {identity.host} port {identity.port}"
        raise _unreachable(at, fault, deadline) from fault
    except RelayError as error:
        error.rank, error.phase = rank, "join"
        raise


def _unreachable(at: str, fault: OSError, deadline: Deadline) -> RelayError:
    if isinstance(fault, ConnectionRefusedError):
        what = f"connection lost: {at} does not listen any more; its process has ended"
    elif deadline.passed:  # it may only have been too busy until now
        what = f"timed out after {deadline.seconds:.3g} s: {at} did not answer"
        return TransferTimeoutError(what)
    elif isinstance(fault, ConnectionResetError):
        what = f"connection lost: {at} does not admit this rank; its process group has ended"
    else:
        what = (
            f"cannot reach {at}: {fault}; set {SETTING} on that rank to the network interface that "
            "the other ranks reach"
        )
    return PeerLostError(what)
