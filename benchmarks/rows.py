"""What is measured and what it has to reach: kinds of transfers, cases, bars, rows."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median
from typing import Any, Literal

from benchmarks.versus import AS_IT_COMES, NEW, Mode, Setup

By = Literal["torch", "torchft", "copy_", "torchrelay"]
Memory = Literal["warm", "cold", "in use"]

NAMES: dict[By, str] = {
    "torch": "torch PGTransport",
    "torchft": "torchft HTTPTransport",
    "copy_": "two-thread copy_",
    "torchrelay": "torchrelay",
}


@dataclass(frozen=True)
class Kind:
    """One way to move a state."""

    by: By
    mode: Mode
    setup: Setup = AS_IT_COMES  # of a `Relay`

    @property
    def fresh(self) -> bool:
        return self.mode == NEW


@dataclass(frozen=True)
class Bar:
    """What a row has to reach. `speed`: their seconds over ours."""

    speed: float | None = None
    fewer_bytes: float | None = None  # their bytes over ours
    sent_per_state: float | None = None  # bytes that leave the sender over bytes of the state

    def __str__(self) -> str:
        parts = []
        if self.speed is not None:
            parts.append(f"speed >= {self.speed:g}x")
        if self.fewer_bytes is not None:
            parts.append(f"bytes >= {self.fewer_bytes:g}x fewer")
        if self.sent_per_state is not None:
            parts.append(f"sent <= {self.sent_per_state:g}x state")
        return ", ".join(parts)


@dataclass(frozen=True)
class Case:
    """Ours beside another."""

    ours: Kind
    theirs: Kind
    bar: Bar | None = None


@dataclass(frozen=True)
class Measured:
    """One kind of transfer."""

    laps: list[float]
    first: float
    bytes: int  # that left the sender or were read from its memory, control messages included
    messages: int  # of the sender, through the group
    exact: bool
    route: str = ""
    cpu_seconds: float = 0.0  # of all ranks together
    sender_phases: dict[str, float] = field(default_factory=dict)
    receiver_phases: dict[str, float] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        return median(self.laps)


@dataclass(frozen=True)
class Row:
    """One case of one workload."""

    workload: str
    title: str
    case: Case
    memory: Memory
    receivers: int
    tensors: int
    state_bytes: int
    theirs: Measured
    ours: Measured
    busy: float  # share of the cores that others had, just before
    evidence: list[dict[str, Any]] = field(default_factory=list)  # of the memory's condition

    @property
    def mode(self) -> str:
        """The mode and whatever else is not as by default."""
        setup = self.case.ours.setup
        parts: list[str] = [self.case.ours.mode]
        if self.case.ours.fresh:
            parts.append(self.memory)
        if setup.verify is not True:
            parts.append(f"verify={setup.verify}")
        if setup.connections is not None:
            parts.append(f"connections={setup.connections}")
        if setup.pool is not None:
            parts.append(f"pool={setup.pool}")
        return ", ".join(parts)

    @property
    def speed(self) -> float:
        return self.theirs.seconds / self.ours.seconds

    @property
    def fewer_bytes(self) -> float | None:
        """None where the other's are not counted."""
        return self.theirs.bytes / self.ours.bytes if self.theirs.bytes else None

    @property
    def exact(self) -> bool:
        return self.theirs.exact and self.ours.exact

    @property
    def passed(self) -> bool | None:
        bar = self.case.bar
        if bar is None:
            return None
        return (
            (bar.speed is None or self.speed >= bar.speed)
            and (bar.fewer_bytes is None or (self.fewer_bytes or 0) >= bar.fewer_bytes)
            and (
                bar.sent_per_state is None
                or self.ours.bytes <= bar.sent_per_state * self.state_bytes
            )
        )
