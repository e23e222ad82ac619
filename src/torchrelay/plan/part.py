"""Reads of a snapshot as a stream of their own, for a receiver that takes parts."""

from __future__ import annotations

import numpy as np

from torchrelay.geometry.boxes import Numbers, run_of
from torchrelay.geometry.runs import Runs
from torchrelay.plan.region import Region
from torchrelay.plan.snapshot import Sendable, Snapshot
from torchrelay.plan.stream import Stream
from torchrelay.record.encoding import encode
from torchrelay.record.reads import Reads
from torchrelay.record.schema import (
    VERSION,
    ImageKind,
    LeafKind,
    Record,
    StateOutline,
    VolumeRecord,
)
from torchrelay.state.local_parts import cut


class SnapshotPart(Sendable):
    """A part of a snapshot, served as a snapshot is. It keeps the snapshot.

    The reads are valid for the snapshot's record.
    """

    def __init__(self, snapshot: Snapshot, reads: Reads) -> None:
        self._snapshot, self._reads = snapshot, reads
        self.step, self.devices = snapshot.step, snapshot.devices
        self.chunks = reads.layout(snapshot.record)
        self._addresses: Numbers = snapshot.addresses[reads.images]
        self._regions: dict[int, Region] = {}  # what is not one run of host memory
        self._take_boxes()
        others = np.flatnonzero((self._addresses == 0) & (self.chunks.image_bytes > 0))
        for number in others.tolist():
            if number not in self._regions:
                self._regions[number] = snapshot.region(int(reads.images[number]))
        here = np.flatnonzero(self._addresses)
        columns = (self.chunks.places, self._addresses, self.chunks.image_bytes)
        host = Runs(*(column[here].astype(np.uint64) for column in columns))
        regions = [(self.chunks.start_of(n), self._regions[n]) for n in sorted(self._regions)]
        self.stream = Stream(host, regions, self.chunks.stream_bytes)

    def _take_boxes(self) -> None:
        """Find the memory of boxes: one run of it, or a view."""
        record = self._snapshot.record
        boxes = self._reads.boxes(record)
        for number, box in zip(self._reads.cut_reads.tolist(), boxes, strict=True):
            image = int(self._reads.images[number])
            kind = record.image_kinds[int(record.image_kind[image])]
            tensor = self._snapshot.tensor(image)
            run = run_of(box, tensor.shape) if self._addresses[number] else None
            if run is not None and kind.strides is None:
                self._addresses[number] += run * tensor.element_size()
            elif 0 not in box[1]:
                self._addresses[number] = 0
                self._regions[number] = Region.row_major(cut(tensor.detach(), *box))
                self._addresses[number] = self._regions[number].address
                if self._addresses[number]:
                    del self._regions[number]

    def encoded(self) -> bytes:
        """A record of all of the bytes as one tensor."""
        total = self.chunks.stream_bytes
        cuts = np.array(self.chunks.sizes, np.int64) if self.chunks.sizes else None
        return encode(
            Record(
                version=VERSION,
                step=self.step,
                outlines=(StateOutline(0, 1),),
                kinds=(LeafKind("uint8", (total,)),),
                images=1,
                image_kinds=(ImageKind("uint8", (total,)),),
                volumes=(VolumeRecord("", total, cuts=cuts),),
            )
        )

    def changed(self) -> str | None:
        return self._snapshot.changed()

    def region(self, number: int) -> Region:
        found = self._regions.get(number)
        if found is None:
            tensor = self._snapshot.tensor(int(self._reads.images[number]))
            nbytes = int(self.chunks.image_bytes[number])
            found = Region.dense(tensor, int(self._addresses[number]), nbytes)
        return found
