"""The first bytes of a connection: both ends prove that they know a key. No I/O.

    listener   Challenge(version, nonce)
    caller     Hello(what the connection is for, nonce, HMAC(key, challenge + hello))
    listener   HMAC(key, "welcome" + challenge + hello)

For a control connection the key is the token in the listener's `Identity`, which only members of
the group can read. For a data connection it is the key of one transfer, which came over a control
connection. All three have a fixed size, so a stranger costs a fixed buffer, and the listener's
nonce makes a recorded `Hello` worthless.
"""

from __future__ import annotations

import hmac
import secrets
import struct
from typing import NamedTuple

from torchrelay.errors import RemoteProtocolError

VERSION = 4
NONCE_BYTES = 16
ID_BYTES = 16
KEY_BYTES = 32
_MAGIC = b"TRLY"
_CHALLENGE = struct.Struct(f"<4sHxx{NONCE_BYTES}s")
_HELLO = struct.Struct(f"<4sHBxII{ID_BYTES}s{ID_BYTES}s{NONCE_BYTES}s")
_MAC_BYTES = 32

CHALLENGE_BYTES = _CHALLENGE.size
HELLO_BYTES = _HELLO.size + _MAC_BYTES
WELCOME_BYTES = _MAC_BYTES

CONTROL, DATA = 1, 2


class Hello(NamedTuple):
    """The purpose of a connection: the `node` that is called, the caller's `rank`, and, for a data
    connection, the `transfer` and how often its connections have broken."""

    kind: int
    node: bytes
    rank: int
    transfer: bytes = bytes(ID_BYTES)
    broken: int = 0


def new_id() -> bytes:
    return secrets.token_bytes(ID_BYTES)


def new_key() -> bytes:
    return secrets.token_bytes(KEY_BYTES)


def challenge() -> bytes:
    return _CHALLENGE.pack(_MAGIC, VERSION, secrets.token_bytes(NONCE_BYTES))


def check_challenge(data: bytes) -> None:
    """`RemoteProtocolError` unless a listener of this version sent these bytes."""
    magic, version, _ = _CHALLENGE.unpack(data)
    if magic != _MAGIC:
        raise RemoteProtocolError("another program listens at the peer's address")
    if version != VERSION:
        raise RemoteProtocolError(
            f"the peer speaks wire version {version}, this side {VERSION}: use the same version of "
            "torchrelay on both sides"
        )


def hello(content: Hello, challenge: bytes, key: bytes) -> bytes:
    kind, node, rank, transfer, broken = content
    nonce = secrets.token_bytes(NONCE_BYTES)
    body = _HELLO.pack(_MAGIC, VERSION, kind, rank, broken, node, transfer, nonce)
    return body + hmac.digest(key, challenge + body, "sha256")


def read_hello(data: bytes) -> Hello | None:
    """The caller's `Hello`; None for anything but a `Hello` of this version. Do not trust it before
    `proves` has accepted it."""
    magic, version, kind, rank, broken, node, transfer, _ = _HELLO.unpack_from(data)
    if (magic, version) != (_MAGIC, VERSION) or kind not in (CONTROL, DATA):
        return None
    return Hello(kind, node, rank, transfer, broken)


def proves(data: bytes, challenge: bytes, key: bytes) -> bool:
    """Whether the caller that sent this `Hello` knows the key."""
    body, mac = data[: _HELLO.size], data[_HELLO.size :]
    return hmac.compare_digest(mac, hmac.digest(key, challenge + body, "sha256"))


def welcome(hello: bytes, challenge: bytes, key: bytes) -> bytes:
    return hmac.digest(key, b"welcome" + challenge + hello, "sha256")


def check_welcome(data: bytes, hello: bytes, challenge: bytes, key: bytes) -> None:
    """`RemoteProtocolError` unless the listener knows the key too."""
    if not hmac.compare_digest(data, welcome(hello, challenge, key)):
        raise RemoteProtocolError("whoever listens at the peer's address does not know its token")
