"""The interface of routes: how the bytes of a live state get to another process.

A route is one file here, with its `ROUTE`, and one line in the list of `choice.py`. For each
receiver that joins, the sender has a `RouteService` of every route that it offers. The receiver
takes one of them, and makes the `RouteFetch` for it. Their messages to each other are opaque to
the protocol, which carries them: in the `Offer`, the `Accept` and the `Go`, and later in
`RouteNote`s.

On a route that reads (`memory`, `cuda_ipc`, `nixl`) the receiver takes the bytes itself and the
sender keeps them where they are. On the others the sender pushes chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from torchrelay.errors import DigestError
from torchrelay.geometry.runs import Runs
from torchrelay.landing.seam import Landing
from torchrelay.memory.gpu.device_chunks import DeviceChunks
from torchrelay.memory.gpu.kernels import Tables
from torchrelay.memory.gpu.side import in_use
from torchrelay.plan.snapshot import Sendable
from torchrelay.transports.meeting.conversation import Conversation
from torchrelay.transports.meeting.node import DataTicket, Node
from torchrelay.transports.resources import Resources
from torchrelay.transports.routes.host.layout import MemoryLayout
from torchrelay.transports.streams.outgoing_chunks import OutgoingChunks
from torchrelay.transports.wire.messages import Accept, Join, Message, Offer

RETRIES = 2  # times a chunk whose digest does not match is fetched again


class Unavailable(NamedTuple):
    """A route cannot be taken; the report says why, unless there is nothing to say."""

    because: str


class RouteFault(Exception):
    """A route that was agreed on cannot be served after all; the message says why."""


# The sender's end


@dataclass(frozen=True)
class Outgoing:
    """Bytes that are sent: a state, or the parts of it that a receiver asked for."""

    snapshot: Sendable
    resources: Resources
    verify: bool | None

    @cached_property
    def from_gpu(self) -> bool:
        """Whether some of it lies on a GPU."""
        return in_use() and "cuda" in self.snapshot.devices

    @property
    def cells(self) -> bool:
        """Whether digests are made of cells: a device can make them."""
        return self.from_gpu

    @cached_property
    def layout(self) -> MemoryLayout:
        return MemoryLayout(self.snapshot)

    @cached_property
    def chunks(self) -> OutgoingChunks:
        return OutgoingChunks(
            self.snapshot,
            self.layout.on_gpu,
            self.resources.buffers,
            verify=self.verify is not False,
            cells=self.cells,
            pinned=self.from_gpu,
            tables=self.resources.of(Tables) if self.from_gpu else None,
        )


class Hop(NamedTuple):
    """A receiver's place in a chain: the rank that feeds it (None: the sender), the receiver that
    it feeds, and how many are before it."""

    upstream: int | None = None
    downstream: DataTicket | None = None
    depth: int = 0


@dataclass(frozen=True)
class Receiver:
    """A receiver that has joined a send, as routes see it."""

    rank: int
    me: int
    transfer: bytes
    join: Join
    node: Node
    group: Any  # the process group, for device backends
    receivers: int  # of the send, in all
    connections: int
    say: Callable[[Message], None]
    report: Callable[[object], None]  # what workers have done, to the loop of the send


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
    is_likely = False  # after `offer`: the receiver will probably take this route

    def offer(self, outgoing: Outgoing) -> bytes | Unavailable:
        """The facts by which the receiver decides whether to take the route."""
        return b""

    def begin(self, outgoing: Outgoing, accept: Accept, hop: Hop) -> bytes:
        """Serve these bytes from now on; returns what the receiver's end needs. `RouteFault` if
        that cannot be done."""
        raise NotImplementedError

    def need(self, chunks: Sequence[int], *, restart: bool) -> None:
        """Send these chunks from here; `restart`: these alone, over new connections."""
        raise RouteFault("asked for chunks on a route on which it reads them itself")

    def hear(self, data: bytes) -> None:
        """The receiver's end says something. `RemoteProtocolError` if it makes no sense."""
        raise RouteFault("said something that its route does not understand")

    def close(self) -> None:
        """The receiver is not served any more: nothing of the state is read for it after this."""


# The receiver's end


@dataclass(frozen=True)
class Incoming:
    """A state that is offered, as routes see it at the receiver."""

    conversation: Conversation
    offer: Offer
    nonce: bytes  # shown by the sender's process; empty if no memory of others is read
    group: Any
    resources: Resources
    connections: int
    progress: Callable[[int, int], None]
    on_device: bool  # some of it goes to a device
    named: Callable[[int, int], str] = lambda start, stop: f"bytes {start} to {stop}"

    def differs(self, what: str) -> DigestError:
        talk = self.conversation
        return DigestError(
            f"{what} does not have the digest it was sent with: was the state changed while it "
            "was sent?",
            rank=talk.sender,
            step=talk.step,
            phase="data",
        )


class RouteFetch:
    """The receiver's end of a route: brings the bytes of one transfer to their places."""

    answer = b""  # to the offer
    verified = False  # digests are compared
    wire_bytes = 0
    messages = 0
    connections = 0

    def run(self, go: bytes, landing: Landing, patience: float) -> None:
        """Returns when every byte is in its place, and verified if it should be."""
        raise NotImplementedError

    def finish(self) -> None:
        """After the commit: serve those who take bytes from here."""

    def close(self) -> None:
        """Nothing is written after this."""


class FetchProgress:
    """Bytes done, for the caller's progress function and for errors."""

    def __init__(self, incoming: Incoming, total: int) -> None:
        self._incoming, self._total = incoming, total
        self._done = 0
        self._tell()

    @property
    def left(self) -> int:
        return self._total - self._done

    def add(self, nbytes: int) -> None:
        self._done = min(self._done + nbytes, self._total)
        self._tell()
        self._incoming.progress(self._done, self._total)

    def _tell(self) -> None:
        self._incoming.conversation.done = f"{self._done} of {self._total} bytes done"


def on_gpu(incoming: Incoming, landing: Landing) -> DeviceChunks:
    """The chunks that a GPU can hash where they land."""
    if not (incoming.offer.cells and in_use()):
        return DeviceChunks(landing.chunks, Runs([], [], []))
    places = landing.places()
    return DeviceChunks(landing.chunks, places.device, places.indirect)


def chunk_named(incoming: Incoming, landing: Landing, index: int) -> str:
    """A chunk, by the tensors it has bytes of, for a message."""
    begin = landing.chunks.offsets[index]
    return f"chunk {index} with {incoming.named(begin, begin + landing.chunks.sizes[index])}"


@dataclass(frozen=True)
class Route:
    """A way for bytes from one process to another: its name, and its two ends."""

    name: str
    service: Callable[[Receiver], RouteService]
    fetch: Callable[[bytes, Incoming], RouteFetch | Unavailable]  # takes what the sender offers
    reads: bool = False  # the receiver takes the bytes itself
    by_request: bool = False  # taken only if both sides ask for it
    compared_by_request: bool = False  # the kernel copies: digests are compared if `verify` is True

    def compares(self, verify: bool | None) -> bool:
        """Whether what comes by it is compared with what was sent."""
        return verify is True if self.compared_by_request else verify is not False
