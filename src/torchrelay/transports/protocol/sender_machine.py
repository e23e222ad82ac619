"""The sender of a live transfer as a state machine: events in, calls of `Effects` out.

The machine has no thread, clock or socket. The driver (`sender.py`) passes it joins, messages,
losses and the time; tests drive it with a recorder.

| stage of receiver | event                            | effect                    | next      |
|-------------------|----------------------------------|---------------------------|-----------|
| EXPECTED          | it joins                         | offer                     | OFFERED   |
| EXPECTED          | it joins for another step        | abort                     | REFUSED   |
| EXPECTED          | nothing in time                  |                           | FAILED    |
| OFFERED           | `Accept` of a route that reads   | go                        | ACTIVE    |
| OFFERED           | `Accept` of route tcp            | wait for the chain        | ACCEPTED  |
| OFFERED           | nothing in time                  | abort                     | FAILED    |
| ACCEPTED          | all are here, or the window ends | go                        | ACTIVE    |
| ACTIVE            | `Need`                           | feed it from here         | ACTIVE    |
| ACTIVE            | `Want`                           | send it digests           | ACTIVE    |
| ACTIVE            | `RouteNote`                      | its route handles it      | ACTIVE    |
| ACTIVE, CONFIRMED | `Accept` of more reads           | go                        | ACTIVE    |
| ACTIVE            | `Fetched`                        | confirm, unless changed   | CONFIRMED |
| CONFIRMED         | `Done`                           |                           | DONE      |
| CONFIRMED         | lost, `Abort`, no answer         | close                     | UNKNOWN   |
| not over          | `Refuse`                         |                           | REFUSED   |
| any other         | lost, `Abort`, no answer, stall  | abort                     | FAILED    |

"Lost" is a closed connection. A receiver of a chain whose upstream failed says `Need`, and
continues to feed those behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torchrelay.errors import RelayError, StateError
from torchrelay.transports.protocol.options import SendOptions
from torchrelay.transports.protocol.peers import OVER, UNDER_WAY, Peer, Stage
from torchrelay.transports.routes.choice import BY_NAME
from torchrelay.transports.routes.route import Link, RouteFault
from torchrelay.transports.wire import messages as m


class Effects(Protocol):
    """The calls that the machine makes to its driver. Each may raise `StateError`: the state has
    changed, or cannot be read. `offer`, `go` and `serve` raise anything else about a receiver that
    cannot be served."""

    def offer(self, peer: Peer, several: bool) -> None:
        """Make an offer to a receiver that has joined."""

    def another_came(self, peer: Peer) -> bool:
        """Whether another state was sent to a receiver while this one was."""

    def go(self, peer: Peer, link: Link) -> None:
        """Begin to serve a receiver."""

    def serve(self, peer: Peer, request: m.Need | m.Want | m.RouteNote) -> None:
        """Send a receiver chunks or digests, or hand a note to its route."""

    def confirm(self, peer: Peer) -> None:
        """Tell a receiver to commit."""

    def send(self, peer: Peer, message: m.Message) -> None: ...

    def drop(self, peer: Peer) -> None:
        """Serve a receiver no longer, and close its connection."""


def patience_of(options: SendOptions, seconds: float, receivers: int) -> float:
    """Seconds without a sign of a receiver after which it is lost; 0.0: the deadline counts. One
    receiver alone delays no one."""
    return min(options.window, seconds / 4) if receivers > 1 else 0.0


@dataclass
class SenderMachine:
    options: SendOptions
    seconds: float  # of the whole call
    peers: dict[int, Peer]
    effects: Effects
    begun: float
    joining: bool = True

    @property
    def patience(self) -> float:
        return patience_of(self.options, self.seconds, len(self.peers))

    def among(self, *stages: Stage) -> list[Peer]:
        return [peer for peer in self.peers.values() if peer.stage in stages]

    @property
    def over(self) -> bool:
        return not self.joining and not self.among(*UNDER_WAY)

    # The join

    def join_ends(self) -> float:
        """Until when to wait for receivers, unless something happens before.

        The first receiver waits a window for the others to come, and as long for the answer of each
        that came. Waiting for late receivers must not use up the time reserved for serving.
        """
        if not self.among(Stage.EXPECTED, Stage.OFFERED):
            return float("-inf")
        end, window = self.begun + self.seconds, self.options.window
        here = [p for p in self.peers.values() if p.stage not in (Stage.EXPECTED, Stage.FAILED)]
        silent = [peer.joined_at for peer in self.among(Stage.OFFERED)]
        if not here:
            return min(self.begun + self.options.join_timeout, end)
        if len(silent) == len(here):
            return end
        waits = [min(peer.joined_at for peer in here), *silent]
        return max(at + min(window, (end - at) / 2) for at in waits)

    def joined(self, rank: int, join: m.Join, several: bool, now: float) -> bool:
        """A receiver has come; whether it is served."""
        peer = self.peers[rank]
        if not self.joining or peer.stage is not Stage.EXPECTED:
            return False
        peer.stage, peer.join, peer.joined_at, peer.pinged_at = Stage.OFFERED, join, now, now
        if not (reason := self.wrong_step(join)):
            self._attempt(peer, self.effects.offer, several)
        else:
            self._refuse_step(peer, reason)
        return True

    def wrong_step(self, join: m.Join) -> str:
        """Why a receiver cannot have this step; empty if it can."""
        if join.step in (None, self.options.step):
            return ""
        return f"step {self.options.step} is offered, step {join.step} was asked for"

    def _refuse_step(self, peer: Peer, reason: str) -> None:
        peer.refuse(m.Refuse("step", reason))
        self.effects.send(peer, m.Abort(reason, kind="step"))
        self.effects.drop(peer)

    def end_join(self, now: float) -> None:
        """No one else is waited for: those who wait for the others begin."""
        self.joining = False
        for peer in self.among(Stage.EXPECTED):
            peer.give_up(f"did not join within {now - self.begun:.3g} s", timed_out=True)
        for peer in self.among(Stage.OFFERED):
            self.fail(peer, "joined, but did not answer the offer", timed_out=True)
        for link in chain(self.among(Stage.ACCEPTED)):
            self._go(self.peers[link.rank], link)

    def _go(self, peer: Peer, link: Link) -> None:
        peer.stage, peer.chained = Stage.ACTIVE, link.upstream is not None
        self._attempt(peer, self.effects.go, link)

    def _attempt(self, peer: Peer, effect: Callable[..., None], *args: Any) -> None:
        """Do something for a receiver, which has failed if that cannot be done."""
        try:
            effect(peer, *args)
        except StateError:
            raise
        except Exception as fault:
            text = fault.message if isinstance(fault, RelayError) else str(fault)
            why = text if isinstance(fault, (RelayError, RouteFault)) else repr(fault)
            self.fail(peer, f"cannot be served: {why}")

    # Messages

    def received(self, rank: int, message: m.Message, now: float) -> None:
        """A receiver has sent a message."""
        peer = self.peers[rank]
        if peer.stage in OVER or peer.stage is Stage.EXPECTED:
            return
        if isinstance(message, m.Refuse):
            peer.refuse(message)
            self.effects.drop(peer)
        elif isinstance(message, m.Abort):
            self._drop(peer, f"gave up: {message.message}", timed_out=message.timed_out)
        elif isinstance(message, m.Accept):
            self._accepted(peer, message)
        elif peer.stage is Stage.ACTIVE and isinstance(message, (m.Need, m.Want, m.RouteNote)):
            if isinstance(message, m.Need):
                peer.rerouted = peer.rerouted or peer.chained
            self._attempt(peer, self.effects.serve, message)
        elif peer.stage is Stage.ACTIVE and isinstance(message, m.Fetched):
            self._fetched(peer)
        elif peer.stage is Stage.CONFIRMED and isinstance(message, m.Done):
            peer.stage = Stage.DONE
        else:
            self._out_of_turn(peer, message)

    def _fetched(self, peer: Peer) -> None:
        assert peer.join is not None
        if peer.join.parts and peer.join.step is None and self.effects.another_came(peer):
            # A receiver from several ranks could have this state from one and that from another.
            self._refuse_step(peer, "several states are sent to this rank: say which by step=")
        else:
            self.effects.confirm(peer)
            peer.stage = Stage.CONFIRMED

    def _accepted(self, peer: Peer, accept: m.Accept) -> None:
        again = accept.reads is not None and peer.stage in (Stage.ACTIVE, Stage.CONFIRMED)
        if peer.stage is not Stage.OFFERED and not again:
            self._out_of_turn(peer, accept)
            return
        route, only = BY_NAME.get(accept.route), self.options.route
        if route is None:
            self.fail(peer, f"took route {accept.route!r}, which is not known here")
        elif only not in (None, route.name):
            reason = f"it takes route {accept.route!r}, and {only!r} was asked for"
            peer.refusal = m.Refuse("route", reason)
            self.fail(peer, reason)
        else:
            peer.accept = accept
            waits = route.chained and accept.reads is None and len(self.peers) > 1
            assert peer.join is not None
            if waits and peer.join.address is not None and self.joining:
                peer.stage = Stage.ACCEPTED
            else:
                self._go(peer, Link(peer.rank))

    def _out_of_turn(self, peer: Peer, message: m.Message) -> None:
        self.fail(peer, f"sent {type(message).__name__} out of turn")

    # Losses

    def lost(self, rank: int, reason: str) -> None:
        """The connection to a receiver is closed."""
        if self.peers[rank].stage in UNDER_WAY:
            self._drop(self.peers[rank], f"connection lost: {reason}")

    def fail(self, peer: Peer, reason: str, *, timed_out: bool = False, message: str = "") -> None:
        """Give up on one receiver, and send it the reason, or this `message`."""
        # A receiver that has been asked to commit takes no more messages.
        if peer.stage is not Stage.CONFIRMED:
            message = message or f"the sender gave up on this rank: {reason}"
            self.effects.send(peer, m.Abort(m.text(message), timed_out=timed_out))
        self._drop(peer, reason, timed_out=timed_out)

    def abort(self, reason: str) -> None:
        """Give up altogether."""
        for peer in self.among(*UNDER_WAY):
            self.fail(peer, reason, message=reason)
        for peer in self.among(Stage.EXPECTED):
            peer.give_up(reason)

    def _drop(self, peer: Peer, reason: str, *, timed_out: bool = False) -> None:
        peer.give_up(reason, timed_out=timed_out)
        self.effects.drop(peer)

    # Time

    @property
    def tick_seconds(self) -> float:
        return min(self.patience / 4, 0.25) if self.patience else 1.0

    def tick(self, now: float, silent: Mapping[int, float], stuck: Mapping[int, float]) -> None:
        """Some time has passed: for how long each receiver was silent, and took none of the
        chunks that wait for it."""
        if not self.patience:
            return
        # Also those that wait for the others, which say nothing of themselves meanwhile.
        for peer in self.among(Stage.ACCEPTED, Stage.ACTIVE, Stage.CONFIRMED):
            if silent.get(peer.rank, 0.0) > self.patience:
                self.fail(peer, f"took no message for {self.patience:.3g} s")
            elif stuck.get(peer.rank, 0.0) > self.patience:
                self.fail(peer, f"took no data for {self.patience:.3g} s")
            elif now > peer.pinged_at + self.patience / 4:
                peer.pinged_at = now
                self.effects.send(peer, m.Ping())

    def time_is_up(self) -> None:
        for peer in self.among(*UNDER_WAY):
            self.fail(peer, f"not done after {self.seconds:.3g} s", timed_out=True)


def chain(peers: Sequence[Peer]) -> list[Link]:
    """Receivers in a row: each passes a chunk on as it arrives, so the bytes leave the sender about
    once. Receivers of one machine are neighbours, so bytes cross to a machine once; machines are in
    the order of their first."""
    joins = {peer.rank: peer.join for peer in peers if peer.join is not None}
    order = list(dict.fromkeys(join.location.machine for join in joins.values()))
    ranks = sorted(joins, key=lambda rank: order.index(joins[rank].location.machine))
    rows = zip(ranks, [None, *ranks], [*ranks[1:], None], strict=False)
    addresses = [None, *(joins[rank].address for rank in ranks)]
    return [Link(*row, depth, addresses[depth]) for depth, row in enumerate(rows)]
