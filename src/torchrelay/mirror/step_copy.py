"""A step copied from where it can be read to a store: its record and its files, byte for byte.

Every chunk is compared with its digest between the read and the write, so bytes that are not those
that were saved are copied nowhere. The step appears at its new place by the commit of a draft.

A copy that has a token can be continued: it leaves its draft behind, and another one with the same
token takes the files that are whole from there. The token names the bytes of the step:

    step-100.tmp-copy-0-5d41402abc4b2a76b9719d911017c592/     in a directory
    step-100/copy-0-5d41402abc4b2a76b9719d911017c592/         in a bucket

It has the form of any draft's token, so `Store.clean` knows the draft. "copy" is the name of no
host, and a draft of another host counts as left behind a day after its last file. Until then the
copy can be continued, by any process and on any host.
"""

from __future__ import annotations

import errno
from contextlib import closing
from functools import partial
from typing import NamedTuple

import xxhash

from torchrelay.errors import CheckpointError, DamagedError, StepExistsError, StepNotFoundError
from torchrelay.memory.thread_pool import run_on_threads
from torchrelay.mirror.unchanged import FileContent, unchanged_files
from torchrelay.progress import Bar, ProgressCallback
from torchrelay.record.schema import Record, VolumeRecord
from torchrelay.shortage import raise_shortage
from torchrelay.sources.remote_step import RemoteStep
from torchrelay.stores.draft import CommittedFile, Draft, ReuseRefusedError
from torchrelay.stores.opening import OpenedStep, open_step
from torchrelay.stores.reading.chunks import Task, Verifier, opened, reading
from torchrelay.stores.retry import storage_faults
from torchrelay.stores.step_files import DataReader
from torchrelay.stores.store import Store
from torchrelay.stores.tokens import new_token

PIECE = 8 << 20  # bytes that are read at once, in whole chunks
WORKERS = 4  # of a file whose pieces can be written in any order, and of files of one piece
FULL = frozenset({errno.ENOSPC, errno.EDQUOT})

Opened = RemoteStep | OpenedStep


class CopiedStep(NamedTuple):
    """Bytes of data: that were written, that an earlier copy had left, and that did not change
    since the step before at the new place."""

    written: int = 0
    left: int = 0
    unchanged: int = 0


class _Presence(NamedTuple):
    """Whether a store has a step, and what a copy of it would replace."""

    whole: bool
    replaces: str = ""  # the id of the draft of the step that is there; "" if there is none


def presence(source: Opened, target: Store) -> _Presence:
    """Whether a store has the step: the same record, and files of the recorded sizes."""
    step = _step(source.record)
    try:
        with closing(open_step(target, step)) as there:
            same = there.digest == source.digest
            with storage_faults("look at the step", target.url, step):
                whole = same and there.holds()
    except StepNotFoundError:
        return _Presence(whole=False)
    except DamagedError:  # no one can read its record
        whole = False
    with storage_faults("look at the step", target.url, step):
        return _Presence(whole, "" if whole else target.draft_id(step))


def copy_token(source: Opened, replaces: str = "") -> str:
    """The token of all copies of these bytes that replace the same step, or none."""
    return f"copy-0-{xxhash.xxh3_128_hexdigest(source.digest + replaces.encode())}"


def copy_step(
    source: Opened,
    target: Store,
    progress: ProgressCallback,
    *,
    token: str | None = None,
    overwrite: bool = False,
) -> CopiedStep:
    """Write a step to a store, whole or not at all; `StepExistsError` if it is there.

    `token`: that of `copy_token`, to continue a copy that was interrupted, and to leave what was
    written to the next one; without it nothing stays. `DamagedError` where a chunk of the source
    does not have its digest.
    """
    record = source.record
    step, bar = _step(record), Bar(progress, record.volume_bytes)
    draft = target.draft(step, token or new_token(), overwrite=overwrite)
    give_up = draft.discard if token is None else draft.leave
    try:
        draft.begin()
        copied = _FileCopies(source, draft, unchanged_files(target, record), bar).run()
        _check_files(draft, record)
        draft.commit(source.files.manifest())
        return copied
    except FileExistsError:
        give_up()
        raise StepExistsError(
            f"step {step} is in {target.url} already: take another place, or rm it first", step=step
        ) from None
    except OSError as fault:
        (draft.discard if fault.errno in FULL else give_up)()  # which frees the space
        raise_shortage(fault, f"write step {step} in {target.url}")
        raise CheckpointError(
            f"cannot be written: {fault.strerror or fault}", step=step, file=target.url
        ) from fault
    except BaseException:
        give_up()
        raise


def discard_copy(target: Store, step: int, token: str) -> None:
    """Remove the draft that a copy has left, unless another process continues it."""
    draft = target.draft(step, token, overwrite=True)
    with storage_faults("remove what an interrupted copy left", target.url, step):
        draft.begin()
    draft.discard()


def _step(record: Record) -> int:
    assert record.step is not None
    return record.step


class _FileCopies:
    """The files of a step, copied to a draft. `unchanged`: those that its store has elsewhere."""

    def __init__(
        self,
        source: Opened,
        draft: Draft,
        unchanged: dict[FileContent, CommittedFile],
        bar: Bar,
    ) -> None:
        self._source, self._draft, self._unchanged, self._bar = source, draft, unchanged, bar
        self._volumes = source.record.volumes
        self._copied: list[CopiedStep] = []  # of each file

    def run(self) -> CopiedStep:
        """Small files side by side, and then one large file after the other."""
        small = [index for index, file in enumerate(self._volumes) if file.nbytes <= PIECE]
        run_on_threads(small, lambda: self._copy, WORKERS)
        for index in sorted(set(range(len(self._volumes))) - set(small)):
            self._copy(index)
        return CopiedStep(*map(sum, zip(*self._copied, strict=True)))

    def _copy(self, index: int) -> None:
        file, draft = self._volumes[index], self._draft
        if draft.has(file.name, file.nbytes, partial(_is_right, self._source, index)):
            self._copied.append(CopiedStep(0, left=file.nbytes))
        elif self._is_taken(file):
            self._copied.append(CopiedStep(0, unchanged=file.nbytes))
        else:
            self._write(index)
            self._copied.append(CopiedStep(file.nbytes))
            return
        self._bar.add(file.nbytes)

    def _is_taken(self, file: VolumeRecord) -> bool:
        """Whether a file was taken from another step of the store."""
        found = self._unchanged.get(FileContent.of(file))
        if found is None:
            return False
        try:
            self._draft.reuse(file.name, file.nbytes, found).finish()
        except (ReuseRefusedError, FileNotFoundError):
            return False
        return True

    def _write(self, index: int) -> None:
        source, record = self._source, self._source.record
        file = self._volumes[index]
        reader = opened(source.files, record, index, once=True)
        sink = self._draft.open(file.name, file.nbytes)

        def copy(task: Task) -> None:
            data = _read(source, reader, task)
            sink.write(task.start, data)
            self._bar.add(len(data))

        try:
            run_on_threads(_tasks(record, index), lambda: copy, 1 if sink.ordered else WORKERS)
            sink.finish()
        except BaseException:
            sink.abort()
            raise


def _tasks(record: Record, index: int) -> list[Task]:
    """The pieces of a file, in whole chunks."""
    file = record.volumes[index]
    size = max(1, PIECE // file.chunk_bytes) * file.chunk_bytes
    starts = range(0, file.nbytes, size)
    return [Task(index, start, min(start + size, file.nbytes)) for start in starts]


def _read(source: Opened, reader: DataReader, task: Task) -> bytearray:
    """The bytes of a piece; `DamagedError` unless its chunks have their digests."""
    files, record = source.files, source.record
    data = bytearray(task.stop - task.start)
    with reading(files, record, task):
        reader.read_into(task.start, memoryview(data))
    if not files.trusted:  # else its reads are checked as they come
        Verifier(files, record, task).update(memoryview(data))
    return data


def _is_right(source: Opened, index: int, reader: DataReader) -> bool:
    """Whether a file that was left has the bytes of the source's."""
    files, record = source.files, source.record
    for task in _tasks(record, index):
        data = bytearray(task.stop - task.start)
        reader.read_into(task.start, memoryview(data))
        try:
            Verifier(files, record, task).update(memoryview(data))
        except DamagedError:
            return False
    return True


def _check_files(draft: Draft, record: Record) -> None:
    """`OSError` unless the files are in the draft, whole: it may have been cleaned up meanwhile."""
    there = draft.sizes()
    lost = [file.name for file in record.volumes if there.get(file.name) != file.nbytes]
    if lost:
        reason = "the draft was changed while it was written"
        raise OSError(errno.EIO, reason, f"{draft.place}/{lost[0]}")
