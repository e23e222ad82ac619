"""Dtypes as text: those of torch by name, with their item size, and those of numpy. No torch.

Dtypes of numpy that hold Python objects are refused on both sides.
"""

from __future__ import annotations

import json
import warnings
from functools import lru_cache
from typing import Any

import numpy as np

from torchrelay.errors import ManifestError

MAX_TEXT = 1 << 16  # of a dtype of numpy
ITEM_SIZES = {
    **dict.fromkeys(
        (
            *("bool", "uint8", "int8"),
            *("bits8", "bits1x8", "bits2x4", "bits4x2", "float4_e2m1fn_x2", "float8_e4m3fn"),
            *("float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
            *(f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)),
        ),
        1,
    ),
    **dict.fromkeys(("int16", "uint16", "float16", "bfloat16", "bits16"), 2),
    **dict.fromkeys(("int32", "uint32", "float32", "complex32", "bcomplex32"), 4),
    **dict.fromkeys(("int64", "uint64", "float64", "complex64"), 8),
    "complex128": 16,
}


def itemsize(dtype: str) -> int:
    """Bytes of an element of the named dtype; `ManifestError` for an unknown name."""
    size = ITEM_SIZES.get(dtype)
    if size is None:
        raise ManifestError(f"dtype {dtype[:40]!r}")
    return size


def dtype_to_text(dtype: np.dtype[np.generic]) -> str:
    """JSON text of numpy's own description of `dtype`; `TypeError` where it cannot travel."""
    try:
        text = _text(dtype)
        same = dtype_from_text(text) == dtype
    except ValueError:
        same = False
    if not same:
        raise TypeError(f"numpy dtype {dtype}")
    return text


def _text(dtype: np.dtype[np.generic]) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # metadata on a dtype is not part of it
        return json.dumps(np.lib.format.dtype_to_descr(dtype))


@lru_cache(maxsize=256)
def dtype_from_text(text: str) -> np.dtype[np.generic]:
    """Undo `dtype_to_text`; `ValueError` for any other text."""
    if len(text) > MAX_TEXT:
        raise ValueError("a dtype description this long")
    try:
        descr: Any = _tuples(json.loads(text))
        dtype: np.dtype[np.generic] = np.lib.format.descr_to_dtype(descr)
        if dtype.hasobject or _text(dtype) != text:
            raise ValueError("not how this library writes a dtype")
    except Exception as fault:  # numpy raises many kinds here
        raise ValueError(f"not a numpy dtype: {fault}") from None
    return dtype


def _tuples(descr: object, in_list: bool = False) -> object:
    """JSON has no tuples; in numpy's description a field inside a list is one, and a shape too."""
    if not isinstance(descr, list):
        return descr
    if in_list:
        name, kind, *shape = descr
        fields = [name if isinstance(name, str) else tuple(name), _tuples(kind)]
        return tuple(fields + [tuple(size) for size in shape])
    return [_tuples(item, in_list=True) for item in descr]
