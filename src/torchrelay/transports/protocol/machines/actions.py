"""What the state machines of a transfer ask of whoever drives them. Plain data."""

from __future__ import annotations

from dataclasses import dataclass

from torchrelay.transports.protocol import wire


@dataclass(frozen=True)
class Say:
    """Send a message on the line of a rank."""

    rank: int
    message: wire.Message


# Of the sender


@dataclass(frozen=True)
class MakeOffer:
    """Answer a join."""

    rank: int
    join: wire.Join


@dataclass(frozen=True)
class CallAnew:
    """Ring a receiver once more: what it said was to an earlier call."""

    rank: int


@dataclass(frozen=True)
class KeepLines:
    """Leave the lines of those who never came to the next call."""

    ranks: tuple[int, ...]


@dataclass(frozen=True)
class ServeParts:
    rank: int


@dataclass(frozen=True)
class LetRead:
    """Have a receiver take the bytes itself, beside `share` - 1 others."""

    rank: int
    share: int


@dataclass(frozen=True)
class FeedChunks:
    """Send chunks over the group, on a lane."""

    rank: int
    lane: int
    chunks: tuple[int, ...]


@dataclass(frozen=True)
class FeedBeside:
    """Send all chunks beside the group."""

    rank: int


@dataclass(frozen=True)
class HashAhead:
    """Hash all chunks; the digests of the first are told before any chunk leaves."""


@dataclass(frozen=True)
class CutOff:
    """Post no more chunks to a receiver. `end`: nor serve it in another way."""

    rank: int
    end: bool = True


@dataclass(frozen=True)
class Trail:
    """Tell a receiver what its bytes should be, if the state has not changed."""

    rank: int


@dataclass(frozen=True)
class HearWord:
    """A route's other end has said something."""

    rank: int
    word: bytes


# Of a receiver


@dataclass(frozen=True)
class AskSender:
    """Take chunks from the sender from here on, on a lane of the group, in this order. What was
    posted to be received, and may still be written to, is abandoned."""

    lane: int
    chunks: tuple[int, ...]


@dataclass(frozen=True)
class PassOn:
    """Send a chunk to the next receiver."""

    chunk: int


@dataclass(frozen=True)
class FreeChunk:
    """The memory that a chunk came in is free."""

    chunk: int


@dataclass(frozen=True)
class StopPassing:
    """Nothing more goes to the next receiver; what is on its way there is abandoned."""


SenderAction = (
    Say
    | MakeOffer
    | CallAnew
    | KeepLines
    | ServeParts
    | LetRead
    | FeedChunks
    | FeedBeside
    | HashAhead
    | CutOff
    | Trail
    | HearWord
)
ReceiverAction = Say | AskSender | PassOn | FreeChunk | StopPassing
