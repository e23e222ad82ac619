"""The messages of a live transfer, and their frames. No I/O (docs/wire-format.md is the spec).

A transfer between two ranks uses one control connection, which the receiver opens to the sender.
The messages are below in the order in which they are sent.

A frame is a head and the message in MessagePack. The head has a magic number, a version, a type,
the length and the digest of the message, and a digest of itself: a length that was changed on its
way would keep a reader waiting for bytes that no one sends. The length is checked against a cap for
its type before memory is allocated, and every field against the values that it may have.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from typing import Annotated, Any, ClassVar, TypeVar

import msgspec
import xxhash
from msgspec import Meta

from torchrelay.errors import DigestError, RemoteProtocolError
from torchrelay.geometry import DIGEST_BYTES
from torchrelay.steps import MAX_STEP
from torchrelay.transports.wire.handshake import ID_BYTES, KEY_BYTES, VERSION

T = TypeVar("T")

MAX_CHUNKS = 1 << 26
MAX_SECONDS = 1e9
MAX_TEXT = 1 << 14  # characters in a reason
NONCE_BYTES = 16
_SMALL, _LARGE = 1 << 16, 1 << 30  # bytes of a message

# The values that a field may have. Decoding refuses all others, so every field has one of these.
Step = Annotated[int, Meta(ge=0, le=MAX_STEP)]
Chunk = Annotated[int, Meta(ge=0, le=MAX_CHUNKS - 1)]
User = Annotated[int, Meta(ge=-1, le=(1 << 32) - 1)]
Pid = Annotated[int, Meta(ge=0, le=1 << 22)]  # Linux has no larger ones
Descriptor = Annotated[int, Meta(ge=-1, le=(1 << 31) - 1)]
Serial = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]  # given by the kernel or a driver
Count = Annotated[int, Meta(ge=0, le=(1 << 16) - 1)]
Seconds = Annotated[float, Meta(ge=0.0, le=MAX_SECONDS)]
Name = Annotated[str, Meta(max_length=256)]
Text = Annotated[str, Meta(max_length=MAX_TEXT)]
Nonce = Annotated[bytes, Meta(max_length=NONCE_BYTES)]
Id = Annotated[bytes, Meta(min_length=ID_BYTES, max_length=ID_BYTES)]
Key = Annotated[bytes, Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]
Blob = Annotated[bytes, Meta(max_length=_LARGE)]
Names = Annotated[tuple[Name, ...], Meta(max_length=1024)]
Chunks = Annotated[tuple[Chunk, ...], Meta(max_length=MAX_CHUNKS)]
# Chunks in ascending order as ranges: the first, and the one after the last.
ChunkRange = tuple[Chunk, Annotated[int, Meta(ge=1, le=MAX_CHUNKS)]]
ChunkRanges = Annotated[tuple[ChunkRange, ...], Meta(max_length=MAX_CHUNKS)]
Reasons = Annotated[dict[Name, Text], Meta(max_length=64)]


class Message(msgspec.Struct, array_like=True, frozen=True):
    """Fields travel in order."""

    most_bytes: ClassVar[int] = _SMALL


class _LargeMessage(Message, frozen=True):
    most_bytes: ClassVar[int] = _LARGE


class ProcessLocation(msgspec.Struct, array_like=True, frozen=True):
    """Where a process runs. If two agree in `machine`, `user` and `pids`, one can try to read the
    other's memory."""

    machine: Name = ""  # id of this boot of this machine; empty if the system has none
    user: User = -1
    pids: Serial = 0  # PID namespace
    pid: Pid = 0
    devices: Names = ()  # ids of the GPUs that the process sees


class NodeAddress(msgspec.Struct, array_like=True, frozen=True):
    """Where a process listens, and the id by which it is known: no other process ever has it."""

    node: Id
    host: Name
    port: Annotated[int, Meta(ge=1, le=0xFFFF)]


class Join(Message, frozen=True):
    """Receiver: I want your state. `step` is the only one I take, if I ask for one."""

    step: Step | None = None
    parts: bool = False  # I take parts of what you have
    location: ProcessLocation = ProcessLocation()
    nonce: Nonce = b""  # for proofs about processes; empty if I read no other memory
    fd: Descriptor = -1  # file of mine that shows the nonce, where I might open device memory
    committed: Annotated[bytes, Meta(max_length=ID_BYTES)] = b""  # my last transfer from you
    address: NodeAddress | None = None  # of mine; None if I feed no other receiver


class Offer(_LargeMessage, frozen=True):
    """Sender: this is what I have, as an encoded record, and the routes that I can serve."""

    record: Blob
    transfer: Id
    verify: bool = True
    route: Name | None = None  # the only one I take
    routes: Annotated[dict[Name, Blob], Meta(max_length=64)] = {}
    unavailable: Reasons = {}  # routes that I cannot serve, and why
    several: bool = False  # I have other states for you: a step must be asked for
    threads: Count = 1  # to copy with on this machine, for each receiver
    patience: Seconds = 0.0  # without progress, before you take your chunks from me


class Accept(_LargeMessage, frozen=True):
    """Receiver: the state fits. Send all of it, or these reads of it, by this route."""

    route: Name
    answer: Annotated[bytes, Meta(max_length=_SMALL)] = b""  # of the route
    instead: Reasons = {}  # faster routes, and why none of them was taken
    reads: Blob | None = None  # parts of it (`plan.asked`)


class Refuse(Message, frozen=True):
    """Receiver: the state does not fit, or an object does not take its part."""

    kind: Name  # "step", "mismatch" (also: no memory), "unsupported", "manifest" or "route"
    message: Text
    path: Text | None = None


class Go(_LargeMessage, frozen=True):
    """Sender: begin. `data` is for the route."""

    data: Blob = b""


class Need(_LargeMessage, frozen=True):
    """Receiver: send me these chunks yourself. `restart`: these alone, over new connections, since
    those to you have broken."""

    chunks: Chunks
    restart: bool = False


class Want(_LargeMessage, frozen=True):
    """Receiver: tell me the digests of these chunks."""

    chunks: ChunkRanges


class Digests(_LargeMessage, frozen=True):
    """Sender: digests of chunks that were asked for, in the order of the chunks."""

    chunks: Chunks
    digests: Annotated[bytes, Meta(max_length=MAX_CHUNKS * 16)]


class RouteNote(_LargeMessage, frozen=True):
    """Both: a message from one end of a route to the other. Opaque to the protocol."""

    data: Blob


class Fetched(Message, frozen=True):
    """Receiver: I have every byte, and every digest matches."""


class Confirmed(Message, frozen=True):
    """Sender: the state is still the one that I described: commit it."""


class Done(Message, frozen=True):
    """Receiver: committed."""


class Abort(Message, frozen=True):
    """Both: I give up; a closed connection means the same."""

    message: Text
    kind: Name = ""  # "step": no state of the step that was asked for is offered
    timed_out: bool = False  # for want of time


class Ping(Message, frozen=True):
    """Both: are you there?"""


class Pong(Message, frozen=True):
    """Both: yes."""


# A frame's type is the position here.
MESSAGES: tuple[type[Message], ...] = (
    *(Join, Offer, Accept, Refuse, Go, Need, Want, Digests, RouteNote),
    *(Fetched, Confirmed, Done, Abort, Ping, Pong),
)

_MAGIC = 0x8B17
_FACTS = struct.Struct(f"<HBBI{DIGEST_BYTES}s")  # of the message
_CHECK_BYTES = 8  # XXH3-64 of them
_HEAD_BYTES = _FACTS.size + _CHECK_BYTES
_BEGINNING = struct.pack("<HB", _MAGIC, VERSION)
_TYPES = {kind: number for number, kind in enumerate(MESSAGES)}
_DECODERS: list[msgspec.msgpack.Decoder[Any]] = [msgspec.msgpack.Decoder(kind) for kind in MESSAGES]
_encode = msgspec.msgpack.Encoder().encode


def encode(message: Message) -> bytes:
    """A message as a frame."""
    body = _encode(message)
    digest = xxhash.xxh3_128_digest(body)
    return _head(_TYPES[type(message)], len(body), digest) + body


def _head(kind: int, length: int, digest: bytes) -> bytes:
    facts = _FACTS.pack(_MAGIC, VERSION, kind, length, digest)
    return facts + xxhash.xxh3_64_digest(facts)


class FrameReader:
    """Turns the bytes of a connection into messages."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[Message, int]]:
        """The messages that are complete with these bytes, and the bytes of each. `DigestError` for
        bytes that were changed on their way, `RemoteProtocolError` for any others."""
        self._data += data
        at = 0
        try:
            while self._has_head(at):
                kind, length, digest = _checked_head(self._data, at)
                begin = at + _HEAD_BYTES
                if len(self._data) < begin + length:
                    return
                with memoryview(self._data)[begin : begin + length] as body:
                    if xxhash.xxh3_128_digest(body) != digest:
                        raise DigestError(
                            f"{MESSAGES[kind].__name__} has other bytes than were sent"
                        )
                    message: Message = read_by(_DECODERS[kind], body)
                at = begin + length
                yield message, length
        finally:
            del self._data[:at]

    def _has_head(self, at: int) -> bool:
        """Whether a head is here; `RemoteProtocolError` as soon as it cannot become one."""
        if len(self._data) >= at + _HEAD_BYTES:
            return True
        if not _BEGINNING.startswith(self._data[at : at + len(_BEGINNING)]):
            raise RemoteProtocolError("a frame that is not of this protocol")
        return False


def _checked_head(data: bytearray, at: int) -> tuple[int, int, bytes]:
    facts = bytes(data[at : at + _FACTS.size])
    if not facts.startswith(_BEGINNING):
        raise RemoteProtocolError("a frame that is not of this protocol")
    if xxhash.xxh3_64_digest(facts) != data[at + _FACTS.size : at + _HEAD_BYTES]:
        raise DigestError("the head of a message has other bytes than were sent")
    _, _, kind, length, digest = _FACTS.unpack(facts)
    if kind >= len(MESSAGES):
        raise RemoteProtocolError("a frame that is not of this protocol")
    most = MESSAGES[kind].most_bytes
    if length > most:
        name = MESSAGES[kind].__name__
        raise RemoteProtocolError(f"{name} of {length} bytes, the cap is {most}")
    return kind, length, digest


def read_by(decoder: msgspec.msgpack.Decoder[T], body: bytes | memoryview) -> T:
    """A decoded message of a peer. Raises `RemoteProtocolError` if a field is out of range."""
    try:
        return decoder.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError) as fault:
        raise RemoteProtocolError(f"unreadable message: {fault}") from None


def reader(kind: type[T]) -> Callable[[bytes], T]:
    """A function that reads messages of one kind, to be made when a module is loaded.

    msgspec looks a type up when it is first used, without a lock: two threads that do so at once
    end the process. So this library makes all decoders of its own types where they are defined.
    """
    return partial(read_by, msgspec.msgpack.Decoder(kind))


def write(record: msgspec.Struct) -> bytes:
    """The bytes that a `reader` reads."""
    return _encode(record)


def text(reason: object) -> str:
    """A reason for a peer, cut to what it takes."""
    return str(reason)[:2000]


def to_ranges(chunks: list[int]) -> tuple[tuple[int, int], ...]:
    """Ascending chunks as the first of each range, and the one after its last."""
    firsts = [n for n, chunk in enumerate(chunks) if not n or chunk != chunks[n - 1] + 1]
    lasts = [n - 1 for n in (*firsts[1:], len(chunks))]
    return tuple([(chunks[a], chunks[b] + 1) for a, b in zip(firsts, lasts, strict=False)])


def from_ranges(ranges: tuple[tuple[int, int], ...], count: int) -> list[int]:
    """The chunks of ranges, of `count` in all; `RemoteProtocolError` for others."""
    edges = [0, *(edge for one in ranges for edge in one), count]
    if any(low > high for low, high in pairwise(edges)):
        raise RemoteProtocolError("chunks that do not exist")
    return [chunk for low, high in ranges for chunk in range(low, high)]
