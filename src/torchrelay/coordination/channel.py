"""Where the ranks of a group meet under a key of the group's store."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import count

from torchrelay.coordination.group_store import GroupStore
from torchrelay.deadlines import Deadline
from torchrelay.errors import CheckpointError


class CallChannel:
    """Where ranks meet under a key. In each process one call at a time is in its first round.

    KEY/first/RANK                 a rank's message in the first round of any call
    KEY/first/failed/CALL          why the coordinator gave that call up
    KEY/call/N/ROUND/RANK          a rank's message in a later round of the Nth call
    KEY/call/N/failed/CALL         why the coordinator gave up that call in a later round
    KEY/answer/RANK/TOKEN/N        an answer, under the key that the message names
    KEY/first/at/RANK              what a rank is doing, for messages; or below KEY/call/N
    KEY/refused/N                  why a rank never takes part in the Nth coordinator of a name
    waiting/RANK                   which channel a rank waits in, and for whom
    """

    def __init__(
        self, store: GroupStore, key: str, known: Mapping[str, CallChannel], subject: str
    ) -> None:
        self.store, self.key, self.subject = store, key, subject
        self.known = known  # the channels of this process, by key
        self.numbers = count(1)
        self.agreements = count(1)  # of this process: one never begins with the keys of another
        self._beginning = threading.Lock()
        self.stale: list[str] = []  # keys that may still come, or that no one needs any more
        self.token = secrets.token_hex(4)  # of this process: another one of this rank may follow
        # The coordinator's, by rank: the step at which the call of that rank failed last, and the
        # answer that it gave last. The message that names that one is not a new one.
        self.behind: tuple[tuple[int, int], ...] = ()
        self.answered: dict[int, str] = {}

    def refusal(self, number: int) -> str:
        """The key with the reason for which a rank never takes part."""
        return f"{self.key}/refused/{number}"

    def sweep(self) -> None:
        """Remove the stale keys that are there by now."""
        keys, self.stale = self.stale, []
        self.stale += [key for key in keys if not self.store.drop(key)]

    @contextmanager
    def first_round(self, deadline: Deadline) -> Iterator[None]:
        """Within: no other call of this process is in its first round."""
        if not self._beginning.acquire(timeout=deadline.left()):
            text = f"another call of this process waits for ranks since {deadline.seconds:g} s"
            raise CheckpointError(text, phase="begin")
        try:
            yield
        finally:
            self._beginning.release()
