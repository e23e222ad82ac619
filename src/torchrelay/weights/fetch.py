"""Part streams into packed volumes: from every server that has volumes of a step, at the same time.

A stream that breaks off is continued where it ended, by whichever server has the volume. A chunk
with other bytes than were sent is asked for again as a whole, and a second one ends a server's part
in it. When all is here it is compared with the record.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import msgspec
import numpy as np

from torchrelay.errors import DigestError, RemoteProtocolError
from torchrelay.memory.thread_pool import ThreadPool
from torchrelay.parts.runs import (
    MAX_RUNS,
    MAX_VOLUMES,
    PART_BYTES,
    Bytes,
    PartRuns,
    PartsRequest,
    VolumeParts,
)
from torchrelay.parts.stream import HEAD_BYTES, MAGIC, WHOLE, ChunkHead, decode
from torchrelay.sources.connection import HostConnection
from torchrelay.sources.remote_step import SUPPLY_FAULTS, RemoteStep, Supplier
from torchrelay.weights.packed_volumes import PackedVolumes
from torchrelay.weights.record_check import ReceivedBytes, RecordCheck

STREAMS = 8  # at once, each of another server


class _VolumeRest(NamedTuple):
    """Runs of a volume, from byte `at` of its packed bytes on. `base`: what those bytes are now;
    `done`: how many of them have come."""

    name: str
    runs: PartRuns
    at: int
    base: str | None
    done: int = 0

    def rest(self) -> _VolumeRest:
        """The part that has not come yet."""
        if not self.done:
            return self
        return _VolumeRest(self.name, self.runs.after(self.done), self.at + self.done, self.base)


class PartFetch:
    """Brings packed volumes to the state of one step."""

    def __init__(self, step: RemoteStep, packed: PackedVolumes) -> None:
        self._step, self._packed, self._suppliers = step, packed, step.suppliers
        self._files = {file.name: file for file in step.record.volumes}
        self._wrong: set[Supplier] = set()  # those that sent wrong bytes once
        self._received: dict[str, list[ReceivedBytes]] = {name: [] for name in packed.volumes}

    def run(self) -> None:
        """Returns when every byte has come and was verified. `PeerLostError` names the servers that
        cannot give theirs; `FileNotFoundError` for a step that was replaced."""
        changed = {}
        for name, volume in self._packed.volumes.items():
            if volume.has(self._files[name]):
                volume.hold(self._step.snapshot, self._files[name])
            else:
                changed[name] = volume
        todo = []
        for name, volume in changed.items():
            for first in range(0, len(volume.runs), MAX_RUNS):
                some = volume.runs.some(first, first + MAX_RUNS)
                todo.append(_VolumeRest(name, some, int(volume.runs.places[first]), volume.base))
            volume.doubt()
        while todo:
            groups = self._by_supplier(todo)
            left = ThreadPool(STREAMS).each(lambda group: self._fetch(*group), groups)
            todo = [piece for some in left for piece in some]
        RecordCheck(self._step, self._packed, self._received).run(list(changed))
        for name, volume in changed.items():
            volume.hold(self._step.snapshot, self._files[name])

    def _by_supplier(self, todo: list[_VolumeRest]) -> list[tuple[Supplier, list[_VolumeRest]]]:
        """Requests, each to a server that has its volumes, within the limits of one."""
        found: list[tuple[Supplier, list[_VolumeRest]]] = []
        current: dict[Supplier, list[_VolumeRest]] = {}
        for piece in todo:
            supplier = self._suppliers.take(piece.name)
            some = current.setdefault(supplier, [])
            count = sum(len(one.runs) for one in some) + len(piece.runs)
            twice = any(one.name == piece.name for one in some)
            if twice or count > MAX_RUNS or len(some) >= MAX_VOLUMES:
                found.append((supplier, some))
                some = current[supplier] = []
            some.append(piece)
        return [*found, *current.items()]

    def _fetch(self, supplier: Supplier, pieces: list[_VolumeRest]) -> list[_VolumeRest]:
        """Take pieces from a server; returns what is left of them."""
        left, came = list(pieces), 0
        try:
            try:
                for nbytes in self._from(supplier, left):
                    came += nbytes
            finally:
                for nbytes in (came, *[0] * (len(pieces) - 1)):
                    self._suppliers.release(supplier, nbytes)
        except (DigestError, RemoteProtocolError) as fault:
            if supplier in self._wrong:
                self._suppliers.drop(supplier, fault.message)
            self._wrong.add(supplier)
        except SUPPLY_FAULTS as fault:
            self._suppliers.note(left[0].name, supplier, fault)
        return [piece.rest() for piece in left]

    def _from(self, supplier: Supplier, left: list[_VolumeRest]) -> Iterator[int]:
        """Take pieces off `left` as they have come; yields bytes that came for that."""
        for piece in list(left):
            mapped = supplier.mapped(piece.name)
            memory = None if mapped is None else mapped.memory(0, mapped.nbytes)
            if memory is not None:
                packed = self._packed.volumes[piece.name].packed[piece.at :]
                piece.runs.pack(np.frombuffer(memory, np.uint8), 0, piece.runs.total, packed)
                left.remove(piece)
                end = piece.at + piece.runs.total
                self._received[piece.name].append(ReceivedBytes(piece.at, end, supplier))
                yield piece.runs.total
        if left:
            yield from self._streamed(supplier, left)

    def _streamed(self, supplier: Supplier, left: list[_VolumeRest]) -> Iterator[int]:
        wanted = [VolumeParts(one.name, one.base, one.runs.encoded()) for one in left]
        body = msgspec.msgpack.encode(PartsRequest(self._step.snapshot, wanted))
        seconds = self._suppliers.deadline.left()
        with supplier.host.stream("/parts", body, seconds=seconds) as stream:
            if stream.read(len(MAGIC)) != MAGIC:
                raise RemoteProtocolError(f"{supplier.name} sends no part stream")
            buffer = memoryview(bytearray(PART_BYTES))
            for piece in list(left):
                packed = self._packed.volumes[piece.name].packed[piece.at :]
                for begin, end, itemsize in piece.runs.parts:
                    # An unfinished chunk is asked for again without its base.
                    left[0] = piece._replace(base=None, done=begin)
                    before = stream.nbytes
                    _receive(stream, packed[begin:end], itemsize, buffer)
                    received = ReceivedBytes(piece.at + begin, piece.at + end, supplier)
                    self._received[piece.name].append(received)
                    yield stream.nbytes - before
                left.pop(0)


def _receive(stream: HostConnection, into: Bytes, itemsize: int, buffer: memoryview) -> None:
    """One part chunk, verified. `into` holds the bytes of the base."""
    head = ChunkHead.decoded(stream.read(HEAD_BYTES))
    if head.kind == WHOLE and head.nbytes == len(into):
        stream.read_into(into.data)
    else:
        payload = buffer[: head.nbytes]
        stream.read_into(payload)
        decode(head.kind, payload, into, itemsize)
    head.check(into)
