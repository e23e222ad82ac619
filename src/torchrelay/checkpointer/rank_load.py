"""A load on one rank: from a recorded step to the caller's state.

The step is offered to the destination as this rank's share of it, and refused there if it does not
fit. Then every digest is checked, new tensors are read, and everything that can fail is done; only
then is memory of the caller written.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import cached_property, partial
from typing import NamedTuple

import numpy as np
import torch

from torchrelay.errors import ManifestError, MismatchError, StorageTimeoutError
from torchrelay.landing.commit.ending import Together, Watch, alone
from torchrelay.landing.options import LandingOptions
from torchrelay.landing.places import Landed
from torchrelay.landing.seam import land_share
from torchrelay.landing.workspace import Workspace
from torchrelay.pause import gc_paused
from torchrelay.plan.reads import BoxRead, Portion, plan_reads
from torchrelay.plan.region import Region
from torchrelay.plan.share.leaves import WHOLE
from torchrelay.plan.share.rank_share import RankShare
from torchrelay.plan.stored import Shard, StoredTensors
from torchrelay.record.dtypes import itemsize
from torchrelay.record.rows import LeafRows
from torchrelay.record.schema import Record
from torchrelay.state import tensors as t
from torchrelay.stores.reading.box_reads import ShardRead, Wave, WaveFetch, waves
from torchrelay.stores.reading.chunks import opened
from torchrelay.stores.reading.device_copies import DeviceCopies
from torchrelay.stores.reading.device_fetch import DeviceFetch
from torchrelay.stores.reading.fetch import Fetch
from torchrelay.stores.seam import DeviceStep, LendingStep, OpenStep, WantedBox

_HOST = torch.empty(0, dtype=torch.uint8, device="cpu")


class RankLoad:
    """Planned by the constructor, then `check`, `make` and `end`. No memory of the caller is
    written before `end`."""

    def __init__(
        self,
        step: OpenStep,
        record: Record,
        into: object,
        options: LandingOptions,
        *,
        world: int,
        include: tuple[str, ...] = (),
        progress: Callable[[int], None] | None = None,
        workspace: Workspace | None = None,
    ) -> None:
        self._step = step
        self._record = record
        self._report = progress
        self._staged = options.staged
        self._files = files = _StepFiles(step, record)
        self._portions: dict[int, Portion] = {}
        self._wanted: list[int] = []  # images whose bytes are read
        self._lent: set[int] = set()  # images whose bytes are in memory that the step has lent
        # How reads are carried out that may hang; `left` is set when they were left behind.
        self.within: Callable[[Callable[[], None]], None] = lambda read: read()
        self.left = threading.Event()
        self.instead: dict[str, str] = {}  # why a faster path was not taken
        with gc_paused():
            self._share = RankShare(
                _rows_for(record, options.rank, world),
                include=include,
                guessed=record.planned,
                look=files.check_size,
            )
            on = replace(options, device=options.device or torch.device("cpu"))
            self._landing = land_share(self._share, into, on, workspace, self._filled)
            self._new, self._own = _Reads([], []), _Reads([], [])
            self._plan()
            wanted = (*self._lent, *self._wanted)
            self.nbytes = sum(self._portion(image).nbytes for image in wanted)

    def _portion(self, image: int) -> Portion:
        """The part of the step that fills an image of the share."""
        found = self._portions.get(image)
        if found is None:
            share, source = self._share, int(self._share.sources[image])
            number, stored = int(share.source_boxes[image]), self._files.tensors[source]
            if number == WHOLE:
                box = (0,) * len(stored.shape), stored.shape
                found = Portion(stored, box, self._record.kind_of_image(source).strides)
            else:
                found = Portion(stored, share.boxes[number], None)
            self._portions[image] = found
        return found

    def _filled(self, image: int) -> torch.Tensor | None:
        """Memory that the step lends with the bytes of an image."""
        portion = self._portion(image)
        found = None if portion.shard is None else self._files.lend(portion.shard, portion.nbytes)
        if found is not None:
            self._lent.add(image)
        return found

    def _plan(self) -> None:
        """Which bytes go to new memory, and which to the caller's."""
        held = self._landing.held
        for image in np.flatnonzero(held.marks).tolist():
            if image in self._lent:
                continue
            storage, offset = held.memory_of(image)
            portion = self._want(image, storage.nbytes() - offset)
            shard = portion.shard
            if shard is not None and storage.device.type == "cpu":
                # The landing keeps the memory.
                self._new.add_shard(shard, portion, _HOST, storage.data_ptr() + offset)
            else:
                self._new.boxes.extend(_all_of(portion, portion.over(storage, offset)))
        for image, tensor in self._landing.own():
            portion = self._want(image, tensor.numel() * tensor.element_size())
            shard = portion.shard
            if shard is not None and tensor.is_cpu and tensor.is_contiguous():
                self._own.add_shard(shard, portion, tensor, tensor.data_ptr())
            else:
                self._own.boxes.extend(_all_of(portion, tensor.detach()))

    def _want(self, image: int, room: int) -> Portion:
        """The part of the step that is read for an image, with `room` bytes for it.

        Every load, pull and gather passes here before it reads: sizes of a record meet memory that
        was made by other sizes. `ManifestError` where that is too small.
        """
        self._wanted.append(image)
        portion = self._portion(image)
        if portion.nbytes > room:
            raise ManifestError(
                f"{portion.nbytes} bytes of {portion.tensor.name[:80]!r} for memory of {room} bytes"
            )
        return portion

    def wanted(self) -> Iterator[WantedBox]:
        """Everything that is going to be read of the step."""
        for image in dict.fromkeys(self._wanted):
            portion = self._portion(image)
            dtype = t.dtype_named(portion.tensor.dtype)
            for read in _all_of(portion, torch.empty(portion.box[1], dtype=dtype, device="meta")):
                name = self._record.volumes[read.shard.file].name
                size = itemsize(portion.tensor.dtype)
                shard = read.shard
                yield WantedBox(name, shard.start, size, shard.sizes, read.offsets, read.sizes)

    @cached_property
    def _planned(self) -> tuple[list[Wave], list[Wave]]:
        """Reads into new tensors, and into the caller's. Planned when they are first needed."""
        return self._waves_of(self._new), self._waves_of(self._own)

    def _waves_of(self, reads: _Reads) -> list[Wave]:
        if not isinstance(self._step, DeviceStep):
            return waves(reads.boxes, reads.shards)
        near = [read for read in reads.boxes if read.destination.is_cuda]
        others = [read for read in reads.boxes if not read.destination.is_cuda]
        copies = DeviceCopies(self._step, self._record, near, self._progress)
        return [*([Wave(fetch=copies)] if near else []), *waves(others, reads.shards)]

    def _progress(self, nbytes: int) -> None:
        if self.left.is_set():
            raise StorageTimeoutError("the load was given up")
        if self._report is not None:
            self._report(nbytes)

    @property
    def touched(self) -> bool:
        """Whether any tensor of the caller has been written to."""
        return self._landing.touched

    def check(self) -> None:
        """Raise `DamagedError` unless all wanted bytes have their digests.

        If everything is staged, it is read now, and is not read again.
        """
        new, own = self._planned
        if self._staged:
            self._read(new, verify=True, own=False)
            return
        if not self._step.trusted:
            for wave in (*new, *own):
                self._fetch(wave).check()

    def make(self, *, verify: bool) -> None:
        """Read new tensors, and compute everything that will be the caller's. `MismatchError`
        where a tensor of the destination would have to hold two values."""
        self._read(self._planned[0], verify, own=False)
        for first, second, path in self._share.twins:
            if not self._landing.are_equal(first, second):
                raise MismatchError(
                    "tied to another tensor here, and saved with another value than "
                    f"{self._portion(first).tensor.name}: untie them, or load one of them with "
                    "include=",
                    path=path,
                )
        self._landing.make()

    def end(
        self, *, verify: bool, together: Together = alone, watch: Watch = nullcontext
    ) -> Landed:
        """Read everything into its place, and end as every landing does."""
        return self._landing.end(
            lambda: self._read(self._planned[1], verify, own=True), together, watch
        )

    def _read(self, some: list[Wave], verify: bool, *, own: bool) -> None:
        landing = self._landing
        while some:
            wave = some.pop(0)  # its buffers are freed with it
            fetch = self._fetch(wave)
            try:
                self.within(partial(fetch.land, verify=verify))
            finally:
                landing.torn = landing.torn or (own and fetch.begun)
                if isinstance(fetch, DeviceFetch) and fetch.instead:
                    self.instead["device memory"] = fetch.instead
            landing.torn = landing.torn or own
            wave.finish()

    def _fetch(self, wave: Wave) -> WaveFetch:
        if wave.fetch is None:
            what = (self._step, self._record, wave.wanted)
            if wave.device is not None and not self._step.costly_reads:
                wave.fetch = DeviceFetch(*what, wave.device, progress=self._progress)
            else:
                wave.fetch = Fetch(*what, progress=self._progress)
        return wave.fetch


class _Reads(NamedTuple):
    """Shards that go to one run of memory as they are, and boxes of all other kinds."""

    shards: list[ShardRead]
    boxes: list[BoxRead]

    def add_shard(self, shard: Shard, portion: Portion, keep: torch.Tensor, address: int) -> None:
        if nbytes := portion.nbytes:
            region = Region(keep, nbytes, address)
            self.shards.append(ShardRead(shard.file, shard.start, region))


class _StepFiles:
    """The files of a step, for planning. It does not refer to its load: if the two referred to each
    other, memory of a state would wait for the garbage collector."""

    def __init__(self, step: OpenStep, record: Record) -> None:
        self._step, self._record = step, record
        self.tensors = StoredTensors(record)
        self._seen: set[int] = set()  # files that exist, with their sizes

    def check_size(self, image: int) -> None:
        """No memory is allocated for a tensor whose files are smaller than the record says."""
        for file in self.tensors[image].files - self._seen:
            opened(self._step, self._record, file)
            self._seen.add(file)

    def lend(self, shard: Shard, nbytes: int) -> torch.Tensor | None:
        """The bytes of a new tensor, if the step has them in memory that a tensor can keep."""
        if not isinstance(self._step, LendingStep) or not self._step.trusted:
            return None
        name = self._record.volumes[shard.file].name
        return torch.frombuffer(self._step.lend(name, shard.start, nbytes), dtype=torch.uint8)


def _all_of(portion: Portion, place: torch.Tensor) -> Iterable[BoxRead]:
    return plan_reads(portion.tensor, portion.box, place)


def _rows_for(record: Record, rank: int, world: int) -> list[LeafRows]:
    """The leaves that a rank of a group of `world` loads from, the first of them first.

    Its own where the group is as large as the one that saved. Else those of the same rank, and
    those of the others, laid over each other.
    """
    saved = len(record.ranks)
    if world == saved or (len(record.outlines) == 1 and not record.differences):
        return [LeafRows(record, min(rank, saved - 1), at_rest=True)]
    first = rank if rank < saved else 0
    # Ranks of one outline have the same paths, and the first of them counts.
    ranks = {record.ranks[first]: first}
    for other, number in enumerate(record.ranks):
        ranks.setdefault(number, other)
    return [LeafRows(record, other, at_rest=True) for other in ranks.values()]
