"""The interface of routes: how the bytes of a live state get to another process.

A route is one file here, with its `ROUTE`, and one line in the list of `choice.py`. For each
receiver that joins, the sender has a `RouteService` of every route that it offers. The receiver
takes one of them, and makes the `RouteFetch` for it. Their messages to each other are opaque to
the protocol, which carries them: in the `Offer`, the `Accept` and the `Go`, and later in
`RouteNote`s.

On a route that reads (`memory`, `cuda_ipc`) the receiver takes the bytes itself and the sender
keeps them where they are. On the others the sender pushes chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from torchrelay.errors import DigestError
from torchrelay.geometry.runs import Runs
from torchrelay.landing.read_target import ReadTarget
from torchrelay.memory.gpu.device_chunks import DeviceChunks
from torchrelay.memory.gpu.side import in_use
from torchrelay.transports.meeting.conversation import Conversation
from torchrelay.transports.meeting.node import DataTicket
from torchrelay.transports.resources import Member
from torchrelay.transports.routes.outgoing import Outgoing
from torchrelay.transports.wire.messages import Accept, Join, Message, NodeAddress, Offer

RETRIES = 2  # times a chunk whose digest does not match is fetched again


class Unavailable(NamedTuple):
    """A route cannot be taken; the report says why, unless there is nothing to say."""

    because: str


class RouteFault(Exception):
    """A route that was agreed on cannot be served after all; the message says why."""


# The sender's end


class Link(NamedTuple):
    """A receiver, the one that feeds it (None: the sender), the one that it feeds, how many are
    before it, and where the one that feeds it listens."""

    rank: int
    upstream: int | None = None
    downstream: int | None = None
    depth: int = 0
    address: NodeAddress | None = None


@dataclass(frozen=True)
class Receiver:
    """A receiver that has joined a send, as routes see it."""

    rank: int
    member: Member  # the sender
    join: Join
    tickets: Mapping[int, DataTicket]  # by rank, of all receivers of the send
    connections: int
    send: Callable[[Message], None]
    report: Callable[[object], None]  # what workers have done, to the loop of the send

    @property
    def transfer(self) -> bytes:
        return self.tickets[self.rank].transfer


@dataclass(frozen=True)
class ServiceFailed:
    """A worker cannot serve a receiver any more."""

    rank: int
    reason: str


class RouteService:
    """The sender's end of a route, for one receiver."""

    wire_bytes = 0
    messages = 0
    connections = 0

    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver
        self.outgoing: Outgoing | None = None  # what is served

    def offer(self, outgoing: Outgoing) -> bytes | Unavailable:
        """The facts by which the receiver decides whether to take the route."""
        return b""

    def begin(self, outgoing: Outgoing, accept: Accept, link: Link) -> bytes:
        """Serve these bytes from now on; returns what the receiver's end needs. `RouteFault` if
        that cannot be done, also where `offer` has said `Unavailable`: a hostile receiver may ask
        all the same."""
        raise NotImplementedError

    def need(self, chunks: Sequence[int], *, restart: bool) -> None:
        """Send these chunks from here; `restart`: these alone, over new connections."""
        raise RouteFault("asked for chunks on a route on which it reads them itself")

    def handle_note(self, data: bytes) -> None:
        """A message of the receiver's end. `RemoteProtocolError` if it makes no sense."""
        raise RouteFault("sent a note that its route does not understand")

    @property
    def stuck_since(self) -> float | None:
        """When the last bytes left, if there are chunks that have not left yet."""
        return None

    def close(self) -> None:
        """The receiver is not served any more: nothing of the state is read for it after this."""


# The receiver's end


@dataclass(frozen=True)
class Incoming:
    """A state that is offered, as routes see it at the receiver."""

    conversation: Conversation
    offer: Offer
    nonce: bytes  # shown by the sender's process; empty if no memory of others is read
    member: Member  # the receiver
    connections: int
    progress: Callable[[int, int], None]
    target: ReadTarget
    named: Callable[[int, int], str] | None = None  # the tensors of bytes, if it is all of a state

    @property
    def whole(self) -> bool:
        """Whether it is all of a state."""
        return self.named is not None

    @property
    def pins(self) -> bool:
        """Whether buffers are pinned: chunks are copied from them to a GPU."""
        return self.target.on_device and in_use()

    def on_gpu(self) -> DeviceChunks:
        """The chunks that a GPU can hash where they land."""
        chunks = self.target.chunks
        if not in_use():
            return DeviceChunks(chunks, Runs([], [], []))
        return DeviceChunks(chunks, self.target.stream.device)


class RouteFetch:
    """The receiver's end of a route: brings the bytes of one transfer to their places."""

    answer = b""  # to the offer
    verified = False  # digests are compared
    wire_bytes = 0
    messages = 0
    connections = 0

    def get_ready(self) -> None:
        """Work out what does not depend on the `Go`, while the sender makes it."""

    def run(self, go: bytes) -> None:
        """Returns when every byte is in its place, and verified if it should be."""
        raise NotImplementedError

    def finish(self) -> None:
        """After the commit: serve those who take bytes from here."""

    def close(self) -> None:
        """Nothing is written after this."""


class FetchProgress:
    """Bytes done, for the caller's progress function and for errors; and chunks that are fetched
    again."""

    def __init__(self, incoming: Incoming) -> None:
        self._incoming, self._chunks = incoming, incoming.target.chunks
        self._done = 0
        self._tries: dict[int, int] = {}
        self._note()

    def add(self, nbytes: int) -> None:
        total = self._chunks.stream_bytes
        self._done = min(self._done + nbytes, total)
        self._note()
        self._incoming.progress(self._done, total)

    def complete(self) -> None:
        """Everything is here. Padding between tensors is never read."""
        if left := self._chunks.stream_bytes - self._done:
            self.add(left)

    def retry(self, index: int) -> None:
        """A chunk does not match its digest. `DigestError` if it has failed too often."""
        self._tries[index] = self._tries.get(index, 0) + 1
        if self._tries[index] > RETRIES:
            talk, begin = self._incoming.conversation, self._chunks.offsets[index]
            end, named = begin + self._chunks.sizes[index], self._incoming.named
            where = f"bytes {begin} to {end}" if named is None else named(begin, end)
            raise DigestError(
                f"chunk {index} with {where}, after {RETRIES} more tries, does not have the digest "
                "it was sent with: was the state changed while it was sent?",
                rank=talk.sender,
                step=talk.step,
                phase="data",
            )

    def _note(self) -> None:
        self._incoming.conversation.done = f"{self._done} of {self._chunks.stream_bytes} bytes done"


class DigestComparison(Enum):
    """When a route compares the digests of bytes that have come with those that were sent."""

    NEVER = "never"
    BY_DEFAULT = "by default"  # unless `verify` is False
    BY_REQUEST = "by request"  # if `verify` is True: the kernel copies the bytes


@dataclass(frozen=True)
class Route:
    """A path for bytes from one process to another: its name, and its two ends."""

    name: str
    service: Callable[[Receiver], RouteService]
    fetch: Callable[[bytes, Incoming], RouteFetch | Unavailable]  # takes what the sender offers
    reads: bool = False  # the receiver takes the bytes itself, from memory of this host
    of_gpus: bool = False  # from memory of GPUs, which hash what lies there
    chained: bool = False  # a receiver can pass the bytes on to the next
    in_offer: bool = False  # a receiver of all of a state needs no more, and waits for no `Go`
    comparison: DigestComparison = DigestComparison.NEVER

    def compares(self, verify: bool | None) -> bool:
        """Whether bytes that come by it are compared with those that were sent."""
        by_request = self.comparison is DigestComparison.BY_REQUEST and verify is True
        return by_request or (
            self.comparison is DigestComparison.BY_DEFAULT and verify is not False
        )
