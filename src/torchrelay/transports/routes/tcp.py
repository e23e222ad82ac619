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
from functools import partial
from typing import Annotated

import msgspec
import torch
from msgspec import Meta

from torchrelay.errors import RelayError
from torchrelay.memory.pool import cores
from torchrelay.transports.meeting.node import DataTicket
from torchrelay.transports.routes import route as r
from torchrelay.transports.routes.outgoing import Outgoing
from torchrelay.transports.streams.chunk_receiver import (
    ChunkArrived,
    ChunkDamaged,
    ChunkReceiver,
    Feed,
    FeedLost,
)
from torchrelay.transports.streams.chunk_sender import MAX_CONNECTIONS, ChunkSender, FeedBroken
from torchrelay.transports.streams.sockets import DataSocket
from torchrelay.transports.wire import messages as m

CONNECTION_BYTES = 8 << 20  # of a state, for which one more connection is worth making
FORWARDED = 4  # chunks in buffers that wait to be passed on
TICK = 0.25
END_SECONDS = 1.0


def usual_connections() -> int:
    """Two on small machines, eight on large ones: half as many as cores, so that as many can
    hash."""
    return max(2, min(8, cores() // 2))


class TcpAnswer(msgspec.Struct, array_like=True, frozen=True):
    """The answer of a receiver that takes the route."""

    connections: m.Count


class TcpGo(msgspec.Struct, array_like=True, frozen=True):
    """Where to connect to, and what shows that it is for this transfer."""

    key: m.Key
    connections: Annotated[int, Meta(ge=1, le=MAX_CONNECTIONS)]
    upstream: m.NodeAddress | None = None  # of the receiver that feeds this one; None: the sender
    depth: m.Count = 0
    downstream: tuple[m.Id, m.Key] | None = None  # admits the receiver that is fed from here
    broken: m.Count = (
        0  # the number of the first connections to the sender, which may have had some
    )


_read_answer, _read_go = m.reader(TcpAnswer), m.reader(TcpGo)


class TcpService(r.RouteService):
    """Feeds a receiver; or only what it asks for, if another receiver feeds it."""

    def __init__(self, receiver: r.Receiver) -> None:
        super().__init__(receiver)
        self._stack = ExitStack()
        self._feed: ChunkSender | None = None
        self._count = self._asked = self._restarts = 0
        self._tickets = 0  # that were given out; connections with an earlier one are not taken

    def begin(self, outgoing: Outgoing, accept: m.Accept, link: r.Link) -> bytes:
        chunks = outgoing.snapshot.chunks
        wanted = _read_answer(accept.answer).connections
        worth = -(-chunks.stream_bytes // CONNECTION_BYTES)
        count = max(1, min(wanted, self._receiver.connections, worth, MAX_CONNECTIONS))
        self.close()  # of an earlier acceptance
        self.outgoing, self._count = outgoing, len(chunks)
        self._asked = self._restarts = 0
        ticket = self._tickets
        self._start([] if link.address is not None else range(self._count))
        tickets = self._receiver.tickets
        downstream = None if link.downstream is None else tickets[link.downstream][:2]
        key = tickets[link.rank].key
        return m.write(TcpGo(key, count, link.address, link.depth, downstream, ticket))

    def _start(self, chunks: Sequence[int]) -> None:
        outgoing, receiver = self.outgoing, self._receiver
        assert outgoing is not None
        hashed = outgoing.note_digest if outgoing.hashes else None
        self._feed = ChunkSender(outgoing.borrow, receiver.report, hashed)
        self._feed.put(chunks)
        ticket = receiver.tickets[receiver.rank]._replace(broken=self._tickets)
        self._tickets += 1
        self._stack.enter_context(receiver.member.node.expect(ticket, _add_to(self._feed)))

    def need(self, chunks: Sequence[int], *, restart: bool) -> None:
        self._asked += len(chunks)
        if self._feed is None or max(chunks, default=0) >= self._count:
            raise r.RouteFault("asked for chunks that do not exist")
        most = (r.RETRIES + 2) * self._count + MAX_CONNECTIONS
        if self._asked > most or self._restarts >= 2 * r.RETRIES:
            raise r.RouteFault("asks for the same chunks again and again")
        if restart:
            self._restarts += 1
            self.close()
            self._start(chunks)
        else:
            self._feed.put(chunks)

    @property
    def stuck_since(self) -> float | None:
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


class TcpFetch(r.RouteFetch):
    """Takes chunks from its upstream, passes them on, and asks the sender for what it lacks."""

    _chunks: ChunkReceiver
    _go: TcpGo

    def __init__(self, incoming: r.Incoming) -> None:
        self._incoming, self._talk = incoming, incoming.conversation
        self._progress = r.FetchProgress(incoming)
        self.verified = incoming.offer.verify
        self.answer = m.write(TcpAnswer(max(1, incoming.connections)))
        self._stack = ExitStack()
        self._feeds: list[Feed] = []
        self._upstream: Feed | None = None  # that is not the sender
        self._direct: Feed | None = None  # the sender
        self._downstream: ChunkSender | None = None
        self._passing: dict[int, ChunkArrived] = {}  # chunks for the next receiver of the chain
        self._broken = 0  # times that connections to the sender broke
        self._expected = len(incoming.landing.chunks)  # chunks that have yet to arrive
        self._patience = incoming.offer.patience
        self._arrived_at = time.monotonic()

    # The phase

    def run(self, go: bytes) -> None:
        self._go = _read_go(go)
        chain = self._go.downstream is not None
        self._chunks = ChunkReceiver(
            self._incoming.landing,
            self._incoming.on_gpu(),
            partial(self._incoming.member.buffer, pinned=self._incoming.pins),
            self._talk.inbox.put,
            verify=self.verified,
            cells=self._incoming.offer.cells,
            keep=FORWARDED * self._go.connections if chain else 0,
        )
        if not self._expected:
            return
        if self._go.downstream is not None:
            self._downstream = ChunkSender(self._borrow, self._talk.inbox.put)
            ticket, add = DataTicket(*self._go.downstream), _add_to(self._downstream)
            self._stack.enter_context(self._talk.node.expect(ticket, add))
        if self._go.upstream is None:
            self._direct = self._connect_to_sender()
        else:
            self._upstream = self._connect(self._go.upstream, 0)
        while self._expected:
            self._handle(self._talk.next("data", TICK if self._patience else float("inf")))
            self._look_around()

    def _connect_to_sender(self) -> Feed:
        return self._connect(self._talk.address, self._go.broken + self._broken)

    def _connect(self, address: m.NodeAddress, broken: int) -> Feed:
        """Data connections to a process that feeds this one."""
        talk, node = self._talk, self._talk.node
        ticket = DataTicket(self._incoming.offer.transfer, self._go.key, broken)

        def connect(over: Callable[[], bool]) -> DataSocket:
            return DataSocket(node.connect_data(address, ticket, talk.deadline, over))

        self.connections = self._go.connections
        self._arrived_at = time.monotonic()
        self._feeds.append(Feed(self._chunks, connect, self.connections))
        return self._feeds[-1]

    def _handle(self, event: object) -> None:
        if isinstance(event, ChunkArrived):
            self._arrived(event)
        elif isinstance(event, ChunkDamaged):
            self.wire_bytes += self._incoming.landing.chunks.sizes[event.index]
            self._progress.retry(event.index)
            self._ask([event.index])
        elif isinstance(event, Exception):
            raise event
        elif isinstance(event, FeedLost):
            self._feed_lost(event)
        elif isinstance(event, FeedBroken):
            self._stop_feeding()
        elif isinstance(event, m.Message):
            raise self._talk.out_of_turn(event)

    def _arrived(self, chunk: ChunkArrived) -> None:
        self._arrived_at = time.monotonic()
        self._expected -= 1
        self.messages += 1
        self.wire_bytes += chunk.data.numel()
        if self._downstream is not None:
            self._passing[chunk.index] = chunk
            self._downstream.put([chunk.index])
        else:
            self._chunks.let_go(chunk.buffered)
        self._progress.add(chunk.data.numel())

    def _ask(self, chunks: list[int]) -> None:
        """Take these chunks from the sender itself."""
        fresh = self._direct is None
        self._talk.send(m.Need(tuple(chunks), restart=fresh and self._broken > 0))
        if fresh:
            self._direct = self._connect_to_sender()

    # Losses

    def _feed_lost(self, event: FeedLost) -> None:
        if event.feed is self._upstream:
            self._leave_upstream()
        elif event.feed is self._direct:
            self._broken += 1
            self._direct.close()
            self._direct = None
            if self._broken > r.RETRIES:
                raise event.shortage or self._talk.lost(event.reason)
            self._ask(sorted(self._chunks.missing))

    def _leave_upstream(self) -> None:
        upstream, self._upstream = self._upstream, None
        if upstream is not None:
            upstream.close()
            self._ask(sorted(self._chunks.missing))

    def _look_around(self) -> None:
        """Leave an upstream that sends nothing, and a downstream that takes nothing. Those behind
        a receiver wait longer than it does: if it finds another way they need none."""
        if not self._patience:
            return
        now = time.monotonic()
        starved_at = self._arrived_at + self._patience * (1 + self._go.depth / 2)
        if self._upstream is not None and self._expected and now > starved_at:
            self._leave_upstream()
        down = self._downstream
        if down is not None and down.unsent and now > down.moved_at + self._patience / 2:
            self._stop_feeding()

    # The next receiver

    @contextmanager
    def _borrow(self, index: int) -> Iterator[tuple[torch.Tensor, bytes]]:
        """Within: a chunk that has arrived, with the digest that it came with."""
        chunk = self._passing.pop(index)
        try:
            yield chunk.data, chunk.digest
        finally:
            self._chunks.let_go(chunk.buffered)

    def _stop_feeding(self) -> None:
        """The next receiver notices that its connections are closed, and asks the sender."""
        down, self._downstream = self._downstream, None
        if down is not None:
            down.close()
            while self._passing:
                self._chunks.let_go(self._passing.popitem()[1].buffered)

    def finish(self) -> None:
        """Let the next receiver have the last chunks."""
        with suppress(RelayError):  # the sender has closed its end: it has no one left to serve
            while self._downstream is not None and self._downstream.unsent:
                if isinstance(self._talk.next("end", TICK), FeedBroken):
                    self._stop_feeding()
                self._look_around()
            if self._downstream is not None:
                self._downstream.finish(self._patience or END_SECONDS)

    def close(self) -> None:
        self._stack.close()
        if hasattr(self, "_chunks"):  # it has begun
            self._chunks.stop()
        for feed in self._feeds:
            feed.close()
        self._stop_feeding()


ROUTE = r.Route("tcp", TcpService, lambda facts, incoming: TcpFetch(incoming), chained=True)
