"""Route "tcp": the sender pushes chunks over data connections. It always works.

The receiver opens the connections, to the sender or, in a chain, to the receiver before it. A chunk
goes with its digest. A receiver of a chain passes each chunk on as soon as it matches. One that
loses its upstream takes what it lacks from the sender.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import Annotated

import msgspec
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
from torchrelay.transports.streams.next_receiver import NextReceiver
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
        self._count = self._requested = self._restarts = 0
        self._tickets = 0  # that were given out; connections with an earlier one are not taken

    def begin(self, outgoing: Outgoing, accept: m.Accept, link: r.Link) -> bytes:
        chunks = outgoing.snapshot.chunks
        wanted = _read_answer(accept.answer).connections
        worth = -(-chunks.stream_bytes // CONNECTION_BYTES)
        count = max(1, min(wanted, self._receiver.connections, worth, MAX_CONNECTIONS))
        self.close()  # of an earlier acceptance
        self.outgoing, self._count = outgoing, len(chunks)
        self._requested = self._restarts = 0
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
        self._stack.enter_context(receiver.member.node.expect(ticket, _adds_to(self._feed)))

    def need(self, chunks: Sequence[int], *, restart: bool) -> None:
        self._requested += len(chunks)
        if self._feed is None or max(chunks, default=0) >= self._count:
            raise r.RouteFault("asked for chunks that do not exist")
        most = (r.RETRIES + 2) * self._count + MAX_CONNECTIONS
        if self._requested > most or self._restarts >= 2 * r.RETRIES:
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


def _adds_to(feed: ChunkSender) -> Callable[[socket.socket], None]:
    return lambda sock: feed.add(DataSocket(sock))


class TcpFetch(r.RouteFetch):
    """Takes chunks from its upstream, passes them on, and asks the sender for what it lacks."""

    def __init__(self, incoming: r.Incoming) -> None:
        self._incoming = incoming
        self.verified = incoming.offer.verify
        self.answer = m.write(TcpAnswer(max(1, incoming.connections)))
        self._transfer: _ChunkTransfer | None = None

    def run(self, go: bytes) -> None:
        transfer = self._transfer = _ChunkTransfer(self._incoming, _read_go(go))
        transfer.run()
        self.messages, self.wire_bytes = transfer.messages, transfer.wire_bytes
        self.connections = transfer.connections

    def finish(self) -> None:
        """Let the next receiver have the last chunks."""
        if self._transfer is not None:
            self._transfer.finish()

    def close(self) -> None:
        if self._transfer is not None:
            self._transfer.close()


class _ChunkTransfer:
    """The chunks of one transfer, from the two sources that they can come from.

    | event                 | from the upstream, a receiver  | from the sender                     |
    |-----------------------|--------------------------------|-------------------------------------|
    | a chunk has arrived   | pass it on                     | pass it on                          |
    | a chunk is damaged    | `Need` it from the sender      | `Need` it again, `RETRIES` times    |
    | connections are lost  | leave it: `Need` all that lack | the same, over new ones, `RETRIES`  |
    | no chunk for a while  | leave it                       | wait for the deadline               |

    In the chain sender -> 1 -> 2 -> 3, where rank 1 dies: rank 2 leaves it and needs chunks 5 to 9
    from the sender. It feeds rank 3 as before, which notices nothing but a delay, and has more
    patience the further down the chain it is.
    """

    def __init__(self, incoming: r.Incoming, go: TcpGo) -> None:
        self._incoming, self._go, self._talk = incoming, go, incoming.conversation
        self._chunks = ChunkReceiver(
            incoming.target,
            incoming.on_gpu(),
            partial(incoming.member.buffer, pinned=incoming.pins),
            self._talk.inbox.put,
            verify=incoming.offer.verify,
            keep=0 if go.downstream is None else FORWARDED * go.connections,
        )
        self._progress = r.FetchProgress(incoming)
        self._patience = incoming.offer.patience
        self._expected = len(incoming.target.chunks)  # chunks that have yet to arrive
        self._feeds: list[Feed] = []  # all that there were
        self._upstream: Feed | None = None  # that is not the sender
        self._from_sender: Feed | None = None
        self._broken = 0  # times that connections to the sender broke
        self._next: NextReceiver | None = None
        self._arrived_at = time.monotonic()
        self.messages = self.wire_bytes = self.connections = 0

    def run(self) -> None:
        """Returns when every chunk is here."""
        if not self._expected:
            return
        if self._go.downstream is not None:
            self._next = NextReceiver(self._talk.inbox.put, self._release)
            self._next.admit(self._talk.node, DataTicket(*self._go.downstream))
        if self._go.upstream is None:
            self._from_sender = self._connect_to_sender()
        else:
            self._upstream = self._connect(self._go.upstream, 0)
        while self._expected:
            self._handle(self._talk.next("data", TICK if self._patience else float("inf")))
            self._check_patience()

    def finish(self) -> None:
        """Let the next receiver have the last chunks."""
        with suppress(RelayError):  # the sender has closed its end: it has no one left to serve
            while self._next is not None and self._next.unsent:
                if isinstance(self._talk.next("end", TICK), FeedBroken):
                    self._leave_next()
                self._check_patience()
            if self._next is not None:
                self._next.finish(self._patience or END_SECONDS)

    def close(self) -> None:
        """Nothing is written after this."""
        self._chunks.stop()
        for feed in self._feeds:
            feed.close()
        self._leave_next()

    def _handle(self, event: object) -> None:
        if isinstance(event, ChunkArrived):
            self._arrived(event)
        elif isinstance(event, ChunkDamaged):
            self.wire_bytes += self._incoming.target.chunks.sizes[event.index]
            self._progress.retry(event.index)
            self._need([event.index])
        elif isinstance(event, FeedLost):
            self._feed_lost(event)
        elif isinstance(event, FeedBroken):
            self._leave_next()
        elif isinstance(event, Exception):
            raise event
        elif isinstance(event, m.Message):
            raise self._talk.out_of_turn(event)

    def _arrived(self, chunk: ChunkArrived) -> None:
        self._arrived_at = time.monotonic()
        self._expected -= 1
        self.messages += 1
        self.wire_bytes += chunk.data.numel()
        if self._next is not None:
            self._next.pass_on(chunk)
        else:
            self._release(chunk)
        self._progress.add(chunk.data.numel())

    def _release(self, chunk: ChunkArrived) -> None:
        self._chunks.let_go(chunk.buffered)

    # Where chunks come from

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

    def _need(self, chunks: list[int]) -> None:
        """Take these chunks from the sender itself."""
        fresh = self._from_sender is None
        self._talk.send(m.Need(tuple(chunks), restart=fresh and self._broken > 0))
        if fresh:
            self._from_sender = self._connect_to_sender()

    def _feed_lost(self, event: FeedLost) -> None:
        if event.feed is self._upstream:
            self._leave_upstream()
        elif event.feed is self._from_sender:
            self._broken += 1
            self._from_sender.close()
            self._from_sender = None
            if self._broken > r.RETRIES:
                raise event.shortage or self._talk.lost(event.reason)
            self._need(sorted(self._chunks.missing))

    def _leave_upstream(self) -> None:
        upstream, self._upstream = self._upstream, None
        if upstream is not None:
            upstream.close()
            self._need(sorted(self._chunks.missing))

    def _leave_next(self) -> None:
        following, self._next = self._next, None
        if following is not None:
            following.close()

    def _check_patience(self) -> None:
        """Leave an upstream that sends nothing, and a next receiver that takes nothing."""
        if not self._patience:
            return
        # Receivers further down wait longer: if this one finds another way, they need none.
        starved = self._patience * (1 + self._go.depth / 2)
        if self._expected and time.monotonic() > self._arrived_at + starved:
            self._leave_upstream()
        if self._next is not None and self._next.takes_nothing_for(self._patience / 2):
            self._leave_next()


ROUTE = r.Route(
    "tcp",
    TcpService,
    lambda facts, incoming: TcpFetch(incoming),
    chained=True,
    comparison=r.DigestComparison.BY_DEFAULT,
)
