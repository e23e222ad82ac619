"""The results of a call: `Loaded` and `Report`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from torchrelay.errors import ReplicaError
from torchrelay.tables import html_table

RANKS_SHOWN, PATHS_SHOWN = 16, 4  # in a message

Peer = int | str  # a rank, or the name of a source: a URL, a directory


class Outcome(NamedTuple):
    """The outcome of one peer of a call.

    - `why`: the reason, if the peer failed or its outcome is unknown.
    - `bytes`: bytes of the state that came from this source; None for a receiver.
    - `rerouted`: the sender took over from another receiver that had fed this one.
    - `settled`: whether it has the state of an earlier send to the same process, whatever its rank
      was then, if the outcome of that was unknown.
    """

    status: Literal["done", "failed", "unknown"] = "done"
    why: str = ""
    route: str = ""
    bytes: int | None = None
    rerouted: bool = False
    settled: bool | None = None


class Attempt(NamedTuple):
    """A source or a step that a load or a recovery tried, and the outcome."""

    source: str
    step: int | None
    outcome: str

    def __str__(self) -> str:
        step = "no step" if self.step is None else f"step {self.step}"
        return f"{self.source}: {step}; {self.outcome}"


class Traffic(NamedTuple):
    """Data that this rank sent or received: bytes, messages or copies, and the number of
    connections."""

    bytes: int = 0
    messages: int = 0
    connections: int = 0


class Differing(NamedTuple):
    """A tensor that ranks hold in common, and that is not the same on all of them. `ranks`: those
    in the minority, or all where no value has the most."""

    path: str
    kind: str  # "parameter", "buffer", "optimizer state", "DTensor", "named"
    ranks: tuple[int, ...]

    @property
    def named_ranks(self) -> str:
        """The ranks as text."""
        more = ", ..." if len(self.ranks) > RANKS_SHOWN else ""
        return ", ".join(map(str, self.ranks[:RANKS_SHOWN])) + more

    def __str__(self) -> str:
        several = "s" if len(self.ranks) > 1 else ""
        return f"{self.path} ({self.kind}) on rank{several} {self.named_ranks}"


def replica_error(differing: tuple[Differing, ...], count: int) -> ReplicaError:
    """The error for replicas that differ: the first of `count`."""
    shown = "; ".join(map(str, differing[:PATHS_SHOWN]))
    more = f"; and {count - PATHS_SHOWN} more" if count > PATHS_SHOWN else ""
    text = f"ranks that hold the same tensors have other values: {shown}{more}"
    return ReplicaError(text, differing=differing)


@dataclass(frozen=True)
class Report:
    """The outcome of a call on this rank. `str(report)` is a summary for people."""

    step: int | None
    bytes: int  # of the state; of this rank's part, where ranks save or load together
    seconds: dict[str, float] = field(default_factory=dict)  # by phase
    peers: dict[Peer, Outcome] = field(default_factory=dict)  # receivers, or sources
    attempts: tuple[Attempt, ...] = ()  # sources asked, and newer steps that were skipped
    missing_keys: tuple[str, ...] = ()  # in the destination, absent in the source (strict=False)
    unexpected_keys: tuple[str, ...] = ()  # in the source, absent in the destination (strict=False)
    verified: bool = True  # whether digests were compared
    instead: dict[str, str] = field(default_factory=dict)  # faster routes: why none was taken
    traffic: Traffic = field(default_factory=Traffic)
    bytes_written: int | None = None  # of a save, by this rank
    bytes_reused: int = 0  # by a save, of the step before: they had not changed
    skipped: str | None = None  # why nothing was saved, published or staged
    differing: tuple[Differing, ...] = ()  # replicas that a save found to differ, the first 256

    @property
    def total_seconds(self) -> float:
        return sum(self.seconds.values())

    @property
    def route(self) -> str:
        """The route of the bytes; "mixed" if peers differ."""
        taken = set(self.routes.values())
        return taken.pop() if len(taken) == 1 else "mixed" if taken else ""

    @property
    def routes(self) -> dict[Peer, str]:
        """The route of each peer that was not lost."""
        return {name: peer.route for name, peer in self._with("done").items() if peer.route}

    @property
    def receivers(self) -> tuple[Peer, ...]:
        """Ranks that have the state, or the URL that it was saved to."""
        return tuple([name for name, peer in self._with("done").items() if peer.bytes is None])

    @property
    def sources(self) -> dict[Peer, int]:
        """How many bytes came from each source."""
        return {name: peer.bytes for name, peer in self.peers.items() if peer.bytes is not None}

    @property
    def source(self) -> Peer | None:
        """The source that was chosen; the first of several."""
        return next(iter(self.sources), None)

    @property
    def failed(self) -> dict[Peer, str]:
        """Peers that do not have the state, or were dropped as sources, with the reasons."""
        return {name: peer.why for name, peer in self._with("failed").items()}

    @property
    def unknown(self) -> dict[Peer, str]:
        """Receivers whose outcome is unknown, with the reasons."""
        return {name: peer.why for name, peer in self._with("unknown").items()}

    @property
    def settled(self) -> dict[Peer, bool]:
        """Receivers whose outcome an earlier send left unknown: whether they have that state."""
        return {name: peer.settled for name, peer in self.peers.items() if peer.settled is not None}

    @property
    def rerouted(self) -> tuple[Peer, ...]:
        """Receivers that the sender served itself, after another had fed them."""
        return tuple([name for name, peer in self.peers.items() if peer.rerouted])

    def _with(self, status: str) -> dict[Peer, Outcome]:
        return {name: peer for name, peer in self.peers.items() if peer.status == status}

    def _headline(self) -> str:
        spent = self.total_seconds
        step = "" if self.step is None else f"step {self.step}: "
        if self.skipped is not None:
            return f"{step}skipped: {self.skipped}"
        route = f" by route {self.route}" if self.route else ""
        over = f" over {self.traffic.connections} connections" if self.traffic.connections else ""
        speed = self.bytes / spent / 1e9 if spent else 0.0
        rate = f", {speed:.2f} GB/s" if speed >= 0.01 else ""
        reused = f", {self.bytes_reused} of them reused" if self.bytes_reused else ""
        return f"{step}{self.bytes} bytes{reused}{route}{over} in {spent:.3g} s{rate}"

    def __str__(self) -> str:
        lines = [self._headline(), *map(str, self.attempts)]
        for name, peer in self.peers.items():
            if peer.status != "done":
                shown = f"rank {name}" if isinstance(name, int) else name
                lines.append(f"{shown} {peer.status}: {peer.why}")
        lines += [f"replicas differ: {one}" for one in self.differing]
        lines += [f"not by {name}: {why}" for name, why in self.instead.items()]
        lines.append(", ".join(f"{phase} {each:.3g} s" for phase, each in self.seconds.items()))
        return "\n  ".join(line for line in lines if line)

    def _repr_html_(self) -> str:
        """For notebooks: the summary, and tables of phases, peers and attempts."""
        phases = [(phase, f"{each:.3g}") for phase, each in self.seconds.items()]
        parts = [html_table(self._headline(), ("phase", "seconds"), phases)]
        if self.peers:
            peers = [
                (name, one.status, one.route, "" if one.bytes is None else one.bytes, one.why)
                for name, one in self.peers.items()
            ]
            parts.append(html_table("peers", ("", "outcome", "route", "bytes", "why"), peers))
        if self.attempts:
            head = ("source", "step", "outcome")
            parts.append(html_table("attempts", head, self.attempts))
        if self.differing:
            differing = [(one.path, one.kind, one.named_ranks) for one in self.differing]
            head = ("path", "kind", "ranks")
            parts.append(html_table("replicas that differ", head, differing))
        return "".join(parts)


@dataclass(frozen=True, eq=False)
class Loaded:
    """A state that was received, loaded, pulled or recovered, with its step (None if the sender
    named none) and the report. With `PullOptions(reshare=True)`, `seed` serves the step until
    closed. `back_from`: the higher step that the destination had before an update, where the
    publisher has gone back."""

    state: Any = field(repr=False)
    step: int | None
    report: Report
    seed: Any = None
    back_from: int | None = None

    def _repr_html_(self) -> str:
        """For notebooks: the report."""
        return self.report._repr_html_()
