"""Durable state: `Checkpointer`."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch

from torchrelay.checkpointer.export import SHARD_BYTES, export_step
from torchrelay.checkpointer.keep import Keep, checked_metrics, policy
from torchrelay.checkpointer.marks import OnReplicas
from torchrelay.checkpointer.mirror import Mirror, open_mirror
from torchrelay.checkpointer.preemption import Preemption
from torchrelay.checkpointer.saver import Saver, SaverHooks
from torchrelay.checkpointer.share_writer import Save, ShareWriter
from torchrelay.checkpointer.stored_steps import StoredSteps
from torchrelay.coordination.call import Call
from torchrelay.coordination.coordinator import Coordinator
from torchrelay.deadlines import Deadline, Timeout, seconds_of
from torchrelay.errors import UsageError
from torchrelay.loading.loader import LoadRequest
from torchrelay.memory.bounded import bounded
from torchrelay.options import (
    CheckpointerOptions,
    Verify,
    checked_options,
    checked_verify,
)
from torchrelay.owner import Owner, close_at_exit
from torchrelay.pending import Pending
from torchrelay.progress import ProgressCallback
from torchrelay.record.schema import Record
from torchrelay.results import Loaded, Report
from torchrelay.sources.source import Source
from torchrelay.steps import check_step
from torchrelay.stores.locate import open_store
from torchrelay.stores.retry import Retry
from torchrelay.stores.store import Store
from torchrelay.system import needs_linux

if TYPE_CHECKING:
    from torchrelay.keeper.front import Keeper

MIN_BUDGET = 16 << 20
MIN_SECONDS = 1.0  # that `close` leaves a copy to the mirror

Result = TypeVar("Result")


class Checkpointer:
    """Steps of a job's state in a directory or a bucket (`s3://`, `gs://`, `az://`).

    Ranks of `group` (by default all, where torch.distributed is initialized) save one state
    together: each makes the same calls in the same order. Without a group, or with `no_dist=True`,
    the process works alone.

    - `keep`: which steps to retain; a number means that many of the newest. Rank 0 removes older
      steps after a commit; other ranks may see them for a moment after `wait`.
    - `mirror`: a second place for the steps, as a `Mirror` or by its name. Rank 0 has a process
      copy committed steps there; nothing waits for it but `close`. `load` and `restore` take the
      newest step of both, `rollback` and `delete` remove from both.
    - `timeout` bounds each call, and an asynchronous save to its commit.
    - `keeper`: holds the states of `stage` in memory, between those that are saved. `save_async`
      stages there, too, so that a step outlives this process before it is written.
    - `replicas`: what a save does where parameters or optimizer states differ that ranks hold in
      common (`compare_ranks` says which those are). "warn": the step is saved and marked, and a
      restart prefers an earlier one; "raise": every rank raises `ReplicaError`, and nothing is
      saved; "keep": it is only in the report.
    - `options`: the rare ones, as `tr.options.CheckpointerOptions`.

    A context manager; `close` ends the writer process and frees the staged memory.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        keep: Keep | int | None = None,
        mirror: Mirror | str | os.PathLike[str] | None = None,
        keeper: Keeper | None = None,
        timeout: Timeout = 1800.0,
        group: Any = None,
        no_dist: bool = False,
        replicas: OnReplicas = "warn",
        options: CheckpointerOptions | None = None,
    ) -> None:
        self._ranks = Coordinator.of(group, "Checkpointer", str(root), no_dist=no_dist)
        with self._ranks.joining():
            self._timeout = seconds_of(timeout)
            chosen: CheckpointerOptions = checked_options(options, CheckpointerOptions)
            _check_choice("replicas", replicas, ("warn", "raise", "keep"))
            _check_arguments(keeper, chosen)
            self._owner = Owner("Checkpointer")
            self._keeper = keeper
            self._store: Store = open_store(root, timeout=self._timeout)
            read_only, ranks = chosen.read_only, self._ranks
            mirrored = open_mirror(mirror, self._store, ranks, self._timeout, copies=not read_only)
            self._stored = StoredSteps(self._store, policy(keep), mirrored)
            self._catalog = self._stored.catalog
            fitting = _fitting(keeper, self._ranks)
            writer = ShareWriter(self._store, chosen.memory_budget, chosen.stage_on, fitting)
            hooks = SaverHooks(self._stored.committed, self._stored.rollback)
            self._saver = Saver(self._ranks, self._catalog, writer, chosen, hooks, replicas)
            self._preemption = Preemption(self._ranks, chosen.signals, self._timeout)
            self._closed = False
            self._calls = threading.RLock()
            self._read_only = read_only
            if ranks.coordinates and not read_only:
                self._bounded("clean up", self._catalog.clean)
            close_at_exit(self)

    @property
    def url(self) -> str:
        """The directory or bucket with the steps."""
        return self._store.url

    @property
    def keeper(self) -> Keeper | None:
        """The keeper that it was given."""
        return self._keeper

    def source(self) -> Source:
        """The steps as a source for `recover` and `pull`: those of the mirror, too."""
        return self._stored.source()

    # Saving.

    def save(
        self,
        step: int,
        state: object,
        *,
        overwrite: bool = False,
        metrics: Mapping[str, float] | None = None,
        timeout: Timeout | None = None,
        progress: ProgressCallback | None = None,
    ) -> Report:
        """All ranks call it together: write a state; returns when the step is committed.

        A step is never overwritten unless `overwrite=True`, which writes a new one and exchanges
        them. If any rank fails, every rank raises, with the rank and file at fault, and nothing of
        the step remains. `metrics` (rank 0's) are numbers that go with the step: see `KeepBest`.
        """
        with self._exclusive(writes=True):
            save = self._save(step, overwrite, metrics, timeout, progress)
            return self._saver.save(save, state)

    def save_async(
        self,
        step: int,
        state: object,
        *,
        overwrite: bool = False,
        metrics: Mapping[str, float] | None = None,
        timeout: Timeout | None = None,
        on_busy: Literal["wait", "skip"] = "wait",
        on_error: Literal["raise", "warn"] = "raise",
        progress: ProgressCallback | None = None,
    ) -> Pending:
        """All ranks call it together: stage a state and return; another process writes it.

        The state may change as soon as this returns. `on_busy`: whether to wait or to skip this
        save while another one is being written. `on_error`: a failure that no caller has seen in
        the `Pending` is raised by the next call or by `close` ("raise"), or is only logged and
        counted in `failures` ("warn").
        """
        needs_linux("save_async")
        with self._exclusive(writes=True):
            _check_choice("on_busy", on_busy, ("wait", "skip"))
            _check_choice("on_error", on_error, ("raise", "warn"))
            save = self._save(step, overwrite, metrics, timeout, progress)
            skip, quiet = on_busy == "skip", on_error == "warn"
            return self._saver.save_async(save, state, self, skip=skip, quiet=quiet)

    def _save(
        self,
        step: int,
        overwrite: bool,
        metrics: Mapping[str, float] | None,
        timeout: Timeout | None,
        progress: ProgressCallback | None,
    ) -> Save:
        step, numbers = check_step(step), checked_metrics(metrics)
        call, deadline = self._ranks.call("save", step), self._deadline(timeout)
        return Save(step, overwrite, call, deadline, progress, numbers)

    def stage(self, step: int, state: object, *, timeout: Timeout | None = None) -> Pending:
        """All ranks call it together: stage a state in the keeper, and write nothing.

        See `Keeper.stage`."""
        if self._keeper is None:
            raise UsageError("stage needs a keeper: Checkpointer(..., keeper=tr.Keeper(job))")
        return self._keeper.stage(step, state, timeout=timeout)

    def prepare(self, state: object) -> int:
        """All ranks call it together: have memory and process ready for `save_async`.

        The first save is then as short as the later ones. Returns the bytes that this rank will
        write."""
        with self._exclusive(writes=True):
            return self._saver.prepare(self._deadline(None), state)

    def wait(self, timeout: Timeout | None = None) -> None:
        """Wait until no save is in progress; raises the failure of the last one."""
        self._owner.check()
        if self._saver.pending is not None:
            self._saver.pending.result(timeout)

    def reached_preemption(self, step: int) -> bool:
        """All ranks call it once for each step: True if the job was asked to stop.

        Then save the state, and end the loop. Ranks name the same steps. A signal (SIGTERM, or
        those of `options.signals`) to any rank makes it return True on all ranks from the same step
        on, a step or two after they have learned of it, which takes a second at most. It waits for
        no other rank, and uses the group's store at most once a second until then. Once a rank was
        asked to stop it waits for the store: `StorageTimeoutError` if that does not answer within
        `timeout`, or `CheckpointError` if it is lost. The other ranks may stop at that step, so do
        not train another one: call it again for the same step, or end the job.

        From its first call on, the signal does nothing else. `close` restores its former effect.
        """
        self._owner.check()
        step = check_step(step)
        self._check_open()
        return self._preemption.reached(step)

    @property
    def failures(self) -> int:
        """The number of asynchronous saves of this checkpointer that have failed."""
        return self._saver.failures

    @property
    def mirror_failures(self) -> int:
        """The number of copies to the mirror that have failed; 0 on ranks that copy none."""
        return self._stored.mirror_failures

    # Loading.

    def load(
        self,
        into: object = None,
        *,
        step: int | None = None,
        key: str | None = None,
        include: str | Iterable[str] = (),
        strict: bool = True,
        verify: Verify = True,
        atomic: bool = True,
        device: torch.device | str | None = None,
        timeout: Timeout | None = None,
        progress: ProgressCallback | None = None,
    ) -> Loaded:
        """All ranks call it together: read a step, into the caller's tensors or as a new state.

        Without `step` it is the newest that verifies: a damaged one is skipped with a warning,
        unless the mirror has its bytes. A step whose replicas differ is taken if there is no other.
        Distributed tensors are resharded for the mesh and placements of `into`, whatever they were
        when saved; without `into` they come whole, on `device`.

        `key` selects a subtree ("model"): `into` and the returned state are what is below it.
        `include` has patterns of dotted paths ("*.weight"), below `key` if that is given.

        `atomic=True` reads a local step twice: first to check every digest, then to write into the
        caller's tensors, without memory for a second copy. So `into` is old or new. `atomic=False`
        reads once and raises `TornStateError` if it cannot finish. `verify` is described in
        `torchrelay.options`.
        """
        request = LoadRequest(
            into,
            step,
            strict=strict,
            key=key,
            include=include,
            verify=bool(checked_verify(verify)),
            atomic=atomic,
            device=device,
            progress=progress,
        )
        with self._exclusive():
            call, deadline = self._reading("load", timeout)
            return self._stored.load(self._ranks, call, request, deadline)

    def restore(
        self,
        state: object,
        *,
        key: str | None = None,
        include: str | Iterable[str] = (),
        strict: bool = True,
        verify: Verify = True,
        atomic: bool = True,
        timeout: Timeout | None = None,
        progress: ProgressCallback | None = None,
    ) -> int | None:
        """All ranks call it together: bring the newest step back into `state`, on all of them.

        Returns the step; None on every rank where there is none, which is a first start. Rank 0
        says which steps there are, and waits for ranks whose file system shows them later. Objects,
        tensors and values of `state` are written in place, as by `load`, whose arguments these are.
        Raises `RecoveryError` where steps exist, or something looks like one, and none can be used.
        """
        request = LoadRequest(
            state,
            key=key,
            include=include,
            strict=strict,
            verify=bool(checked_verify(verify)),
            atomic=atomic,
            progress=progress,
        )
        if state is None:
            raise UsageError("restore fills a state that exists: give it, or call load()")
        with self._exclusive():
            call, deadline = self._reading("restore", timeout)
            return self._stored.restore(self._ranks, call, request, deadline)

    def _reading(self, verb: str, timeout: Timeout | None) -> tuple[Call, Deadline]:
        """A call that reads, after its first round: no rank has a failed save unseen."""
        call, deadline = self._ranks.call(verb), self._deadline(timeout)
        # In a round: a failure that another rank has seen may be unseen here.
        call.together("begin", self._saver.raise_unseen, deadline)
        return call, deadline

    # Managing steps.

    def steps(self) -> list[int]:
        """Committed steps, in ascending order. Does not read their bytes: see `verify`. This call
        and those that look at one step leave the mirror out."""
        return self._bounded("list the steps", self._catalog.steps)

    def latest(self) -> int | None:
        """The newest committed step that is intact, as this rank sees it: see `holds`. Another rank
        may not see it yet; all decide together whether to resume with `restore`."""
        return self._bounded("look for the newest step", self._catalog.latest)

    def record(self, step: int) -> Record:
        """The commit record of a step: its contents and where they are; `DamagedError` if it is
        broken."""
        step = check_step(step)
        return self._bounded("read the commit record", partial(self._catalog.record, step))

    def verify(self, step: int | None = None, *, progress: ProgressCallback | None = None) -> int:
        """Read every byte of a step (the newest, by default) and check every digest.

        Returns the step. Raises `DamagedError` with the first fault.
        """
        if step is not None:
            step = check_step(step)
        deadline = Deadline(self._timeout)
        patience = Retry(lambda: deadline.left() - min(2.0, deadline.seconds / 3))
        return self._bounded("verify", lambda: self._catalog.verify(step, progress, patience))

    def holds(self, step: int) -> bool:
        """True if a step's commit record is intact and its files have the recorded sizes."""
        step = check_step(step)
        return self._bounded("look at a step", partial(self._catalog.holds, step))

    def export_hf(
        self,
        target: str | os.PathLike[str],
        *,
        step: int | None = None,
        key: str | None = "model",
        shard_bytes: int | None = SHARD_BYTES,
    ) -> list[str]:
        """Write the model of a step as Hugging Face loaders want it: `model.safetensors`, or
        several files of at most about `shard_bytes` with their index. One process does it, with a
        few MiB of memory. It loads the whole model only where tensors of it are views of others or
        complex conjugates, or where the step is damaged and another one has to be found.

        `key` is the subtree with the model; None: the state is the model. Returns the names of the
        files. The directory must not exist yet.
        """
        self._owner.check()
        deadline = Deadline(self._timeout)
        return export_step(
            self.source(), target, deadline, step=step, key=key, shard_bytes=shard_bytes
        )

    def delete(self, step: int) -> None:
        """Remove a step, from the mirror, too. Call it on one rank: with a mirror, rank 0."""
        self._check_writable()
        step = check_step(step)
        self._bounded("delete", partial(self._stored.delete, step))

    def rollback(self, step: int, *, timeout: Timeout | None = None) -> list[int]:
        """All ranks call it together: delete every step above `step`; returns them.

        The run resumes from there. Each is deleted as a whole before the next, the newest first, so
        a rollback that is interrupted is one to a later step: call it again. Steps of the mirror
        are deleted before those of the root.
        """
        with self._exclusive(writes=True):
            step = check_step(step)
            return self._saver.rollback(step, self._deadline(timeout))

    # Checks and bounds.

    @contextmanager
    def _exclusive(self, *, writes: bool = False) -> Iterator[None]:
        """Within: one call at a time, of an open checkpointer."""
        self._owner.check()
        with self._calls:
            self._check_open()
            if writes:
                self._check_writable()
            yield

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError("this checkpointer is closed: make another one")

    def _check_writable(self) -> None:
        if self._read_only:
            raise UsageError("this checkpointer is read-only: make one without options.read_only")

    def _deadline(self, timeout: Timeout | None) -> Deadline:
        return Deadline(self._timeout if timeout is None else timeout)

    def _bounded(self, what: str, act: Callable[[], Result]) -> Result:
        """Storage that does not answer is left behind when the time for a call is over."""
        self._owner.check()
        return bounded(act, self._timeout, what, file=self.url)

    # The end.

    def close(self) -> None:
        """Wait for the save in progress, end the writer process, free the staged memory. A copy to
        the mirror is waited for, too, for what is left of `timeout`; a later one continues it.

        Raises the failure of an asynchronous save that no caller has seen. Does nothing in a child
        of a fork.
        """
        if not self._owner.here:
            return
        with self._calls:
            if self._closed:
                return
            self._closed = True
            deadline = Deadline(self._timeout)
            try:
                self._saver.close(self._timeout)
            finally:
                self._preemption.close()
                self._stored.close(max(MIN_SECONDS, deadline.left()))

    def _detach_after_fork(self) -> None:
        """Called in a child of a fork, which has no Checkpointer: what it had is the parent's.

        No lock is taken: a thread of the parent may have held it, and is not here to release it.
        """
        self._preemption.detach_after_fork()
        self._saver.detach_after_fork()
        self._stored.detach_after_fork()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, kind: object, fault: object, trace: object) -> None:
        # The block's own error is the one to show; that of a save is logged.
        with nullcontext() if kind is None else suppress(Exception):
            self.close()


def _fitting(keeper: Keeper | None, ranks: Coordinator) -> Keeper | None:
    """A keeper that stages for these ranks, and no other."""
    if keeper is None:
        return None
    from torchrelay.keeper.front import stages_for  # most checkpointers have none

    return keeper if stages_for(keeper, ranks.rank, ranks.world) else None


def _check_arguments(keeper: object, chosen: CheckpointerOptions) -> None:
    memory_budget, file_bytes = chosen.memory_budget, chosen.file_bytes
    if keeper is not None and not callable(getattr(keeper, "stage", None)):
        raise UsageError(f"keeper is a Keeper, as tr.Keeper(job) makes it, not {keeper!r}")
    if memory_budget is not None and memory_budget < MIN_BUDGET:
        raise UsageError(f"memory_budget is at least {MIN_BUDGET} bytes, not {memory_budget}")
    _check_choice("stage_on", chosen.stage_on, ("auto", "host", "device"))
    if chosen.full_every is not None and chosen.full_every < 1:
        raise UsageError(f"full_every is a positive number or None, not {chosen.full_every}")
    if file_bytes is not None and file_bytes < 1:
        raise UsageError(f"file_bytes is a positive number or None, not {file_bytes}")


def _check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        shown = " or ".join(f"{choice!r}" for choice in choices)
        raise UsageError(f"{name} is {shown}, not {value!r}")
