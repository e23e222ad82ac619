"""One rank's share of a step: which files it writes from which memory, and what it reports.

A share is staged through *slots* of an arena: one as large as the share, or several small ones
that are filled and written in turn (`memory_budget`). The trainer waits while slots are filled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from msgspec.structs import replace

from torchrelay.deadlines import Deadline
from torchrelay.describing.region import Region, Stream
from torchrelay.errors import CheckpointError, StorageTimeoutError
from torchrelay.memory import threads
from torchrelay.memory.arena import Arena
from torchrelay.memory.pages import paged
from torchrelay.memory.staging import Copy, stage
from torchrelay.record.schema import Record
from torchrelay.shares.casting import StandIns
from torchrelay.shares.device_hashing import DeviceHashing
from torchrelay.shares.layout import ShareLayout
from torchrelay.state.tensors import versions_of
from torchrelay.stores.draft import CommittedFile, DataFiles
from torchrelay.stores.writer.client import WriterSave
from torchrelay.stores.writer.file_writer import FileSpec, FileWriter, Placed, Range, Written

PASS_BYTES = 64 << 20
SLOTS = 4  # of an arena smaller than the share


class Share:
    """The files of one rank, ready to be written."""

    def __init__(
        self, layout: ShareLayout, tensors: list[torch.Tensor], cast: StandIns | None = None
    ) -> None:
        """`tensors`: the memory of the boxes, in their order. `cast`: has those of them that are
        written in another dtype."""
        self.layout, self.tensors, self.cast = layout, tensors, cast
        self._versions = versions_of(tensors)
        self.files = [FileSpec(*file.facts) for file in layout.files]
        self.streams: list[Stream] = []
        self._headers: list[torch.Tensor] = []
        self._hashing: DeviceHashing | None = None
        self._hashed: list[FileSpec] = []  # with the digests that GPUs made, and no others
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
    def to_write(self) -> list[int]:
        """The numbers of the files whose bytes are written from here."""
        return [number for number, file in enumerate(self.files) if file.source is None]

    @property
    def bytes_to_write(self) -> int:
        return sum(self.files[number].nbytes for number in self.to_write)

    @property
    def on_host(self) -> bool:
        """Whether everything can be written without a copy to the host."""
        return all(self.streams[number].on_host for number in self.to_write)

    @property
    def pinned(self) -> bool:
        """Whether some of it is written from a GPU."""
        return any(self.streams[number].devices for number in self.to_write)

    def ranges(self) -> list[Range]:
        """Everything in its own memory; for shares that are `on_host`."""
        return [
            Range(number, 0, self.files[number].nbytes, self.streams[number].host)
            for number in self.to_write
        ]

    def reuse(self, number: int, digests: bytes, source: CommittedFile) -> None:
        """Take a file from a committed step, where one has the same bytes."""
        self.files[number] = self.files[number]._replace(digests=digests, source=source)

    def hash_on_devices(self) -> None:
        """Have GPUs compute the digests that they can: the writer does not hash those chunks."""
        if self._hashing is not None:
            return
        self._hashing = DeviceHashing(self.files, self.streams)
        self._hashed = self._hashing.hashed()
        self.files = list(self._hashed)

    def check_unchanged(self) -> None:
        """Called when everything has been copied: `CheckpointError` if a tensor was written to
        meanwhile, as far as autograd knows, or if memory of a GPU no longer has its digests."""
        pairs = zip(self._versions, versions_of(self.tensors), strict=True)
        for index, (old, new) in enumerate(pairs):
            if old != new:
                raise _changed(path=self.layout.entries[index].name)
        if self._hashing is None or not any(file.digests for file in self._hashed):
            return
        for before, now in zip(self._hashed, self._hashing.hashed(), strict=True):
            if before.digests != now.digests:
                raise _changed(file=before.name)

    def write_to(
        self, draft: DataFiles, progress: Callable[[int], None] = lambda nbytes: None
    ) -> list[bytes]:
        """Write all files from this process; returns the digests of their chunks."""
        with FileWriter(draft, self.files, progress) as writer:
            for ranges in self._passes():
                writer.write(ranges)
            return writer.finish().digests

    def _passes(self) -> Iterator[list[Range]]:
        """Everything, in as many passes as it takes to copy device memory to the host."""
        if self.on_host:
            yield self.ranges()
            return
        for index in self.to_write:
            file, stream = self.files[index], self.streams[index]
            size = -(-PASS_BYTES // file.chunk_bytes) * file.chunk_bytes
            buffer = torch.empty(min(size, file.nbytes), dtype=torch.uint8, device="cpu")
            for start in range(0, file.nbytes, size):
                stop = min(start + size, file.nbytes)
                stream.read(start, stop, buffer)
                yield [Range(index, start, stop, buffer.data_ptr() - start)]

    def written(self, digests: Sequence[bytes]) -> Record:
        """The report of what was written, with the digests of each file's chunks."""
        record = self.layout.record
        pairs = zip(record.volumes, digests, strict=True)
        return replace(record, volumes=tuple([replace(file, digests=new) for file, new in pairs]))


def _changed(*, path: str | None = None, file: str | None = None) -> CheckpointError:
    return CheckpointError(
        "the state was changed while it was saved, so the step was not committed: save it again, "
        "and do not change it until the save returns",
        phase="stage",
        path=path,
        file=file,
    )


def fills(files: list[FileSpec], slot_bytes: int) -> Iterator[list[Placed]]:
    """Cut files into slots. A slot has some of each unfinished file, so that threads can write
    different files; the pieces of each file come in order and are cut at its chunks."""
    at = [0 if file.source is None else file.nbytes for file in files]
    while left := [i for i, file in enumerate(files) if at[i] < file.nbytes]:
        left.sort(key=lambda i: files[i].nbytes - at[i])  # short ones leave room to the others
        slot: list[Placed] = []
        used = 0
        for place, index in enumerate(left):
            file, start = files[index], at[index]
            room = (slot_bytes - used) // (len(left) - place)
            whole_chunks = start + room // file.chunk_bytes * file.chunk_bytes
            stop = file.nbytes if file.nbytes - start <= room else whole_chunks
            if stop > start:
                slot.append((index, start, stop, used))
                used += paged(stop - start)
                at[index] = stop
        if not slot:
            raise CheckpointError(
                f"a slot of {slot_bytes} bytes is smaller than a chunk of "
                f"{files[left[-1]].chunk_bytes}: give a larger memory_budget",
                phase="stage",
            )
        yield slot


def arena_bytes(files: list[FileSpec]) -> int:
    """Bytes of an arena that takes all at once that is written of a share."""
    return sum(paged(file.nbytes) for file in files if file.source is None)


class Pipeline:
    """Fills slots and has them written, by threads of this process or by the writer process.
    `stage` returns when the sources may change; `finish`, called once from any thread, when
    everything is durable."""

    def __init__(
        self, share: Share, arena: Arena, target: FileWriter | WriterSave, deadline: Deadline
    ) -> None:
        self._share, self._arena, self._target, self._deadline = share, arena, target, deadline
        self._slots = 1 if arena_bytes(share.files) <= arena.nbytes else SLOTS
        self._slot_bytes = arena.nbytes // self._slots
        self._writes: list[threads.Running] = []  # of slots, each begun when the one before ended
        self._fault: BaseException | None = None

    def stage(self, workers: int) -> None:
        try:
            for number, placed in enumerate(fills(self._share.files, self._slot_bytes)):
                if number >= self._slots:
                    self._wait_for(self._writes[number - self._slots])
                base = number % self._slots * self._slot_bytes
                copies = [
                    Copy(self._share.streams[file], start, stop, base + at)
                    for file, start, stop, at in placed
                ]
                stage(copies, self._arena.tensor, threads=workers)
                in_arena = [(f, a, b, base + at) for f, a, b, at in placed]
                write = partial(self._write, in_arena, self._writes[-1:])
                self._writes.append(threads.run_anyway(write, "save"))
        except BaseException as fault:
            self._fault = self._fault or fault
            raise

    def _wait_for(self, write: threads.Running) -> None:
        is_free = write.wait(self._deadline.left())
        if self._fault is not None:
            raise self._fault
        if not is_free:
            raise StorageTimeoutError(
                "writing is too slow to stage in time: give a longer timeout or a larger "
                "memory_budget",
                phase="stage",
            )

    def _write(self, placed: list[Placed], before: list[threads.Running]) -> None:
        for write in before:
            write.wait()
        try:
            if self._fault is None:
                self._target.write_staged(placed)
        except BaseException as fault:
            self._fault = self._fault or fault

    def finish(self) -> Written:
        if self._writes and not self._writes[-1].wait(self._deadline.left()):
            raise StorageTimeoutError(
                "still writing at the deadline: give a longer timeout", phase="write"
            )
        if self._fault is not None:
            self._target.abort()
            raise self._fault
        return self._target.finish()
