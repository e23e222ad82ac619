"""A step copied from where it can be read to a store: its record and its files, byte for byte."""

from __future__ import annotations

from torchrelay.errors import CheckpointError, StepExistsError
from torchrelay.memory.thread_pool import run_on_threads
from torchrelay.progress import Bar, ProgressCallback
from torchrelay.record.schema import VolumeRecord
from torchrelay.sources.remote_step import RemoteStep
from torchrelay.stores.draft import Draft, Sink
from torchrelay.stores.opening import OpenedStep
from torchrelay.stores.reading.chunks import Task, check_chunks, opened, reading
from torchrelay.stores.store import Store
from torchrelay.stores.tokens import new_token

PIECE = 8 << 20  # bytes that are read at once, in whole chunks
WORKERS = 4


def copy_step(source: RemoteStep | OpenedStep, target: Store, progress: ProgressCallback) -> None:
    """Write a step to a store, whole or not at all; `StepExistsError` if it is there."""
    record = source.record
    assert record.step is not None
    draft = target.draft(record.step, new_token())
    bar = Bar(progress, record.volume_bytes)
    if not source.files.trusted:  # else its reads are checked as they come
        check_chunks(source.files, record)
    try:
        draft.begin()
        for index in range(len(record.volumes)):
            _copy_file(source, index, draft, bar)
        draft.commit(source.files.manifest())
    except FileExistsError:
        raise StepExistsError(
            f"step {record.step} is in {target.url} already: take another place, or rm it first",
            step=record.step,
        ) from None
    except OSError as fault:
        draft.discard()
        raise CheckpointError(
            f"cannot be written: {fault.strerror or fault}", step=record.step, file=target.url
        ) from fault
    except BaseException:
        draft.discard()
        raise


def _copy_file(source: RemoteStep | OpenedStep, index: int, draft: Draft, bar: Bar) -> None:
    file: VolumeRecord = source.record.volumes[index]
    reader = opened(source.files, source.record, index, once=True)
    sink: Sink = draft.open(file.name, file.nbytes)
    size = max(1, PIECE // file.chunk_bytes) * file.chunk_bytes

    def copy(start: int) -> None:
        data = bytearray(min(size, file.nbytes - start))
        with reading(source.files, source.record, Task(index, start, start + len(data))):
            reader.read_into(start, memoryview(data))
        sink.write(start, data)
        bar.add(len(data))

    try:
        workers = 1 if sink.ordered else WORKERS
        run_on_threads(list(range(0, file.nbytes, size)), lambda: copy, workers)
        sink.finish()
    except BaseException:
        sink.abort()
        raise
