"""Files of a step that its new place has already, in an earlier step there: they are not copied.

A step that took files from the step before it (`Origin.reused`) does so at its new place, too: in a
directory they are hard links there, and in a bucket the service copies the objects. A step that was
written in full is copied in full.
"""

from __future__ import annotations

from contextlib import closing, suppress
from typing import NamedTuple

from torchrelay.errors import RelayError
from torchrelay.geometry import DIGEST_BYTES
from torchrelay.record.schema import Record, VolumeRecord
from torchrelay.stores.draft import CommittedFile
from torchrelay.stores.opening import open_step
from torchrelay.stores.store import Store


class FileContent(NamedTuple):
    """Two files with the same content have the same bytes."""

    nbytes: int
    chunk_bytes: int
    digests: bytes

    @classmethod
    def of(cls, file: VolumeRecord) -> FileContent:
        return cls(file.nbytes, file.chunk_bytes, bytes(file.digests))


def unchanged_files(target: Store, record: Record) -> dict[FileContent, CommittedFile]:
    """The files of a store that a copy of the step may take: those of the step next to it there.
    There are none if that step cannot be read or is not whole: all files are copied then."""
    if record.step is None or not record.saved.reused:
        return {}
    with suppress(OSError, RelayError):
        step = _nearest([one for one in target.listing() if one != record.step], record.step)
        if step is None:
            return {}
        version = target.version(step)
        with closing(open_step(target, step)) as opened:
            if opened.holds() and target.version(step) == version:
                return {
                    FileContent.of(file): CommittedFile(step, version, file.name)
                    for file in opened.record.volumes
                    if file.nbytes and len(file.digests) == file.chunks * DIGEST_BYTES
                }
    return {}


def _nearest(steps: list[int], step: int) -> int | None:
    """The step before one, or else the step after it."""
    before = [one for one in steps if one < step]
    return max(before) if before else min(steps, default=None)
