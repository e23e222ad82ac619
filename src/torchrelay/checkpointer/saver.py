"""Saves of one `Checkpointer`, one at a time; each is a `SaveAttempt`.

A rank that fails makes every rank fail, and the draft is removed. Of an asynchronous save the
caller waits for the plan and the copy; a thread brings it to its end.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import msgspec

from torchrelay.checkpointer.catalog import StepCatalog
from torchrelay.checkpointer.marks import OnReplicas
from torchrelay.checkpointer.previous import PreviousSteps
from torchrelay.checkpointer.save_attempt import SaveAttempt
from torchrelay.checkpointer.share_writer import Save, ShareWriter
from torchrelay.coordination.coordinator import Coordinator
from torchrelay.deadlines import Deadline
from torchrelay.errors import CheckpointError, StorageTimeoutError, UsageError
from torchrelay.memory import threads
from torchrelay.memory.bounded import bounded
from torchrelay.options import CheckpointerOptions
from torchrelay.pending import Pending
from torchrelay.results import Report
from torchrelay.shares.planner import SharePlanner
from torchrelay.shares.reuse import Reuse

_encode = msgspec.msgpack.Encoder().encode

# Of the caller's half of an asynchronous save: None once the state is copied, or why it is not.
_Outcome = queue.SimpleQueue[BaseException | None]


class SaverHooks(NamedTuple):
    """Calls to the owner of the steps, on the coordinator.

    `committed`: a step was committed, perhaps in place of another save of it; returns at once.
    `rollback` deletes every step above one, and returns them.
    """

    committed: Callable[[int, bool], None]
    rollback: Callable[[int], list[int]]


class Saver:
    """Saves states of one `Checkpointer`, one at a time."""

    def __init__(
        self,
        ranks: Coordinator,
        catalog: StepCatalog,
        writer: ShareWriter,
        options: CheckpointerOptions,
        hooks: SaverHooks,
        replicas: OnReplicas = "keep",
    ) -> None:
        self._hooks = hooks
        self._replicas: OnReplicas = replicas
        self._ranks = ranks
        self._catalog = catalog
        self.writer = writer
        file_bytes = options.file_bytes
        self._planner = SharePlanner(
            ranks.rank, ranks.world, file_bytes, ranks.members, replicated=tuple(options.replicated)
        )
        self._steps: PreviousSteps | None = None
        if options.reuse:
            reuse = Reuse(ranks.rank, ranks.world, file_bytes)
            self._steps = PreviousSteps(catalog, reuse, options.full_every)
        self.failures = 0  # of asynchronous saves
        self.pending: Pending | None = None  # the last asynchronous save

    def _attempt(self, save: Save) -> SaveAttempt:
        parts = self._ranks, self._catalog, self._planner, self.writer
        return SaveAttempt(save, *parts, self._steps, self._replicas)

    def save(self, save: Save, state: object) -> Report:
        """Write a state and return when it is committed."""
        attempt = self._attempt(save)
        with self._ranks.measured("save", save.step) as measured:
            try:
                attempt.begin(self._wait)
                attempt.plan(state)
                attempt.write()
            except BaseException as fault:
                attempt.give_up(fault)
                raise
            report = self._commit(attempt)
            measured.end(report)
        return report

    def _commit(self, attempt: SaveAttempt) -> Report:
        report = attempt.commit()
        if self._ranks.coordinates:
            self._hooks.committed(attempt.save.step, attempt.save.overwrite)
        return report

    def save_async(
        self, save: Save, state: object, owner: object, *, skip: bool, quiet: bool
    ) -> Pending:
        """Stage a state and return; the `Pending` ends when it is committed, or is not.

        A thread brings the save to its end, with or without success. It is started first, and waits
        for what was staged, or for the failure that kept it from being staged. It keeps `owner`
        alive, which is closed at the end of the process and waits for the save.
        """
        with self._ranks.measured("save_async", save.step, background=True) as measured:
            if skip and self._is_busy(save):
                return Pending(save.step, "saving", "another save is in progress", measured)
            pending = Pending(save.step, "saving", measured=measured)
            pending.seen = quiet
            self._stage(save, state, pending, owner)
        return pending

    def _stage(self, save: Save, state: object, pending: Pending, owner: object) -> None:
        """The caller's half of an asynchronous save."""
        attempt, outcome = self._attempt(save), _Outcome()
        end = partial(self._complete, attempt, outcome, pending, owner)
        thread = threading.Thread(target=end, name="torchrelay-commit", daemon=True)
        try:
            attempt.begin(self._wait)
            self.pending = pending
            threads.begin(thread)
            attempt.plan(state)
            attempt.copy()
            outcome.put(None)
        except BaseException as fault:
            outcome.put(fault)
            if thread.ident is None:  # there is no other thread
                end()
            if not _stays_in(pending, fault):
                if self.pending is pending:
                    pending.exception()
                raise
            self.pending = pending

    def _complete(
        self, attempt: SaveAttempt, outcome: _Outcome, pending: Pending, owner: object
    ) -> None:
        """The other half, on a thread."""
        saved, fault = self._ended(attempt, outcome.get(), pending)
        # The state is released by now: a caller that waits may count on its memory.
        pending.end(saved, fault)

    def _ended(
        self, attempt: SaveAttempt, failed: BaseException | None, pending: Pending
    ) -> tuple[Report | None, BaseException | None]:
        if failed is not None:
            attempt.give_up(failed)
            attempt.release()
            kept = _stays_in(pending, failed)  # else the caller raises it, and has no `Pending`
            self.failures += kept
            return None, failed if kept else None
        try:
            try:
                attempt.write_copy()
            except BaseException as fault:
                attempt.give_up(fault)
                raise
            return self._commit(attempt), None
        except BaseException as fault:
            self.failures += 1
            return None, fault
        finally:
            attempt.release()

    def prepare(self, deadline: Deadline, state: object) -> int:
        """Have memory and process ready for states like this one; returns the bytes of this rank's
        share."""
        call = self._ranks.call("prepare")
        call.together("begin", lambda: self._wait(deadline.left()), deadline)
        share = self._planner.plan(state, call, deadline).share
        self.writer.prepare(share)
        return share.nbytes

    def rollback(self, step: int, deadline: Deadline) -> list[int]:
        """Delete every step above one; returns them."""
        call = self._ranks.call("rollback")

        def mine() -> bytes:
            self._wait(deadline.left())
            return _encode(step)

        def decide(messages: list[bytes]) -> list[bytes]:
            steps = sorted({msgspec.msgpack.decode(data, type=int) for data in messages})
            if len(steps) > 1:
                raise UsageError(f"ranks name different steps: {steps}; name the same on all")
            act = partial(self._hooks.rollback, step)
            newer = bounded(act, deadline.early(), "delete steps", file=self._catalog.url)
            return [_encode(newer)] * len(messages)

        return msgspec.msgpack.decode(call.round("begin", mine, decide, deadline), type=list[int])

    # Begin.

    def _is_busy(self, save: Save) -> bool:
        """Whether any rank still writes; all ranks get the same answer."""
        busy = self.pending is not None and not self.pending.done()
        answer = save.call.round(
            "begin",
            lambda: b"busy" if busy else b"",
            lambda messages: [max(messages)] * len(messages),
            save.deadline,
        )
        return answer == b"busy"

    def _wait(self, seconds: float) -> None:
        """Wait for the save before; raises its failure if no caller has seen it."""
        if self.pending is not None and not self.pending.ends_within(seconds):
            step = self.pending.step
            text = f"step {step} is still being written: give a longer timeout"
            raise CheckpointError(text, step=step, phase="write")
        self.raise_unseen()

    # The end.

    def raise_unseen(self) -> None:
        """Raise the failure of an asynchronous save that no caller has seen."""
        pending = self.pending
        if pending is not None and pending.done() and not pending.seen:
            pending.result()

    def detach_after_fork(self) -> None:
        """In a child of a fork: forget memory and process, which stay the parent's."""
        self.writer.detach_after_fork()

    def close(self, seconds: float) -> None:
        """Wait for the save in progress, and free memory and process."""
        try:
            self._wait(seconds)
        finally:
            self.writer.close()


def _stays_in(pending: Pending, fault: BaseException) -> bool:
    """Whether a failure at the start of a save is kept in its `Pending` instead of being raised:
    only a failure of the storage is, and only with on_error="warn"."""
    if not pending.seen or type(fault) not in (CheckpointError, StorageTimeoutError):
        return False
    return isinstance(fault, StorageTimeoutError) or getattr(fault, "file", None) is not None
