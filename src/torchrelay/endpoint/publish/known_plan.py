"""The parts of a published step that steps of one plan share: fields of volumes, and the record.

Steps of a training run have the same plan and outline. Their records differ in the number of the
step and in digests alone.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from torchrelay.parts.bitmaps import tiled
from torchrelay.parts.fields import Field
from torchrelay.record.dtypes import itemsize
from torchrelay.record.encoding import content_digest, encode
from torchrelay.record.schema import Record
from torchrelay.shares.commit_record import commit_record
from torchrelay.shares.layout import ShareLayout
from torchrelay.shares.planner import PlannedShare
from torchrelay.stores.safetensors import tensors_of


class RecordedStep(NamedTuple):
    """A record, how many tensors it has, and the digest of its layout: of everything but its step
    and the digests of chunks."""

    record: Record
    tensors: int
    layout: str


class KnownPlan:
    """Remembers the fields and the record of the last step of one rank."""

    def __init__(self) -> None:
        self._fields: tuple[ShareLayout, list[list[Field]]] | None = None
        self._record: tuple[ShareLayout, bytes, RecordedStep] | None = None

    def fields(self, layout: ShareLayout) -> list[list[Field]]:
        """The places of elements of each size, which tile each volume."""
        if self._fields is None or self._fields[0] is not layout:
            sizes = [(entry.nbytes, itemsize(entry.dtype)) for entry in layout.entries]
            fields = []
            for file in layout.files:
                placed = ((start, *sizes[index]) for start, index in file.placed)
                found = (Field(start, start + nbytes, item) for start, nbytes, item in placed)
                fields.append(tiled(found, file.nbytes))
            self._fields = layout, fields
        return self._fields[1]

    def like(self, planned: PlannedShare) -> RecordedStep | None:
        """The last step, if its record is that of this one but for the step and the digests."""
        if self._record is None or planned.outlined is None:
            return None
        layout, outline, last = self._record
        same = layout is planned.share.layout and encode(planned.outlined) == outline
        return last if same else None

    def made(self, step: int, planned: PlannedShare, shares: Sequence[Record]) -> RecordedStep:
        """The record of what all ranks have written."""
        assert planned.outlined is not None
        record = commit_record(step, shares, planned.outlined)
        bare = tuple([msgspec.structs.replace(file, digests=b"") for file in record.volumes])
        layout = content_digest(msgspec.structs.replace(record, step=0, volumes=bare))
        made = RecordedStep(record, len(tensors_of(record)), layout)
        self._record = None
        if len(shares) == 1:
            self._record = planned.share.layout, encode(planned.outlined), made
        return made


def again(last: RecordedStep, step: int, digests: Sequence[bytes]) -> RecordedStep:
    """A later step whose record is `like` the last one."""
    volumes = tuple(
        [
            msgspec.structs.replace(file, digests=found)
            for file, found in zip(last.record.volumes, digests, strict=True)
        ]
    )
    saved = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    origin = last.record.origin and msgspec.structs.replace(last.record.origin, time=saved)
    record = msgspec.structs.replace(last.record, step=step, volumes=volumes, origin=origin)
    return last._replace(record=record)
