"""A receiver of a live transfer as a state machine: events in, actions out.

There is no thread, clock or socket here. Whoever drives it tells it what was heard, which chunks
came, were landed and were passed on, and what time it is, and carries out the actions that it finds
in `actions`. An error that it raises ends the transfer; the driver then says `leave`.

| stage     | event                                | does                                | then    |
|-----------|--------------------------------------|-------------------------------------|---------|
| JOINED    | offer                                | the driver looks at it              | OFFERED |
| OFFERED   | the driver accepts                   | accept                              | ACCEPTED|
| OFFERED   | the driver refuses                   | refuse                              | OVER    |
| ACCEPTED  | go; or none is needed                | chunks are awaited, or taken        | DATA    |
| DATA      | a chunk has landed                   | free it, or pass it on in its turn  | DATA    |
| DATA      | hashes, trailer                      | pass on what waited for them        | DATA    |
| DATA      | a chunk to pass on is not right      | unlink, pass nothing more on        | DATA    |
| DATA      | all here, some are not right         | need, at most twice for each        | DATA    |
| DATA      | reroute, or its upstream breaks      | need: the sender feeds it           | DATA    |
| DATA      | detach, or the next one is lost      | pass nothing more on                | DATA    |
| DATA      | nothing comes, nothing is taken      | stalled, blocked                    | DATA    |
| DATA      | all here and right                   | the driver commits, then: done      | OVER    |
| any       | abort, broken line, out of turn      | raises                              | OVER    |
| DATA, trailer is here | broken line              | goes on while it needs nothing more | DATA    |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from torchrelay.errors import DigestError, PeerLostError, RemoteProtocolError
from torchrelay.transports.protocol import wire
from torchrelay.transports.protocol.machines.actions import (
    AskSender,
    FreeChunk,
    PassOn,
    ReceiverAction,
    Say,
    StopPassing,
)
from torchrelay.transports.protocol.machines.events import CLOSED, RETRIES, failure


class ReceiverStage(Enum):
    JOINED = "joined"
    OFFERED = "offered"
    ACCEPTED = "accepted"
    DATA = "data"
    OVER = "over"


class ReceiverMachine:
    """One receive, from the join to the last word. Its data is a `FedMachine`'s, or its route's."""

    def __init__(self, sender: int) -> None:
        self.sender = sender
        self.stage = ReceiverStage.JOINED
        self.actions: list[ReceiverAction] = []
        self.offer: wire.Offer | None = None
        self.go: wire.Go | None = None

    def say(self, message: wire.Message) -> None:
        self.actions.append(Say(self.sender, message))

    def heard(self, message: object) -> None:
        """Before the data: the offer, then the word to go. `RelayError` for anything else."""
        if isinstance(message, wire.Offer) and self.stage is ReceiverStage.JOINED:
            self.offer, self.stage = message, ReceiverStage.OFFERED
        elif isinstance(message, wire.Go) and self.stage is ReceiverStage.ACCEPTED:
            self.begin(message)
        else:
            raise failure(message, self.sender, "join")

    def accept(self, message: wire.Accept) -> None:
        self.stage = ReceiverStage.ACCEPTED
        self.say(message)

    def begin(self, go: wire.Go) -> None:
        self.go, self.stage = go, ReceiverStage.DATA

    def part(self, word: wire.Refuse | wire.Leave | wire.Done) -> None:
        """Say the last word, once."""
        if self.stage is not ReceiverStage.OVER:
            self.stage = ReceiverStage.OVER
            self.say(word)


@dataclass
class Flow:
    """Chunks from one upstream, in a known order."""

    upstream: int
    order: Sequence[int]
    posted: int = 0
    arrived: set[int] = field(default_factory=set)

    @property
    def lacking(self) -> list[int]:
        return [chunk for chunk in self.order if chunk not in self.arrived]

    @property
    def starves(self) -> bool:
        return self.posted > len(self.arrived)


@dataclass(frozen=True)
class FeedTerms:
    """What a fed receiver is sent, and by whom."""

    sender: int
    chunks: int
    verify: bool
    beside: bool  # chunks come beside the group at first
    step: int | None = None
    named: Callable[[int], str] = "chunk {}".format  # a chunk, for a message


class FedMachine:
    """The data of a receiver that chunks are pushed to, and that may pass them on.

    A chunk is passed on once it is known to be what the sender sent. Before that it is whatever
    another rank sent or pointed at, which might be memory that is nobody's business.
    """

    def __init__(self, terms: FeedTerms, go: wire.Go, now: float) -> None:
        self.terms, self._sender = terms, terms.sender
        self.actions: list[ReceiverAction] = []
        self.flow = Flow(go.upstream, range(terms.chunks))
        self.missing = set(range(terms.chunks))
        self.downstream = go.downstream
        self.patience = go.patience
        self.beside = terms.beside
        self.lane = 1
        self.lost: PeerLostError | None = None
        self.retried: list[int] = []
        self.forwarding: set[int] = set()
        self._waiting: set[int] = set()  # chunks that are here and not yet passed on
        self._turn = 0  # the chunk that is to be passed on next
        self._digests = [b""] * terms.chunks
        self._told = [b""] * terms.chunks if terms.verify else []  # what they should be
        self._trailer: tuple[bytes, ...] | None = None
        self._heard_at = self._passed_at = now
        self.done = ""  # how far it is, in words, for errors

    # Chunks in

    def next_chunk(self) -> int | None:
        """The chunk that comes next, to be awaited once there is room for it."""
        flow = self.flow
        return flow.order[flow.posted] if flow.posted < len(flow.order) else None

    def awaited(self) -> None:
        self.flow.posted += 1

    def arrived(self, chunk: int, now: float) -> None:
        """A chunk of the flow is here, to be hashed and landed."""
        self.flow.arrived.add(chunk)
        self._heard_at = now

    def landed(self, chunk: int, digest: bytes, now: float) -> None:
        self._digests[chunk] = digest
        self.missing.discard(chunk)
        if self.downstream is None:
            self.actions.append(FreeChunk(chunk))
        else:
            self._waiting.add(chunk)
            self._pass_on_in_turn(now)

    def broke(self, reason: str, now: float) -> None:
        """Nothing more comes from upstream. Go on from the sender, with what has not arrived."""
        if self.flow.upstream == self._sender and not self.beside:
            raise PeerLostError(
                f"connection lost: {reason}; {self.done}; {CLOSED}",
                rank=self._sender,
                step=self.terms.step,
                phase="data",
            )
        self._ask_for(self.flow.lacking, now)

    def complete(self, now: float) -> bool:
        """Whether every chunk is here and is the one that was sent; asks again for others."""
        if self.missing or self._trailer is None:
            return False
        if not self.terms.verify:
            return True
        if len(self._trailer) != self.terms.chunks:
            raise RemoteProtocolError(
                f"{len(self._trailer)} digests for {self.terms.chunks} chunks", rank=self._sender
            )
        pairs = zip(self._digests, self._trailer, strict=True)
        bad = [index for index, (mine, theirs) in enumerate(pairs) if mine != theirs]
        if not bad:
            return True
        if any(self.retried.count(index) >= RETRIES for index in bad):
            raise DigestError(
                f"{self.terms.named(bad[0])} does not have the digest it was sent with, after "
                f"{RETRIES} more tries: was the state changed while it was sent?",
                rank=self._sender,
                step=self.terms.step,
                phase="data",
            )
        self.retried += bad
        self.missing.update(bad)
        self._ask_for(bad, now)
        return False

    def _ask_for(self, chunks: Sequence[int], now: float) -> None:
        if self.lost is not None:
            raise failure(self.lost, self._sender, "data")
        self.lane += 1
        if self.lane >= wire.LANES:
            raise PeerLostError("too many interruptions", rank=self._sender, phase="data")
        if self.terms.beside:
            self._trailer = None  # the sender looks again at what it sends again
        self.beside = False
        for chunk in self._waiting.intersection(chunks):  # they come again
            self._waiting.discard(chunk)
            self.actions.append(FreeChunk(chunk))
        self.flow = Flow(self._sender, list(chunks))
        self._heard_at = now
        self.actions.append(AskSender(self.lane, tuple(chunks)))
        self.actions.append(Say(self._sender, wire.Need(tuple(chunks), self.lane)))

    # What is heard

    def heard(self, event: object, now: float) -> None:
        if isinstance(event, wire.Hashes):
            self._learn(event.first, event.digests, now)
        elif isinstance(event, wire.Trailer):
            self._trailer = event.digests
            self._learn(0, event.digests, now)
        elif isinstance(event, wire.Reroute):
            if self.flow.upstream != self._sender:
                self.broke("the sender said so", now)
        elif isinstance(event, wire.Detach):
            self.detach()
        elif isinstance(event, PeerLostError) and self._trailer is not None:
            self.lost = event  # what is on its way may be all that is missing
        elif not isinstance(event, wire.Knock):
            raise failure(event, self._sender, "data")

    def _learn(self, first: int, digests: tuple[bytes, ...], now: float) -> None:
        """What the sender says that chunks should be."""
        if not self.terms.verify:
            return
        if first + len(digests) > self.terms.chunks:
            raise RemoteProtocolError(
                f"digests of {first + len(digests)} chunks, of {self.terms.chunks}",
                rank=self._sender,
            )
        self._told[first : first + len(digests)] = digests
        self._pass_on_in_turn(now)

    # Chunks on

    def _pass_on_in_turn(self, now: float) -> None:
        """Pass on what is right, in order. The first that is not is the last: the sender feeds the
        next receiver from there on."""
        while self.downstream is not None and self._turn in self._waiting:
            chunk = self._turn
            theirs = self._told[chunk : chunk + 1]
            if theirs == [b""]:
                return  # not known yet
            if theirs not in ([], [self._digests[chunk]]):
                self.actions.append(Say(self._sender, wire.Unlink()))
                self.detach()
                return
            self._waiting.discard(chunk)
            self._turn += 1
            if not self.forwarding:
                self._passed_at = now
            self.forwarding.add(chunk)
            self.actions.append(PassOn(chunk))

    def forwarded(self, chunk: int, now: float, *, lost: bool) -> None:
        """A chunk has gone on to the next receiver, or that one is lost."""
        if chunk not in self.forwarding:
            return  # given up before
        self._passed_at = now
        self.forwarding.discard(chunk)
        if lost:
            self.downstream = None  # the sender sees to it
            self._drop_waiting()
        self.actions.append(FreeChunk(chunk))

    def detach(self) -> None:
        """Pass nothing more on."""
        self.downstream = None
        self._drop_waiting()
        if self.forwarding:
            self.forwarding.clear()
            self.actions.append(StopPassing())

    def _drop_waiting(self) -> None:
        self.actions += [FreeChunk(chunk) for chunk in sorted(self._waiting)]
        self._waiting.clear()

    # Time

    @property
    def tick_seconds(self) -> float:
        return min(self.patience / 4, 0.25) if self.patience else 1.0

    def tick(self, now: float) -> None:
        """Tell the sender what holds this receiver up."""
        if not self.patience:
            return
        starving = self.flow.starves and self.flow.upstream != self._sender
        if starving and now > self._heard_at + self.patience:
            self._heard_at = now
            if self.lost is not None:
                raise failure(self.lost, self._sender, "data")
            self.actions.append(Say(self._sender, wire.Stalled()))
        stuck = self.forwarding and now > self._passed_at + self.patience
        if stuck and self.downstream is not None:
            self._passed_at = now
            self.actions.append(Say(self._sender, wire.Blocked(self.downstream)))
