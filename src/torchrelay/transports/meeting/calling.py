"""Connecting to another process and being admitted there. Blocks, within a deadline."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable

from torchrelay.deadlines import Deadline
from torchrelay.errors import PeerLostError, RelayError, TransferTimeoutError
from torchrelay.transports.meeting.addresses import SETTING
from torchrelay.transports.meeting.connection import note_open, tune
from torchrelay.transports.meeting.directory import Directory, Identity
from torchrelay.transports.wire import handshake
from torchrelay.transports.wire.handshake import Hello

CONNECT_SECONDS = 30.0
AGAIN_SECONDS = (0.01, 0.1)  # between two tries: first, and last


def call(identity: Identity, hello: Hello, key: bytes, deadline: Deadline) -> socket.socket:
    """A connection to a process, authenticated both ways. `OSError` if that fails."""
    seconds = min(deadline.left(), CONNECT_SECONDS)
    try:
        sock = socket.create_connection((identity.host, identity.port), max(seconds, 0.001))
    except ValueError as fault:  # a host name that cannot be one
        raise OSError(str(fault)) from fault
    try:
        tune(sock)
        note_open(sock)
        challenge = _exactly(sock, handshake.CHALLENGE_BYTES, deadline)
        handshake.check_challenge(challenge)
        said = handshake.hello(hello, challenge, key)
        sock.sendall(said)
        answer = _exactly(sock, handshake.WELCOME_BYTES, deadline)
        handshake.check_welcome(answer, said, challenge, key)
        sock.settimeout(None)
        return sock
    except BaseException:
        sock.close()
        raise


def _exactly(sock: socket.socket, count: int, deadline: Deadline) -> bytes:
    data = b""
    while len(data) < count:
        sock.settimeout(max(min(deadline.left(), CONNECT_SECONDS), 0.001))
        more = sock.recv(count - len(data))
        if not more:
            raise ConnectionResetError("the process there closed the connection")
        data += more
    return data


def call_until(
    identity: Identity,
    hello: Hello,
    key: bytes,
    deadline: Deadline,
    over: Callable[[], bool] = lambda: False,
) -> socket.socket:
    """The same, tried for a while: the process may not expect the call yet, or be too busy to
    answer it in time. It is tried no longer when the transfer is `over`."""
    ends = time.monotonic() + min(deadline.left(), CONNECT_SECONDS)
    pause, longest = AGAIN_SECONDS
    while True:
        try:
            return call(identity, hello, key, deadline)
        except ConnectionResetError:
            if time.monotonic() > ends or over():
                raise
        time.sleep(pause)
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
                return call_until(identity, hello, identity.token, deadline), identity
            except OSError as found:
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
