"""What goes over the wire of a live transfer, without any I/O (docs/wire-format.md is the spec).

The first message is eight bytes on tag 1, where torch's own `PGTransport` sends the length of its
metadata. A length is never negative; ours always is, so a receiver can tell the two apart. All
later messages go on tags that belong to this transfer alone, so a message of an abandoned transfer
is never taken for one of another.
"""

from __future__ import annotations

import struct

import msgspec

from torchrelay.errors import RemoteProtocolError

MAJOR, MINOR = 1, 0

PRELUDE_TAG = 1  # shared with torch's protocol
ID_BITS = 26
LANES = 16  # lane 0 is for control messages, the others for data
CONTROL_LANE = 0

FRAME_BYTES = 128
_HEAD = struct.Struct("<4sHHQ")
_MAGIC = b"TRLY"
INLINE_BYTES = FRAME_BYTES - _HEAD.size
MAX_MESSAGE_BYTES = 1 << 30

_PRELUDE_MAGIC = 0x8B17  # top bit set: as a signed number the prelude is negative


def prelude(transfer: int) -> int:
    """The first message, as a signed 64-bit number: magic, major version, id of the transfer."""
    value = _PRELUDE_MAGIC << 48 | MAJOR << 32 | transfer
    return value - (1 << 64)


def read_prelude(value: int) -> int | None:
    """The transfer's id; None where a torch sender's metadata length was read instead."""
    if value >= 0:
        return None
    bits = value + (1 << 64)
    magic, major, transfer = bits >> 48, bits >> 32 & 0xFFFF, bits & 0xFFFFFFFF
    if magic != _PRELUDE_MAGIC or transfer >= 1 << ID_BITS:
        raise RemoteProtocolError(f"first message {bits:#018x} is no torchrelay or torch sender's")
    if major != MAJOR:
        raise RemoteProtocolError(
            f"the sender speaks wire version {major}, this side {MAJOR}: "
            "use the same major version of torchrelay on both sides"
        )
    return transfer


def tag(transfer: int, lane: int) -> int:
    """The tag of a lane. Bit 30 keeps clear of the tags that torch's protocol uses."""
    return 1 << 30 | transfer << 4 | lane


class _Message(msgspec.Struct, array_like=True, frozen=True):
    """Fields travel in order; new ones go at the end."""


# From the receiver to the sender.


class Join(_Message, tag="join", frozen=True):
    """I am here. `step` is the only step I take, if one was asked for."""

    minor: int
    step: int | None = None


class Accept(_Message, tag="accept", frozen=True):
    """The state fits; I am ready for data."""


class Refuse(_Message, tag="refuse", frozen=True):
    """The state does not fit. Ends the transfer with me."""

    kind: str  # "step", "mismatch" (also: no memory), "unsupported" or "manifest"
    message: str
    path: str | None = None


class Blocked(_Message, tag="blocked", frozen=True):
    """The receiver I pass chunks on to has taken none for a while."""

    rank: int


class Stalled(_Message, tag="stalled", frozen=True):
    """Nothing has come from upstream for a while. The first `have` chunks are here."""

    have: int


class Need(_Message, tag="need", frozen=True):
    """Send me these chunks yourself, in this order, on `lane`."""

    chunks: tuple[int, ...]
    lane: int


class Done(_Message, tag="done", frozen=True):
    """All is here, verified and landed. Ends the transfer with me."""


class Leave(_Message, tag="leave", frozen=True):
    """I give up. Ends the transfer with me."""

    message: str
    late: bool = False  # I ran out of time, and may call again


# From the sender to a receiver.


class Offer(_Message, tag="offer", frozen=True):
    """What I have: an encoded manifest, without digests."""

    manifest: bytes
    verify: bool = True
    device: str = "cpu"  # whose memory carries the data; another kind: nccl, xccl and their like


class Go(_Message, tag="go", frozen=True):
    """Who sends you chunks, and whom you pass them on to (rank and transfer id), if anybody."""

    upstream: int
    downstream: int | None = None
    downstream_id: int = 0
    patience: float = 0.0  # seconds without progress before you tell me


class Knock(_Message, tag="knock", frozen=True):
    """Nothing to do. That it is taken shows that you are there."""


class Detach(_Message, tag="detach", frozen=True):
    """Pass no more chunks on: I see to the receiver behind you."""


class Reroute(_Message, tag="reroute", frozen=True):
    """Your upstream is gone or stuck: ask me for what you lack."""


class Trailer(_Message, tag="trailer", frozen=True):
    """Digests of all chunks in order; empty if the transfer is not verified."""

    digests: tuple[bytes, ...]


class Fin(_Message, tag="fin", frozen=True):
    """I know that you are done. Ends the transfer with you."""


class Abort(_Message, tag="abort", frozen=True):
    """I give up on you, or altogether. Ends the transfer with you."""

    message: str


ToSender = Join | Accept | Refuse | Blocked | Stalled | Need | Done | Leave
ToReceiver = Offer | Go | Knock | Detach | Reroute | Trailer | Fin | Abort
Message = ToSender | ToReceiver

TERMINAL = (Refuse, Done, Leave, Fin, Abort)

_decode_message = msgspec.msgpack.Decoder(Message)


def frame(message: Message) -> tuple[bytes, bytes]:
    """A message as a frame of fixed size and, where it does not fit into that, the payload."""
    payload = msgspec.msgpack.encode(message)
    head = _HEAD.pack(_MAGIC, MAJOR, MINOR, len(payload))
    if len(payload) <= INLINE_BYTES:
        return (head + payload).ljust(FRAME_BYTES, b"\0"), b""
    return head.ljust(FRAME_BYTES, b"\0"), payload


def read_frame(data: bytes) -> tuple[int, bytes | None]:
    """Payload length, and the payload itself if it is in the frame."""
    magic, major, _, length = _HEAD.unpack_from(data)
    if magic != _MAGIC or major != MAJOR:
        raise RemoteProtocolError("a message that is not of this protocol or version")
    if length > MAX_MESSAGE_BYTES:
        raise RemoteProtocolError(f"a message of {length} bytes, the cap is {MAX_MESSAGE_BYTES}")
    if length <= INLINE_BYTES:
        return length, bytes(data[_HEAD.size : _HEAD.size + length])
    return length, None


def read_message(payload: bytes) -> Message:
    try:
        message: Message = _decode_message.decode(payload)
    except (msgspec.MsgspecError, ValueError, RecursionError) as fault:
        raise RemoteProtocolError(f"unreadable message: {fault}") from None
    return message
