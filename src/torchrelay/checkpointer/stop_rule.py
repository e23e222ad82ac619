"""The rule by which all ranks stop at the same step. No store, no clock, no threads.

Ranks come to the same steps, but not at the same time: one may be iterations ahead of another. So
no rank may stop at a step that another has passed, or needs it to pass. The ranks share a store:

    asked     exists if any rank got a signal
    joined    the ranks that pass no step any more without saying so first
    passed    the highest step that a rank of `joined` may have passed; it only grows. When all
              ranks have joined, rank 0 closes it, and it stays as it is

The first step above a closed `passed` is where all ranks stop: none has passed it, and each gets
there without waiting for another. A rank acts on its state:

    state     what it knows              it passes a step        requests, in this order
    FREE      of no signal               always                  LOOK, now and then
    ASKING    a signal came to it        always                  ASK
    ASKED     the job is to stop         always                  RAISE to its step, then JOIN
    BOUND     the others may count it    if `passed` covers it   JOIN; on rank 0 COUNT, CLOSE; RAISE
    CLOSED    where all ranks stop       if `passed` covers it   none

A rank is BOUND before its JOIN leaves, not when the answer comes. So whether a request without an
answer was carried out, was lost, or is carried out much later makes no difference: before JOIN no
rank can stop without this one, and afterwards this one passes only what `passed` covers, which it
has read. Each request can be repeated.

A rank in need of an answer that does not come waits. It never passes a step on its own.

Why all ranks stop at the same step: let P be `passed` when it is closed.

1. No rank passes a step above P. A rank raises `passed` to its highest step before it is BOUND.
   From then on it passes a step only if the `passed` that it has read covers it. That value only
   grows until it is closed, so both are at most P.
2. Each rank passes every step up to P: it stops in CLOSED alone, where P covers those steps.
3. So each rank comes to the first step above P that it calls for. None passes it, and all stop.

`tests/checkpointer/test_stop_rule.py` looks at every order of events for three ranks.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from torchrelay.errors import CheckpointError

_CLOSED = " closed"


class Passed(NamedTuple):
    """The value of `passed` in the store; a text there, empty while no rank has joined."""

    step: int = -1
    closed: bool = False

    @classmethod
    def parse(cls, text: str) -> Passed:
        number = text.removesuffix(_CLOSED)
        return cls(int(number or "-1"), number != text)

    def __str__(self) -> str:
        return f"{self.step if self.step >= 0 else ''}{_CLOSED if self.closed else ''}"


class Verb(Enum):
    """The purpose of a request to the store; behind it the type of the answer."""

    LOOK = "whether a rank got a signal"  # a bool
    ASK = "to stop the job"  # None
    RAISE = "to raise `passed`, if it still is as expected"  # a `Passed`: its value now
    JOIN = "to count this rank"  # None
    COUNT = "whether all ranks have joined"  # a bool
    CLOSE = "to close `passed`, if it still is as expected"  # a `Passed`: its value now


class StopRequest(NamedTuple):
    verb: Verb
    expected: Passed = Passed()
    desired: Passed = Passed()


class Verdict(Enum):
    PASS = "train the next step"
    STOP = "save, and end the loop"


class StopState(Enum):
    FREE = 0
    ASKING = 1
    REQUESTED = 2
    BOUND = 3
    CLOSED = 4


class Known(NamedTuple):
    """The knowledge of one rank. The functions below return it with what they add to it."""

    closes: bool  # it is rank 0
    state: StopState = StopState.FREE
    passed: Passed = Passed()  # as the store had it when this rank last saw it
    joined: bool = False  # whether JOIN was answered
    counted: bool = False  # whether all ranks have joined
    at: int = -1  # the step of the last call
    last: int = -1  # the highest step of the calls before: the caller has passed it


def come_to(known: Known, step: int) -> Known:
    """A rank calls for a step. It has passed the one of the call before, whatever that said."""
    if step == known.at:
        return known
    return known._replace(at=step, last=max(known.last, known.at))


def decide(known: Known, *, signal: bool, look: bool) -> tuple[Known, StopRequest | Verdict]:
    """The next act of a rank at its step: a request, after which it decides again, or a verdict.

    `signal`: one came to this rank. `look`: LOOK and COUNT are due; they were not yet made in this
    call. `CheckpointError` if the caller ignored an error, and has passed the step where all stop.
    """
    if known.state is StopState.FREE and signal:
        known = known._replace(state=StopState.ASKING)
    passed, need = known.passed, max(known.at, known.last)
    if known.state is StopState.FREE and look:
        return known, StopRequest(Verb.LOOK)
    if known.state is StopState.ASKING:
        return known, StopRequest(Verb.ASK)
    if known.state is StopState.REQUESTED:
        if passed.step < need:
            return known, StopRequest(Verb.RAISE, passed, Passed(need))
        known = known._replace(state=StopState.BOUND)
    if known.state is StopState.BOUND:
        if not known.joined:
            return known, StopRequest(Verb.JOIN)
        if known.counted:
            return known, StopRequest(Verb.CLOSE, passed, passed._replace(closed=True))
        if known.closes and look:
            return known, StopRequest(Verb.COUNT)
    if may_pass(known):
        return known, Verdict.PASS
    if known.state is StopState.CLOSED:
        _check_followed(known)
        return known, Verdict.STOP
    return known, StopRequest(Verb.RAISE, passed, Passed(need))


def learn(known: Known, request: StopRequest, answer: bool | Passed | None) -> Known:
    """The answer to a request came, now or at a later step."""
    verb, state = request.verb, known.state
    if verb is Verb.ASK or (verb is Verb.LOOK and answer):
        return known._replace(state=StopState.REQUESTED) if state in _UNASKED else known
    if verb is Verb.JOIN:
        return known._replace(joined=True)
    if verb is Verb.COUNT:
        return known._replace(counted=bool(answer))
    if isinstance(answer, Passed):
        return known._replace(passed=answer, state=StopState.CLOSED if answer.closed else state)
    return known


def may_pass(known: Known) -> bool:
    """Whether a rank may pass its step without another answer of the store."""
    return known.state in _UNBOUND or known.at <= known.passed.step


def _check_followed(known: Known) -> None:
    if known.last > known.passed.step:
        raise CheckpointError(
            f"all ranks stop at the first step after {known.passed.step}, and this one has passed "
            f"step {known.last}, after an error: end the job, and load the last step",
            step=known.at,
            phase="preemption",
        )


_UNASKED = (StopState.FREE, StopState.ASKING)
_UNBOUND = (StopState.FREE, StopState.ASKING, StopState.REQUESTED)
