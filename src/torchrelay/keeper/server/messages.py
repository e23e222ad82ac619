"""What workers and their keeper say to each other, beside what a server process is asked."""

from __future__ import annotations

import msgspec

from torchrelay.endpoint.server import messages as m

TAKEN = "taken"  # the answer to `BeginKeeping` where another keeper has the name


class BeginKeeping(msgspec.Struct, tag="begin"):
    """The first word to a keeper that was launched: the name by which it is found."""

    name: str


class JoinKeeper(msgspec.Struct, tag="join"):
    """A worker is here. The first one says where the keeper listens. Answered with `Joined`.

    `token`: the job's, where the worker knows it. `memory`: bytes at most, 0 for any number.
    `steps`: how many steps the keeper has of its workers at most. `certfile`, `keyfile`: what the
    keeper serves TLS by; `cafile`: what those of other keepers are signed by. `begins`: it is no
    worker, and a keeper that has been joined before goes on by what it was told then.
    """

    host: str
    token: str
    memory: int
    steps: int
    rate: float
    copies: int
    lease: float
    version: str
    begins: bool
    certfile: str | None = None
    keyfile: str | None = None
    cafile: str | None = None


class Joined(msgspec.Struct, tag="joined"):
    """`members`: the URLs of the job's keepers as far as this one knows them."""

    host: str
    port: int
    token: str
    members: list[str]
    pid: int


class Members(msgspec.Struct, tag="members"):
    """The keepers of the job from here on, in the order of their ring, and their token."""

    urls: list[str]
    own: str
    token: str


class RoomWanted(msgspec.Struct, tag="room"):
    """Memory for a rank's part of a step. Answered with `RoomGiven`."""

    nbytes: int
    step: int


class RoomGiven(msgspec.Struct, tag="given"):
    """A slot that may be written to, or why there is none. Slots in `gone` are the worker's no
    more."""

    slot: int
    why: str = ""
    gone: list[int] = []


class HeldStep(msgspec.Struct, array_like=True, frozen=True):
    """A step that a keeper has something of. `whole`: it heard that every rank had staged it.

    `volumes`: how many the step has, 0 where its record is not here. `here`: a number whose bits
    say which of them are here, as bytes from the lowest on.
    """

    snapshot: str
    whole: bool
    volumes: int
    here: bytes


class HoldSlot(msgspec.Struct, tag="hold"):
    """A slot of the worker is read, and is not to be written to; or (`held` is false) no more."""

    slot: int
    held: bool


class TellCopies(msgspec.Struct, tag="copies"):
    """What the keeper has, and how far it is with its copies. Answered with `CopiesTold`."""


class CopiesTold(msgspec.Struct, tag="copied"):
    """`copied`: the step of which it has the copies that it is to have. `idle`: it is at none.
    `failed`: how often in a row copies went wrong. `full`: why it has no room for another step as
    long as it is at this copy."""

    copied: str
    idle: bool
    failed: int
    full: str
    steps: list[HeldStep]


class CopyNext(msgspec.Struct, tag="copy"):
    """What all keepers said adds up to.

    `safe`: the step that all of them have their copies of, if there is one. `begin`: they copy the
    step that is being staged or, where it has to be skipped, the newest. `alone`: copies went wrong
    too often, and steps are no longer kept for them. `whole` and `void`: steps of which the keepers
    have all parts, and of which they do not.
    """

    safe: str
    begin: bool
    alone: bool
    whole: list[str]
    void: list[str]


class End(msgspec.Struct, tag="end"):
    """The keeper ends, and its memory with it."""


KeeperRequest = (
    JoinKeeper
    | Members
    | RoomWanted
    | HoldSlot
    | TellCopies
    | CopyNext
    | End
    | m.AttachSlot
    | m.Hash
    | m.Show
    | m.Expect
    | m.Note
    | m.Tell
)
KeeperAnswer = (
    Joined | RoomGiven | CopiesTold | m.Obeyed | m.VolumeDigests | m.StatusText | m.Refused
)
