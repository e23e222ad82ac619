"""A save, from the caller's state to a committed step.

    plan     the ranks compare what they have, and each knows what it writes
    stage    what must be copied is copied; from here on an asynchronous caller goes on
    write    each rank hashes and writes its files and makes them durable
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
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import torch

from torchrelay.checkpointer.saves.agreement import agree
from torchrelay.checkpointer.saves.pending import Pending, Saved, logger
from torchrelay.checkpointer.saves.staging import (
    HereTarget,
    Pipeline,
    ProcessTarget,
    arena_bytes,
    in_parts,
    write_staged,
)
from torchrelay.checkpointer.saves.step_draft import StepDraft
from torchrelay.deadlines import Deadline, Stopwatch
from torchrelay.errors import CheckpointError, EndpointError, StorageTimeoutError
from torchrelay.memory.arena import Arena
from torchrelay.memory.bounded import bounded
from torchrelay.memory.gpu.side import settle
from torchrelay.memory.gpu.spare import DeviceCopy
from torchrelay.memory.pages import PAGE
from torchrelay.memory.pool import cores
from torchrelay.progress import Bar, ProgressCallback
from torchrelay.record.pause import gc_paused
from torchrelay.stores.local.store import token
from torchrelay.stores.seam import Store
from torchrelay.stores.shares import plan_limits, plans
from torchrelay.stores.shares.drafting import Share, Written, commit_record
from torchrelay.stores.shares.planning import Planning, RulePlanning
from torchrelay.stores.writer.client import WriterProcess
from torchrelay.stores.writer.ranges import WORKERS
from torchrelay.transports.group.assembly import Assembly, Call

if TYPE_CHECKING:
    from torch.distributed.checkpoint.planner import SavePlanner

    from torchrelay.keeper.front import Keeper

RETRY_SECONDS = 1.0  # before the second attempt of a save; twice as long before each later one
BLOCKING_ARENA = 1 << 30  # bytes that a blocking save stages through, where it must stage

_written = msgspec.msgpack.Decoder(Written)


@dataclass
class Save:
    """One save under way on this rank."""

    step: int
    overwrite: bool
    call: Call
    deadline: Deadline
    progress: ProgressCallback | None = None
    watch: Stopwatch = field(default_factory=Stopwatch)
    token: str = ""
    mark: str = ""
    planned: bool = False  # whether every rank has its plan, and awaits the others' last word
    draft: StepDraft | None = None
    outlines: plans.Outlines | None = None


class _Staged(NamedTuple):
    """What this rank is to write, and what returns when it is written."""

    share: Share
    finish: Callable[[], list[bytes]]
    again: Callable[[], list[bytes]] | None  # the same for another draft, if all is still staged
    release: Callable[[], None] = lambda: None  # called in the end, however it ends


class Saver:
    """Saves states of one `Checkpointer`, one at a time. Keeps the arena and the writer process."""

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
        self._budget = memory_budget
        self._stage = stage
        self._keeper = keeper if keeper and keeper._is_for(assembly.rank, assembly.world) else None
        self._retries = retries
        self._version = version
        self.failures = 0  # of asynchronous saves, with all of their attempts
        self._arena: Arena | None = None
        self._process = WriterProcess()
        self._spare = DeviceCopy()
        self.pending: Pending | None = None  # the last asynchronous save

    def save(self, save: Save, state: object) -> Saved:
        """Write a state and return when it is committed."""
        try:
            share, _ = self._plan(save, state)
            settle()
            with save.watch("write"):
                written = self._write_now(save, share)
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
        staged: queue.SimpleQueue[_Staged | BaseException] = queue.SimpleQueue()
        end = functools.partial(self._complete, save, staged, pending, after)
        thread = threading.Thread(target=end, name="torchrelay-commit", daemon=True)
        try:
            self.pending = pending
            thread.start()
            share, drafted = self._plan(save, state)
            with save.watch("stage"):
                word = self._stage_share(save, share, drafted)
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
        if self._keeper is not None:  # its memory is had by staging
            self._process.start()
            return share.nbytes
        budget = self._budget
        if self._copy_on_device(drafted) is not None:
            self._spare.wait()
            budget = budget or BLOCKING_ARENA
        arena = self._take_arena(share, budget)
        self._process.start()
        self._process.attach(arena.fds, arena.each, arena.nbytes)
        self._arena = arena
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
        save.token = token()
        if not dry:
            draft = self._draft(save)
            save.mark = draft.begin(self._planning.nbytes)
            save.draft = draft
        return save.token, save.mark

    def _draft(self, save: Save) -> StepDraft:
        return StepDraft(
            self._store, save.step, save.token, save.deadline, overwrite=save.overwrite
        )

    # Stage and write.

    def _write_now(self, save: Save, share: Share) -> Written:
        """Write a share from this process; gives up waiting for it at the deadline."""
        assert save.draft is not None
        draft = save.draft.files
        target: list[HereTarget] = []
        bar = Bar(save.progress, share.nbytes)

        def write() -> list[bytes]:
            if share.on_host:
                target.append(HereTarget(draft, share.files))
                whole = share.ranges()
                placed = [(part.file, part.start, part.stop, 0) for part in whole]
                for parts in in_parts(placed, share.files, bar):
                    cut = [whole[f]._replace(start=a, stop=b) for f, a, b, _ in parts]
                    target[0].write_ranges(cut)
                digests = target[0].finish(save.deadline)
                share.check_unchanged()
                return digests
            share.hash_on_devices()
            arena = self._take_arena(share, self._budget or BLOCKING_ARENA)
            target.append(HereTarget(draft, share.files, arena.address))
            pipeline = Pipeline(share, share.streams, arena, target[0], save.deadline, bar)
            pipeline.stage(WORKERS)
            share.check_unchanged()
            digests = pipeline.finish()
            self._arena = arena
            return digests

        def work() -> list[bytes]:
            try:
                return write()
            except BaseException:
                if target:
                    target[0].abort()
                raise

        save.call.at(f"writing {', '.join(file.name for file in share.files[:3])}")
        try:
            return share.written(bounded(work, save.deadline.early(), "write the step"))
        except StorageTimeoutError as late:
            late.phase = late.phase or "write"
            late.file = late.file or (target[0].at if target else None)
            raise

    def _take_arena(self, share: Share, budget: int | None) -> Arena:
        """The arena, grown if need be: for all of a share, or no more than a budget.

        Whoever takes it puts it back when nothing uses it any more. A save that breaks off does
        not: a thread that it left behind may still read it, or write to it.
        """
        whole = arena_bytes(share.files)
        need = max(PAGE, whole if budget is None else min(whole, budget))
        pinned = any(stream.devices for stream in share.streams)
        arena, self._arena = self._arena, None
        if arena is not None and (arena.nbytes < need or (pinned and not arena.pinned)):
            arena.close()
            arena = None
        return arena or Arena(need, pinned=pinned, parts=cores())

    def _stage_share(self, save: Save, share: Share, drafted: plans.Drafted) -> _Staged:
        """Copy a share; what waits for its files is called from another thread."""
        save.call.at("staging")
        copied = self._copy_on_device(drafted)
        if copied is None:
            settle()
            kept = self._stage_in_keeper(save, share)
            return kept or self._stage_here(save, share, self._budget)
        copies = plans.Drafted(drafted.entries, copied, drafted.objects)
        spare = Share(copies, share.layouts)

        def finish() -> list[bytes]:
            self._spare.wait()
            return self._stage_here(save, spare, self._budget or BLOCKING_ARENA).finish()

        return _Staged(share, finish, again=finish)

    def _copy_on_device(self, drafted: plans.Drafted) -> list[torch.Tensor] | None:
        """A spare copy of the tensors on their GPUs; None where the host is to have it."""
        wanted = self._stage == "device"
        if not wanted and not (self._stage == "auto" and self._spare.fits(drafted.tensors)):
            return None
        try:
            return self._spare.take(drafted.tensors)
        except torch.cuda.OutOfMemoryError:
            if wanted:
                raise
            return None

    def _stage_in_keeper(self, save: Save, share: Share) -> _Staged | None:
        """Stage a share where it outlives this process; None where that cannot be: there is no
        keeper, or it has no room now."""
        whole = self._budget is None or self._budget >= arena_bytes(share.files)
        if self._keeper is None or not whole:
            return None
        try:
            lent = self._keeper._lend(save.step, share, save.outlines, save.deadline.left())
        except (EndpointError, CheckpointError, TimeoutError) as fault:
            logger.warning("step %d is saved without its keeper: %s", save.step, fault)
            return None
        if lent is None:
            return None

        def write() -> list[bytes]:
            place = (self._store.url, save.step, save.token)
            target = ProcessTarget(self._process, lent, place, share.files, save.deadline)
            bar = Bar(save.progress, share.nbytes)
            return write_staged(target, share.files, lent.starts, save.deadline, bar)

        return _Staged(share, write, write, lent.release)

    def _stage_here(self, save: Save, share: Share, budget: int | None) -> _Staged:
        share.hash_on_devices()
        arena = self._take_arena(share, budget)

        def target() -> ProcessTarget:
            place = (self._store.url, save.step, save.token)
            return ProcessTarget(self._process, arena, place, share.files, save.deadline)

        bar = Bar(save.progress, share.nbytes)
        pipeline = Pipeline(share, share.streams, arena, target(), save.deadline, bar)
        pipeline.stage(WORKERS)
        share.check_unchanged()

        def finish() -> list[bytes]:
            digests = pipeline.finish()
            self._arena = arena
            return digests

        def again() -> list[bytes]:
            digests = pipeline.write_again(target())
            self._arena = arena
            return digests

        return _Staged(share, finish, again if pipeline.holds_all else None)

    # Commit.

    def _complete(
        self,
        save: Save,
        staged: queue.SimpleQueue[_Staged | BaseException],
        pending: Pending,
        after: Callable[[], None],
    ) -> None:
        saved, fault = self._outcome(save, staged, pending, after)
        # The state is let go of by now: whoever waits may count on its memory.
        pending.end(saved, fault)

    def _outcome(
        self,
        save: Save,
        staged: queue.SimpleQueue[_Staged | BaseException],
        pending: Pending,
        after: Callable[[], None],
    ) -> tuple[Saved | None, BaseException | None]:
        word = staged.get()
        if not isinstance(word, _Staged):
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

    def _written(self, save: Save, staged: _Staged) -> Saved:
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

    def _all_can(self, save: Save, staged: _Staged, fault: BaseException, wait: float) -> bool:
        """Whether every rank has what it staged, time left, and met with a fault that may pass."""
        may_pass = type(fault) in (CheckpointError, StorageTimeoutError)
        can = may_pass and staged.again is not None and save.deadline.left() > 2 * wait
        mine = b"yes" if can else b"no"
        heard = save.call.round(
            "retry", lambda: mine, lambda said: [min(said)] * len(said), save.deadline
        )
        return heard == b"yes"

    def _begin_again(self, save: Save, staged: _Staged) -> Callable[[], list[bytes]]:
        """Another draft of the same step, for what is staged."""

        def decide(said: list[bytes]) -> list[bytes]:
            save.token = token()
            draft = self._draft(save)
            save.mark = draft.begin(self._planning.nbytes)
            save.draft = draft
            return [msgspec.msgpack.encode((save.token, save.mark))] * len(said)

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
        self._process.forsake()
        if self._arena is not None:
            self._arena.forsake()
            self._arena = None

    def close(self) -> None:
        self._process.close()
        self._spare.free()
        if self._arena is not None:
            self._arena.close()
            self._arena = None
