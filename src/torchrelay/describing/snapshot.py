"""A snapshot: the record of a state and where its bytes are; and parts of one.

It is borrowed: valid while the caller keeps the tensors alive and unchanged.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cached_property
from operator import itemgetter

import numpy as np
import torch

from torchrelay.describing.description import Description, Indices
from torchrelay.describing.pieces import Pieces
from torchrelay.describing.region import Region, Stream
from torchrelay.describing.state_plan import StatePlan
from torchrelay.errors import StateError
from torchrelay.geometry.boxes import Numbers, run_of
from torchrelay.geometry.chunks import MIB, Chunks
from torchrelay.geometry.runs import Copy, Runs
from torchrelay.pause import gc_paused
from torchrelay.record.encoding import encode
from torchrelay.record.rank_reads import Reads
from torchrelay.state.checkpointable import with_boxes
from torchrelay.state.local_parts import cut
from torchrelay.state.objects import flatten_objects
from torchrelay.state.tensors import versions_of
from torchrelay.state.tree import flatten, show


class Sendable(ABC):
    """A state as a transport sends it: a snapshot, or a part of one."""

    chunks: Chunks
    stream: Stream
    step: int | None
    devices: set[str]  # the kinds of devices that have some of its bytes

    @abstractmethod
    def changed(self) -> str | None:
        """The path of a leaf that was written to since it was described, as far as autograd
        knows."""

    def check_unchanged(self) -> None:
        """Raise `StateError` if a leaf was written to since it was described."""
        if (path := self.changed()) is not None:
            raise StateError(
                "changed while it was sent: keep the state as it is until send returns",
                step=self.step,
                phase="data",
                path=path,
            )

    def view(self, index: int, device: str = "cpu") -> torch.Tensor | None:
        """The chunk's bytes where they lie, if they are one run of that device's memory, and not
        few."""
        start, nbytes = self.chunks.offsets[index], self.chunks.sizes[index]
        return self.stream.view(start, start + nbytes, device) if nbytes >= MIB else None

    def read(self, index: int, out: torch.Tensor, copy: Copy | None = None) -> None:
        """Write the chunk's bytes to the buffer `out`, zeros where the stream has gaps.

        `copy` is as for `Stream.read`.
        """
        start = self.chunks.offsets[index]
        self.stream.read(start, start + self.chunks.sizes[index], out, copy)


class Snapshot(Sendable):
    """`record` describes the state; `view` and `read` give its chunks, `stream` all its bytes.

    A snapshot keeps the tensors of the state alive.
    """

    def __init__(self, found: Description, planned: StatePlan) -> None:
        self.record, self.chunks, numbers = planned
        self.step, self.devices = self.record.step, self.record.used_devices
        self._found, self._image_numbers = found, numbers
        self._plain = found.plain.of(found.locals)
        self._versions = found.plain.versions, self._other_versions()
        self.stream = self._memory()

    def encoded(self) -> bytes:
        """The record in MessagePack."""
        return encode(self.record)

    def _memory(self) -> Stream:
        """The bytes, as they lie in memory now."""
        plain, starts = self._found.plain, self.chunks.places[self._image_numbers]
        count = len(plain)
        pieces = Pieces(
            starts[:count],
            plain.addresses,
            plain.nbytes,
            plain.gpus,
            self._image_numbers[:count],
            np.arange(count),
            self._plain,
        ).in_order()
        placed = zip(starts[count:].tolist(), self._found.images, strict=True)
        regions = [(at, image.region) for at, image in placed if image.region.nbytes]
        regions.sort(key=itemgetter(0))
        return Stream.of(regions, self.chunks.stream_bytes, pieces=pieces)

    @cached_property
    def addresses(self) -> Numbers:
        """Where each image lies in host memory in one run; else 0."""
        plain = self._found.plain
        others = [image.region.address for image in self._found.images]
        found: Numbers = np.zeros(self.record.images, np.int64)
        found[self._image_numbers[: len(plain)]] = np.where(plain.on_host, plain.addresses, 0)
        found[self._image_numbers[len(plain) :]] = others
        return found

    @cached_property
    def _described_as(self) -> Indices:
        """By image of the record, its number in the description."""
        return np.argsort(self._image_numbers)

    def tensor(self, image: int) -> torch.Tensor:
        """The tensor whose elements an image has; of an image of bytes, their memory."""
        number = int(self._described_as[image])
        if number >= len(self._plain):
            return self._found.images[number - len(self._plain)].region.keep
        found: torch.Tensor = self._plain[number]
        return found

    def region(self, image: int) -> Region:
        """The bytes of an image, as they lie."""
        number = int(self._described_as[image]) - len(self._plain)
        return (
            Region.row_major(self.tensor(image))
            if number < 0
            else self._found.images[number].region
        )

    def _other_versions(self) -> list[int]:
        return versions_of(self._found.general.tensors)

    def changed(self) -> str | None:
        now = versions_of(self._plain), self._other_versions()
        if now == self._versions:
            return None
        others = [owner.leaf for owner in self._found.general.owners]
        owners = (self._found.plain.leaves.tolist(), others)
        leaf = min(
            leaf
            for column, before, after in zip(owners, self._versions, now, strict=True)
            for leaf, old, new in zip(column, before, after, strict=True)
            if old != new
        )
        return show(self._found.path_of(leaf))


class SnapshotPart(Sendable):
    """Reads of a snapshot as a stream of their own, for a receiver that takes parts. It keeps the
    snapshot, for whose record the reads are valid."""

    def __init__(self, snapshot: Snapshot, reads: Reads) -> None:
        self._snapshot = snapshot
        self.step, self.devices = snapshot.step, snapshot.devices
        self.chunks = reads.layout(snapshot.record)
        addresses: Numbers = snapshot.addresses[reads.images]
        regions: dict[int, Region] = {}  # what is not one run of host memory
        for number, box in reads.cut():
            if 0 in box[1]:
                continue
            image = int(reads.images[number])
            tensor = snapshot.tensor(image)
            run = run_of(box, tensor.shape) if addresses[number] else None
            if run is not None and snapshot.record.kind_of_image(image).strides is None:
                addresses[number] += run * tensor.element_size()
                continue
            regions[number] = Region.row_major(cut(tensor.detach(), *box))
            addresses[number] = 0
        for number in np.flatnonzero((addresses == 0) & (self.chunks.image_bytes > 0)).tolist():
            if number not in regions:
                regions[number] = snapshot.region(int(reads.images[number]))
        here = np.flatnonzero(addresses)
        columns = (self.chunks.places, addresses, self.chunks.image_bytes)
        host = Runs(*(column[here].astype(np.uint64) for column in columns))
        placed = [(self.chunks.start_of(n), regions[n]) for n in sorted(regions)]
        self.stream = Stream.of(placed, self.chunks.stream_bytes, host)

    def changed(self) -> str | None:
        return self._snapshot.changed()


def capture(
    state: object,
    step: int | None = None,
    *,
    receivers: int = 1,
    chunk_bytes: int | None = None,
    objects: bool = False,
) -> Snapshot:
    """Describe a state without copying it. `UnsupportedLeafError` names what cannot travel.

    With `objects`, those that have a state dict are described by it.
    """
    with gc_paused():
        flat = flatten_objects(state)[0] if objects else flatten(state)
        found = Description(with_boxes(flat))
        return Snapshot(found, StatePlan.build(found, step, receivers, chunk_bytes))
