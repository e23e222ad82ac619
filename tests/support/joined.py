"""The state machines of a transfer joined in memory, without processes, threads or time.

A `World` has a sender, its receivers, lines of control messages, links of chunks and a clock that
moves on when nothing else can happen. Which of the things that can happen comes next is drawn at
random. Lines keep their order, as the group's do; everything else may be late by any length.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from torchrelay.errors import PeerLostError, RelayError, TransferTimeoutError
from torchrelay.transports.protocol import wire
from torchrelay.transports.protocol.machines import actions as act
from torchrelay.transports.protocol.machines.peers import Peer, Stage
from torchrelay.transports.protocol.machines.receiver_machine import (
    FedMachine,
    FeedTerms,
    ReceiverMachine,
    ReceiverStage,
)
from torchrelay.transports.protocol.machines.sender_machine import SenderMachine, SendTerms
from torchrelay.transports.routes.choice import BY_NAME

SENDER = 0
SECONDS = 100.0  # of a call
WINDOW = 4.0
IN_FLIGHT = 1
WRONG = b"?" * 16


def right(chunk: int) -> bytes:
    return bytes([chunk + 1]) * 16


@dataclass
class Link:
    """Chunks from one rank to another on one lane, in order: what is sent, and where it goes."""

    sends: deque[tuple[Any, int, bytes]] = field(default_factory=deque)  # stream, chunk, content
    receives: deque[tuple[Any, int]] = field(default_factory=deque)  # flow, chunk


@dataclass
class Outgoing:
    rank: int
    lane: int
    todo: deque[int]
    beside: bool = False
    in_flight: int = 0
    alive: bool = True


class Receiver:
    """One receiver: its machines, its memory, and what became of it."""

    def __init__(self, world: World, rank: int, plan: str, route: str) -> None:
        self.world, self.rank, self.plan, self.route = world, rank, plan, route
        self.machine = ReceiverMachine(SENDER)
        self.data: FedMachine | None = None
        self.alive, self.stopped = True, False
        self.memory: dict[int, bytes] = {}  # what has landed, not committed
        self.landing: list[tuple[Any, int, bytes]] = []
        self.content: dict[int, bytes] = {}  # of chunks that are held to be passed on
        self.free = 0
        self.lane_in = 1
        self.state = "old"
        self.fault: RelayError | None = None
        self.over = False
        self.downstream: tuple[int, int] | None = None
        self.pulls = BY_NAME[route].pulls

    @property
    def runs(self) -> bool:
        return self.alive and not self.stopped and not self.over

    def hear(self, message: Any) -> None:
        try:
            self._hear(message)
            self.go_on()
        except RelayError as fault:
            self.end(fault)

    def _hear(self, message: Any) -> None:
        stage = self.machine.stage
        if stage in (ReceiverStage.JOINED, ReceiverStage.ACCEPTED):
            self.machine.heard(message)
            if self.machine.stage is ReceiverStage.OFFERED:
                self._consider()
            elif self.machine.go is not None:
                self._begin(self.machine.go)
        elif self.data is not None:
            self.data.heard(message, self.world.now)
        elif isinstance(message, wire.Trailer):
            self._commit()
        elif isinstance(message, wire.Abort | RelayError):
            raise message if isinstance(message, RelayError) else PeerLostError(message.message)

    def _consider(self) -> None:
        if self.plan == "refuses":
            self.machine.part(wire.Refuse("mismatch", "another shape"))
            self.over = True
        elif self.plan == "leaves":
            self.end(TransferTimeoutError("had enough"))
        elif self.plan != "silent":
            self.machine.accept(wire.Accept(self.route))

    def _begin(self, go: wire.Go) -> None:
        if self.pulls:
            self.memory = {chunk: right(chunk) for chunk in range(self.world.chunks)}
            self.machine.say(wire.Pulled())
            return
        beside = go.route != "group"
        terms = FeedTerms(SENDER, self.world.chunks, self.world.verify, beside)
        self.data = FedMachine(terms, go, self.world.now)
        self.free = min(self.world.chunks, IN_FLIGHT * (1 if go.downstream is None else 2))
        if go.downstream is not None:
            self.downstream = go.downstream, 1

    def go_on(self) -> None:
        """Do what the machines say, and wait for as many chunks as there is room for."""
        self._act(self.machine)
        data = self.data
        if data is None or self.over:
            return
        self._act(data)
        if data.complete(self.world.now):
            self._commit()
        self._act(data)
        while self.free and not self.over and (chunk := data.next_chunk()) is not None:
            self.free -= 1
            data.awaited()
            link = self.world.link(data.flow.upstream, self.rank, self.lane_in)
            link.receives.append((data.flow, chunk))

    def _act(self, machine: ReceiverMachine | FedMachine) -> None:
        actions, machine.actions = machine.actions, []
        for action in actions:
            if isinstance(action, act.Say):
                self.world.say(self.rank, SENDER, action.message)
            elif isinstance(action, act.FreeChunk):
                self.free += 1
                self.content.pop(action.chunk, None)
            elif isinstance(action, act.PassOn):
                assert self.downstream is not None
                assert not self.world.verify or self.content[action.chunk] == right(action.chunk)
                link = self.world.link(self.rank, *self.downstream)
                link.sends.append((self, action.chunk, self.content[action.chunk]))
            elif isinstance(action, act.AskSender):
                link = self.world.link(self.before, self.rank, self.lane_in)
                self.free += len(link.receives)
                link.receives.clear()
                self.lane_in = action.lane
            else:
                assert self.downstream is not None
                link = self.world.link(self.rank, *self.downstream)
                self.free += len(link.sends)
                link.sends.clear()

    @property
    def before(self) -> int:
        """The upstream of the flow that is being left."""
        assert self.machine.go is not None
        return self.machine.go.upstream if self.lane_in == 1 else SENDER

    def arrived(self, flow: Any, chunk: int, content: bytes) -> None:
        data = self.data
        assert data is not None
        if flow is data.flow:
            data.arrived(chunk, self.world.now)
            self.landing.append((flow, chunk, content))

    def land(self) -> None:
        data = self.data
        assert data is not None
        _, chunk, content = self.landing.pop(0)
        self.memory[chunk] = self.content[chunk] = content
        try:
            data.landed(chunk, content if self.world.verify else b"", self.world.now)
            self.go_on()
        except RelayError as fault:
            self.end(fault)

    def forwarded(self, chunk: int, *, lost: bool) -> None:
        assert self.data is not None
        self.data.forwarded(chunk, self.world.now, lost=lost)
        self.content.pop(chunk, None)
        if not self.over:
            self.go_on()
        else:
            self._act(self.data)

    def broke(self, flow: Any) -> None:
        if self.data is None or flow is not self.data.flow or self.over:
            return
        try:
            self.data.broke("gone", self.world.now)
            self.go_on()
        except RelayError as fault:
            self.end(fault)

    def tick(self) -> None:
        if self.world.now >= SECONDS:
            self.end(TransferTimeoutError("timed out"))
            return
        if self.data is not None:
            try:
                self.data.tick(self.world.now)
                self.go_on()
            except RelayError as fault:
                self.end(fault)

    def _commit(self) -> None:
        wanted = {chunk: right(chunk) for chunk in range(self.world.chunks)}
        if self.world.verify or self.world.honest:
            assert self.memory == wanted, f"rank {self.rank} commits {self.memory}"
        self.state, self.over = "new", True
        self.machine.part(wire.Done())
        self._act(self.machine)

    def end(self, fault: RelayError) -> None:
        if not self.over:
            self.fault, self.over = fault, True
            late = isinstance(fault, TransferTimeoutError)
            self.machine.part(wire.Leave("gives up", late))
            self._act(self.machine)
            self.world.cut(self.rank)


class World:
    """A transfer. `step` lets one thing happen; whether anything could."""

    def __init__(self, seed: int) -> None:
        self.chance = chance = random.Random(seed)
        self.now = 0.0
        self.chunks = chance.randint(1, 5)
        self.verify = chance.random() < 0.8
        self.lines: dict[tuple[int, int], deque[Any]] = {}
        self.since: dict[int, float] = {}  # when the oldest message to a rank was sent
        self.links: dict[tuple[int, int, int], Link] = {}
        self.streams: list[Outgoing] = []
        self.hashing: list[int] = []
        self.hashed: set[int] = set()
        self.sender_alive, self.sender_stopped = True, False
        self.over = False
        ranks = range(1, 1 + chance.choice((1, 2, 2, 3, 3)))
        self.receivers = {rank: self._receiver(rank) for rank in ranks}
        self.faults = self._plan_faults()
        self.honest = not any(kind == "flip" for _, kind, _ in self.faults)
        names = frozenset(("group", "connections", "host"))
        terms = SendTerms(
            SENDER, self.chunks, self.verify, False, None, names, WINDOW, SECONDS / 2, SECONDS
        )
        peers = {rank: Peer(rank, rank) for rank in ranks}
        self.machine = SenderMachine(terms, peers, 0.0)
        self.phase = "join"
        self.steps = 0
        for rank, receiver in self.receivers.items():
            self.lines[rank, SENDER], self.lines[SENDER, rank] = deque(), deque()
            if receiver.plan != "absent":
                self.say(rank, SENDER, wire.Join())

    def _receiver(self, rank: int) -> Receiver:
        plans = ("fine",) * 12 + ("refuses", "leaves", "silent", "absent")
        route = self.chance.choice(("group", "group", "group", "connections", "host"))
        return Receiver(self, rank, self.chance.choice(plans), route)

    def _plan_faults(self) -> list[tuple[int, str, int]]:
        """At which step what happens to whom."""
        kinds = ("kill", "kill", "stop", "flip", "flip", "kill sender", "stop sender")
        count = self.chance.choice((0, 1, 1, 2))
        ranks = list(self.receivers)
        found = [
            (self.chance.randrange(60), self.chance.choice(kinds), self.chance.choice(ranks))
            for _ in range(count)
        ]
        return sorted(found)

    @property
    def healthy(self) -> list[Receiver]:
        hurt = {rank for _, kind, rank in self.faults if kind in ("kill", "stop")}
        return [
            one for one in self.receivers.values() if one.plan == "fine" and one.rank not in hurt
        ]

    @property
    def sender_runs(self) -> bool:
        return self.sender_alive and not self.sender_stopped and not self.over

    # Lines and links

    def say(self, source: int, target: int, message: Any) -> None:
        if source == SENDER and not self.lines[source, target]:
            self.since[target] = self.now
        self.lines[source, target].append(message)

    def link(self, source: int, target: int, lane: int) -> Link:
        return self.links.setdefault((source, target, lane), Link())

    def lost(self, rank: int) -> bool:
        return not self.sender_alive if rank == SENDER else not self.receivers[rank].alive

    def cut(self, rank: int) -> None:
        """A receiver that is over waits for no more chunks."""
        for (_, target, _), link in self.links.items():
            if target == rank:
                link.receives.clear()

    # What can happen

    def events(self) -> list[tuple[str, Any]]:
        found: list[tuple[str, Any]] = []
        for (source, target), queue in self.lines.items():
            hears = self.sender_runs if target == SENDER else self.receivers[target].runs
            if queue and hears:
                found.append(("message", (source, target)))
        for key, link in self.links.items():
            source, target, _ = key
            if link.sends and link.receives:
                takes = target != SENDER and self.receivers[target].runs
                gives = self.sender_runs if source == SENDER else not self.receivers[source].stopped
                if takes and gives and not self.lost(source):
                    found.append(("chunk", key))
            if (link.sends and self.lost(target)) or (link.receives and self.lost(source)):
                found.append(("broken", key))
        found += [("land", one) for one in self.receivers.values() if one.runs and one.landing]
        if self.hashing and self.sender_runs:
            found.append(("hash", None))
        return found

    def step(self) -> bool:
        self.steps += 1
        while self.faults and self.steps > self.faults[0][0]:
            self._fault(*self.faults.pop(0)[1:])
        events = self.events()
        if not events:
            return self._pass_time()
        kind, what = self.chance.choice(events)
        getattr(self, f"_{kind}")(what)
        if self.sender_runs:
            self._drive()
        return True

    def _pass_time(self) -> bool:
        """Nothing can happen: the clock moves on. Whether anybody is still under way."""
        waiting = [one for one in self.receivers.values() if one.runs and one.plan != "absent"]
        if not waiting and not self.sender_runs:
            return False
        self.now += 0.5
        for one in waiting:
            one.tick()
        if self.sender_runs:
            if self.phase == "data":
                old = {
                    rank: self.now - self.since[rank]
                    for rank in self.receivers
                    if self.lines[SENDER, rank] and not self.lost(rank)
                }
                self.machine.tick(self.now, old)
            self._drive()
        return True

    def _fault(self, kind: str, rank: int) -> None:
        receiver = self.receivers[rank]
        if kind == "kill":
            receiver.alive = False
            self.lines[SENDER, rank].clear()
            self.lines[rank, SENDER].append(PeerLostError("connection lost"))
        elif kind == "stop":
            receiver.stopped = True
        elif kind == "kill sender":
            self.sender_alive = False
            for one in self.receivers:
                self.lines[SENDER, one].append(PeerLostError("connection lost"))
        elif kind == "stop sender":
            self.sender_stopped = True
        else:
            self._flip()

    def _flip(self) -> None:
        """A byte of a chunk on its way turns."""
        sends = [link.sends for link in self.links.values() if link.sends]
        if sends:
            chosen = self.chance.choice(sends)
            source, chunk, _ = chosen[0]
            chosen[0] = source, chunk, WRONG

    def _message(self, ends: tuple[int, int]) -> None:
        source, target = ends
        message = self.lines[ends].popleft()
        if source == SENDER:
            self.since[target] = self.now
            self.receivers[target].hear(message)
            return
        peer = self.machine.peers[source]
        peer.untaken = len(self.lines[SENDER, source])
        self.machine.heard(source, message, self.now)

    def _chunk(self, key: tuple[int, int, int]) -> None:
        link = self.links[key]
        stream, chunk, content = link.sends.popleft()
        flow, expected = link.receives.popleft()
        receiver = self.receivers[key[1]]
        assert chunk == expected, f"chunk {chunk} on the lane of {expected}: {key}"
        if isinstance(stream, Outgoing):
            self._left(stream)
        else:
            stream.forwarded(chunk, lost=False)
        receiver.arrived(flow, chunk, content)

    def _left(self, stream: Outgoing) -> None:
        stream.in_flight -= 1
        if stream.alive:
            self.machine.moved(stream.rank, len(stream.todo), stream.in_flight, self.now)

    def _broken(self, key: tuple[int, int, int]) -> None:
        link = self.links[key]
        sends, link.sends = link.sends, deque()
        for stream, chunk, _ in sends:
            if isinstance(stream, Outgoing):
                stream.in_flight -= 1
                if stream.alive and self.sender_runs:
                    self.machine.broke(stream.rank, "gone", beside=stream.beside)
            elif stream.alive:
                stream.forwarded(chunk, lost=True)
        receiver = self.receivers[key[1]]
        if link.receives and self.lost(key[0]):
            if receiver.runs:
                receiver.broke(link.receives[0][0])
            link.receives.clear()

    def _land(self, receiver: Receiver) -> None:
        receiver.land()

    def _hash(self, _: None) -> None:
        chunk = self.hashing.pop(self.chance.randrange(len(self.hashing)))
        self.hashed.add(chunk)
        self.machine.hashed(chunk, self.now)

    # The sender's driver

    def _drive(self) -> None:
        self._act()
        if self.phase == "join" and self.now >= min(self.machine.join_ends(), SECONDS):
            self.machine.end_join(self.now)
            self._act()
            self.phase = "data"
            beside = [
                peer.rank
                for peer in self.machine.among(Stage.ACCEPTED)
                if peer.route.name == "connections"
            ]
            self.machine.begin(beside, min(2, self.chunks), self.now)
            self._act()
        if self.phase != "data":
            return
        self._pump()
        for rank in self.machine.tell_hashes():
            peer = self.machine.peers[rank]
            told = tuple(right(chunk) for chunk in range(peer.hashes, self.machine.known))
            self.say(SENDER, rank, wire.Hashes(peer.hashes, told))
            peer.hashes = self.machine.known
        self.machine.trail()
        self._act()
        if self.now >= SECONDS:
            self.machine.time_is_up()
            self._act()
        if not self.machine.among(Stage.ACCEPTED):
            self.over = True

    def _pump(self) -> None:
        for stream in self.streams:
            while stream.alive and stream.todo and stream.in_flight < IN_FLIGHT:
                chunk = stream.todo.popleft()
                stream.in_flight += 1
                link = self.link(SENDER, stream.rank, stream.lane)
                link.sends.append((stream, chunk, right(chunk)))
                self._hash_once(chunk)
                self.machine.moved(stream.rank, len(stream.todo), stream.in_flight, self.now)

    def _hash_once(self, chunk: int) -> None:
        if self.verify and chunk not in self.hashed and chunk not in self.hashing:
            self.hashing.append(chunk)

    def _act(self) -> None:
        while self.machine.actions:
            self._do(self.machine.actions.pop(0))

    def _do(self, action: act.SenderAction) -> None:
        if isinstance(action, act.Say):
            self.say(SENDER, action.rank, action.message)
        elif isinstance(action, act.MakeOffer):
            several = len(self.receivers) > 1
            self.say(SENDER, action.rank, wire.Offer(b"", self.verify, threads=0 if several else 1))
        elif isinstance(action, act.LetRead):
            self.say(SENDER, action.rank, wire.Go(SENDER, route="host"))
        elif isinstance(action, act.FeedChunks):
            self.streams.append(Outgoing(action.rank, action.lane, deque(action.chunks)))
        elif isinstance(action, act.FeedBeside):
            self.streams.append(Outgoing(action.rank, 1, deque(range(self.chunks)), beside=True))
        elif isinstance(action, act.HashAhead):
            for chunk in range(self.chunks):
                self._hash_once(chunk)
        elif isinstance(action, act.CutOff):
            for stream in self.streams:
                if stream.rank == action.rank:
                    stream.alive = False
        elif isinstance(action, act.Trail):
            digests = tuple(map(right, range(self.chunks))) if self.verify else ()
            self.say(SENDER, action.rank, wire.Trailer(digests))
