"""The fields of a share's volumes: the places of elements of each size."""

from __future__ import annotations

from collections.abc import Sequence

from torchrelay.parts.bitmaps import tiled
from torchrelay.parts.fields import Field
from torchrelay.record.dtypes import itemsize
from torchrelay.stores.shares.layout import Entry, FileLayout
from torchrelay.stores.shares.share import Share


class KnownFields:
    """The fields of a share's volumes. It keeps the fields of the last share: shares of one plan
    have the same layouts."""

    def __init__(self) -> None:
        self._last: tuple[Sequence[FileLayout], list[list[Field]]] | None = None

    def of(self, share: Share) -> list[list[Field]]:
        if self._last is None or self._last[0] is not share.layouts:
            entries = share.contents.entries
            self._last = share.layouts, [_fields(file, entries) for file in share.layouts]
        return self._last[1]


def _fields(file: FileLayout, entries: Sequence[Entry]) -> list[Field]:
    placed = (
        Field(start, start + entries[index].nbytes, itemsize(entries[index].dtype))
        for start, index in file.placed
    )
    return tiled(placed, file.nbytes)
