"""This format behind torch's own calls: `dcp.save(..., storage_writer=Writer(place))` and
`dcp.load(..., storage_reader=Reader(place))`, with torch's planners and collectives.

Steps written here are those of `Checkpointer` and are read by it, and the other way round. Only
objects that torch's planner does not take apart and that have tensors in them (a tuple of tensors)
are for `Reader` alone.
"""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import cached_property, partial
from typing import Any, TypeVar
from uuid import uuid4

import msgspec
import torch
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from torchrelay.dcp import items
from torchrelay.dcp.chunks import check_chunks
from torchrelay.dcp.flattened import ValueTree, outline_of
from torchrelay.dcp.metadata import AsPlanned, Unknown, as_planned
from torchrelay.deadlines import seconds_of
from torchrelay.describing.region import Region, Stream
from torchrelay.errors import (
    MismatchError,
    StorageTimeoutError,
    TornStateError,
    UnsupportedLeafError,
    UsageError,
)
from torchrelay.landing.commit.landing import TORN
from torchrelay.memory.bounded import bounded
from torchrelay.memory.writable import READ_ONLY, ReadOnlyMemory
from torchrelay.options import FILE_BYTES
from torchrelay.record.encoding import encode
from torchrelay.record.schema import ObjectBytes, Record
from torchrelay.shares.commit_record import commit_record, decode_shares
from torchrelay.shares.layout import arrange
from torchrelay.shares.share import Share
from torchrelay.shares.step_draft import StepDraft
from torchrelay.steps import check_step
from torchrelay.stores.locate import open_store, scheme_of, split_step
from torchrelay.stores.opening import OpenedStep, open_step
from torchrelay.stores.reading.box_reads import WaveFetch, waves
from torchrelay.stores.reading.fetch import Fetch
from torchrelay.stores.store import Store
from torchrelay.stores.tokens import new_token

Place = str | os.PathLike[str]
Result = TypeVar("Result")


class _Written(msgspec.Struct, array_like=True, frozen=True):
    """A rank's report: the record of its share, encoded, and its objects that are plain values."""

    share: bytes
    values: dict[str, ValueTree]


_written = msgspec.msgpack.Decoder(_Written)


class DraftName:
    """Which draft a rank writes to, and as which of how many ranks.

    It travels with a plan, and a planner that keeps its plans puts an older one in the place of
    what came. So the name is noted where torch unpickles it: on the thread that writes next.
    """

    __slots__ = ("name", "rank", "world")

    def __init__(self, name: str, rank: int, world: int) -> None:
        self.name, self.rank, self.world = name, rank, world

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrive, (self.name, self.rank, self.world)


_arrived = threading.local()


def _arrive(name: str, rank: int, world: int) -> DraftName:
    _arrived.name = DraftName(name, rank, world)
    found: DraftName = _arrived.name
    return found


class _AtPlace:
    """A directory or bucket, and the step of it that is written or read.

    `runs/a/step-100` is step 100 of `runs/a`; any other name is a directory with steps in it.
    """

    def __init__(self, path: Place, step: int | None, timeout: float | timedelta) -> None:
        self._chosen_step, self._timeout = step, timeout
        self._go(path)

    def _go(self, path: Place) -> None:
        self.checkpoint_id = root = os.fspath(path)
        step = self._chosen_step
        if step is None:
            root, step = split_step(path)
        self._named_step = None if step is None else check_step(step)
        self._store: Store = open_store(root, timeout=self._timeout)

    def _seconds(self) -> float:
        return seconds_of(self._timeout)

    def _within(
        self, what: str, act: Callable[[], Result], left: threading.Event | None = None
    ) -> Result:
        return bounded(act, self._seconds(), what, file=self.checkpoint_id, left=left)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Place) -> bool:
        """Whether a name is that of a directory or of a bucket with a known scheme."""
        with suppress(UsageError):
            return isinstance(checkpoint_id, (str, os.PathLike)) and bool(scheme_of(checkpoint_id))
        return False


class Writer(_AtPlace, StorageWriter):
    """Writes one step: that of its place's name (`.../step-100`), or `step`, or 0.

    As with torch's writers, saving again replaces what is there, here whole and at once, and only
    if `overwrite`. Objects that only pickle can hold are refused.
    """

    def __init__(
        self,
        path: Place,
        *,
        step: int | None = None,
        overwrite: bool = True,
        file_bytes: int | None = FILE_BYTES,
        timeout: float | timedelta = 1800.0,
    ) -> None:
        super().__init__(path, step, timeout)
        self._overwrite = overwrite
        self._file_bytes = file_bytes
        self._draft: StepDraft | None = None
        self.save_id = str(uuid4())

    @property
    def _step(self) -> int:
        return self._named_step or 0

    def reset(self, checkpoint_id: Place | None = None) -> None:
        self.save_id = str(uuid4())
        if checkpoint_id is not None:
            self._go(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if not kwargs.get("use_collectives", True):
            raise UsageError(
                "use_collectives=False would have each rank commit its part as the whole step: "
                "save with collectives"
            )
        _arrived.name = None
        if self._draft is not None:
            self._draft.discard()  # of a save that failed
            self._draft = None
        if is_coordinator:
            self._within("clean up", self._store.clean)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        name = new_token()
        self._draft = StepDraft(
            self._store, self._step, name, self._seconds, overwrite=self._overwrite
        )
        self._draft.begin()
        return [
            dataclasses.replace(plan, storage_data=DraftName(name, rank, len(plans)))
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        sent: DraftName = getattr(_arrived, "name", None) or plan.storage_data
        _arrived.name = None
        check_chunks(planner)
        tops = {
            fqn: str(path[0]) if len(path) > 1 else None
            for fqn, path in (plan.planner_data or {}).items()
        }
        found = items.resolve_items(plan.items, planner, tops)
        layout = arrange(found.entries, sent.rank, sent.world, self._file_bytes)
        share = Share(layout, found.tensors)
        if self._draft is not None:
            draft = self._draft.files
        else:
            draft = self._store.draft(self._step, sent.name, overwrite=self._overwrite)
        digests = self._within("write", lambda: share.write_to(draft)) if share.files else []
        carried = msgspec.msgpack.encode(_Written(encode(share.written(digests)), found.values))
        results = [WriteResult(item.index, 0, None) for item in plan.items]
        if results:
            results[0] = WriteResult(plan.items[0].index, share.nbytes, carried)
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        draft = self._draft
        assert draft is not None
        sent = [
            _written.decode(result.storage_data)
            for rank in results
            for result in rank
            if result.storage_data is not None
        ]
        try:
            shares = decode_shares(self._step, [one.share for one in sent])
            values = {name: value for one in sent for name, value in one.values.items()}
            outlined = outline_of(metadata, shares, values)
            ranks = (0,) * max(1, len(results))
            outlined = msgspec.structs.replace(outlined, ranks=ranks)
            record = commit_record(self._step, shares, outlined, self.save_id)
            draft.commit(record)
        except BaseException:
            draft.discard()
            raise
        finally:
            self._draft = None
        metadata.version, metadata.storage_meta = CURRENT_DCP_VERSION, self.storage_meta()

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(checkpoint_id=self.checkpoint_id, save_id=self.save_id)


class Reader(_AtPlace, StorageReader):
    """Reads one step: that of its place's name, or `step`, or the newest that is committed.

    Digests are checked before anything is written, unless `verify=False`. Values are converted to
    the destination's dtype where it has another, as torch's readers do.
    """

    def __init__(
        self,
        path: Place,
        *,
        step: int | None = None,
        verify: bool = True,
        timeout: float | timedelta = 1800.0,
    ) -> None:
        super().__init__(path, step, timeout)
        self._verify = verify
        self.load_id = str(uuid4())

    def _forget(self) -> None:
        """Read the record again: since the last load the step may have been replaced."""
        for known in ("_opened", "planned"):
            self.__dict__.pop(known, None)

    def reset(self, checkpoint_id: Place | None = None) -> None:
        self.load_id = str(uuid4())
        if checkpoint_id is not None:
            self._go(checkpoint_id)
        self._forget()

    @property
    def record(self) -> Record:
        """The commit record of the step that is read."""
        return self._opened.record

    @cached_property
    def _opened(self) -> OpenedStep:
        return self._within("open the step", lambda: open_step(self._store, self._named_step))

    @cached_property
    def planned(self) -> AsPlanned:
        return as_planned(self.record)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        self._forget()
        sent = StorageMeta(self.checkpoint_id, self.record.saved.save_id, self.load_id)
        return dataclasses.replace(
            self.planned.metadata, storage_meta=sent, version=CURRENT_DCP_VERSION
        )

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        check_chunks(planner)
        stored = self.planned.tensors
        objects = [item for item in plan.items if item.type == LoadItemType.BYTE_IO]
        places = [
            (item, planner.resolve_tensor(item).detach())
            for item in plan.items
            if item.type != LoadItemType.BYTE_IO
        ]
        read_only = ReadOnlyMemory()
        for item, place in places:
            if read_only.has(place):
                raise MismatchError(
                    f"the destination cannot be written: {READ_ONLY}", path=item.dest_index.fqn
                )
        planned = waves(
            items.requested(item, stored[item.storage_index.fqn], place) for item, place in places
        )
        left = threading.Event()

        def go_on(nbytes: int) -> None:
            if left.is_set():
                raise StorageTimeoutError("the load was given up")

        for wave in planned:
            wave.fetch = Fetch(self._opened.files, self.record, wave.wanted, progress=go_on)
            if self._verify:
                self._within("read the step", wave.fetch.check)
        kept = {one.name: one for one in self.record.objects}
        chosen = [self._object(item, kept.get(item.storage_index.fqn), planner) for item in objects]
        while planned:
            wave = planned.pop(0)
            assert wave.fetch is not None
            self._land(wave.fetch, left)
            wave.finish()
        for item, place in places:
            planner.commit_tensor(item, place)
        for item, data in zip(objects, chosen, strict=True):
            planner.load_bytes(item, data)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _land(self, fetch: WaveFetch, left: threading.Event) -> None:
        try:
            self._within("read the step", partial(fetch.land, verify=self._verify), left)
        except StorageTimeoutError as fault:
            text = f"{TORN}: {fault.message}"
            raise TornStateError(text, step=self.record.step, phase="land") from fault

    def _object(self, item: ReadItem, blob: ObjectBytes | None, planner: LoadPlanner) -> Any:
        name = item.storage_index.fqn
        if blob is not None:
            data = torch.empty(blob.nbytes, dtype=torch.uint8, device="cpu")
            placed = [(blob.start, Region.row_major(data))]
            wanted = {blob.volume: Stream.of(placed, blob.start + blob.nbytes)}
            fetch = Fetch(self._opened.files, self.record, wanted)
            self._within("read the step", partial(fetch.land, verify=self._verify))
            return items.give(blob.kind, data.numpy().tobytes(), planner, name)
        value = self.planned.values[name]
        if isinstance(value, Unknown):
            raise UnsupportedLeafError(
                "a leaf that torch's planners do not know: load it with Checkpointer", path=name
            )
        return items.archive(value)
