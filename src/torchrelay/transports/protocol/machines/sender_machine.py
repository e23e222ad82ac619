"""The sender of a live transfer as a state machine: events in, actions out.

There is no thread, clock or socket here. Whoever drives it tells it what was heard, which chunks
left, which digests are known and what time it is, and carries out the actions that it finds in
`actions`. Its answer to the same events is the same.

| stage of a receiver | hears                             | does                        | then     |
|---------------------|-----------------------------------|-----------------------------|----------|
| CALLED              | join                              | offer                       | JOINED   |
| CALLED              | survey                            | serve parts                 | APART    |
| CALLED, JOINED      | leave, late or on a line kept     | fin, call anew              | CALLED   |
| CALLED              | its kept line is broken           | call anew                   | CALLED   |
| CALLED              | nothing in time                   | keep its line for later     | FAILED   |
| JOINED              | accept                            | at the end of the join: go  | ACCEPTED |
| JOINED              | nothing in time                   | abort                       | FAILED   |
| any but the last    | refuse                            | fin; see to its neighbours  | REFUSED  |
| ACCEPTED            | need                              | feed it from here           | ACCEPTED |
| ACCEPTED            | unlink                            | reroute the one behind it   | ACCEPTED |
| ACCEPTED            | stalled, blocked                  | judge who holds up whom     | ACCEPTED |
| ACCEPTED            | word                              | its route hears it          | ACCEPTED |
| ACCEPTED            | pulled                            | trailer                     | ACCEPTED |
| ACCEPTED            | done                              | fin                         | DONE     |
| any                 | leave, broken line, out of turn   | abort; see to its neighbours| FAILED   |
| ACCEPTED, trailed   | the same                          | the same                    | UNKNOWN  |
| UNKNOWN             | done                              |                             | DONE     |
| UNKNOWN             | leave, refuse                     |                             | FAILED   |

The chain: whoever loses its upstream is fed from here, and goes on feeding those behind it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from torchrelay.transports.protocol import wire
from torchrelay.transports.protocol.machines import fanout
from torchrelay.transports.protocol.machines.actions import (
    CallAnew,
    CutOff,
    FeedBeside,
    FeedChunks,
    HashAhead,
    HearWord,
    KeepLines,
    LetRead,
    MakeOffer,
    Say,
    SenderAction,
    ServeParts,
    Trail,
)
from torchrelay.transports.protocol.machines.peers import Owed, Peer, Stage, go, join_ends
from torchrelay.transports.routes.choice import GROUP

GATHER = 2  # ticks to hear from all who are stuck before judging who is the cause


@dataclass(frozen=True)
class SendTerms:
    """What is sent, and how long everybody has."""

    me: int
    chunks: int
    verify: bool
    may_read: bool  # receivers may read each other's memory
    route: str | None
    offered: frozenset[str]  # routes
    window: float
    join_timeout: float
    seconds: float  # of the whole call
    parts: bool = False  # receivers may take parts


@dataclass
class SenderMachine:
    terms: SendTerms
    peers: dict[int, Peer]
    begun: float
    actions: list[SenderAction] = field(default_factory=list)
    hops: list[fanout.Hop] = field(default_factory=list)
    rerouted: list[int] = field(default_factory=list)
    patience: float = 0.0
    joining: bool = True
    aborted: bool = False

    def __post_init__(self) -> None:
        self._judge = fanout.StallJudge()
        self._beside: set[int] = set()
        self._owed: dict[int, Owed] = {}  # by rank
        self._waits_for: int | None = None  # digests that are told before the first chunk leaves
        self._head: int | None = None  # the first of a chain, while it waits for those
        self.known = 0  # digests, from the first on
        self._unhashed = set(range(self.terms.chunks))

    def among(self, *stages: Stage) -> list[Peer]:
        return [peer for peer in self.peers.values() if peer.stage in stages]

    def _say(self, rank: int, message: wire.Message) -> None:
        self.actions.append(Say(rank, message))

    # The join

    def join_ends(self) -> float:
        """Until when to wait for receivers, unless something is heard before."""
        ends = self.begun + self.terms.seconds
        if not self.among(Stage.CALLED, Stage.JOINED):
            return float("-inf")
        terms = self.terms
        latest = join_ends(self.peers.values(), self.begun + terms.join_timeout, terms.window, ends)
        return min(latest, ends)

    def end_join(self, now: float) -> None:
        """Nobody else is waited for."""
        self.joining = False
        absent, silent = self.among(Stage.CALLED), self.among(Stage.JOINED)
        for peer in absent:
            peer.stage, peer.late, peer.absent = Stage.FAILED, True, True
            peer.reason = f"did not join within {now - self.begun:.3g} s"
        if absent:
            self.actions.append(KeepLines(tuple(peer.rank for peer in absent)))
        for peer in silent:
            self.fail(peer, "joined, but did not answer the offer", late=True)

    def begin(self, beside: Collection[int], first: int, now: float) -> None:
        """The data begins. `beside`: receivers that are pushed to beside the group; `first`: so
        many digests are told before the first chunk goes down a chain."""
        accepted = self.among(Stage.ACCEPTED)
        fed = [peer for peer in accepted if not peer.route.pulls]
        nearby = [peer for peer in accepted if peer.route.pulls]
        # Bytes cross to a machine once: receivers of one machine follow each other.
        chained = [peer for peer in fed if peer.rank not in beside]
        chained = fanout.by_machine(chained, lambda peer: peer.place.machine)
        self._beside = set(beside)
        self.hops = fanout.chain(self.terms.me, [peer.rank for peer in chained])
        self.hops += fanout.star(self.terms.me, [peer.rank for peer in fed if peer.rank in beside])
        # With one receiver there is nobody to protect from a slow one: the deadline alone counts.
        if len(accepted) > 1:
            patience = min(self.terms.window, self.terms.seconds / 4)
            self.patience = min(patience, wire.MAX_SECONDS)
        for hop in self.hops:
            route = self.peers[hop.rank].route if hop.rank in beside else GROUP
            may_read = self.terms.may_read
            self._say(
                hop.rank, go(hop, self.peers, self.patience, may_read=may_read, route=route.name)
            )
        for peer in nearby:
            self.actions.append(LetRead(peer.rank, len(nearby)))
        for rank in beside:
            self._owed[rank] = Owed(self.terms.chunks, 0, now)
            self.actions.append(FeedBeside(rank))
        self._head = chained[0].rank if chained else None
        if len(chained) > 1 and self.terms.verify:
            self.actions.append(HashAhead())
            self._waits_for = first
        self._open_chain(now)

    def _open_chain(self, now: float) -> None:
        """Send the first of the chain all chunks, once it can know their first digests."""
        if self._waits_for is not None and self.known < self._waits_for:
            return
        head, self._head, self._waits_for = self._head, None, None
        if head is not None and self.peers[head].stage is Stage.ACCEPTED:
            self._feed(head, 1, tuple(range(self.terms.chunks)), now)

    def _feed(self, rank: int, lane: int, chunks: tuple[int, ...], now: float) -> None:
        self._owed[rank] = Owed(len(chunks), 0, now)
        self.actions.append(FeedChunks(rank, lane, chunks))

    # What is heard

    def heard(self, rank: int, message: wire.Message | Exception, now: float) -> None:
        """A receiver has said something, or its line is broken."""
        peer = self.peers[rank]
        if peer.stage in (Stage.DONE, Stage.REFUSED, Stage.FAILED, Stage.APART):
            return
        if peer.stage is Stage.UNKNOWN:
            peer.settle(message)
            return
        if isinstance(message, Exception):
            if peer.stage is Stage.CALLED and peer.adopted:
                self._call_anew(peer)
            else:
                self.fail(peer, str(message))
        elif isinstance(message, wire.Refuse):
            accepted = peer.stage is Stage.ACCEPTED
            peer.refuse(message)
            self._say(rank, wire.Fin())
            if accepted:
                self._part_from(peer)
        elif isinstance(message, wire.Leave):
            self._left(peer, message)
        elif peer.stage is Stage.ACCEPTED:
            self._heard_data(peer, message, now)
        elif not self._heard_join(peer, message, now):
            self.fail(peer, f"sent {type(message).__name__} out of turn")

    def _heard_join(self, peer: Peer, message: wire.Message, now: float) -> bool:
        if peer.stage is Stage.CALLED and isinstance(message, wire.Join):
            peer.stage, peer.joined_at = Stage.JOINED, now
            peer.place, peer.reads = message.place, bool(message.nonce)
            self.actions.append(MakeOffer(peer.rank, message))
        elif peer.stage is Stage.CALLED and isinstance(message, wire.Survey) and self.terms.parts:
            peer.stage, peer.joined_at = Stage.APART, now
            self.actions.append(ServeParts(peer.rank))
        elif peer.stage is Stage.JOINED and isinstance(message, wire.Accept):
            if why := peer.take(message, self.terms.route, self.terms.offered):
                self.fail(peer, why)
        else:
            return False
        return True

    def _heard_data(self, peer: Peer, message: wire.Message, now: float) -> None:
        rank, pause = peer.rank, GATHER * self.tick_seconds
        fed = any(hop.rank == rank for hop in self.hops)
        if isinstance(message, wire.Word):
            self.actions.append(HearWord(rank, message.word))
        elif isinstance(message, wire.Pulled):
            peer.pulled, peer.trailed = True, False
            if peer.deaf:
                self.fail(peer, "asks, and does not take the answers")
        elif isinstance(message, wire.Done):
            peer.stage = Stage.DONE
            self._say(rank, wire.Fin())
        elif isinstance(message, wire.Need) and fed:
            self._need(peer, message, now)
        elif isinstance(message, wire.Unlink):
            self._reroute(hop.rank for hop in self.hops if hop.upstream == rank)
        elif isinstance(message, wire.Stalled):
            self._judge.starving(rank, now, pause)
        elif isinstance(message, wire.Blocked):
            if any(hop[:2] == (message.rank, rank) for hop in self.hops):
                self._judge.blocked(message.rank, now, pause)
        else:
            self.fail(peer, f"sent {type(message).__name__} out of turn")

    def _left(self, peer: Peer, message: wire.Leave) -> None:
        again = self.joining and (message.late or peer.adopted)
        if peer.stage is Stage.ACCEPTED or not again:
            self.fail(peer, f"gave up: {message.message}", late=message.late)
            peer.settle(message)
            return
        # It answered an earlier call, or had little time left: it may be calling anew.
        self._say(peer.rank, wire.Fin())
        self._call_anew(peer)

    def _call_anew(self, peer: Peer) -> None:
        peer.stage = Stage.CALLED
        self.actions.append(CallAnew(peer.rank))

    def _need(self, peer: Peer, need: wire.Need, now: float) -> None:
        if not peer.may_ask(need, self.terms.chunks):
            self.fail(peer, "asked for chunks that do not exist, or on a lane that it has used")
            return
        if not need.chunks:
            return
        before = next(hop.upstream for hop in self.hops if hop.rank == peer.rank)
        self.hops = fanout.served_by(self.hops, peer.rank, self.terms.me)
        self._detach(before)
        if before != self.terms.me:
            self.rerouted.append(peer.rank)
        beside = peer.rank in self._beside
        if beside:
            peer.trailed = False  # what it is sent now may have changed since
        self.actions.append(CutOff(peer.rank, end=beside))
        self._feed(peer.rank, need.lane, need.chunks, now)

    # Chunks and digests

    def moved(self, rank: int, todo: int, in_flight: int, now: float) -> None:
        """Chunks to a receiver were posted, or have left."""
        self._owed[rank] = Owed(todo, in_flight, now)

    def broke(self, rank: int, reason: str, *, beside: bool) -> None:
        """Chunks to a receiver do not go through."""
        peer = self.peers[rank]
        if peer.stage is not Stage.ACCEPTED:
            return
        if beside:
            # The receiver notices too, and asks for what it lacks over the group.
            self._owed.pop(rank, None)
            self.actions.append(CutOff(rank))
        else:
            self.fail(peer, f"connection lost: {reason}")

    def hashed(self, chunk: int, now: float) -> None:
        """The digest of a chunk is known."""
        self._unhashed.discard(chunk)
        while self.known < self.terms.chunks and self.known not in self._unhashed:
            self.known += 1
        if self._waits_for is not None:
            self._open_chain(now)

    def tell_hashes(self) -> list[int]:
        """Those who pass chunks on, and can take digests that are new to them. Who has yet to take
        the last message of them gets the next one later: each waits its turn behind chunks."""
        if self._waits_for is not None:
            return []  # one message has all that are told before the first chunk
        passing = [self.peers[hop.rank] for hop in self.hops if hop.downstream is not None]
        behind = [peer for peer in passing if self.known > peer.hashes and not peer.trailed]
        free = [peer for peer in behind if not (peer.hashes and peer.untaken)]
        return [peer.rank for peer in free if peer.stage is Stage.ACCEPTED]

    def trail(self) -> None:
        """Tell those who have all bytes, or soon will, what they should be."""
        for peer in self.among(Stage.ACCEPTED):
            if not peer.trailed and self._has_all(peer):
                peer.trailed = True
                self.actions.append(Trail(peer.rank))

    def _has_all(self, peer: Peer) -> bool:
        if peer.route.pulls:
            return peer.pulled and self._unhashed.isdisjoint(peer.accept.hashed)
        if self.terms.verify and self._unhashed:
            return False
        # Who lacks chunks cannot have the state, and is not told what would let it have it.
        # Without digests nothing tells bytes that changed on their way: they must have left.
        head = fanout.head(self.hops, peer.rank, self.terms.me)
        if head == self._head:
            return False
        owed = self._owed.get(head, Owed())
        return not owed.todo and (self.terms.verify or not owed.in_flight)

    # Time

    @property
    def tick_seconds(self) -> float:
        return min(self.patience / 4, 0.25) if self.patience else 1.0

    def tick(self, now: float, unanswered: Mapping[int, float]) -> None:
        """Some time has passed; for how long receivers have not taken what was said to them."""
        if not self.patience:
            return
        for peer in self.among(Stage.ACCEPTED):
            if unanswered.get(peer.rank, 0.0) > self.patience:
                self.fail(peer, f"took no message for {self.patience:.3g} s")
            elif now > peer.knocked_at + self.patience / 2:
                peer.knocked_at = now
                self._say(peer.rank, wire.Knock())
        for rank, owed in self._owed.items():
            if owed.in_flight and now > owed.moved_at + self.patience:
                owed.moved_at = now
                self._judge.blocked(rank, now, GATHER * self.tick_seconds)
        verdict = self._judge.verdict(self.hops, self.terms.me, now)
        if verdict is None:
            return
        culprits, starving = verdict
        for rank in culprits:
            if self.peers[rank].stage is Stage.ACCEPTED:
                self.fail(self.peers[rank], f"took no data for {self.patience:.3g} s")
        self._reroute(() if starving is None else (starving,))

    def time_is_up(self) -> None:
        for peer in self.among(Stage.ACCEPTED):
            self.fail(peer, f"not done after {self.terms.seconds:.3g} s", late=True)

    # Losses

    def fail(self, peer: Peer, reason: str, *, late: bool = False) -> None:
        """Give up on one receiver, and see to those around it."""
        peer.give_up(reason, late=late)
        self._say(peer.rank, wire.Abort(wire.text(f"the sender gave up on this rank: {reason}")))
        self._part_from(peer)

    def _part_from(self, peer: Peer) -> None:
        self._owed.pop(peer.rank, None)
        self.actions.append(CutOff(peer.rank))
        for hop in self.hops:
            if hop.downstream == peer.rank:
                self._detach(hop.rank)
        done = [p.rank for p in self.among(Stage.DONE)]
        lost = [p.rank for p in self.among(Stage.FAILED, Stage.UNKNOWN, Stage.REFUSED)]
        self._reroute(fanout.orphans(self.hops, lost, done))

    def abort(self, reason: str) -> None:
        """Give up altogether."""
        self.aborted = True
        for peer in self.among(Stage.JOINED, Stage.ACCEPTED):
            peer.give_up(reason)
            self._say(peer.rank, wire.Abort(wire.text(reason)))
        absent = self.among(Stage.CALLED)
        for peer in absent:
            peer.stage, peer.reason, peer.absent = Stage.FAILED, reason, True
        self.actions.append(KeepLines(tuple(peer.rank for peer in absent)))

    def _detach(self, rank: int) -> None:
        if rank in self.peers and self.peers[rank].stage is Stage.ACCEPTED:
            self._say(rank, wire.Detach())

    def _reroute(self, ranks: Iterable[int]) -> None:
        for rank in ranks:
            if self.peers[rank].stage is Stage.ACCEPTED:
                self._say(rank, wire.Reroute())
