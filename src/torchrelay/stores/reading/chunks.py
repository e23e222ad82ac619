"""Whole chunks of a step's files, read and compared with their digests. No torch: a command that
only looks at a step starts without it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import xxhash

from torchrelay.geometry import DIGEST_BYTES
from torchrelay.memory.crew import share_out
from torchrelay.record.schema import Record
from torchrelay.stores.reading.ranges import (
    PIECE_BYTES,
    TASK_BYTES,
    Task,
    damaged,
    opened,
    unread,
    whole_chunks,
    workers_for,
)
from torchrelay.stores.seam import DataReader, OpenStep
from torchrelay.stores.writer.file_writer import WORKERS


def read_chunks(step: OpenStep, record: Record, task: Task) -> memoryview:
    """Read a range of whole chunks; `DamagedError` unless each has its digest."""
    data = memoryview(bytearray(task.stop - task.start))
    reader = opened(step, record, task.file)
    try:
        _read_chunks(step, record, task, reader, data)
    finally:
        reader.close()
    return data


def check_chunks(
    step: OpenStep, record: Record, progress: Callable[[int], None] = lambda nbytes: None
) -> None:
    """Read every byte of a step; `DamagedError` unless every chunk has its digest."""
    readers: list[DataReader] = []
    tasks: list[Task] = []
    try:
        for index, file in enumerate(record.volumes):
            readers.append(opened(step, record, index))
            batched = step.costly_reads or readers[-1].batched
            most = TASK_BYTES if batched else PIECE_BYTES
            tasks += [Task(index, *span) for span in whole_chunks(file, [(0, file.nbytes)], most)]
        checker = partial(_checker, step, record, readers, progress)
        share_out(tasks, checker, workers_for(step, readers, WORKERS))
    finally:
        for reader in readers:
            reader.close()


def _checker(
    step: OpenStep,
    record: Record,
    readers: Sequence[DataReader],
    progress: Callable[[int], None],
) -> Callable[[Task], None]:
    """Checks ranges on one thread, in memory of its own."""
    memory = memoryview(bytearray())

    def check(task: Task) -> None:
        nonlocal memory
        nbytes = task.stop - task.start
        if len(memory) < nbytes:
            memory = memoryview(bytearray(nbytes))
        _read_chunks(step, record, task, readers[task.file], memory[:nbytes])
        progress(nbytes)

    return check


def _read_chunks(
    step: OpenStep, record: Record, task: Task, reader: DataReader, data: memoryview
) -> None:
    file = record.volumes[task.file]
    try:
        reader.read_into(task.start, [data])
    except (OSError, EOFError) as fault:
        raise unread(step, record, task, fault) from fault
    for start in range(task.start, task.stop, file.chunk_bytes):
        stop = min(start + file.chunk_bytes, task.stop)
        at = start // file.chunk_bytes * DIGEST_BYTES
        found = xxhash.xxh3_128_digest(data[start - task.start : stop - task.start])
        if found != file.digests[at : at + DIGEST_BYTES]:
            chunk = Task(task.file, start, stop)
            problem = f"bytes {start} to {stop} are not those written"
            raise damaged(step, record, chunk, problem)
