"""A `SenderMachine` without sockets: a recorder for its effects, and receivers that do anything."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

from torchrelay.errors import StateError
from torchrelay.transports.protocol.options import SendOptions
from torchrelay.transports.protocol.peers import OVER, UNDER_WAY, Peer, Stage
from torchrelay.transports.protocol.sender_machine import SenderMachine
from torchrelay.transports.routes.route import Link, RouteFault
from torchrelay.transports.wire.messages import (
    Abort,
    Accept,
    Done,
    Fetched,
    Go,
    Join,
    Message,
    Need,
    NodeAddress,
    Ping,
    ProcessLocation,
    Refuse,
    RouteNote,
    Want,
)


def at_port(port: int) -> NodeAddress:
    """Where a receiver listens."""
    return NodeAddress(bytes(16), "10.0.0.1", port)


AT = at_port(1)


class Effect(NamedTuple):
    rank: int
    name: str
    what: Any = None


class Recorder:
    """Notes what a machine asks for; `answers` has why it is not done, by effect and rank."""

    machine: SenderMachine

    def __init__(self) -> None:
        self.effects: list[Effect] = []
        self.answers: dict[tuple[str, int], str] = {}
        self.changed = False
        self.another = False
        self._dropped: set[int] = set()

    def names(self, rank: int) -> list[str]:
        """The effects on a receiver, with the kinds of messages that it is sent."""
        return [
            type(one.what).__name__ if one.name == "send" else one.name
            for one in self.effects
            if one.rank == rank
        ]

    def _note(self, peer: Peer, name: str, what: Any = None) -> None:
        rank = peer.rank
        assert rank not in self._dropped, f"{name} for rank {rank}, which was dropped"
        assert self.machine.peers[rank].stage is not Stage.DONE, f"{name} for one that is done"
        self.effects.append(Effect(rank, name, what))
        if (name, rank) in self.answers:
            raise RouteFault(self.answers[name, rank])

    def offer(self, peer: Peer, several: bool) -> None:
        self._note(peer, "offer", (peer.join, several))

    def another_came(self, peer: Peer) -> bool:
        return self.another

    def go(self, peer: Peer, link: Link) -> None:
        assert link.rank == peer.rank
        self._note(peer, "go", link)

    def serve(self, peer: Peer, asked: Need | Want | RouteNote) -> None:
        names = {Need: "feed", Want: "tell_digests", RouteNote: "note"}
        self._note(peer, names[type(asked)], asked)

    def confirm(self, peer: Peer) -> None:
        if self.changed:
            raise StateError("the state was changed while it was sent")
        self._note(peer, "confirm")

    def send(self, peer: Peer, message: Message) -> None:
        self._note(peer, "send", message)

    def drop(self, peer: Peer) -> None:
        self._note(peer, "drop")
        self._dropped.add(peer.rank)


def machine(
    ranks: Mapping[int, Any] | list[int],
    *,
    window: float = 10.0,
    join_timeout: float = 60.0,
    seconds: float = 60.0,
    route: str | None = None,
    step: int | None = None,
) -> tuple[SenderMachine, Recorder]:
    """A machine for these receivers that begins at time 0, and what it does."""
    recorder = Recorder()
    options = SendOptions(step, window, join_timeout, None, route, connections=1)
    peers = {rank: Peer(rank) for rank in ranks}
    recorder.machine = made = SenderMachine(options, seconds, peers, recorder, 0.0)
    return made, recorder


class Driver:
    """Plays a `send` on a clock of its own, with receivers that follow the protocol, break it, or
    are lost, by the seed."""

    def __init__(self, seed: int) -> None:
        self.chance = chance = random.Random(seed)
        self.ranks = chance.sample(range(1, 9), chance.randint(1, 4))
        self.window = chance.choice((1.0, 3.0))
        self.seconds = chance.choice((2.0, 8.0, 30.0))
        self.machine, self.recorder = machine(
            self.ranks,
            window=self.window,
            seconds=self.seconds,
            join_timeout=chance.choice((self.seconds, 1.5)),
        )
        self._reached = chance.random() < 0.8
        self.now = 0.0
        self.fetched: Counter[int] = Counter()
        self.confirmed: Counter[int] = Counter()
        self.lost: set[int] = set()
        self.asked: set[int] = set()  # for chunks or digests
        self.aborted = False
        self._seen = 0
        # Those that follow the protocol, at once: the fate of the others is not theirs.
        self.healthy = {rank for rank in self.ranks if chance.random() < 0.6}
        self.mute = {r for r in self.ranks if r not in self.healthy and chance.random() < 0.4}
        self.came: dict[int, float] = {}
        self.heard_at: dict[int, float] = {}
        self.over_at: dict[int, float] = {}
        self.turn_at: dict[int, float] = {}  # since when it has something to say
        self._bad = 0.0 if chance.random() < 0.2 else 0.06
        self.arrives = {r: chance.random() * self.window * 0.9 for r in self.ranks}
        for rank in set(self.ranks) - self.healthy:
            self.arrives[rank] = chance.random() * self.seconds * 1.2
            for name in ("offer", "go", "feed", "tell_digests", "note"):
                if chance.random() < self._bad:
                    self.recorder.answers[name, rank] = "this cannot be done"

    def run(self) -> None:
        """Until the machine is over, as the driver of a real send does it."""
        while self.machine.joining and not self.aborted:
            if self.now >= min(self.machine.join_ends(), self.seconds):
                self._act(lambda: self.machine.end_join(self.now))
            else:
                self._step()
        while not self.machine.over and not self.aborted:
            self._step()
            if self.now >= self.seconds:
                self._act(self.machine.time_is_up)

    def _step(self) -> None:
        """Something happens, and time passes."""
        for rank in self.ranks:
            self._act(lambda rank=rank: self._receiver(rank))  # type: ignore[misc]
        silent = {rank: self.now - at for rank, at in self.heard_at.items()}
        self._act(lambda: self.machine.tick(self.now, silent, {}))
        self.now += self.chance.choice((0.01, 0.05, 0.2, 0.5)) * min(1.0, self.window / 2)

    def _act(self, act: Any) -> None:
        before = {rank: peer.stage for rank, peer in self.machine.peers.items()}
        try:
            if not self.aborted:
                act()
        except StateError as fault:
            self.aborted = True
            self.machine.abort(f"the sender gave up: {fault}")
        self._check(before)

    def _check(self, before: dict[int, Stage]) -> None:
        for rank, peer in self.machine.peers.items():
            if peer.stage is not before[rank]:
                self.turn_at[rank] = self.now
            if before[rank] in OVER:
                assert peer.stage is before[rank], f"rank {rank} was over, and is {peer.stage}"
            elif peer.stage in OVER:
                self.over_at.setdefault(rank, self.now)
            if peer.stage is Stage.UNKNOWN:
                assert before[rank] in (Stage.CONFIRMED, Stage.UNKNOWN, Stage.ACTIVE)
        for effect in self.recorder.effects[self._seen :]:
            if effect.name == "confirm":
                self.confirmed[effect.rank] += 1
                assert self.confirmed[effect.rank] <= self.fetched[effect.rank], "not asked for"
            if effect.name == "send":
                assert isinstance(effect.what, Abort | Ping)
                if isinstance(effect.what, Ping) and effect.rank not in self.mute:
                    self.heard_at[effect.rank] = self.now  # its `Pong`
        self._seen = len(self.recorder.effects)

    # Receivers

    def _receiver(self, rank: int) -> None:
        machine, peer, chance = self.machine, self.machine.peers[rank], self.chance
        if rank in self.lost or peer.stage in OVER:
            return
        if peer.stage is Stage.EXPECTED:
            if self.now >= self.arrives[rank] and machine.joining:
                self.came[rank] = self.heard_at[rank] = self.now
                address = AT if self._reached else None
                join = Join(location=ProcessLocation(machine=chance.choice("ab")), address=address)
                assert machine.joined(rank, join, False, self.now)
        elif rank in self.healthy:
            # It is busy at times, for less than a window, and answers pings meanwhile.
            late = self.now > self.turn_at[rank] + self.window / 3
            if late or chance.random() < 0.6:
                self._says_what_it_should(rank, peer)
        elif rank in self.mute:
            return
        elif chance.random() < 0.3:
            self._does_anything(rank, peer)
        elif chance.random() < 0.5:
            self._says_what_it_should(rank, peer)

    def _says_what_it_should(self, rank: int, peer: Peer) -> None:
        chance = self.chance
        if peer.stage is Stage.OFFERED:
            self._say(rank, Accept(chance.choice(("tcp", "tcp", "memory"))))
        elif peer.stage is Stage.ACTIVE:
            more = (Need((0,)), Want(((0, 1),)), RouteNote(b""))
            asks = rank not in self.asked and chance.random() < 0.5
            self.asked.add(rank)
            self._say(rank, chance.choice(more) if asks else Fetched())
        elif peer.stage is Stage.CONFIRMED:
            self._say(rank, Done())

    def _say(self, rank: int, message: Message) -> None:
        self.heard_at[rank] = self.now
        self.fetched[rank] += isinstance(message, Fetched)
        self.machine.received(rank, message, self.now)

    def _does_anything(self, rank: int, peer: Peer) -> None:
        chance, stage = self.chance, peer.stage
        kind = chance.randrange(6)
        if kind == 0:
            self.lost.add(rank)
            self.machine.lost(rank, "closed by the other side")
            wanted = Stage.UNKNOWN if stage is Stage.CONFIRMED else Stage.FAILED
            assert peer.stage is wanted, f"lost when {stage}, and is {peer.stage}"
        elif kind == 1:
            self._say(rank, Abort("enough", timed_out=chance.random() < 0.5))
            assert peer.stage not in UNDER_WAY
        elif kind == 2:
            self._say(rank, Refuse("mismatch", "not this one"))
            assert peer.stage is Stage.REFUSED
        elif kind == 3:
            self.recorder.changed = chance.random() < 0.1 and self._bad > 0
        else:
            self._say(rank, chance.choice(ANYTHING))


ANYTHING: list[Message] = [
    Accept("tcp"),
    Accept("memory", reads=b"some"),
    Accept("teleport"),
    Need((0,)),
    Want(((0, 1),)),
    RouteNote(b"x"),
    Fetched(),
    Done(),
    Join(),
    Go(),
]
