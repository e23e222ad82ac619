"""The mirror: the bytes that a subscription needs of each volume, packed in host memory.

It outlives an update, so that the next one may send changes alone. The landing reads from it as
from the volumes themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from torchrelay.memory.host import host_block
from torchrelay.parts.runs import Bytes, PartBox, PartRuns, runs_of
from torchrelay.record.schema import VolumeRecord
from torchrelay.stores.seam import DataReader, WantedBox


class MirrorVolume:
    """Runs of one volume, packed. `base`: the snapshot whose bytes these are, all verified; None
    while they are in doubt."""

    def __init__(self, runs: PartRuns) -> None:
        self.runs = runs
        self.packed: Bytes = host_block(runs.total).numpy()
        self.base: str | None = None
        self._content: tuple[int, int, bytes] | None = None

    def has(self, file: VolumeRecord) -> bool:
        """Whether the bytes here are those of a volume of another step, too."""
        return self.base is not None and self._content == _content(file)

    def doubt(self) -> None:
        """The bytes are about to change."""
        self.base = self._content = None

    def hold(self, snapshot: str, file: VolumeRecord) -> None:
        """The bytes are those of a volume of a snapshot."""
        self.base, self._content = snapshot, _content(file)


class Mirror:
    """The volumes that a subscription needs bytes from, by name."""

    def __init__(self) -> None:
        self.volumes: dict[str, MirrorVolume] = {}

    def plan(self, wanted: Iterable[WantedBox], files: Mapping[str, VolumeRecord]) -> None:
        """Make room for boxes of volumes. Bytes that are here and still wanted stay."""
        boxes: dict[str, list[PartBox]] = {}
        for box in wanted:
            boxes.setdefault(box.name, []).append(box[1:])
        runs = {name: runs_of(some, files[name].nbytes) for name, some in boxes.items()}
        kept = self.volumes
        self.volumes = {}
        for name, one in runs.items():
            found = kept.pop(name, None)
            if found is None or found.runs != one:
                found = None  # its memory is free before more is taken
                found = MirrorVolume(one)
            self.volumes[name] = found

    def rename(self, old: str, new: str) -> None:
        """A snapshot has the same bytes as another: the next changes are relative to that one."""
        for volume in self.volumes.values():
            if volume.base == old:
                volume.base = new

    @property
    def nbytes(self) -> int:
        return sum(one.runs.total for one in self.volumes.values())


class MirrorReader(DataReader):
    """A volume, as far as the mirror has it."""

    def __init__(self, nbytes: int, volume: MirrorVolume | None) -> None:
        self.nbytes, self._volume = nbytes, volume

    def read_into(self, position: int, view: memoryview) -> None:
        if self._volume is None:
            raise EOFError("nothing of it is here")
        runs, packed = self._volume.runs, self._volume.packed
        for run in runs.volume_between(position, position + len(view)):
            run.of_volume(np.frombuffer(view, np.uint8), position)[...] = run.of_packed(packed)


def _content(file: VolumeRecord) -> tuple[int, int, bytes]:
    return file.nbytes, file.chunk_bytes, bytes(file.digests)
