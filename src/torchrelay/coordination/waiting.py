"""The waits of a round, and the notes about ranks that are missing."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

import msgspec

from torchrelay.coordination.channel import CallChannel
from torchrelay.coordination.coordinator_round import WaitEnd
from torchrelay.coordination.messages import COORDINATOR, CallName, RankMessage

NOTED, WARNED = 1.0, 10.0  # seconds of waiting after which ranks publish, and log, who is missing
SHOWN = 8  # ranks in a message

logger = logging.getLogger("torchrelay")
_message = msgspec.msgpack.Decoder(RankMessage)
_waiting = msgspec.msgpack.Decoder(tuple[str, list[int]])
_encode = msgspec.msgpack.Encoder().encode


class RoundWait:
    """The waits of one rank in a round. `prefix`: of the keys of its call. `number`: that of its
    `Coordinator` among those of one name. `called_off`: why the call cannot come about any more,
    once a wait has found that."""

    def __init__(
        self, channel: CallChannel, name: CallName, number: int, rank: int, prefix: str, first: bool
    ) -> None:
        self._channel, self._store = channel, channel.store
        self._name, self._rank, self._first = name, rank, first
        self.prefix, self.number = prefix, number
        self._failed = channel.refusal(number), failure_key(prefix, name)
        self._begun, self._note = time.monotonic(), f"waiting/{rank}"
        self._note_at, self._warn_at = NOTED, WARNED
        self.called_off: RankMessage | None = None

    def wait(self, keys: list[str], seconds: float) -> WaitEnd:
        """Wait until the keys are there, the call is called off, or the time is up. The coordinator
        replaces a key where it finds that its rank has left its message under another one."""
        if self._store.wait_for(keys, seconds, lambda: self.look(lambda: self._missing(keys))):
            return WaitEnd.HERE
        return WaitEnd.OVERDUE if self.called_off is None else WaitEnd.OFF

    def look(self, missing: Callable[[], list[int]]) -> bool:
        """Called now and then: whether the call is called off. After a while in a first round the
        ranks that are missing are published, and logged."""
        if self.is_off():
            return True
        waited = time.monotonic() - self._begun
        if not self._first or waited < min(self._note_at, self._warn_at):
            return False
        ranks = missing()
        if waited >= self._note_at:
            self._note_at *= 2
            self._store.put(self._note, _encode((self._channel.key, ranks)))
        if waited >= self._warn_at:
            self._warn_at *= 2
            logger.warning(
                f"rank {self._rank} has waited {waited:.0f} s in {self._name}"
                f"{self._channel.subject} for {self.describe(ranks)}: every rank of the group "
                "makes this call"
            )
        return False

    def close(self) -> None:
        """The round is over."""
        if self._note_at > NOTED:
            self._store.drop(self._note)

    def is_off(self) -> bool:
        """Whether the call cannot come about any more."""
        for key in self._failed:
            if self.called_off is None and (reason := self._store.read(key)) is not None:
                self.called_off = _message.decode(reason)
        return self.called_off is not None

    def _missing(self, keys: list[str]) -> list[int]:
        """The ranks that have not come. The coordinator finds them, the others read its note.

        A rank that waits under a name that this process does not know has another path to the same
        directory, or a wrong one: its message is taken from there.
        """
        channel, store, missing = self._channel, self._store, []
        if self._rank != COORDINATOR:
            note = store.read(f"waiting/{COORDINATOR}")
            where, ranks = ("", []) if note is None else _waiting.decode(note)
            return ranks if where == channel.key else [COORDINATOR]
        for rank, key in enumerate(keys, 1):
            note = None if store.has(key) else store.read(f"waiting/{rank}")
            if note is not None and (where := _waiting.decode(note)[0]) not in channel.known:
                keys[rank - 1] = f"{where}/first/{rank}"
            elif not store.has(key):
                missing.append(rank)
        return missing

    def describe(self, ranks: Sequence[int]) -> str:
        """Ranks, each with what it is doing."""
        found = []
        for rank in ranks[:SHOWN]:
            doing = self._store.read(activity_key(self.prefix, rank))
            found.append(f"rank {rank} ({doing.decode() if doing else 'has not called it'})")
        more = len(ranks) - SHOWN
        return ", ".join(found) + (f" and {more} more" if more > 0 else "")


def failure_key(prefix: str, name: CallName) -> str:
    """The key with the reason for which the coordinator gave up a call."""
    return f"{prefix}/failed/{name}"


def activity_key(prefix: str, rank: int) -> str:
    """The key with what a rank is doing."""
    return f"{prefix}/at/{rank}"
