"""The steps that a server has: in slots of memory, each shown from one moment to another."""

from __future__ import annotations

import contextlib
import mmap
import os
import time
from collections.abc import Iterator
from typing import BinaryIO, NamedTuple

import xxhash

from torchrelay.endpoint.server.messages import Show, Volume
from torchrelay.geometry import DIGEST_BYTES
from torchrelay.memory.crew import share_out

HASHERS = 2  # threads: the trainer's own go first


class Slot:
    """An arena that the trainer fills: mapped to be hashed, open to be sent from."""

    def __init__(self, fd: int, nbytes: int) -> None:
        self.file: BinaryIO = os.fdopen(fd, "rb", buffering=0)
        self.nbytes = nbytes
        self._map = mmap.mmap(fd, nbytes, prot=mmap.PROT_READ)
        self.view = memoryview(self._map)
        self.mapped = 0  # processes that have it mapped

    def close(self) -> None:
        self.view.release()
        # A thread that hashes may have a part of it: the memory is unmapped when that is done.
        with contextlib.suppress(BufferError):
            self._map.close()
        self.file.close()


class Part(NamedTuple):
    """What one slot has of a step: volumes by name."""

    slot: Slot
    volumes: dict[str, Volume]


class ServedStep:
    """A step that is shown. Requests name it by `id`, so that no two are ever mixed.

    It is in one slot, or in several that were shown one after the other: those of the ranks of a
    host, and copies of others'.
    """

    def __init__(self, shown: Show) -> None:
        self.step, self.id, self.record = shown.step, shown.snapshot, shown.record
        self.order = shown.volumes
        self.tensors = shown.tensors
        self.ranks, self.places = shown.ranks, shown.places
        self.parts: dict[int, Part] = {}  # by the number of the slot
        self._marks: tuple[Slot, int] | None = None
        self.shown = time.time()
        self.superseded: float | None = None  # by the monotonic clock
        self.wanted_until = 0.0  # for a reader that broke off and may come back
        self.replaced = False  # by one with the same number or a lower one: for its readers alone

    def add(self, shown: Show, slot: Slot | None) -> None:
        """A slot has some of its volumes; or here is the record of them all."""
        if slot is not None:
            here = {volume.name: volume for volume in shown.volumes if volume.start >= 0}
            self.parts[shown.slot] = Part(slot, here)
            if shown.marks >= 0:
                self._marks = slot, shown.marks
        if shown.record:
            self.record, self.order, self.tensors = shown.record, shown.volumes, shown.tensors
            self.ranks, self.places = shown.ranks, shown.places

    def place(self, name: str) -> tuple[Slot, Volume] | None:
        """Where a volume lies in this process, if it does."""
        for part in self.parts.values():
            if name in part.volumes:
                return part.slot, part.volumes[name]
        return None

    @property
    def here(self) -> list[str]:
        """The volumes that this process has."""
        return list(dict.fromkeys(name for part in self.parts.values() for name in part.volumes))

    @property
    def nbytes(self) -> int:
        return sum(volume.nbytes for volume in self.order)

    @property
    def etag(self) -> str:
        return f"{self.step}-{self.id}"

    def marks(self) -> bytes:
        """A byte for each chunk of all volumes: whether it is here."""
        count = sum(-(-volume.nbytes // volume.chunk_bytes) for volume in self.order)
        if self._marks is None:
            return b"\1" * count
        slot, at = self._marks
        return bytes(slot.view[at : at + count])

    def has(self, wanted: Volume, start: int, stop: int) -> bool:
        """Whether all chunks of a range are here."""
        if self._marks is None:
            return True
        first = 0
        for volume in self.order:
            if volume.name == wanted.name:
                break
            first += -(-volume.nbytes // volume.chunk_bytes)
        low, high = start // wanted.chunk_bytes, -(-stop // wanted.chunk_bytes)
        slot, at = self._marks
        return all(slot.view[at + first + low : at + first + high])

    def facts(self) -> dict[str, object]:
        return {
            "step": self.step,
            "snapshot": self.id,
            "bytes": self.nbytes,
            "record_bytes": len(self.record),
            "tensors": len(self.tensors),
            "world": max(1, len(self.ranks)),
            "shown": self.shown,
            "volumes": len(self.order),
            "here": self.here,
        }


class ServedSteps:
    """Slots by number, and what is shown of them, the newest last."""

    def __init__(self) -> None:
        self.slots: dict[int, Slot] = {}
        self.shown: list[ServedStep] = []

    def attach(self, number: int, fd: int, nbytes: int) -> None:
        before = self.slots.pop(number, None)
        self.slots[number] = Slot(fd, nbytes)
        if before is not None:
            before.close()

    def detach(self, number: int) -> None:
        slot = self.slots.pop(number, None)
        if slot is not None:
            slot.close()

    def show(self, shown: Show) -> ServedStep:
        slot = self.slots[shown.slot] if shown.slot >= 0 else None
        snapshot = self.by_id(shown.snapshot)
        if snapshot is None:
            snapshot = ServedStep(shown)
            for other in self.shown:
                if other.superseded is None:
                    other.superseded = time.monotonic()
            self.shown.append(snapshot)
        snapshot.add(shown, slot)
        return snapshot

    def lead(self, step: int) -> None:
        """A step was published. Those with its number or a higher one are listed no more: the job
        has gone back, and nobody is to take them for the newest."""
        found = self.by_step(step)
        if found is None:
            return
        for other in self.shown:
            other.replaced = other.replaced or other.step >= step
        found.replaced = False  # it may have been published before
        self.shown.remove(found)
        self.shown.append(found)

    def hide(self, snapshot: ServedStep, number: int) -> None:
        """A slot has nothing of a step any more."""
        snapshot.parts.pop(number)
        if not snapshot.parts:
            self.shown.remove(snapshot)

    @property
    def listed(self) -> Iterator[ServedStep]:
        """Steps that have a record here, the newest last."""
        return (one for one in self.shown if one.record and not one.replaced)

    @property
    def newest(self) -> ServedStep | None:
        return next(reversed(list(self.listed)), None)

    def by_step(self, step: int) -> ServedStep | None:
        return next((one for one in reversed(self.shown) if one.step == step and one.record), None)

    def by_id(self, snapshot: str) -> ServedStep | None:
        return next((one for one in reversed(self.shown) if one.id == snapshot), None)

    def in_slot(self, number: int) -> ServedStep | None:
        return next((one for one in self.shown if number in one.parts), None)


def digests(slot: Slot, volumes: list[Volume]) -> list[bytes]:
    """The digests of each volume's chunks; those that are known stay as they are."""
    found = [bytearray(v.digests or DIGEST_BYTES * -(-v.nbytes // v.chunk_bytes)) for v in volumes]
    unknown = bytes(DIGEST_BYTES)

    def tasks() -> Iterator[tuple[int, int]]:
        for index, volume in enumerate(volumes):
            for chunk in range(-(-volume.nbytes // volume.chunk_bytes)):
                at = chunk * DIGEST_BYTES
                if found[index][at : at + DIGEST_BYTES] == unknown:
                    yield index, chunk

    def hash_chunk(task: tuple[int, int]) -> None:
        index, chunk = task
        volume = volumes[index]
        start = volume.start + chunk * volume.chunk_bytes
        stop = min(start + volume.chunk_bytes, volume.start + volume.nbytes)
        at = chunk * DIGEST_BYTES
        found[index][at : at + DIGEST_BYTES] = xxhash.xxh3_128_digest(slot.view[start:stop])

    share_out(tasks(), lambda: hash_chunk, HASHERS)
    return [bytes(one) for one in found]
