"""The seam of routes: how the bytes of a live state get to another process.

A route is one file here, with its `ROUTE`, and one line in the list of `choice.py`. What its two
ends say to each other is opaque to the protocol, which carries it: an offer, the answer to it, a
word when the data begins, words while it lasts, and one with the digests at the end.

On a route that `pulls` the receiver takes the bytes itself: the sender keeps them where they are
until it says that it is done. On the others the sender pushes chunks, to its only receiver or
down a chain of them.
"""

from __future__ import annotations

import queue
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, NamedTuple, Protocol

from torchrelay.deadlines import Deadline
from torchrelay.geometry.runs import Runs
from torchrelay.landing.seam import Landing
from torchrelay.memory.gpu.device_chunks import DeviceChunks
from torchrelay.memory.gpu.side import in_use
from torchrelay.plan.snapshot import Snapshot
from torchrelay.record.columns import devices_of
from torchrelay.transports.group.c10d import ProcessGroup
from torchrelay.transports.protocol import wire
from torchrelay.transports.protocol.options import SendOptions
from torchrelay.transports.resources import Resources
from torchrelay.transports.routes.hops import Way
from torchrelay.transports.routes.layout import MemoryLayout


class Unavailable(NamedTuple):
    """A route cannot be taken; the report says why, unless there is nothing to say."""

    because: str


class Line(Protocol):
    """Control messages to one peer in one transfer."""

    group: ProcessGroup
    peer: int
    transfer: int

    def send(self, message: wire.Message) -> None: ...


@dataclass(frozen=True)
class Outgoing:
    """A state that is sent, as a route sees it."""

    snapshot: Snapshot
    group: ProcessGroup
    resources: Resources
    device: str  # whose memory carries chunks
    options: SendOptions
    receivers: int

    @cached_property
    def from_gpu(self) -> bool:
        """Whether some of it lies on a GPU."""
        return in_use() and "cuda" in devices_of(self.snapshot.manifest.storages)

    @property
    def cells(self) -> bool:
        """Whether digests are of cells: a device can hash them."""
        return self.device != "cpu" or self.from_gpu

    @cached_property
    def layout(self) -> MemoryLayout:
        return MemoryLayout(self.snapshot)


class PushStream(NamedTuple):
    """How chunks are pushed to one receiver."""

    way: Way
    room: int  # for so many at a time
    buffers: int  # of those, so many in buffers
    hashes: bool = False  # they are hashed on the way


class Server:
    """The sender's end of a route, for all receivers of one send."""

    hashes = True  # digests of chunks go with the trailer
    copied_bytes = 0  # that this end has copied for receivers

    def get_ready(self) -> None:
        """Do what can be done before a receiver has come."""

    def offer(self, join: wire.Join, line: Line) -> wire.RouteOffer | Unavailable:
        """What a receiver that has joined is told. Unavailable: nothing."""
        return Unavailable("")

    def offered(self) -> None:
        """An offer is on its way: begin what the receiver will ask for while it looks at it."""

    def answer(self, rank: int, taken: str, word: bytes, deadline: Deadline) -> None:
        """The receiver takes route `taken`; `word` is its answer if that is this one."""

    def begin(self, rank: int) -> bytes | Unavailable:
        """The word that the data begins with. Empty: the receiver needs none."""
        return b""

    def stream(self, rank: int, transfer: int) -> PushStream | None:
        """How chunks are pushed beside the group; None where they are not."""
        return None

    def hear(self, line: Line, word: bytes) -> str:
        """Do what the receiver's end asks for; what is wrong with that, if anything."""
        return "said something that its route has no word for"

    def trailer(self, rank: int) -> bytes:
        """The word that goes with the digests, once the receiver has all bytes."""
        return b""

    def connections(self, rank: int) -> int:
        """That the receiver is served by, beside those of the group."""
        return 0

    def instead(self, rank: int) -> dict[str, str]:
        """Why the receiver is not served by it, where it should be."""
        return {}

    def end(self, rank: int, *, keep: bool) -> None:
        """The receiver is served or given up; `keep` what it was served by for the next time."""

    def close(self) -> None:
        """Nobody is served any more."""


@dataclass(frozen=True)
class Incoming:
    """A state that is received, as a route sees it."""

    line: Line
    events: queue.SimpleQueue[object]
    offer: wire.Offer
    landing: Landing
    named: Callable[[int, int], str]  # the tensors between two positions of the stream
    nonce: bytes  # that the sender's process shows
    may_read: bool  # memory of others. Another call, which offers were traded with, may do so
    step: int | None
    deadline: Deadline
    resources: Resources
    connections: int
    progress: Callable[[int, int], None]

    def chunk_named(self, chunk: int) -> str:
        """A chunk, by the tensors it has bytes of, for a message."""
        begin = self.landing.chunks.offsets[chunk]
        return f"chunk {chunk} with {self.named(begin, begin + self.landing.chunks.sizes[chunk])}"

    @cached_property
    def on_gpu(self) -> DeviceChunks:
        """The chunks that a GPU can hash where they land."""
        if not (self.offer.cells and in_use()):
            return DeviceChunks(self.landing.chunks, Runs([], [], []))
        places = self.landing.places()
        return DeviceChunks(self.landing.chunks, places.device, places.indirect)


class Mover:
    """The receiver's end of a route: brings the bytes of one transfer to their places."""

    answer = b""  # to the offer
    hashed: tuple[int, ...] = ()  # chunks whose digests the sender is to make
    verified = False  # digests are compared
    wire_bytes = 0
    messages = 0
    handed_bytes = 0  # of `wire_bytes`, read out of the memory of the receiver before this one
    connections = 0  # beside those of the group

    def run(self, go: wire.Go) -> None:
        """Returns when every byte is there, and verified if it is to be."""
        raise NotImplementedError

    def finish(self) -> None:
        """See to those who wait for bytes from here."""

    def close(self, *, keep: bool) -> None:
        """Nothing is written after this; `keep` what the bytes came by for the next time."""


class Route:
    """A way for bytes from one process to another."""

    name: ClassVar[str]
    asked_as: ClassVar[str]  # what a caller asks for, and a report says; its name by default
    pulls: ClassVar[bool] = False
    by_request: ClassVar[bool] = False  # taken only where both sides ask for it

    def __init_subclass__(cls) -> None:
        cls.asked_as = cls.__dict__.get("asked_as", cls.name)

    def compares(self, verify: bool | None) -> bool:
        """Whether what comes by it is compared with what was sent."""
        return verify is not False

    def server(self, outgoing: Outgoing) -> Server:
        return Server()

    def accept(self, offer: wire.RouteOffer | None, incoming: Incoming) -> Mover | Unavailable:
        """The receiver's end, if the offer can be taken. None: there is no offer."""
        raise NotImplementedError
