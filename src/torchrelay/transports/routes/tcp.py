"""Route "tcp": the sender pushes chunks over data connections. It always works.

The receiver opens the connections, to the sender or, in a chain, to the receiver before it. A chunk
goes with its digest. A receiver of a chain passes each chunk on as soon as it matches. One that
loses its upstream takes what it lacks from the sender.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Annotated

import msgspec
from msgspec import Meta

from torchrelay.errors import RelayError
from torchrelay.landing.seam import Landing
from torchrelay.memory.pool import cores
from torchrelay.transports.meeting.directory import Identity
from torchrelay.transports.meeting.node import DataTicket
from torchrelay.transports.routes.route import (
    RETRIES,
    FetchProgress,
    Hop,
    Incoming,
    Outgoing,
    Receiver,
    Route,
    RouteFault,
    RouteFetch,
    RouteService,
    chunk_named,
    on_gpu,
)
from torchrelay.transports.streams.chunk_receiver import (
    ChunkArrivals,
    ChunkArrived,
    ChunkDamaged,
    ChunkReceiver,
    FeedLost,
    FetchFailed,
)
from torchrelay.transports.streams.chunk_sender import (
    LANES,
    ChunkSender,
    FeedBroken,
    LentChunk,
)
from torchrelay.transports.streams.sockets import DataSocket
from torchrelay.transports.wire import messages
from torchrelay.transports.wire.handshake import new_key
from torchrelay.transports.wire.messages import (
    Accept,
    Count,
    Id,
    Key,
    Message,
    Need,
    Rank,
    read_as,
)

LANE_BYTES = 8 << 20  # of a state, for which one more connection is worth making
FORWARDED = 4  # chunks in buffers that wait to be passed on
TICK = 0.25
END_SECONDS = 1.0


def usual_connections() -> int:
    """Two on small machines, eight on large ones: half as many as cores, so that as many can
    hash."""
    return max(2, min(8, cores() // 2))


class TcpAnswer(msgspec.Struct, array_like=True, frozen=True):
    """The answer of a receiver that takes the route."""

    connections: Count


class TcpGo(msgspec.Struct, array_like=True, frozen=True):
    """Where to connect to, and what shows that it is for this transfer."""

    key: Key
    lanes: Annotated[int, Meta(ge=1, le=LANES)]
    upstream: Rank | None = None  # None: the sender
    depth: Count = 0
    downstream: tuple[Id, Key] | None = None  # admits the receiver that is fed from here


class TcpService(RouteService):
    """Feeds a receiver; or only what it asks for, if another receiver feeds it."""

    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver
        self.ticket = DataTicket(receiver.transfer, new_key())
        self._stack = ExitStack()
        self._outgoing: Outgoing | None = None
        self._feed: ChunkSender | None = None
        self._count = self._asked = self._restarts = 0

    def begin(self, outgoing: Outgoing, accept: Accept, hop: Hop) -> bytes:
        receiver, chunks = self._receiver, outgoing.snapshot.chunks
        wanted = read_as(TcpAnswer, accept.answer).connections
        worth = -(-chunks.stream_bytes // LANE_BYTES)
        lanes = max(1, min(wanted, receiver.connections, worth, LANES))
        self.close()  # of an earlier acceptance
        self._outgoing, self._count, self._restarts = outgoing, len(chunks), 0
        self._start([] if hop.upstream is not None else range(self._count))
        downstream = None if hop.downstream is None else hop.downstream[:2]
        return messages.write(TcpGo(self.ticket.key, lanes, hop.upstream, hop.depth, downstream))

    def _start(self, chunks: Sequence[int]) -> None:
        assert self._outgoing is not None
        self._feed = ChunkSender(self._outgoing.chunks, self._receiver.report)
        self._feed.put(chunks)
        ticket = self.ticket._replace(broken=self._restarts)
        self._stack.enter_context(self._receiver.node.expect(ticket, _add_to(self._feed)))

    def need(self, chunks: Sequence[int], *, restart: bool) -> None:
        self._asked += len(chunks)
        if self._feed is None or max(chunks, default=0) >= self._count:
            raise RouteFault("asked for chunks that do not exist")
        if self._asked > (RETRIES + 2) * self._count + LANES or self._restarts >= 2 * RETRIES:
            raise RouteFault("asks for the same chunks again and again")
        if restart:
            self._restarts += 1
            self.close()
            self._start(chunks)
        else:
            self._feed.put(chunks)

    @property
    def stuck_since(self) -> float | None:
        """When the last bytes left, if there are chunks that have not left yet."""
        return self._feed.moved_at if self._feed is not None and self._feed.unsent else None

    def close(self) -> None:
        self._stack.close()
        feed, self._feed = self._feed, None
        if feed is not None:
            feed.close()
            self.wire_bytes += feed.wire_bytes
            self.messages += feed.messages
            self.connections = max(self.connections, feed.connections)


def _add_to(feed: ChunkSender) -> Callable[[socket.socket], None]:
    return lambda sock: feed.add(DataSocket(sock))


class _Passing:
    """Chunks that have arrived, for the next receiver of a chain."""

    hashes = False  # they have the digests that they came with

    def __init__(self, arrivals: ChunkArrivals) -> None:
        self._arrivals = arrivals
        self._held: dict[int, ChunkArrived] = {}

    def hold(self, chunk: ChunkArrived) -> None:
        self._held[chunk.index] = chunk

    @contextmanager
    def borrow(self, index: int) -> Iterator[LentChunk]:
        chunk = self._held.pop(index)
        try:
            yield LentChunk(chunk.data, chunk.digest)
        finally:
            self._arrivals.give(chunk.buffer)

    def note_digest(self, index: int, digest: bytes) -> None:
        pass

    def drop(self) -> None:
        """Nothing more is passed on."""
        while self._held:
            self._arrivals.give(self._held.popitem()[1].buffer)


class TcpFetch(RouteFetch):
    """Takes chunks from its upstream, passes them on, and asks the sender for what it lacks."""

    _landing: Landing
    _arrivals: ChunkArrivals
    _go: TcpGo
    _progress: FetchProgress

    def __init__(self, incoming: Incoming) -> None:
        self._incoming, self._talk = incoming, incoming.conversation
        self.verified = incoming.offer.verify
        self.answer = messages.write(TcpAnswer(max(1, incoming.connections)))
        self._stack = ExitStack()
        self._feeds: list[ChunkReceiver] = []
        self._upstream: ChunkReceiver | None = None  # that is not the sender
        self._direct: ChunkReceiver | None = None  # the sender
        self._downstream: ChunkSender | None = None
        self._passing: _Passing | None = None
        self._tries: dict[int, int] = {}
        self._broken = 0  # times that connections to the sender broke
        self._expected = 0  # chunks that have yet to arrive, and be passed on
        self._patience = 0.0
        self._arrived_at = time.monotonic()

    # The phase

    def run(self, go: bytes, landing: Landing, patience: float) -> None:
        self._go, self._landing, self._patience = read_as(TcpGo, go), landing, patience
        chain = self._go.downstream is not None
        self._arrivals = ChunkArrivals(
            landing,
            on_gpu(self._incoming, landing),
            self._incoming.resources.buffers,
            verify=self.verified,
            cells=self._incoming.offer.cells,
            keep=FORWARDED * self._go.lanes if chain else 0,
        )
        self._progress = FetchProgress(self._incoming, landing.chunks.stream_bytes)
        self._expected = len(landing.chunks)
        if not self._expected:
            return
        self._feed_next()
        if self._go.upstream is None:
            self._direct = self._connect(self._sender())
        else:
            deadline = self._talk.deadline
            found = self._talk.node.directory.find(self._go.upstream, deadline)
            self._upstream = self._connect(found)
        while self._expected:
            event = self._talk.next("data", TICK if self._patience else float("inf"))
            self._handle(event)
            self._look_around()

    def _sender(self) -> Identity:
        return self._talk.node.directory.find(self._talk.sender, self._talk.deadline)

    def _connect(self, identity: Identity) -> ChunkReceiver:
        """Data connections to a process that feeds this one."""
        talk = self._talk
        ticket = DataTicket(self._incoming.offer.transfer, self._go.key, self._broken)
        feed = ChunkReceiver(self._arrivals, talk.inbox.put)

        def connect(over: Callable[[], bool]) -> DataSocket:
            return DataSocket(talk.node.connect_data(identity, ticket, talk.deadline, over))

        feed.connect(connect, self._go.lanes)
        self._feeds.append(feed)
        self.connections = max(self.connections, feed.connections)
        self._arrived_at = time.monotonic()
        return feed

    def _handle(self, event: object) -> None:
        if isinstance(event, ChunkArrived):
            self._arrived(event)
        elif isinstance(event, ChunkDamaged):
            self._damaged(event.index)
        elif isinstance(event, FetchFailed):
            raise event.fault
        elif isinstance(event, FeedLost):
            self._feed_lost(event)
        elif isinstance(event, FeedBroken):
            self._stop_feeding()
        elif isinstance(event, Message):
            raise self._talk.out_of_turn(event)

    def _arrived(self, chunk: ChunkArrived) -> None:
        self._arrived_at = time.monotonic()
        self._expected -= 1
        self.messages += 1
        self.wire_bytes += chunk.data.numel()
        if self._downstream is not None and self._passing is not None:
            self._passing.hold(chunk)
            self._downstream.put([chunk.index])
        else:
            self._arrivals.give(chunk.buffer)
        self._progress.add(chunk.data.numel())

    def _damaged(self, index: int) -> None:
        self._tries[index] = self._tries.get(index, 0) + 1
        self.wire_bytes += self._landing.chunks.sizes[index]
        if self._tries[index] > RETRIES:
            what = chunk_named(self._incoming, self._landing, index)
            raise self._incoming.differs(f"{what}, after {RETRIES} more tries,")
        self._ask([index])

    def _ask(self, chunks: list[int]) -> None:
        """Take these chunks from the sender itself."""
        fresh = self._direct is None
        self._talk.send(Need(tuple(chunks), restart=fresh and self._broken > 0))
        if fresh:
            self._direct = self._connect(self._sender())

    # Losses

    def _feed_lost(self, event: FeedLost) -> None:
        if event.receiver is self._upstream:
            self._leave_upstream()
        elif event.receiver is self._direct:
            self._broken += 1
            self._direct.close()
            self._direct = None
            if self._broken > RETRIES:
                raise self._talk.lost(event.reason)
            self._ask(sorted(self._arrivals.missing))

    def _leave_upstream(self) -> None:
        upstream, self._upstream = self._upstream, None
        if upstream is not None:
            upstream.close()
            self._ask(sorted(self._arrivals.missing))

    def _look_around(self) -> None:
        """Leave an upstream that sends nothing, and a downstream that takes nothing. Those behind
        a receiver wait longer than it does: if it finds another way they need none."""
        if not self._patience:
            return
        now = time.monotonic()
        starved_at = self._arrived_at + self._patience * (1 + self._go.depth / 2)
        if self._upstream is not None and self._arrivals.missing and now > starved_at:
            self._leave_upstream()
        down = self._downstream
        if down is not None and down.unsent and now > down.moved_at + self._patience / 2:
            self._stop_feeding()

    # The next receiver

    def _feed_next(self) -> None:
        if self._go.downstream is None:
            return
        self._passing = _Passing(self._arrivals)
        self._downstream = ChunkSender(self._passing, self._talk.inbox.put)
        ticket, add = DataTicket(*self._go.downstream), _add_to(self._downstream)
        self._stack.enter_context(self._talk.node.expect(ticket, add))

    def _stop_feeding(self) -> None:
        """The next receiver notices that its connections are closed, and asks the sender."""
        down, self._downstream = self._downstream, None
        if down is not None and self._passing is not None:
            down.close()
            self._passing.drop()

    def finish(self) -> None:
        """Let the next receiver have the last chunks."""
        with suppress(RelayError):  # the sender has closed its end: it has no one left to serve
            while self._downstream is not None and self._downstream.unsent:
                event = self._talk.next("end", TICK)
                if isinstance(event, FeedBroken):
                    self._stop_feeding()
                self._look_around()
            if self._downstream is not None:
                self._downstream.finish(self._patience or END_SECONDS)

    def close(self) -> None:
        self._stack.close()
        if self._go_is_known:
            self._arrivals.stop()
        for feed in self._feeds:
            feed.close()
        self._stop_feeding()

    @property
    def _go_is_known(self) -> bool:
        return hasattr(self, "_arrivals")


ROUTE = Route("tcp", TcpService, lambda facts, incoming: TcpFetch(incoming))
