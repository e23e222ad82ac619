"""Elements of tensors as numpy sees them: bytes of one size, whatever they mean. No torch."""

from __future__ import annotations

from typing import Any

import numpy as np

from torchrelay.errors import RemoteProtocolError

# Numbers are moved and compared as integers: a NaN is equal to itself, and zeros have signs.
_DTYPES: dict[int, np.dtype[Any]] = {
    1: np.dtype(np.uint8),
    2: np.dtype(np.uint16),
    4: np.dtype(np.uint32),
    8: np.dtype(np.uint64),
    16: np.dtype("V16"),
}


def element_dtype(itemsize: int) -> np.dtype[Any]:
    """A dtype that moves elements of a size; `RemoteProtocolError` for a size that no dtype has."""
    found = _DTYPES.get(itemsize)
    if found is None:
        raise RemoteProtocolError(f"no dtype has elements of {itemsize} bytes")
    return found
