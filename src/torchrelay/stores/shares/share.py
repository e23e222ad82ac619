"""One rank's share of a step: which files it writes from which memory, and what it reports."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import torch

from torchrelay.errors import CheckpointError
from torchrelay.geometry.boxes import Box
from torchrelay.plan.region import Region
from torchrelay.plan.stream import Stream
from torchrelay.record.kinds import KindTable
from torchrelay.record.schema import ImageKind, ObjectBytes, Record, VolumeRecord, column_of
from torchrelay.state.tensors import versions_of
from torchrelay.stores.seam import DataFiles
from torchrelay.stores.shares.device_hashing import DeviceHashing
from torchrelay.stores.shares.layout import Entry, FileLayout
from torchrelay.stores.writer.file_writer import FileSpec, FileWriter, Range, Staged

PASS_BYTES = 64 << 20


class ShareContents(NamedTuple):
    """Boxes to write with the memory they are in. `objects`: kind and size, by name, of those that
    are the bytes of an object, which only the planners of torch make."""

    entries: list[Entry]
    tensors: list[torch.Tensor]
    objects: Mapping[str, tuple[str, int]] = MappingProxyType({})


class Share:
    """The files of one rank, ready to be written."""

    def __init__(
        self,
        contents: ShareContents,
        layouts: Sequence[FileLayout],
        region: Callable[[torch.Tensor, str], Region] = lambda tensor, dtype: Region.row_major(
            tensor
        ),
    ) -> None:
        """`region`: the bytes of a tensor in a dtype, row by row."""
        self.layouts = layouts
        self.contents = contents
        self._versions = versions_of(contents.tensors)
        self.files = [FileSpec(file.name, file.nbytes, file.chunk_bytes) for file in layouts]
        self.streams: list[Stream] = []
        self._headers: list[torch.Tensor] = []
        self._objects: list[ObjectBytes] = []
        self._hashing: DeviceHashing | None = None
        for number, layout in enumerate(layouts):
            head = torch.frombuffer(bytearray(layout.header), dtype=torch.uint8)
            placed = [(0, Region.row_major(head))]
            for start, index in layout.placed:
                entry = contents.entries[index]
                placed.append((start, region(contents.tensors[index], entry.dtype)))
                if entry.name in contents.objects:
                    kind, nbytes = contents.objects[entry.name]
                    self._objects.append(ObjectBytes(entry.name, kind, number, start, nbytes))
            self._headers.append(head)
            self.streams.append(Stream.of(placed, layout.nbytes))

    @property
    def nbytes(self) -> int:
        return sum(file.nbytes for file in self.files)

    @property
    def phase(self) -> str:
        """The phase of a rank that writes it, for reports of who is late."""
        return f"writing {', '.join(file.name for file in self.files[:3])}"

    @property
    def on_host(self) -> bool:
        """Whether everything can be written without a copy to the host."""
        return all(stream.on_host for stream in self.streams)

    def ranges(self) -> list[Range]:
        """Everything in its own memory; for shares that are `on_host`."""
        return [
            Range(index, 0, file.nbytes, stream.host)
            for index, (file, stream) in enumerate(zip(self.files, self.streams, strict=True))
        ]

    def hash_on_devices(self) -> None:
        """Have GPUs compute the digests that they can: the writer does not hash those chunks."""
        self._hashing = DeviceHashing(self.files, self.streams)
        self.files = self._hashing.hashed()

    def check_unchanged(self) -> None:
        """Called when everything has been copied: `CheckpointError` if a tensor was written to
        meanwhile, as far as autograd knows, or if memory of a GPU no longer has its digests."""
        entries, tensors = self.contents.entries, self.contents.tensors
        for entry, old, new in zip(entries, self._versions, versions_of(tensors), strict=True):
            if old != new:
                raise _changed(path=entry.name)
        if self._hashing is None or not any(file.digests for file in self.files):
            return
        for before, now in zip(self.files, self._hashing.hashed(), strict=True):
            if before.digests != now.digests:
                raise _changed(file=before.name)

    def write_to(
        self, draft: DataFiles, progress: Callable[[int], None] = lambda nbytes: None
    ) -> list[bytes]:
        """Write all files from this process; returns the digests of their chunks."""
        writer = FileWriter(draft, self.files, progress)
        try:
            for ranges in self._passes():
                writer.write(ranges)
            return writer.finish()
        except BaseException:
            writer.abort()
            raise

    def _passes(self) -> Iterator[list[Range]]:
        """Everything, in as many passes as it takes to copy device memory to the host."""
        if self.on_host:
            yield self.ranges()
            return
        for index, (file, stream) in enumerate(zip(self.files, self.streams, strict=True)):
            size = -(-PASS_BYTES // file.chunk_bytes) * file.chunk_bytes
            buffer = torch.empty(min(size, file.nbytes), dtype=torch.uint8, device="cpu")
            for start in range(0, file.nbytes, size):
                stop = min(start + size, file.nbytes)
                stream.read(start, stop, buffer)
                yield [Range(index, start, stop, Staged(start, buffer.data_ptr()))]

    def written(self, digests: Sequence[bytes]) -> Record:
        """The report of what was written: boxes by the names of their tensors, and volumes. Built
        when all is written: a trainer waits for what is done before."""
        boxes: dict[str, list[tuple[Box, int, int]]] = {}
        first: dict[str, Entry] = {}
        for number, layout in enumerate(self.layouts):
            for start, index in layout.placed:
                entry = self.contents.entries[index]
                if entry.name not in self.contents.objects:
                    first.setdefault(entry.name, entry)
                    box = (entry.offsets, entry.sizes)
                    boxes.setdefault(entry.name, []).append((box, number, start))
        kinds = KindTable()
        known: dict[object, int] = {}
        kind_of = []
        for name, placed in boxes.items():
            entry, cut = first[name], tuple(box for box, _, _ in placed)
            key = (entry.dtype, entry.shape, cut)
            if key not in known:
                known[key] = kinds.image(ImageKind.of_boxes(entry.dtype, entry.shape, cut))
            kind_of.append(known[key])
        places = np.array([row[1:] for placed in boxes.values() for row in placed], np.int64)
        return kinds.record(
            (),
            np.array(kind_of, np.int64),
            ranks=(),
            volumes=tuple(
                VolumeRecord(file.name, file.nbytes, file.chunk_bytes, None, known_digests)
                for file, known_digests in zip(self.files, digests, strict=True)
            ),
            volume_of=column_of(places[:, 0]) if boxes else None,
            starts=places[:, 1] if boxes else None,
            names=tuple(enumerate(boxes)),
            objects=tuple(self._objects),
        )


def _changed(*, path: str | None = None, file: str | None = None) -> CheckpointError:
    return CheckpointError(
        "the state was changed while it was saved, so the step was not committed: save it again, "
        "and do not change it until the save returns",
        phase="stage",
        path=path,
        file=file,
    )
