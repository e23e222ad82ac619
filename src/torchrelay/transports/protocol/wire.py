"""What goes over the wire of a live transfer, without any I/O (docs/wire-format.md is the spec).

The first message is eight bytes on tag 1, where torch's own `PGTransport` sends the length of its
metadata. A length is never negative; ours always is, so a receiver can tell the two apart. All
later messages go on tags that belong to this transfer alone, so a message of an abandoned transfer
is never taken for one of another.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Annotated, TypeVar, get_args, get_type_hints

import msgspec
from msgspec import Meta

from torchrelay.errors import RemoteProtocolError
from torchrelay.record.manifest import MAX_STREAM_BYTES
from torchrelay.steps import MAX_STEP

MAJOR, MINOR = 1, 14
T = TypeVar("T")

PRELUDE_TAG = 1  # shared with torch's protocol
ID_BITS = 26
LANES = 16  # lane 0 is for control messages, the others for data
CONTROL_LANE = 0

FRAME_BYTES = 128
FIRST_FRAME_BYTES = 512  # of each side's first, which says more: a second costs its latency
_HEAD = struct.Struct("<4sHHQ")
_MAGIC = b"TRLY"
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


# What a field may be. Decoding refuses anything else, so no field goes without one of these.

MAX_CHUNKS = 1 << 26
MAX_SECONDS = 1e9
MAX_TEXT = 1 << 14  # characters that one side tells the other in words

Step = Annotated[int, Meta(ge=0, le=MAX_STEP)]
Rank = Annotated[int, Meta(ge=0, le=(1 << 31) - 1, title="rank")]  # below the group's size
Id = Annotated[int, Meta(ge=0, le=(1 << ID_BITS) - 1)]  # of a transfer
AskedLane = Annotated[int, Meta(ge=2, le=LANES - 1)]  # of chunks that were asked for
Chunk = Annotated[int, Meta(ge=0, le=MAX_CHUNKS - 1)]
User = Annotated[int, Meta(ge=-1, le=(1 << 32) - 1)]
Pid = Annotated[int, Meta(ge=0, le=1 << 22)]  # Linux has no larger ones
Descriptor = Annotated[int, Meta(ge=-1, le=(1 << 31) - 1)]
Serial = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]  # that the kernel or the driver gives
Offset = Annotated[int, Meta(ge=0, le=MAX_STREAM_BYTES)]
Threads = Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]
BoxIndex = Annotated[int, Meta(ge=0, le=(1 << 24) - 1)]
Seconds = Annotated[float, Meta(ge=0.0, le=MAX_SECONDS)]
Name = Annotated[str, Meta(max_length=256)]
Text = Annotated[str, Meta(max_length=MAX_TEXT)]
NONCE_BYTES = 16
Token = Annotated[bytes, Meta(max_length=16)]
Digest = Annotated[bytes, Meta(max_length=16)]
Blob = Annotated[bytes, Meta(max_length=MAX_MESSAGE_BYTES)]
Lengths = Annotated[tuple[Offset, ...], Meta(max_length=64)]
Names = Annotated[tuple[Name, ...], Meta(max_length=1024)]
Chunks = Annotated[tuple[Chunk, ...], Meta(max_length=MAX_CHUNKS)]
# Chunks in ascending order as stretches: the first, and the one after the last.
Stretch = tuple[Chunk, Annotated[int, Meta(ge=1, le=MAX_CHUNKS)]]
Stretches = Annotated[tuple[Stretch, ...], Meta(max_length=MAX_CHUNKS)]
Digests = Annotated[tuple[Digest, ...], Meta(max_length=MAX_CHUNKS)]
Reasons = Annotated[dict[Name, Text], Meta(max_length=64)]


def text(words: object) -> str:
    """Words for a peer, as long as it takes them."""
    return str(words)[:2000]


class _Message(msgspec.Struct, array_like=True, frozen=True):
    """Fields travel in order; new ones go at the end."""


# What the two tell each other about where they are, to find the fastest way (docs/routes.md).


class Place(msgspec.Struct, array_like=True, frozen=True):
    """Where a process is. Two with the same place can ask the kernel for each other's memory."""

    machine: Name = ""  # id of this boot of this machine; empty where a system has none
    user: User = -1
    pids: Serial = 0  # PID namespace
    pid: Pid = 0
    devices: Names = ()  # ids of the GPUs that this process sees


# From the receiver to the sender.


class Join(_Message, tag="join", frozen=True):
    """I am here. `step` is the only step I take, if one was asked for."""

    step: Step | None = None
    place: Place = Place()
    nonce: Token = b""  # random, for whoever wants to be read by me; empty where I read nobody
    fd: Descriptor = -1  # file with my own claim, where I might open device memory
    knows: Digest = b""  # of a manifest that I have, but for its step, and its routes' tables


class Survey(_Message, tag="survey", frozen=True):
    """In place of `Join`: I take parts of your state, and of others'. What do you have?"""


class Cut(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A box within a box that the sender has; `box` counts in its record."""

    box: BoxIndex
    offsets: Lengths
    sizes: Lengths


class Select(_Message, tag="select", frozen=True):
    """Send me these boxes, as a transfer of its own whose state is a list of them."""

    cuts: Annotated[tuple[Cut, ...], Meta(max_length=1 << 24)]


class Accept(_Message, tag="accept", frozen=True):
    """The state fits; I am ready for data, by this route."""

    route: Name = "group"
    answer: Blob = b""  # of the route, to its offer
    instead: Reasons = {}  # faster routes, and why each was not taken
    hashed: Chunks = ()  # chunks whose digests I compare, where I take the bytes myself


class Word(_Message, tag="word", frozen=True):
    """What one end of a route says to the other, in either direction. The route reads it."""

    word: Blob


class Pulled(_Message, tag="pulled", frozen=True):
    """I have read everything. Is it still what you sent?"""


class Refuse(_Message, tag="refuse", frozen=True):
    """The state does not fit, or an object does not take its part. Ends the transfer with me."""

    kind: Name  # "step", "mismatch" (also: no memory), "unsupported", "manifest" or "route"
    message: Text
    path: Text | None = None


class Blocked(_Message, tag="blocked", frozen=True):
    """The receiver I pass chunks on to has taken none for a while."""

    rank: Rank


class Stalled(_Message, tag="stalled", frozen=True):
    """Nothing has come from upstream for a while."""


class Need(_Message, tag="need", frozen=True):
    """Send me these chunks yourself, in this order, on `lane`."""

    chunks: Chunks
    lane: AskedLane


class Unlink(_Message, tag="unlink", frozen=True):
    """I cannot pass on what I have got: see to the receiver behind me."""


class Done(_Message, tag="done", frozen=True):
    """All is here, verified and landed. Ends the transfer with me."""


class Leave(_Message, tag="leave", frozen=True):
    """I give up. Ends the transfer with me."""

    message: Text
    late: bool = False  # I ran out of time, and may call again


# From the sender to a receiver.


class Inventory(_Message, tag="inventory", frozen=True):
    """What I have: the record of this rank."""

    record: Blob


class Selected(_Message, tag="selected", frozen=True):
    """The boxes that you asked for come as this transfer; answer it by `Join`."""

    transfer: Id


class RouteOffer(msgspec.Struct, array_like=True, frozen=True):
    """What a route says of itself. The route alone reads it."""

    fresh: Blob = b""
    fixed: Blob = b""  # long, and the same as long as the state is in the same memory


def tables(routes: Mapping[str, RouteOffer]) -> list[bytes]:
    """What is long of the offers of routes, in an order that both sides have."""
    return [part for name in sorted(routes) for part in (name.encode(), routes[name].fixed)]


class Offer(_Message, tag="offer", frozen=True):
    """What I have: an encoded manifest, without digests."""

    manifest: Blob
    verify: bool = True
    device: Name = "cpu"  # whose memory carries the data; another kind: nccl, xccl and their like
    cells: bool = False  # digests are of cells
    routes: Annotated[dict[Name, RouteOffer], Meta(max_length=64)] = {}  # that I can serve
    route: Name | None = None  # the only one I take
    threads: Threads = 0  # not 0: you are the only receiver, and may read with so many at once


class Go(_Message, tag="go", frozen=True):
    """Who sends you chunks, and whom you pass them on to (rank and transfer id), if anybody."""

    upstream: Rank
    downstream: Rank | None = None
    downstream_id: Id = 0
    patience: Seconds = 0.0  # seconds without progress before you tell me
    threads: Threads = 0  # that you may copy with on this machine
    word: Blob = b""  # of the route
    reads: bool = False  # your upstream can be read: it sends notes in place of chunks
    notes: bool = False  # your downstream reads: send it notes in place of chunks
    route: Name = "group"  # that the bytes come by: the one that you took, or the group


class Knock(_Message, tag="knock", frozen=True):
    """Nothing to do. That it is taken shows that you are there."""


class Detach(_Message, tag="detach", frozen=True):
    """Pass no more chunks on: I see to the receiver behind you."""


class Reroute(_Message, tag="reroute", frozen=True):
    """Your upstream is gone or stuck: ask me for what you lack."""


class Hashes(_Message, tag="hashes", frozen=True):
    """Digests of chunks from `first` on: what a receiver may pass on has them."""

    first: Chunk
    digests: Digests


class Trailer(_Message, tag="trailer", frozen=True):
    """Digests of all chunks in order; empty if the transfer is not verified. Those of chunks that
    were not asked for may be empty."""

    digests: Digests
    word: Blob = b""  # of the route


class Fin(_Message, tag="fin", frozen=True):
    """I know that you are done. Ends the transfer with you."""


class Abort(_Message, tag="abort", frozen=True):
    """I give up on you, or altogether. Ends the transfer with you."""

    message: Text


ToSender = (
    Join
    | Survey
    | Select
    | Accept
    | Refuse
    | Word
    | Pulled
    | Blocked
    | Stalled
    | Need
    | Unlink
    | Done
    | Leave
)
ToReceiver = (
    Inventory
    | Selected
    | Offer
    | Go
    | Word
    | Knock
    | Detach
    | Reroute
    | Hashes
    | Trailer
    | Fin
    | Abort
)
Message = ToSender | ToReceiver

TERMINAL = (Refuse, Done, Leave, Fin, Abort)

_decode_message = msgspec.msgpack.Decoder(Message)
_encode_message = msgspec.msgpack.Encoder()


def frame(message: Message, nbytes: int = FRAME_BYTES) -> tuple[bytearray, bytearray]:
    """A message as a frame of that size and, where it does not fit into it, the payload. They are
    the caller's."""
    payload = bytearray()
    _encode_message.encode_into(message, payload)
    head = _HEAD.pack(_MAGIC, MAJOR, MINOR, len(payload))
    if len(head) + len(payload) <= nbytes:
        return bytearray(head + payload).ljust(nbytes, b"\0"), bytearray()
    return bytearray(head).ljust(nbytes, b"\0"), payload


def read_frame(data: bytes) -> tuple[int, bytes | None]:
    """Payload length, and the payload itself if it is in the frame."""
    magic, *version, length = _HEAD.unpack_from(data)
    if magic != _MAGIC:
        raise RemoteProtocolError("a message that is not of this protocol")
    if version != [MAJOR, MINOR]:
        raise RemoteProtocolError(
            f"the peer speaks wire version {version[0]}.{version[1]}, this side {MAJOR}.{MINOR}: "
            "use the same version of torchrelay on both sides"
        )
    if length > MAX_MESSAGE_BYTES:
        raise RemoteProtocolError(f"a message of {length} bytes, the cap is {MAX_MESSAGE_BYTES}")
    if _HEAD.size + length <= len(data):
        return length, bytes(data[_HEAD.size : _HEAD.size + length])
    return length, None


def read_as(kind: type[T], payload: bytes) -> T:
    """What one end of a route says to the other. `RemoteProtocolError` unless every field of it is
    one that can be."""
    try:
        return msgspec.msgpack.decode(payload, type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError) as fault:
        raise RemoteProtocolError(f"unreadable message: {fault}") from None


def read_message(payload: bytes | memoryview, ranks: int) -> Message:
    """A message of a peer in a group of so many ranks. `RemoteProtocolError` unless every field of
    it is one that can be."""
    try:
        message: Message = _decode_message.decode(payload)
    except (msgspec.MsgspecError, ValueError, RecursionError) as fault:
        raise RemoteProtocolError(f"unreadable message: {fault}") from None
    for name in _ranks.get(type(message), ()):
        rank = getattr(message, name)
        if rank is not None and rank >= ranks:
            raise RemoteProtocolError(f"rank {rank} was named, in a group of {ranks}")
    return message


def _rank_fields(kind: type) -> list[str]:
    hints = get_type_hints(kind, include_extras=True)
    return [name for name, hint in hints.items() if hint == Rank or Rank in get_args(hint)]


_ranks = {kind: _rank_fields(kind) for kind in get_args(Message)}
