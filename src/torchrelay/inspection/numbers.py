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
# Bits of exponent and mantissa, bias, and whether the format is "fnuz": one NaN, no infinities.
_FLOAT8 = {
    "float8_e4m3fn": (4, 3, 7, False),
    "float8_e4m3fnuz": (4, 3, 8, True),
    "float8_e5m2": (5, 2, 15, False),
    "float8_e5m2fnuz": (5, 2, 16, True),
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
    if dtype == "bfloat16":
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
    if dtype == "float8_e8m0fnu":
        values = [2.0 ** (bits - 127) for bits in range(255)] + [float("nan")]
    else:
        values = [_float8(bits, *_FLOAT8[dtype]) for bits in range(256)]
    return np.array(values, "float32")


def _float8(bits: int, exponent_bits: int, mantissa_bits: int, bias: int, fnuz: bool) -> float:
    sign = -1.0 if bits & 0x80 else 1.0
    mantissa = bits & ((1 << mantissa_bits) - 1)
    exponent = (bits & 0x7F) >> mantissa_bits
    if fnuz and bits == 0x80:
        return float("nan")
    if not fnuz and exponent == (1 << exponent_bits) - 1:
        if exponent_bits == 5:
            return sign * float("inf") if mantissa == 0 else float("nan")
        if mantissa == (1 << mantissa_bits) - 1:
            return float("nan")
    if exponent == 0:
        return sign * mantissa * 2.0 ** (1 - bias - mantissa_bits)
    return sign * (1 + mantissa / (1 << mantissa_bits)) * 2.0 ** (exponent - bias)
