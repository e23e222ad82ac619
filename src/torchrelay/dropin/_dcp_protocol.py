"""The steps in which torch's DCP saves and loads, over any torch storage and planner.

Each rank does its part, and all meet after it: `CheckpointError` on one is `CheckpointError` on
all. Work that can fail before the first meeting, such as a `state_dict()` that raises, is part of
that step, so that no rank waits for one that has left.
"""

from __future__ import annotations

import copy
import inspect
import logging
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter

from torchrelay.dcp.chunks import check_chunks
from torchrelay.dropin import torch_private as private
from torchrelay.errors import CheckpointError, RelayError

logger = logging.getLogger(__name__)
Meeting = private.DistWrapper
_T = TypeVar("_T")


def save(
    meeting: Meeting,
    state: Callable[[], dict[str, Any]],
    writer: StorageWriter,
    planner: SavePlanner,
) -> Metadata:
    """Save what `state()` gives on each rank; every rank gets the metadata."""
    metadata: Metadata | None = None

    def local_plan() -> SavePlan:
        here, leads = state(), meeting.is_coordinator
        if _takes(planner.set_up_planner, "storage_meta"):
            planner.set_up_planner(
                state_dict=here, storage_meta=writer.storage_meta(), is_coordinator=leads
            )
        else:  # a planner of the user's, from before torch 2.3
            planner.set_up_planner(here, leads)  # type: ignore[arg-type]
        check_chunks(planner)
        if _takes(writer.set_up_storage_writer, "kwargs"):
            writer.set_up_storage_writer(leads, rank=meeting.rank, use_collectives=True)
        else:
            writer.set_up_storage_writer(leads)
        return writer.prepare_local_plan(planner.create_local_plan())

    def global_plan(plans: list[SavePlan]) -> list[SavePlan]:
        nonlocal metadata
        plans, metadata = planner.create_global_plan(plans)
        return writer.prepare_global_plan(plans)

    def write() -> Any:
        writes = writer.write_data(planner.finish_plan(plan), planner)
        writes.wait()
        return writes.value()

    def finish(results: list[Any]) -> Metadata:
        if metadata is None:
            raise CheckpointError("the save planner made no metadata")
        writer.finish(metadata=metadata, results=results)
        return metadata

    with _raised_as("save", meeting.rank):
        plan = meeting.reduce_scatter("plan", _sendable(local_plan), _sendable(global_plan))
        return meeting.all_reduce("write", _sendable(write), _sendable(finish))


def load(
    meeting: Meeting,
    state: Callable[[], dict[str, Any]],
    reader: StorageReader,
    planner: LoadPlanner,
) -> None:
    """Load into what `state()` gives on each rank."""

    def local_plan() -> LoadPlan:
        here, leads = state(), meeting.is_coordinator
        metadata, common = _metadata(reader, meeting.rank)
        planner.set_up_planner(here, metadata, leads)
        check_chunks(planner)
        if _takes(reader.set_up_storage_reader, "kwargs"):
            reader.set_up_storage_reader(metadata, leads, rank=meeting.rank, use_collectives=common)
        else:
            reader.set_up_storage_reader(metadata, leads)
        return reader.prepare_local_plan(planner.create_local_plan())

    def global_plan(plans: list[LoadPlan]) -> list[LoadPlan]:
        return reader.prepare_global_plan(planner.create_global_plan(plans))

    def read() -> None:
        reader.read_data(planner.finish_plan(plan), planner).wait()

    with _raised_as("load", meeting.rank):
        plan = meeting.reduce_scatter("plan", _sendable(local_plan), _sendable(global_plan))
        meeting.all_gather("read", _sendable(read))


def _metadata(reader: StorageReader, rank: int) -> tuple[Metadata, bool]:
    """The metadata, and whether all ranks have it in common: a checkpoint saved without
    collectives has one for each rank."""
    try:
        return reader.read_metadata(), True
    except Exception as fault:
        if not _takes(reader.read_metadata, "kwargs"):
            raise
        try:
            return reader.read_metadata(rank=rank), False
        except Exception:
            logger.debug("rank %d has no metadata of its own either", rank, exc_info=True)
        raise fault


class _OfMessage(Exception):
    """Ends the chain of constructors that `RelayError` calls: after `Exception`, which has none of
    its own from Python 3.14 on, would come that of torch, which takes other arguments."""

    def __init__(self, message: str) -> None:
        BaseException.__init__(self, message)


class FailedOnRanksError(CheckpointError, _OfMessage, CheckpointException):
    """A `CheckpointError` that scripts written for torch catch as torch's own. `failures` has what
    each rank raised, as torch has it."""

    def __init__(self, message: str, failures: dict[int, Any], **context: Any) -> None:
        CheckpointError.__init__(self, message, **context)
        self._failures = failures

    def __str__(self) -> str:  # torch's would be the tracebacks of all ranks
        return CheckpointError.__str__(self)

    def __reduce__(self) -> tuple[Any, ...]:
        make = partial(FailedOnRanksError, rank=self.rank, phase=self.phase)
        return make, (self.message, self._failures)


@contextmanager
def _raised_as(what: str, rank: int) -> Iterator[None]:
    """Says in a `CheckpointError` what went wrong inside, and on which ranks."""
    try:
        yield
    except CheckpointException as fault:
        failures = {failed: error for failed, (error, _) in sorted(fault.failures.items())}
        own = failures.get(rank)
        if own is not None and not isinstance(own, Exception):
            raise own from None  # Ctrl-C here, not a failure
        phase, first = str(fault.args[0]), min(failures)
        each = "; ".join(f"rank {r}: {type(e).__name__}: {e}" for r, e in failures.items())
        torn = "; the state is part old, part new: load again" if phase == "read" else ""
        raise FailedOnRanksError(
            f"{what} failed on {each}{torn}", fault.failures, rank=first, phase=phase
        ) from failures[first]
    except RelayError:
        raise
    except Exception as fault:
        # Failures of a rank's own work were raised above: this one is the group's.
        raise CheckpointError(
            f"{what} failed: the process group broke: {fault}", rank=rank
        ) from fault


def _takes(method: Callable[..., Any], parameter: str) -> bool:
    return parameter in inspect.signature(method).parameters


def _sendable(step: Callable[..., _T]) -> Callable[..., _T]:
    """A step whose failures reach the other ranks: one that does not pickle becomes one that does
    and says the same."""

    def run(*args: Any) -> _T:
        try:
            return step(*args)
        except Exception as error:
            try:
                pickle.dumps(error)
                copy.deepcopy(error)  # some pickle, and cannot be made again of that
            except Exception:
                raise CheckpointError(f"{type(error).__name__}: {error}") from error
            raise

    return run
