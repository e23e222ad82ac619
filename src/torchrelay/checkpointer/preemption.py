"""`reached_preemption`: the step at which all ranks stop after a signal to any of them.

`stop_rule` decides what a rank does, and has the proof that all stop at the same step. Here are the
signals of this process, and the requests to the group's store:

| request   | event                                    | the call                      | next      |
|-----------|------------------------------------------|-------------------------------|-----------|
| none      | the rule has one                         | waits for its answer          | UNDER WAY |
| none      | the rule has a verdict                   | returns it                    | none      |
| UNDER WAY | its answer comes                         | asks the rule again           | none      |
| UNDER WAY | it fails, or is late; the rank may pass  | returns False                 | see below |
| UNDER WAY | it fails, or is late; the rank may not   | raises: call again, or end    | see below |

A request that fails is over: the rule has it again. One that is late stays under way, and a later
call waits for it. So the store gets one request of a rank at a time, each after the answer to the
one before, as the proof needs it.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import FrameType
from typing import Any

from torchrelay.checkpointer.stop_rule import (
    Known,
    Passed,
    StopRequest,
    StopState,
    Verb,
    Verdict,
    come_to,
    decide,
    learn,
    may_pass,
)
from torchrelay.coordination.coordinator import Coordinator
from torchrelay.coordination.group_store import GroupStore
from torchrelay.coordination.messages import COORDINATOR
from torchrelay.errors import CheckpointError, StorageTimeoutError, UsageError
from torchrelay.memory import threads
from torchrelay.owner import Owner
from torchrelay.pending import logger

LOOK_SECONDS = 1.0  # between two looks at the store
STORE_SECONDS = 10.0  # that a request may delay a rank which needs no answer yet
WARN_SECONDS = 10.0  # after a signal, if some ranks have not joined
BLOCK = 64  # ranks that are looked for in one access to the store

Answer = bool | Passed | None


class StopAgreement:
    """One rank's part in the choice of the step; `world` ranks share a store. `timeout`: seconds
    that it may take to answer a rank which needs the answer."""

    def __init__(self, store: GroupStore, rank: int, world: int, timeout: float = 1800.0) -> None:
        self._store, self._rank, self._world, self._timeout = store, rank, world, timeout
        self._known = Known(closes=rank == COORDINATOR)
        self._absent = list(range(world))  # ranks that are not known to have joined
        self._under_way: _StoreRequest | None = None
        self._next_look = 0.0
        self._warn_at: float | None = None

    def is_due(self, asks: bool) -> bool:
        """Whether this rank has to use the store now."""
        free = self._known.state is StopState.FREE
        return not free or asks or time.monotonic() >= self._next_look

    def stops_at(self, step: int, asks: bool) -> bool:
        """Whether all ranks stop at this step. `asks`: this rank got a signal.

        `StorageTimeoutError`, or `CheckpointError` if the store is lost: other ranks may stop here,
        so the caller must not train another step. It may ask again for this one.
        """
        now = time.monotonic()
        self._next_look = now + LOOK_SECONDS
        if asks and self._warn_at is None:
            self._warn_at = now + WARN_SECONDS
        self._known = come_to(self._known, step)
        try:
            return self._verdict(asks, now + self._timeout) is Verdict.STOP
        except CheckpointError as fault:
            if not may_pass(self._known):
                raise
            if asks:
                logger.warning("a signal asks this job to stop: %s", fault)
            return False

    def _verdict(self, asks: bool, end: float) -> Verdict:
        look = True
        while True:
            if self._under_way is None:
                self._known, todo = decide(self._known, signal=asks, look=look)
                if isinstance(todo, Verdict):
                    self._look_for_absent()
                    return todo
                self._under_way = _StoreRequest(todo, self._carry_out)
            mine = self._under_way
            if not mine.wait(mine.begun + STORE_SECONDS if may_pass(self._known) else end):
                raise self._unanswered()
            self._under_way = None
            answer = mine.answer()
            if mine.request is None:
                self._warn()
                continue
            self._known = learn(self._known, mine.request, answer)
            look = look and mine.request.verb not in (Verb.LOOK, Verb.COUNT)

    def _carry_out(self, request: StopRequest | None) -> Answer:
        """On a thread, which the caller may leave behind; no other one uses the store."""
        store, verb = self._store, None if request is None else request.verb
        if request is None or verb is Verb.COUNT:
            self._absent = self._still_absent()
            return not self._absent
        if verb is Verb.LOOK:
            return store.has("asked")
        if verb is Verb.ASK:
            store.put("asked", b"")
        elif verb is Verb.JOIN:
            store.put(_key(self._rank), b"")
        else:
            found = store.compare_set("passed", str(request.expected), str(request.desired))
            return Passed.parse(found.decode())
        return None

    def _still_absent(self) -> list[int]:
        left: list[int] = []
        for start in range(0, len(self._absent), BLOCK):
            block = self._absent[start : start + BLOCK]
            if not self._store.has(*map(_key, block)):
                left += [rank for rank in block if not self._store.has(_key(rank))]
        return left

    def _look_for_absent(self) -> None:
        """Once, a while after a signal to this rank; the next call logs the answer."""
        if self._warn_at is None or time.monotonic() < self._warn_at:
            return
        self._warn_at = math.inf
        if self._known.state is not StopState.CLOSED:
            self._under_way = _StoreRequest(None, self._carry_out)
            self._under_way.wait(self._under_way.begun)

    def _warn(self) -> None:
        if self._absent:
            logger.warning(
                "a signal asks this job to stop, and ranks %s do not call reached_preemption: "
                "every rank calls it at every step",
                ", ".join(map(str, self._absent[:8])),
            )

    def _unanswered(self) -> StorageTimeoutError:
        step = self._known.at
        why = (
            "continues without it"
            if may_pass(self._known)
            else (
                "may not pass it alone, for the others may stop there: call again for this step, "
                "or end the job"
            )
        )
        return StorageTimeoutError(
            f"the store of the process group does not answer rank {self._rank} at step {step}, "
            f"which {why}",
            rank=self._rank,
            step=step,
            phase="preemption",
        )


class _StoreRequest:
    """A request under way, on a thread."""

    def __init__(
        self, request: StopRequest | None, carry_out: Callable[[StopRequest | None], Answer]
    ) -> None:
        self.request, self._carry_out = request, carry_out
        self.begun = time.monotonic()
        self._running: threads.Running | None = None
        self._over = False
        self._answer: Answer = None
        self._fault: BaseException | None = None

    def wait(self, until: float) -> bool:
        """Whether it is over by then."""
        if self._running is None and not self._over:
            try:
                self._running = threads.run(self._work, "preemption")
            except RuntimeError:  # no thread can be started while the interpreter ends
                self._work()
        return self._over or (
            self._running is not None and self._running.wait(max(0.0, until - time.monotonic()))
        )

    def _work(self) -> None:
        try:
            self._answer = self._carry_out(self.request)
        except BaseException as fault:
            self._fault = fault
        self._over = True

    def answer(self) -> Answer:
        """Its answer; raises the failure that it ended with."""
        if self._fault is not None:
            raise self._fault
        return self._answer


def _key(rank: int) -> str:
    return f"rank/{rank}"


class Preemption:
    """The signals of this process, from the first `reached` on, and the answer of all ranks."""

    def __init__(
        self, ranks: Coordinator, signals: Sequence[signal.Signals], timeout: float
    ) -> None:
        self._ranks, self._signals, self._timeout = ranks, tuple(signals), timeout
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
            channel, ranks = self._ranks.channel, self._ranks
            number = next(channel.agreements)
            store = channel.store.below(f"{channel.key}/preemption/{number}")
            self._agreement = StopAgreement(store, ranks.rank, ranks.world, self._timeout)
        return self._agreement.is_due(asks) and self._agreement.stops_at(step, asks)

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
