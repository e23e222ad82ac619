"""numpy dtypes as text. Dtypes that hold Python objects are refused on both sides."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

import numpy as np

MAX_TEXT = 1 << 16


def dtype_to_text(dtype: np.dtype[np.generic]) -> str:
    """JSON text of numpy's own description of `dtype`; `TypeError` where it cannot travel."""
    if dtype.hasobject or not (
        dtype.isbuiltin or dtype.names or dtype.kind in "SUVmM" or dtype.str
    ):
        raise TypeError(f"numpy dtype {dtype}")
    text = json.dumps(np.lib.format.dtype_to_descr(dtype))
    if len(text) > MAX_TEXT or dtype_from_text(text) != dtype:
        raise TypeError(f"numpy dtype {dtype}")
    return text


@lru_cache(maxsize=256)
def dtype_from_text(text: str) -> np.dtype[np.generic]:
    """Undo `dtype_to_text`; `ValueError` for any other text."""
    if len(text) > MAX_TEXT:
        raise ValueError("a dtype description this long")
    try:
        descr: Any = _tuples(json.loads(text))
        dtype: np.dtype[np.generic] = np.lib.format.descr_to_dtype(descr)
    except (TypeError, KeyError, IndexError, SyntaxError, AttributeError) as fault:
        raise ValueError(f"not a numpy dtype: {fault}") from None
    if dtype.hasobject:
        raise ValueError("a numpy dtype with objects")
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
