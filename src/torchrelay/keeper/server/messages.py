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
    """

    host: str
    token: str
    memory: int
    rate: float
    copies: int
    lease: float
    version: str


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
    """Memory for a rank's part of the next step. Answered with `RoomGiven`."""

    nbytes: int


class RoomGiven(msgspec.Struct, tag="given"):
    """A slot that may be written to, or why there is none. Slots in `gone` are the worker's no
    more."""

    slot: int
    why: str = ""
    gone: list[int] = []


class TellCopies(msgspec.Struct, tag="copies"):
    """How far the keeper is with its copies. Answered with `CopiesTold`."""


class CopiesTold(msgspec.Struct, tag="copied"):
    """The step of which it has the copies that it is to have, and whether it is at none."""

    copied: str
    idle: bool


class CopyNext(msgspec.Struct, tag="copy"):
    """What all keepers said adds up to: the step that all of them have their copies of, if there is
    one, and whether the step that is being staged is the next to be copied."""

    safe: str
    begin: bool


class End(msgspec.Struct, tag="end"):
    """The keeper ends, and its memory with it."""


KeeperRequest = (
    JoinKeeper
    | Members
    | RoomWanted
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
