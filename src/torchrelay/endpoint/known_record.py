"""The record of a published step, made from its shares or from the record of the step before."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from torchrelay.record.encoding import content_digest, encode
from torchrelay.record.schema import Record
from torchrelay.stores.safetensors import tensors_of
from torchrelay.stores.shares.commit_record import commit_record
from torchrelay.stores.shares.layout import FileLayout
from torchrelay.stores.shares.planner import PlannedShare


class RecordedStep(NamedTuple):
    """A record, how many tensors it has, and the digest of its layout: of everything but its step
    and the digests of chunks."""

    record: Record
    tensors: int
    layout: str


class _Last(NamedTuple):
    layouts: Sequence[FileLayout]
    outline: bytes
    made: RecordedStep


class KnownRecord:
    """Remembers the record of the last step of one rank. Steps of a training run have the same plan
    and outline, so the next record differs in its number and its digests alone."""

    def __init__(self) -> None:
        self._last: _Last | None = None

    def fits(self, planned: PlannedShare) -> bool:
        """Whether the record of the last step is that of this one but for the digests."""
        last = self._last
        if last is None or last.layouts is not planned.share.layouts or planned.outlined is None:
            return False
        return encode(planned.outlined) == last.outline

    def again(self, step: int, digests: Sequence[bytes]) -> RecordedStep:
        """The record of a step that `fits`, with these digests."""
        last = self._last
        assert last is not None
        known = last.made.record
        volumes = tuple(
            msgspec.structs.replace(file, digests=found)
            for file, found in zip(known.volumes, digests, strict=True)
        )
        saved = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        origin = known.origin and msgspec.structs.replace(known.origin, time=saved)
        record = msgspec.structs.replace(known, step=step, volumes=volumes, origin=origin)
        return last.made._replace(record=record)

    def made(self, step: int, planned: PlannedShare, shares: Sequence[Record]) -> RecordedStep:
        """The record of what all ranks have written."""
        assert planned.outlined is not None
        record = commit_record(step, shares, planned.outlined)
        made = RecordedStep(record, len(tensors_of(record)), _layout(record))
        self._last = None
        if len(shares) == 1:
            self._last = _Last(planned.share.layouts, encode(planned.outlined), made)
        return made


def _layout(record: Record) -> str:
    bare = tuple(msgspec.structs.replace(file, digests=b"") for file in record.volumes)
    return content_digest(msgspec.structs.replace(record, step=0, volumes=bare))
