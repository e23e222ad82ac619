"""The service that a sender gives its receivers: the `Effects` that `SenderMachine` calls.

Offers, bytes by routes, digests, and the last look at the state before a receiver may commit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from torchrelay.describing.snapshot import Snapshot, SnapshotPart
from torchrelay.memory.pool import cores
from torchrelay.record.rank_reads import decode_reads
from torchrelay.transports.meeting.matching import OpenSend
from torchrelay.transports.meeting.node import DataTicket
from torchrelay.transports.protocol.options import SendOptions, TransferCall
from torchrelay.transports.protocol.peers import Peer, Stage
from torchrelay.transports.resources import Member
from torchrelay.transports.routes import route as r
from torchrelay.transports.routes.choice import BY_NAME, services
from torchrelay.transports.routes.outgoing import Outgoing
from torchrelay.transports.streams.workers import Workers
from torchrelay.transports.wire import messages as m

MOST_ANSWERS = 1024  # messages with digests, to a receiver that asks once


class Serving:
    """Serves the receivers of one send, until `close`: its workers read nothing after that."""

    def __init__(
        self,
        member: Member,
        outgoing: Outgoing,
        snapshot: Snapshot,
        options: SendOptions,
        call: TransferCall,
        *,
        send: OpenSend,
        tickets: Mapping[int, DataTicket],
        patience: float,
        report: Callable[[object], None],
    ) -> None:
        self._member, self._node, self._options, self._call = member, member.node, options, call
        self._outgoing, self._snapshot, self._record = outgoing, snapshot, snapshot.encoded()
        self._open, self._tickets, self._patience, self._report = send, tickets, patience, report
        # They make digests. Where cores are few, receivers that read need them.
        self._workers = Workers(max(1, min(4, cores() // 4)), report)

    def close(self) -> None:
        self._workers.stop()

    # Effects of the machine

    def offer(self, peer: Peer, several: bool) -> None:
        join = peer.join
        assert join is not None
        if join.address is not None:
            peer.settled = self._node.settle(join.address.node, join.committed)
        offer = self._make_offer(peer, join, several)
        self.send(peer, offer)
        of_gpus = any(BY_NAME[name].of_gpus for name in offer.routes)
        if of_gpus and join.location.devices and not join.parts and offer.verify:
            # Devices hash what lies there: the receiver is likely to ask for it.
            self._workers.submit(self._outgoing.hash_on_devices)

    def another_came(self, peer: Peer) -> bool:
        return peer.rank in self._open.overlaps

    def go(self, peer: Peer, link: r.Link) -> None:
        accept = peer.accept
        assert accept is not None
        peer.service, peer.requested = peer.services[accept.route], set()
        data = peer.service.begin(self._outgoing_of(accept), accept, link)
        if accept.reads is not None or not BY_NAME[accept.route].in_offer:
            self.send(peer, m.Go(data))

    def serve(self, peer: Peer, request: m.Need | m.Want | m.RouteNote) -> None:
        assert peer.service is not None and peer.service.outgoing is not None
        if isinstance(request, m.RouteNote):
            peer.service.handle_note(request.data)
        elif isinstance(request, m.Need):
            self._snapshot.check_unchanged()
            peer.service.need(request.chunks, restart=request.restart)
        else:
            self._send_digests(peer, peer.service.outgoing, request)

    def confirm(self, peer: Peer) -> None:
        self._snapshot.check_unchanged()
        if peer.accept is not None and BY_NAME[peer.accept.route].reads:
            total = self._snapshot.chunks.stream_bytes
            self._call.progress(total, total)
        self.send(peer, m.Confirmed())

    def send(self, peer: Peer, message: m.Message) -> None:
        assert peer.connection is not None
        peer.connection.send(message)

    def drop(self, peer: Peer) -> None:
        address = None if peer.join is None else peer.join.address
        if peer.stage is Stage.UNKNOWN and address is not None:
            self._node.unknown.note(address.node, self._tickets[peer.rank].transfer)
        peer.close()

    # How they are done

    def _make_offer(self, peer: Peer, join: m.Join, several: bool) -> m.Offer:
        """A record, and the routes by which the bytes can travel."""
        outgoing = self._outgoing
        assert peer.connection is not None
        receiver = r.Receiver(
            peer.rank,
            self._member,
            join,
            self._tickets,
            self._options.connections,
            peer.connection.send,
            self._report,
        )
        peer.services = services(receiver, self._options.route)
        found = {name: end.offer(outgoing) for name, end in peer.services.items()}
        return m.Offer(
            self._record,
            receiver.transfer,
            outgoing.verify is not False,
            self._options.route,
            {name: facts for name, facts in found.items() if isinstance(facts, bytes)},
            {name: why.because for name, why in found.items() if isinstance(why, r.Unavailable)},
            several,
            max(1, cores() // len(self._tickets)),
            self._patience,
        )

    def _outgoing_of(self, accept: m.Accept) -> Outgoing:
        """The bytes for a receiver: the state, or the parts of it that it requests."""
        if accept.reads is None:
            return self._outgoing
        reads = decode_reads(accept.reads, self._snapshot.record)
        return Outgoing(SnapshotPart(self._snapshot, reads), self._member, self._options.verify)

    def _send_digests(self, peer: Peer, outgoing: Outgoing, want: m.Want) -> None:
        """Have workers make the digests that a receiver requests: each once, and sent at once."""
        chunks = m.from_ranges(want.chunks, len(outgoing.snapshot.chunks))
        again = not peer.requested.isdisjoint(chunks)
        peer.requested.update(chunks)
        # A device hashes all that lies there at once.
        on_gpu = [index for index in chunks if index in outgoing.on_gpu]
        others = [index for index in chunks if index not in outgoing.on_gpu]
        size = len(others) // MOST_ANSWERS + 1
        jobs = [others[at : at + size] for at in range(0, len(others), size)]

        def answer(some: list[int]) -> None:
            digests = b"".join(map(outgoing.digest, some))
            self.send(peer, m.Digests(tuple(some), digests))

        for job in [on_gpu, *jobs] if on_gpu else jobs:
            self._workers.submit(partial(answer, job))
        if again:
            self._snapshot.check_unchanged()  # one did not match
