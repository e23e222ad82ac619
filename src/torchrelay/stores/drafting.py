"""One rank's share of a step: which files it writes from which memory, and what it reports."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import torch

from torchrelay.state.memory import Region
from torchrelay.state.outline import Outline
from torchrelay.state.runs import Runs
from torchrelay.state.stream import Stream
from torchrelay.stores.layout import FileLayout
from torchrelay.stores.plans import Drafted, Outlines, with_objects
from torchrelay.stores.records import Blob, Checkpoint, DataFile, Shard, StoredTensor
from torchrelay.stores.writing import FileSpec, Range

PASS_BYTES = 64 << 20


class Box(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A box that a rank wrote; `file` counts in its own files."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: int
    start: int


class Written(msgspec.Struct, array_like=True, frozen=True):
    """What a rank has written: the coordinator makes the commit record of these."""

    files: list[DataFile]
    boxes: list[Box]
    blobs: list[Blob]
    values: dict[str, Outline] = {}  # objects that are plain values, by name


class Share:
    """The files of one rank, ready to be written."""

    def __init__(self, drafted: Drafted, layouts: Sequence[FileLayout]) -> None:
        entries, tensors = with_objects(drafted), list(drafted.tensors)
        for _, data in drafted.objects.values():
            tensors.append(torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8))
        plain = len(drafted.entries)
        self.layouts = layouts
        self.files = [FileSpec(file.name, file.nbytes, file.chunk_bytes) for file in layouts]
        self.streams: list[Stream] = []
        self._keep: list[object] = []
        self._boxes: list[Box] = []
        self._blobs: list[Blob] = []
        for number, layout in enumerate(layouts):
            head = torch.frombuffer(bytearray(layout.header), dtype=torch.uint8)
            placed = [(0, Region.row_major(head))]
            for start, index in layout.placed:
                entry = entries[index]
                placed.append((start, Region.row_major(tensors[index])))
                if index >= plain:
                    kind, data = drafted.objects[entry.name]
                    self._blobs.append(Blob(entry.name, kind, number, start, len(data)))
                else:
                    self._boxes.append(Box(*entry[:5], number, start))
            self._keep.append((head, tensors))
            self.streams.append(Stream.of(placed, layout.nbytes))

    @property
    def nbytes(self) -> int:
        return sum(file.nbytes for file in self.files)

    @property
    def on_host(self) -> bool:
        """Whether everything can be written from where it lies."""
        return all(stream.on_host for stream in self.streams)

    def ranges(self) -> list[Range]:
        """Everything, where it lies; for shares that are `on_host`."""
        return [
            Range(index, 0, file.nbytes, stream.host)
            for index, (file, stream) in enumerate(zip(self.files, self.streams, strict=True))
        ]

    def passes(self) -> Iterator[list[Range]]:
        """Everything, in as many passes as it takes to bring what is not on the host there."""
        if self.on_host:
            yield self.ranges()
            return
        for index, (file, stream) in enumerate(zip(self.files, self.streams, strict=True)):
            size = -(-PASS_BYTES // file.chunk_bytes) * file.chunk_bytes
            buffer = torch.empty(min(size, file.nbytes), dtype=torch.uint8)
            for start in range(0, file.nbytes, size):
                stop = min(start + size, file.nbytes)
                stream.read(start, stop, buffer)
                memory = Runs([start], [buffer.data_ptr()], [stop - start])
                yield [Range(index, start, stop, memory)]

    def written(self, digests: Sequence[bytes]) -> Written:
        files = [
            DataFile(file.name, file.nbytes, file.chunk_bytes, known)
            for file, known in zip(self.files, digests, strict=True)
        ]
        return Written(files, self._boxes, self._blobs)


def commit_record(
    step: int, shares: Sequence[Written], outlines: Outlines, version: str
) -> Checkpoint:
    """The commit record of a step that all ranks have written."""
    files: list[DataFile] = []
    shards: dict[str, list[Shard]] = {}
    facts: dict[str, tuple[str, tuple[int, ...]]] = {}
    blobs: list[Blob] = []
    for share in shares:
        first = len(files)
        files += share.files
        for box in share.boxes:
            facts.setdefault(box.name, (box.dtype, box.shape))
            shards.setdefault(box.name, []).append(
                Shard(box.offsets, box.sizes, first + box.file, box.start)
            )
        blobs += [msgspec.structs.replace(blob, file=first + blob.file) for blob in share.blobs]
    tensors = [StoredTensor(name, *facts[name], tuple(shards[name])) for name in shards]
    torch_version: Any = torch.__version__
    return Checkpoint(
        step=step,
        time=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        torch=str(torch_version),
        torchrelay=version,
        outlines=outlines.outlines,
        ranks=outlines.ranks,
        own=outlines.own,
        tensors=tuple(tensors),
        files=tuple(files),
        blobs=tuple(blobs),
    )
