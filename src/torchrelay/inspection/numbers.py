"""Elements of every dtype as numbers of numpy, which lacks some of torch's.

No torch: a process that only serves or looks starts without it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

_NATIVE = (
    *("bool", "uint8", "int8", "int16", "uint16", "int32", "uint32", "int64", "uint64"),
    *("float16", "float32", "float64"),
)
# Complex elements count as two real ones: their norm is the same.
_COMPLEX = {"complex32": "float16", "complex64": "float32", "complex128": "float64"}
_BFLOAT16 = ("bfloat16", "bcomplex32")
# Bits of the mantissa, bias, and whether the format is "fnuz": one NaN, no infinities.
_FLOAT8 = {
    "float8_e4m3fn": (3, 7.0, False),
    "float8_e4m3fnuz": (3, 8.0, True),
    "float8_e5m2": (2, 15.0, False),
    "float8_e5m2fnuz": (2, 16.0, True),
}


def memory_of(array: Array) -> memoryview:
    """The bytes of an array that has no holes."""
    flat: Any = array.reshape(-1).view("uint8")
    return memoryview(flat)


def numbers_of(dtype: str) -> Callable[[Array], Array] | None:
    """A function from the bytes of elements of a dtype to numbers; None if they are not numbers."""
    if dtype in _NATIVE:
        return lambda raw: raw.view(dtype)
    if dtype in _COMPLEX:
        return lambda raw: raw.view(_COMPLEX[dtype])
    if dtype in _BFLOAT16:
        return _from_bfloat16
    if dtype in _FLOAT8 or dtype == "float8_e8m0fnu":
        return partial(np.take, _float8_values(dtype))
    return None


def _from_bfloat16(raw: Array) -> Array:
    high: Array = raw.view("uint16").astype("uint32") << 16
    values: Array = high.view("float32")
    return values


@cache
def _float8_values(dtype: str) -> Array:
    bits = np.arange(256)
    if dtype == "float8_e8m0fnu":
        return np.where(bits == 255, np.nan, np.exp2(bits - 127.0)).astype("float32")
    width, bias, fnuz = _FLOAT8[dtype]
    mantissa, exponent = bits % (1 << width), (bits & 0x7F) >> width
    fraction = mantissa / (1 << width) + (exponent > 0)
    scale = np.exp2(np.maximum(exponent, 1) - bias)
    values: Array = np.where(bits & 0x80, -1.0, 1.0) * fraction * scale
    if fnuz:
        values[0x80] = np.nan
    elif dtype == "float8_e5m2":
        values[exponent == 31] = [np.inf, np.nan, np.nan, np.nan, -np.inf, np.nan, np.nan, np.nan]
    else:
        values[bits & 0x7F == 0x7F] = np.nan
    return values.astype("float32")
