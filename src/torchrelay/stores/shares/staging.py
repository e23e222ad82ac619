"""From a rank's share of a step to its files, through copies in an arena.

A share is staged through *slots* of the arena: one as large as the share, or several small ones
that are filled and written in turn (`memory_budget`). The trainer waits while slots are filled.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from torchrelay.deadlines import Deadline
from torchrelay.errors import CheckpointError, StorageTimeoutError
from torchrelay.memory import threads
from torchrelay.memory.arena import Arena
from torchrelay.memory.pages import paged
from torchrelay.memory.staging import Copy, stage
from torchrelay.stores.shares.share import Share
from torchrelay.stores.writer.client import WriterSave
from torchrelay.stores.writer.file_writer import FileSpec, FileWriter, Placed

SLOTS = 4  # of an arena smaller than the share


def fills(files: list[FileSpec], slot_bytes: int) -> Iterator[list[Placed]]:
    """Cut files into slots. A slot has some of each unfinished file, so that threads can write
    different files; the pieces of each file come in order and are cut at its chunks."""
    at = [0] * len(files)
    while left := [i for i, file in enumerate(files) if at[i] < file.nbytes]:
        slot: list[Placed] = []
        used = 0
        fits = sum(paged(files[i].nbytes - at[i]) for i in left) <= slot_bytes
        for place, index in enumerate(left):
            file = files[index]
            room = (slot_bytes - used) // (1 if fits else len(left) - place)
            stop = min(file.nbytes, at[index] + room // file.chunk_bytes * file.chunk_bytes)
            if file.nbytes - at[index] <= room:
                stop = file.nbytes
            if stop > at[index]:
                slot.append((index, at[index], stop, used))
                used += paged(stop - at[index])
                at[index] = stop
        if not slot:
            index = left[0]
            stop = min(at[index] + files[index].chunk_bytes, files[index].nbytes)
            if stop - at[index] > slot_bytes:
                raise CheckpointError(
                    f"a slot of {slot_bytes} bytes is smaller than a chunk of "
                    f"{files[index].chunk_bytes}: give a larger memory_budget",
                    phase="stage",
                )
            slot.append((index, at[index], stop, 0))
            at[index] = stop
        yield slot


def arena_bytes(files: list[FileSpec]) -> int:
    """Bytes of an arena that takes all of a share at once."""
    return sum(paged(file.nbytes) for file in files)


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
                filled = [(f, a, b, base + at) for f, a, b, at in placed]
                write = partial(self._write, filled, self._writes[-1:])
                self._writes.append(threads.run(write, "save"))
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

    def finish(self) -> list[bytes]:
        """The digests of each file's chunks."""
        if self._writes and not self._writes[-1].wait(self._deadline.left()):
            raise StorageTimeoutError(
                "still writing at the deadline: give a longer timeout", phase="write"
            )
        if self._fault is not None:
            self._target.abort()
            raise self._fault
        return self._target.finish()
