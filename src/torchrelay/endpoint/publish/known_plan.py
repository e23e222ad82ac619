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
from torchrelay.stores.safetensors import tensors_of
from torchrelay.stores.shares.commit_record import commit_record
from torchrelay.stores.shares.layout import ShareLayout
from torchrelay.stores.shares.planner import PlannedShare
from torchrelay.stores.shares.share import Share


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

    def fields(self, share: Share) -> list[list[Field]]:
        """The places of elements of each size, which tile each volume."""
        if self._fields is None or self._fields[0] is not share.layout:
            entries = share.layout.entries
            fields = [
                tiled(
                    (
                        Field(start, start + entries[index].nbytes, itemsize(entries[index].dtype))
                        for start, index in file.placed
                    ),
                    file.nbytes,
                )
                for file in share.layout.files
            ]
            self._fields = share.layout, fields
        return self._fields[1]

    def fits(self, planned: PlannedShare) -> bool:
        """Whether the record of the last step is that of this one but for the digests."""
        if self._record is None or planned.outlined is None:
            return False
        layout, outline, _ = self._record
        return layout is planned.share.layout and encode(planned.outlined) == outline

    def again(self, step: int, digests: Sequence[bytes]) -> RecordedStep:
        """The record of a step that `fits`, with these digests."""
        assert self._record is not None
        last = self._record[2]
        volumes = tuple(
            msgspec.structs.replace(file, digests=found)
            for file, found in zip(last.record.volumes, digests, strict=True)
        )
        saved = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        origin = last.record.origin and msgspec.structs.replace(last.record.origin, time=saved)
        record = msgspec.structs.replace(last.record, step=step, volumes=volumes, origin=origin)
        return last._replace(record=record)

    def made(self, step: int, planned: PlannedShare, shares: Sequence[Record]) -> RecordedStep:
        """The record of what all ranks have written."""
        assert planned.outlined is not None
        record = commit_record(step, shares, planned.outlined)
        bare = tuple(msgspec.structs.replace(file, digests=b"") for file in record.volumes)
        layout = content_digest(msgspec.structs.replace(record, step=0, volumes=bare))
        made = RecordedStep(record, len(tensors_of(record)), layout)
        self._record = None
        if len(shares) == 1:
            self._record = planned.share.layout, encode(planned.outlined), made
        return made
