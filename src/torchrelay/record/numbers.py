"""Columns of whole numbers as bytes: one byte with the width of a number, then the numbers,
little-endian."""

from __future__ import annotations

from typing import Any, cast

import numpy as np

from torchrelay.errors import ManifestError
from torchrelay.geometry.boxes import Numbers

_WIDTHS = {1: "<u1", 2: "<u2", 4: "<u4", 8: "<u8"}


def pack_column(numbers: Numbers) -> bytes:
    """Numbers from 0 on, in the narrowest of the widths that all of them fit into."""
    most = int(numbers.max()) if numbers.size else 0
    if numbers.size and int(numbers.min()) < 0:
        raise ManifestError(f"{int(numbers.min())} in a column of numbers from 0 on")
    width = next(width for width in _WIDTHS if width == 8 or most < 1 << 8 * width)
    return bytes([width]) + numbers.reshape(-1).astype(_WIDTHS[width]).tobytes()


def unpack_column(data: bytes) -> Numbers:
    """Undo `pack_column`; `ValueError` for other bytes, and for numbers past 63 bits."""
    width = data[0] if data else 0
    if width not in _WIDTHS or (len(data) - 1) % width:
        raise ValueError(f"a column of {len(data)} bytes")
    column: Any = np.frombuffer(data, _WIDTHS[width], offset=1).astype(np.int64)
    if width == 8 and len(column) and int(column.min()) < 0:
        raise ValueError("a number past 63 bits")
    return cast("Numbers", column)
