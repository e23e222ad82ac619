"""Columns of whole numbers as bytes, little-endian."""

from __future__ import annotations

from typing import Any, cast

import numpy as np

from torchrelay.errors import ManifestError
from torchrelay.geometry.boxes import Numbers

_WIDTHS = {1: "<u1", 2: "<u2", 4: "<u4", 8: "<u8"}


def pack(column: Numbers, kind: str) -> bytes:
    return column.astype(kind).tobytes()


def unpack(data: bytes, kind: str, count: int | None = None) -> Numbers:
    """A column of `count` numbers. What does not fit into 63 bits is negative."""
    size = np.dtype(kind).itemsize
    if len(data) % size or (count is not None and len(data) != count * size):
        raise ManifestError(f"a column of {len(data)} bytes for {count} numbers of {size}")
    column: Any = np.frombuffer(data, kind).astype(np.int64)
    return cast("Numbers", column)


def pack_narrow(column: Numbers) -> bytes:
    """Numbers from 0 on, each in 1, 2, 4 or 8 bytes: the fewest that all of them fit into."""
    most = int(column.max()) if column.size else 0
    if column.size and int(column.min()) < 0:
        raise ManifestError(f"{int(column.min())} in a column of numbers from 0 on")
    width = next(width for width in _WIDTHS if width == 8 or most < 1 << 8 * width)
    return pack(column.reshape(-1), _WIDTHS[width])


def unpack_narrow(data: bytes, count: int) -> Numbers:
    """The `count` numbers of `pack_narrow`. What does not fit into 63 bits is negative."""
    width, rest = divmod(len(data), count) if count else (1, len(data))
    if rest or width not in _WIDTHS:
        raise ManifestError(f"a column of {len(data)} bytes for {count} numbers")
    return unpack(data, _WIDTHS[width], count)


def pack_column(numbers: Numbers) -> bytes:
    """A column that tells its own width: one byte with it, then the numbers, from 0 on."""
    data = pack_narrow(numbers)
    width = len(data) // len(numbers) if len(numbers) else 1
    return bytes([width]) + data


def unpack_column(data: bytes) -> Numbers:
    """Undo `pack_column`; `ValueError` for other bytes, and for numbers past 63 bits."""
    width = data[0] if data else 0
    if width not in _WIDTHS or (len(data) - 1) % width:
        raise ValueError(f"a column of {len(data)} bytes")
    column: Any = np.frombuffer(data, _WIDTHS[width], offset=1).astype(np.int64)
    if width == 8 and len(column) and int(column.min()) < 0:
        raise ValueError("a number past 63 bits")
    return cast("Numbers", column)
