"""Files of a step into live memory, on a few threads.

The wanted bytes are cut into the chunks that digests were made of. `check` reads and hashes them
and keeps nothing; `land` reads them into their destinations. After a `check`, bytes that come out
of memory again are not hashed twice. So nothing is written anywhere before all of it was verified.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial

import torch

from torchrelay.describing.region import Region, Stream
from torchrelay.memory.pages import host_view
from torchrelay.record.schema import Record
from torchrelay.stores.reading.chunks import (
    PIECE_BYTES,
    TASK_BYTES,
    ChunkReads,
    Scratch,
    Spans,
    Task,
    Verifier,
    Views,
    damaged,
    merged,
)
from torchrelay.stores.step_files import DataReader, StepFiles

_RUN_BYTES = 128 << 10  # on average, of runs of memory that are read into without a detour

Placed = tuple[int, Region]


class Fetch(ChunkReads):
    """Ranges of the files of one step, by file, and their destinations."""

    def __init__(
        self,
        step: StepFiles,
        record: Record,
        wanted: Mapping[int, Stream],
        *,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        self._streams = wanted
        spans = {file: spans_of(stream) for file, stream in wanted.items()}
        super().__init__(step, record, spans, progress)
        # Each copy to a device has its price.
        self._batched |= any(stream.devices for stream in wanted.values())

    def land(self, *, verify: bool = True) -> None:
        """Fill the destinations. With `verify`, `DamagedError` if a chunk is not what was written.

        After `check`, bytes that come out of the same memory again are not hashed a second time;
        bytes that the medium has to supply again are.
        """
        if not verify or self._step.trusted:
            self._run(partial(self._land, verify=False), once=True, exact=True)
        elif self._checked:
            self._run(self._land_again, once=False)
        else:
            self._run(self._land, once=True)

    def _land(
        self, task: Task, reader: DataReader, scratch: Scratch, *, verify: bool = True
    ) -> None:
        memory = self._memory(task, reader) if verify else None
        check = Verifier(self._step, self._record, task).update if verify else None
        read = partial(self._read, task, reader)
        self._into_place(task, reader, scratch, memory, read, check)

    def _land_again(self, task: Task, reader: DataReader, scratch: Scratch) -> None:
        """Land what `check` has verified."""
        memory = self._memory(task, reader)

        def read(at: int, view: memoryview) -> bool:
            return reader.read_cached(at, view)

        again = memory is not None or not self._batched
        if not again or not self._into_place(task, reader, scratch, memory, read):
            self._land(task, reader, scratch)
        elif memory is None and not reader.unchanged():
            problem = "was written to after it was checked"
            raise damaged(self._step, self._record, task, problem)

    def _into_place(
        self,
        task: Task,
        reader: DataReader,
        scratch: Scratch,
        memory: memoryview | None,
        read: Callable[[int, memoryview], bool | None],
        verify: Callable[[memoryview], None] | None = None,
    ) -> bool:
        """Bring a range to its destinations, piece by piece: from the memory of its source, or by
        `read`; False as soon as that returns False. Runs of host memory are read into directly
        unless they are many."""
        stream = self._streams[task.file]
        runs: list[tuple[int, int, int]] = []
        if memory is not None:
            pieces: Views = [(task.start, memory)]
        elif not self._is_batched(reader) and (runs := _long_runs(stream, task)):
            pieces = _in_runs(runs, PIECE_BYTES if verify else TASK_BYTES)
        else:
            pieces = self._in_scratch(task, reader, scratch)
        for at, view in pieces:
            if memory is None and read(at, view) is False:
                return False
            if verify is not None:
                verify(view)
            if not runs:
                stream.write(at, at + len(view), torch.frombuffer(view, dtype=torch.uint8))
        return True


def spans_of(stream: Stream) -> Spans:
    """The bytes that a stream has memory for."""
    host = zip(stream.host.starts.tolist(), stream.host.stops.tolist(), strict=True)
    return merged(sorted([*host, *((at, at + one.nbytes) for at, one in stream.elsewhere)]))


def _long_runs(stream: Stream, task: Task) -> list[tuple[int, int, int]]:
    """The runs of host memory that are all of a range, unless they are short on average."""
    runs = list(stream.host.within(task.start, task.stop))
    nbytes = task.stop - task.start
    whole = sum(size for _, _, size in runs) == nbytes
    return runs if whole and (len(runs) == 1 or len(runs) * _RUN_BYTES <= nbytes) else []


def _in_runs(runs: Iterable[tuple[int, int, int]], size: int) -> Views:
    """Positions and memory of the pieces of runs."""
    for at, address, nbytes in runs:
        whole = host_view(address, nbytes)
        for skip in range(0, nbytes, size):
            yield at + skip, whole[skip : skip + size]
