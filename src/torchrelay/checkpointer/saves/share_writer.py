"""One rank's share of a step, written: from where it lies, or from a copy that is staged first.

A copy is staged in a keeper, which outlives this process, in the memory of a GPU, or in an arena of
this process; the writer process writes what is staged on the host.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch

from torchrelay.checkpointer.saves.pending import logger
from torchrelay.checkpointer.saves.staging import (
    HereTarget,
    Pipeline,
    ProcessTarget,
    arena_bytes,
    in_parts,
    write_staged,
)
from torchrelay.checkpointer.saves.step_draft import Save
from torchrelay.errors import CheckpointError, EndpointError, StorageTimeoutError
from torchrelay.memory.arena import Arena
from torchrelay.memory.bounded import bounded
from torchrelay.memory.gpu.side import settle
from torchrelay.memory.gpu.spare import DeviceCopy
from torchrelay.memory.pages import PAGE
from torchrelay.memory.pool import cores
from torchrelay.progress import Bar
from torchrelay.stores.seam import Store
from torchrelay.stores.shares import plans
from torchrelay.stores.shares.drafting import Share, Written
from torchrelay.stores.writer.client import WriterProcess
from torchrelay.stores.writer.ranges import WORKERS

if TYPE_CHECKING:
    from torchrelay.keeper.front import Keeper

BLOCKING_ARENA = 1 << 30  # bytes that a blocking save stages through, where it must stage


class StagedShare(NamedTuple):
    """What this rank is to write, and what returns when it is written."""

    share: Share
    finish: Callable[[], list[bytes]]
    again: Callable[[], list[bytes]] | None  # the same for another draft, if all is still staged
    release: Callable[[], None] = lambda: None  # called in the end, however it ends


class ShareWriter:
    """Writes shares of one `Checkpointer`, one at a time. Keeps the arena, the spare copy and the
    writer process between them. `where`: the `stage` that the caller chose."""

    def __init__(
        self, store: Store, memory_budget: int | None, where: str, keeper: Keeper | None
    ) -> None:
        self._store = store
        self._budget = memory_budget
        self._where = where
        self._keeper = keeper
        self._arena: Arena | None = None
        self.process = WriterProcess()
        self._spare = DeviceCopy()

    def prepare(self, share: Share, drafted: plans.Drafted) -> None:
        """Have memory and process ready for shares like this one."""
        if self._keeper is not None:  # its memory is had by staging
            self.process.start()
            return
        budget = self._budget
        if self._copy_on_device(drafted) is not None:
            self._spare.wait()
            budget = budget or BLOCKING_ARENA
        arena = self._take_arena(share, budget)
        self.process.start()
        self.process.attach(arena.fds, arena.each, arena.nbytes)
        self._arena = arena

    def write(self, save: Save, share: Share) -> Written:
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
            pipeline = Pipeline(share, arena, target[0], save.deadline, bar)
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

    def stage(self, save: Save, share: Share, drafted: plans.Drafted) -> StagedShare:
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

        return StagedShare(share, finish, again=finish)

    def _copy_on_device(self, drafted: plans.Drafted) -> list[torch.Tensor] | None:
        """A spare copy of the tensors on their GPUs; None where the host is to have it."""
        wanted = self._where == "device"
        if not wanted and not (self._where == "auto" and self._spare.fits(drafted.tensors)):
            return None
        try:
            return self._spare.take(drafted.tensors)
        except torch.cuda.OutOfMemoryError:
            if wanted:
                raise
            return None

    def _stage_in_keeper(self, save: Save, share: Share) -> StagedShare | None:
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
            target = ProcessTarget(self.process, lent, place, share.files, save.deadline)
            placed = [
                (index, 0, file.nbytes, start)
                for index, (file, start) in enumerate(zip(share.files, lent.starts, strict=True))
            ]
            bar = Bar(save.progress, share.nbytes)
            return write_staged(target, placed, share.files, save.deadline, bar)

        return StagedShare(share, write, write, lent.release)

    def _stage_here(self, save: Save, share: Share, budget: int | None) -> StagedShare:
        share.hash_on_devices()
        arena = self._take_arena(share, budget)

        def target() -> ProcessTarget:
            place = (self._store.url, save.step, save.token)
            return ProcessTarget(self.process, arena, place, share.files, save.deadline)

        bar = Bar(save.progress, share.nbytes)
        pipeline = Pipeline(share, arena, target(), save.deadline, bar)
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

        return StagedShare(share, finish, again if pipeline.holds_all else None)

    def forsake(self) -> None:
        """In a child of a fork: let go of memory and process."""
        self.process.forsake()
        if self._arena is not None:
            self._arena.forsake()
            self._arena = None

    def close(self) -> None:
        self.process.close()
        self._spare.free()
        if self._arena is not None:
            self._arena.close()
            self._arena = None
