"""The options of a call of `Relay`, as records that its parts share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torchrelay.deadlines import Deadline, Stopwatch
from torchrelay.landing.options import LandingOptions
from torchrelay.progress import untold


@dataclass(frozen=True)
class TransferCall:
    """One call: its deadline, the seconds of its phases, and its progress function."""

    deadline: Deadline
    watch: Stopwatch = field(default_factory=Stopwatch)
    progress: Callable[[int, int], None] = untold


@dataclass(frozen=True)
class SendOptions:
    """How a state is sent."""

    step: int | None
    window: float  # seconds that the first receivers wait for the others
    join_timeout: float
    verify: bool | None
    route: str | None
    connections: int
    chunk_bytes: int | None = None


@dataclass(frozen=True)
class ReceiveOptions:
    """The state that a receiver takes, and its destination. `reshard`: boxes of it are taken, from
    one rank or several; else one rank's state as it is."""

    into: object = None
    step: int | None = None
    landing: LandingOptions = field(default_factory=LandingOptions)
    route: str | None = None
    connections: int = 1
    chunk_bytes: int | None = None  # of reads of several ranks
    reshard: bool = False
    window: float = 0.0  # seconds that the first of several ranks waits for the others
