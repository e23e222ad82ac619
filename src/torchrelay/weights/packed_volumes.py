"""Packed volumes: the bytes that a subscription needs of each volume, packed in host memory.

It outlives an update, so that the next one may send changes alone. The landing reads from it as
from the volumes themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from torchrelay.memory.host import host_block
from torchrelay.parts.runs import Bytes, PartBox, PartRuns, runs_of
from torchrelay.record.schema import Record, VolumeRecord
from torchrelay.stores.step_files import DataReader, WantedBox
from torchrelay.weights.record_chunks import RecordChunks, VolumeLayout, completing_runs, layouts_of


class PackedVolume:
    """Runs of one volume, packed. `base`: the snapshot whose bytes these are; None while they are
    in doubt. `verified`: whether all of them were compared with digests of the record, or with what
    another server has."""

    def __init__(self, wanted: PartRuns, boxes: Sequence[PartBox], layout: VolumeLayout) -> None:
        """`wanted`: the runs of the boxes alone."""
        self._wanted, self._layout = wanted, layout
        self.runs = runs = completing_runs(wanted, boxes, layout)
        self.packed: Bytes = host_block(runs.total).numpy()
        self.base: str | None = None
        self.verified = False
        self._content: tuple[int, int, bytes] | None = None
        self.chunks = RecordChunks(runs, layout)

    def has(self, file: VolumeRecord) -> bool:
        """Whether the bytes here are those of a volume of another step, too."""
        return self.base is not None and self._content == _content(file)

    def doubt(self) -> None:
        """The bytes are about to change."""
        self.base = self._content = None
        self.verified = False

    def is_of(self, wanted: PartRuns, layout: VolumeLayout) -> bool:
        """Whether there is room for these bytes of a volume of this layout."""
        return self._layout == layout and self._wanted == wanted

    def hold(self, snapshot: str, file: VolumeRecord) -> None:
        """The bytes are those of a volume of a snapshot."""
        self.base, self._content = snapshot, _content(file)


class PackedVolumes:
    """The volumes that a subscription needs bytes from, by name."""

    def __init__(self) -> None:
        self.volumes: dict[str, PackedVolume] = {}

    def plan(self, wanted: Iterable[WantedBox], record: Record) -> None:
        """Make room for boxes of volumes. Bytes that are here and still wanted stay."""
        boxes: dict[str, list[PartBox]] = {}
        for box in wanted:
            boxes.setdefault(box.name, []).append(box[1:])
        layouts = layouts_of(record)
        runs = {name: runs_of(some, layouts[name].nbytes) for name, some in boxes.items()}
        before = self.volumes
        self.volumes = {}
        for name, one in runs.items():
            found = before.pop(name, None)
            if found is None or not found.is_of(one, layouts[name]):
                found = None  # its memory is free before more is taken
                found = PackedVolume(one, boxes[name], layouts[name])
            self.volumes[name] = found

    def rename(self, old: str, new: str) -> None:
        """A snapshot has the same bytes as another: the next changes are relative to that one."""
        for volume in self.volumes.values():
            if volume.base == old:
                volume.base = new

    @property
    def verified(self) -> bool:
        """Whether all bytes were compared with what the record or another server says."""
        return all(one.verified for one in self.volumes.values())

    @property
    def nbytes(self) -> int:
        return sum(one.runs.total for one in self.volumes.values())


class PackedReader(DataReader):
    """A volume, as far as its bytes are packed here."""

    def __init__(self, nbytes: int, volume: PackedVolume | None) -> None:
        self.nbytes, self._volume = nbytes, volume

    def read_into(self, position: int, view: memoryview) -> None:
        if self._volume is None:
            raise EOFError("nothing of it is here")
        runs, packed = self._volume.runs, self._volume.packed
        for run in runs.volume_between(position, position + len(view)):
            run.of_volume(np.frombuffer(view, np.uint8), position)[...] = run.of_packed(packed)


def _content(file: VolumeRecord) -> tuple[int, int, bytes]:
    return file.nbytes, file.chunk_bytes, bytes(file.digests)
