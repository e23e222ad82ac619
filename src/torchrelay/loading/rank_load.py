"""A load on one rank: from a recorded step to the caller's state.

The step is offered to the destination as this rank's share of it, and refused there if it does not
fit. Then every digest is checked, new tensors are read, and everything that can fail is done; only
then is memory of the caller written.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import cached_property, partial

import numpy as np
import torch

from torchrelay.describing.pieces import HOST
from torchrelay.errors import ManifestError, StorageTimeoutError
from torchrelay.geometry.boxes import Numbers
from torchrelay.landing.commit.landing import Act, Landed, Together, Watch, alone, at_once
from torchrelay.landing.image_memory import ImageMemory
from torchrelay.landing.land import fitted
from torchrelay.landing.options import LandingOptions
from torchrelay.landing.workspace import Workspace
from torchrelay.pause import gc_paused
from torchrelay.planning.box_catalog import BoxCatalog
from torchrelay.planning.catalog import RankShare
from torchrelay.planning.reads import BoxReads, Cut, rows_of, stored_reads
from torchrelay.planning.stored import Names, Shard
from torchrelay.record.dtypes import itemsize
from torchrelay.record.rows import LeafRows
from torchrelay.record.schema import Record, runs
from torchrelay.state.local_parts import cut
from torchrelay.stores.reading.box_reads import BoxRead, DirectReads, Wave, WaveFetch, waves
from torchrelay.stores.reading.chunks import opened
from torchrelay.stores.reading.device_copies import DeviceCopies
from torchrelay.stores.reading.device_fetch import DeviceFetch
from torchrelay.stores.reading.fetch import Fetch
from torchrelay.stores.step_files import StepFiles, WantedBox


class RankLoad:
    """Planned by the constructor, then `check`, `make` and `end`. No memory of the caller is
    written before `end`."""

    def __init__(
        self,
        step: StepFiles,
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
        # How reads are carried out that may hang; `left` is set when they were left behind.
        self.within: Callable[[Callable[[], None]], None] = lambda read: read()
        self.left = threading.Event()
        self.instead: dict[str, str] = {}  # why a faster path was not taken
        with gc_paused():
            ranks = rows_for(record, options.rank, world)
            catalog = BoxCatalog(ranks, include=include, guessed=record.planned)
            on = replace(options, device=options.device or torch.device("cpu"))
            found = fitted(catalog, into, on)
            self._share = share = found.share
            self._reads = stored_reads(record, share)
            stored = _StepImages(step, record, share, self._reads)
            self._landing = found.landing(workspace, stored)
            self._new, self._own = self._landing.memory, self._landing.own()
            nbytes = share.record.box_bytes
            wanted = nbytes[self._new.marks].sum() + nbytes[self._own.marks].sum()
            self.nbytes = int(wanted)
            # Memory that the step has lent has its bytes already.
            lent = np.isin(np.arange(len(nbytes)), stored.lent)
            self._new_images = np.flatnonzero(self._new.marks & ~lent)
            self._own_images = np.flatnonzero(self._own.marks)

    def wanted(self) -> Iterator[WantedBox]:
        """Everything that is going to be read of the step."""
        record = self._record
        images = np.union1d(self._new_images, self._own_images)
        for image, shard, found in self._shards(self._reads.some(rows_of(self._reads, images))):
            size = itemsize(self._share.record.kind_of_image(image).dtype)
            name = record.volumes[shard.file].name
            yield WantedBox(name, shard.start, size, shard.sizes, *found.part)

    def _shards(self, reads: BoxReads) -> Iterator[tuple[int, Shard, Cut]]:
        """The image that each read fills, the box that is read, and what of it."""
        lies = (self._record.box_volumes[reads.boxes], self._record.box_starts[reads.boxes])
        columns = (column.tolist() for column in (reads.share, reads.cut, *lies))
        for image, number, volume, start in zip(*columns, strict=True):
            found = reads.cuts[number]
            yield image, Shard(found.box[0], found.box[1], volume, start), found

    @cached_property
    def _planned(self) -> tuple[list[Wave], list[Wave]]:
        """Reads into new tensors, and into the caller's. Planned when they are first needed."""
        new = self._waves_of(self._new, self._new_images)
        return new, self._waves_of(self._own, self._own_images)

    def _waves_of(self, memory: ImageMemory, images: Numbers) -> list[Wave]:
        """The reads that fill images where they lie: runs of bytes that go to host memory, and
        boxes of all other kinds.

        Every load, pull and update passes here before it reads: sizes of a record meet memory that
        was made by other sizes. `ManifestError` where that is too small.
        """
        record, share = self._record, self._share.record
        too_small = images[share.box_bytes[images] > memory.space[images]]
        if len(too_small):
            image = int(too_small[0])
            nbytes, name = int(share.box_bytes[image]), self._name(image)[:80]
            space = int(memory.space[image])
            raise ManifestError(f"{nbytes} bytes of {name!r} for memory of {space} bytes")
        reads = self._reads.some(rows_of(self._reads, images))
        is_run = (reads.start >= 0) & (reads.at >= 0) & (memory.device[reads.share] == HOST)
        some = reads.some(is_run)
        direct = DirectReads(
            record.box_volumes[some.boxes],
            record.box_starts[some.boxes] + some.start,
            memory.address[some.share] + some.at.astype(np.uint64),
            some.nbytes,
        )
        boxes = []
        for image, shard, part in self._shards(reads.some(~is_run)):
            kind = share.kind_of_image(image)
            to = cut(memory.elements(image, kind), *part.to)
            boxes.append(BoxRead(kind.dtype, shard, *part.part, to))
        if not self._step.on_gpus:
            return waves(boxes, direct)
        on_device = [read for read in boxes if read.destination.is_cuda]
        others = [read for read in boxes if not read.destination.is_cuda]
        copies = DeviceCopies(self._step, record, on_device, self._progress)
        return [*([Wave(fetch=copies)] if on_device else []), *waves(others, direct)]

    def _name(self, image: int) -> str:
        return str(Names(self._record)[int(self._share.sources[image])])

    def _progress(self, nbytes: int) -> None:
        if self.left.is_set():
            raise StorageTimeoutError("the load was given up")
        if self._report is not None:
            self._report(nbytes)

    @property
    def in_memory(self) -> bool:
        """Whether everything that `end` writes is in memory of this host, where reads do not
        hang."""
        return self._staged or self._step.mapped

    @property
    def compared(self) -> bool:
        """Whether what is read of the step is compared with digests, if that is asked for."""
        return self._step.compared

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
        self._landing.check_equal(
            lambda one: (
                "tied to another tensor here, and saved with another value than "
                f"{self._name(one.first)}: untie them, or load one of them with include="
            )
        )
        self._landing.make()

    def end(
        self,
        *,
        verify: bool,
        together: Together = alone,
        watch: Watch = nullcontext,
        unbroken: Callable[[Act], None] = at_once,
    ) -> Landed:
        """Read everything into its place, and end as every landing does."""

        def bring() -> None:
            self._read(self._planned[1], verify, own=True)

        return self._landing.end(bring, together, watch, unbroken)

    def _read(self, some: list[Wave], verify: bool, *, own: bool) -> None:
        landing = self._landing
        while some:
            wave = some.pop(0)  # its buffers are freed with it
            fetch = self._fetch(wave)
            try:
                self.within(partial(fetch.land, verify=verify))
            finally:
                if own and fetch.begun:
                    landing.note_write()
                if isinstance(fetch, DeviceFetch) and fetch.instead:
                    self.instead["device memory"] = fetch.instead
            if own:
                landing.note_write()
            wave.finish()

    def _fetch(self, wave: Wave) -> WaveFetch:
        if wave.fetch is None:
            what = (self._step, self._record, wave.wanted)
            if wave.device is not None and not self._step.costly_reads:
                wave.fetch = DeviceFetch(*what, wave.device, progress=self._progress)
            else:
                wave.fetch = Fetch(*what, progress=self._progress)
        return wave.fetch


def rows_for(record: Record, rank: int, world: int) -> list[LeafRows]:
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


class _StepImages:
    """The images of a share, as the files of a step have them."""

    def __init__(self, step: StepFiles, record: Record, share: RankShare, reads: BoxReads) -> None:
        self._step, self._record, self._share, self._reads = step, record, share, reads
        self.lent: list[int] = []  # images whose bytes are in memory that the step has lent

    def check(self, images: Numbers) -> None:
        """No memory is taken for a tensor whose files are smaller than the record says."""
        record, sources = self._record, self._share.sources[images]
        counts = record.box_counts[record.image_kind[sources]]
        boxes = runs(record.first_boxes[sources], counts)
        for file in np.unique(record.box_volumes[boxes]).tolist():
            opened(self._step, record, file)

    def lend(self, image: int) -> torch.Tensor | None:
        step, nbytes = self._step, int(self._share.record.box_bytes[image])
        if not (step.lends and step.trusted):
            return None
        reads = self._reads.some(rows_of(self._reads, np.array([image])))
        (box, *_), (start, *_), (at, *_) = reads.boxes, reads.start, reads.at
        if at or start or nbytes != self._record.box_bytes[box]:
            return None
        self.lent.append(image)
        name = self._record.volumes[int(self._record.box_volumes[box])].name
        lent = step.lend(name, int(self._record.box_starts[box]), nbytes)
        return torch.frombuffer(lent, dtype=torch.uint8)
