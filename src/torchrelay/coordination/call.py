"""One operation of all ranks, in as many rounds as it takes.

In a round each rank leaves a message in the group's store, the coordinator decides with all of
them, and each rank takes its answer. What happens when, and what does not happen where ranks are
late, gone or behind, is decided by two state machines: `coordinator_round` and `member_round`. Here
are the keys, the encodings and the waits of what they request.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext, suppress

import msgspec

from torchrelay.coordination.channel import CallChannel
from torchrelay.coordination.coordinator_round import CoordinatorRound
from torchrelay.coordination.group_store import StoreLost
from torchrelay.coordination.leading import SPREAD, Decide, Leading
from torchrelay.coordination.member_round import MemberRound, MemberStage
from torchrelay.coordination.messages import (
    COORDINATOR,
    CallName,
    RankMessage,
    RoundAnswer,
    RoundMessage,
)
from torchrelay.coordination.waiting import RoundWait, activity_key
from torchrelay.deadlines import Deadline
from torchrelay.errors import CheckpointError, RelayError

DRAIN_SECONDS = 2.0

_answer = msgspec.msgpack.Decoder(RoundAnswer)
_encode = msgspec.msgpack.Encoder().encode

Mine = Callable[[], bytes] | BaseException


class Call:
    """One operation, here of a process alone. Made by `Coordinator.call`."""

    def __init__(self, name: CallName) -> None:
        self.name = name
        self.answered = True  # whether this rank knows how the last round ended
        self.awaited = False  # whether the other ranks wait for this one in the next round

    def together(self, phase: str, act: Callable[[], None], deadline: Deadline) -> None:
        """A round in which each rank acts, and nothing is decided."""

        def mine() -> bytes:
            act()
            return b""

        self.round(phase, mine, returned, deadline)

    def round(self, phase: str, mine: Mine, decide: Decide, deadline: Deadline) -> bytes:
        """Do `mine` on each rank, `decide` on the coordinator with what all returned, and return
        the part of its answer that is for this rank.

        A failure on any rank is raised on every rank, with the rank where it happened first. From
        the second round on all ranks have the earliest deadline of any of them: a rank that gave up
        first would not learn how the call ended.
        """
        if isinstance(mine, BaseException):
            raise mine
        return decide([mine()])[0]

    @contextmanager
    def reporting(self, phase: str, deadline: Deadline) -> Iterator[None]:
        """Within: this rank works between two rounds. If it fails, the next round of the others
        raises the reason, and they do not wait for this rank."""
        try:
            yield
        except BaseException as fault:
            with suppress(RelayError, type(fault)):  # this one is raised
                self.round(phase, fault, returned, deadline)
            raise

    def at(self, activity: str) -> None:
        """Publish what this rank is doing, for messages of the others if it does not finish."""

    def drain(self) -> None:
        """On the coordinator, after the last round: wait, though not for long, until the ranks have
        read their answers. The store that has them may end with this process."""


class GroupCall(Call):
    """A call of several ranks, in rounds that meet in a channel."""

    def __init__(
        self, name: CallName, rank: int, world: int, channel: CallChannel, number: int
    ) -> None:
        super().__init__(name)
        self._rank, self._world, self._number = rank, world, number
        self._channel, self._store = channel, channel.store
        self._rounds = 0
        self._prefix = f"{channel.key}/first"  # of its keys: its own from the second round on
        self._answers: list[str] = []  # the coordinator's, of the last round

    def round(self, phase: str, mine: Mine, decide: Decide, deadline: Deadline) -> bytes:
        self._rounds += 1
        self.awaited = self.answered = False
        message, fault = RankMessage.of(mine, phase, self._rank)
        if isinstance(fault, RelayError) and fault.rank is None:
            fault.rank = self._rank
        activity = activity_key(self._prefix, self._rank)
        try:
            self._channel.sweep()
            answer: RankMessage | None
            with self._channel.first_round(deadline) if self._is_first else nullcontext():
                if self._rank == COORDINATOR:
                    answer = self._lead(phase, message, decide, deadline)
                else:
                    answer = self._take_part(message, deadline)
        except StoreLost as lost:
            raise CheckpointError(lost.message, phase=phase) from lost
        finally:
            with suppress(StoreLost):
                self._store.drop(activity)
        if answer is None:
            raise fault or CheckpointError(
                f"rank 0, the coordinator, did not answer in {deadline.seconds:g} s: see what it "
                "is doing",
                rank=COORDINATOR,
                phase=phase,
            )
        if fault is not None and answer.kind and answer.context.get("rank") == self._rank:
            if isinstance(fault, RelayError):
                fault.phase = fault.phase or phase
            raise fault  # this rank's own, with its traceback
        value = answer.value()
        self.awaited = True
        return value

    @property
    def _is_first(self) -> bool:
        return self._rounds == 1

    def _key(self, rank: int) -> str:
        return f"{self._prefix}/{'' if self._is_first else f'{self._rounds}/'}{rank}"

    def _wait(self) -> RoundWait:
        channel, first = self._channel, self._is_first
        return RoundWait(channel, self.name, self._number, self._rank, self._prefix, first)

    def _take_part(self, message: RankMessage, deadline: Deadline) -> RankMessage | None:
        """A round on a rank other than the coordinator: the answer, or why the call was called off;
        None if no answer came by the deadline."""
        channel, store, key = self._channel, self._store, self._key(self._rank)
        answer = f"{channel.key}/answer/{self._rank}/{channel.token}/{next(channel.numbers)}"
        sent = RoundMessage(self.name, self._number, answer, deadline.left(), message)
        wait, data = self._wait(), None
        machine = MemberRound(self._is_first)
        try:
            while machine.stage is not MemberStage.OVER:
                if machine.stage is MemberStage.SENDING:
                    store.put(key, _encode(sent))
                    machine = machine.sent()
                elif machine.stage is MemberStage.WAITING:
                    machine = machine.waited(wait.wait([answer], deadline.left() + SPREAD))
                elif machine.stage is MemberStage.TAKING:
                    data = store.take(answer)
                    machine = machine.took(data is not None)
                else:
                    store.drop(key)
                    machine = machine.left()
        except BaseException:
            machine = machine.broken_off()
            if machine.stage is MemberStage.LEAVING:
                store.drop(key)
            raise
        finally:
            if machine.unread:
                channel.stale.append(answer)
            self.answered = machine.answered
            wait.close()
        if data is None:
            return wait.called_off
        found = _answer.decode(data)
        self._prefix = found.call
        if not self._is_first:
            deadline.hasten(found.left)
        return found.message

    def _lead(
        self, phase: str, message: RankMessage, decide: Decide, deadline: Deadline
    ) -> RankMessage | None:
        """A round on the coordinator: its answer, or why the call was called off."""
        others = tuple(range(1, self._world))
        machine = CoordinatorRound(self.name, others, self._is_first, self._channel.behind)
        keys, wait = [self._key(rank) for rank in others], self._wait()
        leading = Leading(self._channel, machine, wait, keys, phase, deadline)
        with closing(wait):
            answer = leading.run(message, decide)
        self.answered = True
        self._prefix, self._answers = leading.prefix, leading.answers
        return wait.called_off if answer is None else answer

    def at(self, activity: str) -> None:
        with suppress(StoreLost):  # the next round says so
            self._store.put(activity_key(self._prefix, self._rank), activity.encode())

    def drain(self) -> None:
        begun = time.monotonic()
        with suppress(StoreLost):
            while any(map(self._store.has, self._answers)):
                if (waited := time.monotonic() - begun) > DRAIN_SECONDS:
                    return
                time.sleep(self._store.pause_after(waited))


def returned(values: list[bytes]) -> list[bytes]:
    """For rounds in which nothing is decided: each rank has its own value."""
    return values
