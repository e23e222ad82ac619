"""A save, from the caller's state to a committed step.

    begin    the ranks wait for the save before; the coordinator creates a draft
    plan     the ranks compare what they have, and each knows what it writes
    write    each rank copies its share if it must, then hashes, writes and syncs its files
    commit   the coordinator writes the commit record and puts the step in place

A rank that fails makes every rank fail, and the draft is removed; `step_draft` says how a commit
may end. Of an asynchronous save the caller waits for the plan and the copy.
"""

from __future__ import annotations

import queue
import threading
from contextlib import ExitStack
from functools import partial

import msgspec

from torchrelay.checkpointer.catalog import StepCatalog
from torchrelay.checkpointer.share_writer import Save, ShareWriter, StagedShare
from torchrelay.coordination.coordinator import Coordinator
from torchrelay.coordination.messages import decoded
from torchrelay.deadlines import Deadline
from torchrelay.errors import CheckpointError, StorageTimeoutError, UsageError
from torchrelay.memory import threads
from torchrelay.memory.bounded import bounded
from torchrelay.pending import Pending, logger
from torchrelay.record.encoding import encode
from torchrelay.record.schema import Record
from torchrelay.results import Outcome, Report
from torchrelay.shares.commit_record import commit_record, decode_shares
from torchrelay.shares.planner import PlannedShare, SharePlanner
from torchrelay.shares.step_draft import GRACE, StepDraft
from torchrelay.stores.tokens import new_token

# Token, id and path or URL of a draft, as the coordinator has them.
_begun = msgspec.msgpack.Decoder(tuple[str, str, str])
_encode = msgspec.msgpack.Encoder().encode

_Outcome = queue.SimpleQueue[tuple[PlannedShare, StagedShare] | BaseException]


class Saver:
    """Saves states of one `Checkpointer`, one at a time."""

    def __init__(
        self, ranks: Coordinator, catalog: StepCatalog, writer: ShareWriter, file_bytes: int | None
    ) -> None:
        self._ranks = ranks
        self._catalog = catalog
        self.writer = writer
        self._planner = SharePlanner(ranks.rank, ranks.world, file_bytes, ranks.members)
        self.failures = 0  # of asynchronous saves
        self.pending: Pending | None = None  # the last asynchronous save

    def save(self, save: Save, state: object) -> Report:
        """Write a state and return when it is committed."""
        with self._ranks.measured("save", save.step) as measured:
            try:
                self._begin(save)
                planned = self._plan(save, state)
                with save.watch("write"):
                    written = self.writer.write(save, planned.share)
            except BaseException as fault:
                self._give_up(save, fault)
                raise
            report = self._commit(save, planned, written)
            measured.end(report)
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
        outcome: _Outcome = queue.SimpleQueue()
        end = partial(self._complete, save, outcome, pending, owner)
        thread = threading.Thread(target=end, name="torchrelay-commit", daemon=True)
        try:
            self._begin(save)
            self.pending = pending
            threads.begin(thread)
            planned = self._plan(save, state)
            with save.watch("stage"):
                staged = self.writer.stage(save, planned)
            outcome.put((planned, staged))
        except BaseException as fault:
            outcome.put(fault)
            if thread.ident is None:  # there is no other thread
                end()
            if not _stays_in(pending, fault):
                if self.pending is pending:
                    pending.exception()
                raise
            self.pending = pending

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

        def decide(said: list[bytes]) -> list[bytes]:
            steps = sorted({msgspec.msgpack.decode(data, type=int) for data in said})
            if len(steps) > 1:
                raise UsageError(f"ranks name different steps: {steps}; name the same on all")
            act = partial(self._catalog.rollback, step)
            newer = bounded(act, deadline.early(), "delete steps", file=self._catalog.url)
            return [_encode(newer)] * len(said)

        return msgspec.msgpack.decode(call.round("begin", mine, decide, deadline), type=list[int])

    # Begin.

    def _is_busy(self, save: Save) -> bool:
        """Whether any rank still writes; all ranks get the same answer."""
        busy = self.pending is not None and not self.pending.done()
        heard = save.call.round(
            "begin",
            lambda: b"busy" if busy else b"",
            lambda said: [max(said)] * len(said),
            save.deadline,
        )
        return heard == b"busy"

    def _wait(self, seconds: float) -> None:
        """Wait for the save before; raises its failure if no caller has seen it."""
        if self.pending is not None and not self.pending.ends_within(seconds):
            step = self.pending.step
            text = f"step {step} is still being written: give a longer timeout"
            raise CheckpointError(text, step=step, phase="write")
        self.raise_unseen()

    def _begin(self, save: Save) -> None:
        """Wait for the save before; create the draft of this one."""
        store, deadline = self._catalog.store, save.deadline

        def mine() -> bytes:
            self._wait(deadline.left())
            return b""

        def decide(said: list[bytes]) -> list[bytes]:
            look = partial(self._catalog.check_order, save.step, overwrite=save.overwrite)
            listing = bounded(look, deadline.early(), "list the steps", file=store.url)
            draft = StepDraft(
                store, save.step, new_token(), deadline.early, overwrite=save.overwrite
            )
            draft.begin(listing)
            save.draft = draft
            return [_encode((draft.token, draft.id, draft.files.place))] * len(said)

        save.call.at("waiting for the save before")
        begun = save.call.round("begin", mine, decide, deadline)
        if save.draft is None:
            name, id_, place = decoded(_begun, begun, rank=0)
            draft = StepDraft(store, save.step, name, deadline.early, overwrite=save.overwrite)
            draft.id = id_
            draft.check_visible(self._ranks.rank, place)
            save.draft = draft

    def _plan(self, save: Save, state: object) -> PlannedShare:
        def check_space(nbytes: int) -> None:
            act = partial(self._catalog.check_space, nbytes)
            bounded(act, save.deadline.early(), "look for free space", file=self._catalog.url)

        with save.watch("plan"):
            save.call.at("planning")
            return self._planner.plan(state, save.call, save.deadline, check_space)

    # Commit.

    def _complete(self, save: Save, outcome: _Outcome, pending: Pending, owner: object) -> None:
        saved, fault = self._ended(save, outcome, pending)
        # The state is released by now: a caller that waits may count on its memory.
        pending.end(saved, fault)

    def _ended(
        self, save: Save, outcome: _Outcome, pending: Pending
    ) -> tuple[Report | None, BaseException | None]:
        found = outcome.get()
        if isinstance(found, BaseException):
            self._give_up(save, found)
            kept = _stays_in(pending, found)  # otherwise the caller raises it, and has no `Pending`
            self.failures += kept
            return None, found if kept else None
        planned, staged = found
        try:
            with ExitStack() as last:
                last.callback(staged.release)
                try:
                    save.call.at(staged.share.phase)
                    with save.watch("write"):
                        written = staged.share.written(staged.finish())
                except BaseException as fault:
                    self._give_up(save, fault)
                    raise
                return self._commit(save, planned, written), None
        except BaseException as fault:
            self.failures += 1
            return None, fault

    def _commit(self, save: Save, planned: PlannedShare, written: Record) -> Report:
        """The last round: the coordinator commits what all ranks have written."""
        sizes: dict[str, int] = {}

        def decide(said: list[bytes]) -> list[bytes]:
            assert planned.outlined is not None and save.draft is not None
            shares = decode_shares(save.step, said)
            record = commit_record(
                save.step, shares, planned.outlined, metrics=save.metrics, names=planned.names
            )
            save.draft.commit(record)
            sizes.update((file.name, file.nbytes) for file in record.volumes)
            return [b""] * len(said)

        with save.watch("commit"):
            try:
                payload = encode(written)
                save.call.round("write", lambda: payload, decide, save.deadline)
            except BaseException as fault:
                # Without an answer this rank does not know how the commit ended.
                known = save.call.answered or not isinstance(fault, CheckpointError)
                assert save.draft is not None
                if known or (self._ranks.coordinates and save.draft.files.revoke()):
                    self._discard(save)
                    raise
                assert isinstance(fault, CheckpointError)
                save.draft.look(fault)
            finally:
                save.call.drain()
        if self._ranks.coordinates:
            self._prune(save, sizes)
        url, seconds = f"{self._catalog.url}/step-{save.step}", dict(save.watch.seconds)
        return Report(save.step, planned.share.nbytes, seconds, {url: Outcome(route="storage")})

    def _prune(self, save: Save, sizes: dict[str, int]) -> None:
        """Remove old steps. The step is committed by now: nothing here fails the save."""
        seconds = max(GRACE, save.deadline.left())
        try:
            act = partial(self._catalog.prune, save.step, sizes, save.metrics)
            bounded(act, seconds, "remove old steps", file=self._catalog.url)
        except StorageTimeoutError as late:
            logger.warning("%s", late)

    def _give_up(self, save: Save, fault: BaseException) -> None:
        """This rank failed before the last round: report it to the others, then clean up."""
        if save.call.awaited:
            try:
                save.call.round("write", fault, lambda said: said, save.deadline)
            except BaseException as raised:  # the caller raises the failure itself
                logger.debug("step %d given up: %s", save.step, raised)
        self._discard(save)

    def _discard(self, save: Save) -> None:
        if self._ranks.coordinates and save.draft is not None:
            save.draft.discard()

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
