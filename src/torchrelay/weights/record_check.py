"""Bytes that have come, compared with the record of the step.

A server digests what it sends, so its digests show damage on the way and no other. The record has
digests of whole chunks. Of chunks that are here in part, another server says which bytes it has; if
the two differ, the whole chunk is read and compared with the record. A server that gave other bytes
is dropped, and its chunks are read from the others, as by `pull`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from torchrelay.errors import RemoteProtocolError
from torchrelay.memory.digest import digest
from torchrelay.memory.thread_pool import run_on_threads
from torchrelay.parts.runs import MAX_RUNS, PART_BYTES, PartsRequest, VolumeParts
from torchrelay.parts.stream import HEAD_BYTES, MAGIC, ChunkHead
from torchrelay.sources.remote_step import (
    SUPPLY_FAULTS,
    RemoteReader,
    RemoteStep,
    Supplier,
    digest_of,
)
from torchrelay.stores.writer.file_writer import WORKERS
from torchrelay.weights.packed_volumes import PackedVolumes


class ReceivedBytes(NamedTuple):
    """Packed bytes [begin, end) of a volume, and who gave them."""

    begin: int
    end: int
    supplier: Supplier


class RecordCheck:
    """Of what an update has fetched. `received`: by volume."""

    def __init__(
        self,
        step: RemoteStep,
        packed: PackedVolumes,
        received: Mapping[str, Sequence[ReceivedBytes]],
    ) -> None:
        self._step, self._packed, self._received = step, packed, received
        self._suppliers = step.suppliers
        self._files = {file.name: file for file in step.record.volumes}

    def run(self, names: Sequence[str]) -> None:
        """Have volumes compared; wrong chunks are read again. Raises as reads of the step do where
        no server gives a right one."""
        volumes = {name: self._packed.volumes[name] for name in names}
        found = {name: one.chunks for name, one in volumes.items()}
        wrong: list[tuple[str, int]] = []
        todo = [(name, chunk) for name, chunks in found.items() for chunk in chunks.whole]

        def work() -> Callable[[tuple[str, int]], None]:
            def do(task: tuple[str, int]) -> None:
                name, chunk = task
                content = found[name].content(chunk, volumes[name].packed)
                expected = digest_of(self._files[name], chunk * self._files[name].chunk_bytes)
                if content is None or digest(content.data) != expected:
                    wrong.append(task)

            return do

        run_on_threads(todo, work, WORKERS)
        for name, chunk in sorted(wrong):
            self._read_again(name, chunk)
        for name, volume in volumes.items():
            volume.verified = not found[name].partial or self._is_confirmed(name)

    def _read_again(self, name: str, chunk: int) -> bool:
        """Bring a chunk to the bytes that the record has, whoever gives them, and drop those who
        gave others. Whether there are such."""
        file, volume = self._files[name], self._packed.volumes[name]
        start = chunk * file.chunk_bytes
        stop = min(start + file.chunk_bytes, file.nbytes)
        right = np.empty(stop - start, np.uint8)
        RemoteReader(file, self._suppliers).read_into(start, right.data)
        liars: set[Supplier] = set()
        for run in volume.chunks.runs(chunk):
            wanted = np.ascontiguousarray(run.of_volume(right, start)).reshape(-1)
            here = volume.packed[run.at : run.at + len(wanted)]
            differs = here != wanted
            for begin, end, supplier in self._received[name]:
                if differs[max(begin - run.at, 0) : max(end - run.at, 0)].any():
                    liars.add(supplier)
            here[...] = wanted
        for one in liars:
            self._suppliers.drop(
                one, f"it sent other bytes of {name} than the record has at {start}"
            )
        return bool(liars)

    def _is_confirmed(self, name: str) -> bool:
        """Whether another server has the same bytes of a volume. Where it has others, the record
        decides."""
        givers = {one.supplier for one in self._received[name]}
        for other in self._suppliers.others(name, givers):
            try:
                doubtful = self._differences(name, other)
            except SUPPLY_FAULTS as fault:
                self._suppliers.note(name, other, fault)
                continue
            except RemoteProtocolError as fault:
                self._suppliers.drop(other, fault.message)
                continue
            if doubtful and not self._decided(name, doubtful):
                self._suppliers.drop(other, f"it has other bytes of {name} than the record")
            return True
        return False

    def _differences(self, name: str, other: Supplier) -> list[tuple[int, int]]:
        """The ranges of a volume's packed bytes that another server has otherwise."""
        volume, found = self._packed.volumes[name], []
        buffer = memoryview(bytearray(PART_BYTES))
        for first in range(0, len(volume.runs), MAX_RUNS):
            runs = volume.runs.some(first, first + MAX_RUNS)
            place = int(volume.runs.places[first])
            # From a server that knows its own snapshot, digests come alone.
            parts = VolumeParts(name, self._step.snapshot, runs.encoded())
            body = msgspec.msgpack.encode(PartsRequest(self._step.snapshot, [parts]))
            seconds = self._suppliers.deadline.left()
            with other.host.stream("/parts", body, seconds=seconds) as stream:
                if stream.read(len(MAGIC)) != MAGIC:
                    raise RemoteProtocolError(f"{other.name} sends no part stream")
                for begin, end, _ in runs.parts:
                    head = ChunkHead.decoded(stream.read(HEAD_BYTES))
                    stream.read_into(buffer[: head.nbytes])
                    low, high = place + begin, place + end
                    if digest(volume.packed[low:high].data) != head.digest:
                        found.append((low, high))
        return found

    def _decided(self, name: str, doubtful: Sequence[tuple[int, int]]) -> bool:
        """Read the whole of partial chunks where two servers differ. Whether the bytes that are
        here were wrong."""
        chunks = self._packed.volumes[name].chunks
        were_wrong = False
        for chunk in chunks.partial:
            spans = [(run.at, run.at + run.nbytes * run.rows) for run in chunks.runs(chunk)]
            if any(low < end and at < high for at, end in spans for low, high in doubtful):
                were_wrong |= self._read_again(name, chunk)
        return were_wrong
