"""What a call of the front door asks for, as records that its parts share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from torchrelay.deadlines import Deadline, Stopwatch
from torchrelay.landing.checks.shards import Shards
from torchrelay.landing.destination import PreparedDestination
from torchrelay.landing.seam import Landing
from torchrelay.progress import untold
from torchrelay.record.manifest import Manifest


@dataclass(frozen=True)
class TransferCall:
    """One call: until when, how long each phase took, and whom to tell how far it is."""

    deadline: Deadline
    watch: Stopwatch = field(default_factory=Stopwatch)
    progress: Callable[[int, int], None] = untold


@dataclass(frozen=True)
class ReceiveTarget:
    """Where a received state goes, as `Relay.recv` says it."""

    into: object = None  # looked over already, or as the caller has it
    strict: bool = True
    atomic: bool = True
    device: torch.device | None = None
    shards: Shards = "own"
    make_missing: bool = False  # tensors that `into` lacks are made anew


@dataclass(frozen=True)
class SendOptions:
    """How a state is sent."""

    window: float  # seconds that the first receivers wait for the others
    join_timeout: float
    verify: bool | None
    route: str | None
    connections: int


@dataclass(frozen=True)
class ReceiveOptions:
    """What a receiver takes, and how it lands."""

    step: int | None
    land: Callable[[Manifest], Landing]
    destination: PreparedDestination | None
    route: str | None
    connections: int
