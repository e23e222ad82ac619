"""One operation of all ranks, in as many rounds as it takes."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from itertools import count

import msgspec

from torchrelay.coordination.group_store import GroupStore, StoreDamaged, StoreLost, pause_after
from torchrelay.coordination.messages import (
    CallName,
    RankMessage,
    RoundAnswer,
    RoundMessage,
    conflicts,
)
from torchrelay.deadlines import Deadline
from torchrelay.errors import CheckpointError, RelayError, UsageError

SPREAD = 1.0  # seconds before the deadline at which the coordinator gives up, so that all know why
NOTED, WARNED = 1.0, 10.0  # seconds of waiting after which ranks publish, and log, who is missing
DRAIN_SECONDS, PAUSE = 2.0, 0.02

logger = logging.getLogger("torchrelay")
_sent = msgspec.msgpack.Decoder(RoundMessage)
_answer = msgspec.msgpack.Decoder(RoundAnswer)
_message = msgspec.msgpack.Decoder(RankMessage)
_waiting = msgspec.msgpack.Decoder(tuple[str, list[int]])
_encode = msgspec.msgpack.Encoder().encode

Mine = Callable[[], bytes] | BaseException
Decide = Callable[[list[bytes]], Sequence[bytes]]


class CallChannel:
    """Where ranks meet under a key. In each process one call at a time is in its first round."""

    def __init__(
        self, store: GroupStore, key: str, known: Mapping[str, CallChannel], subject: str
    ) -> None:
        self.store, self.key, self.subject = store, key, subject
        self.known = known  # the channels of this process, by key
        self.numbers = count(1)
        self.agreements = count(1)  # of this process: one never begins with the keys of another
        self.beginning = threading.Lock()
        self.stale: list[str] = []  # keys that may still come, or that no one needs any more
        self.behind: dict[int, int] = {}  # the coordinator's: steps at which calls of ranks failed

    def refusal(self, number: int) -> str:
        """The key with the reason for which a rank never takes part."""
        return f"{self.key}/refused/{number}"

    def sweep(self) -> None:
        keys, self.stale = self.stale, []
        self.stale += [key for key in keys if not self.store.drop(key)]

    @contextmanager
    def first_round(self, deadline: Deadline) -> Iterator[None]:
        if not self.beginning.acquire(timeout=deadline.left()):
            text = f"another call of this process waits for ranks since {deadline.seconds:g} s"
            raise CheckpointError(text, phase="begin")
        try:
            yield
        finally:
            self.beginning.release()


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

        self.round(phase, mine, lambda said: said, deadline)

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
                self.round(phase, fault, lambda said: said, deadline)
            raise

    def at(self, where: str) -> None:
        """Tell the other ranks what this one is doing, in case it does not finish."""

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
        place = self._place(self._rank)
        try:
            self._channel.sweep()
            with self._channel.first_round(deadline) if self._rounds == 1 else nullcontext():
                if self._rank:
                    answer = self._send(message, deadline)
                else:
                    answer = self._lead(phase, message, decide, deadline)
        except StoreLost as lost:
            raise CheckpointError(lost.message, phase=phase) from lost
        finally:
            with suppress(StoreLost):
                self._store.drop(place)
        self.answered = answer is not None
        if answer is None:
            raise fault or CheckpointError(
                f"rank 0, the coordinator, did not answer in {deadline.seconds:g} s: see what it "
                "is doing",
                rank=0,
                phase=phase,
            )
        if fault is not None and answer.kind and answer.context.get("rank") == self._rank:
            if isinstance(fault, RelayError):
                fault.phase = fault.phase or phase
            raise fault  # this rank's own, with its traceback
        value = answer.value()
        self.awaited = True
        return value

    def _key(self, rank: int) -> str:
        return f"{self._prefix}/{'' if self._rounds == 1 else f'{self._rounds}/'}{rank}"

    @property
    def _failed(self) -> str:
        """The key with the reason for which the coordinator gave up this call."""
        return f"{self._prefix}/failed/{self.name}"

    # On the other ranks.

    def _send(self, message: RankMessage, deadline: Deadline) -> RankMessage | None:
        """Leave a message and wait for the answer; None if there is none by the deadline."""
        channel, store, key = self._channel, self._store, self._key(self._rank)
        answer = f"{channel.key}/answer/{self._rank}/{next(channel.numbers)}"
        sent = RoundMessage(self.name, self._number, answer, deadline.left(), message)
        store.put(key, _encode(sent))
        data = None
        try:
            if self._wait_for([answer], deadline.left() + SPREAD):
                data = store.take(answer)
        finally:
            # A message of a later round stays: the coordinator may decide with it all the same.
            gone = data is None and (self._rounds == 1 or self.answered) and store.drop(key)
            if data is None and not gone:
                channel.stale.append(answer)
        if data is None:
            return None
        found = _answer.decode(data)
        self._prefix = found.call
        if self._rounds > 1:
            deadline.hasten(found.left)
        return found.message

    # On the coordinator.

    def _lead(
        self, phase: str, message: RankMessage, decide: Decide, deadline: Deadline
    ) -> RankMessage:
        """Gather the messages of all ranks, decide, and answer them."""
        channel, store, ranks = self._channel, self._store, range(1, self._world)
        keys = [self._key(rank) for rank in ranks]
        while self._wait_for(keys, deadline.left() - min(SPREAD, deadline.seconds / 4)):
            try:
                sent = list(self._messages(keys))
            except StoreDamaged as fault:
                return self._end(keys, RankMessage.failure(fault, phase, 0), deadline)
            if len(sent) < len(keys) or self._is_refused(sent):
                time.sleep(PAUSE)  # a rank stopped waiting just now, or will
                continue
            calls = [self.name, *(one.name for one in sent)]
            failed = conflicts(calls, channel.behind)
            channel.behind = {rank: calls[rank].step or 0 for rank in failed}
            refused = {
                rank: RankMessage.failure(UsageError(why), phase, 0) for rank, why in failed.items()
            }
            for rank, key, one in zip(ranks, keys, sent, strict=True):
                if rank in failed and store.drop(key):
                    self._reply(one, refused[rank], deadline)
            if 0 in failed:
                return refused[0]
            if not failed:
                for key in keys:
                    store.drop(key)
                if self._rounds == 1:
                    self._prefix = f"{channel.key}/call/{next(channel.numbers)}"
                else:
                    deadline.hasten(min(one.left for one in sent))
                answers = _decided(phase, [message, *(one.message for one in sent)], decide)
                self._answers = [one.answer for one in sent]
                for one, answer in zip(sent, answers[1:], strict=True):
                    self._reply(one, answer, deadline)
                return answers[0]
        return self._give_up(keys, phase, deadline)

    def _messages(self, keys: list[str]) -> Iterator[RoundMessage]:
        """The messages that are there. `StoreDamaged` names the rank that sent another one."""
        for rank, key in enumerate(keys, 1):
            try:
                data = self._store.read(key)
            except StoreDamaged as fault:
                fault.rank = rank
                raise
            if data is not None:
                yield _sent.decode(data)

    def _reply(self, sent: RoundMessage, answer: RankMessage, deadline: Deadline) -> None:
        self._store.put(sent.answer, _encode(RoundAnswer(self._prefix, deadline.left(), answer)))

    def _give_up(self, keys: list[str], phase: str, deadline: Deadline) -> RankMessage:
        """Ranks are missing at the deadline. The call fails on all of them, also on those that come
        to it later; without a step it may be their next one that they come to."""
        late = [rank for rank, key in enumerate(keys, 1) if not self._store.has(key)]
        text = (
            f"no message in {deadline.seconds:g} s in {self.name} from "
            f"{self._places(late)}: every rank makes this call"
        )
        fault = CheckpointError(text, rank=late[0] if late else None, phase=phase)
        return self._end(keys, RankMessage.failure(fault, phase, 0), deadline)

    def _end(self, keys: list[str], reason: RankMessage, deadline: Deadline) -> RankMessage:
        """Fail the call on all ranks, also on those that come to it later."""
        store = self._store
        if self._rounds > 1 or self.name.step is not None:
            store.put(self._failed, _encode(reason))
            self._channel.stale.append(self._failed)  # until the next call
        for key in keys:
            data = None
            try:
                data = store.read(key)
            except StoreDamaged:  # it is not to be found by the next call
                store.drop(key)
            sent = None if data is None else _sent.decode(data)
            if sent is not None and sent.name == self.name and store.drop(key):
                self._reply(sent, reason, deadline)
        return reason

    def drain(self) -> None:
        begun = time.monotonic()
        with suppress(StoreLost):
            while any(map(self._store.has, self._answers)):
                if (waited := time.monotonic() - begun) > DRAIN_SECONDS:
                    return
                time.sleep(pause_after(waited))

    # Ranks that are missing.

    def _wait_for(self, keys: list[str], seconds: float) -> bool:
        """Whether the keys are there in time. Raises where the call cannot come about any more;
        logs after a while which ranks have not come to its first round."""
        store, begun = self._store, time.monotonic()
        note, note_at, warn_at = f"waiting/{self._rank}", NOTED, WARNED

        def look() -> None:
            nonlocal note_at, warn_at
            self._check_failed()
            waited = time.monotonic() - begun
            if self._rounds > 1 or waited < min(note_at, warn_at):
                return
            missing = self._missing(keys)
            if waited >= note_at:
                note_at *= 2
                store.put(note, _encode((self._channel.key, missing)))
            if waited >= warn_at:
                warn_at *= 2
                logger.warning(
                    f"rank {self._rank} has waited {waited:.0f} s in {self.name}"
                    f"{self._channel.subject} for {self._places(missing)}: every rank of the group "
                    "makes this call"
                )

        try:
            return store.wait_for(keys, seconds, look)
        finally:
            if note_at > NOTED:
                store.drop(note)

    def _check_failed(self) -> None:
        """Raise the reason for which this call cannot come about any more."""
        for key in (self._channel.refusal(self._number), self._failed):
            if (reason := self._store.read(key)) is not None:
                self.answered = True
                _message.decode(reason).value()

    def _is_refused(self, sent: Iterable[RoundMessage]) -> bool:
        """Whether another rank is at an earlier coordinator of this name, which some rank could not
        make. Raises if this rank is."""
        earlier = {one.number for one in sent if one.number < self._number}
        if any(one.number > self._number for one in sent):
            self._check_failed()
        return any(self._store.has(self._channel.refusal(number)) for number in earlier)

    def _missing(self, keys: list[str]) -> list[int]:
        """The ranks that have not come. The coordinator finds them, the others read its note.

        A rank that waits under a name that this process does not know has another path to the same
        directory, or a wrong one: its message is taken from there.
        """
        channel, store, missing = self._channel, self._store, []
        if self._rank > 0:
            note = store.read("waiting/0")
            where, ranks = ("", []) if note is None else _waiting.decode(note)
            return ranks if where == channel.key else [0]
        for rank, key in enumerate(keys, 1):
            note = None if store.has(key) else store.read(f"waiting/{rank}")
            if note is not None and (where := _waiting.decode(note)[0]) not in channel.known:
                keys[rank - 1] = f"{where}/first/{rank}"
            elif not store.has(key):
                missing.append(rank)
        return missing

    def at(self, where: str) -> None:
        with suppress(StoreLost):  # the next round says so
            self._store.put(self._place(self._rank), where.encode())

    def _place(self, rank: int) -> str:
        return f"{self._prefix}/at/{rank}"

    def _places(self, ranks: list[int]) -> str:
        found = []
        for rank in ranks[:8]:
            where = self._store.read(self._place(rank))
            found.append(f"rank {rank} ({where.decode() if where else 'has not called it'})")
        return ", ".join(found) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")


def _decided(phase: str, messages: list[RankMessage], decide: Decide) -> list[RankMessage]:
    failed = next((message for message in messages if message.kind), None)
    if failed is not None:
        return [failed] * len(messages)
    try:
        return [RankMessage(data) for data in decide([message.data for message in messages])]
    except Exception as fault:
        return [RankMessage.failure(fault, phase, 0)] * len(messages)
