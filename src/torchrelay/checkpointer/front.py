"""Durable state: `Checkpointer`."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import msgspec
import torch

from torchrelay.checkpointer.arguments import check_keeper, check_sizes, checked_retries, planners
from torchrelay.checkpointer.catalog import Catalog
from torchrelay.checkpointer.export import SHARD_BYTES, export_hf
from torchrelay.checkpointer.keep import Keep, policy
from torchrelay.checkpointer.loader import Loaded, Loader, Wanted, patience
from torchrelay.checkpointer.saves.last_save import LastSave, agreed_step
from torchrelay.checkpointer.saves.pending import Pending, Saved, logger
from torchrelay.checkpointer.saves.saver import Saver
from torchrelay.checkpointer.saves.step_draft import GRACE, Save
from torchrelay.deadlines import Deadline, Timeout, seconds_of
from torchrelay.errors import CheckpointError, StorageTimeoutError, UsageError
from torchrelay.memory.bounded import bounded
from torchrelay.owner import Owner, enrol
from torchrelay.progress import ProgressCallback
from torchrelay.record.checkpoint.schema import Checkpoint
from torchrelay.steps import check_step
from torchrelay.stores.locate import open_store
from torchrelay.stores.seam import Store
from torchrelay.stores.shares.layout import FILE_BYTES
from torchrelay.transports.group.assembly import Assembly
from torchrelay.version import __version__

if TYPE_CHECKING:
    from torch.distributed.checkpoint.planner import LoadPlanner, SavePlanner

    from torchrelay.endpoint.publishing import Published
    from torchrelay.keeper.front import Keeper

Result = TypeVar("Result")


class Checkpointer:
    """Steps of a job's state in a directory or a bucket (`s3://`, `gs://`, `az://`).

    Ranks of `group` (by default all, where torch.distributed is initialized) save one state
    together: each makes the same calls in the same order. Without a group, or with `group=False`, a
    process is on its own.

    - `keep` says which steps stay; a number means that many of the newest. The coordinator removes
      older ones once a new one is committed; other ranks may see them for a moment after `wait`.
    - `planner`: a `SavePlanner` and / or a `LoadPlanner` of torch, to be used in place of the
      default ones. They see the state as a flat dict of tensors by name.
    - `timeout` bounds each call, and an asynchronous save to its commit.
    - `on_busy`: what `save_async` does while another save is being written: "wait" or "skip".
    - `on_error`: whether a failed `save_async` that nobody asked about is raised by the next call
      ("raise"), or logged and counted in `failures` alone ("warn").
    - `retries`: how often such a save is tried again from what it staged; by default 2 times with
      "warn", and not with "raise".
    - `memory_budget` bounds the staged copy of `save_async` in bytes; without, it is one copy.
    - `stage`: where `save_async` copies a state to while the caller waits. "device": GPU tensors to
      a spare copy in GPU memory, which stays there for the next save; "host": to host memory;
      "auto": to the device where that copy fits beside what training has used at its peak.
    - `save_on_signal`: a function that returns (step, state); on SIGTERM that is saved, after the
      save under way, and then the signal does what it would have done. A process on its own does
      it at once, ranks of a group at the `tick`, `save` or `save_async` that they agree on.
    - `read_only`: nothing is cleaned up at the start, and saving and deleting are refused.
    - `file_bytes`: how large a data file may get before tensors go to another; None: any size.
    - `keeper`: where `stage` keeps states in memory, between those that are saved; `save_async`
      stages there too, so that the step outlives this process before it is written.

    A context manager; `close` ends the writer process and frees the arena.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        group: Any = None,
        keep: Keep | int | None = None,
        planner: SavePlanner | LoadPlanner | Iterable[SavePlanner | LoadPlanner] | None = None,
        timeout: Timeout = 1800.0,
        on_busy: Literal["wait", "skip"] = "wait",
        on_error: Literal["raise", "warn"] = "raise",
        retries: int | None = None,
        memory_budget: int | None = None,
        stage: Literal["auto", "host", "device"] = "auto",
        save_on_signal: Callable[[], tuple[int, Any]] | None = None,
        signals: tuple[signal.Signals, ...] = (signal.SIGTERM,),
        file_bytes: int | None = FILE_BYTES,
        read_only: bool = False,
        keeper: Keeper | None = None,
    ) -> None:
        self._all = Assembly.of(group, "checkpointer")
        with self._all.joining():
            self._timeout = seconds_of(timeout)
            retries = checked_retries(retries, on_busy, on_error, stage)
            check_sizes(memory_budget, file_bytes)
            check_keeper(keeper)
            self._owner = Owner("Checkpointer")
            self._keeper = keeper
            self._on_busy = on_busy
            self._on_error = on_error
            self._store: Store = open_store(root, timeout=self._timeout)
            self._steps = Catalog(self._store, policy(keep))
            save_planner, load_planner = planners(planner)
            self._loader = Loader(self._shelf, self._all, load_planner)
            self._saver = Saver(
                self._store,
                self._all,
                planner=save_planner,
                memory_budget=memory_budget,
                file_bytes=file_bytes,
                stage=stage,
                retries=retries,
                version=__version__,
                keeper=keeper,
            )
            self._closed = False
            self._calls = threading.RLock()
            self._read_only = read_only
            if self._all.coordinates and not read_only:
                self._bounded("clean up", self._shelf.clean)
            self._last = LastSave(self, self._all, save_on_signal, signals, self._timeout)
            enrol(self)

    @property
    def url(self) -> str:
        """Where the steps are."""
        return self._store.url

    # Saving.

    def save(
        self,
        step: int,
        state: object,
        *,
        overwrite: bool = False,
        timeout: Timeout | None = None,
        progress: ProgressCallback | None = None,
    ) -> Saved:
        """Write a state; returns when the step is committed on the medium.

        A step is never overwritten unless `overwrite=True`, which writes beside it and swaps. Where
        any rank fails, every rank raises, with the rank and file at fault, and nothing of the step
        remains.
        """
        with self._exclusive():
            save = self._new_save(step, overwrite, timeout, progress)
            last = self._settle(save, lambda: self._shelf.check_order(step, overwrite=overwrite))
            with self._last.after(last):
                saved = self._saver.save(save, state)
                self._prune(save)
            return saved

    def save_async(
        self,
        step: int,
        state: object,
        *,
        overwrite: bool = False,
        timeout: Timeout | None = None,
        on_busy: Literal["wait", "skip"] | None = None,
        progress: ProgressCallback | None = None,
    ) -> Pending:
        """Stage a state and return; a process beside this one writes it.

        The state may change as soon as this returns. A failure that nobody learned of from the
        `Pending` is logged, and raised by the next call or by `close`.
        """
        with self._exclusive():
            save = self._new_save(step, overwrite, timeout, progress)
            if (on_busy or self._on_busy) == "skip" and self._busy(save):
                return Pending(step, skipped=True)
            pending = Pending(step, quiet=self._on_error == "warn")
            check = partial(self._shelf.check_order, step, overwrite=overwrite)
            try:
                last = self._settle(save, check)
            except CheckpointError as fault:
                if not pending.takes(fault):
                    raise
                self._saver.pending = pending
                self._saver.failures += 1
                pending.end(None, fault)
                return pending
            with self._last.after(last):
                self._saver.save_async(save, state, pending, lambda: self._prune(save))
            return pending

    def stage(self, step: int, state: object, *, timeout: Timeout | None = None) -> Published:
        """Keep a state in the memory of the keeper, and write nothing: see `Keeper.stage`."""
        if self._keeper is None:
            raise UsageError("stage needs a keeper: Checkpointer(..., keeper=tr.Keeper(job))")
        return self._keeper.stage(step, state, timeout=timeout)

    def prepare(self, state: object) -> int:
        """Allocate and touch the memory that `save_async` of such a state needs, and start the
        writer process, so that the first save is as short as the later ones. Returns the bytes
        that this rank will write. All ranks call it together."""
        with self._exclusive():
            save = self._new_save(0, False, None)
            self._settle(save)
            return self._saver.prepare(save, state)

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        """One call at a time, and none in the middle of another by way of a signal."""
        self._owner.check()
        with self._calls, self._last.held():
            yield

    def wait(self, timeout: Timeout | None = None) -> None:
        """Until no save is under way; raises what went wrong with the last one."""
        self._owner.check()
        if self._saver.pending is not None:
            self._saver.pending.result(timeout)

    def _new_save(
        self,
        step: int,
        overwrite: bool,
        timeout: Timeout | None,
        progress: ProgressCallback | None = None,
    ) -> Save:
        if self._closed:
            raise UsageError("this checkpointer is closed")
        self._check_writable()
        check_step(step)
        deadline = Deadline(self._timeout if timeout is None else timeout)
        return Save(step, overwrite, self._all.call(f"step {step}"), deadline, progress)

    def _busy(self, save: Save) -> bool:
        """Whether any rank still writes; all ranks come to the same answer. A save that is to be
        the last one is not skipped."""
        pending = self._saver.pending
        mine = b"busy" if pending is not None and not pending.done() else b""
        mine = b"last" if self._last.asked else mine
        heard = save.call.round(
            "begin", lambda: mine, lambda said: [max(said)] * len(said), save.deadline
        )
        return heard == b"busy"

    def _settle(self, save: Save, check: Callable[[], None] = lambda: None) -> bool:
        """Wait for the save under way, and raise its failure if nobody has seen it. The ranks name
        the same step, and the coordinator's check passes. Returns whether any rank has a signal."""

        def mine() -> bytes:
            if self._saver.pending is not None:
                self._saver.pending.settle(save.deadline.left())
            return msgspec.msgpack.encode((save.step, self._last.asked))

        def decide(said: list[bytes]) -> list[bytes]:
            words = [msgspec.msgpack.decode(data, type=tuple[int, bool]) for data in said]
            agreed_step([step for step, _ in words])
            self._bounded("list the steps", check, save.deadline.early())
            return [msgspec.msgpack.encode(any(signalled for _, signalled in words))] * len(said)

        save.call.at("waiting for the save before")
        heard = save.call.round("begin", mine, decide, save.deadline)
        return msgspec.msgpack.decode(heard, type=bool)

    def tick(self, step: int) -> bool:
        """Tell that an iteration is over; returns whether the loop should end.

        Called by every rank once for each iteration, between two of them, by a job that has
        `save_on_signal`. When any rank has a signal, all ranks make the last save at the same
        tick, of the state that `save_on_signal` returns there. On ranks that have a signal it then
        does what it did before; on the others, and from then on, `tick` returns True.

        It waits for no other rank until then, and asks the group's store once a second at most.
        """
        self._owner.check()
        check_step(step)
        if self._closed:
            raise UsageError("this checkpointer is closed")
        return self._last.tick()

    @property
    def stopped(self) -> bool:
        """Whether the last save was made, or tried, because of a signal to any rank."""
        return self._last.stopped

    @property
    def failures(self) -> int:
        """How many asynchronous saves of this checkpointer have failed, retries included."""
        return self._saver.failures

    # Loading.

    def load(
        self,
        into: object = None,
        *,
        step: int | None = None,
        strict: bool = True,
        only: str | Iterable[str] = (),
        verify: bool = True,
        atomic: bool = True,
        device: torch.device | str | None = None,
        timeout: Timeout | None = None,
        progress: ProgressCallback | None = None,
    ) -> Loaded:
        """Read a step: into the caller's tensors, or as a new state (`into=None`).

        Without `step` it is the newest that verifies: one that is damaged is warned about and
        passed over. Distributed tensors are cut anew for the mesh and placements of `into`,
        whatever they were when saved; without `into` they come whole, on `device`.

        With `atomic`, every digest is checked before anything is written, so `into` is old or
        new. `atomic=False` reads once instead of twice and raises `TornStateError` if it cannot
        finish. `verify=False` checks no digests. `only` has patterns of dotted paths ("model.*").
        """
        with self._exclusive():
            if self._closed:
                raise UsageError("this checkpointer is closed")
            if step is not None:
                check_step(step)
            wanted = Wanted.of(
                into,
                step,
                strict=strict,
                only=only,
                verify=verify,
                atomic=atomic,
                device=device,
                progress=progress,
            )
            call = self._all.call()
            deadline = Deadline(self._timeout if timeout is None else timeout)
            # In a round: another rank may have asked for the failure that this one was not told.
            call.round("begin", self._raise_untold, lambda said: said, deadline)
            return self._loader.load(call, wanted, deadline)

    # Looking after what is there.

    @property
    def _shelf(self) -> Catalog:
        self._owner.check()
        return self._steps

    def steps(self) -> list[int]:
        """Committed steps, in ascending order. Says nothing about their bytes: see `verify`."""
        return self._bounded("list the steps", self._shelf.steps)

    def latest(self) -> int | None:
        """The newest committed step whose commit record and file sizes hold."""
        return self._bounded("look for the newest step", self._shelf.latest)

    def record(self, step: int) -> Checkpoint:
        """The commit record of a step: what is in it and where; `DamagedError` if it is broken."""
        check_step(step)
        return self._bounded("read the commit record", lambda: self._shelf.record(step))

    def verify(self, step: int | None = None, *, progress: ProgressCallback | None = None) -> int:
        """Read every byte of a step (the newest, by default) and check every digest.

        Returns the step; `DamagedError` says what is wrong with it.
        """
        if step is not None:
            check_step(step)
        trying = patience(Deadline(self._timeout))
        return self._bounded("verify", lambda: self._shelf.verify(step, progress, trying))

    def holds(self, step: int) -> bool:
        """Whether a step's commit record is whole and its files have the sizes it says."""
        check_step(step)
        return self._bounded("look at a step", lambda: self._shelf.holds(step))

    def export_hf(
        self,
        target: str | os.PathLike[str],
        *,
        step: int | None = None,
        under: str | None = "model",
        shard_bytes: int | None = SHARD_BYTES,
    ) -> list[str]:
        """Write the model of a step as Hugging Face loaders want it: `model.safetensors`, or
        several files of at most about `shard_bytes` with their index. One process does it.

        `under` is the key of the state that has the model; None: the state is the model. Returns
        the names of the files. The directory must not exist yet.
        """
        if step is not None:
            check_step(step)
        only = (f"{under}.*",) if under is not None else ()
        wanted = Wanted(None, step, True, only, True, True, None, None)
        alone = Assembly(None, "export")
        loader = Loader(self._shelf, alone, None)
        deadline = Deadline(self._timeout)
        state = loader.load(alone.call(), wanted, deadline).state
        model = state if under is None else state.get(under)
        return export_hf(model, target, deadline.left(), shard_bytes=shard_bytes)

    def delete(self, step: int) -> None:
        """Remove a step. One rank does it."""
        self._check_writable()
        check_step(step)
        self._bounded("delete", lambda: self._shelf.delete(step))

    def rollback(self, step: int, *, timeout: Timeout | None = None) -> list[int]:
        """Set aside every step above `step`, so that the run goes on from there; returns them.

        They are steps no longer: `steps`, `latest`, `load` and retention do not see them. Their
        bytes stay until `remove_aside`. Each is set aside whole and for good before the next, the
        newest first, so a rollback that is interrupted is one to a later step: call it again. All
        ranks call it together.
        """
        with self._exclusive():
            save = self._new_save(step, False, timeout)
            self._settle(save)

            def decide(said: list[bytes]) -> list[bytes]:
                act = partial(self._shelf.rollback, step)
                newer = self._bounded("set steps aside", act, save.deadline.early())
                return [msgspec.msgpack.encode(newer)] * len(said)

            heard = save.call.round("rollback", lambda: b"", decide, save.deadline)
            return msgspec.msgpack.decode(heard, type=list[int])

    def aside(self) -> list[str]:
        """Names of the steps that were set aside."""
        return self._bounded("list what was set aside", self._shelf.aside)

    def remove_aside(self, name: str) -> None:
        """Remove a step that was set aside, by its name in `aside`. One rank does it."""
        self._check_writable()
        self._bounded("remove", lambda: self._shelf.remove_aside(name))

    def _check_writable(self) -> None:
        if self._read_only:
            raise UsageError("this checkpointer is read-only")

    def _prune(self, save: Save) -> None:
        if self._all.coordinates:
            try:
                act = partial(self._shelf.prune, save.step)
                self._bounded("remove old steps", act, max(GRACE, save.deadline.left()))
            except StorageTimeoutError as late:  # the step is committed
                logger.warning("%s", late)

    def _bounded(
        self, what: str, act: Callable[[], Result], seconds: float | None = None
    ) -> Result:
        """Storage that does not answer is left behind at the end of the time for a call."""
        return bounded(act, self._timeout if seconds is None else seconds, what, file=self.url)

    # The end.

    def _raise_untold(self) -> bytes:
        if self._saver.pending is not None and (fault := self._saver.pending.untold()) is not None:
            raise fault
        return b""

    def close(self) -> None:
        """Wait for the save under way, end the writer process, free the arena.

        Raises the failure of an asynchronous save that nobody has learned of. Does nothing in a
        child of a fork.
        """
        if not self._owner.here:
            return
        with self._exclusive():
            if self._closed:
                return
            self._closed = True
            try:
                if self._saver.pending is not None:
                    self._saver.pending.settle(self._timeout)
            finally:
                self._saver.close()
                self._last.close()

    def _forsake(self) -> None:
        """Called in a child of a fork, which has no Checkpointer: let go of what is the parent's.

        No lock is taken: whoever held it in the parent is not here to release it.
        """
        self._last.forsake()
        self._saver.forsake()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, kind: object, fault: object, trace: object) -> None:
        if kind is None:
            self.close()
            return
        with suppress(Exception):  # the block's own error is the one to show; this one is logged
            self.close()
