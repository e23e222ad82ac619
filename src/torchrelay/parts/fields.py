"""Fields of a volume. No numpy: every server knows them."""

from __future__ import annotations

from typing import NamedTuple


class Field(NamedTuple):
    """Bytes [start, stop) of a volume, which are elements of one size."""

    start: int
    stop: int
    itemsize: int
