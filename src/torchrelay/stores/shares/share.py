"""One rank's share of a step: which files it writes from which memory, and what it reports."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from msgspec.structs import replace

from torchrelay.errors import CheckpointError
from torchrelay.plan.casting import StandIns
from torchrelay.plan.region import Region, Stream
from torchrelay.record.schema import Record
from torchrelay.state.tensors import versions_of
from torchrelay.stores.seam import DataFiles
from torchrelay.stores.shares.device_hashing import DeviceHashing
from torchrelay.stores.shares.layout import ShareLayout
from torchrelay.stores.writer.file_writer import FileSpec, FileWriter, Range, Staged

PASS_BYTES = 64 << 20


class Share:
    """The files of one rank, ready to be written."""

    def __init__(
        self, layout: ShareLayout, tensors: list[torch.Tensor], cast: StandIns | None = None
    ) -> None:
        """`tensors`: the memory of the boxes, in their order. `cast`: has those of them that are
        written in another dtype."""
        self.layout, self.tensors = layout, tensors
        self._versions = versions_of(tensors)
        self.files = [FileSpec(*file.facts) for file in layout.files]
        self.streams: list[Stream] = []
        self._headers: list[torch.Tensor] = []
        self._hashing: DeviceHashing | None = None
        entries = layout.entries
        for file in layout.files:
            head = torch.frombuffer(bytearray(file.header), dtype=torch.uint8)
            placed = [(0, Region.row_major(head))]
            if cast is None:
                placed += [(at, Region.row_major(tensors[n])) for at, n in file.placed]
            else:
                placed += [(at, cast.region(tensors[n], entries[n].dtype)) for at, n in file.placed]
            self._headers.append(head)
            self.streams.append(Stream.of(placed, file.nbytes))

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
        pairs = zip(self._versions, versions_of(self.tensors), strict=True)
        for index, (old, new) in enumerate(pairs):
            if old != new:
                raise _changed(path=self.layout.entries[index].name)
        if self._hashing is None or not any(file.digests for file in self.files):
            return
        for before, now in zip(self.files, self._hashing.hashed(), strict=True):
            if before.digests != now.digests:
                raise _changed(file=before.name)

    def write_to(
        self, draft: DataFiles, progress: Callable[[int], None] = lambda nbytes: None
    ) -> list[bytes]:
        """Write all files from this process; returns the digests of their chunks."""
        with FileWriter(draft, self.files, progress) as writer:
            for ranges in self._passes():
                writer.write(ranges)
            return writer.finish()

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
        """The report of what was written, with the digests of each file's chunks."""
        record = self.layout.record
        pairs = zip(record.volumes, digests, strict=True)
        return replace(record, volumes=tuple(replace(file, digests=new) for file, new in pairs))


def _changed(*, path: str | None = None, file: str | None = None) -> CheckpointError:
    return CheckpointError(
        "the state was changed while it was saved, so the step was not committed: save it again, "
        "and do not change it until the save returns",
        phase="stage",
        path=path,
        file=file,
    )
