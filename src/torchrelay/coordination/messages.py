"""Messages between ranks: values, failures, and the call that a rank makes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeVar

import msgspec

from torchrelay import errors
from torchrelay.errors import CheckpointError, RelayError

# The classes that a failure of another rank may be raised as; others arrive as `CheckpointError`.
_KINDS: dict[str, type[RelayError]] = {
    name: kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, RelayError)
}
Message = TypeVar("Message")
COORDINATOR = 0  # the rank that decides
_CONTEXT = ("rank", "step", "phase", "path", "file", "offset")


class RankMessage(msgspec.Struct, array_like=True):
    """A rank's contribution to a round, or its answer; with a `kind`, a failure."""

    data: bytes = b""
    kind: str = ""
    text: str = ""
    context: dict[str, int | str | None] = {}

    @classmethod
    def failure(cls, fault: BaseException, phase: str, rank: int) -> RankMessage:
        if not isinstance(fault, RelayError):
            fault = CheckpointError(f"{type(fault).__name__}: {fault}")
        context = {name: getattr(fault, name, None) for name in _CONTEXT}
        context["rank"] = rank if fault.rank is None else fault.rank
        context["phase"] = fault.phase or phase
        # Of a class that only this process knows, the nearest one that all know.
        kind = next(one.__name__ for one in type(fault).__mro__ if one.__name__ in _KINDS)
        return cls(kind=kind, text=fault.message, context=context)

    @classmethod
    def of(
        cls, act: Callable[[], bytes] | BaseException, phase: str, rank: int
    ) -> tuple[RankMessage, BaseException | None]:
        """A message with the result or failure of `act`, interrupts included; and the exception."""
        if isinstance(act, BaseException):
            return cls.failure(act, phase, rank), act
        try:
            return cls(act()), None
        except BaseException as fault:
            return cls.failure(fault, phase, rank), fault

    def value(self) -> bytes:
        """The data; raises the failure."""
        if not self.kind:
            return self.data
        fault = _KINDS.get(self.kind, CheckpointError)(self.text)
        for name in self.context.keys() & vars(fault).keys() & set(_CONTEXT):
            setattr(fault, name, self.context[name])
        raise fault


class CallName(NamedTuple):
    """Which call a rank makes. Each rank makes calls with a step in ascending order of steps."""

    verb: str
    step: int | None = None

    def __str__(self) -> str:
        return self.verb if self.step is None else f"{self.verb} of step {self.step}"


class RoundMessage(msgspec.Struct, array_like=True):
    """A rank's message in a round of a call of its `number`th coordinator of a name, and the key
    under which it awaits the answer."""

    name: CallName
    number: int
    answer: str
    left: float  # seconds to its deadline
    message: RankMessage


class RoundAnswer(msgspec.Struct, array_like=True):
    """The coordinator's answer; `call` is the prefix of the keys of the later rounds."""

    call: str
    left: float  # seconds to the earliest deadline of any rank
    message: RankMessage


def conflicts(calls: list[CallName], behind: Mapping[int, int]) -> dict[int, str]:
    """The ranks whose call fails, with the reason, where ranks make different calls.

    A rank with a lower step is behind: its call fails, and the others wait for its next one. Where
    that does not bring it further (`behind` has the steps at which calls failed last), the calls of
    the others fail. If calls are of different kinds no one can tell which comes first: all fail.
    """
    if len(set(calls)) == 1:
        return {}
    rule = "every rank makes the same calls in the same order"
    steps = [call.step for call in calls if call.step is not None]
    if len({call.verb for call in calls}) > 1 or len(steps) < len(calls):
        made = ", ".join(f"rank {rank}: {call}" for rank, call in list(enumerate(calls))[:8])
        return dict.fromkeys(range(len(calls)), f"ranks make different calls ({made}): {rule}")
    low = {rank for rank, step in enumerate(steps) if step < max(steps)}
    if any(steps[rank] <= behind[rank] for rank in low if rank in behind):
        low = set(range(len(calls))) - low
    other = next(rank for rank in range(len(calls)) if rank not in low)
    return {
        rank: f"ranks make different calls (rank {other}: {calls[other]}, rank {rank}: "
        f"{calls[rank]}): {rule}"
        for rank in low
    }


def decoded(decoder: msgspec.msgpack.Decoder[Message], data: bytes, rank: int) -> Message:
    """The message that a rank sent; `CheckpointError` if it is not one."""
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, RecursionError, ValueError) as fault:
        raise CheckpointError(
            f"the message of rank {rank} cannot be read ({fault}): see whether all ranks run the "
            "same version of torchrelay",
            rank=rank,
            phase="plan",
        ) from None
