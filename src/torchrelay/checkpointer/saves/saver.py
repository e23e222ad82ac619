"""A save, from the caller's state to a committed step.

    plan     the ranks compare what they have, and each knows what it writes
    stage    what must be copied is copied; from here on an asynchronous caller goes on
    write    each rank hashes and writes its files and makes them durable (`share_writer`)
    commit   the coordinator writes the commit record and puts the step in place

A rank that fails in any of these makes every rank fail, and the draft is removed; `step_draft` says
how a commit may end.
"""

from __future__ import annotations

import dataclasses
import functools
import queue
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from torchrelay.checkpointer.saves.agreement import agree
from torchrelay.checkpointer.saves.pending import Pending, Saved, logger
from torchrelay.checkpointer.saves.share_writer import ShareWriter, StagedShare
from torchrelay.checkpointer.saves.step_draft import Save, StepDraft
from torchrelay.errors import CheckpointError, StorageTimeoutError
from torchrelay.memory.gpu.side import settle
from torchrelay.record.pause import gc_paused
from torchrelay.stores.local.store import token
from torchrelay.stores.seam import Store
from torchrelay.stores.shares import plan_limits, plans
from torchrelay.stores.shares.drafting import Share, Written, commit_record
from torchrelay.stores.shares.planning import Planning, RulePlanning
from torchrelay.transports.group.assembly import Assembly

if TYPE_CHECKING:
    from torch.distributed.checkpoint.planner import SavePlanner

    from torchrelay.keeper.front import Keeper

RETRY_SECONDS = 1.0  # before the second attempt of a save; twice as long before each later one

_written = msgspec.msgpack.Decoder(Written)


class Saver:
    """Saves states of one `Checkpointer`, one at a time."""

    def __init__(
        self,
        store: Store,
        assembly: Assembly,
        *,
        planner: SavePlanner | None,
        memory_budget: int | None,
        file_bytes: int | None,
        stage: str,
        retries: int,
        version: str,
        keeper: Keeper | None = None,
    ) -> None:
        self._store = store
        self._all = assembly
        place = (assembly.rank, assembly.world, file_bytes)
        self._planning: Planning = RulePlanning(*place, assembly.members)
        if planner is not None:
            from torchrelay.stores.shares.given_planner import PlannerPlanning

            self._planning = PlannerPlanning(planner, *place)
        near = keeper if keeper and keeper._is_for(assembly.rank, assembly.world) else None
        self._shares = ShareWriter(store, memory_budget, stage, near)
        self._retries = retries
        self._version = version
        self.failures = 0  # of asynchronous saves, with all of their attempts
        self.pending: Pending | None = None  # the last asynchronous save

    def save(self, save: Save, state: object) -> Saved:
        """Write a state and return when it is committed."""
        try:
            share, _ = self._plan(save, state)
            settle()
            with save.watch("write"):
                written = self._shares.write(save, share)
        except BaseException as fault:
            self._give_up(save, fault)
            raise
        return self._commit(save, share, written)

    def save_async(
        self, save: Save, state: object, pending: Pending, after: Callable[[], None]
    ) -> None:
        """Stage a state and return; `pending` ends when it is committed, or is not. `after` is done
        after the commit. One thread brings the save to its end, whatever that is. It waits for the
        first word of this one: what was staged, or why nothing was.
        """
        staged: queue.SimpleQueue[StagedShare | BaseException] = queue.SimpleQueue()
        end = functools.partial(self._complete, save, staged, pending, after)
        thread = threading.Thread(target=end, name="torchrelay-commit", daemon=True)
        try:
            self.pending = pending
            thread.start()
            share, drafted = self._plan(save, state)
            with save.watch("stage"):
                word = self._shares.stage(save, share, drafted)
            staged.put(word)
        except BaseException as fault:
            staged.put(fault)
            if thread.ident is None:  # there is no other thread
                end()
            if not pending.takes(fault):
                pending.result()
                raise

    def prepare(self, save: Save, state: object) -> int:
        """Have memory and process ready for states like this one; the bytes staged for it."""
        share, drafted = self._plan(save, state, dry=True)
        self._shares.prepare(share, drafted)
        return share.nbytes

    # Plan.

    def _plan(self, save: Save, state: object, *, dry: bool = False) -> tuple[Share, plans.Drafted]:
        with save.watch("plan"), gc_paused():
            save.call.at("planning")
            try:
                go = agree(
                    self._planning, save.call, save.deadline, state, lambda: self._begin(save, dry)
                )
            except BaseException:
                self._planning.forget()
                raise
            save.token, save.mark, save.planned = go.token, go.mark, not dry
            if save.draft is None:
                save.draft = self._draft(save)
            drafted, layouts = self._planning.resolve(go.plan)
            return Share(drafted, layouts), drafted

    def _begin(self, save: Save, dry: bool) -> tuple[str, str]:
        """The coordinator's: there is a plan, so there is a draft. Its token and its mark."""
        save.outlines = self._planning.outlines
        return (token(), "") if dry else self._begin_draft(save)

    def _begin_draft(self, save: Save) -> tuple[str, str]:
        save.token = token()
        draft = self._draft(save)
        save.mark = draft.begin(self._planning.nbytes)
        save.draft = draft
        return save.token, save.mark

    def _draft(self, save: Save) -> StepDraft:
        return StepDraft(
            self._store, save.step, save.token, save.deadline, overwrite=save.overwrite
        )

    # Commit.

    def _complete(
        self,
        save: Save,
        staged: queue.SimpleQueue[StagedShare | BaseException],
        pending: Pending,
        after: Callable[[], None],
    ) -> None:
        saved, fault = self._outcome(save, staged, pending, after)
        # The state is let go of by now: whoever waits may count on its memory.
        pending.end(saved, fault)

    def _outcome(
        self,
        save: Save,
        staged: queue.SimpleQueue[StagedShare | BaseException],
        pending: Pending,
        after: Callable[[], None],
    ) -> tuple[Saved | None, BaseException | None]:
        word = staged.get()
        if not isinstance(word, StagedShare):
            self._give_up(save, word)
            told = pending.takes(word)  # else the caller raises it, and nobody has the `Pending`
            self.failures += told
            return None, word if told else None
        try:
            try:
                saved = self._written(save, word)
            finally:
                word.release()
            after()
        except BaseException as fault:
            self.failures += 1
            return None, fault
        return saved, None

    def _written(self, save: Save, staged: StagedShare) -> Saved:
        """Write what is staged and commit it, in as many attempts as there may be."""
        failures: list[str] = []
        finish: Callable[[], list[bytes]] | None = staged.finish
        while True:
            try:
                if finish is None:
                    finish = self._begin_again(save, staged)
                saved = self._attempt(save, staged.share, finish)
                return dataclasses.replace(saved, failures=tuple(failures))
            except BaseException as fault:
                wait = RETRY_SECONDS * 2 ** len(failures)
                failures.append(str(fault))
                if len(failures) > self._retries or not save.call.answered:
                    raise
                if not self._all_can(save, staged, fault, wait):
                    raise
                logger.warning("saving step %d is tried again: %s", save.step, fault)
                time.sleep(wait)
                finish = None

    def _attempt(self, save: Save, share: Share, finish: Callable[[], list[bytes]]) -> Saved:
        try:
            save.call.at(f"writing {', '.join(file.name for file in share.files[:3])}")
            with save.watch("write"):
                written = share.written(finish())
        except BaseException as fault:
            self._give_up(save, fault)
            raise
        return self._commit(save, share, written)

    def _all_can(self, save: Save, staged: StagedShare, fault: BaseException, wait: float) -> bool:
        """Whether every rank has what it staged, time left, and met with a fault that may pass."""
        may_pass = type(fault) in (CheckpointError, StorageTimeoutError)
        can = may_pass and staged.again is not None and save.deadline.left() > 2 * wait
        mine = b"yes" if can else b"no"
        heard = save.call.round(
            "retry", lambda: mine, lambda said: [min(said)] * len(said), save.deadline
        )
        return heard == b"yes"

    def _begin_again(self, save: Save, staged: StagedShare) -> Callable[[], list[bytes]]:
        """Another draft of the same step, for what is staged."""

        def decide(said: list[bytes]) -> list[bytes]:
            return [msgspec.msgpack.encode(self._begin_draft(save))] * len(said)

        heard = save.call.round("retry", lambda: b"", decide, save.deadline)
        save.token, save.mark = msgspec.msgpack.decode(heard, type=tuple[str, str])
        if not self._all.coordinates:
            save.draft = self._draft(save)
        assert staged.again is not None
        return staged.again

    def _commit(self, save: Save, share: Share, written: Written) -> Saved:
        def decide(said: list[bytes]) -> list[bytes]:
            shares = [plan_limits.read(_written, data, r) for r, data in enumerate(said)]
            assert save.outlines is not None and save.draft is not None
            save.draft.commit(commit_record(save.step, shares, save.outlines, self._version))
            return [b""] * len(said)

        with save.watch("commit"):
            try:
                payload = msgspec.msgpack.encode(written)
                save.call.round("write", lambda: payload, decide, save.deadline)
            except BaseException as fault:
                if save.call.answered or not isinstance(fault, CheckpointError):
                    self._discard(save)
                    raise
                self._look(save, fault)
            finally:
                save.call.farewell()
        url = f"{self._store.url}/step-{save.step}"
        return Saved(save.step, url, share.nbytes, dict(save.watch.seconds))

    def _look(self, save: Save, silence: CheckpointError) -> None:
        """This rank did not hear how the commit went. Returns if the step is there."""
        assert save.draft is not None
        if self._all.coordinates and save.draft.files.revoke():
            self._discard(save)
            raise silence
        save.draft.look(save.mark, silence)

    def _give_up(self, save: Save, fault: BaseException) -> None:
        """This rank failed before the last round: tell the others there, then clean up."""
        if save.planned:
            try:
                save.call.round("write", fault, lambda said: said, save.deadline)
            except BaseException as told:  # the caller raises what it was
                logger.debug("step %d given up: %s", save.step, told)
        self._discard(save)

    def _discard(self, save: Save) -> None:
        if self._all.coordinates and save.draft is not None:
            save.draft.discard()

    def forsake(self) -> None:
        """In a child of a fork: let go of memory and process."""
        self._shares.forsake()

    def close(self) -> None:
        self._shares.close()
