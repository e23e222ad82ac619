"""torch's `_Checkpointer`, under its signatures: save, save in the background, load."""

from __future__ import annotations

import logging
import os
import threading
import uuid
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlanner, SavePlanner
from torch.distributed.checkpoint.staging import AsyncStager, DefaultStager, StagingOptions
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter

from torchrelay.dropin import _dcp_protocol as protocol
from torchrelay.dropin import torch_private as private
from torchrelay.dropin._dcp_protocol import Meeting
from torchrelay.errors import CheckpointError, ResourceError, UnsupportedTorchError, UsageError
from torchrelay.memory import threads
from torchrelay.state.checkpointable import keep_attributes
from torchrelay.state.torch_names import look_up

logger = logging.getLogger(__name__)

CheckpointId = str | os.PathLike[str]
_State = Callable[[], dict[str, Any]]


class TorchCheckpointer:
    """Saves and loads through any torch `StorageWriter` and `StorageReader`.

    Every rank of `process_group` (all ranks, where none is given) makes the same calls in the same
    order. `coordinator_rank` is a rank of that group: it makes the global plan and writes the
    metadata. With `no_dist`, or where torch.distributed is not initialized, the process works
    alone, and `process_group` and `coordinator_rank` mean nothing.

    One call runs at a time: each waits for an `async_save` before it. A failure on any rank is a
    `CheckpointError` on all: `rank` is the lowest that failed (in the group), the message names
    each one, `__cause__` is what it raised. Where ranks failed, it is torch's `CheckpointException`
    too, with its `failures`. A failed `async_save` is logged; if nothing has looked
    at its future by then, the next call raises it, and does nothing else.

    Values of a state that have `state_dict` and `load_state_dict` are saved and loaded through
    these, at the top level. A checkpoint that a torch reader loads can run code: read one that
    you do not trust by `torchrelay.dropin.stock_dcp.read_stock`.
    """

    def __init__(
        self,
        storage_writer: StorageWriter,
        storage_reader: StorageReader,
        *,
        process_group: dist.ProcessGroup | None = None,
        coordinator_rank: int = 0,
        no_dist: bool = False,
        load_planner: LoadPlanner | None = None,
        save_planner: SavePlanner | None = None,
    ) -> None:
        self.storage_writer = storage_writer
        self.storage_reader = storage_reader
        self.process_group = process_group
        self.coordinator_rank = coordinator_rank
        self.no_dist = no_dist
        self.load_planner = load_planner
        self.save_planner = save_planner
        self._one_at_a_time = threading.RLock()
        self._pending: _SaveFuture | None = None
        self._background_group: dist.ProcessGroup | None = None

    def save(
        self, state_dict: dict[str, Any], *, checkpoint_id: CheckpointId | None = None
    ) -> Metadata:
        """Save, and return when every rank has written and the checkpoint is complete.

        `checkpoint_id` resets the writer to another place, as in torch's `save`; it stays there.
        """

        def state() -> dict[str, Any]:
            _check(earlier)
            _reset(self.storage_writer, checkpoint_id)
            return _of_stateful(state_dict)

        with self._one_at_a_time:
            meeting, earlier = self._meeting(), self._settled()
            return protocol.save(meeting, state, self.storage_writer, self._save_planner())

    def async_save(
        self, state_dict: dict[str, Any], *, checkpoint_id: CheckpointId | None = None
    ) -> Future[Metadata]:
        """Copy the state, and save the copy in the background.

        Later changes of `state_dict` are not in the checkpoint. The writer makes the copy if it is
        an `AsyncStager`; else the copy is in CPU memory. The ranks use a gloo group of their own,
        so `process_group` may have any backend, and training may use it meanwhile. The program does
        not exit before the save has ended.

        A failure of this rank before the save began is raised here; other ranks find it in their
        futures.
        """
        with self._one_at_a_time:
            meeting, earlier = self._meeting(background=True), self._settled()
            fault: Exception | None = None
            staged: dict[str, Any] = {}
            try:
                _check(earlier)
                _reset(self.storage_writer, checkpoint_id)
                staged = _staged(self.storage_writer, _of_stateful(state_dict))
            except Exception as error:
                fault = error

            def state() -> dict[str, Any]:
                _check(fault)
                return staged

            future = self._pending = _SaveFuture()
            future.set_running_or_notify_cancel()
            run = partial(self._run_in_background, future, meeting, state)
            thread = threading.Thread(target=run, name="torchrelay-async-save")
            try:
                threads.begin(thread)
            except ResourceError:  # the other ranks save, and wait for this one
                run()
            if fault is None:
                return future
            # The other ranks must learn of it before the next call.
            failure = future.exception()
            raise failure if failure is not None else fault

    def load(
        self, state_dict: dict[str, Any], *, checkpoint_id: CheckpointId | None = None
    ) -> None:
        """Load into `state_dict`: tensors in place, other values replaced in their containers.

        A failure that came while values were read says in its message that the state is part old,
        part new. `checkpoint_id` resets the reader to another place, where it stays.
        """
        into: dict[str, Any] = {}

        def state() -> dict[str, Any]:
            _check(earlier)
            _reset(self.storage_reader, checkpoint_id)
            # In one order on all ranks: a `state_dict()` may be a collective.
            into.update(_of_stateful({key: state_dict[key] for key in sorted(state_dict)}))
            return into

        with self._one_at_a_time:
            meeting, earlier = self._meeting(), self._settled()
            planner = DefaultLoadPlanner() if self.load_planner is None else self.load_planner
            protocol.load(meeting, state, self.storage_reader, planner)
            for key, value in into.items():
                if isinstance(state_dict[key], Stateful):
                    state_dict[key].load_state_dict(value)
                else:
                    state_dict[key] = value

    def _save_planner(self) -> SavePlanner:
        return DefaultSavePlanner() if self.save_planner is None else self.save_planner

    def _settled(self) -> CheckpointError | None:
        """Wait for the save in the background; its failure, if no caller has seen it."""
        pending, self._pending = self._pending, None
        if pending is None or pending.seen:
            return None
        failure = pending.exception()
        if failure is None:
            return None
        error = CheckpointError(f"an earlier async_save failed: {failure}")
        error.__cause__ = failure
        return error

    def _run_in_background(self, future: _SaveFuture, meeting: Meeting, state: _State) -> None:
        try:
            result = protocol.save(meeting, state, self.storage_writer, self._save_planner())
        except BaseException as fault:
            logger.error("async_save failed: %s", fault, exc_info=fault)
            future.set_exception(fault)
        else:
            future.set_result(result)

    def _meeting(self, *, background: bool = False) -> Meeting:
        """The ranks of a call. In the background they have a group of their own, which the calls of
        training cannot get in between of."""
        if self.no_dist or not (dist.is_available() and dist.is_initialized()):
            if not self.no_dist:
                warnings.warn(
                    "torch.distributed is not initialized: the process saves and loads alone "
                    "(no_dist=True says that this is meant)",
                    stacklevel=3,
                )
            return Meeting(None, False, 0)
        group, leader = self.process_group, self.coordinator_rank
        if dist.get_rank(group) < 0:
            raise UsageError("this process is not a rank of the checkpointer's process group")
        if not 0 <= leader < (size := dist.get_world_size(group)):
            raise UsageError(f"coordinator_rank {leader} is not in a group of {size}")
        if background:
            if self._background_group is None:
                self._background_group = _own_group(group)
            group = self._background_group
        return Meeting(group, True, leader)


class _SaveFuture(Future[Metadata]):
    """A future that records whether a caller has seen its outcome."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = False

    def result(self, timeout: float | None = None) -> Metadata:
        found = super().exception(timeout)
        self.seen = True
        if found is not None:
            raise found
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        found = super().exception(timeout)
        self.seen = True
        return found


def _check(fault: Exception | None) -> None:
    if fault is not None:
        raise fault


def _reset(storage: StorageReader | StorageWriter, checkpoint_id: CheckpointId | None) -> None:
    if checkpoint_id is not None:
        storage.reset(checkpoint_id)


def _of_stateful(state: dict[str, Any]) -> dict[str, Any]:
    return {k: v.state_dict() if isinstance(v, Stateful) else v for k, v in state.items()}


def _staged(writer: StorageWriter, state: dict[str, Any]) -> dict[str, Any]:
    """A copy that is complete: torch's own call may return while a stager is still copying."""
    theirs = isinstance(writer, AsyncStager)
    stager: Any = writer if theirs else DefaultStager(StagingOptions(False, False, False, False))
    try:
        staged = stager.stage(state)
        whole: dict[str, Any] = staged.result() if isinstance(staged, Future) else staged
        if stager.should_synchronize_after_execute:
            stager.synchronize_staging()
        keep_attributes(state, whole)
        return whole
    finally:
        if not theirs:
            stager.close()


def _own_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """A new gloo group with the ranks, the order and the timeout of `group`.

    Every rank of `group` calls this, and no other has to. torch's `new_group` wants all ranks of
    the world; with `use_local_synchronization` it names the group after how many groups a rank is
    in, and hangs where these numbers differ. Here the first rank names it.
    """
    ranks = dist.get_process_group_ranks(group)
    name: list[Any] = [f"torchrelay-{uuid.uuid4().hex}"]
    dist.broadcast_object_list(name, src=ranks[0], group=group)
    found: tuple[dist.ProcessGroup, Any] = private.new_group_helper(
        len(ranks),
        dist.get_rank(group),
        ranks,
        c10d.Backend("gloo"),
        private.default_store(),
        name[0],
        timeout=_timeout(group),
    )
    # `new_group` records this for a group, and torch's collectives look it up.
    world = look_up(private.NAMES["world"])  # each time: torch may put another in its place
    world.pg_group_ranks[found[0]] = {rank: n for n, rank in enumerate(ranks)}
    return found[0]


def _timeout(group: dist.ProcessGroup | None) -> Any:
    """The timeout the caller gave the group; torch's default where it does not tell."""
    whole: Any = dist.group.WORLD if group is None else group
    try:
        find = private.backend_finder_of(whole)
        return private.timeout_of(find(private.device_types_of(whole)[0]).options)
    except (AttributeError, RuntimeError, UnsupportedTorchError):
        return c10d.default_pg_timeout
