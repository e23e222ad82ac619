"""One round of a call on a rank other than the coordinator, as a state machine. Pure.

Each stage has one request to the store, which `call.py` carries out.

| stage   | request                | answer                       | next                          |
|---------|------------------------|------------------------------|-------------------------------|
| SENDING | leave the message      |                              | WAITING                       |
| WAITING | wait for the answer    | it is here                   | TAKING                        |
|         |                        | the call was called off      | LEAVING                       |
|         |                        | the time is up               | LEAVING; in later rounds OVER |
| TAKING  | read it, and remove it | the answer                   | LEAVING; in later rounds OVER |
|         |                        | it is gone                   | as if the time were up        |
| LEAVING | remove the message     |                              | OVER                          |
| any     | any                    | an error, an interrupt       | as if the time were up        |

In a first round the rank removes its message in any case: its next one comes under the same key. In
later rounds the coordinator does so. Where a rank gives up in one, its message stays: the
coordinator may still decide with it, and the call then succeeds on the other ranks. A call that was
called off takes no message any more.

An answer that comes when its rank has gone is `unread`: the rank removes it in a later round.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from torchrelay.coordination.coordinator_round import WaitEnd


class MemberStage(Enum):
    SENDING = "leaves its message"
    WAITING = "waits for the answer"
    TAKING = "takes the answer"
    LEAVING = "removes its message"
    OVER = "ended"


class MemberRound(NamedTuple):
    """The state of a round. Each method returns the next one."""

    first: bool  # whether it is the first round of its call
    stage: MemberStage = MemberStage.SENDING
    answered: bool = False  # whether this rank knows how the round ended
    unread: bool = False  # whether an answer may still come, which this rank does not read

    def sent(self) -> MemberRound:
        return self._replace(stage=MemberStage.WAITING)

    def waited(self, seen: WaitEnd) -> MemberRound:
        if seen is WaitEnd.HERE:
            return self._replace(stage=MemberStage.TAKING)
        if seen is WaitEnd.OFF:
            return self._replace(stage=MemberStage.LEAVING, answered=True, unread=True)
        return self.broken_off()

    def took(self, found: bool) -> MemberRound:
        if not found:
            return self.broken_off()
        stage = MemberStage.LEAVING if self.first else MemberStage.OVER
        return self._replace(stage=stage, answered=True)

    def left(self) -> MemberRound:
        return self._replace(stage=MemberStage.OVER)

    def broken_off(self) -> MemberRound:
        """The time is up, or a request failed."""
        leaves = self.first and self.stage is not MemberStage.LEAVING
        return self._replace(
            stage=MemberStage.LEAVING if leaves else MemberStage.OVER, unread=not self.answered
        )
