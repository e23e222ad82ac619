"""One round of a call on the coordinator, as a state machine: requests out, their answers in. Pure.

The machine has no store, thread or clock. `call.py` carries out its requests; tests do so with a
recorder, and in every order that the requests of three ranks can have.

| stage     | requests                          | answer                             | next      |
|-----------|-----------------------------------|------------------------------------|-----------|
| GATHERING | WAIT for a message of every rank  | all are here                       | READING   |
|           |                                   | the call was called off            | OVER      |
|           |                                   | the time is up                     | ENDING    |
| READING   | READ each message                 | all ranks make this call           | DECIDING  |
|           |                                   | one is gone: its rank gave up      | GATHERING |
|           |                                   | one is damaged                     | ENDING    |
|           |                                   | the call was called off            | OVER      |
|           |                                   | ranks make different calls         | REJECTING |
| REJECTING | ANSWER each rank whose call fails | this rank's call fails             | OVER      |
|           |                                   | those of others fail               | GATHERING |
| DECIDING  | REMOVE each message, DECIDE,      |                                    | OVER      |
|           | ANSWER each rank                  |                                    |           |
| ENDING    | NOTE that the call has failed;    |                                    | OVER      |
|           | READ, REMOVE, ANSWER each message |                                    |           |
|           | of it that is here                |                                    |           |

Before GATHERING begins again because a message is gone, the machine requests a PAUSE, which also
ends where the time is up.

First rounds have no REMOVE. A rank leaves the messages of all its first rounds under one
key, and may give up at any time: between READ and REMOVE its next message could have come there. So
it alone removes them, and a message that was answered counts as gone. In later rounds each message
has a key of its own.

A decision is made with the messages that were read, and each rank is answered, though it may have
given up meanwhile.

Example: rank 1 is at step 7 and rank 2 at step 8, as this rank is. WAIT, READ 1, READ 2, and the
call of rank 1 fails: ANSWER 1. WAIT for the next message of rank 1, READ 1, READ 2: all are at step
8. DECIDE, ANSWER 1, ANSWER 2.
"""

from __future__ import annotations

from enum import Enum, unique
from typing import NamedTuple

from torchrelay.coordination.messages import COORDINATOR, CallName, conflicts


class RoundStage(Enum):
    GATHERING = "waits until every rank has left a message"
    READING = "reads the messages"
    REJECTING = "answers the ranks whose calls fail"
    DECIDING = "decides, and answers all ranks"
    ENDING = "lets the call fail on all ranks"
    OVER = "ended, as `outcome` says"


@unique
class RoundVerb(Enum):
    """A request to the driver; behind it the type of the answer."""

    WAIT = "wait for a message of every rank"  # a `WaitEnd`
    PAUSE = "wait a moment, before the next look"  # a `WaitEnd`
    READ = "read a message"  # a `CallMade`; DAMAGED, OFF; None if it is gone, or soon will be
    REMOVE = "remove a message"  # None
    DECIDE = "decide, with all messages"  # None
    ANSWER = "answer a rank"  # None
    NOTE = "leave a note that the call has failed, for ranks that come later"  # None


class RoundRequest(NamedTuple):
    verb: RoundVerb
    rank: int = COORDINATOR


class WaitEnd(Enum):
    """The end of a wait, or what was found instead of a message."""

    HERE = "all that was waited for is here"
    OVERDUE = "the time is up"
    OFF = "the call was called off: it cannot come about any more"
    DAMAGED = "a message has other bytes than were written"


class CallMade(NamedTuple):
    """A message, as far as it matters here: the call that its rank makes."""

    name: CallName


class RoundOutcome(Enum):
    DECIDED = "there is an answer for each rank"
    REJECTED = "the call of this rank fails: `rejected` has the reason"
    OFF = "it was called off"
    FAILED = "the call failed on all ranks"


Answer = WaitEnd | CallMade | None


class CoordinatorRound(NamedTuple):
    """The state of a round. `after` returns the next one."""

    name: CallName
    others: tuple[int, ...]  # the other ranks
    first: bool  # whether it is the first round of its call
    behind: tuple[tuple[int, int], ...] = ()  # by rank: the step at which its call failed last
    stage: RoundStage = RoundStage.GATHERING
    todo: tuple[RoundRequest, ...] = (RoundRequest(RoundVerb.WAIT),)
    sent: tuple[tuple[int, CallMade], ...] = ()  # by rank: the messages that were read
    rejected: tuple[tuple[int, str], ...] = ()  # by rank: why its call fails
    outcome: RoundOutcome | None = None

    @property
    def request(self) -> RoundRequest:
        """What to carry out next."""
        return self.todo[0]

    @property
    def gone(self) -> list[int]:
        """After READING: the ranks whose message was not there."""
        return [rank for rank in self.others if rank not in dict(self.sent)]

    def after(self, answer: Answer) -> CoordinatorRound:
        """The request was carried out."""
        request, todo = self.todo[0], self.todo[1:]
        found = self._replace(todo=todo)._learned(request, answer)
        while not found.todo and found.stage is not RoundStage.OVER:
            found = found._next_stage()
        return found

    def _learned(self, request: RoundRequest, answer: Answer) -> CoordinatorRound:
        verb, rank = request
        if answer is WaitEnd.OFF:
            return self._over(RoundOutcome.OFF)
        if answer is WaitEnd.OVERDUE or (
            answer is WaitEnd.DAMAGED and self.stage is RoundStage.READING
        ):
            return self._ending()
        if verb is not RoundVerb.READ or not isinstance(answer, CallMade):
            return self
        found = self._replace(sent=(*self.sent, (rank, answer)))
        if self.stage is RoundStage.ENDING and answer.name == self.name:
            todo = (*self._removes(rank), RoundRequest(RoundVerb.ANSWER, rank), *self.todo)
            found = found._replace(todo=todo)
        return found

    def _removes(self, *ranks: int) -> list[RoundRequest]:
        return [] if self.first else [RoundRequest(RoundVerb.REMOVE, rank) for rank in ranks]

    def _next_stage(self) -> CoordinatorRound:
        if self.stage is RoundStage.GATHERING:
            reads = [RoundRequest(RoundVerb.READ, rank) for rank in self.others]
            return self._replace(stage=RoundStage.READING, todo=tuple(reads), sent=())
        if self.stage is RoundStage.READING:
            return self._compared()
        if self.stage is RoundStage.REJECTING:
            here = COORDINATOR in dict(self.rejected)
            return self._over(RoundOutcome.REJECTED) if here else self._gathering()
        ended = RoundOutcome.DECIDED if self.stage is RoundStage.DECIDING else RoundOutcome.FAILED
        return self._over(ended)

    def _compared(self) -> CoordinatorRound:
        """All ranks that sent a message make the same call, or some calls fail."""
        if self.gone:
            return self._gathering(RoundRequest(RoundVerb.PAUSE))
        calls = [self.name, *(one.name for _, one in self.sent)]
        rejected = conflicts(calls, dict(self.behind))
        answers = [RoundRequest(RoundVerb.ANSWER, rank) for rank in self.others]
        if not rejected:
            todo = (*self._removes(*self.others), RoundRequest(RoundVerb.DECIDE), *answers)
            return self._replace(stage=RoundStage.DECIDING, todo=todo, behind=())
        return self._replace(
            stage=RoundStage.REJECTING,
            todo=tuple([one for one in answers if one.rank in rejected]),
            behind=tuple([(rank, calls[rank].step or 0) for rank in rejected]),
            rejected=tuple(rejected.items()),
        )

    def _gathering(self, *before: RoundRequest) -> CoordinatorRound:
        return self._replace(
            stage=RoundStage.GATHERING, todo=(*before, RoundRequest(RoundVerb.WAIT))
        )

    def _ending(self) -> CoordinatorRound:
        """Ranks that come later find a note. In a first round without a step there is none: the
        call that they make may be the next one."""
        noted = not self.first or self.name.step is not None
        reads = [RoundRequest(RoundVerb.READ, rank) for rank in self.others]
        todo = (*([RoundRequest(RoundVerb.NOTE)] if noted else []), *reads)
        return self._replace(stage=RoundStage.ENDING, todo=todo, sent=())

    def _over(self, outcome: RoundOutcome) -> CoordinatorRound:
        return self._replace(stage=RoundStage.OVER, todo=(), outcome=outcome)
