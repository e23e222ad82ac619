"""One rank's share of a step, written: from its own memory, or from a copy that is staged first.

A copy is staged in a keeper, which outlives this process, in the memory of a GPU, or in an arena of
this process; the writer process writes what is staged on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch

from torchrelay.coordination.call import Call
from torchrelay.deadlines import Deadline, Stopwatch
from torchrelay.errors import CheckpointError, EndpointError, StorageTimeoutError
from torchrelay.memory.arena import Arena
from torchrelay.memory.bounded import bounded
from torchrelay.memory.gpu.side import settle
from torchrelay.memory.gpu.spare import DeviceCopy
from torchrelay.memory.pages import PAGE
from torchrelay.memory.pool import cores
from torchrelay.pending import logger
from torchrelay.progress import Bar, ProgressCallback
from torchrelay.record.schema import Record
from torchrelay.shares.planner import PlannedShare
from torchrelay.shares.share import Pipeline, Share, arena_bytes
from torchrelay.shares.step_draft import StepDraft
from torchrelay.stores.store import Store
from torchrelay.stores.writer.client import WriterProcess, WriterSave
from torchrelay.stores.writer.file_writer import WORKERS, FileWriter, Written

if TYPE_CHECKING:
    from torchrelay.keeper.front import Keeper

BLOCKING_ARENA = 1 << 30  # bytes that a blocking save stages through, where it must stage


@dataclass
class Save:
    """One save in progress on this rank."""

    step: int
    overwrite: bool
    call: Call
    deadline: Deadline
    progress: ProgressCallback | None
    metrics: Mapping[str, float] = field(default_factory=dict)
    watch: Stopwatch = field(default_factory=Stopwatch)
    draft: StepDraft | None = None
    # Of a share whose memory does not change meanwhile: the same, with files of the step before.
    decide: Callable[[Share], Share] = lambda share: share


class WrittenShare(NamedTuple):
    """A share that was written, and the digests of its files' chunks. `copied` is as in `Written`.
    `reused`: bytes that did not have to be written."""

    share: Share
    digests: list[bytes]
    copied: dict[str, str]

    @classmethod
    def of(cls, share: Share, written: Written) -> WrittenShare:
        return cls(share, *written)

    @property
    def record(self) -> Record:
        """The report of what was written."""
        return self.share.written(self.digests)

    @property
    def instead(self) -> dict[str, str]:
        """Why files that did not change had to be written all the same."""
        why = next(iter(self.copied.values()), None)
        return {} if why is None else {"link": why}

    @property
    def reused(self) -> int:
        files = [file for file in self.share.files if file.source is not None]
        return sum(file.nbytes for file in files if file.name not in self.copied)


class StagedShare(NamedTuple):
    """A share that was copied; `finish` writes it. `release` is called in the end, with or without
    success."""

    share: Share
    finish: Callable[[], WrittenShare]
    release: Callable[[], None] = lambda: None


class ShareWriter:
    """Writes shares of one `Checkpointer`, one at a time. Keeps the arena, the copy on the GPU and
    the writer process between them."""

    def __init__(
        self, store: Store, memory_budget: int | None, stage_on: str, keeper: Keeper | None
    ) -> None:
        self._store = store
        self._budget = memory_budget
        self._stage_on = stage_on
        self._keeper = keeper
        self._arena: Arena | None = None
        self.process = WriterProcess()
        self._spare = DeviceCopy()

    def prepare(self, share: Share) -> None:
        """Have memory and process ready for shares like this one."""
        if self._keeper is not None:  # staging allocates its memory
            self.process.start()
            return
        budget = self._budget
        if self._copy_on_device(share) is not None:
            self._spare.wait()
            budget = budget or BLOCKING_ARENA
        arena = self._take_arena(share, budget)
        self.process.start()
        self.process.attach(arena.fds, arena.each, arena.nbytes)
        self._arena = arena

    # From this process, while the caller waits.

    def write(self, save: Save, share: Share) -> WrittenShare:
        """Write a share; gives up at the deadline."""
        writers: list[FileWriter] = []
        work = partial(self._write, save, share, writers)
        save.call.at(share.phase)
        settle()
        try:
            return bounded(work, save.deadline.early(), "write the step")
        except StorageTimeoutError as overdue:
            overdue.phase = overdue.phase or "write"
            overdue.file = overdue.file or (writers[0].current if writers else None)
            raise

    def _write(self, save: Save, share: Share, writers: list[FileWriter]) -> WrittenShare:
        assert save.draft is not None
        share = save.decide(share)
        arena, base = None, 0
        if not share.on_host:
            share.hash_on_devices()
            arena = self._take_arena(share, self._budget or BLOCKING_ARENA)
            base = arena.address
        progress = Bar(save.progress, share.bytes_to_write).add
        with FileWriter(save.draft.files, share.files, progress, base) as writer:
            writers.append(writer)
            if arena is not None:
                return self._staged(save, share, arena, writer).finish()
            writer.write(share.ranges())
            written = writer.finish()
            share.check_unchanged()
            return WrittenShare.of(share, written)

    def _take_arena(self, share: Share, budget: int | None) -> Arena:
        """The arena, enlarged if it is too small: for all of a share, or at most a budget.

        The caller puts it back when nothing uses it any more. A save that fails does not: a thread
        that it left behind may still read it, or write to it.
        """
        whole = arena_bytes(share.files)
        need = max(PAGE, whole if budget is None else min(whole, budget))
        pinned = share.pinned
        arena, self._arena = self._arena, None
        if arena is not None and (arena.nbytes < need or (pinned and not arena.pinned)):
            arena.close()
            arena = None
        try:
            return arena or Arena(need, pinned=pinned, parts=cores())
        except MemoryError as fault:
            raise CheckpointError(
                f"no memory for the staged copy of this rank's part: {fault}. Call save, which "
                "needs none, or give memory_budget=",
                phase="stage",
            ) from fault

    # Staged, and written in the background.

    def stage(self, save: Save, planned: PlannedShare) -> StagedShare:
        """Copy a share; its `finish` is called from another thread."""
        save.call.at("staging")
        share = planned.share
        copied = self._copy_on_device(share)
        if copied is None:
            settle()
            planned = planned._replace(share=save.decide(share))
            return self._stage_in_keeper(save, planned) or self._stage_here(save, planned.share)
        spare = Share(share.layout, copied)

        def finish() -> WrittenShare:
            self._spare.wait()
            decided = save.decide(spare)
            return self._stage_here(save, decided, self._budget or BLOCKING_ARENA).finish()

        return StagedShare(share, finish)

    def _copy_on_device(self, share: Share) -> list[torch.Tensor] | None:
        """A copy of the tensors on their GPUs; None if the host should have it."""
        tensors, wanted = share.tensors, self._stage_on == "device"
        if not wanted and not (self._stage_on == "auto" and self._spare.fits(tensors)):
            return None
        try:
            return self._spare.take(tensors)
        except torch.cuda.OutOfMemoryError:
            if wanted:
                raise
            return None

    def _stage_in_keeper(self, save: Save, planned: PlannedShare) -> StagedShare | None:
        """Stage a share in memory that outlives this process; None without a keeper, or if it has
        no memory for it now. A restart should not find a marked step there."""
        share = planned.share
        whole = self._budget is None or self._budget >= share.nbytes
        if self._keeper is None or not whole or planned.mark is not None:
            return None
        from torchrelay.keeper.front import lend  # most checkpointers have none

        try:
            lent = lend(self._keeper, save.step, share, planned.outlined, save.deadline.left())
        except (EndpointError, CheckpointError, TimeoutError) as fault:
            logger.warning("step %d is saved without its keeper: %s", save.step, fault)
            return None
        if lent is None:
            return None

        def finish() -> WrittenShare:
            files, starts = share.files, lent.starts
            placed = [(n, 0, files[n].nbytes, starts[n]) for n in share.to_write]
            self.process.attach(lent.fds, lent.each, lent.nbytes, save.deadline.left())
            target = self._target(save, share)
            try:
                target.write_staged(placed)
            except BaseException:
                target.abort()
                raise
            return WrittenShare.of(share, target.finish())

        return StagedShare(share, finish, lent.release)

    def _stage_here(self, save: Save, share: Share, budget: int | None = None) -> StagedShare:
        share.hash_on_devices()
        arena = self._take_arena(share, budget or self._budget)
        self.process.attach(arena.fds, arena.each, arena.nbytes, save.deadline.left())
        return self._staged(save, share, arena, self._target(save, share))

    def _staged(
        self, save: Save, share: Share, arena: Arena, target: FileWriter | WriterSave
    ) -> StagedShare:
        """Copy a share through an arena, which is put back when everything is written."""
        pipeline = Pipeline(share, arena, target, save.deadline)
        pipeline.stage(WORKERS)
        share.check_unchanged()

        def finish() -> WrittenShare:
            written = pipeline.finish()
            self._arena = arena
            return WrittenShare.of(share, written)

        return StagedShare(share, finish)

    def _target(self, save: Save, share: Share) -> WriterSave:
        assert save.draft is not None
        draft = (self._store.url, save.step, save.draft.token)
        bar = Bar(save.progress, share.bytes_to_write)
        return self.process.begin(*draft, share.files, save.deadline, bar)

    def detach_after_fork(self) -> None:
        """In a child of a fork: forget memory and process, which stay the parent's."""
        self.process.detach_after_fork()
        if self._arena is not None:
            self._arena.detach_after_fork()
            self._arena = None

    def close(self) -> None:
        self.process.close()
        self._spare.free()
        if self._arena is not None:
            self._arena.close()
            self._arena = None
