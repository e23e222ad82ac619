"""Reads of a snapshot as a stream of their own, for a receiver that takes parts."""

from __future__ import annotations

import numpy as np
import torch

from torchrelay.geometry import chunks as plan
from torchrelay.geometry.boxes import Numbers, run_of
from torchrelay.geometry.runs import Copy, Runs
from torchrelay.plan.region import Region
from torchrelay.plan.snapshot import Snapshot
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
from torchrelay.state.tensors import flat_bytes


class SnapshotPart:
    """A part of a snapshot, served as a snapshot is. It keeps the snapshot.

    The reads are valid for the snapshot's record.
    """

    def __init__(self, snapshot: Snapshot, reads: Reads) -> None:
        self._snapshot, self._reads = snapshot, reads
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

    @property
    def step(self) -> int | None:
        return self._snapshot.step

    @property
    def devices(self) -> set[str]:
        return self._snapshot.devices

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

    def check_unchanged(self) -> None:
        """Raise `StateError` if a leaf was written to since the capture."""
        self._snapshot.check_unchanged()

    def view(self, index: int, device: str = "cpu") -> torch.Tensor | None:
        """The chunk's bytes where they lie, if they are one run of that device's memory."""
        whole = self.chunks.within_one(index) if self.chunks.sizes[index] >= plan.MIB else None
        if whole is None:
            return None
        number, start, stop = whole
        tensor = self._snapshot.tensor(int(self._reads.images[number]))
        if tensor.device.type != device:
            return None
        if device != "cpu":
            return self._regions[number].run(start, stop)
        address = int(self._addresses[number])
        if not address:
            return None
        origin = tensor.untyped_storage()
        return flat_bytes(origin, address - origin.data_ptr() + start, stop - start)

    def read(self, index: int, out: torch.Tensor, copy: Copy | None = None) -> None:
        """Write the chunk's bytes to the buffer `out`, zeros where the stream has gaps."""
        start = self.chunks.offsets[index]
        self.stream.read(start, start + self.chunks.sizes[index], out, copy)
