"""`reached_preemption`: the step at which all ranks stop after a signal to any of them.

Ranks call it for the same steps, but not at the same time: one may be iterations ahead of another.
So no rank may stop at a step that another has passed, or needs it to pass.

    asked     a rank that got a signal says so in the group's store
    joined    each rank looks for that at most once a second. From then on it passes a step only
              after `passed`, the highest step that any rank may have passed, has at least that one
    closed    when all ranks have joined, the last of them closes `passed`: it grows no more

The first step above it is where all ranks stop. No rank has passed it, and each gets there without
waiting for another.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from types import FrameType
from typing import Any

from torchrelay.coordination.coordinator import Coordinator
from torchrelay.coordination.group_store import GroupStore
from torchrelay.errors import CheckpointError, UsageError
from torchrelay.memory.bounded import bounded
from torchrelay.owner import Owner
from torchrelay.pending import logger

LOOK_SECONDS = 1.0  # between two looks at the store
STORE_SECONDS = 10.0  # that the store may take
WARN_SECONDS = 10.0  # after a signal, if some ranks have not asked
_CLOSED = b" closed"


class StopAgreement:
    """One rank's part in the choice of the step; `world` ranks share a store."""

    def __init__(self, store: GroupStore, rank: int, world: int) -> None:
        self._store, self._rank, self._world = store, rank, world
        self._next_look = 0.0
        self._asked_at: float | None = None
        self._joined = False
        self._passed = b""  # the value in the store when this rank last saw it

    def is_due(self, asks: bool) -> bool:
        """Whether this rank has to use the store now."""
        return self._joined or asks or time.monotonic() >= self._next_look

    def stops_at(self, step: int, asks: bool) -> bool:
        """Whether all ranks stop at this step. `asks`: this rank got a signal."""
        now = time.monotonic()
        if self._joined:
            self._warn(now)
            return not self._may_pass(step)
        self._next_look = now + LOOK_SECONDS
        if asks:
            self._asked_at = now
            self._store.put("asked", b"")
        elif not self._store.has("asked"):
            return False
        self._may_pass(step)
        self._joined = True
        self._store.put(f"rank/{self._rank}", b"")
        if self._store.add("joined", 1) == self._world:
            self._close()
        return False

    def _may_pass(self, step: int) -> bool:
        """Raise `passed` to this step, unless it is closed below."""
        while True:
            passed, closed = _parsed(self._passed)
            if step <= passed or closed:
                return step <= passed
            self._passed = self._swap(str(step).encode())

    def _close(self) -> None:
        while not _parsed(self._passed)[1]:
            self._passed = self._swap(self._passed + _CLOSED)

    def _swap(self, new: bytes) -> bytes:
        """Replace the value that was seen last; returns the one that is there then."""
        return self._store.compare_set("passed", self._passed.decode(), new.decode())

    def _warn(self, now: float) -> None:
        if self._asked_at is not None and now > self._asked_at + WARN_SECONDS:
            self._asked_at = None
            ranks = [rank for rank in range(self._world) if not self._store.has(f"rank/{rank}")]
            if ranks:
                logger.warning(
                    "a signal asks this job to stop, and ranks %s do not call reached_preemption: "
                    "every rank calls it at every step",
                    ", ".join(map(str, ranks[:8])),
                )


def _parsed(passed: bytes) -> tuple[int, bool]:
    number = passed.removesuffix(_CLOSED)
    return int(number or b"-1"), number != passed


class Preemption:
    """The signals of this process, from the first `reached` on, and the answer of all ranks."""

    def __init__(self, ranks: Coordinator, signals: Sequence[signal.Signals]) -> None:
        self._ranks, self._signals = ranks, tuple(signals)
        self._owner = Owner("Checkpointer")
        self._before: dict[int, Any] | None = None
        self._came: int | None = None
        self._agreement: StopAgreement | None = None
        self._stopped = False

    def reached(self, step: int) -> bool:
        """Whether this job should save now and end; the same on all ranks at the same step."""
        if self._before is None:
            self._watch_signals()
        if not self._stopped:
            self._stopped = self._reaches(step)
        return self._stopped

    def _reaches(self, step: int) -> bool:
        asks = self._came is not None
        if self._ranks.channel is None:
            return asks
        if self._agreement is None:
            store = self._ranks.channel.store.below(f"{self._ranks.channel.key}/preemption")
            self._agreement = StopAgreement(store, self._ranks.rank, self._ranks.world)
        agreement = self._agreement
        if not agreement.is_due(asks):
            return False
        try:
            return bounded(
                lambda: agreement.stops_at(step, asks), STORE_SECONDS, "ask the other ranks to stop"
            )
        except CheckpointError as fault:
            if asks:
                logger.warning("a signal asks this job to stop: %s", fault)
            return False

    def _watch_signals(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise UsageError("call reached_preemption in the main thread, where signals arrive")
        before: dict[int, Any] = {}
        self._before = before
        for number in self._signals:
            try:
                before[number] = signal.signal(number, self._handle)
            except (OSError, ValueError, TypeError) as fault:
                self._restore()
                raise UsageError(f"{number!r} is not a signal to handle: {fault}") from None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._owner.here:
            self._came = number
        else:  # a child of a fork has nothing to save
            self._pass_on(number, frame)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        before = (self._before or {}).get(number)
        self._restore()
        if callable(before):
            before(number, frame)
        elif before != signal.SIG_IGN:
            signal.raise_signal(number)

    def _restore(self) -> None:
        """Put the handlers back that were there before."""
        for number, before in (self._before or {}).items():
            if signal.getsignal(number) == self._handle:
                signal.signal(number, signal.SIG_DFL if before is None else before)

    def close(self) -> None:
        """Handle no more signals. One that came and that no caller knows of takes effect now."""
        came, self._came = self._came, None
        if self._before is None:
            return
        if threading.current_thread() is threading.main_thread():
            if came is not None and not self._stopped:
                self._pass_on(came, None)
            self._restore()

    def detach_after_fork(self) -> None:
        """In a child of a fork: put the handlers back that were there before."""
        with suppress(ValueError):  # the child runs another thread than the main one
            self._restore()
