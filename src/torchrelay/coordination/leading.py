"""A round on the coordinator: carries out the requests of a `CoordinatorRound`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import msgspec

from torchrelay.coordination.channel import CallChannel
from torchrelay.coordination.coordinator_round import (
    Answer,
    CallMade,
    CoordinatorRound,
    RoundOutcome,
    RoundRequest,
    RoundStage,
    RoundVerb,
    WaitEnd,
)
from torchrelay.coordination.group_store import StoreDamaged
from torchrelay.coordination.messages import COORDINATOR, RankMessage, RoundAnswer, RoundMessage
from torchrelay.coordination.waiting import RoundWait, failure_key
from torchrelay.deadlines import Deadline
from torchrelay.errors import CheckpointError, UsageError

SPREAD = 1.0  # seconds before the deadline at which the coordinator gives up, so that all know why

Decide = Callable[[list[bytes]], Sequence[bytes]]
_sent = msgspec.msgpack.Decoder(RoundMessage)
_encode = msgspec.msgpack.Encoder().encode


class Leading:
    """One round. `keys`: where the other ranks leave their messages, in the order of ranks. `wait`:
    the waits of this rank. When it is over, `prefix` is that of the keys of the next round, and
    `answers` has the keys of the answers."""

    def __init__(
        self,
        channel: CallChannel,
        machine: CoordinatorRound,
        wait: RoundWait,
        keys: list[str],
        phase: str,
        deadline: Deadline,
    ) -> None:
        self._channel, self._store = channel, channel.store
        self._machine, self._wait, self._keys = machine, wait, keys
        self._phase, self._deadline = phase, deadline
        self.prefix, self.answers = wait.prefix, list[str]()
        self._sent: dict[int, RoundMessage] = {}  # by rank
        self._decided: list[RankMessage] = []  # by rank
        self._paused_at = 0.0  # first, if at all
        self._failure: RankMessage | None = None  # for which the call fails on all ranks

    def run(self, own: RankMessage, decide: Decide) -> RankMessage | None:
        """Gather the messages of the other ranks, decide with them and this rank's own, and answer.
        Returns the answer for this rank; None where `wait` found that the call was called off."""
        try:
            while self._machine.stage is not RoundStage.OVER:
                request = self._machine.request
                if request.verb is RoundVerb.DECIDE:
                    self._make_decision(own, decide)
                self._machine = self._machine.after(self._carry_out(request))
        finally:
            if self._machine.first:
                self._channel.behind = self._machine.behind
        return None if self._machine.outcome is RoundOutcome.OFF else self._answer_for(COORDINATOR)

    def _carry_out(self, request: RoundRequest) -> Answer:
        verb, rank = request
        if verb is RoundVerb.WAIT:
            return self._wait_for_messages()
        if verb is RoundVerb.PAUSE:
            return self._pause()
        if verb is RoundVerb.READ:
            return self._read(rank)
        if verb is RoundVerb.REMOVE:
            self._store.drop(self._keys[rank - 1])
        if verb is RoundVerb.ANSWER:
            sent = self._sent[rank]
            answer = RoundAnswer(self.prefix, self._deadline.left(), self._answer_for(rank))
            self._store.put(sent.answer, _encode(answer))
            self._channel.answered[rank] = sent.answer
        if verb is RoundVerb.NOTE:
            key = failure_key(self.prefix, self._machine.name)
            self._store.put(key, _encode(self._failure))
            self._channel.stale.append(key)  # until the next call
        return None

    @property
    def _left(self) -> float:
        """Seconds for which this rank waits."""
        return self._deadline.left() - min(SPREAD, self._deadline.seconds / 4)

    def _wait_for_messages(self) -> WaitEnd:
        seen = self._wait.wait(self._keys, self._left)
        if seen is WaitEnd.OVERDUE:
            overdue = [rank for rank, key in enumerate(self._keys, 1) if not self._store.has(key)]
            self._fail_for(overdue)
        return seen

    def _pause(self) -> WaitEnd:
        if self._left <= 0:
            self._fail_for(self._machine.gone)
            return WaitEnd.OVERDUE
        if self._wait.look(lambda: self._machine.gone):
            return WaitEnd.OFF
        now = time.monotonic()
        self._paused_at = self._paused_at or now
        time.sleep(self._store.pause_after(now - self._paused_at))
        return WaitEnd.HERE

    def _fail_for(self, overdue: list[int]) -> None:
        fault = CheckpointError(
            f"no message in {self._deadline.seconds:g} s in {self._machine.name} from "
            f"{self._wait.describe(overdue)}: every rank makes this call",
            rank=overdue[0] if overdue else None,
        )
        self._failure = RankMessage.failure(fault, self._phase, COORDINATOR)

    def _read(self, rank: int) -> Answer:
        try:
            data = self._store.read(self._keys[rank - 1])
        except StoreDamaged as fault:
            fault.rank = rank
            failure = RankMessage.failure(fault, self._phase, COORDINATOR)
            self._failure = self._failure or failure
            return WaitEnd.DAMAGED
        sent = None if data is None else _sent.decode(data)
        if sent is None or sent.answer == self._channel.answered.get(rank):
            return None
        self._sent[rank] = sent
        if self._machine.stage is RoundStage.READING:
            # Where some rank could not make its coordinator, the others learn that, and come again
            # with their next one. Until then their numbers differ.
            own = self._wait.number
            if sent.number > own and self._wait.is_off():
                return WaitEnd.OFF
            if sent.number < own and self._store.has(self._channel.refusal(sent.number)):
                return None
        return CallMade(sent.name)

    def _make_decision(self, own: RankMessage, decide: Decide) -> None:
        sent = [self._sent[rank] for rank in self._machine.others]
        if self._machine.first:
            self.prefix = f"{self._channel.key}/call/{next(self._channel.numbers)}"
        else:
            self._deadline.hasten(min(one.left for one in sent))
        self.answers = [one.answer for one in sent]
        messages = [own, *(one.message for one in sent)]
        failed = next((message for message in messages if message.kind), None)
        if failed is not None:
            self._decided = [failed] * len(messages)
            return
        try:
            self._decided = [RankMessage(data) for data in decide([one.data for one in messages])]
        except Exception as fault:
            failure = RankMessage.failure(fault, self._phase, COORDINATOR)
            self._decided = [failure] * len(messages)

    def _answer_for(self, rank: int) -> RankMessage:
        rejected = dict(self._machine.rejected)
        if (
            self._machine.stage is RoundStage.REJECTING
            or self._machine.outcome is RoundOutcome.REJECTED
        ):
            return RankMessage.failure(UsageError(rejected[rank]), self._phase, COORDINATOR)
        if self._failure is not None:
            return self._failure
        return self._decided[rank]
