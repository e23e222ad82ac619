"""The messages between workers and their keeper, in addition to those of a server process."""

from __future__ import annotations

import msgspec

from torchrelay.endpoint.address import Address
from torchrelay.endpoint.server import messages as m
from torchrelay.errors import UsageError

LEASE_SECONDS = 60.0
RATE = 200e6  # bytes a second at which copies are fetched
STEPS = 2  # the newest one, and the one that is being staged
MIN_MEMORY = 1 << 20
TAKEN = "taken"  # the answer to a name that another keeper has


class JoinKeeper(msgspec.Struct, tag="join"):
    """A worker is here. The first one says where the keeper listens. Answered with `Joined`.

    `listen.token`: the job's, where the worker knows it. `memory`: bytes at most, None for any
    number. `steps`: how many steps of its workers the keeper has at most. `begins`: the sender is
    not a worker, and a keeper that was joined before keeps its settings. `UsageError` where a
    setting makes no sense.
    """

    listen: m.Listen
    memory: int | None = None
    steps: int = STEPS
    copies: int = 1
    rate: float = RATE
    lease: float = LEASE_SECONDS
    begins: bool = False

    def __post_init__(self) -> None:
        listen = self.listen
        if listen.port:
            raise UsageError(f"a keeper listens at a free port: give {listen.host}:0")
        if listen.token is not None:
            Address(listen.host, 0).check(listen.token)
        if self.memory is not None and self.memory < MIN_MEMORY:
            raise UsageError(
                f"memory_budget must be at least {MIN_MEMORY} bytes or None, not {self.memory!r}"
            )
        if type(self.steps) is not int or self.steps < STEPS:
            raise UsageError(f"steps must be a number from {STEPS}, not {self.steps!r}")
        if type(self.copies) is not int or self.copies < 0:
            raise UsageError(f"copies must be a number from 0, not {self.copies!r}")
        if not self.rate > 0:
            raise UsageError(f"copy_bytes_per_second must be a positive number, not {self.rate!r}")
        if not 0 < self.lease < 1e8:
            raise UsageError(f"lease_seconds must be a positive number, not {self.lease!r}")


class Joined(msgspec.Struct, tag="joined"):
    """`members`: the URLs of the job's keepers, as far as this one knows them."""

    port: int
    token: str
    members: list[str]
    pid: int


class Members(msgspec.Struct, tag="members"):
    """The keepers of the job from here on, and their token."""

    urls: list[str]
    own: str
    token: str


class AskReport(msgspec.Struct, tag="report"):
    """Answered with `KeeperReport`."""


class RetainedStep(msgspec.Struct, array_like=True, frozen=True):
    """A step that a keeper has something of.

    `volumes`: how many the step has, 0 where its record is not here. `here`: a bit for each that
    the keeper has, as a little-endian number. `copied`: it has all that it has to copy.
    """

    step: int
    snapshot: str
    volumes: int
    here: bytes
    copied: bool


class KeeperReport(msgspec.Struct, tag="reported"):
    """The steps of a keeper, oldest first, and the one that it is copying. `failed`: how many
    copies in a row went wrong. `full`: why it has no memory for another step while it copies."""

    steps: list[RetainedStep]
    copying: str
    failed: int
    full: str


class KeeperDecision(msgspec.Struct, array_like=True):
    """The next action of all keepers. `keep`: reported steps that must not be lost. `copy`: whether
    to copy the step that is being staged or, if it is skipped, the newest."""

    keep: list[str]
    copy: bool
    known: list[str]


class HoldSlot(msgspec.Struct, tag="hold"):
    """A slot of the worker is read, and must not be written to; or (`held` is false) no longer."""

    slot: int
    retained: bool


class End(msgspec.Struct, tag="end"):
    """The keeper ends, and its memory with it."""


KeeperRequest = JoinKeeper | Members | AskReport | HoldSlot | End | m.PublishRequest
KeeperAnswer = Joined | KeeperReport | m.PublishAnswer
