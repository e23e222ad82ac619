"""The messages between workers and their keeper, in addition to those of a server process."""

from __future__ import annotations

import msgspec

from torchrelay.endpoint.address import Address
from torchrelay.endpoint.server import messages as m
from torchrelay.errors import UsageError
from torchrelay.sources.access import Access

LEASE_SECONDS = 60.0
RATE = 200e6  # bytes a second at which copies are fetched
STEPS = 2  # the newest one, and the one that is being staged
MIN_MEMORY = 1 << 20
TAKEN = "taken"  # the answer to `BeginKeeping` where another keeper has the name


class BeginKeeping(msgspec.Struct, tag="begin"):
    """The first message to a keeper that was launched: the name by which it is found."""

    name: str


class JoinKeeper(msgspec.Struct, tag="join"):
    """A worker is here. The first one says where the keeper listens. Answered with `Joined`.

    `listen.token`: the job's, where the worker knows it. `memory`: bytes at most, 0 for any number.
    `steps`: how many steps of its workers the keeper has at most. `begins`: the sender is not a
    worker, and a keeper that was joined before keeps its settings.
    """

    listen: m.Listen
    memory: int
    steps: int
    copies: int
    rate: float
    lease: float
    begins: bool

    @classmethod
    def of(
        cls,
        address: Address,
        access: Access,
        memory: int | None = None,
        steps: int = STEPS,
        copies: int = 1,
        rate: float = RATE,
        lease: float = LEASE_SECONDS,
        *,
        begins: bool = False,
    ) -> JoinKeeper:
        """`UsageError` where a setting makes no sense."""
        token = access.secret()
        if address.port:
            raise UsageError(f"a keeper listens at a free port: give {address.host}:0")
        if token is not None:
            address.check(token)
        if memory is not None and memory < MIN_MEMORY:
            raise UsageError(f"memory must be at least {MIN_MEMORY} bytes or None, not {memory!r}")
        if type(steps) is not int or steps < STEPS:
            raise UsageError(f"steps must be a number from {STEPS}, not {steps!r}")
        if type(copies) is not int or copies < 0:
            raise UsageError(f"copies must be a number from 0, not {copies!r}")
        if not rate > 0:
            raise UsageError(f"rate must be a number of bytes a second, not {rate!r}")
        if not 0 < lease < 1e8:
            raise UsageError(f"lease must be a number of seconds, not {lease!r}")
        listen = m.Listen.at(address.host, 0, access)
        return cls(listen, memory or 0, steps, copies, rate, lease, begins)


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


class HeldStep(msgspec.Struct, array_like=True, frozen=True):
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

    steps: list[HeldStep]
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
    held: bool


class End(msgspec.Struct, tag="end"):
    """The keeper ends, and its memory with it."""


KeeperRequest = (
    JoinKeeper
    | Members
    | AskReport
    | HoldSlot
    | End
    | m.Reserve
    | m.StageSlot
    | m.Show
    | m.FinishPublish
    | m.Tell
)
KeeperAnswer = (
    Joined | KeeperReport | m.Reserved | m.SlotStaged | m.StatusText | m.Obeyed | m.Refused
)
