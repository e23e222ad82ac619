"""Ranges of the files of a step: how they are cut, opened, and named in errors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from torchrelay.errors import CheckpointError, DamagedError
from torchrelay.plan.stored import Names, images_in
from torchrelay.record.schema import Record, VolumeRecord
from torchrelay.stores.retry import is_wrong
from torchrelay.stores.seam import DataReader, OpenStep


class Task(NamedTuple):
    """Bytes [start, stop) of a file."""

    file: int
    start: int
    stop: int


def opened(step: OpenStep, record: Record, file: int, *, once: bool = False) -> DataReader:
    """A file of a step; `DamagedError` unless it exists and has its recorded size."""
    expected = record.volumes[file]
    whole = Task(file, 0, expected.nbytes)
    with reading(step, record, whole):
        reader = step.reader(expected.name, once=once)
    if reader.nbytes != expected.nbytes:
        reader.close()
        problem = f"has {reader.nbytes} bytes, {expected.nbytes} were written"
        lost = whole._replace(start=min(reader.nbytes, expected.nbytes))
        raise damaged(step, record, lost, problem)
    return reader


@contextmanager
def reading(step: OpenStep, record: Record, task: Task) -> Iterator[None]:
    """Within: a read that fails names its file. It is damage only if the file itself is found
    wrong; a medium that does not give its bytes may give them later."""
    try:
        yield
    except (OSError, EOFError) as fault:
        if isinstance(fault, EOFError) or is_wrong(fault):
            raise damaged(step, record, task, f"cannot be read: {fault}") from fault
        raise CheckpointError(
            f"cannot be read: {fault.strerror or fault}; its bytes may be intact, so try again "
            "when the storage works",
            step=record.step,
            phase="read",
            file=f"{step.url}/{record.volumes[task.file].name}",
        ) from fault


def damaged(step: OpenStep, record: Record, task: Task, problem: str) -> DamagedError:
    """The error of a range that is not what was written; it names the tensors in it."""
    file = record.volumes[task.file]
    images, names = images_in(record, *task), Names(record)
    shown = ", ".join(names[image] for image in images[:8])
    shown += f" and {len(images) - 8} more" if len(images) > 8 else ""
    return DamagedError(
        f"{file.name} {problem}",
        file=f"{step.url}/{file.name}",
        step=record.step,
        phase="verify",
        path=shown or None,
        offset=task.start,
    )


def whole_chunks(
    file: VolumeRecord, spans: Iterable[tuple[int, int]], most: int
) -> Iterator[tuple[int, int]]:
    """The chunks of a file that spans of it touch, each once, in ranges of about `most` bytes."""
    size = file.chunk_bytes
    several = max(1, most // size)
    last = 0
    for start, stop in spans:
        first, end = max(start // size, last), -(-stop // size)
        for chunk in range(first, end, several):
            yield chunk * size, min(min(chunk + several, end) * size, file.nbytes)
        last = max(last, end)


def merged(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Spans in ascending order, those that touch each other as one."""
    found: list[tuple[int, int]] = []
    for start, stop in spans:
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(stop, found[-1][1]))
        elif stop > start:
            found.append((start, stop))
    return found
