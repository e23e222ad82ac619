"""The steps that a server has: in slots of memory, each shown from one moment to another."""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, BinaryIO, NamedTuple

from torchrelay.endpoint.server.http.connections import Span
from torchrelay.endpoint.server.messages import Show, StepRecord, Volume
from torchrelay.geometry import DIGEST_BYTES
from torchrelay.memory.digest import digest
from torchrelay.memory.thread_pool import run_on_threads

if TYPE_CHECKING:  # numpy takes as much memory as the server itself
    from torchrelay.endpoint.server.changes import ChangeHistory

HASHERS = 2  # threads: the trainer's own go first


class Slot:
    """Memory that a publisher fills: mapped to be hashed, open to be sent from. Its descriptor is
    closed with it, and where it cannot be made."""

    def __init__(self, fd: int, nbytes: int) -> None:
        try:
            self._map = mmap.mmap(fd, nbytes, prot=mmap.PROT_READ)
            self.file: BinaryIO = os.fdopen(fd, "rb", buffering=0)
        except BaseException:
            os.close(fd)
            raise
        self.nbytes = nbytes
        self.view = memoryview(self._map)
        self.mapped = 0  # processes that have it mapped

    def close(self) -> None:
        self.view.release()
        # A thread that hashes may have a part of it: the memory is unmapped when that is done.
        with contextlib.suppress(BufferError):
            self._map.close()
        self.file.close()


class Arrivals:
    """Which chunks of a step that is still arriving are here. `expects`: whether a chunk is on its
    way."""

    def __init__(self, chunks: int, expects: Callable[[int], bool]) -> None:
        self._here = bytearray(chunks)
        self._expects = expects
        self._lock = threading.Lock()
        self._waiting: list[tuple[int, int, threading.Event]] = []

    def has(self, first: int, last: int) -> bool:
        return all(self._here[first:last])

    @property
    def complete(self) -> bool:
        return all(self._here)

    def add(self, first: int, count: int) -> None:
        with self._lock:
            self._here[first : first + count] = b"\1" * count
            for low, high, arrived in self._waiting:  # many wait for other chunks
                if self.has(low, high):
                    arrived.set()

    def wait(self, first: int, last: int, seconds: float) -> bool:
        """Whether chunks are here, after that long at most where they are on their way."""
        waiting = first, last, threading.Event()
        with self._lock:
            if self.has(first, last):
                return True
            self._waiting.append(waiting)
        if self._expects(first):
            waiting[2].wait(seconds)
        with self._lock:
            self._waiting.remove(waiting)
            return self.has(first, last)


class Part(NamedTuple):
    """The volumes of a step in one slot, by name."""

    slot: Slot
    volumes: dict[str, Volume]


class ServedSnapshot:
    """A step that is shown. Requests name it by `id`, so that no two are ever mixed.

    It is in one slot or in several: those of the ranks of a host, and copies of other hosts' parts.
    """

    def __init__(self, shown: Show, arrivals: Arrivals | None = None) -> None:
        self.step, self.id = shown.step, shown.snapshot
        # Until the record of all volumes is here, these are all that is known.
        self.whole = StepRecord(b"", shown.volumes, 0, [], [0] * len(shown.volumes))
        self.arrivals = arrivals  # of a step that is still arriving
        self.parts: dict[int, Part] = {}  # by the number of the slot
        self.shown = time.time()
        self.replaced = False  # by one with the same number or a lower one: for its readers alone

    def add(self, shown: Show, slot: Slot) -> None:
        """A slot has some of its volumes, and the record of all of them may be here."""
        self.parts[shown.slot] = Part(slot, {volume.name: volume for volume in shown.volumes})
        self.whole = shown.whole or self.whole

    @property
    def record(self) -> bytes:
        return self.whole.record

    def place(self, name: str) -> tuple[Slot, Volume] | None:
        """The slot in which this process has a volume, if it does."""
        for part in list(self.parts.values()):
            if name in part.volumes:
                return part.slot, part.volumes[name]
        return None

    def span(self, name: str, start: int, stop: int) -> Span | None:
        """Bytes of a volume that is in this process."""
        if (place := self.place(name)) is None:
            return None
        slot, volume = place
        return Span(slot.file, slot.view, volume.start + start, stop - start)

    def wait(self, name: str, start: int, stop: int, seconds: float) -> bool:
        """Whether all chunks of a range are here, after that long at most."""
        if self.arrivals is None:
            return True
        first = 0
        for volume in self.whole.volumes:
            if volume.name == name:
                size = volume.chunk_bytes
                low, high = first + start // size, first - (-stop // size)
                return self.arrivals.wait(low, high, seconds)
            first += volume.chunks
        return False

    @property
    def complete(self) -> bool:
        return self.arrivals is None or self.arrivals.complete

    @property
    def here(self) -> list[str]:
        """The volumes that this process has, whole."""
        parts = self.parts.values() if self.complete else ()
        return list(dict.fromkeys(name for part in parts for name in part.volumes))

    @property
    def nbytes(self) -> int:
        return sum(volume.nbytes for volume in self.whole.volumes)

    @property
    def etag(self) -> str:
        return f"{self.step}-{self.id}"

    def facts(self) -> dict[str, object]:
        return {
            "step": self.step,
            "snapshot": self.id,
            "state": self.whole.state,
            "bytes": self.nbytes,
            "record_bytes": len(self.record),
            "tensors": self.whole.tensors,
            "world": max(1, len(self.whole.ranks)),
            "shown": self.shown,
            "volumes": len(self.whole.volumes),
            "here": self.here,
        }


class Snapshots:
    """Slots by number, and the steps shown from them, the newest last. `changes`: the elements that
    differ between them, where the server finds them."""

    def __init__(self) -> None:
        self.changes: ChangeHistory | None = None
        self.slots: dict[int, Slot] = {}
        self.shown: list[ServedSnapshot] = []

    def attach(self, number: int, fd: int, nbytes: int) -> None:
        self.detach(number)
        self.slots[number] = Slot(fd, nbytes)

    def detach(self, number: int) -> None:
        slot = self.slots.pop(number, None)
        if slot is not None:
            slot.close()

    def show(self, shown: Show, arrivals: Arrivals | None = None) -> ServedSnapshot:
        snapshot = self.by_id(shown.snapshot)
        if snapshot is None:
            snapshot = ServedSnapshot(shown, arrivals)
            self.shown.append(snapshot)
        snapshot.add(shown, self.slots[shown.slot])
        if self.changes is not None:
            self.changes.show(shown.slot, shown.step, shown.snapshot)
        return snapshot

    def lead(self, step: int) -> None:
        """A step was published. Steps with its number or a higher one are no longer listed: the job
        has gone back, and readers must not take them for the newest."""
        found = self.by_step(step)
        if found is None:
            return
        for other in self.shown:
            other.replaced = other.replaced or other.step >= step
        found.replaced = False  # it may have been published before
        self.shown.remove(found)
        self.shown.append(found)

    def hide(self, snapshot: ServedSnapshot, number: int) -> None:
        """A slot has nothing of a step any more."""
        snapshot.parts.pop(number)
        if not snapshot.parts:
            self.shown.remove(snapshot)

    @property
    def listed(self) -> list[ServedSnapshot]:
        """Steps that have a record here, the newest last."""
        return [one for one in self.shown if one.record and not one.replaced]

    @property
    def newest(self) -> ServedSnapshot | None:
        listed = self.listed
        return listed[-1] if listed else None

    def by_step(self, step: int) -> ServedSnapshot | None:
        return next((one for one in reversed(self.shown) if one.step == step and one.record), None)

    def by_id(self, snapshot: str) -> ServedSnapshot | None:
        return next((one for one in reversed(self.shown) if one.id == snapshot), None)

    def in_slot(self, number: int) -> ServedSnapshot | None:
        return next((one for one in self.shown if number in one.parts), None)


def digests(slot: Slot, volumes: list[Volume]) -> list[bytes]:
    """The digests of each volume's chunks; those that are known stay as they are."""
    found = [bytearray(one.digests or DIGEST_BYTES * one.chunks) for one in volumes]
    unknown = bytes(DIGEST_BYTES)

    def tasks() -> Iterator[tuple[int, int]]:
        for index, volume in enumerate(volumes):
            for chunk in range(volume.chunks):
                at = chunk * DIGEST_BYTES
                if found[index][at : at + DIGEST_BYTES] == unknown:
                    yield index, chunk

    def hash_chunk(task: tuple[int, int]) -> None:
        index, chunk = task
        volume = volumes[index]
        start = volume.start + chunk * volume.chunk_bytes
        stop = min(start + volume.chunk_bytes, volume.start + volume.nbytes)
        at = chunk * DIGEST_BYTES
        found[index][at : at + DIGEST_BYTES] = digest(slot.view[start:stop])

    run_on_threads(tasks(), lambda: hash_chunk, HASHERS)
    return [bytes(one) for one in found]
